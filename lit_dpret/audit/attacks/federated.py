"""Attacks by members of a federation on another silo's queries, from the messages that they receive.

A curious silo embeds texts that it suspects and compares them with request rows: embeddings of queries by *nearness*,
means of many by *tracing* (Dwork et al. 2015, "Robust Traceability from Trace Amounts"). The suspects are queries of
the *same* silo, both sent and unsent. A curious server reads tokens from the word-embedding table: a row whose token is
in no text of the batch has no gradient (Melis et al. 2019, 1805.04049).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lit_dpret.audit.attacks.inversion import token_set_f1
from lit_dpret.audit.attacks.signals import unit_rows
from lit_dpret.audit.statistics.error_rates import Rate, rate
from lit_dpret.audit.statistics.metrics import auc
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.errors import ConfigurationError, DataError

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# How far rounding to float32 moves a table row, as a share of the median row's norm.
_ROUNDING = 1e-6
_DEVIATIONS = 6.0


def pooled(rates: Sequence[Rate]) -> Rate | None:
    """Pool the trials of several rates; None without rates.

    Trials of one silo resemble each other, so the interval is narrower than one that covers newly drawn silos.
    """
    if not rates:
        return None
    known = [one.chance for one in rates if one.chance is not None]
    trials = sum(one.trials for one in rates)
    chance = sum((one.chance or 0.0) * one.trials for one in rates) / trials if len(known) == len(rates) else None
    return rate(sum(one.hits for one in rates), trials, chance=chance, confidence=rates[0].confidence)


def nearness(rows: Floats, suspects: Floats) -> Floats:
    """Return the cosine of each suspect with its nearest row; zeros without rows.

    Both have shape ``(count, dim)``; the shared encoder embedded ``suspects``.
    """
    if rows.ndim != 2 or suspects.ndim != 2 or rows.shape[1] != suspects.shape[1]:
        raise DataError(f"Rows of shape {rows.shape} and suspects of {suspects.shape} cannot be compared.")
    if not len(rows):
        return np.zeros(len(suspects))
    return np.asarray((unit_rows(suspects) @ unit_rows(rows).T).max(axis=1))


def traces(rows: Floats, suspects: Floats) -> Floats:
    """Return each suspect's contribution to its nearest mean beyond the other suspects there, ``(suspects,)``.

    ``<x, row - mean of the other suspects there>``. A mean of k unit vectors contains 1/k of each of them; with a text
    that is not in it, it shares only what all such texts have in common. Zeros without rows.
    """
    if not len(rows) or not len(suspects):
        return np.zeros(len(suspects))
    unit = unit_rows(suspects)
    place = (unit @ unit_rows(rows).T).argmax(axis=1)
    sums, counts = np.zeros_like(rows), np.bincount(place, minlength=len(rows))
    np.add.at(sums, place, unit)
    others = np.maximum(counts[place] - 1, 1)[:, None]
    expected = (sums[place] - unit) / others
    return np.asarray(np.einsum("ij,ij->i", unit, rows[place] - expected))


@dataclass(frozen=True, kw_only=True)
class Identified:
    """How well a silo's rows identify their queries."""

    rows: int
    # By number of guesses: how often a query that was sent is among that many nearest of its candidates.
    named: dict[int, Rate]
    # The same for queries that were not sent; any excess over chance is due to the domain, not to the rows.
    control: dict[int, Rate]
    nearness: float  # the probability that a query that was sent is nearer to a row than one that was not (AUC)
    # The same by `traces` where rows are means, else None. If set, it also decides the named queries.
    traced: float | None
    candidates: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows, "candidates": self.candidates, "nearness": self.nearness, "traced": self.traced,
            "named": {str(top): one.to_dict() for top, one in self.named.items()},
            "control": {str(top): one.to_dict() for top, one in self.control.items()},
        }  # fmt: skip


