"""Our call of sacrebleu, and which queries are held against which."""

from __future__ import annotations

import math

import pytest

from lit_dpret.errors import DataError
from lit_dpret.synthesis.textsim.bleu import corpus_bleu, references_by_passage

sacrebleu = pytest.importorskip("sacrebleu", reason='BLEU is by sacrebleu: pip install "lit-dpret[quality]"')

SYNTHETIC = ["does flood insurance pay for a wet basement", "what is whole life insurance worth", "is it covered"]
ORIGINAL = [
    ["does flood insurance pay for my wet basement", "will flood insurance cover a basement"],
    ["what is the worth of whole life insurance"],
    ["is a hail dent covered", "is it covered at all", "who covers it"],
]


def test_with_two_references_each_it_is_what_sacrebleu_computes() -> None:
    two = [known[:2] if len(known) > 1 else known * 2 for known in ORIGINAL]
    expected = sacrebleu.corpus_bleu(SYNTHETIC, [[known[0] for known in two], [known[1] for known in two]])
    assert corpus_bleu(SYNTHETIC, two).score == pytest.approx(expected.score)


def test_the_score_of_one_pair_is_the_definition_by_hand() -> None:
    found = corpus_bleu(["a b c d e"], [["a b c d f"]])
    assert found.precisions == pytest.approx((80.0, 75.0, 200 / 3, 50.0))
    assert found.score == pytest.approx(100 * math.exp(sum(map(math.log, (4 / 5, 3 / 4, 2 / 3, 1 / 2))) / 4))
    short = corpus_bleu(["a b c d"], [["a b c d e f g h"]])
    assert short.brevity_penalty == pytest.approx(math.exp(1 - 8 / 4))


def test_a_query_whose_passage_nobody_asked_for_is_counted_and_not_scored() -> None:
    found = corpus_bleu([*SYNTHETIC, "anything"], [*ORIGINAL, []])
    assert found.score == corpus_bleu(SYNTHETIC, ORIGINAL).score
    assert (found.scored, found.without_reference) == (3, 1)


def test_references_are_the_original_queries_of_the_same_passage() -> None:
    originals = {"p1": ["a", "b"], "p2": ["c"], "p9": ["never asked about"]}
    assert references_by_passage(["p2", "p1", "p3"], originals) == [["c"], ["a", "b"], []]


@pytest.mark.parametrize(
    ("synthetic", "references", "says"),
    [
        (["a"], [["a"], ["b"]], "1 texts came with 2 lists"),
        ([], [], "nothing to score"),
        (["a"], [[]], "nothing to score"),
    ],
)
def test_what_cannot_be_scored_is_refused(synthetic: list[str], references: list[list[str]], says: str) -> None:
    with pytest.raises(DataError, match=says):
        corpus_bleu(synthetic, references)
