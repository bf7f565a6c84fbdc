"""A histogram of private units over public bins, with Gaussian noise, charged like every other release.

A unit with m counts moves it by C = m (``replace_one``: m / sqrt(2), as accountants double it); with at most one count
per bin, by sqrt(m). docs/derivations.md derives these. Several may be released in turn over bins that the earlier ones
chose: that is adaptive composition. Bins must be public: boundaries chosen by looking at private queries would reveal
more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError
from lit_dpret.files import read_json
from lit_dpret.privacy.accounting.accountant import Accountant
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, merge
from lit_dpret.privacy.budget import (
    AccountantName,
    Neighbours,
    NoiseName,
    PrivacyBudget,
    show_epsilon,
    with_rounding_paid,
)
from lit_dpret.privacy.ledger.private_run import PrivateRun, sum_tag
from lit_dpret.privacy.ledger.run_ledger import charged_releases
from lit_dpret.privacy.noise import noise_source
from lit_dpret.privacy.plan import EVOLUTION, HISTOGRAM, PlainSamplingRequest, PrivacyPlan
from lit_dpret.settings import require_number, require_whole

HISTOGRAM_NAME = "histogram.json"
SCHEMA = "lit-dpret/private-histogram/1"


def histogram_sensitivity(max_count: int, neighbours: Neighbours, *, distinct: bool = False) -> float:
    """Return the bound C (see the module) for at most ``max_count`` counts per unit, distinct if ``distinct``."""
    require_whole("task", {"max_count": max_count}, 1)
    length = math.sqrt(max_count) if distinct else float(max_count)
    return length / math.sqrt(2) if neighbours == "replace_one" else length


def histogram_plan(
    budget: PrivacyBudget,
    *,
    noise_multiplier: float,
    max_count: int = 1,
    accountant: AccountantName = "pld",
    n_public: int | None = None,
    max_units_per_user: int | None = None,
    noise: NoiseName = "gaussian",
) -> PrivacyPlan:
    """Return the plan of one histogram."""
    require_number("task", {"noise_multiplier": noise_multiplier})
    if n_public is not None:
        budget.refuse_large_delta(n_public)
    bound = histogram_sensitivity(max_count, budget.neighbours)
    release = GaussianRelease(noise_multiplier=noise_multiplier, law=FullBatch(), label=HISTOGRAM)
    counter = Accountant(delta=budget.delta, neighbours=budget.neighbours, name=accountant)
    if (cost := counter.epsilon([release])) > budget.eps:
        raise BudgetExceededError(
            f"task.noise_multiplier={noise_multiplier:g} costs epsilon {show_epsilon(cost)} for the histogram alone, "
            f"more than privacy.eps={budget.eps:g}. Raise it, or the budget."
        )
    return PrivacyPlan(
        budget=budget, law=FullBatch(), steps=1, noise_multiplier=noise_multiplier, max_grad_norm=bound,
        sensitivity=with_rounding_paid(bound, noise), denominator=1.0, physical_batch_size=1, accountant=accountant,
        engine="counting", mode=HISTOGRAM, n_public=n_public, max_units_per_user=max_units_per_user, noise=noise,
    )  # fmt: skip


def votes_plan(
    budget: PrivacyBudget,
    *,
    releases: int,
    max_votes: int = 1,
    noise_multiplier: float | None = None,
    accountant: AccountantName = "pld",
    n_public: int | None = None,
    max_units_per_user: int | None = None,
    noise: NoiseName = "gaussian",
) -> PrivacyPlan:
    """Return the plan of ``releases`` histograms, with at most ``max_votes`` distinct votes per unit in each."""
    plan = PrivacyPlan.build(
        budget,
        # The batch size is the divisor in `build`, which a histogram does not use.
        PlainSamplingRequest(sampling="full_batch", expected_batch_size=1, physical_batch_size=1),
        steps=releases,
        max_grad_norm=histogram_sensitivity(max_votes, budget.neighbours, distinct=True),
        n_public=n_public,
        noise_multiplier=noise_multiplier,
        accountant=accountant,
        engine="counting",
        mode=EVOLUTION,
        max_units_per_user=max_units_per_user,
        noise=noise,
    )
    return replace(plan, denominator=1.0)


def release_histogram(
    run: PrivateRun,
    plan: PrivacyPlan,
    contributions: Iterable[Sequence[int]],
    *,
    bins: int,
    max_count: int,
    spec: str,
    step: int = 0,
    grant: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Count, announce in the ledger, add noise, and confirm; the noised counts are integers, ``(bins,)``.

    The order within each unit of ``contributions`` must depend only on that unit. ``spec`` is a fingerprint of the
    bins: different bins never share noise. ``grant`` is called before announcing a release that the ledger does not
    hold yet.

    Guarantees:
        - No unit adds more than ``max_count`` counts, and under a plan of votes no more than one to a bin, whatever
          ``contributions`` holds.
        - The ledger on disk announces the release before its noise is drawn.
        - Repeated on the same counts, it gives the same numbers and is charged once. On other counts or bins it is a
          separate release with fresh noise, and is charged separately.
        - A release that the plan's budget does not cover, in addition to those in the ledger, is not announced.
    """
    distinct = plan.mode == EVOLUTION  # several votes of one unit for one candidate count once
    bound = histogram_sensitivity(max_count, plan.budget.neighbours, distinct=distinct)
    if plan.sensitivity < with_rounding_paid(bound, plan.noise):
        raise ConfigurationError(
            f"max_count={max_count} is more than the plan's sensitivity {plan.sensitivity:g} covers."
        )
    # Cut here and not by the caller, because the sensitivity depends on it.
    counts = exact_counts(contributions, bins=bins, max_count=max_count, distinct=distinct)
    # The bins are part of the tag: the same counts over other bins must not share noise.
    tag = sum_tag(run.stream, {f"{HISTOGRAM} {spec}": counts})
    known = run.intents.get((run.attempt, step))
    if known is not None and known.get("sum_tag") != tag:
        run.attempt += 1
        known = None
    attempt = run.attempt
    key = (attempt, step)
    if known is None:
        release = GaussianRelease(noise_multiplier=plan.noise_multiplier, law=plan.law, label=plan.mode)
        # Before the intent, so that a refusal leaves no charge.
        _require_budget(run, plan, release)
        grant()
        run.intents[key] = run.ledger.announce(key, release, sum_tag=tag)
    else:
        run.ledger.append("replay", attempt=attempt, step=step)
    source = noise_source(plan.noise, run.stream, noise_multiplier=plan.noise_multiplier, coordinates=bins)
    # Rounding after the noise is post-processing.
    noised: np.ndarray = np.rint(
        source.noised(counts, std=plan.noise_std, attempt=attempt, step=step, parameter=HISTOGRAM, salt=tag).numpy()
    )
    if key not in run.releases:
        run.releases[key] = run.ledger.confirm(
            key,
            noise_std=plan.noise_std,
            sensitivity=plan.sensitivity,
            denominator=plan.denominator,
            law=plan.law,
            update_hash=hashlib.sha256(noised.tobytes()).hexdigest(),
        )
    return noised


