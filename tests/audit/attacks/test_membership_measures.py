"""Membership of a query in the training data: coins, signals, and when an attack is more than a claim allows."""

from __future__ import annotations

import math
import random
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_generator import generator
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from tiny_tasks import parts, write_log

from lit_dpret.audit.attacks.coins import COINS_NAME, Coins
from lit_dpret.audit.attacks.membership import RATES, Promise, exceeded, half_accuracy, measure
from lit_dpret.audit.attacks.release import BigramModel, bigram_scores, disclosures, nearest_scores, repeated
from lit_dpret.audit.attacks.signals import (
    EncodedPairs,
    encode_pairs,
    encoder_signals,
    generator_signals,
    mean_by_query,
)
from lit_dpret.audit.statistics.metrics import auc, bootstrap, tpr_at_fpr
from lit_dpret.audit.statistics.one_run import one_run_counts
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder, Towers
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules.token_scores import TokenScores
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.tasks import Fit

SHIFT = 0.8
RELEASE = GaussianRelease(noise_multiplier=1 / SHIFT, law=FullBatch(), label="one Gaussian sum")


def told(accuracy: float, rates: list[float]) -> dict:
    """The ceilings of a release that tells nothing (one half), or everything."""
    return {
        "tpr_at_fpr": {f"{rate:g}": rate if accuracy < 1 else 1.0 for rate in rates}, "membership_accuracy": accuracy,
    }  # fmt: skip


def test_a_perfect_attack_exceeds_every_ceiling_but_certainty() -> None:
    scores = CanaryScores(np.arange(2000) + 5000.0, np.arange(2000))
    assert len(exceeded(scores, partial(told, 0.5), error=0.01)) == len(RATES) + 1
    assert exceeded(scores, partial(told, 1.0), error=0.01) == ()
    assert exceeded(CanaryScores([1.0], [0.0]), partial(told, 0.5), error=0.05) == ()  # of a few texts
    for inside, outside, share in (([3, 4], [1, 2], 1.0), ([1, 2], [3, 4], 0.0), ([1, 1], [1, 1], 0.5)):
        assert half_accuracy(CanaryScores(inside, outside)) == share, "the higher half, without knowing a member"


def test_evidence_is_asked_for_where_coins_were_tossed_and_divided_among_the_attacks() -> None:
    scores = CanaryScores(np.arange(200) + 1000.0, np.arange(200))
    alone, one_of_ten = (measure("x", scores, Promise(delta=1e-6), attacks=count, resamples=10) for count in (1, 10))
    assert alone.evidence is not None
    assert one_of_ten.evidence is not None
    assert alone.evidence.eps_lower > one_of_ten.evidence.eps_lower > 0
    assert one_of_ten.evidence.confidence == pytest.approx(0.995)
    assert measure("x", scores, resamples=10).evidence is None
    assert set(measure("x", scores, resamples=10).to_dict()["tpr_at_fpr"]) == {"0.1", "0.01", "0.001"}
    found = measure("x", scores, Promise(delta=1e-9, epsilon=1.0), resamples=10)
    assert [one.what for one in found.exceeded] == ["epsilon at delta=1e-09"]
    assert measure("x", scores, Promise(delta=1e-9, epsilon=8.0), resamples=10).exceeded == ()
    statistics = {"a": auc, "b": partial(tpr_at_fpr, fpr=0.1)}  # several intervals are those of each alone
    both = bootstrap(statistics, scores, resamples=50)
    assert both == {name: bootstrap({"": one}, scores, resamples=50)[""] for name, one in statistics.items()}


# -- against the accountant ------------------------------------------------------------------------


@lru_cache
def ceilings_of_a_gaussian(rates: tuple[float, ...]) -> Mapping[str, Any]:
    return attack_ceilings([RELEASE], neighbours="zero_out", false_positive_rates=rates)


def by_the_accountant(rates: Sequence[float]) -> Mapping[str, Any]:
    return ceilings_of_a_gaussian(tuple(rates))


