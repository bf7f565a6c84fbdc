"""A module, a loss, a data set and an optimizer of a Lightning user's own, made private by `make_private`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting
import lightning as L
import numpy as np
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from jsonschema import Draft202012Validator
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lit_dpret import (
    OptimizerSpec,
    PrivacyAccountant,
    PrivacyCard,
    PrivateModule,
    UnitDataModule,
    assert_private,
    cards,
    make_private,
)  # fmt: skip
from lit_dpret.cards.card import write_card
from lit_dpret.cards.text import privacy_line, show_epsilon
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation, ResumeError, UnsupportedModelError
from lit_dpret.privacy.content import content_of
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD


class Classifier(L.LightningModule):
    """What a Lightning user has already; its training and validation step stay as they are."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *extra, nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("The step of the module itself knows no privacy.")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", row_loss(self, batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        return [optimizer], [{"scheduler": steps, "interval": "step", "frequency": 2}, {"scheduler": epochs}]


def row_loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def rows(count: int = 60) -> TensorDataset:
    coins = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=coins)
    return TensorDataset(x, x[:, :3].argmax(1))


def data(dataset: Any = None, **settings: Any) -> UnitDataModule:
    given = {"expected_batch_size": 20, "physical_batch_size": 16} | settings
    return UnitDataModule(rows() if dataset is None else dataset, **given)


def made(module: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {"per_row_loss": row_loss, "eps": 3.0, "noise_multiplier": 1.0}
    return make_private(module or Classifier(), **given | settings)


def fit(folder: Path, module: Any, datamodule: Any = None, *, ckpt_path: Any = None, **trainer: Any) -> L.Trainer:
    given: dict[str, Any] = {"max_steps": 6, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    found = L.Trainer(default_root_dir=folder, enable_model_summary=False, **given | trainer)
    found.fit(module, datamodule=datamodule or data(), ckpt_path=ckpt_path)
    return found


def card_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    return found


# -- what it guarantees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_unit", ["one", "all"])
def test_the_clipped_sum_is_that_of_a_loop_over_units(rows_per_unit: str, tmp_path: Path) -> None:
    model, clip = Classifier().double(), 0.3
    x, y = rows().tensors
    dataset = TensorDataset(x.double(), y)
    names = [f"u{row % 25}" for row in range(60)]
    seen: list[tuple[Any, dict[str, Tensor], dict[str, Tensor]]] = []
    private = made(model, max_grad_norm=clip)
    drawn: list[Any] = []
    contribute, take = private.privacy.contribute, private.privacy.take

    def note_batch(module: Any, batch: Any) -> None:
        drawn.append(batch)
        contribute(module, batch)

    def note_sum() -> dict[str, Tensor]:
        sums = take()
        if drawn:
            seen.append((list(drawn), sums, {n: p.detach().clone() for n, p in model.named_parameters()}))
            drawn.clear()
        return sums

    private.privacy.contribute, private.privacy.take = note_batch, note_sum
    datamodule = data(dataset, unit_of=names.__getitem__, expected_batch_size=10, rows_per_unit=rows_per_unit)
    fit(tmp_path, private, datamodule, precision="64-true", max_steps=3)
    assert len(seen) == 3
    for batches, sums, weights in seen:
        expected = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for batch in batches:
            for unit in range(len(batch.mask)):
                own = batch.unit_ids == unit
                assert rows_per_unit == "all" or int(own.sum()) <= 1
                if not bool(own.any()):
                    continue

                def loss(parameters: dict[str, Tensor], batch: Any = batch, own: Tensor = own) -> Tensor:
                    logits = torch.func.functional_call(model, parameters, (batch.rows[0][own],))
                    return F.cross_entropy(logits, batch.rows[1][own])

                gradient = torch.func.grad(loss)(weights)
                norm = torch.sqrt(sum(g.square().sum() for g in gradient.values()))
                for name, part in gradient.items():
                    expected[name] += part * min(1.0, clip / float(norm))
        for name, weight in expected.items():
            torch.testing.assert_close(sums[f"module.{name}"], weight, rtol=1e-6, atol=1e-9)


def test_a_fit_ends_with_a_card_of_the_epsilon_that_another_accountant_finds(tmp_path: Path) -> None:
    private = make_private(Classifier(), per_row_loss=row_loss, eps=3)
    fit(tmp_path, private, data(sampling="poisson"))
    card = card_in(tmp_path)
    step = dp_accounting.PoissonSampledDpEvent(
        20 / 60,
        dp_accounting.GaussianDpEvent(
            PrivacyLedger.read(tmp_path / "privacy_ledger.jsonl").records[0]["plan"]["noise_multiplier"]
        ),
    )
    claim = card["claim"]
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    other = accountant.compose(step, 6).get_epsilon(claim["delta"])
    assert claim["unit"] == "record" and claim["delta"] == pytest.approx(1 / 120)
    assert claim["epsilon"] == pytest.approx(other, rel=1e-3) and 2.5 < claim["epsilon"] <= 3
    assert card["mechanism"]["optimizer"] == "SGD"
    assert not verify_chain(tmp_path).failed


def test_the_card_calls_a_unit_what_its_owner_calls_it_and_a_resume_cannot_change_that(tmp_path: Path) -> None:
    users = [f"u{row // 2}" for row in range(60)]
    fit(tmp_path, made(), grouped("user"), max_steps=1)
    card = card_in(tmp_path)
    claim = card["claim"]
    assert claim["unit"] == "record" and claim["unit_name"] == "user" and claim["unit_plural"] == "users"
    assert "unit = user, " in privacy_line(card) and "one user was clipped" in claim["statement"]
    assert not re.search(r"\brecords?\b", " ".join(card["not_covered"]))
    assert claim["user_level_epsilon"] == claim["epsilon"]  # all rows of a user are one unit
    assert any("unit_of" in str(taken) for taken in card["assumptions"])
    schema = Path(cards.__file__).with_name("privacy_card.schema.json").read_text(encoding="utf-8")
    Draft202012Validator(json.loads(schema)).validate(card)
    assert not verify_chain(tmp_path).failed
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name("copy")))
    write_card(card | {"claim": claim | {"unit_name": "team"}}, copy)
    assert verify_chain(copy).failed
    other = data(unit_of=users.__getitem__, unit_name="team", expected_batch_size=10)
    with pytest.raises(ResumeError, match="unit_name"):
        fit(tmp_path, made(), other, max_steps=1, callbacks=[PrivacyAccountant(resume=True)])


