"""Keyed streams: independent where keys differ, equal where they do not, and secret."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy import noise
from lit_dpret.privacy.noise import BLOCK, KeyedStream, load_secret

SECRET = bytes(range(32))


def draw(stream: KeyedStream, size: int = 10_000, **key: object) -> torch.Tensor:
    arguments = {"attempt": 0, "step": 0, "parameter": "w"} | key
    return stream.normal(torch.Size([size]), **arguments)  # type: ignore[arg-type]


def rounded(stream: KeyedStream, size: int = 10_000, **key: object) -> torch.Tensor:
    arguments = {"attempt": 0, "step": 0, "parameter": "w", "bits": 30} | key
    return stream.rounded_normal(torch.Size([size]), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [draw, rounded])
@pytest.mark.parametrize("secure", [False, True])
def test_the_same_key_gives_the_same_noise_and_any_other_key_unrelated_noise(secure: bool, drawn: Any) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    base = drawn(stream)
    assert torch.equal(base, drawn(KeyedStream(SECRET, "run", secure_rng=secure)))
    changes: list[dict[str, Any]] = [{"step": 1}, {"attempt": 1}, {"parameter": "v"}, {"salt": "of another sum"}]
    others = [drawn(stream, **change) for change in changes]
    others += [drawn(stream, attempt=1, step=11), drawn(stream, attempt=11, step=1)]
    others += [drawn(KeyedStream(SECRET, "other", secure_rng=secure))]
    others += [drawn(KeyedStream(bytes(32), "run", secure_rng=secure))]
    correlations = torch.corrcoef(torch.stack([base, *others]).double()).fill_diagonal_(0.0)
    assert correlations.abs().max() < 0.06


def test_float64_parameters_get_float64_noise_and_bfloat16_ones_float32() -> None:
    stream = KeyedStream(SECRET, "run")
    assert stream.normal(torch.Size([2]), attempt=0, step=0, parameter="w", dtype=torch.float64).dtype == torch.float64
    assert stream.normal(torch.Size([2]), attempt=0, step=0, parameter="w", dtype=torch.bfloat16).dtype == torch.float32


def test_the_stream_cannot_be_pickled_into_a_checkpoint() -> None:
    with pytest.raises(ResumeError):
        pickle.dumps(KeyedStream(SECRET, "run"))


def test_a_secret_is_made_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret"
    secret = load_secret(path)
    assert len(secret) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret


def test_a_secret_in_the_run_folder_or_that_others_can_read_and_what_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="inside the run folder"):
        load_secret(tmp_path / "run" / "secret", run_dir=tmp_path / "run")
    load_secret(tmp_path / "secret")
    for content, mode, words in ((SECRET, 0o644, "0644"), (b"short", 0o600, "5 bytes")):
        (tmp_path / "secret").write_bytes(content)
        (tmp_path / "secret").chmod(mode)
        with pytest.raises(ConfigurationError, match=words):
            load_secret(tmp_path / "secret")


def test_a_tag_recognises_equal_bytes_and_needs_the_secret() -> None:
    stream = KeyedStream(SECRET, "run")
    assert stream.tag("t", b"ab", b"c") == stream.tag("t", b"abc")
    assert stream.tag("t", b"abc") != stream.tag("t", b"abd")
    assert stream.tag("t", b"abc") != KeyedStream(bytes(32), "run").tag("t", b"abc")


def test_seeds_that_agree_in_their_low_bits_still_give_unrelated_noise() -> None:
    """PyTorch's CPU generator keeps 32 bits of a seed; with 2000 steps of 126 tensors such seeds would collide."""
    stream = KeyedStream(SECRET, "run")
    first = [draw(stream, size=4, step=step, parameter=name) for step in range(400) for name in "abcdefghij"]
    assert len({tuple(noise.tolist()) for noise in first}) == len(first)
    digests = []
    honest = stream._digest
    stream._digest = lambda *key, size=32: digests.append(honest(*key, size=size)) or digests[-1]  # type: ignore[method-assign,func-returns-value]
    draw(stream, size=4)
    low = digests[0][:4] + bytes(28)
    stream._digest = lambda *key, size=32: low  # type: ignore[method-assign]
    assert not torch.equal(draw(stream, size=4), first[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_secure_noise_has_the_bits_of_the_cpu_whatever_its_size() -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=True)
    for size in (3, noise.FEW, noise.FEW + 1, 3_000_000):
        assert torch.equal(draw(stream, size=size, device="cuda").cpu(), draw(stream, size=size))
        assert torch.equal(rounded(stream, size, device="cuda").cpu(), rounded(stream, size))


def test_noise_for_a_device_that_cannot_draw_it_is_drawn_on_the_cpu() -> None:
    for kind in ("xla", "mps", "meta"):
        assert noise._drawn_on(torch.device(kind), 10**9).type == "cpu"
    assert noise._drawn_on("cuda", noise.FEW + 1).type == "cuda" and noise._drawn_on("cuda:1", noise.FEW).type == "cpu"


# -- blocks ------------------------------------------------------------------------------------

PARTS = [(0, 7), (BLOCK - 3, 9), (BLOCK, BLOCK), (BLOCK + 5, BLOCK), (2 * BLOCK + 11, 30), (0, 2 * BLOCK + 41)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("secure", [False, True])
def test_a_part_of_a_parameter_gets_the_noise_that_it_has_in_the_whole(secure: bool, dtype: torch.dtype) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    whole = draw(stream, size=2 * BLOCK + 41, dtype=dtype)
    for start, count in PARTS:
        assert torch.equal(draw(stream, size=count, start=start, dtype=dtype), whole[start : start + count])
    rows = stream.normal(torch.Size([41, 3]), attempt=0, step=0, parameter="w", start=BLOCK, dtype=dtype)
    assert torch.equal(rows.flatten(), whole[BLOCK : BLOCK + 123])


@pytest.mark.parametrize("secure", [False, True])
def test_what_surrounds_the_drawing_changes_no_number(secure: bool, set_threads: Callable[[int], None]) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    known = draw(stream, 3 * BLOCK), rounded(stream, 3 * BLOCK)
    for threads in (1, 3):
        set_threads(threads)
        for surrounded in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
            with surrounded:
                found = draw(stream, 3 * BLOCK), rounded(stream, 3 * BLOCK)
            assert all(map(torch.equal, found, known)), (threads, surrounded)
            assert torch.get_num_threads() == threads
            assert not any(each.is_inference() for each in found)


def test_constants_of_secure_noise_are_made_on_the_cpu() -> None:
    """A process whose first import stands under another default device."""
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    from lit_dpret.privacy.noise import KeyedStream\n"
        f"    streams = [KeyedStream({SECRET!r}, 'run', secure_rng=secure) for secure in (False, True)]\n"
        "    key = {'attempt': 0, 'step': 0, 'parameter': 'w'}\n"
        "    drawn = [(s.normal(torch.Size([9]), **key), s.rounded_normal(torch.Size([9]), bits=30, **key))\n"
        "             for s in streams]\n"
        "print([[each.tolist() for each in of_one] for of_one in drawn])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    streams = [KeyedStream(SECRET, "run", secure_rng=secure) for secure in (False, True)]
    assert found.strip() == str([[draw(s, 9).tolist(), rounded(s, 9).tolist()] for s in streams])


@pytest.mark.parametrize("secure", [False, True])
def test_blocks_are_unrelated_to_one_another_and_to_the_blocks_of_other_keys(secure: bool) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    blocks = list(draw(stream, size=3 * BLOCK).split(BLOCK))
    blocks += list(draw(stream, size=3 * BLOCK, step=1).split(BLOCK))
    blocks += list(draw(stream, size=3 * BLOCK, parameter="v").split(BLOCK))
    correlations = torch.corrcoef(torch.stack(blocks).double()).fill_diagonal_(0.0)
    assert correlations.abs().max() < 6 / BLOCK**0.5
    assert stats.kstest(torch.cat(blocks).double().numpy(), "norm").pvalue > 1e-4


def test_the_key_of_a_block_is_none_of_another_parameter_or_step() -> None:
    stream, digests = KeyedStream(SECRET, "run"), []
    honest = stream._digest

    def noted(*key: object, size: int = 32) -> bytes:
        digests.append(honest(*key, size=size))
        return digests[-1]

    stream._digest = noted  # type: ignore[method-assign]
    for step in (0, 1, 11):
        for name in ("w", "w1"):
            draw(stream, size=12 * BLOCK, step=step, parameter=name)
    assert len(digests) == 3 * 2 * 12 == len(set(digests))


def test_the_noise_of_no_coordinates_and_of_a_single_number_is_drawn() -> None:
    stream = KeyedStream(SECRET, "run")
    assert draw(stream, size=0).shape == (0,)
    assert stream.normal(torch.Size([]), attempt=0, step=0, parameter="w") == draw(stream, size=1)[0]


def test_a_part_is_drawn_without_the_memory_of_the_whole() -> None:
    tracemalloc.start()
    try:
        draw(KeyedStream(SECRET, "run"), size=100, start=10**12)
        assert tracemalloc.get_traced_memory()[1] < 4 * BLOCK + 100_000
    finally:
        tracemalloc.stop()
