"""User code in a private run: refusals and trials before the first step, and the parts that are trusted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from itertools import islice
from types import FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.core.hooks import DataHooks
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lit_dpret.callbacks.first_come import FIRST, depends_on_the_first, refuse_other_rows
from lit_dpret.callbacks.shared_files import refuse_shared_files
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.batches import ALONE, Draw, SeededDraws, UnitOwners, answer_of, names_its_unit, row_keys
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.clipping.rules import make_plan
from lit_dpret.privacy.content import content_of_rows, readable_content
from lit_dpret.privacy.ledger.trained import objects_in
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler
from lit_dpret.privacy.user_code import HOLD_NO_CODE, NAMESPACES, dict_of, is_library, items_of
from lit_dpret.privacy.user_generators import kept_generators, own_generators

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_KNOWN = ("lit_dpret.", "lightning.", "pytorch_lightning.")
#: At most this many objects are searched for user code.
_OBJECTS = 50_000
#: The maximum number of values in a setting, and of characters in one of its texts.
_SETTINGS, _LONGEST = 64, 500


def refuse_random_layers(module: Any) -> None:
    """Refuse active dropout in a layer without a clipping rule: torch.func runs its rows without random numbers."""
    if getattr(module.privacy, "engine", None) != "vmap":
        return
    plan = make_plan(module, trainable(module), fallback=True)
    for site in (site for site in plan.sites if site.kind == "function"):
        for layer in site.module.modules():
            rate = layer.p if isinstance(layer, _DropoutNd) else 0.0
            rate = layer.dropout if isinstance(layer, nn.MultiheadAttention) else rate
            if layer.training and rate > 0:
                raise UnsupportedModelError(
                    f"privacy.engine=vmap cannot draw the dropout={rate:g} of {site.name} "
                    f"({type(site.module).__name__}). Set it to 0, or choose privacy.engine=loop, which is slow."
                )


def refuse_changed_batches(module: Any, data: Any) -> None:
    """Refuse hooks that change a batch on its way to the device: rows could then not be compared."""
    for owner in (module, data):
        for hook in _HOOKS:
            if getattr(type(owner), hook, None) not in (getattr(DataHooks, hook), None):
                raise ConfigurationError(
                    f"{type(owner).__name__}.{hook} changes batches where mixing of rows cannot be detected. Do it in "
                    "collate_rows or per_row_loss.",
                    trap="T11",
                )


def refuse_replaced_weighting(module: Any) -> None:
    """Refuse a custom ``unit_loss``: clipping trusts its weighting of rows without a check."""
    owner = next((kind for kind in type(module).__mro__ if "unit_loss" in vars(kind)), None)
    if owner is not None and not owner.__module__.startswith("lit_dpret."):
        raise ConfigurationError(
            f"{owner.__name__}.unit_loss replaces the weighting of rows, where a coupling of units cannot be detected. "
            "Weight rows in per_row_loss.",
            trap="T11",
        )


def refuse_remembering_collation(module: Any, dataset: Any, sampler: PrivateBatchSampler) -> None:
    """Compare how rows are collated alone, after others and with others, and learning rates, before the first step."""
    examine = getattr(module, "examine_collation", None)
    if examine is None or dataset is None:
        return
    units = list(islice((unit for unit in range(sampler.units) if list(_ask(dataset, unit)[1])), 4 * ALONE))
    if len(units) > ALONE:
        reads = [partial(_first_rows, dataset, units[:ALONE]), partial(_first_rows, dataset, units[ALONE:])]
        examine(*(read() for read in reads))
        module.examine_reading(reads)


def _first_rows(dataset: Any, units: Sequence[int]) -> list[Any]:
    return [next(iter(_ask(dataset, unit)[1])) for unit in units]


def trusted_code(trainer: L.Trainer, module: Any, data: Any) -> list[str]:
    """Return the claim's trusted assumptions about code outside this package and Lightning, for the card."""
    mode = type(module.privacy)
    own = dict.fromkeys(_own_code([module, data, trainer], apart=mode))
    if module.privacy.guarantee == "inherited":
        text = "this code reads no private data, which the claim of the training data would not cover."
        return [f"{', '.join(own)}: {text}"] if own else []
    bound = [] if mode.__module__.startswith(_KNOWN) else [
        f"{mode.__name__} is a privacy mode from outside lit-dpret: its code is trusted to let one unit move the sum "
        "of a step by no more than this card says. Its noise was measured in every step."
    ]  # fmt: skip
    if not own:
        return bound
    if kept := ", ".join(dict.fromkeys(f"{owner}.{name}" for owner, name, _ in _saved(module, data))):
        bound.append(f"Nothing from a private row is in the hyper-parameters that checkpoints and logs keep: {kept}.")
    if kept := ", ".join(dict.fromkeys(_keep_states([module, data, *trainer.callbacks]))):  # type: ignore[attr-defined]
        bound.append(f"Nothing from a private row is in what checkpoints keep of {kept} besides trained weights.")
    what = "the loss of a row, including its random numbers, depends on no other row"
    if mode.candidates not in ("rows", "pool"):
        what = (
            "the embedding of a row, including its random numbers, and whether two rows are negatives of each other "
            "(answers), depend on no further row, and the loss depends on their similarities alone"
        )
    examined = (
        "Samples of it were checked during the run, and nothing was found; that is no proof."
        if hasattr(module, "examine_collation")
        else "None of it was checked, because the training step is custom. Test it with assert_private."
    )
    text = (
        f"{', '.join(own)}: in this code, {what}, and no private row ends the run, sets a learning rate, changes an "
        f"update or a weight except by its clipped gradient, or reaches a file. {examined} No private data went into "
        "anything else that it reads in addition to its rows and the trained weights: other models, labels, tables."
    )
    public = ", ".join(getattr(module, "public_metrics", ()))
    return [*bound, text] + ([f"Private rows affect {public} only through the trained weights."] if public else [])


