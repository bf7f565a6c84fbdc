"""Local epochs run by an ordinary Trainer with this package's accountant, and their callbacks."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.progress import StepProgress
from lit_dpret.errors import ResumeError
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, events_of, plans_of
from lit_dpret.progress import without_progress


class NotRepeatedError(ResumeError):
    """An interrupted fit cannot be repeated bit by bit, so all of it would be charged again."""


class RoundAccountant(PrivacyAccountant):
    """The accountant of one round that continues from earlier weights: the silo composes all rounds."""

    counted_by_others = True

    def _reserve(self) -> None:
        # The noise of all fits is planned together: drawing new noise here would use up budget of the others.
        if self.resume and self._run.attempt:
            raise NotRepeatedError(f"The fit in {self.run_dir} cannot be repeated bit by bit on this machine.")
        super()._reserve()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, ResumeError):  # no step was made, and `SiloLedger.settle_broken` settles the account
            self._close_account()
            self._account = None
        super().on_exception(trainer, pl_module, exception)


def fit_epochs(
    module: Any, data: Any, folder: Path, *, epochs: int = 1, callbacks: Sequence[Callback] = (),
    progress: StepProgress | None = None, repeat: bool = False,
) -> None:  # fmt: skip
    """Train ``module`` on ``data`` for this many epochs, with its ledger in ``folder``; log and checkpoint nothing.

    ``repeat`` repeats an interrupted fit (`broken_attempt`): the steps that its ledger announced get the same noise bit
    by bit and cost nothing more, and the rest is charged as planned.
    """
    lines = [] if progress is None else [progress]
    quiet = logging.getLogger("lightning.pytorch")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        trainer = L.Trainer(
            accelerator="auto",
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[RoundAccountant(run_dir=folder, resume=repeat, eps_log_points=1), *lines, *callbacks],
        )
        with nullcontext() if lines else without_progress(), warnings.catch_warnings():
            # The sentence side is frozen in stage 2, by design.
            warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
            trainer.fit(module, datamodule=data)
    except ResumeError as error:
        if repeat and events_of(_records(folder), "replay_failed"):
            raise NotRepeatedError(str(error)) from error
        raise
    finally:
        quiet.setLevel(level)


class KeepOptimizer(Callback):
    """Restore the optimizer's state from an earlier fit, and save the new state at the end.

    Under a private mode the state is a function of noised gradients only. It stays on this machine in any case.
    """

    def __init__(self, before: Path, after: Path) -> None:
        self._before, self._after = before, after

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Restore before the accountant starts: a repeated step is compared with a state that includes the optimizer's.
        if self._before.is_file():
            trainer.optimizers[0].load_state_dict(torch.load(self._before, weights_only=True))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        kept = io.BytesIO()
        torch.save(trainer.optimizers[0].state_dict(), kept)
        write_whole(self._after, kept.getvalue(), owner_only=True)


def attempt_folder(folder: Path) -> Path:
    """Return the first of ``attempt-0``, ``attempt-1`` and so on that does not exist."""
    number = 0
    while (folder / f"attempt-{number}").exists():
        number += 1
    return folder / f"attempt-{number}"


def broken_attempt(folder: Path) -> tuple[Path, float] | None:
    """Return the newest attempt whose ledger holds a plan, and its noise multiplier; None if there is none."""
    attempts = sorted(folder.glob(f"attempt-*/{LEDGER_NAME}"), key=lambda path: int(path.parent.name.split("-")[1]))
    for path in reversed(attempts):
        plan = next((plan["plan"] for plan in plans_of(_records(path.parent))), None)
        if plan is not None:
            return path.parent, float(plan["noise_multiplier"])
    return None


def _records(folder: Path) -> list[dict[str, Any]]:
    return PrivacyLedger.read(folder / LEDGER_NAME).records


class TowardsAnchor(Callback):
    """Add ``strength * (w - anchor)`` to every gradient: the term ``strength / 2 * |w - anchor|^2`` of the loss.

    If the anchor is the round's initial weights, this is FedProx (Li et al., 1812.06127, equation 2); if it is the mean
    of the clients' personal models, MR-MTL (Liu et al., 2206.07902, section 5). The term is a function of released
    weights only and is added after clipping and noise, so it costs no privacy.
    """

    # Changes the gradients while the optimizer steps, by a function of released weights only.
    public_metrics = ("grad",)

    def __init__(self, anchor: Mapping[str, Tensor], strength: float) -> None:
        self._anchor, self._strength = dict(anchor), strength

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and name in self._anchor:
                away = parameter.detach() - self._anchor[name].to(parameter)
                parameter.grad.add_(away, alpha=self._strength)
