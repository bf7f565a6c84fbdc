"""`task=compare_negatives` with parts that train in a blink: every source, two runs each, a table and what differs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from tiny_tasks import parts

from lit_dpret.cards.text import NOT_PROVED, WITHOUT_PRIVACY
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.text_encoder import OneSide
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.negatives import BM25Negatives, DynamicNegatives, PreBatchNegatives, RandomNegatives, StaticNegatives
from lit_dpret.privacy.ledger.trained import TrainedIn, mark_trained
from lit_dpret.privacy.modes import NoPrivacy, PublicPassages
from lit_dpret.tasks.encoder_privacy import PUBLIC, UNKNOWN
from reproduction import CompareNegatives
from reproduction.compare_negatives import NegativesVariant


def retriever(**settings: Any) -> DualEncoder:
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    frozen = {"towers": "separate", "passage_tower": "frozen", "optimizer": OptimizerSpec(name="sgd", lr=0.5)}
    return DualEncoder(**{"encoder": tower, **frozen, **settings})


def variants(run: Path) -> dict[str, NegativesVariant]:
    mined = {"cache_dir": run / "private" / "negatives", "depth": 6}
    made: dict[str, Any] = {
        "random": partial(RandomNegatives),
        "bm25": partial(BM25Negatives, **mined),
        "static": partial(StaticNegatives, **mined),
        "pre_batch": partial(PreBatchNegatives),
        "dynamic": partial(DynamicNegatives, depth=4),
    }
    found = {name: NegativesVariant(label=name, negatives={name: source}) for name, source in made.items()}
    return {"in_batch": NegativesVariant(), **found}


def compare(folder: Path, **changes: Any) -> CompareNegatives:
    run = folder / "run"
    settings: dict[str, Any] = {
        "retriever": partial(retriever, passage_cache_dir=run / "passages"), "variants": variants(run), "steps": 2,
        "batch": 16, "seeds": 2, "max_passages": 20, "min_free_mb": 1, "only": ["in_batch", "bm25"],
    }  # fmt: skip
    return CompareNegatives(**settings | changes)


def tiny_parts(folder: Path, privacy: Any = NoPrivacy, **changes: Any) -> Any:
    return parts(folder, privacy=privacy, words=WORDS, **changes)


def results(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run" / "compare_negatives.json").read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_source_is_trained_several_times_and_stands_in_one_table(tmp_path: Path) -> None:
    told = compare(tmp_path, only=None).run(tiny_parts(tmp_path))
    names = ["BM25", "zero-shot", "in-batch"]
    names += [f"in-batch and {name}" for name in ("random", "bm25", "static", "pre_batch", "dynamic")]
    assert list(told) == names
    rows = {row["system"]: row for row in results(tmp_path)["rows"]}
    assert rows["in-batch and bm25"]["settings"]["negatives"] == "in_batch, bm25 1 of 6"
    assert rows["in-batch"]["settings"]["negatives"] == "in_batch"
    for row in list(rows.values())[2:]:
        for measured in row["metrics"].values():
            assert len(measured["per_run"]) == 2 and set(measured["over_queries"]) == {"mean", "low", "high"}
        assert row["privacy"].startswith("no privacy")
    pairs = len(results(tmp_path)["differences"])
    assert pairs == 2 * (8 * 7 // 2 - 1), "every two rows in both metrics, but BM25 and zero-shot, which nobody trained"
    for name in ("compare_negatives.html", "compare_negatives.md", "compare_negatives.csv", "differences.csv"):
        assert all(system in (tmp_path / "run" / name).read_text(encoding="utf-8") for system in names[2:]), name
    assert not (tmp_path / "run" / "private").exists(), "rankings of queries are as private as the queries"
    assert not list((tmp_path / "run").glob("*/model"))


@pytest.mark.costly
def test_the_passages_are_embedded_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    begin = OneSide.__enter__

    def counted(self: OneSide) -> None:
        encoded.append(self._side)
        begin(self)

    monkeypatch.setattr(OneSide, "__enter__", counted)
    compare(tmp_path, only=["in_batch", "bm25", "dynamic"], seeds=1).run(tiny_parts(tmp_path))
    assert encoded.count("passage") == 1


@pytest.mark.slow
def test_what_the_privacy_mode_refuses_is_left_out_and_told(tmp_path: Path) -> None:
    noise = {"noise_multiplier": 2.0, "secret_file": tmp_path / "secret"}
    private = partial(PublicPassages, eps=8.0, max_grad_norm=0.1, pool_size=8, **noise)
    told = compare(tmp_path, only=["in_batch", "bm25", "pre_batch"]).run(tiny_parts(tmp_path, privacy=private))
    assert list(told)[2:] == ["public pool", "public pool and bm25"]
    found = results(tmp_path)
    rows = {row["system"]: row for row in found["rows"]}
    assert rows["public pool"]["settings"]["negatives"] == "public pool"
    assert rows["public pool and bm25"]["settings"]["negatives"] == "bm25 1 of 6"
    assert rows["public pool and bm25"]["privacy"].startswith("epsilon = ") and found["private_runs"] == 4
    assert any("pre_batch is left out" in note for note in found["notes"])


@pytest.mark.costly
@pytest.mark.parametrize(("mode", "promise"), [("dp_sgd", NOT_PROVED), ("none", WITHOUT_PRIVACY), (None, UNKNOWN)])
def test_the_row_of_the_untrained_encoder_promises_what_is_known_of_it(
    mode: str | None, promise: str, tmp_path: Path
) -> None:
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    mark_trained(tower, [TrainedIn("a run", mode)] if mode else [], whole=True)
    make = partial(retriever, passage_cache_dir=tmp_path / "run" / "passages", encoder=tower)
    compare(tmp_path, retriever=make, only=["in_batch"], seeds=1).run(tiny_parts(tmp_path))
    rows = {row["system"]: row["privacy"] for row in results(tmp_path)["rows"]}
    assert rows["zero-shot"] == promise and rows["BM25"] == PUBLIC


def test_the_draws_of_a_run_are_those_of_its_seed() -> None:
    variant = NegativesVariant(label="x", negatives={"random": partial(RandomNegatives, per_query=3)})
    made = [variant.make(NoPrivacy(), seed=seed) for seed in (0, 1)]
    assert [[getattr(source, "seed", None) for source in sources or ()] for sources in made] == [[None, 0], [None, 1]]


@pytest.mark.parametrize(
    ("negatives", "named"),
    [({}, "label='x'"), ({"a": RandomNegatives()}, r"negatives\.a"), ({"a": partial(int)}, r"negatives\.a")],
)
def test_bad_settings_are_refused_by_name(negatives: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        NegativesVariant(label="x", negatives=negatives)
