r"""Clip by low-precision products: norms from above, and sums whose rounding is inside the bound.

Norms and weighted sums of linear weights are the largest part of a private step that runs in IEEE float32. Here their
products take TF32 or bfloat16 inputs and are added up in float32, which accelerators do 7 to 15 times faster. What that
may change is bounded for each unit and added to its norm, so that the clip factor is never larger than the exact norm
of what the unit adds to the sum would make it.

**Inputs.** Inputs a_t and output gradients g_t of a unit's positions t are rounded to the format once, before anything
is computed of them. From then on the unit's gradient *is* :math:`G = \sum_t g_t a_t^\top` of the rounded values: norm
and sum are about the same G, so this rounding needs no bound. Under bfloat16 autocast or weights it changes next to
nothing. TF32 is rounded here and not by the device, which may round or cut.

**Products.** The product of two values of a format is exact in float32. Assumed of a device is that a sum of n of them
is off by at most :math:`\gamma_n \sum |x_i y_i|`, :math:`\gamma_n = n u / (1 - n u)`, u = 2^-22 (`ROUNDOFF`), in any
order, and by `TINY` for each where values are too small for float32. IEEE float32 keeps this with u = 2^-24 (Higham,
Accuracy and Stability of Numerical Algorithms, section 3.1). Tensor cores align a block of b products and the running
sum, cut them to 24 bits or more, and cut the result: n (1 + 2/b) 2^-23 (Blanchard et al. 2020, SIAM J. Sci. Comput.
42(3); Fasi et al. 2021, PeerJ CS 7:e330). `check_products` refuses a device on which a probe is off by more. Sums are
cut into parts of `DEPTH` terms, so n is at most that and the number of parts. Write :math:`\alpha_t = |a_t|`,
:math:`\beta_t = |g_t|`, :math:`S = \sum_t \alpha_t \beta_t`; the product of a row by a column is then off by at most
:math:`\gamma` times the product of their lengths (Cauchy and Schwarz).

**The norm, written out.** Each coordinate of G is a sum of T products, and the matrix of their absolute values has a
norm of at most S. So :math:`|G| \le |\tilde G| + \gamma_T S`.

**The norm, from pairs.** :math:`|G|^2 = \sum_{ts} A_{ts} B_{ts}` with the Gram matrices A of a and B of g, computed as
:math:`\tilde A, \tilde B` with errors :math:`|E_{ts}| \le \gamma_a \alpha_t \alpha_s` and
:math:`|F_{ts}| \le \gamma_g \beta_t \beta_s`. From
:math:`A B = \tilde A \tilde B - \tilde A F - E \tilde B + E F` follows

.. math:: |G|^2 \le \sum \tilde A \tilde B + \gamma_g \sum |\tilde A_{ts}| \beta_t \beta_s
          + \gamma_a \sum |\tilde B_{ts}| \alpha_t \alpha_s + \gamma_a \gamma_g S^2.

The weighted sums of absolute values are those of the matrices at hand: with the lengths alone in their place the bound
would be up to T times looser where positions are nearly orthogonal. No term can be left out: with T = 1 the right side
*is* :math:`|G|^2` where every product is as wrong as is assumed possible.

**The sum.** It adds :math:`V = \sum_t g_t \hat x_t^\top` for a unit with factor c, where :math:`\hat x_t` is
:math:`c\,a_t` rounded to the format (or c g_t, whichever is shorter), by a relative :math:`\omega`: 2^-11 for TF32, and
2^-17 for bfloat16, where it is written as a sum of two (the first leaves at most half a unit in its last place, the
second 2^-9 of that). So :math:`|V - cG| \le c\,\omega S`, and its own additions are off by
:math:`c\,(1 + 2^{-6}) \gamma S` more. What is clipped is therefore not |G| but

.. math:: U = \sqrt{\sum_p |G_p|^2} + \sqrt{\sum_p (\kappa_p S_p)^2},\quad \kappa = \omega + (1 + 2^{-6})\gamma,

over the parameters p (Minkowski): c U is at most the bound, hence so is what the unit adds. Nothing beside
``max_grad_norm`` is charged. As in float32, how the rounding of the running total over *all* units depends on one of
them is not covered (`base.room_for_rounding`).

**Where it says nothing.** A unit whose U is more than a quarter above its estimate and is clipped by it, that
overflows, or whose scaled values would leave the range of float32, is computed and added in float64, from the same
rounded values. NaN is dropped, as ever.

**What stays in float32**: embeddings and weights tied to them, convolutions, biases, norms, and gradients that are
written out because they are small. None of this was measured on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.matmul_precision import tf32_products
from lit_dpret.privacy.clipping.base import ClipSettings, RowLoss, accumulator_dtype, room_for_rounding
from lit_dpret.privacy.clipping.contributions import (
    Contribution,
    Outer,
    Written,
    _block,
    _cat,
    _kept,
    _prefers_gram,
    _units_at_once,
    add_squared_norms,
    add_weighted,
    by_input,
)
from lit_dpret.privacy.clipping.ghost import Contributions, GhostClipping
from lit_dpret.privacy.clipping.units import UnitRows

FormatName = Literal["tf32", "bf16"]

#: Assumed of an addition in float32, four times what IEEE has: tensor cores cut where they should round.
ROUNDOFF = 2.0**-22
#: Of an operation in IEEE float32, which all others are.
_U = 2.0**-24
#: Absolute error of a product and of an addition where float32 runs out of exponents, flushed to zero or not.
TINY = 2.0**-125
#: Terms that are added up in one product; the rest is added to it.
DEPTH = 2048
#: By how much of its estimate a unit's bound may be larger before the unit is computed in float64 ...
LOOSE = 0.25
#: ... and what small values may add beside that, as a share of the bound; `CLIP_ROUNDING` has room for it.
NEGLIGIBLE = 1e-6
#: Lengths above this may overflow when they are multiplied.
_LARGE = 2.0**60


@dataclass(frozen=True)
class Format:
    """What inputs of products are rounded to.

    Attributes:
        parts: Values whose sum stands for a scaled input.
        omega: Relative error of that sum; a factor is rounded to float32 beside it, which `CLIP_ROUNDING` covers.
    """

    name: FormatName
    parts: int
    omega: float

    def rounded(self, values: Tensor) -> Tensor:
        """The nearest values of the format, ties to even; no copy where they are of it already."""
        if self.name == "bf16":
            return values.to(torch.bfloat16)
        if values.dtype in (torch.bfloat16, torch.float16):
            return values
        bits = values.float().contiguous().view(torch.int32)
        # Half of the last place that stays, less one where that is even; then the 13 last bits go.
        nearest = (bits + 0xFFF + ((bits >> 13) & 1)).bitwise_and_(-0x2000).view(torch.float32)
        return torch.where(values.isfinite(), nearest, values.float())

    def split(self, values: Tensor) -> Iterator[Tensor]:
        """Values of the format whose sum is ``values`` but for ``omega``."""
        for part in range(self.parts):
            found = self.rounded(values)
            yield found
            if part + 1 < self.parts:
                values = values - found  # exact


FORMATS: Mapping[FormatName, Format] = {
    "tf32": Format("tf32", 1, (1 + 2.0**-11) * (1 + _U) - 1),
    "bf16": Format("bf16", 2, (1 + 2.0**-17) * (1 + _U) - 1),
}


def product(x: Tensor, y: Tensor, name: FormatName) -> Tensor:
    """``x @ y``, ``(..., m, k)`` and ``(..., k, n)``, of values of the format, added up in float32.

    On CUDA the kernels of the format; elsewhere float32, which multiplies such values exactly as well.
    """
    if x.device.type != "cuda":
        return x.float() @ y.float()
    if name == "tf32":
        with tf32_products():
            return x.float() @ y.float()
    with _added_in_float32():
        found: Tensor = (torch.bmm if x.dim() == 3 else torch.mm)(x, y, out_dtype=torch.float32)
    return found


@contextmanager
def _added_in_float32() -> Iterator[None]:
    """Let cuBLAS not add up parts of a bfloat16 product in bfloat16, as it may by default."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def gamma(terms: int, roundoff: float | None = None) -> float:
    """Relative error of a sum of so many products, in any order; infinite where it may be all of it."""
    size = terms * (ROUNDOFF if roundoff is None else roundoff)
    return size / (1 - size) if size < 0.5 else math.inf


