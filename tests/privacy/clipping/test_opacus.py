"""Where opacus is right both engines agree; where it is wrong (opacus 1.6) it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipping_cases import CASES, add, case_of, check_exact, check_refused, head, small
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy.clipping import OpacusClipping, make_engine


def freeze(case: Any, *words: str) -> Any:
    case.module.train()
    for name, p in case.module.named_parameters():
        p.requires_grad_(not any(word in name for word in words))
    return case


@pytest.mark.parametrize("name", ["t5_tied_relu", "t5_untied_gated", "bert", "distilbert", "head", "convolution"])
@pytest.mark.parametrize("unit_ids", [None, [0, 0, 1, 1]], ids=["one_row_each", "two_rows_each"])
def test_opacus_is_exact_where_it_is_right(name: str, unit_ids: list[int] | None) -> None:
    if name == "convolution":
        case = case_of(nn.Sequential(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4)), 5, 3, 6)
    else:
        case = freeze(CASES[name](), "relative_attention_bias", "position_embeddings", "word_embeddings")
    case.rows = {n: v[:4] for n, v in case.rows.items()}
    check_exact(case, engine="opacus", unit_ids=None if unit_ids is None else torch.tensor(unit_ids))


def bias_norms(case: Any) -> Tensor:
    """What opacus itself, without our checks, says of the decoder's position bias."""
    wrapped = GradSampleModule(case.module, loss_reduction="sum")
    with pytest.warns(UserWarning, match="Full backward hook"):
        case.losses(case.rows).sum().backward()
    bias = case.module.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    norms = bias.grad_sample.flatten(1).norm(dim=1)
    wrapped.to_standard_module()
    case.module.zero_grad()
    return norms


def test_opacus_takes_the_query_length_for_the_batch_of_t5s_position_bias() -> None:
    """Batch equal to query length: no error, wrong norms. This is why the bias is refused."""
    case = CASES["t5_batch_equal_to_query_length"]()
    case.module.train()
    name = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    exact = torch.stack([gradient[name].norm() for gradient in case.unit_gradients()])
    assert bias_norms(case).shape == exact.shape
    assert not torch.allclose(bias_norms(case), exact, rtol=0.05)
    with pytest.raises(UnsupportedModelError, match="relative_attention_bias"):
        make_engine("opacus", case.module, max_grad_norm=1.0)


def test_the_padding_row_of_an_embedding_is_refused_and_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small()
    with pytest.raises(UnsupportedModelError, match=r"embed\.weight .* padding_idx=1"):
        make_engine("opacus", case.module, max_grad_norm=1.0)
    monkeypatch.setattr(OpacusClipping, "_refuse_known_mistakes", lambda self: None)
    with pytest.raises(UnsupportedModelError, match=r"embed\.weight"):
        case.run(make_engine("opacus", case.module, max_grad_norm=1.0))


@pytest.mark.parametrize(
    ("name", "frozen", "words"),
    [
        ("bert", ["word_embeddings"], "position_embeddings"),
        ("distilbert", ["word_embeddings"], "position_embeddings"),
        ("siamese", ["position_embeddings", "word_embeddings"], "for 4 rows"),
    ],
)
def test_shared_position_embeddings_and_folded_rows_are_refused(name: str, frozen: list[str], words: str) -> None:
    check_refused(freeze(CASES[name](), *frozen), words, engine="opacus")


class _Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 2)
        self.register_buffer("mask", torch.ones(2))


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.GRU(5, 6), "weight_ih_l0"), (nn.LSTM(5, 6), "weight_ih_l0"), (nn.RNN(5, 6), "weight_ih_l0"),
        (nn.GRUCell(5, 6), "weight_ih"), (nn.Bilinear(5, 5, 2), "0.weight"), (nn.MultiheadAttention(5, 1), "in_proj"),
        (_Buffered(), "0.weight"), (torch.jit.script(nn.Linear(5, 2)), "^0 "),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)  # fmt: skip
def test_a_layer_that_opacus_cannot_run_row_by_row_is_refused_by_name_before_anything_runs(
    layer: nn.Module, named: str
) -> None:
    buffered = isinstance(layer, _Buffered)
    engine = "ghost" if buffered else "opacus"
    with pytest.raises(UnsupportedModelError, match=rf"{named}.*privacy\.engine={engine}") as refused:
        make_engine("opacus", nn.Sequential(layer), max_grad_norm=1.0)
    assert refused.value.trap == "T13" or buffered


class _CalledByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(input=x)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x.argmax(dim=-1, keepdim=True))


@pytest.mark.parametrize("made", [_CalledByName, _Bag])
def test_what_opacus_fails_on_in_a_batch_is_refused_with_the_setting(made: type[nn.Module]) -> None:
    module, rows = made(), torch.randn(3, 5)
    clipping = make_engine("opacus", module, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match=r"privacy\.engine=opacus"):
        add(clipping, lambda: module(rows).sin().sum(1), 3)


def test_eval_mode_is_refused_because_opacus_records_nothing_there() -> None:
    case = head()
    case.module.eval()
    with pytest.raises(ConfigurationError, match="eval mode"):
        case.run(make_engine("opacus", case.module, max_grad_norm=1.0))


def test_a_missing_opacus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus.grad_sample", None)
    with pytest.raises(ConfigurationError, match="pip install opacus"):
        make_engine("opacus", nn.Linear(2, 2), max_grad_norm=1.0)
