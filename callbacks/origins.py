"""The origin of a run's initial weights, and whether its claim counts the private runs that trained them.

Known origins are the folders that modules and transformers remember, the runs that trained weights in this process
(`lit_dpret.privacy.ledger.trained`), and the run that ``init_from`` names.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lit_dpret.cards.file import CARD_NAME, card_above, read_card
from lit_dpret.cards.start import Start, ledgers_of, model_folder, places_of
from lit_dpret.errors import ConfigurationError, told
from lit_dpret.files import linked_folders
from lit_dpret.privacy.ledger.passed import Passed, held_by, is_common, is_readable, looked_at
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, ledger_identity, plans_of, private_start
from lit_dpret.privacy.ledger.trained import (
    TrainedIn,
    changed_before,
    fingerprint,
    fingerprints,
    fingerprints_of_casts,
    mark_trained,
    modules_and_tensors_in,
    noted_in,
    remember,
    runs_behind,
    set_later,
    weights,
)


class OwnWeights:
    """The weights of one fit, recognisable by later runs; values that the fit leaves unchanged are not its own."""

    def __init__(self, module: Any, run: TrainedIn, start: Start | None, *, callbacks: Sequence[Any] = ()) -> None:
        self._run, self._before, self._marked = run, fingerprints(module), False
        self._callbacks, held = callbacks, [each for each in weights(module).values() if is_readable(each)]
        self._shapes = frozenset(tuple(each.shape) for each in held)
        self._held, self._passed = held, Passed([run], [*held, *held_by(callbacks, self._shapes)])
        places = [*_origins(module, start), *([] if start is None else [model_folder(start.folder)])]
        # Under privacy=none, no card counts these runs; only the notes that this run writes still name them.
        behind = runs_behind(module).union(*map(_runs_behind, places))
        self._began_with = {run for run in behind if run.privacy != "none"}

    def mark_trained(self, module: Any) -> None:
        """Mark a trained module, once, with all runs that trained it."""
        if not self._marked:
            self._marked = True
            mark_trained(module, [self._run, *self._began_with])

    def note_step(self) -> None:
        """Remember the values, after a step, of the weights and of averages of them that callbacks hold."""
        self._passed.note(self._held, held_by(self._callbacks, self._shapes))

    def remember(self, values: Iterable[tuple[str, Any]]) -> None:
        """Remember values of a module, or of its state dict, as this run's."""
        remember(values, self._before, [self._run])


def refuse_other_weights(module: Any, accountant: Any, data: Any, *, part: nn.Module | None = None) -> None:
    """Refuse weights (of ``part``, if given) from a private run whose releases this run's claim does not count."""
    if accountant.counted_by_others or module.privacy.guarantee == "none":
        return
    part = module if part is None else part
    behind = runs_behind(part).union(*map(_runs_behind, _origins(part, accountant.start())))
    if not behind:
        return
    known = accountant.known_runs(module, data)
    unknown = sorted((not run.folder, run) for run in behind if run.run not in known)
    if not unknown:
        return
    run = unknown[0][1]
    place = f" in {run.folder}" if run.folder else ""
    way = "Build a new module from public weights"
    if run.folder and (Path(run.folder) / CARD_NAME).is_file():
        way += f", or start from the model of that run: init_from={run.folder}"
    raise ConfigurationError(
        f"{type(part).__name__} holds weights that a run under privacy={run.privacy} trained{place}, and this card "
        f"would omit that cost. {way}; or continue that run itself, with resume=true in its folder.",
        trap="T30",
    )


