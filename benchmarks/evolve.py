"""Compare queries selected by private votes with as many from the same untrained model, on InsuranceQA.

    pip install "lit-dpret[quickstart]"
    python benchmarks/evolve.py

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from common import machine, options, say, write

from lit_dpret.cards.file import CARD_NAME
from lit_dpret.datamodules import InsuranceQADataModule, SyntheticDataModule
from lit_dpret.modules import FrozenDualEncoder, OptimizerSpec, QueryGenerator
from lit_dpret.modules.generator_folder import load_generator
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.synthesis.dataset_folder import SyntheticQuery, write_dataset
from lit_dpret.synthesis.evolution import in_turn
from lit_dpret.synthesis.filters import load_released
from lit_dpret.synthesis.groups import Generation, canonical_groups, draw_groups
from lit_dpret.tasks import Evolve
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks, train_retriever
from lit_dpret.tasks.ranking import score_embeddings
from lit_dpret.tasks.round_trip import KEPT, check_round_trip

ROOT = Path(__file__).resolve().parents[1]
PASSAGES, TEMPERATURE = 8000, 0.7
MODELS: dict[str, dict[str, Any]] = {
    "public_t5": {"max_passage_length": 64, "max_query_length": 32, "lower_case": True},
    "smollm2": {"max_passage_length": 384, "max_query_length": 24, "few_shot": ROOT / "examples" / "few_shot.jsonl"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "evolved": {},
    "evolved, {query} {passage}": {"variation": "{query} {passage}"},
    "evolved, fresh": {"fresh": 0.5, "vote_power": 0.0},
    "evolved, one a passage": {"per_passage": 1},
}


class Log(InsuranceQADataModule):
    """All questions, and the passages of the sample."""

    sampled: ClassVar[dict[str, str]] = {}

    def public_passages(self) -> dict[str, str]:
        return self.sampled


class Bench:
    """The sample, the zero-shot encoder, and the output folder."""

    def __init__(self, folder: Path, model: str, cache: Path, split: str) -> None:
        self.folder, self.model, self.cache, self.split = folder, model, cache, split
        self.searched = InsuranceQADataModule(max_passages=PASSAGES)
        self.searched.setup("fit")
        Log.sampled = dict(self.searched.public_passages())

    def generator(self, privacy: Any) -> QueryGenerator:
        return QueryGenerator(privacy=privacy, optimizer=OptimizerSpec(), pretrained=self.model, **MODELS[self.model])

    def parts(self, folder: Path, **given: Any) -> Parts:
        trainer = partial(
            L.Trainer, accelerator="cpu", devices=1, max_epochs=-1, enable_progress_bar=False, logger=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        )  # fmt: skip
        made = {"make_privacy": NoPrivacy, "make_datamodule": Log, "make_module": self.generator, **given}
        return Parts(run_dir=folder, make_trainer=lambda logger=False, **more: trainer(**more), **made)

    def untrained(self, size: int, seed: int) -> Path:
        """Write queries for the first passages of the public order, one for each."""
        place, texts = self.folder / f"untrained_{size}_{seed}", {}
        if (place / "queries.jsonl").is_file():
            return place
        source = self.generator(NoPrivacy()).save_model(self.folder / "model")
        for number, name in enumerate(islice(in_turn(Log.sampled), size)):
            texts[f"{name}#{number}"] = Log.sampled[name]
        generator = load_generator(source)
        longest = generator.contract.max_query_length
        how = Generation(seed=seed, temperature=TEMPERATURE, max_new_tokens=longest, device="cpu")
        groups = canonical_groups(generator.codec, texts, 64)
        tasks = ((index, {name: texts[name] for name in group}) for index, group in enumerate(groups))
        drawn = [
            record for _, found in draw_groups(tasks, source, how, workers=0, generator=generator) for record in found
        ]
        queries = [
            SyntheticQuery(**{**record, "passage_id": record["passage_id"].rpartition("#")[0]}) for record in drawn
        ]
        write_dataset(place, lambda: iter(queries), Log.sampled)
        return place

    def evolved(self, size: int, seed: int, eps: float, label: str, more: dict[str, Any]) -> Path:
        place = self.folder / f"{label.replace(' ', '_')}_{eps:g}_{seed}"
        if (place / "synthetic" / CARD_NAME).is_file():
            return place / "synthetic"
        mode = partial(DPSGD, eps=eps, secret_file=self.folder / "secret")
        task = Evolve(
            passages_are_public=True, population=size, temperature=TEMPERATURE, cache_dir=self.cache / "private", **more
        )
        task.run(replace(self.parts(place, make_privacy=mode), seed=seed))
        return place / "synthetic"

    def measured(self, folder: Path, seed: int, *, card: bool) -> dict[str, Any]:
        """Measure the round trip, nearness to real questions, and scores of a retriever trained on what passes."""
        encoder = partial(
            FrozenDualEncoder,
            optimizer=OptimizerSpec(lr=3e-4),
            max_passage_length=64,
            cache_dir=self.cache / "embeddings",
        )
        data = SyntheticDataModule(
            folder=folder, evaluation=self.searched, require_privacy_card=False, physical_batch_size=1024
        )
        data.setup("fit")
        model = encoder(privacy=NoPrivacy())
        model.prepare(data)
        released = replace(load_released(folder, declared_public=not card), passages=Log.sampled)
        tried = folder.parent / f"{folder.name}_trip"
        tried.mkdir(parents=True, exist_ok=True)
        trip = check_round_trip(model, released, tried, k=10, seed=seed)
        kept = SyntheticDataModule(
            folder=folder, evaluation=self.searched, keep=tried / KEPT,
            require_privacy_card=False, physical_batch_size=1024,
        )  # fmt: skip
        L.seed_everything(seed, verbose=False)
        trained = encoder(privacy=NoPrivacy())
        trained.prepare(data)
        place = folder.parent / f"{folder.name}_retriever"
        shutil.rmtree(place, ignore_errors=True)
        train_retriever(
            trained, kept, place, parts=self.parts(place), steps=40, batch=1024, resume=False,
            callbacks=stage_callbacks(place, resume=False, label="retriever"),
        )  # fmt: skip
        asked = list(self.searched.evaluation_set(self.split)[0].values())
        near = model.encode_queries(asked) @ model.encode_queries([query.text for query in released]).T
        return {
            "queries": len(released), "passages": len({query.passage_id for query in released}), "round_trip": trip,
            "asked_to_set": float(near.max(1).values.mean()), "set_to_asked": float(near.max(0).values.mean()),
            **self.score(trained),
        }  # fmt: skip

    def score(self, model: Any) -> dict[str, float]:
        queries, qrels = self.searched.evaluation_set(self.split)
        found = score_embeddings(
            list(queries), model.encode_queries(list(queries.values())), list(Log.sampled),
            model.encode_passages(list(Log.sampled.values())), qrels,
        )  # fmt: skip
        return {name: value for name, value in found.means.items() if name in ("ndcg@10", "mrr@10", "recall@10")}

    def zero_shot(self) -> dict[str, float]:
        model = FrozenDualEncoder(
            privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=3e-4), max_passage_length=64,
            cache_dir=self.cache / "embeddings",
        )  # fmt: skip
        model.prepare(self.searched)
        return self.score(model)


def main() -> None:
    parser = options(__doc__ or "", "evolve_cpu.json", size=2000, seeds=3)
    parser.add_argument("--model", choices=sorted(MODELS), default="public_t5")
    parser.add_argument("--eps", type=float, nargs="+", default=[3.0])
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--split", default="test", help="split whose questions the retrievers are measured on")
    parser.add_argument("--folder", type=Path, help="folder that keeps generated sets and models")
    parser.add_argument("--cache", type=Path, help="folder that keeps embeddings; as private as the questions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            args.folder or Path(scratch) / "made", args.model, args.cache or Path(scratch) / "cache", args.split
        )
        zero_shot = bench.zero_shot()
        say(f"zero-shot encoder: {zero_shot}")
        rows: dict[str, list[dict[str, Any]]] = {}
        for seed in range(args.seeds):
            made = {"untrained": (lambda seed=seed: bench.untrained(args.size, seed), False)}
            for eps in args.eps:
                for label in args.variants:
                    made[f"{label}, eps {eps:g}"] = (
                        lambda seed=seed, eps=eps, label=label: bench.evolved(
                            args.size, seed, eps, label, VARIANTS[label]
                        ),
                        True,
                    )
            for name, (make, card) in made.items():
                rows.setdefault(name, []).append(found := bench.measured(make(), seed, card=card))
                say(f"{name}, seed {seed}: {found}")
                if card and (size := found["queries"]) < args.size:  # equal candidates were merged
                    found = bench.measured(bench.untrained(size, seed), seed, card=False)
                    rows.setdefault(f"untrained, as many as {name}", []).append(found)
                    say(f"untrained, as many as {name}, seed {seed}: {found}")
    mean = {
        name: {
            "round_trip": statistics.mean(one["round_trip"]["recall"][0] for one in found),
            "control": statistics.mean(one["round_trip"]["control"][0] for one in found),
            **{
                name: statistics.mean(one[name] for one in found)
                for name in ("queries", "passages", "asked_to_set", "set_to_asked", *zero_shot)
            },
        }
        for name, found in rows.items()
    }
    report = {
        "data": {"name": "InsuranceQA", "passages": PASSAGES, "size": args.size, "model": args.model},
        "zero_shot": zero_shot, "mean": mean, "per_seed": rows,
        "tuning": "none: the defaults of task=evolve, and the quickstart's settings of the retriever",
        **machine("torch", "lightning", "transformers", "dp-accounting"),
    }  # fmt: skip
    write(report, args.out)


if __name__ == "__main__":
    main()
