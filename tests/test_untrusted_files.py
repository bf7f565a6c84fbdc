"""No file that somebody else may have written runs code by being read: in the source, and by files that try."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import Regression
from tiny_models import tiny_bert, tiny_tokenizer

from lit_dpret.callbacks.checkpoint_files import newest_checkpoint
from lit_dpret.encoders.backbones import load_transformer
from lit_dpret.errors import LitDpretError
from lit_dpret.tasks.export import load_module

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
