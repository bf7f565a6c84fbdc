"""A good chain of cards is accepted from each of its links, and one with any part changed is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain
from cards import Run, made_from, make_plan, rewrite_chain, started
from tiny_tasks import no_parts

from lit_dpret.cards import verification
from lit_dpret.cards.amendments import AttackResult, add_evidence, note_not_covered
from lit_dpret.cards.audits import ALARM, AUDIT_EVENT, BOUND
from lit_dpret.cards.card import build_card, inherit_card, read_card, subject_of, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.hub import claim_metadata, front_matter
from lit_dpret.cards.lineage import copy_lineage
from lit_dpret.cards.start import read_start
from lit_dpret.cards.text import WITHOUT_PRIVACY
from lit_dpret.cards.verification import Verification, verify_chain
from lit_dpret.errors import ConfigurationError, DataError, VerificationError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.tasks import Verify

LEDGER = "privacy_ledger.jsonl"


def rejected(result: Verification, *, artefact: str, check: str) -> str:
    """The complaint of the one check that failed."""
    assert [(f.artefact, f.check) for f in result.failed] == [(artefact, check)], result.format()
    return result.failed[0].text


def other_files(result: Verification) -> list[str]:
    """What is said of files that no card lists."""
    return [one.text for one in result.not_checked if one.check == "other files"]


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, forge: bool = True) -> None:
    """Change a card's JSON; with its checksum put right, as somebody who knows the format would."""
    card = json.loads(path.read_text(encoding="utf-8"))
    change(card)
    if forge:
        card["checksum"] = checksum(card)
    path.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def less_noise(record: dict[str, Any]) -> None:
    if record["kind"] == "release":
        record["noise_std"] /= 2


# -- a good chain ------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["index", "embeddings", "encoder", "synthetic", "generator"])
def test_a_good_chain_is_accepted_from_each_link(link: str, made: Chain) -> None:
    result = verify_chain(getattr(made, link))
    assert not result.failed, result.format()
    confirmed = [(f.artefact, f.check) for f in result.findings if f.outcome == "ok"]
    order = ["index", "embeddings", "FrozenDualEncoder", "synthetic", "QueryGenerator"]
    names = [name for name, check in confirmed if check == "card"]
    assert names == order[-len(names) :] and len(names) >= 1
    assert {("QueryGenerator", "ledger"), ("QueryGenerator", "numbers")} <= set(confirmed)
    assert sum(check == "parent" for _, check in confirmed) == len(names) - 1
    assert result.claim.startswith("epsilon = ")
    if (copy := getattr(made, link) / "model").is_dir():
        assert not verify_chain(copy).failed, "the card in the model folder is as good as that of the run"


# -- each must be rejected ---------------------------------------------------------------------


def test_a_changed_ledger_line_is_rejected_by_its_number(chain: Chain) -> None:
    path = chain.generator / LEDGER
    lines = path.read_text(encoding="utf-8").splitlines()
    place = next(i for i, line in enumerate(lines) if '"kind":"release"' in line)
    lines[place] = lines[place].replace('"noise_std":2', '"noise_std":9')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for link in (chain.generator, chain.index):
        text = rejected(verify_chain(link), artefact="QueryGenerator", check="ledger")
        assert f"line {place + 1}: the content does not match its hash" in text


def test_a_ledger_with_less_noise_and_hashes_put_right_is_not_that_of_the_card_or_shows_that_it_claims_too_little(
    chain: Chain,
) -> None:
    path = chain.generator / LEDGER
    rewrite_chain(path, less_noise)
    assert "another ledger" in rejected(verify_chain(chain.index), artefact="QueryGenerator", check="ledger")
    head = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["hash"]
    edit(chain.generator / "privacy_card.json", lambda card: card["ledger"].update(head=head))
    result = verify_chain(chain.generator)
    assert "claim.epsilon" in result.failed[0].text and result.failed[0].check == "ledger"


def test_a_swapped_file_is_rejected_and_a_missing_one_if_it_is_of_the_subject_itself(chain: Chain) -> None:
    queries = chain.synthetic / "queries.jsonl"
    first, *others = queries.read_text(encoding="utf-8").splitlines(keepends=True)
    queries.write_text("".join([*others, first]), encoding="utf-8")
    for link in (chain.synthetic, chain.index):
        text = rejected(verify_chain(link), artefact="synthetic", check="files")
        assert text.startswith("queries.jsonl was changed")
    for path in [one for one in chain.synthetic.rglob("*") if one.is_file() and one.name != "privacy_card.json"]:
        if "shards" not in path.parts:
            path.unlink()
    assert not verify_chain(chain.encoder).failed, "of a parent's files nothing is left beside its card"
    assert {f.check for f in verify_chain(chain.synthetic).failed} == {"files"}


