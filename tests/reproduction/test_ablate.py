"""`task=ablate` and `task=compare_modes` with parts that train in a blink: every kind of row, its claim, going on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generator import generator, write_parent_card
from tiny_models import WORDS, tiny_tokenizer
from tiny_tasks import open_to_others, parts, retriever, write_synthetic
from transformers import BertConfig, BertForSequenceClassification

from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, PrivateDataError, ResumeError, UnsupportedModelError
from lit_dpret.losses import KernelPairLoss
from lit_dpret.modules import OptimizerSpec
from lit_dpret.negatives.drawn import read_labels
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import (
    DPSGD,
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PublicPassages,
    SyntheticData,
)
from lit_dpret.synthesis.filters import load_released
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.tasks.encoder_privacy import UNKNOWN
from reproduction import Ablate, CompareModes
from reproduction.recipe import GeneratorRecipe, Recipe


def recipes(folder: Path) -> dict[str, Recipe]:
    small: dict[str, Any] = {
        "optimizer": OptimizerSpec(name="sgd", lr=2.0), "steps": 2, "batch": 16, "temperature": 1.0, "trials": 7,
    }  # fmt: skip
    noise = {"secret_file": folder / "secret", "noise_multiplier": 2.0}
    direct = partial(PublicPassages, max_grad_norm=0.1, pool_size=8, **noise)
    return {
        "direct": Recipe(label="direct", privacy=direct, head_dim=4, rows_per_unit="all", **small),
        "base": Recipe(label="base", privacy=direct, part="baseline", **small),
        "none": Recipe(label="none", privacy=partial(NoPrivacy), part="bound", **small),
        "both": Recipe(label="both", privacy=partial(NoPrivacy), part="bound", head="both", **small),
        "pseudo": Recipe(label="pseudo", privacy=partial(NoPrivacy), queries="pseudo", **small),
        "made": Recipe(
            label="made", privacy=partial(SyntheticData), queries="tiny", round_trip_filter=20, head="both", **small
        ),
    }  # fmt: skip


def generators(folder: Path) -> dict[str, GeneratorRecipe]:
    private = partial(DPSGD, secret_file=folder / "secret", noise_multiplier=4.0)
    made = GeneratorRecipe(label="tiny one", model=partial(generator), privacy=private, steps=1, batch=8, trials=3)
    return {"tiny": made}


def study(folder: Path, **changes: Any) -> Ablate:
    settings: dict[str, Any] = {
        "retriever": retriever, "variants": recipes(folder), "generators": generators(folder), "eps": 8.0, "seeds": 2,
        "max_passages": 20, "min_free_mb": 1, "likeness_texts": None, "written_passages": 15, "tuning_data": "private",
        "tuning_note": "chosen on dev",
    }  # fmt: skip
    return Ablate(**settings | changes)


def results(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "ablation.json").read_text(encoding="utf-8")))


@pytest.mark.costly
def test_a_row_goes_on_from_a_head_trained_on_synthetic_queries_and_claims_both(tmp_path: Path) -> None:
    known = recipes(tmp_path)
    known["seen"] = replace(known["made"], head="query", label="seen")
    known["on"] = replace(known["base"], part="recipe", label="on", start="seen", eps=6.0)
    study(tmp_path, variants=known, only=["seen", "on"], seeds=1).run(parts(tmp_path))
    run = tmp_path / "run"
    card, first = read_card(run / "on-seed0"), read_card(run / "seen-seed0")
    assert card["claim"]["epsilon"] > first["claim"]["epsilon"] > 0
    assert [parent["name"] for parent in card["parents"]][1:] == [parent["name"] for parent in first["parents"]]
    (row,) = [row for row in results(run)["rows"] if row["system"] == "on"]
    assert row["settings"]["start"] == "seen"


@pytest.mark.slow
def test_every_run_on_synthetic_queries_has_a_generator_of_its_own_and_its_claim(tmp_path: Path) -> None:
    told = study(tmp_path).run(parts(tmp_path))
    run = tmp_path / "run"
    assert list(told) == ["BM25", "zero-shot", "none", "both", "base", "direct", "pseudo", "made"]
    rows = {row["system"]: row for row in results(run)["rows"]}
    for seed in (0, 1):
        made, source = read_card(run / f"made-seed{seed}"), read_card(run / f"generator-tiny-seed{seed}")
        assert 0 < made["claim"]["epsilon"] == source["claim"]["epsilon"] <= 8
        assert "Number of trials: 3. chosen on dev" in source["tuning"]["text"]
    ledgers = [run / f"generator-tiny-seed{seed}" / "privacy_ledger.jsonl" for seed in (0, 1)]
    plans = [PrivacyLedger.read(ledger).records[0] for ledger in ledgers]
    assert plans[0]["run_id"] != plans[1]["run_id"], "noise of its own"
    assert rows["made"]["settings"]["queries"] == "tiny" and rows["made"]["settings"]["head"] == "both"
    assert rows["direct"]["settings"]["head_dim"] == 4 and rows["direct"]["budget"] == 8
    assert rows["pseudo"]["privacy"] == UNKNOWN and rows["pseudo"]["budget"] is None
    assert results(run)["private_runs"] == 2 * 3, "two direct rows and a generator, twice each"
    (together,) = re.findall(r"The 6 private trainings .* have epsilon = ([\d.]+) at", results(run)["spent"])
    assert float(together) > max(read_card(run / f"{row}-seed0")["claim"]["epsilon"] for row in ("direct", "made"))
    assert {path.stat().st_mode & 0o077 for path in run.glob("ablation.*")} == {0}, "measures of private queries"
    assert results(run)["spent"] in (run / "ablation.md").read_text(encoding="utf-8").replace("\\", "")
    assert not (run / "embeddings").exists(), "embeddings of queries are as private as the queries"


@pytest.mark.slow
def test_a_study_grows_and_no_finished_stage_is_done_again_or_with_other_settings(tmp_path: Path) -> None:
    only = {"only": ["made", "none"], "seeds": 1}
    study(tmp_path, **only).run(parts(tmp_path))
    ledger = tmp_path / "run" / "generator-tiny-seed0" / "privacy_ledger.jsonl"
    before = ledger.read_bytes()
    with pytest.raises(ResumeError, match="resume=true"):
        study(tmp_path).run(parts(tmp_path))
    hotter = {name: replace(recipe, temperature=2.0) for name, recipe in recipes(tmp_path).items()}
    for change, named in (
        ({"generators": {"tiny": replace(generators(tmp_path)["tiny"], steps=2)}}, r"task\.generators\.tiny"),
        ({"eps": 7.0}, "other settings"),
        ({"variants": hotter}, r"task\.variants\.none"),
    ):
        with pytest.raises(ResumeError, match=named):
            study(tmp_path, **only | change).run(parts(tmp_path, resume=True))
    told = study(tmp_path, only=["made", "none", "pseudo"]).run(parts(tmp_path, resume=True))
    assert ledger.read_bytes() == before and "pseudo" in told


@pytest.mark.slow
def test_what_the_queries_of_another_generator_made_is_refused_until_it_is_moved_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproduction.ablate.likeness", lambda *_, **__: {"bleu": 1.0, "mauve": 0.5})
    only = {"only": ["made", "none"], "likeness_texts": 20, "seeds": 1}
    study(tmp_path, **only).run(parts(tmp_path))
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "generator-tiny-seed0").rename(elsewhere / "generator-tiny-seed0")
    for stage in ("made-tiny-1-seed0", "made-seed0", "round_trip20-made-tiny-1-seed0", "likeness-tiny-seed0"):
        with pytest.raises(ResumeError, match=rf"{stage} comes from another training than the one in generator-tiny"):
            study(tmp_path, **only).run(parts(tmp_path, resume=True))
        assert not (run / "generator-tiny-seed0").exists(), "nothing was trained, and spent, before"
        (run / stage).rename(elsewhere / stage)
    study(tmp_path, **only).run(parts(tmp_path, resume=True))
    assert read_card(run / "made-seed0")["ledger"]["head"] != read_card(elsewhere / "made-seed0")["ledger"]["head"]


@pytest.mark.parametrize(
    ("row", "change", "knob"),
    [
        ("direct", {"queries": "tiny"}, "queries=tiny"),
        ("direct", {"queries": "pseudo"}, "queries=pseudo"),
        ("direct", {"head": "none"}, "task.variants: head"),
        ("direct", {"head_dim": 0}, "head_dim=0"),
        ("base", {"start": "made", "head_dim": 4}, "start"),
        ("base", {"start": "made", "privacy": partial(NoPrivacy)}, "start"),
        ("none", {"head": "query", "pseudo_labels": 2}, "pseudo_labels=2"),
        ("made", {"head": "both", "pseudo_labels": 2}, "pseudo_labels=2"),
        ("made", {"pseudo_labels": 0}, "pseudo_labels=0"),
        ("none", {"batch": 0}, "batch=0"),
        ("none", {"negatives": "hard"}, "negatives"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(row: str, change: dict[str, Any], knob: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=knob):
        replace(recipes(tmp_path)[row], **change)


def test_unknown_and_unprotected_generators_and_a_start_that_is_not_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.variants\.made\.queries=tiny"):
        study(tmp_path, generators={})
    with pytest.raises(ConfigurationError, match="has no guarantee"):
        replace(generators(tmp_path)["tiny"], privacy=partial(NoPrivacy))
    known = recipes(tmp_path)
    known["on"] = replace(known["base"], start="made")
    with pytest.raises(ConfigurationError, match=r"task\.only"):
        study(tmp_path, variants=known, only=["on"])
    known["hidden"] = replace(known["direct"], privacy=partial(known["direct"].privacy, neighbours="add_or_remove"))
    with pytest.raises(ConfigurationError, match=r"Set task\.delta"):
        study(tmp_path, variants=known, only=["hidden"])  # it would be derived from a private number


def warm(folder: Path, start: Path) -> dict[str, Any]:
    """The study with one more generator, which starts from a folder, and a row that learns from it."""
    tiny = generators(folder)["tiny"]
    made = recipes(folder)["made"]
    return {
        "generators": {"tiny": tiny, "warm": replace(tiny, label="warm one", public_start=str(start))},
        "variants": recipes(folder) | {"made_warm": replace(made, label="made warm", queries="warm")},
        "seeds": 1,
    }


def save_start(run: Path, *, seed: int = 5, private: bool = False) -> Path:
    """The folder of an earlier run with a generator in it."""
    module = generator(seed=seed)
    module.save_model(run / "model")
    if private:
        write_parent_card(run / "model")
        for file in (run / "model").glob("privacy_*"):
            file.rename(run / file.name)
    return run


def test_a_row_whose_generator_has_no_start_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = warm(tmp_path, tmp_path / "warm_up") | {"only": ["made_warm", "none"]}
    with pytest.raises(ConfigurationError, match=r"warm_up, which is missing.*hydra\.run\.dir="):
        study(tmp_path, **rows).run(parts(tmp_path))
    assert not (tmp_path / "run").exists(), "refused before anything is computed"
    chosen = {name: rows["variants"][name] for name in rows["only"]}
    assert "none" in study(tmp_path, **rows | {"variants": chosen, "only": None}).run(parts(tmp_path))
    assert "left out: task.variants.made_warm" in capsys.readouterr().out
    assert [row["system"] for row in results(tmp_path / "run")["rows"]] == ["BM25", "zero-shot", "none"]


def test_a_start_that_tells_of_private_data_is_not_public(tmp_path: Path) -> None:
    start = save_start(tmp_path / "warm_up", private=True)
    with pytest.raises(ConfigurationError, match=r"public_start=.*mentions private data"):
        study(tmp_path, **warm(tmp_path, start)).run(parts(tmp_path))


@pytest.mark.costly
def test_a_generator_starts_from_the_public_folder_and_its_card_says_so(tmp_path: Path) -> None:
    start = save_start(tmp_path / "warm_up")
    changes = warm(tmp_path, start) | {"only": ["made_warm", "none"]}
    started: list[str] = []

    def noting(*, pretrained: str, privacy: Any) -> Any:
        started.append(pretrained)
        return generator(privacy=privacy, pretrained=pretrained, config=None, tokenizer=None)

    changes["generators"]["warm"] = replace(changes["generators"]["warm"], model=partial(noting))
    study(tmp_path, **changes).run(parts(tmp_path))
    assert started == [str(start / "model")]
    card = read_card(tmp_path / "run" / "generator-warm-seed0")
    assert "started from warm_up, which was declared to be public" in card["pretraining"]["start"]
    assert "made from public data alone, as declared" in json.dumps(card["assumptions"])
    study(tmp_path, **changes).run(parts(tmp_path, resume=True))
    save_start(tmp_path / "warm_up", seed=6)
    with pytest.raises(ResumeError, match=r"other settings of task\.generators\.warm"):
        study(tmp_path, **changes).run(parts(tmp_path, resume=True))


# -- a teacher ---------------------------------------------------------------------------------


def taught(folder: Path, source: Path | None, **changes: Any) -> Ablate:
    """The study with rows that learn a teacher's margins: of made queries, and of words that nobody asked."""
    known = recipes(folder)
    rows = {
        "labelled": replace(known["made"], label="labelled", head="query", round_trip_filter=20, pseudo_labels=2),
        "pseudo_labelled": replace(known["pseudo"], label="pseudo labelled", pseudo_labels=1),
    }
    settings: dict[str, Any] = {"teacher": source, "seeds": 1, "variants": known | rows, "only": ["none", *rows]}
    return study(folder, **settings | changes)


