r"""Noise on a sum: in floating point, or in whole numbers on a public grid.

``privacy.noise=gaussian`` adds floating-point normals. Which numbers such an addition can give depends on the sum, so
the low bits of the result tell more than the proof allows (Mironov 2012, "On significance of the least significant
bits for differential privacy"; Jin et al. 2022).

``privacy.noise=discrete`` computes in integers. Let :math:`\sigma` be the noise multiplier, :math:`\Delta` the
sensitivity of the sum s, d its number of coordinates. Noise has the standard deviation :math:`s_n = \sigma \Delta (1 +
\rho)`, with :math:`\rho` = `ROUNDING_SHARE`, and the grid is :math:`g = s_n 2^{-b}`. What is released is

.. math:: g (r(s) + K), \qquad r(s) = \text{round}(s / g), \quad K = \text{round}(2^b Z), \quad Z \sim N(0, I),

where K is drawn exactly (`lit_dpret.privacy.exact_normal`) and r(s) + K is a sum of 64-bit integers. Since r(s) is
whole, r(s) + K is :math:`r(s) + 2^b Z`, rounded: a function of the Gaussian mechanism on r(s) and of nothing else. So
whatever an accountant proves of Gaussian noise of that size holds for these very integers, sampling and composition
included. (For the discrete Gaussian of Canonne, Kamath and Steinke 2020, which has other probabilities, that is proved
of concentrated differential privacy, and not of the privacy loss distributions and the sampling laws in use here.)

*What rounding costs.* r(s) cuts s / g to :math:`\pm 2^{52}`, a projection, which moves no two points apart, and is off
by at most 1 in each coordinate: half from the division in float64, half from rounding. So neighbours that move s by
:math:`\Delta` move g r(s) by at most :math:`\Delta + 2 g \sqrt d`, and b is the least number with
:math:`2 g \sqrt d \le \rho \Delta` (`grid_bits`). The sensitivity that a plan states is :math:`\Delta (1 + \rho)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import ROUNDING_SHARE, NoiseName
from lit_dpret.privacy.exact_normal import MOST_BITS
from lit_dpret.privacy.noise import BLOCK, KeyedStream

_LARGEST = 2.0**52
_AT_ONCE = 256 * BLOCK


def grid_bits(noise_multiplier: float, coordinates: int) -> int:
    """Return b of the module's text: one deviation of the noise is ``2**b`` grid steps.

    Example:
        >>> grid_bits(1.0, 1_000_000)
        27

    Raises:
        ConfigurationError: So much noise would need a finer grid than 64-bit integers hold.
    """
    steps = 2 * math.sqrt(coordinates) * noise_multiplier * (1 + ROUNDING_SHARE) / ROUNDING_SHARE
    bits = max(0, math.ceil(math.log2(steps) + 1e-9))
    if bits > MOST_BITS - 8:
        raise ConfigurationError(
            f"privacy.noise=discrete: {coordinates} coordinates under a noise multiplier of {noise_multiplier:g} need "
            f"a grid of 2^-{bits} deviations, finer than 64-bit integers hold. Set privacy.noise=gaussian."
        )
    return bits


class NoiseSource(Protocol):
    """Adds the noise of one run to its sums."""

    def noised(
        self, total: Tensor, *, std: float, attempt: int, step: int, parameter: str, salt: str = "", start: int = 0
    ) -> Tensor:
        """Return ``total`` with noise of deviation ``std``, in the type of ``total``; the rest keys the noise."""


@dataclass(frozen=True)
class FloatNoise:
    """Floating-point normals of the stream."""

    stream: KeyedStream

    def noised(
        self, total: Tensor, *, std: float, attempt: int, step: int, parameter: str, salt: str = "", start: int = 0
    ) -> Tensor:
        """Return ``total`` with noise, as `NoiseSource` says."""
        noise = self.stream.normal(
            total.shape, attempt=attempt, step=step, parameter=parameter, salt=salt, start=start,
            device=total.device, dtype=total.dtype,
        )  # fmt: skip
        return total + noise.mul_(std)


@dataclass(frozen=True)
class GridNoise:
    """Whole numbers: the sum rounded to the grid, and an exactly rounded normal.

    Args:
        stream: Of the run.
        bits: From `grid_bits`, for all coordinates of the sum together.
    """

    stream: KeyedStream
    bits: int

    def noised(
        self, total: Tensor, *, std: float, attempt: int, step: int, parameter: str, salt: str = "", start: int = 0
    ) -> Tensor:
        """Return ``total`` on the grid with noise, as `NoiseSource` says; what is no number counts as 0."""
        grid, flat = std * 2.0**-self.bits, total.reshape(-1)
        found = torch.empty_like(flat)
        for first in range(0, len(flat), _AT_ONCE):
            part = flat[first : first + _AT_ONCE]
            whole = part.to(torch.float64, copy=True).div_(grid).round_().nan_to_num_(0.0, _LARGEST, -_LARGEST)
            integers = whole.clamp_(-_LARGEST, _LARGEST).long()
            integers += self.stream.rounded_normal(
                part.shape, bits=self.bits, attempt=attempt, step=step, parameter=parameter, salt=salt,
                start=start + first, device=total.device,
            )  # fmt: skip
            found[first : first + _AT_ONCE] = integers.double().mul_(grid)
        return found.reshape(total.shape)


def noise_source(noise: NoiseName, stream: KeyedStream, *, noise_multiplier: float, coordinates: int) -> NoiseSource:
    """Return the source of that name, its grid fit for ``coordinates`` coordinates in all.

    Raises:
        ConfigurationError: As `grid_bits` does.
    """
    if noise == "gaussian":
        return FloatNoise(stream)
    return GridNoise(stream, grid_bits(noise_multiplier, coordinates))
