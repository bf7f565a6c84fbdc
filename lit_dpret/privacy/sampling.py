"""Sample the participants of each step by keyed coins alone.

An accountant's number holds for one *law*: how the units of a logical batch were drawn. Here the law is an object, and
the sampler is built from it. The sampler can report what it really did, so that the ledger records the law that ran and
not the law that was requested. The Protocol `TrainingData` lists what a DataModule must provide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Sampler

from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.accounting.coupled_sensitivity import largest_batch
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, Poisson, SamplingLaw, Shuffle, TruncatedPoisson
from lit_dpret.privacy.batches import PADDING, Draw, SeededDraws, UnitBatch, UnitOwners
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import SamplingRequest
from lit_dpret.settings import batch_among, require_whole


class Row(Protocol):
    """One (query, passage) row of a unit, as modules read it; `lit_dpret.datamodules.rows.Row` implements it."""

    @property
    def query_id(self) -> str: ...
    @property
    def query(self) -> str: ...
    @property
    def passage_id(self) -> str: ...
    @property
    def passage(self) -> str: ...
    @property
    def positives(self) -> frozenset[str]: ...


class TrainingData(SamplingRequest, Protocol):
    """The interface of a DataModule, besides Lightning's hooks, as in `lit_dpret.datamodules.PairsDataModule`."""

    @property
    def n_units(self) -> int:
        """The number of units, after `use_unit`."""

    @property
    def unit_by(self) -> str | None:
        """How rows are grouped into units, after `use_unit`: None where all rows have an id of the run's unit.

        Otherwise one of the values of `lit_dpret.privacy.budget`: ``EACH_ROW``, ``PARTLY_NAMED``, ``UNSAID``, or
        ``ALL_OF_ONE`` with a name. Runs are added up only where it is the same.
        """

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        """Group the rows by ``privacy.unit``; called before anything is planned."""

    def data_fingerprint(self, key: bytes) -> str:
        """Return a keyed hash of the training rows, so that a resumed run can detect changed data."""

    def attach(self, batch_sampler: Any, collate_fn: Callable[..., Any]) -> None:
        """Store both for the loader of `train_dataloader`."""

    def train_dataloader(self) -> Any:
        """Return a loader with that sampler, whose ``dataset[draw]`` is the draw and the rows of ``draw.unit``."""


OFFERED = (
    "sampling", "expected_batch_size", "sample_rate", "physical_batch_size", "cap", "rows_per_unit", "n_units",
    "unit_by", "use_unit", "data_fingerprint", "attach", "train_dataloader",
)  # fmt: skip


def not_offered(data: Any) -> list[str]:
    """Return the names of `TrainingData` that ``data`` lacks."""
    return [name for name in OFFERED if not hasattr(type(data), name) and name not in vars(data)]


def steps_per_epoch(request: SamplingRequest, public_units: int | None) -> int:
    """Return how many logical steps make one pass over the units, on average under Poisson sampling."""
    if request.sampling == "full_batch":
        return 1
    if request.sample_rate is not None:
        if not 0 < request.sample_rate <= 1:
            raise ConfigurationError(f"datamodule.sample_rate={request.sample_rate} must be in (0, 1].")
        return max(1, round(1 / request.sample_rate))
    if public_units is None:
        raise ConfigurationError(
            "privacy.neighbours=add_or_remove keeps the number of units private, so no rate can be derived from it: "
            "declare datamodule.sample_rate.",
            trap="T5",
        )
    require_whole("datamodule", request, 1, "expected_batch_size", null=True)
    passes = public_units / batch_among(request.expected_batch_size, public_units, f"the {public_units} units")
    return math.ceil(passes) if request.sampling in ("shuffle", "fixed_size") else max(1, round(passes))


