"""Keyed streams: independent where keys differ, equal where they do not, and secret."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

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


def rounded(stream: KeyedStream, size: int, **key: object) -> torch.Tensor:
    arguments = {"attempt": 0, "step": 0, "parameter": "w", "bits": 30} | key
    return stream.rounded_normal(torch.Size([size]), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("secure", [False, True])
def test_the_same_key_gives_the_same_noise_and_any_other_key_unrelated_noise(secure: bool) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    base = draw(stream)
    assert torch.equal(base, draw(KeyedStream(SECRET, "run", secure_rng=secure)))
    others = [
        draw(stream, step=1),
        draw(stream, attempt=1),
        draw(stream, parameter="v"),
        draw(KeyedStream(SECRET, "other", secure_rng=secure)),
        draw(KeyedStream(bytes(32), "run", secure_rng=secure)),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(correlation) < 0.05


def test_a_key_cannot_be_mistaken_for_another_by_joining_its_parts() -> None:
    stream = KeyedStream(SECRET, "run")
    assert not torch.equal(draw(stream, attempt=1, step=11), draw(stream, attempt=11, step=1))


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


def test_a_secret_inside_the_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="inside the run folder"):
        load_secret(tmp_path / "run" / "secret", run_dir=tmp_path / "run")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        load_secret(tmp_path / "secret")


def test_a_file_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(ConfigurationError, match="5 bytes"):
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


@pytest.mark.parametrize("secure", [False, True])
def test_noise_for_another_sum_is_other_noise(secure: bool) -> None:
    stream = KeyedStream(SECRET, "run", secure_rng=secure)
    assert not torch.equal(draw(stream, salt="tag of one sum"), draw(stream, salt="tag of another"))


def test_whole_numbers_differ_where_any_part_of_their_key_does() -> None:
    stream = KeyedStream(SECRET, "run")
    changes: list[dict[str, object]] = [{}, {"attempt": 1}, {"step": 1}, {"parameter": "v"}, {"salt": "sum"}]
    found = [rounded(stream, 100, **change) for change in changes]
    found.append(rounded(KeyedStream(bytes(32), "run"), 100))
    found.append(rounded(KeyedStream(SECRET, "other"), 100))
    assert len({tuple(noise.tolist()) for noise in found}) == len(found)


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
