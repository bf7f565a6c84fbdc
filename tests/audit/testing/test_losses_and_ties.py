"""Tied weights, losses that couple rows, and padding that depends on the batch, each put to ``assert_private``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_ins import Line, Regression, Words
from torch import Tensor, nn

from lit_dpret.audit.testing import PrivacyViolation, assert_private
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.privacy.clipping import certificate, ghost
from lit_dpret.privacy.modes import DPSGD

Patch = pytest.MonkeyPatch
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
    ("module", "first", "then"),
    [
        (
            BatchNormalised,
            "independence: .* when other rows are in the batch",
            "independence: .* and each of them alone",
        ),
        (Centred, "independence: .* when other rows are in the batch", "independence: .* and each of them alone"),
        (CoupledInTraining, "independence: .* when other rows are in the batch", "independence: .* in training mode"),
    ],
)
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_loss_that_depends_on_other_rows_fails(
    module: type[Words], engine: str, first: str, then: str, monkeypatch: Patch
) -> None:
    with pytest.raises(PrivacyViolation, match=first):
        module(engine=engine).check()
    monkeypatch.setattr(CouplingCheck, "look", lambda *_: None)
    if engine == "loop":  # no unit meets another one there
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
