"""Norms and sums are bounded with every rounding: what a unit is clipped by is never below what it adds to the sum.

Each bound is attacked by the arithmetic of this device, by that of a tensor core that cuts where it should round, and
by the worst products that the bound permits, with which no term of it can be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import arithmetic, certificate, make_engine
from lit_dpret.privacy.clipping.arithmetic import FORMATS, Format
from lit_dpret.privacy.clipping.certificate import Bounds, Certified
from lit_dpret.privacy.clipping.contributions import Dense, Lookup, Outer
from lit_dpret.privacy.clipping.low_precision import add_scaled
from lit_dpret.privacy.clipping.units import RowGroup, UnitRows

Patch = pytest.MonkeyPatch
Product = Callable[[Tensor, Tensor, Format], Tensor]
NAMES = ["float32", "tf32", "bf16"]
SHORT = ["tf32", "bf16"]


def each_alone(count: int) -> RowGroup:
    return RowGroup.build(list(range(count)), [[row] for row in range(count)], torch.device("cpu"))


def certify(a: Tensor, gs: list[Tensor], form: Format) -> Certified:
    found = Certified.zeros(len(a), a.device)
    Bounds(each_alone(len(a)), form, found).of_products([(a, gs)])
    return found


def without_sums(patch: Patch) -> None:
    """Leave what the rounding of sums adds out of the bound, so that it is one on the norm alone."""
    patch.setattr(certificate, "_missed", lambda form, terms: 0.0)


def cut(values: Tensor) -> Tensor:
    """float64 values cut to the 24 bits of a float32, towards zero."""
    bits = values.view(torch.int64) & ~((1 << 29) - 1)
    return bits.view(torch.float64)


def tensor_core(x: Tensor, y: Tensor, form: Format) -> Tensor:
    """Blocks of 4 products and the running sum aligned to the largest, each cut to 24 bits, and the result cut."""
    x, y = x.double(), y.double()
    total = torch.zeros(*x.shape[:-1], y.shape[-1], dtype=torch.float64)
    for start in range(0, x.shape[-1], 4):
        part = slice(start, start + 4)
        terms = x[..., :, part, None] * y[..., None, part, :]
        terms = torch.cat([total[..., None, :], terms], -2)
        unit = torch.exp2(torch.floor(terms.abs().amax(-2, keepdim=True).clamp(min=1e-300).log2()) - 23)
        total = cut(((terms / unit).trunc() * unit).sum(-2))
    return total.float()


def in_order(x: Tensor, y: Tensor, form: Format) -> Tensor:
    """IEEE float32, one product after the other: every one and every sum is rounded."""
    total = torch.zeros(*x.shape[:-1], y.shape[-1])
    for k in range(x.shape[-1]):
        total = total + x[..., :, k, None].float() * y[..., None, k, :].float()
    return total


def worst(sign: float) -> Product:
    """The exact product, off by all that is permitted, in the direction of ``sign``."""

    def found(x: Tensor, y: Tensor, form: Format) -> Tensor:
        x, y = x.double(), y.double()
        product = x @ y
        return (product + sign * product.sign() * form.gamma(x.shape[-1]) * (x.abs() @ y.abs())).float()

    return found


#: With what is assumed of each.
DEVICES: dict[str, tuple[Product, list[str]]] = {
    "here": (arithmetic.product, NAMES),
    "in order": (in_order, ["float32"]),
    "tensor core": (tensor_core, SHORT),
    "worst": (worst(-1.0), NAMES),
}
ON = [(device, name) for device, (_, names) in DEVICES.items() for name in names]


def exact_squares(a: Tensor, gs: list[Tensor]) -> Tensor:
    return torch.stack([(g.double().mT @ a.double()).square().sum((1, 2)) for g in gs]).sum(0)


def factors(
    seed: int, form: Format, *, positions: int, into: int, out: int, parameters: int, level: float, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Two units whose terms cancel down to about ``level`` of them, over a huge range, some with half-way values."""
    draw = torch.Generator().manual_seed(seed)

    def around(width: int, sign: Tensor) -> Tensor:
        common = torch.randn(2, 1, width, generator=draw)
        found = common * sign[None, :, None] + level * torch.randn(2, positions, width, generator=draw)
        if seed % 3 == 1:  # few elements hold nearly everything, so that what is added to them is lost
            found = found * 10.0 ** (-4 * torch.rand(width, generator=draw))
        if seed % 3 == 2:  # of one size and sign, so that errors of rounding add up
            found = found.abs().clamp(min=level) * sign[None, :, None]
        return found

    turned = torch.ones(positions)
    turned[::2] = -1
    a = form.rounded(around(into, torch.ones(positions)))
    return a, [form.rounded(scale * around(out, turned)) for _ in range(parameters)]


