"""What a run is charged with in the ledger of a data set: its own releases, and once for all runs what it starts from.

Runs that begin with the weights of one earlier run have seen one release of these weights, not one each. A charge
therefore names that run, and a sum over charges counts it once. Each record states the whole cost of its run as well:
a reader that knows of no such parts counts an earlier run with each that began with it, and so never too little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_dpret.errors import LedgerError
from lit_dpret.privacy.accounting.releases import Release, merge, release_from_dict


@dataclass(frozen=True)
class EarlierRun:
    """A run whose model others begin with.

    Two are the same only if all is: copies of one run folder that went on by themselves share the identity alone.

    Args:
        run: Its lasting identity, as `ledger_identity` gives it.
        head: The last record of its ledger that tells of a step: what a resume at the end adds releases nothing.
        releases: What its model cost.
    """

    run: str
    head: str
    releases: tuple[Release, ...]

    @classmethod
    def of_start(cls, start: Mapping[str, Any] | None) -> tuple[EarlierRun, ...]:
        """The run behind a start, as a ledger tells of it; nothing where the start cost nothing."""
        if start is None or not start["releases"]:
            return ()
        releases = tuple(release_from_dict(release) for release in start["releases"])
        return (cls(str(start["runs"][0]), str(start["head"]), releases),)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"run": self.run, "head": self.head, "releases": [release.to_dict() for release in self.releases]}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> EarlierRun:
        """What `to_dict` wrote."""
        releases = tuple(release_from_dict(release) for release in facts["releases"])
        return cls(str(facts["run"]), str(facts["head"]), releases)


@dataclass(frozen=True)
class Charge:
    """What one run is charged with; made by `of`.

    Args:
        own: Its own releases, merged.
        earlier: The runs that it begins with and that nothing else in the ledger counts.
    """

    own: tuple[Release, ...]
    earlier: tuple[EarlierRun, ...] = ()

    @classmethod
    def of(cls, given: Charge | Sequence[Release], earlier: Sequence[EarlierRun] = ()) -> Charge:
        """The charge itself, or that of these releases."""
        return given if isinstance(given, Charge) else cls(tuple(merge(given)), tuple(earlier))

    @property
    def releases(self) -> list[Release]:
        """All of it, as if no other run began with the same model."""
        return composed([self])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values: all releases and, where there are earlier runs, the parts that they come from."""
        whole = {"releases": [release.to_dict() for release in self.releases]}
        if not self.earlier:
            return whole
        own = [release.to_dict() for release in self.own]
        return whole | {"parts": {"own": own, "earlier": [run.to_dict() for run in self.earlier]}}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Charge:
        """What `to_dict` wrote.

        Raises:
            LedgerError: The parts are not all that the whole is.
        """
        whole, parts = [release_from_dict(release) for release in facts["releases"]], facts.get("parts")
        if parts is None:
            return cls(tuple(whole))
        own = tuple(release_from_dict(release) for release in parts["own"])
        charge = cls(own, tuple(EarlierRun.from_dict(run) for run in parts["earlier"]))
        if charge.releases != whole:
            raise LedgerError("its parts are not the releases that it states.")
        return charge


def composed(charges: Iterable[Charge]) -> list[Release]:
    """What several runs have cost together: the releases of each, and each earlier run once."""
    charges = list(charges)
    earlier = dict.fromkeys(run for charge in charges for run in charge.earlier)
    parts = [*(charge.own for charge in charges), *(run.releases for run in earlier)]
    return merge(release for part in parts for release in part)
