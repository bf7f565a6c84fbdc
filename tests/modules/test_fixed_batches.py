"""Batches of the generator filled up to one shape: the same update, and nothing that a compiler would see change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import Regression, dp, fit
from tiny_generator import SHAPE, CopyTask, Pair, copy_pairs, generator, lively_generator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_dpret.callbacks.fixed_shapes import refuse_changing_shapes, shape_of_batches
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.privacy.batches import Draw, FixedShape, UnitBatch
from lit_dpret.privacy.clipping import GhostClipping
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.modes import DPSGD

PAIRS = copy_pairs(12)


def unit(first: int, rows: int) -> tuple[Draw, Sequence[Pair]]:
    """A drawn unit of so many rows."""
    return Draw(first, 0, 0, True), PAIRS[first : first + rows]


DRAWN: dict[str, list[tuple[Draw, Sequence[Pair]]]] = {
    "full": [unit(0, 1), unit(1, 2), unit(3, 3), unit(6, 1), unit(7, 3)],
    "three of five": [unit(7, 1), unit(2, 3), unit(9, 2)],
    "one without rows": [unit(1, 2), unit(3, 0), unit(5, 1)],
}


def batch_of(module: QueryGenerator, drawn: Any, *, rows: str, fixed: bool) -> UnitBatch:
    shape = FixedShape(slots=5, rows_of_a_slot=1 if rows == "one" else 3, place_rows=module.place_rows)
    return UnitCollator(module.collate_rows, rows, shape=shape if fixed else None)(drawn)


def clipped_sum(
    module: QueryGenerator, batch: UnitBatch, *, bound: float, fixed: bool
) -> tuple[dict[str, Tensor], Any]:
    engine = GhostClipping(module, max_grad_norm=bound, fixed_shapes=fixed)
    stats = engine.add(module.unit_loss(batch), batch.unit_ids, batch.mask)
    return engine.take(), stats


@pytest.mark.parametrize("bound", [1e-2, 1e3], ids=["clipped", "whole"])
@pytest.mark.parametrize("rows", ["one", "all"])
@pytest.mark.parametrize("drawn", sorted(DRAWN))
def test_what_is_filled_in_changes_no_sum(drawn: str, rows: str, bound: float) -> None:
    module = lively_generator()
    found = []
    for fixed in (False, True):
        batch = batch_of(module, DRAWN[drawn], rows=rows, fixed=fixed)
        found.append(clipped_sum(module, batch, bound=bound, fixed=fixed))
    (plain, stats), (filled, filled_stats) = found
    for name, total in plain.items():
        torch.testing.assert_close(filled[name], total, rtol=1e-5, atol=1e-6 * bound)
    assert int(stats.clipped) == int(filled_stats.clipped)
    units = len(stats.norms)
    torch.testing.assert_close(filled_stats.norms[:units], stats.norms, rtol=1e-5, atol=1e-6)
    assert not filled_stats.norms[units:].any()


class _Watch(TorchDispatchMode):
    """Note every operation that reads a value, or whose result has a size that follows from values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "equal.default", "is_nonzero")
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if by_mask or any(name in str(func) for name in reads):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    with _Watch() as watch:
        yield watch.seen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"config": SHAPE | {"tie_word_embeddings": False}},
        {"prompt_tuning": {"num_virtual_tokens": 3}},
    ],
    ids=["plain", "checkpointing", "untied", "prompt"],
)
def test_once_audited_no_batch_reads_a_value(settings: dict[str, Any]) -> None:
    module = generator(**settings)
    engine = GhostClipping(module, max_grad_norm=0.1, fixed_shapes=True)
    full, part = (batch_of(module, DRAWN[drawn], rows="one", fixed=True) for drawn in ("full", "three of five"))
    losses = module.unit_loss(full)  # counts rows on the host
    with watched():  # this one too, for under a dispatch mode autograd records another graph
        engine.add(losses, full.unit_ids, full.mask)
    losses = module.unit_loss(part)
    with watched() as seen:
        engine.add(losses, part.unit_ids, part.mask)
    assert seen == []
    plain = batch_of(module, DRAWN["three of five"], rows="one", fixed=False)
    ordinary = GhostClipping(module, max_grad_norm=0.1)
    ordinary.add(module.unit_loss(plain), plain.unit_ids, plain.mask)
    with watched() as seen:
        ordinary.add(module.unit_loss(plain), plain.unit_ids, plain.mask)
    assert seen != []  # the watch does see what is read elsewhere


def on(device: str, precision: str = "32-true") -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), precision=precision)


def data(rows_per_unit: str = "one", most: int | None = 3) -> CopyTask:
    found: Any = CopyTask("truncated_poisson")
    found.rows_per_unit, found.max_rows_per_unit = rows_per_unit, most
    return found


def test_shapes_are_fixed_where_the_device_compiles_or_on_request() -> None:
    module = generator()
    assert shape_of_batches(on("cpu"), module, data()) is None
    found = shape_of_batches(on("xla"), module, data())
    assert found is not None and (found.slots, found.rows_of_a_slot) == (16, 1)
    module.fixed_shapes = True
    found = shape_of_batches(on("cpu"), module, data("all"))
    assert found is not None and found.rows == 48
    module.fixed_shapes = False
    assert shape_of_batches(on("xla"), module, data()) is None
    with pytest.raises(ConfigurationError, match=r"datamodule.max_rows_per_unit"):
        shape_of_batches(on("xla"), generator(), data("all", None))


def test_on_xla_changing_shapes_and_low_precision_are_refused() -> None:
    refuse_changing_shapes(on("cpu", "bf16-mixed"), generator(fixed_shapes=False))
    refuse_changing_shapes(on("xla"), generator())
    for module in (generator(fixed_shapes=False), Regression(privacy=DPSGD(eps=1.0))):
        with pytest.raises(ConfigurationError, match=r"model.fixed_shapes"):
            refuse_changing_shapes(on("xla"), module)
    with pytest.raises(ConfigurationError, match=r"trainer.precision=bf16-true"):
        refuse_changing_shapes(on("xla", "bf16-true"), generator())


def test_an_engine_without_a_fixed_form_and_a_module_that_cannot_fill_up_are_refused(tmp_path: Path) -> None:
    module = generator(privacy=dp(tmp_path, engine="loop", noise_multiplier=1.5), fixed_shapes=True)
    with pytest.raises(ConfigurationError, match=r"privacy.engine=ghost"):
        fit(tmp_path / "loop", module, data(), steps=2)
    numbers = Regression(privacy=dp(tmp_path))
    numbers.fixed_shapes = True
    with pytest.raises(UnsupportedModelError, match="place_rows"):
        fit(tmp_path / "numbers", numbers)
