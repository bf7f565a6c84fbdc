"""Files are there whole or not at all, of this version, and run no code by being read."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import Run, make_plan, rewrite_chain
from planned_sweeps import trial_parts
from stand_ins import Regression, dp, fit
from tiny_generator import generator
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import open_to_others, parts, retriever, write_beir

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.checkpoint_files import WholeCheckpoints, newest_checkpoint
from lit_dpret.cards.card import write_card
from lit_dpret.cards.file import checksum, read_card
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.datamodules.layouts import folder_parts
from lit_dpret.encoders.backbones import load_transformer
from lit_dpret.encoders.st_folder import GENERATOR_CONTRACT, read_folder
from lit_dpret.errors import DataError, LedgerError, LitDpretError, ResumeError, StorageError, UnsupportedModelError
from lit_dpret.files import write_whole
from lit_dpret.modules.embedding_trainer import save_net
from lit_dpret.modules.generator_folder import load_generator, read_contract
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.synthesis.shards import ShardStore
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import Evaluate, Fit
from lit_dpret.tasks.export import load_module
from lit_dpret.tasks.index_folder import MANIFEST, Encoding, IndexFolder, encode_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("content", ["größer\n", "größer\n".encode()])
def test_a_text_is_written_as_utf_8_and_folders_are_made(tmp_path: Path, content: str | bytes) -> None:
    path = write_whole(tmp_path / "new" / "folder" / "file.txt", content)
    assert path.read_bytes() == "größer\n".encode()
    assert [one.name for one in path.parent.iterdir()] == ["file.txt"]


def test_a_private_file_is_its_owners_before_it_has_its_name_whatever_stood_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, draft = tmp_path / "file.txt", tmp_path / f".file.txt.{os.getpid()}.tmp"
    for file, allowed in ((path, 0o644), (draft, 0o666)):
        file.write_text("left behind")
        file.chmod(allowed)
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (seen.append(mode(source)), replace(source, target)))
    assert mode(write_whole(path, "new", owner_only=True)) == 0o600 and seen == [0o600]
    assert mode(write_whole(tmp_path / "folder" / "file.txt", "new", owner_only=True).parent) == 0o700
    assert path.read_text() == "new"
    (tmp_path / "usual").touch()
    assert mode(write_whole(tmp_path / "other.txt", "text")) == mode(tmp_path / "usual")


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


@pytest.mark.costly
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


# -- files of another version --------------------------------------------------------------------

FIXTURES = Path(__file__).resolve().parent / "data" / "schema"
OTHER = r"/2', and this lit-dpret reads 'lit-dpret/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of each kind, laid out as their readers expect them."""
    run = Run(tmp_path / "old", make_plan()).train(2)
    write_card(run.card(), run.folder)
    run.ledger.close()
    book = DatasetLedger(run.folder / "dataset_ledger.jsonl", total_eps=8.0, budget=make_plan().budget)
    book.require([make_plan().release()])
    book.begin()
    shutil.copytree(FIXTURES, tmp_path / "old", dirs_exist_ok=True)
    (tmp_path / "old" / "shards").mkdir()
    (tmp_path / "old" / "shard.jsonl").rename(tmp_path / "old" / "shards" / "000000.jsonl")
    write_beir(tmp_path / "old", {"p": "p is a letter"}, {"q": "what is p"}, {"train": [("q", "p")]})
    return tmp_path / "old"


