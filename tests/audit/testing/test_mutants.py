"""Each known way to break a private step, put in on purpose, fails ``assert_private`` at the property it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_ins import Line, Regression, Words
from torch import Tensor, nn

from lit_dpret.audit.testing import PrivacyViolation, assert_private
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.clip_fraction import NAME
from lit_dpret.privacy.clipping import base, certificate, ghost
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream

Patch = pytest.MonkeyPatch
normal, privatize, add, take = KeyedStream.normal, DPSGD.privatize, DPSGD.add, DPSGD.take
logical_step, unit_loss = PrivateModule._logical_step, PrivateModule.unit_loss


# -- the noise ------------------------------------------------------------------------------------


def scaled(factor: float) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(KeyedStream, "normal", lambda *a, **k: normal(*a, **k) * factor)


def keyed_without(**fixed: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(KeyedStream, "normal", lambda *a, **k: normal(*a, **{**k, **fixed}))


def in_turns_of(steps: int) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(KeyedStream, "normal", lambda *a, step, **k: normal(*a, step=step % steps, **k))


def divided_before_the_noise(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        mean = {name: total / self._plan.denominator for name, total in sums.items()}
        update = privatize(self, mean, **key)
        return replace(update, gradients={n: g * self._plan.denominator for n, g in update.gradients.items()})

    patch.setattr(DPSGD, "privatize", mutant)


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

    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        update, (parts, self.parts) = privatize(self, sums, **key), (getattr(self, "parts", 0), 0)
        for part in range(1, parts):
            more = privatize(self, {n: torch.zeros_like(s) for n, s in sums.items()}, **{**key, "salt": f"{part}"})
            for name, g in more.gradients.items():
                update.gradients[name] += g
        return update

    patch.setattr(DPSGD, "add", adding)
    patch.setattr(DPSGD, "privatize", mutant)


def only_where_touched(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        update = privatize(self, sums, **key)
        return replace(update, gradients={n: g * (sums[n] != 0) for n, g in update.gradients.items()})

    patch.setattr(DPSGD, "privatize", mutant)


def only_where_touched_unless_empty(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        update, empty = privatize(self, sums, **key), not any(s.any() for s in sums.values())
        return replace(update, gradients={n: g if empty else g * (sums[n] != 0) for n, g in update.gradients.items()})

    patch.setattr(DPSGD, "privatize", mutant)


def one_parameter_forgotten(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        update = privatize(self, sums, **key)
        return replace(update, gradients={n: g for n, g in update.gradients.items() if n != "second.bias"})

    patch.setattr(DPSGD, "privatize", mutant)


def one_parameter_raw(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        update = privatize(self, sums, **key)
        update.gradients["second.bias"] = sums["second.bias"] / self._plan.denominator
        return update

    patch.setattr(DPSGD, "privatize", mutant)


def one_value_for_all(patch: Patch) -> None:
    patch.setattr(
        KeyedStream, "normal", lambda self, shape, **k: normal(self, torch.Size((1,)), **k).expand(shape).clone()
    )


def one_row_for_all(patch: Patch) -> None:
    def mutant(self: Any, shape: torch.Size, **key: Any) -> Tensor:
        return normal(self, shape[-1:], **key).expand(shape).clone()

    patch.setattr(KeyedStream, "normal", mutant)


def one_nan(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        update = privatize(self, sums, **key)
        update.gradients["first.weight"][1, 2] = torch.nan
        return update

    patch.setattr(DPSGD, "privatize", mutant)


def no_step_for_an_empty_batch(patch: Patch) -> None:
    def mutant(self: Any, guard: Any, attempt: int, step: int) -> None:
        if self.privacy.counts.units:
            logical_step(self, guard, attempt, step)

    patch.setattr(PrivateModule, "_logical_step", mutant)


# -- the sum --------------------------------------------------------------------------------------


def realised_batch_size(patch: Patch) -> None:
    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        units = max(self.counts.units, 1)
        update = privatize(self, sums, **key)
        scale = self._plan.denominator / units
        return replace(update, gradients={n: g * scale for n, g in update.gradients.items()})

    patch.setattr(DPSGD, "privatize", mutant)


def realised_unless_empty(patch: Patch) -> None:
    """Divides by the realised size plus the noise scaled to match: only the replay can see it."""

    def mutant(self: Any, sums: dict[str, Tensor], **key: Any) -> Any:
        units = self.counts.units or self._plan.denominator
        scale = self._plan.denominator / units
        return privatize(self, {n: s * scale for n, s in sums.items()}, **key)

    patch.setattr(DPSGD, "privatize", mutant)


def whole_batch_as_one_unit(patch: Patch) -> None:
    def mutant(self: Any, row_loss: Any, unit_ids: Tensor, mask: Tensor) -> None:
        add(self, row_loss, torch.zeros_like(unit_ids), torch.ones(1, dtype=torch.bool))

    patch.setattr(DPSGD, "add", mutant)


def no_clipping(patch: Patch) -> None:
    patch.setattr(base, "clip_factors", lambda norms, **settings: norms.isfinite().to(norms.dtype))


def after_averaging(patch: Patch) -> None:
    def mutant(self: Any) -> dict[str, Tensor]:
        sums = take(self)
        norm = sum(float(s.square().sum()) for s in sums.values()) ** 0.5
        return {n: s * min(1.0, self._plan.max_grad_norm / (norm + 1e-30)) for n, s in sums.items()}

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


MUTANTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no noise": (scaled(0.0), "noise: .* or none"),
    "noise divided by the batch size twice": (scaled(1 / 6), "noise: .* got less than the planned noise"),
    "noise of the mean, divided again": (scaled(6.0), "noise: .* more than"),
    "noise that is a tenth too small": (scaled(0.9), "noise: .* less than"),
    "the mean is noised like a sum": (divided_before_the_noise, "noise: .* more than"),
    "noise in every physical batch": (per_physical_batch, "^independence: .* something other than its gradient"),
    "noise once more for every further physical batch": (again_for_every_physical_batch, "physical batches of 2"),
    "noise on touched coordinates only": (only_where_touched, "noise: .* or none"),
    "noise on touched coordinates only, empty batches aside": (
        only_where_touched_unless_empty, "parameter lookup.weight got less",
    ),
    "a parameter gets no update": (one_parameter_forgotten, "second.bias is trainable and got no update"),
    "a parameter gets its sum without noise": (one_parameter_raw, "parameter second.bias got less"),
    "one draw for a whole parameter": (one_value_for_all, "neighbouring coordinates of one parameter get correlated"),
    "one row of noise for a whole matrix": (one_row_for_all, "the rows of one parameter get correlated"),
    "a coordinate is not a number": (one_nan, "the update of parameter first.weight is not finite"),
    "the same noise again after sixteen steps": (in_turns_of(16), "two steps get the same noise"),
    "the same noise at every step": (keyed_without(step=0), "two steps get the same noise"),
    "the same noise in every attempt": (keyed_without(attempt=0), "another attempt gets the same"),
    "the same noise for two sums": (keyed_without(salt=""), "another sum"),
    "the same noise for parameters of equal shape": (keyed_without(parameter=""), "two parameters of equal shape"),
    "an empty batch takes no step": (no_step_for_an_empty_batch, "empty logical batch made 0 updates"),
    "divided by the realised batch size": (realised_batch_size, "noise: .* more than"),
    "the sum alone divided by the realised batch size": (realised_unless_empty, "sensitivity: the noised sum"),
    "the batch is clipped as one unit": (whole_batch_as_one_unit, "independence: .* and each of them alone"),
    "nothing is clipped": (no_clipping, "sensitivity: the clipped sum"),
    "the mean is clipped instead of each unit": (after_averaging, "independence: .* and each of them alone"),
    "each parameter is clipped to the whole bound": (each_parameter_to_the_whole_bound, "sensitivity: the clipped sum"),
    "padding counts": (padding_counts, "beside padding"),
    "the loss is divided by the batch size": (loss_over_the_batch, "independence: .* and each of them alone"),
    "the clip factor is that of the mean norm": (norms_over_the_batch, "sensitivity: the clipped sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_fails_at_what_it_breaks(name: str, monkeypatch: Patch) -> None:
    mutate, words = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(PrivacyViolation, match=words):
        Words().check()


def count_alone(change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Only the noise of the count of clipped units is another one."""

    def mutant(self: Any, shape: torch.Size, **key: Any) -> Tensor:
        return change(self, shape, **key) if key["parameter"] == NAME else normal(self, shape, **key)

    return lambda patch: patch.setattr(KeyedStream, "normal", mutant)