def _own_code(roots: Sequence[Any], *, apart: type) -> Iterator[str]:
    """Yield the names of classes and functions from outside this package and known libraries, except ``apart``.

    Library objects are searched further, since a module may hold a user's loss; user objects are only named.
    """
    waiting, seen = list(reversed(roots)), set[int]()
    while waiting and len(seen) < _OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (*HOLD_NO_CODE, type)):
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            waiting += islice(value.values() if isinstance(value, dict) else value, _SETTINGS)
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, FunctionType):
            if not is_library(value.__module__):
                yield value.__qualname__.replace("<locals>.", "")
        else:
            kind = value.__class__  # for a weak proxy, that of its referent
            if kind is not apart and not is_library(kind.__module__):
                yield kind.__name__
            elif hasattr(value, "__dict__"):
                waiting += vars(value).values()


def refuse_saved_data(module: Any, data: Any) -> None:
    """Refuse hyper-parameters that contain data: ``save_hyperparameters`` writes them to checkpoints and loggers."""
    for owner, name, value in _saved(module, data):
        if holds_data(value):
            raise ConfigurationError(
                f"{owner}.save_hyperparameters keeps {name}, which holds data instead of a setting: it would be in "
                f"every checkpoint and log, and no noise covers it. Use save_hyperparameters(ignore=[{name!r}]).",
                trap="T25",
            )


def _keep_states(owners: Sequence[Any]) -> Iterator[str]:
    """Yield the names of classes whose own code adds state to checkpoints."""
    for owner in owners:
        for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
            hooks = (getattr(part, name, None) for name in ("state_dict", "on_save_checkpoint", "get_extra_state"))
            if not all(is_library(getattr(hook, "__module__", "torch")) for hook in hooks):
                yield type(part).__name__