def set_version(path: Path, version: int = 2) -> None:
    """Raise the version of a JSON file that holds one object, a card's checksum included."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["schema"] = facts["schema"].rpartition("/")[0] + f"/{version}"
    if "checksum" in facts:
        facts["checksum"] = checksum(facts)
    path.write_text(json.dumps(facts), encoding="utf-8")


def other_chain(path: Path) -> None:
    def other(record: dict[str, Any]) -> None:
        if "schema" in record:
            record["schema"] = record["schema"].rpartition("/")[0] + "/2"

    rewrite_chain(path, other)


def other_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('"format": 1', '"format": 2')
    path.write_text(text.replace("synthetic-data/1", "synthetic-data/2"), encoding="utf-8")


def read_total(folder: Path) -> object:
    return DatasetLedger(folder / "dataset_ledger.jsonl", total_eps=None, budget=make_plan().budget).total()


# A file, what makes it one of another version, who reads it from the folder, and the error.
FILES: dict[str, tuple[Callable[[Path], None], Callable[[Path], object], type[Exception], str]] = {
    "privacy_ledger.jsonl": (
        other_chain, lambda folder: PrivacyLedger.read(folder / "privacy_ledger.jsonl"), LedgerError, OTHER,
    ),
    "dataset_ledger.jsonl": (other_chain, read_total, LedgerError, OTHER),
    "privacy_card.json": (set_version, read_card, DataError, OTHER),
    "lit_dpret_generator.json": (other_text, load_generator, UnsupportedModelError, "is of format 2"),
    "manifest.jsonl": (other_text, lambda folder: ShardStore(folder, {"seed": 0}, 1), ResumeError, OTHER),
    "generation.json": (
        set_version, lambda folder: SyntheticDataModule(folder=folder).setup("fit"), DataError, OTHER,
    ),
    "index/index.json": (set_version, lambda folder: IndexFolder(folder / "index"), DataError, OTHER),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_version_is_refused_by_its_name(name: str, folder: Path) -> None:
    change, read, error, words = FILES[name]
    change(folder / name)
    with pytest.raises(error, match=rf"{re.escape(Path(name).name)}.*{words}"):
        read(folder)


def test_a_synthetic_data_set_of_this_version_is_read(folder: Path) -> None:
    SyntheticDataModule(folder=folder).setup("fit")


def test_a_checkpoint_of_another_accountant_is_refused_and_not_passed_over(folder: Path, tmp_path: Path) -> None:
    set_version(folder / "accountant_state.json")
    state = json.loads((folder / "accountant_state.json").read_text(encoding="utf-8"))
    WholeCheckpoints().save_checkpoint(
        {"global_step": 4, "callbacks": {"PrivacyAccountant": state}}, tmp_path / "last.ckpt"
    )
    with pytest.raises(ResumeError, match=rf"last\.ckpt: the accountant's state cannot be read: .*{OTHER}"):
        newest_checkpoint(tmp_path)
    with pytest.raises(ResumeError, match=OTHER):
        PrivacyAccountant().load_state_dict(state)


def test_a_checkpoint_of_this_version_states_its_version(tmp_path: Path) -> None:
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path, noise_multiplier=4.0)), steps=2)
    content = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["callbacks"]["PrivacyAccountant"]["schema"] == "lit-dpret/accountant-state/1"


def test_a_schema_that_is_no_schema_is_refused(folder: Path) -> None:
    path = folder / "privacy_card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    for schema in (None, "lit-dpret/privacy-card", "lit-dpret/privacy-card/0", "other/privacy-card/1", 1):
        card["schema"] = schema
        path.write_text(json.dumps(card), encoding="utf-8")
        with pytest.raises(DataError, match="its schema is"):
            read_card(folder)


# -- files that would run code -------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lit_dpret", "callbacks", "datamodules", "scripts", "benchmarks", "examples", "reproduction")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT / folder).parts[0] not in ("callbacks", "datamodules", "configs")  # links
]
# Calls that may read a pickle, and what has to be said to each.
NEEDS_WEIGHTS_ONLY = {"load_checkpoint", "load_from_checkpoint", "fit", "validate", "test", "predict"}
MAY_NOT = {"trust_remote_code": True, "allow_pickle": True, "shell": True, "weights_only": False}
# Where pickles are read all the same, and why that is not a danger.
KNOWN = {
    "datamodules/image_sources.py": "an unpickler that builds arrays and refuses every other name",
    "lit_dpret/distributed/ranks.py": "an error that this very process pickled a line before",
    "lit_dpret/tasks/export.py": "a class of this package, whose load_from_checkpoint says weights_only=True",
}


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """The calls of a file, each with its name from the last dot but one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node, ".".join(ast.unparse(node.func).split(".")[-2:])


