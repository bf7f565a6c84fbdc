"""The unit of work of a generation: a group of passages whose queries are drawn together.

Everything that determines the bytes of a data set is here: the cut into groups, the model's dtype and device, and the
number of threads, which decides the order in which a matrix product sums. Several processes of a Ray cluster may draw
groups at once; only the calling process writes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from lit_dpret.distributed.ray_workers import ray_workers
from lit_dpret.errors import ConfigurationError, WorkerError
from lit_dpret.matmul_precision import whole_products
from lit_dpret.modules.generator_folder import GeneratorModel, TextCodec, load_generator, weights_hash
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.dataset_folder import SyntheticQuery
from lit_dpret.synthesis.prefill import prefill
from lit_dpret.synthesis.sampler import Decoding, decode, uniforms

PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Sampling settings of a data set; plain values, so that they can be sent to a process."""

    queries_per_passage: int = 1  # draws per passage
    seed: int = 0  # public; an experiment's seed, not the noise secret
    top_p: float = 0.8  # this and the four below are those of `Decoding`
    temperature: float = 1.0
    top_k: int | None = None
    max_new_tokens: int | None = None  # null uses the query length of training
    min_new_tokens: int = 1
    group_size: int = 64  # passages decoded together
    device: str = "auto"  # ``auto``, ``cpu``, ``cuda`` or ``cuda:0``
    precision: str = "32-true"  # ``32-true`` or ``bf16-true``
    threads: int = 1  # PyTorch threads; another number changes the last bits, so it is part of a set's configuration
    workers: int = 0  # Ray processes that draw groups, each with the generator; 0 draws in this process

    def __post_init__(self) -> None:
        require_whole("task", self, 1, "queries_per_passage", "group_size", "threads")
        require_whole("task", self, 0, "workers")
        if self.precision not in PRECISIONS:
            raise ConfigurationError(
                f"task.precision={self.precision!r} is not one of {', '.join(PRECISIONS)}: T5 overflows in float16."
            )

    def decoding(self) -> Decoding:
        """Return the decoding settings; ``max_new_tokens`` must be set."""
        return Decoding(**{field.name: getattr(self, field.name) for field in fields(Decoding)})


def group_drawer(generator: GeneratorModel, how: Generation) -> Callable[[Mapping[str, str]], list[dict[str, Any]]]:
    """Return a function that draws a group's queries, as stored in a shard; the generator is moved and cast."""
    generator.model.to(device=torch.device(how.device), dtype=PRECISIONS[how.precision])
    settings = how.queries_per_passage, how.seed, how.decoding()
    return lambda group: [asdict(query) for query in draw_group(generator, group, *settings)]


@contextmanager
def fixed_arithmetic(threads: int) -> Iterator[None]:
    """Compute with this many threads and full float32 products inside the block; then restore the settings."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with whole_products():
            yield
    finally:
        torch.set_num_threads(before)


def canonical_groups(codec: TextCodec, passages: Mapping[str, str], group_size: int) -> list[list[str]]:
    """Return passage ids in groups by (token length, id); this depends on the set of passages, not on their order."""
    names = sorted(passages)
    lengths: list[int] = []
    for start in range(0, len(names), _CHUNK):
        lengths += map(len, codec.passages([passages[name] for name in names[start : start + _CHUNK]]))
    order = [name for _, name in sorted(zip(lengths, names, strict=True))]
    return [order[start : start + group_size] for start in range(0, len(order), group_size)]


def draw_group(
    generator: GeneratorModel, group: Mapping[str, str], draws: int | Sequence[int], seed: int, decoding: Decoding
) -> list[SyntheticQuery]:
    """Draw the queries of one group of passages, ordered by passage and draw.

    ``draws`` is the number of draws per passage, or a list of draws. Each draw is decoded in a separate batch, so it
    does not depend on how many there are.
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


def draw_groups(
    tasks: Iterable[Task], source: Path, how: Generation, *, generator: GeneratorModel | None = None
) -> Generator[Drawn]:
    """Yield the records of each group with its number, in order of completion.

    Guarantees:
        - The records of a group depend only on the group, the generator and the settings.
        - Once the iterator is closed, exhausted or has raised, none of its processes is left.

    ``tasks`` are read only as fast as they can be handed out. Without ``how.workers``, ``generator`` draws the groups
    in this process.
    """
    if how.workers == 0:
        with fixed_arithmetic(how.threads):
            draw = group_drawer(generator or load_generator(source), how)
            for index, group in tasks:
                yield index, draw(group)
        return
    make = partial(_worker, source.absolute(), weights_hash(source), how)
    with ray_workers(make, how.workers, device=how.device, threads=how.threads) as drawn:
        yield from drawn(tasks)


def _worker(source: Path, weights: str, how: Generation) -> Callable[[Task], Drawn]:
    """Return a function that draws a group in a worker process."""
    transformers_logging.disable_progress_bar()
    if weights_hash(source) != weights:
        raise WorkerError(f"{source} holds another generator on a worker's machine. Copy the same folder there.")
    draw = group_drawer(load_generator(source), how)

    def work(task: Task) -> Drawn:
        with fixed_arithmetic(how.threads):
            return task[0], draw(task[1])

    return work
