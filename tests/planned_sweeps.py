"""A planned and reserved sweep over a tiny log, and trials that start in it. Imported by path; not a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tiny_generator import generator
from tiny_tasks import parts, trainer

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.sweeps import SweepFolder
from lit_dpret.tasks import Fit, Sweep, TrialOf
from lit_dpret.tasks.parts import ComposedRun, Parts

STEPS = 3


def trial_parts(
    folder: Path,
    run_dir: Path,
    *,
    callbacks: Callable[[Path], list[Any]] | None = None,
    trial_of: Path | None = None,
    start: Path | None = None,
    settings: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **more: Any,
) -> Parts:
    """Return the parts of a training of a few steps, as a trial or as the plan of one."""
    chosen: dict[str, Any] = {"eps": 8.0, "noise_multiplier": 4.0, "secret_file": folder / "secret"}
    extra = callbacks or (lambda folder: [PrivacyCard(run_dir=folder)])
    plain = parts(folder).make_datamodule
    made: dict[str, Any] = {
        "run_dir": run_dir,
        "make_datamodule": partial(plain, **{"expected_batch_size": 8, "physical_batch_size": 8} | (data or {})),
        "make_module": partial(generator, seed=0),
        "make_trainer": lambda **given: trainer(**{"max_steps": STEPS} | given),
        "make_callbacks": lambda: [
            PrivacyAccountant(run_dir=run_dir, trial_of=trial_of, init_from=start), *extra(run_dir)
        ],
    }  # fmt: skip
    return parts(folder, partial(DPSGD, **chosen | (settings or {})), **made | more)


def planned(
    folder: Path, *, task: Any = None, total_eps: float | None = 100.0, metric: str | None = None, trials: int = 2,
    metric_data: str = "unknown", ledger: str = "data.jsonl", described: str = "",
    vary: Callable[[str], dict[str, Any]] = lambda setting: {}, **given: Any,
) -> SweepFolder:  # fmt: skip
    """Plan a sweep of trials and reserve their cost, as ``task=sweep task.start=false`` does.

    The trials differ only by what ``vary`` returns for their setting ``x=0``, ``x=1`` and so on.
    """
    content: dict[str, Any] = {"parameters": {"x": {"values": list(range(trials))}}}
    if metric is not None:
        content["metric"] = {"name": metric}
    draft = folder / f"{threading.get_ident()}.yaml"
    draft.write_text(yaml.safe_dump(content), encoding="utf-8")
    draft.replace(folder / "sweep.yaml")  # atomic: another thread may be reading it

    def make_run(overrides: Sequence[str]) -> ComposedRun:
        varied = vary(overrides[-1])
        made = trial_parts(folder, folder / "sweep", **given | varied)
        return ComposedRun(lambda groups: f"{described}{varied or ''}", lambda: (task or Fit(min_free_mb=1), made))

    Sweep(
        file=folder / "sweep.yaml", dataset_ledger=folder / ledger, total_eps=total_eps, metric_data=metric_data,
        start=False, min_free_mb=1,
    ).run(parts(folder, run_dir=folder / "sweep", make_run=make_run))  # fmt: skip
    return SweepFolder.read(folder / "sweep")


def begun(folder: Path, name: str = "one", *, task: Any = None, **given: Any) -> Path:
    """Run one trial of the sweep to its end; return its folder."""
    run_dir = folder / "sweep" / "trials" / name
    (task or Fit(min_free_mb=1)).run(trial_parts(folder, run_dir, trial_of=folder / "sweep", **given))
    return run_dir


def joined(folder: Path, *, task: Any = None, name: str = "one", **given: Any) -> TrialOf:
    """Return the check that the command line makes before a trial of the sweep starts."""
    run_dir = folder / "sweep" / "trials" / name
    made = trial_parts(folder, run_dir, trial_of=folder / "sweep", **given)
    return TrialOf(folder / "sweep", task or Fit(min_free_mb=1), made)
