"""Which numbers a private run may show or keep while it trains: those that somebody declares to be public.

A number does not say what it was computed on. So what a module, a callback or anybody else logs inside a run with a
guarantee, or puts into its checkpoints, is refused, unless the module or a callback of the run lists its name in
``public_metrics``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lit_dpret.errors import ConfigurationError

ALWAYS = frozenset({"epoch", "step", "trainer/global_step"})
"""Names that Lightning adds by itself."""


def public_names(sources: Iterable[Any]) -> frozenset[str]:
    """The names that modules and callbacks declare to be computed without a private row."""
    return ALWAYS.union(*(getattr(source, "public_metrics", ()) for source in sources))


def unaccounted(what: str, mode: Any) -> ConfigurationError:
    """The refusal of ``what``, a number that would be shown although nobody counts it."""
    return ConfigurationError(
        f"{what} is logged inside a run with privacy={getattr(mode, 'name', mode)}: a number computed on private rows "
        "is a release that nobody counts. Leave it out. If no private row is behind it, list its name in "
        "public_metrics of the module or callback that logs it; or set model.log_private_loss=true, and the card will "
        "name it and state no epsilon.",
        trap="T25",
    )
