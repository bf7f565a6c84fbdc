"""The guarantee that a run must not exceed, and its wording."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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

EACH_ROW = "each row"
"""The `PrivacyBudget.unit_by` of data whose rows are units, because no field names units of several rows."""

PARTLY_NAMED = "each row without an id, and all rows of each id"
"""The `PrivacyBudget.unit_by` of a log in which some records have ids; another log may have other records with ids."""

ALL_OF_ONE = "all rows of one "
"""The prefix of `PrivacyBudget.unit_by` for rows grouped by the user's function; the name of the unit follows."""

UNNAMED = "what unit_of names"
"""The `PrivacyBudget.unit_by` of rows grouped by the user's function, without a name for what it returns."""

UNSAID = "what the DataModule groups"
"""The `PrivacyBudget.unit_by` of a DataModule that does not say what rows make one unit."""

ROUNDING_SHARE = 2.0**-16
"""The share of the sensitivity, and so of the noise, that pays for rounding a sum to the grid of `noise_source`."""


def show_epsilon(value: float | None) -> str:
    """Format an epsilon rounded up to four significant digits; ``infinite`` for infinity and None (JSON).

    For the epsilon of a card use `printed_epsilon`: there None may also mean that nothing is proved.

    Example:
        >>> show_epsilon(2.99961), show_epsilon(0.123412), show_epsilon(None)
        ('3.000', '0.1235', 'infinite')
    """
    if value is None or not math.isfinite(value):
        return "infinite"
    if value <= 0:
        return "0"
    digits = 3 - math.floor(math.log10(value))
    scaled = value * 10.0**digits
    rounded = math.ceil(scaled * (1 - 1e-12)) / 10.0**digits
    return f"{rounded:.{max(0, digits)}f}"


