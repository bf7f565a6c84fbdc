"""What decoders and encoder-decoders other than T5 have of their own; `test_coverage` runs them on Poisson batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covered_models import CAUSAL, bart, causal, gpt2
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine, recorder, rules


def build(name: str, lib: SimpleNamespace, rows: int = 5) -> Any:
    return bart(lib, rows) if name == "bart" else causal(lib, CAUSAL[name](), rows)


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_a_causal_model_is_clipped_exactly(name: str, lib: SimpleNamespace) -> None:
    lib.check_exact(causal(lib, CAUSAL[name]()))


def test_under_bf16_autocast_gemma_is_within_the_bound_in_fp32(lib: SimpleNamespace) -> None:
    lib.check_low_precision(build("gemma3", lib, rows=3))


@pytest.mark.parametrize(("name", "trained"), [("gpt2", "c_attn.weight"), ("llama", "norm")])
def test_any_part_can_be_trained_alone(name: str, trained: str, lib: SimpleNamespace) -> None:
    case = build(name, lib)
    for full, p in case.module.named_parameters():
        p.requires_grad_(trained in full)
    assert lib.check_exact(case).parameters


def test_given_positions_of_one_row_are_charged_to_every_row(lib: SimpleNamespace) -> None:
    case = causal(lib, gpt2())
    plain, length = case.module.forward, case.rows["ids"].shape[1]
    case.module.forward = lambda **inputs: plain(**inputs, position_ids=torch.arange(length).flip(0)[None])
    lib.check_exact(case)


@pytest.mark.parametrize("rows", [1, 3])
def test_positions_of_one_axis_are_not_taken_for_the_batch(rows: int, lib: SimpleNamespace) -> None:
    case = bart(lib, rows)
    decoder = case.module.model.decoder
    positions = torch.arange(5).flip(0)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        hidden = decoder(input_ids=batch["labels"].clamp(min=2), position_ids=positions, use_cache=False)
        return hidden.last_hidden_state.sin().sum((1, 2))

    for layer in decoder.layers:  # no passage to attend to
        layer.encoder_attn.requires_grad_(False)
        layer.encoder_attn_layer_norm.requires_grad_(False)
    lib.check_exact(lib.Case(decoder, losses, case.rows))


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_positions_without_a_batch_axis_are_refused(
    name: str, lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "POSITIONED", set())
    case = build(name, lib)
    with pytest.raises(UnsupportedModelError, match=r"wpe|embed_positions"):
        case.run(make_engine("ghost", case.module, max_grad_norm=1.0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bart"])
def test_a_class_taken_off_the_lists_is_refused_by_name(
    name: str, lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build(name, lib)
    for listed in ("SCALES", "TRANSPOSED_LINEAR", "LOOKUPS"):
        monkeypatch.setattr(rules, listed, set())
        monkeypatch.setattr(recorder, listed, set(), raising=False)
    with pytest.raises(UnsupportedModelError, match=r"Conv1D|RMSNorm|BartLearnedPositionalEmbedding"):
        make_engine("ghost", case.module, max_grad_norm=1.0)