def check_products(device: torch.device, name: FormatName) -> None:
    """Refuse a device whose sums of products are further off than is assumed of them.

    Raises:
        UnsupportedModelError: A probe is off by more.
    """
    draw = torch.Generator().manual_seed(0)
    # One large term among many small ones of its sign: what a sum of few digits loses.
    x = 2.0**-12 * (1 + torch.rand(1, 32, DEPTH, generator=draw))
    x[0, torch.arange(32), torch.randint(DEPTH, (32,), generator=draw)] = 1.0
    x, y = FORMATS[name].rounded(x), FORMATS[name].rounded(1 + torch.rand(1, 32, DEPTH, generator=draw))
    found = product(x.to(device), y.to(device).mT, name).cpu().double()
    exact = x.double() @ y.double().mT  # of positive terms, so the sum of their sizes as well
    if not bool(((found - exact).abs() <= gamma(DEPTH) * exact).all()):
        raise UnsupportedModelError(
            f"privacy.engine=ghost_{name} assumes that {device} adds up products of {name} values in float32, and a "
            "probe is off by more than that allows. Choose privacy.engine=ghost."
        )


@dataclass(frozen=True)
class Certified:
    """Of the gradients of parameters that share their inputs, one value for each unit, ``(n,)`` in float64."""

    estimate: Tensor  # the squared norm as it was computed
    squares: Tensor  # an upper bound on it
    moved: Tensor  # an upper bound on the squared norm by which a sum misses factor times gradient, over the factor
    tiny: Tensor  # the norm by which it does so besides, whatever the factor is


