"""Ranks and exposure of a secret by likelihood, whether it stands in what is generated, and what that proves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from lit_dpret.audit.canaries import Canary
from lit_dpret.audit.canaries.canary import check_all_fit
from lit_dpret.audit.canaries.findings import ALARM, POOLED, Limits, Outcome, cells_of, share
from lit_dpret.audit.canaries.scores import draw_leaks, holds, prompt_without_secret, score_canaries
from lit_dpret.audit.statistics.rank_epsilon import mean_rank_bound, top_rank_bound, top_rank_one_training
from lit_dpret.errors import ConfigurationError, DataError
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


@pytest.mark.costly
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


@pytest.mark.costly
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


# -- what ranks and leaks of several trainings prove, and that nothing passes a ceiling unseen -----


KINDS = ("digits", "own_passage", "random_passage")


def outcomes(ranks: dict[int, list[int]], *, copies: int = 10, found: int = 0, side: str = "query") -> list[Outcome]:
    """Ranks by training, one for each kind in turn."""
    return [
        Outcome(training=training, kind=KINDS[place % 3], side=side, copies=copies, rank=rank, exposure=1.0, draws=20,
                found=found, chance=0.25)
        for training, row in ranks.items() for place, rank in enumerate(row)
    ]  # fmt: skip


def test_canaries_that_share_a_training_are_bounded_as_such_and_single_ones_as_independent() -> None:
    extra = Outcome(
        training=0, kind="echo", side="query", copies=10, rank=1, exposure=6.6, draws=20, found=20, chance=1.0
    )
    ranks = outcomes({0: [1, 1, 1], 1: [1, 1, 7], 2: [1, 1, 1]})
    cells = cells_of([*ranks, extra], candidates=100, limits={}, delta=1e-6)
    kinds = {POOLED: 9, "digits": 3, "own_passage": 3, "random_passage": 3, "echo": 1}
    assert {cell.kind: cell.canaries for cell in cells} == kinds, "other kinds are not pooled with the papers'"
    pooled = cells[0]
    digits = next(cell for cell in cells if cell.kind == "digits")
    assert pooled.top.mean == pytest.approx(8 / 9)
    assert pooled.bounds[0] == top_rank_one_training(8, 9, candidates=100, copies=10)
    assert pooled.bounds[0].delta == 0
    assert digits.bounds[0] == top_rank_bound(3, 3, candidates=100, copies=10, delta=1e-6)
    assert digits.bounds[1] == mean_rank_bound([1, 1, 1], candidates=100, copies=10, delta=1e-6)
    assert pooled.bounds[-1].confidence is None  # the papers' number has none, and is not the first


def test_the_interval_of_a_share_counts_trainings_and_covers_the_truth_where_canaries_rise_and_fall_together() -> None:
    """100 canaries in two trainings are no better than two coins."""
    two = cells_of(outcomes({0: [1] * 50, 1: [1] * 50}), candidates=100, limits={})[0].top
    assert (two.mean, two.low, two.high) == (1.0, pytest.approx(0.025**0.5), 1.0)
    assert share([0.5, 0.5, 0.0]).low <= share([1.0, 0.0, 0.0]).low
    rng, missed = np.random.default_rng(0), 0
    for _ in range(400):
        found = share((rng.random(8) < 0.3).astype(float).tolist())
        missed += not found.low <= 0.3 <= found.high
    assert missed <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)


def test_what_is_measured_above_its_ceiling_is_a_contradiction_and_nothing_else_is() -> None:
    limits = {10: Limits(top=0.3, mean_rank=10.0, leak=1e-3, eps=0.05, delta=1e-5)}
    broken = cells_of(outcomes({i: [1, 1, 1] for i in range(40)}, found=3), candidates=100, limits=limits, delta=1e-5)
    for cell in broken:
        assert {"the share of rank 1", "the leaked share"} <= {excess.what for excess in cell.excesses}
    assert any(excess.evidence is not None for cell in broken for excess in cell.excesses)
    honest = cells_of(outcomes({i: [50, 30, 70] for i in range(40)}), candidates=100, limits=limits, delta=1e-5)
    assert not any(cell.excesses for cell in honest)
    few = cells_of(outcomes({0: [1, 1, 1]}, found=1), candidates=100, limits={10: Limits(top=0.3, eps=16.0)})
    assert not any(cell.excesses for cell in few)  # three hits in one training prove nothing at 1 - 1e-4


def test_a_mechanism_at_its_ceiling_is_contradicted_with_no_more_than_the_allowed_probability() -> None:
    """Rank 1 exactly as often as the claim allows, in ten trainings: every outcome, by its probability."""
    limits, chance = {1: Limits(top=0.3, mean_rank=1.0, leak=1.0, eps=math.log(30), delta=0.0)}, 0.0
    for hits in range(11):
        ranks = {i: [1 if i < hits else 50] for i in range(10)}
        digits = next(cell for cell in cells_of(outcomes(ranks, copies=1), candidates=100, limits=limits, cells=4)
                      if cell.kind == "digits")  # fmt: skip
        chance += float(binom.pmf(hits, 10, 0.3)) * bool(digits.contradictions)
    assert 0 < chance <= ALARM / 4


def test_every_statement_of_a_cell_and_every_table_shares_the_error_of_a_contradiction() -> None:
    """Shares of rank 1 and of leaks, two bounds: four chances to be wrong about a cell, and eight in two tables."""
    ranks, limits = {i: [1, 1, 1] for i in range(4)}, {10: Limits(top=0.3, leak=1e-3, eps=0.05, delta=1e-5)}
    for tables in (1, 2):
        cells = cells_of(outcomes(ranks), candidates=100, limits=limits, tables=tables)
        errors = [1 - one.confidence for cell in cells for one in cell.alarms if one.confidence is not None]
        assert errors == pytest.approx([ALARM / (4 * 4 * tables)] * len(errors), rel=1e-6)


def test_a_mechanism_that_tells_all_secrets_with_probability_delta_is_not_contradicted_for_it() -> None:
    """It is (0, delta)-DP, and delta is more than the allowed error: all ranks in one training are 1 that often."""
    limits = {1: Limits(top=0.5, leak=1.0, eps=0.5, delta=1e-3)}
    told = cells_of(outcomes({0: [1] * 9}, copies=1), candidates=100, limits=limits, delta=1e-3)
    assert not any(cell.contradictions for cell in told)
    pure = cells_of(outcomes({0: [1] * 9}, copies=1), candidates=100, limits={1: Limits(top=0.5, eps=0.5)}, delta=0.0)
    assert pure[0].contradictions  # where nothing may be told with any probability, the same ranks are one
    small = {1: Limits(top=0.5, leak=1.0, eps=0.5, delta=1e-7)}
    told = cells_of(outcomes({0: [1] * 9}, copies=1), candidates=100, limits=small, delta=1e-7)
    assert "at delta=1e-07" in told[0].contradictions[0]


def test_secrets_that_were_never_planted_are_evidence_with_no_more_than_the_allowed_probability() -> None:
    """Uniform ranks of 15 canaries in five trainings: every number of them in first place, by its probability."""
    chance = 0.0
    for hits in range(16):
        ranks = [1] * hits + [50] * (15 - hits)
        cell = cells_of(outcomes({i: ranks[3 * i : 3 * i + 3] for i in range(5)}, copies=1), candidates=100, limits={})[
            0
        ]
        chance += float(binom.pmf(hits, 15, 0.01)) * (cell.bounds[0].eps_lower > 0)
    assert 0 < chance <= 0.05


def test_an_outcome_is_read_from_what_was_stored_and_mixed_files_are_refused() -> None:
    score: dict[str, Any] = {
        "name": "a", "kind": "digits", "side": "query", "copies": 1, "rank": 3, "exposure": 5.0,
        "log_probability": None, "never_drawn": True,
    }  # fmt: skip
    leak = {"name": "a", "draws": 5, "found": 0}
    assert Outcome.of(2, score, leak).chance == 0.0
    assert Outcome.of(2, {**score, "never_drawn": False}, leak).chance is None
    assert Outcome.of(2, {**score, "never_drawn": False, "log_probability": math.log(0.5)}, leak).chance == 0.5
    with pytest.raises(DataError, match="canary a"):
        Outcome.of(0, score, {**leak, "name": "b"})
    with pytest.raises(DataError):
        cells_of([], candidates=100, limits={})
