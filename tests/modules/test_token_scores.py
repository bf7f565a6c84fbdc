"""Log probabilities of the tokens of a query, by teacher forcing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny_generator
import torch

from lit_dpret.errors import DataError
from lit_dpret.modules.token_scores import TokenScorer, token_scores

QUERIES = ["bana delo", "fibi", "gomu kuri bana felo"]
PASSAGES = ["bana delo fibi", "kuri", "gomu gomu gomu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_generator.lively_generator().save_model(tmp_path_factory.mktemp("token-scores") / "model")


def test_the_scores_of_a_query_add_up_to_the_loss_of_its_row(folder: Path) -> None:
    module = tiny_generator.lively_generator()
    rows = [tiny_generator.pair(query, passage) for query, passage in zip(QUERIES, PASSAGES, strict=True)]
    with torch.no_grad():
        losses = tiny_generator.losses(module.eval(), rows)
    found = token_scores(folder, QUERIES, PASSAGES)
    np.testing.assert_allclose(-found.per_token(), losses.numpy(), rtol=1e-5)
    assert found.mask.sum(axis=1).tolist() == [3, 2, 5]  # the end mark counts
    assert (found.log_probs[~found.mask] == 0).all() and (found.tokens[~found.mask] == -100).all()


def test_a_score_does_not_depend_on_the_company(folder: Path) -> None:
    together, alone = token_scores(folder, QUERIES, PASSAGES), token_scores(folder, QUERIES, PASSAGES, batch_size=1)
    np.testing.assert_allclose(together.log_probs, alone.log_probs, rtol=1e-5)


def test_moments_are_those_of_a_token_that_the_model_draws(folder: Path) -> None:
    scorer = TokenScorer.load(folder)
    found = scorer.score(QUERIES[1:2], PASSAGES[1:2], moments=True)
    vocabulary = [word for word in tiny_generator.WORDS]
    first = [scorer.score([word], PASSAGES[1:2]).log_probs[0, 0] for word in vocabulary]
    specials = 1 - sum(math.exp(value) for value in first)  # pad, end, unknown and prompt: no text gives them
    assert found.means is not None and found.deviations is not None
    mean = sum(math.exp(value) * value for value in first)
    # Entropy of what is left over lies between one lump and four equal ones.
    low, high = specials * math.log(specials / 4), specials * math.log(specials)
    assert mean + low - 1e-6 <= found.means[0, 0] <= mean + high + 1e-6
    assert found.deviations[0, 0] > 0 and found.deviations.shape == found.log_probs.shape


def test_queries_without_passages_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="2 queries and 1 passages"):
        token_scores(folder, QUERIES[:2], PASSAGES[:1])


def test_the_public_reference_reads_texts_by_the_contract_it_is_given(folder: Path) -> None:
    own = TokenScorer.load(folder)
    reference = TokenScorer.load("public_t5", contract=own.codec.contract)
    assert reference.codec.contract == own.codec.contract
