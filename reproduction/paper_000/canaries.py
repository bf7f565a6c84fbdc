"""Table 7: planted secrets, from a canary study that is run here or was run earlier."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.report.canary_table import POOLED, SCHEMA, SHORT
from lit_dpret.report.table import interval_of
from lit_dpret.tasks.parts import Parts
from reproduction.canary_study import NAME
from reproduction.paper_000.study import Trainings
from reproduction.paper_000.table import PaperRow, PaperTable, named, shown
from reproduction.published import MAIN, PAPER_000

TABLE = "table_7_canaries"
_COPIES = (10, 100)


def tables(
    study: Trainings, make_canaries: Callable[..., Any], *, finished: Path | None, train_queries: int | None
) -> list[PaperTable]:
    """Return the paper's rows, for each side on which the secret is planted."""
    facts = read(finished) if finished is not None else _run(study, make_canaries, train_queries)
    models = dict.fromkeys((row["model"], row["side"]) for row in facts["rows"])
    rows = [_row(model, side, facts["rows"]) for model, side in models]
    told = (
        f"{facts['trainings']} trainings with each budget, {facts['units']} units of which "
        f"{facts['planted_units']} are canaries: {facts['command']}."
    )
    return [PaperTable.of(TABLE, rows, [told])]


def check(
    study: Trainings, make_canaries: Callable[..., Any], *, finished: Path | None, train_queries: int | None
) -> None:
    """Refuse what would stop `tables` after hours of other trainings; the arguments are those of `tables`."""
    if finished is not None:
        read(finished)
        return
    make_canaries()
    mode, data = study.parts.make_privacy(), study.parts.make_datamodule(max_train_queries=train_queries)
    data.use_unit(mode.unit, mode.neighbours)
    data.setup("fit")
    data.train_units()


def _run(study: Trainings, make: Callable[..., Any], train_queries: int | None) -> Any:
    def work(parts: Parts) -> Any:
        data = partial(parts.make_datamodule, max_train_queries=train_queries)
        make().run(replace(parts, make_datamodule=data))
        return read(parts.run_dir)

    return study.result("canaries", [make, train_queries], work)


def read(folder: Path) -> Any:
    """Read the results of a finished study."""
    path = folder / f"{NAME}.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"task.canaries_from={folder} holds no readable {path.name}. Name the folder of a finished "
            "experiment=canaries, or set it to null to run one."
        ) from error
    if facts.get("schema") != SCHEMA:
        raise DataError(f"task.canaries_from={folder}: {path.name} has schema {facts.get('schema')!r}, not {SCHEMA}.")
    return facts


def private_trainings(folder: Path) -> int:
    """Return how many trainings of the finished study in ``folder`` spent part of a budget."""
    facts = read(folder)
    return int(facts["trainings"]) * len({row["model"] for row in facts["rows"] if row["limits"]["eps"] is not None})


def _row(model: str, side: str, found: Any) -> PaperRow:
    pooled = {row["copies"]: row for row in found if (row["model"], row["side"], row["kind"]) == (model, side, POOLED)}
    eps = None if model == "no privacy" else float(model.removeprefix("eps = "))
    ours, paper = {}, {}
    for copies in _COPIES:
        if copies in pooled:
            for what, key in (("rank", "mean_rank"), ("leaked", "leaked")):
                ours[f"{what}_{copies}"] = interval_of(pooled[copies][key])
    if side == "query":
        for row in PAPER_000["table_7"]:
            if row["epsilon"] == eps:
                paper[f"rank_{row['copies']}"], paper[f"leaked_{row['copies']}"] = row["rank"], row["leaked"]
    limits = next(iter(pooled.values()))["limits"]
    promise = "no guarantee"
    if limits["eps"] is not None:
        bound = f"epsilon = {show_epsilon(limits['eps'])} at delta = {show_delta(limits['delta'])}"
        promise = f"{bound} for one unit of the study's claim"
    beside = named((MAIN, eps)) if paper else ""
    return PaperRow(
        system=f"secret in {SHORT[side]}", epsilon=shown(eps), metrics=ours, paper=paper, beside=beside, privacy=promise
    )
