"""Bad input on the command line ends in one line that names the setting, before anything is trained.

From the words that are typed to the line that is printed: all commands are typed one after the other into one process
that has no network, and each test looks at what one of them said.
"""

from __future__ import annotations

import gc
import gzip
import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import idle_work
import pytest
from tiny_tasks import write_log

from lit_dpret import cli

SECONDS_OF_PROCESSOR = 5.0
LOG = ("datamodule=pairs", "datamodule.folder=.", "datamodule.expected_batch_size=4", "trainer.max_steps=1")
PAIRS = [{"query": f"how is thing {i} done", "passage": f"thing {i} is done by hand"} for i in range(24)]


def _jsonl(*changed: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in [*PAIRS, *changed]).encode()


FILES: dict[str, bytes] = {
    "a_file": b"x",
    "empty.jsonl": b"",
    "blank.jsonl": b"  \n\n \n",
    "broken.jsonl": _jsonl() + b"{'query': 1}\n",
    "cut.jsonl": _jsonl()[:-20],
    "columns.jsonl": b'{"question": "a", "answer": "b"}\n',
    "bytes.jsonl": bytes(range(128, 256)) * 4,
    "latin.jsonl": '{"query": "où", "passage": "b"}\n'.encode("latin-1"),
    "two_texts.jsonl": _jsonl(*({"query_id": "q", "query": text, "passage": "b"} for text in "ac")),
    "nan.jsonl": _jsonl() + b'{"query": NaN, "passage": "b"}\n',
    "null.jsonl": _jsonl({"query": None, "passage": "b"}),
    "number.jsonl": _jsonl({"query": 7, "passage": "b"}),
    "nested.jsonl": _jsonl({"query": {"text": "a"}, "passage": "b"}),
    "a_list.jsonl": json.dumps(PAIRS).encode(),
    "one.jsonl": json.dumps(PAIRS[0]).encode(),
    "blank_query.jsonl": _jsonl({"query": " \u00a0", "passage": "b"}),
    "surrogate.jsonl": _jsonl({"query": "half \ud83d", "passage": "b"}),
    "split.jsonl": _jsonl({"query": "a", "passage": "b", "split": "trainn"}),
    "not_gzip.jsonl.gz": _jsonl(),
    "cut.jsonl.gz": gzip.compress(_jsonl())[:-12],
    "cr.jsonl": _jsonl().replace(b"\n", b"\r"),
    "indented.jsonl": json.dumps(PAIRS, indent=1).encode(),
    "commas.tsv": b"query,passage\na,b\n",
    "semicolons.csv": b"query;passage\na;b\n",
    "quote.csv": b'query,passage\n"a,b\n',
    "columns.tsv": b"query\tpassage\na\tb\tc\n",
    "log.txt": _jsonl(),
    "log.json": json.dumps(PAIRS).encode(),
    "log.xlsx": b"PK\x03\x04",
    "log.parquet": _jsonl(),
    "open_secret": bytes(32),
    "own/model/broken.yaml": b"_target_: [",
    "other/privacy_card.json": b"{}",
    "addresses/training.txt": b"http://www.cnn.com/2008/HEALTH/05/01/x/index.html",
}  # fmt: skip


class Case(NamedTuple):
    """The words after ``lit-dpret``, and what the line that they end with has to name."""

    words: tuple[str, ...]
    named: str


def log(*words: str, named: str) -> Case:
    return Case((*LOG, *words), named)


def pairs(name: str, named: str = "") -> Case:
    return Case(
        ("datamodule=pairs", f"datamodule.pairs={name}", "datamodule.expected_batch_size=4"), named or re.escape(name)
    )


def setting(word: str) -> Case:
    """A value that is refused by the setting's name and the value, or its name and what may be chosen."""
    name, _, value = word.partition("=")
    return log(word, named=rf"{re.escape(name)}\b.*{re.escape(value)}")


