"""However records are divided into files, and wherever these lie, they are the same data."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lit_dpret.datamodules import HuggingFaceDataModule, PairsDataModule, shards
from lit_dpret.datamodules.cleaning import check_clean
from lit_dpret.datamodules.records import Problems
from lit_dpret.datamodules.shards import find_shards, open_records
from lit_dpret.errors import ConfigurationError, DataError, StorageError

KEY = bytes(range(32))
PAIRS = [{"query": f'ask "{i}", please', "passage": f"answer {i % 5}", "user_id": f"u{i % 3}"} for i in range(12)]
PASSAGES = [{"_id": f"p{i}", "text": f"passage {i}"} for i in range(11)]
DIVIDED = [(0, 5), (5, 6), (6, 12)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write records in the format of the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if ".jsonl" in path.suffixes:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
    elif path.suffix == ".csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        text = "".join(",".join('"' + value.replace('"', '""') + '"' for value in line) + "\n" for line in lines)
    else:
        text = "".join("\t".join(line) + "\n" for line in [list(rows[0]), *(row.values() for row in rows)])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def module(cache: Path, **settings: Any) -> PairsDataModule:
    return PairsDataModule(expected_batch_size=4, cache_dir=str(cache / "cache"), **settings)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".tsv", ".parquet"])
def test_a_log_in_one_file_in_shards_or_at_a_url_has_the_same_queries_and_the_same_fingerprint(
    suffix: str, tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(tmp_path / f"log{suffix}", PAIRS)
    for number, (start, stop) in enumerate(DIVIDED):
        written(tmp_path / "log" / f"part-{number}{suffix}", PAIRS[start:stop])
    (tmp_path / "log" / "_SUCCESS").touch()
    bucket.put(str(tmp_path / "log"), "/b/log", recursive=True)
    bucket.put(str(whole), f"/b/log{suffix}")
    monkeypatch.chdir(tmp_path)
    given = [whole, "log", f"log/*{suffix}", "log/part-?*", (tmp_path / "log").as_uri(), whole.as_uri()]
    given += [f"memory://b/log/*{suffix}", "memory://b/log", f"memory://b/log{suffix}"]
    found = [module(tmp_path, pairs=one) for one in given]
    assert found[0].collection.queries == {
        f"row-{i + (2 if suffix in ('.csv', '.tsv') else 1)}": row["query"] for i, row in enumerate(PAIRS)
    }
    for one in found:
        assert list(one.collection.queries.items()) == list(found[0].collection.queries.items())
        assert one.data_fingerprint(KEY) == found[0].data_fingerprint(KEY), one.pairs
        assert one.file_columns() == {"pairs": ("query", "passage", "user_id")}
    assert module(tmp_path, pairs=written(tmp_path / f"x{suffix}", PAIRS[1:])).data_fingerprint(KEY) != found[
        0
    ].data_fingerprint(KEY)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_all_parts_of_a_set_may_be_shards_also_of_a_corpus_that_is_read_from_disk(
    in_memory: bool, suffix: str, tmp_path: Path, bucket: MemoryFileSystem
) -> None:
    queries = [{"_id": f"q{i}", "text": f"ask {i}"} for i in range(6)]
    qrels = [{"query-id": f"q{i}", "corpus-id": f"p{i}", "score": 1} for i in range(6)]
    beir = tmp_path / "beir"
    for name, rows in (("corpus", PASSAGES), ("queries", queries)):
        written(tmp_path / f"{name}{suffix}", rows)
        written(beir / name / f"0{suffix}", rows[:4])
        written(beir / name / f"1{suffix}", rows[4:])
    train = written(beir / "qrels" / "train.jsonl", qrels)
    bucket.put(str(beir), "/b", recursive=True)
    one = module(tmp_path, in_memory=in_memory, qrels={"train": train},
                 **{name: tmp_path / f"{name}{suffix}" for name in ("corpus", "queries")})  # fmt: skip
    at = {name: f"memory://b/{name}/*{suffix}" for name in ("corpus", "queries")}
    far = module(tmp_path, in_memory=in_memory, qrels={"train": "memory://b/qrels/train.jsonl"}, **at)
    near = module(tmp_path, in_memory=in_memory, folder=beir)
    for other in (far, near):
        other.prepare_data()
        assert dict(other.collection.passages) == dict(one.collection.passages)
        assert list(other.collection.passages) == [row["_id"] for row in PASSAGES]
        assert other.data_fingerprint(KEY) == one.data_fingerprint(KEY)
    assert len(list((tmp_path / "cache").glob("*.sqlite"))) == (0 if in_memory else 3)


def test_a_problem_is_located_by_shard_and_row_in_it(tmp_path: Path) -> None:
    rows = [{**row, "query_id": f"q{i}"} for i, row in enumerate(PAIRS)]
    for number, (start, stop) in enumerate(DIVIDED):
        written(tmp_path / "log" / f"{number}.csv", rows[start:stop])
    written(tmp_path / "log" / "3.csv", [rows[5], {**rows[6], "query": " "}])
    problems = Problems()
    module(tmp_path, pairs=tmp_path / "log").read_collection(problems)
    repeated, empty = problems.found
    assert f"{tmp_path}/log/3.csv line 2: query 'q5'" in str(repeated)
    assert f"line 2 of {tmp_path}/log/1.csv" in str(repeated)
    assert str(empty).startswith(f"{tmp_path}/log/3.csv line 3: ") and "ask" not in str(empty)
    assert [problem.record for problem in problems.found] == [(f"{tmp_path}/log/3.csv", line) for line in (2, 3)]
    (tmp_path / "log" / "1.csv").write_text('query,passage,query_id\na,b\n"open')
    with pytest.raises(DataError, match=r"log/1\.csv line 2"):
        module(tmp_path, pairs=f"{tmp_path}/log/[01].csv").read_collection()
    written(tmp_path / "corpus" / "a.jsonl", PASSAGES)
    written(tmp_path / "corpus" / "b.jsonl", PASSAGES[3:4])
    with pytest.raises(DataError, match=r"b\.jsonl line 1: id 'p3' was already given on line 4 of .*a\.jsonl"):
        module(tmp_path, pairs=tmp_path / "log", corpus=tmp_path / "corpus", in_memory=False).read_collection()


@pytest.mark.parametrize(
    ("given", "reason"),
    [("log/*.parquet", "no file"), ("log/*.jsonl", "several formats"), ("log", "several formats"), ("empty", "no file"),
     ("nested", "the folder part"), ("nowhere", "exist"), ("log/*.txt", "format")],
)  # fmt: skip
@pytest.mark.parametrize("place", ["", "memory://"])
def test_what_is_not_one_sequence_of_records_is_refused_with_the_setting(
    given: str, reason: str, place: str, tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("log/a.jsonl", "log/b.jsonl.gz", "log/c.jsonl", "nested/a.jsonl", "nested/part/b.jsonl"):
        written(tmp_path / name, PAIRS)
    (tmp_path / "log" / "c.jsonl").rename(tmp_path / "log" / "x.csv.jsonl")
    (tmp_path / "log" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.md").touch()
    for name in ("log", "nested", "empty"):
        bucket.put(str(tmp_path / name), f"/{name}", recursive=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=reason) as refused:
        module(tmp_path, pairs=f"{place}{given}").read_collection()
    assert given.split("*")[0] in str(refused.value) and "datamodule.pairs" in str(refused.value)


def test_the_copy_of_a_private_log_is_made_once_and_only_its_owner_can_read_it(
    tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(str(written(tmp_path / "log.jsonl", PAIRS)), "/b/log.jsonl")
    (tmp_path / "cache").mkdir(mode=0o755)
    (file,) = find_shards("memory://b/log.jsonl", cache_dir=tmp_path / "cache").files
    assert file.is_relative_to(tmp_path / "cache") and file.read_bytes() == (tmp_path / "log.jsonl").read_bytes()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", lambda *_, **__: pytest.fail("fetched again"))
        assert find_shards("memory://b/log.jsonl", cache_dir=tmp_path / "cache").files == (file,)
    file.write_bytes(b"")  # damaged
    assert find_shards("memory://b/log.jsonl", cache_dir=tmp_path / "cache").size
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert find_shards("memory://b/log.jsonl").files[0].is_relative_to(tmp_path / "home" / "lit-dpret")


def test_a_changed_object_is_fetched_again(tmp_path: Path, bucket: MemoryFileSystem) -> None:
    for letter in "ab":  # of the same length
        bucket.pipe("/b/log.jsonl", f'{{"query": "{letter}", "passage": "p"}}\n'.encode())
        assert list(module(tmp_path, pairs="memory://b/log.jsonl").collection.queries.values()) == [letter]


@pytest.mark.parametrize("kind", ["cut", "broken", "changed", "killed"])
def test_half_a_download_is_refused_and_leaves_nothing_that_passes_for_the_file(
    kind: str, tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(str(written(tmp_path / "log.jsonl", PAIRS)), "/b/log.jsonl")
    opened = MemoryFileSystem.open

    class Stream:
        def __init__(self, path: str) -> None:
            self.path, self.pieces = path, 2

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, size: int) -> bytes:
            self.pieces -= 1
            if self.pieces < 1:
                if kind == "broken":
                    raise ConnectionResetError("connection reset")
                if kind == "killed":
                    raise KeyboardInterrupt
                return b""
            with opened(bucket, self.path, "rb") as file:
                content: bytes = file.read()
            if kind == "changed":
                bucket.pipe(self.path, content)
                return content
            return content[:-10]

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", lambda self, path, *_: Stream(path))
        with pytest.raises(KeyboardInterrupt if kind == "killed" else DataError) as refused:
            module(tmp_path, pairs="memory://b/log.jsonl").read_collection()
    if kind != "killed":
        assert "datamodule.pairs=memory://" in str(refused.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(module(tmp_path, pairs="memory://b/log.jsonl").collection.queries) == len(PAIRS)


def test_drafts_that_a_killed_process_left_are_removed(tmp_path: Path, bucket: MemoryFileSystem) -> None:
    bucket.put(str(written(tmp_path / "log.jsonl", PAIRS)), "/b/log.jsonl")
    (file,) = find_shards("memory://b/log.jsonl", cache_dir=tmp_path).files
    file.unlink()
    drafts = [file.with_name(f".log.jsonl.{number}.tmp") for number in (1, 2)]
    for draft in drafts:
        draft.write_text("half")
    os.utime(drafts[0], (0, 0))
    find_shards("memory://b/log.jsonl", cache_dir=tmp_path)
    assert [draft.exists() for draft in drafts] == [False, True]


@pytest.mark.parametrize("note", ["privacy_card.json", "division.json"])
def test_files_whose_card_or_note_would_be_overlooked_are_refused(
    note: str, tmp_path: Path, bucket: MemoryFileSystem
) -> None:
    written(tmp_path / "log" / "pairs" / "a.jsonl", PAIRS)
    written(tmp_path / "corpus.jsonl", [{"_id": f"p{i}", "text": f"answer {i}"} for i in range(5)])
    (tmp_path / "log" / note).write_text("{}")
    bucket.put(str(tmp_path / "log"), "/b", recursive=True)
    for given in ("memory://b/pairs/a.jsonl", "memory://b/pairs", f"{tmp_path}/log/pairs/*.jsonl"):
        with pytest.raises(ConfigurationError, match=rf"datamodule\.pairs=.*{note}"):
            module(tmp_path, pairs=given).read_collection()
    (tmp_path / "log" / note).unlink()
    (tmp_path / note).write_text("{}")  # beside a public corpus
    module(tmp_path, pairs=f"{tmp_path}/log/pairs/*.jsonl", corpus=f"{tmp_path}/corpus*.jsonl").read_collection()


def test_a_glob_matches_links_and_a_note_below_a_folder_that_is_read_is_found(tmp_path: Path) -> None:
    file = written(tmp_path / "log" / "part" / "train.jsonl", PAIRS)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.jsonl").symlink_to(file)
    assert len(module(tmp_path, pairs=f"{tmp_path}/links/*.jsonl").collection.queries) == len(PAIRS)
    (file.parent / "division.json").write_text('{"by": "text"}')
    with pytest.raises(ConfigurationError, match=r"datamodule\.pairs=.*division\.json"):
        module(tmp_path, pairs=f"{tmp_path}/links/*.jsonl").prepare_data()
    assert HuggingFaceDataModule(path=str(tmp_path / "log"), expected_batch_size=4).assumptions()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server of ``tmp_path/web``, and the paths that it answers with 503."""
    down: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def send_head(self) -> Any:
            if self.path in down:
                return self.send_error(503)
            return super().send_head()

        def send_header(self, keyword: str, value: str) -> None:
            if keyword != "Last-Modified":
                super().send_header(keyword, value)

        def log_message(self, *_: Any) -> None: ...

    (tmp_path / "web").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web"))) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", down
        http.shutdown()