def write_teacher(folder: Path, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tiny_tokenizer()), num_hidden_layers=1, num_labels=1, **settings)
    BertForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.costly
def test_rows_learn_the_margins_of_one_public_teacher_between_passages_of_the_list(tmp_path: Path) -> None:
    source = write_teacher(tmp_path / "teacher")
    taught(tmp_path, source).run(parts(tmp_path))
    run = tmp_path / "run"
    rows = {row["system"]: row for row in results(run)["rows"]}
    assert rows["labelled"]["settings"]["pseudo_labels"] == 2 and rows["none"]["settings"]["pseudo_labels"] is None
    assert rows["labelled"]["settings"]["loss"] == "margins of a teacher, temperature 1"
    assert rows["labelled"]["budget"] == 8 and rows["pseudo labelled"]["privacy"] == UNKNOWN
    labels = read_labels(run / "labels2-round_trip20-tiny-1-seed0" / "gpl-training-data.tsv")
    kept = (run / "round_trip20-made-tiny-1-seed0" / "kept_queries.txt").read_text(encoding="utf-8").split()
    assert sorted({label.query_id for label in labels}) == sorted(kept) and len(labels) == 2 * len(kept)
    assert read_labels(run / "labels1-all-pseudo-1" / "gpl-training-data.tsv")
    made = load_released(run / "made-tiny-1-seed0" / "data")
    scorer = CrossEncoder.load(source)
    asked = {query.query_id: query.text for query in made}
    data = PairsDataModule(folder=tmp_path / "log")
    data.setup("fit")
    texts = data.public_passages()
    one = labels[0]
    own, other = scorer.score([asked[one.query_id]] * 2, [texts[one.passage_id], texts[one.negative_id]], batch_size=2)
    assert one.margin == pytest.approx(own - other, abs=1e-4)
    assert "from the queries that the parent" in json.dumps(read_card(run / "labelled-seed0")["assumptions"])
    write_teacher(tmp_path / "teacher", seed=1)
    with pytest.raises(ResumeError, match=r"labels2-.*task\.teacher="):
        taught(tmp_path, source).run(parts(tmp_path, resume=True))
    retriever(privacy=NoPrivacy()).encoder.backbone.save_pretrained(tmp_path / "encoder")
    with pytest.raises(UnsupportedModelError, match="cross-encoder"):
        taught(tmp_path, tmp_path / "encoder").run(parts(tmp_path, resume=True))
    write_parent_card(source)
    with pytest.raises(PrivateDataError, match=r"task\.teacher="):
        taught(tmp_path, source).run(parts(tmp_path, resume=True))


