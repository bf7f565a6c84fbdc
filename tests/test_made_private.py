"""A module, a loss and an optimizer of a Lightning user's own, made private by `make_private`."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections import UserDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import lightning as L
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from own_modules import Classifier, card_in, data, fit, made, row_loss, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lit_dpret import (
    OptimizerSpec,
    PrivacyAccountant,
    PrivacyCard,
    PrivateModule,
    UnitDataModule,
    assert_private,
    make_private,
)  # fmt: skip
from lit_dpret.cards.text import show_epsilon
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation, ResumeError, UnsupportedModelError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD

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


def test_the_length_and_the_noise_of_a_run_are_told_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lit_dpret.callbacks.privacy_accountant.rank_zero_info", told.append)
    names = [f"u{row // 2}" for row in range(60)]
    fit(
        tmp_path,
        made(delta=1e-5),
        data(unit_of=names.__getitem__, unit_name="user", expected_batch_size=5),
        max_steps=2,
    )
    words = " ".join(told)
    assert "2 steps" in words and "noise multiplier 1 " in words and "user" in words and "1e-05" in words


@pytest.mark.parametrize("eps", [3, 21])
def test_a_large_epsilon_is_warned_of_before_the_first_step(
    eps: float, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    fit(tmp_path, made(eps=eps), max_steps=1)
    assert sum(f"eps={eps} is large" in str(one.message) for one in recwarn) == (eps > 20)


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


class RunningMean:
    seen, mean = 0, 0.0

    def add(self, rows: Tensor) -> Any:
        for row in rows.numpy():
            self.seen += 1
            self.mean = self.mean + (row - self.mean) / self.seen
        return self.mean


def test_a_running_mean_in_collate_fn_is_called_by_its_name(tmp_path: Path) -> None:
    running = RunningMean()

    def centred(given: list[Any]) -> Any:
        x, y = default_collate(given)
        return x - torch.tensor(running.add(x)).float(), y

    with pytest.raises(UnsupportedModelError, match="running mean") as refused:
        fit(tmp_path, made(collate_fn=centred), data(physical_batch_size=8))
    assert refused.value.trap == "T11"


class Rated(Classifier):
    rate = 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_a_resume_says_that_the_learning_rate_is_the_checkpoints(
    rate: float, tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path / "run", made(Rated()), callbacks=[kept], max_steps=4)
    (path,) = (tmp_path / "kept").glob("*step=2.ckpt")
    monkeypatch.setattr(Rated, "rate", rate)
    trainer = fit(
        tmp_path / "run", made(Rated()), callbacks=[PrivacyAccountant(resume=True)], ckpt_path=path, max_steps=4
    )
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    said = [str(warning.message) for warning in recwarn if "configure_optimizers" in str(warning.message)]
    assert len(said) == (rate == 3.0) and all("3" in text for text in said)


class Sized(Classifier):
    def __init__(self, width: int, activation: Any = torch.tanh) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net[-1] = nn.Linear(8, width)


@pytest.mark.parametrize("averaged", [False, True])
def test_a_checkpoint_is_loaded_by_the_class_of_the_module_and_by_a_resume(averaged: bool, tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1)
    average = [EMAWeightAveraging()] if averaged else []
    whole = Sized(3, torch.sin)
    trainer = fit(tmp_path / "run", made(whole), callbacks=[kept, *average])
    paths = {step: next((tmp_path / "kept").glob(f"*step={step}.ckpt")) for step in (3, 6)}
    loaded = Sized.load_from_checkpoint(paths[6], weights_only=True)
    assert loaded.hparams == Sized(3).hparams
    names = dict(loaded.named_parameters()).keys()
    assert averaged or all(torch.equal(loaded.get_parameter(name), whole.get_parameter(name)) for name in names)
    again = Sized(3)
    fit(tmp_path / "run", made(again), callbacks=[PrivacyAccountant(resume=True), *average], ckpt_path=paths[3])
    assert all(torch.equal(again.get_parameter(name), whole.get_parameter(name)) for name in names)
    with pytest.raises(UnsupportedModelError, match=r"\bSized.*ckpt_path"):
        type(trainer.lightning_module).load_from_checkpoint(paths[6])


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
    with pytest.raises(UnsupportedModelError, match="DualEncoder") as found:
        fit(tmp_path / "batch", made(per_row_loss=of_in_batch_negatives), data(dataset), max_steps=1)
    assert not re.search(r"axis of (\d+) is not the batch of \1 ", str(found.value))
    assert '"intent"' not in (tmp_path / "batch" / "privacy_ledger.jsonl").read_text()


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": torch.optim.SGD}, "OptimizerSpec"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "OptimizerSpec"),
        ({"batch_size": 32}, "expected_batch_size"),
        ({"resume": True}, "PrivacyAccountant"),
        ({"epsilon": 3}, r"\beps\b"),
        ({"neighbors": "zero_out"}, "neighbours"),
        ({"max_grad_nrom": 1.0}, "max_grad_norm"),
        ({"unit_of": len}, "UnitDataModule"),
        ({"eps": 0}, "eps=0 .*DataLoader"),
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
        (lambda: PrivateModule(privacy=DPSGD(eps=3), target_epsilon=3), "DPSGD"),  # type: ignore[call-arg]
        (lambda: PrivateModule(privacy=DPSGD(eps=3), optimiser=None), "called optimizer"),  # type: ignore[call-arg]
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

    with pytest.raises(ConfigurationError, match=r"'train_loss'.*per_row_loss") as found:
        fit(tmp_path, made(per_row_loss=logging))
    assert found.value.trap == "T25"


def test_a_spawned_process_is_refused_before_anything_is_sent_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="strategy='ddp'"):
        fit(tmp_path, made(), strategy="ddp_spawn", devices=2)
    assert not (tmp_path / "privacy_ledger.jsonl").exists()
    assert type(copy.deepcopy(made())).__name__ == type(made()).__name__


def test_a_data_module_of_units_is_refused_to_a_module_that_is_not_private(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="make_private"):
        fit(tmp_path, Classifier())


@pytest.mark.parametrize("asked", ["validate", "test", "predict"])
def test_the_wrapper_is_trained_and_the_module_inside_is_measured(asked: str) -> None:
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_model_summary=False)
    with pytest.raises(UnsupportedModelError, match=rf"trainer\.{asked}\(private\.module"):
        getattr(trainer, asked)(made(), DataLoader(rows(), 8))


def coupled(model: Any, batch: Any) -> Tensor:
    loss = row_loss(model, batch)
    return loss - loss.mean()


def test_a_loader_of_ones_own_is_refused_for_a_data_module(tmp_path: Path) -> None:
    trainer = L.Trainer(default_root_dir=tmp_path, max_steps=1, logger=False, accelerator="cpu")
    with pytest.raises(ConfigurationError, match="datamodule=") as found:
        trainer.fit(made(), DataLoader(rows(), 20))
    assert found.value.trap == "T1"


@pytest.mark.parametrize(
    ("given", "named"),
    [(UnitDataModule, r"datamodule=UnitDataModule\(\.\.\.\)"), (rows(), "unit_of"), (rows, "unit_of")],
)
def test_a_class_or_a_data_set_in_the_place_of_a_data_module_is_refused(given: Any, named: str, tmp_path: Path) -> None:
    trainer = L.Trainer(default_root_dir=tmp_path, max_steps=1, logger=False, accelerator="cpu")
    with pytest.raises(ConfigurationError, match=named):
        trainer.fit(made(), datamodule=given)


def test_hooks_that_nobody_would_call_are_refused_by_name() -> None:
    class Hooked(Classifier):
        def on_train_epoch_end(self) -> None: ...

    with pytest.raises(UnsupportedModelError, match="on_train_epoch_end"):
        made(Hooked())


def test_what_is_private_already_is_not_wrapped() -> None:
    with pytest.raises(UnsupportedModelError, match="PrivateModule"):
        made(made())


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


@pytest.mark.parametrize("row", [lambda number: torch.zeros(number % 3 + 1), lambda number: object()])
def test_rows_that_torch_cannot_collate_are_refused_by_the_setting_that_can(row: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="collate_fn"):
        fit(tmp_path, made(), data([(row(number), 0) for number in range(60)]))


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


@pytest.mark.parametrize("loss", [coupled, lambda model, batch: row_loss(model, batch).mean()], ids=["coupled", "mean"])
def test_a_loss_that_couples_rows_is_refused_and_leaves_a_folder_that_is_said_to_hold_nothing_that_was_spent(
    loss: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="row"):
        fit(tmp_path, made(per_row_loss=loss))
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text()
    with pytest.raises(ResumeError, match="delete it"):
        fit(tmp_path, made())
    (tmp_path / "privacy_ledger.jsonl").unlink()
    fit(tmp_path, made(), max_steps=1)
    with pytest.raises(ResumeError, match="already holds"):
        fit(tmp_path, made(), max_steps=1)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_without_a_value_on_rows_that_are_no_data_is_refused_before_the_ledger(
    factor: float, tmp_path: Path
) -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        return row_loss(model, batch) * factor

    made_up = [(torch.zeros(4), torch.tensor(1)), (torch.ones(4), torch.tensor(0))]
    with pytest.raises(ConfigurationError, match="per_row_loss"):
        fit(tmp_path / "refused", made(per_row_loss=broken, public_rows=made_up))
    assert not (tmp_path / "refused" / "privacy_ledger.jsonl").exists()
    fit(tmp_path / "trained", made(public_rows=made_up), max_steps=2)
    assert card_in(tmp_path / "trained")["claim"]["guarantee"] == "dp"


def test_a_mode_that_a_hook_replaces_after_the_plan_is_refused(tmp_path: Path) -> None:
    module, callback = made(noise_multiplier=4.0), L.Callback()
    callback.on_fit_start = lambda *_: setattr(module, "privacy", DPSGD(eps=3.0))  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="privacy of"):
        fit(tmp_path, module, callbacks=[callback])


def _padded(given: list[Any]) -> Any:
    texts, labels = zip(*given, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


class _Summing(Classifier):
    """Sums over all places of a text, those that it is filled up to included."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(self.words(x).sum(1))
        return found


