"""What several runs on one data set have cost together.

A run's epsilon speaks of that run alone. Whoever sees the results of two runs on the same data has
seen both mechanisms, and the two compose. The total composes the releases themselves, as one list
of mechanisms, and falls back to adding epsilons and deltas (basic composition: Dwork and Roth 2014,
Theorem 3.16) only between groups that no one accountant judges together.

The bound is for runs whose noise, sampling and length do not depend on what earlier runs released.
Where they do, the same number is proved for Rényi accounting (privacy filters: Feldman and Zrnic
2021, arXiv 2008.11193; ``privacy.accountant=rdp``), and is not known to hold for privacy loss
distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy.accounting.composition import check_supported, epsilon
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Release, merge
from lit_dpret.privacy.budget import AccountantName, Neighbours

TOTAL_EVENT = "dataset_total"
"""The event of a run's ledger that holds the total of its data set when the run ended."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """Epsilon of everything that was released or reserved from one data set.

    Args:
        epsilon: Of all runs together; infinite where one of them has no guarantee.
        delta: The delta that it holds at.
        accountant: How it was composed: ``pld``, ``rdp``, or a phrase where only basic composition
            was left.
        total_eps: The limit.
        runs: Runs that are charged.
        running: Those of them that hold a reservation: they run, or were killed and not resumed.
    """

    epsilon: float
    delta: float
    accountant: str
    total_eps: float
    runs: int
    running: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; an infinite epsilon is null."""
        return asdict(self) | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else None}


def noted_total(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The last total that a run's ledger notes, as `Total.to_dict` has it; None where it notes none."""
    noted = [record for record in records if record.get("kind") == "event" and record.get("name") == TOTAL_EVENT]
    return {item.name: noted[-1].get(item.name) for item in fields(Total)} if noted else None


def compose_across_runs(
    releases: Sequence[Release], *, delta: float, neighbours: Neighbours, accountant: AccountantName = "pld"
) -> tuple[float, str]:
    """The epsilon that the releases of all runs satisfy together at ``delta``, and how it was composed.

    Guarantees:
        - One composition of all releases by one accountant wherever one judges them all: by ``rdp``
          where that was asked for, else by ``pld``; the other one of the two where the first cannot.
        - Otherwise the releases are split by the accountant that judges them, each group gets an
          equal share of ``delta``, and the epsilons add up.
        - The phrase names what was done; nothing is swapped silently.

    Raises:
        UnsupportedAccountingError: A release that no accountant judges under ``neighbours``.
    """
    releases = merge(releases)
    names: tuple[AccountantName, ...] = ("rdp", "pld") if accountant == "rdp" else ("pld", "rdp")
    for name in names:
        try:
            return epsilon(releases, delta=delta, neighbours=neighbours, accountant=name), name
        except UnsupportedAccountingError:
            continue
    groups: dict[AccountantName, list[Release]] = {}
    for release in releases:
        groups.setdefault(_judge_of(release, names, neighbours), []).append(release)
    share = delta / len(groups)
    parts = [epsilon(group, delta=share, neighbours=neighbours, accountant=name) for name, group in groups.items()]
    return math.fsum(parts), f"basic composition of {' and '.join(groups)}, delta / {len(groups)} each"


def _judge_of(release: Release, names: Sequence[AccountantName], neighbours: Neighbours) -> AccountantName:
    """The first accountant that judges the release's law; any would do where there is no law to judge."""
    if isinstance(release, NonPrivateRelease):
        return names[0]
    try:
        check_supported(release.law, names[0], neighbours)
        return names[0]
    except UnsupportedAccountingError:
        check_supported(release.law, names[1], neighbours)
        return names[1]
