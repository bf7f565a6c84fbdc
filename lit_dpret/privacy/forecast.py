"""What a plan will have cost when it is over, told before it starts.

One epsilon hides the assumptions behind it. So a forecast puts the stated one beside what other
accountants, relations and sampling laws would make of the same noise, beside what is left if the
sampling was not what it claimed to be, and beside what an attacker could do with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting import (
    attack_ceilings,
    calibrate_noise,
    epsilon,
    epsilon_without_amplification,
)
from lit_dpret.privacy.budget import AccountantName, Neighbours, PrivacyBudget
from lit_dpret.privacy.composition import plain
from lit_dpret.privacy.releases import FixedSize, GaussianRelease, Poisson, SamplingLaw, Shuffle, TruncatedPoisson

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
    """

    release: GaussianRelease
    budget: PrivacyBudget
    accountant: AccountantName
    steps: int
    denominator: float

    def to_dict(self) -> dict[str, Any]:
        """The whole forecast as JSON values; what cannot be computed is None and says why beside it."""
        law = self.release.law
        return {
            "noise_multiplier": self.release.noise_multiplier,
            "noise_to_batch": self.release.noise_multiplier / self.denominator,
            "sample_rate": _sample_rate(law),
            "expected_batch_size": self.denominator,
            "cap": law.cap if isinstance(law, TruncatedPoisson) else None,
            "steps": self.steps,
            "epochs": self._epochs(),
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
            answer = self._answer(
                lambda a=accountant, r=neighbours, o=other: epsilon(  # type: ignore[misc]
                    [self._all(o)], delta=self.budget.delta, neighbours=r, accountant=a
                )
            )
            rows.append({"accountant": accountant, "neighbours": neighbours, "sampling": other.kind, **answer})
        return rows

    def _noise_for(self) -> list[dict[str, Any]]:
        """The noise that other budgets would ask for, to three digits; a cap's cost is left out, it is below those."""
        return [self._noise_row(eps) for eps in BUDGETS]

    def _noise_row(self, eps: float) -> dict[str, Any]:
        try:
            noise = calibrate_noise(
                eps=eps,
                delta=self.budget.delta,
                neighbours=self.budget.neighbours,
                law=_uncapped(self.release.law),
                steps=self.steps,
                accountant=self.accountant,
                tolerance=1e-2,
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


def format_plan(facts: Mapping[str, Any]) -> str:
    """The forecast as a text for a terminal."""
    budget = facts["plan"]["budget"]
    lines = [
        f"Plan {facts['fingerprint'][:12]}: epsilon {facts['epsilon']:.4g} at delta {budget['delta']:.3g}, "
        f"unit={budget['unit']}, neighbours={budget['neighbours']}, budget {budget['eps']:g}",
        "",
        f"  sampling             {facts['law']}",
        f"  steps                {facts['steps']}" + _if(facts["epochs"], " ({:.4g} passes over the data)"),
        f"  clipping bound       {facts['plan']['max_grad_norm']:g} ({facts['plan']['clip']}{_shared(facts['plan'])})",
        f"  noise multiplier     {facts['noise_multiplier']:.6g}",
        f"  noise std on the sum {facts['noise_std']:.6g} (sensitivity {facts['plan']['sensitivity']:g})",
        f"  noise to batch       {facts['noise_to_batch']:.3g} (divided by {facts['expected_batch_size']:g})",
        "",
        "The same noise, counted otherwise",
    ]
    rows = [
        (row["accountant"], row["neighbours"], row["sampling"], _number(row), row.get("why", ""))
        for row in facts["epsilon_by"]
    ]
    rows.append(("", "", "no amplification", _number(facts["epsilon_without_amplification"]), ""))
    lines += [f"  {a:<5}{n:<15}{s:<20}{e:>9}" for a, n, s, e, why in rows if not why]
    lines += ["", "Noise multiplier for other budgets, and its ratio to the batch"]
    for row in facts["noise_for"]:
        noise = "-" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.4g}"
        ratio = "-" if row["noise_to_batch"] is None else f"{row['noise_to_batch']:.3g}"
        lines.append(f"  eps {row['eps']:<6g}{noise:>10}{ratio:>12}")
    if (ceilings := facts["ceilings"]) is not None:
        lines += ["", "No attack on one unit does better than"]
        lines.append(f"  membership accuracy  {ceilings['membership_accuracy']:.3g}")
        for rate, value in ceilings["tpr_at_fpr"].items():
            lines.append(f"  {value:<9.3g} true positives at {rate} false positives")
        for prior, value in ceilings["secret_guess"].items():
            lines.append(f"  {value:<9.3g} of naming a secret that one guesses with probability {prior} anyway")
    return "\n".join(lines)


def _shared(plan: Mapping[str, Any]) -> str:
    return ", / sqrt(K) for each of K layers" if plan["clip_groups"] == "per_layer" else ""


def _number(row: Mapping[str, Any]) -> str:
    return "-" if row["epsilon"] is None else f"{row['epsilon']:.4g}"


def _if(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


def _sample_rate(law: SamplingLaw) -> float | None:
    if isinstance(law, (Poisson, TruncatedPoisson)):
        return law.sample_rate
    if isinstance(law, (FixedSize, Shuffle)):
        return law.batch_size / law.n
    return 1.0


def _uncapped(law: SamplingLaw) -> SamplingLaw:
    law = plain(law)
    return Poisson(sample_rate=law.sample_rate) if isinstance(law, TruncatedPoisson) else law
