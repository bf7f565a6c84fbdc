r"""Canaries with a fair coin each, and what stands in the data where the coin says no.

A one-run audit (Steinke et al. 2023, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846, Theorem 5.2)
guesses the coins of one training. Its theorem is about the map from m coins to what is released, and asks that this map
be (eps, delta)-DP in one coin, the others fixed, and that the coins be fair and independent. So the data sets of a
coin's two sides must be *neighbours under the relation of the claim*, and nothing else:

- ``zero_out``: heads, the canary; tails, an empty unit in its place. That is the relation itself, and n, the sampling
  rate and delta = 1/(2n) count m places whatever the coins say. Left out altogether, n would tell their number.
- ``add_or_remove``: heads, the canary; tails, nothing. n is private there, and everything public was declared.
- ``replace_one``: heads, the canary; tails, its *twin*, the same text with another secret. An empty place would be a
  change of half the size, and test less than was claimed.

In each case the bound is one on the claim's own epsilon, with no factor of two. What the canaries do to each other,
through the weights or through the negatives of a batch, is the mechanism's affair: the theorem holds for any
mechanism, and losses that couple the units of a batch change nothing about its coins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dpret.audit.canaries.canary import CanarySet
from lit_dpret.audit.canaries.planting import planted_facts
from lit_dpret.datamodules.planted import Planted
from lit_dpret.datamodules.records import Row
from lit_dpret.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class CoinFlips:
    """Rows, and for each whether it is trained on.

    Args:
        rows: The canaries, one row each.
        twins: What takes a canary's place under ``replace_one``.
        included: The coins.
        facts: What may be told of them before they are opened.

    Raises:
        ConfigurationError: Their numbers differ.
    """

    rows: Sequence[Any] = field(repr=False)
    twins: Sequence[Any] = field(repr=False)
    included: tuple[bool, ...] = field(repr=False)
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.twins) == len(self.included):
            raise ConfigurationError("Every canary of an audit needs a row, a twin and a coin.")

    def units(self, neighbours: str) -> list[tuple[Any, ...]]:
        """The units that are trained on, so that flipping one coin makes a neighbour under that relation.

        Guarantees:
            - Flipping a coin blanks a unit and keeps the others in their places (``zero_out``), exchanges its row
              (``replace_one``), or takes it out (``add_or_remove``).
        """
        found: list[tuple[Any, ...]] = []
        for row, twin, included in zip(self.rows, self.twins, self.included, strict=True):
            if included:
                found.append((row,))
            elif neighbours == "replace_one":
                found.append((twin,))
            elif neighbours == "zero_out":
                found.append(())
        return found

    def planted(self, neighbours: str) -> Planted:
        """The units and what may be told of them, for a DataModule's ``plant``."""
        return Planted(self.units(neighbours), self.facts)


def coins_of(canaries: CanarySet) -> CoinFlips:
    """The coins and rows of canaries that were made with ``include=0.5``, one copy and two candidates each.

    Raises:
        ConfigurationError: They were made otherwise, so that a one-run audit does not cover them.
    """
    for canary in canaries.canaries:
        if canary.copies != 1 or len(canary.candidates) < 2 or canaries.settings.get("include") != 0.5:
            raise ConfigurationError(
                f"Canary {canary.name} has {canary.copies} copies, {len(canary.candidates)} candidates and "
                f"include={canaries.settings.get('include')}: a one-run audit takes one copy, a twin and a fair coin."
            )
    rows: list[Row] = []
    twins: list[Row] = []
    for canary in canaries.canaries:
        other = next(secret for secret in canary.candidates if secret != canary.secret)
        for secret, kept in ((canary.secret, rows), (other, twins)):
            query, passage = canary.query_with(secret), canary.passage_with(secret)
            kept.append(
                Row(f"canary:{canary.name}", query, canary.passage_id, passage, frozenset((canary.passage_id,)))
            )
    included = tuple(canary.included for canary in canaries.canaries)
    return CoinFlips(rows=rows, twins=twins, included=included, facts=planted_facts(canaries))
