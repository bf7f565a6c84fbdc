"""What every loss asks of its settings and of the masks it is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError


def checked_temperature(temperature: float) -> float:
    """``temperature`` as a float, refused unless it is positive and finite."""
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise ConfigurationError(
            f"loss.temperature={temperature} is not a positive, finite number. It divides the scores; "
            "a `scale` of another library is 1 / temperature."
        )
    return float(temperature)


def checked_mask(mask: Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    """``mask`` on ``device``, refused unless it is one boolean for each row and column."""
    if mask.shape != (rows, columns) or mask.dtype != torch.bool:
        raise ConfigurationError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be torch.bool of shape {(rows, columns)}."
        )
    return mask.to(device)
