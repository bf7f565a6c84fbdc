"""Interrupted, shot, damaged, resumed: the same bytes, or a refusal that names what changed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import PASSAGES, SETTINGS, content, generator, lines, passage, write_parent_card

from lit_dpret.errors import ResumeError
from lit_dpret.modules.generator_folder import load_generator
from lit_dpret.synthesis import writer
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.sampler import Decoding
from lit_dpret.synthesis.writer import synthesize

# -- sameness --------------------------------------------------------------------------------


def test_an_interrupted_run_writes_the_same_bytes(whole: Path, source: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "set", list[tuple[int, int]]()
    for after in (1, 2, 0):
        left = iter(range(after))

        def press_control_c(done: int, total: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            synthesize(source, PASSAGES, out, progress=press_control_c, **SETTINGS)
        assert not (out / "queries.jsonl").exists()
    synthesize(source, PASSAGES, out, progress=lambda *at: seen.append(at), **SETTINGS)
    assert seen == [(8, 11), (11, 11)]
    assert content(out) == content(whole)


def test_a_finished_set_is_left_as_it_is_and_order_threads_and_precision_of_products_change_no_byte(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    before, turned = content(whole), dict(reversed(PASSAGES.items()))
    stamps = {path: path.stat().st_mtime_ns for path in (whole / "shards").iterdir()}
    synthesize(source, turned, whole, **SETTINGS)
    assert content(whole) == before
    assert {path: path.stat().st_mtime_ns for path in (whole / "shards").iterdir()} == stamps
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    try:
        out = synthesize(source, turned, tmp_path / "set", **SETTINGS)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "medium")
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
    assert content(out) == before


def drawn(folder: Path) -> dict[tuple[str, int], tuple[str, float]]:
    records = [record for shard in sorted((folder / "shards").iterdir()) for record in lines(shard)]
    return {(r["passage_id"], r["draw"]): (r["text"], r["log_prob"]) for r in records}


def test_a_query_does_not_depend_on_how_many_draws_there_are_nor_on_group_size_and_company(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    """Beyond the last bits of the scores: the numbers are a query's own, whoever stands beside it."""
    one, three = (
        drawn(synthesize(source, PASSAGES, tmp_path / "set", **SETTINGS | {"queries_per_passage": 1})),
        drawn(whole),
    )
    assert (len(one), len(three)) == (11, 33)
    assert one.items() <= three.items()
    loaded = load_generator(source)
    decoding = Decoding(max_new_tokens=loaded.contract.max_query_length)
    ours = draw_group(loaded, PASSAGES, [2, 0], 5, decoding)
    assert {(query.passage_id, query.draw) for query in ours} == {(name, d) for name in PASSAGES for d in (0, 2)}
    assert all(three[query.passage_id, query.draw][0] == query.text for query in ours)
    assert len({query.text for query in ours}) > 11


# -- damage ----------------------------------------------------------------------------------


def cut_in_half(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def flip_a_letter(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))


def kill_before_the_manifest_says_so(shard: Path) -> None:
    """Or in mid-line."""
    manifest = shard.parent.parent / "manifest.jsonl"
    whole = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(whole[:-1]) + whole[-1][:20])
    (shard.parent / ".000003.jsonl.77.tmp").write_text("{")


@pytest.mark.parametrize("harm", [cut_in_half, flip_a_letter, os.unlink, kill_before_the_manifest_says_so])
def test_a_damaged_shard_is_made_again(whole: Path, source: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    out, seen = tmp_path / "set", list[tuple[int, int]]()
    shutil.copytree(whole, out)
    harm(out / "shards" / "000001.jsonl")
    synthesize(source, PASSAGES, out, progress=lambda *at: seen.append(at), **SETTINGS)
    assert seen == [(9 if harm is kill_before_the_manifest_says_so else 8, 11), (11, 11)]
    assert content(out) == content(whole)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 6}, "seed=5"), ({"top_p": 0.9}, "top_p=0.8"), ({"temperature": 0.5}, "temperature=1.0"),
        ({"top_k": 7}, "top_k=None"), ({"max_new_tokens": 4}, "max_new_tokens=8"), ({"group_size": 4}, "group_size=3"),
        ({"queries_per_passage": 4}, "queries_per_passage=3"), ({"precision": "bf16-true"}, "precision=32-true"),
    ],
)  # fmt: skip
def test_another_configuration_is_refused_by_the_key_that_changed(
    whole: Path, source: Path, change: dict[str, Any], key: str
) -> None:
    before = content(whole)
    with pytest.raises(ResumeError, match=key):
        synthesize(source, PASSAGES, whole, **SETTINGS | change)
    assert content(whole) == before


def test_other_passages_another_generator_and_other_libraries_are_refused_and_so_is_a_lost_manifest(
    whole: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, out = generator(seed=9).save_model(tmp_path / "g"), tmp_path / "set"
    write_parent_card(other)
    shutil.copytree(whole / "shards", out / "shards")
    for folder, passages, into, named in (
        (source, PASSAGES | {"p1": "other words"}, whole, "passages="),
        (other, PASSAGES, whole, "generator="),
        (source, PASSAGES, out, "manifest"),
    ):
        with pytest.raises(ResumeError, match=named):
            synthesize(folder, passages, into, **SETTINGS)
    monkeypatch.setattr(writer, "version_of", lambda package: f"{package} of another year")  # other last bits
    with pytest.raises(ResumeError, match="torch=torch of another year"):
        synthesize(source, PASSAGES, whole, **SETTINGS)


# -- processes that are killed -----------------------------------------------------------------


MANY = {f"p{number}": passage(number, 2 + number % 9) for number in range(60)}


SLOW: dict[str, Any] = {**SETTINGS, "queries_per_passage": 4}


def job(source: Path, out: Path, **settings: Any) -> str:
    """A script that synthesizes, as a user writes it, and says how far it is."""
    return textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from lit_dpret.synthesis.writer import synthesize

        if __name__ == "__main__":
            told = lambda done, total: print(done, flush=True)
            synthesize({str(source)!r}, {MANY!r}, {str(out)!r}, progress=told, **{SLOW | settings!r})
    """)


def interrupted(script: Path, after: int, kill: bool) -> None:
    """Run the script, kill it or press control-C when it has told ``after`` times, and wait for all its processes."""
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for _ in range(after):
        assert process.stdout.readline().strip()
    if kill:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode != 0
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a worker outlived the process that it worked for")


@pytest.mark.slow
def test_two_generations_that_were_killed_and_resumed_differently_are_the_same_to_the_byte(
    source: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    found = [content(synthesize(source, MANY, tmp_path / "whole" / "set", **SLOW))]
    for name, stops in {"first": [(2, 4, True), (0, 3, False)], "second": [(0, 3, True), (2, 5, False)]}.items():
        out, script = tmp_path / name / "set", tmp_path / f"{name}.py"
        shards = 0
        for workers, after, kill in stops:
            script.write_text(job(source, out, workers=workers))
            interrupted(script, after, kill)
            now = len(list((out / "shards").glob("[0-9]*.jsonl")))
            assert shards < now < 20
            assert not (out / "queries.jsonl").exists()
            shards = now
        found.append(content(synthesize(source, MANY, out, **SLOW)))
    assert found[0] == found[1] == found[2]
