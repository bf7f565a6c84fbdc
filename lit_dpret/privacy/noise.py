"""Noise and coins that cannot be replayed without the secret, and that the run itself never reuses.

Every random number behind a claim comes from a *keyed stream*, seeded by (secret, purpose, run, attempt, step,
parameter). For noise the key also includes a tag of the sum it is added to, so that no noise is added to two sums. A
flat index determines a number, so ranks and threads can draw parts. Philox (default, CPU, not cryptographic) or
ChaCha20 (``secure_rng``) draws normals. ``privacy.noise=discrete`` computes in integers, and docs/derivations.md proves
its claim.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy import box_muller, exact_normal
from lit_dpret.privacy.budget import ROUNDING_SHARE, NoiseName
from lit_dpret.privacy.chacha import DEVICES
from lit_dpret.threads import in_threads

SECRET_BYTES = 32

BLOCK = 1 << 16
"""The number of coordinates of a parameter whose noise shares one Philox key."""

PHILOX_STREAM, CHACHA_STREAM = 2, 3
"""How keys become noise. Any change to a number requires a new stream number.

A ledger records which stream drew its noise, and no step is repeated under another one.
"""

FEW = 1 << 15
"""Up to this many numbers are drawn on the CPU even for a GPU: launching its hundreds of kernels takes longer."""

# Part of every key of floating-point noise. It has no meaning any more; removing it would change every number.
_KEY_CONSTANT = 0


def default_secret_file() -> Path:
    """Return the path of the secret if ``privacy.secret_file`` is null: in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "lit-dpret" / "privacy_secret"


def load_secret(path: str | Path | None, *, run_dir: Path | None = None) -> bytes:
    """Read the secret, or create one with mode 0600."""
    path = Path(path or default_secret_file()).expanduser()
    if run_dir is not None and path.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigurationError(
            f"privacy.secret_file={path} is inside the run folder {run_dir}: anyone with the folder could subtract "
            "the noise. Choose a path outside it.",
            trap="T21",
        )
    if not path.exists():
        _make_secret(path)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"privacy.secret_file={path} cannot be read: {error.strerror}. Choose another path."
        ) from error
    if mode & 0o077:
        raise ConfigurationError(
            f"privacy.secret_file={path} has mode {mode:04o} and can be read by others. Run: chmod 600 {path}",
            trap="T21",
        )
    if len(secret) != SECRET_BYTES:
        raise ConfigurationError(
            f"privacy.secret_file={path} holds {len(secret)} bytes instead of {SECRET_BYTES}; it is not a secret "
            "of this program. Choose another path, or delete the file, and a new secret is created."
        )
    return secret


def published_secret(seed: int) -> bytes:
    """Return a key that anyone can derive from ``seed``: for development, without a claim."""
    return hashlib.blake2b(f"published noise seed {seed}".encode(), digest_size=SECRET_BYTES).digest()


