"""The unit of work of a generation: a group of passages whose queries are drawn together.

Everything that the bytes of a data set depend on stands here: the cut into groups, the dtype and device of the model,
and the number of threads, for a matrix product adds up in another order with another number. Several processes may
draw groups at once; only the process that called writes, and one that dies takes the groups it had and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from lit_dpret.errors import ConfigurationError, LitDpretError, WorkerError
from lit_dpret.matmul_precision import whole_products
from lit_dpret.modules.generator_folder import GeneratorModel, TextCodec, load_generator
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.dataset_folder import SyntheticQuery
from lit_dpret.synthesis.prefill import prefill
from lit_dpret.synthesis.sampler import Decoding, decode, uniforms

PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Sampling settings of a data set; plain values, so that they can be sent to a process."""

    queries_per_passage: int = 1  # draws for each passage
    seed: int = 0  # public; an experiment's seed, not the noise secret
    top_p: float = 0.8  # like the four below, of `Decoding`
    temperature: float = 1.0
    top_k: int | None = None
    max_new_tokens: int | None = None  # null for the query length of training
    min_new_tokens: int = 1
    group_size: int = 64  # passages decoded together
    device: str = "auto"  # ``auto``, ``cpu``, ``cuda`` or ``cuda:0``
    precision: str = "32-true"  # ``32-true`` or ``bf16-true``
    threads: int = 1  # of PyTorch; with another number the last bits differ, so it belongs to what a set was begun with
    workers: int = 0  # processes that draw groups, each with the generator in memory; 0 draws in this one
    groups_in_flight: int = 2  # groups that each worker holds at once, computed or waiting

    def __post_init__(self) -> None:
        require_whole("task", self, 1, "queries_per_passage", "group_size", "threads", "groups_in_flight")
        require_whole("task", self, 0, "workers")
        if self.precision not in PRECISIONS:
            raise ConfigurationError(
                f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}: T5 overflows in float16."
            )

    def decoding(self) -> Decoding:
        """Return the decoding settings; ``max_new_tokens`` must be known."""
        return Decoding(**{field.name: getattr(self, field.name) for field in fields(Decoding)})


def group_drawer(
    generator: GeneratorModel, how: Generation, place: torch.device | None = None
) -> Callable[[Mapping[str, str]], list[dict[str, Any]]]:
    """Return what draws the queries of a group, as stored in a shard, by a generator that is moved and cast."""
    generator.model.to(device=place or torch.device(how.device), dtype=PRECISIONS[how.precision])
    settings = how.queries_per_passage, how.seed, how.decoding()
    return lambda group: [query.to_dict() for query in draw_group(generator, group, *settings)]


