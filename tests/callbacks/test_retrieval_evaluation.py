from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from cards import LAW, Run, make_plan
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from stand_ins import Numbers, Regression, dp, fit, records
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, RetrievalEvaluation, examine, retrieval_evaluation
from lit_dpret.cards.card import read_card, subject_of, verify_card, write_card
from lit_dpret.datamodules.collection import Collection
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, release_from_dict
from lit_dpret.privacy.ledger.run_ledger import charged_releases
from lit_dpret.privacy.modes import NoPrivacy, SyntheticData

LETTERS = "abcdefgh"


class Retriever(Regression):
    """Embeds a text by counts of letters; trains on something else altogether."""

    def encode_queries(self, texts: list[str]) -> Tensor:
        return torch.tensor([[float(text.count(letter)) for letter in LETTERS] for text in texts])

    encode_passages = encode_queries


class Judged(Numbers):
    """Three queries, of which the letters find the right passage for two; the third comes second."""

    def evaluation_set(self, split: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        assert split in ("dev", "train")
        return {"q1": "aa", "q2": "b", "q3": "c"}, {"q1": {"p1": 1}, "q2": {"p2": 1}, "q3": {"p3": 1}}

    def public_passages(self) -> dict[str, str]:
        return {"p1": "aaa", "p2": "bb", "p3": "c", "p4": "ccd"}


def retriever(tmp_path: Path, privacy: Any = None) -> Retriever:
    L.seed_everything(0, verbose=False)
    return Retriever(privacy=privacy or dp(tmp_path))


def run(tmp_path: Path, callback: RetrievalEvaluation, module: Any = None, data: Any = None, **more: Any) -> L.Trainer:
    folder = tmp_path / "run"
    extra = [callback, PrivacyCard(run_dir=folder)]
    return fit(folder, module or retriever(tmp_path), data or Judged(), extra=extra, **more)


def logged(tmp_path: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.slow
def test_metrics_of_public_queries_are_logged_on_time_and_the_claim_stands(tmp_path: Path) -> None:
    callback = RetrievalEvaluation(data="public", every_n_steps=4, metrics=["mrr@10", "success@1"])
    trainer = run(tmp_path, callback)
    assert logged(tmp_path, "val/mrr@10") == {4: pytest.approx(2.5 / 3), 6: pytest.approx(2.5 / 3)}
    assert trainer.callback_metrics["val/success@1"].item() == pytest.approx(2 / 3)
    card = read_card(tmp_path / "run" / "privacy_card.json")
    assert card["claim"]["guarantee"] == "dp" and card["claim"]["epsilon"] <= 3
    (said,) = [a for a in card["assumptions"] if "dev queries" in a["text"]]
    assert said["holds"] == "unverified" and "as declared" in said["text"] and "are public" in said["text"]


def test_metrics_of_private_queries_are_in_the_ledger_first_and_leave_no_epsilon_on_the_card(tmp_path: Path) -> None:
    written: list[int] = []

    class Watched(RetrievalEvaluation):
        def measure(self, module: Any) -> Any:
            events = [r for r in records(tmp_path / "run") if r.get("name") == "private_evaluation"]
            written.append(len(events))
            return super().measure(module)

    run(tmp_path, Watched(data="private", card_entry=True, every_n_steps=4, metrics=["mrr@10"]))
    assert written == [1, 2], "the event is on the disk before its metric is computed"
    events = [r for r in records(tmp_path / "run") if r.get("name") == "private_evaluation"]
    assert [event["at_step"] for event in events] == [4, 6]
    release = release_from_dict(events[0]["release"])
    assert release == NonPrivateRelease(label="mrr@10 of private dev queries")
    card = read_card(tmp_path / "run" / "privacy_card.json")
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    assert any("mrr@10 of private dev queries were logged during training, 2 times" in b for b in card["banners"])
    assert verify_card(card, tmp_path / "run" / "privacy_ledger.jsonl") == []
    assert len(charged_releases(records(tmp_path / "run"))) == 1, "the six steps are charged as ever"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "does not declare their kind"),
        ({"data": "private"}, r"callbacks\.evaluation\.card_entry=true, and the card will"),
        ({"data": "synthetic"}, "Judged reads data without a privacy card"),
    ],
)
def test_data_that_is_not_declared_is_refused_before_the_first_step(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        run(tmp_path, RetrievalEvaluation(**settings))
    assert refused.value.trap == "T25"
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_without_a_claim_nothing_has_to_be_declared(tmp_path: Path) -> None:
    run(tmp_path, RetrievalEvaluation(every_n_steps=6), retriever(tmp_path, NoPrivacy()))
    assert list(logged(tmp_path, "val/ndcg@10")) == [6]


@pytest.mark.costly
def test_a_run_is_the_same_with_and_without_evaluation(tmp_path: Path) -> None:
    states = []
    for name, extra in (("with", [RetrievalEvaluation(data="public", every_n_steps=1)]), ("without", [])):
        module = retriever(tmp_path, dp(tmp_path, noise_seed=3))
        fit(tmp_path / name, module, Judged(), extra=extra)
        states.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*states)