def certify(inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], form: Format) -> Certified:
    """Bound the norms of sums of outer products, and what a sum of them may be off by.

    Args:
        inputs: One tensor (n, positions, in) per use, of values of the format.
        outputs: For every parameter, one tensor (n, positions, out) per use, of values of the format.
        form: The format.
    """
    a, gs = _cat(list(inputs)), [_cat(list(g)) for g in outputs]
    positions, width = a.shape[1:]
    alpha, betas = lengths(a), [lengths(g) for g in gs]
    spreads = [(alpha * beta).sum(1) for beta in betas]
    # One addition more for each use and part, for they may be products of their own.
    kappa = form.omega + (1 + 2.0**-6) * gamma(form.parts * (positions + len(inputs)))
    moved = _total([(kappa * spread).square() for spread in spreads])
    tiny = _total([
        TINY * 2 * ((width + g.shape[2]) ** 0.5 * (alpha + beta).sum(1) + (width * g.shape[2]) ** 0.5 * 2 * positions)
        for g, beta in zip(gs, betas, strict=True)
    ])  # fmt: skip
    large = _total([(alpha.amax(1) > _LARGE) | (beta.amax(1) > _LARGE) for beta in betas]) > 0
    tiny = tiny.masked_fill(large, math.inf)
    if _prefers_gram(positions, sum(g.shape[2] for g in gs), width):
        estimate, squares = _from_pairs(a, gs, alpha, betas, spreads, form)
    else:
        estimate, squares = _written_out(a, gs, spreads, form)
    # What the few operations here are off by, in float64.
    return Certified(estimate, squares * (1 + 1e-9), moved * (1 + 1e-9), tiny)


def lengths(values: Tensor) -> Tensor:
    """Upper bounds on the norms over the last axis, in float64."""
    width = values.shape[-1]
    found: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32).double()
    # Squares below the range of float32 are lost, which is told by an absolute term.
    return found * (1 + gamma(width + 4, _U)) + float(width**0.5 * 2.0**-62)


