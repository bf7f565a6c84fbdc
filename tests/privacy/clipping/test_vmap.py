"""The fallback engine: layers without a rule are clipped exactly, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipping_cases import Case, Positions, Scaled, case_of, check_exact, check_refused, norm_of, prepared
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine

WIDTH = 4


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"w": nn.Parameter(torch.randn(WIDTH, WIDTH))})
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights["w"] + self.calls


class Attention(nn.Module):
    """Two outputs, both of which the loss depends on, one of them computed from the other."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        hidden, weights = self.attention(x, x.sin(), x.cos())
        return hidden + weights.square().sum((1, 2))[:, None, None]


class Chained(nn.Module):
    """Its second output is made from the first, and both are used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x * self.scale
        return {"first": first, "second": first.square() * self.scale}


class Deep(nn.Module):
    """Layers with a rule before and after those without one; a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scaled, self.chained, self.positions = Scaled(), Chained(), Positions()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scaled(self.scaled(self.first(x)).sin())
        both = self.chained(self.positions(hidden))
        return self.norm(both["first"] + both["second"].cos())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare_parameter": Scaled,
    "positions": Positions,
    "parameters_in_a_dict": Stored,
    "attention": Attention,
    "transposed_convolution": lambda: nn.ConvTranspose1d(5, 3, 2, stride=2),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)), nn.Tanh()),
    "prelu": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.PReLU()),
    "deep": Deep,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_norms_and_sum_equal_one_unit_at_a_time(name: str) -> None:
    check_exact(case_of(MODELS[name](), 5, 5, WIDTH), engine="vmap")


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.7))

    def forward(self, losses: Tensor) -> Tensor:
        return losses * self.value.exp()


@pytest.mark.parametrize("engine", ["vmap", "opacus", "loop"])
def test_a_parameter_that_scales_the_losses_themselves_is_exact(engine: str) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(WIDTH, 3), "temperature": Temperature()}).double()
    x = torch.randn(5, 5, WIDTH).double()
    loss = lambda b: model["temperature"](model["linear"](b["x"]).flatten(1).sin().sum(1))  # noqa: E731
    check_exact(Case(model, loss, {"x": x}), engine=engine)


def test_units_of_several_rows_masks_and_batches_of_none_and_one() -> None:
    case = case_of(Deep(), 6, 5, WIDTH)
    ids = torch.tensor([2, 0, 2, 1, 2, 0])
    check_exact(case, engine="vmap", unit_ids=ids)
    clipping = check_exact(case, engine="vmap", unit_ids=ids, mask=torch.tensor([True, False, True]))
    nothing = torch.zeros(0, dtype=torch.long)
    assert clipping.add(lambda: pytest.fail("ran"), nothing, nothing.bool()).norms.shape == (0,)
    case.rows = case.take(torch.tensor([3]))
    check_exact(case, engine="vmap")


