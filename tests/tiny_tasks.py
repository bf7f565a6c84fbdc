"""A private log, a retriever and the parts of a task, each as small as possible. Imported by path; not a test."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from cards import Run, make_plan
from tiny_generator import WORDS
from tiny_models import tiny_bert, tiny_tokenizer

from lit_dpret.cards.card import subject_of, write_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.modules import FrozenDualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.synthesis.pseudo_queries import write_pseudo_queries
from lit_dpret.tasks.parts import Parts

QUERIES, PASSAGES = 64, 24


def write_log(folder: Path, words: Sequence[str] = WORDS) -> Path:
    """Write a BEIR folder whose queries are words of their passages; the last eight are for testing."""

    def some(start: int, count: int) -> str:
        return " ".join(words[(start + step) % len(words)] for step in range(0, 3 * count, 3))

    corpus = {f"p{i}": some(i, 4) for i in range(PASSAGES)}
    queries = {f"q{i}": f"{some(i % PASSAGES, 2)} {words[i % len(words)]}" for i in range(QUERIES)}
    pairs = [(f"q{i}", f"p{i % PASSAGES}") for i in range(QUERIES)]
    return write_beir(folder, corpus, queries, {"train": pairs[:-8], "test": pairs[-8:]})


def write_beir(
    folder: Path, passages: Mapping[str, str], queries: Mapping[str, str],
    judged: Mapping[str, Sequence[tuple[str, str]]],
) -> Path:  # fmt: skip
    """Write a folder in BEIR's layout; ``judged`` has, by split, pairs of a query and its passage."""
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", passages), ("queries", queries)):
        lines = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for split, pairs in judged.items():
        rows = ["query-id\tcorpus-id\tscore", *(f"{query}\t{passage}\t1" for query, passage in pairs)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def with_users(log: Path, per_user: int) -> None:
    """Assign the queries of a log to users, ``per_user`` each, in the order of the file."""
    rows = [json.loads(line) for line in (log / "queries.jsonl").read_text().splitlines()]
    named = [json.dumps({**row, "user_id": f"u{number // per_user}"}) for number, row in enumerate(rows)]
    (log / "queries.jsonl").write_text("\n".join(named) + "\n")


def with_query(log: Path, text: str) -> None:
    """Make ``text`` the first query of a log."""
    first, *rest = (log / "queries.jsonl").read_text().splitlines()
    (log / "queries.jsonl").write_text("\n".join([json.dumps(json.loads(first) | {"text": text}), *rest]) + "\n")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Simulate a full disk: no file may grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_to_others(folder: Path) -> set[str]:
    """Return the files that users other than the owner could read if they reached ``folder``, as relative paths."""
    found: set[str] = set()
    for path in folder.iterdir():
        if path.is_dir() and path.stat().st_mode & 0o011:
            found |= {f"{path.name}/{inner}" for inner in open_to_others(path)}
        elif path.is_file() and path.stat().st_mode & 0o044:
            found.add(path.name)
    return found


def write_synthetic(folder: Path, log: PairsDataModule) -> Path:
    """Write queries for the passages of ``log``, with the card of a private run, as a generator would."""
    log.setup("fit")
    write_pseudo_queries(log.public_passages(), folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    subject = subject_of("dataset", "synthetic queries", files, root=folder)
    write_card(Run(folder.with_name("generator"), make_plan()).train().card(subject=subject), folder)
    return folder


def retriever(**settings: Any) -> FrozenDualEncoder:
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    return FrozenDualEncoder(**{"optimizer": OptimizerSpec(name="sgd", lr=0.1), "encoder": tower} | settings)


def trainer(**settings: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "max_epochs": -1}
    return L.Trainer(accelerator="cpu", devices=1, **quiet, **settings)  # type: ignore[arg-type]


def no_parts(run_dir: Path, **given: Any) -> Parts:
    """Return task parts that may build only what is given."""

    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("not needed for this task")

    kinds = ("make_privacy", "make_datamodule", "make_module", "make_trainer")
    return Parts(**{"run_dir": run_dir, **dict.fromkeys(kinds, none), **given})


def parts(
    tmp_path: Path, privacy: Callable[..., Any] | None = None, words: Sequence[str] = WORDS, **changes: Any
) -> Parts:
    folder = tmp_path / "log"
    private = partial(DPSGD, eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret")
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "make_privacy": privacy or private,
        "make_datamodule": partial(
            PairsDataModule, folder=folder if folder.exists() else write_log(folder, words), sampling="poisson"
        ),
        "make_module": lambda: None,
        "make_trainer": trainer,
    }
    return Parts(**settings | changes)
