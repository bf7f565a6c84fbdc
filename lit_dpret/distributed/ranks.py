"""The processes of one job: sums, decisions of rank 0, and joint failure.

A run on several processes (*ranks*) is still one run: one draw per logical step, one sum, one noise, one ledger.
Rank 0 keeps everything that exists once (ledger, card, checkpoints). Ranks exchange sums before the noise, and what
rank 0 found or refused: these are private, so the network must be private too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import WorkerError

T = TypeVar("T")

#: The number of elements that one message sums: 100 MB in float32.
BUCKET = 25_000_000
#: How long a rank waits for another's decision or output (an export, a card); a dead process is noticed at once.
PATIENCE = timedelta(hours=2)

_WORD = "lit_dpret/word/"
# How gloo and NCCL report a peer that is gone or too late; gloo raises it as a bare RuntimeError.
_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "TCPStore",
           "Broken pipe")  # fmt: skip


@dataclass(frozen=True)
class _Groups:
    """Process groups in addition to the default one.

    On a SIGTERM Lightning broadcasts in the default group from its signal handler, at any moment: that must not be
    taken for part of a sum.
    """

    sums: Any
    quick: Any
    patient: Any


_made: dict[Any, _Groups] = {}


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, as seen by one process.

    Guarantees:
        - With one rank, nothing is sent, and no process group is used.
        - Every method except ``here``, ``is_first``, ``leave_word`` and ``word_was_left`` is called by all ranks, in
          the same order.
        - An error inside ``share`` or ``together`` is raised on every rank, so that none waits for ever.
    """

    rank: int = 0  # of this process, from 0
    world_size: int = 1  # the number of ranks

    @classmethod
    def here(cls) -> Ranks:
        """Return this process among those of ``torch.distributed``; one rank if nothing is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensors: Mapping[str, Tensor], counts: Tensor | None = None) -> None:
        """Sum tensors over all ranks, in place, and ``counts``, a vector on the CPU.

        Sums are computed in float32 or wider, whatever the tensors' dtypes, and every rank holds the same bits
        afterwards. Names, shapes and dtypes must be the same on every rank.
        """
        if self.world_size == 1:
            return
        with noticing_death():
            groups = _groups()
            for bucket in _buckets([tensors[name] for name in sorted(tensors)]):
                wide = torch.promote_types(bucket[0].dtype, torch.float32)
                flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in bucket])
                flat = flat.cpu() if is_lazy(flat.device) else flat  # gloo supports no XLA device
                dist.all_reduce(flat, group=groups.sums)
                totals = torch.split(flat, [tensor.numel() for tensor in bucket])
                for tensor, total in zip(bucket, totals, strict=True):
                    tensor.detach().copy_(total.view_as(tensor))
            if counts is not None:
                dist.all_reduce(counts, group=groups.quick)

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Sum matrices ``(world size, n)`` over all ranks; each rank gets its own row of the total, ``(n,)``."""
        if self.world_size == 1:
            return rows[0]
        total = torch.empty_like(rows[0])
        with noticing_death():
            # One tensor: backends would first copy a list of rows.
            reduce: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            reduce(total, rows.reshape(-1), group=_groups().sums)
        return total

    def gather_into(self, whole: Tensor, part: Tensor, *, only: int | None = None) -> None:
        """Write the parts ``(n,)`` of all ranks into ``whole``, ``(world size * n,)``, on all ranks or ``only`` one."""
        if self.world_size == 1:
            whole.copy_(part)
            return
        sent = part.contiguous().view(torch.uint8)
        with noticing_death():
            group = _groups().sums
            if only is None:
                _gather_flat(whole.view(torch.uint8), sent, group)
            else:
                rows = list(whole.view(torch.uint8).view(self.world_size, -1)) if self.rank == only else None
                dist.gather(sent, rows, dst=only, group=group)

    def words(self, word: int) -> list[int]:
        """Return the number that each rank sends, by rank."""
        if self.world_size == 1:
            return [word]
        found = torch.empty(self.world_size, dtype=torch.long)
        with noticing_death():
            _gather_flat(found, torch.tensor([word]), _groups().quick)
        words: list[int] = found.tolist()
        return words

    def gather_rows(self, row: Tensor) -> Tensor | None:
        """Return the vectors ``(n,)`` of all ranks, ``(world size, n)``, on the CPU of rank 0; None on the others."""
        if self.world_size == 1:
            return row.detach().cpu()[None]
        with noticing_death():
            group = _groups().sums
            sent = row.detach().to(torch.device("cuda")) if dist.get_backend(group) == "nccl" else row.detach().cpu()
            gathered = [torch.empty_like(sent) for _ in range(self.world_size)] if self.is_first else None
            dist.gather(sent, gathered, dst=0, group=group)
        return None if gathered is None else torch.stack([each.cpu() for each in gathered])

    def share(self, work: Callable[[], T], *, quick: bool = False) -> T:
        """Run ``work`` on rank 0 alone and return its result, or raise its error, on every rank.

        The result is pickled, and may be secret within the job. With ``quick`` the others wait only as long as for a
        sum; otherwise long enough for an export.
        """
        if self.world_size == 1:
            return work()
        answer: list[Any] = [None]
        own: BaseException | None = None
        if self.is_first:
            try:
                answer = [(True, work())]
            except BaseException as error:
                own = error
                answer = [(False, sendable(error))]
        with noticing_death():
            groups = _groups()
            dist.broadcast_object_list(answer, src=0, group=groups.quick if quick else groups.patient)
        if own is not None:
            raise own
        done, result = answer[0]
        if not done:
            result.told_by_rank = 0
            raise result
        found: T = result
        return found

    def together(self, work: Callable[[], T], *, quick: bool = False) -> T:
        """Run ``work`` on every rank and return its result; if any fails, all raise the lowest failing rank's error."""
        if self.world_size == 1:
            return work()
        result: Any = None
        own: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            own = error
        gathered = self.gather(None if own is None else sendable(own), quick=quick)
        if own is not None and not any(gathered[: self.rank]):
            raise own
        for rank, failure in enumerate(gathered):
            if failure is not None:
                failure.told_by_rank = rank
                raise failure
        found: T = result
        return found

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0, and then on the others, which can read its files."""
        if self.world_size == 1:
            return work()
        own: list[T] = []
        self.share(lambda: own.append(work()))
        return own[0] if self.is_first else work()

    def gather(self, value: Any, *, quick: bool = False) -> list[Any]:
        """Return the value of each rank, by rank, on every rank; ``quick`` as in `share`."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        with noticing_death():
            groups = _groups()
            dist.all_gather_object(gathered, value, group=groups.quick if quick else groups.patient)
        return gathered

    def leave_word(self, word: str) -> None:
        """Leave a message for the other ranks before this rank ends with an error; it outlives this process.

        It is kept in the store through which the processes of the job found each other; no other rank has to take part.
        """
        if self.world_size > 1:
            with suppress(RuntimeError):  # if the process that keeps the store is gone, no rank is left to read it
                _store().set(_WORD + word, "1")

    def word_was_left(self, word: str) -> bool:
        """Return whether some rank left that message, without waiting for any."""
        try:
            return self.world_size > 1 and bool(_store().check([_WORD + word]))
        except RuntimeError:  # the process that keeps the store is gone, so assume that the message was left
            return True


