"""What an attack on a run is held against: the accountant's answer to the run's own ledger."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_dpret.audit.attacks.membership import Ceilings
from lit_dpret.cards.check import verdict_of
from lit_dpret.cards.file import CARD_NAME, read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.errors import DataError
from lit_dpret.privacy.ledger.facts import ceilings_of, plan_of
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, claimed_releases

#: What a coin that leaves a query out does, where the relation of the claim is another one.
DROPPED = {
    "zero_out": "A coin leaves a query's place out, and the claim (zero_out) is about emptying it: the number of "
    "units, which the claim takes for public, hangs on the coins. Evidence and ceilings hold but for what that tells.",
    "replace_one": "A coin leaves a query out, and the claim (replace_one) is about exchanging it for another, in data "
    "of one size: it says nothing of what is found here, neither of evidence nor of ceilings.",
}


class Claim:
    """What a run promised, as ceilings at any false positive rate.

    Attributes:
        line: Of the card, in words.
        eps: The claimed epsilon, recomputed from the ledger; None where none is claimed about whole queries.
        delta: Its delta; None where nothing is claimed.
        neighbours: Its relation; None where nothing is claimed.
        ceilings: From false positive rates to what no attack can exceed; None where no library computes it.
        caveats: What a reader of the attacks has to know of the claim.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self.eps: float | None = None
        self.delta: float | None = None
        self.neighbours: str | None = None
        self.ceilings: Ceilings | None = None
        self.caveats: list[str] = []

    @classmethod
    def of(cls, folder: Path) -> Claim:
        """The claim of a finished run, from its card and ledger.

        Raises:
            DataError: The folder lacks one of them.
        """
        if not (folder / CARD_NAME).is_file() or not (folder / LEDGER_NAME).is_file():
            raise DataError(f"task.run={folder} lacks {CARD_NAME} or {LEDGER_NAME}: it is no finished run.")
        card, records = read_card(folder), PrivacyLedger.read(folder / LEDGER_NAME).records
        found = cls(privacy_line(card))
        plan, _ = plan_of(records)
        verdict = verdict_of(card, records)
        if plan is None or verdict.epsilon is None:
            found.caveats.append("The run promises nothing, so that there are no ceilings to hold attacks against.")
            return found
        found.eps, found.delta, found.neighbours = verdict.epsilon, plan.budget.delta, plan.budget.neighbours
        if plan.budget.unit == "pair":
            found.eps = None
            found.caveats.append(
                "The claim is about single pairs, and the attacks are on whole queries: it gives them no ceiling."
            )
            return found
        releases = claimed_releases(records)

        @lru_cache(maxsize=8)
        def cached(rates: tuple[float, ...]) -> Mapping[str, Any] | None:
            return ceilings_of(releases, plan, verdict, false_positive_rates=rates)

        if cached((0.1,)) is None:
            found.caveats.append("No library computes attack ceilings for this sampling: only epsilon is held against.")
        else:
            found.ceilings = lambda rates: cached(tuple(rates)) or {}
        return found

    def usual(self) -> Mapping[str, Any] | None:
        """The ceilings at 10, 1 and 0.1 percent."""
        return None if self.ceilings is None else self.ceilings((0.1, 0.01, 0.001))