@pytest.mark.parametrize("long", [1, 2, 6])
def test_padding_that_counts_is_refused_whoever_holds_the_longest_text(long: int, tmp_path: Path) -> None:
    """The longest texts come first, where they are collated without the others too."""
    torch.manual_seed(3)
    texts = [torch.randint(1, 20, (60 if row < long else 2 + row,)) for row in range(12)]
    log = [(text, row % 3) for row, text in enumerate(texts)]
    units = UnitDataModule(log, sampling="full_batch")
    with pytest.raises(UnsupportedModelError) as refused:
        fit(tmp_path, made(_Summing(), collate_fn=_padded, noise_multiplier=4.0), units, max_steps=1)
    assert refused.value.trap == "T11"


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def mapping_of(kind: Any) -> Any:
    made = {UserDict: UserDict, defaultdict: partial(defaultdict, list)}[kind]
    return lambda found: made(zip("xy", default_collate(found), strict=True))


@pytest.mark.parametrize("kind", [Pair, UserDict, defaultdict, dict])
def test_the_loss_gets_what_collate_fn_returned(kind: Any, tmp_path: Path) -> None:
    x, y = rows().tensors
    seen = set()

    def loss(model: Any, batch: Any) -> Tensor:
        seen.add(type(batch))
        if kind is Pair:
            return row_loss(model, (batch.x, batch.y))
        return row_loss(model, (batch[1], batch[0]) if kind is dict else (batch["x"], batch["y"]))

    one: Any = {Pair: Pair, dict: lambda x, y: {1: x, 0: y}}.get(kind, lambda *both: both)
    items = [one(*each) for each in zip(x, y, strict=True)]
    collate = {"collate_fn": mapping_of(kind)} if kind in (UserDict, defaultdict) else {}
    fit(tmp_path, made(per_row_loss=loss, **collate), data(items), max_steps=2)
    assert seen == {dict if kind is defaultdict else kind}  # whose constructor takes a factory first


def test_a_checkpoint_of_a_plain_training_is_refused_by_name(tmp_path: Path) -> None:
    class Plainly(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return row_loss(self, batch).mean()

    runner = L.Trainer(
        max_steps=1, logger=False, enable_progress_bar=False, accelerator="cpu", enable_checkpointing=False,
        default_root_dir=tmp_path, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(Plainly(), DataLoader(rows(), batch_size=20))
    runner.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ResumeError) as found:
        fit(tmp_path / "run", made(Plainly()), ckpt_path=tmp_path / "plain.ckpt")
    assert found.value.trap == "T30"


def test_a_resume_goes_on_though_the_class_is_imported_from_elsewhere(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path / "run", made(), callbacks=[kept])
    moved = type("Moved", (Classifier,), {"__module__": "elsewhere"})
    (path,) = (tmp_path / "kept").glob("*step=4.ckpt")
    fit(tmp_path / "run", made(moved()), callbacks=[PrivacyAccountant(resume=True)], ckpt_path=path)
