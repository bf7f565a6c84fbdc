"""Mining: the best passages of every query, in shards, gone on with after a kill, as private as the queries."""

from __future__ import annotations

import stat
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from negative_cases import PASSAGES, QUERIES, WordTowers, texts
from stand_ins import Killed

from lit_dpret.errors import ConfigurationError, StorageError
from lit_dpret.negatives import BM25Negatives, MinedSource, RowNegatives, StaticNegatives
from lit_dpret.negatives.rankings import Mined, MinedShards
from lit_dpret.privacy.modes import BatchClip, NoPrivacy
from lit_dpret.retrieval.bm25 import BM25


def mined(source: MinedSource, towers: WordTowers | None = None, **changes: Any) -> Mined:
    source.prepare(texts(**changes), towers or WordTowers(), private=True)
    return source.mined


def same(a: Mined, b: Mined) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in Mined.__dataclass_fields__)


def stores(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.npz"))


def test_bm25_mines_what_bm25_ranks_and_scores_the_answers() -> None:
    data, found = texts(), mined(BM25Negatives(depth=5))
    index = BM25(data.passages, data.passage_ids)
    assert np.array_equal(found.places, index.search(data.queries, 5).indices.numpy())
    everything = index.search(data.queries, 20)
    for i in range(8):
        ranking = dict(zip(everything.indices[i].tolist(), everything.scores[i].tolist(), strict=True))
        for place in data.positives(i):
            assert found.score_of(i, place) == pytest.approx(ranking.get(place, 0.0))


def test_static_mines_the_passages_of_highest_similarity() -> None:
    data, towers, found = texts(), WordTowers(), mined(StaticNegatives(depth=4))
    table = towers.embeddings(data.queries, "query", None) @ towers.embeddings(data.passages, "passage", None).T
    np.testing.assert_allclose(found.scores, table.topk(4).values.numpy(), atol=1e-6)
    for i in range(8):
        for place in data.positives(i):
            assert found.score_of(i, place) == pytest.approx(float(table[i, place]), abs=1e-6)
    assert np.isnan(found.score_of(0, 19))


@pytest.mark.parametrize("kind", [BM25Negatives, StaticNegatives])
@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_the_result_does_not_depend_on_the_size_of_shards_nor_on_the_disk(kind: Any, size: int, tmp_path: Path) -> None:
    plain = mined(kind(depth=7))
    assert same(plain, mined(kind(depth=7, shard_size=size, cache_dir=tmp_path)))
    assert same(plain, mined(kind(depth=7, shard_size=size)))


@pytest.mark.parametrize("kind", [BM25Negatives, StaticNegatives])
def test_after_a_kill_only_what_is_missing_is_mined(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mined(kind(depth=7))
    write, done = MinedShards.write, []

    def killed(self: MinedShards, span: range, part: Mined) -> None:
        if len(done) == 2:
            raise Killed
        done.append(span)
        write(self, span, part)

    monkeypatch.setattr(MinedShards, "write", killed)
    with pytest.raises(Killed):
        mined(kind(depth=7, shard_size=2, cache_dir=tmp_path))
    assert shards(tmp_path) == ["000000000-000000002.npz", "000000002-000000004.npz"]
    again: list[range] = []
    monkeypatch.setattr(MinedShards, "write", lambda self, span, part: again.append(span) or write(self, span, part))
    assert same(whole, mined(kind(depth=7, shard_size=3, cache_dir=tmp_path)))
    assert again == [range(4, 7), range(7, 8)]


def test_an_equal_mining_is_read_and_nothing_is_encoded(tmp_path: Path) -> None:
    first, second = WordTowers(), WordTowers()
    found = mined(StaticNegatives(cache_dir=tmp_path), first)
    assert first.asked == 28
    assert same(found, mined(StaticNegatives(cache_dir=tmp_path, per_query=3, seed=5), second))
    assert second.asked == 0, "how many are drawn, and by which coins, is not part of the mining"


@pytest.mark.parametrize(
    "change",
    [
        {"towers": WordTowers("trained")},
        {"passages": PASSAGES | {"p1": "flood"}},
        {"passages": PASSAGES | {"p20": "flood"}},
        {"queries": QUERIES | {"q0": "flood"}},
        {"depth": 3},
    ],
    ids=["weights", "a passage", "one more", "a query", "depth"],
)
def test_whatever_the_ranking_depends_on_makes_another_entry(change: dict[str, Any], tmp_path: Path) -> None:
    mined(StaticNegatives(cache_dir=tmp_path))
    towers, depth = change.pop("towers", None), change.pop("depth", 200)
    mined(StaticNegatives(cache_dir=tmp_path, depth=depth), towers, **change)
    assert len(stores(tmp_path)) == 2


def test_a_torn_shard_and_one_of_another_version_are_mined_again_and_overlaps_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version has other entries; one that came under our name is not trusted."""
    again = partial(BM25Negatives, cache_dir=tmp_path, shard_size=4)
    whole = mined(again())
    second = next(tmp_path.rglob("000000004-*.npz"))
    for content in (second.read_bytes()[:200], b""):
        second.write_bytes(content)
        assert same(whole, mined(again()))
    (folder,) = stores(tmp_path)
    store = MinedShards(tmp_path, name="bm25", key=folder.name.rpartition("-")[2], count=8, private=True)
    with monkeypatch.context() as patch:
        patch.setattr("lit_dpret.negatives.rankings.SCHEMA", "lit-dpret/mined-negatives/2")
        store.write(range(4), Mined(whole.places[:4] * 0, whole.scores[:4], *_answers(whole, 0, 4)))
    assert same(whole, mined(again()))
    store.write(range(2, 6), Mined(whole.places[2:6], whole.scores[2:6], *_answers(whole, 2, 6)))
    assert same(whole, mined(again()))


def _answers(whole: Mined, start: int, stop: int) -> tuple[Any, Any, Any]:
    first, last = whole.starts[start], whole.starts[stop]
    return whole.starts[start : stop + 1] - first, whole.answer_places[first:last], whole.answer_scores[first:last]


def test_what_is_kept_of_private_queries_says_so_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    mined(StaticNegatives(cache_dir=tmp_path))
    (folder,) = stores(tmp_path)
    assert folder.name.startswith("private-static-") and "as private as the" in (folder / "README.txt").read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.npz")} == {0o600}
    assert {path.suffix for path in folder.iterdir()} == {".npz", ".txt"}, "embeddings are gone"


def test_nobody_else_can_list_the_folder_whose_names_are_hashes_of_private_texts(tmp_path: Path) -> None:
    """Who knows all queries but one could tell by the name whether a guess of that one is right."""
    cache = tmp_path / "run" / "private" / "negatives"
    mined(StaticNegatives(cache_dir=cache))
    (folder,) = stores(cache)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, cache, cache.parent)} == {0o700}
    folder.chmod(0o755)
    mined(StaticNegatives(cache_dir=cache))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_private_mode_keeps_rankings_in_a_private_place_alone(tmp_path: Path) -> None:
    mode = BatchClip(eps=3.0, delta=1e-3, max_grad_norm=0.1)
    with pytest.raises(ConfigurationError, match=r"model\.negatives\.bm25\.cache_dir=.* has a part 'private'"):
        RowNegatives([BM25Negatives(cache_dir=tmp_path / "model")], mode)
    RowNegatives([BM25Negatives(cache_dir=tmp_path / "private" / "negatives")], mode)
    RowNegatives([BM25Negatives(cache_dir=tmp_path / "model")], NoPrivacy())


def test_what_is_told_of_mining_is_the_same_for_any_number_of_private_queries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a terminal, where each shard rewrites the line: 50 % after a shard of 4 would mean 8 queries."""
    monkeypatch.setattr("lit_dpret.progress._clock", lambda seconds: "0:00")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    told = []
    for count in (8, 7, 1):
        mined(BM25Negatives(shard_size=4), queries=dict(list(QUERIES.items())[:count]))
        told.append(capsys.readouterr().err)
    assert "mining bm25 negatives: 100%" in told[0] and len(set(told)) == 1


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Choose another cache_dir"):
        mined(BM25Negatives(cache_dir=tmp_path / "file" / "private"))
