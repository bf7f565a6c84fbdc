"""The round trip of the pipeline, a choice among released queries, asks where its encoder is from; so do the rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cards import Run, make_plan
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import parts, retriever, write_log, write_synthetic

from lit_dpret.cards.card import subject_of, write_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError, ResumeError
from lit_dpret.privacy.ledger.run_ledger import STAGES_NAME
from lit_dpret.privacy.ledger.trained import NOTE_NAME, TRAINED_KEY, TrainedIn, mark_trained
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.synthesis.filters import load_released
from lit_dpret.tasks import Pipeline
from lit_dpret.tasks.round_trip import KEPT, check_round_trip, hits, wrong_sources
from lit_dpret.tasks.stages import Stages

LENGTHS: dict[str, Any] = {"max_passage_length": 10, "max_query_length": 8}


def tower() -> TextEncoder:
    return TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))


def encoder_of_a_run(folder: Path, told_by: str) -> Path:
    """An encoder's folder whose card, or whose note alone, tells of a run under a mode."""
    save_sentence_transformer(folder, tower())
    what, mode = told_by.split()
    if what == "note":
        (folder / NOTE_NAME).write_text(json.dumps({TRAINED_KEY: [["a run", mode]]}), encoding="utf-8")
    if what == "card":
        files = [path for path in folder.rglob("*") if path.is_file()]
        run = Run(folder.with_name("other"), make_plan() if mode == "dp_sgd" else None, mode=mode)
        write_card(run.train().card(subject=subject_of("weights", "encoder", files, root=folder)), folder)
    return folder


@pytest.mark.parametrize("told_by", ["card dp_sgd", "card none", "note dp_sgd", "note none"])
def test_an_encoder_of_other_private_training_takes_no_part_in_the_round_trip(told_by: str, tmp_path: Path) -> None:
    """The pipeline trains under privacy=none here, so that no check of a fit looks at where the encoder is from."""
    released = load_released(write_synthetic(tmp_path / "made", PairsDataModule(folder=write_log(tmp_path / "log"))))
    (tmp_path / "other").mkdir()
    folder = encoder_of_a_run(tmp_path / "private", told_by)
    model = retriever(privacy=NoPrivacy(), encoder=str(folder), **LENGTHS)
    with pytest.raises(PrivateDataError, match=r"model\.encoder="):
        check_round_trip(model, released, tmp_path, k=3, seed=0)
    assert not (tmp_path / KEPT).exists()


def pipeline(**changes: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "generator": retriever, "retriever": retriever, "generator_steps": 1, "generator_batch": 8,
        "generator_physical_batch": 8, "generator_max_grad_norm": 0.1, "retriever_steps": 1, "retriever_batch": 16,
        "retriever_max_grad_norm": 0.5, "min_free_mb": 1, "max_passages": 20, "only": ["zero_shot"],
    }  # fmt: skip
    return Pipeline(**settings | changes)


def promised(tmp_path: Path, **changes: Any) -> str:
    """What the table of a pipeline promises for its encoder."""
    pipeline(**changes).run(parts(tmp_path))
    [row] = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    return str(row["privacy"])


