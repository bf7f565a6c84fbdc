"""Synthesis and encoding by two ranks beside one: the same work, one thread each, in turns.

    python benchmarks/ranks.py

Small models, so that it ends in minutes; what is compared is how the work is shared out, not how fast a model is. Each
turn is a job of its own; timed is the work alone, from the first group to the last. The ratio cannot come near one
half where other programs want the same cores: the load of the machine is written down.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from common import machine, options, say, write


def synthesize(folder: Path, passages: dict[str, str], out: Path) -> float:
    from lit_dpret.distributed.job import job_here
    from lit_dpret.synthesis.writer import synthesize as write

    begun: list[float] = []
    with job_here() as job:
        write(
            folder / "generator", passages, out, passages_are_public=True, group_size=16, min_new_tokens=16,
            max_new_tokens=16, job=job, progress=lambda done, total: begun.append(time.monotonic()),
        )  # fmt: skip
    return begun[-1] - begun[0]


def encode(folder: Path, passages: dict[str, str], out: Path) -> float:
    from lit_dpret.distributed.job import job_here
    from lit_dpret.tasks.index_folder import Encoding, encode_folder

    begun: list[float] = []
    with job_here() as job:
        start = time.monotonic()
        encode_folder(
            "minilm", passages, out, Encoding(batch_size=2), job=job,  # 16 batches are one piece of work
            progress=lambda done, total: begun.append(time.monotonic()),
        )  # fmt: skip
    return begun[-1] - start


JOBS: dict[str, Callable[[Path, dict[str, str], Path], float]] = {"synthesize": synthesize, "encode": encode}


def main() -> None:
    parser = options(__doc__, "ranks_cpu.json")
    parser.add_argument("--passages", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", nargs=3, metavar=("JOB", "FOLDER", "OUT"), help="one rank of one job")
    arguments = parser.parse_args()
    if arguments.job:
        job, folder, out = arguments.job
        torch.set_num_threads(1)
        passages = json.loads((Path(folder) / "passages.json").read_text(encoding="utf-8"))
        say(str(JOBS[job](Path(folder), passages, Path(out))))
        return
    results: dict[str, Any] = {**machine("torch"), "passages": arguments.passages, "jobs": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.passages)
        for job in JOBS:
            rounds = [{world: timed(job, folder, world, turn) for world in (1, 2)} for turn in range(arguments.rounds)]
            ratios = [times[2] / times[1] for times in rounds]
            results["jobs"][job] = {"seconds": rounds, "ratio": statistics.median(ratios), "ratios": ratios}
            say(f"{job}: two ranks take {statistics.median(ratios):.2f} of the time of one ({ratios})")
    write(results, arguments.out)


def prepare(folder: Path, count: int) -> None:
    """Passages of InsuranceQA, and the small public T5 with a card that promises nothing."""
    from lit_dpret.cards.card import RunFacts, build_card, subject_of, write_card
    from lit_dpret.datamodules import InsuranceQADataModule
    from lit_dpret.modules import OptimizerSpec, QueryGenerator
    from lit_dpret.privacy.accounting.releases import NonPrivateRelease
    from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
    from lit_dpret.privacy.modes import NoPrivacy

    data = InsuranceQADataModule()
    data.setup("predict")
    passages = dict(list(data.public_passages().items())[:count])
    (folder / "passages.json").write_text(json.dumps(passages), encoding="utf-8")
    module = QueryGenerator(
        privacy=NoPrivacy(), optimizer=OptimizerSpec(name="adam", lr=1e-3), pretrained="public_t5",
        max_passage_length=96, max_query_length=32,
    )  # fmt: skip
    made = module.save_model(folder / "generator")
    files = [path for path in made.rglob("*") if path.is_file()]
    with PrivacyLedger.open(folder / "privacy_ledger.jsonl") as ledger:
        ledger.append("plan", run_id="r", attempt=0, mode="none", plan=None)
        release = NonPrivateRelease(label="none").to_dict()
        ledger.append("intent", attempt=0, step=0, release=release, state_hash=None, sum_tag=None)
        records = ledger.records
    subject = subject_of("weights", "generator", files, root=made)
    write_card(build_card(records, subject, RunFacts(tuning={"data": "none"})), made)


def timed(job: str, folder: Path, world: int, turn: int) -> float:
    """Seconds of work, as the first rank saw them."""
    out = folder / f"{job}-{world}-{turn}"
    return float(common.ranks(__file__, "--job", job, folder, out, world=world, CUDA_VISIBLE_DEVICES="")[0])


if __name__ == "__main__":
    main()
