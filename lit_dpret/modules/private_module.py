"""The base of all model families: what a subclass implements, and what other parts of this package call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_dpret.distributed.handover import keep_masters
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.modules.coupling_passes import Passes
from lit_dpret.modules.kept_state import KeptState
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_step import PrivateStep
from lit_dpret.privacy.batches import map_rows, rows_in_turn
from lit_dpret.privacy.ledger.gate import refuse_other_sums
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row
from lit_dpret.privacy.state_watch import copy_parts
from lit_dpret.privacy.user_generators import kept_generators
from lit_dpret.settings import naming_arguments

#: Help for arguments that `PrivateModule` needs, and for arguments that belong elsewhere.
_ARGUMENTS = {
    "privacy": "the privacy mode, such as DPSGD(eps=3)",
    "per_row_loss": "write it as a method of your class, or give it to make_private with your module",
    "collate_fn": "write collate_rows as a method of your class, or give collate_fn to make_private with your module",
    "module": "make_private wraps an existing module; in a subclass of PrivateModule, make it an attribute",
    "eps": "give privacy=DPSGD(eps=...)",
    "delta": "give privacy=DPSGD(delta=...)",
    "lr": "give optimizer=OptimizerSpec(name=..., lr=...)",
}
Reads = Literal["texts", "images"]
#: The file that `PrivateModule.save_model` writes.
WEIGHTS = "weights.pt"


def save_weights(state: dict[str, Any], folder: str | Path) -> Path:
    """Write a state dict to ``weights.pt`` in ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copy_parts(state)
    torch.save(state, folder / WEIGHTS)
    return folder


