"""Embedding inversion: the probe with its control, ranking of candidates, and a small trained inverter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from tiny_generator import WORDS, tokenizer

from lit_dpret.audit.attacks.decoder import (
    PrefixDecoder,
    Words,
    fit_decoder,
    load_language_model,
    new_language_model,
    padded,
)
from lit_dpret.audit.attacks.inversion import (
    align,
    embedding_gain,
    identify,
    recovered,
    shuffled_order,
    token_set_f1,
)
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError

# -- the probe's arithmetic ------------------------------------------------------------------------


def test_the_gain_is_a_mean_over_tokens_and_its_interval_is_paired_and_covers_zero_as_often_as_it_says() -> None:
    """Texts differ far more than the two networks: only a paired interval sees the difference."""
    found = embedding_gain([1.0, 20.0], [2.0, 29.0], [1, 9])
    assert found.nats == pytest.approx(10 / 10)
    assert found.bits == pytest.approx(1 / math.log(2))
    assert found.perplexity == pytest.approx(math.exp(2.1))
    assert found.shuffled_perplexity == pytest.approx(math.exp(3.1))
    rng = np.random.default_rng(0)
    hard = rng.uniform(10, 100, 300)
    nothing = embedding_gain(hard + rng.normal(0, 0.1, 300), hard + rng.normal(0, 0.1, 300), np.full(300, 10))
    little = embedding_gain(hard, hard + rng.normal(0.05, 0.1, 300), np.full(300, 10))
    assert nothing.low < 0 < nothing.high
    assert not nothing.significant
    assert 0 < little.low < 0.005 < little.high
    assert little.significant
    wrong = 0
    for _ in range(200):
        found = embedding_gain(rng.normal(20, 1, 80), rng.normal(20, 1, 80), np.full(80, 8), resamples=300)
        wrong += not found.low <= 0 <= found.high
    assert wrong <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05 * 0.95)


# -- the decoder -----------------------------------------------------------------------------------


def decoder(how: str = "key_value", *, dim: int | None = 8, seed: int = 0) -> PrefixDecoder:
    words = tokenizer()
    model = new_language_model(len(words), max_tokens=6, places=2, seed=seed, n_embd=32, n_layer=1, n_head=2)
    return PrefixDecoder(model, dim=dim, end=1, how=how, places=2)  # type: ignore[arg-type]


def meaning(text: str) -> np.ndarray:
    """An embedding that holds the words: a fixed random vector for each word and place."""
    vectors = np.random.default_rng(7).standard_normal((4, len(WORDS), 8))
    return sum(vectors[place, WORDS.index(word)] for place, word in enumerate(text.split()))  # type: ignore[return-value]


TEXTS = [f"{WORDS[i % 7]} {WORDS[(i * 3) % 11]} {WORDS[(i * 5) % 13]}" for i in range(400)]
VECTORS = torch.tensor(np.array([meaning(text) for text in TEXTS]), dtype=torch.float32)


def test_a_new_models_vocabulary_is_that_of_the_known_texts() -> None:
    small = Words(tokenizer(), 6, only_of=["bana delo", "delo fibi"])
    ids = small.ids(["fibi bana", "gomu delo"])
    assert small.size == 5 and all(row[-1] == small.end == 0 for row in ids)
    assert [small.text(row[:-1]) for row in ids] == ["fibi bana", "delo"] and ids[1][0] == 1
    assert Words(tokenizer(), 6).size == len(tokenizer())


@pytest.mark.parametrize("how", ["key_value", "embedding"])
def test_a_token_depends_on_its_embedding_and_on_what_stands_before_it_alone(how: str) -> None:
    made = decoder(how).eval()
    ids = Words(tokenizer(), 6).ids(TEXTS[:3])
    tokens, mask = padded(ids, 1)
    with torch.no_grad():
        whole = made(tokens, mask, VECTORS[:3])
        changed = tokens.clone()
        changed[:, 2] = 9
        later = made(changed, mask, VECTORS[:3])
        other = made(tokens, mask, VECTORS[[0, 5, 2]])
        alone = made(tokens[1:2], mask[1:2], VECTORS[1:2])
        without = decoder(how, dim=None).eval()(tokens, mask)  # it sees the text alone
    torch.testing.assert_close(whole[:, :2], later[:, :2])
    assert not torch.allclose(whole[:, 2], later[:, 2])
    torch.testing.assert_close(whole[[0, 2]], other[[0, 2]])
    assert not torch.allclose(whole[1], other[1])
    torch.testing.assert_close(whole[1:2], alone)
    assert without.shape == tokens.shape
    assert (without[~mask] == 0).all()


@pytest.mark.costly
def test_an_inverter_writes_out_texts_by_their_own_embeddings_and_not_by_shuffled_ones() -> None:
    words, found = Words(tokenizer(), 6), []
    for order in (np.arange(len(TEXTS)), shuffled_order(len(TEXTS), seed=0)):
        made = decoder()
        fit_decoder(made, words.ids(TEXTS), VECTORS[order], steps=220, batch_size=32, lr=6e-3, seed=0)
        written = [words.text(ids) for ids in made.write(VECTORS[:50], max_tokens=6)]
        found.append(recovered(written, TEXTS[:50]))
    told, control = found
    assert told.exact > 0.4 > control.exact
    assert told.token_f1 > control.token_f1 + 0.3


def test_training_and_shuffling_are_repeatable_and_leave_no_text_its_own_embedding() -> None:
    weights = []
    for elsewhere in (1, 2):
        made = decoder()
        torch.manual_seed(elsewhere)
        fit_decoder(made, Words(tokenizer(), 6).ids(TEXTS[:20]), VECTORS[:20], steps=3, batch_size=4, lr=1e-2, seed=5)
        weights.append(next(made.parameters()).detach())
    assert torch.equal(*weights)
    for count in (2, 3, 50):
        order = shuffled_order(count, seed=count)
        assert sorted(order) == list(range(count))
        assert (order != np.arange(count)).all()
    found = recovered(["How to file a claim?", "my house"], ["how to file a claim", "your house"], cosines=[1.0, 0.5])
    assert (found.exact, found.token_f1, found.cosine) == (0.5, pytest.approx(0.75), 0.75)
    assert token_set_f1("", "") == 0.0 == token_set_f1("a b", "c")


# -- ranking of candidates -------------------------------------------------------------------------


def vectors(count: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim))


def test_the_same_encoder_names_every_text_and_a_stranger_none_beyond_chance() -> None:
    known = vectors(300)
    all_of_them = identify(known, 3 * known, candidates=100)
    assert all_of_them.value == 1.0 and all_of_them.low == pytest.approx(0.025 ** (1 / 300))
    strangers = identify(known, vectors(300, seed=1), candidates=10)
    assert strangers.low <= strangers.chance <= strangers.high
    assert identify(np.ones((5, 3)), np.ones((5, 3)), candidates=2).hits == 0, "equal embeddings are no hit"


def test_a_secret_rotation_protects_until_some_texts_are_known() -> None:
    public = vectors(400)
    rotation = np.linalg.qr(vectors(16, seed=2))[0]
    secret = public @ rotation
    score = partial(identify, candidates=50)
    assert score(secret[100:], public[100:]).value < 0.2
    back = align(secret[:100], public[:100])
    assert score(secret[100:] @ back, public[100:]).value == 1.0


# -- quality ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: decoder("nose"), ConfigurationError, "how='nose'"),
        (lambda: Words(tokenizer(), 1), ConfigurationError, "max_tokens=1"),
        (lambda: load_language_model("/nowhere"), UnsupportedModelError, "language_model=/nowhere"),
        (lambda: shuffled_order(1, seed=0), DataError, "1 texts"),
        (lambda: identify(vectors(5), vectors(5, dim=3)), DataError, "align"),
        (lambda: identify(vectors(5), vectors(5)), ConfigurationError, "candidates=100"),
        (lambda: align(vectors(5), vectors(4)), DataError, "same texts"),
    ],
)
def test_other_spaces_and_impossible_settings_are_refused(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()
