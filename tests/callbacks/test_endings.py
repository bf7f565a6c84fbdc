"""A run that a private row may have ended: no noise covers that it ended, or when."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from stand_ins import Numbers, Regression, StopAfter, dp, fit, granted, records, weights
from tiny_generator import generator
from tiny_models import tiny_bert, tiny_tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.callbacks.doctor import examine
from lit_dpret.callbacks.refusals import refuse_endless_losses
from lit_dpret.cards.card import verify_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.errors import ConfigurationError, DataError, DivergenceError, ResumeError
from lit_dpret.modules import DualEncoder, FrozenDualEncoder, OptimizerSpec
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.modes import DPSGD, LogitDP, NoPrivacy, PublicPassages

STEPS = 6


class Fragile(Regression):
    """Fails from the third step on."""

    where = ""
    error: BaseException = RuntimeError("row 7")

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        if self.where == "collate" and self._trainer is not None and self.trainer.global_step >= 2:
            raise self.error
        return super().collate_rows(rows)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if self.where == "loss" and self.trainer.global_step >= 2 and torch.is_grad_enabled():
            raise self.error
        return super().per_row_loss(rows)


class _Items:
    def __init__(self, items: Any, error: BaseException, module: Any) -> None:
        self.items, self.error, self.module = items, error, module

    def __getitem__(self, draw: Any) -> Any:
        if self.module.trainer.global_step >= 2:
            raise self.error
        return self.items[draw]

    def __len__(self) -> int:
        return len(self.items)


class Unreadable(Numbers):
    """Rows that cannot be read later on."""

    module: Any
    error: BaseException

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        items = _Items(loader.dataset, self.error, self.module)
        return DataLoader(items, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


def card(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "privacy_card.json").read_text(encoding="utf-8")))


def ended(folder: Path, where: str, error: BaseException, *, extra: Any = ()) -> None:
    module = Fragile(privacy=dp(folder.parent))
    module.where, module.error, data = where, error, Numbers()
    if where == "dataset":
        data = Unreadable()
        data.module, data.error = module, error
    with pytest.raises((type(error), SystemExit)):  # Lightning exits after a KeyboardInterrupt
        fit(folder, module, data, steps=STEPS, extra=[PrivacyCard(), *extra])


class Worker(Numbers):
    """Rows that a worker reads, which dies, or takes longer than it may, at one of them."""

    how = ""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        items = _Deadly(loader.dataset, self.how)
        return DataLoader(
            items, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn, num_workers=1, timeout=1,
            multiprocessing_context="fork",
        )  # fmt: skip


class _Deadly:
    def __init__(self, items: Any, how: str) -> None:
        self.items, self.how = items, how

    def __getitem__(self, draw: Any) -> Any:
        if draw.step >= 2 and get_worker_info() is not None:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exits":
                os._exit(1)
            time.sleep(10)
        return self.items[draw]

    def __len__(self) -> int:
        return len(self.items)


@pytest.mark.parametrize("how", ["killed", "exits", "slow"])
def test_so_is_the_end_of_a_worker_that_read_a_private_row(how: str, tmp_path: Path) -> None:
    data = Worker()
    data.how = how
    with pytest.raises((RuntimeError, OSError, EOFError)):  # it may be killed while it hands a batch over
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), data, steps=STEPS, extra=[PrivacyCard()])
    assert records(tmp_path / "run")[-1]["reason"] == "failed"
    if (tmp_path / "run" / "privacy_card.json").exists():  # news of a dead worker may come while it is written
        assert card(tmp_path / "run")["claim"]["guarantee"] == "not_proved"


class LeavesOut(Fragile):
    """Ends the epoch at a batch, as Lightning's hook allows."""

    def on_train_batch_start(self, batch: Any, index: int) -> Any:
        return -1 if batch.step == 2 else None


class StopsIterating(Fragile):
    """Raises what Lightning drops, and the batch with it."""

    where, error = "loss", StopIteration()


@pytest.mark.parametrize("module", [LeavesOut, StopsIterating])
def test_a_batch_that_lightning_passes_over_ends_the_run_and_its_claim(module: type[Any], tmp_path: Path) -> None:
    data = Numbers(physical_batch_size=4)
    with pytest.raises(RuntimeError) if module is StopsIterating else nullcontext():
        fit(tmp_path / "run", module(privacy=dp(tmp_path)), data, steps=STEPS, extra=[PrivacyCard()])
    assert records(tmp_path / "run")[-1]["reason"] == "failed"
    assert card(tmp_path / "run")["claim"]["guarantee"] == "not_proved"