@pytest.mark.parametrize(
    ("told_by", "promise"),
    [
        ("nothing -", "no privacy card: what the encoder was trained on is not known"),
        ("card dp_sgd", "epsilon = "),
        ("card none", "no privacy guarantee"),
        ("note dp_sgd", "privacy not proved"),
        ("note none", "no privacy guarantee"),
    ],
)
def test_the_row_of_an_encoder_promises_what_its_folder_tells_alone(told_by: str, promise: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    make = partial(retriever, encoder=str(encoder_of_a_run(tmp_path / "encoder", told_by)), **LENGTHS)
    assert promised(tmp_path, retriever=make).startswith(promise)
    for only in (["direct"], ["synthetic"], ["pseudo", "zero_shot"], None):
        if told_by == "nothing -":
            pipeline(retriever=make, only=only)
            continue
        with pytest.raises(ConfigurationError, match=r"task\.retriever\.encoder") as refused:
            pipeline(retriever=make, only=only)
        assert refused.value.trap == "T30"


def test_a_row_promises_nothing_for_an_encoder_that_was_trained_in_this_process(tmp_path: Path) -> None:
    trained = tower()
    mark_trained(trained, [TrainedIn("a run", "dp_sgd")], whole=True)
    assert promised(tmp_path, retriever=partial(retriever, encoder=trained)) == "privacy not proved (no epsilon)"


def test_a_card_beside_other_weights_promises_nothing_for_a_row(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = encoder_of_a_run(tmp_path / "encoder", "card dp_sgd")
    (folder / "more.txt").write_text("others", encoding="utf-8")
    with pytest.raises(DataError, match=r"more\.txt"):
        promised(tmp_path, retriever=partial(retriever, encoder=str(folder), **LENGTHS))


def test_a_generator_that_a_run_trained_is_refused_before_anything_is_begun(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = encoder_of_a_run(tmp_path / "start", "note dp_sgd")
    with pytest.raises(ConfigurationError, match=r"task\.generator\.pretrained") as refused:
        pipeline(generator=partial(retriever, pretrained=folder), only=["direct", "synthetic"]).run(parts(tmp_path))
    assert refused.value.trap == "T30" and list((tmp_path / "run").iterdir()) == []


# -- stages ------------------------------------------------------------------------------------


class Refusal(Exception):
    """What a stage raises."""


@pytest.mark.parametrize("left", [None, "first/a.txt", "elsewhere/a.txt", "scratch/a.txt", "train.log"])
def test_a_run_whose_first_stage_was_refused_before_it_wrote_was_never_begun(left: str | None, tmp_path: Path) -> None:
    def refuse(folder: Path, resume: bool) -> dict[str, Any]:
        if left is not None:
            (tmp_path / left).parent.mkdir(exist_ok=True)
            (tmp_path / left).write_text("some", encoding="utf-8")
        raise Refusal

    stages = Stages(tmp_path, resume=False, fingerprint="some settings", scratch=("scratch",))
    assert not (tmp_path / STAGES_NAME).exists()
    with pytest.raises(Refusal):
        stages.run("first", refuse)
    begun = left in ("first/a.txt", "elsewhere/a.txt")
    assert (tmp_path / STAGES_NAME).exists() == (tmp_path / "first").exists() == begun
    for resume in (False, True):
        if begun:
            with pytest.raises(ResumeError):
                Stages(tmp_path, resume=resume, fingerprint="others")
        else:
            Stages(tmp_path, resume=resume, fingerprint="others")


def test_a_later_stage_that_is_refused_leaves_the_mark_of_what_was_begun(tmp_path: Path) -> None:
    def refuse(folder: Path, resume: bool) -> dict[str, Any]:
        raise Refusal

    stages = Stages(tmp_path, resume=False, fingerprint="some settings")
    assert stages.run("first", lambda folder, resume: {"a": 1}) == {"a": 1}
    with pytest.raises(Refusal):
        stages.run("second", refuse)
    assert (tmp_path / STAGES_NAME).read_text(encoding="utf-8") == "some settings"
    assert (tmp_path / STAGES_NAME).stat().st_mode & 0o077 == 0, "a hash of private texts can be guessed"


def test_a_pipeline_refused_in_its_first_training_leaves_the_folder_to_the_corrected(tmp_path: Path) -> None:
    def refuse(**_: Any) -> Any:
        raise Refusal

    with pytest.raises(Refusal):
        pipeline(generator=refuse, only=["zero_shot", "synthetic"]).run(parts(tmp_path))
    pipeline().run(parts(tmp_path))
    with pytest.raises(ResumeError):
        pipeline().run(parts(tmp_path))


def test_a_pipeline_does_not_go_on_with_other_data_of_the_same_size(tmp_path: Path) -> None:
    pipeline().run(parts(tmp_path))
    log = tmp_path / "log" / "queries.jsonl"
    before = log.read_text(encoding="utf-8")
    log.write_text(before.replace('"text": "', '"text": "another ', 1), encoding="utf-8")
    with pytest.raises(ResumeError, match="data"):
        pipeline().run(parts(tmp_path, resume=True))
    log.write_text(before, encoding="utf-8")
    pipeline().run(parts(tmp_path, resume=True))


# -- the round trip and its control --------------------------------------------------------------

SOURCES = {f"q{n}": f"p{n % 7}" for n in range(21)}


def test_no_query_keeps_its_passage_and_passages_move_together() -> None:
    for seed in range(20):
        wrong = wrong_sources(SOURCES, seed)
        assert all(wrong[query] != passage for query, passage in SOURCES.items())
        moved = {(SOURCES[query], wrong[query]) for query in SOURCES}
        assert len(moved) == 7 and {after for _, after in moved} == set(SOURCES.values())


def test_the_control_is_a_function_of_the_seed() -> None:
    assert wrong_sources(SOURCES, 1) == wrong_sources(dict(reversed(SOURCES.items())), 1)
    assert len({tuple(wrong_sources(SOURCES, seed).values()) for seed in range(10)}) > 5


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(DataError, match="two passages"):
        wrong_sources({"a": "s", "b": "s"})
    with pytest.raises(DataError, match="two passages"):
        wrong_sources({})
    with pytest.raises(ConfigurationError, match="k=0"):
        hits({"a": "s"}, {}, 0)
