"""The unit of work of a generation: a group of passages whose queries are drawn together.

What the groups are and how one is computed decides the bytes of a data set; who computes it and when does
not. So everything that the bytes depend on stands here: the cut into groups, the dtype and device of the
model, and the number of threads, for a matrix product adds up in another order with another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_dpret.matmul_precision import whole_products
from lit_dpret.modules.generator_folder import GeneratorModel, TextCodec, load_generator
from lit_dpret.synthesis.dataset_folder import SyntheticQuery
from lit_dpret.synthesis.sampler import Decoding, decode, encode, uniforms

PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What a process has to know to draw the queries of any group; plain values, so that it can be sent to one.

    Args:
        generator: The generator's folder.
        draws: Queries for each passage.
        seed: The public seed.
        decoding: How to draw.
        device: Where, as PyTorch calls it.
        precision: One of `PRECISIONS`.
        threads: Threads of PyTorch.
    """

    generator: Path
    draws: int
    seed: int
    decoding: Decoding
    device: str
    precision: str
    threads: int


class GroupDrawer:
    """A loaded generator that draws the queries of groups.

    Args:
        settings: What to draw with.
        generator: The generator where it is loaded already; it is moved and cast.
        place: One of several devices of the kind that the settings name.
    """

    def __init__(
        self, settings: GroupSettings, generator: GeneratorModel | None = None, *, place: torch.device | None = None
    ) -> None:
        self._settings = settings
        self._generator = load_generator(settings.generator) if generator is None else generator
        self._generator.model.to(device=place or torch.device(settings.device), dtype=PRECISIONS[settings.precision])

    def records(self, group: Mapping[str, str]) -> list[dict[str, Any]]:
        """The queries of one group, as a shard holds them."""
        settings = self._settings
        drawn = draw_group(self._generator, group, settings.draws, settings.seed, settings.decoding)
        return [query.to_dict() for query in drawn]


@contextmanager
def fixed_arithmetic(threads: int) -> Iterator[None]:
    """Compute with so many threads and whole float32 products, whatever this process was set to; then restore that."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with whole_products():
            yield
    finally:
        torch.set_num_threads(before)


def canonical_groups(codec: TextCodec, passages: Mapping[str, str], group_size: int) -> list[list[str]]:
    """Passage ids in groups of ``group_size``, by (token length, id).

    Guarantees:
        - The groups are a function of the set of passages, not of the order they came in.
    """
    names = sorted(passages)
    lengths: list[int] = []
    for start in range(0, len(names), _CHUNK):
        lengths += map(len, codec.passages([passages[name] for name in names[start : start + _CHUNK]]))
    order = [name for _, name in sorted(zip(lengths, names, strict=True))]
    return [order[start : start + group_size] for start in range(0, len(order), group_size)]


def draw_group(
    generator: GeneratorModel, group: Mapping[str, str], draws: int | Sequence[int], seed: int, decoding: Decoding
) -> list[SyntheticQuery]:
    """The queries of one group of passages, by passage and draw.

    Args:
        generator: The generator.
        group: Passages by id.
        draws: How many draws for each passage, or which ones. Each draw is decoded in a batch of its
            own, so that it does not depend on how many there are.
        seed: The public seed.
        decoding: How to draw.
    """
    names, codec = list(group), generator.codec
    wanted = range(draws) if isinstance(draws, int) else draws
    encoded = encode(generator.model, codec.passages(list(group.values())))
    by_draw = []
    for draw in wanted:
        numbers = np.stack([uniforms(seed, name, draw, decoding.max_new_tokens) for name in names])
        by_draw.append(decode(generator.model, encoded, numbers, decoding))
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
