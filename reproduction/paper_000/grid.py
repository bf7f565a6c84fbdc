"""Table 1: the search for settings of the private generator, by BLEU on validation queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.statistics import Interval
from lit_dpret.tasks.fit_scored import BLEU, FitScored
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks
from reproduction.paper_000.study import LeftOut, Trainings
from reproduction.paper_000.table import PaperRow, PaperTable, shown
from reproduction.published import PAPER_000


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The points of a search: all combinations of these values."""

    lr: Sequence[float] = (0.001,)  # learning rates
    max_grad_norm: Sequence[float] = (0.1,)  # clip bounds
    batch: Sequence[int] = (256,)  # average number of units in a logical step
    epochs: Sequence[float] = (1.0,)  # passes over the train queries; may be fractions
    eps: float = 3.0  # budget of each point
    split: str = "dev"  # the validation split
    max_passages: int | None = 500  # score on a sample of this many of its passages

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "batch", "epochs"):
            values = getattr(self, name)
            if not values or not all(value > 0 for value in values):
                raise ConfigurationError(f"task.grid.{name}={list(values)} must be one or more positive numbers.")
        if not self.eps > 0:
            raise ConfigurationError(f"task.grid.eps={self.eps} must be positive.")

    @property
    def points(self) -> list[tuple[float, float, int, float]]:
        return list(product(self.lr, self.max_grad_norm, self.batch, self.epochs))

    @property
    def names(self) -> list[str]:
        return [name_of(point) for point in self.points]


def name_of(point: tuple[float, float, int, float]) -> str:
    """Return the folder in which a point is trained, named by learning rate, clip bound, batch and epochs."""
    lr, clip, batch, epochs = point
    return f"grid-lr{lr:g}-clip{clip:g}-batch{batch}-epochs{epochs:g}"


def tables(study: Trainings, grid: Grid) -> list[PaperTable]:
    """Return a row for each point, the best first."""
    if not study.originals_are_public:
        raise LeftOut(
            "a search scores on validation queries, but task.originals_are_public=false. task=sweep with "
            "task.metric_data=private searches and states the cost of the choice."
        )
    found = {point: _point(study, grid, point) for point in grid.points}
    best = max(found, key=lambda point: found[point][0])
    rows = [
        PaperRow(
            system=f"rate {lr:g}, clip {clip:g}, batch {batch}, {epochs:g} epochs",
            epsilon=shown(grid.eps),
            metrics={"bleu": Interval(bleu / 100, float("nan"), float("nan"))},
            privacy=privacy,
            note="best of these" if (lr, clip, batch, epochs) == best else "",
        )
        for (lr, clip, batch, epochs), (bleu, privacy) in sorted(found.items(), key=lambda item: -item[1][0])
    ]
    theirs = "; ".join(
        f"{name} {', '.join(f'{v:g}' for v in found['searched'])} (best {found['best']:g})"
        for name, found in PAPER_000["table_1"].items()
    )
    notes = [
        f"The paper's grid: {theirs}. It prints no BLEU of the points.",
        f"{study.described(study.main)}; the paper searched with T5-Small. The public-only systems "
        "have none of these settings.",
    ]
    facts: dict[str, Any] = {"points": len(rows), "passages": grid.max_passages or "all", "split": grid.split}
    return [PaperTable.of("table_1_grid", rows, notes, **facts)]


def _point(study: Trainings, grid: Grid, point: tuple[float, float, int, float]) -> tuple[float, str]:
    lr, clip, batch, epochs = point
    base, source = study.base, study.source(study.main)
    optimizer = replace(base.generator.keywords["optimizer"], lr=lr)  # type: ignore[attr-defined]
    make = partial(base.generator, pretrained=source, optimizer=optimizer)
    name = name_of(point)

    def privacy() -> Any:
        mode: Any = study.privacy(grid.eps)()
        mode.max_grad_norm = clip
        return mode

    def work(parts: Parts) -> Any:
        size: dict[str, Any] = {"expected_batch_size": batch, "physical_batch_size": base.generator_physical_batch}
        data = parts.read_data(**size)
        mode = privacy()
        data.use_unit(mode.unit, mode.neighbours)
        steps = max(1, round(epochs * data.n_units / batch))
        task = FitScored(data="private", split=grid.split, max_passages=grid.max_passages)
        how: dict[str, Any] = {"resume": parts.resume, "label": name}
        how |= {"tuning_data": base.tuning_data, "tuning_note": base.tuning_note}
        own = replace(
            parts, make_privacy=lambda **_: privacy(), make_module=make, make_canaries=lambda: None,
            make_datamodule=partial(parts.make_datamodule, **size),
            make_trainer=partial(parts.make_trainer, max_steps=steps),
            make_callbacks=lambda: stage_callbacks(parts.run_dir, **how),
        )  # fmt: skip
        return [task.run(own)[BLEU], privacy_line(read_card(parts.run_dir))]

    settings = [grid.eps, grid.split, grid.max_passages, point, study.sizes[study.main],
                str(base.generator), base.generator_physical_batch]  # fmt: skip
    bleu, line = study.result(name, settings, work)
    return float(bleu), str(line)
