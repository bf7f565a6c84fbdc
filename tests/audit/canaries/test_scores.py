"""Ranks and exposure of a secret by likelihood, and whether it stands in what is generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_dpret.audit.canaries import Canary
from lit_dpret.audit.canaries.canary import check_all_fit
from lit_dpret.audit.canaries.scores import draw_leaks, holds, prompt_without_secret, score_canaries
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.generator_folder import GeneratorModel, TextCodec
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.synthesis.sampler import Decoding

DECODING = Decoding(top_p=0.8, max_new_tokens=24)
CANDIDATES = tuple(f"{number:010d}" for number in (4829137650, 11, 9876543210, 5551234567, 8080808080))


def canary(**changes: Any) -> Canary:
    facts: dict[str, Any] = {
        "name": "c", "kind": "own_passage", "side": "query", "query": "bana delo", "passage_id": "p",
        "passage": "fibi gomu", "candidates": CANDIDATES, "secret": CANDIDATES[0],
    }  # fmt: skip
    return Canary(**facts | changes)


def remember(module: QueryGenerator, query: str, passage: str, steps: int = 100) -> None:
    """Train on one pair until it is known by heart."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    rows = module.collate_rows([next(canary(query=query, passage=passage, side="passage", secret="").units())[0]])
    for _ in range(steps):
        optimizer.zero_grad()
        module.per_row_loss(rows).sum().backward()
        optimizer.step()


def test_a_secret_that_was_learnt_by_heart_has_rank_1_and_leaks(
    module: QueryGenerator, generator: GeneratorModel
) -> None:
    pairs = tuple(f"<extra_id_{i}><extra_id_{i + 1}>" for i in range(0, 10, 2))
    shown, hidden = canary(), canary(kind="new_token", candidates=pairs, secret=pairs[1])  # in no text
    before = score_canaries(generator, [shown], decoding=DECODING)[0]
    for one in (shown, hidden):
        check_all_fit(generator.codec, [one])
        remember(module, one.query_with(one.secret), one.passage)
        module.model.eval()
        after = score_canaries(generator, [one], decoding=DECODING)[0]
        assert (after.rank, after.exposure) == (1, pytest.approx(math.log2(5)))
        assert after.bits < 1 < before.bits
        assert after.margin > 10
        assert after.log_probability is not None
        assert after.log_probability > math.log(0.9)
        leak = draw_leaks(generator, [one], decoding=DECODING, draws=4, seed=0)[0]
        assert (leak.found, leak.copied) == (4, None)
        assert any(holds(text, one.secret) for text in leak.sample)


def test_the_perplexity_is_that_of_the_secret_alone_unless_the_query_is_asked_for(generator: GeneratorModel) -> None:
    """By hand: the whole query's bits are the stem's, the secret's and the end mark's."""
    one = canary()
    model, codec = generator.model, generator.codec
    ids = torch.tensor(codec.queries([one.query_with(one.secret)]))
    passage = torch.tensor(codec.passages([one.passage]))
    with torch.no_grad():
        logits = model(input_ids=passage, labels=ids).logits[0].double()
    by_hand = -logits.log_softmax(1).gather(1, ids[0][:, None])[:, 0] / math.log(2)
    ranks = [score_canaries(generator, [canary(secret=each)], decoding=DECODING)[0].rank for each in CANDIDATES]
    assert sorted(ranks) == [1, 2, 3, 4, 5], "where none was planted, ranks are uniform"
    secret, query = (score_canaries(generator, [one], decoding=DECODING, span=s)[0].bits for s in ("secret", "query"))
    assert secret == pytest.approx(float(by_hand[2:-1].sum()), rel=1e-5)
    assert query == pytest.approx(float(by_hand.sum()), rel=1e-5)
    assert ids.shape[1] == 2 + 10 + 1


def test_a_secret_in_the_passage_is_judged_by_the_query_that_it_leads_to(generator: GeneratorModel) -> None:
    one = canary(side="passage")
    found = score_canaries(generator, [one], decoding=DECODING)[0]
    model, codec = generator.model, generator.codec
    labels = torch.tensor(codec.queries([one.query]))
    bits = []
    for secret in CANDIDATES:
        with torch.no_grad():
            out = model(input_ids=torch.tensor(codec.passages([f"fibi gomu {secret}"])), labels=labels)
        bits.append(float(out.loss) * labels.shape[1] / math.log(2))
    assert found.bits == pytest.approx(bits[0], rel=1e-4)
    assert found.rank == 1 + sum(value <= bits[0] for value in bits[1:])
    assert found.log_probability is None


def test_the_probability_of_a_leak_is_the_frequency_of_leaks(module: QueryGenerator, generator: GeneratorModel) -> None:
    one = canary(secret="0000000011")
    remember(module, one.query_with(one.secret), one.passage, steps=25)
    module.model.eval()
    score = score_canaries(generator, [one], decoding=DECODING)[0]
    assert score.log_probability is not None
    chance, draws = math.exp(score.log_probability), 400
    leak = draw_leaks(generator, [one], decoding=DECODING, draws=draws, seed=1)[0]
    spread = math.sqrt(chance * (1 - chance) / draws)
    assert leak.found / draws >= chance - 4 * spread - 1e-9


def test_what_is_drawn_for_a_canary_does_not_depend_on_the_others(generator: GeneratorModel) -> None:
    pair = [canary(), canary(name="d", passage="kuri lana")]
    alone = [draw_leaks(generator, [one], decoding=DECODING, draws=3, seed=4)[0] for one in pair]
    assert draw_leaks(generator, pair, decoding=DECODING, draws=3, seed=4) == alone
    for side in ("passage", "both"):  # nor is the secret given away to it
        one = canary(side=side)
        assert one.secret not in prompt_without_secret(one)
        assert draw_leaks(generator, [one], decoding=DECODING, draws=2, seed=0)[0].copied is not None


def test_white_space_case_and_marks_between_digits_do_not_hide_a_secret() -> None:
    for text, secret in (
        ("call 482-913 7755 now", "4829137755"), ("4 8 2 9 1 3 7 7 5 5", "4829137755"), ("Rare  Words", "rare words"),
        ("x<extra_id_3> <extra_id_4>", "<extra_id_3><extra_id_4>"),
    ):  # fmt: skip
        assert holds(text, secret)
    assert not holds("482913775", "4829137755")
    assert not holds("<extra_id_4><extra_id_3>", "<extra_id_3><extra_id_4>")


@pytest.mark.parametrize(
    ("change", "limits", "reason"),
    [
        (lambda c: c, {"max_query_length": 8}, "max_query_length=8"),
        (lambda c: replace(c, side="passage"), {"max_passage_length": 8}, "max_passage_length=8"),
        (lambda c: replace(c, candidates=("strange", "stranger"), secret="strange"), {}, "same tokens"),
    ],
    ids=["query cut", "passage cut", "unknown to the tokenizer"],
)
def test_a_secret_that_the_model_does_not_see_whole_is_refused(
    change: Callable[[Canary], Canary], limits: dict[str, int], reason: str, generator: GeneratorModel
) -> None:
    codec = TextCodec(generator.tokenizer, replace(generator.contract, **limits))
    with pytest.raises(ConfigurationError, match=reason):
        check_all_fit(codec, [change(canary())])
