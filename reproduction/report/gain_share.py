"""How much of what private queries can teach is left under privacy: shares of a gain, with intervals over runs.

The share of the score that private training keeps (the papers' way to say it) is large even for a system that learned
nothing, since the untrained encoder already scores. The share of the *gain* starts there: 0 is the untrained encoder,
1 the same training without privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from lit_dpret.cards.page import Grid, Paragraph, Section
from lit_dpret.errors import DataError
from lit_dpret.retrieval.statistics import Interval
from reproduction.report.comparison import ModeRow

# nDCG@10 of the retriever from synthetic queries at epsilon = 3 and without privacy, as the paper's table has them.
PAPER = (0.1830, 0.2525)


@dataclass(frozen=True)
class Share:
    """What a system keeps of a bound."""

    system: str  # its name
    bound: str  # the name of the system without privacy
    of_gain: Interval  # (system - start) / (bound - start), with the interval over training runs of both
    of_score: float  # system / bound


def share_of_gain(system: Sequence[float], bound: Sequence[float], start: float) -> Interval:
    """(mean of system - start) / (mean of bound - start), with a 95 % interval over training runs (delta method).

    ``start`` is taken for exact: it is the score of a system that is not trained. The interval does not cover the
    choice of test queries.

    Example:
        >>> share_of_gain([0.44, 0.45, 0.46], [0.49, 0.50, 0.51], 0.40)
        Interval(mean=0.5..., low=0.2..., high=0.7...)

    Args:
        system: One result per run.
        bound: The same of the system without privacy.
        start: Of the untrained system.

    Returns:
        The bounds are NaN where either side has a single run.
    """
    above, most = np.asarray(system, float) - start, np.asarray(bound, float) - start
    if not most.mean() > 0:
        raise DataError(f"The bound gains {most.mean():.4f} over the start: there is nothing to take a share of.")
    share = float(above.mean() / most.mean())
    if min(len(above), len(most)) < 2:
        return Interval(share, math.nan, math.nan)
    parts = [
        (weight**2 * float(runs.var(ddof=1)) / len(runs), len(runs) - 1)
        for weight, runs in ((1.0, above), (share, most))
    ]
    variance = sum(part for part, _ in parts)
    if variance == 0.0:
        return Interval(share, share, share)
    freedom = variance**2 / sum(part**2 / runs for part, runs in parts)  # Welch and Satterthwaite
    reach = float(stats.t.ppf((1 + 0.95) / 2, freedom)) * math.sqrt(variance) / float(most.mean())
    return Interval(share, share - reach, share + reach)


def gain_shares(rows: Sequence[ModeRow], bounds: Sequence[ModeRow], start: ModeRow, metric: str) -> list[Share]:
    """Return the shares of each row in each bound; a bound that gains nothing is left out."""
    zero = start.over_runs(metric).mean
    return [
        Share(
            system=row.name,
            bound=bound.name,
            of_gain=share_of_gain(row.per_run[metric], bound.per_run[metric], zero),
            of_score=row.over_runs(metric).mean / bound.over_runs(metric).mean,
        )
        for row in rows
        for bound in bounds
        if bound.over_runs(metric).mean > zero
    ]


def share_section(shares: Sequence[Share], metric: str) -> Section:
    """Return the table, with the paper's number beside it."""
    bounds = list(dict.fromkeys(share.bound for share in shares))
    found = {(share.system, share.bound): share for share in shares}
    body = []
    for system in dict.fromkeys(share.system for share in shares):
        cells: list[object] = [system]
        for bound in bounds:
            share = found[system, bound]
            cells += [_percent(share.of_gain), f"{share.of_score:.1%}"]
        body.append(cells)
    header = ["System", *(text for bound in bounds for text in (f"of the gain of {bound}", "of its score"))]
    explained = (
        f"Share of the gain: ({metric} - that of zero-shot) / (that of a row without privacy - that of zero-shot), "
        "with 95 % intervals over the training runs of both (delta method). Beside it the share of the score, which is "
        f"what the paper's numbers give: {PAPER[0]:.4f} of {PAPER[1]:.4f}, {PAPER[0] / PAPER[1]:.1%} at epsilon 3, of "
        "another data set, encoder and generator; how much of it an untrained encoder reaches, they do not say."
    )
    return Section(
        "How much of the gain is kept",
        [Paragraph(explained), Grid(header, body, frozenset(range(1, len(header))))],
    )


def _percent(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return f"{interval.mean:.0%}"
    return f"{interval.mean:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