def _make_secret(path: Path) -> None:
    """Write a new secret. It appears whole, and if two processes create one at once, both read the first."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        raise ConfigurationError(
            f"privacy.secret_file={path} cannot be created: {error.strerror}. Choose another path."
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


class KeyedStream:
    """Computationally independent streams for one run, derived from one secret.

    Guarantees:
        - The same key gives the same coins on any machine. Under ``secure_rng`` it also gives the same noise on any
          machine and device; otherwise only on the same kind of CPU and version of NumPy.
        - Keys that differ in any component give unrelated numbers, also for parameters of equal shape and for steps of
          two attempts.
    """

    def __init__(self, secret: bytes, run_id: str, *, secure_rng: bool = False) -> None:
        self._secret = secret
        self.run_id = run_id
        self.secure_rng = secure_rng

    @property
    def noise_stream(self) -> int:
        return CHACHA_STREAM if self.secure_rng else PHILOX_STREAM

    def __getstate__(self) -> dict[str, object]:
        # A checkpoint or a worker that pickles the stream would carry the secret out of this process.
        raise ResumeError("A keyed stream holds the privacy secret and is never written to a file.")

    def _digest(self, purpose: str, *key: object, size: int = 32) -> bytes:
        parts = [str(part).encode() for part in (purpose, self.run_id, *key)]
        # Length-prefixed, or ("ab", "c") and ("a", "bc") would share a stream.
        message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hashlib.blake2b(message, key=self._secret, digest_size=size).digest()

    def tag(self, purpose: str, *parts: bytes | memoryview) -> str:
        """Return a keyed fingerprint of private bytes, which reveals only equality."""
        # The tag is of a private sum, so it needs a key: a plain hash could be compared with guesses.
        mac = hmac.new(self._digest(purpose), digestmod=hashlib.blake2b)
        for part in parts:
            mac.update(part)
        return mac.hexdigest()[:32]

    def coins(self, attempt: int, step: int, purpose: str = "sampling") -> np.random.Generator:
        """Return the generator for the sampling coins of one logical step."""
        # These 128 bits are Philox's key directly, with no `SeedSequence` in between.
        seed = int.from_bytes(self._digest(purpose, attempt, step, size=16), "little")
        return np.random.Generator(np.random.Philox(key=seed))

    def model_seed(self, attempt: int, step: int, part: int) -> int:
        """Return a 256-bit seed for dropout in one physical batch, so that a replayed step draws the same masks."""
        return int.from_bytes(self._digest("dropout", attempt, step, part), "little")

    def unit_seed(self, attempt: int, step: int, unit: int) -> int:
        """Return a 256-bit seed for random draws while one unit is fetched and collated in one logical step."""
        return int.from_bytes(self._digest("unit", attempt, step, unit), "little")

    # The threads that draw do not inherit inference mode, and cannot write into a tensor that was created in it.
    @torch.inference_mode(False)
    def normal(
        self,
        shape: torch.Size,
        *,
        attempt: int,
        step: int,
        parameter: str,
        salt: str = "",
        start: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return standard normal noise of ``shape`` for one parameter and step, in fp32 or wider.

        ``salt`` tags the sum that the noise is added to; ``start`` is the flat index, in the parameter, of the first
        coordinate.

        Guarantees:
            - The number at flat index i depends only on the key and i: a part of a parameter, from ``start`` on, gets
              the same numbers as in the whole parameter, and nothing of the size of the whole is allocated for it.
            - The number of threads, which is PyTorch's, changes no number.
        """
        # Never in half precision: its coarse steps would show in the noise.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        count = math.prod(shape)
        if self.secure_rng:
            key = self._digest("normals", attempt, step, parameter, salt)
            where = _drawn_on(device, count)
            return box_muller.normals(key, count, start=start, device=where, dtype=wide).reshape(shape).to(device)
        drawn = np.empty(count, dtype=np.float64 if wide == torch.float64 else np.float32)
        self._fill(drawn, ("noise", attempt, step, parameter, _KEY_CONSTANT, salt), start)
        return torch.from_numpy(drawn).reshape(shape).to(device)

    @torch.inference_mode(False)
    def rounded_normal(
        self,
        shape: torch.Size,
        *,
        bits: int,
        attempt: int,
        step: int,
        parameter: str,
        salt: str = "",
        start: int = 0,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return exact normals of standard deviation ``2**bits``, rounded to int64, from ChaCha20."""
        key, count = self._digest("rounded normals", attempt, step, parameter, salt), math.prod(shape)
        drawn = exact_normal.rounded_normals(key, count, start=start, bits=bits, device=_drawn_on(device, count))
        return drawn.reshape(shape).to(device)

    def _fill(self, drawn: np.ndarray, key: tuple[object, ...], start: int) -> None:
        """Fill ``drawn``, which begins at flat index ``start``, from Philox, each block under its own key."""
        count = len(drawn)

        def fill(block: int) -> None:
            purpose, *rest = key
            # By block, not by rank or thread: any process that holds these coordinates draws the same numbers.
            seed = self._digest(str(purpose), *rest, block)
            begin = block * BLOCK
            first, last = max(begin, start), min(begin + BLOCK, start + count)
            target = drawn[first - start : last - start]
            if first == begin:
                _philox_normal(seed, target)
            else:
                # Normals are drawn by rejection, so a block has no random access: its head is drawn and discarded.
                upto = np.empty(last - begin, dtype=drawn.dtype)
                _philox_normal(seed, upto)
                target[:] = upto[first - begin :]

        in_threads(fill, range(start // BLOCK, -(-(start + count) // BLOCK)) if count else range(0))


def _philox_normal(seed: bytes, target: np.ndarray) -> None:
    """Fill ``target`` from NumPy's Philox; a shorter draw from one seed is a prefix of a longer one."""
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed[:16], "little")))
    generator.standard_normal(dtype=target.dtype, out=target)


