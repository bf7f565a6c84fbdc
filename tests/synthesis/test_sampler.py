"""The sampler against a slow reference, against Hugging Face, and against the laws of chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generator import generator, lively_generator, passage
from transformers import PreTrainedModel

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.synthesis.prefill import ENCODED_AT_ONCE, prefill
from lit_dpret.synthesis.sampler import (
    HEADS,
    Decoding,
    Sampled,
    choose_tokens,
    decode,
    drawn_log_probs,
    from_nucleus_unsorted,
    target_scores,
    uniforms,
)


def model_and_passages(count: int = 5) -> tuple[PreTrainedModel, list[list[int]]]:
    module = lively_generator().double()
    tokens = module.codec.passages([passage(number, 2 + number % 4) for number in range(count)])
    return module.model.eval(), tokens


def numbers(count: int, length: int, draw: int = 0) -> np.ndarray:
    return np.stack([uniforms(3, f"p{row}", draw, length) for row in range(count)])


def drawn(model: PreTrainedModel, tokens: list[list[int]], u: np.ndarray, **settings: Any) -> list[Sampled]:
    decoding = Decoding(**{"max_new_tokens": 10, **settings})
    return decode(model, prefill(model, tokens), u, decoding)


def nucleus(logits: np.ndarray, decoding: Decoding, forbidden: tuple[int, ...] = ()) -> dict[int, float]:
    """Holtzman et al.'s definition, word for word: probability by token id, in order of probability."""
    scaled = logits.astype(np.float64) / decoding.temperature
    scaled[list(forbidden)] = -np.inf
    ranked = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))[: decoding.top_k]
    weights = np.exp(scaled[ranked] - scaled[ranked].max())
    chances = weights / weights.sum()
    kept: dict[int, float] = {}
    mass = 0.0
    for token, chance in zip(ranked, chances, strict=True):
        kept[token] = chance
        mass += chance
        if mass >= decoding.top_p:
            break
    total = sum(kept.values())
    return {token: chance / total for token, chance in kept.items() if chance > 0}


def pick(chances: dict[int, float], u: float) -> int:
    mass = 0.0
    for token, chance in chances.items():
        mass += chance
        if mass > u:
            return token
    return list(chances)[-1]


def reference(model: PreTrainedModel, passage_tokens: list[int], u: np.ndarray, decoding: Decoding) -> Sampled:
    """One row, no batch, no padding, no cache, no shortcut."""
    sequence, log_prob = [0], 0.0
    for position in range(decoding.max_new_tokens):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([passage_tokens]), decoder_input_ids=torch.tensor([sequence]), use_cache=False
            ).logits[0, -1]
        forbidden = (1,) if position < decoding.min_new_tokens else ()
        token = pick(nucleus(logits.numpy(), decoding, forbidden), u[position])
        log_prob += float(logits.log_softmax(0)[token])
        if token == 1:
            return Sampled(sequence[1:], log_prob, True)
        sequence.append(token)
    return Sampled(sequence[1:], log_prob, False)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_p": 1.0}, {"temperature": 0.5, "top_p": 0.95}, {"temperature": 2.0, "top_k": 5, "min_new_tokens": 4},
        {"top_k": 1, "min_new_tokens": 0}, {"max_new_tokens": 1},
    ],
)  # fmt: skip
def test_it_equals_a_reference_that_takes_one_row_at_a_time_without_cache(settings: dict[str, Any]) -> None:
    model, tokens = model_and_passages(6)
    u = numbers(6, 10)
    made = drawn(model, tokens, u, **settings)
    assert settings or len({len(row.tokens) for row in made}) >= 3, "else the shrinking of the batch goes untested"
    for ours, ids, row in zip(made, tokens, u, strict=True):
        theirs = reference(model, ids, row, Decoding(**{"max_new_tokens": 10, **settings}))
        assert (ours.tokens, ours.finished) == (theirs.tokens, theirs.finished)
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_decoding_is_hugging_faces(tied: bool) -> None:
    model, tokens = model_and_passages(5)
    if tied:
        model = generator().double().model.eval()
    ours = drawn(model, tokens, numbers(5, 10), top_p=1e-9)
    for ids, row in zip(tokens, ours, strict=True):
        theirs = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10, min_new_tokens=1)[0].tolist()
        assert row.tokens == [token for token in theirs[1:] if token != 1]


def test_encoding_a_few_rows_at_a_time_gives_the_states_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_and_passages(2 * ENCODED_AT_ONCE + 3)
    few = prefill(model, tokens)
    monkeypatch.setattr("lit_dpret.synthesis.prefill.ENCODED_AT_ONCE", len(tokens))
    whole = prefill(model, tokens)
    assert torch.equal(few.mask, whole.mask)
    shown = whole.mask.bool()
    torch.testing.assert_close(few.states[shown], whole.states[shown])
    assert few.states.isfinite().all(), "what is not a number would spoil the rows that it is hidden from"


