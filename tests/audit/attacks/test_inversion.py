"""Embedding inversion: the probe with its control, ranking of candidates, and a small trained inverter."""

from __future__ import annotations

import math
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


def test_what_is_told_is_a_mean_over_tokens_and_not_over_texts() -> None:
    found = embedding_gain([1.0, 20.0], [2.0, 29.0], [1, 9])
    assert found.nats == pytest.approx(10 / 10) and found.bits == pytest.approx(1 / math.log(2))
    assert found.perplexity == pytest.approx(math.exp(2.1)) and found.shuffled_perplexity == pytest.approx(
        math.exp(3.1)
    )


def test_the_interval_holds_nothing_where_nothing_is_told_and_is_paired() -> None:
    """Texts differ far more than the two networks: only a paired interval sees the difference."""
    rng = np.random.default_rng(0)
    hard = rng.uniform(10, 100, 300)
    nothing = embedding_gain(hard + rng.normal(0, 0.1, 300), hard + rng.normal(0, 0.1, 300), np.full(300, 10))
    little = embedding_gain(hard, hard + rng.normal(0.05, 0.1, 300), np.full(300, 10))
    assert nothing.low < 0 < nothing.high and not nothing.significant
    assert 0 < little.low < 0.005 < little.high and little.significant


def test_intervals_without_a_difference_exclude_zero_no_more_often_than_they_may() -> None:
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        found = embedding_gain(rng.normal(20, 1, 80), rng.normal(20, 1, 80), np.full(80, 8), resamples=300)
        wrong += not found.low <= 0 <= found.high
    assert wrong <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05 * 0.95)


def test_a_shuffled_order_leaves_no_text_its_own_embedding() -> None:
    for count in (2, 3, 50):
        order = shuffled_order(count, seed=count)
        assert sorted(order) == list(range(count)) and (order != np.arange(count)).all()
    with pytest.raises(DataError, match="cannot be shuffled"):
        shuffled_order(1, seed=0)


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
    torch.testing.assert_close(whole[:, :2], later[:, :2])
    assert not torch.allclose(whole[:, 2], later[:, 2])
    torch.testing.assert_close(whole[[0, 2]], other[[0, 2]])
    assert not torch.allclose(whole[1], other[1])
    torch.testing.assert_close(whole[1:2], alone)


def test_a_decoder_without_a_map_sees_the_text_alone() -> None:
    plain = decoder(dim=None)
    assert plain.map is None
    with torch.no_grad():
        tokens, mask = padded(Words(tokenizer(), 6).ids(TEXTS[:4]), 1)
        without = plain.eval()(tokens, mask)
        assert without.shape == tokens.shape and (without[~mask] == 0).all()


@pytest.fixture(scope="module")
def trained() -> dict[str, PrefixDecoder]:
    """The same network on the texts' own embeddings and on shuffled ones."""
    ids = Words(tokenizer(), 6).ids(TEXTS)
    orders = {"own": np.arange(len(TEXTS)), "shuffled": shuffled_order(len(TEXTS), seed=0)}
    found = {}
    for name, order in orders.items():
        found[name] = decoder()
        fit_decoder(found[name], ids, VECTORS[order], steps=220, batch_size=32, lr=6e-3, seed=0)
    return found


def test_the_trained_inverter_writes_the_texts_out(trained: dict[str, PrefixDecoder]) -> None:
    words = Words(tokenizer(), 6)
    written = [words.text(ids) for ids in trained["own"].write(VECTORS[:50], max_tokens=6)]
    control = [words.text(ids) for ids in trained["shuffled"].write(VECTORS[:50], max_tokens=6)]
    found, chance = recovered(written, TEXTS[:50]), recovered(control, TEXTS[:50])
    assert found.exact > 0.4 > chance.exact and found.token_f1 > chance.token_f1 + 0.3


def test_training_is_repeatable() -> None:
    def weights(elsewhere: int) -> torch.Tensor:
        made = decoder()
        torch.manual_seed(elsewhere)
        fit_decoder(made, Words(tokenizer(), 6).ids(TEXTS[:20]), VECTORS[:20], steps=3, batch_size=4, lr=1e-2, seed=5)
        return next(made.parameters()).detach()

    assert torch.equal(weights(1), weights(2))


def test_impossible_settings_and_missing_models_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigurationError, match="how='nose'"):
        decoder("nose")
    with pytest.raises(ConfigurationError, match="max_tokens=1"):
        Words(tokenizer(), 1)
    with pytest.raises(UnsupportedModelError, match="not a folder of a causal language model"):
        load_language_model(tmp_path_factory.mktemp("empty"))


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


def test_other_spaces_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="see align"):
        identify(vectors(5), vectors(5, dim=3))
    with pytest.raises(ConfigurationError, match="candidates=100"):
        identify(vectors(5), vectors(5))
    with pytest.raises(DataError, match="same texts"):
        align(vectors(5), vectors(4))


# -- quality ---------------------------------------------------------------------------------------


def test_scores_of_recovered_texts_are_those_of_their_definitions() -> None:
    found = recovered(["How to file a claim?", "my house"], ["how to file a claim", "your house"], cosines=[1.0, 0.5])
    assert found.exact == 0.5 and found.token_f1 == pytest.approx(0.75) and found.cosine == 0.75
    assert token_set_f1("", "") == 0.0 and token_set_f1("a b", "c") == 0.0
