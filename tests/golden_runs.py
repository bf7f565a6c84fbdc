"""Small seeded runs of every mode and family, and the facts about each that code changes must preserve.

Imported by path; not a test. Rewrite the facts only if the commit says why they change:

    PYTHONPATH=tests:. python tests/golden_runs.py [name ...]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FACTS = Path(__file__).parent / "golden" / "golden.json"
Facts = dict[str, Any]

# -- the facts that are kept of a run --------------------------------------------------------


def of_weights(weights: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return each tensor's norm, and its product with fixed numbers, which reordered values would change."""
    found = {}
    for name, value in sorted(weights.items()):
        flat = (value.detach() if isinstance(value, Tensor) else torch.tensor(value)).double().flatten()
        fixed = torch.cos(torch.arange(len(flat), dtype=torch.float64))
        found[name] = [float(flat.norm()), float(flat @ fixed)]
    return found


def of_ledger(folder: Path) -> Facts:
    """Return what was planned, what was charged, and how many records of each kind were written."""
    lines = (folder / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    plans = [record for record in records if record["kind"] == "plan"]
    intents = [record for record in records if record["kind"] == "intent"]
    return {
        "plan": plans[0]["plan"],
        "law": plans[0]["law"],
        "records": dict(Counter(record["kind"] for record in records)),
        "charged": [[record["attempt"], record["step"]] for record in intents],
        "release": intents[0]["release"] if intents else None,
    }


def of_card(folder: Path) -> Facts:
    """Return the claim and the mechanism on a card, without dates and checksums."""
    card = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    mechanism = {name: value for name, value in (card["mechanism"] or {}).items() if isinstance(value, (int, float))}
    return {"claim": {n: card["claim"][n] for n in ("guarantee", "epsilon", "delta")}, "mechanism": mechanism}


def fixed_secret(folder: Path) -> dict[str, str]:
    """Return the environment in which runs without a secret or a seed always draw the same numbers."""
    secret = folder / "lit-dpret" / "privacy_secret"
    secret.parent.mkdir(mode=0o700, exist_ok=True)
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    return {"XDG_STATE_HOME": str(folder)}


# -- runs of small modules, on one process and on two ----------------------------------------

DATA = {"sampling": "truncated_poisson", "physical_batch_size": 8}
COUPLED = {"max_grad_norm": 1.0, "sub_batches": 2, "n_max": 19}
_JOBS: dict[str, tuple[str, int, Facts]] = {
    "dp_sgd": ("fit", 1, {"mode": {"name": "dp_sgd"}}),
    "dp_sgd, pld": ("fit", 1, {"mode": {"name": "dp_sgd", "accountant": "pld"}, "data": DATA}),
    "dp_sgd, noise on a grid": ("fit", 1, {"mode": {"name": "dp_sgd", "noise": "discrete"}}),
    "none": ("fit", 1, {"mode": {"name": "none"}}),
    "pairs, none": ("fit", 1, {"module": "pairs", "mode": {"name": "none"}, "data": {"physical_batch_size": 64}}),
    "frozen, dp_sgd": ("fit", 1, {"module": "frozen", "mode": {"name": "dp_sgd"}}),
    "generator, ghost": ("fit", 1, {"module": "t5", "mode": {"name": "dp_sgd", "engine": "ghost"}}),
    "generator, vmap": ("fit", 1, {"module": "t5", "mode": {"name": "dp_sgd", "engine": "vmap"}}),
    "generator, loop": ("fit", 1, {"module": "t5", "mode": {"name": "dp_sgd", "engine": "loop"}}),
    "killed and resumed": (
        "fit", 1, {"mode": {"name": "dp_sgd", "accountant": "pld"}, "data": DATA, "doom": {"whose": -1, "at": 3}},
    ),
    "DDP": ("fit", 2, {"mode": {"name": "dp_sgd"}}),
    "FSDP2": ("shard_jobs:fit", 2, {"mode": {"name": "dp_sgd"}}),
    "ZeRO-2": ("zero_fit", 2, {"mode": {"name": "dp_sgd"}, "zero": {"stage": 2}}),
}  # fmt: skip


def run_job(server: Any, folder: Path, name: str) -> Facts:
    """Run a fit by `rank_runs`, killed in a step and resumed if the job says so."""
    from rank_runs import told

    job, world, given = _JOBS[name]
    if "doom" in given:
        assert server.run(job, folder / "run", world=world, **given) == [-9] * world
        given = {key: value for key, value in given.items() if key != "doom"} | {"resume": True}
    statuses = server.run(job, folder / "run", world=world, **given)
    assert statuses == [0] * world, (folder / "run" / "rank0.json").read_text(encoding="utf-8")
    seen = told(folder / "run", 0)
    return {"epsilon": seen["eps"], "weights": of_weights(seen["weights"]), "ledger": of_ledger(folder / "run")}


# -- runs by the command line's configuration ------------------------------------------------


def _by_command(case: str) -> Callable[[Path], Facts]:
    def run(folder: Path) -> Facts:
        from configured import composed
        from safetensors.torch import load_file
        from test_cli_modes import private

        from lit_dpret import cli

        cli.run(composed(f"run_dir={folder / 'run'}", *private(folder, case), "privacy.noise_seed=1"))
        weights: dict[str, Tensor] = {}
        for file in sorted((folder / "run" / "model").rglob("*.safetensors")):
            weights |= {f"{file.parent.name}/{name}": value for name, value in load_file(file).items()}
        assert weights
        return {"card": of_card(folder / "run"), "weights": of_weights(weights)}

    return run


def _synthetic_set(folder: Path) -> Facts:
    """Return a digest of every query that a generator writes, and the first three."""
    from tiny_generator import PASSAGES, SETTINGS, lively_generator, write_parent_card

    from lit_dpret.synthesis.writer import synthesize

    source = lively_generator().save_model(folder / "generator")
    write_parent_card(source)
    made = synthesize(source, PASSAGES, folder / "set", **SETTINGS)
    text = (made / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    queries = [(query["_id"], query["text"], query["metadata"]["passage_id"]) for query in map(json.loads, text)]
    digest = hashlib.sha256(json.dumps(queries).encode()).hexdigest()
    return {"queries": len(queries), "first": [list(query) for query in queries[:3]], "sha256": digest}


def _federation(folder: Path) -> Facts:
    """Train a shared model of two silos under a budget."""
    from tiny_silos import PRIVATE, SIZE, federation

    run = federation(folder, PRIVATE, size=replace(SIZE, clients=2))
    shared = run.train_shared()
    return {
        "epsilon": {name: client.epsilon() for name, client in run.clients.items()},
        "parameters": sorted(shared),
    }


HERE: dict[str, Callable[[Path], Facts]] = {
    **{f"dual encoder, {case}": _by_command(case) for case in (
        "batch_clip", "per_example_duplicated", "logit_dp", "logit_dp sigmoid", "public_passages",
    )},
    "synthetic set": _synthetic_set,
    "federation": _federation,
}  # fmt: skip
IN_PROCESSES = tuple(_JOBS)


def server_of(name: str) -> Any:
    """Return a server of processes for a job, with DeepSpeed if the job needs it."""
    from rank_runs import Server
    from zero_runs import ZeroServer

    return ZeroServer() if name.startswith("ZeRO") else Server()


def main(names: Iterable[str]) -> None:
    """Run the named runs, or all, and write their facts, one line per run."""
    facts = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
    os.environ |= fixed_secret(Path(tempfile.mkdtemp()))
    for name in names or [*IN_PROCESSES, *HERE]:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "golden"
            place.mkdir()
            if name in HERE:
                facts[name] = HERE[name](place)
            else:
                server = server_of(name)
                facts[name] = run_job(server, place, name)
                server.close()
        print(name, flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in facts.items())
    FACTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
