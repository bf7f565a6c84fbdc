"""Ways in which one unit could have moved the sum by more than its bound, each once found by an attack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipping_cases import CASES, ENGINES, Case, bert, case_of, check_exact, check_refused, difference, norm_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import (
    base,
    contributions,
    ghost,
    loop,
    make_engine,
    recorder,
    recording_check,
    rules,
)

Patch = pytest.MonkeyPatch


def moved(case: Any, unit: int, bound: float) -> float:
    """How far the sum moves, over the bound, when one unit is taken out."""
    clipping = make_engine("ghost", case.module, max_grad_norm=bound)
    case.run(clipping)
    whole = clipping.take()
    case.run(clipping, mask=torch.arange(case.count) != unit)
    rest = clipping.take()
    return float(norm_of({name: whole[name].double() - rest[name].double() for name in whole})) / bound


def cancelling(count: int, width: int, scale: float) -> Tensor:
    """Output gradients of two units; those of the first sum to nothing, after growing large on the way."""
    half = torch.rand(count // 2, width) + 0.5
    return torch.stack([torch.cat([half, -half]) * scale, torch.randn(count, width)])


def sum_in_fp32(patch: Patch) -> None:
    """A mutant: the norm of a doubtful unit is exact, and what is added is not."""
    plain = ghost.GhostClipping._norms

    def mutant(self: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        norms, doubtful, present = plain(self, *arguments)
        return norms, torch.zeros_like(doubtful), present

    patch.setattr(ghost.GhostClipping, "_norms", mutant)


@pytest.mark.parametrize(
    ("kind", "count", "width", "scale", "bound"),
    [("token", 512, 64, 1e6, 1.0), ("token", 4096, 64, 10.0, 0.01), ("position", 256, 512, 1e7, 1.0)],
)
def test_terms_of_a_weight_that_cancel_stay_within_the_bound(
    kind: str, count: int, width: int, scale: float, bound: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", 0)
    weight = cancelling(count, width, scale)
    if kind == "token":
        model: nn.Module = nn.Embedding(50, width)
        x = torch.stack([torch.full((count,), 7), torch.randint(0, 50, (count,))])
    else:
        model = nn.Linear(width, width, bias=False)
        x = (torch.rand(width) + 0.5).expand(2, count, width).clone()
    case = Case(model, lambda b: (model(b["x"]) * b["weight"]).sum((1, 2)), {"x": x, "weight": weight})
    assert moved(case, 0, bound) <= 1 + 1e-5
    sum_in_fp32(monkeypatch)
    assert moved(case, 0, bound) > 1.5, "the fp32 sum alone is not within it"


def in_a_list(h: Tensor, order: Tensor) -> Tensor:
    rows = list(h)
    return torch.stack([rows[i] for i in order.tolist()])


def in_parts(h: Tensor, order: Tensor) -> Tensor:
    parts = h.split(1)
    return torch.cat([parts[i] for i in order.tolist()])


def filled_in(h: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for row, i in zip(h, order.argsort().tolist(), strict=True):
        out[i] = row
    return out


def looked_up(h: Tensor, order: Tensor) -> Tensor:
    return nn.functional.embedding(order, h)


def multiplied(h: Tensor, order: Tensor) -> Tensor:
    return nn.functional.one_hot(order, len(h)).to(h) @ h


def from_the_end(h: Tensor, order: Tensor) -> Tensor:
    return h if order.tolist() == sorted(order.tolist()) else h.flip(0)


@pytest.mark.parametrize("engine", ["ghost", "opacus"])
@pytest.mark.parametrize(
    "put", [lambda h, i: h[i], in_a_list, in_parts, filled_in, from_the_end, looked_up, multiplied]
)
def test_rows_that_are_sorted_by_length_and_put_back_are_audited_again(put: Any, engine: str) -> None:
    layer, out = nn.Linear(6, 4).double(), nn.Linear(4, 1).double()
    model = nn.ModuleList([layer, out])

    def losses(batch: dict[str, Tensor]) -> Tensor:
        order = (batch["x"] != 0).sum(1).argsort(stable=True)
        sorted_rows = put(layer(batch["x"]), order).tanh()
        return put(out(sorted_rows), order.argsort()).squeeze(1)

    lengths = torch.arange(6)[None] < torch.arange(1, 7)[:, None]
    x = torch.randn(6, 6, dtype=torch.float64) * lengths
    clipping = make_engine(engine, model, max_grad_norm=1.0)
    Case(model, losses, {"x": x}).run(clipping)
    with pytest.raises(UnsupportedModelError, match="depends on another unit"):
        Case(model, losses, {"x": x.flip(0)}).run(clipping)


@pytest.mark.parametrize("engine", ["ghost", "opacus"])
def test_a_mixing_of_rows_that_no_pattern_shows_is_found_in_the_eighth_batch(engine: str) -> None:
    case, mixes = case_of(model := nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1)]), 4, 3), False

    def losses(batch: dict[str, Tensor]) -> Tensor:
        h = model[0](batch["x"])
        return model[1](torch.where(torch.tensor(mixes), h.roll(1, 0), h).tanh()).squeeze(1)

    case.losses = losses
    clipping = make_engine(engine, model, max_grad_norm=1.0)
    for batch in range(7):
        mixes = batch > 2
        case.run(clipping)
    with pytest.raises(UnsupportedModelError, match="depends on another unit"):
        case.run(clipping)


@pytest.mark.parametrize(
    ("pick", "same"),
    [
        (lambda h, i: h[torch.arange(4), i], True),
        (lambda h, i: h.gather(1, i[:, None, None].expand(-1, -1, 3)), True),
        (lambda h, i: h[:, int(i[0])], True),
        (lambda h, i: h[:, -2:], True),
        (lambda h, i: h[i], False),
        (lambda h, i: h[i % 2 == 0], False),
        (lambda h, i: h.index_select(0, i), False),
        (lambda h, i: h.gather(0, i[:, None, None].expand(-1, 4, 3)), False),
        (lambda h, i: torch.cat([h[r : r + 1] for r in i.tolist()]), False),
        (lambda h, i: torch.stack([h[r] for r in i.tolist()]), False),
        (lambda h, i: torch.zeros_like(h).index_add(0, i, h), False),
        (lambda h, i: torch.zeros_like(h).index_put((i,), h), False),
        (lambda h, i: torch.cat(list(h.split([int(i[0]) + 1, 3 - int(i[0])]))), False),
        (lambda h, i: h.transpose(0, 1).index_select(1, i), False),
        (lambda h, i: h.flatten()[(i[:, None] * 12 + torch.arange(12)).flatten()], False),
        (in_a_list, False),
        (in_parts, False),
        (filled_in, False),
        (from_the_end, False),
        (lambda h, i: multiplied(h.flatten(1), i), False),
        (lambda h, i: torch.rand(4, 4) @ nn.Linear(3, 4).weight + h.sum(), True),
        (lambda h, i: looked_up(h.flatten(1), i), False),
        (lambda h, i: nn.functional.embedding(i, nn.Parameter(torch.ones(4, 3))) + h.sum(1), True),
    ],
)
def test_picks_along_the_batch_are_told_apart_and_picks_along_other_axes_are_not(pick: Any, same: bool) -> None:
    patterns = []
    for index in ([0, 1, 2, 3], [3, 1, 0, 2]):
        h = torch.randn(4, 5 if same else 4, 3, requires_grad=True)
        h = h if same else torch.randn(4, 4, 3, requires_grad=True)
        patterns.append(recording_check.row_pattern(pick(h * 1, torch.tensor(index)).sum(), 4))
    assert (patterns[0] is not None and patterns[0] == patterns[1]) is same


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_reentrant_checkpointing_is_refused_and_the_other_kind_is_exact(engine: str) -> None:
    case = case_of(model := nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)]), 5, 4)

    def losses(batch: dict[str, Tensor], reentrant: bool = False) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return model[1](checkpoint(lambda h: model[0](h).tanh(), x, use_reentrant=reentrant)).squeeze(1).sin()

    case.losses = losses
    check_exact(case, engine=engine)
    case.losses = lambda batch: losses(batch, reentrant=True)
    check_refused(case, "use_reentrant", engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_without_any_trained_parameter_is_refused(engine: str) -> None:
    case = case_of(model := nn.Linear(4, 1), 5, 4)
    case.losses = lambda b: model(b["x"]).detach().squeeze(1)
    check_refused(case, "depends on no trainable parameter", engine=engine)


def test_a_unit_whose_loss_is_a_constant_adds_nothing_and_the_others_are_clipped_as_ever() -> None:
    case = case_of(model := nn.Linear(4, 1), 5, 4)
    clipping = make_engine("loop", model, max_grad_norm=1.0)
    case.run(clipping, mask=torch.tensor([True, False, True, True, True]))
    others, rows = clipping.take(), case.losses
    chosen = case.rows["x"][1]
    case.losses = lambda b: torch.zeros(len(b["x"])) if len(b["x"]) == 1 and torch.equal(b["x"][0], chosen) else rows(b)
    case.run(clipping)
    assert difference(clipping.take(), others) == 0


@pytest.mark.parametrize("engine", ["ghost", "loop", "opacus"])
def test_a_factor_too_small_for_fp32_drops_the_unit_and_counts_it(engine: str) -> None:
    model = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(model.weight)
    x = torch.randn(3, 8)
    x[0] = 5e26
    target = torch.randn(3, 8)
    target[0] = 1.38e18
    case = Case(model, lambda b: (model(b["x"]) - b["target"]).square().sum(1), {"x": x, "target": target})
    clipping = make_engine(engine, model, max_grad_norm=1.0)
    stats = case.run(clipping)
    whole = clipping.take()
    assert stats.non_finite == 1 and torch.isfinite(whole["weight"]).all()
    case.run(clipping, mask=torch.tensor([False, True, True]))
    assert difference(clipping.take(), whole) == 0


@pytest.mark.parametrize(("engine", "where"), [("ghost", "add_weighted"), ("loop", "check_losses")])
def test_a_batch_that_breaks_off_halfway_is_neither_released_nor_added_twice(
    engine: str, where: str, monkeypatch: Patch
) -> None:
    module = ghost if engine == "ghost" else loop
    case = CASES["small"]()
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    plain, calls = getattr(module, where), []

    def breaks(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return plain(*arguments, **named)

    monkeypatch.setattr(contributions, "ROOM", 0)
    monkeypatch.setattr(module, where, breaks)
    with pytest.raises(torch.OutOfMemoryError):
        case.run(clipping)
    for attempt in (clipping.take, lambda: case.run(clipping)):
        with pytest.raises(UnsupportedModelError, match=r"failed while it was being added .* forget\(\)"):
            attempt()
    clipping.forget()
    case.run(clipping)
    again = make_engine(engine, case.module, max_grad_norm=1.0)
    case.run(again)
    assert difference(clipping.take(), again.take()) < 1e-12


def test_products_are_taken_in_full_precision_and_the_setting_is_given_back(monkeypatch: Patch) -> None:
    seen, plain = [], base.ClippedSum.factors

    def watched(self: Any, norms: Tensor) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return plain(self, norms)

    monkeypatch.setattr(base.ClippedSum, "factors", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        case = CASES["small"]()
        case.run(make_engine("ghost", case.module, max_grad_norm=1.0))
        assert seen[0] == "highest" and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("large", [1e6, 1e8, 1.7e9, 1e10, 1e13])
@pytest.mark.parametrize("engine", ["ghost", "ghost_tf32", "ghost_bf16", "vmap"])
def test_records_that_share_a_column_far_larger_than_the_others_stay_within_the_bound(
    engine: str, large: float
) -> None:
    """Two records of one unit, of opposite labels: the column, such as a time in seconds, cancels but for rounding.

    What is left may lie below what float64 can tell from pairs of terms whose energy that column makes.
    """
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Linear(16, 16, bias=False)
        nn.init.zeros_(model.weight)
        x = torch.cat([torch.full((2, 1), large), 10 * torch.randn(2, 15)], 1)
        y = torch.stack([torch.ones(16), torch.zeros(16)])

        def loss(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            return nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="none").sum(1)

        clipping = make_engine(engine, model, max_grad_norm=1.0)
        clipping.add(loss, torch.zeros(2, dtype=torch.long), torch.ones(1, dtype=torch.bool))
        (found,) = clipping.take().values()
        assert 0 < torch.linalg.vector_norm(found.double()) <= 1.0


@pytest.mark.parametrize("engine", ["ghost", "ghost_tf32", "ghost_bf16"])
@pytest.mark.parametrize("kind", ["embedding", "linear"])
def test_a_long_text_in_the_batch_changes_no_factor_of_the_short_ones(kind: str, engine: str) -> None:
    """The bound on rounding grows with the padded length, which one unit decides for all."""
    ids = torch.randint(1, 50, (8, 4096))
    ids[:, 32:] = 0
    layer = nn.Embedding(50, 8) if kind == "embedding" else nn.Linear(128, 256, bias=False)
    words = torch.randn(50, 128)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        given = batch["ids"] if kind == "embedding" else words[batch["ids"]]
        return (layer(given) * (batch["ids"] != 0)[:, :, None]).sum((1, 2)).sin() * 100

    sums = []
    for length in (4096, 64):
        clipping = make_engine(engine, layer, max_grad_norm=1.0)
        Case(layer, losses, {"ids": ids[:, :length]}).run(clipping)
        sums.append(clipping.take())
    moved = norm_of({name: sums[0][name] - sums[1][name] for name in sums[0]})
    assert float(moved) < 8 * 1e-6


@pytest.mark.parametrize("mutant", ["layouts", "parameters"])
def test_the_audit_alone_catches_a_shared_position_embedding(mutant: str, monkeypatch: Patch) -> None:
    """A recorder that charges shared positions to the rows in turn: sums stay right, norms do not."""
    case = bert()
    case.rows = {n: v[:, :5] if v.dim() == 2 and n != "target" else v for n, v in case.rows.items()}  # length = batch

    if mutant == "layouts":
        monkeypatch.setattr(rules, "POSITIONED", set())
        record = recorder.Recorder._record

        def transposed(self: Any, site: Any, output: Tensor, saved: Any, aliases: Any) -> None:
            if "position_embeddings" in site.name:
                shape, below = torch.Size((5, 1, 12)), recorder._edge_below(output)
                self.uses.append(recorder.Use(site, 0, below, shape, saved.view(5, 1), aliases, saved._version))
            else:
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
        check_exact(case)