@pytest.mark.costly
def test_a_checkpoint_may_be_chosen_by_a_public_metric_and_by_no_private_one(tmp_path: Path) -> None:
    def best(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(dirpath=folder, monitor="val/mrr@10", mode="max", every_n_train_steps=2, filename="best")

    public = RetrievalEvaluation(data="public", every_n_steps=2, metrics=["mrr@10"])
    fit(tmp_path / "run", retriever(tmp_path), Judged(), extra=[public, best(tmp_path / "kept")])
    assert (tmp_path / "kept" / "best.ckpt").is_file()
    private = RetrievalEvaluation(data="private", card_entry=True, metrics=["mrr@10"])
    for choosing in (best(tmp_path / "other"), EarlyStopping(monitor="val/mrr@10")):
        with pytest.raises(ConfigurationError, match="by private data"):
            fit(tmp_path / "second", retriever(tmp_path), Judged(), extra=[private, choosing])


@pytest.mark.costly
def test_another_datamodule_and_fewer_queries_can_be_evaluated_on(tmp_path: Path) -> None:
    class Broken(Judged):
        def evaluation_set(self, split: str) -> Any:
            raise AssertionError("the run's own data is not to be looked at")

    callback = RetrievalEvaluation(data="public", datamodule=Judged(), max_queries=1, metrics=["success@1"])
    run(tmp_path, callback, data=Broken())
    assert callback.last is not None and callback.last.query_ids == ("q1",)
    assert callback.last.means == {"success@1": 1.0}


def test_the_queries_that_a_run_protects_are_not_public(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"callbacks\.evaluation\.split") as refusal:
        run(tmp_path, RetrievalEvaluation(data="public", split="train"))
    assert refusal.value.trap == "T25"


class Renamed(Judged):
    """Text data some of whose train queries are also those that `Judged` evaluates on, under other ids."""

    def __init__(self, trained: Sequence[str], evaluated: Sequence[str] = ("aa", "b", "c")) -> None:
        super().__init__()
        queries = {f"t{number}": text for number, text in enumerate(trained)}
        self.collection = Collection(passages={}, queries=queries, qrels={"train": {q: {"p1": 1} for q in queries}})
        self.evaluated = evaluated

    def evaluation_set(self, split: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        queries = {f"q{number}": text for number, text in enumerate(self.evaluated)}
        return queries, {query: {"p1": 1} for query in queries}


@pytest.mark.parametrize("unit", ["user", "query"])
def test_queries_of_the_users_that_a_run_protects_are_not_public(
    unit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = Renamed(["x", "y"])
    data.collection = replace(data.collection, users={"t0": "anna", "t1": "bert", "q0": "anna", "q1": "carl"})
    module = SimpleNamespace(privacy=SimpleNamespace(guarantee="dp", unit=unit))
    with pytest.raises(ConfigurationError, match="users") if unit == "user" else nullcontext():
        RetrievalEvaluation(data="public", split="dev").refuse_protected(module, data)
    monkeypatch.setattr(retrieval_evaluation, "training_behind", lambda folder, log: ("an earlier run", unit))
    with pytest.raises(ConfigurationError, match="users") if unit == "user" else nullcontext():
        RetrievalEvaluation(data="public", split="dev").refuse_queries_behind([tmp_path], data)


@pytest.mark.parametrize("other", [False, True], ids=["its own data", "the same queries in another DataModule"])
def test_train_queries_under_the_name_of_another_split_are_not_public(tmp_path: Path, other: bool) -> None:
    data = Renamed(["AA ", "x", "y"])
    callback = RetrievalEvaluation(data="public", datamodule=Judged() if other else None)
    with pytest.raises(ConfigurationError, match=r"callbacks\.evaluation\.split=dev") as refusal:
        run(tmp_path, callback, data=data)
    assert refusal.value.trap == "T25" and not (tmp_path / "run" / "privacy_ledger.jsonl").exists()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=6, logger=False, callbacks=[PrivacyAccountant(run_dir=tmp_path / "new"), callback]
    )
    found = examine(trainer, retriever(tmp_path), data)
    assert [finding.trap for finding in found.refused] == ["T25"], found.format()


def test_a_benchmark_may_share_a_common_query_with_the_log(tmp_path: Path) -> None:
    public = [f"a{number}" for number in range(10)]
    run(tmp_path, RetrievalEvaluation(data="public", every_n_steps=6), data=Renamed(["A0", "x"], public))
    assert list(logged(tmp_path, "val/ndcg@10")) == [6]


def test_judgements_of_unknown_passages_and_a_model_that_does_not_retrieve_are_refused(
    tmp_path: Path,
) -> None:
    class Unknown(Judged):
        def public_passages(self) -> dict[str, str]:
            return {"p1": "a"}

    with pytest.raises(DataError, match="unknown passage 'p2'"):
        run(tmp_path, RetrievalEvaluation(data="public"), data=Unknown())
    with pytest.raises(UnsupportedModelError, match="Regression lacks them"):
        run(tmp_path, RetrievalEvaluation(data="public"), Regression(privacy=dp(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "secret"}, "not one of public, synthetic, private"),
        ({"data": "public", "card_entry": True}, "card_entry=true is only for data=private"),
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"max_queries": 0}, "max_queries=0"),
        ({"metrics": ["ndcg@200"]}, "top_k=100 cannot compute"),
        ({"metrics": []}, "name at least one"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RetrievalEvaluation(**settings)


def test_the_doctor_tells_a_declared_leak_and_refuses_an_undeclared_one(tmp_path: Path) -> None:
    def statuses(callback: RetrievalEvaluation) -> dict[str, str]:
        accountant = PrivacyAccountant(run_dir=tmp_path / "doctor")
        trainer = L.Trainer(accelerator="cpu", max_steps=6, callbacks=[accountant, callback], logger=False)
        found = examine(trainer, retriever(tmp_path), Judged())
        return {finding.status: finding.text for finding in found.findings if finding.trap == "T25"}

    declared = statuses(RetrievalEvaluation(data="private", card_entry=True, metrics=["mrr@10"]))
    assert "mrr@10 of private dev queries" in declared["declared"]
    assert "uncounted release" in statuses(RetrievalEvaluation(data="private"))["refused"]


# -- data with a privacy card of its own ----------------------------------------------------------


class Made(Judged):
    """Synthetic queries whose folder has a card."""

    def __init__(self, folder: Path, evaluation: Any = None) -> None:
        super().__init__(sampling="shuffle")
        self.folder, self.evaluation = folder, evaluation

    @property
    def privacy_card_path(self) -> Path:
        return self.folder / "privacy_card.json"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "queries.jsonl").write_text("{}\n", encoding="utf-8")
    subject = subject_of("dataset", "synthetic queries", [folder / "queries.jsonl"], root=folder)
    ledger = Run(folder, make_plan(LAW)).train()
    write_card(ledger.card(subject=subject), folder)
    ledger.ledger.close()
    return folder


@pytest.mark.costly
def test_synthetic_queries_are_held_against_their_card(tmp_path: Path, made: Path) -> None:
    callback = RetrievalEvaluation(data="synthetic", split="train", datamodule=Made(made), every_n_steps=6)
    run(tmp_path, callback)
    assert list(logged(tmp_path, "val/ndcg@10")) == [6]
    (made / "queries.jsonl").write_text("{} \n", encoding="utf-8")
    with pytest.raises(DataError, match=r"not the file that privacy_card\.json describes"):
        callback.refuse_undeclared(retriever(tmp_path), None)


def test_a_checkpoint_is_chosen_by_synthetic_queries_only_where_the_run_claims_what_they_cost(
    tmp_path: Path, made: Path
) -> None:
    def choosing(**settings: Any) -> list[Any]:
        best = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val/mrr@10", mode="max", filename="best")
        return [RetrievalEvaluation(data="synthetic", split="train", metrics=["mrr@10"], **settings), best]

    with pytest.raises(ConfigurationError, match="by synthetic queries"):
        fit(tmp_path / "run", retriever(tmp_path), Judged(), extra=choosing(datamodule=Made(made)))
    other = choosing(datamodule=Made(made))
    with pytest.raises(ConfigurationError, match="by synthetic queries"):
        fit(tmp_path / "third", retriever(tmp_path, SyntheticData()), Made(made), extra=other)
    fit(tmp_path / "second", retriever(tmp_path, SyntheticData()), Made(made), extra=choosing())


class Looking(Retriever):
    """It shows a number of whatever its validation loader holds."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val/loss", 0.0)


@pytest.mark.parametrize("chooser", [ModelCheckpoint, EarlyStopping])
def test_a_run_under_an_inherited_claim_chooses_by_no_other_number_than_one_of_its_own_would(
    chooser: Any, tmp_path: Path, made: Path
) -> None:
    def begin(module: Any, name: str, *more: Any) -> None:
        folder = tmp_path / name.replace("/", " ")
        fit(folder, module, Made(made), steps=2, extra=[*more, chooser(monitor=name)])

    begin(retriever(tmp_path, SyntheticData()), "train/loss")
    for name, more in (("val/loss", []), ("val/mrr@10", [RetrievalEvaluation(data="private", card_entry=True)])):
        with pytest.raises(ConfigurationError, match=name) as raised:
            begin(retriever(tmp_path, SyntheticData()), name, *more)
        assert raised.value.trap == "T25"
    looking = retriever(tmp_path, SyntheticData())
    looking.__class__ = Looking
    with pytest.raises(ConfigurationError, match="validation_step") as raised:
        begin(looking, "train/loss")
    assert raised.value.trap == "T25"


def test_queries_with_a_privacy_card_are_not_taken_for_public_nor_real_ones_behind_them_for_synthetic(
    tmp_path: Path, made: Path
) -> None:
    real, module = Made(made, evaluation=Judged()), retriever(tmp_path)
    for data, split, behind in (("public", "train", Made(made)), ("synthetic", "dev", real)):
        callback = RetrievalEvaluation(data=data, split=split, datamodule=behind)
        with pytest.raises(ConfigurationError, match=f"data={data}|which holds real ones"):
            callback.refuse_undeclared(module, None)
    RetrievalEvaluation(data="public", datamodule=real).refuse_undeclared(module, None)


def test_training_on_synthetic_queries_inherits_nothing_once_private_metrics_were_let_out(
    tmp_path: Path, made: Path
) -> None:
    module = retriever(tmp_path, SyntheticData())
    with pytest.raises(ConfigurationError, match="does not declare their kind"):
        run(tmp_path, RetrievalEvaluation(), module, Made(made))
    run(tmp_path, RetrievalEvaluation(data="private", card_entry=True), module, Made(made))
    card = read_card(tmp_path / "run" / "privacy_card.json")
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    assert any("of private dev queries were logged" in banner for banner in card["banners"])