CASES: dict[str, Case] = {
    "a seed that is a text": log("seed=abc", named=r"seed='abc'"),
    "a seed that is too large": log("seed=4294967296", named=r"seed=4294967296"),
    "a setting that nothing reads": log("+foo=1", named=r"foo is not a setting"),
    "a key of a choice that is not made yet": Case(
        ("histogram", *LOG[:2], "task.generator=a", "task.bins.edges=[3]"), r"task\.bins\.edges is.*bins=length"
    ),
    "a class whose arguments are others": log(
        "callbacks.card._target_=lit_dpret.callbacks.StepProgress", named=r"callbacks\.card\..* ~callbacks\.card\."
    ),
    "an argument of another class": log(
        "callbacks.card._target_=a.B", "callbacks.card.c=1", named=r"callbacks\.card\.c.*\+callbacks\.card\.c="
    ),
    "a choice for another task": log("bins=length", named=r"bins=length"),
    "a key beside the choices of a group": log("+negatives.bm25.depth=3", named=r"\+negatives\."),
    "a key of a choice that is not made": log("+canaries.count=3", named=r"\+canaries\."),
    "a text for a number": log("model.optimizer.lr=fast", named=r"model\.optimizer\.lr='fast'"),
    "a learning rate that leaves no model": log("model.optimizer.lr=1e9", named=r"model\.optimizer\.lr=1000000000"),
    "a text for a whole number": log("model.max_query_length=long", named=r"model\.max_query_length"),
    "a text for true": log("model.lower_case=perhaps", named=r"model\.lower_case='perhaps'"),
    "one value for a list": Case(("evaluate", *LOG[:2], "task.metrics=ndcg@10"), r"task\.metrics=\[ndcg@10\]"),
    "a file for a list of files": log(
        "callbacks.card.audit_protocols=audit.md", named=r"callbacks\.card\.audit_protocols=\[audit\.md\]"
    ),
    "a glob of nothing": pairs("nothing/*.jsonl", r"nothing/\*\.jsonl.*datamodule\.pairs"),
    "shards of several formats": pairs("*s.*sv", r"formats.*datamodule\.pairs"),
    "an unknown protocol": pairs("nowhere://bucket/x", r"datamodule\.pairs=nowhere://bucket/x"),
    "several files for one": log("datamodule.pairs=[a.jsonl,b.jsonl]", named=r"datamodule\.pairs=.*a\.jsonl.*string"),
    "a mapping for a path": Case(("search", "task.index={a: 1}", "task.query=a"), r"task\.index=\{'a': 1\}"),
    "a number for a path": log("model.pretrained=5", named=r"model\.pretrained='5'"),
    "a number for a mapping": log("model.lora=8", named=r"model\.lora=8 must be a mapping"),
    "a list for a mapping": Case(("check_data", *LOG[:2], "task.fractions=[8,1,1]"), r"task\.fractions=\{train: 0\.8"),
    "a mapping that does not end": log("model.lora={r:", named=r"model\.lora=\{r:.*quotes"),
    "a run folder that is a file": log("hydra.run.dir=a_file", named=r"a_file is a file.*hydra\.run\.dir"),
    "a start that is nowhere": log("init_from=nope", named=r"init_from=nope is not a folder"),
    "a start that holds no model": log("init_from=qrels", named=r"init_from=qrels holds no model"),
    "a hub that does not answer": log("model.pretrained=t5-smal", named=r"model\.pretrained=t5-smal"),
    "a path for a hub name": log("model.pretrained=./t5-small", named=r"model\.pretrained=\./t5-small is not a folder"),
    "no GPU": log("trainer=gpu", named=r"trainer cannot be built: .*trainer=cpu"),
    "no such precision": log("trainer.precision=8", named=r"trainer\.precision: .*8"),
    "no CUDA for a task": Case(("encode", *LOG[:2], "task.device=cuda"), r"task\.device=cuda"),
    "no device of that name": Case(
        ("search", "task.index=nope", "task.query=a", "task.device=gpu"), r"task\.device=gpu"
    ),
    "W&B without a key": log("logger=wandb", named=r"logger=wandb: .*logger\.wandb\.offline=true"),
    "no such task": Case(("sinthesize",), r"'sinthesize'"),
    "a word that is not an option": Case(("--privacy.eps=3",), r"--privacy\.eps=3"),
    "no such option": Case(("fit", "--hlep"), r"--hlep is not an option"),
    "an option between a task and its settings": Case(("fit", "-m", "privacy.epsilon=1,3"), r"privacy\.epsilon is not"),
    "blanks around the sign": Case(("fit", "privacy.eps", "=", "3"), r"privacy\.eps .*NAME=VALUE"),
    "settings of one's own that are not YAML": Case(
        ("--config-dir", "own", "model=broken"), r"own/model/broken\.yaml is not YAML"
    ),
    "one run of several that is refused": log(
        "-m", "model=frozen_dual_encoder", "privacy.eps=1,-3", named=r"privacy\.eps=-3"
    ),
    "another file for SQuAD": Case(
        ("build_silos", "task.source=squad", "task.folder=broken.jsonl"), r"task\.folder=broken\.jsonl .*malformed JSON"
    ),
    "another file for NewsQA": Case(
        ("build_silos", "task.source=newsqa", "task.newsqa=broken.jsonl", "task.cnn_urls=addresses"),
        r"task\.newsqa=broken\.jsonl .*JSON",
    ),
    "no such group": Case(("list", "privcy"), r"'privcy'"),
    "no choice of that name": log("privacy=dpsgd", named=r"privacy=dpsgd does not exist"),
    "a task with another sign": Case(("check-data",), r"'check-data'.*\bcheck_data"),
    "an experiment in the place of a task": Case(("quickstart",), r"'quickstart'.*experiment=quickstart"),
    "a script with the line ends of Windows": log("hydra.run.dir=runs/mine\r", named=r"hydra\.run\.dir=runs/mine"),
    "a setting with another sign": log("privacy_eps=3", named=r"privacy_eps is not .*privacy\.eps"),
    "nothing for a choice": log("privacy=null", named=r"privacy=null does not exist.*none"),
    "a path for a choice": Case(("experiment=configs/experiment/own_log",), r"experiment=configs/.*quickstart"),
    "no name before the sign": Case(("plan", "=3"), r"NAME=VALUE"),
    "a mapping that the shell has split": log("datamodule.columns={query:", "a,", named=r"columns=\{query: .*quotes"),
    "a name for the optimizer": log("model.optimizer=adam", named=r"model\.optimizer=adam .*optimizer\.name"),
    "a key that a mapping has not": Case(
        ("experiment=pdd_as2_planted", "federated.planted={clients: 3, wheels: 4}"),
        r"federated\.planted\.wheels is not a setting.*phrasings",
    ),
    "no such setting": log("privacy.epsilon=3", named=r"privacy\.epsilon is not a setting"),
    "a setting without its group": log("eps=3", named=r"eps is not a setting.*privacy\.eps"),
    "a setting of the task without it": Case(("evaluate", *LOG[:2], "encoder=nope"), r"task\.encoder"),
    "a setting in another group": log("trainer.lr=1", named=r"trainer\.lr is not a setting.*model\.optimizer\.lr"),
    "a value that a part of the task refuses": Case(
        ("evaluate", *LOG[:2], "task.encoder=bm25", "task.bm25.k1=-3"), r"task\.bm25\.k1=-3"
    ),
    "no such metric": Case(("evaluate", *LOG[:2], "task.metrics=[ndcg@0]"), r"task\.metrics=\[ndcg@0\]"),
    "a folder for a file to write": Case(("verify", "other", "task.report=qrels"), r"task\.report=qrels"),
    "a file to write inside a file": Case(("verify", "other", "task.report=a_file/b.json"), r"task\.report=a_file"),
    "a folder for a ledger": log("privacy.dataset_ledger=qrels", named=r"privacy\.dataset_ledger=qrels"),
    "a file for a folder to write": Case(
        ("check_data", *LOG[:1], "datamodule.pairs=log.jsonl", "task.write_split=a_file"), r"task\.write_split=a_file"
    ),
    "a clean log in the place of another": Case(
        ("check_data", "datamodule=pairs", "datamodule.pairs=broken.jsonl", "task.write_clean=one.jsonl"),
        r"task\.write_clean=one\.jsonl exists",
    ),
    "a clean log of what no line mends": Case(
        ("check_data", "datamodule=pairs", "datamodule.pairs=quote.csv", "task.write_clean=new.csv"),
        r"task\.write_clean=new\.csv .*quote\.csv line 2",
    ),
    "a file for a cache": Case(("evaluate", *LOG[:2], "task.cache_dir=a_file"), r"task\.cache_dir=a_file"),
    "a setting of the Trainer that privacy owns": log(
        "trainer.gradient_clip_val=1", named=r"trainer\.gradient_clip_val is not a setting"
    ),
    "no adapters": log("model.lora={r:4,target_modules:[nope]}", named=r"model\.lora=.*nope"),
    "a pattern that does not end": log("model.trainable_patterns=['[']", named=r"model\.trainable_patterns"),
    "a choice that is added": log("+debug=tiny", named=r"Leave out the \+: debug=tiny"),
    "no constants in the place of a private number": Case(
        ("datamodule=pairs", "datamodule.pairs=nope.jsonl", "privacy.neighbours=add_or_remove"),
        r"privacy\.delta .*datamodule\.sample_rate, datamodule\.sampling=poisson",
    ),
    "a sampling that the accountant does not judge": log(
        "datamodule.folder=nope", "privacy.accountant=prv", named=r"sampling=truncated_poisson, privacy\.accountant=prv"
    ),
    "a log for data that are another choice": Case(
        ("task=own_log", "datamodule.pairs=log.jsonl"), r"datamodule\.pairs is not a setting.*datamodule=pairs"
    ),
    "no log for the task of one's own log": Case(("task=own_log",), r"datamodule\.pairs=.*"),
    "a setting of another task": Case(
        ("task=encode", "task.encoder=nope", "task.max_passages=5"), r"task\.max_passages is not a setting.*task=encode"
    ),
    "a file in the place of a setting": Case(("own_log", "log.jsonl"), r"log\.jsonl .*NAME=VALUE"),
    "a choice on data that nobody knows": log(
        "callbacks.card.tuning_data=dev", named=r"callbacks\.card\.tuning_data='dev'"
    ),
    "a setting of another mode": log("privacy=none", "privacy.eps=3", named=r"privacy\.eps is not a setting"),
    "a promise that no noise keeps": log("privacy.eps=1e-9", "privacy.delta=1e-300", named=r"privacy\.eps"),
    "a folder that holds no model": log("model.pretrained=qrels", named=r"model\.pretrained=qrels"),
    "a run folder that cannot be": log("run_dir=/proc/nowhere", named=r"/proc/nowhere cannot be written"),
    "a disk that is too full": log("task.min_free_mb=1e12", named=r"task\.min_free_mb"),
    "users that are not known": log("privacy.unit=user", named=r"privacy\.unit=user.*user_id"),
    "a run of no known length": log("trainer.max_steps=-1", named=r"trainer\.max_steps"),
    "a run of no steps": log("trainer.max_steps=0", named=r"trainer\.max_steps"),
    "a batch above the data": log("datamodule.expected_batch_size=100000", named=r"expected_batch_size=100000"),
    "a secret that others can read": log("privacy.secret_file=open_secret", named=r"open_secret.*chmod 600"),
    "a secret that is a folder": log("privacy.secret_file=.", named=r"privacy\.secret_file"),
    "no folder of data": Case(("datamodule=pairs",), r"datamodule\.folder.*datamodule\.pairs"),
    "a card that is nowhere": Case(("verify", "nope"), r"nope"),
    "no card": Case(("verify",), r"task\.card"),
    "no runs": Case(("compare",), r"task\.run_a and task\.run_b .*lit-dpret compare RUN_A RUN_B"),
    "an encoder that is nowhere": Case(("evaluate", *LOG[:2], "task.encoder=nope"), r"nope"),
    "a generator that is nowhere": Case(
        ("synthesize", *LOG[:2], "task.generator=./nope", "task.passages_are_public=true"), r"task\.generator=nope"
    ),
    "an artefact that is not a generator": Case(
        ("synthesize", *LOG[:2], "task.generator=other", "task.passages_are_public=true"), r"other\b"
    ),
    "embeddings that are nowhere": Case(("index", "task.embeddings=nope"), r"nope"),
    "a sweep that is nowhere": Case(("sweep", "nope.yaml"), r"nope\.yaml"),
    "a folder without records": pairs("addresses", r"addresses holds no.*datamodule\.pairs"),
    "no such file": pairs("nope.jsonl", r"nope\.jsonl.*datamodule\.pairs"),
    **{
        word: setting(word)
        for word in (
            "privacy.eps=0", "privacy.eps=abc", "privacy.eps=nan", "privacy.eps=true", "privacy.delta=0.5",
            "privacy.unit=person", "privacy.neighbours=swap", "privacy.max_grad_norm=0",
            "datamodule.expected_batch_size=0", "datamodule.physical_batch_size=0", "model.max_passage_length=0",
            "model.optimizer.name=adamm", "model.optimizer.lr=-1", "trainer.precision=16-true", "model.dropout=true",
        )
    },
    **{name: pairs(name) for name in FILES if re.fullmatch(r"[^/]+\.(?!yaml).*", name) and name != "one.jsonl"},
    "one.jsonl": pairs("one.jsonl", r"expected_batch_size=4 exceeds the 1 units"),
    **{f"a path as it is typed: {name}": pairs(name, re.escape(f"{name} does not exist"))
       for name in ("my own log.jsonl", "a=b.jsonl", "wei rd ü 漢.jsonl", "50% of it.jsonl")},
    "a reference that selects another setting": log(
        "+budget=-1", "privacy.eps='${oc.select:budget}'", named=r"privacy\.eps=-1"
    ),
}  # fmt: skip