def said(call: ast.Call) -> dict[str | None, Any]:
    return {word.arg: getattr(word.value, "value", ...) for word in call.keywords}


def complaints(path: Path) -> list[str]:
    wrong = []
    for call, name in calls(path):
        words, last = said(call), name.split(".")[-1]
        reads = name in ("torch.load", "jit.load") or last in ("load_checkpoint", "load_from_checkpoint")
        reads |= last in NEEDS_WEIGHTS_ONLY and "ckpt_path" in words
        if reads and words.get("weights_only") is not True:
            wrong.append(f"{name} in line {call.lineno} without weights_only=True")
        if name.split(".")[0] in ("pickle", "dill", "joblib", "cloudpickle") and last in ("load", "loads", "Unpickler"):
            wrong.append(f"{name} in line {call.lineno}")
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "eval", "exec", "hub.load"):
            wrong.append(f"{name} in line {call.lineno}")
        wrong += [
            f"{word}={value} in line {call.lineno}" for word, value in MAY_NOT.items() if words.get(word) is value
        ]
    return wrong


@pytest.mark.costly
def test_no_source_file_reads_anything_that_could_run() -> None:
    assert len(SOURCES) > 400
    found = {str(path.relative_to(ROOT)): complaints(path) for path in SOURCES}
    assert {name: wrong for name, wrong in found.items() if wrong and name not in KNOWN} == {}


def test_what_is_known_to_read_pickles_still_does() -> None:
    assert all(complaints(ROOT / name) or "Unpickler" in (ROOT / name).read_text(encoding="utf-8") for name in KNOWN)


@pytest.mark.parametrize(
    "line",
    [
        *("torch.load(p)", "torch.load(p, weights_only=False)", "M.load_from_checkpoint(p)", "t.fit(m, ckpt_path=p)"),
        *("pickle.loads(b)", "np.load(p, allow_pickle=True)", "yaml.load(t)", "A.of(n, trust_remote_code=True)"),
    ],
)
def test_a_line_that_could_run_code_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(line)
    assert complaints(tmp_path / "bad.py")


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.mark,)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The content of a checkpoint that would run code; nothing may have run in the end."""
    mark = tmp_path / "ran"
    yield {"state_dict": {"weight": torch.zeros(1)}, "global_step": 1, "payload": Hostile(mark)}
    assert not mark.exists(), "the file ran code"


def test_the_file_would_run_code_where_pickles_are_trusted(tmp_path: Path) -> None:
    torch.save(Hostile(tmp_path / "ran"), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "ran").exists(), "or the tests below show nothing"


@pytest.mark.parametrize("load", [load_module, Regression.load_from_checkpoint], ids=["exported", "by a class"])
def test_a_hostile_checkpoint_is_not_loaded(
    load: Callable[[Path], object], hostile: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(hostile, tmp_path / "last.ckpt")
    with pytest.raises(LitDpretError):
        load(tmp_path / "last.ckpt")


def test_a_hostile_checkpoint_is_not_resumed_from(hostile: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save(hostile, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.warns(UserWarning, match="not a complete checkpoint"):
        assert newest_checkpoint(tmp_path / "checkpoints") is None


def test_hostile_weights_of_an_encoder_are_not_loaded(hostile: dict[str, Any], tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path / "encoder")
    tiny_tokenizer().save_pretrained(tmp_path / "encoder")
    (tmp_path / "encoder" / "model.safetensors").unlink()
    torch.save(hostile, tmp_path / "encoder" / "pytorch_model.bin")
    with pytest.raises(LitDpretError, match="cannot be loaded"):
        load_transformer(tmp_path / "encoder", torch.float32)