def show_delta(value: float) -> str:
    """Format a delta rounded up to three significant digits: rounding down would be a stronger claim."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.3g}"


#: A delta above the first causes a warning; the second is usual.
LARGE_DELTA, USUAL_DELTA = 1e-3, 1e-5


def large_delta(delta: float, units: int | None) -> str:
    """Explain why a delta is large for this number of units, and what is usual."""
    of = "" if units is None else f" for {units} units, where 1/n is {1 / units:.2g}"
    return (
        f"delta={show_delta(delta)} is large{of}: with up to that chance a unit is not protected at all, so the "
        f"usual delta is far below 1/n, such as {USUAL_DELTA:g}. Set privacy.delta={USUAL_DELTA:g}, or train on more "
        "units."
    )


#: An epsilon above this is hardly a protection, and often a typing error.
LARGE_EPSILON = 20.0


def large_epsilon(eps: float) -> str:
    """Explain how little a large epsilon promises."""
    return (
        f"privacy.eps={eps:g} is large: the odds of a guess about one unit may change by a factor of e^{eps:g}, which "
        "protects little. Usual values are 1 to 10."
    )


def with_rounding_paid(sensitivity: float, noise: NoiseName) -> float:
    """Return the charged sensitivity of the noised sum, including rounding to the noise grid."""
    return sensitivity * (1 + ROUNDING_SHARE) if noise == "discrete" else sensitivity


def require_delta(delta: float, *, knob: str = "privacy.delta") -> None:
    """Refuse a delta outside (0, 1)."""
    if not (isinstance(delta, (int, float)) and 0 < delta < 1):
        raise ConfigurationError(f"{knob}={delta} must be between 0 and 1, both excluded.")


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The guarantee that a run must not exceed.

    Everything here may be published with the model. What must not be published (per-example norms, the noise secret,
    and under ``add_or_remove`` the size of the data set) never becomes a field of a budget.
    """

    eps: float  # of the whole run, positive and finite
    delta: float  # of the whole run, in (0, 1); below 1/n where n is public
    unit: Unit = "query"  # whose data a neighbouring data set lacks or changes
    neighbours: Neighbours = "zero_out"  # how it differs; an epsilon means nothing without this word next to it
    duplicates: Duplicates = "keep"
    """Whether equal texts under different ids are separate units, or one: ``datamodule.duplicates``.

    The plan sets it from the data. A unit of one kind is not a unit of the other.
    """
    unit_by: str | None = None
    """What rows make one unit, as found in the data, where ``unit`` leaves that open.

    One of `EACH_ROW`, `UNNAMED`, or all rows of one ``datamodule.unit_name``. None where ids in the data define it.
    """

    def __post_init__(self) -> None:
        if not (isinstance(self.eps, (int, float)) and math.isfinite(self.eps) and self.eps > 0):
            raise ConfigurationError(
                f"privacy.eps={self.eps!r} is not a positive, finite number. "
                "For training without a guarantee choose privacy=none."
            )
        require_delta(self.delta)
        # 3 and 3.0 are one budget, in JSON and in a fingerprint too.
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "delta", float(self.delta))
        require_choice("privacy.unit", self.unit, get_args(Unit))
        require_choice("privacy.neighbours", self.neighbours, get_args(Neighbours))
        require_choice("datamodule.duplicates", self.duplicates, get_args(Duplicates))

    def refuse_large_delta(self, units: int, *, knob: str = "privacy.delta") -> None:
        """Refuse a delta that permits publishing one whole unit, given the public number of ``units``."""
        if self.delta >= 1 / units:
            raise ConfigurationError(
                f"{knob}={self.delta:g} is not below 1/n = {1 / units:.3g} for n={units} units: "
                "such a guarantee allows publishing one unit outright. "
                f"Set {knob} to {1 / (2 * units):.3g} or less.",
                trap="T29",
            )

    def of_units(self, data: Any) -> PrivacyBudget:
        """Return the budget for the units of ``data``, a DataModule: its ``duplicates`` and ``unit_by``."""
        duplicates = getattr(data, "duplicates", self.duplicates)
        return replace(self, duplicates=duplicates, unit_by=getattr(data, "unit_by", self.unit_by))

    def refuse_other_units(
        self, unit: str, neighbours: str, duplicates: str, where: str, *, unit_by: str | None, group: str = "privacy"
    ) -> None:
        """Refuse to add up with a guarantee about other units or neighbours, which ``where`` states."""
        for knob, own, other in (
            (f"{group}.unit", self.unit, unit),
            (f"{group}.neighbours", self.neighbours, neighbours),
            ("datamodule.duplicates", self.duplicates, duplicates),
        ):
            if own != other:
                raise ConfigurationError(
                    f"{knob}={own}, but {where} {knob}={other}, and epsilons of different guarantees do not add up. "
                    "Use the same."
                )
        ours, theirs = (by or f"all rows with one id of a {unit}" for by in (self.unit_by, unit_by))
        knob, way = {
            "record": ("datamodule.unit_name", "unit_of and unit_name"),
            "user": ("datamodule.columns", "one name for the column of users"),
        }.get(unit, ("datamodule.columns", "a column of query ids"))
        if UNSAID in (ours, theirs):
            raise ConfigurationError(
                f"unit_by: a DataModule does not say which rows make one unit: a unit of this run is {ours}, and "
                f"{where} units that are {theirs}. The epsilons of different units do not add up. Give the class of "
                "the DataModule unit_by (lit_dpret.privacy.sampling.TrainingData), or query_ids to the Collection "
                "that its read_collection returns."
            )
        if ours != theirs:
            raise ConfigurationError(
                f"{knob}: a unit of this run is {ours}, but {where} units that are {theirs}. One unit here may be "
                f"several there, and the epsilons of different units do not add up. Use {way} in both, or in neither."
            )
        if ours == PARTLY_NAMED:
            raise ConfigurationError(
                f"{knob}: a unit of this run is {ours}, and nothing says that the same records have ids where {where} "
                "such units. The epsilons of different units do not add up. Give every record a query id, or none."
            )
        if ours == UNNAMED:
            raise ConfigurationError(
                f"{knob}=null: nothing says that {UNNAMED} is the same unit in this run and wherever {where} units, "
                "and the epsilons of different units do not add up. Set unit_name, such as user, in every run."
            )

    @property
    def unit_name(self) -> str:
        """The unit's name in cards and messages; for a record, the name that the owner of the data gave it."""
        named = (self.unit_by or "").removeprefix(ALL_OF_ONE)
        return named if self.unit == "record" and named not in ("", self.unit_by) else self.unit

    def describe_unit(self, *, whole: bool) -> str:
        """Return unit and neighbours for a table or a message, with ``whole`` also what makes rows one unit."""
        more = [f"duplicates={self.duplicates}", self.unit_by or "by its id"] if whole else []
        return f"{self.unit} ({', '.join([self.neighbours, *more])})"

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        return facts if self.unit_by is not None else {name: facts[name] for name in facts if name != "unit_by"}
