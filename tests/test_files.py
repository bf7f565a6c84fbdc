"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planned_sweeps import trial_parts
from tiny_generator import generator
from tiny_tasks import open_to_others, parts, retriever

from lit_dpret.cards.file import read_card
from lit_dpret.datamodules.layouts import folder_parts
from lit_dpret.encoders.st_folder import GENERATOR_CONTRACT, read_folder
from lit_dpret.errors import DataError, LitDpretError, StorageError
from lit_dpret.files import write_whole
from lit_dpret.modules.embedding_trainer import save_net
from lit_dpret.modules.generator_folder import read_contract
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import Evaluate, Fit
from lit_dpret.tasks.index_folder import MANIFEST, Encoding, IndexFolder, encode_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("content", ["größer\n", "größer\n".encode()])
def test_a_text_is_written_as_utf_8_and_folders_are_made(tmp_path: Path, content: str | bytes) -> None:
    path = write_whole(tmp_path / "new" / "folder" / "file.txt", content)
    assert path.read_bytes() == "größer\n".encode()
    assert [one.name for one in path.parent.iterdir()] == ["file.txt"]


def test_only_its_owner_may_read_a_private_file_whatever_stood_there_before(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    path.chmod(0o644)
    draft = tmp_path / f".file.txt.{os.getpid()}.tmp"
    draft.write_text("left behind")
    draft.chmod(0o666)
    assert mode(write_whole(path, "new", owner_only=True)) == 0o600
    assert mode(write_whole(tmp_path / "folder" / "file.txt", "new", owner_only=True).parent) == 0o700
    assert path.read_text() == "new"


def test_other_files_get_the_mode_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    assert mode(write_whole(tmp_path / "file.txt", "text")) == mode(tmp_path / "usual")


def test_a_draft_is_private_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (seen.append(mode(source)), replace(source, target)))
    write_whole(tmp_path / "file.txt", "text", owner_only=True)
    assert seen == [0o600]


def test_a_write_that_fails_leaves_what_was_there_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_whole(tmp_path / "file.txt", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"file\.txt cannot be written: No space left on device\. What was mined"):
        write_whole(path, "new", advice="What was mined is kept.")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_what_is_handed_on_has_the_mode_of_new_files_and_what_is_private_is_its_owners(
    umask: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        generator(seed=0).save_model(tmp_path / "generator")
        retriever(privacy=NoPrivacy()).save_model(tmp_path / "retriever")
        save_net(torch.nn.Linear(2, 2), tmp_path / "net")
        for queries in ("public", "private"):
            how = Encoding(side="query", queries=queries)
            encode_folder(tmp_path / "retriever", {"a": "red", "b": "blue"}, tmp_path / queries, how)
        Evaluate(encoder="bm25", split="test").run(parts(tmp_path, run_dir=tmp_path / "scores"))
    finally:
        os.umask(before)
    names = ("generator", "retriever", "net", "public")
    handed_on = [file for name in names for file in (tmp_path / name).rglob("*") if file.is_file()]
    assert len(handed_on) > 10 and {mode(file) for file in handed_on} == {0o666 & ~umask}
    assert open_to_others(tmp_path / "private") == open_to_others(tmp_path / "scores") == set()


def test_a_fit_that_promises_nothing_lies_in_a_folder_for_its_owner_alone(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("none", "dp")}
    Fit(min_free_mb=1).run(trial_parts(tmp_path, folders["none"], make_privacy=NoPrivacy))
    Fit(min_free_mb=1).run(trial_parts(tmp_path, folders["dp"]))
    assert mode(folders["none"]) == 0o700 and mode(folders["dp"]) & 0o044


READERS: dict[Callable[[Path], object], str] = {
    read_contract: GENERATOR_CONTRACT, read_folder: "config.json", IndexFolder: MANIFEST,
    read_card: "privacy_card.json", folder_parts: "queries.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_run_folder_in_the_place_of_what_lies_in_it_is_refused_with_the_name_of_that(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "run" / "inner").mkdir(parents=True)
    (tmp_path / "run" / "inner" / READERS[read]).touch()
    with pytest.raises(LitDpretError, match=re.escape(str(tmp_path / "run" / "inner"))):
        read(tmp_path / "run")
    with pytest.raises(LitDpretError, match="rum does not exist"):
        read(tmp_path / "rum")


def test_a_generator_that_is_not_there_is_refused_before_a_declaration_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        synthesize(tmp_path / "generatr", {"p": "a text"}, tmp_path / "out", passages_are_public=False)
