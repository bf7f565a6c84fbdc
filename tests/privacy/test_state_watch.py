"""A forward pass of private rows leaves nothing behind in the model: no noise would cover it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import Numbers, Regression, dp, fit
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.state_watch import SMALL, StateWatch

ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
ENGINES = ["ghost", "vmap", "loop"]


class Leaky(nn.Module):
    """A linear model that does ``leak`` with each batch of private rows before it uses them."""

    def __init__(self, leak: Callable[[Leaky, Tensor], object], buffer: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.table = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.register_buffer("average", torch.zeros(buffer))
        self.average: Tensor
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.leak(self, x)
        losses: Tensor = self.head(x * self.frozen).squeeze(1).square()
        return losses


def replace_buffer(module: Leaky, x: Tensor) -> None:
    module.average = x.mean(0)


def replace_buffer_often(module: Leaky, x: Tensor) -> None:
    for _ in range(6):  # an object that is let go lends its identity to the next one
        module.average = module.average.lerp(x[0], 0.5)


def replace_frozen(module: Leaky, x: Tensor) -> None:
    module.frozen = nn.Parameter(x.mean(0), requires_grad=False)


def repoint(module: Leaky, x: Tensor) -> None:
    for _ in range(6):
        module.frozen.data = module.frozen * 0.9 + x.mean(0)


def turn(module: Leaky, x: Tensor) -> None:
    module.table.data = module.table.data.T


def add_a_buffer(module: Leaky, x: Tensor) -> None:
    module.register_buffer("late", x.mean(0))


def remove_a_buffer(module: Leaky, x: Tensor) -> None:
    if hasattr(module, "average"):
        del module.average


def renormalise(module: Leaky, x: Tensor) -> None:
    F.embedding(x.abs().long().clamp(max=3)[:, 0], module.table, max_norm=0.5)


LEAKS: dict[str, tuple[Callable[[Leaky, Tensor], object], str, str]] = {
    "buffer in place": (lambda m, x: m.average.mul_(0.9).add_(x.mean(0)), "Buffer average", "written"),
    "buffer in place, to what it was": (lambda m, x: m.average.zero_(), "Buffer average", "written"),
    "buffer replaced": (replace_buffer, "Buffer average", "replaced"),
    "buffer replaced several times": (replace_buffer_often, "Buffer average", "replaced"),
    "buffer added": (add_a_buffer, "Buffer late", "added"),
    "buffer removed": (remove_a_buffer, "Buffer average", "removed"),
    "frozen in place": (lambda m, x: m.frozen.mul_(0.9).add_(x.mean(0)), "Parameter frozen", "written"),
    "frozen replaced": (replace_frozen, "Parameter frozen", "replaced"),
    "frozen data replaced": (repoint, "Parameter frozen", "written"),
    "frozen data turned": (turn, "Parameter table", "written"),
    "frozen rows renormalised": (renormalise, "Parameter table", "written"),
    "trainable in place": (lambda m, x: m.head.weight.add_(x.mean()), "Parameter head.weight", "written"),
}
UNCOUNTED: dict[str, tuple[Callable[[Leaky, Tensor], object], str]] = {
    "buffer": (lambda m, x: m.average.data.add_(x.mean(0)), "Buffer average"),
    "frozen": (lambda m, x: m.frozen.data.add_(x.mean(0)), "Parameter frozen"),
    "frozen, one bit": (lambda m, x: m.frozen.data[2].mul_(1 + 2**-23), "Parameter frozen"),
    "trainable": (lambda m, x: m.head.weight.data.mul_(x.abs().max()), "Parameter head.weight"),
}


def attached(module: nn.Module, tmp_path: Path, **settings: Any) -> DPSGD:
    mode = dp(tmp_path, **settings)
    mode.attach(module, mode.plan(Numbers(sampling="poisson"), units=200, steps=6), KeyedStream(b"k" * 32, "run"))
    return mode


def add(mode: DPSGD, module: nn.Module) -> None:
    mode.add(lambda i=slice(None): module(ROWS[i]), torch.arange(3), torch.ones(3, dtype=torch.bool))


def refused(words: str) -> Any:
    return pytest.raises(UnsupportedModelError, match=f"{words} during the forward pass of private rows of Leaky")


def in_batches(module: Leaky, leak: Callable[[Leaky, Tensor], object], *, first: int, last: int) -> StateWatch:
    """A watch before its verdict on the last of so many batches, of which those from the first one on leak."""
    watch = StateWatch(module)
    for batch in range(1, last + 1):
        watch.before()
        module.leak = leak if batch >= first else module.leak
        module(ROWS)
        if batch < last:
            watch.after()
    return watch


@pytest.mark.parametrize("kind", sorted(LEAKS))
def test_a_pass_that_writes_a_parameter_or_a_buffer_is_refused_by_name_in_any_batch(kind: str, tmp_path: Path) -> None:
    leak, named, how = LEAKS[kind]
    module = Leaky(leak)
    with refused(f"{named} was {how}"):
        add(attached(module, tmp_path, engine="loop"), module)
    watch = in_batches(Leaky(lambda module, x: None), leak, first=7, last=7)
    with refused(f"{named} was {how}"):
        watch.after()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", sorted(UNCOUNTED))
def test_a_write_through_data_is_refused_in_the_first_batch(kind: str, engine: str, tmp_path: Path) -> None:
    leak, named = UNCOUNTED[kind]
    module = Leaky(leak)
    with refused(f"{named} was written"):
        add(attached(module, tmp_path, engine=engine), module)


@pytest.mark.parametrize(
    ("kind", "size", "last"), [("buffer", 4, 7), ("buffer", SMALL, 8), ("frozen", 4, 8), ("trainable", 4, 8)]
)
def test_a_write_through_data_that_comes_late_is_refused_at_the_next_power_of_two(
    kind: str, size: int, last: int
) -> None:
    leak = UNCOUNTED[kind][0] if size == 4 else lambda m, x: m.average.data[:4].add_(x.mean(0))
    watch = in_batches(Leaky(lambda module, x: None, buffer=size), leak, first=7, last=last)
    with refused(".* was written"):
        watch.after()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_that_writes_nothing_is_accepted_whatever_the_state_holds(engine: str, tmp_path: Path) -> None:
    module = Leaky(lambda module, x: None)
    module.average.fill_(float("nan"))
    for name, tensor in {
        "flag": torch.ones((), dtype=torch.bool),
        "empty": torch.empty(0),
        "narrow": torch.ones(3, 2, dtype=torch.bfloat16).T,
        "sparse": torch.eye(3).to_sparse(),
        "large": torch.full((SMALL,), float("nan"), dtype=torch.complex64),
    }.items():
        module.register_buffer(name, tensor)
    mode = attached(module, tmp_path, engine=engine)
    before = torch.get_rng_state()
    for _ in range(4):
        add(mode, module)
    assert torch.equal(torch.get_rng_state(), before)


class Lookup(Regression):
    """Adds a frozen embedding that renormalises the rows of the units that were drawn."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.lookup = nn.Embedding(400, 4, max_norm=0.5).requires_grad_(False)
        nn.init.ones_(self.lookup.weight)

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        return {**super().collate_rows(rows), "id": torch.tensor([int(row.query) for row in rows], dtype=torch.long)}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss({**rows, "inputs": rows["inputs"] + self.lookup(rows["id"])})


def test_a_fit_does_not_tell_which_units_were_drawn_by_a_renormalised_embedding(tmp_path: Path) -> None:
    module = Lookup(privacy=dp(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"lookup \(Embedding\) has max_norm=0\.5"):
        fit(tmp_path / "run", module, Numbers(sampling="poisson"))
    assert torch.equal(module.lookup.weight, torch.ones(400, 4))