def identify_requests(
    rows: Floats,
    sent: Floats,
    unsent: Floats,
    *,
    means: bool = False,
    candidates: int = 100,
    tops: Sequence[int] = (1, 10),
    confidence: float = 0.95,
    seed: int = 0,
) -> Identified:
    """Find each sent query among unsent ones of its silo.

    Half of the unsent queries serve as the other candidates. The other half are the control, in place of the sent ones.

    Guarantees:
        - A tie with another candidate counts against the attack, so uninformative rows identify nothing.
        - The control differs from the attack only in that its queries are not in the rows.

    Args:
        rows: Request rows of the silo, ``(rows, dim)``; may be empty.
        sent: Embeddings of the queries that the rows were computed from, ``(queries, dim)``.
        unsent: Embeddings of other queries of the same silo, none of them equal in text to a sent one.
        means: The rows are means of many embeddings of length 1, as centroids are.
        candidates: Candidates per query: the query itself and ``candidates - 1`` others, drawn without replacement.
        tops: Numbers of guesses.
        confidence: Confidence level of the intervals, which assume independent queries.
        seed: The seed of the draws.
    """
    if candidates < 2 or any(not 1 <= top < candidates for top in tops):
        raise ConfigurationError(
            f"task.candidates={candidates} must be at least 2 and more than each of the guesses {list(tops)}."
        )
    half = len(unsent) // 2
    if not len(sent) or half < candidates - 1 or half < 1:
        raise DataError(
            f"{len(sent)} queries that were sent and {len(unsent)} others of the silo are too few for "
            f"task.candidates={candidates}, which needs one and {2 * (candidates - 1)}. Lower task.candidates."
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(unsent))
    scores = nearness(rows, sent), nearness(rows, unsent)
    by_nearness, by_trace = auc(CanaryScores(*scores)), None
    if means:
        traced = traces(rows, np.concatenate([sent, unsent]))
        scores = traced[: len(sent)], traced[len(sent) :]
        by_trace = auc(CanaryScores(*scores))
    near, far = scores
    held, pool = far[order[:half]], far[order[half:]]

    def named(victims: Floats) -> dict[int, Rate]:
        draws = np.stack([rng.choice(pool, candidates - 1, replace=False) for _ in victims])
        before = (draws >= victims[:, None]).sum(axis=1)
        return {
            top: rate(int((before < top).sum()), len(victims), chance=top / candidates, confidence=confidence)
            for top in tops
        }

    return Identified(
        rows=len(rows), named=named(near), control=named(held), nearness=by_nearness, traced=by_trace,
        candidates=candidates,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OwnTexts:
    """How well the attacker's queries approximate those of another silo, matched by rows."""

    # F1 between the sets of words of the own query and the victim's query nearest to a row, mean over rows.
    similarity: float
    control: float  # the same with an own query drawn at random
    equal: float  # the share of rows for which both queries have the same set of words


def own_texts(
    rows: Floats,
    victims: tuple[Sequence[str], Floats],
    own: tuple[Sequence[str], Floats],
    *,
    seed: int = 0,
) -> OwnTexts | None:
    """Guess the nearest own query for each row; return None without rows.

    ``victims`` and ``own`` are texts with their embeddings, ``(queries, dim)``; ``rows`` has shape ``(rows, dim)``.
    """
    if not len(rows):
        return None
    unit = unit_rows(rows)
    theirs = [victims[0][place] for place in (unit @ unit_rows(victims[1]).T).argmax(axis=1)]
    guessed = [own[0][place] for place in (unit @ unit_rows(own[1]).T).argmax(axis=1)]
    drawn = np.random.default_rng(seed).integers(len(own[0]), size=len(rows))
    found = np.array([token_set_f1(a, b) for a, b in zip(guessed, theirs, strict=True)])
    blind = [token_set_f1(own[0][place], text) for place, text in zip(drawn, theirs, strict=True)]
    return OwnTexts(similarity=float(found.mean()), control=float(np.mean(blind)), equal=float((found == 1.0).mean()))


# -- a curious server: rows of the table of word embeddings
#
# Tokens of sentences move rows as well, so the evidence about queries is the difference from tokens that occur only in
# the collection. Weight decay scales all rows by one factor, estimated as the median over the table.


@dataclass(frozen=True, eq=False, repr=False)
class MovedRows:
    """The change of each row of a word-embedding table beyond the common change of all rows."""

    # L2 norms, ``(vocabulary,)``. Changes within float32 rounding are set to 0: rounding grows with a row's length, and
    # would separate frequent from rare words without any update.
    moved: Floats
    kept: float  # the factor by which decay scaled every row, estimated from the update; 1 without decay
    # A row above this counts as touched: six robust deviations above the median row, and more than rounding.
    threshold: float

    def __repr__(self) -> str:
        return f"MovedRows({len(self.moved)} rows, {int(self.touched.sum())} touched)"

    @property
    def touched(self) -> NDArray[np.bool_]:
        return np.asarray(self.moved > self.threshold)


def moved_rows(before: Floats, after: Floats) -> MovedRows:
    """Measure how far an update moved the rows of a table, without weight decay; texts must touch few of the rows.

    ``before`` is the table that the server sent, ``after`` the one that it got back, both ``(vocabulary, dim)``.
    """
    squares = np.einsum("ij,ij->i", before, before)
    rows = squares > 0
    kept = float(np.median(np.einsum("ij,ij->i", after[rows], before[rows]) / squares[rows]))
    least = _ROUNDING * float(np.median(np.sqrt(squares[rows])))
    moved = np.linalg.norm(after - kept * before, axis=1)
    moved[moved <= least] = 0.0
    spread = float(stats.median_abs_deviation(moved, scale="normal"))
    return MovedRows(moved, kept, max(least, float(np.median(moved)) + _DEVIATIONS * spread))


@dataclass(frozen=True, kw_only=True)
class TokenSeparation:
    """How well an update distinguishes some tokens from others."""

    tokens: int
    others: int
    auc: float  # the probability that one of `tokens` moved further than one of `others`
    recall: Rate  # the share of `tokens` that stand out
    precision: Rate | None  # the share of `tokens` among all that stand out; None where nothing does

    @property
    def prevalence(self) -> float:
        return self.tokens / (self.tokens + self.others)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "others": self.others, "prevalence": self.prevalence, "auc": self.auc,
            "recall": self.recall.to_dict(), "precision": None if self.precision is None else self.precision.to_dict(),
        }  # fmt: skip