def _written_out(a: Tensor, gs: Sequence[Tensor], spreads: Sequence[Tensor], form: Format) -> tuple[Tensor, Tensor]:
    estimates, squares = list[Tensor](), list[Tensor]()
    positions, width = a.shape[1:]
    parts = -(-positions // DEPTH)
    for g, spread in zip(gs, spreads, strict=True):
        pairs = zip(torch.split(g, DEPTH, 1), torch.split(a, DEPTH, 1), strict=True)  # type: ignore[no-untyped-call]
        total = functools.reduce(torch.add, (product(part.mT, into, form.name) for part, into in pairs))
        norm = torch.linalg.vector_norm(total, dim=2).double().square().sum(1).sqrt()
        error = gamma(min(positions, DEPTH) + parts) * spread
        lost = (width * g.shape[2]) ** 0.5 * (2.0**-62 + 2 * positions * TINY)
        estimates.append(norm.square())
        squares.append((norm * (1 + gamma(width + 4, _U)) + error + lost).square())
    return _total(estimates), _total(squares)


def _from_pairs(
    a: Tensor, gs: Sequence[Tensor], alpha: Tensor, betas: Sequence[Tensor], spreads: Sequence[Tensor], form: Format
) -> tuple[Tensor, Tensor]:
    positions, width = a.shape[1:]
    into, out = _parts([a]), _parts(gs)
    gamma_a, gamma_g = (gamma(max(part.shape[2] for part in parts) + len(parts)) for parts in (into, out))
    step = _block(positions)
    found = weighted_a = weighted_g = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    beta = torch.stack(list(betas), 2)
    for start in range(0, positions, step):
        rows = slice(start, start + step)
        # Off the diagonal block each pair stands for two.
        times = torch.full((positions - start,), 2.0, device=a.device)
        times[:step] = 1.0
        of_g = _added([(part[:, rows], part[:, start:].mT) for part in out], form)
        of_a = _added([(part[:, rows], part[:, start:].mT) for part in into], form)
        weighted_g = weighted_g + _weighted(of_g, alpha[:, :, None], rows, start, times)
        weighted_a = weighted_a + _weighted(of_a, beta, rows, start, times)
        products = of_g.mul_(of_a)
        both = products.sum((1, 2), dtype=torch.float64).mul_(2)
        found = found + both.sub_(products[:, :, : products.shape[1]].sum((1, 2), dtype=torch.float64))
    # The elementwise product is rounded too, and so is the float64 sum of T^2 of them.
    gamma_a = gamma_a + 2 * _U + positions**2 * 2.0**-52
    error = gamma_g * weighted_a + gamma_a * weighted_g + gamma_a * gamma_g * _total([s.square() for s in spreads])
    widths = width, sum(g.shape[2] for g in gs)
    lost = widths[1] * alpha.sum(1).square() + widths[0] * beta.sum(1).square().sum(1) + 2 * positions**2
    return found, found.clamp(min=0) + error + 4 * TINY * lost


def _weighted(matrix: Tensor, weights: Tensor, rows: slice, start: int, times: Tensor) -> Tensor:
    """The sum of absolute values times the weights of row and column, ``(n,)``, from above; weights (n, T, sets)."""
    narrow = weights.float()
    columns = matrix.abs() @ (narrow[:, start:] * times[:, None])
    found = (columns.double() * narrow[:, rows].double()).sum((1, 2))
    return found * (1 + gamma(len(times) + 8, _U))


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in torch.split(tensor, DEPTH, 2)]  # type: ignore[no-untyped-call]


def _added(pairs: Sequence[tuple[Tensor, Tensor]], form: Format) -> Tensor:
    total = product(*pairs[0], form.name)
    for x, y in pairs[1:]:
        total += product(x, y, form.name)
    return total


def _total(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)


def add_scaled(
    uses: Sequence[Outer],
    coefficients: Tensor,
    total: Tensor | None,
    shape: torch.Size,
    rows: Tensor | None,
    form: Format,
) -> Tensor:
    """``total`` plus the gradients of ``rows``, each times its coefficient, by products of the format."""
    weights = (coefficients if rows is None else coefficients[rows]).float()[:, None, None]
    total = torch.zeros(shape, device=coefficients.device) if total is None else total
    for use in uses:
        a, g = _kept(use.a, rows), _kept(use.g, rows)
        scale_inputs = a.shape[2] <= g.shape[2]  # the smaller of the two
        for part in form.split((a if scale_inputs else g).float() * weights):
            x, y = (g, part) if scale_inputs else (part, a)
            x, y = x.flatten(0, 1), y.flatten(0, 1)
            for start in range(0, len(total), 8192):  # in parts: a second matrix of the vocabulary is large
                total[start : start + 8192] += product(x[:, start : start + 8192].T, y, form.name)
    return total


