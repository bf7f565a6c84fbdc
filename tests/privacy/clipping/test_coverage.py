"""Every model of the coverage list, on Poisson batches, in every setting that a user may choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covered_models import COVERED
from torch import Tensor

from lit_dpret.privacy.clipping import make_engine

UNITS = torch.tensor([0, 1, 1, 2, 3, 3])  # of six rows
ATTENTION = sorted(set(COVERED) - {"resnet18", "conv_net"})


def poisson_batches(rate: float = 0.35) -> list[Tensor]:
    """Which units each batch holds, by a coin per unit; among them are batches of none, of one and of several."""
    generator = torch.Generator().manual_seed(51)
    batches = [(torch.rand(4, generator=generator) < rate).nonzero().flatten() for _ in range(5)]
    assert {0, 1} < {len(units) for units in batches}
    return batches


def check_poisson(case: Any, lib: SimpleNamespace, engine: str = "ghost", clip_groups: str = "flat") -> Any:
    """Every batch has the norms and the sum of its units alone; the empty one runs nothing and adds zero."""
    gradients = case.unit_gradients(UNITS)
    norms = torch.stack([lib.norm_of(g) for g in gradients])
    bound = 1.001 * float(norms.median())
    clipping = make_engine(engine, case.module, max_grad_norm=bound, clip_groups=clip_groups)
    for units in poisson_batches():
        keep = torch.isin(UNITS, units)
        slots = torch.searchsorted(units, UNITS[keep])
        stats = case.run(clipping, slots, torch.ones(len(units), dtype=torch.bool), rows=case.take(keep))
        assert torch.allclose(stats.norms.double(), norms[units], rtol=1e-10) and stats.non_finite == 0
        total = clipping.take()
        if not len(units):
            assert total.keys() == gradients[0].keys() and not any(t.any() for t in total.values())
            continue
        expected = lib.clipped_sum([gradients[u] for u in units], bound, groups=clipping.groups)
        assert lib.difference(total, expected) < 1e-10
    return clipping


WAYS = [("ghost", "flat"), ("ghost", "per_layer"), ("vmap", "flat")]
SLOW = [("vmap", "per_layer"), ("loop", "flat"), ("loop", "per_layer")]


@pytest.mark.parametrize(
    ("engine", "clip_groups"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)]
)
@pytest.mark.parametrize("name", sorted(COVERED))
def test_poisson_batches_are_clipped_exactly(name: str, engine: str, clip_groups: str, lib: SimpleNamespace) -> None:
    check_poisson(COVERED[name](lib, 6), lib, engine, clip_groups)


@pytest.mark.parametrize("name", ATTENTION)
def test_poisson_batches_under_eager_attention(name: str, lib: SimpleNamespace) -> None:
    check_poisson(COVERED[name](lib, 6, attn_implementation="eager"), lib)


@pytest.mark.filterwarnings("ignore:.*_checkpointing.* is deprecated")
@pytest.mark.parametrize("name", sorted(set(COVERED) - {"conv_net"}))
def test_poisson_batches_under_activation_checkpointing(name: str, lib: SimpleNamespace) -> None:
    case = COVERED[name](lib, 6)
    case.module.train()
    if name == "resnet18":
        case.module.checkpointed = True
    else:
        case.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert case.module.is_gradient_checkpointing
    check_poisson(case, lib)


@pytest.mark.parametrize(
    ("name", "clip_groups"),
    [*((name, "flat") for name in sorted(COVERED)), ("t5_v1.0_tied", "per_layer"), ("conv_net", "per_layer")],
)
def test_under_bf16_autocast_every_contribution_is_within_the_bound_in_fp32(
    name: str, clip_groups: str, lib: SimpleNamespace
) -> None:
    case = COVERED[name](lib, 3)
    exact = torch.stack([lib.norm_of(g) for g in case.unit_gradients()])
    case.module.float()
    case.rows = {n: v.float() if v.is_floating_point() else v for n, v in case.rows.items()}
    bound = float(exact.min()) / (3 if clip_groups == "flat" else 1e5)
    clipping = make_engine("ghost", case.module, max_grad_norm=bound, clip_groups=clip_groups)
    for unit in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            stats = case.run(clipping, mask=torch.arange(3) == unit)
        sums = clipping.take()
        assert all(total.dtype == torch.float32 for total in sums.values())
        share = bound / len(clipping.groups) ** 0.5
        assert all(lib.norm_of({n: sums[n] for n in names}) <= share for names in clipping.groups)
        reached = float(lib.norm_of(sums)) / bound
        assert reached <= 1 and (reached >= lib.lowered(1.0) * (1 - 1e-5) or clip_groups == "per_layer")
        # the gradient is bf16's: a saturated unit's tiny one is known no better than the others' rounding
        assert float(stats.norms[unit]) == pytest.approx(float(exact[unit]), rel=0.2, abs=0.01 * float(exact.max()))


LLAMA = {"attention_bias": True, "mlp_bias": True}  # which has none by itself


@pytest.mark.parametrize(
    ("name", "part", "changes"),
    [
        *((name, "bias", {}) for name in sorted(set(COVERED) - {"llama", "llama_tied"})),  # T5's are of its positions
        ("llama", "bias", LLAMA),
        ("bert", "position_embeddings", {}),
        ("minilm", "position_embeddings", {}),
        ("distilbert", "position_embeddings", {}),
        ("gpt2", "wpe", {}),
        ("bart", "embed_positions", {}),
    ],
)
def test_biases_or_learned_positions_alone_are_clipped_exactly(
    name: str, part: str, changes: dict[str, Any], lib: SimpleNamespace
) -> None:
    case = COVERED[name](lib, 6, **changes)
    for full, p in case.module.named_parameters():
        p.requires_grad_(part in full)
    assert check_poisson(case, lib).parameters


@pytest.mark.parametrize("name", sorted(COVERED))
def test_a_broken_unit_contributes_zero_to_every_layer_and_is_counted(name: str, lib: SimpleNamespace) -> None:
    case = COVERED[name](lib, 6)
    plain, scale = case.losses, torch.ones(6, dtype=torch.float64)
    scale[2] = float("nan")
    case.rows["scale"] = scale
    case.losses = lambda batch: plain(batch) * batch["scale"]
    gradients = case.unit_gradients(UNITS)
    gradients[1] = {n: torch.zeros_like(g) for n, g in gradients[1].items()}
    bound = float(torch.stack([lib.norm_of(g) for g in gradients]).median())
    clipping = make_engine("ghost", case.module, max_grad_norm=bound, clip_groups="per_layer")
    for _ in range(2):
        stats = case.run(clipping, UNITS)
        assert stats.non_finite == 1 and not stats.norms[1].isfinite() and stats.norms[[0, 2, 3]].isfinite().all()
        assert lib.difference(clipping.take(), lib.clipped_sum(gradients, bound, groups=clipping.groups)) < 1e-10
