"""Names for the parts of clipping one physical batch, for `torch.profiler` and for who counts bytes part by part."""

from __future__ import annotations

from typing import Literal, get_args

from torch.profiler import record_function

PREFIX = "lit_dpret.clipping."
Phase = Literal["forward", "backward", "check_backward", "check_parameters", "norms", "sum"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def phase(name: Phase) -> record_function:
    """A context that a profile shows under ``lit_dpret.clipping.<name>``."""
    return record_function(PREFIX + name)  # type: ignore[no-untyped-call]