class PrivateModule(PrivateStep):
    """Base of every trainable module, in this package or user-defined.

    Implement ``collate_rows(rows)`` and ``per_row_loss(rows)``. The loss of a row must depend on
    that row and on public data alone. A module whose loss couples rows declares
    ``coupled_loss = True`` and is refused by the per-example modes.

    `PrivateStep` documents what happens in a fit, and what it guarantees.

    Args:
        privacy: The privacy mode.
        optimizer: Name, learning rate and schedule of the optimizer; None if ``configure_optimizers`` is overridden.
        log_private_loss: Log the training loss, and everything else, although it is an unaccounted release.

    Raises:
        ConfigurationError: The optimizer corrects for noise and the mode adds none, or an argument has the wrong type.
    """

    coupled_loss: bool = False
    #: Whether the sums and counts of a step are reduced over all ranks before the guard is asked; a custom module that
    #: does not declare this is trained on one process alone.
    adds_up_over_ranks: bool = True
    #: Whether batches are padded to a fixed shape for a compiler; None for XLA devices only. A module that
    #: implements ``place_rows`` may override False. In low precision under a guarantee they are padded in any case.
    fixed_shapes: bool | None = False
    #: Features that may vary in width even in batches of fixed shape, such as lists of indices of correct answers.
    #: Only masks may be computed from them.
    ragged_features: Sequence[str] = ()
    #: Names of logged numbers, and of tensors that hooks write (such as a teacher), that depend on private rows only
    #: through the trained weights. Declared, not checked; the card says so.
    public_metrics: Sequence[str] = ()
    #: Whether a unit whose computation fails counts as zero instead of ending the run: for weights from an untrusted
    #: party, to whom a failure could reveal private rows (`PhysicalBatches`). Under every guarantee, a unit that does
    #: not fit into memory counts as zero.
    drops_failing_units: bool = False
    #: Whether each block's weights are used only by calls of its own modules, so that a strategy that shards the
    #: weights may gather them for these calls and free them afterwards.
    gathers_blocks: bool = False
    #: For messages: the functions that may not read other rows, and the alternative.
    way_out_of_coupling: str = (
        "collate_rows and per_row_loss; or declare coupled_loss = True and choose a mode for coupled losses"
    )
    #: The kind of this package's rows that ``collate_rows`` reads, so that others are refused; None does not check.
    reads: Reads | None = None

    @naming_arguments("PrivateModule", _ARGUMENTS)
    def __init__(
        self, *, privacy: PrivacyMode, optimizer: OptimizerSpec | None = None, log_private_loss: bool = False
    ) -> None:
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            given = optimizer if isinstance(optimizer, type | str) else type(optimizer)
            raise ConfigurationError(
                f"optimizer={getattr(given, '__name__', given)} is not an OptimizerSpec. Set model.optimizer.name=... "
                "on the command line, pass optimizer=OptimizerSpec(name=..., lr=...), or omit it and return a torch "
                "optimizer from configure_optimizers."
            )
        if not isinstance(privacy, PrivacyMode):
            raise ConfigurationError(f"privacy={privacy!r} is not a privacy mode: give one, such as DPSGD(eps=3).")
        if optimizer is not None and optimizer.uses_noise_std and privacy.guarantee != "dp":
            raise ConfigurationError(
                f"model.optimizer.name={optimizer.name} subtracts the noise of a private mode, and "
                f"privacy={privacy.name} adds none. Choose model.optimizer.name=adam."
            )
        self.automatic_optimization = False
        self.privacy = privacy
        self.optimizer_spec = optimizer
        self.log_private_loss = log_private_loss
        self._leave_run()

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Store the constructor's arguments as Lightning does, except ``privacy`` and ``optimizer``."""
        current = inspect.currentframe()
        frame = frame or (None if current is None else current.f_back)
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        super().save_hyperparameters(*args, ignore=[*ignored, "privacy", "optimizer"], frame=frame, logger=logger)

    def collate_rows(self, rows: list[Row]) -> Any:
        """Turn rows into the input of ``per_row_loss``: a dict of tensors, whose first axis is the rows.

        It may draw from the global generators of torch, ``random`` and numpy. Under a guarantee it is then called for
        the rows of one unit at a time, with that unit's random numbers, and every unit's tensors must have the same
        shape per row.
        """
        raise UnsupportedModelError(f"{type(self).__name__} does not implement collate_rows(rows).")

    def examine_collation(self, rows: list[Row], others: list[Row]) -> None:
        """Refuse a ``collate_rows`` that keeps state: collate rows alone, after others and with others."""
        with self._replayable_dropout(0):
            self._couplings.compare_collations(self, rows, others)

    def examine_reading(self, reads: Sequence[Callable[[], list[Row]]]) -> None:
        """Refuse learning rates that depend on which rows were read; each of ``reads`` returns other rows."""
        if self._hides_rows:
            with self._replayable_dropout(0), Passes(self, KeptState(self), seed=0) as passes:
                passes.compare_reading(reads)

    def place_rows(self, features: Any, places: Sequence[int], rows: int) -> Any:
        """Return features of a fixed shape: those of ``collate_rows`` at ``places``, among ``rows`` rows.

        No size in the result may depend on ``features``, except in `ragged_features`. Rows that are filled in do not
        count; if a unit has rows, copies of its first row replace its filled-in ones.
        """
        raise UnsupportedModelError(f"{type(self).__name__} does not implement place_rows(features, places, rows).")

    @property
    def fills_up(self) -> bool:
        """Whether the module defines how to pad a batch to a fixed shape."""
        return type(self).place_rows is not PrivateModule.place_rows

    def probe(self) -> Tensor | None:
        """Return `probe_losses` in evaluation mode, without gradients; restore random streams and the mode."""
        with evaluation_mode(self), torch.no_grad(), kept_generators():
            return self.probe_losses()

    def probe_losses(self) -> Tensor | None:
        """Return the losses of some rows that are not data, such as random tokens; None if the module has none.

        A private run is refused, before its ledger opens, if all of them are NaN or infinite. Called in evaluation
        mode and without gradients.
        """
        made: Any = getattr(self, "longest_rows", None)
        return None if made is None else self.per_row_loss(made(1))

    def save_model(self, folder: str | Path) -> Path:
        """Write the trained state dict into ``folder``, which also gets a copy of the card."""
        return save_weights(self.state_dict(), folder)

    def assumptions(self) -> list[str]:
        """Return the trusted assumptions of a claim besides the mechanism, as statements for the card."""
        return []

    def configure_optimizers(self) -> Any:
        spec = self.optimizer_spec
        if spec is None:
            raise ConfigurationError(
                f"{type(self).__name__} has neither optimizer=OptimizerSpec(...) nor configure_optimizers, so it has "
                "no optimizer. Define one of them."
            )
        # The accountant attached the mode in its ``setup``, which Lightning runs before it builds optimizers.
        noise_std = self.privacy.gradient_noise_std if spec.uses_noise_std else 0.0
        return spec.build(self.parameters(), steps=max(0, self.trainer.max_steps), noise_std=noise_std)

    def configure_model(self) -> None:
        """Shard the parameters over the ranks, once, if the strategy shards (``trainer=fsdp``)."""
        if self._shards is None and self.device_mesh is not None:
            from lit_dpret.distributed.fsdp import ShardedParameters  # not needed by runs on one process

            compute = torch.bfloat16 if str(self.trainer.precision) == "bf16-mixed" else None
            self._shards = ShardedParameters(self, self.device_mesh["data_parallel"], compute_dtype=compute)
            self.receive_handover(self._shards.handover(Ranks.here()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.get("state_dict")) is not None:
            keep_masters(state, self, self.trainer.optimizers)
        super().on_save_checkpoint(checkpoint)

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return no callbacks; refuse settings that need Lightning's optimization, and name the replacement."""
        training = self._trainer is not None and self._trainer.state.fn == "fit"
        if training:
            self._refuse_other_data()
        if training and self.privacy.guarantee == "dp":
            refuse_other_sums(self._trainer)
        return []

    def _refuse_other_data(self) -> None:
        """Refuse an object that is not a DataModule, before Lightning calls methods that it lacks."""
        trainer = self.trainer
        data: Any = getattr(trainer, "datamodule", None)
        if data is None or isinstance(data, LightningDataModule):
            return
        trainer.datamodule = None  # type: ignore[attr-defined]  # otherwise Lightning reports the error to it
        if isinstance(data, type):
            raise ConfigurationError(
                f"datamodule={data.__name__} of trainer.fit is a class. Pass an instance: "
                f"datamodule={data.__name__}(...)."
            )
        raise ConfigurationError(
            f"trainer.fit(datamodule=...) got a {type(data).__name__}, not a LightningDataModule. Wrap a data set in "
            "UnitDataModule(dataset, unit_of=...), where unit_of names the unit of each row."
        )

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]] | None:
        """Return the token ids of texts, queries or passages; None if the module reads no tokens.

        With ``whole``, ids are not truncated to the side's maximal length: a difference shows what is cut.
        """
        return None

    def canary_scores(self, rows: Sequence[Row]) -> Tensor:
        """Return how well the model knows each row, higher for trained ones, float64 on the CPU; here minus the loss.

        This is deterministic, and restores the module's mode. Scores of private rows are as private as the rows.
        """
        with evaluation_mode(self), torch.no_grad():
            found = [-self.per_row_loss(features) for features in self.features_in_turn(rows)]
        return torch.cat(found).double().cpu()

    def features_in_turn(self, rows: Sequence[Row], *, at_once: int = 32) -> Iterator[Any]:
        """Yield ``collate_rows`` of some rows at a time, on the module's device."""
        for part in rows_in_turn(len(rows), at_once):
            yield map_rows(lambda tensor: tensor.to(self.device), self.collate_rows(list(rows[part])))
