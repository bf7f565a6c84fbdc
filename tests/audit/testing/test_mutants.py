"""Each known way to break a private step, put in on purpose, fails ``assert_private`` at the property it breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_ins import Line, Regression, Words
from torch import Tensor, nn

from lit_dpret.audit.testing import PrivacyViolation, assert_private, private
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.clip_fraction import NAME
from lit_dpret.privacy.clipping import base, certificate, ghost
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream

Patch = pytest.MonkeyPatch
Mutate = Callable[[Patch], None]
Tensors = dict[str, Tensor]
normal, privatize, add, take = KeyedStream.normal, DPSGD.privatize, DPSGD.add, DPSGD.take
logical_step, unit_loss, certified = PrivateModule._logical_step, PrivateModule.unit_loss, certificate.certified


# -- the noise ------------------------------------------------------------------------------------


def drawn(change: Callable[..., Tensor], *, of_the_count_alone: bool = False) -> Mutate:
    """The noise is drawn in another way: all of it, or that of the count of clipped units."""

    def mutant(self: Any, shape: torch.Size, **key: Any) -> Tensor:
        honest = of_the_count_alone and key["parameter"] != NAME
        return normal(self, shape, **key) if honest else change(self, shape, **key)

    return lambda patch: patch.setattr(KeyedStream, "normal", mutant)


def scaled(factor: float, **how: Any) -> Mutate:
    return drawn(lambda *a, **k: normal(*a, **k) * factor, **how)


def keyed_without(of_the_count_alone: bool = False, **fixed: Any) -> Mutate:
    return drawn(lambda *a, **k: normal(*a, **{**k, **fixed}), of_the_count_alone=of_the_count_alone)


def in_turns_of(steps: int) -> Mutate:
    return drawn(lambda *a, step, **k: normal(*a, step=step % steps, **k))


def noised(
    after: Callable[[Tensors, Tensors, float], Mapping[str, Tensor]] = lambda gradients, sums, scale: gradients,
    before: Callable[[Tensors, float], Tensors] = lambda sums, scale: sums,
) -> Mutate:
    """The sums are changed before the noise, or the gradients after it.

    ``scale`` is the public denominator over the number of units there were, 1 where there were none.
    """

    def mutant(self: Any, sums: Tensors, **key: Any) -> Any:
        scale = self._plan.denominator / (self.counts.units or self._plan.denominator)
        update = privatize(self, before(sums, scale), **key)
        return replace(update, gradients=dict(after(update.gradients, sums, scale)))

    return lambda patch: patch.setattr(DPSGD, "privatize", mutant)


def times(values: Tensors, factor: float) -> Tensors:
    return {name: value * factor for name, value in values.items()}


def where_touched(gradients: Tensors, sums: Tensors, scale: float) -> Tensors:
    return {name: value * (sums[name] != 0) for name, value in gradients.items()}


def where_touched_unless_empty(gradients: Tensors, sums: Tensors, scale: float) -> Tensors:
    return where_touched(gradients, sums, scale) if any(s.any() for s in sums.values()) else gradients


def with_one_nan(gradients: Tensors, sums: Tensors, scale: float) -> Tensors:
    gradients["first.weight"][1, 2] = torch.nan
    return gradients


def per_physical_batch(patch: Patch) -> None:
    def mutant(self: Any, *rest: Any) -> None:
        add(self, *rest)
        for total in self._sums._sums.values():
            total += torch.randn(total.shape) * self._plan.noise_std

    patch.setattr(DPSGD, "add", mutant)


def again_for_every_physical_batch(patch: Patch) -> None:
    """The sums are right; the noise is added as often as there were physical batches."""

    def adding(self: Any, *rest: Any) -> None:
        self.parts = getattr(self, "parts", 0) + 1
        add(self, *rest)

    def mutant(self: Any, sums: Tensors, **key: Any) -> Any:
        update, (parts, self.parts) = privatize(self, sums, **key), (getattr(self, "parts", 0), 0)
        for part in range(1, parts):
            more = privatize(self, times(sums, 0.0), **{**key, "salt": f"{part}"})
            for name, g in more.gradients.items():
                update.gradients[name] += g
        return update

    patch.setattr(DPSGD, "add", adding)
    patch.setattr(DPSGD, "privatize", mutant)


def no_step_for_an_empty_batch(patch: Patch) -> None:
    def mutant(self: Any, guard: Any, attempt: int, step: int) -> None:
        if self.privacy.counts.units:
            logical_step(self, guard, attempt, step)

    patch.setattr(PrivateModule, "_logical_step", mutant)


# -- the sum --------------------------------------------------------------------------------------


def whole_batch_as_one_unit(patch: Patch) -> None:
    def mutant(self: Any, row_loss: Any, unit_ids: Tensor, mask: Tensor) -> None:
        add(self, row_loss, torch.zeros_like(unit_ids), torch.ones(1, dtype=torch.bool))

    patch.setattr(DPSGD, "add", mutant)


def no_clipping(patch: Patch) -> None:
    patch.setattr(base, "clip_factors", lambda norms, **settings: norms.isfinite().to(norms.dtype))


def after_averaging(patch: Patch) -> None:
    def mutant(self: Any) -> Tensors:
        sums = take(self)
        norm = sum(float(s.square().sum()) for s in sums.values()) ** 0.5
        return times(sums, min(1.0, self._plan.max_grad_norm / (norm + 1e-30)))

    no_clipping(patch)
    patch.setattr(DPSGD, "take", mutant)


def each_parameter_to_the_whole_bound(patch: Patch) -> None:
    """Clip each parameter to C instead of all together: the bound is sqrt(parameters) times C."""

    def mutant(self: Any, row_loss: Any, batch: Any) -> Any:
        losses = row_loss()
        for unit, name in ((u, n) for u in range(batch.units) for n in self.parameters):
            mine = losses[(batch.unit_of_row == unit) & batch.row_is_real()].sum()
            (g,) = torch.autograd.grad(mine, [self.parameters[name]], retain_graph=True)
            self._sums[name] = self._sums.get(name, 0) + g * min(1.0, self.max_grad_norm / (float(g.norm()) + 1e-30))
        return self.stats(torch.zeros(batch.units), batch)

    patch.setattr(ghost.GhostClipping, "_add", mutant)


def padding_counts(patch: Patch) -> None:
    patch.setattr(DPSGD, "add", lambda self, loss, ids, mask: add(self, loss, ids, torch.ones_like(mask)))


def loss_over_the_batch(patch: Patch) -> None:
    def mutant(self: Any, batch: Any) -> Any:
        losses = unit_loss(self, batch)
        return lambda: losses() / len(batch.mask)

    patch.setattr(PrivateModule, "unit_loss", mutant)


def norms_over_the_batch(patch: Patch) -> None:
    """Clip by the mean norm of the physical batch: the factor of one unit depends on the others."""
    honest = base.clip_factors
    patch.setattr(base, "clip_factors", lambda norms, **s: honest(norms.mean().expand_as(norms).clone(), **s))


MUTANTS: dict[str, tuple[Mutate, str]] = {
    "no noise": (scaled(0.0), "noise: .* or none"),
    "noise divided by the batch size twice": (scaled(1 / 6), "noise: .* got less than"),
    "noise of the mean, divided again": (scaled(6.0), "noise: .* more than"),
    "noise that is a tenth too small": (scaled(0.9), "noise: .* less than"),
    "the mean is noised like a sum": (
        noised(lambda g, sums, scale: times(g, 6.0), lambda sums, scale: times(sums, 1 / 6)), "noise: .* more than",
    ),
    "noise in every physical batch": (per_physical_batch, "^independence: .* something other than its gradient"),
    "noise once more for every further physical batch": (again_for_every_physical_batch, "physical batches of 2"),
    "noise on touched coordinates only": (noised(where_touched), "noise: .* or none"),
    "noise on touched coordinates only, empty batches aside": (
        noised(where_touched_unless_empty), "parameter lookup.weight got less",
    ),
    "a parameter gets no update": (
        noised(lambda g, sums, scale: {n: v for n, v in g.items() if n != "second.bias"}), "second.bias is trainable",
    ),
    "a parameter gets its sum without noise": (
        noised(lambda g, sums, scale: g | {"second.bias": sums["second.bias"] / 6}), "parameter second.bias got less",
    ),
    "one draw for a whole parameter": (
        drawn(lambda self, shape, **k: normal(self, torch.Size((1,)), **k).expand(shape).clone()),
        "neighbouring coordinates",
    ),
    "one row of noise for a whole matrix": (
        drawn(lambda self, shape, **k: normal(self, shape[-1:], **k).expand(shape).clone()),
        "the rows of one parameter",
    ),
    "a coordinate is not a number": (noised(with_one_nan), "first.weight is not finite"),
    "the same noise again after sixteen steps": (in_turns_of(16), "two of the first 64 steps get the same noise"),
    "the same noise at every step": (keyed_without(step=0), "two steps get the same noise"),
    "the same noise in every attempt": (keyed_without(attempt=0), "another attempt"),
    "the same noise for two sums": (keyed_without(salt=""), "another sum"),
    "the same noise for parameters of equal shape": (keyed_without(parameter=""), "two parameters of equal shape"),
    "an empty batch takes no step": (no_step_for_an_empty_batch, "empty logical batch made 0 updates"),
    "divided by the realised batch size": (
        noised(lambda g, sums, scale: times(g, scale if scale != 1 else 6.0)), "noise: .* more than",
    ),
    "the sum alone divided by the realised batch size": (
        noised(before=times), "sensitivity: the noised sum",  # which only the replay can see
    ),
    "the batch is clipped as one unit": (whole_batch_as_one_unit, "independence: .* and each of them alone"),
    "nothing is clipped": (no_clipping, "sensitivity: the clipped sum"),
    "the mean is clipped instead of each unit": (after_averaging, "independence: .* and each of them alone"),
    "each parameter is clipped to the whole bound": (each_parameter_to_the_whole_bound, "sensitivity: the clipped sum"),
    "padding counts": (padding_counts, "next to padding"),
    "the loss is divided by the batch size": (loss_over_the_batch, "independence: .* and each of them alone"),
    "the clip factor is that of the mean norm": (norms_over_the_batch, "sensitivity: the clipped sum"),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_fails_at_what_it_breaks(name: str, monkeypatch: Patch) -> None:
    mutate, words = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(PrivacyViolation, match=words):
        Words().check()


def blank_units_count(patch: Patch) -> None:
    """A unit without rows is told from one that is not there: the sum moves by more than one unit's part."""
    stats = base.ClippedSum.stats

    def mutant(self: Any, norms: Tensor, batch: Any, *present: Tensor) -> Any:
        found = stats(self, norms, batch, *present)
        return replace(found, within=batch.real.sum() - found.clipped)

    patch.setattr(base.ClippedSum, "stats", mutant)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mutate", "words"),
    [
        pytest.param(scaled(0.0, of_the_count_alone=True), "clip_fraction got less", id="no noise"),
        pytest.param(scaled(0.5, of_the_count_alone=True), "clip_fraction got less", id="half the noise"),
        pytest.param(keyed_without(True, step=0), "two steps get the same", id="the same at every step"),
        pytest.param(keyed_without(True, salt=""), "another sum", id="the same for two sums"),
        pytest.param(blank_units_count, "sensitivity: .* replaced by nothing", id="blank units count"),
    ],
)
def test_a_mutant_of_the_count_of_clipped_units_fails_at_what_it_breaks(
    mutate: Mutate, words: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(PrivacyViolation, match=words):
        Words(clip_fraction_budget=0.1).check()


@pytest.mark.costly
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_the_unmutated_step_passes(engine: str) -> None:
    Words(engine=engine).check()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1 / 6])
