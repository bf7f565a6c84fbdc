"""What a plan will have cost when it is over, computed before it starts.

One epsilon hides the assumptions behind it. So a forecast puts the stated one beside what other accountants, relations
and sampling laws would make of the same noise, beside what is left if the sampling was not what it claimed to be, and
beside what an attacker could do with it. An epsilon belongs to one law and one relation; read under another, the same
noise is worth more or less, and under some there is no proved number at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from scipy import stats

from lit_dpret.audit.statistics.power import audit_power
from lit_dpret.cards.knee import knee_table
from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.accountant import calibrate_noise, truncation_delta
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.composition import (
    SUPPORTED,
    check_supported,
    epsilon,
    epsilon_without_amplification,
    plain,
    rough_epsilon,
)
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
from lit_dpret.privacy.budget import AccountantName, Neighbours, PrivacyBudget
from lit_dpret.privacy.plan import PrivacyPlan

OTHER_BOUND = "the loss couples units, and under this law and relation one of them moves the sum further than planned"
"""Why the noise of a plan says nothing about a law or relation."""

UNITS = (1, 2, 5, 10)
"""How many units together the table of user levels has rows for."""

# Passes make stairs, and cost nothing to compute.
_CURVE_POINTS, _STAIRS = 14, 80


@dataclass(frozen=True)
class Planned:
    """The releases of a plan, whatever law they are read under.

    Args:
        law: The planned law.
        noise_multiplier: Of each step.
        steps: How many.
        delta: Of every epsilon.
        neighbours: The planned relation.
        n: The number of units, or the constant that stands for it; None where there is none.
        batch: The expected batch size.
        holds: Whether the noise may be read under a law and a relation: not always, where a loss couples units.
    """

    law: SamplingLaw
    noise_multiplier: float
    steps: int
    delta: float
    neighbours: Neighbours
    n: int | None
    batch: float
    holds: Callable[[SamplingLaw, Neighbours], bool] = lambda law, neighbours: True

    def releases(self, law: SamplingLaw, steps: int | None = None) -> list[GaussianRelease]:
        """The planned steps, or the first ``steps`` of them, as if drawn by ``law``."""
        return [GaussianRelease(noise_multiplier=self.noise_multiplier, law=law, count=steps or self.steps)]

    def laws(self) -> list[SamplingLaw]:
        """The planned law, then the other ones with the same expected batch."""
        law, found = plain(self.law), [self.law]
        if isinstance(law, FullBatch) or self.n is None:
            return found + ([Poisson(sample_rate=law.sample_rate)] if isinstance(law, TruncatedPoisson) else [])
        rate = law.sample_rate if isinstance(law, (Poisson, TruncatedPoisson)) else self.batch / self.n
        size = max(1, min(self.n, round(rate * self.n)))
        # Six standard deviations above the mean: cut so seldom that it costs next to nothing.
        cap = min(self.n, math.ceil(size + 6 * math.sqrt(size)))
        found += [
            Poisson(sample_rate=rate),
            TruncatedPoisson(sample_rate=rate, cap=cap, n=self.n),
            FixedSize(batch_size=size, n=self.n),
            Shuffle(batch_size=size, n=self.n),
        ]
        first: dict[str, SamplingLaw] = {}
        for other in found:
            first.setdefault(other.kind, other)
        return list(first.values())


def epsilon_matrix(plan: Planned, heartbeat: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Epsilon of the planned noise for every law and relation, each by the tightest accountant that judges it.

    Guarantees:
        - The cell of the planned law and relation is the plan's epsilon by ``pld``, where that judges it.
        - ``replace_one`` is the library's own pair at the same noise: one unit in, another one out.
        - ``shuffle`` claims no amplification: every pass counts as a release that saw all units.
        - A combination that no accountant judges, or for which a coupled loss has another sensitivity, has no
          number, and says why.

    Returns:
        ``sampling``, ``law`` as a sentence, ``neighbours``, ``epsilon`` or None, ``accountant`` or None,
        ``amplified``, and ``why`` where there is no number.
    """
    rows = []
    for law in plan.laws():
        for relation in get_args(Neighbours):
            rows.append(
                {
                    "sampling": law.kind,
                    "law": law.describe(),
                    "neighbours": relation,
                    "amplified": not isinstance(plain(law), (Shuffle, FullBatch)),
                    **_cell(plan, law, relation),
                }
            )
            heartbeat()
    return rows