def test_a_missing_parent_is_rejected_unless_that_is_allowed_and_then_it_is_said(
    chain: Chain, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(chain.synthetic, elsewhere)
    text = rejected(verify_chain(chain.index), artefact="synthetic", check="card")
    assert "was not found" in text and "task.parents" in text
    allowed = verify_chain(chain.index, allow_missing_parents=True)
    assert not allowed.failed
    assert ("synthetic", "card") in [(f.artefact, f.check) for f in allowed.not_checked]
    assert ("QueryGenerator", "numbers") in [(f.artefact, f.check) for f in allowed.findings], "the rest is checked"
    found = verify_chain(chain.index, parents=[elsewhere])
    assert not found.failed and ("synthetic", "card") not in [(f.artefact, f.check) for f in found.not_checked]


def test_what_is_handed_over_alone_is_checked_without_what_lies_around_it(chain: Chain) -> None:
    """Beside the curator's other runs an incomplete release would pass, and fail where it arrives."""
    assert not (found := verify_chain(chain.synthetic)).failed
    assert {path.parent for path in found.elsewhere} == {chain.generator}
    failed = {(one.artefact, one.check) for one in verify_chain(chain.synthetic, self_contained=True).failed}
    assert failed == {("QueryGenerator", "card"), ("synthetic", "ledger")}
    assert not verify_chain(chain.synthetic, self_contained=True, parents=[chain.generator]).failed
    copy_lineage(chain.synthetic / "privacy_card.json", chain.synthetic / "provenance")
    whole = verify_chain(chain.synthetic, self_contained=True)
    assert not whole.failed and not whole.elsewhere
    assert not any(LEDGER in text for text in other_files(whole)), "it is checked with its run"
    # A link that leads out of the folder completes no release.
    for file in [one for one in (chain.synthetic / "provenance").rglob("*") if one.is_file()]:
        away = chain.root / f"{file.parent.name}-{file.name}"
        file.rename(away)
        file.symlink_to(away)
    assert failed == {(one.artefact, one.check) for one in verify_chain(chain.synthetic, self_contained=True).failed}


def test_a_missing_ledger_is_rejected_unless_that_is_allowed(
    chain: Chain, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("handed") / "on" / "to" / "others"
    shutil.copytree(chain.generator / "model", folder)
    text = rejected(verify_chain(folder), artefact="QueryGenerator", check="ledger")
    assert "epsilon was not recomputed" in text
    assert [f.check for f in verify_chain(folder, allow_missing_ledger=True).not_checked] == [
        "ledger", "entries", "protocol", "signature",
    ]  # fmt: skip
    assert not verify_chain(folder, parents=[chain.generator]).failed


def test_a_card_or_a_parent_that_was_edited_by_hand_is_rejected(chain: Chain) -> None:
    edit(chain.synthetic / "privacy_card.json", lambda card: card["claim"].update(epsilon=0.01), forge=False)
    assert "It was edited" in rejected(verify_chain(chain.synthetic), artefact="privacy_card.json", check="card")
    text = rejected(verify_chain(chain.encoder), artefact="synthetic", check="card")
    assert "The search met 1 cards that are damaged or were edited" in text and "synthetic/privacy_card.json" in text
    edit(chain.synthetic / "privacy_card.json", lambda card: card["claim"].update(epsilon=0.01))
    rejected(verify_chain(chain.encoder), artefact="synthetic", check="card")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda card: card["claim"].update(epsilon=0.01), "It says epsilon = 0.01, its parent"),
        (lambda card: card["claim"].update(unit="user"), "It says unit = 'user', its parent 'query'"),
        (lambda card: card["accounting"].update(epsilon_rdp=0.01), "Its accounting block is not its parent's"),
        (lambda card: card["empirical"]["ceilings"].update(membership_accuracy=0.5), "Its ceilings of attacks"),
        (lambda card: card["parents"].pop(), "The cards that it names after its parent are not"),
        (lambda card: card["assumptions"].pop(), "It leaves out assumptions of its parent"),
        (lambda card: card["assumptions"][0].update(holds=False), "One of its own assumptions does not hold"),
        (lambda card: card["not_covered"].pop(), "It leaves out what its parent does not cover"),
    ],
    ids=["epsilon", "unit", "accounting", "ceilings", "ancestors", "assumptions", "false assumption", "not covered"],
)
def test_a_derived_card_that_says_more_than_its_parent_or_names_none_is_rejected(
    change: Callable[[dict[str, Any]], None], complaint: str, chain: Chain
) -> None:
    edit(chain.encoder / "privacy_card.json", change)
    found = [f.text for f in verify_chain(chain.encoder).failed if f.check == "parent"]
    assert len(found) == 1 and found[0].startswith(complaint)
    edit(chain.synthetic / "privacy_card.json", lambda card: card["parents"].clear())
    rejected(verify_chain(chain.synthetic), artefact="synthetic", check="parents")


