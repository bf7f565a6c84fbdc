"""Labels are differences of a cross-encoder's logits, the same whoever interrupts them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generator import PASSAGES, SETTINGS, generator, lines, write_parent_card
from tiny_tasks import retriever, trainer
from transformers import BertForSequenceClassification

from lit_dpret.callbacks.refusals import complaints
from lit_dpret.cards.card import card_sha256, read_card
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError, ResumeError, WorkerError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.negatives.drawn import LabelledNegatives, read_labels
from lit_dpret.privacy.modes import SyntheticData
from lit_dpret.retrieval.topk import TopK
from lit_dpret.retrieval.trec_runs import Ranking
from lit_dpret.synthesis.filters import (
    CrossEncoderScore,
    LanguageModelScore,
    ReleasedQueries,
    load_released,
    pair_scores,
)
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.pseudo_labels import LABELS, NEGATIVES, Labelling, label, mine
from lit_dpret.synthesis.writer import synthesize


class InOrder:
    encoder = "bm25"

    def rank(self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int) -> Ranking:
        indices = torch.arange(k).repeat(len(queries), 1)
        return Ranking(
            query_ids=list(queries), passage_ids=list(passages), top=TopK(torch.zeros(indices.shape), indices)
        )


def labelled(released: ReleasedQueries, out: Path, model: Path, progress: Any = None, **changes: Any) -> Path:
    settings: dict[str, Any] = {"depth": 6, "per_query": 2, "group_size": 4, "cross_encoder_is_public": True}
    how = Labelling(cross_encoder=model, **settings | changes)
    return label(released, out, how, ranker=InOrder(), progress=progress)


def test_a_label_is_the_difference_of_two_logits(
    released: ReleasedQueries, cross_encoder_folder: Path, tmp_path: Path
) -> None:
    out = labelled(released, tmp_path / "labels", cross_encoder_folder)
    found = read_labels(out / LABELS)
    assert len(found) == 2 * len(released)
    texts = {query.query_id: query.text for query in released}
    scorer = CrossEncoder.load(cross_encoder_folder)
    for one in found[::7]:
        own, other = scorer.score(
            [texts[one.query_id]] * 2, [released.passages[one.passage_id], released.passages[one.negative_id]]
        )
        assert one.margin == pytest.approx(own - other, abs=1e-4)
    sources = {query.query_id: query.passage_id for query in released}
    assert all(sources[one.query_id] == one.passage_id != one.negative_id for one in found)
    assert np.std([one.margin for one in found]) > 0.01
    for record in lines(out / NEGATIVES):
        assert record["pos"] == [sources[record["qid"]]]
        assert record["neg"] == {"bm25": [r.negative_id for r in found if r.query_id == record["qid"]]}


def refused(whole: Path, labels: Path, *, keep: Path | None = None) -> list[str]:
    """What is said of a file that carries another claim than the run's, before a retriever is trained."""
    source = LabelledNegatives(file=labels)
    module = retriever(privacy=SyntheticData(), loss=MarginMSELoss(), negatives=[source])
    found = complaints(trainer(max_steps=1), module, SyntheticDataModule(folder=whole, keep=keep))
    assert all(isinstance(error, ConfigurationError) for error in found), found
    return [str(error) for error in found if "model.negatives." in str(error) or "datamodule.keep" in str(error)]


@pytest.mark.costly
def test_labels_of_a_second_generators_queries_cannot_enter_under_the_claim_of_the_first(
    released: ReleasedQueries, whole: Path, cross_encoder_folder: Path, tmp_path: Path
) -> None:
    second = generator(seed=5).save_model(tmp_path / "second")
    write_parent_card(second)
    other = load_released(synthesize(second, PASSAGES, tmp_path / "other", **SETTINGS))
    own = labelled(released, tmp_path / "own", cross_encoder_folder) / LABELS
    foreign = labelled(other, tmp_path / "foreign", cross_encoder_folder) / LABELS
    card = read_card(own.parent)
    assert card["parents"][0]["sha256"] == card_sha256(whole) and set(card["subject"]["sha256"]) == {LABELS, NEGATIVES}
    assert card["claim"]["epsilon"] == read_card(whole)["claim"]["epsilon"]
    assert refused(whole, own) == []
    assert refused(whole, shutil.copy(own, tmp_path / "declared.tsv")) == []  # without a card it is as declared
    [told] = refused(whole, foreign)
    assert "model.negatives.labelled.file" in told and str(foreign) in told
    (foreign.parent / "ids").write_text("q")
    [told] = refused(whole, own, keep=foreign.parent / "ids")
    assert "datamodule.keep" in told


class Stop(Exception):
    pass


