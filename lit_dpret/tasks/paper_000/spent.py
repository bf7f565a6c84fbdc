"""What all trainings of the reproduction have spent together, which is more than any row says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_dpret.privacy.card import LEDGER_NAME
from lit_dpret.privacy.card_text import show_delta, show_epsilon
from lit_dpret.privacy.charges import charged_releases
from lit_dpret.privacy.dataset_total import compose_across_runs
from lit_dpret.privacy.ledger import PrivacyLedger
from lit_dpret.privacy.releases import Release


@dataclass(frozen=True)
class Spent:
    """The trainings under a run folder.

    Args:
        private: How many spent something of a budget.
        bare: How many read the private queries without any.
        text: What they come to, in words.
    """

    private: int
    bare: int
    text: str


def spent_under(run_dir: Path, *, taken: Path | None = None) -> Spent:
    """Compose everything that the ledgers under ``run_dir`` are charged with.

    Args:
        run_dir: Of the reproduction.
        taken: A finished study whose results stand on the page as well. Its ledgers are counted where they lie under
            its folder; where they do not, the text says that what it spent is missing from the sum.
    """
    elsewhere = set() if taken is None else {path.resolve() for path in taken.rglob(LEDGER_NAME)}
    releases: dict[tuple[str, str], list[Release]] = {}
    deltas: dict[tuple[str, str], float] = {}
    private = bare = 0
    for path in sorted({path.resolve() for path in run_dir.rglob(LEDGER_NAME)} | elsewhere):
        records = PrivacyLedger.read(path).records
        plans = [record for record in records if record["kind"] == "plan"]
        planned = [record for record in plans if record.get("plan") is not None]
        if not planned:
            bare += any(record.get("mode") == "none" for record in plans)
            continue
        if path.parent.name == "data":  # the copy that travels with a data set
            continue
        budget = planned[-1]["plan"]["budget"]
        kind = (str(budget["unit"]), str(budget["neighbours"]))
        releases.setdefault(kind, []).extend(charged_releases(records))
        deltas[kind] = min(deltas.get(kind, 1.0), float(budget["delta"]))
        private += 1
    missing = (
        f" The study in {taken} was taken as it is, without its ledgers: what its private trainings spent of the same "
        "queries is not in this sum."
        if taken is not None and not elsewhere
        else ""
    )
    if not private:
        return Spent(0, bare, f"No private training is finished, so nothing was spent.{missing}")
    totals = []
    for (unit, neighbours), found in releases.items():
        eps, how = compose_across_runs(found, delta=deltas[unit, neighbours], neighbours=neighbours)  # type: ignore[arg-type]
        totals.append(
            f"epsilon = {show_epsilon(eps)} at delta = {show_delta(deltas[unit, neighbours])} (unit {unit}, neighbours "
            f"{neighbours}, composed by {how})"
        )
    text = (
        f"The {private} private trainings behind this page read the same queries. The epsilon of a row is that of its "
        f"own training; whoever sees all of them has {' and '.join(totals)}."
    )
    if bare:
        text += (
            f" {bare} more trainings had no privacy at all (ε = ∞, or made of public texts alone): what read the "
            "original queries without privacy promises nothing to anybody, whatever else is claimed."
        )
    return Spent(private, bare, text + missing)