def at_commit(folder: Path, commit: str | None) -> None:
    """Write the card in ``folder`` as lit-dpret of this commit would have."""
    card = read_card(folder)
    card["environment"]["code_commit"] = commit
    card["checksum"] = checksum(card)
    write_card(card, folder)


def test_words_and_pages_that_do_not_follow_from_the_facts_are_rejected(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "code_commit", lambda: "a" * 40)
    for folder in (chain.generator, chain.generator / "model"):
        at_commit(folder, "a" * 40)
    page = chain.generator / "privacy_card.html"
    page.write_text(page.read_text(encoding="utf-8").replace("zero-out", "nothing at all"), encoding="utf-8")
    assert "privacy_card.html" in rejected(verify_chain(chain.generator), artefact="QueryGenerator", check="words")
    edit(chain.generator / "model" / "privacy_card.json", lambda card: card["not_covered"].pop())
    assert "gaps of the claim, are missing" in verify_chain(chain.generator / "model").failed[0].text


def test_words_that_another_version_may_have_written_are_not_called_wrong_unless_a_warning_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "code_commit", lambda: "a" * 40)
    run = Run(tmp_path / "run", None, mode="none").train(3)
    run.write_card()
    for commit in ("b" * 40, "a" * 40 + "+changes", None):
        at_commit(run.folder, commit)
        (run.folder / "privacy_card.html").write_text("older words", encoding="utf-8")
        result = verify_chain(run.folder)
        assert not result.failed and "words" in [finding.check for finding in result.not_checked]
    edit(run.folder / "privacy_card.json", lambda card: card["banners"].clear())
    rejected(verify_chain(run.folder), artefact="generator", check="words")


def test_a_card_that_lacks_what_every_card_has_is_rejected_and_not_stumbled_over(chain: Chain) -> None:
    for name in ("mechanism", "banners", "cautions", "package_versions", "assumptions"):
        path = shutil.copytree(chain.generator, chain.root / f"without {name}") / "privacy_card.json"
        edit(path, lambda card, name=name: card.pop(name))  # type: ignore[misc]
        found = verify_chain(path)
        assert found.failed and f"'{name}'" in found.failed[-1].text


# -- cards that were amended -------------------------------------------------------------------


def test_a_chain_whose_generator_an_audit_contradicts_is_rejected_and_nothing_is_claimed_of_what_is_made_from_it(
    chain: Chain,
) -> None:
    found = AttackResult(
        attack="one-run audit", n=300, metric=BOUND, estimate=90.0, eps_lower=90.0, delta=1e-5, confidence=ALARM,
        ceiling=50.0,
    )  # fmt: skip
    for folder in (chain.generator, chain.generator / "model"):
        add_evidence(folder, [found])
    for link in (chain.index, chain.generator):
        assert "CONTRADICTS" in rejected(verify_chain(link), artefact="QueryGenerator", check="audit")
    card = made_from(chain.generator)
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    assert any("An audit of QueryGenerator" in text for text in card["banners"])
    with pytest.raises(ConfigurationError, match="no privacy guarantee"):
        read_start(chain.generator, public=False).check(DPSGD(eps=1.0))


def test_a_card_that_lost_the_result_of_an_audit_that_its_ledger_registered_is_rejected(tmp_path: Path) -> None:
    run = Run(tmp_path, make_plan())
    run.ledger.append("event", name=AUDIT_EVENT, audit={"canaries": 9})
    run.train(3).write_card()
    text = [finding.text for finding in verify_chain(tmp_path).failed if finding.check == "audit"]
    assert len(text) == 1 and "registered" in text[0]
    add_evidence(tmp_path, [AttackResult(attack="one-run audit", n=9, metric=BOUND, estimate=0.1, eps_lower=0.1)])
    assert not verify_chain(tmp_path).failed


