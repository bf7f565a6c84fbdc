"""The numbers of docs/audit.md are those that the code finds."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from canary_samples import PUBLISHED, quantiles

import lit_dpret.audit.statistics
from lit_dpret.audit.statistics.curves import gaussian_epsilon
from lit_dpret.audit.statistics.error_rates import clopper_pearson_audit, gdp_audit
from lit_dpret.audit.statistics.metrics import auc, raw_epsilon, tpr_at_fpr
from lit_dpret.audit.statistics.one_run import one_run_audit, one_run_fdp_audit
from lit_dpret.audit.statistics.power import most_certifiable
from lit_dpret.audit.statistics.rank_epsilon import (
    mean_rank_bound,
    mean_rank_point,
    top_rank_bound,
    top_rank_one_training,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")


def row(shift: float) -> str:
    """A row of the table of shifts."""
    scores, published = quantiles(10_000, shift), PUBLISHED[shift]
    cells = [f"{shift:g}", f"{gaussian_epsilon(shift, 1e-6):.3f}"]
    for name, audit in (
        ("one run", one_run_audit),
        ("f-DP", one_run_fdp_audit),
        ("error rates", clopper_pearson_audit),
        ("Gaussian", gdp_audit),
    ):
        cells.append(f"{audit(scores, delta=1e-6).eps_lower:.3f} ({published[name]:.3f})")
    cells += [f"{raw_epsilon(scores, delta=1e-6):.3f}", f"{auc(scores):.3f}", f"{tpr_at_fpr(scores, 0.01):.3f}"]
    return "| " + " | ".join(cells) + " |"


def power_row(canaries: int) -> str:
    """A row of the table of powers."""
    power = most_certifiable(canaries, delta=0.0)
    cells = (power.one_run, power.error_rates, power.ranks, power.ranks_one_training)
    return f"| {canaries:,} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"


@pytest.mark.parametrize("shift", PUBLISHED)
def test_the_table_of_shifts_is_what_is_found(shift: float) -> None:
    assert row(shift) in PAGE


@pytest.mark.parametrize("canaries", [10, 100, 1000, 10_000])
def test_the_table_of_powers_is_what_is_found(canaries: int) -> None:
    assert power_row(canaries) in PAGE


def test_the_papers_table_is_read_as_the_page_says() -> None:
    paper = mean_rank_point(43, candidates=100, copies=10, chance=50).eps_lower
    exact = mean_rank_point(43, candidates=100, copies=10).eps_lower
    bound = mean_rank_bound([43] * 100, candidates=100, copies=10).eps_lower
    apart = top_rank_bound(67, 100, candidates=100, copies=10).eps_lower
    together = top_rank_one_training(67, 100, candidates=100, copies=10).eps_lower
    said = re.search(r"ln\(50 / 43\) / 10 = ([\d.]+).*?([\d.]+) with.*?100 trainings, ([\d.]+)", PAGE, flags=re.DOTALL)
    assert said is not None
    assert [float(x) for x in said.groups()] == [round(paper, 4), round(exact, 4), round(bound, 4)]
    assert f"{apart:.3f} from independent trainings and {together:.3f} from one" in PAGE


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(lit_dpret.audit.statistics.__path__)])
def test_the_examples_in_the_code_are_what_it_prints(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"lit_dpret.audit.statistics.{name}")).failed == 0


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert code is not None
    exec(code.group(1), {})
    assert "absence of evidence is no guarantee" in capsys.readouterr().out
