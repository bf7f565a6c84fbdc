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
    add_weighted,
    by_input,
    chunk_of,
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
#: Positions up to which a Gram matrix is computed whole: half of it would be saved, for four times the kernels.
WHOLE = 1024
#: By how much of its estimate a unit's bound may be larger before the unit is computed in float64 ...
LOOSE = 0.25
#: ... and what small values may add beside that, as a share of the bound; `CLIP_ROUNDING` has room for it.
NEGLIGIBLE = 1e-6
#: Rows of a sum that are made by one product.
_AT_ONCE = 8192
#: Lengths whose sum is above this may overflow when they are multiplied.
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
        """The nearest values of the format; no copy where they are of it already. Infinity may become NaN."""
        if self.name == "bf16":
            return values.to(torch.bfloat16)
        if values.dtype in (torch.bfloat16, torch.float16):
            return values
        values = values.float().contiguous()
        # Half of the last place that stays, then the 13 last bits go; ties away from zero.
        nearest = (values.view(torch.int32) + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
        return nearest.add_(values, alpha=0.0)  # adds nothing but NaN, whose bits may have become a number's

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
    outs = [g.shape[2] for g in gs]
    alpha, beta = lengths(a), torch.stack([lengths(g) for g in gs], 2)
    spreads = (alpha[:, :, None] * beta).sum(1, dtype=torch.float64) * (1 + gamma(8, _U))  # rounded to float32 before
    # One addition more for each use and part, for they may be products of their own.
    kappa = form.omega + (1 + 2.0**-6) * gamma(form.parts * (positions + len(inputs)))
    spread = spreads.square().sum(1)
    alphas, betas = alpha.sum(1, dtype=torch.float64), beta.sum(1, dtype=torch.float64)
    if _prefers_gram(positions, sum(outs), width):
        lost = sum(outs) * alphas.square() + width * betas.square().sum(1) + 2 * positions**2
        estimate, error = _from_pairs(a, gs, alpha, beta, spread, form)
        squares = estimate + error + 4 * TINY * lost
    else:
        estimate, squares = _written_out(a, gs, spreads, form)
    sizes = len(gs) * alphas + betas.sum(1)
    tiny = TINY * 2 * ((width + max(outs)) ** 0.5 * sizes + len(gs) * (width * max(outs)) ** 0.5 * 2 * positions)
    # What the few operations here are off by, in float64, is far below 1e-9.
    moved = spread * (kappa**2 * (1 + 1e-9))
    return Certified(estimate, squares * (1 + 1e-9), moved, tiny.masked_fill(sizes > _LARGE, math.inf))


def lengths(values: Tensor) -> Tensor:
    """Upper bounds on the norms over the last axis, in float32."""
    width = values.shape[-1]
    found: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
    # Squares below the range of float32 are lost, which an absolute term makes up for.
    return found.mul_(1 + gamma(width + 8, _U)).add_(float(width**0.5 * 2.0**-61))


def _written_out(a: Tensor, gs: Sequence[Tensor], spreads: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """The squared norm as computed, and from above; ``spreads`` (n, parameters)."""
    estimates, squares = list[Tensor](), list[Tensor]()
    positions, width = a.shape[1:]
    parts = -(-positions // DEPTH)
    for g, spread in zip(gs, spreads.unbind(1), strict=True):
        pairs = zip(torch.split(g, DEPTH, 1), torch.split(a, DEPTH, 1), strict=True)  # type: ignore[no-untyped-call]
        total = functools.reduce(torch.add, (product(part.mT, into, form.name) for part, into in pairs))
        norm = torch.linalg.vector_norm(total, dim=2).double().square().sum(1).sqrt()
        error = gamma(min(positions, DEPTH) + parts) * spread
        lost = (width * g.shape[2]) ** 0.5 * (2.0**-62 + 2 * positions * TINY)
        estimates.append(norm.square())
        squares.append((norm * (1 + gamma(width + 4, _U)) + error + lost).square())
    return functools.reduce(torch.add, estimates), functools.reduce(torch.add, squares)


def _from_pairs(
    a: Tensor, gs: Sequence[Tensor], alpha: Tensor, beta: Tensor, spread: Tensor, form: Format
) -> tuple[Tensor, Tensor]:
    """The squared norm as computed, and what it may be off by; lengths (n, T) and (n, T, parameters)."""
    positions = a.shape[1]
    into, out = _parts([a]), _parts(gs)
    gamma_a, gamma_g = (gamma(max(part.shape[2] for part in parts) + len(parts)) for parts in (into, out))
    step = positions if positions <= WHOLE else _block(positions)
    found, weighted_a, weighted_g = list[Tensor](), list[Tensor](), list[Tensor]()
    for start in range(0, positions, step):
        rows = slice(start, start + step)
        of_g = _added([(part[:, rows], part[:, start:].mT) for part in out], form)
        of_a = _added([(part[:, rows], part[:, start:].mT) for part in into], form)
        weighted_g.append(_weighted(of_g, alpha[:, :, None], rows, start))
        weighted_a.append(_weighted(of_a, beta, rows, start))
        products = of_g.mul_(of_a)
        square = products[:, :, : products.shape[1]].sum((1, 2), dtype=torch.float64)
        if start + step < positions:  # off the diagonal block each pair stands for two
            square = 2 * products.sum((1, 2), dtype=torch.float64) - square
        found.append(square)
    # The elementwise product is rounded too, and so is the float64 sum of T^2 of them.
    gamma_a = gamma_a + 2 * _U + positions**2 * 2.0**-52
    upwards = 1 + gamma(positions + 16, _U)  # of the weighted sums
    error = upwards * gamma_g * _total(weighted_a) + upwards * gamma_a * _total(weighted_g) + gamma_a * gamma_g * spread
    return _total(found), error


def _weighted(matrix: Tensor, weights: Tensor, rows: slice, start: int) -> Tensor:
    """The sum of absolute values times the weights of row and column, ``(n,)``; weights (n, T, sets)."""
    columns = weights[:, start:]
    if matrix.shape[1] < matrix.shape[2]:  # off the diagonal block each pair stands for two
        times = torch.full((matrix.shape[2], 1), 2.0, device=matrix.device)
        times[: matrix.shape[1]] = 1.0
        columns = columns * times
    return (matrix.abs() @ columns).mul_(weights[:, rows]).sum((1, 2), dtype=torch.float64)


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
    for use in uses:
        a, g = _kept(use.a, rows), _kept(use.g, rows)
        scale_inputs = a.shape[2] <= g.shape[2]  # the smaller of the two
        for part in form.split((a if scale_inputs else g) * weights):  # in float32
            x, y = (g, part) if scale_inputs else (part, a)
            x, y = x.flatten(0, 1), y.flatten(0, 1)
            if total is None and shape[0] <= _AT_ONCE:
                total = product(x.T, y, form.name)
                continue
            total = torch.zeros(shape, device=coefficients.device) if total is None else total
            for start in range(0, len(total), _AT_ONCE):  # in parts: a second matrix of the vocabulary is large
                total[start : start + _AT_ONCE].add_(product(x[:, start : start + _AT_ONCE].T, y, form.name))
    return torch.zeros(shape, device=coefficients.device) if total is None else total


def _at_once(uses: Sequence[Outer], shape: torch.Size, parameters: int, batch: UnitRows) -> int:
    """How many units fit into temporaries of bounded size."""
    positions = max(group.rows.shape[1] for group in batch.groups) * sum(use.g.shape[1] for use in uses)
    gram = _prefers_gram(positions, shape[0] * parameters, shape[1])
    each = 3 * positions * (positions if positions <= WHOLE else _block(positions)) if gram else 2 * shape.numel()
    return max(1, chunk_of(batch.real.device) // max(1, each))


class LowPrecisionGhostClipping(GhostClipping):
    """`GhostClipping` whose products take low-precision inputs, with norms bounded from above.

    Guarantees, beyond those of `GhostClipping`:
        - Where all of a unit's gradient is made by low-precision products, its clip factor is at most what the exact
          norm of that gradient would give; the proof heads this module. The rest has the tolerance of float32.
        - What is added for a unit, with the rounding of its own terms, is within ``max_grad_norm``.
        - It takes batches of any shape, and none of fixed shape.

    Raises:
        UnsupportedModelError: The device adds up products less exactly than is assumed.
    """

    form: ClassVar[Format]

    def __init__(self, module: nn.Module, *, verify: bool = False, **clipping: Unpack[ClipSettings]) -> None:
        super().__init__(module, verify=verify, **clipping)
        self._probed: set[torch.device] = set()
        for device in {parameter.device for parameter in self.parameters.values()}:
            self._probe(device)

    def _probe(self, device: torch.device) -> None:
        if device not in self._probed:
            check_products(device, self.form.name)
            self._probed.add(device)

    def _recorded(self, row_loss: RowLoss, batch: UnitRows) -> tuple[Tensor, Contributions]:
        """The losses and contributions, after any check, with the factors of outer products rounded to the format."""
        losses, contributions = super()._recorded(row_loss, batch)
        self._probe(losses.device)  # the module may have been moved since
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
        parts = [{name: low[name] for name in names if name in low} for names in self.groups]
        upper, vague = torch.zeros_like(norms), torch.zeros_like(doubtful)
        for group, part in enumerate(parts):
            found = self._certified(part, batch)
            upper[group] = found.squares.sqrt() + found.moved.sqrt()
            whole = (norms[group].square() + upper[group].square()).sqrt()
            about = (norms[group].square() + found.estimate.clamp(min=0)).sqrt()
            vague[group] = ~(whole <= (1 + LOOSE) * about + NEGLIGIBLE * self.bound)  # NaN is vague too
            if self.clip == "abadi":  # what is not clipped in any case needs no closer look
                vague[group] &= ~(whole <= room_for_rounding(self.bound, self.parameters.values()))
            vague[group] |= ~(found.tiny <= NEGLIGIBLE * self.bound)
        vague &= batch.real & ~norms.isnan()
        # Read for all groups together: each reading waits for the device.
        for group in (g for g, some in enumerate(vague.any(1).tolist()) if some):
            exact = self._exact_squares(parts[group], batch.only(vague[group]))
            upper[group] = torch.where(vague[group], exact.sqrt(), upper[group])
        return (norms.square() + upper.square()).sqrt(), doubtful | vague

    def _certified(self, part: Mapping[str, Sequence[Contribution]], batch: UnitRows) -> Certified:
        found = Certified(*torch.zeros(4, batch.units, dtype=torch.float64, device=batch.real.device))
        for names in by_input(part):
            uses = [[use for use in part[name] if isinstance(use, Outer)] for name in names]
            size = _at_once(uses[0], self.parameters[names[0]].shape, len(names), batch)
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