def _drawn_on(device: torch.device | str, count: int) -> torch.device:
    """Return the device that draws the ChaCha20 numbers wanted on ``device``."""
    device = torch.device(device)
    return device if device.type in DEVICES and count > FEW else torch.device("cpu")


_LARGEST = 2.0**52
_AT_ONCE = 256 * BLOCK


def grid_bits(noise_multiplier: float, coordinates: int) -> int:
    """Return b such that one noise deviation is ``2**b`` grid steps (see docs/derivations.md)."""
    steps = 2 * math.sqrt(coordinates) * noise_multiplier * (1 + ROUNDING_SHARE) / ROUNDING_SHARE
    # Slightly upwards, so that rounding of the logarithm does not give a grid that is too coarse.
    bits = max(0, math.ceil(math.log2(steps) + 1e-9))
    # Some spare bits below the finest grid on which `rounded_normals` draws.
    if bits > exact_normal.MOST_BITS - 8:
        raise ConfigurationError(
            f"privacy.noise=discrete: {coordinates} coordinates under a noise multiplier of {noise_multiplier:g} need "
            f"a grid of 2^-{bits} deviations, finer than 64-bit integers hold. Set privacy.noise=gaussian."
        )
    return bits


@dataclass(frozen=True)
class FloatNoise:
    """Floating-point normals of the stream."""

    stream: KeyedStream

    def noised(
        self, total: Tensor, *, std: float, attempt: int, step: int, parameter: str, salt: str = "", start: int = 0
    ) -> Tensor:
        """Return ``total`` with noise of deviation ``std``, in its dtype; the other arguments key the noise."""
        noise = self.stream.normal(
            total.shape, attempt=attempt, step=step, parameter=parameter, salt=salt, start=start,
            device=total.device, dtype=total.dtype,
        )  # fmt: skip
        return total + noise.mul_(std)


@dataclass(frozen=True)
class GridNoise:
    """Integer noise: the sum rounded to the grid, plus an exactly rounded normal."""

    stream: KeyedStream  # of the run
    bits: int  # from `grid_bits`, for all coordinates of the sum together

    def noised(
        self, total: Tensor, *, std: float, attempt: int, step: int, parameter: str, salt: str = "", start: int = 0
    ) -> Tensor:
        """Return ``total`` on the grid with noise, as `FloatNoise.noised` does; NaN counts as 0."""
        grid, flat = std * 2.0**-self.bits, total.reshape(-1)
        found = torch.empty_like(flat)
        for first in range(0, len(flat), _AT_ONCE):
            part = flat[first : first + _AT_ONCE]
            whole = part.to(torch.float64, copy=True).div_(grid).round_().nan_to_num_(0.0, _LARGEST, -_LARGEST)
            integers = whole.clamp_(-_LARGEST, _LARGEST).long()
            integers += self.stream.rounded_normal(
                part.shape, bits=self.bits, attempt=attempt, step=step, parameter=parameter, salt=salt,
                start=start + first, device=total.device,
            )  # fmt: skip
            found[first : first + _AT_ONCE] = integers.double().mul_(grid)
        return found.reshape(total.shape)


def noise_source(
    noise: NoiseName, stream: KeyedStream, *, noise_multiplier: float, coordinates: int
) -> FloatNoise | GridNoise:
    """Return the source of ``noise``; its grid, if any, is for ``coordinates`` coordinates in total."""
    if noise == "gaussian":
        return FloatNoise(stream)
    return GridNoise(stream, grid_bits(noise_multiplier, coordinates))
