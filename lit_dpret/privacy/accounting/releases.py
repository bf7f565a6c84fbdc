"""Releases and sampling laws as data: frozen public facts that survive JSON and that anyone can add up.

A law states how a batch was really drawn. "Shuffled, accounted as Poisson" is the most common false claim in public
code, so the two are different classes here and the accountant reads the class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias

from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import is_number, require_whole


def _real(owner: object, name: str) -> float:
    """Refuse a field that is not a number, and store it as a float: 1 and 1.0 are then one release, not two."""
    value = getattr(owner, name)
    if not is_number(value):
        raise ConfigurationError(f"{type(owner).__name__}: {name}={value!r} is not a number.")
    object.__setattr__(owner, name, float(value))
    return float(value)


def _rate(owner: object) -> None:
    value = _real(owner, "sample_rate")
    if not 0 < value <= 1:
        raise ConfigurationError(f"{type(owner).__name__}: sample_rate={value:g} must be in (0, 1].")


class SamplingLaw(ABC):
    """How the units of one logical batch are drawn. Two laws are equal if their draws have the same distribution."""

    kind: ClassVar[str]
    """The law's name in configs, in the ledger and on the card."""

    @property
    def expected_batch_size(self) -> float | None:
        """The mean number of units in a batch; None if the law's public facts do not determine it."""
        return None

    @abstractmethod
    def describe(self) -> str: ...

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SamplingLaw:
        """Return the law that `to_dict` wrote, of any kind; refuse an unknown kind or field by name."""
        law: SamplingLaw = _build(_LAWS, data, "sampling law")
        return law


@dataclass(frozen=True, kw_only=True)
class Poisson(SamplingLaw):
    """Draw each unit by an independent coin. Batch sizes vary, 0 is valid, and n is never needed."""

    kind: ClassVar[str] = "poisson"
    sample_rate: float  # probability of one unit being in one batch, in (0, 1]

    def __post_init__(self) -> None:
        _rate(self)

    def describe(self) -> str:
        return f"Poisson sampling, each unit with probability {self.sample_rate:.6g}"


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(SamplingLaw):
    """Poisson sampling, then a uniform subset of ``cap`` units if more were drawn: fixed shapes."""

    kind: ClassVar[str] = "truncated_poisson"
    sample_rate: float  # the probability of each unit's coin, in (0, 1]
    cap: int  # maximum units in a batch, 1 to n
    # Units in the data set. Public under ``zero_out`` and ``replace_one``; under ``add_or_remove`` a constant that the
    # user declared.
    n: int

    def __post_init__(self) -> None:
        _rate(self)
        require_whole(type(self).__name__, self, 1, "n", "cap")
        if self.cap > self.n:
            raise ConfigurationError(f"TruncatedPoisson: cap={self.cap} is above n={self.n}; no batch is that large.")

    @property
    def expected_batch_size(self) -> float | None:
        """``sample_rate * n``, before truncation, which is negligible for an automatic cap."""
        return self.sample_rate * self.n

    def describe(self) -> str:
        return (
            f"Poisson sampling, each of {self.n} units with probability {self.sample_rate:.6g}, "
            f"truncated to {self.cap} units"
        )


@dataclass(frozen=True, kw_only=True)
class _OfOneSize(SamplingLaw):
    batch_size: int  # units in every batch, 1 to n
    n: int  # units in the data set, a public number

    def __post_init__(self) -> None:
        require_whole(type(self).__name__, self, 1, "n", "batch_size")
        if self.batch_size > self.n:
            raise ConfigurationError(f"{type(self).__name__}: batch_size={self.batch_size} is above n={self.n}.")

    @property
    def expected_batch_size(self) -> float | None:
        return float(self.batch_size)


@dataclass(frozen=True, kw_only=True)
class FixedSize(_OfOneSize):
    """Each batch is a fresh uniform subset of exactly ``batch_size`` of the n units."""

    kind: ClassVar[str] = "fixed_size"

    def describe(self) -> str:
        return f"{self.batch_size} of {self.n} units drawn without replacement for every step"


