from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules.readers import Problems, RecordFile
from lit_dpret.errors import ConfigurationError, DataError

Write = Callable[..., Path]
RECORDS = [{"_id": "a", "text": "one, two"}, {"_id": "b", "text": 'the "third"\u2028word'}]


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor().compress(content)
    return packed


def parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), path)
    return path


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_every_format_gives_the_same_records(write: Write, tmp_path: Path) -> None:
    jsonl = write("x.jsonl", RECORDS)
    files = [
        jsonl,
        write("y.jsonl.gz", gzip.compress(jsonl.read_bytes())),
        write("z.jsonl.zst", zstd(jsonl.read_bytes())),
        write("x.tsv", '_id\ttext\na\tone, two\nb\tthe "third"\u2028word\n'),
        write("x.csv", '_id,text\na,"one, two"\nb,"the ""third""\u2028word"\n'),
        write("y.csv.gz", gzip.compress(b'_id,text\na,"one, two"\nb,"the ""third""\xe2\x80\xa8word"\n', mtime=0)),
        parquet(tmp_path / "x.parquet", RECORDS),
    ]
    for path in files:
        assert [record for _, record in RecordFile(path)] == RECORDS, path.name


BOM, LONG = "\ufeff", "x" * 200_000


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.tsv", 'a\tb\n"low\twater"\n"\t\n', [(2, {"a": '"low', "b": 'water"'}), (3, {"a": '"', "b": ""})]),
        ("x.tsv", BOM + "a\tb\r\n1\t2\r\n", [(2, {"a": "1", "b": "2"})]),
        ("x.tsv", f"a\tb\n1\t{LONG}\n", [(2, {"a": "1", "b": LONG})]),  # longer than the csv module likes
        ("x.csv", 'a,b\n1,"two\nlines"\n3,4\n', [(2, {"a": "1", "b": "two\nlines"}), (4, {"a": "3", "b": "4"})]),
        ("x.jsonl", '{"a": 1}\n\n{"a": 2}', [(1, {"a": 1}), (3, {"a": 2})]),
    ],
    ids=["quote marks of a TSV", "byte order mark", "long text", "lines inside quotes", "blank lines"],
)
def test_records_and_their_lines_are_read_as_they_stand(
    name: str, content: str, expected: list[Any], write: Write
) -> None:
    assert list(RecordFile(write(name, content))) == expected


def test_several_zstd_frames_are_one_file(write: Write) -> None:
    path = write("x.jsonl.zst", zstd(b'{"a": 1}\n') + zstd(b'{"a": 2}\n'))
    assert [record for _, record in RecordFile(path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": secret}', "malformed JSON"),
        ('{"a": "secret"', "malformed JSON"),
        ('["secret"]', "a list"),
        ("3", "a number"),
        ("[" * 100_000, "malformed JSON"),
    ],
)
def test_malformed_jsonl_is_refused_with_its_line_and_without_its_text(write: Write, line: str, reason: str) -> None:
    path = write("x.jsonl", '{"a": 1}\n\n' + line + "\n")
    with pytest.raises(DataError) as error:
        list(RecordFile(path))
    assert f"{path} line 3: " in one_line(error) and reason in str(error.value)
    assert "secret" not in str(error.value)


def test_a_wrong_or_cut_zstd_file_is_refused(write: Write) -> None:
    whole = zstd(b"".join(b'{"a": %d}\n' % (i * i) for i in range(50_000)))
    for packed in (b"not zstd at all", whole[: len(whole) // 2]):
        with pytest.raises(DataError, match="not a readable zstd file"):
            list(RecordFile(write("x.jsonl.zst", packed)))


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "x.parquet"), ("zstandard", "x.jsonl.zst")])
def test_a_format_whose_package_is_missing_names_the_pip_command(
    write: Write, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=f"pip install {package}"):
        list(RecordFile(write(name, b"x")))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.jsonl", b'{"a": \n{"a": 1}\n', "column 6"),  # where the line ends too early
        ("x.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), r"compressed with gzip; rename it to x\.jsonl\.gz"),
        ("x.csv", b"a,a\n1,2\n", "column 'a' twice"),
        ("x.csv", b'a,b\n1,"two\n3,4\n', "line 2: not a readable table row"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name: str, content: bytes, reason: str, write: Write) -> None:
    with pytest.raises(DataError, match=reason):
        list(RecordFile(write(name, content)))


def test_a_file_is_not_read_again_for_every_repeated_id(write: Write) -> None:
    file = RecordFile(write("a.jsonl", '{"_id": "a"}\n' * 100), complain=Problems())
    found = [file.find(number, (("_id",), "a")) for number in range(2, 60)]
    assert found[:20] == [1] * 20 and set(found[20:]) == {0}
    assert file.place(0) == "an earlier one"