def _gather_flat(whole: Tensor, part: Tensor, group: Any) -> None:
    """All-gather into one tensor, by the function name of this torch release."""
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(whole, part, group=group)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def sendable(error: BaseException) -> BaseException:
    """Return the error itself if another process can rebuild it, otherwise a `WorkerError` with its text."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    if type(again) is type(error) and str(again) == str(error):
        return error
    return WorkerError(f"{type(error).__name__}: {error}")


def lost_rank(error: BaseException) -> WorkerError | None:
    """Explain a broken connection between ranks; None for any other error."""
    if not isinstance(error, RuntimeError) or isinstance(error, WorkerError):
        return None
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if not (isinstance(error, dist.DistError) or any(word in reason for word in _BROKEN)):
        return None
    return WorkerError(
        "Another process of this job ended or stopped answering, so this one ends too; its message is above or in its "
        "own log. The ledger holds every granted step: with resume=true in the same hydra.run.dir, the run continues "
        f"from the last checkpoint. ({reason})"
    )


def is_of_lost_rank(error: BaseException) -> bool:
    """Return whether an error reports only that another rank is gone, not why."""
    behind = error.__cause__ if isinstance(error, WorkerError) else error
    return behind is not None and lost_rank(behind) is not None


@contextmanager
def noticing_death() -> Iterator[None]:
    """Translate a broken connection into an error that names the lost rank."""
    try:
        yield
    except RuntimeError as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise lost from error


def _groups() -> _Groups:
    """Return the process groups of this job, created at the first message between ranks."""
    world = dist.group.WORLD
    if world not in _made:
        _made.clear()
        timeout = _timeout_of(world)
        _made[world] = _Groups(
            sums=dist.new_group(timeout=timeout),
            quick=dist.new_group(backend="gloo", timeout=timeout),
            patient=dist.new_group(backend="gloo", timeout=PATIENCE),
        )
    return _made[world]


def _timeout_of(group: Any) -> timedelta | None:
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        found: timedelta | None = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype and device, together no larger than one message unless there is only one."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        bucket: list[Tensor] = []
        for tensor in same:
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        if bucket:
            yield bucket


def all_rows(own: Tensor) -> Tensor:
    """Return the rows, ``(rows of all, ...)``, of all ``torch.distributed`` processes in rank order.

    Processes may have different numbers of rows. The gradient of a process's rows is the sum of the gradients from all
    processes' losses. If every process takes the loss of its own rows, the sum of the parameters' gradients over
    processes is therefore that of one process with all rows. If nothing is distributed, return ``own``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own
    sizes = [torch.zeros(1, dtype=torch.long, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
    counts = [int(size) for size in sizes]
    found: Tensor = _AllRows.apply(own, counts)  # type: ignore[no-untyped-call]
    return found


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        longest = max(counts)
        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        start = sum(ctx.counts[: dist.get_rank()])
        return total[start : start + ctx.counts[dist.get_rank()]], None
