"""What a plan will have cost when it is over, told before it starts.

One epsilon hides the assumptions behind it. So a forecast puts the stated one beside what other
accountants, relations and sampling laws would make of the same noise, beside what is left if the
sampling was not what it claimed to be, and beside what an attacker could do with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.audit_power import audit_power
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.composition import epsilon, epsilon_without_amplification, plain
from lit_dpret.privacy.accounting.knee import knee_table
from lit_dpret.privacy.accounting.matrix import OTHER_BOUND, Planned, epsilon_matrix, epsilon_over_steps, user_levels
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    GaussianRelease,
    Poisson,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import AccountantName, Neighbours, PrivacyBudget

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
