"""Checkpoints that name the class of their module and the plain arguments that built it."""

from __future__ import annotations

from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import lightning as L
from torch import nn

from lit_dpret.distributed.handover import refuse_zero_state
from lit_dpret.errors import DataError, ResumeError, first_line
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.privacy.ledger.trained import mark_trained, note, note_built, noted, remember_loaded
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.privacy.user_code import items_of

#: The checkpoint key for the name of the class that wrote it.
CLASS_KEY = "lit_dpret_class"
#: The checkpoint key for the settings of the optimizer.
OPTIMIZER_KEY = "lit_dpret_optimizer"
_CLASS = "class"
_NOT_KEPT = ("self", "__class__", "privacy", "optimizer")


class NotesItsStart(ABCMeta):
    """Classes whose objects record the weights set by their constructor, in any subclass."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        module = ABCMeta.__call__(cls, *args, **settings)  # Lightning mistakes frames with super() for constructors
        given = [part for part in (*args, *settings.values()) if isinstance(part, nn.Module)]
        note_built(module, given)
        return module


class Checkpointed(L.LightningModule, metaclass=NotesItsStart):
    """A module whose checkpoints load without knowledge of its constructor arguments.

    Guarantees:
        - Checkpoints contain only plain values and tensors, so that they are read without running code.
        - ``Class.load_from_checkpoint(path)`` returns the module with its weights, whichever mode trained it.
        - Checkpoints and state dicts name the runs that trained their weights on private data, and a module that
          loads them remembers these runs.
    """

    _saved_optimizer: Mapping[str, Any] = {}

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        """Store the plain values of a constructor's ``locals()`` in every checkpoint, for ``load_from_checkpoint``."""
        kept = {name: plain_value(v) for name, v in settings.items() if name not in _NOT_KEPT and is_plain(v)}
        self.save_hyperparameters(kept, logger=False)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        *,
        privacy: PrivacyMode | None = None,
        optimizer: OptimizerSpec | None = None,
        **settings: Any,
    ) -> Self:
        """Return the module of a checkpoint, in evaluation mode, for encoding, writing or exporting.

        Args:
            checkpoint_path: The checkpoint of a run of this class.
            privacy: A mode to train on with; ``NoPrivacy()`` by default. To continue a private run, use
                ``resume=true``, which keeps its ledger.
            optimizer: As for the constructor.
            settings: Constructor arguments that are not plain values, or that should differ.
        """
        if not Path(checkpoint_path).is_file():
            raise DataError(
                f"checkpoint_path={checkpoint_path} is not an existing file. Give a .ckpt file that a run wrote."
            )
        try:
            module = super().load_from_checkpoint(
                checkpoint_path,
                map_location="cpu",
                weights_only=True,
                privacy=privacy or NoPrivacy(),
                optimizer=optimizer or OptimizerSpec(),
                **settings,
            )
        except (RuntimeError, TypeError, KeyError, UnpicklingError) as error:
            raise DataError(f"{checkpoint_path} is not a checkpoint of {cls.__name__}: {first_line(error)}") from error
        module.eval()
        return module

    def take_precision(self) -> None:
        """Convert the module, and averages of its weights, to the trainer's precision.

        Lightning converts the module only after it has loaded a checkpoint, and would round its float64 weights to
        float32 on the way. It never converts an average, with which weights are swapped.
        """
        averages = (getattr(callback, "_average_model", None) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        for part in (self, *averages):
            if part is not None:
                self.trainer.precision_plugin.convert_module(part)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mark_trained(self, noted(checkpoint), whole=True)
        trainer = self._trainer
        if trainer is not None and trainer.state.fn == "fit" and type(trainer.strategy).__name__ != "ZeroStrategy":
            refuse_zero_state(checkpoint)
        if trainer is not None and trainer.state.fn == "fit":
            self.take_precision()
            self._saved_optimizer = checkpoint.get(OPTIMIZER_KEY, {})
            self.refuse_another_optimizer()  # a user's own optimizer is built later, and checked then

    def refuse_another_optimizer(self) -> None:
        """Refuse another optimizer than the checkpoint's, whose state would silently replace its settings."""
        saved, now = self._saved_optimizer, _optimizer_of(self)
        for name in sorted(saved.keys() & now.keys()):
            if saved[name] != now[name]:
                what = "configure_optimizers returns " if name == _CLASS else f"model.optimizer.{name}="
                raise ResumeError(
                    f"{what}{now[name]}, but the checkpoint was trained with {saved[name]} and holds that optimizer's "
                    "state. Restore the setting, or begin a new run in another hydra.run.dir."
                )

    def complete_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Change how a checked checkpoint of a private run is written; called last."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = type(self)
        checkpoint[CLASS_KEY] = f"{own.__module__}.{own.__qualname__}"
        checkpoint[OPTIMIZER_KEY] = _optimizer_of(self)
        note(self, checkpoint)
        state = checkpoint.get("state_dict")
        if state is not None and not hasattr(state, "_metadata"):  # assembled by a strategy or an average
            checkpoint["state_dict"] = whole = OrderedDict(state)
            whole._metadata = OrderedDict({"": {}})  # type: ignore[attr-defined]
            note(self, whole._metadata[""])  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        own = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if own is not None:
            note(self, own)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any, **named: Any
    ) -> None:
        if runs := noted(local_metadata):
            mark_trained(self, runs, whole=True)
            # The state dict of a part, extracted from this one, names no runs.
            inside = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
            remember_loaded(inside, self, runs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest, **named)


def _optimizer_of(module: Any) -> dict[str, Any]:
    """Return the settings of a module's optimizer as plain values, and the class of the optimizer in use."""
    spec = getattr(module, "optimizer_spec", None)
    settings = {} if spec is None else {name: plain_value(value) for name, value in asdict(spec).items()}
    found = [] if module._trainer is None else module.trainer.optimizers
    return settings | ({_CLASS: " and ".join(map(_named, found))} if found else {})


def _named(optimizer: Any) -> str:
    if type(optimizer).__module__.startswith("deepspeed."):  # its class depends on the stage, which a resume may change
        optimizer = optimizer.optimizer
    sizes = [str(len(group["params"])) for group in optimizer.param_groups]
    name = type(optimizer).__name__
    return name if len(sizes) == 1 else f"{name} with groups of {' and '.join(sizes)} parameters"


def is_plain(value: Any) -> bool:
    """Return whether a value can be stored in a checkpoint that is read without running code."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in items_of(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(is_plain(item) for _, item in items_of(value))
    return value is None or isinstance(value, (bool, int, float, str, Path))


def plain_value(value: Any) -> Any:
    """Return the value as lists, dicts, numbers and texts."""
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in items_of(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_value(item) for _, item in items_of(value)]
    return str(value) if isinstance(value, Path) else value
