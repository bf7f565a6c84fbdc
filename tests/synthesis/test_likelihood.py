"""How likely a given query is, under the model and under the distribution that the sampler really draws from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_generator import lively_generator, passage

from lit_dpret.synthesis.prefill import prefill
from lit_dpret.synthesis.sampler import (
    Decoding,
    choose_tokens,
    decode,
    drawn_log_probs,
    target_scores,
    uniforms,
)

DECODINGS = [
    Decoding(top_p=0.8), Decoding(top_p=1.0), Decoding(top_p=0.5, temperature=0.7), Decoding(top_p=0.9, top_k=3),
    Decoding(top_p=1e-6),
]  # fmt: skip


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_a_token_has_the_probability_with_which_the_sampler_takes_it(decoding: Decoding) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)) * 2
    count = 20_000
    numbers = (np.arange(count) + 0.5) / count  # every number in its turn: shares are probabilities, up to 1 / count
    taken, _ = choose_tokens(logits.expand(count, -1), numbers, decoding)
    shares = np.bincount(taken, minlength=30) / count
    exact = torch.stack([drawn_log_probs(logits, torch.tensor([token]), decoding)[0] for token in range(30)]).exp()
    assert np.abs(exact.numpy() - shares).max() <= 2 / count
    assert ((exact.numpy() == 0) == (shares == 0)).all()


def test_equal_scores_are_ordered_as_the_sampler_orders_them() -> None:
    logits = torch.zeros(1, 10)
    decoding = Decoding(top_p=0.3)
    drawable = [drawn_log_probs(logits, torch.tensor([token]), decoding)[0].exp().item() for token in range(10)]
    assert drawable == pytest.approx([1 / 3] * 3 + [0] * 7)


def test_an_end_mark_is_not_drawn_too_early_nor_anything_too_late() -> None:
    logits, tokens = torch.zeros(3, 4), torch.tensor([1, 1, 1])
    found = drawn_log_probs(logits, tokens, Decoding(top_p=1.0, min_new_tokens=1, max_new_tokens=2), ends=[1])
    assert found[0] == found[2] == -math.inf and found[1].exp().item() == pytest.approx(0.25)


def test_scores_are_those_that_the_sampler_reports_for_what_it_drew() -> None:
    """Two implementations: teacher forcing here, the cached decoder there."""
    module = lively_generator()
    model = module.model.eval()
    ids = module.codec.passages([passage(i, 3 + i) for i in range(4)])
    decoding = Decoding(top_p=1.0, max_new_tokens=6)
    encoded = prefill(model, ids)
    sampled = decode(model, encoded, np.stack([uniforms(1, str(i), 0, 6) for i in range(4)]), decoding)
    targets = [[*one.tokens, 1] if one.finished else one.tokens for one in sampled]
    scores = target_scores(model, encoded, targets, decoding)
    assert scores.log_probs.sum(1).tolist() == pytest.approx([one.log_prob for one in sampled], abs=1e-4)
    assert scores.drawn is not None and torch.isfinite(scores.drawn).all()


def test_one_passage_may_stand_for_many_targets() -> None:
    module = lively_generator()
    ids = module.codec.passages([passage(2)])
    targets = module.codec.queries([passage(i, 2) for i in range(5)])
    once = target_scores(module.model.eval(), prefill(module.model, ids), targets).log_probs
    each = target_scores(module.model.eval(), prefill(module.model, ids * 5), targets).log_probs
    assert torch.allclose(once, each, atol=1e-5)