@contextmanager
def fixed_arithmetic(threads: int) -> Iterator[None]:
    """Compute with this many threads and full float32 products within the block; then restore the settings."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with whole_products():
            yield
    finally:
        torch.set_num_threads(before)


def canonical_groups(codec: TextCodec, passages: Mapping[str, str], group_size: int) -> list[list[str]]:
    """Return passage ids in groups by (token length, id): a function of the set of passages, not of their order."""
    names = sorted(passages)
    lengths: list[int] = []
    for start in range(0, len(names), _CHUNK):
        lengths += map(len, codec.passages([passages[name] for name in names[start : start + _CHUNK]]))
    order = [name for _, name in sorted(zip(lengths, names, strict=True))]
    return [order[start : start + group_size] for start in range(0, len(order), group_size)]


def draw_group(
    generator: GeneratorModel, group: Mapping[str, str], draws: int | Sequence[int], seed: int, decoding: Decoding
) -> list[SyntheticQuery]:
    """Draw the queries of one group of passages, by passage and draw.

    ``draws`` is how many for each passage, or which ones. Each draw is decoded in a batch of its own, so that it does
    not depend on how many there are.
    """
    names, codec = list(group), generator.codec
    wanted = range(draws) if isinstance(draws, int) else draws
    read = prefill(generator.model, codec.passages(list(group.values())))
    by_draw = []
    for draw in wanted:
        numbers = np.stack([uniforms(seed, name, draw, decoding.max_new_tokens) for name in names])
        by_draw.append(decode(generator.model, read, numbers, decoding, line_breaks=codec.line_breaks))
    return [
        SyntheticQuery(
            passage_id=name,
            draw=draw,
            text=codec.text(sampled[row].tokens),
            log_prob=sampled[row].log_prob,
            finished=sampled[row].finished,
        )
        for row, name in enumerate(names)
        for draw, sampled in zip(wanted, by_draw, strict=True)
    ]


Task = tuple[int, Mapping[str, str]]
Drawn = tuple[int, list[dict[str, Any]]]

_GRACE = 5.0  # seconds for a process to end by itself


def draw_groups(
    tasks: Iterable[Task], source: Path, how: Generation, *, workers: int, generator: GeneratorModel | None = None
) -> Generator[Drawn]:
    """Yield the records of each group with its number, in order of completion.

    Guarantees:
        - The records of a group depend on the group, the generator and the settings alone.
        - When the iterator is closed, exhausted or raises, none of its processes is left.

    ``tasks`` are read only as far as they can be handed out. Without ``workers`` the groups are drawn here, by
    ``generator``.
    """
    if workers == 0:
        with fixed_arithmetic(how.threads):
            draw = group_drawer(generator or load_generator(source), how)
            for index, group in tasks:
                yield index, draw(group)
        return
    pool: list[_Worker] = []
    try:
        pool += [_Worker(number, workers, source, how) for number in range(workers)]
        yield from _handed_out(iter(tasks), pool, how.groups_in_flight)
    finally:
        for worker in pool:
            worker.stop()


def _handed_out(tasks: Iterator[Task], pool: list[_Worker], groups_in_flight: int) -> Iterator[Drawn]:
    """Keep every process supplied, and pass on what they finish."""
    for _ in range(groups_in_flight):  # one each, then the next: nobody waits for a neighbour's reserve
        for worker in pool:
            _supply(worker, tasks)
    while busy := {worker.connection: worker for worker in pool if worker.held}:
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            drawn = worker.take()
            try:
                _supply(worker, tasks)
            except WorkerError:
                yield drawn  # finished before it died, so it is kept
                raise
            yield drawn


def _supply(worker: _Worker, tasks: Iterator[Task]) -> None:
    if (task := next(tasks, None)) is not None:
        worker.give(task)


class _Worker:
    """One process, seen from the one that called."""

    def __init__(self, number: int, of: int, source: Path, how: Generation) -> None:
        self.number, self.of = number, of
        self.held: deque[int] = deque()
        self._drew = False
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that PyTorch's threads hold
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, source, how, number), daemon=True)
        self._process.start()
        theirs.close()  # else a dead process would leave its end open here, and never be noticed

    def give(self, task: Task) -> None:
        try:
            self.connection.send(task)
        except OSError as error:
            raise self._death() from error
        self.held.append(task[0])

    def take(self) -> Drawn:
        """Return the next group that it finished, or raise what it refused."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, LitDpretError):
            raise answer
        if isinstance(answer, str):
            raise WorkerError(
                f"Worker {self.number + 1} of {self.of} failed: {answer.strip().splitlines()[-1]} Finished work is "
                "kept: the same command continues from there."
            ) from RuntimeError(answer)
        drawn: Drawn = answer
        self.held.remove(drawn[0])
        self._drew = True
        return drawn

    def stop(self) -> None:
        """End it: at once if it still holds groups, by its own will otherwise."""
        if self.held:
            self._process.terminate()
        self.connection.close()
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _death(self) -> WorkerError:
        self._process.join(_GRACE)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            how += ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        if self._drew or (code is not None and code < 0):
            way_out = "Each worker holds the generator in memory; take fewer (task.workers) if that was the reason."
        else:
            way_out = (
                'It did not get ready. In a script of your own, call synthesize under `if __name__ == "__main__":`, '
                "because workers import the script; or draw in one process by workers=0."
            )
        return WorkerError(
            f"Worker {self.number + 1} of {self.of} {how}. Finished work is kept: the same command continues from "
            f"there. {way_out}"
        )


def _work(connection: Connection, source: Path, how: Generation, number: int) -> None:
    """Draw groups, in a process of its own, until there are no more or the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a control-C goes to all; the one that called ends the others
    transformers_logging.disable_progress_bar()
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    # A pipe holds little: unless somebody reads while a group is computed, both sides would wait to write.
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    try:
        with fixed_arithmetic(how.threads):
            draw = group_drawer(load_generator(source), how, _place(how.device, number))
            while (task := tasks.get()) is not None:
                connection.send((task[0], draw(task[1])))
    except BrokenPipeError:
        pass
    except LitDpretError as error:
        connection.send(error)
    except Exception:
        connection.send(traceback.format_exc())


def _receive(connection: Connection, tasks: queue.SimpleQueue[Task | None]) -> None:
    while True:
        try:
            tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the one that called is gone or wants no more; there is nothing to save


def _place(device: str, number: int) -> torch.device:
    """Return the device of one process: with several of a kind they take turns."""
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", number % torch.cuda.device_count())
    return place
