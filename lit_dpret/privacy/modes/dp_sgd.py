r"""DP-SGD: clip each unit's contribution, add Gaussian noise once per step.

Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm 1, with the sum divided by a public constant
instead of the realised batch size. One unit is one query with all its rows (or one pair, or one user); its loss must
depend on its own rows and on public data alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import nn

from lit_dpret.distributed.strategies import Supported, with_xla
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.budget import ClipGroups, ClipName
from lit_dpret.privacy.clipping import BY_BLOCK, make_engine
from lit_dpret.privacy.modes.gaussian import GaussianMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan, SamplingRequest
from lit_dpret.settings import require_choice, require_number

Engine = Literal["ghost", "ghost_tf32", "ghost_bf16", "vmap", "opacus", "loop"]


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGD(GaussianMode):
    """Per-unit clipping and Gaussian noise.

    Guarantees:
        - Removing one unit, or replacing its queries by nothing, moves the sum of a step by at most ``max_grad_norm``
          before noise, however the parameters are grouped for clipping.
        - With ``clip_fraction_budget=f`` a unit also adds a constant, with a sign that depends on whether it was
          clipped, and nothing if it has no gradient; both together move the sum by at most
          ``max_grad_norm / sqrt(1 - f)``.
        - All guarantees of `GaussianMode`.

    Args:
        max_grad_norm: L2 bound on one unit's gradient. The command line sets 0.1 (``configs/privacy/_clipped.yaml``),
            which suits the text models here; other libraries use 1.0.
        engine: ``ghost`` (fast, exact), ``ghost_tf32`` or ``ghost_bf16`` (its products with low-precision inputs, for
            accelerators; norms bounded from above), ``vmap`` (as ghost, and torch.func for layers that ghost refuses),
            ``opacus`` or ``loop`` (for comparison).
        clip: ``abadi`` scales by min(1, C/norm), ``automatic`` by C/(norm + 0.01).
        clip_groups: ``flat`` clips the gradient of all parameters together to C = ``max_grad_norm``; ``per_layer``
            clips that of each of the model's K layers to C/sqrt(K), which also bounds all together by C (He et al.
            2023, 2212.01539). The noise is the same.
        clip_fraction_budget: The share of each step's budget, above 0 and at most 0.1, that pays for releasing the
            noised share of units that were clipped (`lit_dpret.privacy.clip_fraction`); null releases none.
    """

    name: ClassVar[str] = "dp_sgd"
    strategies: ClassVar[Supported] = with_xla(frozenset({"ghost"}))

    max_grad_norm: float = 1.0
    engine: Engine = "ghost"
    clip: ClipName = "abadi"
    clip_groups: ClipGroups = "flat"
    clip_fraction_budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("privacy.engine", self.engine, get_args(Engine))
        require_choice("privacy.clip", self.clip, get_args(ClipName))
        require_choice("privacy.clip_groups", self.clip_groups, get_args(ClipGroups))
        require_number("privacy", self, "max_grad_norm")
        if self.clip_fraction_budget is not None:
            clip_fraction.check_budget(self.clip_fraction_budget)

    def plan(self, request: SamplingRequest, *, units: int, steps: int, module: Any = None) -> PrivacyPlan:
        """Return the plan of ``steps`` logical steps; the sensitivity depends on the settings alone."""
        return self._build_plan(
            request,
            units=units,
            steps=steps,
            max_grad_norm=self.max_grad_norm,
            clip=self.clip,
            clip_groups=self.clip_groups,
            clip_fraction_budget=self.clip_fraction_budget or 0.0,
            engine=self.engine,
        )

    @property
    def clips_by_block(self) -> bool:
        return type(self) is DPSGD and self.engine in BY_BLOCK and not self.fixed_shapes

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        super().attach(module, plan, stream)
        plan = self._plan
        if self.candidates == "rows" and getattr(module, "coupled_loss", False):
            raise UnsupportedModelError(
                f"privacy={self.name} cannot train {type(module).__name__}: its loss couples the examples of a "
                "batch, so clipping each example bounds nothing. Choose privacy=public_passages, which takes the "
                "negatives from public passages, privacy=logit_dp, which bounds every pair, or privacy=synthetic.",
                trap="T11",
            )
        settings: dict[str, Any] = {"max_grad_norm": plan.max_grad_norm, "clip_groups": plan.clip_groups}
        if self.fixed_shapes:
            if plan.engine != "ghost":
                raise ConfigurationError(
                    f"privacy.engine={plan.engine} does not support batches of fixed shape (trainer=tpu, or "
                    "model.fixed_shapes=true). Choose privacy.engine=ghost."
                )
            settings["fixed_shapes"] = True
        self._sums = make_engine(plan.engine, module, clip=plan.clip, **settings)
