"""MAUVE against its authors' program, and against what the definition says by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from compare_mauve import GAUSSIAN, gaussian_set

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.mauve import curve_area, divergence_curve, mauve, principal_components

pytest.importorskip("sklearn", reason='k-means is by scikit-learn: pip install "lit-dpret[quality]"')

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((ROOT / "tests" / "data" / "mauve.json").read_text(encoding="utf-8"))


def normal(n: int, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    features = np.random.default_rng(seed).standard_normal((n, 8))
    features[:, 0] += shift
    return features


@pytest.mark.parametrize("name", ["same", "shifted", "far"])
def test_the_value_is_that_of_the_authors_program_within_the_spread_of_seeds(name: str) -> None:
    """Our mean over five seeds is theirs over ten, up to the spread that k-means gives either."""
    theirs = GOLDEN["sets"][name]["mauve-text"]
    found = mauve(*gaussian_set(GAUSSIAN[name]), featuriser="test")
    assert found.sd is not None
    assert (found.buckets, found.texts) == (GOLDEN["buckets"], (GOLDEN["texts"],) * 2)
    assert abs(found.mean - theirs["mean"]) <= max(found.sd, theirs["sd"])


def test_equal_histograms_have_1_and_disjoint_ones_the_beta_integral() -> None:
    assert curve_area([0.2, 0.8], [0.2, 0.8]) == pytest.approx(1.0)
    # x = (1 - w)^c and y = w^c: the area is c B(c, c + 1), 1/252 for c = 5, and the trapezia add a little.
    for c in (1.0, 2.0, 5.0):
        exact = c * math.gamma(c) * math.gamma(c + 1) / math.gamma(2 * c + 1)
        assert exact - 1e-9 < curve_area([1.0, 0.0], [0.0, 1.0], scaling=c) < exact + 0.001


def test_the_curve_of_two_coins_is_the_definition_by_hand() -> None:
    curve = divergence_curve([0.5, 0.5], [0.9, 0.1], scaling=1.0)
    middle = curve[13]  # the weight 1/2; the mixture is (0.7, 0.3)
    assert middle[0] == pytest.approx(math.exp(-(0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3))))
    assert middle[1] == pytest.approx(math.exp(-(0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3))))
    assert curve[0].tolist() == [1.0, 0.0] and curve[-1].tolist() == [0.0, 1.0]


def test_the_components_kept_are_the_fewest_with_90_percent_of_the_variance() -> None:
    angle = np.random.default_rng(0).standard_normal((500, 3)) * [0.3, 0.1, 0.01]
    features = np.concatenate([np.ones((500, 1)), angle], axis=1)
    kept = principal_components(features)
    rows = features / np.linalg.norm(features, axis=1, keepdims=True)
    total = rows.var(axis=0).sum()
    assert kept.shape == (500, 2)
    assert kept[:, 0].var() < 0.9 * total <= kept.var(axis=0).sum()


def test_equal_seeds_give_equal_values_and_no_global_random_state_is_touched() -> None:
    p, q = normal(200), normal(200, 1.0, seed=1)
    first = mauve(p, q, featuriser="test", seeds=(0, 1))
    np.random.seed(7)
    assert mauve(p, q, featuriser="test", seeds=(0, 1)) == first
    assert np.random.random() == np.random.RandomState(7).random()
    assert first.values[0] != first.values[1]
    assert mauve(p, p, featuriser="test", seeds=(0, 1)).values == pytest.approx((1.0, 1.0))


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hundred = normal(100)
    for arguments, settings, error, named in (
        ((normal(19), hundred), {}, DataError, "19 and 100 texts"),
        ((hundred, np.empty((0, 8))), {}, DataError, "q_features"),
        ((hundred, hundred[:, :3]), {}, DataError, "8 columns and q_features 3"),
        ((hundred, np.full((100, 8), np.nan)), {}, DataError, "100 rows"),
        ((hundred, normal(200)), {"buckets": 101}, DataError, "101 buckets"),
        ((hundred, hundred), {"seeds": ()}, ConfigurationError, r"seeds=\[\]"),
        ((hundred, hundred), {"restarts": 0}, ConfigurationError, "restarts=0"),
        ((hundred, hundred), {"scaling": 0.0}, ConfigurationError, "scaling=0"),
    ):
        with pytest.raises(error, match=named):
            mauve(*arguments, featuriser="test", **settings)  # type: ignore[arg-type]
    for p, q in (([0.5, 0.6], [0.5, 0.5]), ([-1.0, 2.0], [0.5, 0.5]), ([1.0], [0.5, 0.5])):
        with pytest.raises(DataError, match=r"[Hh]istogram"):
            curve_area(p, q)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigurationError, match=r"lit-dpret\[quality\]"):
        mauve(hundred, hundred, featuriser="test")