def refuse_called(trainer: L.Trainer, module: Any, accountant: Any, data: Any) -> RemovableHandle:
    """Refuse calls of modules whose weights no claim counts, until the handle is removed or the fit fails.

    This applies to weights that `refuse_other_weights` refuses and, unless declared public, to weights that an
    optimizer of this process changed before the fit. Every module is checked at its first call, also in forked workers,
    however the loss reaches it. Weights read without a call, and results computed earlier, are not seen.
    """
    met, changed = WeakSet(module.modules()), changed_before(module)  # determined before training begins

    def ask(called: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # dynamo would recompile this for each module; the checks of the first batch run uncompiled
        if called not in met and not trainer.interrupted:
            with temporarily_clear_interpreter_stack():  # a loss may call it inside torch.func.vmap
                refuse_other_weights(module, accountant, data, part=called)
                if module.privacy.guarantee != "none":
                    _refuse_unknown(changed, called, accountant, data, module)
            met.update(called.modules())

    return register_module_forward_pre_hook(ask)


def refuse_set_later(module: Any, accountant: Any, data: Any) -> None:
    """Refuse weights and buffers that are not as built, not as a counted run left them, and not declared public."""
    _refuse_unknown(set_later, module, accountant, data, module)


def _refuse_unknown(
    unknown: Callable[[nn.Module, Collection[str]], list[str]], part: nn.Module, accountant: Any, data: Any, module: Any
) -> None:
    """Refuse the weights that ``unknown`` finds in ``part``, the trained module or one that it calls."""
    start = accountant.start()
    if accountant.counted_by_others or (start is None and accountant.init_from_is_public):
        return
    if not (names := unknown(part, accountant.known_runs(module, data))):
        return
    way = (
        "start from the run that trained them (init_from), or declare that they contain nothing private, which the "
        "card will state: init_from_is_public=true."
        if start is None
        else f"and load what {start.knob}={start.folder} saved before the module is built (before make_private). If it "
        "was trained further on public data, save it and start in a new process: the card lists that as assumed."
    )
    raise ConfigurationError(
        f"{_listed(names)} of {type(part).__name__} was set after the module was built, or trained before it, and not "
        f"by a run that this claim counts. Set weights and buffers in the constructor, {way}",
        trap="T30",
    )


def assumed_weights(module: Any, accountant: Any) -> list[str]:
    """Return, for the card, assumptions about the initial weights other than those of the start."""
    start = accountant.start()
    if start is None:
        if not accountant.init_from_is_public:
            return []
        names = set_later(module)
        own = (
            f"{_listed(names)}, set after {type(module).__name__} was built or trained before, or into "
            if names
            else ""
        )
        return [
            f"No private data went into {own}other models that were trained earlier in the same process and that the "
            "run calls, as declared (init_from_is_public)."
        ]
    asked = module.privacy.guarantee != "none" and not (accountant.resume or accountant.counted_by_others)
    if not asked or (file := _other_weights_in(start, module)) is None:
        return []
    rank_zero_warn(told(
        f"{start.knob}={start.folder}: no parameter of {type(module).__name__} is equal to one in the files of that "
        f"run (such as {file.relative_to(start.folder)}). If another private run trained them, name that run: the "
        "card lists this as not verified."
    ))  # fmt: skip
    return [
        f"Only the private data behind {start.facts['name']} went into the weights that {type(module).__name__} "
        "began with, although none of these weights was found in the files of that run."
    ]


def _other_weights_in(start: Start, module: Any) -> Path | None:
    """Return a file of the start that has other values for parameters with names and shapes of the module's.

    Returns None if there is no such file, or if any parameter is equal: then the others may be new.
    """
    own: dict[tuple[str, ...], set[int | None]] = {}
    for name, each in module.named_parameters():
        if (values := looked_at(each)) is not None and not is_common(values):
            own.setdefault(_kind(name, each), set()).add(fingerprint(each))
    met = None
    for file, name, tensor in _tensors_saved_in(start.folder):
        if numbers := own.get(_kind(name, tensor)):
            met = met or file
            if numbers.intersection(fingerprints_of_casts(tensor)):
                return None
    return met


def _kind(name: str, tensor: Tensor) -> tuple[str, ...]:
    return name.rpartition(".")[2], *map(str, tensor.shape)


def _tensors_saved_in(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield the tensors in model files and checkpoints below ``folder``; skip files that cannot be read."""
    for file in sorted(folder.rglob("*")):
        with suppress(OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as content:
                    yield from ((file, name, content.get_tensor(name)) for name in content.keys())  # noqa: SIM118
            elif file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                yield from ((file, name, each) for name, each in _named_tensors(content))


def _named_tensors(content: Any) -> Iterator[tuple[str, Tensor]]:
    for name, each in content.items() if isinstance(content, Mapping) else ():
        if isinstance(each, Tensor):
            yield str(name), each
        else:
            yield from _named_tensors(each)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _origins(module: Any, start: Start | None) -> list[Path]:
    """Return the folders, except the start's, that weights came from by a module's settings or by transformers."""
    own = None if start is None else model_folder(start.folder).resolve()
    parts = [part for part in modules_and_tensors_in(module) if isinstance(part, nn.Module)]
    remembered = (getattr(getattr(part, "config", None), "_name_or_path", None) for part in parts)
    configs = (settings for part in parts if isinstance(settings := getattr(part, "peft_config", None), Mapping))
    adapted = (getattr(each, "base_model_name_or_path", None) for settings in configs for each in settings.values())
    places = _folders([*(getattr(part, "pretrained", None) for part in parts), *remembered, *adapted])
    places = list(dict.fromkeys([*places, *_folders(base for place in places for base in _base_model_in(place))]))
    return [place for place in places if not (own and place.resolve().is_relative_to(own))]


def _folders(named: Iterable[Any]) -> list[Path]:
    found: dict[Path, None] = {}
    for name in dict.fromkeys(str(name) for name in named if isinstance(name, (str, Path)) and name != ""):
        place = Path(name).expanduser()
        if place.is_dir():
            found |= dict.fromkeys([place, *linked_folders(place)])
        else:
            found |= dict.fromkeys(places_of(name))
    return list(found)


def _base_model_in(folder: Path) -> list[Any]:
    """Return the base model that a folder of adapters names: transformers loads both."""
    try:
        facts = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [facts.get("base_model_name_or_path")] if isinstance(facts, dict) else []


def _runs_behind(place: Path) -> frozenset[TrainedIn]:
    noted = noted_in(place)
    known = {run.run for run in noted}  # a note also has the mode of a run that a ledger mentions only as a start
    return noted.union(run for ledger in ledgers_of(place) for run in _runs_in(ledger) if run.run not in known)


def _runs_in(ledger: Path) -> set[TrainedIn]:
    records = PrivacyLedger.read(ledger).records
    plan = next(iter(plans_of(records)), None)
    found = set() if plan is None else {TrainedIn(ledger_identity(records), str(plan["mode"]), str(ledger.parent))}
    if (behind := private_start(records)) is not None:
        start, mode = behind
        found |= {TrainedIn(run, mode) for run in start["runs"] or [start["name"]]}
    return found


def claim_of(data: Any) -> str:
    """Name the release behind the data of ``privacy=synthetic``: one claim covers everything derived from it."""
    card = read_card(data.privacy_card_path)
    return f"claim {(card['ledger'] or {}).get('head') or card['checksum']}"


def refuse_cards_behind(module: Any, start: Start | None) -> None:
    """Refuse weights from a folder with a privacy card, except the run of ``init_from``."""
    for place in _origins(module, start):
        card = place / CARD_NAME if os.path.lexists(place / CARD_NAME) else card_above(place)
        if card is not None:
            raise ConfigurationError(
                f"{place} carries a privacy card ({card}), and this card would omit the cost of its weights. Name its "
                "run as init_from, or start from a public model.",
                trap="T30",
            )