def holds_data(value: Any, *, small: int = 0) -> bool:
    """Return whether a value is more than a setting: many values, a tensor, an array, a data set, bytes, a long text.

    A tensor with at most ``small`` elements counts as that many values.
    """
    found = [each for _, each in islice(settings_in(value), _SETTINGS + 1)]
    few = [each for each in found if isinstance(each, Tensor) and 0 < each.numel() <= small]
    found += [each for tensor in few for each in tensor.reshape(-1).tolist()]
    found = [each for each in found if not any(each is tensor for tensor in few)]
    return len(found) > _SETTINGS or any(
        isinstance(leaf, (Tensor, np.ndarray, bytes))
        or _is_collection(leaf)
        or (isinstance(leaf, str) and len(leaf) > _LONGEST)
        for leaf in found
    )


def _saved(module: Any, data: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the hyper-parameters of classes from outside this package: class name, parameter name, value."""
    for owner in (getattr(module, "keeps_hparams_of", module), data):
        kind = type(owner)
        if not kind.__module__.startswith(_KNOWN):
            yield from ((kind.__name__, str(name), value) for name, value in getattr(owner, "hparams", {}).items())


def settings_in(value: Any, where: str = "", *, keys: bool = False, depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield the values that containers and user objects hold, with their paths; with ``keys``, mapping keys too."""
    held: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        held = items_of(value)
        if keys:
            yield from ((f"a key of {where}", key) for key in value if isinstance(key, str))
    elif isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes, bytearray)):
        held = enumerate(value) if isinstance(value, Set) else items_of(value)
    elif isinstance(value, partial):
        held = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, MethodType):
        held = [("__self__", value.__self__)]
    elif isinstance(value, NAMESPACES) or not (
        isinstance(value, (*HOLD_NO_CODE, type, FunctionType, ModuleType, nn.Module, Enum))
        or dict_of(value) is None
        or is_library(type(value).__module__)
        or _is_collection(value)
    ):
        held = (dict_of(value) or {}).items()
    else:
        yield where, value
        return
    for name, inner in held if depth else ():
        place = f"{where}[{name}]" if isinstance(name, int) else f"{where}.{name}".lstrip(".")
        yield from settings_in(inner, place, keys=keys, depth=depth - 1)


def _is_collection(value: Any) -> bool:
    """Return whether a value is indexed by number or name, like a data set or a pandas table."""
    setting = isinstance(value, (str, type, GenericAlias, nn.Module, np.generic, np.dtype, Enum))
    return hasattr(type(value), "__getitem__") and not setting


#: If the units up to this number have no named row, a data set is not asked for the rest.
UNNAMED = 99


def refuse_replaced_sampler(loader: Any, sampler: PrivateBatchSampler) -> None:
    """Refuse a training loader that does not draw by the planned law."""
    if getattr(loader, "batch_sampler", None) is not sampler:
        raise ConfigurationError(
            "The training loader does not draw by the planned law: its batch sampler was replaced. "
            "Set trainer.use_distributed_sampler=false, and do not override train_dataloader.",
            trap="T2",
        )


def _refuse_fetching_together(dataset: Any) -> None:
    if callable(getattr(dataset, "__getitems__", None)):
        raise ConfigurationError(
            f"{type(dataset).__name__} has __getitems__, which fetches several units at once: rows of one could depend "
            "on the others. Remove it, so that each unit is fetched by dataset[draw].",
            trap="T38",
        )


def refuse_first_asked(loader: Any, sampler: PrivateBatchSampler) -> None:
    """Refuse an external training data set whose rows depend on which unit was requested first.

    This runs before the loader reads: a scale set by the first batch stays, and nothing shows whose it is.
    """
    dataset = loader.dataset
    if _is_ours(dataset):  # `refuse_first_come` checks it row by row
        return
    units = range(min(sampler.units, FIRST))
    if depends_on_the_first([dataset], [partial(_rows_of, dataset, unit) for unit in units]):
        refuse_other_rows()


def _is_ours(dataset: Any) -> bool:
    parts = (dataset, getattr(dataset, "units", dataset))
    return all(type(part).__module__.startswith("lit_dpret.") for part in parts)


