"""Which weights were trained on private data before, and in which runs.

A run counts its own releases. Weights that another run trained carry that run's releases with them, and a card that
took them for fresh ones would forget what they cost. So a run leaves its name on what it trains, in three places that
weights travel by: on the modules and parameters themselves (into another module, a deep copy, a pickle), on state
dicts and checkpoints (into another process), and as fingerprints of the values, kept in this process (through
whatever copies, renames or casts them to bfloat16). Weights that reach a run through none of them, such as a file of
plain tensors, are what the card calls declared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Where state dicts and checkpoints name the runs that trained their tensors.
TRAINED_KEY = "lit_dpret_trained_in"
_MARK = "_lit_dpret_trained_in"
# Of a large tensor so many values are looked at; trained ones differ from any other in nearly all of them.
_LOOKED_AT = 4096
# A few values can be equal by chance.
_FEWEST = 16


class TrainedIn(NamedTuple):
    """A run that trained weights on private data.

    Args:
        run: The identity of its ledger; for ``privacy=synthetic``, the SHA-256 of the card of its data.
        privacy: Its mode.
        folder: Where it ran; empty where it is not known.
    """

    run: str
    privacy: str
    folder: str = ""


_values: dict[bytes, frozenset[TrainedIn]] = {}


def mark(module: nn.Module, runs: Iterable[TrainedIn]) -> None:
    """Leave the names of ``runs`` on whatever of ``module`` is trained, beside those that are there."""
    runs = frozenset(runs)
    if not runs:
        return
    for part in module.modules():
        if any(parameter.requires_grad for parameter in part.parameters()):
            # Adapters are merged into the layer that they stand beside.
            for holder in (part, *filter(None, [getattr(part, "base_layer", None)])):
                vars(holder)[_MARK] = _marks(holder) | runs
    for parameter in module.parameters():
        if parameter.requires_grad:
            setattr(parameter, _MARK, _marks(parameter) | runs)


def runs_behind(module: nn.Module) -> frozenset[TrainedIn]:
    """The runs that are known to have trained something of ``module``."""
    found: set[TrainedIn] = set()
    for part in module.modules():
        found |= _marks(part)
    for parameter in module.parameters():
        found |= _marks(parameter)
        if _values and (value := fingerprint(parameter)) is not None:
            found |= _values.get(value, frozenset())
    return frozenset(found)


def fingerprint(tensor: Tensor) -> bytes | None:
    """What a copy of ``tensor`` shares with it, in bfloat16 as well; None for a shard or a few values."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.numel() < _FEWEST or not tensor.is_floating_point():
        return None
    flat = tensor.detach().reshape(-1)[:: -(-tensor.numel() // _LOOKED_AT)]
    values = flat.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
    return hashlib.blake2b(f"{tuple(tensor.shape)}".encode() + values, digest_size=16).digest()


def fingerprints(module: nn.Module) -> dict[str, bytes | None]:
    """Those of the parameters that are trained, by name."""
    return {name: fingerprint(p) for name, p in module.named_parameters() if p.requires_grad}


def remember(tensors: Mapping[str, Any], before: Mapping[str, bytes | None], run: TrainedIn) -> None:
    """Remember, in this process, the values of those tensors that are others than ``before`` the run."""
    for name, was in before.items():
        tensor = tensors.get(name)
        now = fingerprint(tensor) if isinstance(tensor, Tensor) else None
        if now is not None and was is not None and now != was:
            _values[now] = _values.get(now, frozenset()) | {run}


def note(module: nn.Module, facts: dict[str, Any]) -> None:
    """Write the runs that are marked on ``module`` into a checkpoint or the metadata of a state dict."""
    if marked := _marks(module):
        facts[TRAINED_KEY] = [list(each) for each in sorted({(run, privacy) for run, privacy, _ in marked})]


def noted(facts: Mapping[str, Any]) -> frozenset[TrainedIn]:
    """What `note` wrote."""
    return frozenset(TrainedIn(str(run), str(privacy)) for run, privacy in facts.get(TRAINED_KEY, ()))


def _marks(holder: Any) -> frozenset[TrainedIn]:
    found: frozenset[TrainedIn] = getattr(holder, _MARK, frozenset())
    return found
