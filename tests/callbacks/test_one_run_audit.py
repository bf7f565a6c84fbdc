"""An audit that any training carries: it finds a broken mechanism, lets an honest one pass, and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from audit.canaries.conftest import digit_module, digit_tokenizer
from jsonschema import Draft202012Validator
from memoriser import CANARIES, Memoriser, a_fixed_batch, audited, large_log, without_noise, write_large_log
from stand_ins import KillAt, Killed
from tiny_generator import WORDS as GENERATOR_WORDS
from tiny_generator import generator
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from tiny_tasks import retriever, trainer

from lit_dpret.callbacks import OneRunAudit, PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import verify_card
from lit_dpret.cards.claim import claimed_curve
from lit_dpret.cards.file import read_card
from lit_dpret.datamodules import ImagesDataModule, PairsDataModule
from lit_dpret.datamodules.rows import Row
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.vision import EmbeddingNet
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation, ResumeError
from lit_dpret.modules import DualEncoder, EmbeddingTrainer, OptimizerSpec
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import (
    DPSGD,
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PublicPassages,
    SyntheticData,
)

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


@pytest.mark.costly
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_noise_that_is_silently_missing_behind_a_claim_of_eps_2_is_caught(
    neighbours: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    zero_out = neighbours == "zero_out"
    folder = request.getfixturevalue("noiseless") if zero_out else found_out(tmp_path, neighbours)
    assert card_of(folder)["claim"]["epsilon"] <= 2.0
    assert card_of(folder)["empirical"]["results"][0]["eps_lower"] > 2.0


@pytest.mark.costly
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_the_honest_mechanism_of_the_same_settings_is_not_flagged(neighbours: str, tmp_path: Path) -> None:
    audited(tmp_path, **settings_for(neighbours, tmp_path))
    found = card_of(tmp_path)["empirical"]["results"][0]
    assert found["eps_lower"] <= card_of(tmp_path)["claim"]["epsilon"] and found["n"] == CANARIES


@pytest.mark.costly
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


@pytest.mark.costly
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


@pytest.mark.costly
def test_the_card_says_what_was_found_and_what_was_planted(short: Path) -> None:
    card = card_of(short)
    bound, curve = card["empirical"]["results"]
    assert (bound["n"], bound["confidence"], bound["delta"]) == (CANARIES, 0.95, card["claim"]["delta"])
    assert (curve["confidence"], curve["metric"]) == (1 - 1e-4, "lower bound on epsilon")
    assert (curve["ceiling"], curve["delta"]) in claimed_curve(ledger_of(short)).pairs
    assert card["empirical"]["planted"]["canaries"] == CANARIES == card["empirical"]["planted"]["units"]
    assert "CONTRADICTS" not in card["claim"]["statement"]
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
    audit = ledger_of(short)[kinds.index("audit")]["audit"]
    assert audit["canaries"] == CANARIES
    assert audit["sha256"] == ledger_of(short)[0]["planted"]["sha256"]


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


@pytest.mark.costly
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
    refused(tmp_path, OneRunAudit(canaries=100), "at least 100 canaries, more than callbacks.audit.max_share=0.01")
    private = settings_for("add_or_remove", tmp_path)
    refused(tmp_path, OneRunAudit(max_share=0.5), "canaries=null cannot be derived", **private)
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


@pytest.mark.costly
def test_an_audit_that_could_not_contradict_the_claim_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The ceilings are those of this callback, which guesses four canaries in five and tries three shares."""

    def warned(eps: float) -> str:
        caplog.clear()
        audited(tmp_path / str(eps), steps=2, audit=OneRunAudit(canaries=64, max_share=0.5), eps=eps)
        told = read_card(tmp_path / str(eps) / "run")["empirical"]["results"][0]["attack"]
        assert "64 canaries can show at most 2.46" in told
        assert ("would not contradict" in told) == ("would not contradict" in caplog.text)
        return caplog.text

    assert "64 canaries can show at most 2.46" in (above_both := warned(2.8)) and "would not contradict" in above_both
    assert "would not contradict" in warned(2.0)  # the bound lies above the claim, and the alarm could not ring
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


