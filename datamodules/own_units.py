"""A custom map-style data set; a function names the unit of privacy of each row."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

from torch.utils.data import IterableDataset

from lit_dpret.datamodules.records import as_id
from lit_dpret.datamodules.sampled import SampledDataModule
from lit_dpret.datamodules.unit_dataset import Planted
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.budget import ALL_OF_ONE, EACH_ROW, UNNAMED, Unit
from lit_dpret.privacy.content import content_of_rows, copied_row
from lit_dpret.privacy.user_generators import kept_generators, seed_everywhere
from lit_dpret.settings import batch_among, naming_arguments

#: Descriptions of the arguments that `UnitDataModule` needs, and where the arguments of a DataLoader belong.
_ARGUMENTS = {
    "dataset": "a data set with a length, which returns a row by its number",
    "collate_fn": "give it to make_private, or write collate_rows of the PrivateModule",
    "batch_size": "expected_batch_size is the average number of units in a step, and physical_batch_size the number of "
    "units computed at once",
    "shuffle": "the units of a step are drawn at random; sampling says how",
    "sampler": "the units of a step are drawn at random; sampling says how",
    "batch_sampler": "the units of a step are drawn at random; sampling says how",
    "drop_last": "every step draws from all units; sampling says how",
    "transform": "apply it in the data set, whose random draws are seeded for each unit and step",
}
_OTHER_UNITS = tuple(unit for unit in get_args(Unit) if unit != "user")


class OwnUnits:
    """The rows of a data set, by number, grouped by unit."""

    unit = "record"
    duplicates = "keep"

    def __init__(self, dataset: Any, groups: Sequence[Sequence[int]]) -> None:
        self.dataset, self._groups = dataset, groups

    def __len__(self) -> int:
        return len(self._groups)

    def rows(self, unit: int) -> Sequence[Any]:
        """Return copies of all rows of unit number ``unit``, since a data set may read all its rows into one buffer."""
        return tuple(copied_row(self.dataset[row]) for row in self._groups[unit])

    def most_units_of_a_user(self) -> int | None:
        """Return None: only ``unit_of`` knows the person that a unit belongs to."""
        return None


@dataclass(eq=False, repr=False)
class UnitDataModule(SampledDataModule):
    """Any map-style data set; a unit of privacy, a *record*, is all rows with one name.

    Guarantees:
        - Every row is in exactly one unit.
        - The content of a unit depends on its own rows alone; a data set that remembers earlier requests is refused.

    Args:
        dataset: Has a length, and returns a row by its number. Every row is read once when a run begins.
        unit_of: Returns the name of a row's unit, given the row's number: a string or an integer, as
            ``users.__getitem__`` does; the claim is then about one user. None makes every row a unit of its own.
        unit_name: What all rows with one name represent, such as ``user``; the card shows it instead of ``record``.
        expected_batch_size: As for `SampledDataModule`; it or ``sample_rate`` is needed.
    """

    dataset: Any
    _: KW_ONLY
    unit_of: Callable[[int], Any] | None = None
    unit_name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dataset, unit_of, unit_name = self.dataset, self.unit_of, self.unit_name
        kind = type(dataset).__name__
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise DataError(
                f"dataset={kind} is not a map-style data set, with __len__ and __getitem__. Units are drawn by number, "
                "and epsilon depends on how many there are. Pass a map-style data set."
            )
        if unit_of is not None and not callable(unit_of):
            raise ConfigurationError(
                f"datamodule.unit_of={type(unit_of).__name__} is not a function of a row's number. For a list of "
                "names, pass users.__getitem__."
            )
        if len(dataset) == 0:
            raise DataError(f"dataset={kind} has no rows, so there is no unit to train on.")
        names: Any = getattr(unit_of, "__self__", None)  # ``users``, for ``users.__getitem__``
        if type(names).__name__ in ("_LocIndexer", "_AtIndexer"):  # for ``users.loc.__getitem__``
            names = names.obj
        labels = getattr(names, "index", None) if hasattr(names, "iloc") else None  # for a pandas.Series
        if labels is not None and [*labels] != [*range(len(labels))]:
            raise DataError(
                "unit_of looks up names by the labels of a table's index, which are not 0, 1, 2 and so on: it would "
                "name the wrong rows. unit_of receives the number of a row: pass users.iloc.__getitem__, or "
                "users.to_numpy().__getitem__."
            )
        if hasattr(names, "__len__") and not isinstance(names, dict) and len(names) != len(dataset):
            raise DataError(
                f"unit_of reads {len(names)} names, but dataset={kind} has {len(dataset)} rows: it would name the "
                "wrong rows. unit_of receives the number of a row of this data set: for a Subset, pass lambda row: "
                "users[subset.indices[row]]."
            )
        a_word = re.fullmatch(r"[a-z]{1,30}", str(unit_name)) and unit_name not in _OTHER_UNITS
        if unit_name is not None and unit_of is None:
            raise ConfigurationError(
                f"datamodule.unit_name={unit_name!r} needs unit_of: it is the card's word for all rows to which "
                "unit_of gives one name, and without unit_of every row is a unit. Give unit_of, or omit unit_name."
            )
        if unit_name is not None and not a_word:
            raise ConfigurationError(
                f"datamodule.unit_name={unit_name!r} must be one word of at most 30 lower-case letters a to z, such as "
                f"user, and not one of {', '.join(_OTHER_UNITS)}, which mean other units on every card."
            )
        self._units: OwnUnits | None = None
        if self.sample_rate is None and self.sampling != "full_batch":
            batch_among(self.expected_batch_size, len(self.train_units()))  # the number of units, which may be private

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        """Set the run's unit of privacy, which can only be a record."""
        if unit != OwnUnits.unit:
            word = "" if unit in _OTHER_UNITS else f", and unit_name={unit!r}"  # unit_name refuses these
            raise ConfigurationError(
                f"privacy.unit={unit}: the units of a UnitDataModule are those that unit_of names. Leave privacy.unit "
                f"at {OwnUnits.unit}, and give UnitDataModule a unit_of that names each row's {unit}{word}."
            )
        self._units = None  # names and rows that `unit_of` looks up may have changed since an earlier run

    @property
    def unit_by(self) -> str:
        """The rule that groups rows into a unit (`PrivacyBudget.unit_by`)."""
        if self.unit_of is None:
            return EACH_ROW
        return UNNAMED if self.unit_name is None else f"{ALL_OF_ONE}{self.unit_name}"

    def assumptions(self) -> list[str]:
        """Return, for the card, the assumption behind a unit name."""
        return [] if self.unit_name is None else [f"unit_of gives all rows of one {self.unit_name} one name."]

    def train_units(self) -> OwnUnits:
        """Return the rows by unit, in order of first occurrence; calls `unit_of` once per row."""
        if self._units is None:
            groups: dict[Any, list[int]] = {}
            for row in range(len(self.dataset)):
                groups.setdefault(self._name_of(row), []).append(row)
            self._units = OwnUnits(self.dataset, list(groups.values()))
        return self._units

    def _name_of(self, row: int) -> str | int:
        if self.unit_of is None:
            return row
        try:
            name = self.unit_of(row)
            name = name.item() if hasattr(name, "item") else name
        except Exception as error:  # its message may contain a text of the data
            raise DataError(
                f"unit_of({row}) raised {type(error).__name__}: it receives the number of a row, and must return the "
                "name of the unit of dataset[number], as users.__getitem__ does."
            ) from error
        if (found := as_id(name)) is None:  # NaN differs from itself, and equal tensors differ as keys
            raise DataError(
                f"unit_of({row}) returned "
                f"{'an empty string' if isinstance(name, str) else f'a {type(name).__name__}'}: the name of a unit "
                "must be a string or an integer, so that equal names identify one unit."
            )
        return found

    def plant(self, planted: Planted) -> None:
        """Refuse canaries: they are texts, and the format of this data set's rows is unknown."""
        raise ConfigurationError("UnitDataModule takes no canaries: its rows may be of any kind. Leave the audit out.")

    def data_fingerprint(self, key: bytes) -> str:
        """Return a keyed fingerprint of all rows with their units, so that a resume detects changed data."""
        found = hmac.new(key, digestmod="sha256")
        with kept_generators():
            for row in range(len(self.dataset)):
                seed_everywhere(row)  # for random draws of the data set, such as augmentations
                part = content_of_rows((self._name_of(row), self.dataset[row]))
                found.update(len(part).to_bytes(8, "big") + part)
        return found.hexdigest()


_named = naming_arguments("UnitDataModule", _ARGUMENTS)(UnitDataModule.__init__)  # generated by the dataclass
UnitDataModule.__init__ = _named  # type: ignore[method-assign]
