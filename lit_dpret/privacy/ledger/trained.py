"""Track which weights were trained on private data, and in which runs: a card must not take them for fresh ones.

A run leaves its name on modules and parameters, on state dicts, checkpoints and model folders, and as fingerprints of
values in this process (`passed`). The search covers everything that a module holds, also outside the module tree.
Weights that arrive another way have no known origin (`set_later`).
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lit_dpret.distributed.shards import is_sharded
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.passed import fingerprint_of, is_common, looked_at, outside_steps, passed_in
from lit_dpret.privacy.state_watch import checksums, parts_of
from lit_dpret.privacy.user_code import dict_of

#: The key under which state dicts and checkpoints name the runs that trained their tensors.
TRAINED_KEY = "lit_dpret_trained_in"
#: The file in which model folders name them.
NOTE_NAME = "lit_dpret_trained_in.json"
MARK = "_lit_dpret_trained_in"
_BUILT = "_lit_dpret_built_with"
#: Torch's name for the state of a part that is not a tensor.
_EXTRA = "_extra_state"
# Lists of a million of these are common, and hold no weights.
_SCALARS = frozenset((str, bytes, int, float, complex, bool, NoneType))


class TrainedIn(NamedTuple):
    """A run that trained weights on private data."""

    run: str  # the identity of its ledger; for ``privacy=synthetic``, the SHA-256 of the card of its data
    privacy: str  # its mode
    folder: str = ""  # where it ran; empty where it is not known


# By the shape of the tensor, so that most other tensors are ruled out without reading their values.
_values: dict[tuple[int, ...], dict[int | None, frozenset[TrainedIn]]] = {}
# By run, all values that it left, including those that another run may have by chance.
_left: dict[str, set[int]] = {}
# Values that constructors in this process set; they belong to no run, though files of a run may hold them.
_built: set[int] = set()
# The same without values of modules passed to a constructor: a new module's weights may well be copied into another.
_made: set[int] = set()
# Parameters that an optimizer of this process has changed, whatever code called it.
_stepped = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
# The values that such parameters began with, except those that another training left: small steps leave many of them.
_begun: set[int | None] = set()
# Weights next to which an optimizer changed adapters, with their earlier fingerprint: once the adapters are merged into
# them, they are trained.
_adapted: Any = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]


def _note_begin(optimizer: Optimizer, *_: Any) -> None:
    if not outside_steps.before(optimizer, _stepped):
        return
    params = [each for group in optimizer.param_groups for each in group["params"]]
    changed, passed = _changed(_trained_here(), params), outside_steps.so_far()
    _begun.update({fingerprint(each) for each in params if not passed(each)} - changed)
    if "peft" in sys.modules:
        own = {*map(id, params)}
        for layer in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
            weight = getattr(getattr(layer, "base_layer", None), "weight", None)
            if isinstance(weight, nn.Parameter) and not own.isdisjoint(map(id, layer.parameters())):
                _adapted.setdefault(weight, fingerprint(weight))


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    outside_steps.after(optimizer)
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:  # the others are unchanged
                _stepped[each] = True


register_optimizer_step_pre_hook(_note_begin)
register_optimizer_step_post_hook(_note_step)


def modules_and_tensors_in(module: nn.Module) -> Iterator[nn.Module | Tensor]:
    """Return every module and tensor that ``module`` can reach: its tree, and attributes (`objects_in`)."""
    return (each for each in objects_in(module) if isinstance(each, (nn.Module, Tensor)))


def objects_in(root: object) -> Iterator[Any]:
    """Return every object that ``root`` can reach, itself first.

    Attributes are followed through lists, tuples, sets, dicts, bound methods, `functools.partial` and the attributes of
    objects. Closures, slots, the contents of Lightning's own objects, and objects with ``holds_module`` are not
    followed.
    """
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += (value for value in _inside(each) if type(value) not in _SCALARS)


def _inside(each: Any) -> Iterable[Any]:
    if isinstance(each, dict):
        return each.values()
    if isinstance(each, (list, tuple, set, frozenset, deque)):
        return each
    # A bound method leads to its object: `self.loss = teacher.forward` hides the teacher in one.
    if isinstance(each, MethodType):
        return (each.__self__,)
    if isinstance(each, partial):
        return (each.func, *each.args, *each.keywords.values())
    if isinstance(each, Tensor) or _leads_away(type(each)):
        return ()
    return (dict_of(each) or {}).values()


def _leads_away(kind: type) -> bool:
    """Return whether attributes of such objects lead to objects of no run, or of every run, in this process."""
    if issubclass(kind, nn.Module):
        return False
    outside = any(str(base.__module__).partition(".")[0] == "lightning" for base in kind.__mro__)
    return outside or issubclass(kind, (type, FunctionType, ModuleType)) or getattr(kind, "holds_module", False)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, including those of modules held outside the tree."""
    names = {id(part): name for name, part in module.named_modules()}
    found = {}
    for part in modules_and_tensors_in(module):
        if isinstance(part, nn.Module):
            prefix = names.get(id(part), f"beside {id(part)}")
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and name not in part._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def mark_trained(module: nn.Module, runs: Iterable[TrainedIn], *, whole: bool = False) -> None:
    """Add ``runs`` to the marks on all trained parts of ``module``."""
    runs = frozenset(runs)
    if not runs:
        return
    for part in module.modules():
        if whole or any(parameter.requires_grad for parameter in part.parameters()):
            # Adapters are merged into the layer next to them.
            for holder in (part, *filter(None, [getattr(part, "base_layer", None)])):
                vars(holder)[MARK] = _marks(holder) | runs
    for parameter in module.parameters():
        if whole or parameter.requires_grad:
            setattr(parameter, MARK, _marks(parameter) | runs)


