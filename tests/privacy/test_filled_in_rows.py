"""Rows that fill batches of fixed shape up: no unit has a say in another one's slot by them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from half_precision import STILL, Log, largest_ratio
from stand_ins import Regression

from lit_dpret.privacy.batches import Draw, FixedShape, copied_rows
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.modes import DPSGD


class Distances(Regression):
    """The loss of q0 is a distance of zero, where the derivative of a root is not finite: its unit is dropped."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Any]:
        numbers = torch.tensor([[len(row.query), len(row.passage), row.query.count("a"), 1.0] for row in rows])
        return {"inputs": numbers.sin(), "apart": torch.tensor([float(row.query_id != "q0") for row in rows])}

    def per_row_loss(self, rows: dict[str, Any]) -> torch.Tensor:
        return (self.net(rows["inputs"]).squeeze(-1).float() * rows["apart"]).square().sqrt()


class Placing(Distances):
    """It fills up by itself, and takes the first row of the batch for that."""

    def place_rows(self, features: Any, places: Sequence[int], rows: int) -> Any:
        of = torch.zeros(rows, dtype=torch.long)
        of[list(places)] = torch.arange(len(places))
        return {name: value[of] for name, value in features.items()}


class Compiled(Placing):
    """Its engine takes all rows of a slot, filled in or not."""

    fixed_shapes = True


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("make", "engine", "unit"),
    [
        (Distances, "ghost", "query"), (Distances, "vmap", "query"), (Distances, "opacus", "query"),
        (Distances, "loop", "query"), (Distances, "ghost", "user"), (Placing, "ghost", "query"),
        (Compiled, "ghost", "query"),
    ],
)  # fmt: skip
def test_a_row_without_a_finite_gradient_drops_its_own_unit_alone(
    tmp_path: Path, make: type[Distances], engine: str, unit: str, precision: str
) -> None:
    """Each unit has room for another row, and the rows that fill it up are nobody else's."""

    def data(**settings: Any) -> Any:
        return Log(12, rows_per_unit="all", max_rows_per_unit=2, **settings)

    def build() -> Any:
        torch.manual_seed(0)
        mode = DPSGD(eps=30.0, delta=1e-3, max_grad_norm=1e-4, noise_multiplier=20.0, noise_seed=7,
                     secret_file=tmp_path / "secret", engine=engine, unit=unit)  # fmt: skip
        return make(privacy=mode, optimizer=STILL, dropout=0.0)

    assert largest_ratio(tmp_path, build, (0,), data=data, precision=precision) <= 1e-5


def test_what_fills_a_slot_up_is_its_units_own_and_charged_to_nobody() -> None:
    shape = FixedShape(slots=4, rows_of_a_slot=3, place_rows=copied_rows)
    collate = UnitCollator(lambda rows: {"n": torch.tensor(rows)}, "all", shape=shape)
    batch = collate([(Draw(unit, 0, 0, True), rows) for unit, rows in enumerate([[5, 6], [], [7]])])
    assert batch.rows["n"].view(4, 3)[[0, 2]].tolist() == [[5, 6, 5], [7, 7, 7]]
    owners, real = batch.owners_of_rows()
    assert owners[batch.data_rows].tolist() == [0, 0, 2] and not real[owners[~batch.data_rows]].any()
    assert real[:4].tolist() == batch.mask.tolist() == [True, True, True, False]