class Panic(BaseException):
    """Derives from no Exception, as what libraries in Rust raise."""


BY_A_ROW = [
    ("loss", Panic("row 7")),
    ("loss", MemoryError()),
    ("collate", DataError("row 7 has no text")),
    ("dataset", OSError(errno.ENOENT, "7.png")),
    ("loss", SystemExit(1)),
    ("collate", KeyboardInterrupt()),
]


@pytest.mark.costly
@pytest.mark.parametrize(("where", "error"), BY_A_ROW)
def test_an_end_that_a_private_row_may_have_caused_is_one_word_and_claims_nothing(
    where: str, error: BaseException, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ended(folder, where, error)
    end = records(folder)[-1]
    assert (end["kind"], end["reason"]) == ("end", "failed")
    written = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.json*"))
    assert type(error).__name__ not in written and "row 7" not in written and "7.png" not in written
    found = card(folder)
    assert found["claim"]["guarantee"] == "not_proved" and found["claim"]["epsilon"] is None
    assert "may depend on what it had released" not in found["claim"]["statement"]
    assert not verify_chain(folder).failed
    owed = owed_releases(records(folder))
    assert owed and not any(isinstance(one, NonPrivateRelease) for one in owed), "counted as any others"

    fit(folder, Fragile(privacy=dp(tmp_path)), Numbers(), steps=STEPS, resume=True, extra=[PrivacyCard()])
    found = card(folder)
    assert found["claim"]["guarantee"] == "dp" and found["claim"]["epsilon"] > 0
    broken = [one for one in found["assumptions"] if one["holds"] is False]
    assert [one["consequence"] for one in broken] == ["weights_alone"]
    assert any("the ledger" in banner for banner in found["banners"])
    assert not verify_chain(folder).failed


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["person", "handler", "callback", "disk"])
def test_an_end_for_another_reason_keeps_the_claim_of_all_planned_steps(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if kind == "callback":

        def fails(trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("stop")

        twice = Numbers(sample_rate=0.5, expected_batch_size=None)
        with pytest.raises(RuntimeError, match="stop"):
            fit(folder, Regression(privacy=dp(tmp_path, noise_multiplier=8.0)), twice, steps=STEPS,
                extra=[PrivacyCard(), LambdaCallback(on_train_epoch_start=fails)])  # fmt: skip
        assert granted(folder)
    elif kind in ("person", "handler"):
        # A process in the background may have been started with Ctrl-C ignored.
        number = signal.SIGINT if kind == "person" else signal.SIGHUP
        handler = signal.default_int_handler if kind == "person" else lambda *_: sys.exit(0)
        before = signal.signal(number, handler)

        def interrupt(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if batch.last and batch.step == 1:
                signal.raise_signal(number)

        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(folder, Regression(privacy=dp(tmp_path)), steps=STEPS,
                extra=[PrivacyCard(), LambdaCallback(on_train_batch_end=interrupt)])  # fmt: skip
        signal.signal(number, before)
    else:
        ended(folder, "dataset", OSError(errno.ENOSPC, "full"))
        assert records(folder)[-1]["kind"] != "end"
        return
    assert records(folder)[-1]["reason"] != "failed"
    claim = card(folder)["claim"]
    assert claim["guarantee"] == "dp" and "may depend on what it had released" in claim["statement"]


class Scheduled(Regression):
    """Its optimizer and schedule are its own."""

    divisor, kind, length = 3.5, torch.optim.SGD, None

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.01)
        if self.length is not None:
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=self.length)
        else:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (self.divisor - step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def scheduled(folder: Path, **settings: Any) -> Scheduled:
    module = Scheduled(privacy=dp(folder))
    for name, value in settings.items():
        setattr(module, name, value)
    return module


@pytest.mark.costly
def test_a_schedule_that_fails_keeps_the_claim_and_a_corrected_one_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        fit(run, scheduled(tmp_path, divisor=4), steps=STEPS, extra=[PrivacyCard()])
    assert card(run)["claim"]["guarantee"] == "dp"
    fit(run, scheduled(tmp_path), steps=STEPS, extra=[PrivacyCard()], resume=True)
    assert card(run)["claim"]["epsilon"] <= 3 and granted(run)[-1][1] == STEPS - 1


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step"])
def test_an_error_of_a_callback_beside_a_batch_may_be_that_of_a_private_row(hook: str, tmp_path: Path) -> None:
    def fails(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ValueError

    run, failing = tmp_path / "run", LambdaCallback(**{hook: fails})  # type: ignore[arg-type]
    counting = [PrivacyAccountant(run_dir=run, eps_log_points=1), PrivacyCard()]
    around = [failing, *counting] if hook == "on_train_batch_start" else [*counting, failing]
    with pytest.raises(ValueError):
        fit(run, Regression(privacy=dp(tmp_path)), steps=STEPS, callbacks=around)
    assert records(run)[-1]["reason"] == "failed" and card(run)["claim"]["guarantee"] == "not_proved"


class Inner(Regression):
    """Its loss takes steps of an optimizer on copies, which fail at a private row."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        if self.trainer.global_step >= 2:
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step(lambda: 1 / 0)
        return losses


def test_an_error_of_an_optimizer_in_the_loss_may_be_that_of_a_private_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        fit(run, Inner(privacy=dp(tmp_path)), steps=STEPS, extra=[PrivacyCard()])
    assert card(run)["claim"]["guarantee"] == "not_proved"


def test_a_schedule_that_is_shorter_than_the_run_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="total_steps=4"):
        fit(tmp_path / "run", scheduled(tmp_path, length=4), steps=STEPS)
    assert granted(tmp_path / "run") == []
    fit(tmp_path / "longer", scheduled(tmp_path, length=STEPS), steps=STEPS)


def in_groups(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}], **settings)


@pytest.mark.costly
def test_a_resume_with_another_optimizer_of_ones_own_is_refused_before_a_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="stop"):
        fit(run, scheduled(tmp_path), steps=STEPS, extra=[PrivacyCard(), StopAfter(3)])
    before = len(records(run))
    for kind, named in ((torch.optim.Adam, "Adam"), (in_groups, "groups of 1 and 3")):
        with pytest.raises(ResumeError, match=named):
            fit(run, scheduled(tmp_path, kind=kind), steps=STEPS, extra=[PrivacyCard()], resume=True)
    assert not {"intent", "release"} & {record["kind"] for record in records(run)[before:]}
    fit(run, scheduled(tmp_path), steps=STEPS, extra=[PrivacyCard()], resume=True)
    assert card(run)["claim"]["guarantee"] == "dp"


# -- a private run whose weights are NaN or infinite ends: they were released, and further steps wou--


class Rises(Callback):
    """Takes steps from one on whose length no float holds."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if batch.step == self.step:
            for group in trainer.optimizers[0].param_groups:
                group |= {"lr": 1e38, "weight_decay": 1e30}


def diverging(folder: Path, *, steps: int = 6, **given: Any) -> Regression:
    module = Regression(privacy=dp(folder), optimizer=OptimizerSpec(name="sgd", lr=0.01))
    extra = [PrivacyCard(run_dir=folder / "run"), Rises(3)]
    fit(folder / "run", module, Numbers(), steps=steps, save_every=1, extra=extra, **given)
    return module


def test_a_run_ends_where_its_weights_do_and_claims_what_was_planned(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"step 4 .*net\.0\.weight.*max_steps.*lr"):
        diverging(tmp_path)
    assert len(granted(tmp_path / "run")) == 4, "the two others are not paid for"
    last = records(tmp_path / "run")[-1]
    assert (last["kind"], last["reason"], last["steps"]) == ("end", "DivergenceError", 4), "of no private row"
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["guarantee"] == "dp" and card["mechanism"]["steps_counted"] == 6
    assert not any("private rows" in banner for banner in card["banners"])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    for name in names:
        saved = torch.load(tmp_path / "run" / "checkpoints" / name, weights_only=True)["state_dict"]
        assert all(bool(value.isfinite().all()) for value in saved.values()), name

    module = diverging(tmp_path, steps=3, resume=True)  # a resume that ends there has the last finite checkpoint
    assert bool(weights(module).isfinite().all()) and (tmp_path / "run" / "model" / "weights.pt").is_file()
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["guarantee"] == "dp" and verify_card(card, tmp_path / "run" / "privacy_ledger.jsonl") == []
    assert card["mechanism"]["steps_counted"] == 6, "which checkpoint it is follows from what was released"


def test_a_run_without_a_promise_goes_on_as_lightning_has_it(tmp_path: Path) -> None:
    module = Regression(privacy=NoPrivacy(), optimizer=OptimizerSpec(name="sgd", lr=0.01))
    fit(tmp_path / "run", module, Numbers(), steps=6, extra=[Rises(3)])
    assert not bool(weights(module).isfinite().all())


# -- a run whose every loss would be NaN is refused before its ledger opens, by rows that are no dat--


LEDGER = "privacy_ledger.jsonl"


class Probed(Regression):
    """Its loss is multiplied by ``factor``; it has rows that are no data, and notes what it was asked about."""

    def __init__(self, *, factor: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.factor, self.asked = factor, []

    def longest_rows(self, count: int) -> dict[str, Tensor]:
        return {"inputs": torch.full((count, 4), 0.5), "target": torch.zeros(count)}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        self.asked.append(bool((rows["inputs"] == 0.5).all()))
        return super().per_row_loss(rows) * self.factor


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_without_a_value_is_refused_before_the_ledger_and_no_row_of_the_data_was_looked_at(
    factor: float, tmp_path: Path
) -> None:
    module = Probed(factor=factor, privacy=dp(tmp_path))
    with pytest.raises(ConfigurationError, match="per_row_loss"):
        fit(tmp_path / "run", module, Numbers(), steps=2)
    assert module.asked == [True] and not (tmp_path / "run" / LEDGER).exists()
    trainer = L.Trainer(default_root_dir=tmp_path, max_steps=2, logger=False, accelerator="cpu", barebones=True)
    found = examine(trainer, Probed(factor=factor, privacy=dp(tmp_path)), Numbers())
    assert any("per_row_loss" in one.text for one in found.findings if one.status == "refused"), "by the doctor too"


def test_a_finite_loss_trains_as_without_the_probe(tmp_path: Path) -> None:
    weights = []
    for kind in (Probed, Regression):
        torch.manual_seed(3)
        module = kind(privacy=dp(tmp_path, noise_seed=5))
        fit(tmp_path / kind.__name__, module, Numbers(), steps=2)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


class Broken(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net[0].weight.data[0, 0] = math.nan


def test_weights_that_are_no_numbers_are_refused_by_name_before_the_ledger(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"net\.0\.weight .*NaN"):
        fit(tmp_path / "run", Broken(privacy=dp(tmp_path)), Numbers(), steps=2)
    assert not (tmp_path / "run" / LEDGER).exists()


def encoder() -> TextEncoder:
    return TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))


SPEC = OptimizerSpec(name="sgd", lr=0.1)
MODULES = {
    "frozen, against a pool": lambda t: FrozenDualEncoder(
        encoder=encoder(), privacy=PublicPassages(eps=3.0), optimizer=SPEC, temperature=t
    ),
    "against a pool": lambda t: DualEncoder(
        encoder=encoder(), privacy=PublicPassages(eps=3.0), optimizer=SPEC, temperature=t
    ),
    "in the batch": lambda t: DualEncoder(
        encoder=encoder(), privacy=LogitDP(eps=3.0, delta=1e-3, max_logit_grad_norm=1.0), optimizer=SPEC, temperature=t
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_temperature_that_leaves_no_loss_is_found_on_public_texts(kind: str) -> None:
    refuse_endless_losses(MODULES[kind](0.05))
    with pytest.raises(ConfigurationError, match="temperature"):
        refuse_endless_losses(MODULES[kind](1e-42))


def test_a_generator_is_asked_about_random_tokens_and_keeps_its_mode_and_coins() -> None:
    module = generator(privacy=DPSGD(eps=3.0)).train()
    coins = torch.random.get_rng_state()
    refuse_endless_losses(module)
    assert module.training and torch.equal(coins, torch.random.get_rng_state())
    with torch.no_grad():
        module.model.get_input_embeddings().weight.fill_(math.nan)
    with pytest.raises(ConfigurationError):
        refuse_endless_losses(module)