def runs_behind(module: nn.Module) -> frozenset[TrainedIn]:
    """Return the known runs that trained parts of ``module``."""
    found: set[TrainedIn] = set()
    for each in modules_and_tensors_in(module):
        found |= _marks(each)
        if isinstance(each, Tensor) and (known := _values.get(tuple(each.shape))):
            found |= known.get(fingerprint(each), frozenset())
        if isinstance(each, Tensor):
            found |= passed_in(each)
    return frozenset(found)


def note_built(module: nn.Module, given: Sequence[nn.Module] = ()) -> None:
    """Store the fingerprints of the `weights` and extra states of ``module``, and of casts, after its constructor.

    Nothing is stored for a module with lazy layers, whose first batch sets them. Parameters that an optimizer has
    changed before are left out, and so are copies of them and of their values after one of its steps, unless a
    constructor had set the same values: their origin was not recorded. Values ``given`` to a constructor are known as
    this module's only.
    """
    if any(map(is_lazy, module.parameters())):
        return
    own = list(weights(module).values())
    stepped, passed = _trained_here(), outside_steps.so_far()
    changed = _changed(stepped, own)
    kept = [each for each in own if each not in stepped and fingerprint(each) not in changed and not passed(each)]
    found = {number for each in kept for number in fingerprints_of_casts(each)}
    vars(module)[_BUILT] = built = frozenset(found | {_digest(each) for _, each in extra_states(module)})
    _built.update(built)
    outside = {id(each) for part in given for each in modules_and_tensors_in(part)}
    _made.update(number for each in kept if id(each) not in outside for number in fingerprints_of_casts(each))


def _trained_here() -> Any:
    """Return the parameters that an optimizer of this process changed, or into which such adapters were merged."""
    merged = [each for each in list(_adapted) if fingerprint(each) != _adapted[each]]
    return WeakIdKeyDictionary(dict.fromkeys([*_stepped, *merged]))  # type: ignore[no-untyped-call]


