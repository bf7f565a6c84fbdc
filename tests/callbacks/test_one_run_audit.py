"""An audit that any training carries: it finds a broken mechanism, lets an honest one pass, and loses nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from memoriser import CANARIES, Memoriser, a_fixed_batch, audited, large_log, without_noise, write_large_log
from stand_ins import KillAt, Killed
from tiny_tasks import trainer

from lit_dpret.callbacks import OneRunAudit, PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import verify_card
from lit_dpret.cards.claim import claimed_curve
from lit_dpret.cards.file import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation, ResumeError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, SyntheticData

slow = pytest.mark.slow
GIVEN = {"noise_multiplier": 8.0}  # nothing to calibrate
NEIGHBOURS = ["zero_out", pytest.param("add_or_remove", marks=slow), pytest.param("replace_one", marks=slow)]
SCHEMA = json.loads((Path(__file__).parents[2] / "lit_dpret/cards/privacy_card.schema.json").read_text("utf-8"))


def settings_for(neighbours: str, folder: Path) -> dict[str, Any]:
    """What a run under these neighbours has to declare."""
    rate = {"sample_rate": 0.15} if neighbours == "add_or_remove" else {}
    return {"neighbours": neighbours, "data": large_log(folder, **rate), "steps": 40}


def card_of(folder: Path) -> dict[str, Any]:
    return read_card(folder / "run")


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return PrivacyLedger.read(folder / "run" / "privacy_ledger.jsonl").records


# -- what it finds -------------------------------------------------------------------------------


def found_out(folder: Path, neighbours: str) -> Path:
    """A run that claims epsilon = 2, adds no noise, and is stopped by its audit when it is over."""
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        with pytest.raises(PrivacyViolation, match=r"contradicts the claim: with 300 canaries.*publish neither"):
            audited(folder, **settings_for(neighbours, folder))
    return folder


@pytest.fixture(scope="module")
def noiseless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return found_out(tmp_path_factory.mktemp("noiseless"), "zero_out")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run of three steps."""
    folder = tmp_path_factory.mktemp("short")
    audited(folder, steps=3, **GIVEN)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twenty steps that was killed in its twelfth."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(Killed):
        audited(folder, steps=20, callbacks=(KillAt(12),), **GIVEN)
    return folder


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_noise_that_is_silently_missing_behind_a_claim_of_eps_2_is_caught(
    neighbours: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    zero_out = neighbours == "zero_out"
    folder = request.getfixturevalue("noiseless") if zero_out else found_out(tmp_path, neighbours)
    assert card_of(folder)["claim"]["epsilon"] <= 2.0
    assert card_of(folder)["empirical"]["results"][0]["eps_lower"] > 2.0


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_the_honest_mechanism_of_the_same_settings_is_not_flagged(neighbours: str, tmp_path: Path) -> None:
    audited(tmp_path, **settings_for(neighbours, tmp_path))
    found = card_of(tmp_path)["empirical"]["results"][0]
    assert found["eps_lower"] <= card_of(tmp_path)["claim"]["epsilon"] and found["n"] == CANARIES


@pytest.mark.parametrize("broken", [True, pytest.param(False, marks=slow)])
def test_a_fixed_batch_of_canaries_behind_a_claim_of_poisson_sampling_is_caught(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch has the planned size, so that nothing but the audit can see it."""
    if broken:
        a_fixed_batch(monkeypatch)
    write_large_log(tmp_path / "log", queries=7000)
    audit = OneRunAudit(canaries=200, max_share=0.06, seed=11)
    run = {"data": large_log(tmp_path, expected_batch_size=200), "audit": audit, "eps": 1.0, "steps": 40}
    if broken:
        with pytest.raises(PrivacyViolation, match="contradicts the claim"):
            audited(tmp_path, **run)
    else:
        audited(tmp_path, **run)
    assert card_of(tmp_path)["claim"]["epsilon"] <= 1.0


def test_without_privacy_there_is_a_bound_and_no_claim_to_contradict(tmp_path: Path) -> None:
    audited(tmp_path, module=Memoriser(NoPrivacy()), steps=40)
    (found,) = card_of(tmp_path)["empirical"]["results"]
    assert found["eps_lower"] > 3.0 and found["ceiling"] is None


# -- what is on the disk when it is over ---------------------------------------------------------


def test_model_ledger_and_card_are_whole_when_the_run_ends_with_an_error(noiseless: Path) -> None:
    run, card = noiseless / "run", card_of(noiseless)
    assert ledger_of(noiseless)[-1]["reason"] == "finished"
    assert (run / "model" / "weights.pt").is_file() and list(card["subject"]["sha256"]) == ["weights.pt"]
    assert read_card(run / "model")["empirical"] == card["empirical"]
    assert verify_card(card, run / "privacy_ledger.jsonl") == []
    assert not list(Draft202012Validator(SCHEMA).iter_errors(card))
    assert "AN AUDIT CONTRADICTS THIS CLAIM" in card["claim"]["statement"]
    page = (run / "privacy_card.html").read_text(encoding="utf-8")
    assert page.count("AN AUDIT CONTRADICTS THIS CLAIM") == 2  # the banner, and the statement


def test_the_card_says_what_was_found_and_that_the_model_is_the_canaried_one(short: Path) -> None:
    card, page = card_of(short), (short / "run" / "privacy_card.md").read_text(encoding="utf-8")
    bound, curve = card["empirical"]["results"]
    assert (bound["n"], bound["confidence"], bound["delta"]) == (CANARIES, 0.95, card["claim"]["delta"])
    assert (curve["confidence"], curve["metric"]) == (1 - 1e-4, "lower bound on epsilon")
    assert (curve["ceiling"], curve["delta"]) in claimed_curve(ledger_of(short)).pairs
    assert card["empirical"]["planted"]["canaries"] == CANARIES == card["empirical"]["planted"]["units"]
    assert "absence of evidence is no guarantee" in page and "This is the canaried model" in page
    assert "CONTRADICTS" not in page
    assert verify_card(card, short / "run" / "privacy_ledger.jsonl") == []


def test_canaries_and_coins_are_told_by_their_hash_alone(short: Path) -> None:
    run = short / "run"
    secrets = [one["secret"] for one in json.loads((run / "canaries.json").read_text(encoding="utf-8"))["canaries"]]
    for file in [*run.glob("privacy_*"), *(run / "model").iterdir()]:
        assert not any(secret.encode() in file.read_bytes() for secret in secrets), file
    for name in ("canaries.json", "audit_scores.json"):
        assert (run / name).stat().st_mode & 0o777 == 0o600


def test_what_will_be_done_stands_in_the_ledger_before_the_first_release(short: Path) -> None:
    kinds = [record["kind"] if record.get("name") != "one_run_audit" else "audit" for record in ledger_of(short)]
    assert kinds.index("audit") < kinds.index("intent")
    (record,) = [record for record in ledger_of(short) if record.get("name") == "one_run_audit"]
    assert (
        record["audit"]["canaries"] == CANARIES
        and record["audit"]["sha256"] == ledger_of(short)[0]["planted"]["sha256"]
    )


# -- resuming ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_canaries_and_first_scores(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("canaries.json", "audit_scores.json")}
    assert card_of(tmp_path)["empirical"]["results"] == []
    audited(tmp_path, steps=20, resume=True, **GIVEN)
    after = json.loads((tmp_path / "run" / "audit_scores.json").read_text(encoding="utf-8"))
    assert (tmp_path / "run" / "canaries.json").read_bytes() == before["canaries.json"]
    assert after["before"] == json.loads(before["audit_scores.json"])["before"] and after["after"] is not None
    assert len(card_of(tmp_path)["empirical"]["results"]) == 2


def test_a_run_that_is_finished_already_is_judged_alike_again(short: Path, tmp_path: Path) -> None:
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    before = card_of(tmp_path)["empirical"]["results"]
    audited(tmp_path, steps=3, resume=True, **GIVEN)
    assert card_of(tmp_path)["empirical"]["results"] == before  # and what is said already is not said again


def test_a_resume_with_another_audit_is_refused(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ResumeError, match="count was 300 and is 200 now"):
        audited(tmp_path, steps=20, resume=True, audit=OneRunAudit(canaries=200, max_share=0.9, seed=11), **GIVEN)
    with pytest.raises(ResumeError, match=r"confidence was 0\.95 and is 0\.9 now"):
        audited(tmp_path, steps=20, resume=True,
                audit=OneRunAudit(canaries=CANARIES, max_share=0.9, seed=11, confidence=0.9), **GIVEN)  # fmt: skip
    (tmp_path / "run" / "audit_scores.json").unlink()
    with pytest.raises(ResumeError, match="without the scores before training"):
        audited(tmp_path, steps=20, resume=True, **GIVEN)


# -- what is refused before anything is trained --------------------------------------------------


def refused(folder: Path, audit: OneRunAudit, match: str, **settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=match):
        audited(folder, audit=audit, **settings)
    assert not (folder / "run" / "privacy_ledger.jsonl").exists()


def test_numbers_of_canaries_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, OneRunAudit(), "max_share=0.01 of the units")
    refused(tmp_path, OneRunAudit(canaries=100), "100 canaries or more are more than callbacks.audit.max_share=0.01")
    refused(
        tmp_path,
        OneRunAudit(max_share=0.5),
        "canaries=null cannot be derived",
        **settings_for("add_or_remove", tmp_path),
    )
    for wrong in ({"canaries": 8}, {"max_share": 0.0}, {"confidence": 1.0}, {"kind": "loud"}, {"queries": "dev"},
                  {"seed": "abc"}, {"seed": -1}, {"seed": True}):  # fmt: skip
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            OneRunAudit(**wrong)  # type: ignore[arg-type]


def queries_file(folder: Path, *more: str) -> Path:
    """Public queries, and ``more``, as records."""
    texts = [*(f"how do tides {i} turn at noon" for i in range(CANARIES)), *more]
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def audit_of(queries: str | Path) -> OneRunAudit:
    return OneRunAudit(canaries=CANARIES, max_share=0.9, seed=11, queries=str(queries))


@pytest.mark.parametrize("split", ["train", "test"])
def test_words_of_the_runs_own_queries_are_refused_by_the_name_of_the_setting(split: str, tmp_path: Path) -> None:
    log = large_log(tmp_path)
    asked = "why is my left knee so sore"
    log.collection.queries["q0"] = asked
    log.collection.qrels["test"] = {"q0": log.collection.qrels["train"]["q0"]}
    if split == "test":
        del log.collection.qrels["train"]["q0"]
    path = queries_file(tmp_path, f"q7: {asked}?")
    refused(tmp_path, audit_of(path), r"^callbacks\.audit\.queries", data=log, **GIVEN)
    refused(tmp_path, audit_of(tmp_path / "none.tsv"), r"^callbacks\.audit\.queries", **GIVEN)
    short = tmp_path / "short.txt"
    short.write_text("how do tides turn\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"^callbacks\.audit\.queries.*callbacks\.audit\.canaries"):
        audited(tmp_path, audit=audit_of(short), **GIVEN)


def test_the_card_names_the_declaration_that_the_words_of_canaries_are_public(tmp_path: Path) -> None:
    audited(tmp_path, audit=audit_of(queries_file(tmp_path)), steps=2, **GIVEN)
    card, ledger = card_of(tmp_path), tmp_path / "run" / "privacy_ledger.jsonl"
    (told,) = [one for one in card["assumptions"] if "canaries took their words" in one["text"]]
    assert told["holds"] == "unverified" and verify_card(card, ledger) == []


def test_one_percent_of_the_units_and_a_thousand_at_most_are_planted_by_default() -> None:
    audit = OneRunAudit()
    assert [audit._count(units, "zero_out") for units in (3200, 12_889, 532_000)] == [32, 128, 1000]


def test_a_run_that_cannot_be_audited_is_refused_with_the_reason(tmp_path: Path) -> None:
    audit, run = OneRunAudit(canaries=64, max_share=0.5), tmp_path / "run"
    bare = Memoriser(DPSGD(eps=2.0, delta=1e-5, secret_file=tmp_path / "secret"))
    log, counted, card = large_log(tmp_path), PrivacyAccountant(run_dir=run), PrivacyCard(run_dir=run)
    for callbacks, module, match in (
        ([counted, audit, card], bare, "comes before PrivacyCard"),
        ([audit], Memoriser(NoPrivacy()), "PrivacyAccountant"),
    ):
        found = trainer(max_steps=2, logger=False, callbacks=callbacks, default_root_dir=str(run))
        with pytest.raises(ConfigurationError, match=match):
            found.fit(module, datamodule=log)
    with pytest.raises(ConfigurationError, match="trains on released data"):
        audit._refuse(trainer(callbacks=[audit]), Memoriser(SyntheticData()), log)
    with pytest.raises(ConfigurationError, match="has no plant"):
        audit._refuse(trainer(callbacks=[audit]), bare, object())
    with pytest.raises(ConfigurationError, match="has no canary_scores"):
        nothing = torch.nn.Linear(1, 1)
        nothing.privacy = NoPrivacy()  # type: ignore[assignment]
        audit._refuse(trainer(callbacks=[audit]), nothing, log)


def test_an_audit_that_could_not_contradict_the_claim_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The ceilings are those of this callback, which guesses four canaries in five and tries three shares."""

    def warned(eps: float) -> str:
        caplog.clear()
        audited(tmp_path / str(eps), steps=2, audit=OneRunAudit(canaries=64, max_share=0.5), eps=eps)
        told = read_card(tmp_path / str(eps) / "run")["empirical"]["results"][0]["attack"]
        assert "64 canaries show 2.46 at most" in told
        assert ("no guesses of theirs contradict" in told) == ("no guesses of theirs contradict" in caplog.text)
        return caplog.text

    assert "64 canaries show 2.46 at most" in (above_both := warned(2.8)) and "no guesses" in above_both
    assert "no guesses" in warned(2.0)  # the bound lies above the claim, and the alarm could not ring
    assert "at most" not in warned(1.0)


# -- where the unit is a person, a canary is a person with one query ----------------------------------

QUERIES, USERS = 800, 400


def log_of_users(folder: Path) -> PairsDataModule:
    """The large log, every two of its queries written by one person."""
    place = write_large_log(folder / "log", queries=QUERIES)
    rows = []
    queries = [json.loads(line) for line in (place / "queries.jsonl").read_text(encoding="utf-8").splitlines()]
    corpus = [json.loads(line) for line in (place / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, query in enumerate(queries):
        passage = corpus[number % len(corpus)]
        rows.append(
            {"query": query["text"], "query_id": query["_id"], "passage": passage["text"],
             "passage_id": passage["_id"], "user_id": f"user {number % USERS}"}
        )  # fmt: skip
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PairsDataModule(
        pairs=folder / "pairs.jsonl", corpus=place / "corpus.jsonl", sampling="poisson", expected_batch_size=100,
        physical_batch_size=400, rows_per_unit="all",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("broken", [True, False], ids=["without noise", "as claimed"])
def test_a_claim_about_people_is_audited_by_people_who_are_canaries(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"unit": "user", "data": log_of_users(tmp_path), "steps": 40}
    if broken:
        without_noise(monkeypatch)
        with pytest.raises(PrivacyViolation, match=r"contradicts the claim: with 300 canaries"):
            audited(tmp_path, **settings)
    else:
        audited(tmp_path, **settings)
    card = read_card(tmp_path / "run")
    bound = card["empirical"]["results"][0]
    assert card["claim"]["unit"] == "user" and card["claim"]["epsilon"] <= 2.0
    assert (bound["eps_lower"] > 2.0) == broken and bound["n"] == CANARIES
    assert card["empirical"]["planted"]["units"] == CANARIES
