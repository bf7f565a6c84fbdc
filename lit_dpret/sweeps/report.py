"""The report of a sweep: results and cost of its trials, as a table, a CSV file and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.card import read_card
from lit_dpret.errors import LitDpretError
from lit_dpret.files import write_whole
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.dataset_file import Charge, EarlierRun, compose_across_runs, composed
from lit_dpret.privacy.ledger.dataset_ledger import one_release
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, noise_keys, plans_of, recorded_start
from lit_dpret.report.figures import can_draw, draw_sweep
from lit_dpret.report.page import render
from lit_dpret.report.table import Table, plain
from lit_dpret.sweeps.folder import SweepFolder

TABLE_CSV, TABLE_MD, FIGURE, REPORT = "sweep.csv", "sweep.md", "sweep.png", "sweep_report.json"


@dataclass(frozen=True)
class Report:
    """The findings of a sweep."""

    # A row for each finished trial: ``trial``, its settings, ``epsilon`` on its card, and its metrics.
    rows: list[dict[str, Any]]
    # The joint epsilon that all trials spent, failed ones included; None if nothing private was spent.
    epsilon: float | None
    best: str | None  # the best trial by the metric of the sweep; None without a metric
    text: str  # the report as text


def write_report(sweep: SweepFolder) -> Report:
    """Write ``sweep.csv``, ``sweep.md``, ``sweep_report.json`` and, with matplotlib, ``sweep.png``.

    Scores may be measures of private queries, so only the owner can read the files.
    """
    rows: list[dict[str, Any]] = [
        {"trial": name, "settings": dict(setting.partition("=")[::2] for setting in found["settings"]),
         "epsilon": claimed_epsilon(sweep.trial_folder(name)), "metrics": dict(found["metrics"])}
        for name, found in sweep.results().items()
    ]  # fmt: skip
    epsilon, how = _spent(sweep)
    best = _best(sweep, rows)
    text = _told(sweep, rows, epsilon, how, best)
    facts = {"sweep": sweep.describe(), "rows": rows, "epsilon": epsilon, "composed_by": how, "best": best}
    write_whole(sweep.folder / TABLE_CSV, _csv(rows), owner_only=True)
    write_whole(sweep.folder / TABLE_MD, text + "\n", owner_only=True)
    write_whole(sweep.folder / REPORT, json.dumps(_finite(facts), indent=2) + "\n", owner_only=True)
    metric = sweep.facts["metric"].get("name")
    varied = differing([row["settings"] for row in rows])
    if metric is not None and len(rows) > 1 and varied and can_draw() and any(metric in row["metrics"] for row in rows):
        draw_sweep([row | row["settings"] for row in rows], metric=metric, varied=varied, path=sweep.folder / FIGURE)
    return Report(rows, epsilon, best, text)


def claimed_epsilon(folder: Path) -> float | None:
    """Return epsilon from the card in a run's folder; None for a run of several trainings with several cards."""
    try:
        claim = read_card(folder)["claim"]
    except LitDpretError:
        return None
    return float(claim["epsilon"]) if claim["guarantee"] == "dp" else math.inf


def _spent(sweep: SweepFolder) -> tuple[float | None, str | None]:
    """Return the composed charges of the trials' ledgers; for a missing ledger, use the charge in the data set's
    ledger.
    """
    budget, ledger = sweep.facts["budget"], sweep.ledger()
    if budget is None:
        return None, None
    charges, found = [], set()
    for path in sorted((sweep.folder / "trials").rglob(LEDGER_NAME)):
        records = PrivacyLedger.read(path).records
        if not noise_keys(records):
            continue  # refused before its first step
        found |= {str(plan["run_id"]) for plan in plans_of(records)}
        if any(plan["plan"] is not None for plan in plans_of(records)):
            charges.append(Charge.of(owed_releases(records), EarlierRun.of_start(recorded_start(records))))
    if ledger is not None and ledger.path.exists():  # a deleted folder has still been spent
        charges += [charge for run, charge in ledger.charges_of(sweep.id).items() if run not in found]
    delta, neighbours, accountant = budget["delta"], budget["neighbours"], sweep.facts["accountant"]
    return compose_across_runs(composed(charges), delta=delta, neighbours=neighbours, accountant=accountant)


def _best(sweep: SweepFolder, rows: Sequence[Mapping[str, Any]]) -> str | None:
    metric = sweep.facts["metric"]
    judged = [row for row in rows if metric and not math.isnan(row["metrics"].get(metric["name"], math.nan))]
    if not judged:
        return None
    sign = 1.0 if metric["goal"] == "minimize" else -1.0
    best = min(judged, key=lambda row: (sign * row["metrics"][metric["name"]], row["trial"]))
    return str(best["trial"])


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ between rows; all names if there is only one row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len(rows) == 1 or len({str(row.get(name)) for row in rows}) > 1]


def _told(
    sweep: SweepFolder, rows: Sequence[Mapping[str, Any]], epsilon: float | None, how: str | None, best: str | None
) -> str:
    metric, facts = sweep.facts["metric"].get("name"), sweep.facts
    names = [*differing([row["settings"] for row in rows]), "epsilon", *([metric] if metric else [])]
    cells = []
    for row in rows:
        shown = {
            **row["metrics"],
            **row["settings"],
            "epsilon": "several" if row["epsilon"] is None else show_epsilon(row["epsilon"]),
        }
        name = f"{row['trial']} (best)" if row["trial"] == best else row["trial"]
        cells.append([name, *(plain(shown.get(column)) for column in names)])
    claims = {row["epsilon"] for row in rows}
    proved = sorted(claims - {None, math.inf})
    told = {
        "trials": Table(["trial", *names], cells).markdown(),
        "done": len(rows),
        "epsilon": epsilon,
        "how": how,
        "best": best,
        "metric": metric,
        "proved": proved,
        "released": epsilon is None and one_release(facts) and len(claims) == len(proved) == 1,
        "bare": math.inf in claims or facts.get("without_privacy") != 0,
    }
    return render("sweep.md", {"sweep": facts, **told}).rstrip()


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    settings = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    metrics = sorted({name for row in rows for name in row["metrics"]})
    lines = [
        [row["trial"], *map(row["settings"].get, settings), row["epsilon"], *map(row["metrics"].get, metrics)]
        for row in rows
    ]
    return Table(["trial", *settings, "epsilon", *metrics], lines).csv()


def _finite(value: Any) -> Any:
    """Replace infinities by null: JSON has no value for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value