def exact_counts(
    contributions: Iterable[Sequence[int]], *, bins: int, max_count: int, distinct: bool = False
) -> torch.Tensor:
    """Return the counts without noise, at most ``max_count`` per unit; private, shape ``(bins,)``."""
    # Integers up to 2^53 are exact in float64.
    counts = torch.zeros(bins, dtype=torch.float64)
    for unit in contributions:
        for place in list(dict.fromkeys(unit) if distinct else unit)[:max_count]:
            counts[place] += 1
    return counts


def _require_budget(run: PrivateRun, plan: PrivacyPlan, release: GaussianRelease) -> None:
    budget = plan.budget
    counter = Accountant(delta=budget.delta, neighbours=budget.neighbours, name=plan.accountant)
    after = counter.epsilon(merge([*charged_releases(run.ledger.records), release]))
    if after > budget.eps:
        raise BudgetExceededError(
            f"One more release would bring this run to epsilon {show_epsilon(after)}, over privacy.eps={budget.eps:g}: "
            "an announced release cannot be repeated bit by bit (other data, candidates, secret or machine), so it "
            "would be charged again. Resume with the original data and machine, or start another run in another "
            "hydra.run.dir."
        )


def shares(counts: np.ndarray) -> np.ndarray:
    """Return noised counts as a distribution: negative counts become zero, and the rest is normalised."""
    # Post-processing of what was released, so it costs nothing.
    positive = np.maximum(counts, 0.0)
    if positive.sum() == 0:
        raise DataError(
            "No bin of the histogram is above zero: its noise hides everything. Use fewer bins or less noise."
        )
    found: np.ndarray = positive / positive.sum()
    return found


@dataclass(frozen=True, kw_only=True)
class ReleasedHistogram:
    """A released histogram, as stored in its file."""

    names: tuple[str, ...]  # of the bins
    counts: tuple[float, ...]  # noised counts, as released; some may be below zero
    bins: Mapping[str, Any]  # how texts are put into bins; public
    noise_std: float  # standard deviation of the noise on each count
    max_count: int  # the maximum number of counts that one unit added

    @property
    def target(self) -> np.ndarray:
        return shares(np.array(self.counts))

    def write(self, folder: Path) -> Path:
        facts = {
            "schema": SCHEMA,
            "names": list(self.names),
            "counts": list(self.counts),
            "noise_std": self.noise_std,
            "max_count": self.max_count,
            "bins": dict(self.bins),
        }
        path = folder / HISTOGRAM_NAME
        # Renamed once it is complete: after a kill here, a run reads the whole file or does not find it.
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return beside.replace(path)

    @classmethod
    def read(cls, folder: Path) -> ReleasedHistogram:
        path = folder / HISTOGRAM_NAME
        try:
            facts = read_json(path, SCHEMA)
            return cls(
                names=tuple(map(str, facts["names"])), counts=tuple(map(float, facts["counts"])),
                bins=dict(facts["bins"]), noise_std=float(facts["noise_std"]), max_count=int(facts["max_count"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a histogram from task=histogram ({error}).") from error
