"""Facts of a card besides its claim: the machine, its paths, what pre-training held of the data, and protocols."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from card_chain import Chain
from cards import Run, made_from, make_plan
from jsonschema import Draft202012Validator
from memoriser import Memoriser, large_log
from stand_ins import Regression, dp, fit
from tiny_tasks import retriever, trainer

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards import provenance as environment
from lit_dpret.cards.card import read_card, write_card
from lit_dpret.cards.provenance import (
    PROTOCOL_EVENT,
    code_commit,
    environment_facts,
    note_protocols,
    registered,
    text_hashes,
)
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.files import file_sha256
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, SyntheticData
from lit_dpret.tasks.index_folder import IndexFolder, told_from

OWNER = "home-of-the-owner"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a package in it that this module believes to be its own; nothing is committed yet."""
    package = tmp_path / "lit_dpret" / "privacy"
    package.mkdir(parents=True)
    (tmp_path / "lit_dpret" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "other.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    git(tmp_path, "init", "-q")
    code_commit.cache_clear()
    yield tmp_path
    code_commit.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True).stdout


def test_a_checkout_is_named_by_its_commit_and_says_whether_files_differ_from_it(repository: Path) -> None:
    git(repository, "add", "other.py")
    git(repository, "commit", "-qm", "another project, whose environment lies inside it")
    assert code_commit() is None, "the package only lies there"
    code_commit.cache_clear()
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "all")
    commit = git(repository, "rev-parse", "HEAD").strip()
    os.utime(repository / "other.py", (10**9, 10**9))  # so that git would note the new time in its index
    before = (index := repository / ".git" / "index").read_bytes()
    assert code_commit() == commit
    assert index.read_bytes() == before, "a run that is killed, or whose disk is full, would leave its lock there"
    (repository / "other.py").write_text("changed = True\n", encoding="utf-8")
    code_commit.cache_clear()
    assert code_commit() == f"{commit}+changes"


def test_the_facts_name_kinds_and_no_host() -> None:
    facts = environment_facts(device="cpu", precision="32-true")
    assert (facts["hardware"], facts["precision"]) == (f"cpu ({platform.machine()})", "32-true")
    assert environment_facts()["hardware"] is None
    assert platform.node() not in json.dumps(facts)


SCHEMA = json.loads((Path(__file__).parents[2] / "lit_dpret/cards/privacy_card.schema.json").read_text("utf-8"))
SHARE = {"exact": {"positives": 2, "total": 10, "value": 0.2, "interval": [0.06, 0.51]}}


def counted(folder: Path, **changes: Any) -> Path:
    facts = {"corpus": {"name": "sample.jsonl", "documents": 90, "words": 4000}, "sampled": None, "split": "dev",
             "whose": "public", "not_covered": None, "found": {"queries": SHARE, "passages": SHARE},
             "queries_sha256": text_hashes(["a public query"])}  # fmt: skip
    path = folder / "pretraining_overlap.json"
    path.write_text(json.dumps(facts | changes), encoding="utf-8")
    return path


@pytest.mark.costly
def test_what_was_counted_on_public_texts_stands_on_the_card(tmp_path: Path) -> None:
    run = tmp_path / "run"
    callbacks = [PrivacyAccountant(run_dir=run), PrivacyCard(run_dir=run, pretraining_overlap=counted(tmp_path))]
    fitted = trainer(max_steps=1, logger=False, callbacks=callbacks, default_root_dir=str(run))
    fitted.fit(memoriser(tmp_path), large_log(tmp_path))
    card = read_card(run)
    assert card["pretraining"]["overlap_check"]["found"]["queries"] == SHARE
    assert any("overlap check looked for in its corpus are public" in each["text"] for each in card["assumptions"])
    assert not list(Draft202012Validator(SCHEMA).iter_errors(card))
    assert "sample.jsonl" in (run / "privacy_card.md").read_text(encoding="utf-8")


class OwnRows:
    """A data module without a collection, whose units are rows with a query."""

    def train_units(self) -> Any:
        return self

    def __len__(self) -> int:
        return 2

    def rows(self, unit: int) -> list[Any]:
        return [SimpleNamespace(query=f"query {unit + 3}")]


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize(("queries", "refused"), [("query 5", False), ("Query  3", True)])
def test_an_overlap_of_the_runs_own_train_queries_is_refused(
    queries: str, refused: bool, collected: bool, tmp_path: Path
) -> None:
    hashes = text_hashes([*(f"other {i}" for i in range(5)), queries])
    card = PrivacyCard(pretraining_overlap=counted(tmp_path, queries_sha256=hashes))
    asked = {f"q{i}": f"query {i}" for i in range(9)}
    collection = SimpleNamespace(queries=asked, qrels={"train": {"q3": {}, "q4": {}}})
    with pytest.raises(ConfigurationError, match="pretraining_overlap") if refused else nullcontext():
        card.refuse_protected(memoriser(tmp_path), SimpleNamespace(collection=collection) if collected else OwnRows())


@pytest.mark.parametrize("text", ["no json", "{}", "[]", None])
def test_another_file_and_one_of_private_queries_are_refused_before_the_run(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"pretraining_overlap=.*cannot be read"):
        PrivacyCard(pretraining_overlap=path)
    for changes in ({"whose": "private"}, {"not_covered": "Overlap of private queries"}):
        with pytest.raises(ConfigurationError, match="shares of private queries"):
            PrivacyCard(pretraining_overlap=counted(tmp_path, **changes))


def memoriser(folder: Path) -> Memoriser:
    return Memoriser(DPSGD(eps=2.0, delta=1e-5, noise_multiplier=2.0, secret_file=folder / "secret"))