def _changed(stepped: Iterable[Tensor], like: Iterable[Tensor]) -> set[int]:
    """Return the fingerprints of those ``stepped`` parameters that have a shape found in ``like``."""
    shapes = {each.shape for each in like}
    known = [values for each in list(stepped) if each.shape in shapes and (values := looked_at(each)) is not None]
    return {fingerprint_of(values) for values in known if not is_common(values)} - _built - _begun


def changed_before(own: nn.Module) -> Callable[[nn.Module, Collection[str]], list[str]]:
    """Return a search for weights that an optimizer of this process has changed so far, or equal to such after a step.

    The search takes a module and runs, and returns the names of such weights that none of the runs left. It excludes
    the weights of ``own``, and anything trained from now on, such as a probe that a callback trains on public rows.
    """
    of_own = {id(each) for each in weights(own).values()}
    others = [each for each in list(_trained_here()) if id(each) not in of_own]
    changed, passed = _changed(others, others), outside_steps.so_far()
    held = WeakIdKeyDictionary(dict.fromkeys(others))  # type: ignore[no-untyped-call]

    def search(module: nn.Module, runs: Collection[str]) -> list[str]:
        left = set[int]().union(*(_left.get(run, ()) for run in runs))
        return [
            name for name, each in weights(module).items()
            if (each in held or fingerprint(each) in changed or passed(each))
            and not left.issuperset(fingerprints_of_casts(each)[:1])
            and not any(run.run in runs for run in passed_in(each))
        ]  # fmt: skip

    return search


def fingerprints_of_casts(tensor: Tensor) -> list[int]:
    """Return the `fingerprint` of a tensor and of its casts to half precision; empty without values."""
    if (values := looked_at(tensor)) is not None:
        return [fingerprint_of(cast) for cast in _casts(values)]
    if is_sharded(tensor) or is_functorch_wrapped_tensor(tensor):
        return []
    return checksums([tensor]) if parts_of(tensor) else []  # of integers, sparse, or of a subclass


def set_later(module: nn.Module, runs: Collection[str] = ()) -> list[str]:
    """Return the names of `weights` and extra states that no constructor set and none of the ``runs`` left.

    A constructor counts if it is the module's own, or another one that made the values itself.
    """
    built = vars(module).get(_BUILT)
    if built is None:
        return []
    known = built.union(_made, *(_left.get(run, ()) for run in runs))
    made_later = getattr(module, "made_of_public", ())
    now = {name: each for name, each in weights(module).items() if name not in made_later}
    later = [
        name for name, each in now.items()
        if not known.issuperset(fingerprints_of_casts(each)[:1])
        and not any(run.run in runs for run in passed_in(each))
    ]  # fmt: skip
    return [*later, *(name for name, each in extra_states(module) if _digest(each) not in known)]


