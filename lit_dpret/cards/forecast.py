"""The final cost of a plan, computed before it starts.

An epsilon belongs to one sampling law and one neighbouring relation. Under another, the same noise gives more or less,
or no proved number at all. A forecast therefore compares the stated epsilon with what other accountants, relations and
sampling laws would give for the same noise, and with what an attacker could do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
from scipy import stats

from lit_dpret.audit.statistics.one_run import audit_power
from lit_dpret.cards.knee import knee_table
from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.accounting.accountant import calibrate_noise, truncation_delta
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.comparisons import epsilon_if_shuffled
from lit_dpret.privacy.accounting.composition import SUPPORTED, check_supported, epsilon, rough_epsilon, simplest_law
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import (
    LARGE_DELTA,
    LARGE_EPSILON,
    USUAL_DELTA,
    AccountantName,
    Neighbours,
    large_delta,
    large_epsilon,
    show_epsilon,
)
from lit_dpret.privacy.plan import PrivacyPlan

OTHER_BOUND = "the loss couples units, and under this law and relation one of them moves the sum further than planned"
"""The reason why a plan's noise has no epsilon under another law or relation."""

UNITS = (1, 2, 5, 10)
"""The numbers of units per user in the rows of the user-level table."""

LARGE_RATE = 0.5

# The curve of shuffled passes is a staircase, and costs nothing to compute.
_CURVE_POINTS, _STAIRS = 14, 80


def _batch(plan: PrivacyPlan) -> float:
    """Return the expected batch size in units; with a coupled loss, the denominator counts something else."""
    coupling = plan.coupling
    return plan.denominator if coupling is None else coupling.expected * coupling.sub_batches


def _drawn_by(law: SamplingLaw, plan: PrivacyPlan, steps: int | None = None) -> list[GaussianRelease]:
    """Return the planned steps, or the first ``steps`` of them, as if drawn by ``law``."""
    return [GaussianRelease(noise_multiplier=plan.noise_multiplier, law=law, count=steps or plan.steps)]


def _laws(plan: PrivacyPlan) -> list[SamplingLaw]:
    """Return the planned law, then the others with the same expected batch size."""
    law, found, n = simplest_law(plan.law), [plan.law], plan.n_public
    if isinstance(law, FullBatch) or n is None:
        return found + ([Poisson(sample_rate=law.sample_rate)] if isinstance(law, TruncatedPoisson) else [])
    rate = law.sample_rate if isinstance(law, (Poisson, TruncatedPoisson)) else _batch(plan) / n
    size = max(1, min(n, round(rate * n)))
    # Six standard deviations above the mean: batches are cut so rarely that it costs almost nothing.
    cap = min(n, math.ceil(size + 6 * math.sqrt(size)))
    found += [
        Poisson(sample_rate=rate),
        TruncatedPoisson(sample_rate=rate, cap=cap, n=n),
        FixedSize(batch_size=size, n=n),
        Shuffle(batch_size=size, n=n),
    ]
    first: dict[str, SamplingLaw] = {}
    for other in found:
        first.setdefault(other.kind, other)
    return list(first.values())


