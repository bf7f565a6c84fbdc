"""`task=audit` of a dual encoder: the canaries of a run are found by which candidate brings its pair together."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memoriser import without_noise, write_large_log
from tiny_generator import WORDS
from tiny_models import tiny_bert
from tiny_tasks import parts

sys.path.insert(0, str(Path(__file__).parents[1] / "audit" / "canaries"))
from conftest import digit_tokenizer

from lit_dpret.audit.canaries import CANARIES, CanarySuite, read_canaries
from lit_dpret.audit.canaries.canary import check_all_fit
from lit_dpret.audit.canaries.coin_flips import KNOBS
from lit_dpret.audit.canaries.scores import score_pairs
from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy, PublicPassages
from lit_dpret.tasks import Audit, Fit
from lit_dpret.tasks.audit import Measurement
from lit_dpret.tasks.pipeline_stages import stage_callbacks

SUITE = CanarySuite(kinds=("echo",), repetitions=(1,), count=48, candidates=10, query_words=2, suffix_words=3, seed=3)


def encoder(**settings: Any) -> TextEncoder:
    tokens = digit_tokenizer()
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": len(tokens)}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return TextEncoder(tiny_bert(**shape, **plain), tokens, Contract(passage_max_length=8, **settings))


def dual(*, privacy: Any, lr: float = 0.02, length: int = 12) -> DualEncoder:
    adam = OptimizerSpec(name="adam", lr=lr)
    return DualEncoder(privacy=privacy, optimizer=adam, encoder=encoder(query_max_length=length), temperature=0.1)


def trained(tmp_path: Path, privacy: Any, *, suite: CanarySuite = SUITE, steps: int, **module: Any) -> Path:
    run = tmp_path / "trained"
    write_large_log(tmp_path / "log", queries=8, passages=60, vocabulary=WORDS)
    made = parts(tmp_path, privacy, run_dir=run)
    batches = {"sampling": "poisson", "expected_batch_size": 40 if steps > 2 else 6, "physical_batch_size": 100}
    how: dict[str, Any] = {
        "make_datamodule": partial(PairsDataModule, folder=tmp_path / "log", **batches),
        "make_module": partial(dual, **module),
        "make_trainer": partial(made.make_trainer, max_steps=steps),
        "make_callbacks": lambda: stage_callbacks(run, resume=False, label="run"),
        "make_canaries": lambda: suite,
    }
    Fit(min_free_mb=1).run(replace(made, **how))
    return run


def private(tmp_path: Path) -> Any:
    return partial(
        PublicPassages, eps=0.1, delta=1e-7, max_grad_norm=1.0, pool_size=None, secret_file=tmp_path / "secret"
    )


def audited(tmp_path: Path, run: Path) -> dict[str, float]:
    return Audit(run=run, measure=Measurement(), min_free_mb=1).run(parts(tmp_path, run_dir=tmp_path / "audit"))


@pytest.mark.slow
def test_a_dual_encoder_without_its_noise_contradicts_its_claim_and_an_honest_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, broken = tmp_path / "honest", tmp_path / "broken"
    audited(honest, trained(honest, private(honest), steps=100, lr=0.01))
    card = read_card(honest / "trained")
    (told,) = card["empirical"]["results"]
    assert told["metric"] == "share of rank 1" and told["n"] == 48 and told["ceiling"] < 1
    assert told["eps_lower"] <= card["claim"]["epsilon"] <= 0.1
    assert "leaked" not in capsys.readouterr().out
    without_noise(monkeypatch)
    run = trained(broken, private(broken), steps=100, lr=0.01)
    assert read_card(run)["claim"]["epsilon"] <= 0.1
    with pytest.raises(PrivacyViolation, match="audit contradicts the claim of trained"):
        audited(broken, run)
    assert (broken / "audit" / "audit.html").is_file()
    assert "AN AUDIT CONTRADICTS THIS CLAIM" in read_card(run / "model")["claim"]["statement"]


@pytest.mark.parametrize(
    ("name", "value"), [("draws", 0), ("top_p", 2.0), ("temperature", 0.0), ("max_new_tokens", 0), ("span", "all")]
)
def test_a_wrong_setting_of_a_measurement_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^task\.measure\.{name}={value!r} "):
        Measurement(**{name: value})


def test_the_audit_of_an_encoder_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = replace(SUITE, count=4, include=0.5)
    run = trained(tmp_path, NoPrivacy, suite=suite, steps=2)
    audited(tmp_path, run)
    report = json.loads((tmp_path / "audit" / "audit.json").read_text(encoding="utf-8"))
    assert "with 4 canaries" in capsys.readouterr().out.splitlines()[-1], "it ends with what was measured and found"
    assert all(row["leaked"]["mean"] is None and row["draws"] == 0 for row in report["rows"])
    assert {one["leak"]["draws"] for one in report["canaries"]} == {0} and len(report["canaries"]) == 4
    page = (tmp_path / "audit" / "audit.md").read_text(encoding="utf-8")
    assert "nothing was drawn" in page and "own passage" in page and page.count("none drawn") == len(report["rows"])
    card = read_card(run)
    assert all(one["metric"] != "leaked share" for one in card["empirical"]["results"])
    assert not (tmp_path / "audit" / CANARIES).exists()


def test_an_audit_ends_also_where_no_coin_included_a_canary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, NoPrivacy, suite=replace(SUITE, count=2, include=0.5, seed=5), steps=2)
    audited(tmp_path, run)
    report = json.loads((tmp_path / "audit" / "audit.json").read_text(encoding="utf-8"))
    assert [one["score"]["included"] for one in report["canaries"]] == [False] * 2 and report["one_run"] == []
    assert "no coin included" in capsys.readouterr().out


def test_other_weights_in_a_runs_place_are_not_audited_and_its_cards_stay(tmp_path: Path) -> None:
    run = trained(tmp_path, NoPrivacy, suite=replace(SUITE, count=4), steps=2)
    before = read_card(run), read_card(run / "model")
    weights = next((run / "model").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(DataError):
        audited(tmp_path, run)
    assert (read_card(run), read_card(run / "model")) == before


@pytest.mark.costly
def test_a_candidate_is_judged_by_its_own_passage_among_those_of_the_others(tmp_path: Path) -> None:
    run = trained(tmp_path, NoPrivacy, suite=replace(SUITE, count=4), steps=2)
    towers, canaries = load_towers(run / "model"), read_canaries(run).canaries
    first, *rest = canaries
    found = score_pairs(towers, canaries)[0]
    passages = towers.passage_encoder.encode([first.passage, *(one.passage for one in rest)], "passage").double()
    bits = []
    for secret in first.candidates:
        query = towers.query_encoder.encode([first.query_with(secret)], "query").double()
        share = (query @ passages.T / 0.05).softmax(dim=1)[0, 0]
        bits.append(-float(share.log2()))
    own = first.candidates.index(first.secret)
    assert found.bits == pytest.approx(bits[own], rel=1e-6)
    assert found.rank == sum(one <= bits[own] + 1e-12 for one in bits)
    swapped = [first, *(replace(one, secret=one.candidates[-1]) for one in rest)]
    assert score_pairs(towers, swapped)[0] == found


class InPieces:
    """A tokenizer that knows characters alone."""

    def token_ids(self, texts: list[str], side: str, *, whole: bool = False) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]


def test_what_makes_no_sense_for_a_dual_encoder_is_refused_and_told_what_to_take(tmp_path: Path) -> None:
    run = trained(tmp_path, NoPrivacy, suite=replace(SUITE, kinds=("new_token",), count=2), steps=2)
    sentinel = read_canaries(run).canaries[0]
    check_all_fit(InPieces(), [replace(sentinel, kind="echo")])
    with pytest.raises(ConfigurationError, match=r"no unused tokens <extra_id_N>.*canaries\.kinds=\[echo\]"):
        check_all_fit(InPieces(), [sentinel])
    with pytest.raises(ConfigurationError, match=r"Choose callbacks\.audit\.kind=echo, "):
        check_all_fit(InPieces(), [sentinel], KNOBS)
    alike = [replace(one, passage="bana") for one in read_canaries(run).canaries]
    with pytest.raises(ConfigurationError, match="All canaries have the same passage"):
        score_pairs(load_towers(run / "model"), alike)
