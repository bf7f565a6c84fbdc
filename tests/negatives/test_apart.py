"""Embeddings of private queries for mining: to the last bit, no other query has a say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from half_precision import tower
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from torch import Tensor

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.bulk import LANES, embed_apart
from lit_dpret.evaluation_mode import evaluation_mode

ENCODER = tower()
QUERIES = st.lists(st.lists(st.sampled_from(WORDS), max_size=20).map(" ".join), min_size=1, max_size=24)
LONG = st.lists(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join), min_size=1, max_size=9)


def embeddings(texts: list[str]) -> list[bytes]:
    return [row.numpy().tobytes() for row in ENCODER.encode(texts, "query", apart=True)]


@settings(max_examples=25, deadline=None)
@given(QUERIES, QUERIES, st.booleans())
def test_an_embedding_is_the_same_whatever_else_is_embedded(some: list[str], others: list[str], low: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        together = embeddings(others + some)
    assert together[len(others) :] == embeddings(some)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(LONG, LONG, st.integers(3, 48))
def test_how_far_a_text_is_padded_follows_from_no_other_one(some: list[str], others: list[str], most: int) -> None:
    encoder = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=most, passage_max_length=9))
    alone = [encoder.encode([text], "query", apart=True)[0] for text in some]
    assert torch.equal(encoder.encode([*others, *some], "query", apart=True)[len(others) :], torch.stack(alone))
    torch.testing.assert_close(torch.stack(alone), encoder.encode(some, "query"), rtol=0, atol=1e-5)


def test_of_a_step_they_are_the_same_as_of_a_list() -> None:
    texts = [" ".join(WORDS[i : i + 1 + i % 7]) for i in range(9)]
    tokens = ENCODER.at_full_length(ENCODER.tokenize(texts, "query"), "query")
    with evaluation_mode(ENCODER):
        found = embed_apart(ENCODER, tokens, ENCODER.tokenizer.pad_token_id)
    assert torch.equal(found, ENCODER.encode(texts, "query", apart=True))


def _seen(texts: list[str]) -> list[dict[str, Tensor]]:
    batches: list[dict[str, Tensor]] = []

    def embed(batch: dict[str, Tensor]) -> Tensor:
        batches.append({name: tensor.clone() for name, tensor in batch.items()})
        return torch.zeros(len(batch["input_ids"]), 3)

    embed_apart(embed, ENCODER.at_full_length(ENCODER.tokenize(texts, "query"), "query"), 0)
    return batches


def test_all_batches_have_one_shape_and_some_padding_and_a_text_has_one_place() -> None:
    """Also where all texts are as long as can be: transformers takes another way where it sees no padding."""
    longest = [" ".join([word] * 30) for word in WORDS]
    places: dict[Any, set[int]] = {}
    for texts in (longest, longest[3:], longest[:1], [*longest, "a", "claim"]):
        for batch in _seen(texts):
            assert {tuple(tensor.shape) for tensor in batch.values()} == {(LANES + 1, 16)}
            assert not batch["attention_mask"].all()
            for place, row in enumerate(batch["input_ids"].tolist()[:LANES]):
                if any(row):
                    places.setdefault(tuple(row), set()).add(place)
    assert len(places) == len(longest) + 2 and all(len(where) == 1 for where in places.values())


@pytest.mark.parametrize("texts", [["a"], ["a claim", "a claim"]])
def test_equal_texts_are_embedded_once(texts: list[str]) -> None:
    assert len(_seen(texts * 40)) == 1
