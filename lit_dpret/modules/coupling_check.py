"""Check during training whether a row's loss depends on other rows, or on rows of earlier batches.

Clipping bounds a unit's own gradient, which bounds nothing if the unit also changes the gradients of others: by a
statistic of the batch, mixed inputs, the number of rows, or something kept from one batch to the next. A clipping
engine misses a dependence without a gradient, so the loss is recomputed with the other rows replaced.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.memory import is_out_of_memory
from lit_dpret.modules.coupling_collations import CollationPasses, refuse_own_coins, same_features
from lit_dpret.modules.coupling_passes import refuse_memory
from lit_dpret.modules.coupling_rows import Rows
from lit_dpret.modules.coupling_values import TOLERANCE
from lit_dpret.modules.kept_state import KeptName, KeptState, Looks
from lit_dpret.privacy.batches import ALONE, UnitBatch, clone_rows
from lit_dpret.privacy.user_code import is_library

_TRAINING = attrgetter("training")


class CouplingCheck:
    """Check some batches of a run: the first one, one after a resume or change of mode, and random ones (`Looks`).

    Guarantees:
        - A module is refused by name if, in training mode and with equal random numbers, the loss or the gradient of
          some rows depends on one of these:

          * the other rows of the batch, or whether there are any;
          * whether rows are collated alone, or at which positions they are;
          * the batch before, even for the very first batch;
          * a torchmetrics metric.

        - Under a mode that bounds coupled rows itself (`PrivacyMode.candidates` is neither ``rows`` nor ``pool``) the
          embeddings of pairs are compared with those of rows collated alone, and losses only after other batches and
          without metrics.
        - Parameters, buffers, random streams, and what the module keeps in attributes are restored.
        - What the loss changes in attributes, closures, globals and metrics is restored after every batch, including
          counts of its calls: no schedule, optimizer or callback reads it. A warning names it. A value that the loss
          creates once, the same for all rows, stays.
        - A loss that depends on how often it was computed is refused, and so are learning rates that a schedule
          derives from what the loss left nevertheless.

    The first look and every third one compare whole batches, the others a few rows.

    Not detected: a dependence that no examined batch shows, such as one below the tolerances, one that begins between
    looks, or one through a chance event that did not happen.
    """

    def __init__(self) -> None:
        self._before: KeptState | None = None
        self._earlier: KeptState | None = None
        self._rows: Any = None
        self._collated: tuple[list[Any], list[Any]] | None = None
        self._differentiates, self._fixes_coins = False, True
        self._passes: Any = None
        self._modes: list[bool] | None = None
        self._trained: Tensor | None = None
        self._as_collated, self._collated_step, self._sized_step = False, -1, -1
        self.begin()

    def begin(self) -> None:
        """Restart the count of batches; single-unit batches are counted separately."""
        self._looks = {True: Looks(), False: Looks()}
        self._parts: list[nn.Module] = []
        self._single: Any = None
        self._earlier = None
        self._first: KeptState | None = None
        #: What the loss keeps of rows, by location.
        self._of_rows: dict[tuple[Any, ...], KeptName] = {}

    def prepare(self, module: Any, batch: UnitBatch, seed: int) -> None:
        """Decide whether to check a batch; if so, store the state of ``module`` before it. ``seed`` is the batch's.

        A user's ``before_batch`` runs later, and is part of what is compared (`prepares_itself`).
        """
        self._parts = self._parts or list(module.modules())  # since the last look; a walk takes twenty times as long
        modes = [*map(_TRAINING, self._parts)]
        if modes != self._modes:  # a loss may couple rows in one mode only
            kept = self._single, self._first, self._of_rows
            self.begin()
            (self._single, self._first, self._of_rows), self._modes = kept, modes
        for name in self._of_rows.values():
            name.note()
        alone = _of_one_unit(batch)
        due = self._looks[alone].due(seed)
        # In some steps rows are also collated alone; one batch of each such step is compared with them.
        collated = batch.alone is not None and not is_lazy(module.device)
        self._as_collated = collated and not (due or alone or batch.step == self._collated_step)
        self._collated_step = batch.step if self._as_collated else self._collated_step
        self._before = KeptState(module) if due or self._as_collated else None
        if due:
            self._parts = []
        self._rows = clone_rows(batch.rows) if alone or self._before is not None else None
        self._trained = None

    def note(self, losses: Tensor) -> None:
        """Keep the row losses of the training pass if the batch is compared, so that no pass recomputes them."""
        alike = losses.dtype in TOLERANCE and not torch.is_autocast_enabled(losses.device.type)
        if self._before is not None and alike and not is_functorch_wrapped_tensor(losses):
            self._trained = losses.detach()

    def look(self, module: Any, batch: UnitBatch, seed: int) -> None:
        """Check the physical batch that the module just contributed, if `prepare` chose it."""
        alone, own = _of_one_unit(batch), self._rows
        self._rows = None
        batch = batch if own is None else replace(batch, rows=own)  # as before the loss, which may write into its batch
        previous = None
        if alone:
            previous, self._single = self._single, own
        before = self._before
        if before is None:
            return
        rows, looks = Rows.of(module, batch), self._looks[alone]
        if previous is None if alone else len(rows.slots) < 2:
            if not self._as_collated:
                looks.again()
            return
        compare = partial(self._compare, rows, previous, looks.made, module=module, before=before, seed=seed,
                          batch=batch if prepares_itself(module) else None)  # fmt: skip
        while True:
            try:
                compare()
                return
            except UnsupportedModelError:
                if self._fixes_coins or not self._passes.drew:  # otherwise a loss that drew nothing before draws now
                    raise
                self._fixes_coins = True
            except RuntimeError as error:  # a loss may compute gradients itself, which passes without a graph forbid
                if self._differentiates or is_out_of_memory(error):
                    raise
                self._differentiates = True

    def put_back(self, module: Any) -> None:
        """Restore what the loss keeps of rows to its state before the batch, in every batch after `look`."""
        before, self._before = self._before, None
        if self._first is None and before is not None and module._hides_rows:  # nothing was compared yet
            before.put_back(module._public())
        self._put_back()

    def _put_back(self) -> None:
        for name in self._of_rows.values():
            name.put_back()

    def _compare(self, rows: Rows, previous: Any, number: int, **given: Any) -> None:
        """Make the comparisons that are due in look ``number``, or with the ``previous`` batch of one unit."""
        module, first, turn = rows.module, number == 1, number % 3
        of_pairs, lazy = module.privacy.candidates not in ("rows", "pool"), is_lazy(module.device)
        apart = module.privacy.units_apart
        self._passes = CollationPasses(**given, differentiates=self._differentiates, fixes_coins=self._fixes_coins)
        with self._passes as passes:
            if self._as_collated and rows.batch.data_rows is not None:
                passes.compare_placed(rows)
            elif self._as_collated:
                if rows.batch.smallest is None:  # otherwise it is compared below, which shows as much
                    passes.compare_alone(rows.first(3), of_pairs=of_pairs)
            elif previous is not None:  # a lone unit can only depend on earlier ones
                passes.compare_histories(rows, previous)
            elif of_pairs:
                passes.compare_histories(rows)
                passes.compare_pair_histories(rows)
                for part in (rows.first(3), rows)[: 2 if first or turn == 0 else 1]:
                    passes.compare_alone(part, of_pairs=True)
            elif lazy:  # another shape, or a gradient, would be another program to compile
                passes.compare_company(rows, first)
            else:
                if first and self._collated is not None:
                    passes.compare_collated(rows, *self._collated)
                    self._collated = None
                # Usually few rows, to save time, of which as many are kept as were also collated alone. Sometimes the
                # whole batch, since a loss may couple many rows but not few, unless an engine computes units apart.
                part = rows.first(2 if module.privacy.candidates == "pool" else 2 * ALONE if first else 3)
                most, even = part if apart else rows, number % 2 == 0
                if first or turn == 0:  # later in every third look, to save time
                    trained = self._trained if most is rows and not first else None
                    passes.compare_company(most, even, gradients=first, later=part, trained=trained)
                if turn == 2 or (first and apart):
                    passes.compare_company(part, first or even, gradients=True)
                if rows.batch.data_rows is not None:  # rows are never removed, so only this shows a look back
                    passes.compare_company((part if turn == 2 else most).keeping_the_last(), even)
                    if rows.batch.alone is not None:
                        passes.compare_placed(rows)
                elif turn == 1:
                    passes.compare_sizes(rows if first else part, part)
                    if not apart and number % 6 == 1:  # rounding depends on the data and hardly on the step
                        passes.compare_rounding(rows)
            if rows.batch.smallest is not None and rows.batch.step != self._sized_step:
                self._sized_step = rows.batch.step
                passes.compare_alone(rows.smallest(), of_pairs=of_pairs)
            if previous is None and not (self._as_collated or lazy or apart):
                if first or turn == 0:
                    passes.compare_as_trained(rows, of_pairs=of_pairs)
                if first or turn == 2:
                    passes.compare_scales(rows.first(2), of_pairs=of_pairs)
            if not self._as_collated:
                before, public = given["before"], module._public()
                earlier, self._earlier = self._earlier or before, before
                if not lazy:
                    passes.compare_without_objects(rows, earlier, public, of_pairs=of_pairs)
                if module._hides_rows:
                    # The smallest unit was collated by itself, so it has less padding there than here.
                    pair, long = rows.first(2) if rows.batch.smallest is None else rows.smallest(), first or turn == 1
                    few = pair.apart(previous, of_pairs=of_pairs)
                    names = passes.names_of_rows(few, earlier, public)
                    self._note(module, before, names)
                    if long:
                        passes.compare_put_back(few, names, self._put_back)
            if metrics := given["before"].metrics:
                passes.compare_metrics(rows, metrics)
        if first:
            self._fixes_coins = passes.drew

    def _note(self, module: Any, before: KeptState, names: Collection[tuple[int, str]]) -> None:
        """Make `put_back` restore ``names`` from now on."""
        self._first = self._first or before
        found = before.names_from(names, self._first)
        new = {place: name for place, name in found.items() if place not in self._of_rows}
        self._of_rows |= new
        if named := sorted({name.label for name in new.values()}):
            rank_zero_warn(
                f"per_row_loss of {type(module).__name__} keeps in {', '.join(named)} values that depend on private "
                "rows, such as a loss, a count or a cache. They are put back after every batch, so that no schedule, "
                "optimizer or callback reads them. To measure, use PublicValidation; to count, use "
                "self.trainer.global_step. If a value depends on no private row, list its name without the class in "
                "public_metrics of the module."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what is kept of the module and of private rows from copies and pickles."""
        of_rows = ("_collated", "_rows", "_single", "_trained")
        names = dict.fromkeys(("_before", "_earlier", "_passes", "_first", *of_rows))
        return {**vars(self), **names, "_of_rows": {}, "_parts": []}

    def compare_collations(self, module: Any, rows: list[Any], others: list[Any]) -> None:
        """Compare ``collate_rows`` of rows before and after others; the first look compares their losses."""
        self._collated = None
        with CollationPasses(module, KeptState(module), seed=0) as passes:
            alone, again, after = (passes.collated(rows, before) for before in ([], [], others))
            repeats = same_features(alone, again)
            if not repeats or alone.own_generators != after.own_generators:  # also detects draws with few outcomes
                refuse_own_coins(module)
            if not same_features(alone, after):
                refuse_memory(module)
            if not alone.draws_beside_torch:  # other draws cannot be fixed; such rows share no call of collate_rows
                self._collated = rows, others


def prepares_itself(module: Any) -> bool:
    """Return whether ``before_batch`` is user code."""
    method = module.before_batch
    return not is_library(getattr(method, "__func__", method).__module__)


def _of_one_unit(batch: UnitBatch) -> bool:
    """Return whether at most one unit can have rows: fixed shapes have a spare slot and filled-in rows."""
    if batch.data_rows is None or is_lazy(batch.unit_ids.device):
        return len(batch.mask) < 2
    return int(torch.unique(batch.unit_ids[batch.data_rows]).numel()) < 2
