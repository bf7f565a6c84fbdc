"""The public plan of a private run, decided before it starts.

Sampler, clipper, noise and accounting are built from one `PrivacyPlan`, so they cannot disagree. It holds public values
only: under ``add_or_remove`` no field derives from the data, and the user declares every constant.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, get_args

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.accounting.accountant import Accountant, calibrate_noise, choose_cap
from lit_dpret.privacy.accounting.composition import check_supported
from lit_dpret.privacy.accounting.coupled_sensitivity import Coupling, holds_under
from lit_dpret.privacy.accounting.groups import check_max_units
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
    AccountantName,
    ClipGroups,
    ClipName,
    Neighbours,
    NoiseName,
    PrivacyBudget,
    SamplingName,
    with_rounding_paid,
)
from lit_dpret.settings import batch_among, is_number, is_whole, require_choice, require_whole

HISTOGRAM = "histogram"
"""The mode in the plan of a released histogram."""

EVOLUTION = "private_evolution"
"""The mode in the plan of the votes that select candidates, generation after generation."""


class SamplingRequest(Protocol):
    """A DataModule's request for drawing batches; the plan turns it into a law."""

    sampling: str
    expected_batch_size: int | None
    sample_rate: float | None
    physical_batch_size: int
    cap: int | None
    rows_per_unit: str


