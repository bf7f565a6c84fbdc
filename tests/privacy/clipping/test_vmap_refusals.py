"""The fallback engine refuses what it cannot run row by row, or could not bound, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine

WIDTH = 4


class Scaled(nn.Module):
    """A bare parameter beside a layer that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.temperature.exp()


def case_of(lib: SimpleNamespace, model: nn.Module, rows: int = 5) -> Any:
    model.double()
    x = torch.randn(rows, 5, WIDTH).double()
    return lib.Case(model, lambda b: model(b["x"]).flatten(1).sin().sum(1), {"x": x})


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
        ("another_function", "something else for a row alone"),
        ("batch_mean_without_gradient", "something else for a row alone"),
        ("batch_mean", "depends on another unit"),
    ],
)
def test_what_cannot_be_run_row_by_row_is_refused_with_the_reason(kind: str, words: str, lib: SimpleNamespace) -> None:
    case = case_of(lib, nn.Sequential(nn.Linear(WIDTH, WIDTH), Odd(kind)))
    clipping = make_engine("vmap", case.module, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        case.run(clipping)
    assert "privacy.engine=loop" in str(caught.value) or kind == "batch_mean"
    assert not any(total.any() for total in clipping.take().values())


@pytest.mark.parametrize("kind", ["batch_mean", "batch_mean_without_gradient"])
@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_module_that_mixes_rows_is_refused_beside_a_broken_unit_too(
    kind: str, where: str, lib: SimpleNamespace
) -> None:
    """A broken unit makes autograd's sum NaN, and nothing can be compared with that."""
    model = Odd(kind).double()
    data = {"x": torch.randn(4, 5, WIDTH).double(), "scale": torch.ones(4).double()}
    (data["x"] if where == "input" else data["scale"])[1] = float("nan")
    case = lib.Case(model, lambda b: model(b["x"]).sin().sum((1, 2)) * b["scale"], data)
    with pytest.raises(UnsupportedModelError, match="something else for a row alone"):
        case.run(make_engine("vmap", model, max_grad_norm=1.0))


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
def test_a_result_in_which_gradients_cannot_be_followed_is_refused(kind: str, words: str, lib: SimpleNamespace) -> None:
    """Its gradient would be missed in silence."""
    model = Returning(kind).double()

    def losses(batch: dict[str, Tensor]) -> Tensor:
        model(batch["x"])
        return model.kept.sum((1, 2))

    with pytest.raises(UnsupportedModelError, match=words):
        lib.Case(model, losses, {"x": torch.randn(4, 5, WIDTH).double()}).run(
            make_engine("vmap", model, max_grad_norm=1.0)
        )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.LSTM(2, 2), "weight_ih_l0 is not covered by privacy.engine=vmap"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
        (lambda: nn.Sequential(Scaled(), nn.BatchNorm1d(3)), "GroupNorm"),
    ],
)
def test_what_is_known_not_to_work_is_refused_before_training(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        make_engine("vmap", build(), max_grad_norm=1.0)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_batch_axis_that_is_not_the_first_is_refused(rows: int, lib: SimpleNamespace) -> None:
    model = nn.MultiheadAttention(WIDTH, 2).double()
    x = torch.randn(rows, 5, WIDTH).double()

    def losses(batch: dict[str, Tensor]) -> Tensor:
        turned = batch["x"].transpose(0, 1)
        return model(turned, turned, turned, need_weights=False)[0].sin().sum((0, 2))

    with pytest.raises(UnsupportedModelError, match=r"not the batch|no batch axis"):
        lib.Case(model, losses, {"x": x}).run(make_engine("vmap", model, max_grad_norm=1.0))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (mask @ x) * self.scale


def test_a_shared_input_as_long_as_the_batch_is_refused_in_any_batch(lib: SimpleNamespace) -> None:
    """Whether a tensor is shared is told by its length alone, so every batch is compared with autograd."""
    model, mask = Masked().double(), torch.randn(5, 5).double()
    case = lib.Case(model, lambda b: model(b["x"], mask).sin().sum((1, 2)), {"x": torch.randn(6, 5, WIDTH).double()})
    clipping = lib.check_exact(case, engine="vmap")
    with pytest.raises(UnsupportedModelError, match=r"cannot be run|differs from autograd"):
        case.run(clipping, rows=case.take(torch.arange(5)))


def test_a_parameter_used_outside_its_module_is_refused(lib: SimpleNamespace) -> None:
    model = Scaled().double()
    case = lib.Case(
        model, lambda b: (model(b["x"]) * model.temperature).sum((1, 2)), {"x": torch.randn(4, 5, WIDTH).double()}
    )
    with pytest.raises(UnsupportedModelError, match="temperature is also used outside"):
        case.run(make_engine("vmap", model, max_grad_norm=1.0))