def test_the_best_attack_on_a_gaussian_is_rarely_called_above_its_ceiling_and_on_half_the_noise_it_is() -> None:
    """The likelihood ratio is the best that the claim allows: at error 0.2, in 100 audits of 1,000 scores a side."""
    wrong = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores = CanaryScores(rng.normal(SHIFT, 1, 1000), rng.normal(0, 1, 1000))
        wrong += bool(exceeded(scores, by_the_accountant, error=0.2))
    assert wrong <= 20 + 3 * 4
    scores = CanaryScores(rng.normal(2 * SHIFT, 1, 1000), rng.normal(0, 1, 1000))
    found = measure("x", scores, Promise(ceilings=by_the_accountant), alarm=0.9999, attacks=10, resamples=10)
    assert "the balanced accuracy" in {one.what for one in found.exceeded}
    known = by_the_accountant([0.01, 0.02, 0.1])["tpr_at_fpr"]
    assert known["0.01"] < known["0.02"] < known["0.1"]
    usual = attack_ceilings([RELEASE], neighbours="zero_out")["tpr_at_fpr"]
    assert (known["0.01"], known["0.1"]) == (usual["0.01"], usual["0.1"])


# -- signals of encoders and generators ------------------------------------------------------------


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


@pytest.mark.costly
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


# -- attacks that see a synthetic data set alone ---------------------------------------------------


def test_a_bigram_model_adds_one_to_every_count() -> None:
    model = BigramModel(["a b", "a c"])  # three words, the end and the unknown word: five choices
    expected = (math.log(3 / 7) + math.log(2 / 7) + math.log(2 / 6)) / 3  # start a, a b, b end
    np.testing.assert_allclose(model.mean_log_probs(["A, b!"]), [expected])
    np.testing.assert_allclose(model.mean_log_probs(["zzz"]), [(math.log(1 / 7) + math.log(1 / 5)) / 2])


def test_a_query_that_the_release_echoes_scores_higher_than_a_stranger_of_the_same_words() -> None:
    release = ["does flood insurance cover my house"] * 3 + ["how to file a claim"]
    queries = ["does flood insurance cover my house", "my house cover does insurance flood"]
    echoed, stranger = bigram_scores(queries, release, ["how to file a claim", "what is a policy"])
    assert echoed > stranger + 0.3
    with pytest.raises(DataError, match="needs texts"):
        bigram_scores(queries, [])


