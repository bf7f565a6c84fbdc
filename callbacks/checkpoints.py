"""Checkpoints of a private run: taken between two logical steps, without values that no noise covers.

Within a logical step only Lightning's counters change, so a checkpoint requested there becomes the one from before the
step. Noise covers the trained parameters, and what optimizers, schedules, loops and averages derive from them.
Everything else passes only if it is unchanged since before the first private batch.
"""

from __future__ import annotations

import hashlib
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch import Tensor
from torch.nn import Parameter

from lit_dpret.callbacks.own_code import holds_data, settings_in
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.ledger.gate import public_names, way_to_declare
from lit_dpret.privacy.ledger.trained import TRAINED_KEY
from lit_dpret.privacy.sampling import PrivateBatchSampler
from lit_dpret.privacy.state_watch import checksums
from lit_dpret.privacy.user_code import is_library
from lit_dpret.privacy.user_generators import kept_generators
from lit_dpret.texts import queries_of, refuse_quoted


class BetweenSteps:
    """Restrict the checkpoints of one fit to moments between logical steps.

    Guarantees:
        - A checkpoint requested within a logical step resumes with the whole of that step.
        - None is written during an update: a request is refused, or after an error skipped with a warning.
        - A checkpoint goes to ``complete`` once every callback and the module have added their parts, also after the
          fit. If it is refused there, it is not written; after an error it is skipped with a warning.
        - SLURM's request to requeue the job is served after the current step, by all ranks at once.

    The Trainer's ``save_checkpoint`` is replaced until `release`, and ``dump_checkpoint`` until its next fit.
    """

    def __init__(self, trainer: L.Trainer, module: Any, complete: Callable[[dict[str, Any]], None]) -> None:
        self._trainer, self._module, self._complete = trainer, module, complete
        self.saving = False
        self._step = -1
        self._before: dict[str, int] = {}
        self._requeue_signal: int | None = None
        self._requeue_asked = False
        self.release()  # from an earlier fit that ended by an error
        self._save = trainer.save_checkpoint
        vars(trainer)["save_checkpoint"] = self._save_between
        connector = trainer._checkpoint_connector
        vars(connector).pop("dump_checkpoint", None)
        self.put_together = connector.dump_checkpoint
        vars(connector)["dump_checkpoint"] = self._put_together_whole

    def release(self) -> None:
        """Restore the Trainer's own ``save_checkpoint``."""
        vars(self._trainer).pop("save_checkpoint", None)

    def begin_batch(self, step: int) -> None:
        """Record the counters before step ``step``, at its first physical batch, which Lightning counts as ready."""
        if step == self._step:
            return
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        self._step = step
        self._before = {"total": progress.total.ready - 1, "current": progress.current.ready - 1}
        self._before["stepped"] = loop._batches_that_stepped

    def set_back(self, checkpoint: dict[str, Any], steps_done: int) -> None:
        """Reset the loop's counters in ``checkpoint`` to the start of an unfinished step."""
        if self._step != steps_done:
            return
        loop = checkpoint["loops"]["fit_loop"]
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = self._before["stepped"]
        progress = loop["epoch_loop.batch_progress"]
        progress["is_last_batch"] = False
        for part in ("total", "current"):
            progress[part] = dict.fromkeys(progress[part], self._before[part])

    def _save_between(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        reason = "the update of a step was not finished, so weights, optimizer and ledger do not match"
        if not getattr(self._module, "updating", False):
            try:
                self._save(filepath, weights_only, storage_options)
                return
            except ConfigurationError as refusal:
                if not self._trainer.interrupted:
                    raise
                reason = str(refusal).rstrip(".")
        elif not self._trainer.interrupted:
            raise ResumeError(
                f"The checkpoint {filepath} cannot be written now: {reason}. Save it in on_train_batch_end."
            )
        warnings.warn(f"The checkpoint {filepath} was skipped: {reason}. Earlier ones are complete.", stacklevel=2)

    def rescue(self, path: Path) -> None:
        """Write a checkpoint after an error; if user callbacks are refused or fail, write it without them."""
        if getattr(self._module, "updating", False):
            return
        trainer: Any = self._trainer
        everyone = trainer.callbacks
        for callbacks in (everyone, [each for each in everyone if is_library(type(each).__module__)]):
            trainer.callbacks = callbacks
            try:
                self._save(path, None, None)
                return
            except Exception as error:  # the run already ends by another error
                warnings.warn(f"{path} could not be written with {len(callbacks)} callbacks: {error}", stacklevel=2)
            finally:
                trainer.callbacks = everyone

    def _put_together_whole(self, weights_only: bool | None = None) -> dict[str, Any]:
        self.saving = True
        try:
            checkpoint = self.put_together(weights_only)
        finally:
            self.saving = False
        if self._trainer.lightning_module is self._module:
            self._complete(checkpoint)
        return checkpoint

    # -- SLURM -------------------------------------------------------------------------------

    def note_requeue_quietly(self) -> None:
        """Record SLURM's requeue signal instead of letting Lightning write a checkpoint in the signal handler."""
        environment = self._trainer._accelerator_connector.cluster_environment
        if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self._requeue_signal = int(environment.requeue_signal or signal.SIGUSR1)

        def note(signum: int, frame: Any) -> None:
            self._requeue_asked = True

        signal.signal(self._requeue_signal, note)

    def end_step(self, ranks: Ranks) -> None:
        """Write SLURM's checkpoint and requeue the job if a rank was signalled; a collective call after a step."""
        if self._requeue_signal is None or not any(ranks.gather(self._requeue_asked, quick=True)):
            return
        self._requeue_asked = False
        self._trainer._signal_connector._slurm_sigusr_handler_fn(self._requeue_signal, None)  # type: ignore[arg-type]


def hide_batches(checkpoint: dict[str, Any], steps_done: int) -> None:
    """Count steps instead of physical batches in ``checkpoint``, whose number may be private."""
    loop = checkpoint["loops"]["fit_loop"]
    loop["epoch_loop.state_dict"].pop("_batches_that_stepped", None)
    for part in ("total", "current"):
        progress = loop["epoch_loop.batch_progress"][part]
        progress |= dict.fromkeys(progress, steps_done)


def count_by_steps(checkpoint: dict[str, Any], steps_done: int, sampler: PrivateBatchSampler) -> None:
    """Set the loops' counters in ``checkpoint`` to those that this fit would have after ``steps_done`` steps.

    Lightning ends an epoch at a number of batches, and the sampler at a number of steps. If they disagree, an epoch is
    trained twice or ends inside a step.
    """
    if steps_done == 0:
        return
    epochs, steps = divmod(steps_done - 1, sampler.steps_per_epoch)
    parts = sampler.physical_batches_per_step
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    batches = progress["total"]["ready"] if parts is None else steps_done * parts
    for part, count in (("total", batches), ("current", (steps + 1) * (parts or 1))):
        progress[part] = dict.fromkeys(progress[part], count) | {"completed": count - 1}
    progress["is_last_batch"] = steps + 1 == sampler.steps_per_epoch
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = batches - 1
    for part in ("total", "current"):
        begun = {"ready": epochs + 1, "started": epochs + 1}
        loop["epoch_progress"][part] = dict.fromkeys(loop["epoch_progress"][part], epochs) | begun


_Path = tuple[str, ...]
_TRUSTED = ("lightning.", "lit_dpret.")
#: Functions of released updates and of the schedule, or values that the accountant sets again.
_RELEASED: set[_Path] = {
    ("optimizer_states",), ("lr_schedulers",), ("averaging_state", "n_averaged"), ("epoch",), ("global_step",),
}  # fmt: skip
_WEIGHTS = ("state_dict", "current_model_state")
#: A tensor in a callback's state with at most this many values may be a setting.
_SMALL = 8
#: The keys that Lightning puts into a checkpoint. Hyper-parameters are checked earlier (`refuse_saved_data`).
_OF_LIGHTNING = frozenset({
    "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states",
    "lr_schedulers", "hparams_name", "hparams_type", "hyper_parameters", "datamodule_hparams_name",
    "datamodule_hparams_type", "datamodule_hyper_parameters", "averaging_state", "current_model_state",
})  # fmt: skip


class CheckpointGate:
    """Allow only checkpoints that hold the run's releases, unchanged initial values, and values declared public.

    Guarantees:
        - A value that changed since the first private batch is refused by name, unless a part of the name is listed in
          ``public_metrics``. With ``declare``, which is called with the name, it passes. This covers buffers,
          hyper-parameters, states of callbacks, modules, metrics, loaders and DataModules, attributes pickled with a
          state dict or tensor, and whatever ``on_save_checkpoint`` adds.
        - What user code saves in addition to the weights from the start is not data: few values, no large tensor, no
          query of the run.
        - States of this package's and Lightning's own callbacks pass as these callbacks return them.
    """

    def __init__(
        self, trainer: L.Trainer, module: Any, start: Mapping[str, Any], declare: Callable[[str], None] | None
    ) -> None:
        self._trainer, self._module, self._declare = trainer, module, declare
        self._start = dict(self._fingerprints(start))
        self._refuse_data(start)

    def expect(self, content: Mapping[str, Any]) -> None:
        """Allow these initial values too."""
        self._start.update(self._fingerprints(content))

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        public = self._public
        expected = self._start | dict(self._fingerprints(self._own(callbacks)))
        # Some of the runs that the checkpoint names are named only in a part's metadata.
        runs = {found for path, found in expected.items() if TRAINED_KEY in path}
        for path, found in self._fingerprints(checkpoint):
            name = ".".join(path)
            if (TRAINED_KEY in path and found in runs) or found == self._version_of(path):
                continue
            if expected.get(path) == found or not public.isdisjoint((name, *path, *name.split("."))):
                continue
            if self._declare is None:
                raise ConfigurationError(
                    f"A checkpoint under privacy={self._module.privacy.name} would hold {name}, which changed since "
                    "the training began: a number computed from private rows is an uncounted release. Remove it; or "
                    "list its name in public_metrics of the object that holds it, if it depends on no private row; or "
                    f"{way_to_declare(self._module)}, and the card will name it and state no epsilon.",
                    trap="T25",
                )
            self._declare(f"{name} in a checkpoint")

    @property
    def _public(self) -> frozenset[str]:
        trainer: Any = self._trainer
        return frozenset(public_names([self._module, trainer.datamodule, *trainer.callbacks]))

    def _refuse_data(self, start: Mapping[str, Any]) -> None:
        trainer: Any = self._trainer
        public, texts, names = self._public, dict[str, str](), dict[str, str]()
        for path, value in self._of_users(start):
            if not public.isdisjoint((".".join(path), *path)):
                continue
            leaves = [(p, each) for p, each in _leaves(value, path) if public.isdisjoint((".".join(p), *p))]
            texts |= {
                f"{'.'.join(place)} {where} in a checkpoint": each for place, leaf in leaves
                for where, each in settings_in(leaf, keys=True) if isinstance(each, str)
            }  # fmt: skip
            names |= {f"a key of {'.'.join(path)} ({n})": key for n, (place, _) in enumerate(leaves) for key in place}
            if not holds_data([each for _, each in leaves], small=_SMALL):
                continue
            if self._declare is None:
                raise ConfigurationError(
                    f"Checkpoints of privacy={self._module.privacy.name} would hold {'.'.join(path)}, which is "
                    "data, not a setting. Build it in setup instead of saving it in a state; or list its name in "
                    "public_metrics if it depends on no private row.",
                    trap="T25",
                )
            self._declare(f"{'.'.join(path)} in a checkpoint")
        if (texts or names) and self._declare is None:
            with kept_generators():  # reading rows may draw random numbers
                refuse_quoted(queries_of(trainer.datamodule), texts, names)

    def _of_users(self, start: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
        """Yield what code from outside this package and Lightning adds to a checkpoint, except weights."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        trusted = self._own(callbacks)
        for key, value in start.items():
            if key not in _OF_LIGHTNING and key not in trusted and not key.startswith("lit_dpret"):
                yield (key,), value
        for key, value in start.get("callbacks", {}).items():
            if key not in trusted["callbacks"]:
                yield ("callbacks", key), value
        for name, part in self._module.named_modules():
            if not is_library(part.get_extra_state.__module__):
                key = f"{name}._extra_state".lstrip(".")
                yield ("state_dict", key), start["state_dict"].get(key)

    def _version_of(self, path: _Path) -> str | None:
        """Return the fingerprint of a part's format version, as PyTorch notes it, for parts built in the meantime."""
        _, *place = path
        if place[:1] != ["_metadata"] or place[-1] != "version":
            return None
        parts = dict(self._module.named_modules())
        return _fingerprint(getattr(parts.get(".".join(place[1:-1])), "_version", None))

    def _own(self, callbacks: list[Any]) -> dict[str, Any]:
        """Return what this package and Lightning put into a checkpoint now."""
        own: dict[str, Any] = {}
        kinds: tuple[Any, ...] = type(self._module).__mro__
        hooks = (kind for kind in kinds if "on_save_checkpoint" in vars(kind))
        next(kind for kind in hooks if kind.__module__.startswith(_TRUSTED)).on_save_checkpoint(self._module, own)
        trusted = (c for c in callbacks if getattr(c.state_dict, "__module__", "").startswith(_TRUSTED))
        return own | {"callbacks": {callback.state_key: callback.state_dict() for callback in trusted}}

    def _fingerprints(self, checkpoint: Mapping[str, Any]) -> Iterator[tuple[_Path, str]]:
        weights = {name for name, p in self._module.named_parameters(remove_duplicate=False) if p.requires_grad}
        for path, value in _leaves(checkpoint, ()):
            if path[0] in _WEIGHTS:
                path = ("state_dict", *path[1:])  # one name, even if an average replaced the weights
                if isinstance(value, Tensor) and ".".join(path[1:]) in weights:
                    continue
            yield path, _fingerprint(value)


def _leaves(content: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield the values in nested dicts and lists, except what is released or set again by the accountant."""
    loops = path[:1] == ("loops",) and "combined_loader" not in path  # the latter holds the state of a user's loader
    if path in _RELEASED:
        return
    nested = isinstance(content, (Mapping, list, tuple))
    if nested:
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from _leaves(value, (*path, str(key)))
    elif not loops:
        yield path, content
    if nested or type(content) in (Tensor, Parameter):
        for key, value in getattr(content, "__dict__", {}).items():  # pickled too
            yield from _leaves(value, (*path, key))


def _fingerprint(value: Any) -> str:
    try:
        if isinstance(value, Tensor):
            return f"{value.dtype} {tuple(value.shape)} {checksums([value])[0]}"
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # no checkpoint can be written of it either
        return repr(value)