# -- runs that started from another run's model ------------------------------------------------


def test_a_run_that_started_from_another_is_followed_to_it_and_so_is_its_export(tmp_path: Path) -> None:
    second, export = started(tmp_path), tmp_path / "export"
    second.write_card()
    result = verify_chain(second.folder)
    assert not result.failed
    assert [f.artefact for f in result.findings if f.check == "ledger"] == ["generator", "first"]
    export.mkdir()
    (export / "weights").write_bytes(b"w")
    (export / "unknown").write_bytes(b"u")
    subject = subject_of("weights", "export", [export / "weights"], root=export)
    write_card(inherit_card(second.folder, subject, description="writing out"), export)
    copy_lineage(export / "privacy_card.json", export / "provenance", near=second.folder / "privacy_card.json")
    assert len(list(export.glob(f"provenance/*/{LEDGER}"))) == 2
    result = verify_chain(export, self_contained=True)
    assert not result.failed
    (others,) = other_files(result)
    assert "unknown" in others and LEDGER not in others


def test_a_run_that_charges_its_start_too_little_is_rejected_by_the_ledger_of_that(tmp_path: Path) -> None:
    second = started(tmp_path)

    def cheaper(record: dict[str, Any]) -> None:
        if record.get("name") == "init_from":
            record["start"]["releases"][0]["noise_multiplier"] *= 2

    rewrite_chain(second.path, cheaper)
    records = PrivacyLedger.read(second.path).records
    write_card(build_card(records, subject_of("weights", "second")), second.folder)
    assert "its start cost" in rejected(verify_chain(second.folder), artefact="second", check="parent")


def test_parents_may_be_named_by_their_files_and_hidden_folders_are_not_searched(
    chain: Chain, tmp_path_factory: pytest.TempPathFactory
) -> None:
    far = tmp_path_factory.mktemp("far")
    shutil.move(chain.synthetic / "privacy_card.json", far / "card of the queries.json")
    shutil.copytree(chain.synthetic, far / ".hidden")
    shutil.copy2(far / "card of the queries.json", far / ".hidden" / "privacy_card.json")
    assert verify_chain(chain.encoder, parents=[far]).failed
    assert not verify_chain(chain.encoder, parents=[far / "card of the queries.json"]).failed


# -- the task ----------------------------------------------------------------------------------