@dataclass(frozen=True, kw_only=True)
class Shuffle(_OfOneSize):
    """Batches in shuffled order, each unit once per epoch. No amplification is claimed: none is proved.

    The accountant charges one unsampled Gaussian per epoch begun. Every release in a list starts its own epoch: an
    epoch that continues after a break is stated as one release.
    """

    kind: ClassVar[str] = "shuffle"

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the last one may be smaller and is kept."""
        # Rounded up in integers: a float quotient may be one batch too many or too few.
        return -(-self.n // self.batch_size)

    def epochs(self, steps: int) -> int:
        """Return the most epochs that ``steps`` consecutive steps from an epoch's start can touch."""
        return -(-steps // self.steps_per_epoch)

    def describe(self) -> str:
        return f"{self.n} units shuffled every epoch into batches of {self.batch_size}, without amplification"


@dataclass(frozen=True, kw_only=True)
class FullBatch(SamplingLaw):
    """Every unit in every release: full-batch descent, a histogram, a noised metric."""

    kind: ClassVar[str] = "full_batch"

    def describe(self) -> str:
        return "every unit in every release"


@dataclass(frozen=True, kw_only=True)
class GaussianRelease:
    """A sum with bounded contribution of each unit, plus Gaussian noise added once."""

    kind: ClassVar[str] = "gaussian"
    # Standard deviation of the noise over the bound C on one unit's contribution, under every relation. Replacing a
    # unit moves the sum by up to 2C; the accountant takes that into account. 0 means no noise: epsilon is infinite.
    noise_multiplier: float
    law: SamplingLaw  # how the units of the sum were drawn
    count: int = 1  # how many such releases, each with fresh noise and, where the law samples, a fresh draw
    # The purpose: ``train``, ``histogram`` and so on. Part of the identity of a release.
    label: str = "train"

    def __post_init__(self) -> None:
        value = _real(self, "noise_multiplier")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"GaussianRelease: noise_multiplier={value} must be finite and at least 0.")
        if not isinstance(self.law, SamplingLaw):
            raise ConfigurationError(f"GaussianRelease: law={self.law!r} is not a SamplingLaw.")
        require_whole(type(self).__name__, self, 1, "count")
        _label(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "noise_multiplier": self.noise_multiplier,
            "law": self.law.to_dict(),
            "count": self.count,
            "label": self.label,
        }


@dataclass(frozen=True, kw_only=True)
class NonPrivateRelease:
    """A release without any protection. A list that contains one has an infinite epsilon."""

    kind: ClassVar[str] = "non_private"
    label: str  # the content of the release, for the card
    count: int = 1  # how often

    def __post_init__(self) -> None:
        _label(self)
        require_whole(type(self).__name__, self, 1, "count")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "label": self.label, "count": self.count}


Release: TypeAlias = GaussianRelease | NonPrivateRelease

_LAWS: dict[str, Any] = {law.kind: law for law in (Poisson, TruncatedPoisson, FixedSize, Shuffle, FullBatch)}
_RELEASES: dict[str, Any] = {release.kind: release for release in (GaussianRelease, NonPrivateRelease)}


def release_from_dict(data: Mapping[str, Any]) -> Release:
    """Return the release that its ``to_dict`` wrote; refuse an unknown kind or field by name."""
    release: Release = _build(_RELEASES, data, "release")
    return release


def merge(releases: Iterable[Release]) -> list[Release]:
    """Join releases that differ only in ``count``, in order of first appearance.

    Epsilon is preserved under every accountant. Therefore shuffled releases are joined only if they are whole epochs:
    the halves of two epochs may hold the same unit.
    """
    counts: dict[Release, int] = {}
    merged: list[Release] = []
    for release in releases:
        law = release.law if isinstance(release, GaussianRelease) else None
        # A part of an epoch stays separate: two parts may hold one unit twice, and a joined count would hide that.
        if isinstance(law, Shuffle) and release.count % law.steps_per_epoch:
            merged.append(release)
            continue
        single = replace(release, count=1)
        if single not in counts:
            counts[single] = 0
            merged.append(single)
        counts[single] += release.count
    return [replace(entry, count=counts[entry]) if entry in counts else entry for entry in merged]


def _label(owner: object) -> None:
    value = getattr(owner, "label")  # noqa: B009 - the owner is one of two classes that have it
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{type(owner).__name__}: label={value!r} must be a non-empty string.")


def _build(classes: Mapping[str, Any], data: Mapping[str, Any], what: str) -> Any:
    values = dict(data)
    kind = values.pop("kind", None)
    if kind not in classes:
        raise ConfigurationError(f"{what} kind={kind!r} is not one of {', '.join(classes)}.")
    chosen = classes[kind]
    wanted = {field.name for field in fields(chosen)}
    # An unknown field may change the meaning of the release, so it is not ignored.
    if unknown := sorted(set(values) - wanted):
        raise ConfigurationError(f"{what} {kind!r} has no field {', '.join(map(repr, unknown))}.")
    if isinstance(values.get("law"), Mapping):
        values["law"] = SamplingLaw.from_dict(values["law"])
    try:
        return chosen(**values)
    except TypeError as error:
        needed = {field.name for field in fields(chosen) if field.default is MISSING}
        missing = ", ".join(sorted(needed - set(values)))
        raise ConfigurationError(f"{what} {kind!r} lacks the field {missing}.") from error