class Said(NamedTuple):
    """What a command left behind."""

    status: int
    text: str
    seconds: float


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    kept = os.dup(1), os.dup(2)
    said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in zip((1, 2), kept, strict=True):
            os.dup2(before, stream)
            os.close(before)
        os.close(said)


def _type_all(folder: Path) -> None:
    """In a new process, without a network and a key: what the installed program does with each command."""

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    socket.create_connection = no_network  # type: ignore[assignment]
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        os.environ.pop(name, None)
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    os.chdir(folder)
    idle_work.leave_out(setattr)
    gc.freeze()
    found = {}
    for name, case in CASES.items():
        began, status = time.process_time(), 0
        sys.argv = ["lit-dpret", *case.words]
        with _written_to(folder / "said"):
            try:
                cli.main()
            except SystemExit as ended:
                status = int(ended.code or 0)
            except BaseException as error:
                print(f"a traceback: {error!r}")
                status = 1
        found[name] = Said(status, (folder / "said").read_text(), time.process_time() - began)
    (folder / "all").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What each command said."""
    folder = write_log(tmp_path_factory.mktemp("typed"))
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "open_secret").chmod(0o644)
    # A fork of this process would not do: torch's threads, where an earlier test has used them, do not survive it.
    process = multiprocessing.get_context("spawn").Process(target=partial(_type_all, folder))
    process.start()
    process.join()
    return {name: Said(*values) for name, values in json.loads((folder / "all").read_text()).items()}


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_that_names_the_setting(name: str, said: dict[str, Said]) -> None:
    status, text, seconds = said[name]
    assert status == cli.USER_ERROR, text
    # A bar of transformers', which the program switches off before it loads that; a test has loaded it already.
    beside = ("run folder: ", "data: ", "Loading weights", "[")  # the last begins what Hydra says of jobs
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(beside)]
    assert len(lines) == 1 and re.search(rf"error: .*(?:{CASES[name].named})", lines[0]), text
    assert seconds < SECONDS_OF_PROCESSOR