def test_the_task_says_each_check_in_a_line_and_fails_where_one_does(
    chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    counts = Verify(card=chain.index, report=report).run(no_parts(tmp_path / "run"))
    assert counts["failed"] == 0 and counts["ok"] > 15
    told = json.loads(report.read_text(encoding="utf-8"))
    assert told["schema"] == "lit-dpret/verification/1" and told["counts"]["ok"] == counts["ok"]
    several = sum(finding["check"] == "entries" for finding in told["findings"])
    assert several == 5 and len(lines := capsys.readouterr().out.splitlines()) == sum(counts.values()) - several + 5
    assert sum(", entries: " in line for line in lines) == 1
    assert lines[-3].startswith("checks: ") and str(chain.generator / LEDGER) in lines[-1]
    assert not (tmp_path / "run").exists(), "nothing is written that nobody asked for"
    (chain.index / "texts.jsonl").write_bytes(b"")
    with pytest.raises(VerificationError, match=r"checks failed, the first: index, files"):
        Verify(card=chain.index).run(no_parts(tmp_path / "report"))
    shown = capsys.readouterr().out
    assert "FAILED       index, files: texts.jsonl" in shown
    assert not shown.startswith("epsilon"), "a card that fails has no claim to show"
    with pytest.raises(DataError, match="does not exist"):
        Verify(card=chain.index, parents=[tmp_path / "no"]).run(no_parts(tmp_path / "report"))


def test_a_synthetic_set_made_from_a_card_without_a_guarantee_promises_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", None, mode="none").train()
    write_card(made_from(run.write_card()), tmp_path / "made")
    result = verify_chain(tmp_path / "made")
    assert not result.failed and result.claim == WITHOUT_PRIVACY
    edit(tmp_path / "made" / "privacy_card.json", lambda card: card["claim"].update(guarantee="not_proved"))
    assert "It says that the guarantee is 'not_proved'" in verify_chain(tmp_path / "made").format()


def test_what_is_made_from_an_inherited_artefact_is_not_held_against_the_ledger_of_that_artefacts_own_run(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "generator", make_plan()).train()
    run.write_card()
    encoder = Run(tmp_path / "encoder", None, mode="synthetic").folder  # a run that released nothing has a ledger too
    write_card(made_from(run.folder), encoder)
    export = made_from(encoder)
    assert export["claim"]["epsilon"] == read_card(run.folder)["claim"]["epsilon"]
    shutil.copy(run.path, encoder / "privacy_ledger.jsonl")
    told = "The parent's epsilon follows from the parent's ledger."
    holds = [
        next(a["holds"] for a in card["assumptions"] if a["text"] == told) for card in (export, made_from(encoder))
    ]
    assert holds == ["unverified", True]
    ledger = (run.folder / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run.folder / "privacy_ledger.jsonl").write_text("".join(ledger[:-1]), encoding="utf-8")
    with pytest.raises(DataError, match="does not agree with its ledger"):
        made_from(run.folder)  # a first-hand card is always checked


def test_the_claim_on_the_page_that_a_hub_shows_is_checked_and_one_without_is_named(chain: Chain) -> None:
    folder = max(chain.root.rglob("privacy_card.json"), key=lambda path: len(path.parts)).parent
    card, page = read_card(folder), folder / "README.md"

    def readme() -> list[tuple[str, str]]:
        found = verify_chain(folder).findings
        own = [one for one in found if one.artefact == found[0].artefact]
        return [(one.outcome, one.check) for one in own if "README.md" in one.check + one.text]

    page.write_text("# A model\n", encoding="utf-8")
    assert readme() == [("not_checked", "other files")]
    page.write_text(front_matter({"privacy": claim_metadata(card)}) + "# A model\n", encoding="utf-8")
    assert readme() == [("ok", "README.md")]
    better = {**claim_metadata(card), "epsilon": 0.1}
    page.write_text(front_matter({"privacy": better}) + "# A model\n", encoding="utf-8")
    assert readme() == [("failed", "README.md")]
    page.write_text(stale := front_matter({"privacy": claim_metadata(card)}), encoding="utf-8")
    note_not_covered(folder, "A score of M", computed="private queries")
    assert readme() == [("ok", "README.md")] and "A score of M" in page.read_text(encoding="utf-8")
    page.write_text(stale, encoding="utf-8")
    assert readme() == [("failed", "README.md")], "the page of the card before its caution"


@pytest.mark.parametrize(
    "text",
    [
        "---\nnote: a---\nprivacy: {epsilon: 0.001}\n---\n",
        "---\nnote: a\n--- \nprivacy: {epsilon: 0.001}\n---\n",
        "\n\n---\r\nprivacy: {epsilon: 0.001}\r\n---\r\n",
        "\ufeff---\nprivacy: {epsilon: 0.001}\n---\n",
        "---\nprivacy: {epsilon: 0.001}\n---",
        "---\nprivacy: {epsilon: 0.001\n---\n",
        "---\nprivacy: {epsilon: 0.001}\n",
        "---\nprivacy\n---\n",
        "---\nprivacy: {epsilon: 0.001}\nnote: \udcff\n---\n",
    ],
)
def test_no_header_that_a_hub_might_read_otherwise_passes(text: str, chain: Chain) -> None:
    folder = chain.generator / "model"
    (folder / "README.md").write_bytes(text.encode("utf-8", "surrogateescape"))
    rejected(verify_chain(folder), artefact="QueryGenerator", check="README.md")


def test_a_page_beside_the_card_is_read_where_the_files_lie_in_the_model_folder_or_the_page_is_on_the_card(
    chain: Chain,
) -> None:
    folder = chain.generator
    card = read_card(folder)
    (folder / "README.md").write_text(front_matter({"privacy": claim_metadata(card)}), encoding="utf-8")
    found = verify_chain(folder)
    assert ("ok", "README.md") in [(one.outcome, one.check) for one in found.findings] and not found.failed
    (folder / "model" / "pytorch_model.bin").write_bytes(b"other weights")
    (folder / "model" / "README.md").write_text("# A model\n", encoding="utf-8")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"of another run")
    (others,) = other_files(verify_chain(folder))
    assert all(name in others for name in ("README.md", "pytorch_model.bin", "checkpoints/last.ckpt"))
    edit(chain.synthetic / "privacy_card.json", lambda card: card["subject"]["sha256"].update({"README.md": "0" * 64}))
    failed = {one.check for one in verify_chain(chain.synthetic).failed}
    # The pages of a card that this very version made say other words than the edited one.
    assert failed - {"words"} == {"README.md", "files"}, "its header names another card, and its digest is another"
