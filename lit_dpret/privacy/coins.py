"""The global generators of torch, ``random`` and numpy, which code of the user's draws from.

A row's coins must not follow from other rows. Where rows take numbers from one generator in turn, a unit with one
word more moves the coins of all rows after it, in this step and in later ones, and who knows the seed can tell. So the
generators are seeded anew for every unit, in every step, from the run's secret (`Draw.seed`): while its rows are
fetched (`SeededDraws`) and while they are collated (`UnitCollator`). For every choice of these seeds one unit moves
what is made of no other, so the bound on a step's sum holds even against somebody who knows all of them.

In ``per_row_loss`` a batch has one seed. There, rows stand in one tensor and share its random numbers, as in dropout:
a batch with fewer rows can give a row another part of the same sequence. That is harmless as long as the sequence is
secret and each row's part of it is independent of the others': then the other rows' numbers have the same joint
distribution without the unit as with it, and the bound holds for every value that they take.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def seed_python_and_numpy(seed: int) -> None:
    """Seed ``random`` and ``numpy.random`` by a number of up to 64 bits."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def seed_generators(seed: int) -> None:
    """Seed the global generators: on the CPU, and on CUDA devices that this process uses."""
    torch.default_generator.manual_seed(seed)
    if _uses_cuda():
        torch.cuda.manual_seed_all(seed)
    seed_python_and_numpy(seed)


def python_and_numpy_now() -> tuple[object, ...]:
    """Return the state of ``random`` and ``numpy.random``, to be compared."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def generators_now() -> tuple[object, ...]:
    """Return the state of every generator that `seed_generators` seeds, to be compared."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if _uses_cuda() else ())]
    return *(state.numpy().tobytes() for state in states), *python_and_numpy_now()


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave every global generator as it was found."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if _uses_cuda() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def own_generators(objects: Iterable[Any]) -> tuple[bytes | str, ...]:
    """Return the states of the generators among some objects, to be compared."""
    found: list[bytes | str] = []
    for each in objects:
        if isinstance(each, torch.Generator):
            found.append(each.get_state().cpu().numpy().tobytes())
        elif isinstance(each, np.random.Generator):
            found.append(repr(each.bit_generator.state))
        elif isinstance(each, np.random.RandomState):
            found.append(repr([np.asarray(part).tobytes() for part in each.get_state()]))
        elif isinstance(each, random.Random) and not isinstance(each, random.SystemRandom):
            found.append(repr(each.getstate()))
    return tuple(found)