def test_without_a_teacher_its_rows_are_left_out_unless_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "cross_encoder"
    for source, reason in ((None, "it is null"), (missing, "is not a folder on this machine")):
        with pytest.raises(ConfigurationError, match=rf"task\.variants\.labelled learns .*{reason}"):
            taught(tmp_path, source).run(parts(tmp_path))
    assert not (tmp_path / "run").exists(), "refused before anything is computed"
    few = {name: row for name, row in taught(tmp_path, None).variants.items() if name in ("none", "labelled")}
    assert "none" in taught(tmp_path, missing, variants=few, only=None).run(parts(tmp_path))
    assert "left out: task.variants.labelled" in capsys.readouterr().out


# -- every mode, at several budgets --------------------------------------------------------------

MODES = ("none", "batch_clip", "per_example_duplicated", "logit_dp", "logit_dp_kernel", "public_passages", "synthetic")


def compare(folder: Path, **changes: Any) -> CompareModes:
    noise = {"secret_file": folder / "secret", "noise_multiplier": 2.0}
    logit, clipped = {"max_logit_grad_norm": 0.1, "sub_batches": 4} | noise, {"max_grad_norm": 0.1} | noise
    modes: dict[str, Any] = {
        "none": partial(NoPrivacy),
        "batch_clip": partial(BatchClip, sub_batches=4, **clipped),
        "per_example_duplicated": partial(PerExampleDuplicated, sub_batches=4, **clipped),
        "logit_dp": partial(LogitDP, **logit),
        "logit_dp_kernel": partial(LogitDP, **logit),
        "public_passages": partial(PublicPassages, pool_size=8, **clipped),
        "synthetic": partial(SyntheticData),
    }
    variants = {
        name: Recipe(
            label=name, privacy=mode, optimizer=OptimizerSpec(name="sgd", lr=20.0), steps=2, batch=16, temperature=1.0,
            loss=KernelPairLoss(temperature=0.5) if name == "logit_dp_kernel" else None, trials=7,
        )
        for name, mode in modes.items()
    }  # fmt: skip
    settings: dict[str, Any] = {
        "retriever": retriever, "variants": variants, "eps": [3.0], "seeds": 2, "max_passages": 20, "min_free_mb": 1,
        "tuning_data": "private", "tuning_note": "chosen on dev",
    }  # fmt: skip
    return CompareModes(**settings | changes)


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "made", parts(tmp_path, words=WORDS).make_datamodule(max_passages=20))


