"""The exactness tests can fail: each known mistake, put in on purpose, makes one of them fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import audit, contributions, ghost, recorder, rules, units

Patch = pytest.MonkeyPatch
squared_norms = contributions.squared_norms


def no_cross_term(patch: Patch) -> None:
    patch.setattr(contributions, "cross_terms", lambda inputs, outputs, ids, looked_up: torch.zeros(len(ids)).double())


def each_use_alone(patch: Patch) -> None:
    def mutant(parameters: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        found = [squared_norms([[use]], *rest) for uses in parameters for use in uses]
        return sum(s for s, _ in found), sum(e for _, e in found)  # type: ignore[return-value]

    patch.setattr(ghost, "squared_norms", mutant)
    patch.setattr(contributions, "ROOM", 0)  # what is written out is a sum over the uses already


def last_use_only(patch: Patch) -> None:
    """What fastDP does: the second use of a weight overwrites the norm of the first."""
    patch.setattr(ghost, "squared_norms", lambda all_, *rest: squared_norms([uses[-1:] for uses in all_], *rest))


def rows_alone(patch: Patch) -> None:
    def mutant(self: Any, tensor: Tensor) -> Tensor:
        joined = join(self, tensor)
        each = self.rows.shape[1]
        first = torch.arange(joined.shape[1]) < joined.shape[1] // each
        return joined * first.view(1, -1, *[1] * (joined.dim() - 2))

    join = units.RowGroup.join
    patch.setattr(units.RowGroup, "join", mutant)


def shared_positions(patch: Patch) -> None:
    patch.setattr(rules, "POSITIONED", set())


def shared_bias(patch: Patch) -> None:
    patch.setattr(rules, "RELATIVE_ATTENTION", set())


def padding_row(patch: Patch) -> None:
    plain = recorder.contributions_of

    def mutant(use: Any, *rest: Any, **key: Any) -> Any:
        if use.site.kind == "embedding":
            patch.setattr(use.site.module, "padding_idx", None)
        return plain(use, *rest, **key)

    patch.setattr(ghost, "contributions_of", mutant)


def every_gram_entry_positive(patch: Patch) -> None:
    plain = contributions._outer_squares
    patch.setattr(contributions, "_outer_squares", lambda *a, **k: (plain(*a, **k)[1], plain(*a, **k)[1]))


MUTANTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "the cross term of a tied weight is dropped": (no_cross_term, "embedding_tied_to_linear"),
    "the cross term of T5's tied output layer is dropped": (no_cross_term, "t5_tied_relu"),
    "the uses of a weight are clipped as if they were separate weights": (each_use_alone, "module_called_three_times"),
    "two layers with one weight are clipped as if they had two": (each_use_alone, "two_linears_with_one_weight"),
    "the towers of a siamese encoder are clipped apart": (each_use_alone, "siamese"),
    "the last use of a weight overwrites the others": (last_use_only, "t5_tied_relu"),
    "position ids are left without a batch axis": (shared_positions, "bert"),
    "T5's position bias is left without a batch axis": (shared_bias, "t5_encoder"),
    "T5's position bias is charged to the rows by query": (shared_bias, "t5_batch_equal_to_query_length"),
    "the padding row gets a gradient": (padding_row, "small"),
    "the Gram matrix loses its off-diagonal": (every_gram_entry_positive, "t5_tied_relu"),
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_fails_the_exactness_test(name: str, lib: SimpleNamespace, monkeypatch: Patch) -> None:
    mutate, case = MUTANTS[name]
    lib.check_exact(lib.case(case))
    mutate(monkeypatch)
    with pytest.raises((AssertionError, UnsupportedModelError)):
        lib.check_exact(lib.case(case))


def test_a_mutant_that_ignores_all_but_a_units_first_row_fails(lib: SimpleNamespace, monkeypatch: Patch) -> None:
    unit_ids = torch.tensor([0, 0, 1, 1])
    lib.check_exact(lib.t5(rows=4), unit_ids=unit_ids)
    rows_alone(monkeypatch)
    with pytest.raises(AssertionError):
        lib.check_exact(lib.t5(rows=4), unit_ids=unit_ids)


def test_without_the_float64_recomputation_a_cancelling_unit_has_a_wrong_norm(
    lib: SimpleNamespace, monkeypatch: Patch
) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    x = torch.randn(1, 1, 64).expand(1, 2, 64) + 1e-4 * torch.randn(1, 2, 64)
    sign = torch.tensor([1.0, -1.0])[:, None]
    case = lib.Case(model, lambda b: (model(b["x"]) * sign).sum((1, 2)), {"x": x})
    exact = float((x * sign).sum(1).double().norm()) * 8
    found = [float(case.run(ghost.GhostClipping(model, max_grad_norm=1.0)).norms)]
    monkeypatch.setattr(ghost, "MOST_DOUBTFUL", -math.inf)
    found.append(float(case.run(ghost.GhostClipping(model, max_grad_norm=1.0)).norms))
    assert abs(found[0] / exact - 1) < 1e-4 < abs(found[1] / exact - 1)


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
        words = "cannot be told apart"
    else:
        plain = ghost.contributions_of

        def without(use: Any, *rest: Any, **key: Any) -> Any:
            return [] if "position_embeddings" in use.site.name else plain(use, *rest, **key)

        monkeypatch.setattr(ghost, "contributions_of", without)
        words = "differs from autograd's"
    with pytest.raises(UnsupportedModelError, match=words):
        lib.check_exact(case)


def test_the_weights_of_the_audit_differ_between_neighbouring_units() -> None:
    for count in (1, 2, 16, 40):
        batch = units.UnitRows.build(torch.arange(count), torch.ones(count, dtype=torch.bool))
        weights = audit.unit_weights(batch)
        assert len(set(weights[:16].tolist())) == min(count, 16)
        assert (weights.abs().log2() % 1 == 0).all()
