"""Per-layer clipping: each layer within C / sqrt(K), all together within C, whatever engine computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipping_cases import CASES, Case, case_of, check_exact, norm_of, small, t5
from torch import Tensor, nn

from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PlainSamplingRequest


def layers_of(module: nn.Module) -> list[list[str]]:
    """Modules with what they own, each tensor once; by walking the modules, not by names."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    found = []
    for layer in module.modules():
        own = [names.pop(id(p)) for p in layer.parameters(recurse=False) if id(p) in names]
        found += [own] if own else []
    return found


def check(case: Case, engine: str, clip: str = "abadi", unit_ids: Tensor | None = None) -> Any:
    """Norms and sum equal the reference, and what is clipped together is what one module owns."""
    clipping = check_exact(case, engine=engine, clip=clip, unit_ids=unit_ids, clip_groups="per_layer")
    assert sorted(map(sorted, clipping.groups)) == sorted(map(sorted, layers_of(case.module)))
    return clipping


class Mixed(nn.Module):
    """A bare parameter, which is the module's own, beside layers with rules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first, self.norm = nn.Linear(5, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) * self.scale.exp()


NAMED: dict[str, Callable[[], Case]] = {
    "t5": lambda: t5(rows=6),
    "bare parameters": lambda: case_of(nn.Sequential(Mixed(), nn.Linear(4, 2)), 5, 3, 5),
    "plain": lambda: case_of(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), 6, 3, 5),
}
WAYS = [
    *((engine, name) for engine in ("ghost", "loop") for name in ("t5_tied_relu", "bert_masked_lm", "siamese")),
    *((engine, "two_linears_with_one_weight") for engine in ("ghost", "loop")),
    *((engine, "bare parameters") for engine in ("vmap", "loop")),
    ("vmap", "t5"), ("opacus", "plain"),
]  # fmt: skip


@pytest.mark.like(3)
@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize(("engine", "name"), WAYS)
def test_the_sum_equals_one_unit_at_a_time(engine: str, name: str, clip: str) -> None:
    case = (NAMED | CASES)[name]()
    unit_ids = torch.tensor([1, 0, 1, 2, 3]) if case.count == 5 else torch.tensor([2, 0, 2, 1, 2, 0])[: case.count]
    check(case, engine, clip)
    check(case, engine, clip, unit_ids)


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop"])
@pytest.mark.parametrize("name", ["t5_tied_relu", "embedding_tied_to_linear", "norm_tied_to_linear"])
def test_one_unit_moves_each_layer_by_its_share_and_all_together_by_the_bound(
    name: str, engine: str, clip: str
) -> None:
    case, bound = CASES[name](), 1e-3
    layers, count = layers_of(case.module), case.count
    clipping = make_engine(engine, case.module, max_grad_norm=bound, clip=clip, clip_groups="per_layer")
    case.run(clipping)
    whole = clipping.take()
    for unit in range(count):
        case.run(clipping, mask=torch.arange(count) != unit)
        rest = clipping.take()
        moved = {name: whole[name] - rest[name] for name in whole}
        assert float(norm_of(moved)) <= bound * (1 + 1e-9)
        shares = [float(norm_of({n: moved[n] for n in layer})) * math.sqrt(len(layers)) for layer in layers]
        assert max(shares) <= bound * (1 + 1e-9)
        if clip == "abadi":
            assert max(shares) == pytest.approx(bound, rel=1e-8)


def test_the_mode_clips_as_its_plan_says() -> None:
    request = PlainSamplingRequest(sampling="poisson", sample_rate=0.1, expected_batch_size=20)
    mode = DPSGD(eps=3.0, delta=1e-5, noise_multiplier=30.0, max_grad_norm=1e-4, clip_groups="per_layer")
    case = small()
    plan = mode.plan(request, units=200, steps=1)
    mode.attach(case.module, plan, KeyedStream(bytes(32), "run"))
    mode.add(lambda: case.losses(case.rows), torch.arange(5), torch.arange(5) == 2)
    total, share = mode.take(), 1e-4 / math.sqrt(len(layers_of(case.module)))
    found = [float(norm_of({n: total[n] for n in layer})) for layer in layers_of(case.module)]
    assert found == [0.0 if norm == 0.0 else pytest.approx(share, rel=1e-8) for norm in found]
    assert plan.clip_groups == "per_layer" and plan.sensitivity == 1e-4 and mode.counts.clipped == 1
