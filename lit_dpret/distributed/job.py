"""A job of several ranks that share a list of work: passages to write queries for, or texts to embed.

Each rank takes the next item from a common list whenever it is free, so a slow rank delays no other, and a rank that
dies loses only its current item. An item must not depend on the rank that takes it; then neither do the files. The
ranks are those of ``torchrun`` (``RANK``, ``WORLD_SIZE``) or of SLURM (``SLURM_PROCID``, ``SLURM_NTASKS``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, LitDpretError, WorkerError

T = TypeVar("T")

TOGETHER = timedelta(minutes=10)
"""How long the ranks have to find each other, and to answer a question about the common list."""

_GONE = (
    ", so this one ends too; what that one said stands above or in its own log. What is finished is kept: the same "
    "command goes on from there, with as many processes as you like."
)
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def device_named(name: str, *, knob: str = "device") -> torch.device:
    """Return the device of a setting, where ``auto`` prefers a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"{knob}={name} cannot be used here. Choose cpu, or a device that is here.") from error
    return device


@dataclass(frozen=True)
class Job:
    """The ranks of one job, from the view of one rank.

    Guarantees:
        - Each item of a list is taken by one rank, and none is left out while a rank is alive.
        - Where there is one rank, nothing is sent.
    """

    ranks: Ranks = field(default_factory=Ranks)  # who is there
    store: Any = None  # counts what was taken; None where there is one rank
    local_rank: int = 0  # the place of this rank among those of its machine

    @property
    def is_first(self) -> bool:
        """Whether this rank merges all results and writes the card."""
        return self.ranks.is_first

    @property
    def size(self) -> int:
        return self.ranks.world_size

    def deal(self, name: str, items: Sequence[int]) -> Iterator[int]:
        """Yield the items of the list ``name`` for this rank, the next free one on each request."""
        if self.store is None:
            yield from items
            return
        while (place := self.add(f"{name}/taken", 1) - 1) < len(items):
            yield items[place]

    def share(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank; all ranks get its result, or raise its error."""
        with _in_these_words():
            return self.ranks.share(work)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; if one fails, all raise its error at the end."""
        with _in_these_words():
            return self.ranks.together(work)

    def gather(self, value: Any) -> list[Any]:
        with _in_these_words():
            return self.ranks.gather(value)

    def add(self, name: str, amount: int) -> int:
        if self.store is None:
            raise ConfigurationError("A job of one rank has no shared counter.")
        try:
            return int(self.store.add(name, amount))
        except RuntimeError as error:
            raise WorkerError(f"The process that keeps the list of this job's work is gone{_GONE}") from error

    def place(self, device: torch.device) -> torch.device:
        """Return the device of this rank; several devices on a machine are assigned in turn."""
        if self.size > 1 and device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return device

    def require_same(self, what: str, value: str) -> None:
        """Refuse a job whose ranks were called with different arguments."""
        given = self.gather(value)
        if len(set(given)) > 1:
            raise ConfigurationError(
                f"The processes of this job differ in {what}: {', '.join(sorted(set(map(str, given)))[:2])}. Start all "
                f"with the same settings, and name {what} instead of leaving it to the clock."
            )


@contextmanager
def _in_these_words() -> Iterator[None]:
    """Explain a broken connection where there is no ledger and no checkpoint."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error.__cause__, RuntimeError) and not isinstance(error.__cause__, LitDpretError):
            raise WorkerError(f"Another process of this job ended or stopped answering{_GONE}") from error
        raise


@contextmanager
def job_here(environment: Mapping[str, str] | None = None) -> Iterator[Job]:
    """Yield the job of this process, by ``environment`` or its own; a job of one rank if it was started alone."""
    given = dict(os.environ if environment is None else environment)
    world = _number(given, "WORLD_SIZE")
    if world is None or world == 1:
        yield Job()
        return
    if dist.is_initialized():
        raise ConfigurationError("The processes of this job are connected already; start this task on its own.")
    rank, local = _number(given, "RANK"), _number(given, "LOCAL_RANK")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]
    if rank is None or missing:
        raise ConfigurationError(
            f"{world} processes were started, and this one lacks {', '.join(missing) or 'RANK'}: start them by "
            "torchrun, or under SLURM export MASTER_ADDR (a node that all reach) and MASTER_PORT."
        )
    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=TOGETHER))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TOGETHER)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise WorkerError(
            f"Rank {rank} of {world} did not find the others within {TOGETHER.seconds // 60} minutes at "
            f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}. Start all of them, or none. ({error})"
        ) from error
    try:
        yield Job(
            Ranks(rank, world), torch.distributed.distributed_c10d.PrefixStore("lit-dpret/job", store), local or 0
        )
    finally:
        dist.destroy_process_group()


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Read a number that torchrun sets, or SLURM under another name where this is a step of several tasks."""
    text = environment.get(name)
    if text is None and environment.get("SLURM_STEP_ID") is not None:  # set by srun, not in a shell of the allocation
        text = environment.get(_SLURM[name])
    try:
        return None if text is None else int(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text!r} in the environment is not a number.") from error
