"""A selection of released queries is a data set like the whole, with the claim of the whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cards import forge
from tiny_generator import PASSAGES, lines, write_parent_card
from tiny_tasks import no_parts

from lit_dpret.cards.card import card_sha256, read_card, write_card
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError, StorageError
from lit_dpret.synthesis.dataset_folder import DATA_FILES
from lit_dpret.synthesis.filters import (
    BestOf,
    CrossEncoderScore,
    LanguageModelScore,
    ReleasedQueries,
    apply_filters,
    load_released,
    write_selection,
)
from lit_dpret.tasks import Filter


def test_a_claim_that_cannot_be_inherited_leaves_no_queries_without_a_card(
    released: ReleasedQueries, tmp_path: Path
) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    write_parent_card(claim)
    write_card(forge(read_card(claim), epsilon=0.01), claim)
    with pytest.raises(DataError, match="does not agree with its ledger"):
        write_selection(released.under(claim), tmp_path / "out", applied=[])
    assert not (tmp_path / "out").exists()


def test_what_is_kept_keeps_its_id_and_only_its_passages_are_written(
    released: ReleasedQueries, whole: Path, tmp_path: Path
) -> None:
    everything = write_selection(released, tmp_path / "all", applied=[])
    for name in DATA_FILES:
        assert (everything / name).read_bytes() == (whole / name).read_bytes()
    kept = released.only([i % 5 == 3 for i in range(len(released))])
    out = write_selection(kept, tmp_path / "some", applied=[])
    every = (whole / "queries.jsonl").read_text().splitlines()
    assert (out / "queries.jsonl").read_text().splitlines() == every[3::5]
    assert {line["_id"] for line in lines(out / "corpus.jsonl")} == {query.passage_id for query in kept}
    again = load_released(out)
    assert [vars(query) for query in again] == [vars(query) for query in kept]
    module = SyntheticDataModule(folder=out)
    module.setup("fit")
    assert [row.query_id for row in module.pair_rows("train")] == [query.query_id for query in kept]


def test_the_card_of_a_selection_claims_what_the_whole_claims_and_lists_the_filters(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    best = BestOf(LanguageModelScore(model=source, keep_share=1.0))
    told = Filter(data=whole, filters={"best": best}).run(no_parts(tmp_path))
    out = tmp_path / "filtered"
    card, parent = read_card(out), read_card(whole)
    for key in ("guarantee", "epsilon", "delta", "unit", "neighbours"):
        assert card["claim"].get(key) == parent["claim"].get(key)
    assert [p["sha256"] for p in card["parents"]] == [
        card_sha256(whole / "privacy_card.json"), *(p["sha256"] for p in parent["parents"])
    ]  # fmt: skip
    assert told["kept"] == len(PASSAGES) == len(lines(out / "queries.jsonl"))
    applied = card["generation"]["filters"]
    assert {one["uses_private_data"] for one in applied} == {False}
    assert card["environment"]["hardware"] and card["environment"]["precision"] == "float32"
    assert [(one["filter"], one["kept"], one["by"]["model"]) for one in applied] == [("best_of", len(PASSAGES), "g")]
    assert str(source) not in (out / "README.md").read_text() + (out / "privacy_card.json").read_text()
    Filter(data=out, filters={"a": LanguageModelScore(keep_share=0.5)}).run(no_parts(tmp_path / "twice"))
    both = read_card(tmp_path / "twice" / "filtered")["generation"]["filters"]
    assert [one["filter"] for one in both] == ["best_of", "language_model"], "filters add up"
    report = json.loads((tmp_path / "filter.json").read_text())
    assert report["queries"] == len(load_released(whole)) and report["kept"] == len(PASSAGES)
    examples = (tmp_path / "examples.md").read_text()
    assert examples.count("| kept |") == examples.count("| dropped |") == 5
    passages = load_released(whole).passages
    rows = [row for row in examples.splitlines() if row.startswith(("| kept |", "| dropped |"))]
    shown = [row.removesuffix(" |").split(" | ")[-1].split(": ", 1) for row in rows]
    assert len(shown) == 10 and all(passages[name].startswith(words.removesuffix(" ...")) for name, words in shown)


def test_nothing_is_written_over_and_a_setting_of_the_task_is_refused_before_anything_is_written(
    whole: Path, tmp_path: Path
) -> None:
    """A folder of queries that is left without its card could be taken for another one."""
    (tmp_path / "filtered").mkdir()
    (tmp_path / "filtered" / "mine.txt").write_text("x")
    filters = {"a": LanguageModelScore(keep_share=0.5)}
    with pytest.raises(StorageError, match="filtered"):
        Filter(data=whole, filters=filters).run(no_parts(tmp_path))
    assert (tmp_path / "filtered" / "mine.txt").read_text() == "x"
    for change, named in (
        ({"filters": {}}, "filter=round_trip"), ({"examples": -3}, r"task\.examples=-3"),
        ({"tuning_data": "mine"}, r"task\.tuning_data='?mine"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=named):
            Filter(**{"data": "set", "filters": filters} | change)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"task\.data"):
        load_released(tmp_path / "nowhere")


def test_a_model_that_was_declared_public_is_named_on_the_card_as_declared(
    released: ReleasedQueries, cross_encoder_folder: Path, tmp_path: Path
) -> None:
    by = CrossEncoderScore(cross_encoder_folder, model_is_public=True, keep_share=0.5)
    told = []
    for name, filters in (("declared", [BestOf(by), by]), ("recorded", [LanguageModelScore(keep_share=0.5)])):
        kept, applied = apply_filters(released, filters)
        card = read_card(write_selection(kept, tmp_path / name, applied=applied))
        trusted = [each for each in card["assumptions"] if cross_encoder_folder.name in each["text"]]
        assert all(each["holds"] == "unverified" for each in trusted)
        told.append((len(trusted), {each["uses_private_data"] for each in card["generation"]["filters"]}))
    assert told == [(1, {"no, as declared"}), (0, {False})]


def test_a_selection_of_declared_queries_tells_of_a_declaration_and_claims_nothing(whole: Path, tmp_path: Path) -> None:
    bare = tmp_path / "declared"
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("privacy_card*"))
    out = write_selection(load_released(bare, declared_public=True), tmp_path / "out", applied=[])
    told, claimed = (out / "README.md").read_text(), (whole / "README.md").read_text()
    assert "declared that no private query" in told and "was not checked" in told
    for words in ("synthetic", "written by a program", "No private query", "not a sample of what people asked"):
        assert words not in told.split("## Files")[0], words
    assert "written by a program" in claimed and "within the bounds" in claimed


def test_what_is_not_in_the_folder_is_not_written_with_its_card(released: ReleasedQueries, tmp_path: Path) -> None:
    """Anybody can put other texts into the object in a program; the card is about those of the files."""
    first, *rest = released.queries
    for swapped in (
        replace(released, queries=(replace(first, text="my secret"), *rest)),
        replace(released, queries=(replace(first, query_id="secret"), *rest)),
        replace(released, queries=(replace(first, passage_id=rest[-1].passage_id), *rest)),
        replace(released, passages={name: "my secret" for name in released.passages}),
    ):
        with pytest.raises(PrivateDataError, match="is not in") as told:
            write_selection(swapped.only([True] * len(swapped)), tmp_path / "out", applied=[])
        assert "secret" not in str(told.value) and not (tmp_path / "out").exists()
