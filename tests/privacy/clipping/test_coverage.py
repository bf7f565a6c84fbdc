"""Every model of the coverage list, in every setting that a user may choose, and what is told by lists of classes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from clipping_cases import (
    CAUSAL,
    COVERED,
    Case,
    bart,
    causal,
    check_dropped,
    check_exact,
    check_refused,
    clipped_sum,
    difference,
    gpt2,
    norm_of,
)
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine, recorder, rules

UNITS = torch.tensor([0, 1, 1, 2, 3, 3])  # of six rows
ATTENTION = sorted(set(COVERED) - {"resnet18", "conv_net"})


def poisson_batches(rate: float = 0.35) -> list[Tensor]:
    """Which units each batch holds, by a coin per unit; among them are batches of none, of one and of several."""
    generator = torch.Generator().manual_seed(51)
    batches = [(torch.rand(4, generator=generator) < rate).nonzero().flatten() for _ in range(5)]
    assert {0, 1} < {len(units) for units in batches}
    return batches


def check_poisson(case: Any, engine: str = "ghost", clip_groups: str = "flat") -> Any:
    """Every batch has the norms and the sum of its units alone; the empty one runs nothing and adds zero."""
    gradients = case.unit_gradients(UNITS)
    norms = torch.stack([norm_of(g) for g in gradients])
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
        expected = clipped_sum([gradients[u] for u in units], bound, groups=clipping.groups)
        assert difference(total, expected) < 1e-10
    return clipping


WAYS = [("ghost", "flat"), ("ghost", "per_layer"), ("vmap", "flat")]
SLOW = [("vmap", "per_layer"), ("loop", "flat"), ("loop", "per_layer")]


@pytest.mark.like(4)
@pytest.mark.parametrize(
    ("engine", "clip_groups"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)]
)
@pytest.mark.parametrize("name", sorted(COVERED))
def test_poisson_batches_are_clipped_exactly(name: str, engine: str, clip_groups: str) -> None:
    check_poisson(COVERED[name](6), engine, clip_groups)


@pytest.mark.parametrize("name", ATTENTION)
def test_poisson_batches_under_eager_attention(name: str) -> None:
    check_poisson(COVERED[name](6, attn_implementation="eager"))


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_a_causal_model_is_clipped_exactly(name: str) -> None:
    check_exact(causal(CAUSAL[name]()))


@pytest.mark.filterwarnings("ignore:.*_checkpointing.* is deprecated")
@pytest.mark.parametrize("name", sorted(set(COVERED) - {"conv_net"}))
def test_poisson_batches_under_activation_checkpointing(name: str) -> None:
    case = COVERED[name](6)
    case.module.train()
    if name == "resnet18":
        case.module.checkpointed = True
    else:
        case.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert case.module.is_gradient_checkpointing
    check_poisson(case)


ALONE = {
    "bert": ["position_embeddings", "embeddings", "LayerNorm", "query", "layer.1.", "word_embeddings"],
    "minilm": ["position_embeddings"],
    "distilbert": ["position_embeddings"],
    "gpt2": ["wpe", "c_attn.weight"],
    "llama": ["norm"],
    "bart": ["embed_positions"],
    "t5_v1.0_untied": ["layer_norm", "shared", "lm_head", "decoder"],
}


@pytest.mark.parametrize(
    ("name", "part"),
    [  # T5's biases are of its positions
        *((name, "bias") for name in sorted(set(COVERED) - {"llama_tied"})),
        *((name, part) for name, parts in ALONE.items() for part in parts),
    ],
)
def test_what_alone_is_trained_is_clipped_exactly(name: str, part: str) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if (name, part) == ("llama", "bias") else {}
    case = COVERED[name](6, **changes)
    for full, p in case.module.named_parameters():
        p.requires_grad_(part in full)
    assert check_poisson(case).parameters


@pytest.mark.parametrize("name", sorted(COVERED))
def test_a_broken_unit_contributes_zero_to_every_layer_and_is_counted(name: str) -> None:
    case = COVERED[name](6)
    plain = case.losses
    case.rows["scale"] = torch.tensor([1, 1, math.nan, 1, 1, 1]).double()
    case.losses = lambda batch: plain(batch) * batch["scale"]
    check_dropped(case, 1, unit_ids=UNITS, clip_groups="per_layer")


def test_given_positions_of_one_row_are_charged_to_every_row() -> None:
    case = causal(gpt2())
    plain, length = case.module.forward, case.rows["ids"].shape[1]
    case.module.forward = lambda **inputs: plain(**inputs, position_ids=torch.arange(length).flip(0)[None])
    check_exact(case)


@pytest.mark.parametrize("rows", [1, 3])
def test_positions_of_one_axis_are_not_taken_for_the_batch(rows: int) -> None:
    case = bart(rows)
    decoder = case.module.model.decoder
    positions = torch.arange(5).flip(0)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        hidden = decoder(input_ids=batch["labels"].clamp(min=2), position_ids=positions, use_cache=False)
        return hidden.last_hidden_state.sin().sum((1, 2))

    for layer in decoder.layers:  # no passage to attend to
        layer.encoder_attn.requires_grad_(False)
        layer.encoder_attn_layer_norm.requires_grad_(False)
    check_exact(Case(decoder, losses, case.rows))


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_positions_without_a_batch_axis_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "POSITIONED", set())
    check_refused(COVERED[name](5), "wpe|embed_positions")


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bart"])
def test_a_class_taken_off_the_lists_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = CAUSAL[name]() if name in CAUSAL else bart().module
    for listed in ("SCALES", "TRANSPOSED_LINEAR", "LOOKUPS"):
        monkeypatch.setattr(rules, listed, set())
        monkeypatch.setattr(recorder, listed, set(), raising=False)
    with pytest.raises(UnsupportedModelError, match=r"Conv1D|RMSNorm|BartLearnedPositionalEmbedding"):
        make_engine("ghost", module, max_grad_norm=1.0)
