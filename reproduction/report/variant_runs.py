"""Training runs of several variants as data, from which the figures and tables of a comparison are made.

A *variant* is a way to train (Logit-DP, Naive-DP, Non-private). If the data are private, loss curves and confusion
matrices are computed from private rows, and no accountant counts them. These files are for research data; do not
publish them with a released model.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError, schema_problem
from lit_dpret.files import write_whole

SCHEMA = "lit-dpret/variant-run/1"
# The variant of encoders before their first step: the scores without any training, private or not.
UNTRAINED = "Untrained"


@dataclass(frozen=True, kw_only=True)
class VariantRun:
    """One run of one variant."""

    variant: str
    seed: int  # a variant has each seed once
    # At each observation; empty if not measured.
    steps: Sequence[int]  # optimizer steps taken, increasing
    losses: Sequence[float]  # training loss, per example
    held_out: Sequence[float] = ()  # the loss on images that were not trained on
    examples: Sequence[int] = ()  # seen
    seconds: Sequence[float] = ()  # wall time since the first step began, increasing
    # Root mean square change of the weights by the preceding step, divided by the learning rate: near 1 for the first
    # step of an Adam whose eps does not matter.
    moved: Sequence[float] = ()
    # At the last evaluation.
    metrics: Mapping[str, float] = field(default_factory=dict)
    confusion: Sequence[Sequence[float]] | None = None  # counts; row: true, column: predicted
    batch_size: int | None = None  # examples of a batch

    def __post_init__(self) -> None:
        name = f"The run {self.variant!r} of seed {self.seed}"
        for of, values in (("losses", self.losses), ("held_out", self.held_out), ("metrics", self.metrics.values())):
            if not all(map(math.isfinite, values)):
                raise DataError(f"{name} has {of} that are not finite: it diverged.")
        for of in ("steps", "examples", "seconds", "moved"):  # wrong in a file that a user merged or cut
            values = getattr(self, of)
            if (values or of == "steps") and len(values) != len(self.losses):
                raise DataError(f"{name} has {len(self.losses)} losses and {len(values)} {of}.")
            if of != "moved" and any(later <= earlier for earlier, later in itertools.pairwise(values)):
                raise DataError(f"{name} has {of} that do not increase.")


def by_variant(runs: Iterable[VariantRun]) -> dict[str, list[VariantRun]]:
    """Group runs by variant, in order of appearance."""
    groups: dict[str, list[VariantRun]] = {}
    for run in runs:
        group = groups.setdefault(run.variant, [])
        if any(other.seed == run.seed for other in group):
            raise DataError(f"The variant {run.variant!r} has seed {run.seed} twice.")
        group.append(run)
    if not groups:
        raise DataError("There are no runs to compare.")
    return groups


def sizes_of(runs: Iterable[VariantRun]) -> str:
    """State how many runs each variant has, their steps and batches; leave out encoders before any step."""
    alike: dict[tuple[str, int | None], list[int]] = {}
    for run in runs:
        if run.steps[-1] > 0:
            alike.setdefault((run.variant, run.batch_size), []).append(run.steps[-1])
    names: dict[str, list[str]] = {}
    for (variant, batch), steps in alike.items():
        ends = " to ".join(f"{count:,}" for count in sorted({min(steps), max(steps)}))
        of = "" if batch is None else f" of {batch:,} examples"
        size = f"{len(steps)} run{'s' * (len(steps) > 1)} of {ends} step{'s' * (max(steps) > 1)}{of}"
        names.setdefault(size, []).append(variant)
    return ". ".join(f"{size}: {'; '.join(variants)}" for size, variants in names.items())


def ties_of(runs: Sequence[VariantRun]) -> str:
    """State how tied votes of a k-NN were broken, and what another rule gives; empty if there were no votes."""
    if not all("tied_votes" in run.metrics for run in runs):
        return ""
    groups = by_variant(runs)

    def means(metric: str, form: str) -> str:
        found = {v: statistics.fmean(run.metrics[metric] for run in group) for v, group in groups.items()}
        return "; ".join(f"{variant} {value:{form}}" for variant, value in found.items())

    return (
        "k-NN: a tied vote goes to the nearest of the tied neighbours. "
        f"Share of votes that were tied: {means('tied_votes', '.0%')}. "
        f"Accuracy with ties to the lowest label instead: {means('lowest_accuracy', '.3f')}."
    )


def write_runs(runs: Iterable[VariantRun], path: Path) -> None:
    """Write one run per line, as JSON."""
    lines = [json.dumps({"schema": SCHEMA, **asdict(run)}, allow_nan=False) for run in runs]
    write_whole(path, "".join(line + "\n" for line in lines))


def read_runs(path: Path) -> list[VariantRun]:
    """Read the runs that `write_runs` wrote."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    runs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found: dict[str, Any] = json.loads(line)
            if problem := schema_problem(found.pop("schema", None), SCHEMA):
                raise DataError(problem)
            runs.append(VariantRun(**found))
        except (ValueError, AttributeError, TypeError, DataError) as error:
            raise DataError(f"{path} line {number} is not a run: {error}") from error
    return runs