def test_a_run_that_was_stopped_goes_on_and_writes_the_same(
    released: ReleasedQueries, cross_encoder_folder: Path, tmp_path: Path
) -> None:
    whole = labelled(released, tmp_path / "whole", cross_encoder_folder)
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done >= 8:
            raise Stop

    with pytest.raises(Stop):
        labelled(released, tmp_path / "parts", cross_encoder_folder, progress=stop)
    assert told == [(4, len(released)), (8, len(released))]
    told.clear()
    labelled(released, tmp_path / "parts", cross_encoder_folder, progress=lambda *at: told.append(at))
    assert told[0] == (12, len(released))
    for name in (LABELS, NEGATIVES):
        assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(ResumeError, match="per_query=2"):
        labelled(released, tmp_path / "parts", cross_encoder_folder, per_query=3)
    other = tmp_path / cross_encoder_folder.name
    model = BertForSequenceClassification.from_pretrained(cross_encoder_folder)
    with torch.no_grad():
        model.classifier.weight.mul_(2)
    shutil.copytree(cross_encoder_folder, other)
    model.save_pretrained(other)
    with pytest.raises(ResumeError, match="sha256_of_cross_encoder"):
        labelled(released, tmp_path / "parts", other)


def test_negatives_are_drawn_evenly_from_the_first_passages_and_never_the_own_one(released: ReleasedQueries) -> None:
    names = list(released.passages)
    counts = dict.fromkeys(names, 0)
    for seed in range(200):
        for query, drawn in zip(
            released, mine(released, InOrder(), depth=5, per_query=2, seed=seed).values(), strict=True
        ):
            assert len(set(drawn)) == 2 and query.passage_id not in drawn
            for name in drawn:
                counts[name] += 1
    assert {name for name in names if counts[name]} == set(names[:6])  # the sixth where the own passage is among five
    others = [q for q in released if q.passage_id not in names[:6]]
    expected = 200 * 2 / 5 * len(others)
    assert all(counts[name] > 0.8 * expected for name in names[:5])


def test_private_data_and_undeclared_models_are_refused(
    released: ReleasedQueries, cross_encoder_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"query": "secret words", "passage": "a passage"}\n')
    with pytest.raises(PrivateDataError, match="PairsDataModule"):
        labelled(PairsDataModule(pairs=tmp_path / "pairs.jsonl"), tmp_path / "x", cross_encoder_folder)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^task\.cross_encoder=.* task\.cross_encoder_is_public=true"):
        labelled(released, tmp_path / "x", cross_encoder_folder, cross_encoder_is_public=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("margin", ["", "\tmuch", "\tnan", "\t1e300", "\t-inf"])
def test_a_malformed_label_is_refused_by_line(margin: str, tmp_path: Path) -> None:
    (tmp_path / "labels.tsv").write_text(f"q0\tp0\tp1\t0.5\nq1\tp1\tp2{margin}\n")
    with pytest.raises(DataError, match=r"labels.tsv line 2"):
        read_labels(tmp_path / "labels.tsv")
    with pytest.raises(DataError, match=r"model.negatives.labelled.file=.*no.tsv"):
        read_labels(tmp_path / "no.tsv")


# -- scores of pairs are the same whoever computes them


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_labels_and_filters_by_two_workers_are_those_of_one_process(
    released: ReleasedQueries, source: Path, cross_encoder_folder: Path, tmp_path: Path
) -> None:
    folders = [labelled(released, tmp_path / f"{n}", cross_encoder_folder, workers=n) for n in (0, 2)]
    for name in (LABELS, NEGATIVES):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    for make, model, declared in (
        (CrossEncoderScore, cross_encoder_folder, {"model_is_public": True}),
        (LanguageModelScore, source, {}),
    ):
        settings: Any = {"model": model, "keep_share": 1.0, "batch_size": 1, **declared}
        here, there = (make(workers=workers, **settings).choose(released)[0] for workers in (0, 2))
        assert len(here) > 16
        assert np.array_equal(here, there)


def test_workers_with_other_weights_under_the_name_and_a_device_that_is_not_here_are_refused(
    released: ReleasedQueries, cross_encoder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def two(*_: object, **__: object) -> Iterator[Any]:
        yield lambda pieces: ((at, np.zeros(len(asked)), f"weights {at % 32}") for at, asked, _ in pieces)

    monkeypatch.setattr(pair_scores, "ray_workers", two)
    settings: Any = {"model_is_public": True, "keep_share": 0.5, "batch_size": 1}
    with pytest.raises(WorkerError, match="not the same model"):
        CrossEncoderScore(cross_encoder_folder, workers=2, **settings).score(released)
    with pytest.raises(ConfigurationError, match="device=nowhere"):
        CrossEncoderScore(cross_encoder_folder, device="nowhere", **settings).score(released)