@pytest.mark.parametrize(
    "settings",
    [{"unit_name": "user"}, *({"unit_of": str, "unit_name": name} for name in ("A user (public)", "query", "pair"))],
)
def test_a_name_of_units_that_are_rows_or_that_is_no_word_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="unit_name"):
        data(**settings)


def test_a_bound_on_the_units_of_a_user_contradicts_units_that_are_users(tmp_path: Path) -> None:
    users = data(unit_of=lambda row: row // 2, unit_name="user", expected_batch_size=10)
    with pytest.raises(ConfigurationError, match="max_units_per_user"):
        fit(tmp_path, made(max_units_per_user=3), users, max_steps=1)


def grouped(by: str | None) -> UnitDataModule:
    """Return 60 rows of 30 users: each a unit of its own, or all rows of a user one, with that name or unnamed."""
    if by is None:
        return data(expected_batch_size=10)
    return data(unit_of=lambda row: f"u{row // 2}", unit_name=by or None, expected_batch_size=10)


@pytest.mark.parametrize("by", ["user", None])
def test_a_chain_of_runs_is_about_users_if_every_run_declares_them(by: str | None, tmp_path: Path) -> None:
    module, before = Classifier(), {}
    for run in range(3):
        callbacks = [PrivacyAccountant(**before)]
        fit(tmp_path / str(run), made(module, delta=1e-3), grouped(by), max_steps=1, callbacks=callbacks)
        before = {"init_from": tmp_path / str(run)}
    card = card_in(tmp_path / "2")
    claim, told = card["claim"], by or "record"
    assert f"unit = {told}, " in privacy_line(card) and claim["unit_plural"] == f"{told}s"
    assert claim["user_level_epsilon"] == (claim["epsilon"] if by else None)
    assert not re.search(r"\ban (user|record)\b", json.dumps(card))
    assert any("at most one" in str(taken) for taken in card["assumptions"])
    assert not verify_chain(tmp_path / "2").failed


OTHER_UNITS = [(None, "user"), ("user", None), ("user", "team"), ("user", ""), ("", "user"), ("", None), ("", "")]


@pytest.mark.parametrize(("first", "then"), OTHER_UNITS)
def test_a_run_does_not_start_from_a_run_whose_units_may_be_parts_of_its_own(
    first: str | None, then: str | None, tmp_path: Path
) -> None:
    module = Classifier()
    fit(tmp_path / "1", made(module, delta=1e-3), grouped(first), max_steps=1)
    with pytest.raises(ConfigurationError, match="unit_name"):
        before = PrivacyAccountant(init_from=tmp_path / "1")
        fit(tmp_path / "2", made(module, delta=1e-3), grouped(then), max_steps=1, callbacks=[before])
    assert not (tmp_path / "2" / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize(("first", "then"), [units for units in OTHER_UNITS if units[0] != ""])
def test_a_ledger_of_a_data_set_adds_up_no_runs_whose_units_may_be_parts_of_others(
    first: str | None, then: str | None, tmp_path: Path
) -> None:
    ledger = {"dataset_ledger": tmp_path / "spent.jsonl", "total_eps": 20.0, "delta": 1e-3}
    for run in "12":
        fit(tmp_path / run, made(**ledger), grouped(first), max_steps=1)
    spent = (tmp_path / "spent.jsonl").read_bytes()
    with pytest.raises(ConfigurationError, match="unit_name"):
        fit(tmp_path / "3", made(**ledger), grouped(then), max_steps=1)
    assert (tmp_path / "spent.jsonl").read_bytes() == spent


def test_a_ledger_of_a_data_set_is_not_begun_by_a_run_whose_units_nobody_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unit_name"):
        fit(tmp_path / "1", made(dataset_ledger=tmp_path / "spent.jsonl", total_eps=9.0), grouped(""), max_steps=1)
    assert not (tmp_path / "spent.jsonl").exists()


def test_a_name_that_was_set_past_the_constructor_makes_no_claim_about_it(tmp_path: Path) -> None:
    rows_alone = data()
    rows_alone.unit_name = "user"
    fit(tmp_path, made(), rows_alone, max_steps=1)
    claim = card_in(tmp_path)["claim"]
    assert "unit_name" not in claim and claim["user_level_epsilon"] is None


@pytest.mark.parametrize("delta", [None, 1e-5])
def test_a_large_delta_is_cautioned_of_before_the_first_step_and_on_the_card(
    delta: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_dpret.errors.on_command_line", False)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=logger.name), contextlib.ExitStack() as undo:
        logger.addHandler(caplog.handler)
        undo.callback(logger.removeHandler, caplog.handler)
        fit(tmp_path, made(delta=delta, noise_multiplier=None), max_steps=1)
    told = [one.getMessage() for one in caplog.records if "delta=1e-05" in one.getMessage()]
    cautions = [one for one in card_in(tmp_path)["cautions"] if one.startswith("delta = ")]
    assert bool(told) is bool(cautions) is (delta is None)
    if delta is None:
        at_that = dict(map(reversed, card_in(tmp_path)["claim"]["curve"]))[1e-5]
        assert f"1e-05, at which epsilon is {show_epsilon(at_that)}" in cautions[0] and "privacy." not in told[0]
        assert cautions[0] in (tmp_path / "privacy_card.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("eps", [3, 21])
def test_a_large_epsilon_is_warned_of_before_the_first_step(
    eps: float, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    fit(tmp_path, made(eps=eps), max_steps=1)
    assert sum(f"eps={eps} is large" in str(one.message) for one in recwarn) == (eps > 20)


def test_a_vowel_is_named_with_its_article(tmp_path: Path) -> None:
    fit(tmp_path, made(), data(unit_of=lambda row: row // 2, unit_name="account", expected_batch_size=10), max_steps=1)
    assert not re.search(r"\ba account\b", json.dumps(card_in(tmp_path)))


class Compares(L.Callback):
    """Scores the model of an earlier run on public rows when training has ended."""

    def __init__(self, earlier: Any) -> None:
        self.earlier = earlier

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.earlier(torch.zeros(2, 4))


def test_a_model_of_an_earlier_run_may_be_compared_with_when_training_has_ended(tmp_path: Path) -> None:
    earlier = Classifier()
    fit(tmp_path / "first", made(earlier), max_steps=1)
    fit(tmp_path / "second", made(), max_steps=1, callbacks=[PrivacyAccountant(), PrivacyCard(), Compares(earlier.net)])
    assert (tmp_path / "second" / "privacy_card.json").exists()


class Predicts(PrivateModule):
    """A private module that is only asked."""

    def predict_step(self, batch: Any) -> Tensor:
        found: Tensor = batch[0].sum(1)
        return found


@pytest.mark.parametrize("loss", [lambda model, batch: None, lambda model, batch: list(row_loss(model, batch))])
def test_a_loss_that_is_no_tensor_is_refused_before_its_first_release(loss: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="per_row_loss"):
        fit(tmp_path, made(per_row_loss=loss))
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("setting", ["gradient_clip_val", "accumulate_grad_batches"])
def test_what_only_training_cannot_have_is_no_matter_for_prediction(setting: str, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    runner = L.Trainer(accelerator="cpu", enable_progress_bar=False, **quiet, **{setting: 2})
    runner.predict(Predicts(privacy=DPSGD(eps=3)), DataLoader(rows(8), 8))


def test_the_trained_weights_lie_beside_the_card_and_in_the_module_itself(tmp_path: Path) -> None:
    model = Classifier()
    before = model.net[0].weight.detach().clone()
    fit(tmp_path, made(model))
    saved = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    fresh = Classifier()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.net[0].weight, model.net[0].weight) and not torch.equal(before, model.net[0].weight)
    assert not verify_chain(tmp_path / "model").failed


def test_its_step_keeps_the_promise() -> None:
    x, y = rows(6).tensors
    private = made()
    assert_private(private, {0: x, 1: (y + 1) % 3}, eps=1.0, delta=1e-5)


@pytest.mark.parametrize(
    ("loss", "property_of_it"),
    [
        (lambda model, batch: row_loss(model, batch) / len(batch[1]), "independence"),
        (lambda model, batch: row_loss(model, batch).detach(), "step"),
        (lambda model, batch: row_loss(model, batch) - row_loss(model, batch).mean(), "independence"),
    ],
)
def test_a_step_that_breaks_the_promise_is_told_by_its_property_at_the_line_of_the_test(
    loss: Any, property_of_it: str
) -> None:
    with pytest.raises(PrivacyViolation) as found:
        assert_private(made(per_row_loss=loss), [rows(6)[row] for row in range(6)], eps=1.0, delta=1e-5)
    told = str(found.value)
    assert told.startswith(f"{property_of_it}: ") and "collate_rows" not in told and "coupled_loss" not in told
    shown = found.traceback.filter(found)
    assert [Path(entry.path) for entry in shown] == [Path(__file__)] and found.value.__suppress_context__


# -- what is the user's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["truncated_poisson", "poisson"])
def test_the_optimizer_and_schedules_of_the_module_are_used_at_their_intervals(sampling: str, tmp_path: Path) -> None:
    trainer = fit(tmp_path, made(), data(sampling=sampling))  # three steps make an epoch
    assert type(trainer.optimizers[0]) is torch.optim.SGD
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**3 * 0.1**2)


def test_a_plain_module_takes_an_optimizer_by_name_or_is_refused(tmp_path: Path) -> None:
    net = Classifier().net
    with pytest.raises(ConfigurationError, match="optimizer="):
        made(net)
    trainer = fit(tmp_path, made(net, optimizer=OptimizerSpec(name="sgd", lr=0.5)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_items_of_dicts_and_of_lone_tensors_reach_the_loss_as_the_collation_makes_them(tmp_path: Path) -> None:
    x, y = rows().tensors

    def of_dict(model: Any, batch: Any) -> Tensor:
        assert isinstance(batch["in"], list | tuple) and batch["in"][0].shape[1] == 4
        return row_loss(model, (batch["in"][0], batch["label"]))

    dicts = [{"in": (a,), "label": b} for a, b in zip(x, y, strict=True)]
    fit(tmp_path / "dict", made(per_row_loss=of_dict), data(dicts))
    lone = made(per_row_loss=lambda model, batch: model(batch).square().sum(1))
    fit(tmp_path / "lone", lone, data(list(x)))


def test_a_checkpoint_of_ones_own_callback_goes_on_with_the_ledger(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    whole = Classifier()
    fit(tmp_path / "run", made(whole), callbacks=[kept])
    fit(tmp_path / "other", made(), max_steps=1)
    resumed = [PrivacyAccountant(resume=True)]
    (path,) = (tmp_path / "kept").glob("*step=4.ckpt")
    model = Classifier()
    fit(tmp_path / "run", made(model), callbacks=resumed, ckpt_path=path)
    assert torch.equal(model.net[0].weight, whole.net[0].weight)
    with pytest.raises(ResumeError):
        fit(tmp_path / "run", made())


def test_a_resume_without_its_checkpoint_is_refused_before_a_step_is_charged_again(tmp_path: Path) -> None:
    fit(tmp_path, made(), max_steps=1)
    before = (tmp_path / "privacy_ledger.jsonl").read_text().count('"intent"')
    with pytest.raises(ResumeError, match="ckpt_path") as found:
        fit(tmp_path, made(), max_steps=1, callbacks=[PrivacyAccountant(resume=True)])
    (path,) = tmp_path.rglob("*.ckpt")
    assert str(path) in str(found.value)
    assert (tmp_path / "privacy_ledger.jsonl").read_text().count('"intent"') == before
    path.unlink()  # as after a crash before the first one
    fit(tmp_path, made(), max_steps=1, callbacks=[PrivacyAccountant(resume=True)])


def test_a_resume_in_a_folder_of_other_runs_leaves_their_checkpoints_alone(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    fit(tmp_path, made(), max_steps=1)
    other = tmp_path / "other" / "checkpoints"
    other.mkdir(parents=True)
    for name in (".last.ckpt.tmp", "theirs.ckpt"):
        (other / name).write_bytes(b"another process writes this")
    with pytest.raises(ResumeError, match="ckpt_path"):
        fit(tmp_path, made(), max_steps=1, callbacks=[PrivacyAccountant(resume=True)])
    assert len(list(other.iterdir())) == 2 and not [one for one in recwarn if "theirs" in str(one.message)]


def test_weights_are_not_written_among_files_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").write_text("code = 1\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="run_dir"):
        fit(tmp_path, made(), max_steps=1)
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text(encoding="utf-8")


class Validation(L.Callback):
    """A validation loss of public rows, every two steps."""

    public_metrics = ("val_loss",)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.last and (batch.step + 1) % 2 == 0:
            with torch.no_grad():
                self.log("val_loss", row_loss(pl_module.module, rows(8).tensors).mean())


def test_the_best_checkpoint_by_a_public_validation_loss_is_kept(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", every_n_train_steps=2)
    with pytest.raises(ConfigurationError, match="public_metrics") as found:
        fit(tmp_path / "undeclared", made(), callbacks=[kept])
    assert found.value.trap == "T25"
    trainer = fit(tmp_path / "run", made(), callbacks=[Validation(), kept, EarlyStopping("val_loss", patience=9)])
    assert kept.best_model_score == min(kept.best_k_models.values())
    assert "val_loss" in trainer.callback_metrics and card_in(tmp_path / "run")["claim"]["guarantee"] == "dp"


def of_own_negatives(model: Any, batch: Any) -> Tensor:
    scores = torch.einsum("rd,rkd->rk", model(batch[0]), model(batch[1]))
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long), reduction="none")


def of_in_batch_negatives(model: Any, batch: Any) -> Tensor:
    scores = model(batch[0]) @ model(batch[1][:, 0]).T
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


def test_a_contrastive_loss_is_private_with_negatives_of_the_row_and_refused_with_those_of_the_batch(
    tmp_path: Path,
) -> None:
    dataset = TensorDataset(torch.randn(60, 4), torch.randn(60, 3, 4))
    fit(tmp_path / "own", made(per_row_loss=of_own_negatives), data(dataset), max_steps=1)
    with pytest.raises(UnsupportedModelError):
        fit(tmp_path / "batch", made(per_row_loss=of_in_batch_negatives), data(dataset), max_steps=1)
    assert '"intent"' not in (tmp_path / "batch" / "privacy_ledger.jsonl").read_text()


def test_callbacks_that_the_trainer_has_are_not_added_again(tmp_path: Path) -> None:
    own = [PrivacyAccountant(eps_log_points=1), PrivacyCard(run_dir=tmp_path / "cards")]
    trainer = fit(tmp_path / "run", made(), callbacks=list(own), enable_checkpointing=False)
    assert [c for c in trainer.callbacks if isinstance(c, (PrivacyAccountant, PrivacyCard))] == own  # type: ignore[attr-defined]
    assert card_in(tmp_path / "cards")["claim"]["epsilon"] > 0


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": torch.optim.SGD}, "OptimizerSpec"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "OptimizerSpec"),
        ({"batch_size": 32}, "expected_batch_size"),
        ({"resume": True}, "PrivacyAccountant"),
        ({"epsilon": 3}, "delta"),
        ({"per_row_loss": None}, "per_row_loss"),
        ({"collate_fn": None}, "collate_fn"),
        ({"module": Classifier}, "module"),
        ({"per_row_loss": lambda batch: batch}, "per_row_loss"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_an_argument_that_is_no_such_thing_is_refused_at_once(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        made(**given)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: make_private(Classifier(), eps=3), "per_row_loss"),  # type: ignore[call-arg]
        (lambda: make_private(Classifier(), per_row_loss=row_loss), "eps"),  # type: ignore[call-arg]
        (lambda: make_private(eps=3, per_row_loss=row_loss), "module"),  # type: ignore[call-arg]
        (lambda: make_private(Classifier(), row_loss, eps=3), "per_row_loss"),  # type: ignore[misc, call-arg]
        (lambda: data(collate_fn=list), "make_private"),
        (lambda: data(batch_size=16), "expected_batch_size"),
        (lambda: data(shuffle=True), "sampling"),
        (lambda: data(user_of=len), "unit_of"),
        (lambda: data(unit_of=["a"] * 60), "unit_of"),
        (lambda: UnitDataModule(expected_batch_size=10), "dataset"),  # type: ignore[call-arg]
        (lambda: UnitDataModule(rows(), len, expected_batch_size=10), "unit_of"),  # type: ignore[misc]
        (lambda: PrivateModule(), "privacy"),  # type: ignore[call-arg]
        (lambda: PrivateModule(privacy=DPSGD(eps=3), per_row_loss=row_loss), "per_row_loss"),  # type: ignore[call-arg]
    ],
)
def test_an_argument_that_is_missing_unknown_or_elsewhere_is_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()


class WithoutALoss(PrivateModule):
    def __init__(self) -> None:
        super().__init__(privacy=DPSGD(eps=3.0, unit="record"), optimizer=OptimizerSpec(name="sgd", lr=0.1))
        self.net = nn.Linear(4, 3)

    def collate_rows(self, rows: Any) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in rows])}


def test_a_private_module_without_a_loss_is_refused_before_its_first_release(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="per_row_loss"):
        fit(tmp_path, WithoutALoss(), callbacks=[PrivacyAccountant(), PrivacyCard()])
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("setting", ["gradient_clip_val", "accumulate_grad_batches"])
def test_sums_that_lightning_would_clip_or_add_up_are_refused_by_what_does_it_here(
    setting: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"max_grad_norm|physical_batch_size"):
        fit(tmp_path, made(), **{setting: 2})


def test_a_loss_that_logs_itself_is_refused_as_a_release(tmp_path: Path) -> None:
    def logging(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        model.log("train_loss", losses.mean())
        return losses

    with pytest.raises(ConfigurationError, match="per_row_loss") as found:
        fit(tmp_path, made(per_row_loss=logging))
    assert found.value.trap == "T25"


@pytest.mark.parametrize("asked", ["validate", "test", "predict"])
def test_the_wrapper_is_trained_and_the_module_inside_is_measured(asked: str) -> None:
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_model_summary=False)
    with pytest.raises(UnsupportedModelError, match=rf"trainer\.{asked}\(private\.module"):
        getattr(trainer, asked)(made(), DataLoader(rows(), 8))


def coupled(model: Any, batch: Any) -> Tensor:
    loss = row_loss(model, batch)
    return loss - loss.mean()


@pytest.mark.parametrize("loss", [coupled, lambda model, batch: row_loss(model, batch).mean()], ids=["coupled", "mean"])
def test_a_loss_that_couples_rows_is_refused_before_a_release(loss: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="row"):
        fit(tmp_path, made(per_row_loss=loss))
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text()


def test_a_loader_of_ones_own_is_refused_for_a_data_module(tmp_path: Path) -> None:
    trainer = L.Trainer(default_root_dir=tmp_path, max_steps=1, logger=False, accelerator="cpu")
    with pytest.raises(ConfigurationError, match="datamodule=") as found:
        trainer.fit(made(), DataLoader(rows(), 20))
    assert found.value.trap == "T1"


def test_hooks_that_nobody_would_call_are_refused_by_name() -> None:
    class Hooked(Classifier):
        def on_train_epoch_end(self) -> None: ...

    with pytest.raises(UnsupportedModelError, match="on_train_epoch_end"):
        made(Hooked())


def test_what_is_private_already_is_not_wrapped() -> None:
    with pytest.raises(UnsupportedModelError, match="PrivateModule"):
        made(made())


def test_weights_of_an_earlier_fit_are_not_forgotten(tmp_path: Path) -> None:
    model = Classifier()
    fit(tmp_path / "first", made(model))
    with pytest.raises(ConfigurationError, match="init_from"):
        fit(tmp_path / "second", made(model))


def test_weights_that_a_trainer_has_trained_before_have_to_be_declared(tmp_path: Path) -> None:
    class Trained(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return row_loss(self, batch).mean()

    model = Trained()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=2, enable_progress_bar=False, accelerator="cpu", **quiet)
    trainer.fit(model, DataLoader(rows(), 8))
    L.Trainer(enable_progress_bar=False, accelerator="cpu", **quiet).validate(
        model, DataLoader(rows(), 8), verbose=False
    )
    with pytest.raises(ConfigurationError, match="init_from_is_public"):
        fit(tmp_path / "part", made(model.net, optimizer=OptimizerSpec(lr=0.1)))
    with pytest.raises(ConfigurationError, match="init_from_is_public"):
        fit(tmp_path / "second", made(model))
    fit(tmp_path / "third", made(model), callbacks=[PrivacyAccountant(init_from_is_public=True)])
    assert any("init_from_is_public" in text for text in map(str, card_in(tmp_path / "third")["assumptions"]))


def test_values_that_are_no_tensors_of_rows_are_refused_by_the_collation(tmp_path: Path) -> None:
    texts = [{"text": f"t{i}", "label": i % 3} for i in range(60)]
    with pytest.raises(UnsupportedModelError, match="collate_fn"):
        fit(tmp_path, made(), data(texts))


# -- units of a data set of one's own --------------------------------------------------------------------------


def test_rows_of_one_name_are_one_unit_and_rows_without_names_are_units_themselves() -> None:
    grouped = data([10, 11, 12, 13], unit_of=["a", "b", "a", "a"].__getitem__)
    grouped.use_unit("record")
    units = grouped.train_units()
    assert [list(units.rows(unit)) for unit in range(len(units))] == [[10, 12, 13], [11]]
    single = data([10, 11])
    single.use_unit("record")
    assert single.n_units == 2 and list(single.train_units().rows(1)) == [11]


def test_another_row_name_or_order_is_another_fingerprint() -> None:
    x, y = rows(6).tensors
    key = b"k" * 32
    whole = data(TensorDataset(x, y)).data_fingerprint(key)
    assert data(TensorDataset(x.clone(), y.clone())).data_fingerprint(key) == whole
    others = [
        data(TensorDataset(x.flip(0), y.flip(0))), data(TensorDataset(x, 1 - y)), data(TensorDataset(x.double(), y)),
        data(TensorDataset(x[:5], y[:5])), data(TensorDataset(x, y), unit_of=lambda row: row // 2),
        data(TensorDataset(x.view(6, 2, 2), y)),
    ]  # fmt: skip
    found = {other.data_fingerprint(key) for other in others}
    assert whole not in found and len(found) == len(others)
    assert data(TensorDataset(x, y)).data_fingerprint(b"l" * 32) != whole


def test_the_order_of_a_set_is_no_part_of_the_fingerprint() -> None:
    one, other = set([0, 8]), set([8, 0])
    assert list(one) != list(other) and content_of(one) == content_of(other)


def test_random_augmentations_leave_the_fingerprint_and_the_generators_alone() -> None:
    class Augmented(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, row: int) -> Tensor:
            return torch.rand(2)

    before = torch.get_rng_state()
    assert data(Augmented()).data_fingerprint(b"k") == data(Augmented()).data_fingerprint(b"k")
    assert torch.equal(before, torch.get_rng_state())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), (row for row in range(3)), []], ids=["iterable", "generator", "empty"])
def test_data_without_rows_that_can_be_counted_and_drawn_are_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match="dataset"):
        data(dataset)


@pytest.mark.parametrize(
    "name", [lambda row: {}[row], lambda row: torch.tensor([1, 2]), lambda row: None, lambda row: 0.5]
)
def test_a_function_that_names_no_unit_is_refused_with_the_row(name: Any) -> None:
    with pytest.raises(DataError, match=r"unit_of\(0\)"):
        data(unit_of=name).n_units  # noqa: B018


class Table:
    """Looks names up by labels, as a ``pandas.Series``."""

    iloc = ()

    def __init__(self, labels: list[int]) -> None:
        self.index = labels

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, label: int) -> str:
        return f"user {label}"


