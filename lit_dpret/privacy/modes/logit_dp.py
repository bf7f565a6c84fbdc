"""Logit-DP: clip the gradient of each pair's similarity (Kong, Munoz Medina and Ribero, 2310.03104).

Each gradient of S_ij depends on two records. The loss proves how far one record changes the coefficients
(`PairwiseLoss.sensitivity`). For the softmax that is about 2 (1 + e^(2 / temperature)), at most about 2 n /
temperature: no advantage over clipping rows at temperatures of 0.01 to 0.1. docs/derivations.md lists the differences
from the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from lit_dpret.distributed.strategies import SUMS_ADD_UP, Supported
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.privacy.accounting.coupled_sensitivity import Bounded, LossClaim, Relation
from lit_dpret.privacy.clipping.base import room_for_rounding, trainable
from lit_dpret.privacy.clipping.pairs import (
    NormsName,
    choose_norms,
    clipped_pair_factors,
    costs,
    embed_all,
    make_pair_norms,
    weighted_backward,
    width_of,
)
from lit_dpret.privacy.clipping.pairs.batch import PAIR_ROUNDING
from lit_dpret.privacy.modes.base import GradientSums
from lit_dpret.privacy.modes.coupled import CoupledMode, named
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import require_choice, require_whole

SensitivityRule = Literal["proof", "paper"]
#: How far coefficients may deviate from the derivative of the row losses, relative to the largest: float32 rounding.
TOLERANCE, TINY = 1e-3, 1e-12


class PairLoss(Protocol):
    """The loss interface of this mode, on the matrix of similarities; `lit_dpret.losses.PairwiseLoss` implements it."""

    @property
    def claim(self) -> LossClaim: ...
    def row_losses(self, scores: Tensor, mask: Tensor | None = None) -> Tensor: ...
    def coefficients(self, scores: Tensor, mask: Tensor | None = None) -> Tensor: ...
    def sensitivity(self, n_max: int, *, relation: Relation) -> float: ...


@dataclass(kw_only=True, eq=False, repr=False)
class LogitDP(CoupledMode):
    """Clip the gradient of each pair's similarity, for losses of all similarities in a sub-batch.

    Guarantees:
        - Removing one unit moves the sum of a step by at most ``max_logit_grad_norm`` times the loss's sensitivity at
          ``n_max``; that holds for any encoder and any temperature.
        - A pair's clip factor depends only on its two records.
        - In every sub-batch, the coefficients of a loss from outside this package are compared with the derivative of
          its row losses. Any other function, such as one that remembers earlier tables, is refused.
        - With ``sensitivity=paper`` nothing is claimed: the card says that it is not proved.
        - Dropout is off in the step, and every pass runs in float32 or wider, whatever the Trainer's precision: norms
          and gradient come from one function.

    Args:
        max_logit_grad_norm: L2 bound B on the gradient of one pair's similarity.
        l2_sensitivity: The total instead, B times the loss's sensitivity, which the paper tunes.
        norms: How the norms are computed: ``pair_ghost``, ``jacobian``, ``linear_head`` and ``brute_force`` are exact;
            ``k_blocks`` is exact for two towers and a proved bound for a shared one; ``auto`` takes the cheapest that
            is exact.
        sensitivity: ``proof``, or ``paper`` for Lemma 4.5, which is refuted.
        rows_at_once: Rows that go through the encoder together in the second pass.
        pairs_at_once: With ``pair_ghost``, pairs whose gradients of layer outputs are held together; null for as many
            as fit in 256 MiB (2 GiB on a device other than the CPU).
        delta: As for `GaussianMode`, but it must be given.
    """

    name: ClassVar[str] = "logit_dp"
    strategies: ClassVar[Supported] = SUMS_ADD_UP
    bounded: ClassVar[Bounded] = "pair"
    bound_key: ClassVar[str] = "max_logit_grad_norm"

    max_grad_norm: float | None = field(init=False, default=None)  # set from max_logit_grad_norm
    max_logit_grad_norm: float | None = None
    norms: NormsName = "auto"
    sensitivity: SensitivityRule = "proof"
    rows_at_once: int = 64
    pairs_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.delta is None:
            raise ConfigurationError(
                "privacy.delta=null: privacy=logit_dp derives no delta. Set privacy.delta to a constant below 1/n."
            )
        self.max_grad_norm = self.max_logit_grad_norm
        super().__post_init__()
        require_choice("privacy.norms", self.norms, get_args(NormsName))
        require_choice("privacy.sensitivity", self.sensitivity, get_args(SensitivityRule))
        require_whole("privacy", self, 1, "rows_at_once")
        require_whole("privacy", self, 1, "pairs_at_once", null=True)

    # -- the plan ----------------------------------------------------------------------------

    def _read_loss(self, module: Any, expected: float) -> PairLoss:
        self._refuse_uncoupled(module)
        loss: Any = module.pair_loss(expected)
        if self.sensitivity == "paper":
            if "sensitivity_from" not in {one.name for one in fields(loss)}:
                raise ConfigurationError(
                    f"privacy.sensitivity=paper is Lemma 4.5 for the softmax; {type(loss).__name__} has no such "
                    "constant. Set it to proof."
                )
            loss = replace(loss, sensitivity_from="paper")
        found: PairLoss = loss
        return found

    def _sensitivity(self, n_max: int, change: Relation, loss: Any) -> float:
        found: float = loss.sensitivity(n_max, relation=change)
        return found

    def _claim(self, loss: Any) -> LossClaim:
        found: LossClaim = loss.claim
        return found

    def norms_cost(self, module: Any, plan: PrivacyPlan) -> dict[str, Any] | None:
        """Return how the norms of pairs are computed, and their time in ordinary steps within a factor of 2.

        An ordinary step is the forward and backward pass of the same records without privacy. The time is None where
        it was not measured.
        """
        coupling = plan.coupling
        if coupling is None:
            return None
        shape = {"width": width_of(module), **module.pair_shape()}
        name = choose_norms(n_max=coupling.n_max, **shape) if self.norms == "auto" else self.norms
        shape.pop("linear_head", None)
        return {"norms": name, "ordinary_steps": costs(n_max=math.ceil(coupling.expected), **shape).get(name)}

    # -- the step ----------------------------------------------------------------------------

    @property
    def has_exact_norms(self) -> bool:
        """Whether pairs are clipped by their norms instead of upper bounds; known once attached."""
        return self._norms.exact

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        super().attach(module, plan, stream)
        coupling = self._plan.coupling
        if coupling is None:
            raise ConfigurationError("privacy=logit_dp needs a plan from its own plan(); this one has no sub-batches.")
        contrasted: Any = module
        self._loss = self._read_loss(module, coupling.expected)
        if coupling.loss not in ("", named(self._loss)):
            raise ConfigurationError(
                f"The noise was planned for {coupling.loss}, and model.loss is now {named(self._loss)}, whose "
                "sensitivity differs. Set model.loss before the plan is made."
            )
        _refuse_learned_loss(contrasted)
        settings: Any = {"pairs_at_once": self.pairs_at_once} if self.norms == "pair_ghost" else {}
        with evaluation_mode(contrasted):
            shape = contrasted.pair_shape()
            self._norms = make_pair_norms(self.norms, contrasted, n_max=coupling.n_max, **shape, **settings)
        self._sums = GradientSums(module)

    def contribute(self, module: Any, batch: Any) -> None:
        self._refuse_large(int(batch.mask.sum()))
        answers = batch.rows.get("answers")
        parameters = trainable(self._module)
        self._watch.before()
        with evaluation_mode(self._module):
            pairs = module.pair_batch(batch.rows)
            # Norms first, since the second pass weights each pair's gradient by its factor.
            norms = self._norms.table(pairs)
            queries, passages = embed_all(pairs, rows_at_once=self.rows_at_once)
            # Scores in float32: coefficients of differently rounded scores belong to another function.
            with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
                scores = queries @ passages.T
                coefficients = self._loss.coefficients(scores, answers)
                if self._claim(self._loss) == "declared":
                    _refuse_other_coefficients(self._loss, scores, answers, coefficients)
                bound = room_for_rounding(self._plan.max_grad_norm, parameters.values(), PAIR_ROUNDING)
                factors, broken = clipped_pair_factors(norms, bound)
                module.note_loss(float(self._loss.row_losses(scores, answers).nan_to_num().sum()))
            # One backward pass of the weighted similarities gives the sum of all clipped gradients.
            weights = coefficients.to(factors) * factors
            found = weighted_backward(pairs, weights, parameters, rows_at_once=self.rows_at_once)
        self._watch.after()
        self.counts.units += int(batch.mask.sum())
        self.counts.clipped += int((factors < 1).sum())
        self.counts.non_finite += broken
        self._sums.add(found)

    def add(self, row_loss: Any, unit_ids: Tensor, mask: Tensor) -> None:
        raise UnsupportedModelError(
            "privacy=logit_dp clips pairs, and row losses do not show them. Call contribute(module, batch) instead."
        )


def _refuse_other_coefficients(loss: Any, scores: Tensor, answers: Tensor | None, found: Tensor) -> None:
    """Refuse coefficients that are not the derivative of the row losses: only the loss is checked for memory."""
    # From a new object, without anything the loss stores besides its settings.
    fresh: Any = replace(loss) if is_dataclass(type(loss)) else loss
    with torch.enable_grad():
        table = scores.detach().requires_grad_()
        total = fresh.row_losses(table, answers).sum()
        expected = torch.autograd.grad(total, table)[0] if total.requires_grad else torch.zeros_like(scores)
    gap, largest = ((found - expected).nan_to_num().abs().max(), expected.nan_to_num().abs().max())
    if float(gap) > TOLERANCE * float(largest) + TINY:
        raise UnsupportedModelError(
            f"privacy=logit_dp cannot train with {type(loss).__name__}: its coefficients are not the derivative of its "
            "row losses, or depend on earlier batches, so its bounds are those of another function. Make them the "
            "derivative, from these scores alone; DeclaredPairLoss derives them from row_loss.",
            trap="T11",
        )


def _refuse_learned_loss(module: Any) -> None:
    """Refuse parameters outside the similarities: their gradient is not made of pairs, and no clipping bounds it."""
    # By identity: a parameter may be registered under several names.
    inside = {id(p) for p in module.pair_parameters()}
    learned = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if learned:
        raise UnsupportedModelError(
            f"privacy=logit_dp bounds the gradients of similarities, and {learned[0]} is not part of them (a learned "
            "temperature, a bias of the logits). Freeze it at a public constant, as the temperature of model.loss is.",
            trap="T11",
        )