@dataclass(kw_only=True)
class PlainSamplingRequest:
    """A `SamplingRequest` without a DataModule, as in a test of one step."""

    sampling: str
    expected_batch_size: int | None = None
    sample_rate: float | None = None
    physical_batch_size: int = 32
    cap: int | None = None
    rows_per_unit: str = "one"


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """The guarantee of a run and its mechanism; frozen, public, serialisable."""

    budget: PrivacyBudget  # the guarantee, which must not be exceeded
    law: SamplingLaw  # how a logical batch is drawn
    steps: int  # the number of planned releases
    noise_multiplier: float  # noise standard deviation over ``sensitivity``
    max_grad_norm: float  # L2 bound on one unit's gradient
    # How far removing or emptying one unit moves the sum (L2). Replacing a unit moves it twice as far, which the
    # accounting for ``replace_one`` takes into account.
    sensitivity: float
    denominator: float  # the public constant by which the noised sum is divided
    physical_batch_size: int  # units per forward pass
    clip: str = "abadi"  # ``abadi`` or ``automatic``
    # ``flat``, or ``per_layer`` for a bound of ``max_grad_norm / sqrt(K)`` on each of K layers, which also bounds all
    # of them together by ``max_grad_norm``.
    clip_groups: str = "flat"
    accountant: AccountantName = "pld"  # ``pld``, ``rdp`` or ``prv``
    engine: str = "ghost"  # the clipping engine
    mode: str = "dp_sgd"  # the privacy mode
    n_public: int | None = None  # the number of units if it is public, or a constant that the user declared
    # The maximum number of units that one person contributed, as the user declared; None if not declared. It changes no
    # step; the user-level epsilon is computed from it.
    max_units_per_user: int | None = None
    # Which rows see each other under a loss that couples units, and what ``max_grad_norm`` then bounds; None where it
    # bounds the gradient of one unit, which depends on no other unit.
    coupling: Coupling | None = None
    # The share of a step's budget that pays for the count of clipped units; 0 if none is released. ``sensitivity``
    # covers it.
    clip_fraction_budget: float = 0.0
    # ``gaussian``, or ``discrete`` for integers on a public grid; ``sensitivity`` covers the rounding.
    noise: NoiseName = "gaussian"

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "max_grad_norm", "sensitivity", "denominator"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ConfigurationError(f"A private run needs a positive, finite {name}, not {value!r}.")
            # As a float, so that 1 and 1.0 have one fingerprint. The class is frozen, so its `__setattr__` is bypassed.
            object.__setattr__(self, name, float(value))
        require_whole("trainer", {"max_steps": self.steps}, 1)
        require_whole("datamodule", self, 1, "physical_batch_size")
        require_choice("privacy.accountant", self.accountant, get_args(AccountantName))
        require_choice("privacy.clip", self.clip, get_args(ClipName))
        require_choice("privacy.clip_groups", self.clip_groups, get_args(ClipGroups))
        require_choice("privacy.noise", self.noise, get_args(NoiseName))
        if self.max_units_per_user is not None:
            check_max_units(self.max_units_per_user)
        if self.clip_fraction_budget != 0:
            self._check_clip_fraction()

    def _check_clip_fraction(self) -> None:
        clip_fraction.check_budget(self.clip_fraction_budget)
        if self.coupling is not None:
            raise ConfigurationError(
                f"privacy.clip_fraction_budget={self.clip_fraction_budget:g} counts units, and under "
                f"privacy={self.mode} no gradient of a single unit is clipped. Set it to null."
            )
        needed = clip_fraction.sensitivity(self.max_grad_norm, self.clip_fraction_budget)
        if self.sensitivity < needed * (1 - 1e-12):
            raise ConfigurationError(
                f"sensitivity={self.sensitivity:g} does not cover the count of clipped units that "
                f"privacy.clip_fraction_budget={self.clip_fraction_budget:g} releases: it takes {needed:g}."
            )

    @classmethod
    def build(
        cls,
        budget: PrivacyBudget,
        request: SamplingRequest,
        *,
        steps: int,
        max_grad_norm: float,
        n_public: int | None,
        noise_multiplier: float | None = None,
        clip_fraction_budget: float = 0.0,
        accountant: AccountantName = "pld",
        **fields: Any,
    ) -> PrivacyPlan:
        """Resolve a request: the law with its cap, and the noise that the budget needs.

        Guarantees:
            - The planned steps stay within the budget: a given noise that is too small is refused, and the error states
              how many steps it allows.
            - The denominator is a public constant: the declared or expected number of units in a batch.
            - Under ``add_or_remove`` nothing is derived from ``n_public``, which is then None, or a constant that the
              user declared for a truncated law.

        If the rate of the request is None, it follows from the expected batch size and ``n_public``. If its cap is
        None, a cap is chosen. ``fields`` are those of `PrivacyPlan` that are used unchanged.
        """
        require_choice("datamodule.sampling", request.sampling, get_args(SamplingName))
        budget = budget.of_units(request)
        if not is_whole(steps) or steps < 1:
            raise ConfigurationError(f"A private run of {steps} steps releases nothing; set trainer.max_steps.")
        if n_public is not None:
            if n_public < 1:
                raise ConfigurationError("The data set has no unit: nothing can be planned.")
            budget.refuse_large_delta(n_public)
        if clip_fraction_budget != 0:
            clip_fraction.check_budget(clip_fraction_budget)
        law = _law(request, budget=budget, n=n_public)
        counter = Accountant(delta=budget.delta, neighbours=budget.neighbours, name=accountant)
        # Choosing a cap needs the noise, so plain Poisson is used until then.
        uncapped = isinstance(law, Poisson) and request.sampling == "truncated_poisson"
        if uncapped and accountant != "pld":
            # Any truncated law serves to ask whether the accountant judges them.
            check_supported(TruncatedPoisson(sample_rate=0.5, cap=1, n=2), accountant, budget.neighbours)
        if noise_multiplier is not None:
            _check_given_noise(noise_multiplier, counter, law, steps, budget.eps)
        if uncapped and isinstance(law, Poisson) and n_public is not None:
            cap = choose_cap(
                n=n_public,
                sample_rate=law.sample_rate,
                steps=steps,
                eps=budget.eps,
                delta=budget.delta,
                neighbours=budget.neighbours,
                noise_multiplier=noise_multiplier,
            )
            law = TruncatedPoisson(sample_rate=law.sample_rate, cap=cap, n=n_public)
            if noise_multiplier is not None:
                _check_given_noise(noise_multiplier, counter, law, steps, budget.eps)
        if noise_multiplier is None:
            noise_multiplier = calibrate_noise(
                eps=budget.eps,
                delta=budget.delta,
                neighbours=budget.neighbours,
                law=law,
                steps=steps,
                accountant=accountant,
            )
        return cls(
            budget=budget,
            law=law,
            steps=steps,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            sensitivity=with_rounding_paid(
                clip_fraction.sensitivity(max_grad_norm, clip_fraction_budget), fields.get("noise", "gaussian")
            ),
            denominator=_denominator(law, budget, n_public, request.expected_batch_size),
            physical_batch_size=request.physical_batch_size,
            accountant=accountant,
            n_public=n_public,
            clip_fraction_budget=clip_fraction_budget,
            **fields,
        )

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.sensitivity

    def release(self, count: int = 1) -> GaussianRelease:
        return GaussianRelease(noise_multiplier=self.noise_multiplier, law=self.law, count=count)

    def holds_under(self, law: SamplingLaw, neighbours: Neighbours) -> bool:
        """Return whether this plan's noise is valid under another law and relation; always true without coupling."""
        return self.coupling is None or holds_under(
            self.coupling,
            planned=(self.law, self.budget.neighbours),
            read_as=(law, neighbours),
            steps=self.steps,
            units=self.n_public,
            delta=self.budget.delta,
        )

    @property
    def proved(self) -> bool:
        """Whether an epsilon may be stated; False if the sensitivity is known to be too small."""
        return self.coupling is None or self.coupling.claim != "refuted"

    def epsilon(self) -> float:
        """Return epsilon after all planned steps, at the budget's delta; infinite if none may be stated."""
        if not self.proved:
            return math.inf
        counter = Accountant(delta=self.budget.delta, neighbours=self.budget.neighbours, name=self.accountant)
        return counter.epsilon([self.release(self.steps)])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"budget": self.budget.to_dict(), "law": self.law.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrivacyPlan:
        # Both ways: an unknown field may change the meaning of the plan.
        if wrong := sorted(set(data) ^ {field.name for field in fields(cls)}):
            raise ConfigurationError(f"A recorded privacy plan has missing or unknown fields: {', '.join(wrong)}.")
        try:
            budget, law = PrivacyBudget(**data["budget"]), SamplingLaw.from_dict(data["law"])
            coupling = Coupling.from_dict(data["coupling"]) if data["coupling"] else None
            return cls(**{**data, "budget": budget, "law": law, "coupling": coupling})
        except (KeyError, TypeError) as error:
            raise ConfigurationError(f"A recorded privacy plan is malformed: {error}.") from error

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical JSON: equal plans have equal fingerprints."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _check_given_noise(noise: float, counter: Accountant, law: SamplingLaw, steps: int, eps: float) -> None:
    fits = counter.max_steps(GaussianRelease(noise_multiplier=noise, law=law), eps, at_most=steps)
    if fits < steps:
        raise ConfigurationError(
            f"privacy.noise_multiplier={noise:g} allows {fits} of the {steps} planned steps within "
            f"privacy.eps={eps:g}. Raise it, plan fewer steps, or set it to null to have it calibrated."
        )


