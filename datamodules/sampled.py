"""Base of every private DataModule: its sampling settings, and its sampling.

The run's privacy plan turns the settings into a sampling law, draws by it, and attaches its sampler before `fit`.
Without a sampler there is no train loader, so a Trainer cannot silently train on batches that no accountant counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_start_method
from types import FrameType
from typing import Any, Literal, Protocol, get_args

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin, _given_hyperparameters
from lightning.pytorch.utilities.parsing import collect_init_args
from torch.utils.data import DataLoader, Dataset

from lit_dpret.datamodules.unit_dataset import Planted
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.batches import PADDING, Draw
from lit_dpret.privacy.budget import UNSAID, RowsPerUnit, SamplingName
from lit_dpret.settings import require_choice, require_whole

PhysicalBatchSize = int | Literal["auto"]

#: Settings that every plan reads again. All others take effect once, when the data are read.
_READ_BY_EACH_PLAN = frozenset(
    {"sampling", "expected_batch_size", "sample_rate", "physical_batch_size", "cap", "rows_per_unit", "num_workers"}
)

#: The default, also used for ``physical_batch_size=auto`` until a fit finds the size, before its first release.
UNTIL_FOUND = 32


class Units(Protocol):
    """A train split as units of privacy, with any kind of rows."""

    def __len__(self) -> int: ...
    def rows(self, unit: int) -> Sequence[Any]: ...


class UnitItems(Dataset[tuple[Any, Sequence[Any]]]):
    """A map-style data set indexed by draws: ``items[draw]`` is ``(draw, rows of its unit)``; padding has no rows."""

    def __init__(self, units: Units) -> None:
        self.units = units

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, draw: Draw) -> tuple[Any, Sequence[Any]]:
        return draw, (() if draw.unit == PADDING else self.units.rows(draw.unit))


@dataclass(kw_only=True, eq=False, repr=False)
class SampledDataModule(LightningDataModule):
    """A private data set, sampled only by the privacy plan.

    `lit_dpret.privacy.sampling.TrainingData` lists what a fit requires of any DataModule.

    A subclass provides its units (`train_units`) and, where a row depends on the draw, the items of its loader
    (`_train_items`).

    Guarantees:
        - There is no train loader before a sampler is attached.
        - Iterating the loader draws nothing from torch's global random state.
        - Settings that choose the data are fixed at construction, in this object and in copies of it.
          `dataclasses.replace` creates a DataModule that reads the data again.

    Args:
        sampling: How the plan should draw units.
        expected_batch_size: Units per logical batch, on average.
        sample_rate: The probability of drawing each unit. If it is given, ``expected_batch_size`` is only the constant
            that divides the sum. Both are required under ``privacy.neighbours=add_or_remove``.
        physical_batch_size: Units that fit on the device at once; ``auto`` finds it before the first release, on random
            rows of the longest size.
        cap: Largest logical batch under ``truncated_poisson``; None lets the accountant choose.
        rows_per_unit: ``one`` draws one row of each drawn unit, ``all`` takes all.
        seed: The seed of public choices, such as a sample of the data.
        num_workers: Worker processes of the train loader.
    """

    sampling: SamplingName = "truncated_poisson"
    expected_batch_size: int | None = None
    sample_rate: float | None = None
    physical_batch_size: PhysicalBatchSize = UNTIL_FOUND
    cap: int | None = None
    rows_per_unit: RowsPerUnit = "one"
    seed: int = 0
    num_workers: int = 0

    def save_hyperparameters(
        self, *args: Any, ignore: Any = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Store the arguments of a subclass's constructor, as Lightning does for classes whose fields hold no data."""
        frame = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        given = _given_hyperparameters.get()
        if given is None and frame is not None and frame.f_code.co_name == "__init__":
            given = {}
            for found in collect_init_args(frame, [], classes=(HyperparametersMixin,)):
                given.update(found)
        before = _given_hyperparameters.set(given)
        try:
            super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        finally:
            _given_hyperparameters.reset(before)

    def __post_init__(self) -> None:
        trainer = vars(self).pop("trainer", None)  # set already where a subclass calls this constructor in its `setup`
        settings = {name: value for name, value in vars(self).items() if name not in _READ_BY_EACH_PLAN}
        super().__init__()
        self.trainer = trainer
        self.finds_physical_batch_size = self.physical_batch_size == "auto"
        if self.finds_physical_batch_size:
            self.physical_batch_size = UNTIL_FOUND
        self._batch_sampler: Iterable[list[Any]] | None = None
        self._collate_fn: Callable[[list[Any]], Any] | None = None
        self._planted: Planted | None = None
        self._check_sampling()
        self._dicts = {name: dict(value) for name, value in settings.items() if isinstance(value, dict)}
        self._settled = frozenset(settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_settled", ()):
            raise _set_later(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self).get("_settled", ()):
            raise _set_later(name)
        super().__delattr__(name)

    def _require_as_built(self) -> None:
        """Refuse settings that are dicts and were changed in place."""
        for name, before in self._dicts.items():
            now = getattr(self, name)
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
                raise _set_later(name)

    def _check_sampling(self) -> None:
        self._check_choices(sampling=SamplingName, rows_per_unit=RowsPerUnit)
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise ConfigurationError(f"datamodule.sample_rate={self.sample_rate} must be above 0 and at most 1.")
        if self.cap is not None and self.sampling != "truncated_poisson":
            raise ConfigurationError(
                f"datamodule.cap={self.cap} has no meaning under datamodule.sampling={self.sampling}; set it to null."
            )
        require_whole("datamodule", self, 1, "physical_batch_size")
        require_whole("datamodule", self, 0, "num_workers")
        require_whole("datamodule", self, 1, "expected_batch_size", "cap", null=True)

    def _check_choices(self, **choices: Any) -> None:
        """Refuse settings, by name, that are not values of their ``Literal``."""
        for knob, literal in choices.items():
            require_choice(f"datamodule.{knob}", getattr(self, knob), get_args(literal))

    def _refuse_sample(self, neighbours: str | None, knob: str, *, several: str | None) -> None:
        """Refuse a setting that keeps a fixed number of records, if changing one unit could move another into or out of
        it.

        Under ``zero_out`` ids are public and stay. Under ``replace_one`` one record may replace another, so a unit must
        be exactly one record; ``several`` names the setting that violates this, if any.
        """
        if getattr(self, knob) is None or neighbours not in ("add_or_remove", "replace_one"):
            return
        if neighbours == "add_or_remove":
            why = "removing one record would let another one in"
        elif several is not None:
            why = f"a unit is not one record of this sample ({several}), so replacing it may move others in or out"
        else:
            return
        raise ConfigurationError(
            f"datamodule.{knob}={getattr(self, knob)} cannot go with privacy.neighbours={neighbours}: {why}. Set it to "
            "null, or set privacy.neighbours=zero_out, under which ids are public."
        )

    def plant(self, planted: Planted) -> None:
        """Train on these units too: canaries, which an audit examines afterwards.

        Guarantees:
            - Each unit is drawn by the same law as every other unit and counts as one in n and in everything derived
              from n.
            - `data_fingerprint` covers the planted units, and no split of the data contains them.
        """
        if self._planted is not None or self._batch_sampler is not None:
            raise ConfigurationError(
                "These data already have planted units or an attached sampler. Plant all units at once, before fit."
            )
        self._planted = planted

    @property
    def planted_facts(self) -> dict[str, Any] | None:
        """The public facts about planted units, for ledger and card; None without any."""
        return None if self._planted is None else dict(self._planted.facts)

    def train_units(self) -> Units:
        """Return the train split, one item per unit of privacy."""
        raise NotImplementedError(f"{type(self).__name__} does not define train_units().")

    def _train_items(self) -> Dataset[Any]:
        """Return the data set of the train loader: a map from a draw to ``(draw, rows of its unit)``."""
        return UnitItems(self.train_units())

    @property
    def unit_by(self) -> str | None:
        """The rule that groups rows into units (see `TrainingData`); until a subclass states it, its runs compose with
        no others.
        """
        return UNSAID

    @property
    def n_units(self) -> int:
        """The number of train units; private under ``add_or_remove``."""
        self._require_as_built()
        return len(self.train_units())

    def attach(self, batch_sampler: Iterable[list[Any]], collate_fn: Callable[[list[Any]], Any]) -> None:
        """Set the plan's sampler, which yields lists of draws, and its collate function.

        The collate function gets a list of ``(draw, rows)``; ``rows`` is empty where ``draw.unit`` is -1.
        """
        self._batch_sampler, self._collate_fn = batch_sampler, collate_fn

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the attached sampler's batches."""
        if self._batch_sampler is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no sampler: training batches are drawn by the plan of a private module, "
                "which attaches itself before fit. Give trainer.fit the result of make_private(module, ...), or a "
                f"PrivateModule (with privacy=none for no guarantee); {self._without_a_plan()}."
            )
        return DataLoader(
            self._train_items(),
            batch_sampler=self._batch_sampler,
            collate_fn=self._collate_fn,
            num_workers=self.num_workers,
            # Python 3.14 defaults to forkserver, which would have to pickle the collate function.
            multiprocessing_context="fork" if self.num_workers and get_start_method() == "forkserver" else None,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _without_a_plan(self) -> str:
        """Name the plain data for a loop without a privacy plan, as part of a sentence."""
        return "in a custom loop, read train_units()"


def _set_later(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"datamodule.{name} cannot change after construction: the data may have been read with the old value, and plan "
        f"and card would describe the new one. Build a new DataModule, as dataclasses.replace(data, {name}=...) does; "
        "a subclass sets it before super().__post_init__()."
    )
