"""Interrupted, shot, damaged, resumed: the same bytes, or a refusal that names what changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import PASSAGES, SETTINGS, content, generator, lines, write_parent_card

from lit_dpret.errors import ResumeError
from lit_dpret.modules.generator_folder import load_generator
from lit_dpret.synthesis import writer
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.sampler import Decoding
from lit_dpret.synthesis.writer import synthesize


class Stop:
    """Presses control-C after some groups."""

    def __init__(self, after: int) -> None:
        self.calls = -1
        self.after = after

    def __call__(self, done: int, total: int) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise KeyboardInterrupt


# -- sameness --------------------------------------------------------------------------------


def test_an_interrupted_run_writes_the_same_bytes(whole: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    for after in (1, 2, 0):
        with pytest.raises(KeyboardInterrupt):
            synthesize(source, PASSAGES, out, progress=Stop(after), **SETTINGS)
        assert not (out / "queries.jsonl").exists()
    seen: list[tuple[int, int]] = []
    synthesize(source, PASSAGES, out, progress=lambda done, total: seen.append((done, total)), **SETTINGS)
    assert seen == [(8, 11), (11, 11)]
    assert content(out) == content(whole)


def test_a_finished_set_is_left_as_it_is_in_whatever_order_passages_are_given(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    before, turned = content(whole), dict(reversed(PASSAGES.items()))
    stamps = {path: path.stat().st_mtime_ns for path in (whole / "shards").iterdir()}
    synthesize(source, turned, whole, **SETTINGS)
    assert content(whole) == before
    assert {path: path.stat().st_mtime_ns for path in (whole / "shards").iterdir()} == stamps
    assert content(synthesize(source, turned, tmp_path / "set", **SETTINGS)) == before


def test_the_queries_of_a_draw_do_not_depend_on_how_many_draws_there_are(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    def drawn(folder: Path) -> dict[tuple[str, int], tuple[str, float]]:
        records = [record for shard in sorted((folder / "shards").iterdir()) for record in lines(shard)]
        return {(r["passage_id"], r["draw"]): (r["text"], r["log_prob"]) for r in records}

    one = drawn(synthesize(source, PASSAGES, tmp_path / "set", **SETTINGS | {"queries_per_passage": 1}))
    three = drawn(whole)
    assert len(one) == 11 and len(three) == 33
    assert all(three[key] == value for key, value in one.items())


def test_group_size_and_company_change_no_query(whole: Path, source: Path) -> None:
    """Beyond the last bits of the scores: the numbers are a query's own, whoever stands beside it."""
    loaded = load_generator(source)
    records = [record for shard in sorted((whole / "shards").iterdir()) for record in lines(shard)]
    theirs = {(record["passage_id"], record["draw"]): record["text"] for record in records}
    decoding = Decoding(max_new_tokens=loaded.contract.max_query_length)
    ours = draw_group(loaded, PASSAGES, [2, 0], 5, decoding)
    assert {(query.passage_id, query.draw) for query in ours} == {(name, d) for name in PASSAGES for d in (0, 2)}
    assert all(theirs[query.passage_id, query.draw] == query.text for query in ours)
    assert len({query.text for query in ours}) > 11


# -- damage ----------------------------------------------------------------------------------


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_letter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [cut_in_half, flip_a_letter, os.unlink])
def test_a_damaged_shard_is_made_again(whole: Path, source: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    out = tmp_path / "set"
    shutil.copytree(whole, out)
    harm(out / "shards" / "000001.jsonl")
    seen: list[tuple[int, int]] = []
    synthesize(source, PASSAGES, out, progress=lambda done, total: seen.append((done, total)), **SETTINGS)
    assert seen == [(8, 11), (11, 11)]
    assert content(out) == content(whole)


def test_a_shard_that_nobody_vouched_for_is_made_again(whole: Path, source: Path, tmp_path: Path) -> None:
    """Killed after the shard was renamed and before the manifest said so, or in mid-line."""
    out = tmp_path / "set"
    shutil.copytree(whole, out)
    manifest = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (out / "manifest.jsonl").write_bytes(b"".join(manifest[:3]) + manifest[3][:20])
    (out / "shards" / ".000003.jsonl.77.tmp").write_text("{")
    synthesize(source, PASSAGES, out, **SETTINGS)
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
    with pytest.raises(ResumeError, match="passages="):
        synthesize(source, PASSAGES | {"p1": "other words"}, whole, **SETTINGS)
    other = generator(seed=9).save_model(tmp_path / "g")
    write_parent_card(other)
    with pytest.raises(ResumeError, match="generator="):
        synthesize(other, PASSAGES, whole, **SETTINGS)
    out = tmp_path / "set"
    shutil.copytree(whole / "shards", out / "shards")
    with pytest.raises(ResumeError, match="no manifest"):
        synthesize(source, PASSAGES, out, **SETTINGS)
    monkeypatch.setattr(writer, "version_of", lambda package: f"{package} of another year")  # other last bits
    with pytest.raises(ResumeError, match="cannot go on with torch=torch of another year"):
        synthesize(source, PASSAGES, whole, **SETTINGS)