def epsilon_matrix(plan: PrivacyPlan, heartbeat: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return the epsilon of the planned noise for every law and relation, each by the tightest accountant.

    ``replace_one`` swaps one unit for another at the same noise; ``shuffle`` claims no amplification. A combination
    has no number but a ``why`` if no accountant supports it, or if a coupled loss has another sensitivity under it.
    """
    rows = []
    for law in _laws(plan):
        for relation in get_args(Neighbours):
            rows.append(
                {
                    "sampling": law.kind,
                    "law": law.describe(),
                    "neighbours": relation,
                    "amplified": not isinstance(simplest_law(law), (Shuffle, FullBatch)),
                    **_cell(plan, law, relation),
                }
            )
            heartbeat()
    return rows


def _cell(plan: PrivacyPlan, law: SamplingLaw, relation: Neighbours) -> dict[str, Any]:
    accountants: tuple[AccountantName, ...] = ("pld", "rdp", "prv")
    judges = [name for name in accountants if relation in SUPPORTED[name].get(type(simplest_law(law)), ())]
    if not judges:
        try:
            check_supported(law, "pld", relation)
        except UnsupportedAccountingError as error:
            return {"epsilon": None, "accountant": None, "why": str(error)}
    if not plan.holds_under(law, relation):
        return {"epsilon": None, "accountant": None, "why": OTHER_BOUND}
    value = epsilon(_drawn_by(law, plan), delta=plan.budget.delta, neighbours=relation, accountant=judges[0])
    return {"accountant": judges[0], **_number(value)}


def user_levels(plan: PrivacyPlan, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the epsilon of the planned noise for a person with 1, 2, 5 or 10 units, by law.

    A truncated law whose cap was chosen for one unit may guarantee nothing for several, because a truncated batch can
    reveal all of them. ``roomy_cap`` is then a cap that truncates so rarely that it does not matter, in its own column.
    """
    laws = _laws(plan)
    roomy = _roomy(plan)
    if roomy is not None:
        # Truncated so rarely, it gives almost the same numbers as Poisson sampling.
        laws = [laws[0], roomy, *(law for law in laws[1:] if not isinstance(law, Poisson))]
    columns = []
    for law in laws:
        rows = []
        for units in UNITS:
            rows.append({"units": units, **_level(plan, law, units)})
            heartbeat()
        columns.append(
            {
                "sampling": law.kind,
                "law": law.describe(),
                "cap": law.cap if isinstance(law, TruncatedPoisson) else None,
                "amplified": not isinstance(simplest_law(law), (Shuffle, FullBatch)),
                "rows": rows,
            }
        )
    return {"neighbours": plan.budget.neighbours, "roomy_cap": None if roomy is None else roomy.cap, "columns": columns}


def _level(plan: PrivacyPlan, law: SamplingLaw, units: int) -> dict[str, Any]:
    if units == 1:
        return {key: value for key, value in _cell(plan, law, plan.budget.neighbours).items() if key != "accountant"}
    if not plan.holds_under(law, plan.budget.neighbours):
        return {"epsilon": None, "why": OTHER_BOUND}
    try:
        value = group_epsilon(
            _drawn_by(law, plan), delta=plan.budget.delta, units=units, neighbours=plan.budget.neighbours
        )
    except UnsupportedAccountingError as error:
        return {"epsilon": None, "why": str(error)}
    lost = isinstance(law, TruncatedPoisson) and units * truncation_delta(law, plan.steps) >= plan.budget.delta
    return _number(value, "truncated batches may reveal that many units" if lost else "epsilon is infinite")


def _roomy(plan: PrivacyPlan) -> TruncatedPoisson | None:
    """Return the planned law with a cap that costs the largest group a thousandth of delta; None if not needed."""
    law = simplest_law(plan.law)
    if not isinstance(law, TruncatedPoisson) or plan.budget.neighbours != "zero_out":
        return None
    most = max(UNITS)
    if most * truncation_delta(law, plan.steps) < plan.budget.delta / 10:
        return None
    spare = plan.budget.delta / 1000 / most / plan.steps
    cap = min(law.n, int(stats.binom.isf(spare, law.n, law.sample_rate)) + 1)
    return TruncatedPoisson(sample_rate=law.sample_rate, cap=cap, n=law.n)


def epsilon_over_steps(plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Return the growth of epsilon over the steps, for the laws and relations worth plotting.

    These values are for plots only: the discretisation for sampled laws is ten times as coarse as the claim's, and
    pessimistic, so that a line never runs below what is spent.

    Returns:
        ``sampling``, ``neighbours``, ``amplified`` and ``points`` of (step, epsilon).
    """
    lines = []
    for law, relation in _lines(plan):
        amplified = not isinstance(simplest_law(law), (Shuffle, FullBatch))
        shares = np.geomspace(1e-3, 1, _CURVE_POINTS if amplified else _STAIRS)
        steps = sorted({max(1, round(plan.steps * share)) for share in shares})
        values = [rough_epsilon(_drawn_by(law, plan, count), plan.budget.delta, relation) for count in steps]
        points = [[count, value] for count, value in zip(steps, values, strict=True) if math.isfinite(value)]
        lines.append({"sampling": law.kind, "neighbours": relation, "amplified": amplified, "points": points})
    return lines


def _lines(plan: PrivacyPlan) -> Iterator[tuple[SamplingLaw, Neighbours]]:
    """Yield the laws worth plotting under the planned relation and ``replace_one``, where these are supported."""
    laws = {law.kind: law for law in _laws(plan)}
    relations: Sequence[Neighbours] = tuple(dict.fromkeys((plan.budget.neighbours, "replace_one")))
    for kind in ("poisson", "shuffle", "full_batch"):
        for relation in relations:
            law = laws.get(kind)
            judged = law is not None and relation in SUPPORTED["pld"].get(type(simplest_law(law)), ())
            if law is not None and judged and plan.holds_under(law, relation):
                yield law, relation


def _number(value: float, why: str = "epsilon is infinite") -> dict[str, Any]:
    return {"epsilon": value} if math.isfinite(value) else {"epsilon": None, "why": why}


BUDGETS = (1.0, 3.0, 8.0, 16.0)


def describe_plan(plan: PrivacyPlan, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Return guarantee and cost of the plan as JSON values: noise, epsilon by every accounting, ceilings.

    This takes some ten seconds for long runs with little noise; ``progress`` is called with what is computed next.
    `lit_dpret.tasks.plan.format_plan` formats the result as text. A value that cannot be computed is None, with the
    reason next to it. For a plan that is not `PrivacyPlan.proved`, epsilon is None, and what follows from it is absent.
    """
    facts: dict[str, Any] = {
        "plan": plan.to_dict(),
        "fingerprint": plan.fingerprint(),
        "law": plan.law.describe(),
        "noise_std": plan.noise_std,
        "cautions": cautions(plan),
        "clip_fraction": None,
    }
    if share := plan.clip_fraction_budget:
        facts["clip_fraction"] = {
            "standard_deviation": clip_fraction.deviation(
                plan.noise_multiplier, share=share, denominator=plan.denominator
            ),
            "more_noise": 1 / math.sqrt(1 - share) - 1,  # on the gradient
        }
    noise = {"noise_multiplier": plan.noise_multiplier, "noise_to_batch": plan.noise_multiplier / plan.denominator}
    if not plan.proved:
        counts = {"expected_batch_size": plan.denominator, "steps": plan.steps, "epochs": None, "epsilon": None}
        return {**facts, **noise, **counts}

    def doing(what: str) -> Callable[[], None]:
        progress(what)
        return lambda: progress(what)

    law, budget = plan.law, plan.budget
    return {
        **facts,
        "epsilon": plan.epsilon(),
        **noise,
        "sample_rate": _sample_rate(law),
        "expected_batch_size": plan.denominator,
        "cap": law.cap if isinstance(law, TruncatedPoisson) else None,
        "steps": plan.steps,
        "epochs": _epochs(plan),
        "epsilon_matrix": epsilon_matrix(plan, doing("epsilon under each law and relation")),
        "user_level": user_levels(plan, doing("epsilon of several units")),
        "epsilon_over_steps": epsilon_over_steps(plan),
        "audit_power": audit_power(budget.eps, budget.delta),
        "knee": _knee(plan, doing),
        "ceilings": _ceilings(plan),
        "epsilon_if_shuffled": _answer(
            lambda: epsilon_if_shuffled(_drawn_by(law, plan), delta=budget.delta, neighbours=budget.neighbours)
        ),
        "epsilon_by": _epsilon_by(plan),
        "noise_for": [_noise_for(eps, plan, progress) for eps in sorted({*BUDGETS, budget.eps})],
    }


def cautions(plan: PrivacyPlan) -> list[str]:
    """Return weaknesses of an allowed plan: a large epsilon or delta, batches with most of the data."""
    budget, law = plan.budget, plan.law
    found = [large_epsilon(budget.eps)] if budget.eps > LARGE_EPSILON else []
    if budget.delta > LARGE_DELTA:
        text = large_delta(budget.delta, plan.n_public)
        releases = _drawn_by(law, plan)
        same = _answer(
            lambda: epsilon(releases, delta=USUAL_DELTA, neighbours=budget.neighbours, accountant=plan.accountant)
        )
        if plan.proved and same["epsilon"] is not None:
            text += f" The noise planned here gives epsilon {show_epsilon(same['epsilon'])} at that delta."
        found.append(text)
    rate = _sample_rate(law)
    if isinstance(simplest_law(law), (Poisson, TruncatedPoisson, FixedSize)) and rate is not None and rate > LARGE_RATE:
        found.append(
            f"A step draws {rate:.0%} of the units. Above one half, sampling hardly hides who took part, and the noise "
            "is nearly that of full batches; a quarter at most is usual. Lower datamodule.expected_batch_size."
        )
    return found


def _epochs(plan: PrivacyPlan) -> float | None:
    if isinstance(plan.law, Shuffle):
        return plan.steps / plan.law.steps_per_epoch
    rate = _sample_rate(plan.law)
    return None if rate is None else plan.steps * rate


def _knee(plan: PrivacyPlan, doing: Callable[[str], Callable[[], None]]) -> dict[str, Any] | None:
    """Return the grid of noise over batch; None if the number of units is neither public nor declared."""
    rate, epochs, units, batch = _sample_rate(plan.law), _epochs(plan), plan.n_public, _batch(plan)
    if units is None and rate is not None and rate < 1:
        # Both are declared constants, so their quotient is one too.
        units = max(1, round(batch / rate))
    if units is None or epochs is None:
        return None
    return knee_table(
        n=units,
        eps=plan.budget.eps,
        delta=plan.budget.delta,
        neighbours=plan.budget.neighbours,
        batch=min(units, max(1, round(batch))),
        epochs=epochs,
        heartbeat=doing("noise over batch, for other batches and passes"),
    )


def _ceilings(plan: PrivacyPlan) -> dict[str, Any] | None:
    accountants: tuple[AccountantName, ...] = ("pld", "rdp")
    for name in accountants:
        try:
            found = attack_ceilings([plan.release(plan.steps)], neighbours=plan.budget.neighbours, accountant=name)
        except UnsupportedAccountingError:
            continue
        return found | {"accountant": name}
    return None


def _epsilon_by(plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Return the epsilon of the same noise under other accountings, the planned one first."""
    law, stated, counted = plan.law, plan.budget.neighbours, plan.accountant
    uncapped = _uncapped(law)
    others: list[tuple[AccountantName, Neighbours, SamplingLaw]] = [(counted, stated, law), (counted, stated, uncapped)]
    others += [(name, stated, uncapped) for name in get_args(AccountantName)]
    others += [(counted, relation, uncapped) for relation in get_args(Neighbours)]
    if isinstance(law, TruncatedPoisson):
        size = max(1, round(law.sample_rate * law.n))
        others += [("rdp", "replace_one", FixedSize(batch_size=size, n=law.n))]
        others += [("pld", stated, Shuffle(batch_size=size, n=law.n))]
    rows = []
    for accountant, neighbours, other in dict.fromkeys(others):
        if plan.holds_under(other, neighbours):
            count = partial(epsilon, delta=plan.budget.delta, neighbours=neighbours, accountant=accountant)
            answer = _answer(partial(count, _drawn_by(other, plan)))
        else:
            answer = {"epsilon": None, "why": OTHER_BOUND}
        rows.append({"accountant": accountant, "neighbours": neighbours, "sampling": other.kind, **answer})
    return rows


def _noise_for(eps: float, plan: PrivacyPlan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the noise that a budget needs without a cap, at most a thousandth too large."""
    progress(f"noise for epsilon {eps:g}")
    try:
        noise = calibrate_noise(
            eps=eps,
            delta=plan.budget.delta,
            neighbours=plan.budget.neighbours,
            law=_uncapped(plan.law),
            steps=plan.steps,
            accountant=plan.accountant,
        )
    except ConfigurationError as error:
        return {"eps": eps, "noise_multiplier": None, "noise_to_batch": None, "why": str(error)}
    return {"eps": eps, "noise_multiplier": noise, "noise_to_batch": noise / plan.denominator}


def _answer(question: Callable[[], float]) -> dict[str, Any]:
    try:
        return _number(question())
    except ConfigurationError as error:
        return {"epsilon": None, "why": str(error)}


def _sample_rate(law: SamplingLaw) -> float | None:
    if isinstance(law, (Poisson, TruncatedPoisson)):
        return law.sample_rate
    if isinstance(law, (FixedSize, Shuffle)):
        return law.batch_size / law.n
    return 1.0


def _uncapped(law: SamplingLaw) -> SamplingLaw:
    law = simplest_law(law)
    return Poisson(sample_rate=law.sample_rate) if isinstance(law, TruncatedPoisson) else law
