"""Embeddings that are written for hours: killed anywhere, gone on with, and the same bytes in the end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TEXTS, WORDS, tiny_bert, tiny_tokenizer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.bulk import OneSide, ahead
from lit_dpret.encoders.embedding_cache import Rows, encode_to_file, mapped
from lit_dpret.errors import ResumeError

MANY = [f"{one} {two}" for one in WORDS[:12] for two in WORDS[:12]] + TEXTS * 3
ROWS = Rows(dtype=torch.float32, batch_size=2, buffer_size=60)
FACTS = {"model": "tiny"}


def tiny_encoder() -> TextEncoder:
    return TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=6, passage_max_length=10)).eval()


class Stop(Exception):
    """In the place of a kill."""


def write(path: Path, stop_after: int | None = None, **changed: Any) -> int:
    """Write MANY, and raise after so many batches; returns how many batches were computed."""
    side = OneSide(tiny_encoder(), "passage", None)
    embed, batches = side.embed, 0

    def counted(ids: Any) -> Any:
        nonlocal batches
        if stop_after is not None and batches >= stop_after:
            raise Stop
        batches += 1
        return embed(ids)

    side.embed = counted  # type: ignore[method-assign]
    encode_to_file(side, MANY, path, **{"rows": ROWS, "facts": FACTS, **changed})
    return batches


def test_a_file_holds_the_rows_of_encode_in_the_order_of_the_texts(tmp_path: Path) -> None:
    write(tmp_path / "e")
    found = mapped(tmp_path / "e", len(MANY), 16, torch.float32)
    assert found is not None
    assert torch.allclose(found, tiny_encoder().encode(MANY, "passage"), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    assert mapped(tmp_path / "e", len(MANY) + 1, 16, torch.float32) is None
    write(tmp_path / "half", rows=replace(ROWS, dtype=torch.bfloat16))
    half = mapped(tmp_path / "half", len(MANY), 16, torch.bfloat16)
    assert half is not None and torch.equal(half, found.bfloat16())


@pytest.mark.parametrize("stop_after", [0, 17, 60])
def test_a_file_that_was_stopped_and_gone_on_with_has_the_same_bytes_for_less_work(
    stop_after: int, tmp_path: Path
) -> None:
    whole = write(tmp_path / "whole")
    with pytest.raises(Stop):
        write(tmp_path / "part", stop_after)
    assert not (tmp_path / "part").exists()
    assert write(tmp_path / "part") <= whole - stop_after + 15, "at most the unfinished group is computed twice"
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


def test_rows_that_were_damaged_on_the_disk_are_computed_again(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    with pytest.raises(Stop):
        write(tmp_path / "part", 50)
    partial = tmp_path / "part.partial"
    data = bytearray(partial.read_bytes())
    data[64 * 3 + 1] ^= 1  # in a window that was finished
    data[64 * 62 : 64 * 115] = bytes(64 * 53)  # in one that was not
    partial.write_bytes(data)
    with (tmp_path / "part.journal").open("ab") as file:
        file.write(b'{"window": 60, "gro')  # a torn line
    write(tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


def test_other_settings_are_not_mixed_into_a_file_that_was_begun(tmp_path: Path) -> None:
    fours = replace(ROWS, batch_size=4)
    with pytest.raises(Stop):
        write(tmp_path / "e", 20)
    with pytest.raises(ResumeError, match="begun with another batch_size, model"):
        write(tmp_path / "e", facts={"model": "other"}, rows=fours)
    write(tmp_path / "other", rows=fours)
    write(tmp_path / "e", rows=fours, restart=True)
    assert (tmp_path / "e").read_bytes() == (tmp_path / "other").read_bytes()


KILLED = """
import os, signal, sys
sys.path[:0] = {folders!r}
import test_embedding_file as case
from pathlib import Path
path, after = Path(sys.argv[1]), int(sys.argv[2])
side = case.OneSide(case.tiny_encoder(), "passage", None)
embed, left = side.embed, [after]
def counted(ids):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return embed(ids)
side.embed = counted
case.encode_to_file(side, case.MANY, path, case.ROWS, facts=case.FACTS)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    program = KILLED.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    write(tmp_path / "whole")
    for after in (5, 40, 0):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "part"), str(after)], check=False)
        assert done.returncode == (-9 if after else 0)
        if after:
            json.loads((tmp_path / "part.journal").read_text().splitlines()[0])
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


def test_items_made_ahead_come_in_order_and_errors_where_they_arose() -> None:
    def breaks() -> Any:
        yield from range(3)
        raise ValueError("here")

    items = ahead(breaks())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="here"):
        next(items)


def test_one_item_is_made_while_another_is_in_use_and_no_more_after_giving_up() -> None:
    made, second = [], threading.Event()

    def make() -> Any:
        for i in range(100):
            made.append(i)
            if i == 1:
                second.set()
            yield i

    items = ahead(make())
    assert next(items) == 0
    assert second.wait(10), "the second item is made while the first is in use"
    items.close()  # type: ignore[attr-defined]
    assert len(made) < 10
