"""An engine whose sums are kept elsewhere hands them over in parts, and checks itself without all gradients at once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from clipping_cases import Case, check_exact, difference, small, t5
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import ghost, make_engine
from lit_dpret.privacy.clipping.recording_check import Comparison


class Kept:
    """Sums by parts of two parameters each; most numbers that were handed over at once."""

    def __init__(self, names: list[str]) -> None:
        self.parts = [tuple(names[i : i + 2]) for i in range(0, len(names), 2)]
        self.sums: dict[str, Tensor] = {}
        self.calls: list[int] = []
        self.most = 0

    def free(self) -> None:
        pass

    def add(self, part: int, sums: dict[str, Tensor]) -> None:
        assert set(sums) <= set(self.parts[part])
        self.calls.append(part)
        self.most = max(self.most, sum(each.numel() for each in sums.values()))
        for name, each in sums.items():
            self.sums[name] = self.sums.get(name, 0) + each

    def take(self) -> dict[str, Tensor]:
        found, self.sums = self.sums, {}
        return found

    def forget(self) -> None:
        self.sums = {}


def in_parts(case: Case, **settings: Any) -> tuple[Any, Kept]:
    engine = make_engine("ghost", case.module, **settings)
    store = Kept(list(engine.parameters))
    engine.store = store
    return engine, store


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
@pytest.mark.parametrize("case", [t5, lambda: t5(untied=True), small], ids=["tied", "untied", "small"])
def test_sums_in_parts_are_those_of_the_engine(case: Any, clip_groups: str) -> None:
    made = case()
    whole = check_exact(made, clip_groups=clip_groups)
    engine, store = in_parts(made, max_grad_norm=whole.max_grad_norm, clip_groups=clip_groups)
    for _ in range(2):  # the first of which is checked
        stats, other = made.run(engine), made.run(whole)
        assert torch.equal(stats.norms, other.norms) and stats.clipped == other.clipped
        found, expected = engine.take(), whole.take()
        found = {name: found.get(name, torch.zeros_like(each)) for name, each in expected.items()}
        assert difference(found, expected) < 1e-14
    made.run(engine)
    engine.forget()
    assert not store.sums
    assert store.calls == [*range(len(store.parts))] * 3, "in one order, whatever the batch: other processes take part"
    assert store.most < sum(parameter.numel() for parameter in engine.parameters.values()) / 2


def test_a_gradient_that_no_rule_explains_is_refused_in_parts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ghost.contributions_of

    def without(use: Any, *rest: Any, **key: Any) -> Any:
        return [] if "DenseReluDense.wi" in use.site.name else plain(use, *rest, **key)

    monkeypatch.setattr(ghost, "contributions_of", without)
    made = t5()
    engine, store = in_parts(made, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match="another gradient than autograd"):
        made.run(engine)
    assert not store.sums


def test_a_loss_that_couples_units_is_refused_in_parts_as_well() -> None:
    made = small()
    own = made.losses
    made.losses = lambda rows: (losses := own(rows)) * losses.mean()
    engine, store = in_parts(made, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match="cannot be assigned to units"):
        made.run(engine)
    assert not store.sums


def test_autograds_gradients_are_compared_one_by_one_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that held them all would hold as much as the model."""
    made = t5(rows=3)
    engine, _ = in_parts(made, max_grad_norm=1.0)
    seen: list[str] = []
    alive: list[int] = []
    references: list[weakref.ref[Tensor]] = []
    real = Comparison.add

    def add(self: Comparison, name: str, reference: Tensor) -> None:
        seen.append(name)
        references.append(weakref.ref(reference))
        real(self, name, reference)
        alive.append(sum(each() is not None for each in references))

    monkeypatch.setattr(Comparison, "add", add)
    made.run(engine)
    assert sorted(seen) == sorted(name for name, _ in made.module.named_parameters()), "each once, the tied one too"
    assert max(alive) <= 2
