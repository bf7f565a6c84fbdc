"""The global generators of torch, ``random`` and numpy, from which user code draws.

They are seeded for every unit and step from the run's secret (`Draw.seed`), so that one unit's rows do not change any
other unit's coins. In ``per_row_loss`` a batch has one seed, which must be too long to guess: on a CPU, torch keeps 32
bits of a seed, so its whole state is filled from a hash (`seed_torch`). docs/derivations.md has the argument.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError

_WORDS = 624  # of the state of a Mersenne twister
_FIRST_WORD = 24  # offset in torch's state, after the seed, counters, and two flags
_DEVICE_SEED = (1 << 63) - 1


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def seed_generators(seed: int) -> None:
    """Seed the global generators with a non-negative integer: on the CPU, and on CUDA devices in use."""
    _draw_every_number()
    seed_torch(torch.default_generator, seed)
    if _uses_cuda():
        torch.cuda.manual_seed_all(seed & _DEVICE_SEED)
    random.seed(seed)
    # NumPy takes an array of 32-bit words, of any length.
    np.random.seed([seed >> shift & 0xFFFFFFFF for shift in range(0, max(64, seed.bit_length()), 32)])


def seed_everywhere(seed: int) -> None:
    """Seed the global generators as `seed_generators` does, and those of every accelerator."""
    if _has_accelerator():
        torch.manual_seed(seed & _DEVICE_SEED)
    seed_generators(seed)


@cache
def _has_accelerator() -> bool:
    """Return whether an accelerator exists; without one, torch stores each seed for later, which takes milliseconds."""
    return torch.accelerator.is_available()


def seed_torch(generator: torch.Generator, seed: int) -> None:
    """Fill the whole state of a CPU generator from a hash of ``seed``, of which ``manual_seed`` keeps 32 bits."""
    hashed = hashlib.shake_256(b"%x" % seed).digest(8 + 4 * _WORDS)
    state = _fresh_state().copy()
    # Where torch stores the value that `initial_seed()` returns.
    state[:8].view(np.uint64)[:] = int.from_bytes(hashed[:8], "little") & _DEVICE_SEED
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(np.uint64)[:] = np.frombuffer(hashed, dtype="<u4", offset=8)
    generator.set_state(torch.from_numpy(state))


@cache
def _fresh_state() -> np.ndarray:
    """Return the bytes of torch's state right after a seed, when the next number regenerates all words."""
    state: np.ndarray = torch.Generator().manual_seed(5).get_state().numpy()
    words = state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(np.uint64)
    _, same, *_ = np.random.RandomState(5).get_state()  # of the same twister, seeded in the same way
    # The offsets above are torch's private layout: checked once, against a documented twister.
    if not np.array_equal(words, same):
        raise ConfigurationError(
            f"torch {torch.__version__} stores the state of its generator in a layout that this program does not "
            "know, so dropout could not be keyed by the secret. Install a version of torch that pyproject.toml allows."
        )
    return state


def _bernoulli(target: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    return target.copy_(_uniform(target, generator) < p)


def _exponential(target: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    # log1p(-u) keeps the digits of a small u, and u is never 1.
    return target.copy_(-torch.log1p(-_uniform(target, generator)) / lambd)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float64).uniform_(generator=generator)


_OF_ONE_WORD: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "bernoulli_": ("bernoulli_.float", _bernoulli),
    "exponential_": ("exponential_", _exponential),
}


@cache
def _draw_every_number() -> torch.library.Library | None:
    """Make dropout on a CPU draw each number from torch's generator, and return the object that keeps it so.

    On Intel processors, MKL draws a whole tensor of Bernoulli or exponential numbers from one 32-bit word of the
    generator: anyone who knows a layer's input can try out all words. Here the same operations compute what torch
    itself computes on other processors.
    """
    found = [each for name, each in _OF_ONE_WORD.items() if _draws_one_word(name)]
    if not found:
        return None
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # undone once unreferenced
    with warnings.catch_warnings(action="ignore"):  # about replacing an operation of torch's, which is intended
        for overload, draw in found:
            library.impl(overload, draw, "CPU")  # type: ignore[no-untyped-call]
    return library


def _draws_one_word(name: str) -> bool:
    """Return whether drawing few numbers leaves the generator in the same state as drawing many."""
    after = []
    for count in (1000, 2000):  # where few are drawn, a library may do so one by one
        generator = torch.Generator().manual_seed(0)
        getattr(torch.empty(count, device="cpu"), name)(generator=generator)
        after.append(generator.get_state())
    return torch.equal(*after)


def python_and_numpy_now() -> tuple[object, ...]:
    """Return the state of ``random`` and ``numpy.random``, for comparison."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def generators_now() -> tuple[object, ...]:
    """Return the state of every generator that `seed_generators` seeds, for comparison."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if _uses_cuda() else ())]
    return *(state.numpy().tobytes() for state in states), *python_and_numpy_now()


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore every global generator at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if _uses_cuda() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def own_generators(objects: Iterable[Any]) -> tuple[bytes | str, ...]:
    """Return the states of the generators among some objects, for comparison."""
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