class PrivateBatchSampler(Sampler[list[Draw]]):
    """Draw logical batches by a law and return them as physical batches.

    Guarantees:
        - Under the Poisson laws each unit takes part in each step by its own coin; under the truncated law a batch
          above the cap loses units uniformly, never by file order.
        - An empty logical batch is handed out as one physical batch of padding.
        - Under a capped law the number of physical batches per step is constant.
        - The draw of a step depends on (secret, run, attempt, step) alone: not on workers, nor on a resume.
        - With ``sub_batches``, these are the physical batches of a step: each drawn unit is assigned to one by its own
          coin, and none holds more than the given number of units. The units left out are chosen uniformly.
        - If the sampler ``scatters``, each drawn unit's position in a physical batch is decided by the unit's own coin,
          so that it is the same without any other unit. The number of units may be private.
        - All ``ranks`` draw the same step and divide it among them, by unit or by sub-batch. Each hands out the same
          number of physical batches, with padding where it has no units, so that no rank waits for another.

    Attributes:
        watched: Whether each batch is compared with what was handed out for it (`require_drawn`).
    """

    def __init__(
        self,
        law: SamplingLaw,
        *,
        units: int,
        steps_per_epoch: int,
        physical_batch_size: int,
        stream: KeyedStream,
        sub_batches: tuple[int, int | None] | None = None,
        ranks: Ranks | None = None,
        unit: str = "query",
    ) -> None:
        require_whole("datamodule", {"physical_batch_size": physical_batch_size}, 1)
        self.law = law
        self.units = units
        self.steps_per_epoch = steps_per_epoch
        self.physical_batch_size = physical_batch_size
        self.sub_batches: int | None
        self.n_max: int | None
        self.sub_batches, self.n_max = (None, None) if sub_batches is None else sub_batches
        self.ranks = ranks or Ranks()
        self.scatters = False
        self.attempt = 0
        self.next_step = 0
        self.before_first_draw: Callable[[], None] = lambda: None
        self._stream = stream
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        self.watched = False
        self._handed_out: dict[tuple[int, int, int], list[int]] = {}
        self.unit = unit
        self._owners = UnitOwners(unit)

    def draw(self, step: int) -> np.ndarray:
        """Return the units of logical step ``step``, in random order, shape ``(drawn,)``."""
        coins = self._stream.coins(self.attempt, step)
        law = self.law
        if isinstance(law, (Poisson, TruncatedPoisson)):
            # Binomial size, then a uniform choice: the law of one coin per unit, without drawing `units` coins.
            size = int(coins.binomial(self.units, law.sample_rate))
            if isinstance(law, TruncatedPoisson):
                # The choice below is uniform, so a smaller choice has the law of a larger one cut at random.
                size = min(size, law.cap)
            return coins.choice(self.units, size=size, replace=False)
        if isinstance(law, FixedSize):
            return coins.choice(self.units, size=law.batch_size, replace=False)
        if isinstance(law, Shuffle):
            per_epoch = math.ceil(self.units / law.batch_size)
            epoch, position = divmod(step, per_epoch)
            # The order belongs to an epoch, not to a step: a resume in its middle continues in the same order.
            key = (self.attempt, epoch)
            if self._order is None or self._order[0] != key:
                order = self._stream.coins(*key, purpose="shuffle").permutation(self.units)
                self._order = (key, order)
            return self._order[1][position * law.batch_size : (position + 1) * law.batch_size]
        if isinstance(law, FullBatch):
            return np.arange(self.units)
        raise ConfigurationError(f"No sampler implements the law {type(law).__name__}.")

    @property
    def physical_batches_per_step(self) -> int | None:
        """Physical batches per step on each rank; None if that may be private."""
        if self.sub_batches is not None:
            return math.ceil(self.sub_batches / self.ranks.world_size)
        if self.scatters:
            return None
        largest = largest_batch(self.law)
        return None if largest is None else self._parts(largest)

    def _parts(self, units: int) -> int:
        """Return how many physical batches the fullest rank needs for ``units`` units over all ranks."""
        return max(1, math.ceil(math.ceil(units / self.ranks.world_size) / self.physical_batch_size))

    def physical_batches(self, step: int) -> list[list[Draw]]:
        """Return this rank's part of step ``step`` as a list of physical batches, never empty."""
        units = self.draw(step)
        # With a separate purpose, so that the row taken does not depend on which units were drawn.
        picks = self._stream.coins(self.attempt, step, purpose="rows").integers(0, 2**62, size=len(units))
        if self.scatters and self.sub_batches is None:
            members = self._scattered(len(units), step)
            parts = len(members)
        else:
            parts = self.physical_batches_per_step or self._parts(len(units))
            members = self._members(units, step, parts)
        batches: list[list[Draw]] = []
        for position in range(parts):
            chosen = members[position]
            part = position * self.ranks.world_size + self.ranks.rank
            last = position == parts - 1
            batch = [
                self._of_unit(int(units[at]), step, part, last, int(picks[at]))
                if at >= 0
                else Draw(PADDING, step, part, last, attempt=self.attempt)
                for at in chosen
            ]
            # Padding where no unit was drawn: the step still adds its noise, or an empty batch would show.
            batches.append(batch or [Draw(PADDING, step, part, last, attempt=self.attempt)])
        return batches

    def _of_unit(self, unit: int, step: int, part: int, last: bool, pick: int) -> Draw:
        return Draw(unit, step, part, last, pick, self.attempt, self._stream.unit_seed(self.attempt, step, unit))

    def _members(self, units: np.ndarray, step: int, parts: int) -> list[np.ndarray]:
        """Return the positions of the drawn units in each of this rank's physical batches."""
        rank, world = self.ranks.rank, self.ranks.world_size
        whole = self._sub_batches(units, step)
        if whole is None:
            own, size = np.arange(rank, len(units), world), self.physical_batch_size
            return [own[part * size : (part + 1) * size] for part in range(parts)]
        nobody = np.arange(0)
        return (whole[rank::world] + [nobody] * parts)[:parts]

    def _scattered(self, count: int, step: int) -> list[np.ndarray]:
        """Return those positions with each unit at its own random offset in a batch, and -1 at an empty offset.

        Units with the same coin get the same offset in different batches. So the offset of a unit in its batch depends
        on no other unit, nor on how many there are.
        """
        size, world = self.physical_batch_size, self.ranks.world_size
        coins = self._stream.coins(self.attempt, step, purpose="places").integers(0, size * world, size=count)
        # Stable, so that units with one coin keep the order of the draw.
        order = np.argsort(coins, kind="stable")
        turns = np.empty(count, dtype=np.int64)
        turns[order] = np.arange(count) - np.searchsorted(coins[order], coins[order])
        places = np.full((1 + int(turns.max(initial=0)), world, size), -1)
        places.reshape(len(places), -1)[turns, coins] = np.arange(count)
        return list(places[:, self.ranks.rank])

    def _sub_batches(self, units: np.ndarray, step: int) -> list[np.ndarray] | None:
        """Return the positions of the drawn units in each sub-batch; None without sub-batches."""
        if self.sub_batches is None:
            return None
        # A coin for every unit, drawn or not, so that another unit's absence moves no unit.
        coins = self._stream.coins(self.attempt, step, purpose="sub_batches")
        assigned = coins.integers(0, self.sub_batches, size=self.units)[units]
        # By these numbers, a part that is too full loses units uniformly, and not by their position in the draw.
        rank = coins.random(self.units)[units]
        found = [np.flatnonzero(assigned == part) for part in range(self.sub_batches)]
        if self.n_max is None:
            return found
        return [np.sort(part[np.argsort(rank[part])[: self.n_max]]) for part in found]

    def __iter__(self) -> Iterator[list[Draw]]:
        self.before_first_draw()
        first = self.next_step
        for step in range(first, (first // self.steps_per_epoch + 1) * self.steps_per_epoch):
            self.next_step = step + 1
            for batch in self.physical_batches(step):
                if self.watched:
                    self._handed_out[batch[0].attempt, step, batch[0].part] = [draw.unit for draw in batch]
                yield SeededDraws(batch)

    def require_drawn(self, batch: UnitBatch) -> None:
        handed_out = self._handed_out.pop((batch.attempt, batch.step, batch.part), None)
        if not batch.origin:
            return  # the user's own collate function
        if handed_out is not None and handed_out != [unit for unit, _ in batch.origin]:
            raise DataError(
                f"In step {batch.step} the training data set answered for other units than were drawn: dataset[draw] "
                "must return the draw itself and the rows of unit draw.unit (datamodule.train_dataloader).",
                trap="T38",
            )
        for unit, keys in batch.origin:
            self._owners.note(unit, keys)

    def __len__(self) -> int:
        parts = self.physical_batches_per_step
        if parts is None:
            raise TypeError(
                "Under this law the number of physical batches of a step may be private. The number of steps is "
                "trainer.max_steps, or trainer.estimated_stepping_batches."
            )
        return self.steps_per_epoch * parts