def blank_units_count(patch: Patch) -> None:
    """A unit without rows is told from one that is not there: the sum moves by more than one unit's part."""
    stats = base.ClippedSum.stats

    def mutant(self: Any, norms: Tensor, batch: Any, *present: Tensor) -> Any:
        found = stats(self, norms, batch, *present)
        return replace(found, within=batch.real.sum() - found.clipped)

    patch.setattr(base.ClippedSum, "stats", mutant)


COUNT_MUTANTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no noise": (count_alone(lambda *a, **k: normal(*a, **k) * 0), "clip_fraction got less"),
    "half the noise": (count_alone(lambda *a, **k: normal(*a, **k) / 2), "clip_fraction got less"),
    "the same at every step": (count_alone(lambda *a, **k: normal(*a, **{**k, "step": 0})), "two steps get the same"),
    "the same for two sums": (count_alone(lambda *a, **k: normal(*a, **{**k, "salt": ""})), "another sum"),
    "blank units count": (blank_units_count, "sensitivity: .* replaced by nothing"),
}


@pytest.mark.parametrize("name", sorted(COUNT_MUTANTS))
def test_a_mutant_of_the_count_of_clipped_units_fails_at_what_it_breaks(name: str, monkeypatch: Patch) -> None:
    mutate, words = COUNT_MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(PrivacyViolation, match=words):
        Words(clip_fraction_budget=0.1).check()


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_the_unmutated_step_passes(engine: str) -> None:
    Words(engine=engine).check()


