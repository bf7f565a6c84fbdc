"""ChaCha20 in tensor operations: the standard's examples, OpenSSL's blocks, and every way to ask for a block."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from lit_dpret.privacy.chacha import keystream

KEY = bytes(range(32))
NUMBERS = [0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**40 + 3, 2**62 + 1]


def block(key: bytes, number: int, lane: int = 0) -> bytes:
    words = keystream(key, torch.tensor([number]), lane=lane)
    return struct.pack("<16i", *words[:, 0].tolist())


RFC_8439 = {
    "2.3.2": (
        KEY, 1 | 0x09000000 << 32, 0x4A000000,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1, number 1": (
        bytes(32), 0, 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1, number 2": (
        bytes(32), 1, 0,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("key", "number", "lane", "expected"), RFC_8439.values(), ids=RFC_8439)
def test_blocks_are_those_of_the_standard(key: bytes, number: int, lane: int, expected: str) -> None:
    assert block(key, number, lane).hex() == expected


def by_openssl(key: bytes, number: int, lane: int, size: int = 64) -> bytes:
    cipher = Cipher(ChaCha20(key, struct.pack("<QII", number, lane, 0)), mode=None)
    return cipher.encryptor().update(bytes(size))


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_and_lane_has_the_block_of_openssl(number: int) -> None:
    for lane in (0, 1, 4, 2**31 - 1):
        key = hashlib.sha256(str((number, lane)).encode()).digest()
        assert block(key, number, lane) == by_openssl(key, number, lane)


def test_the_stream_is_that_of_openssl() -> None:
    words = keystream(KEY, torch.arange(900), lane=3).T.contiguous().numpy().tobytes()
    assert by_openssl(KEY, 0, 3, len(words)) == words


def test_a_block_depends_on_its_number_and_on_no_other_block() -> None:
    numbers = torch.tensor(NUMBERS)
    together = keystream(KEY, numbers)
    assert together.dtype == torch.int32 and together.shape == (16, len(NUMBERS))
    order = torch.randperm(len(NUMBERS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(keystream(KEY, numbers[order]), together[:, order])
    every_second = keystream(KEY, numbers[::2])
    assert torch.equal(every_second, together[:, ::2])
    assert keystream(KEY, numbers[:0]).shape == (16, 0)


DRAWN = """
import hashlib, torch
from lit_dpret.privacy.box_muller import normals
from lit_dpret.privacy.chacha import keystream
from lit_dpret.privacy.exact_normal import rounded_normals
key, cpu = bytes(range(32)), torch.device("cpu")
hashed = hashlib.sha256()
for drawn in (
    keystream(key, torch.arange(5003)), normals(key, 70_001, start=3, device=cpu, dtype=torch.float64),
    rounded_normals(key, 70_001, start=3, bits=33, device=cpu),
):
    hashed.update(drawn.contiguous().numpy().tobytes())
print(hashed.hexdigest())
"""


@pytest.mark.costly
def test_processors_with_other_instructions_draw_the_same_bits() -> None:
    """PyTorch has kernels for each set of vector instructions, which round logarithms and cosines differently."""
    told = {
        subprocess.run(
            [sys.executable, "-c", DRAWN], env=os.environ | {"ATEN_CPU_CAPABILITY": kind}, text=True, check=True,
            stdout=subprocess.PIPE,
        ).stdout
        for kind in ("default", "avx2", "avx512")
    }  # fmt: skip
    assert len(told) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_the_bits_of_the_cpu() -> None:
    from lit_dpret.privacy.box_muller import normals
    from lit_dpret.privacy.exact_normal import rounded_normals

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    numbers = torch.tensor(NUMBERS)
    assert torch.equal(keystream(KEY, numbers.to(gpu)).cpu(), keystream(KEY, numbers))
    for dtype in (torch.float32, torch.float64):
        one, two = (normals(KEY, 5_000_001, start=7, device=place, dtype=dtype) for place in (cpu, gpu))
        assert torch.equal(one, two.cpu())
    one, two = (rounded_normals(KEY, 2_500_001, start=7, bits=33, device=place) for place in (cpu, gpu))
    assert torch.equal(one, two.cpu())
