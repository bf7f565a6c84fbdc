"""A module, a loss and an optimizer of a Lightning user's own, made private by `make_private`."""

from __future__ import annotations

import contextlib
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import lightning as L
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from own_modules import Classifier, card_in, data, fit, made, row_loss, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_dpret import (
    OptimizerSpec,
    PrivacyAccountant,
    PrivacyCard,
    PrivateModule,
    assert_private,
    make_private,
)  # fmt: skip
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, PrivacyViolation, ResumeError, UnsupportedModelError
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD

# -- what it guarantees ----------------------------------------------------------------------------------------


@pytest.mark.costly
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


class Measured(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        raise RuntimeError("a test of one's own that fails")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


@pytest.mark.costly
def test_a_fit_ends_with_its_weights_and_a_card_that_verify_and_that_later_measures_leave_as_they_are(
    tmp_path: Path,
) -> None:
    model = Measured()
    before = model.net[0].weight.detach().clone()
    trainer = fit(tmp_path, make_private(model, per_row_loss=row_loss, eps=3), data(sampling="poisson"))
    saved = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    fresh = Classifier()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.net[0].weight, model.net[0].weight) and not torch.equal(before, model.net[0].weight)
    card, written = card_in(tmp_path), (tmp_path / "privacy_card.json").read_bytes()
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
    loader = DataLoader(rows(), batch_size=20)
    trainer.validate(model, loader, verbose=False)
    trainer.predict(model, loader)
    with pytest.raises(RuntimeError, match="of one's own"):
        trainer.test(model, loader, verbose=False)
    assert (tmp_path / "privacy_card.json").read_bytes() == written
    assert not verify_chain(tmp_path).failed and not verify_chain(tmp_path / "model").failed