def extra_states(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the state other than tensors that parts put into a state dict, under its name there."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is nn.Module.get_extra_state:
            continue
        try:
            state = part.get_extra_state()
        except Exception:  # not there yet; anything a run saves is compared from its setup on
            continue
        yield f"{name}.{_EXTRA}".lstrip("."), state


def _digest(state: object) -> int:
    try:
        content = pickle.dumps(state)
    except Exception:  # no checkpoint can hold it either
        content = type(state).__qualname__.encode()
    return int.from_bytes(blake2b(content, digest_size=16).digest(), "little")


def fingerprint(tensor: Tensor) -> int | None:
    """Return the fingerprint of a tensor's values (`fingerprint_of`); None without values."""
    values = looked_at(tensor)
    return None if values is None else fingerprint_of(values)


def _casts(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return values, values.half(), values.bfloat16()


def fingerprints(module: nn.Module) -> dict[str, int | None]:
    """Return the fingerprints of all `values_of` a module, frozen ones too: a hook may put an average there."""
    return {name: fingerprint(tensor) for name, tensor in values_of(module)}


def values_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the `weights`, and the `merged_values`."""
    yield from weights(module).items()
    yield from merged_values(module)


def merged_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that layers would have with their adapters (peft's LoRA) merged."""
    for name, part in module.named_modules():
        if not hasattr(part, "lora_A"):
            continue
        weight = getattr(part.base_layer, "weight", None)
        adapters = [each for each in part.active_adapters if each in part.lora_A]
        if adapters and type(weight) is nn.Parameter and weight.numel() and not weight.is_meta:  # not a shard
            with torch.no_grad():
                yield f"{name} merged", sum(map(part.get_delta_weight, adapters), weight)


def remember(tensors: Iterable[tuple[str, Any]], before: Mapping[str, int | None], runs: Iterable[TrainedIn]) -> None:
    """Record, for this process, the values of tensors that changed since ``before`` the runs."""
    runs = frozenset(runs)
    for name, tensor in tensors:
        extra = name.rpartition(".")[2] == _EXTRA
        left = [_digest(tensor)] if extra else fingerprints_of_casts(tensor) if isinstance(tensor, Tensor) else ()
        for run in runs:
            _left.setdefault(run.run, set()).update(left)
        if extra or not isinstance(tensor, Tensor):
            continue
        values = looked_at(tensor)
        if values is None or before.get(name) in (None, fingerprint_of(values)):
            continue
        if isinstance(tensor, nn.Parameter):  # not a tensor of a checkpoint, which would take the name into the file
            setattr(tensor, MARK, _marks(tensor) | runs)
        known = _values.setdefault(tuple(tensor.shape), {})
        for cast in _casts(values):
            # Rounding may undo a small change.
            if (copy := fingerprint_of(cast)) != before[name] and not is_common(cast):
                known[copy] = known.get(copy, frozenset()) | runs


def remember_loaded(state: Mapping[str, Any], module: nn.Module, runs: Iterable[TrainedIn]) -> None:
    """Record what a state dict of ``runs`` will load into ``module``."""
    before = {name: fingerprint(tensor) for name, tensor in weights(module).items() if tensor.requires_grad}
    remember(((name, value) for name, value in state.items() if fingerprint(value) not in _built), before, runs)


def note(module: nn.Module, facts: dict[str, Any]) -> None:
    """Write the runs marked on ``module`` into a checkpoint or the metadata of a state dict."""
    if marked := _marks(module):
        facts[TRAINED_KEY] = _plain(marked)


def note_folder(module: nn.Module, folder: str | Path) -> None:
    """Write the runs behind ``module`` next to its model in ``folder``; remove an earlier note."""
    path, runs = Path(folder) / NOTE_NAME, runs_behind(module)
    if runs:
        write_whole(path, json.dumps({TRAINED_KEY: _plain(runs)}, indent=2) + "\n")
    else:
        path.unlink(missing_ok=True)


def noted_in(folder: Path) -> frozenset[TrainedIn]:
    """Read what `note_folder` wrote into ``folder``, or into its parent."""
    # Resolved, because the parent of a link to `model/` is not that of the folder it points to.
    place = folder.resolve()
    found: set[TrainedIn] = set()
    for path in (place / NOTE_NAME, place.parent / NOTE_NAME):
        if os.path.lexists(path):  # a broken link cannot be read, and is refused
            try:
                found |= noted(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{path} cannot be read. It names the runs that trained the model next to it: use the folder "
                    "unchanged.",
                    trap="T30",
                ) from error
    return frozenset(found)


def noted(facts: Mapping[str, Any]) -> frozenset[TrainedIn]:
    """Read what `note` wrote."""
    return frozenset(TrainedIn(str(run), str(privacy)) for run, privacy in facts.get(TRAINED_KEY, ()))


def _plain(runs: Iterable[TrainedIn]) -> list[list[str]]:
    return [list(each) for each in sorted({(run, privacy) for run, privacy, _ in runs})]


def _marks(holder: Any) -> frozenset[TrainedIn]:
    found: frozenset[TrainedIn] = getattr(holder, MARK, frozenset())
    return found