SHAPES = {
    "pairs": {"positions": 12, "into": 96, "out": 80, "parameters": 3},
    "narrow": {"positions": 4, "into": 400, "out": 8, "parameters": 1},
    "written": {"positions": 160, "into": 12, "out": 10, "parameters": 2},
    "one": {"positions": 1, "into": 64, "out": 48, "parameters": 1},
}


def largest(shape: str, form: Format, share: Callable[[Certified, Tensor], Tensor], seeds: int) -> float:
    """Climb over how far terms cancel, and over their size, for the largest share that any unit reaches."""
    most = 0.0
    for seed in range(seeds):
        level, best = 0.3, 0.0
        for step in range(10):
            tried = level * 2.0 ** (float(torch.randn((), generator=torch.Generator().manual_seed(step))) - 0.3)
            scale = 10.0 ** (step % 4 * 4 - 6)
            a, gs = factors(100 * seed + step, form, level=tried, scale=scale, **SHAPES[shape])
            found = float(share(certify(a, gs, form), exact_squares(a, gs)).amax())
            if found > best:
                level, best = tried, found
        most = max(most, best)
    return most


@pytest.mark.like(4)
@pytest.mark.parametrize(("device", "name"), ON)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_certified_norm_is_below_the_exact_one(name: Any, shape: str, device: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(arithmetic, "product", DEVICES[device][0])
    without_sums(monkeypatch)
    form = FORMATS[name]
    assert largest(shape, form, lambda found, exact: (exact.sqrt() / found.norms()).nan_to_num(2.0), 6) <= 1.0
    estimate = largest(shape, form, lambda found, exact: exact / found.estimate.clamp(min=1e-300), 6)
    # A written gradient is rounded up for its sum of squares.
    found_by_search = estimate > 1.0 or (shape == "written" and device != "worst")
    assert found_by_search, "the search finds norms that are below the exact ones without a bound"


@pytest.mark.parametrize("name", NAMES)
def test_gram_matrices_of_which_half_is_computed_have_the_same_bound(name: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(certificate, "_prefers_gram", lambda *shape: True)
    form = replace(FORMATS[name], roundoff=2.0**-12)  # so that the bound is most of what is compared
    a, gs = factors(0, form, positions=160, into=12, out=10, parameters=2, level=1.0, scale=1.0)
    found = []
    for step in (lambda positions, device: positions, certificate._step):
        monkeypatch.setattr(certificate, "_step", step)
        found.append(certify(a, gs, form))
    assert torch.allclose(found[0].norms(), found[1].norms(), rtol=1e-5)
    assert torch.allclose(found[0].estimate, found[1].estimate, rtol=1e-4)
    assert torch.allclose(found[0].error, found[1].error, rtol=1e-4)
    assert bool((found[0].error > 0.05 * found[0].estimate).all())


@pytest.mark.parametrize(
    ("gram", "into", "out", "positions"),
    [*((True, *shape, positions) for shape in ((1, 64), (64, 1), (48, 64)) for positions in (1, 2)),
     (False, 5, 4, 1), (False, 5, 4, 30)],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_no_term_of_a_bound_can_be_left_out(
    name: Any, gram: bool, into: int, out: int, positions: int, monkeypatch: Patch
) -> None:
    """Where products are as small as is permitted, the bound from pairs of one position, or of a sum, is reached."""
    monkeypatch.setattr(arithmetic, "product", worst(-1.0))
    monkeypatch.setattr(certificate, "_prefers_gram", lambda *shape: gram)
    without_sums(monkeypatch)
    form = replace(FORMATS[name], roundoff=2.0**-8)
    a, g = torch.full((1, positions, into), 0.5), torch.full((1, positions, out), 0.25)
    over = float(certify(a, [g], form).norms() / exact_squares(a, [g]).sqrt()) ** (2 if gram else 1)
    # One part more than terms is counted, for the addition of parts; a square is a product of two sums.
    parts = sum(form.gamma(terms + 1) - form.gamma(terms) for terms in ((into, out) if gram else (positions,)))
    assert 1.0 <= over < 1.0 + 1.5 * parts + 1e-4


def test_what_cancels_between_positions_is_bounded_where_products_err_either_way(monkeypatch: Patch) -> None:
    monkeypatch.setattr(certificate, "_prefers_gram", lambda *shape: True)
    without_sums(monkeypatch)
    form = replace(FORMATS["bf16"], roundoff=2.0**-14)
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        signs = iter(torch.randint(0, 2, (1000,), generator=draw).mul(2).sub(1).tolist())
        monkeypatch.setattr(arithmetic, "product", lambda x, y, form, signs=signs: worst(next(signs))(x, y, form))
        a, gs = factors(seed, form, level=0.02, scale=1.0, **SHAPES["pairs"])
        assert bool((certify(a, gs, form).norms().square() >= exact_squares(a, gs)).all())


# -- sums ------------------------------------------------------------------------------------------------------


def missed(a: Tensor, g: Tensor, factor: float, form: Format) -> tuple[float, float]:
    """How far the sum of one unit is from its factor times its gradient, and the bound on that."""
    found = certify(a, [g], form)
    shape, coefficients = torch.Size((g.shape[2], a.shape[2])), torch.tensor([factor])
    total = add_scaled([Outer(a, g)], coefficients, None, shape, None, form)
    exact = (g[0].double().T @ a[0].double()) * float(coefficients)
    return float((total.double() - exact).norm()), float(factor * found.moved.sqrt() + found.tiny())


@pytest.mark.parametrize("name", SHORT)
def test_the_rounding_of_scaled_inputs_reaches_its_bound_and_does_not_pass_it(name: Any) -> None:
    form = FORMATS[name]
    a, g = torch.ones(1, 1, 32), torch.ones(1, 1, 40)
    shares = []
    for factor in (0.5 + 1.9995 * 2.0**-13, 0.5 + 2.0**-10 + 2.0**-18):  # half-way between two values, or two sums
        moved, bound = missed(a, g, float(torch.tensor(factor)), form)
        shares.append(moved / bound)
    assert 0.8 < max(shares) <= 1.0


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_additions_of_a_sum_are_in_its_bound(name: Any, sign: float, monkeypatch: Patch) -> None:
    monkeypatch.setattr(arithmetic, "product", worst(sign))
    monkeypatch.setattr(certificate, "_prefers_gram", lambda *shape: True)
    a, g = torch.full((1, 16, 32), 0.5), torch.full((1, 16, 40), 0.25)
    moved, bound = missed(a, g, 1.0, replace(FORMATS[name], roundoff=2.0**-9))
    assert 0.4 < moved / bound <= 1.0


# -- embeddings, and weights tied to them ----------------------------------------------------------------------


def of_table(seed: int, fixed: bool, *, tied: bool, level: float) -> tuple[float, float, float]:
    """The exact norm of a weight's gradient, the computed one, and the bound on it."""
    draw = torch.Generator().manual_seed(seed)
    signs = torch.tensor([1.0, -1.0]).repeat(24)[None, :, None]
    g = torch.randn(1, 1, 96, generator=draw) * signs + level * torch.randn(1, 48, 96, generator=draw)
    ids = torch.randint(0, 3 + seed % 5, (1, 48), generator=draw)
    uses: list[Any] = [Lookup(ids, g)]
    shape = torch.Size((64, 96))
    exact = torch.zeros(shape, dtype=torch.float64).index_add_(0, ids[0], g[0].double())
    if tied:
        a = torch.randn(1, 12, 96, generator=draw)
        of_logits = torch.randn(1, 12, 64, generator=draw)
        if seed % 2:  # so that the two cancel
            a, of_logits = -exact[None, :12].float(), torch.eye(64)[None, :12]
            a = a + level * torch.randn(a.shape, generator=draw)
        uses.append(Outer(a, of_logits))
        exact += of_logits[0].double().T @ a[0].double()
    found = Certified.zeros(1, torch.device("cpu"))
    batch = UnitRows.build(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool), fixed=fixed)
    certificate.certified([uses], shape, batch, FORMATS["float32"], found)
    return float(exact.norm()), float(found.estimate.clamp(min=0).sqrt()), float(found.norms())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_no_norm_of_a_table_is_below_the_exact_one(tied: bool, fixed: bool, monkeypatch: Patch) -> None:
    without_sums(monkeypatch)
    shares, under = [], []
    for seed in range(200):
        exact, estimate, bound = of_table(seed, fixed, tied=tied, level=10.0 ** -(seed % 8))
        shares.append(exact / bound)
        under.append(estimate < exact)
    assert max(shares) <= 1.0
    # A written gradient is rounded up for its sum of squares.
    assert any(under) or not fixed, "the search finds norms that are below the exact ones without a bound"


@pytest.mark.parametrize("rows", [2, 30])
def test_what_the_sum_of_a_units_biases_may_miss_is_in_its_bound(rows: int, monkeypatch: Patch) -> None:
    without_sums(monkeypatch)
    form, value = replace(FORMATS["float32"], roundoff=2.0**-8), torch.full((rows, 5), 0.25)
    low = value.sum(0)[None] * (1 - form.gamma(rows))
    monkeypatch.setattr(certificate, "unit_gradients", lambda *arguments: low)
    found, group = Certified.zeros(1, value.device), RowGroup.build([0], [list(range(rows))], value.device)
    Bounds(group, form, found).of_written([Dense(value)], torch.Size((5,)))
    assert 1.0 <= float(found.norms() / value.double().sum(0).norm()) < 1.001


def test_factors_of_written_gradients_bound_what_small_products_lose() -> None:
    large, small = torch.full((1, 1, 3), 2.0**50), torch.full((1, 1, 4), 2.0**-104)
    found, group = Certified.zeros(1, large.device), each_alone(1)
    uses: list[Any] = [Outer(large, small), Dense(torch.zeros(1, 4, 3))]
    Bounds(group, FORMATS["float32"], found).of_written(uses, torch.Size((4, 3)))
    assert float(found.tiny()) >= 2.0**-126 * float(large.norm())


def test_a_token_whose_small_gradients_are_lost_beside_a_large_one_is_bounded(monkeypatch: Patch) -> None:
    without_sums(monkeypatch)
    g = torch.full((1, 4000, 8), 2.0**-25)
    g[:, 0] = 1.0
    found = Certified.zeros(1, g.device)
    ids = torch.full((1, 4000), 3)
    Bounds(each_alone(1), FORMATS["float32"], found).of_lookups(ids, g, 5, more=1, fixed=False)
    exact = float(g.double().sum(1).norm())
    assert float(found.estimate.sqrt()) < exact * (1 - 1e-4)
    assert float(found.norms()) >= exact


# -- small, large and broken values ----------------------------------------------------------------------------


def squares_of(a: Tensor, g: Tensor, name: str, *, gram: bool, monkeypatch: Patch) -> tuple[float, float]:
    monkeypatch.setattr(certificate, "_prefers_gram", lambda *shape: gram)
    without_sums(monkeypatch)
    found = certify(a, [g], FORMATS[name])  # type: ignore[index]
    return float(found.norms().square()), float(exact_squares(a, [g]))


def test_no_length_of_a_row_is_below_the_exact_one() -> None:
    draw = torch.Generator().manual_seed(0)
    for exponent in (-130, -100, -76, -75, -64, -60, 0, 50):  # squares of the first ones are zero in float32
        for width in (1, 7, 400):
            rows = (2.0**exponent * (1 + torch.rand(3, 50, width, generator=draw))).bfloat16()
            exact = rows.double().square().sum(2).sqrt()
            found = certificate.lengths(rows, FORMATS["bf16"]).double()
            assert bool((found >= exact).all())
            assert exponent < -60 or bool((found <= 1.001 * exact + 1e-17).all())


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("exponent", [-133, -100, -75, -74, -64, -63, -60])
def test_products_too_small_for_float32_are_bounded(exponent: int, gram: bool, monkeypatch: Patch) -> None:
    small = torch.full((1, 3, 16), 2.0**exponent) * torch.tensor([1.0, -1.0]).repeat(8)
    large = torch.full((1, 3, 16), 2.0**58)
    for a, g in ((small, large), (large, small), (small, small)):
        upper, exact = squares_of(a.bfloat16(), g.bfloat16(), "bf16", gram=gram, monkeypatch=monkeypatch)
        assert upper >= exact > 0 or (exact == 0 and upper >= 0)


# -- rounding --------------------------------------------------------------------------------------------------


def test_tf32_is_the_nearest_value_of_eleven_bits_ties_away_from_zero() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=draw) * torch.exp2(torch.randint(-120, 120, (4000,), generator=draw).float())
    half = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11), 1 + 2.0**-11 + 2.0**-23])
    values = torch.cat([values, half, torch.tensor([0.0, -0.0, 1.5, 2.0**-140])])
    found = FORMATS["tf32"].rounded(values)
    exponents = torch.floor(values.double().abs().clamp(min=2.0**-126).log2())
    unit = torch.exp2(exponents - 10)
    nearest = torch.floor(values.double().abs() / unit + 0.5) * unit * values.double().sign()
    assert torch.equal(found.double(), nearest)
    assert torch.equal(FORMATS["tf32"].rounded(found), found)


