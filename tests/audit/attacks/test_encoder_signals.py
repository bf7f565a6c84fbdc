"""Signals of membership from a dual encoder, on arithmetic and on an encoder that was overfitted."""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import WORDS, tiny_bert, tiny_tokenizer

from lit_dpret.audit.attacks.membership import measure
from lit_dpret.audit.attacks.signals import (
    EncodedPairs,
    encode_pairs,
    encoder_signals,
    generator_signals,
    mean_by_query,
)
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.encoders import Contract, TextEncoder, Towers
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules.token_scores import TokenScores

DIAGONAL = math.sqrt(0.5)
PAIRS = EncodedPairs(
    queries=np.array([[2.0, 0.0], [0.0, 3.0]]),
    passages=np.array([[1.0, 1.0], [0.0, 5.0]]),
    pool=np.array([[1.0, 0.0], [0.0, 5.0], [-1.0, 0.0]]),
    own=np.array([[False, False, False], [False, True, False]]),
    normalise=True,
)


def test_signals_are_what_their_definitions_say() -> None:
    found = encoder_signals(PAIRS, temperature=0.5)
    first = DIAGONAL / 0.5 - math.log(math.exp(1 / 0.5) + 1 + math.exp(-1 / 0.5))
    second = 1 / 0.5 - math.log(2.0)  # its own passage is not a negative
    np.testing.assert_allclose(found["logit"], [first, second])
    np.testing.assert_allclose(found["margin"], [DIAGONAL, 1.0])
    np.testing.assert_allclose(found["rank"], [-math.log(2), 0.0])
    np.testing.assert_allclose(found["norm"], [2.0, 3.0])
    dot = replace(PAIRS, normalise=False)
    np.testing.assert_allclose(encoder_signals(dot, temperature=1.0)["logit"][1], 15.0 - math.log(2.0))
    tied = EncodedPairs(PAIRS.queries[:1], PAIRS.pool[:1], PAIRS.pool, np.zeros((1, 3), dtype=bool), True)
    assert encoder_signals(tied)["rank"].tolist() == [-math.log(2)], "a tie counts against the passage"
    rows = mean_by_query({"x": np.array([1.0, 3.0, 5.0])}, [0, 0, 1], 2)
    assert rows["x"].tolist() == [2.0, 5.0]
    with pytest.raises(ConfigurationError, match="temperature=0"):
        encoder_signals(PAIRS, temperature=0)
    with pytest.raises(DataError, match="pool"):
        encoder_signals(replace(PAIRS, own=np.ones((2, 3), dtype=bool)))


# -- a trained encoder ---------------------------------------------------------------------------


def texts(count: int, words: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def encoder() -> TextEncoder:
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    contract = Contract(query_max_length=10, passage_max_length=12)
    return TextEncoder(tiny_bert(**settings), tiny_tokenizer(), contract)


def overfitted(queries: list[str], passages: list[str], *, steps: int = 60) -> Towers:
    model = encoder().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sides = [model.tokenize(queries, "query"), model.tokenize(passages, "passage")]
    for _ in range(steps):
        left, right = (model(side) for side in sides)
        optimizer.zero_grad()
        F.cross_entropy(left @ right.T / 0.05, torch.arange(len(queries))).backward()
        optimizer.step()
    return Towers(model.eval(), model)


def test_an_overfitted_encoder_gives_its_members_away_and_one_of_other_data_nobody() -> None:
    """60 members and 60 others, under an encoder of the members and one of yet others."""
    queries, passages, pool = texts(180, 6, 1), texts(180, 8, 2), texts(50, 8, 3)
    reference = encode_pairs(Towers(encoder(), encoder()), queries[:120], passages[:120], pool)
    for rows in (slice(0, 60), slice(120, 180)):
        towers = overfitted(queries[rows], passages[rows])
        attacked = encode_pairs(towers, queries[:120], passages[:120], pool)
        signals = encoder_signals(attacked, reference=reference)
        found = {name: CanaryScores(signal[:60], signal[60:]) for name, signal in signals.items()}
        auc = {name: measure(name, scores, resamples=300).auc for name, scores in found.items()}
        if rows.start == 0:
            for name in ("logit", "margin", "rank", "logit_reference", "margin_reference"):
                assert auc[name].value > 0.8, name
        else:
            for name in ("logit", "margin", "rank", "logit_reference", "shift"):
                assert auc[name].low <= 0.5 <= auc[name].high, name


# -- signals of a generator


def scores(*rows: list[float], moments: tuple[float, float] | None = None) -> TokenScores:
    width = max(map(len, rows))
    mask = np.array([[place < len(row) for place in range(width)] for row in rows])
    log_probs = np.array([[*row, *[0.0] * (width - len(row))] for row in rows])
    mean, deviation = (None, None) if moments is None else (np.full(mask.shape, m) for m in moments)
    return TokenScores(log_probs, mask, np.where(mask, 7, -100), mean, deviation)


def test_signals_are_what_their_papers_define_and_those_that_lack_their_input_are_left_out() -> None:
    queries = ["a question", "b"]
    own = scores([-1.0, -2.0, -3.0, -0.5, -6.0], [-0.1, -0.3], moments=(-2.0, 0.5))
    found = generator_signals(own, queries, reference=scores([-2.0] * 7, [-1.0]), lowest=0.4)
    np.testing.assert_allclose(found["loss"], [-2.5, -0.2])
    np.testing.assert_allclose(found["logit"], [-2.5 - math.log1p(-math.exp(-2.5)), -0.2 - math.log1p(-math.exp(-0.2))])
    np.testing.assert_allclose(found["reference"], [-12.5 + 14.0, -0.4 + 1.0])
    np.testing.assert_allclose(found["zlib"][0], -2.5 / len(zlib.compress(b"a question")))
    np.testing.assert_allclose(found["min_k"], [(-6.0 - 3.0) / 2, -0.3])
    np.testing.assert_allclose(found["min_k_plus"], [((-6 + 2) + (-3 + 2)) / 0.5 / 2, (-0.3 + 2) / 0.5])
    assert set(generator_signals(scores([-1.0]), ["a"])) == {"loss", "logit", "zlib", "min_k"}
    certain = generator_signals(scores([0.0, 0.0], moments=(0.0, 0.0)), ["a"], reference=scores([-1.0]))
    assert all(np.isfinite(value).all() for value in certain.values())