def refuse_other_units(loader: Any, sampler: PrivateBatchSampler) -> bool:
    """Read every unit of an external training data set once, and refuse units that share rows.

    This package's data sets are built unit by unit and not read in full. If the first rows have no names (`row_key`),
    reading ends early, since nothing can be compared. Returns whether all rows of a unit are known to be of one query,
    user or image.
    """
    dataset = loader.dataset
    if hasattr(dataset, "__len__") and len(dataset) != sampler.units:
        raise DataError(
            "The training data set does not have the number of units in datamodule.n_units, for which the run was "
            "planned. Make the two equal (datamodule.train_dataloader).",
            trap="T38",
        )
    if _is_ours(dataset):
        units = getattr(dataset, "units", dataset)
        if (grouped := getattr(units, "unit", sampler.unit)) != sampler.unit:
            raise DataError(
                f"The training data are grouped by {grouped}, but privacy.unit={sampler.unit}, so epsilon would be "
                "false. Group them by the unit passed to datamodule.use_unit.",
                trap="T38",
            )
        if hasattr(units, "dataset"):  # a user's data set, read row by row
            _refuse_remembering(dataset, sampler)
        return True
    _refuse_fetching_together(dataset)
    owners, seen, unnamed = UnitOwners(sampler.unit), False, False
    with kept_generators():
        for unit in range(sampler.units):
            draw, rows = answer_of(dataset[Draw(unit, 0, 0, False)])
            if draw.unit != unit:
                raise DataError(
                    f"The training data set returns unit {draw.unit}, but unit {unit} was drawn. dataset[draw] must "
                    "return the draw that it was given (datamodule.train_dataloader).",
                    trap="T38",
                )
            keys = row_keys(rows, sampler.unit, or_row=True)
            seen |= bool(keys)
            unnamed |= not all(names_its_unit(row, sampler.unit) for row in rows)
            if unit == UNNAMED and not seen:
                break
            owners.note(unit, keys)
    _refuse_remembering(dataset, sampler)
    return not unnamed


#: About how many units `UnchangedUnits` compares.
_COMPARED = 16


def _refuse_remembering(dataset: Any, sampler: PrivateBatchSampler) -> None:
    """Refuse a data set whose rows of a unit depend on the unit requested before, or on a generator of its own."""
    asked = [unit for unit in range(min(sampler.units, UNNAMED)) if len(answer_of(_ask(dataset, unit))[1])][:4]
    for before, unit, other in zip(asked, asked[1:], asked[2:], strict=False):
        found, own = [], []
        for first in (before, before, before, other):
            _ask(dataset, first)
            found.append(content_of_rows(list(answer_of(_ask(dataset, unit))[1])))
            own.append(own_generators(islice(objects_in(dataset), _OBJECTS)))
        # The first answer may fill a cache and be a different object from later ones.
        if found[1] != found[2] or own[1] != own[2]:
            raise DataError(
                "The training data set draws rows from a generator of its own, which units share, so one unit changes "
                "what others get. Let dataset[draw] draw from the global generators of torch, random or numpy, which "
                "are seeded from the run's secret for every unit and step (datamodule.train_dataloader).",
                trap="T38",
            )
        if found[2] != found[3]:
            refuse_other_rows()


def refuse_shared_draws(loader: Any, units: int) -> None:
    """Refuse worker processes of the training loader that share an open file with this process."""
    dataset = loader.dataset
    refuse_shared_files(
        loader, lambda unit: _ask(dataset, unit), units, whose="The training data set", knob="datamodule.num_workers"
    )


def refuse_replaced_rows(data: Any, stream: KeyedStream, begun: str | None) -> None:
    """Refuse data whose content or order changed since their fingerprint ``begun`` was written to the ledger.

    Rows that a callback shuffles later could put one person's rows into several units, and differ between ranks.
    """
    if begun not in (None, data.data_fingerprint(bytes.fromhex(stream.tag("data-fingerprint")))):
        raise DataError(
            "The training data, or their order, changed since the run was planned, so a unit would hold rows of "
            "another one. Do not change them after setup (in callbacks or train_dataloader); augment rows in "
            "dataset[draw] or collate_rows.",
            trap="T38",
        )


