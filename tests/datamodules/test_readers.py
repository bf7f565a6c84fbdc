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
        write("y.csv.gz", gzip.compress(b'_id,text\na,"one, two"\nb,"the ""third""\xe2\x80\xa8word"\n')),
        parquet(tmp_path / "x.parquet", RECORDS),
    ]
    for path in files:
        assert [record for _, record in RecordFile(path)] == RECORDS, path.name


def test_line_numbers_count_blank_lines_and_lines_inside_quotes(write: Write) -> None:
    assert [n for n, _ in RecordFile(write("x.jsonl", '{"a": 1}\n\n{"a": 2}'))] == [1, 3]
    assert [n for n, _ in RecordFile(write("x.csv", 'a,b\n1,"two\nlines"\n3,4\n'))] == [2, 4]


def test_a_quote_mark_in_a_tsv_file_is_a_character_like_any_other(write: Write) -> None:
    path = write("x.tsv", 'a\tb\n"low\twater"\n"\t\n')
    assert [record for _, record in RecordFile(path)] == [{"a": '"low', "b": 'water"'}, {"a": '"', "b": ""}]


def test_a_byte_order_mark_is_not_part_of_the_first_key(write: Write) -> None:
    assert [record for _, record in RecordFile(write("x.tsv", "\ufeffa\tb\r\n1\t2\r\n"))] == [{"a": "1", "b": "2"}]


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


def test_a_line_that_ends_early_is_told_with_the_column_of_its_end(write: Write) -> None:
    with pytest.raises(DataError, match="column 6"):
        list(RecordFile(write("x.jsonl", '{"a": \n{"a": 1}\n')))


def test_a_gzip_file_under_a_plain_name_is_recognised(write: Write) -> None:
    with pytest.raises(DataError, match=r"compressed with gzip; rename it to x\.jsonl\.gz"):
        list(RecordFile(write("x.jsonl", gzip.compress(b'{"a": 1}\n'))))


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


def test_a_column_named_twice_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match="column 'a' twice"):
        list(RecordFile(write("x.csv", "a,a\n1,2\n")))


def test_a_quote_that_never_ends_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match=r"line 2: not a readable table row"):
        list(RecordFile(write("x.csv", 'a,b\n1,"two\n3,4\n')))


def test_a_text_longer_than_the_csv_module_likes_is_read(write: Write) -> None:
    text = "x" * 200_000
    assert [record for _, record in RecordFile(write("x.tsv", f"a\tb\n1\t{text}\n"))] == [{"a": "1", "b": text}]


def test_a_file_is_not_read_again_for_every_repeated_id(write: Write) -> None:
    file = RecordFile(write("a.jsonl", '{"_id": "a"}\n' * 100), complain=Problems())
    found = [file.find(number, (("_id",), "a")) for number in range(2, 60)]
    assert found[:20] == [1] * 20 and set(found[20:]) == {0}
    assert file.place(0) == "an earlier one"
