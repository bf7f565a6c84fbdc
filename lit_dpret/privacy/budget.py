"""The guarantee that a run must not exceed, and its wording."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_choice

Unit = Literal["query", "pair", "user", "image", "passage", "record"]
Neighbours = Literal["zero_out", "add_or_remove", "replace_one"]
Duplicates = Literal["keep", "merge"]
AccountantName = Literal["pld", "rdp", "prv"]
NoiseName = Literal["gaussian", "discrete"]
ClipName = Literal["abadi", "automatic"]
ClipGroups = Literal["flat", "per_layer"]
SamplingName = Literal["truncated_poisson", "poisson", "fixed_size", "shuffle", "full_batch"]
RowsPerUnit = Literal["one", "all"]

#: The fields that name the unit of a row, by ``privacy.unit``.
NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("query_id",),
    "pair": ("query_id", "passage_id"),
    "user": ("user_id",),
    "image": ("image_id",),
    "passage": ("passage_id",),
    "record": ("record_id",),
}

ROUNDING_SHARE = 2.0**-16
"""The share of the sensitivity, and so of the noise, that is paid for rounding a sum to the grid of `noise_source`."""


def show_delta(value: float) -> str:
    """Format a delta rounded up to three significant digits: rounding down would be a stronger claim.

    Example:
        >>> show_delta(1e-5), show_delta(3.8711e-5), show_delta(0)
        ('1e-05', '3.88e-05', '0')
    """
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.3g}"


def with_rounding_paid(sensitivity: float, noise: NoiseName) -> float:
    """Return the charged sensitivity of the noised sum, including rounding to the noise grid."""
    return sensitivity * (1 + ROUNDING_SHARE) if noise == "discrete" else sensitivity


def require_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not (isinstance(delta, (int, float)) and 0 < delta < 1):
        raise ConfigurationError(f"privacy.delta={delta} must lie strictly between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The guarantee that a run must not exceed.

    Everything here may be published with the model. What must not be published (per-example
    norms, the noise secret, and under ``add_or_remove`` the size of the data set) never becomes a
    field of a budget.

    Raises:
        ConfigurationError: A value is out of range; the message names the ``privacy.`` key.
    """

    eps: float  # of the whole run, positive and finite
    delta: float  # of the whole run, in (0, 1); below 1/n where n is public
    unit: Unit = "query"  # whose data one neighbouring data set lacks or changes
    neighbours: Neighbours = "zero_out"  # how it differs; an epsilon means nothing without this word beside it
    duplicates: Duplicates = "keep"
    """Whether equal texts under different ids are units of their own, or one: ``datamodule.duplicates``, as the plan
    finds it. A unit of the one kind is no unit of the other."""

    def __post_init__(self) -> None:
        if not (isinstance(self.eps, (int, float)) and math.isfinite(self.eps) and self.eps > 0):
            raise ConfigurationError(
                f"privacy.eps={self.eps} is not a positive, finite number. "
                "For training without a guarantee choose privacy=none."
            )
        require_delta(self.delta)
        # 3 and 3.0 are one budget, in JSON and in a fingerprint too.
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "delta", float(self.delta))
        require_choice("privacy.unit", self.unit, get_args(Unit))
        require_choice("privacy.neighbours", self.neighbours, get_args(Neighbours))
        require_choice("datamodule.duplicates", self.duplicates, get_args(Duplicates))

    def refuse_large_delta(self, units: int) -> None:
        """Refuse a delta that permits publishing one whole unit of ``units`` public many."""
        if self.delta >= 1 / units:
            raise ConfigurationError(
                f"privacy.delta={self.delta:g} is not below 1/n = {1 / units:.3g} for n={units} units: "
                "such a guarantee allows publishing one unit outright. "
                "Lower privacy.delta, or set it to null for 1/(2n).",
                trap="T29",
            )

    def refuse_other_units(self, unit: str, neighbours: str, duplicates: str, where: str) -> None:
        """Refuse to add up with a guarantee about other units or neighbours, which ``where`` states.

        Raises:
            ConfigurationError: It is another one; the message names the setting that differs.
        """
        for knob, own, other in (
            ("privacy.unit", self.unit, unit),
            ("privacy.neighbours", self.neighbours, neighbours),
            ("datamodule.duplicates", self.duplicates, duplicates),
        ):
            if own != other:
                raise ConfigurationError(
                    f"{knob}={own}, but {where} {knob}={other}, and epsilons of different guarantees do not add up. "
                    "Use the same."
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