def separate_tokens(
    rows: MovedRows, tokens: Ids, others: Ids, *, touched_alone: bool = False, confidence: float = 0.95
) -> TokenSeparation | None:
    """Distinguish tokens from others by the change of their rows; None if one kind is empty.

    Args:
        rows: How far the rows moved.
        tokens: Ids to find, without repetition.
        others: Ids that must not be named; none of them among ``tokens``.
        touched_alone: Compare only touched rows, to see whether the distance reveals more than the fact of moving.
        confidence: Confidence level of the intervals, which assume independent tokens.
    """
    for ids in (tokens, others):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < len(rows.moved)):
            raise DataError("A token has no row in the attacked table: it belongs to another tokenizer.")
    if touched_alone:
        tokens, others = tokens[rows.touched[tokens]], others[rows.touched[others]]
    if not len(tokens) or not len(others):
        return None
    right, wrong = int(rows.touched[tokens].sum()), int(rows.touched[others].sum())
    base = len(tokens) / (len(tokens) + len(others))
    scores = CanaryScores(rows.moved[tokens], rows.moved[others])
    return TokenSeparation(
        tokens=len(tokens),
        others=len(others),
        auc=auc(scores),
        recall=rate(right, len(tokens), confidence=confidence),
        precision=rate(right, right + wrong, chance=base, confidence=confidence) if right + wrong else None,
    )