def _cell(plan: Planned, law: SamplingLaw, relation: Neighbours) -> dict[str, Any]:
    accountants: tuple[AccountantName, ...] = ("pld", "rdp", "prv")
    judges = [name for name in accountants if relation in SUPPORTED[name].get(type(plain(law)), ())]
    if not judges:
        try:
            check_supported(law, "pld", relation)
        except UnsupportedAccountingError as error:
            return {"epsilon": None, "accountant": None, "why": str(error)}
    if not plan.holds(law, relation):
        return {"epsilon": None, "accountant": None, "why": OTHER_BOUND}
    value = epsilon(plan.releases(law), delta=plan.delta, neighbours=relation, accountant=judges[0])
    return {"accountant": judges[0], **_number(value)}


def user_levels(plan: Planned, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What the planned noise promises to somebody with 1, 2, 5 or 10 units, by law under the planned relation.

    A truncated law whose cap was chosen for one unit may promise nothing to several: a batch that was
    cut can give all of them away. ``roomy_cap`` is then a cap that cuts so seldom that it does not
    matter, and its column says what that would promise.

    Returns:
        ``neighbours``; ``columns`` of laws with ``rows`` of ``units`` and ``epsilon`` or None and ``why``;
        ``roomy_cap``, or None where the planned law needs none.
    """
    laws = plan.laws()
    roomy = _roomy(plan)
    if roomy is not None:
        # Cut so seldom, it is Poisson sampling for all that shows.
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
                "amplified": not isinstance(plain(law), (Shuffle, FullBatch)),
                "rows": rows,
            }
        )
    return {"neighbours": plan.neighbours, "roomy_cap": None if roomy is None else roomy.cap, "columns": columns}


def _level(plan: Planned, law: SamplingLaw, units: int) -> dict[str, Any]:
    if units == 1:
        return {key: value for key, value in _cell(plan, law, plan.neighbours).items() if key != "accountant"}
    if not plan.holds(law, plan.neighbours):
        return {"epsilon": None, "why": OTHER_BOUND}
    try:
        value = group_epsilon(plan.releases(law), delta=plan.delta, max_units=units, neighbours=plan.neighbours)
    except UnsupportedAccountingError as error:
        return {"epsilon": None, "why": str(error)}
    lost = isinstance(law, TruncatedPoisson) and units * truncation_delta(law, plan.steps) >= plan.delta
    return _number(value, "batches that are cut may give that many units away" if lost else "beyond all bounds")


def _roomy(plan: Planned) -> TruncatedPoisson | None:
    """The planned law with a cap that costs the largest group a thousandth of delta; None where it has one."""
    law = plain(plan.law)
    if not isinstance(law, TruncatedPoisson) or plan.neighbours != "zero_out":
        return None
    most = max(UNITS)
    if most * truncation_delta(law, plan.steps) < plan.delta / 10:
        return None
    spare = plan.delta / 1000 / most / plan.steps
    cap = min(law.n, int(stats.binom.isf(spare, law.n, law.sample_rate)) + 1)
    return TruncatedPoisson(sample_rate=law.sample_rate, cap=cap, n=law.n)


def epsilon_over_steps(plan: Planned) -> list[dict[str, Any]]:
    """How epsilon grows on the way to the last step, for the laws and relations that are worth a line.

    Drawn, not stated: the distributions of sampled laws are ten times as coarse as those of the claim,
    and pessimistic, so that a line never runs below what is spent.

    Returns:
        ``sampling``, ``neighbours``, ``amplified`` and ``points`` of (step, epsilon).
    """
    lines = []
    for law, relation in _lines(plan):
        amplified = not isinstance(plain(law), (Shuffle, FullBatch))
        shares = np.geomspace(1e-3, 1, _CURVE_POINTS if amplified else _STAIRS)
        steps = sorted({max(1, round(plan.steps * share)) for share in shares})
        values = [rough_epsilon(plan.releases(law, count), plan.delta, relation) for count in steps]
        points = [[count, value] for count, value in zip(steps, values, strict=True) if math.isfinite(value)]
        lines.append(
            {
                "sampling": law.kind,
                "neighbours": relation,
                "amplified": amplified,
                "points": points,
            }
        )
    return lines


def _lines(plan: Planned) -> Iterator[tuple[SamplingLaw, Neighbours]]:
    """Poisson sampling and shuffled passes under the planned relation, and Poisson sampling under ``replace_one``."""
    laws = {law.kind: law for law in plan.laws()}
    relations: Sequence[Neighbours] = tuple(dict.fromkeys((plan.neighbours, "replace_one")))
    for kind in ("poisson", "shuffle", "full_batch"):
        for relation in relations:
            law = laws.get(kind)
            if law is not None and plan.holds(law, relation) and relation in SUPPORTED["pld"].get(type(plain(law)), ()):
                yield law, relation


def _number(value: float, why: str = "beyond all bounds") -> dict[str, Any]:
    return {"epsilon": value} if math.isfinite(value) else {"epsilon": None, "why": why}


BUDGETS = (1.0, 3.0, 8.0, 16.0)


@dataclass(frozen=True)
class Forecast:
    """The cost of ``steps`` releases like ``release``.

    Args:
        release: What one step lets out.
        budget: The guarantee that was asked for.
        accountant: The accountant that states the claim.
        steps: Steps planned.
        denominator: The public constant that the noised sum is divided by.
        n_public: The number of units, where it is public or declared.
        progress: Told what is computed next, before it is.
        batch: Units in a batch on average; None where that is the denominator.
        holds: Whether the noise may be read under a law and a relation.
    """

    release: GaussianRelease
    budget: PrivacyBudget
    accountant: AccountantName
    steps: int
    denominator: float
    n_public: int | None = None
    progress: Callable[[str], None] = lambda what: None
    batch: float | None = None
    holds: Callable[[SamplingLaw, Neighbours], bool] = lambda law, neighbours: True

    def to_dict(self) -> dict[str, Any]:
        """The whole forecast as JSON values; what cannot be computed is None and says why beside it."""
        law = self.release.law
        planned = Planned(
            law=law,
            noise_multiplier=self.release.noise_multiplier,
            steps=self.steps,
            delta=self.budget.delta,
            neighbours=self.budget.neighbours,
            n=self.n_public,
            batch=self.batch or self.denominator,
            holds=self.holds,
        )
        return {
            "noise_multiplier": self.release.noise_multiplier,
            "noise_to_batch": self.release.noise_multiplier / self.denominator,
            "sample_rate": _sample_rate(law),
            "expected_batch_size": self.denominator,
            "cap": law.cap if isinstance(law, TruncatedPoisson) else None,
            "steps": self.steps,
            "epochs": self._epochs(),
            "epsilon_matrix": epsilon_matrix(planned, self._doing("epsilon under each law and relation")),
            "user_level": user_levels(planned, self._doing("epsilon of several units")),
            "epsilon_over_steps": epsilon_over_steps(planned),
            "audit_power": audit_power(self.budget.eps, self.budget.delta),
            "knee": self._knee(),
            "ceilings": self._ceilings(),
            "epsilon_without_amplification": self._answer(
                lambda: epsilon_without_amplification(
                    [self._all(law)], delta=self.budget.delta, neighbours=self.budget.neighbours
                )
            ),
            "epsilon_by": self._table(),
            "noise_for": self._noise_for(),
        }

    def _all(self, law: SamplingLaw) -> GaussianRelease:
        return replace(self.release, law=law, count=self.steps)

    def _epochs(self) -> float | None:
        law = self.release.law
        if isinstance(law, Shuffle):
            return self.steps / law.steps_per_epoch
        rate = _sample_rate(law)
        return None if rate is None else self.steps * rate

    def _doing(self, what: str) -> Callable[[], None]:
        self.progress(what)
        return lambda: self.progress(what)

    def _knee(self) -> dict[str, Any] | None:
        """The grid of noise over batch; None where no number of units is public or declared."""
        rate, epochs = _sample_rate(self.release.law), self._epochs()
        units = self.n_public
        if units is None and rate is not None and rate < 1:
            # Both are declared constants, and so is their quotient.
            units = max(1, round((self.batch or self.denominator) / rate))
        if units is None or epochs is None:
            return None
        return knee_table(
            n=units,
            eps=self.budget.eps,
            delta=self.budget.delta,
            neighbours=self.budget.neighbours,
            batch=min(units, max(1, round(self.batch or self.denominator))),
            epochs=epochs,
            heartbeat=self._doing("noise over batch, for other batches and passes"),
        )

    def _ceilings(self) -> dict[str, Any] | None:
        accountants: tuple[AccountantName, ...] = ("pld", "rdp")
        for name in accountants:
            try:
                return attack_ceilings(
                    [self._all(self.release.law)], neighbours=self.budget.neighbours, accountant=name
                ) | {"accountant": name}
            except UnsupportedAccountingError:
                continue
        return None

    def _table(self) -> list[dict[str, Any]]:
        """Epsilon of the same noise by other ways of counting, the planned one first."""
        law, stated = self.release.law, self.budget.neighbours
        uncapped = _uncapped(law)
        others: list[tuple[AccountantName, Neighbours, SamplingLaw]] = [(self.accountant, stated, law)]
        others += [(self.accountant, stated, uncapped)]
        others += [(name, stated, uncapped) for name in get_args(AccountantName)]
        others += [(self.accountant, relation, uncapped) for relation in get_args(Neighbours)]
        if isinstance(law, TruncatedPoisson):
            size = max(1, round(law.sample_rate * law.n))
            others += [("rdp", "replace_one", FixedSize(batch_size=size, n=law.n))]
            others += [("pld", stated, Shuffle(batch_size=size, n=law.n))]
        rows = []
        for accountant, neighbours, other in dict.fromkeys(others):
            if not self.holds(other, neighbours):
                unread = {"epsilon": None, "why": OTHER_BOUND}
                rows.append({"accountant": accountant, "neighbours": neighbours, "sampling": other.kind, **unread})
                continue
            answer = self._answer(
                lambda a=accountant, r=neighbours, o=other: epsilon(  # type: ignore[misc]
                    [self._all(o)], delta=self.budget.delta, neighbours=r, accountant=a
                )
            )
            rows.append({"accountant": accountant, "neighbours": neighbours, "sampling": other.kind, **answer})
        return rows

    def _noise_for(self) -> list[dict[str, Any]]:
        """The noise that the asked budget and others ask for without a cap, each at most a thousandth too large."""
        return [self._noise_row(eps) for eps in sorted({*BUDGETS, self.budget.eps})]

    def _noise_row(self, eps: float) -> dict[str, Any]:
        self.progress(f"noise for epsilon {eps:g}")
        try:
            noise = calibrate_noise(
                eps=eps,
                delta=self.budget.delta,
                neighbours=self.budget.neighbours,
                law=_uncapped(self.release.law),
                steps=self.steps,
                accountant=self.accountant,
            )
        except ConfigurationError as error:
            return {"eps": eps, "noise_multiplier": None, "noise_to_batch": None, "why": str(error)}
        return {"eps": eps, "noise_multiplier": noise, "noise_to_batch": noise / self.denominator}

    @staticmethod
    def _answer(question: Callable[[], float]) -> dict[str, Any]:
        try:
            value = question()
        except ConfigurationError as error:
            return {"epsilon": None, "why": str(error)}
        if math.isinf(value):
            return {"epsilon": None, "why": "beyond all bounds"}
        return {"epsilon": value}


def _sample_rate(law: SamplingLaw) -> float | None:
    if isinstance(law, (Poisson, TruncatedPoisson)):
        return law.sample_rate
    if isinstance(law, (FixedSize, Shuffle)):
        return law.batch_size / law.n
    return 1.0


def _uncapped(law: SamplingLaw) -> SamplingLaw:
    law = plain(law)
    return Poisson(sample_rate=law.sample_rate) if isinstance(law, TruncatedPoisson) else law


def describe_plan(plan: PrivacyPlan, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """What the plan promises and costs, as JSON values: noise, epsilon by every way of counting, ceilings.

    Takes some ten seconds for long runs with little noise; ``progress`` is told what is computed next.
    ``format_plan`` makes a text of it. Of a plan that is not `PrivacyPlan.proved` no epsilon is stated: it is None,
    and nothing that follows from it is there.
    """
    if not plan.proved:
        return {
            "plan": plan.to_dict(),
            "fingerprint": plan.fingerprint(),
            "law": plan.law.describe(),
            "noise_std": plan.noise_std,
            "noise_multiplier": plan.noise_multiplier,
            "noise_to_batch": plan.noise_multiplier / plan.denominator,
            "expected_batch_size": plan.denominator,
            "steps": plan.steps,
            "epochs": None,
            "epsilon": None,
        }
    coupling = plan.coupling
    forecast = Forecast(
        plan.release(),
        plan.budget,
        plan.accountant,
        plan.steps,
        plan.denominator,
        plan.n_public,
        progress,
        batch=plan.denominator if coupling is None else coupling.expected * coupling.sub_batches,
        holds=plan.holds_under,
    )
    return {
        "plan": plan.to_dict(),
        "fingerprint": plan.fingerprint(),
        "law": plan.law.describe(),
        "noise_std": plan.noise_std,
        "epsilon": plan.epsilon(),
        **forecast.to_dict(),
    }
