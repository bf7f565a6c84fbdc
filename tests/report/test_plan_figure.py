"""The picture of a plan: four panels, of every kind of plan, and told apart without colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_dpret.cards.forecast import describe_plan
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan
from lit_dpret.report.figures import draw_plan

pytest.importorskip("matplotlib")


def facts(neighbours: Any = "zero_out", **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"steps": 20, "max_grad_norm": 0.5, "n_public": 2000, "noise_multiplier": 8.0}
    request = PlainSamplingRequest(sampling="poisson", expected_batch_size=40)
    budget = PrivacyBudget(eps=3.0, delta=1e-5, neighbours=neighbours)
    for name in set(changes) & set(vars(request)):
        setattr(request, name, changes.pop(name))
    return describe_plan(PrivacyPlan.build(budget, request, **settings | changes))


@pytest.mark.parametrize(
    "made",
    [
        {"sampling": "shuffle"},
        {"sampling": "full_batch"},
        pytest.param(
            {"neighbours": "replace_one", "sampling": "fixed_size", "accountant": "rdp", "noise_multiplier": 30.0},
            marks=pytest.mark.slow,
        ),
        {"neighbours": "add_or_remove", "n_public": None, "sample_rate": 0.02},
    ],
    ids=lambda made: "-".join(map(str, made.values())),
)
def test_every_kind_of_plan_can_be_drawn(made: dict[str, Any], tmp_path: Path) -> None:
    picture = draw_plan(facts(**made), tmp_path / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