class UnchangedUnits:
    """Compare some units of the training data set with their content at the start of the run.

    A callback may change a data set during the run, for example repeat the rows with the largest losses. A unit then
    depends on others. Worker processes have copies of the data set, so some of their draws are compared too.
    """

    def __init__(self, dataset: Any, sampler: PrivateBatchSampler) -> None:
        self._dataset, units = dataset, sampler.units
        self._units = range(0, units, max(1, units // _COMPARED))
        self._begun = self._contents(self._units)
        # Read as many units as a batch holds before collation, so that a pool of that many buffers is reused.
        together = range(0, units, max(1, units // max(_COMPARED, sampler.physical_batch_size)))
        contents = self._begun if together == self._units else self._contents(together)
        read = [self._rows_of(Draw(unit, 0, 0, False, seed=unit)) for unit in together]
        for unit, rows, content in zip(together, read, contents, strict=True):
            if None not in (rows, content) and readable_content(rows) != content:
                raise DataError(
                    f"The training data set overwrites the rows of unit {unit} when it reads other units, as happens "
                    "if all rows are views of one buffer. Return copies from dataset[draw] (array.copy(), "
                    "tensor.clone()).",
                    trap="T38",
                )

    def compare(self) -> None:
        """Refuse a data set that now gives other rows for one of these units, with the same random numbers."""
        now = self._contents(self._units)
        for unit, before, after in zip(self._units, self._begun, now, strict=True):
            if None not in (before, after) and before != after:
                raise DataError(
                    f"The training data set gives unit {unit} other rows than when the run began, which no clipping "
                    "bounds. Do not change it during a run; augment rows in dataset[draw] or collate_rows.",
                    trap="T38",
                )

    def compare_drawn(self, contents: Mapping[Draw, bytes]) -> None:
        """Refuse a data set that gives other rows for the same draws in a worker process than here."""
        for draw, found in contents.items():
            if self._of_draw(draw) not in (None, found):
                raise DataError(
                    f"The training data set gives unit {draw.unit} other rows in a worker process of the loader than "
                    "in this one. Let dataset[draw] depend on the draw alone, or set datamodule.num_workers=0.",
                    trap="T38",
                )

    def _contents(self, units: Iterable[int]) -> list[bytes | None]:
        return [self._of_draw(Draw(unit, 0, 0, False, seed=unit)) for unit in units]

    def _of_draw(self, draw: Draw) -> bytes | None:
        rows = self._rows_of(draw)
        return None if rows is None else readable_content(rows)

    def _rows_of(self, draw: Draw) -> Any:
        try:
            (found,) = [self._dataset[each] for each in SeededDraws([draw])]
            return answer_of(found)[1]
        except KeyboardInterrupt:
            raise
        except BaseException:  # raised again where the unit is drawn, and judged there (`ends_by_rows`)
            return None


def _ask(dataset: Any, unit: int) -> Any:
    """Request a unit from a data set, with the same random numbers each time."""
    (found,) = [dataset[draw] for draw in SeededDraws([Draw(unit, 0, 0, False, seed=unit)])]
    return found


def _rows_of(dataset: Any, unit: int) -> list[Any]:
    return list(answer_of(_ask(dataset, unit))[1])


def refuse_false_bound(mode: Any, data: Any) -> None:
    """Refuse a declared ``privacy.max_units_per_user`` that the user ids of the data, if any, contradict."""
    bound = getattr(mode, "max_units_per_user", None)
    if bound is None or not hasattr(data, "train_units"):
        return
    if getattr(data, "unit_name", None) == "user":
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} counts the units of a user, but datamodule.unit_name=user says that a "
            "unit is a whole user. Set the bound to null."
        )
    units = data.train_units()
    if getattr(units, "duplicates", "keep") == "merge":
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} cannot be combined with datamodule.duplicates=merge: a merged unit "
            "may belong to several people. Set datamodule.duplicates=keep, or set the bound to null."
        )
    most = units.most_units_of_a_user() if hasattr(units, "most_units_of_a_user") else None
    if most is not None and most > bound:
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} contradicts these data: a user id has more {mode.unit} units than "
            "that. Declare a bound that holds, remove rows from the data, or set privacy.unit=user."
        )