@pytest.mark.parametrize("note", ["privacy_card.json", "division.json"])
def test_a_card_or_note_on_a_web_server_is_not_overlooked(
    note: str, tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    web, down = server
    written(tmp_path / "web" / "set" / "pairs" / "a.jsonl", PAIRS)
    (tmp_path / "web" / "set" / note).write_text("{}")
    for given in (f"{web}/set/pairs/a.jsonl", f"{web}/set/pairs/a.jsonl?token=a/b"):
        with pytest.raises(ConfigurationError, match=rf"datamodule\.pairs=.*{note}"):
            module(tmp_path, pairs=given).read_collection()
    (tmp_path / "web" / "set" / note).unlink()
    down.append(f"/set/{note}")
    with pytest.raises(DataError, match=rf"datamodule\.pairs=.*{note}.*503"):
        module(tmp_path, pairs=f"{web}/set/pairs/a.jsonl").read_collection()
    down.clear()
    assert len(module(tmp_path, pairs=f"{web}/set/pairs/a.jsonl").collection.queries) == len(PAIRS)


def test_a_file_that_its_server_does_not_date_is_copied_each_time(
    tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    file = written(tmp_path / "web" / "log.jsonl", PAIRS)
    for word in ("answer", "ANSWER"):
        file.write_text(file.read_text().replace("answer", word))
        (copy,) = find_shards(f"{server[0]}/log.jsonl", cache_dir=tmp_path).files
        assert copy.read_bytes() == file.read_bytes()


def test_a_note_that_cannot_be_looked_for_and_an_archive_are_refused(
    tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Any, path: str, *_: Any, **__: Any) -> bytes:
        raise PermissionError("Forbidden")

    bucket.put(str(written(tmp_path / "log.jsonl", PAIRS)), "/b/log.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", denied)
        with pytest.raises(DataError, match=r"datamodule\.pairs=.*privacy_card\.json.*Forbidden"):
            module(tmp_path, pairs="memory://b/log.jsonl").read_collection()
    shutil.make_archive(str(tmp_path / "log"), "zip", tmp_path, "log.jsonl")
    with pytest.raises(ConfigurationError, match=r"datamodule\.pairs=zip://"):
        module(tmp_path, pairs=f"zip://log.jsonl::{tmp_path}/log.zip").read_collection()


def test_a_missing_library_an_unknown_protocol_and_a_folder_of_parts_name_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.core, "url_to_fs", missing)
        written(tmp_path / "log.jsonl", PAIRS)
        with pytest.raises(ConfigurationError, match=r"datamodule\.corpus=s3://b/\*\.parquet .*s3fs"):
            module(tmp_path, pairs=tmp_path / "log.jsonl", corpus="s3://b/*.parquet").prepare_data()
    with pytest.raises(DataError, match=r"datamodule\.pairs=nothing://b"):
        module(tmp_path, pairs="nothing://b").prepare_data()
    with pytest.raises(ConfigurationError, match=r"datamodule\.folder=s3://b.*datamodule\.corpus"):
        module(tmp_path, folder="s3://b").prepare_data()
    with pytest.raises(DataError, match=r"datamodule\.qrels=s3://b/qrels "):
        module(tmp_path, corpus="c", queries="q", qrels="s3://b/qrels").prepare_data()


def test_no_clean_copy_is_made_of_shards(tmp_path: Path) -> None:
    for part in "ab":
        written(tmp_path / "log" / f"{part}.jsonl", PAIRS)
    for given in ("memory://b/log.jsonl", tmp_path / "log"):
        with pytest.raises(ConfigurationError, match=r"task\.write_clean=.*datamodule\.pairs="):
            check_clean(given, tmp_path / "clean.jsonl")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, bucket: MemoryFileSystem) -> None:
    bucket.put(str(written(tmp_path / "log.jsonl", PAIRS)), "/b/log.jsonl")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match=r"datamodule\.cache_dir"):
        module(tmp_path, pairs="memory://b/log.jsonl").read_collection()


def test_a_large_file_is_fetched_in_pieces_with_a_progress_line(
    tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put(str(written(tmp_path / "log.jsonl", PAIRS)), "/b/log.jsonl")
    monkeypatch.setattr(shards, "_PIECE", 100)
    monkeypatch.setattr(shards, "_SILENT", 0.0)
    assert len(list(open_records(find_shards("memory://b/log.jsonl", cache_dir=tmp_path)))) == len(PAIRS)
    assert "fetching" in capsys.readouterr().err