class LowPrecisionGhostClipping(GhostClipping):
    """`GhostClipping` whose products take low-precision inputs, with norms bounded from above.

    Guarantees, beyond those of `GhostClipping`:
        - A unit's clip factor is at most what the exact norm of the gradient that is added for it would give, and what
          is added for it, with the rounding of its own terms, is within ``max_grad_norm``: the proof heads this module.
        - It takes batches of any shape, and none of fixed shape.

    Raises:
        UnsupportedModelError: The device adds up products less exactly than is assumed.
    """

    form: ClassVar[Format]

    def __init__(self, module: nn.Module, *, verify: bool = False, **clipping: Unpack[ClipSettings]) -> None:
        super().__init__(module, verify=verify, **clipping)
        for device in {parameter.device for parameter in self.parameters.values()}:
            check_products(device, self.form.name)

    def _recorded(self, row_loss: RowLoss, batch: UnitRows) -> tuple[Tensor, Contributions]:
        """The losses and contributions, after any check, with the factors of outer products rounded to the format."""
        losses, contributions = super()._recorded(row_loss, batch)
        rounded: dict[object, tuple[Tensor, Tensor]] = {}  # with what it was made from, whose place none may take
        with torch.no_grad():
            for name, uses in contributions.items():
                if self._is_low(name, uses):
                    contributions[name] = [Outer(self._shared(use.a, rounded), self._shared(use.g, rounded))
                                           for use in uses if isinstance(use, Outer)]  # fmt: skip
        return losses, contributions

    def _shared(self, values: Tensor, rounded: dict[object, tuple[Tensor, Tensor]]) -> Tensor:
        """Round once what several parameters have in common, so that `by_input` finds it again."""
        place = values.data_ptr(), values.shape, values.stride(), values.dtype
        if not values.data_ptr():
            return self.form.rounded(values)
        if place not in rounded:
            rounded[place] = values, self.form.rounded(values)
        return rounded[place][1]

    def _is_low(self, name: str, uses: Sequence[Contribution]) -> bool:
        of_linear = all(isinstance(use, Outer) for use in uses)
        return of_linear and accumulator_dtype(self.parameters[name]) == torch.float32

    def _norms(
        self, contributions: Contributions, written: Mapping[str, list[Written]], losses: Tensor, batch: UnitRows
    ) -> tuple[Tensor, Tensor]:
        low = {name: uses for name, uses in contributions.items() if self._is_low(name, uses)}
        rest = {name: uses for name, uses in contributions.items() if name not in low}
        norms, doubtful = super()._norms(rest, written, losses, batch)
        for group, names in enumerate(self.groups):
            part = {name: low[name] for name in names if name in low}
            if not part:
                continue
            found = self._certified(part, batch)
            upper = found.squares.sqrt() + found.moved.sqrt()
            whole = (norms[group].square() + upper.square()).sqrt()
            about = (norms[group].square() + found.estimate.clamp(min=0)).sqrt()
            vague = ~(whole <= (1 + LOOSE) * about + NEGLIGIBLE * self.bound)  # NaN is vague too
            if self.clip == "abadi":  # what is not clipped in any case needs no closer look
                vague &= ~(whole <= room_for_rounding(self.bound, self.parameters.values()))
            vague |= ~(found.tiny <= NEGLIGIBLE * self.bound)
            vague &= batch.real & ~norms[group].isnan()
            if bool(vague.any()):
                again, exact = batch.only(vague), torch.zeros_like(upper)
                for name, uses in part.items():
                    shape = self.parameters[name].shape
                    add_squared_norms([uses], shape, again, torch.float64, exact, torch.zeros_like(exact))
                upper = torch.where(vague, exact.clamp(min=0).sqrt(), upper)
                doubtful[group] |= vague
            norms[group] = (norms[group].square() + upper.square()).sqrt()
        return norms, doubtful

    def _certified(self, part: Mapping[str, Sequence[Contribution]], batch: UnitRows) -> Certified:
        found = Certified(*torch.zeros(4, batch.units, dtype=torch.float64, device=batch.real.device))
        for names in by_input(part):
            uses = [[use for use in part[name] if isinstance(use, Outer)] for name in names]
            size = max(1, _units_at_once(uses, [], self.parameters[names[0]].shape, batch) // 2)
            for group in (each for whole in batch.groups for each in whole.split(size)):
                inputs = [group.join(use.a) for use in uses[0]]
                here = certify(inputs, [[group.join(use.g) for use in each] for each in uses], self.form)
                for name in ("estimate", "squares", "moved", "tiny"):
                    group.add_to(getattr(found, name), getattr(here, name))
        return found

    def _add_rows(
        self, uses: Sequence[Contribution], coefficients: Tensor, total: Tensor | None, shape: torch.Size,
        dtype: torch.dtype, *, rows: Tensor | None, fixed: bool = False,
    ) -> Tensor:  # fmt: skip
        outers = [use for use in uses if isinstance(use, Outer)]
        if len(outers) < len(uses) or dtype != torch.float32:
            return add_weighted(uses, coefficients, total, shape, dtype, rows=rows, fixed=fixed)
        return add_scaled(outers, coefficients, total, shape, rows, self.form)


class Tf32GhostClipping(LowPrecisionGhostClipping):
    """`LowPrecisionGhostClipping` with TF32 inputs; ``privacy.engine=ghost_tf32``."""

    form = FORMATS["tf32"]


class Bf16GhostClipping(LowPrecisionGhostClipping):
    """`LowPrecisionGhostClipping` with bfloat16 inputs; ``privacy.engine=ghost_bf16``."""

    form = FORMATS["bf16"]