# -- every family of models and every privacy mode carries the audit: blank units among the drawn, s--


NOISE: dict[str, Any] = {"eps": 50.0, "delta": 1e-5, "noise_multiplier": 20.0}
ADAM = OptimizerSpec(lr=0.01)


def encoder() -> TextEncoder:
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    return TextEncoder(tiny_bert(**plain), tiny_tokenizer(), Contract(query_max_length=16, passage_max_length=8))


def dual(privacy: Any) -> DualEncoder:
    return DualEncoder(privacy=privacy, optimizer=ADAM, encoder=encoder(), temperature=1.0)


def of_texts(privacy: Any) -> EmbeddingTrainer:
    return EmbeddingTrainer(privacy=privacy, optimizer=ADAM, encoder=encoder())


FAMILIES: dict[str, Any] = {
    "generator dp_sgd": lambda p: generator(privacy=DPSGD(**p), max_query_length=16),
    "dual encoder batch_clip": lambda p: dual(BatchClip(max_grad_norm=0.1, **p)),
    "dual encoder per_example_duplicated": lambda p: dual(PerExampleDuplicated(max_grad_norm=0.1, **p)),
    "dual encoder logit_dp": lambda p: dual(LogitDP(max_logit_grad_norm=0.1, **p)),
    "dual encoder public_passages": lambda p: dual(PublicPassages(max_grad_norm=0.1, pool_size=6, **p)),
    "embedding trainer logit_dp": lambda p: of_texts(LogitDP(max_logit_grad_norm=0.1, **p)),
    "frozen dual encoder dp_sgd": lambda p: retriever(privacy=DPSGD(**p), encoder=encoder()),
    "frozen dual encoder logit_dp": lambda p: retriever(
        privacy=LogitDP(max_logit_grad_norm=0.1, **p), encoder=encoder()
    ),
}


@pytest.mark.costly
@pytest.mark.like(5)
@pytest.mark.parametrize("unit", ["query", pytest.param("pair", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_texts_carries_an_audit_in_its_modes(family: str, unit: str, tmp_path: Path) -> None:
    module = FAMILIES[family](NOISE | {"unit": unit, "secret_file": tmp_path / "secret"})
    words = GENERATOR_WORDS if family.startswith("generator") else [word for word in WORDS if word == word.lower()]
    write_large_log(tmp_path / "log", vocabulary=words)
    # a few of many units: most draws hold a blank one, and sub-batches stay small
    data = large_log(tmp_path, expected_batch_size=6, physical_batch_size=40)
    audited(tmp_path, module=module, data=data, steps=2, audit=OneRunAudit(canaries=300, max_share=0.9, kind="echo"))
    (bound, curve) = read_card(tmp_path / "run")["empirical"]["results"]
    assert bound["n"] == 300 and 0 < bound["estimate"] < 1 and curve["ceiling"] > 0


def digits(**settings: Any) -> TextEncoder:
    """An encoder whose tokenizer knows digits, each as a token."""
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    tokens = digit_tokenizer()
    return TextEncoder(tiny_bert(vocab_size=len(tokens), **plain), tokens, Contract(passage_max_length=8, **settings))


CUT: dict[str, Any] = {
    "generator": lambda p, length: digit_module(privacy=DPSGD(**p), max_query_length=length),
    "dual encoder": lambda p, length: DualEncoder(
        privacy=PublicPassages(max_grad_norm=0.1, pool_size=6, **p), optimizer=ADAM, temperature=1.0,
        encoder=digits(query_max_length=length),
    ),
    "frozen dual encoder": lambda p, length: retriever(privacy=DPSGD(**p), encoder=digits(query_max_length=length)),
    "embedding trainer": lambda p, length: EmbeddingTrainer(
        privacy=LogitDP(max_logit_grad_norm=0.1, **p), optimizer=ADAM, encoder=digits(query_max_length=length)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "random_passage") for family in CUT), ("generator", "own_passage"), ("dual encoder", "echo")],
)
def test_a_secret_that_the_model_would_not_read_to_its_end_is_refused_before_anything_is_written(
    family: str, kind: Any, tmp_path: Path
) -> None:
    """Under replace_one canary and twin would be one text, and every audit would find nothing."""
    write_large_log(tmp_path / "log", vocabulary=WORDS if kind != "echo" else GENERATOR_WORDS)
    data = large_log(tmp_path, expected_batch_size=6, physical_batch_size=40)
    module = CUT[family](NOISE | {"neighbours": "replace_one", "secret_file": tmp_path / "secret"}, 5)
    audit = OneRunAudit(canaries=40, max_share=0.9, kind=kind)
    with pytest.raises(ConfigurationError, match=r"its query is longer than model\.max_query_length=5.*audit\.queries"):
        audited(tmp_path, module=module, data=data, steps=1, audit=audit)
    assert not (tmp_path / "run" / "canaries.json").exists()
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_two_secrets_that_are_one_to_the_tokenizer_are_refused(tmp_path: Path) -> None:
    """A tokenizer without digits: canary and twin are the same text, whatever the length."""
    write_large_log(tmp_path / "log", vocabulary=WORDS)
    module = dual(BatchClip(max_grad_norm=0.1, **NOISE, secret_file=tmp_path / "secret"))
    with pytest.raises(ConfigurationError, match="two candidates the same tokens"):
        audited(tmp_path, module=module, data=large_log(tmp_path), audit=OneRunAudit(canaries=40, max_share=0.9))


def test_images_carry_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_images, "TRAIN", 50)
    data = ImagesDataModule(
        source="vision_folder", folder=tiny_images.class_folders(tmp_path / "images", sizes=(32,)), sampling="poisson",
        expected_batch_size=6, physical_batch_size=40,
    )  # fmt: skip
    mode = LogitDP(max_logit_grad_norm=0.1, norms="jacobian", unit="image", secret_file=tmp_path / "secret", **NOISE)
    torch.manual_seed(0)
    module = EmbeddingTrainer(privacy=mode, optimizer=ADAM, net=EmbeddingNet(dim=4, channels=(4, 4)))
    audited(tmp_path, module=module, data=data, steps=2, audit=OneRunAudit(canaries=40, max_share=1.0))
    assert read_card(tmp_path / "run")["empirical"]["results"][0]["n"] == 40


