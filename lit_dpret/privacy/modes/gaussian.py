"""Base of every mode with Gaussian noise: the budget, the plan, and noise added once per step.

The modes differ in what they sum and in how far one unit can move that sum. The sum of a logical step gets noise of
``noise_multiplier * sensitivity`` in every coordinate, once, and is divided by a public constant.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from lit_dpret.distributed.shards import like, place_of
from lit_dpret.distributed.xla import read, sync_device
from lit_dpret.errors import ConfigurationError
from lit_dpret.files import OutputFile
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.accounting.composition import check_supported
from lit_dpret.privacy.accounting.groups import check_max_units
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, Poisson, SamplingLaw, Shuffle, TruncatedPoisson
from lit_dpret.privacy.budget import AccountantName, Neighbours, NoiseName, PrivacyBudget, SamplingName, Unit
from lit_dpret.privacy.clipping import ClipStats
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.modes.base import Guarantee, PrivacyMode, StepCounts, Update
from lit_dpret.privacy.noise import KeyedStream, noise_source
from lit_dpret.privacy.plan import PrivacyPlan, SamplingRequest
from lit_dpret.privacy.state_watch import StateWatch
from lit_dpret.settings import require_choice, require_number, require_switch, require_whole

#: A law of each kind, for asking whether an accountant judges it, whatever the data.
_DRAWN_SO: dict[str, SamplingLaw] = {
    "truncated_poisson": TruncatedPoisson(sample_rate=0.5, cap=1, n=2),
    "poisson": Poisson(sample_rate=0.5),
    "fixed_size": FixedSize(batch_size=1, n=2),
    "shuffle": Shuffle(batch_size=1, n=2),
    "full_batch": FullBatch(),
}


@dataclass(kw_only=True, eq=False, repr=False)
class GaussianMode(PrivacyMode):
    """A sum with bounded contribution of each unit, plus Gaussian noise.

    Guarantees:
        - Noise is added once per logical step to every coordinate of every trainable parameter, also to those that no
          example of the batch touched, and also in an empty step.
        - The noised sum is divided by a public constant, never by the realised batch size.
        - Where the plan pays for the share of clipped units, their count is one more coordinate of the sum and gets the
          same noise; nothing else about the counts is released.
        - A forward pass of private rows that writes a parameter or a buffer is refused (`StateWatch`).

    Args:
        eps: Budget of the whole run.
        delta: Its delta; null for 1/(2n), n being the public number of units.
        unit: ``query``, ``pair`` or ``user``; ``image`` or ``record`` where the data are images or rows of any kind.
        neighbours: ``zero_out``, ``add_or_remove`` or ``replace_one``.
        noise_multiplier: Noise standard deviation over sensitivity; null to calibrate it.
        accountant: ``pld``, ``rdp`` or ``prv``.
        noise: ``gaussian`` for floating-point normals; ``discrete`` for integers on a public grid, drawn exactly and
            from ChaCha20 (`lit_dpret.privacy.noise`).
        secure_rng: Draw the noise from ChaCha20, on the device of the sum, instead of from NumPy's Philox on the CPU.
        secret_file: The path of the noise secret; null for the user's state folder.
        dataset_ledger: The file in which all runs on this data set add up; null for none. The path identifies the data
            set: every run on the data must name the same file.
        total_eps: The limit for all of these runs together; null takes it from the file.
        max_units_per_user: The maximum number of units that one person contributed, a declared public bound; the card
            then prints the epsilon of all of them together. It does not change the training.
        noise_seed: Key noise and coins with this number instead of the secret, to repeat a run on a CPU bit by bit
            during development. Anyone who knows it can subtract the noise, so the card states no epsilon.
    """

    guarantee: ClassVar[Guarantee] = "dp"

    eps: float
    delta: float | None = None
    unit: Unit = "query"
    neighbours: Neighbours = "zero_out"
    noise_multiplier: float | None = None
    accountant: AccountantName = "pld"
    noise: NoiseName = "gaussian"
    secure_rng: bool = False
    secret_file: str | Path | None = None
    dataset_ledger: str | OutputFile | None = None
    total_eps: float | None = None
    max_units_per_user: int | None = None
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        super().__init__()
        delta = 0.5 if self.delta is None else self.delta
        PrivacyBudget(eps=self.eps, delta=delta, unit=self.unit, neighbours=self.neighbours)
        require_choice("privacy.accountant", self.accountant, get_args(AccountantName))
        require_choice("privacy.noise", self.noise, get_args(NoiseName))
        noise, ledger, seed, most = (
            self.noise_multiplier, self.dataset_ledger, self.noise_seed, self.max_units_per_user,
        )  # fmt: skip
        if noise is not None and not (math.isfinite(noise) and noise > 0):
            raise ConfigurationError(
                f"privacy.noise_multiplier={noise} is not a positive, finite number. "
                "Leave it null to have it calibrated, or choose privacy=none."
            )
        require_switch("privacy", self, "secure_rng")
        require_number("privacy", self, "total_eps", null=True)
        if self.total_eps is not None and ledger is None:
            raise ConfigurationError(
                f"privacy.total_eps={self.total_eps:g} limits all runs on one data set together, and no file adds them "
                "up. Set privacy.dataset_ledger."
            )
        if most is not None:
            check_max_units(most)
            if self.unit == "user":
                raise ConfigurationError(
                    f"privacy.max_units_per_user={most} cannot go with privacy.unit=user: everything from one user is "
                    "one unit already. Set it to null."
                )
        require_whole("privacy", self, 0, "noise_seed", null=True)
        if seed is not None and ledger is not None:
            raise ConfigurationError(
                f"privacy.noise_seed={seed} makes noise that anyone can compute, and no "
                f"privacy.dataset_ledger={ledger} could count a run without privacy. Set one of them to null."
            )
        # Integers are drawn from ChaCha20 only: their proof needs exact bits.
        self.secure_rng = self.secure_rng or self.noise == "discrete"

    def budget(self, public_units: int | None) -> PrivacyBudget:
        """Return the budget, with a null delta derived from the public number of units."""
        delta = self.delta
        if delta is None:
            if public_units is None:
                raise ConfigurationError(
                    "privacy.delta=null cannot be derived: under privacy.neighbours=add_or_remove the "
                    "number of units is private. Set privacy.delta to a constant below 1/n.",
                    trap="T5",
                )
            # Half of 1/n: at 1/n, publishing one unit at random would be allowed.
            delta = 1 / (2 * public_units)
        if self.delta_at_most is not None:
            # The smaller one covers the people of both runs.
            delta = min(delta, self.delta_at_most)
        budget = PrivacyBudget(eps=self.eps, delta=delta, unit=self.unit, neighbours=self.neighbours)
        if public_units is not None:
            budget.refuse_large_delta(public_units)
        return budget

    def check_request(self, request: SamplingRequest) -> None:
        """Refuse batches that this mode cannot plan, before any data are read."""
        self._refuse_missing(request)
        law = _DRAWN_SO[request.sampling]
        if request.sampling == "truncated_poisson" and request.cap is not None:
            law = _DRAWN_SO["poisson"]  # the law if the cap turns out to be all units; otherwise the plan refuses
        if request.sampling == "poisson" and request.sample_rate == 1:
            law = _DRAWN_SO["full_batch"]
        check_supported(law, self.accountant, self.neighbours)

    def _refuse_missing(self, request: SamplingRequest) -> None:
        require_choice("datamodule.sampling", request.sampling, get_args(SamplingName))
        if self.neighbours != "add_or_remove":
            return
        sampled = request.sampling != "full_batch"
        needed = {
            "privacy.delta (a constant below 1/n)": self.delta is None,
            "datamodule.sample_rate": sampled and request.sample_rate is None,
            "datamodule.sampling=poisson (the others are accounted with that number)": sampled
            and request.sampling != "poisson",
            "datamodule.expected_batch_size (what the noised sum is divided by)": request.expected_batch_size is None,
        }
        if missing := [name for name, lacks in needed.items() if lacks]:
            raise ConfigurationError(
                "privacy.neighbours=add_or_remove keeps the number of units private, so nothing can be derived from "
                f"it. Set as constants: {', '.join(missing)}.",
                trap="T6" if sampled and request.sampling == "truncated_poisson" else "T5",
            )

    def norms_cost(self, module: Any, plan: PrivacyPlan) -> dict[str, Any] | None:
        """Return how the norms of pairs of records are computed, and their time; None for a mode without any."""
        return None

    @abstractmethod
    def plan(self, request: SamplingRequest, *, units: int, steps: int, module: Any = None) -> PrivacyPlan:
        """Return the plan of ``steps`` logical steps over ``units`` units, drawn as ``request`` asks.

        Under ``add_or_remove`` the number of units is private, and no part of the plan derives from it.
        """

    def _build_plan(self, request: SamplingRequest, *, units: int, steps: int, **facts: Any) -> PrivacyPlan:
        self._refuse_missing(request)
        public = self.public_units(units)
        return PrivacyPlan.build(
            self.budget(public),
            request,
            n_public=public,
            steps=steps,
            noise_multiplier=self.noise_multiplier,
            accountant=self.accountant,
            mode=self.name,
            max_units_per_user=self.max_units_per_user,
            noise=self.noise,
            **facts,
        )

    def ledger_of_dataset(self, budget: PrivacyBudget, *, run_dir: Path | None = None) -> DatasetLedger | None:
        """Return the data-set ledger; None if not configured."""
        if self.dataset_ledger is None:
            return None
        path = Path(self.dataset_ledger)
        if run_dir is not None and path.expanduser().resolve().is_relative_to(run_dir.resolve()):
            raise ConfigurationError(
                f"privacy.dataset_ledger={path} is inside the run folder {run_dir}, where no other run on the data "
                "set would find it. Put it next to the data."
            )
        return DatasetLedger(
            path, total_eps=self.total_eps, budget=budget, accountant=self.accountant, limit=self.limit
        )

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        self.counts = StepCounts()
        if plan is None:
            raise ConfigurationError(f"privacy={self.name} needs a plan; the PrivacyAccountant callback makes it.")
        self._plan = plan
        self._stream = stream
        self._module = module
        self._watch = StateWatch(module)
        self._stats: list[ClipStats] = []
        self._noise = noise_source(
            plan.noise, stream, noise_multiplier=plan.noise_multiplier, coordinates=_coordinates(module) + 1
        )  # plus one for the count of clipped units

    def add(self, row_loss: Callable[..., Tensor], unit_ids: Tensor, mask: Tensor) -> None:
        """Add a physical batch to a clipping engine; overridden by modes that do not clip units."""
        self._watch.before()
        stats = self._sums.add(row_loss, unit_ids, mask)
        self._watch.after()
        self.counts.units += int(mask.sum())
        # Read in `take`, once per step: reading a count waits for the device.
        self._stats.append(stats)

    def take(self) -> dict[str, Tensor]:
        # All counts in one transfer.
        found = read([count for stats in self._stats for count in (stats.clipped, stats.non_finite, stats.within)])
        self.counts.clipped += sum(found[::3])
        self.counts.non_finite += sum(found[1::3])
        self.counts.within += sum(found[2::3])
        self._stats.clear()
        return super().take()

    def forget(self) -> None:
        self._stats.clear()
        super().forget()

    @property
    def gradient_noise_std(self) -> float:
        if not hasattr(self, "_plan"):
            raise ConfigurationError(
                f"privacy={self.name} has no plan yet, so its noise is not known: the PrivacyAccountant callback makes "
                "it. Add lit_dpret.callbacks.PrivacyAccountant to the Trainer's callbacks."
            )
        return self._plan.noise_std / self._plan.denominator

    def extra_sums(self) -> dict[str, Tensor]:
        plan = self._plan
        if not plan.clip_fraction_budget:
            return {}
        value = clip_fraction.coordinate(
            self.counts.clipped, self.counts.within, max_grad_norm=plan.max_grad_norm, share=plan.clip_fraction_budget
        )
        # float64: counts of all ranks are added, and float32 would round large ones.
        return {clip_fraction.NAME: torch.tensor(value, dtype=torch.float64)}

    def privatize(
        self,
        sums: dict[str, Tensor],
        *,
        attempt: int,
        step: int,
        salt: str = "",
        starts: Mapping[str, int] | None = None,
    ) -> Update:
        # Read before any noise is added: if it is missing, nothing may be released.
        counted = self._counted(sums)
        self.counts = StepCounts()
        std = self._plan.noise_std
        gradients: dict[str, Tensor] = {}
        # Names come from the module and not from the sums: a missing sum must fail, not go without noise.
        for name in trainable(self._module):
            if starts is not None and name not in sums:
                continue  # other ranks have it
            total, start = place_of(sums[name]) if starts is None else (sums[name], starts[name])
            noised = self._noise.noised(
                total, std=std, attempt=attempt, step=step, parameter=name, salt=salt, start=start
            ).div_(self._plan.denominator)  # no narrower than the sum
            gradients[name] = like(sums[name], noised) if starts is None else noised
        for device in {gradient.device for gradient in gradients.values()}:
            # On XLA the graph of the step ends here, so that every step is the same program.
            sync_device(device)
        fraction = None
        if counted is not None:  # the same on every rank, from the counts of all ranks
            with_noise = float(self._noise.noised(
                counted.double(), std=std, attempt=attempt, step=step, parameter=clip_fraction.NAME, salt=salt
            ))  # fmt: skip
            fraction = clip_fraction.estimate(
                with_noise,
                max_grad_norm=self._plan.max_grad_norm,
                share=self._plan.clip_fraction_budget,
                denominator=self._plan.denominator,
            )
        return Update(gradients, std, self._plan.sensitivity, self._plan.denominator, fraction)

    def _counted(self, sums: Mapping[str, Tensor]) -> Tensor | None:
        """Return the coordinate of the clipped units among the sums; None if the plan does not pay for it."""
        if not self._plan.clip_fraction_budget:
            return None
        if clip_fraction.NAME not in sums:
            raise ConfigurationError(
                f"privacy.clip_fraction_budget={self._plan.clip_fraction_budget:g} releases a count with each "
                "step, and the training loop did not show it to the guard: add privacy.extra_sums() to the sums after "
                "privacy.take(), or set it to null."
            )
        return sums[clip_fraction.NAME]


def _coordinates(module: nn.Module) -> int:
    """Return how many coordinates an update has over all ranks, whatever part this process holds."""
    return sum(max(p.numel(), int(getattr(p, "ds_numel", 0))) for p in trainable(module).values())
