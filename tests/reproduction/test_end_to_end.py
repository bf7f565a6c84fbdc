"""`experiment=paper_000_end_to_end` with encoders that train in a blink: what is trained, in which order; the page."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import generator, write_parent_card
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import parts, write_log, write_synthetic

from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, BatchClip, NoPrivacy, PerExampleDuplicated, PublicPassages, SyntheticData
from reproduction import EndToEnd
from reproduction import study as harness
from reproduction.paper_000.end_to_end_table import Cell, Regime
from reproduction.recipe import GeneratorRecipe, Recipe


def retriever(**settings: Any) -> DualEncoder:
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    return DualEncoder(**{"encoder": tower, "optimizer": OptimizerSpec()} | settings)


def ways(folder: Path) -> dict[str, Recipe]:
    small: dict[str, Any] = {"optimizer": OptimizerSpec(name="sgd", lr=0.1), "steps": 2, "batch": 16}
    noise = {"secret_file": folder / "secret", "max_grad_norm": 0.1, "noise_multiplier": 4.0}
    return {
        "original": Recipe(label="original", privacy=partial(NoPrivacy), **small),
        "made": Recipe(label="made", privacy=partial(SyntheticData), queries="generator", **small),
        "rows": Recipe(label="rows", privacy=partial(PerExampleDuplicated, sub_batches=4, **noise), **small),
        "batches": Recipe(label="batches", privacy=partial(BatchClip, sub_batches=4, **noise), **small),
        "public": Recipe(label="public", privacy=partial(PublicPassages, pool_size=8, **noise), **small),
        "chosen": Recipe(
            label="chosen", privacy=partial(SyntheticData), queries="generator", round_trip_filter=15, **small
        ),
    }  # fmt: skip


def study(folder: Path, **changes: Any) -> EndToEnd:
    some = ("original", "made", "rows")
    private = partial(DPSGD, secret_file=folder / "secret", noise_multiplier=4.0)
    make, known = partial(retriever), ways(folder)
    settings: dict[str, Any] = {
        "regimes": {
            "whole": Regime(label="the one", retriever=make, ways=known, as_in_the_paper=True),
            "other": Regime(label="the other", retriever=make, ways={way: known[way] for way in some}),
        },
        "generator": GeneratorRecipe(label="tiny", model=partial(generator), privacy=private, steps=1, batch=8),
        "eps": [8.0, 16.0, None], "seeds": 2, "max_passages": 20, "written_passages": 15, "min_free_mb": 1,
        "originals_are_public": True, "tuning_note": "tried on dev", "tuning_data": "private",
    }  # fmt: skip
    return EndToEnd(**settings | changes)


def facts(folder: Path, name: str = "end_to_end") -> dict[str, Any]:
    return dict(json.loads((folder / "run" / "report" / f"{name}.json").read_text(encoding="utf-8")))


def test_the_smallest_budget_comes_first_then_no_privacy_and_the_encoders_take_turns(tmp_path: Path) -> None:
    cells = study(tmp_path).cells()
    assert [cell.name for cell in cells[:5]] == [
        "whole-made-eps8", "other-made-eps8", "whole-rows-eps8", "other-rows-eps8", "whole-batches-eps8",
    ]  # fmt: skip
    assert list(dict.fromkeys(cell.eps for cell in cells)) == [8.0, None, 16.0]
    without = [cell.name for cell in cells if cell.eps is None]
    assert without[:3] == ["whole-original-none", "other-original-none", "whole-made-none"]
    assert Cell("whole", "original", 8.0) not in cells, "without privacy there is one row"
    assert Cell("other", "batches", 8.0) not in cells, "a way that the regime has not"


def test_a_budget_that_is_added_later_is_a_choice_as_well(tmp_path: Path) -> None:
    kept = tmp_path / "run" / "generator-eps8"
    (kept / "model").mkdir(parents=True)
    write_parent_card(kept)
    only: dict[str, Any] = {"only": ["whole-made"], "tuning_data": "none", "seeds": 1}
    with pytest.raises(ConfigurationError, match=r"task\.tuning_data=none"):
        study(tmp_path, eps=[16.0], **only).run(parts(tmp_path))
    study(tmp_path, eps=[16.0], rates=[0.1], **only).refuse_untold_choice(parts(tmp_path))
    study(tmp_path, eps=[8.0], **only).refuse_untold_choice(parts(tmp_path))


@pytest.mark.slow
def test_every_row_is_trained_whole_and_synthetic_queries_cost_what_their_generator_did(tmp_path: Path) -> None:
    told = study(tmp_path, seeds=1, eps=[8.0, None]).run(parts(tmp_path))
    run = tmp_path / "run"
    assert set(told) == {cell.name for cell in study(tmp_path, eps=[8.0, None]).cells()}
    rows = {row["source"]: row for row in facts(tmp_path, "end_to_end_whole")["rows"] if row["epsilon"] == "8"}
    assert set(rows) == {"made", "rows", "batches", "public", "chosen"}
    assert rows["rows"]["paper"] and rows["made"]["paper"], "the methods that the paper used"
    assert not rows["public"]["paper"] and not rows["batches"]["paper"] and not rows["chosen"]["paper"]
    assert not any(row["paper"] for row in facts(tmp_path, "end_to_end_other")["rows"]), "not the paper's situation"
    source = read_card(run / "generator-eps8")["claim"]
    for row in ("whole-made-eps8-seed0", "whole-chosen-eps8-seed0", "other-made-eps8-seed0"):
        assert read_card(run / row)["claim"]["epsilon"] == source["epsilon"] <= 8
    assert read_card(run / "whole-made-none-seed0")["claim"]["guarantee"] == "none"
    for row in ("rows", "batches", "public"):
        claim = read_card(run / f"whole-{row}-eps8-seed0")["claim"]
        assert claim["epsilon"] <= 8 and claim["delta"] == source["delta"]
        assert "frozen" not in json.dumps(read_card(run / f"whole-{row}-eps8-seed0")["mechanism"])
    assert facts(tmp_path)["not_run"] == "" and "The 5 private trainings" in facts(tmp_path)["spent"]
    assert not list(run.glob("*seed*/model"))


@pytest.mark.slow
def test_a_page_of_some_runs_says_which_seeds_it_has_and_what_was_not_run(tmp_path: Path) -> None:
    only = ["whole-original", "whole-made", "whole-rows"]
    study(tmp_path, seeds=1, eps=[8.0, None], only=only).run(parts(tmp_path))
    found = {(row["source"], row["epsilon"]): row for row in facts(tmp_path, "end_to_end_whole")["rows"]}
    assert found["rows", "8"]["note"] == "one run, seed 0" and found["public", "8"]["note"] == "not run yet"
    assert found["public", "8"]["ours"] == {}
    lacks = facts(tmp_path)["not_run"]
    assert "seed 0 (" in lacks and "whole-public-eps8" in lacks and "whole-rows-eps8" not in lacks
    notes = facts(tmp_path, "end_to_end_whole")["notes"]
    (order,) = [note for note in notes if note.startswith("ε = 8: made") and " rows, " in note]
    assert "not over runs" in order
    ledger = (tmp_path / "run" / "whole-rows-eps8-seed0" / "privacy_ledger.jsonl").read_bytes()
    settings: dict[str, Any] = {"seeds": 2, "eps": [8.0, None], "only": only}
    study(tmp_path, **settings, report_only=True).run(parts(tmp_path, resume=True))
    assert "seed 1 (not one row)" in facts(tmp_path)["not_run"]
    study(tmp_path, **settings).run(parts(tmp_path, resume=True))
    assert (tmp_path / "run" / "whole-rows-eps8-seed0" / "privacy_ledger.jsonl").read_bytes() == ledger
    found = {(row["source"], row["epsilon"]): row for row in facts(tmp_path, "end_to_end_whole")["rows"]}
    assert found["rows", "8"]["note"] == "runs with seeds 0, 1"
    assert facts(tmp_path)["per_run"]["whole-rows-eps8"].keys() == {"0", "1"}
    other = study(tmp_path, **settings)
    other.generator = replace(other.generator, steps=2)
    with pytest.raises(ResumeError, match=r"other settings of task\."):
        other.run(parts(tmp_path, resume=True))


def test_queries_whose_generator_was_moved_away_are_not_learned_from(tmp_path: Path) -> None:
    whole, made = parts(tmp_path, resume=True), tmp_path / "run" / "made-eps8"
    write_synthetic(made / "data", whole.read_data(expected_batch_size=None))
    (made / "stage.json").write_text(json.dumps({"result": {"passages": 24}, "seconds": 1.0}), encoding="utf-8")
    with pytest.raises(ResumeError, match=r"made-eps8 comes from another training"):
        study(tmp_path).run(whole)


@pytest.mark.costly
def test_rates_are_tried_on_public_texts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[set[str]] = []
    train = harness.train_retriever

    def watched(model: Any, data: Any, *rest: Any, **more: Any) -> None:
        read.append({row.query for row in data.pair_rows("train")})
        train(model, data, *rest, **more)

    monkeypatch.setattr(harness, "train_retriever", watched)
    few = partial(PairsDataModule, folder=write_log(tmp_path / "log"), sampling="poisson", max_train_queries=12)
    told = study(tmp_path, rates=[0.1, 0.2], rate_queries=4, only=["whole-original", "whole-batches"]).run(
        parts(tmp_path, make_datamodule=few)
    )
    assert set(told) == {
        f"whole-{way}-rate{rate}" for way in ("original-none", "batches-eps8") for rate in ("0.1", "0.2")
    }
    log = parts(tmp_path, make_datamodule=few).read_data(expected_batch_size=None)
    private = {row.query for split in ("train", "test") for row in log.pair_rows(split)}
    assert len(read) == 4 and {len(texts) for texts in read} == {12} and not any(texts & private for texts in read)
    assert not list((tmp_path / "run").glob("generator*"))
    assert len(facts(tmp_path, "rates")["trials"]) == 4
