"""MAUVE against its authors' program, and against what the definition says by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.mauve import curve_area, divergence_curve, mauve, principal_components

pytest.importorskip("sklearn", reason='k-means is by scikit-learn: pip install "lit-dpret[quality]"')

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((ROOT / "tests" / "data" / "mauve.json").read_text(encoding="utf-8"))


def script() -> Any:
    """What wrote the golden values."""
    spec = importlib.util.spec_from_file_location("compare_mauve", ROOT / "tests" / "compare_mauve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agrees(name: str, p: np.ndarray, q: np.ndarray) -> None:
    """Our mean over five seeds is the authors' over ten, up to the spread that k-means gives either."""
    theirs = GOLDEN["sets"][name]["mauve-text"]
    found = mauve(p, q, featuriser="test")
    assert found.sd is not None
    assert (found.buckets, found.texts) == (GOLDEN["buckets"], (GOLDEN["texts"],) * 2)
    assert abs(found.mean - theirs["mean"]) <= max(found.sd, theirs["sd"])


def normal(n: int, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    features = np.random.default_rng(seed).standard_normal((n, 8))
    features[:, 0] += shift
    return features


@pytest.mark.parametrize("name", ["same", "shifted", "far"])
def test_the_value_is_that_of_the_authors_program_within_the_spread_of_seeds(name: str) -> None:
    module = script()
    agrees(name, *module.gaussian_set(module.GAUSSIAN[name]))


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


def test_without_scikit_learn_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigurationError, match=r"scikit-learn, which is not installed.*lit-dpret\[quality\]"):
        mauve(normal(40), normal(40), featuriser="test")


@pytest.mark.parametrize(
    ("p", "q", "says"),
    [
        (normal(19), normal(100), "buckets=None needs 20"),
        (normal(100), np.empty((0, 8)), "a table of one row per text"),
        (normal(100), normal(100)[:, :3], "8 columns and q_features 3"),
        (normal(100), np.full((100, 8), np.nan), "NaN or infinity in 100 rows"),
    ],
)
def test_features_that_cannot_be_compared_are_refused(p: np.ndarray, q: np.ndarray, says: str) -> None:
    with pytest.raises(DataError, match=says):
        mauve(p, q, featuriser="test")
    with pytest.raises(DataError, match="101 buckets cannot be computed from 100 and 200 texts"):
        mauve(normal(100), normal(200), featuriser="test", buckets=101)


@pytest.mark.parametrize("wrong", [{"seeds": ()}, {"restarts": 0}, {"scaling": 0.0}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="MAUVE needs a seed"):
        mauve(normal(40), normal(40), featuriser="test", **wrong)


@pytest.mark.parametrize(("p", "q"), [([0.5, 0.6], [0.5, 0.5]), ([-1.0, 2.0], [0.5, 0.5]), ([1.0], [0.5, 0.5])])
def test_what_is_no_histogram_is_refused(p: list[float], q: list[float]) -> None:
    with pytest.raises(DataError):
        curve_area(p, q)
