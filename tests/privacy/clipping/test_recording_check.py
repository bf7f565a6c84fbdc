"""The audit of a recording notices alone what the sums do not show; a cancelling unit needs float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import ghost, recorder, recording_check, rules, units

Patch = pytest.MonkeyPatch


def test_a_unit_whose_terms_cancel_keeps_its_exact_norm(lib: SimpleNamespace) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    x = torch.randn(1, 1, 64).expand(1, 2, 64) + 1e-4 * torch.randn(1, 2, 64)
    sign = torch.tensor([1.0, -1.0])[:, None]
    case = lib.Case(model, lambda b: (model(b["x"]) * sign).sum((1, 2)), {"x": x})
    exact = float((x * sign).sum(1).double().norm()) * 8
    assert abs(float(case.run(ghost.GhostClipping(model, max_grad_norm=exact / 2)).norms) / exact - 1) < 1e-4


@pytest.mark.parametrize("mutant", ["layouts", "parameters"])
def test_the_audit_alone_catches_a_shared_position_embedding(
    mutant: str, lib: SimpleNamespace, monkeypatch: Patch
) -> None:
    """A recorder that charges shared positions to the rows in turn: sums stay right, norms do not."""
    case = lib.bert()
    case.rows = {n: v[:, :5] if v.dim() == 2 and n != "target" else v for n, v in case.rows.items()}  # length = batch

    if mutant == "layouts":
        monkeypatch.setattr(rules, "POSITIONED", set())
        record = recorder.Recorder._record

        def transposed(self: Any, site: Any, output: Tensor, saved: Any, aliases: Any) -> None:
            if "position_embeddings" in site.name:
                self.uses.append(
                    recorder.Use(
                        site,
                        0,
                        recorder._edge_below(output),
                        torch.Size((5, 1, 12)),
                        saved.view(5, 1),
                        aliases,
                        saved._version,
                    )
                )
                return
            record(self, site, output, saved, aliases)

        monkeypatch.setattr(recorder.Recorder, "_record", transposed)
        words = "cannot be assigned to units"
    else:
        plain = ghost.contributions_of

        def without(use: Any, *rest: Any, **key: Any) -> Any:
            return [] if "position_embeddings" in use.site.name else plain(use, *rest, **key)

        monkeypatch.setattr(ghost, "contributions_of", without)
        words = "another gradient than autograd"
    with pytest.raises(UnsupportedModelError, match=words):
        lib.check_exact(case)


def test_the_weights_of_the_audit_differ_between_neighbouring_units() -> None:
    for count in (1, 2, 16, 40):
        batch = units.UnitRows.build(torch.arange(count), torch.ones(count, dtype=torch.bool))
        weights = recording_check.unit_weights(batch)
        assert len(set(weights[:16].tolist())) == min(count, 16)
        assert (weights.abs().log2() % 1 == 0).all()
