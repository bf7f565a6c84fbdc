"""Select synthetic queries so that their bins have the frequencies of a private histogram.

A noised histogram of the private queries over public bins shows what people really asked about, for a fraction of the
privacy that training costs. Queries selected by it carry the claim that composes generator and histogram, which is that
of the histogram's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.cards.amendments import names_before_evidence
from lit_dpret.cards.audits import contradicted
from lit_dpret.cards.card import CARD_NAME, card_sha256, read_card, verify_card
from lit_dpret.cards.lineage import Lineage
from lit_dpret.cards.text import charges_every_unit
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, PrivateDataError
from lit_dpret.privacy.accounting.releases import merge, release_from_dict
from lit_dpret.privacy.histogram import ReleasedHistogram
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.privacy.ledger.judgement import every_unit_in_every_step
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, recorded_start
from lit_dpret.synthesis.filters.bins import Bins, bins_from_spec
from lit_dpret.synthesis.filters.by_score import Progress, QueryFilter
from lit_dpret.synthesis.filters.released import ReleasedQueries


@dataclass(eq=False)
class HistogramMatch(QueryFilter):
    """Keep a share of the queries, drawn so that their bins are distributed like a private histogram's.

    Guarantees:
        - The selection is a function of the queries, the histogram, the settings and the public seed.
        - From each bin as many queries are kept as its share asks for, or all that it has; the other bins make up
          for a shortage in proportion.
        - The selection carries the claim of the histogram's card. A histogram whose card does not compose the claim of
          these very queries is refused.
    """

    name = "histogram_match"

    histogram: str | Path  # the run folder of ``task=histogram``
    _: KW_ONLY
    keep_share: float = 0.5
    """The share of the queries to keep, in (0, 1]. Smaller shares come closer to the histogram; 1 keeps all."""
    seed: int = 0  # decides which queries of a bin are kept; public
    encoder: str | None = None  # the folder of the topics' encoder, if it was a folder
    encoder_is_public: bool = False  # declares that nothing private went into it

    def __post_init__(self) -> None:
        if not 0 < self.keep_share <= 1:
            raise ConfigurationError(f"keep_share={self.keep_share} of the filter {self.name} is not in (0, 1].")
        self.folder = Path(self.histogram)
        self.distances: tuple[float, float] | None = None

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        require_composed(self.folder, released)
        histogram, bins = self._read()
        if len(bins.names) != len(histogram.target):
            raise DataError(f"{self.folder}: the histogram's counts and bins differ in number. Restore its files.")
        return list(bins.trusts)

    def claim(self, released: ReleasedQueries) -> Path | None:
        return self.folder

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        """Return how much of its bin's quota is left when a query's turn comes; queries above zero are kept."""
        histogram, bins = self._read()
        target = histogram.target
        found = bins.assign([q.text for q in released], [q.passage_id for q in released])
        there = np.bincount(found, minlength=len(target))
        quota = quotas(target, there, max(1, round(self.keep_share * len(released))))
        by_hash = sorted(range(len(released)), key=lambda i: self._draw(released.queries[i].query_id))
        scores, taken = np.empty(len(released)), np.zeros(len(target), dtype=int)
        for i in by_hash:
            scores[i] = quota[found[i]] - taken[found[i]]
            taken[found[i]] += 1
        self.distances = (_distance(there, target), _distance(quota, target))
        return scores

    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        kept: np.ndarray = scores > 0
        return kept

    def settings(self) -> dict[str, Any]:
        before, after = self.distances or (None, None)
        return {
            "uses_private_data": False,  # but another release, which the claim of the selection is charged with
            "histogram": self.folder.resolve().name,
            "histogram_card_sha256": card_sha256(self.folder),
            "keep_share": self.keep_share,
            "seed": self.seed,
            "distance_before": before,
            "distance_after": after,
        }

    def _read(self) -> tuple[ReleasedHistogram, Bins]:
        histogram = ReleasedHistogram.read(self.folder)
        knob = f"task.filters.{self.name}.encoder"
        bins = bins_from_spec(histogram.bins, encoder=self.encoder, encoder_is_public=self.encoder_is_public, knob=knob)
        return histogram, bins

    def _draw(self, query_id: str) -> bytes:
        return sha256(f"{self.name}\x1f{self.seed}\x1f{query_id}".encode("utf-8", "surrogatepass")).digest()


def quotas(target: np.ndarray, there: np.ndarray, wanted: int) -> np.ndarray:
    """Return how many queries to take from each bin, ``wanted`` in total: by the target's shares, or all it has.

    Example:
        >>> quotas(np.array([0.5, 0.5, 0.0]), np.array([100, 10, 50]), 60).tolist()
        [50, 10, 0]

    ``target`` is the wanted distribution, ``there`` the number of queries in each bin, both ``(bins,)``. If the bins
    with a share hold fewer than ``wanted`` queries, all of those are taken.
    """
    wanted = min(wanted, int(there[target > 0].sum()))
    due, full = np.zeros(len(target)), (target <= 0) | (there == 0)
    while True:  # a bin that runs short is taken whole, and its share goes to the others
        due[full] = np.where(target > 0, there, 0)[full]
        if full.all():
            break
        due[~full] = target[~full] * (wanted - due[full].sum()) / target[~full].sum()
        short = ~full & (due > there)
        if not short.any():
            break
        full |= short
    quota = np.floor(due + 1e-9).astype(np.int64)
    room = np.where(quota < there, due - quota, -1.0)  # the largest remainders get what rounding left over
    quota[np.argsort(-room, kind="stable")[: wanted - int(quota.sum())]] += 1
    return quota


def _distance(counts: np.ndarray, target: np.ndarray) -> float:
    """Return the total variation between counts and a distribution, in [0, 1]."""
    return round(float(np.abs(counts / counts.sum() - target).sum()) / 2, 6)


def require_composed(folder: Path, released: ReleasedQueries) -> None:
    """Refuse a histogram whose card does not compose the claim of these queries.

    Guarantees, after it returns, that the card in ``folder`` agrees with its ledger and its files. In addition, either
    the queries' own card names it, or it records a start that is an ancestor of the queries and was charged with
    exactly the releases that their card states (the card of another histogram, if one selected them before). A card to
    which an audit added results in between is the same ancestor if it is within reach, equals the named card once the
    results are removed, and is not contradicted by them.
    """
    card = read_card(folder)
    if problems := verify_card(card, folder / LEDGER_NAME, folder=folder):
        raise DataError(f"{folder}: its card does not match its files: {problems[0]}")
    if card["subject"]["artifact_type"] != "histogram":
        raise DataError(f"{folder} holds the card of {card['subject']['artifact_type']}, not of a histogram.")
    if names_before_evidence(card) & released.ancestors:
        return
    second = released.claim is not None
    if released.provenance == "card" and released.folder is not None:
        try:
            start = recorded_start(PrivacyLedger.read(folder / LEDGER_NAME).records)
        except LedgerError as error:
            raise DataError(f"{folder}: {error}") from error
        theirs = read_card(released.claim or released.folder)
        charged = _releases(theirs["ledger"]["releases"], theirs)
        named = "" if start is None else str(start["card_sha256"])
        if named in released.ancestors or _the_same_card(named, released, near=(folder, released.folder)):
            if start is not None and charged == _releases(start["releases"]):
                return
            second = True
    if second:
        raise PrivateDataError(
            f"{folder} is a second histogram for queries that were already selected by "
            f"{released.claim or released.folder}, and its card does not compose that one, so no claim would cover "
            "both. Select by one of them alone, or count both at once with finer bins in one task=histogram."
        )
    raise PrivateDataError(
        f"The histogram in {folder} was charged to a different ledger from these queries: its card does not start from "
        "the generator that wrote them, so no claim covers both, and selecting by it would spend more than any card "
        "states. Create one with task=histogram task.generator=RUN, where RUN is the run of their generator. (If an "
        "audit changed the generator's card in between, that card must be within three folders of either.)"
    )


def _the_same_card(named: str, released: ReleasedQueries, *, near: Sequence[Path]) -> bool:
    """Return whether the card ``named`` is an ancestor of the queries, apart from results of audits.

    Run and model folder have a copy each, which an audit amends one after the other: two copies are one card if both
    were the same before.
    """
    lineage = Lineage()
    for folder in near:
        lineage.look_near(folder / CARD_NAME)
    start = lineage.card(named)
    if start is None or contradicted(start.card) or named not in (names := names_before_evidence(start.card)):
        return False
    for ancestor in released.ancestors:
        other = lineage.card(ancestor)
        if other is not None and not contradicted(other.card):
            theirs = names_before_evidence(other.card)
            if ancestor in theirs and names & theirs:
                return True
    return False


def _releases(facts: Any, card: Mapping[str, Any] | None = None) -> list[str]:
    """Return the releases in a canonical order, without labels, as the card's accounting charges them."""
    found = [release_from_dict(one) for one in facts]
    if card is not None and charges_every_unit(card):
        found = every_unit_in_every_step(found)
    bare = [release_from_dict({**release.to_dict(), "label": "any"}) for release in found]
    return sorted(str(release.to_dict()) for release in merge(bare))
