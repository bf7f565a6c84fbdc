"""Which clients an asker asks for negatives: ``Select`` of equation 7 of paper 004, which leaves open how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives.base import coins
from lit_dpret.privacy.budget import require_choice

Selection = Literal["all", "random", "region", "latency"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is publicly known of a client's place.

    Args:
        region: A word, as ``eu-west``; null where it is not known.
        latency_ms: Of the way from the asker, in milliseconds; null where it is not known.
    """

    region: str | None = None
    latency_ms: float | None = None


def select_clients(
    asker: str,
    sites: Mapping[str, Site],
    how: Selection,
    *,
    count: int | None = None,
    seed: int = 0,
    refresh: int = 0,
) -> list[str]:
    """The clients to ask, the asker never among them.

    ``random`` draws anew at every refresh. ``region`` takes those of the asker's region first, ``latency`` the
    nearest first; where these say nothing, coins decide.

    Guarantees:
        - A function of public facts and public coins: nothing that a client holds decides whether it is asked.
        - At most ``count`` clients, all others where it is null.

    Args:
        asker: Who asks.
        sites: Of all clients.
        how: See above.
        count: How many to ask.
        seed: Of the coins; public.
        refresh: The number of the refresh.

    Raises:
        ConfigurationError: The asker is unknown, the count not positive, or ``how`` unknown.
    """
    require_choice("federated.stage2.select", how, get_args(Selection))
    if asker not in sites:
        raise ConfigurationError(f"client {asker!r} asks for negatives and is none of {', '.join(sites)}.")
    if count is not None and count < 1:
        raise ConfigurationError(f"federated.stage2.select_count={count} must be at least 1, or null for all.")
    others = sorted(set(sites) - {asker})
    if how == "all":
        return others if count is None else others[:count]
    order = coins(seed, "select clients", asker, refresh if how == "random" else 0).permutation(len(others))
    shuffled = [others[place] for place in order]
    if how == "region":
        home = sites[asker].region
        shuffled.sort(key=lambda name: home is None or sites[name].region != home)
    if how == "latency":
        shuffled.sort(key=lambda name: _latency(sites[name]))
    return shuffled[:count]


def _latency(site: Site) -> float:
    return float("inf") if site.latency_ms is None else site.latency_ms
