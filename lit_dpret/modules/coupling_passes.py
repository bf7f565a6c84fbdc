"""Recompute the losses of a batch from the same state and random numbers, and compare them.

The other rows are replaced, left out, moved or collated apart, or another batch is computed first. `CouplingCheck`
decides which comparison is made in which batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.modules.coupling_rows import Rows, cannot_train
from lit_dpret.modules.coupling_values import LOW_PRECISION, TOLERANCE, FixedCoins, differ, far, gaps, norm, shortened
from lit_dpret.modules.kept_state import KeptState
from lit_dpret.privacy.batches import UnitBatch, clone_rows
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.clipping.recorder import uncompiled
from lit_dpret.privacy.collation import leaves
from lit_dpret.privacy.state_watch import kept_buffers
from lit_dpret.privacy.user_generators import (
    generators_now,
    kept_generators,
    python_and_numpy_now,
    seed_everywhere,
)

#: If shapes differ, differences below this many nats are ignored: a loss near zero is a difference of larger numbers.
FLOOR = 1e-4
#: The relative change that rounding may cause in a row's gradient in a batch of another shape: the margin that the
#: charge includes for the effect of units on each other's rounding.
ROUNDING = 1e-3
#: Gradients shorter than this, or than a lower clip bound, are compared relative to it: a learnt row's is rounding.
_SHORT = 1e-2
_FEW = 4
DEPENDS = "the loss of a row is different when other rows are in the batch, or are not there"


class _Seen(NamedTuple):
    losses: Tensor
    gradient: dict[str, Tensor]
    later: Tensor


class Passes:
    """Runs the loss repeatedly from the same state, and restores that state at the end."""

    def __init__(
        self, module: Any, before: KeptState, seed: int, *, differentiates: bool = False,
        fixes_coins: bool = True, batch: UnitBatch | None = None,
    ) -> None:  # fmt: skip
        self.module, self._kept_state, self._seed = module, before, seed
        #: Set if ``before_batch`` is user code, which is then part of every pass.
        self._prepared_like = batch
        self._differentiates, self._fixes_coins = differentiates, fixes_coins
        #: Whether a random number was drawn in a pass that fixes them.
        self.drew = False
        self._drew_publicly = False
        self._parameters = trainable(module)

    def __enter__(self) -> Self:
        self._as_trained = self._kept_state.contents()
        self._kept_state.begin()
        with ExitStack() as stack:
            stack.enter_context(kept_generators())
            stack.enter_context(uncompiled())
            stack.enter_context(kept_buffers(self.module))
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._kept_state.put_back()

    def compare_company(
        self, rows: Rows, from_kept: bool, *, gradients: bool = False, later: Rows | None = None,
        trained: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compare the losses and gradients of the kept rows in this and in other company, and then ``later`` rows.

        ``trained`` are the losses of all rows in the training pass, if nothing was reset since.
        """
        if trained is None:
            first = self._in_company(rows, rows.as_they_are(), gradients=gradients, later=later)
        else:
            kept = trained[rows.kept]
            first = _Seen(kept, {}, kept[:0] if later is None else self._later(later.alone()))
        tolerance = TOLERANCE.get(first.losses.dtype, LOW_PRECISION)
        features = rows.with_other_company(from_kept=from_kept)
        other = self._in_company(rows, features, gradients=gradients, later=later)
        if differ(first.losses, other.losses):
            if trained is not None:  # with a graph, in which a loss may differ: compare two passes
                return self.compare_company(rows, from_kept, gradients=gradients, later=later)
            self._refuse(rows)
        if far(first.gradient, other.gradient, min(10 * tolerance, 0.1)):
            self._refuse(rows, "the gradient of a row's loss is different when other rows are in the batch")
        if differ(first.later, other.later):
            self._refuse_memory()
        self._kept_state.refuse_writes(self._refuse_memory)

    def _in_company(self, rows: Rows, features: Any, *, gradients: bool, later: Rows | None) -> _Seen:
        """Return the losses and gradient of the kept rows among ``features``, and the losses of ``later`` rows."""
        losses = self._afresh(features, gradients=gradients)
        gradient = self._gradient(losses, rows.kept) if gradients else {}
        losses = losses.detach()[rows.kept]
        return _Seen(losses, gradient, losses[:0] if later is None else self._later(later.alone()))

    def compare_sizes(self, rows: Rows, later: Rows, *, again: bool = True) -> None:
        """Compare the losses of the kept rows with and without the others, and then those of ``later`` rows."""
        (features, places), found, drawn, after = rows.others_alone(), [], [], []
        for batch in (rows.as_they_are(), rows.alone(), features):
            found.append(self._afresh(batch, fixed_coins=True))
            drawn.append(python_and_numpy_now())
            if batch is not features:
                after.append(self._later(later.alone()))
        if drawn[0] != drawn[1] or drawn[0] != drawn[2]:
            if again:  # another thread may have drawn in the meantime
                return self.compare_sizes(rows, later, again=False)
            self._refuse_other_coins()
        together, alone, others = found
        if differ(together[rows.kept], alone, floor=FLOOR) or differ(together[places], others, floor=FLOOR):
            self._refuse(rows)
        if differ(after[0], after[1], floor=FLOOR):
            self._refuse_memory()

    def compare_as_trained(self, rows: Rows, *, of_pairs: bool) -> None:
        """If training is in low precision, compare losses or embeddings of the kept rows in other company there.

        A module may rescale by the largest number of a batch in low precision only. The shape, and so the rounding, is
        the same.
        """
        low = any(parameter.dtype not in TOLERANCE for parameter in self._parameters.values())
        computed_in_low = low or torch.is_autocast_enabled(self.module.device.type)
        if not computed_in_low or (of_pairs and not hasattr(self.module, "pair_batch")):
            return
        halves, found = (rows, rows.keeping_the_last()), []
        in_company = (half.with_other_company(from_kept=True) for half in halves)
        for features in (rows.as_they_are(), rows.as_they_are(), *in_company):
            self._kept_state.reset()
            values = (self._embeddings if of_pairs else self._losses)(features, as_trained=True).double()
            found.append(values.where(values.isfinite(), 0.0))
        first, again, *others = found
        allowed = 1e-3 * first.abs().max() + 4 * (first - again).abs().max()
        for half, other in zip(halves, others, strict=True):
            if bool(((first - other)[half.kept].abs() > allowed).any()):
                self._refuse(rows)

    def compare_scales(self, rows: Rows, *, of_pairs: bool) -> None:
        """Compare the gradient of the kept rows' losses, or summed embeddings, with that of a multiple of them.

        Code that rescales gradients, such as a hook that clips a batch's gradient, scales by all rows.
        """
        low = any(parameter.dtype not in TOLERANCE for parameter in self._parameters.values())
        if of_pairs and (
            low or not hasattr(self.module, "pair_batch")
        ):  # no mode differentiates embeddings in low precision
            return
        times, found = 2.0**10, []  # a power of two commutes with rounding
        of_rows = self._embeddings if of_pairs else self._losses
        for factor in (times, 1.0):
            self._kept_state.reset()
            losses = of_rows(rows.as_they_are(), gradients=True)
            losses = losses.sum(1) if of_pairs else losses
            found.append(self._gradient(losses * factor, rows.kept))
        multiple = {name: gradient * times for name, gradient in found[1].items()}
        if far(multiple, found[0], 10 * TOLERANCE.get(losses.dtype, LOW_PRECISION)):
            self._refuse(rows, "twice the loss of a row does not have twice the gradient, as when a hook clips the "
                         "gradient of a batch (privacy.engine=loop accepts a hook that works row by row)")  # fmt: skip

    def compare_rounding(self, rows: Rows) -> None:
        """Compare the gradient of a row's loss among others with that of the row alone."""
        found = []
        for features in rows.extreme():
            with self._coins():  # also while a checkpointed block is recomputed
                losses = self._afresh(features, gradients=True)
                last = torch.arange(len(losses), device=losses.device) == len(losses) - 1
                found.append(self._gradient(losses, last))
        one, other = found
        together, alone, gap = (norm(list(each)) for each in (one.values(), other.values(), gaps(one, other)))
        least = min(_SHORT, getattr(self.module.privacy, "max_grad_norm", None) or _SHORT)
        if gap > ROUNDING * max(together, alone, least):  # false if one of them is NaN
            raise cannot_train(
                self.module,
                "the gradient of a row's loss is different when other rows are in the batch. If each row's loss "
                "depends on that row alone, the difference is rounding: scale the inputs to about 1 (from 1e4 on they "
                "saturate attention), set trainer.precision=64-true, or choose privacy.engine=loop.",
            )

    def names_of_rows(self, batches: Sequence[Any], earlier: KeptState, public: frozenset[str]) -> set[tuple[int, str]]:
        """Return the names whose content differs after the losses of different batches, except ``public`` names.

        Content is compared after one batch, after two, after another one, and after the batch that was trained on with
        its gradient. Two batches in a row reveal a count: how often a loss is called depends on the number of units
        drawn.
        """

        def after(batches: Sequence[Any]) -> list[dict[tuple[int, str], Any]]:
            self._kept_state.reset()
            left = []
            for features in batches:
                self._losses(features)
                left.append(self._kept_state.contents())
            return left

        left = [self._as_trained]
        for some in (batches[:2], batches[-1:]):
            try:
                with self._kept_state.without_objects_since(earlier, public):  # these objects are created again
                    left += after(some)
            except Exception:  # other values of the module may say that these objects exist
                left += after(some)
        names = {(at, name) for at, name in _differing(left) if name not in public}
        if found := ", ".join(self._kept_state.generators(names)):
            raise cannot_train(
                self.module,
                f"its loss draws from {found}, a random generator whose state continues from batch to batch: its "
                "numbers reveal how many batches the units filled, and anyone can reproduce them. Draw from torch's "
                "global generator (torch.rand(...)), which the run seeds from its secret.",
            )
        return names

    def compare_put_back(
        self, batches: Sequence[Any], names: Collection[tuple[int, str]], put_back: Callable[[], None]
    ) -> None:
        """Refuse ``names`` that cannot be put back, and losses and learning rates that depend on their content."""
        left, rates = [], []
        if not names and not getattr(self.module._trainer, "lr_scheduler_configs", None):
            return  # there is nothing to put back, and nothing could depend on it
        for features in batches:
            self._afresh(features)
            put_back()
            contents = self._kept_state.contents()
            left.append({name: contents.get(name) for name in names})
            rates.append(self._next_rates())
        what = None
        if found := ", ".join(sorted({name for _, name in _differing(left)})):
            what = f"per_row_loss keeps values of private rows in {found}, which cannot be put back"
        elif any(each != rates[0] for each in rates):
            what = "learning rates depend on what per_row_loss keeps of private rows, on a clock or on a custom count"
        elif names and self._counts(batches[0], put_back):
            what = "the loss depends on how often it was computed, which reveals how many units were drawn"
        if what is not None:
            raise cannot_train(
                self.module,
                f"{what}; no noise covers this. Keep nothing of private rows between batches, and compute learning "
                "rates and temperatures from the number of steps (self.trainer.global_step).",
            )

    def compare_reading(self, reads: Sequence[Callable[[], list[Any]]]) -> None:
        """Refuse learning rates that depend on what a data set or ``collate_rows`` counts of the rows."""
        rates = []
        for read in reads:
            self._kept_state.reset()
            self.module.collate_rows(read())
            rates.append(self._next_rates())
        if any(each != rates[0] for each in rates):
            raise cannot_train(
                self.module,
                "learning rates depend on what the data set or collate_rows keeps of private rows, such as a count of "
                "tokens; no noise covers this. Compute them from the number of steps (self.trainer.global_step).",
            )

    def _counts(self, features: Any, put_back: Callable[[], None]) -> bool:
        """Return whether a loss differs the second time if nothing is put back in between."""
        once, twice = self._afresh(features), self._losses(features)
        self._afresh(features)
        put_back()
        return differ(once, twice) and not differ(once, self._losses(features))

    def _next_rates(self) -> list[Any]:
        """Return the optimizers' settings after a step of each schedule, which the next pass undoes."""
        trainer = self.module._trainer
        with warnings.catch_warnings(action="ignore"):
            for config in [] if trainer is None else trainer.lr_scheduler_configs:
                with suppress(Exception):  # some schedules need a validation metric
                    config.scheduler.step()
        groups = [] if trainer is None else [group for each in trainer.optimizers for group in each.param_groups]
        return [[float(v) for v in group.values() if isinstance(v, (int, float))] for group in groups]

    def compare_metrics(self, rows: Rows, metrics: Sequence[Metric]) -> None:
        """Compare the losses of the batch with its losses after every metric is reset."""
        found = []
        for forgets in (False, True):
            self._kept_state.reset()
            for metric in metrics if forgets else ():
                metric.reset()
            found.append(self._losses(rows.as_they_are()))
        if differ(found[0], found[1]):
            self._refuse_memory()

    def compare_histories(self, rows: Rows, other: Any = None) -> None:
        """Compare the losses of the batch after itself with those after another batch, or after other rows."""
        found = []
        other = rows.with_other_company(from_kept=True) if other is None else other
        for before in (rows.as_they_are(), other):
            self._afresh(before)
            found.append(self._later(rows.as_they_are(), fixed_coins=False))
        if differ(found[0], found[1]):
            self._refuse_memory()
        self._kept_state.refuse_writes(self._refuse_memory)

    def compare_pair_histories(self, rows: Rows) -> None:
        """Compare the embeddings of the batch's pairs after itself with those after a batch of other rows."""
        if is_lazy(self.module.device) or not hasattr(self.module, "pair_batch"):
            return
        found = []
        for before in (rows.as_they_are(), rows.with_other_company(from_kept=True)):
            self._kept_state.reset()
            self._embeddings(before)
            found.append(self._embeddings(rows.as_they_are()))
        if differ(found[0], found[1]):
            self._refuse_memory()

    def compare_without_objects(
        self, rows: Rows, earlier: KeptState, public: frozenset[str], *, of_pairs: bool
    ) -> None:
        """Compare losses, or embeddings, with those of the same rows after recent objects are created again.

        A normaliser that is fitted at its first use is then fitted on other rows.
        """
        if of_pairs and not hasattr(self.module, "pair_batch"):
            return
        of_rows, features = self._embeddings if of_pairs else self._losses, rows.with_other_company(from_kept=False)
        self._kept_state.reset()
        with self._kept_state.without_objects_since(earlier, public) as names:
            if not names:
                return
            try:
                anew = of_rows(features)[rows.kept]
            except Exception:  # other values of the module may say that these objects exist
                return
        self._kept_state.reset()
        if differ(of_rows(features)[rows.kept], anew):
            raise cannot_train(
                self.module,
                f"the loss depends on what earlier batches left in {', '.join(sorted(set(names)))}, so one unit "
                "affects steps that it is not part of. Keep nothing of private rows between batches, or list the name "
                "in public_metrics if it depends on trained weights alone.",
            )

    def compare_alone(self, rows: Rows, *, of_pairs: bool) -> None:
        """Compare the losses of the kept rows, or their embeddings, with those of the same rows collated alone."""
        if is_lazy(self.module.device) or (of_pairs and not hasattr(self.module, "pair_batch")):
            return
        of_rows = self._embeddings if of_pairs else partial(self._losses, fixed_coins=True)
        found = []
        for features in (rows.as_they_are(), rows.alone()):
            self._kept_state.reset()
            found.append(of_rows(features))
        if differ(found[0][rows.kept], found[1], floor=FLOOR):
            what = "the embedding of a row is different when it is collated with other rows"
            self._refuse(rows, what if of_pairs else DEPENDS)

    def _embeddings(self, features: Any, *, as_trained: bool = False, gradients: bool = False) -> Tensor:
        seed_everywhere(self._seed)
        with torch.set_grad_enabled(gradients), self._wide(as_trained), FixedCoins() as coins:
            sides = self.module.pair_batch(self._prepared(features)).sides
            found = torch.cat([side.embedded(slice(0, side.count)) for side in sides], 1)
        self._drew_publicly |= coins.drew_publicly
        return found

    def _afresh(self, features: Any, **how: bool) -> Tensor:
        self._kept_state.reset()
        return self._losses(features, **how)

    def _later(self, features: Any, *, fixed_coins: bool = True) -> Tensor:
        """Return the losses of a batch as of the next step: some modules reuse values for all batches of one step."""
        trainer = self.module._trainer
        if trainer is None:
            return self._losses(features, fixed_coins=fixed_coins)
        done = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        done.completed += 1
        try:
            return self._losses(features, fixed_coins=fixed_coins)
        finally:
            done.completed -= 1

    def _prepared(self, features: Any) -> Any:
        """Return a copy of the rows, since a loss may write into them, after ``before_batch`` if it is user code."""
        batch, own = self._prepared_like, clone_rows(features)
        if batch is None:
            return own
        count = len(leaves(features)[0])
        if count == len(batch.unit_ids):
            batch = replace(batch, rows=own, alone=None)
        else:
            ids = torch.arange(count, device=batch.unit_ids.device)
            real = torch.ones_like(ids, dtype=torch.bool)
            data_rows = None if batch.data_rows is None else real
            batch = replace(batch, rows=own, alone=None, unit_ids=ids, mask=real, data_rows=data_rows)
        self.module.before_batch(batch)
        return batch.rows

    def _losses(
        self, features: Any, *, gradients: bool = False, fixed_coins: bool = False, as_trained: bool = False
    ) -> Tensor:
        """Return the row losses, ``(rows,)``; with ``fixed_coins`` a row's random numbers depend on no shape."""
        seed_everywhere(self._seed)
        coins = self._coins() if fixed_coins else nullcontext()
        before = None if self._fixes_coins else generators_now()
        wide, few = self._wide(as_trained), _one_thread(len(leaves(features)[0]))
        with torch.set_grad_enabled(gradients or self._differentiates), coins, wide, few:
            losses: Tensor = self.module.per_row_loss(self._prepared(features))
        self.drew |= before is not None and generators_now() != before
        return losses if gradients else losses.detach()

    def _wide(self, as_trained: bool) -> AbstractContextManager[object]:
        return nullcontext() if as_trained else torch.autocast(self.module.device.type, enabled=False)

    @contextmanager
    def _coins(self) -> Iterator[None]:
        coins = FixedCoins()
        with coins if self._fixes_coins else nullcontext():
            yield
        self.drew |= coins.drew
        self._drew_publicly |= coins.drew_publicly

    def _gradient(self, losses: Tensor, kept: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the kept rows' losses, weighted so that neighbouring rows weigh differently."""
        with _one_thread(len(losses)):
            count = int(kept.sum())
            weights = torch.tensor([(-1.0) ** i * 2.0 ** (i % 5 // 2) for i in range(count)], device=losses.device)
            loss = (losses[kept] * weights.to(losses.dtype)).sum()
            if not loss.requires_grad:
                return {}
            if self.module.in_blocks:
                return self._shortened_gradient(loss)
            found = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
            dense = (g.to_dense() if g is not None and g.is_sparse else g for g in found)
            return {name: g for name, g in zip(self._parameters, dense, strict=True) if g is not None}

    def _shortened_gradient(self, loss: Tensor) -> dict[str, Tensor]:
        """Return `_gradient` with each parameter `shortened` as soon as it arrives: no process may hold all of it."""
        found: dict[str, Tensor] = {}

        def arrived(name: str, gradient: Tensor) -> Tensor | None:
            found[name] = shortened(gradient)
            # Autograd keeps what is returned here until the end: return zeros that take no memory.
            return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        handles = [p.register_hook(partial(arrived, name)) for name, p in self._parameters.items()]  # type: ignore[no-untyped-call]
        try:
            torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _refuse(self, rows: Rows, what: str = DEPENDS) -> NoReturn:
        """Refuse a dependence on other rows, or random numbers that cannot be repeated, which look like one."""
        again = [self._afresh(rows.as_they_are()) for _ in range(2)]
        if differ(again[0], again[1]):
            raise cannot_train(
                self.module,
                "the same rows have a different loss each time, so a dependence between rows cannot be detected. Draw "
                "random numbers in per_row_loss from torch, and keep nothing of private rows between batches.",
            )
        if self._drew_publicly:
            raise cannot_train(
                self.module,
                "it draws random numbers with its own seed or generator: which of them a row gets depends on the "
                "other rows, and anyone can reproduce them. Draw them from torch's global generator without a seed "
                "(torch.rand(...), dropout), which the run seeds from its secret.",
            )
        raise cannot_train(
            self.module,
            f"{what}, so clipping each example bounds nothing. Compute each row's loss from that row alone: normalise "
            "inside the row, and remove batch statistics, mixed inputs and the number of rows from "
            f"{self.module.way_out_of_coupling}.",
        )

    def _refuse_other_coins(self) -> NoReturn:
        """Refuse numbers of ``random`` and numpy that rows share: only torch's can be fixed (`FixedCoins`)."""
        raise cannot_train(
            self.module,
            "how many numbers per_row_loss draws from random or numpy depends on the rows of the batch, so a "
            "dependence between rows cannot be detected. Draw them from torch, or in collate_rows or dataset[draw].",
        )

    def _refuse_memory(self) -> NoReturn:
        refuse_memory(self.module)


@contextmanager
def _one_thread(rows: int) -> Iterator[None]:
    """Compute few rows with one PyTorch thread: a second thread would mostly wait for the first."""
    before = torch.get_num_threads()
    if rows > _FEW or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _differing(contents: Sequence[dict[tuple[int, str], Any]]) -> set[tuple[int, str]]:
    """Return the names whose content in some of ``contents`` differs from the first."""
    return {name for each in contents for name in each | contents[0] if each.get(name) != contents[0].get(name)}


def refuse_memory(module: Any) -> NoReturn:
    """Refuse a module in which something of one batch changes the loss of the next."""
    raise cannot_train(
        module,
        "what it keeps of one batch (an attribute, a closure or a global) changes the loss of the rows of the next "
        "one, so one unit affects steps that it is not part of. Keep nothing of private rows between batches.",
    )