def test_the_statistical_audit_alone_tells_a_sixth_of_the_noise_from_all_of_it(
    factor: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(private, "check_noise_of_empty_steps", lambda probe: 1.0)
    monkeypatch.setattr(private, "check_noise_of_full_steps", lambda probe, sizes: None)
    scaled(factor)(monkeypatch)
    if factor == 1:
        Words().check(trials=500)
        return
    with pytest.raises(PrivacyViolation, match="epsilon: 500 releases"):
        Words().check(trials=500)


# -- tied weights, coupled losses, padding ----------------------------------------------------------


class Tied(Words):
    """Token in, token out, by one matrix; its two gradients point the same way, so their cross term is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = None
        self.outward = nn.Linear(4, 9, bias=False)
        self.outward.weight = self.lookup.weight

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return -self.outward(self.lookup(rows["token"])).gather(1, rows["token"][:, None]).squeeze(1)


def no_cross_term(patch: Patch) -> None:
    patch.setattr(certificate.Bounds, "of_cross_terms", lambda *arguments: None)


def last_use_only(patch: Patch) -> None:
    patch.setattr(ghost, "certified", lambda uses, *rest: certified([u[-1:] for u in uses], *rest))


@pytest.mark.parametrize("mutate", [no_cross_term, last_use_only])
def test_a_tied_weight_without_its_cross_term_fails(mutate: Mutate, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(PrivacyViolation, match="sensitivity: the clipped sum"):
        Tied().check()


class BatchNormalised(Words):
    def per_row_loss(self, rows: Tensors) -> Tensor:
        return super().per_row_loss(rows) / len(rows["token"])


class CoupledInTraining(Words):
    """Subtracts the mean of the batch, but in training mode only, where a check in evaluation mode is blind."""

    def per_row_loss(self, rows: Tensors) -> Tensor:
        losses = super().per_row_loss(rows)
        return (losses - losses.mean().detach()) * losses if self.training else losses


class Centred(Words):
    """Multiplies by the mean without its gradient, in either mode."""

    def per_row_loss(self, rows: Tensors) -> Tensor:
        losses = super().per_row_loss(rows)
        return losses * losses.mean().detach()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("module", "engine", "then"),
    [
        (BatchNormalised, "ghost", "independence: .* and each of them alone"),
        (Centred, "ghost", "independence: .* and each of them alone"),
        (CoupledInTraining, "ghost", "independence: .* in training mode"),
        (CoupledInTraining, "loop", ""),  # no unit meets another one there
    ],
)
def test_a_loss_that_depends_on_other_rows_fails(
    module: type[Words], engine: str, then: str, monkeypatch: Patch
) -> None:
    with pytest.raises(PrivacyViolation, match=r"independence: .* when other rows are in the batch"):
        module(engine=engine).check()
    monkeypatch.setattr(CouplingCheck, "look", lambda *_: None)
    if not then:
        module(engine=engine).check()
        return
    with pytest.raises(PrivacyViolation, match=then):  # found by the replay where the module's own check is off
        module(engine=engine).check()


class PaddedToTheBatch(Regression):
    """A row's target depends on how many rows were collated with it, as padding to the longest does."""

    def collate_rows(self, rows: list[Any]) -> Tensors:
        return super().collate_rows(rows) | {"longest": torch.full((len(rows),), float(len(rows)))}

    def per_row_loss(self, rows: Tensors) -> Tensor:
        return super().per_row_loss(rows) * rows["longest"]


@pytest.mark.slow
def test_padding_that_changes_a_loss_fails_with_the_rows_and_cannot_be_seen_in_tensors() -> None:
    rows = [Line(f"q{i}", str(i), f"p{i}", str(i % 3), frozenset()) for i in range(5)]
    torch.manual_seed(0)
    module = PaddedToTheBatch(privacy=DPSGD(eps=1.0, max_grad_norm=0.5))
    with pytest.raises(PrivacyViolation, match="independence: "):
        assert_private(module, rows, 1.0, 1e-5, trials=60)
    assert_private(module, module.collate_rows(rows), 1.0, 1e-5, trials=60)
