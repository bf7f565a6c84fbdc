"""`task=compare_modes` with parts that train in a blink: every mode, two runs each, a table and what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import WORDS
from tiny_tasks import open_to_others, parts, retriever, write_synthetic

from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import KernelPairLoss
from lit_dpret.modules import OptimizerSpec
from lit_dpret.privacy.modes import BatchClip, LogitDP, NoPrivacy, PerExampleDuplicated, PublicPassages, SyntheticData
from reproduction import CompareModes
from reproduction.recipe import Recipe as Variant

MODES = ("none", "batch_clip", "per_example_duplicated", "logit_dp", "logit_dp_kernel", "public_passages", "synthetic")


def log_parts(tmp_path: Path, **changes: Any) -> Any:
    return parts(tmp_path, words=WORDS, **changes)


def variants(folder: Path) -> dict[str, Variant]:
    noise = {"secret_file": folder / "secret", "noise_multiplier": 2.0}
    cut = noise | {"sub_batches": 4}
    modes: dict[str, Any] = {
        "none": partial(NoPrivacy),
        "batch_clip": partial(BatchClip, max_grad_norm=0.1, **cut),
        "per_example_duplicated": partial(PerExampleDuplicated, max_grad_norm=0.1, **cut),
        "logit_dp": partial(LogitDP, max_logit_grad_norm=0.1, **cut),
        "logit_dp_kernel": partial(LogitDP, max_logit_grad_norm=0.1, **cut),
        "public_passages": partial(PublicPassages, max_grad_norm=0.1, pool_size=8, **noise),
        "synthetic": partial(SyntheticData),
    }
    return {
        name: Variant(
            label=name, privacy=mode, optimizer=OptimizerSpec(name="sgd", lr=20.0), steps=2, batch=16, temperature=1.0,
            loss=KernelPairLoss(temperature=0.5) if name == "logit_dp_kernel" else None, trials=7,
        )
        for name, mode in modes.items()
    }  # fmt: skip


def compare(folder: Path, **changes: Any) -> CompareModes:
    settings: dict[str, Any] = {
        "retriever": retriever, "variants": variants(folder), "eps": [3.0], "seeds": 2, "max_passages": 20,
        "min_free_mb": 1, "tuning_data": "private", "tuning_note": "chosen on dev", "only": ["none", "logit_dp"],
    }  # fmt: skip
    return CompareModes(**settings | changes)


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    log: PairsDataModule = log_parts(tmp_path).make_datamodule(max_passages=20)
    return write_synthetic(tmp_path / "made", log)


def results(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "compare_modes.json").read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_mode_is_trained_several_times_and_stands_in_one_table(tmp_path: Path, synthetic: Path) -> None:
    told = compare(tmp_path, only=None, synthetic=synthetic, round_trip_filter=20).run(log_parts(tmp_path))
    run = tmp_path / "run"
    assert list(told) == ["BM25", "zero-shot", "none", *(f"{mode}, epsilon 3" for mode in MODES[1:])]
    rows = {row["system"]: row for row in results(run)["rows"]}
    for mode in MODES[1:-1]:
        row = rows[f"{mode}, epsilon 3"]
        cards = [read_card(run / f"{mode}-eps3-seed{seed}") for seed in (0, 1)]
        assert {card["mechanism"]["mode"] for card in cards} == {mode.removesuffix("_kernel")}
        assert 0 < max(card["claim"]["epsilon"] for card in cards) <= 3
        assert row["settings"]["sensitivity"] == cards[0]["mechanism"]["sensitivity"] > 0
        assert row["settings"]["clip_bound"] == pytest.approx(cards[0]["mechanism"]["max_grad_norm"])
        assert row["privacy"].startswith("epsilon = ") and row["settings"]["trials"] == 7
        assert all("Number of trials: 7. chosen on dev" in card["tuning"]["text"] for card in cards)
    shown = open_to_others(tmp_path / "run")
    assert not [path for path in shown if path.startswith("none-")] and [p for p in shown if p.startswith("logit_dp-")]
    assert rows["none"]["privacy"].startswith("no privacy") and rows["none"]["settings"]["sensitivity"] is None
    assert rows["synthetic, epsilon 3"]["privacy"] == privacy_line(read_card(synthetic))
    for name, row in rows.items():
        values = row["metrics"]["nDCG@10"]["per_run"]
        assert len(values) == (1 if name in ("BM25", "zero-shot") else 2) and told[name] == pytest.approx(
            np.mean(values)
        )
    assert results(run)["private_runs"] == 10
    for name in ("compare_modes.html", "compare_modes.md", "compare_modes.csv"):
        text = (run / name).read_text(encoding="utf-8")
        assert all(system in text for system in told), name
    assert not (run / "embeddings").exists(), "embeddings of queries are as private as the queries"
    assert not list(run.glob("*/model")), "models are large, and nobody asked for them"


def test_a_synthetic_data_set_stands_at_the_smallest_budget_that_covers_it(tmp_path: Path, synthetic: Path) -> None:
    cells = compare(tmp_path, only=["synthetic"], eps=[8.0, 0.01, 3.0], synthetic=[synthetic]).cells()
    assert [(cell.eps, cell.synthetic) for cell in cells] == [(3.0, synthetic)]


def test_a_synthetic_data_set_that_fits_no_budget_is_refused_before_anything_runs(
    tmp_path: Path, synthetic: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"more than all of task\.eps"):
        compare(tmp_path, only=["synthetic"], eps=[0.01], synthetic=synthetic).run(log_parts(tmp_path))
    with pytest.raises(ConfigurationError, match="two folders"):
        compare(tmp_path, only=["synthetic"], synthetic=[synthetic, synthetic]).run(log_parts(tmp_path))
    assert not list((tmp_path / "run").glob("*seed*"))


def test_a_delta_is_not_derived_from_a_private_number_of_queries(tmp_path: Path) -> None:
    known = variants(tmp_path)
    private = partial(known["logit_dp"].privacy, neighbours="add_or_remove")
    known["logit_dp"] = replace(known["logit_dp"], privacy=private)
    with pytest.raises(ConfigurationError, match=r"Set task\.delta"):
        compare(tmp_path, variants=known).run(log_parts(tmp_path))


def test_a_variant_without_steps_or_with_an_unknown_word_is_refused() -> None:
    known: dict[str, Any] = {"label": "x", "privacy": partial(NoPrivacy), "optimizer": OptimizerSpec(), "steps": 1}
    with pytest.raises(ConfigurationError, match="batch=0"):
        Variant(**known, batch=0)
    with pytest.raises(ConfigurationError, match="negatives"):
        Variant(**known, batch=4, negatives="hard")  # type: ignore[arg-type]