def test_the_numbers_of_a_query_are_its_own() -> None:
    base = uniforms(1, "p", 2, 8)
    assert ((base >= 0) & (base < 1)).all()
    for other in (uniforms(2, "p", 2, 8), uniforms(1, "q", 2, 8), uniforms(1, "p", 3, 8), uniforms(12, "p", 0, 8)):
        assert not np.array_equal(base, other)
    assert np.array_equal(base, uniforms(1, "p", 2, 20)[:8])
    assert not np.array_equal(uniforms(1, "2\x1fp", 1, 8), uniforms(1, "p", 2, 8))
    # pinned: data sets made by earlier versions can be made again
    assert uniforms(0, "passage", 0, 2).tolist() == [0.8060422737226894, 0.8251305884237708]


@pytest.mark.parametrize("top_k", [None, 3, HEADS[0] + 40])
@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0, 1000.0])
@pytest.mark.parametrize("vocabulary", [2, 300, HEADS[1] + 300])
def test_a_vocabulary_is_sorted_only_as_far_as_needed_and_gives_the_same(
    vocabulary: int, spread: float, top_k: int | None
) -> None:
    """Flat scores reach past the head; equal ones at its edge go by token id; a forbidden token is never drawn."""
    coins = torch.Generator().manual_seed(vocabulary)
    logits = (spread * torch.randn((6, vocabulary), generator=coins)).bfloat16().float()  # coarse: many ties
    random = np.random.default_rng(0)
    for top_p in (1e-9, 0.3, 0.7, 0.999, 1.0):
        u, decoding = np.array([0.0, 0.9999, *random.random(4)]), Decoding(top_p=top_p, top_k=top_k)
        for forbidden in ((), (1,)):
            tokens, _ = choose_tokens(logits, u, decoding, forbidden=forbidden)
            wanted = [pick(nucleus(row.numpy(), decoding, forbidden), x) for row, x in zip(logits, u, strict=True)]
            assert tokens.tolist() == wanted, top_p


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": 0.0}, {"temperature": math.inf}, {"top_k": 0},
        {"max_new_tokens": 0}, {"min_new_tokens": 11, "max_new_tokens": 10},
    ],
)  # fmt: skip
def test_decoding_out_of_range_is_refused_by_name_and_so_is_a_broken_generator(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        Decoding(**settings)
    for broken in (math.nan, math.inf):
        with pytest.raises(UnsupportedModelError, match="weights are broken"):
            choose_tokens(torch.tensor([[0.0, 0.0], [0.0, broken]]), np.zeros(2), Decoding())


def test_the_largest_number_below_one_does_not_leave_the_nucleus() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        scores = random.normal(size=400)
        log_mass = float(np.logaddexp.reduce(scores))
        order = np.argsort(-scores)
        size = int((np.cumsum(np.exp(scores[order] - log_mass)) < 0.7).sum()) + 1
        assert from_nucleus_unsorted(scores, log_mass, 1 - 2**-53, 0.7) == order[size - 1]


@pytest.mark.parametrize(
    "settings", [{"top_p": 1.0}, {"top_p": 0.5, "temperature": 0.7}, {"top_p": 0.9, "top_k": 3}, {"top_p": 1e-6}]
)
def test_a_token_has_the_probability_with_which_the_sampler_takes_it(settings: dict[str, Any]) -> None:
    decoding = Decoding(**settings)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)) * 2
    count = 10_000
    numbers = (np.arange(count) + 0.5) / count  # every number in its turn: shares are probabilities, up to 1 / count
    taken, log_probs = choose_tokens(logits.expand(count, -1), numbers, decoding)
    shares = np.bincount(taken, minlength=30) / count
    exact = torch.stack([drawn_log_probs(logits, torch.tensor([token]), decoding)[0] for token in range(30)]).exp()
    assert np.abs(exact.numpy() - shares).max() <= 2 / count
    assert ((exact.numpy() == 0) == (shares == 0)).all()
    torch.testing.assert_close(torch.from_numpy(log_probs), logits[0].double().log_softmax(0)[torch.from_numpy(taken)])


def test_equal_scores_are_ordered_alike_and_an_end_mark_is_not_drawn_too_early_nor_anything_too_late() -> None:
    logits, decoding = torch.zeros(1, 10), Decoding(top_p=0.3)
    drawable = [drawn_log_probs(logits, torch.tensor([token]), decoding)[0].exp().item() for token in range(10)]
    assert drawable == pytest.approx([1 / 3] * 3 + [0] * 7)
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
    assert scores.drawn is not None
    assert torch.isfinite(scores.drawn).all()
    once, each = (target_scores(model, prefill(model, part), targets).log_probs for part in (ids[:1], ids[:1] * 4))
    assert torch.allclose(once, each, atol=1e-5), "one passage may stand for many targets"
