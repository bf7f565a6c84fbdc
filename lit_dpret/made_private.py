"""Make an existing module private: a wrapper that adds the accountant and the card."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import default_collate

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, UnsupportedModelError, first_line
from lit_dpret.modules import OptimizerSpec, PrivateModule
from lit_dpret.modules.checkpointed import CLASS_KEY, is_plain, plain_value
from lit_dpret.modules.private_module import save_weights
from lit_dpret.privacy.content import copied_row
from lit_dpret.privacy.modes import DPSGD, PrivacyMode
from lit_dpret.privacy.state_watch import state_of_part
from lit_dpret.privacy.user_code import reads_of
from lit_dpret.settings import naming_arguments

#: Prefix of the names of the inner module's weights.
_INNER = "module."
#: Key for a batch that is a single tensor rather than a dict or tuple of tensors.
_LONE = ""
#: Descriptions of the arguments that `make_private` needs, and hints on where to give arguments often passed to it.
_ARGUMENTS = {
    "module": "the LightningModule, or another torch.nn.Module, that is trained",
    "per_row_loss": "a function of the module and a batch that returns one loss for each row, as with reduction='none'",
    "eps": "the budget of the whole run, such as 3",
    "batch_size": "give UnitDataModule(expected_batch_size=...)",
    "resume": "give the Trainer callbacks=[PrivacyAccountant(resume=True)], and trainer.fit(ckpt_path=...)",
    "lr": "give optimizer=OptimizerSpec(name=..., lr=...)",
    "steps": "give the Trainer max_steps",
    "epochs": "give the Trainer max_steps",
    **dict.fromkeys(
        ("dataset", "data_loader", "dataloader", "datamodule"),
        "give trainer.fit datamodule=UnitDataModule(dataset, expected_batch_size=...)",
    ),
    **dict.fromkeys(
        ("expected_batch_size", "physical_batch_size", "sampling", "sample_rate", "unit_of", "unit_name"),
        "it belongs to UnitDataModule",
    ),
    "max_steps": "it belongs to the Trainer",
    "max_epochs": "it belongs to the Trainer",
    "privacy": "the mode is DPSGD, with arguments of make_private; for another mode derive from PrivateModule",
    "log_private_loss": "derive from PrivateModule, which has it",
}
#: Hooks that Lightning would call and a wrapper around the module does not.
_HOOKS = {
    *vars(ModelHooks), *vars(DataHooks), *vars(CheckpointHooks), "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks", "backward",
}  # fmt: skip
#: Parts of hook names that belong to validation, test and prediction, which are left to the module.
_OUTSIDE_OF_FIT = ("_validation", "_test", "_predict", "val_dataloader", "train_dataloader")


class MadePrivate(PrivateModule):
    """The result of `make_private`: the inner module, trained by the loop of `PrivateModule`."""

    way_out_of_coupling = "collate_fn and per_row_loss; in-batch negatives need lit_dpret.modules.DualEncoder"
    way_to_declare = "derive from PrivateModule and set log_private_loss=True"

    def __init__(
        self,
        module: nn.Module,
        per_row_loss: Callable[[Any, Any], Tensor],
        collate_fn: Callable[[list[Any]], Any],
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec | None,
        public_rows: Sequence[Any] = (),
    ) -> None:
        super().__init__(privacy=privacy, optimizer=optimizer)
        self.module, self._public_rows = module, list(public_rows)
        # Not registered as submodules, or checkpoints would hold weights that the user's class cannot load.
        vars(self).update(_loss_of_rows=per_row_loss, _collate_fn=collate_fn)
        # Earlier private training of these counts too, even if only their weights are read and they are never called.
        self._loss_of_rows: Callable[[Any, Any], Tensor]
        self._collate_fn: Callable[[list[Any]], Any]
        self._read_by_loss = _modules_read(per_row_loss)
        self._hparams_name = getattr(module, "_hparams_name", None)
        self.public_metrics = getattr(module, "public_metrics", ())

    @property
    def keeps_hparams_of(self) -> nn.Module:
        """Return the module whose hyper-parameters checkpoints and logs hold, so that they are checked."""
        return self.module

    @property
    def hparams(self) -> Any:
        """The plain hyper-parameters of the inner module, for ``load_from_checkpoint`` of its class."""
        found = getattr(self.module, "hparams", {})
        return {name: plain_value(value) for name, value in found.items() if is_plain(value)}

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **settings: Any) -> Any:  # type: ignore[override]
        """Refuse to load: a checkpoint holds the inner module."""
        raise UnsupportedModelError(
            "The result of make_private cannot be loaded from a checkpoint, which holds the module inside it. Call "
            f"load_from_checkpoint of that module's class ({cls.__name__}). To continue training, give the Trainer "
            "callbacks=[PrivacyAccountant(resume=True)], and trainer.fit a new make_private(...) and "
            f"ckpt_path={checkpoint_path}."
        )

    def complete_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rename the weights to the inner module's own names, so that its class can load them."""
        if not self.trainer.strategy.restore_checkpoint_after_setup:  # otherwise it loads by the wrapper's names
            checkpoint[CLASS_KEY] = _name_of(type(self.module))
            _rename(checkpoint, lambda name: name.removeprefix(_INNER))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if CLASS_KEY not in checkpoint and not any(name.startswith(_INNER) for name in checkpoint["state_dict"]):
            raise ResumeError(
                f"The checkpoint of {type(self).__name__} comes from training without privacy, which no card would "
                "count. Continue from a checkpoint of this run folder, or omit trainer.fit(ckpt_path=).",
                trap="T30",
            )
        # Also compare weight names, since the class may be imported from elsewhere by now.
        if checkpoint.get(CLASS_KEY) == _name_of(type(self.module)) or (
            checkpoint["state_dict"].keys() == self.module.state_dict().keys()
        ):
            _rename(checkpoint, lambda name: _INNER + name)
        super().on_load_checkpoint(checkpoint)

    def collate_rows(self, rows: list[Any]) -> Any:
        try:  # copies: collations may pop labels from rows or write into them, and rows are also collated on trial
            features = _as_dicts(self._collate_fn([copied_row(row) for row in rows]))
        except (RuntimeError, TypeError) as error:
            if self._collate_fn is not default_collate:
                raise
            raise DataError(
                "collate_fn: torch's default_collate cannot make a batch of these rows "
                f"({first_line(error).rstrip('.')}). Pass make_private a collate_fn that does, for example one that "
                "pads to one length."
            ) from error
        _refuse_other_features(features, len(rows))
        return features if isinstance(features, dict) else {_LONE: features}

    def per_row_loss(self, rows: Any) -> Tensor:
        try:
            return self._loss_of_rows(self.module, _as_collated(rows))
        except MisconfigurationException as error:  # from Lightning, whose module logs nothing outside of its own hooks
            name = _logged_in(error.__traceback__)
            what = "What per_row_loss computes" if name is None else f"{name!r} of per_row_loss"
            raise ConfigurationError(
                f"{what} is logged inside a run with privacy={self.privacy.name}: a number computed on private rows is "
                "an uncounted release. Remove it. Log numbers of public rows in a callback that lists them in "
                "public_metrics, or derive from PrivateModule, which has log_private_loss.",
                trap="T25",
            ) from error

    def probe_losses(self) -> Tensor | None:
        if not self._public_rows:
            return None
        return torch.cat([self.per_row_loss(features) for features in self.features_in_turn(self._public_rows)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if get_spawning_popen() is not None:  # its class has the inner class's name, so pickle cannot find it by name
            raise ConfigurationError(
                "The result of make_private cannot be sent to a spawned process. For several processes set "
                "strategy='ddp' in the Trainer; for a loader that spawns its workers, set num_workers=0."
            )
        return super().__reduce_ex__(protocol)

    def configure_optimizers(self) -> Any:
        module: Any = self.module
        return module.configure_optimizers() if self.optimizer_spec is None else super().configure_optimizers()

    def configure_callbacks(self) -> list[Callback]:
        """Return an accountant and a card, each only if the Trainer has none."""
        super().configure_callbacks()
        present: list[Callback] = [] if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        if self._trainer is not None and (asked := self.trainer.state.fn) not in (None, "fit"):
            raise UnsupportedModelError(
                f"trainer.{asked.value} received the result of make_private, which can only be trained. Pass the inner "
                f"{type(self.module).__name__}, and non-private data: trainer.{asked.value}(private.module, loader)."
            )
        cards = [at for at, each in enumerate(present) if isinstance(each, PrivacyCard)]
        if not any(isinstance(each, PrivacyAccountant) for each in present):
            if not cards:
                return [PrivacyAccountant(), PrivacyCard()]
            present.insert(cards[0], PrivacyAccountant())  # its last record must precede the card
        return [] if cards else [PrivacyCard()]

    def save_model(self, folder: str | Path) -> Path:
        """Write the weights of the inner module, under its own names."""
        return save_weights(state_of_part(self.module), folder)


@naming_arguments("make_private", _ARGUMENTS, rest=DPSGD)
def make_private(
    module: nn.Module,
    *,
    per_row_loss: Callable[[Any, Any], Tensor],
    eps: float,
    optimizer: OptimizerSpec | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    public_rows: Sequence[Any] = (),
    unit: str = "record",
    **privacy: Any,
) -> MadePrivate:
    """Return a module around ``module`` that ``Trainer.fit`` trains under differential privacy, with ledger and card.

    The Trainer's ``default_root_dir`` gets the ledger, the card, and the weights in ``model/weights.pt``. To continue
    from a checkpoint, give the Trainer ``callbacks=[PrivacyAccountant(resume=True)]``.

    Guarantees:
        - ``module`` itself is trained, in place, on the gradients that `PrivateModule` computes: each unit's gradient
          is clipped exactly, and no update carries information about the data that is not noised and in the ledger.
        - Optimizer and schedules are those of ``module.configure_optimizers``, at their ``interval`` and ``frequency``,
          where a step is a logical one. Its ``training_step`` and ``validation_step`` do not run.
        - Layers that mix rows, losses that couple rows, and hooks that would never be called are refused by name.

    Args:
        module: A LightningModule, or any other module together with ``optimizer``.
        per_row_loss: Takes ``module`` and a collated batch, and returns one loss for each row (``reduction="none"``);
            the loss of a row depends on that row alone.
        eps: The budget of the whole run.
        optimizer: Replaces ``configure_optimizers`` of the module.
        collate_fn: As for a DataLoader, from the rows of a batch to tensors whose first axis is the rows.
        public_rows: Some rows without private data, as the data set returns them: synthetic or public. If none of them
            has a finite loss, the run is refused before its ledger opens; without them this is not checked.
        unit: Whose data the guarantee protects; ``record`` is what `UnitDataModule` draws.
        privacy: Other arguments of `DPSGD`, such as ``delta`` and ``max_grad_norm``.

    Raises:
        ConfigurationError: A setting is out of range, or nothing says how ``module`` is optimized.
        UnsupportedModelError: ``module`` is already private, or has hooks that a wrapper would not call.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"module={module!r} is not a torch.nn.Module: give make_private an object of such a class."
        )
    for argument, value in (("per_row_loss", per_row_loss), ("collate_fn", collate_fn)):
        if not callable(value):
            raise ConfigurationError(
                f"{argument}={value!r} is not callable, and make_private calls it with each batch."
            )
    if not _takes(per_row_loss, 2):
        name = getattr(per_row_loss, "__name__", repr(per_row_loss))
        raise ConfigurationError(f"per_row_loss={name} must take two arguments, the module and a batch.")
    if isinstance(eps, int | float) and not (math.isfinite(eps) and eps > 0):
        raise ConfigurationError(
            f"eps={eps!r} is not a positive, finite number. To train without a guarantee give trainer.fit the module "
            "itself, with a DataLoader."
        )
    _warn_of_untrained(module, per_row_loss)
    name = type(module).__name__
    if isinstance(module, PrivateModule):
        raise UnsupportedModelError(f"{name} is a PrivateModule already: give it to trainer.fit itself.")
    if hooks := sorted(hook for hook in _HOOKS if _is_own(module, hook)):
        raise UnsupportedModelError(
            f"{name}.{hooks[0]} would not be called: make_private wraps the module. Remove it, write it as a Callback "
            "of the Trainer, or derive from lit_dpret.PrivateModule, whose hooks run and are watched.",
            trap="T7",
        )
    if optimizer is None and not callable(getattr(module, "configure_optimizers", None)):
        raise ConfigurationError(
            f"{name} has no configure_optimizers, so nothing says how it is trained: give make_private "
            "optimizer=OptimizerSpec(name=..., lr=...)."
        )
    mode = DPSGD(eps=eps, unit=unit, **privacy)  # type: ignore[arg-type]
    kind: type[MadePrivate] = type(name, (MadePrivate,), {"__module__": __name__})  # the name that card and errors show
    return kind(module, per_row_loss, collate_fn, privacy=mode, optimizer=optimizer, public_rows=public_rows)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _rename(checkpoint: dict[str, Any], new_name: Callable[[str], str]) -> None:
    """Rename the weights of a checkpoint and the metadata of the modules that they belong to."""
    old = checkpoint["state_dict"]
    checkpoint["state_dict"] = state = OrderedDict((new_name(name), value) for name, value in old.items())
    notes = getattr(old, "_metadata", {})
    state._metadata = OrderedDict((new_name(name) if name else name, note) for name, note in notes.items())  # type: ignore[attr-defined]


def _logged_in(trace: TracebackType | None) -> str | None:
    """Return, from an error's traceback, the name of the metric that Lightning's ``log`` refused."""
    while trace is not None:
        if trace.tb_frame.f_code is L.LightningModule.log.__code__:
            return str(trace.tb_frame.f_locals.get("name"))
        trace = trace.tb_next
    return None


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    """Return whether a function can be called with this many arguments; true where Python cannot determine it."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # of a builtin
        return True
    return True


def _warn_of_untrained(module: nn.Module, per_row_loss: Any) -> None:
    """Warn of a loss whose own parameters look trainable, such as a temperature, but are not trained."""
    owner = per_row_loss if isinstance(per_row_loss, nn.Module) else getattr(per_row_loss, "__self__", None)
    trained = {id(each) for each in module.parameters()}
    own = owner.named_parameters() if isinstance(owner, nn.Module) else ()
    if left := [name for name, each in own if each.requires_grad and id(each) not in trained]:
        rank_zero_warn(
            f"per_row_loss={type(owner).__name__} has parameters ({left[0]}) that are not trained: only those of "
            f"{type(module).__name__} are. Make the loss a part of the module (module.loss = loss), or freeze its "
            "parameters (requires_grad_(False))."
        )


def _modules_read(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a function reads from its surroundings, such as a teacher model."""
    if not inspect.isfunction(function):
        return []
    return [value for _, value in reads_of(function) if isinstance(value, nn.Module)]


def _is_own(module: nn.Module, hook: str) -> bool:
    """Return whether a LightningModule overrides this fit hook of Lightning's."""
    own = inspect.getattr_static(type(module), hook, None)
    if hook.startswith("_") or any(part in hook for part in _OUTSIDE_OF_FIT):
        return False
    return isinstance(module, L.LightningModule) and own is not inspect.getattr_static(L.LightningModule, hook, None)


class _Place(int):
    """An index in a tuple or list, as opposed to a dict key."""


class _Field(str):
    """A name in a named tuple or in a mapping other than dict, of this ``kind``."""

    kind: Any


def _field(name: str, kind: type) -> _Field:
    made = _Field(name)
    made.kind = kind
    return made


def _as_dicts(batch: Any) -> Any:
    """Return a collated batch as nested dicts, as a `UnitBatch` holds them; the keys let `_as_collated` restore it."""
    if isinstance(batch, Mapping):
        plain = type(batch) is dict or not all(isinstance(name, str) for name in batch)
        return {name if plain else _field(name, type(batch)): _as_dicts(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return {_field(name, type(batch)): _as_dicts(getattr(batch, name)) for name in batch._fields}
    if isinstance(batch, (tuple, list)):
        return {_Place(place): _as_dicts(value) for place, value in enumerate(batch)}
    return batch


def _as_collated(rows: Any) -> Any:
    """Return the batch that `_as_dicts` and ``collate_rows`` received, with tuples for lists."""
    if not isinstance(rows, dict):
        return rows
    if rows.keys() == {_LONE}:
        return rows[_LONE]
    made = {name: _as_collated(value) for name, value in rows.items()}
    key = next(iter(made), None)
    if isinstance(key, _Place):
        return tuple(made.values())
    if isinstance(key, _Field):
        named = {str(name): value for name, value in made.items()}
        return _mapping(key.kind, named) if issubclass(key.kind, Mapping) else key.kind._make(made.values())
    return made


def _mapping(kind: type[Any], named: dict[str, Any]) -> Any:
    """Return a mapping of this kind; a dict where its constructor builds something else, as for a defaultdict."""
    try:
        found = kind(named)
        same = found.keys() == named.keys() and all(found[name] is value for name, value in named.items())
        return found if same else named
    except Exception:
        return named


def _refuse_other_features(features: Any, rows: int, place: str = "") -> None:
    if isinstance(features, dict):
        for name, value in features.items():
            _refuse_other_features(value, rows, f"{place}[{name!r}]")
    elif not isinstance(features, Tensor) or features.dim() == 0 or len(features) != rows:
        found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UnsupportedModelError(
            f"collate_fn gave {found} at batch{place} for {rows} rows: each value must be a tensor whose first axis "
            "is the rows. Pass make_private a collate_fn that returns such tensors only, and no strings.",
            trap="T11",
        )