def _law(request: SamplingRequest, *, budget: PrivacyBudget, n: int | None) -> SamplingLaw:
    """Return the named law, its numbers derived from public values; plain Poisson if a cap is yet to be chosen."""
    sampling, batch, cap = request.sampling, request.expected_batch_size, request.cap
    if sampling == "full_batch":
        return FullBatch()
    rate = _rate(budget, n, request.sample_rate, batch)
    if sampling == "poisson":
        return Poisson(sample_rate=rate)
    if n is None or (cap is None and sampling == "truncated_poisson" and budget.neighbours == "add_or_remove"):
        raise ConfigurationError(
            f"datamodule.sampling={sampling} is accounted with the number of units, which privacy.neighbours="
            f"{budget.neighbours} keeps private. Choose datamodule.sampling=poisson.",
            trap="T6" if sampling == "truncated_poisson" else "T5",
        )
    if sampling == "truncated_poisson":
        return Poisson(sample_rate=rate) if cap is None else TruncatedPoisson(sample_rate=rate, cap=min(cap, n), n=n)
    size = batch or max(1, round(rate * n))
    return FixedSize(batch_size=size, n=n) if sampling == "fixed_size" else Shuffle(batch_size=size, n=n)


def _rate(budget: PrivacyBudget, n: int | None, sample_rate: float | None, batch: int | None) -> float:
    """Return the sampling rate: as declared, or expected batch size over public number of units."""
    require_whole("datamodule", {"expected_batch_size": batch}, 1, null=True)
    if sample_rate is not None:
        if not 0 < sample_rate <= 1:
            raise ConfigurationError(f"datamodule.sample_rate={sample_rate} must be in (0, 1].")
        # A difference of one unit is rounding of the rate; more means two settings that contradict each other.
        if budget.neighbours != "add_or_remove" and n and batch and abs(sample_rate * n - batch) > 1:
            raise ConfigurationError(
                f"datamodule.sample_rate={sample_rate:g} of {n} units is {sample_rate * n:.4g}, and "
                f"datamodule.expected_batch_size={batch}: they contradict each other. Set one of them to null."
            )
        return float(sample_rate)
    if budget.neighbours == "add_or_remove" or n is None:
        raise ConfigurationError(
            f"privacy.neighbours={budget.neighbours} keeps the number of units private, so no rate can be derived "
            "from it: declare datamodule.sample_rate and privacy.delta as constants.",
            trap="T5",
        )
    return batch_among(batch, n, f"the {n} units") / n


def _denominator(law: SamplingLaw, budget: PrivacyBudget, n: int | None, batch: int | None) -> float:
    """Return the public constant to divide by: the average number of units in a batch, never the realised number."""
    if budget.neighbours != "add_or_remove" and n is not None:
        if isinstance(law, FullBatch):
            return float(n)
        if batch is None:
            return law.sample_rate * n if isinstance(law, Poisson) else float(law.expected_batch_size or n)
    if batch is None:
        raise ConfigurationError(
            f"privacy.neighbours={budget.neighbours}: the noised sum is divided by a public constant, and none is "
            "declared. Set datamodule.expected_batch_size.",
            trap="T5",
        )
    return float(batch)