def test_rows_folded_into_the_batch_belong_to_their_row() -> None:
    model = Positions().double()

    def losses(batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        return model(x.flatten(0, 1)).unflatten(0, x.shape[:2]).flatten(2).sum(2).prod(1)

    case = Case(model, losses, {"x": torch.randn(4, 3, 5, WIDTH).double()})
    check_exact(case, engine="vmap", unit_ids=torch.tensor([1, 0, 1, 2]))


def test_a_vision_transformer_is_clipped_exactly() -> None:
    """Its class token and positions are bare parameters; all other layers have a rule."""
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=10, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    case = case_of(model := prepared(ViTModel(config)).train(), 4, 3, 8, 8)
    case.losses = lambda b: model(b["x"]).pooler_output.sum(1).sin()
    check_exact(case, engine="vmap")


# -- what cannot be run row by row, or could not be bounded -----------------------------------


class Odd(nn.Module):
    """A module that vmap cannot run, or that is not the same function when it is run again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "dropout":
            x = nn.functional.dropout(x, 0.5)
        if self.kind == "control_flow" and x.sum() > 0:
            x = -x
        if self.kind == "buffer":
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
        if self.kind == "count":
            self.mean += 1
        if self.kind == "another_function":
            x = x * self.calls
        if self.kind == "batch_mean":
            x = x - x.mean(0)
        if self.kind == "batch_mean_without_gradient":
            return x * self.scale + x.mean(0).detach()
        return x * self.scale


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dropout", "random"),
        ("control_flow", "control flow"),
        ("buffer", "in-place"),
        ("count", "in-place"),
        ("another_function", "another result for a row alone"),
        ("batch_mean_without_gradient", "another result for a row alone"),
        ("batch_mean", "depends on another unit"),
    ],
)
def test_what_cannot_be_run_row_by_row_is_refused_with_the_reason(kind: str, words: str) -> None:
    case = case_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Odd(kind)), 5, 5, WIDTH)
    clipping = make_engine("vmap", case.module, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        case.run(clipping)
    assert "privacy.engine=loop" in str(caught.value) or kind == "batch_mean"
    assert not any(total.any() for total in clipping.take().values())


@pytest.mark.parametrize("kind", ["batch_mean", "batch_mean_without_gradient"])
@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_module_that_mixes_rows_is_refused_beside_a_broken_unit_too(kind: str, where: str) -> None:
    """A broken unit makes autograd's sum NaN, and nothing can be compared with that."""
    case = case_of(Odd(kind), 4, 5, WIDTH)
    plain, case.rows["scale"] = case.losses, torch.ones(4).double()
    case.losses = lambda b: plain(b) * b["scale"]
    case.rows["x" if where == "input" else "scale"][1] = float("nan")
    check_refused(case, "another result for a row alone", engine="vmap")


class Opaque:
    """A result that nobody can look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.kept = x * self.scale
        return Opaque(self.kept) if self.kind == "opaque" else self.kept.detach()


@pytest.mark.parametrize(("kind", "words"), [("opaque", "returns a Opaque"), ("detached", "no tensor with a gradient")])
def test_a_result_in_which_gradients_cannot_be_followed_is_refused(kind: str, words: str) -> None:
    """Its gradient would be missed in silence."""
    case = case_of(model := Returning(kind), 4, 5, WIDTH)
    case.losses = lambda b: (model(b["x"]), model.kept.sum((1, 2)))[1]
    check_refused(case, words, engine="vmap")


@pytest.mark.parametrize("rows", [3, 5])
def test_a_batch_axis_that_is_not_the_first_is_refused(rows: int) -> None:
    case = case_of(model := nn.MultiheadAttention(WIDTH, 2), rows, 5, WIDTH)
    case.losses = lambda b: model(*[b["x"].transpose(0, 1)] * 3, need_weights=False)[0].sin().sum((0, 2))
    check_refused(case, "not the batch|no batch axis", engine="vmap")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (mask @ x) * self.scale


def test_a_shared_input_as_long_as_the_batch_is_refused_in_any_batch() -> None:
    """Whether a tensor is shared is told by its length alone, so every batch is compared with autograd."""
    case, mask = case_of(model := Masked(), 6, 5, WIDTH), torch.randn(5, 5).double()
    case.losses = lambda b: model(b["x"], mask).sin().sum((1, 2))
    clipping = check_exact(case, engine="vmap")
    with pytest.raises(UnsupportedModelError, match=r"cannot be run|another gradient than autograd"):
        case.run(clipping, rows=case.take(torch.arange(5)))


def test_a_later_row_whose_gradient_consists_of_rounding_ends_no_run_and_is_clipped() -> None:
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.ModuleList([nn.Linear(5, 8), attention, nn.Linear(8, 1)])

    def losses(batch: dict[str, Tensor]) -> Tensor:
        return model[2](attention(model[0](batch["x"])).mean(1)).squeeze(1).square()

    case = Case(model, losses, {"x": torch.randn(6, 8, 5)})
    clipping = make_engine("vmap", model, max_grad_norm=1.0)
    case.run(clipping)
    clipping.take()
    for seed in range(8):
        torch.manual_seed(seed)
        case.rows = {"x": torch.randn(1, 8, 5) * 1e4}
        case.run(clipping)
        assert float(norm_of(clipping.take())) <= 1.0