def test_what_is_not_finite_does_not_become_finite_and_values_of_a_format_are_not_copied() -> None:
    strange = torch.tensor([math.nan, math.inf, -math.inf, 3.4028234e38, math.nan])
    strange.view(torch.int32)[0] = 0x7FFFFFFF  # what CUDA makes
    for name in SHORT:
        assert not FORMATS[name].rounded(strange).isfinite().any()  # type: ignore[index]
    half = torch.randn(5).bfloat16()
    assert all(FORMATS[name].rounded(half) is half for name in SHORT)  # type: ignore[index]


@pytest.mark.parametrize("name", SHORT)
def test_the_parts_of_a_scaled_input_miss_it_by_no_more_than_omega(name: Any) -> None:
    form = FORMATS[name]
    values = torch.randn(100_000) * torch.exp2(torch.randint(-60, 60, (100_000,)).float())
    parts = list(form.split(values))
    gap = (sum(part.double() for part in parts) - values.double()).abs() / values.double().abs()
    assert len(parts) == form.parts and 0.5 * form.omega < float(gap.amax()) <= form.omega


def test_a_device_that_adds_up_in_few_digits_is_refused(monkeypatch: Patch) -> None:
    check: Any = arithmetic.check_products
    model = nn.Linear(2, 2)
    moved: Any = make_engine("ghost_bf16", model, max_grad_norm=1.0)
    for name in NAMES:
        check(torch.device("cpu"), FORMATS[name])
    monkeypatch.setattr(arithmetic, "product", tensor_core)
    check(torch.device("cpu"), FORMATS["bf16"])

    def in_bfloat16(x: Tensor, y: Tensor, form: Format) -> Tensor:
        halves = x.shape[-1] // 2  # as parts of a product that are added up in bfloat16
        parts = [x[..., part].float() @ y[..., part, :].float() for part in (slice(halves), slice(halves, None))]
        return (parts[0].bfloat16() + parts[1].bfloat16()).float()

    def fourteen_bits(x: Tensor, y: Tensor, form: Format) -> Tensor:
        total = torch.zeros(*x.shape[:-1], y.shape[-1])
        for k in range(x.shape[-1]):
            total = (total + x[..., :, k, None].float() * y[..., None, k, :].float()).half().float()
        return total

    def shortened(x: Tensor, y: Tensor, form: Format) -> Tensor:
        first = x.bfloat16().float()  # as a sum of two, which has 17 bits
        return (first + (x - first).bfloat16().float()) @ y

    with monkeypatch.context() as patch:
        patch.setattr(arithmetic, "product", shortened)
        with pytest.raises(UnsupportedModelError, match=r"privacy\.engine"):
            make_engine("ghost", nn.Linear(2, 2), max_grad_norm=1.0)
    for bad in (in_bfloat16, fourteen_bits):
        monkeypatch.setattr(arithmetic, "product", bad)
        with pytest.raises(UnsupportedModelError, match=r"privacy\.engine"):
            make_engine("ghost_bf16", nn.Linear(2, 2), max_grad_norm=1.0)
    moved._probed.clear()  # as where a module goes to another device after the engine was made
    with pytest.raises(UnsupportedModelError, match=r"privacy\.engine"):
        moved.add(lambda: model(torch.randn(3, 2)).sum(1), torch.arange(3), torch.ones(3, dtype=torch.bool))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", NAMES)
def test_products_on_cuda_keep_what_is_assumed_of_them(name: Any) -> None:
    form = FORMATS[name]
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        shape = (3, 64, 2 ** (seed % 12 + 1))
        x, y = (form.rounded(torch.randn(*shape, generator=draw) * 10.0 ** (seed % 4 * 3 - 5)) for _ in range(2))
        found = arithmetic.product(x.cuda(), y.cuda().mT, form).cpu().double()
        exact, sizes = x.double() @ y.double().mT, x.double().abs() @ y.double().abs().mT
        assert bool(((found - exact).abs() <= form.gamma(shape[2]) * sizes).all())
