"""What a total over several runs has to count of one run, by that run's own ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Release
from lit_dpret.privacy.ledger.charges import charged_releases
from lit_dpret.privacy.ledger.facts import derived_assumptions, every_unit_in_every_step, plan_of
from lit_dpret.privacy.ledger.leaks import leaks


def owed_releases(records: Sequence[Mapping[str, Any]]) -> list[Release]:
    """The releases that a run is charged with, as far as its ledger lets anything be claimed for them.

    Guarantees:
        - Where the ledger itself refutes the claim (a private loss or metric was shown, the noise is keyed with a
          published number, a bound is refuted, units were added or removed and batches not drawn as planned), there is
          a `NonPrivateRelease` among them: no total over runs is finite where a run's own card proves nothing.
        - Where amplification by sampling is refuted alone, every unit is charged for every step.

    Raises:
        LedgerError: The records contradict each other.
    """
    charged = charged_releases(records)
    if not any(record.get("kind") == "plan" for record in records):
        return charged
    plan, _ = plan_of(records)
    if plan is None:
        return charged
    refuted = [a for a in (*derived_assumptions(records, plan), *leaks(records)) if a.holds is False]
    broken = {assumption.consequence for assumption in refuted}
    if "no_guarantee" in broken or ("no_amplification" in broken and plan.budget.neighbours == "add_or_remove"):
        return [*charged, NonPrivateRelease(label="a run whose card proves nothing")]
    return every_unit_in_every_step(charged) if "no_amplification" in broken else charged