@pytest.mark.costly
@pytest.mark.parametrize(("eps", "delta"), [(3, None), (21, 1e-5)])
def test_a_large_delta_or_epsilon_is_cautioned_of_before_the_first_step_and_on_the_card(
    eps: float, delta: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("lit_dpret.errors.on_command_line", False)
    told: list[str] = []
    monkeypatch.setattr("lit_dpret.callbacks.planning.rank_zero_info", told.append)
    fit(tmp_path, made(eps=eps, delta=delta, noise_multiplier=None), max_steps=1)
    cautions = [one for one in card_in(tmp_path)["cautions"] if one.startswith("delta = ")]
    assert any("delta=1e-05" in one for one in told) is bool(cautions) is (delta is None)
    assert sum(f"eps={eps} is large" in str(one.message) for one in recwarn) == (eps > 20)
    if delta is None:
        at_that = dict(map(reversed, card_in(tmp_path)["claim"]["curve"]))[1e-5]
        assert f"epsilon is {show_epsilon(at_that)}" in cautions[0]


class Predicts(PrivateModule):
    """A private module that is only asked."""

    def predict_step(self, batch: Any) -> Tensor:
        found: Tensor = batch[0].sum(1)
        return found


@pytest.mark.parametrize("setting", ["gradient_clip_val", "accumulate_grad_batches"])
def test_what_only_training_cannot_have_is_no_matter_for_prediction(setting: str, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    runner = L.Trainer(accelerator="cpu", enable_progress_bar=False, **quiet, **{setting: 2})
    runner.predict(Predicts(privacy=DPSGD(eps=3)), DataLoader(rows(8), 8))


@pytest.mark.costly
def test_its_step_keeps_the_promise() -> None:
    x, y = rows(6).tensors
    private = made()
    assert_private(private, private.collate_rows(list(zip(x, (y + 1) % 3, strict=True))), eps=1.0, delta=1e-5)


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


@pytest.mark.costly
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


class Rated(Classifier):
    rate = 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@pytest.mark.costly
def test_a_resume_says_that_the_learning_rate_is_the_checkpoints(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path / "run", made(Rated()), callbacks=[kept], max_steps=4)
    (path,) = (tmp_path / "kept").glob("*step=2.ckpt")
    for rate, times in ((1.0, 0), (3.0, 1)):
        monkeypatch.setattr(Rated, "rate", rate)
        resumed = [PrivacyAccountant(resume=True)]
        trainer = fit(tmp_path / "run", made(Rated()), callbacks=resumed, ckpt_path=path, max_steps=4)
        assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
        said = [str(warning.message) for warning in recwarn if "configure_optimizers" in str(warning.message)]
        assert len(said) == times and all("3" in text for text in said)


class AsksForItsLength(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        length = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(length))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.costly
@pytest.mark.parametrize("sampling", ["poisson", "full_batch"])
def test_a_schedule_may_ask_how_long_the_run_is(sampling: str, tmp_path: Path) -> None:
    given = {"sampling": sampling} | ({"expected_batch_size": None} if sampling == "full_batch" else {})
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    made_so = partial(made, noise_multiplier=9.0)
    fit(tmp_path / "run", made_so(AsksForItsLength()), data(**given), callbacks=[kept], max_steps=4)
    (path,) = (tmp_path / "kept").glob("*step=2.ckpt")
    for start in (path, *(tmp_path / "kept").glob("*step=4.ckpt")):  # the latter has no step left to make
        again = [PrivacyAccountant(resume=True)]
        fit(tmp_path / "run", made_so(AsksForItsLength()), data(**given), callbacks=again, ckpt_path=start, max_steps=4)
    assert card_in(tmp_path / "run")["mechanism"]["steps_done"] == 4


class Tempered(nn.Module):
    """A loss with a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, model: Any, batch: Any) -> Tensor:
        return row_loss(model, batch) / self.temperature


@pytest.mark.parametrize("kind", ["loss", "method", "frozen", "part of the model"])
def test_a_loss_with_parameters_that_nothing_trains_is_warned_of(kind: str) -> None:
    loss, model = Tempered(), Classifier()
    loss.requires_grad_(kind != "frozen")
    if kind == "part of the model":
        model.loss = loss
    expected = pytest.warns(UserWarning, match=r"temperature.*not trained")
    with expected if kind in ("loss", "method") else contextlib.nullcontext():
        made(model, per_row_loss=loss.forward if kind == "method" else loss)


class Sized(Classifier):
    def __init__(self, width: int, activation: Any = torch.tanh) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net[-1] = nn.Linear(8, width)


@pytest.mark.costly
@pytest.mark.parametrize("averaged", [False, True])
def test_a_checkpoint_is_loaded_by_the_class_of_the_module_and_by_a_resume(averaged: bool, tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1)
    average = [EMAWeightAveraging()] if averaged else []
    whole = Sized(3, torch.sin)
    trainer = fit(tmp_path / "run", made(whole), callbacks=[kept, *average])
    moved = type("Moved", (Sized,), {"__module__": "elsewhere"})  # the class, imported from elsewhere
    paths = {step: next((tmp_path / "kept").glob(f"*step={step}.ckpt")) for step in (3, 6)}
    loaded = Sized.load_from_checkpoint(paths[6], weights_only=True)
    assert loaded.hparams == Sized(3).hparams
    names = dict(loaded.named_parameters()).keys()
    assert averaged or all(torch.equal(loaded.get_parameter(name), whole.get_parameter(name)) for name in names)
    again = moved(3)
    fit(tmp_path / "run", made(again), callbacks=[PrivacyAccountant(resume=True), *average], ckpt_path=paths[3])
    assert all(torch.equal(again.get_parameter(name), whole.get_parameter(name)) for name in names)
    with pytest.raises(UnsupportedModelError, match=r"\bSized.*ckpt_path"):
        type(trainer.lightning_module).load_from_checkpoint(paths[6])


@pytest.mark.costly
def test_a_resume_without_its_checkpoint_is_refused_before_a_step_is_charged_again(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    fit(tmp_path, made(), max_steps=1)
    before = (tmp_path / "privacy_ledger.jsonl").read_text().count('"intent"')
    (path,) = tmp_path.rglob("*.ckpt")
    theirs = tmp_path / "other" / "checkpoints"  # of another run, which no resume touches
    theirs.mkdir(parents=True)
    for name in (".last.ckpt.tmp", "theirs.ckpt"):
        (theirs / name).write_bytes(b"another process writes this")
    with pytest.raises(ResumeError, match="ckpt_path") as found:
        fit(tmp_path, made(), max_steps=1, callbacks=[PrivacyAccountant(resume=True)])
    assert str(path) in str(found.value)
    assert (tmp_path / "privacy_ledger.jsonl").read_text().count('"intent"') == before
    assert len(list(theirs.iterdir())) == 2 and not [one for one in recwarn if "theirs" in str(one.message)]
    shutil.rmtree(theirs)
    path.unlink()  # as after a crash before the first one
    fit(tmp_path, made(), max_steps=1, callbacks=[PrivacyAccountant(resume=True)])


def test_weights_are_not_written_among_files_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").write_text("code = 1\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="run_dir"):
        fit(tmp_path, made(), max_steps=1)
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text(encoding="utf-8")


class Validation(L.Callback):
    """A validation loss of public rows, every two steps."""

    public_metrics: tuple[str, ...] = ("val_loss",)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.last and (batch.step + 1) % 2 == 0:
            with torch.no_grad():
                self.log("val_loss", row_loss(pl_module.module, rows(8).tensors).mean())


def test_the_best_checkpoint_by_a_public_validation_loss_is_kept(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", every_n_train_steps=2)
    with pytest.raises(ConfigurationError, match="public_metrics") as found:
        fit(tmp_path / "undeclared", made(), callbacks=[kept])
    assert found.value.trap == "T25"

    class Undeclared(Validation):
        public_metrics = ()

    with pytest.raises(ConfigurationError, match="or derive from PrivateModule and set log_private_loss=True, and"):
        fit(tmp_path / "logged", made(), callbacks=[Undeclared()])
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
    with pytest.raises(UnsupportedModelError, match="DualEncoder") as found:
        fit(tmp_path / "batch", made(per_row_loss=of_in_batch_negatives), data(dataset), max_steps=1)
    assert not re.search(r"axis of (\d+) is not the batch of \1 ", str(found.value))
    assert '"intent"' not in (tmp_path / "batch" / "privacy_ledger.jsonl").read_text()


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["validate", "test", "predict"])
def test_the_wrapper_is_trained_and_the_module_inside_is_measured(asked: str) -> None:
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_model_summary=False)
    with pytest.raises(UnsupportedModelError, match=rf"trainer\.{asked}\(private\.module"):
        getattr(trainer, asked)(made(), DataLoader(rows(), 8))


def test_a_card_alone_gets_an_accountant_before_it(tmp_path: Path) -> None:
    fit(tmp_path / "run", made(), max_steps=1, callbacks=[PrivacyCard(tuning_data="public")])
    assert card_in(tmp_path / "run")["tuning"]["data"] == "public"
    with pytest.raises(ConfigurationError, match="tuning_data"):
        PrivacyCard(tuning_data="dev")


@pytest.mark.costly
def test_callbacks_that_are_given_to_two_trainers_work_in_the_folder_of_each(tmp_path: Path) -> None:
    watching = [PrivacyAccountant(), PrivacyCard()]
    for name in ("one", "two"):
        fit(tmp_path / name, made(), max_steps=1, callbacks=watching)
    for name in ("one", "two"):
        assert (tmp_path / name / "privacy_ledger.jsonl").is_file() and card_in(tmp_path / name)["claim"]["epsilon"]