def test_nearest_scores_are_the_mean_of_the_highest_cosines() -> None:
    release = np.array([[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(nearest_scores(np.array([[2.0, 0.0], [1.0, 1.0]]), release, nearest=2), [0.5, 0.5**0.5])
    np.testing.assert_allclose(nearest_scores(np.array([[2.0, 0.0]]), release), [0.0], atol=1e-12)  # all three
    many = np.random.default_rng(0).standard_normal((600, 2))
    assert nearest_scores(many, release, nearest=1).shape == (600,)
    with pytest.raises(DataError, match="cannot be compared"):
        nearest_scores(np.ones((1, 2)), np.ones((1, 3)))


def test_repetition_is_exact_but_for_case_and_punctuation_or_by_a_share_of_ngrams() -> None:
    release = ["Does flood insurance cover my house?", "how to file a claim in the state of maine"]
    queries = ["does flood insurance cover my house", "how to file a claim in texas", "claim", "", "my house"]
    assert repeated(queries, release).tolist() == [True, False, False, False, False]
    # "how to file", "to file a", "file a claim", "a claim in" of five 3-grams; short queries have none
    assert repeated(queries, release, overlap=0.8).tolist() == [True, True, False, False, False]
    assert repeated(queries, release, overlap=0.9).tolist() == [True, False, False, False, False]
    parts = ["how to file it", "to file a letter", "file a claim"]  # n-grams of several queries do not add up
    assert repeated(["how to file a claim"], parts, overlap=0.6).tolist() == [False]
    with pytest.raises(ConfigurationError, match="overlap=0"):
        repeated(queries, release, overlap=0)


@pytest.mark.parametrize(("trained", "eps"), [(550, 0.0918), (600, 0.2950), (700, 0.7293), (900, 2.0152)])
def test_golden_bounds_of_disclosures(trained: int, eps: float) -> None:
    """The published formula takes the number of repeated queries for fixed; what holds for any number is below it."""
    planned = one_run_counts(canaries=10_000, guesses=1000, correct=trained, delta=1e-5).eps_lower
    assert planned == pytest.approx(eps, abs=1e-4)
    found = disclosures(queries=10_000, repeated=1000, trained=trained, delta=1e-5).evidence.eps_lower
    assert planned - 0.04 < found < planned
    nothing = disclosures(queries=100, repeated=0, trained=0, delta=0.0)
    assert (nothing.phantoms, nothing.excess, nothing.precision, nothing.evidence.eps_lower) == (0, 0, 0.5, 0.0)


# -- coins that hold half of the train queries out, and what a run does with them ------------------


def test_coins_are_fair_and_independent_of_the_data() -> None:
    heads = sum(len(Coins.toss(str(i) for i in range(400)).trained_on) for _ in range(25))
    assert abs(heads - 5000) < 5 * 50  # five standard deviations of a Binomial(10000, 1/2)
    assert Coins.toss("abcdefghijklmnop").heads != Coins.toss("abcdefghijklmnop").heads  # but once in 65,536


def test_coins_are_read_as_they_were_written_by_their_owner_alone_and_broken_or_newer_ones_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=COINS_NAME):
        Coins.read(tmp_path)
    coins = Coins({"q1": True, "q2": False})
    path = coins.write(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Coins.read(tmp_path) == coins
    assert coins.trained_on == {"q1"}
    assert "q1" not in repr(coins)
    written = path.read_text()
    for old, new, named in (("coins/1", "coins/2", "membership-coins/2"), ("true", "1", "each query")):
        path.write_text(written.replace(old, new))
        with pytest.raises(DataError, match=named):
            Coins.read(tmp_path)
    with pytest.raises(DataError, match="1 queries"):
        Coins.toss(["q1"])


# -- in the data and in a run --------------------------------------------------------------------


def data_of(folder: Path, **settings: Any) -> PairsDataModule:
    made = PairsDataModule(folder=folder, sampling="poisson", expected_batch_size=8, **settings)
    made.setup("fit")
    made.use_unit("query")
    return made


def test_train_on_keeps_those_queries_and_takes_others_over_from_their_split(tmp_path: Path) -> None:
    data = data_of(write_log(tmp_path / "log"))
    data.train_on({"q0", "q1", "q60"})
    assert set(data.collection.split("train")) == {"q0", "q1", "q60"} and data.n_units == 3
    assert "q60" not in data.collection.split("test") and "q61" in data.collection.split("test")
    assert "q2" not in data.collection.queries
    with pytest.raises(DataError, match="none of the queries"):
        data.train_on({"nobody"})


def fit_settings(tmp_path: Path, **privacy: Any) -> dict[str, Any]:
    mode: dict[str, Any] = {"eps": 8.0, "noise_multiplier": 2.0, "secret_file": tmp_path / "secret", **privacy}
    data = {"folder": write_log(tmp_path / "log"), "sampling": "poisson", "expected_batch_size": 8}
    return {
        "make_privacy": partial(DPSGD, **mode),
        "make_datamodule": partial(PairsDataModule, **data),
        "make_module": lambda privacy: generator(privacy=privacy),
        "make_callbacks": lambda: [PrivacyAccountant(run_dir=tmp_path / "run")],
    }


@pytest.mark.slow
def test_a_run_with_coins_trains_on_heads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made = parts(tmp_path, **fit_settings(tmp_path))
    keep, trainer = PairsDataModule.train_on, made.make_trainer
    monkeypatch.setattr(PairsDataModule, "train_on", lambda self, ids: (keep(self, ids), seen.append(len(ids)))[0])
    Fit(membership_coins=True).run(replace(made, make_trainer=lambda **s: trainer(max_steps=2, **s)))
    coins = Coins.read(tmp_path / "run")
    assert seen == [len(coins.trained_on)]
    assert len(coins.heads) == 56


def test_coins_of_an_earlier_run_are_not_forgotten_and_no_person_is_put_on_both_sides(tmp_path: Path) -> None:
    made = parts(tmp_path, **fit_settings(tmp_path))
    (tmp_path / "run").mkdir()
    Coins({"q1": True, "other": False}).write(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="membership_coins=true"):
        Fit().run(made)
    with pytest.raises(DataError, match="other train queries"):
        Fit(membership_coins=True).run(made)
    assert (tmp_path / "run" / COINS_NAME).exists()
    with pytest.raises(ConfigurationError, match="one person"):
        Fit(membership_coins=True).run(parts(tmp_path / "users", **fit_settings(tmp_path / "users", unit="user")))
