"""What an audit could prove at best."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

import pytest

import lit_dpret.audit.statistics
from lit_dpret.audit.statistics.one_run import audit_power, canaries_needed, most_certifiable, one_run_counts
from lit_dpret.audit.statistics.rank_epsilon import top_rank_bound, top_rank_one_training
from lit_dpret.errors import ConfigurationError


@pytest.mark.parametrize(
    ("canaries", "expected"),
    [(10, 1.05), (32, 2.32), (64, 3.04), (100, 3.49), (256, 4.44), (500, 5.11), (1000, 5.81), (2000, 6.50),
     (5000, 7.42), (10_000, 8.11)],
)  # fmt: skip
def test_an_audit_without_a_mistake_certifies_the_published_epsilon(canaries: int, expected: float) -> None:
    found = most_certifiable(canaries, delta=0.0)
    assert found == pytest.approx(expected, abs=6e-3)
    rate = 0.05 ** (1 / canaries)
    assert found == pytest.approx(math.log(rate / (1 - rate)), abs=1e-6)
    assert top_rank_bound(canaries, canaries, candidates=100).eps_lower == pytest.approx(math.log(100 * rate), abs=1e-6)
    together = top_rank_one_training(canaries, canaries, candidates=100).eps_lower
    assert together == pytest.approx(math.log(99 * rate / (1 - rate)) / 2, abs=1e-6)


def test_the_plan_of_a_run_says_the_same() -> None:
    [row] = audit_power(8.0, 1e-6, canaries=(1000,))
    assert row["at_best"] == pytest.approx(most_certifiable(1000, delta=1e-6), rel=1e-6)


@pytest.mark.parametrize(("eps", "delta"), [(0.5, 0.0), (3.0, 0.0), (3.0, 1e-5), (6.0, 1e-6)])
def test_the_canaries_needed_suffice_and_one_fewer_do_not(eps: float, delta: float) -> None:
    needed = canaries_needed(eps, delta=delta)
    for canaries, enough in ((needed, True), (needed - 1, False)):
        found = one_run_counts(canaries=canaries, guesses=canaries, correct=canaries, delta=delta).eps_lower
        assert (found > eps) is enough


def test_copies_let_fewer_canaries_prove_less_of_one_copy() -> None:
    assert most_certifiable(100, delta=0.0, copies=10) == pytest.approx(3.492965 / 10, abs=1e-6)
    assert canaries_needed(0.3, delta=0.0, copies=10) == canaries_needed(3.0, delta=0.0)


def test_an_audit_that_cannot_fail_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="eps=12"):
        canaries_needed(12.0, delta=1e-3)
    with pytest.raises(ConfigurationError, match="eps=nan"):
        canaries_needed(float("nan"), delta=0.0)
    with pytest.raises(ConfigurationError, match="canaries=0"):
        most_certifiable(0, delta=0.0)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(lit_dpret.audit.statistics.__path__)])
def test_the_examples_in_the_code_are_what_it_prints(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"lit_dpret.audit.statistics.{name}")).failed == 0
