"""The gate between a private run and its checkpoints, which are handed on like its weights.

What noise covers may stand in a checkpoint: the trained parameters, and what optimizers, schedules, loops and averages
make of them. Everything else that a module, a callback or a DataModule puts there is let through as it was before the
first private batch. A number that changed since may be one of private rows; it does not say.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.checksums import checksums

_Path = tuple[str, ...]
_TRUSTED = ("lightning.", "lit_dpret.")
#: What is a function of released updates and of the schedule, or is put in anew by the accountant.
_RELEASED: set[_Path] = {
    ("optimizer_states",), ("lr_schedulers",), ("averaging_state", "n_averaged"), ("epoch",), ("global_step",),
}  # fmt: skip
_WEIGHTS = ("state_dict", "current_model_state")


class CheckpointGate:
    """Let a checkpoint pass that holds what the run releases, what it held at the start, and what is declared public.

    Guarantees:
        - A buffer, hyper-parameter, state of a user's callback, module, metric, loader or DataModule, and whatever
          their ``on_save_checkpoint`` adds, is refused by name when it is not as it was before the first private batch,
          unless a part of its name is listed in ``public_metrics`` of one of them. With ``declare`` it passes, and
          ``declare`` was called with its name before.
        - The states of this package's and Lightning's own callbacks pass as these callbacks give them.
        - What is taken out of a checkpoint is never missed.

    Args:
        trainer: Of the fit.
        module: Names its mode, and what it declares to be public.
        start: A checkpoint from before the first private batch.
        declare: Notes that a private number is handed on; None where that is refused.
    """

    def __init__(
        self, trainer: L.Trainer, module: Any, start: Mapping[str, Any], declare: Callable[[str], None] | None
    ) -> None:
        self._trainer, self._module, self._declare = trainer, module, declare
        self._start = self._fingerprints(start)
        self._declared: set[str] = set()

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse what else a complete checkpoint holds, or note it.

        Raises:
            ConfigurationError: Naming it.
        """
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        data: Any = self._trainer.datamodule  # type: ignore[attr-defined]
        public = {name for each in (self._module, data, *callbacks) for name in getattr(each, "public_metrics", ())}
        expected = self._start | self._fingerprints(self._own(callbacks))
        for path, found in self._fingerprints(checkpoint).items():
            name = ".".join(path)
            if expected.get(path) == found or not public.isdisjoint((name, *path, *name.split("."))):
                continue
            if self._declare is None:
                raise ConfigurationError(
                    f"A checkpoint of a run with privacy={self._module.privacy.name} would hold {name}, which changed "
                    "since the training began: a number computed on private rows is a release that nobody counts. "
                    "Leave it out. If no private row is behind it, list its name, or that of what holds it, in "
                    "public_metrics of the module, callback or DataModule; or set model.log_private_loss=true, and "
                    "the card will name it and state no epsilon.",
                    trap="T25",
                )
            if name not in self._declared:
                self._declare(f"{name} in a checkpoint")
                self._declared.add(name)

    def _own(self, callbacks: list[Any]) -> dict[str, Any]:
        """What this package and Lightning put there now."""
        own: dict[str, Any] = {}
        kinds: tuple[Any, ...] = type(self._module).__mro__
        hooks = (kind for kind in kinds if "on_save_checkpoint" in vars(kind))
        next(kind for kind in hooks if kind.__module__.startswith(_TRUSTED)).on_save_checkpoint(self._module, own)
        trusted = (c for c in callbacks if getattr(c.state_dict, "__module__", "").startswith(_TRUSTED))
        return own | {"callbacks": {callback.state_key: callback.state_dict() for callback in trusted}}

    def _fingerprints(self, checkpoint: Mapping[str, Any]) -> dict[_Path, str]:
        """What stands for each value that no noise covers, by where it stands."""
        weights = {name for name, p in self._module.named_parameters(remove_duplicate=False) if p.requires_grad}
        found = {}
        for path, value in _leaves(checkpoint, ()):
            if path[0] in _WEIGHTS:
                path = ("state_dict", *path[1:])  # one name, where an average took the place of the weights
                if isinstance(value, Tensor) and ".".join(path[1:]) in weights:
                    continue
            found[path] = _fingerprint(value)
        return found


def _leaves(content: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """The values in nested dicts and lists, but for what is released or put in anew by the accountant."""
    loops = path[:1] == ("loops",) and "combined_loader" not in path  # of which a user's loader keeps the state
    if path in _RELEASED:
        return
    if isinstance(content, (Mapping, list, tuple)):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from _leaves(value, (*path, str(key)))
    elif not loops:
        yield path, content


def _fingerprint(value: Any) -> str:
    try:
        if isinstance(value, Tensor):
            return f"{value.dtype} {tuple(value.shape)} {checksums([value])[0]}"
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # no checkpoint can be written of it either
        return repr(value)