@pytest.mark.parametrize(
    "names", [Table([*range(1, 60), 0]), Table([*range(61)])], ids=["shuffled", "longer"]
)  # fmt: skip
def test_names_of_another_table_are_refused(names: Any) -> None:
    with pytest.raises(DataError, match="unit_of"):
        data(unit_of=names.__getitem__)


def test_a_table_in_its_own_order_names_its_rows() -> None:
    assert data(unit_of=Table([*range(60)]).__getitem__).n_units == 60


def test_a_number_in_a_tensor_is_the_name_that_it_holds() -> None:
    assert data(unit_of=(torch.arange(60) // 2).__getitem__).n_units == 30


def test_other_units_than_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unit"):
        fit(tmp_path, made(unit="user"))


def test_a_data_set_that_remembers_is_refused(tmp_path: Path) -> None:
    class Remembering(Dataset[Any]):
        last = 0

        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> Any:
            self.last, before = row, self.last
            return torch.full((4,), float(before)), row % 3

    with pytest.raises(DataError):
        fit(tmp_path, made(), data(Remembering()))


def loaded(net: Any) -> Classifier:
    other = Classifier()
    other.load_state_dict(net.state_dict())
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
def test_a_copy_of_what_an_optimizer_trained_here_is_refused_as_the_original_is(tmp_path: Path, copied: Any) -> None:
    trained = Classifier()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    row_loss(trained, rows().tensors).mean().backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match="init_from_is_public"):
        fit(tmp_path / "copy", made(copied(trained)))
    with pytest.raises(ConfigurationError, match="init_from_is_public"):
        fit(tmp_path / "original", made(trained))
    fit(tmp_path / "other", made(Classifier()), max_steps=1)
    assert "assumed" in card_in(tmp_path / "other")["pretraining"]["start"]


def test_a_card_alone_gets_an_accountant_before_it(tmp_path: Path) -> None:
    fit(tmp_path / "run", made(), max_steps=1, callbacks=[PrivacyCard(tuning_data="public")])
    assert card_in(tmp_path / "run")["tuning"]["data"] == "public"
    with pytest.raises(ConfigurationError, match="tuning_data"):
        PrivacyCard(tuning_data="dev")


def test_callbacks_that_are_given_to_two_trainers_work_in_the_folder_of_each(tmp_path: Path) -> None:
    watching = [PrivacyAccountant(), PrivacyCard()]
    for name in ("one", "two"):
        fit(tmp_path / name, made(), max_steps=1, callbacks=watching)
    for name in ("one", "two"):
        assert (tmp_path / name / "privacy_ledger.jsonl").is_file() and card_in(tmp_path / name)["claim"]["epsilon"]


class Words(Dataset[Any]):
    """Numbers words by their first occurrence."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        return torch.full((4,), float(self.known.setdefault(f"word {row % 7}", len(self.known)))), row % 3


def test_rows_made_by_a_vocabulary_that_grows_are_refused_and_those_of_a_cache_are_not(tmp_path: Path) -> None:
    words, first = Words(), {}

    def collate(given: list[Any]) -> Any:
        numbers = [first.setdefault(float(x[0]), len(first)) for x, _ in given]
        return torch.tensor(numbers)[:, None].float().expand(-1, 4), torch.tensor([y for _, y in given])

    with pytest.raises(DataError):
        fit(tmp_path / "rows", made(), data(words))
    assert not words.known, "as it was"
    with pytest.raises(UnsupportedModelError, match="collate_rows"):
        fit(tmp_path / "batch", made(collate_fn=collate))
    cache: dict[int, Any] = {}

    class Cached(Words):
        def __getitem__(self, row: int) -> Any:
            return cache.setdefault(row, (torch.full((4,), row / 60), row % 3))

    fit(tmp_path / "cache", made(), data(Cached()), max_steps=1)


@pytest.mark.parametrize("kind", ["loss", "count"])
def test_a_module_that_counts_rows_is_refused_and_one_that_counts_calls_is_not(tmp_path: Path, kind: str) -> None:
    class Warm(Classifier):
        seen, calls, last = 0, 0, 0

    def loss(model: Any, batch: Any) -> Tensor:
        model.calls, model.last = model.calls + 1, len(batch[1])
        share = min(1.0, model.seen / 1000) if kind == "loss" else float(model.seen > 10**6)
        model.seen += len(batch[1]) if counts else 0
        return row_loss(model, batch) * (1 + share)

    for counts in (True, False):
        module = make_private(Warm(), per_row_loss=loss, eps=3, delta=1e-3)
        if counts:
            with pytest.raises(UnsupportedModelError, match="keeps of one batch"):
                fit(tmp_path / "counts", module)
        else:
            fit(tmp_path / "plain", module, max_steps=2)


class Fresh(Dataset[Any]):
    """Makes every row when it is asked for, as most data sets do."""

    def __init__(self, change: Any) -> None:
        self.rows, self.change = rows().tensors, change

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows
        return self.change(x[row]), int(y[row])


@pytest.mark.parametrize(
    "change", [lambda x: torch.tensor(x.tolist()), lambda x: x / 2, lambda x: x + 0.01 * torch.randn(4)],
    ids=["made", "computed", "augmented"],
)  # fmt: skip
def test_rows_that_are_made_when_they_are_asked_for_are_no_memory(change: Any, tmp_path: Path) -> None:
    for turn in range(3):  # where a tensor lies in memory is a matter of luck
        fit(tmp_path / str(turn), made(), data(Fresh(change)), max_steps=1)


@dataclass
class Row:
    x: Tensor
    tags: frozenset[str]


def test_equal_rows_of_any_kind_have_one_content_and_others_another_one() -> None:
    row = Row(torch.ones(3), frozenset({"a", "bb"}))
    word = "abc"
    assert content_of(row) == content_of(Row(torch.ones(6)[::2], frozenset({"bb", "a"})))
    assert content_of((word, word)) == content_of((word, "".join(["a", "bc"])))
    others = [row, Row(torch.zeros(3), row.tags), Row(torch.ones(3).double(), row.tags), Row(row.x, frozenset()),
              [[1], 2], [1, [2]], torch.ones(3).bfloat16(), torch.empty(0, 3), torch.empty(0, 4), np.ones(3),
              "1", 1]  # fmt: skip
    assert len({content_of(other) for other in others}) == len(others)


def test_rows_that_hold_themselves_have_a_content_too() -> None:
    def ring(value: float) -> list[Any]:
        found: list[Any] = [torch.tensor([value])]
        found.append(found)
        return found

    assert content_of(ring(1.0)) == content_of(ring(1.0)) != content_of(ring(2.0))
    assert content_of(torch.tensor([1j]).conj()) != content_of(torch.tensor([1j]))


def test_who_a_unit_is_does_not_depend_on_how_its_name_is_written() -> None:
    names = ["u1", "u1 ", 1, "1", 1.0, np.int64(1), "Jos\u00e9", "Jose\u0301"]
    assert data([*range(8)], unit_of=names.__getitem__).n_units == 3


def test_names_of_more_rows_than_a_subset_has_are_refused() -> None:
    users = [f"u{row // 10}" for row in range(60)]
    part = Subset(rows(), range(0, 60, 2))
    with pytest.raises(DataError, match="unit_of"):
        data(part, unit_of=users.__getitem__)
    assert data(part, unit_of=lambda row: users[part.indices[row]]).n_units == 6
    assert data(part, unit_of={row: row // 2 for row in range(90)}.__getitem__).n_units == 15


def test_two_users_who_clicked_the_same_passage_for_the_same_query_are_two_units(tmp_path: Path) -> None:
    x, _ = rows().tensors
    clicks = [{"query_id": "q", "passage_id": "p", "x": x[row], "y": row % 3} for row in range(60)]

    def collate(chosen: list[Any]) -> Any:
        return torch.stack([row["x"] for row in chosen]), torch.tensor([row["y"] for row in chosen])

    fit(tmp_path, made(collate_fn=collate), data(clicks, unit_of=lambda row: f"u{row}"), max_steps=2)
    assert card_in(tmp_path)["claim"]["epsilon"] is not None


# -- what a reader of the terminal sees ------------------------------------------------------------------------


def test_after_a_refusal_the_folder_is_said_to_hold_nothing_that_was_spent(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        fit(tmp_path, made(per_row_loss=coupled))
    with pytest.raises(ResumeError, match="delete it"):
        fit(tmp_path, made())
    (tmp_path / "privacy_ledger.jsonl").unlink()
    fit(tmp_path, made(), max_steps=1)
    with pytest.raises(ResumeError, match="already holds"):
        fit(tmp_path, made(), max_steps=1)
