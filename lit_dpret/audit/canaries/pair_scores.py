"""What a trained dual encoder thinks of planted secrets: which candidate brings query and passage nearest.

A dual encoder gives a text no likelihood, and writes none. What it was trained for is to tell a query's passage from
others, so a candidate is judged by that: -log2 of the softmax share of the canary's own passage, for the query and the
passage with that candidate in it, among the passages of the other canaries without their secrets. The secret's own
bits lie low where its pair was trained on. Nothing here knows another canary's secret, so that ranks are functions of
the model and of public texts, as every bound on them asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from lit_dpret.audit.canaries.canary import Canary
from lit_dpret.audit.canaries.lengths import check_all_fit
from lit_dpret.audit.canaries.scores import SecretScore
from lit_dpret.audit.statistics.exposure import exposure_of_rank, extrapolated_exposure, rank
from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.encoders.st_folder import Towers
from lit_dpret.errors import ConfigurationError

TEMPERATURE = 0.05
"""Of the softmax, where embeddings have length 1; dot products of any length are taken as they are."""


def score_pairs(
    towers: Towers, canaries: Sequence[Canary], *, progress: Callable[[int, int], None] | None = None
) -> list[SecretScore]:
    """Score every canary, planted or left out by its coin.

    Args:
        towers: The trained encoders.
        canaries: Their candidates are ranked.
        progress: Called with (canaries done, canaries in all).

    Raises:
        ConfigurationError: A secret is cut away by the encoders' lengths, a tokenizer cannot tell candidates apart, or
            the canaries have one passage between them, so that there is none to tell it from.
    """
    check_all_fit(_BothSides(towers), canaries)
    texts = list(dict.fromkeys(canary.passage for canary in canaries))
    pool = towers.passage_encoder.encode(texts, "passage").double()
    found = []
    for done, canary in enumerate(canaries):
        others = pool[[text != canary.passage for text in texts]]
        if not len(others):
            raise ConfigurationError(
                "All canaries have the same passage, and a dual encoder is asked to tell a query's passage from "
                "others. Plant canaries of kind random_passage or own_passage, several of them."
            )
        found.append(_score(canary, _bits(towers, canary, others)))
        if progress is not None:
            progress(done + 1, len(canaries))
    return found


def _bits(towers: Towers, canary: Canary, others: torch.Tensor) -> list[float]:
    """For each candidate, what the encoders leave open about which passage the query belongs to."""
    queries = [canary.query_with(secret) for secret in canary.candidates]
    passages = [canary.passage_with(secret) for secret in canary.candidates]
    asked = towers.query_encoder.encode(queries, "query").double()
    own = towers.passage_encoder.encode(passages, "passage").double()
    divisor = TEMPERATURE if towers.query_encoder.contract.normalise else 1.0
    right = (asked * own).sum(dim=1, keepdim=True) / divisor
    table = torch.cat([right, asked @ others.T / divisor], dim=1)
    return [float(value) for value in (table.logsumexp(dim=1) - right[:, 0]) / math.log(2)]


def _score(canary: Canary, bits: Sequence[float]) -> SecretScore:
    own = canary.candidates.index(canary.secret)
    others = [*bits[:own], *bits[own + 1 :]]
    place = rank(bits[own], others)
    extrapolated = extrapolated_exposure(bits[own], others) if len(set(others)) > 1 else 0.0
    return SecretScore(
        name=canary.name, kind=canary.kind, side=canary.side, copies=canary.copies, included=canary.included,
        bits=bits[own], rank=place, exposure=exposure_of_rank(place, len(canary.candidates)),
        margin=sum(others) / len(others) - bits[own],
        extrapolated=extrapolated if math.isfinite(extrapolated) else None, log_probability=None,
    )  # fmt: skip


class _BothSides:
    """Two towers as what knows how texts become tokens."""

    def __init__(self, towers: Towers) -> None:
        self._of: dict[Side, TextEncoder] = {"query": towers.query_encoder, "passage": towers.passage_encoder}

    def token_ids(self, texts: Sequence[str], side: Side, *, whole: bool = False) -> list[list[int]]:
        return self._of[side].token_ids(texts, side, whole=whole)