# -- the audit, where everything else is switched off ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "passes"), [("honest", True), ("a sixth", False)])
def test_the_statistical_audit_alone_tells_them_apart(name: str, passes: bool, monkeypatch: Patch) -> None:
    from lit_dpret.audit.testing import private

    monkeypatch.setattr(private, "check_noise_of_empty_steps", lambda probe: 1.0)
    monkeypatch.setattr(private, "check_noise_of_full_steps", lambda probe, sizes: None)
    scaled({"honest": 1.0, "a sixth": 1 / 6}[name])(monkeypatch)
    if passes:
        Words().check(trials=500)
        return
    with pytest.raises(PrivacyViolation, match="epsilon: 500 releases"):
        Words().check(trials=500)


# -- tied weights, coupled losses, padding


certified = certificate.certified


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
def test_a_tied_weight_without_its_cross_term_fails(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(PrivacyViolation, match="sensitivity: the clipped sum"):
        Tied().check()


# -- losses that couple rows ----------------------------------------------------------------------


class BatchNormalised(Words):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) / len(rows["token"])


class CoupledInTraining(Words):
    """Subtracts the mean of the batch, but in training mode only, where a check in evaluation mode is blind."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        return (losses - losses.mean().detach()) * losses if self.training else losses


class Centred(Words):
    """Subtracts the mean gradientless, in either mode."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        return losses * losses.mean().detach()


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

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        return super().collate_rows(rows) | {"longest": torch.full((len(rows),), float(len(rows)))}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * rows["longest"]


@pytest.mark.slow
def test_padding_that_changes_a_loss_fails_with_the_rows_and_cannot_be_seen_in_tensors() -> None:
    rows = [Line(f"q{i}", str(i), f"p{i}", str(i % 3), frozenset()) for i in range(5)]
    torch.manual_seed(0)
    module = PaddedToTheBatch(privacy=DPSGD(eps=1.0, max_grad_norm=0.5))
    with pytest.raises(PrivacyViolation, match="independence: "):
        assert_private(module, rows, 1.0, 1e-5, trials=60)
    assert_private(module, module.collate_rows(rows), 1.0, 1e-5, trials=60)