@pytest.mark.slow
def test_every_mode_is_trained_several_times_and_stands_in_one_table(tmp_path: Path, synthetic: Path) -> None:
    told = compare(tmp_path, synthetic=synthetic, round_trip_filter=20).run(parts(tmp_path, words=WORDS))
    run = tmp_path / "run"
    assert list(told) == ["BM25", "zero-shot", "none", *(f"{mode}, epsilon 3" for mode in MODES[1:])]
    found = dict(json.loads((run / "compare_modes.json").read_text(encoding="utf-8")))
    rows = {row["system"]: row for row in found["rows"]}
    for mode in MODES[1:-1]:
        row = rows[f"{mode}, epsilon 3"]
        cards = [read_card(run / f"{mode}-eps3-seed{seed}") for seed in (0, 1)]
        assert {card["mechanism"]["mode"] for card in cards} == {mode.removesuffix("_kernel")}
        assert 0 < max(card["claim"]["epsilon"] for card in cards) <= 3
        assert row["settings"]["sensitivity"] == cards[0]["mechanism"]["sensitivity"] > 0
        assert row["settings"]["clip_bound"] == pytest.approx(cards[0]["mechanism"]["max_grad_norm"])
        assert row["privacy"].startswith("epsilon = ") and row["settings"]["trials"] == 7
        assert all("Number of trials: 7. chosen on dev" in card["tuning"]["text"] for card in cards)
    shown = open_to_others(run)
    assert not [path for path in shown if path.startswith("none-")] and [p for p in shown if p.startswith("logit_dp-")]
    assert rows["none"]["privacy"].startswith("no privacy") and rows["none"]["settings"]["sensitivity"] is None
    assert rows["synthetic, epsilon 3"]["privacy"] == privacy_line(read_card(synthetic))
    for name, row in rows.items():
        values = row["metrics"]["nDCG@10"]["per_run"]
        assert len(values) == (1 if name in ("BM25", "zero-shot") else 2)
        assert told[name] == pytest.approx(np.mean(values))
    assert found["private_runs"] == 10
    for name in ("compare_modes.html", "compare_modes.md", "compare_modes.csv"):
        text = (run / name).read_text(encoding="utf-8")
        assert all(system in text for system in told), name
    assert not (run / "embeddings").exists(), "embeddings of queries are as private as the queries"
    assert not list(run.glob("*/model")), "models are large, and nobody asked for them"


def test_a_synthetic_data_set_stands_at_the_smallest_budget_that_covers_it_or_is_refused(
    tmp_path: Path, synthetic: Path
) -> None:
    cells = compare(tmp_path, only=["synthetic"], eps=[8.0, 0.01, 3.0], synthetic=[synthetic]).cells()
    assert [(cell.eps, cell.synthetic) for cell in cells] == [(3.0, synthetic)]
    for change, named in (
        ({"eps": [0.01], "synthetic": synthetic}, r"more than all of task\.eps"),
        ({"synthetic": [synthetic, synthetic]}, "two folders"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            compare(tmp_path, only=["synthetic"], **change).run(parts(tmp_path, words=WORDS))
    assert not list((tmp_path / "run").glob("*seed*"))