def protocol(folder: Path, text: str = "1000 canaries, one run, 95 %", name: str = "protocol.md") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.costly
def test_a_run_registers_its_protocols_before_its_first_release_and_its_card_names_them(tmp_path: Path) -> None:
    path, folder = protocol(tmp_path), tmp_path / "run"
    module = Regression(privacy=dp(tmp_path, noise_multiplier=4.0))
    fit(folder, module, steps=2, extra=[PrivacyCard(run_dir=folder, audit_protocols=[path])])
    records = PrivacyLedger.read(folder / "privacy_ledger.jsonl").records
    kinds = [record.get("name", record["kind"]) for record in records]
    assert kinds.index(PROTOCOL_EVENT) < kinds.index("intent")
    card = read_card(folder)
    assert card["pretraining"]["model"] == "unstated"
    (one,) = card["empirical"]["pre_registered"]
    assert (one["name"], one["sha256"]) == ("protocol.md", file_sha256(path))
    assert one["sha256"] in (folder / "privacy_card.html").read_text(encoding="utf-8")
    assert not verify_chain(folder, protocols=[path]).failed
    assert "task.protocols=[FILE]" in verify_chain(folder).format()
    path.write_text("other canaries", encoding="utf-8")
    (finding,) = verify_chain(folder, protocols=[path]).failed
    assert finding.check == "protocol" and "protocol.md" in finding.text


def test_a_resumed_run_keeps_its_protocols_and_takes_no_new_ones(tmp_path: Path) -> None:
    path, folder = protocol(tmp_path), tmp_path / "run"

    def go_on(steps: int, resume: bool, *files: Path) -> None:
        module = Regression(privacy=dp(tmp_path, noise_multiplier=4.0))
        card = PrivacyCard(run_dir=folder, audit_protocols=files)
        fit(folder, module, steps=steps, resume=resume, extra=[card])

    go_on(2, False, path)
    go_on(2, True, path)
    go_on(2, True)
    assert len(read_card(folder)["empirical"]["pre_registered"]) == 1
    with pytest.raises(ResumeError, match=r"late\.md was not registered when this run began"):
        go_on(2, True, protocol(tmp_path, "an attack that worked", "late.md"))
    path.write_text("something else", encoding="utf-8")
    with pytest.raises(ResumeError, match="or was changed since"):
        go_on(2, True, path)


def test_a_derived_artefact_has_the_protocols_that_its_parent_registered_before_its_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan())
    note_protocols(run.ledger, [protocol(tmp_path)])
    run.step(0)
    run.ledger.append("event", name=PROTOCOL_EVENT, protocols=[{"name": "late.md", "sha256": "0" * 64}])
    assert [one["name"] for one in registered(run.ledger.records)] == ["protocol.md"]
    child = made_from(run.write_card())
    assert child["empirical"]["pre_registered"] == read_card(run.folder)["empirical"]["pre_registered"] != []
    write_card(child, tmp_path / "made")
    assert not verify_chain(tmp_path / "made", protocols=[tmp_path / "protocol.md"]).failed


def test_protocols_that_cannot_be_registered_are_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path / "none.md", tmp_path, protocol(tmp_path, "", "empty.md")):
        with pytest.raises(ConfigurationError, match=r"callbacks\.card\.audit_protocols"):
            PrivacyCard(audit_protocols=[path])
    with pytest.raises(ConfigurationError, match=r"task\.protocols: .*none\.md cannot be read"):
        verify_chain(tmp_path, protocols=[tmp_path / "none.md"])
    card = PrivacyCard(run_dir=tmp_path, audit_protocols=[protocol(tmp_path)])
    with pytest.raises(ConfigurationError, match="this run makes no release of its own"):
        card.setup(SimpleNamespace(callbacks=[]), retriever(privacy=SyntheticData()), "fit")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs the PrivacyAccountant callback before it"):
        accounted = SimpleNamespace(callbacks=[PrivacyAccountant()])
        card.setup(accounted, Regression(privacy=NoPrivacy()), "fit")  # type: ignore[arg-type]


@pytest.mark.costly
def test_no_card_ledger_set_model_or_index_tells_where_it_was_made(made: Chain) -> None:
    files = [path for path in made.root.rglob("*") if path.is_file()]
    # Lightning keeps the place of each checkpoint inside it; they are for going on, and a model folder is handed on.
    telling = [path.name for path in files if OWNER.encode() in path.read_bytes() and path.suffix != ".ckpt"]
    assert len(files) > 30 and not telling


def test_an_index_finds_its_encoder_where_it_was_left(made: Chain, tmp_path: Path) -> None:
    assert IndexFolder(made.index).encoder_folder == str((made.encoder / "model").resolve())
    assert IndexFolder(made.index).query_encoder().dim == IndexFolder(made.index).manifest.dim
    assert told_from(tmp_path, "org/name") == "org/name"
    assert told_from("/somewhere/else", tmp_path) == tmp_path.name


@pytest.mark.parametrize(("pretrained", "told"), [("org/name", "org/name"), (f"/{OWNER}/models/small", "small")])
def test_a_card_names_a_model_by_its_hub_or_by_its_folder_alone(pretrained: Any, told: str, tmp_path: Path) -> None:
    module = Regression(privacy=dp(tmp_path))
    module.pretrained = pretrained
    fit(tmp_path / "run", module, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    card = read_card(tmp_path / "run")
    assert card["pretraining"]["model"] == told
    assert OWNER not in (tmp_path / "run" / "privacy_card.json").read_text()
