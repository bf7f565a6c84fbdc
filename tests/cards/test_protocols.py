"""A protocol that counts as pre-registered was in the ledger before the first release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cards import Run, make_plan
from stand_ins import Regression, dp, fit
from tiny_tasks import retriever

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import inherit_card, read_card, subject_of, write_card
from lit_dpret.cards.facts import PROTOCOL_EVENT, note_protocols, registered
from lit_dpret.cards.file import checksum, file_sha256
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import NoPrivacy, SyntheticData


def protocol(folder: Path, text: str = "1000 canaries, one run, 95 %", name: str = "protocol.md") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_run_registers_its_protocols_before_its_first_release_and_its_card_names_them(tmp_path: Path) -> None:
    path, folder = protocol(tmp_path), tmp_path / "run"
    module = Regression(privacy=dp(tmp_path, noise_multiplier=4.0))
    fit(folder, module, steps=2, extra=[PrivacyCard(run_dir=folder, audit_protocols=[path])])
    kinds = [
        r["kind"] if r["kind"] != "event" else r["name"]
        for r in PrivacyLedger.read(folder / "privacy_ledger.jsonl").records
    ]
    assert kinds.index(PROTOCOL_EVENT) < kinds.index("intent")
    card = read_card(folder)
    (one,) = card["empirical"]["pre_registered"]
    assert (one["name"], one["sha256"]) == ("protocol.md", file_sha256(path))
    assert one["sha256"] in (folder / "privacy_card.html").read_text(encoding="utf-8")
    result = verify_chain(folder, protocols=[path])
    assert not result.failed and "was registered before the first release" in result.format()
    assert "give the file in task.protocols=[FILE]" in verify_chain(folder).format()
    path.write_text("other canaries", encoding="utf-8")
    (finding,) = verify_chain(folder, protocols=[path]).failed
    assert finding.text == "protocol.md was not registered, or not with this content."


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


def test_a_record_after_the_first_announced_step_registers_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan())
    note_protocols(run.ledger, [protocol(tmp_path)])
    run.step(0)
    run.ledger.append("event", name=PROTOCOL_EVENT, protocols=[{"name": "late.md", "sha256": "0" * 64}])
    assert [one["name"] for one in registered(run.ledger.records)] == ["protocol.md"]


def test_a_protocol_that_only_the_card_names_is_rejected(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan()).train()
    write_card(run.card(), run.folder)
    path = run.folder / "privacy_card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["empirical"]["pre_registered"] = [{"name": "late.md", "sha256": "0" * 64, "registered": card["created"]}]
    card["checksum"] = checksum(card)
    path.write_text(json.dumps(card), encoding="utf-8")
    assert "The protocols on the card are not those" in verify_chain(run.folder).format()


def test_a_derived_artefact_has_the_protocols_of_its_parent(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make_plan())
    note_protocols(run.ledger, [protocol(tmp_path)])
    run.train()
    write_card(run.card(), run.folder)
    child = inherit_card(run.folder, subject_of("dataset", "made"), description="drawing")
    assert child["empirical"]["pre_registered"] == read_card(run.folder)["empirical"]["pre_registered"] != []
    write_card(child, tmp_path / "made")
    assert not verify_chain(tmp_path / "made", protocols=[tmp_path / "protocol.md"]).failed


def test_protocols_that_cannot_be_registered_are_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path / "none.md", tmp_path, protocol(tmp_path, "", "empty.md")):
        with pytest.raises(ConfigurationError, match=r"callbacks\.card\.audit_protocols"):
            PrivacyCard(audit_protocols=[path])
    with pytest.raises(ConfigurationError, match=r"task\.protocols: .*none\.md cannot be read"):
        verify_chain(tmp_path, protocols=[tmp_path / "none.md"])
    card = PrivacyCard(audit_protocols=[protocol(tmp_path)])
    with pytest.raises(ConfigurationError, match="this run makes no release of its own"):
        card.setup(Runner(), retriever(privacy=SyntheticData()), "fit")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs the PrivacyAccountant callback before it"):
        card.setup(Runner(PrivacyAccountant()), Regression(privacy=NoPrivacy()), "fit")  # type: ignore[arg-type]


class Runner:
    """A Trainer as far as the card asks for one before training."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = list(callbacks)