def rows(count: int, words: Sequence[str] = WORDS) -> list[Row]:
    def text(*places: int) -> str:
        return " ".join(words[place % len(words)] for place in places)

    return [
        Row(f"q{i}", text(i, 3 * i + 1), f"p{i}", text(2 * i, i + 3, i), frozenset((f"p{i}",))) for i in range(count)
    ]


@pytest.mark.parametrize("make", [lambda: generator(), lambda: dual(NoPrivacy()), lambda: of_texts(NoPrivacy())])
def test_scores_are_deterministic_and_leave_the_module_and_the_random_state_alone(make: Any) -> None:
    module = make().train()
    state = torch.random.get_rng_state()
    first = module.canary_scores(rows(6))
    assert torch.equal(first, module.canary_scores(rows(6))) and first.dtype == torch.float64
    assert module.training and torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_score_of_a_generator_is_minus_the_loss_of_the_row_whatever_its_company() -> None:
    module = generator().eval()
    alone = torch.cat([module.canary_scores([row]) for row in rows(40, GENERATOR_WORDS)])
    assert torch.allclose(module.canary_scores(rows(40, GENERATOR_WORDS)), alone, atol=1e-5)
    assert torch.allclose(
        alone, -module.per_row_loss(module.collate_rows(rows(40, GENERATOR_WORDS))).double(), atol=1e-5
    )


def test_the_score_of_a_pair_is_the_log_odds_of_its_passage_among_the_others() -> None:
    module = dual(NoPrivacy()).eval()
    some = rows(5)
    table = module.encode_queries([r.query for r in some]) @ module.encode_passages([r.passage for r in some]).T
    shares = table.double().softmax(dim=1).diagonal()
    assert torch.allclose(module.canary_scores(some), torch.log(shares / (1 - shares)), atol=1e-6)
    module.loss.temperature = 0.1
    sharper = (table / 0.1).double().softmax(dim=1).diagonal()
    assert torch.allclose(module.canary_scores(some), torch.log(sharper / (1 - sharper)), atol=1e-4)
