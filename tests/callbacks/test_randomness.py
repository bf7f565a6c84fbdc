"""Who can compute the noise and the coins of a run: nobody without the secret, and the card says how they were made."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy import box_muller
from lit_dpret.privacy.budget import ROUNDING_SHARE
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler

QUIET: dict[str, Any] = {"noise_multiplier": 4.0}


class Trace:
    """All noise and all draws of one run, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.noise: list[Tensor] = []
        self.draws: list[list[int]] = []
        normal, draw = KeyedStream.normal, PrivateBatchSampler.draw

        def watched(stream: Any, shape: Any, **key: Any) -> Tensor:
            made = normal(stream, shape, **key)
            self.noise.append(made.clone())
            return made

        def drawn(sampler: Any, step: int) -> np.ndarray:
            units = draw(sampler, step)
            self.draws.append(units.tolist())
            return units

        patch.setattr(KeyedStream, "normal", watched)
        patch.setattr(PrivateBatchSampler, "draw", drawn)


def traced(folder: Path, secret: Path, *, seed: int, first: Path | None = None, **mode: Any) -> Trace:
    """Two steps from equal weights; with the streams of the run ``first``, if given."""
    torch.manual_seed(0)
    module = Regression(privacy=dp(secret, **QUIET | mode))
    folder.mkdir()
    if first is not None:  # the same run id, and nothing released yet
        line = (first / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()[0]
        (folder / "privacy_ledger.jsonl").write_text(line + "\n", encoding="utf-8")
    L.seed_everything(seed, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        trace = Trace(patch)
        accountant = PrivacyAccountant(run_dir=folder, resume=first is not None, eps_log_points=1)
        fit(folder, module, Numbers(sampling="poisson"), steps=2, accountant=accountant, resume=first is not None,
            extra=[PrivacyCard(run_dir=folder)])  # fmt: skip
    return trace


def equal(first: Trace, second: Trace) -> tuple[bool, bool]:
    """Whether two runs drew the same noise, and the same units."""
    same = len(first.noise) == len(second.noise) and all(map(torch.equal, first.noise, second.noise))
    return same, first.draws == second.draws


@pytest.mark.costly
def test_the_public_seed_decides_neither_noise_nor_coins_and_the_secret_both(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    run = traced(tmp_path / "a", tmp_path, seed=0)
    assert run.noise and len(run.draws) >= 2
    assert equal(run, traced(tmp_path / "b", tmp_path, seed=1, first=tmp_path / "a")) == (True, True)
    assert equal(run, traced(tmp_path / "c", tmp_path / "other", seed=0, first=tmp_path / "a")) == (False, False)
    assert equal(run, traced(tmp_path / "d", tmp_path, seed=0)) == (False, False), "each run has an id of its own"


def test_coins_rows_dropout_and_noise_of_a_step_come_from_different_streams() -> None:
    stream = KeyedStream(bytes(32), "run")
    asked: list[bytes] = []
    honest = stream._digest
    stream._digest = lambda *key, size=32: asked.append(honest(*key, size=size)) or asked[-1]  # type: ignore[method-assign,func-returns-value]
    for purpose in ("sampling", "rows", "shuffle"):
        stream.coins(0, 0, purpose=purpose)
    stream.model_seed(0, 0, 0)
    stream.normal(torch.Size([1]), attempt=0, step=0, parameter="w")
    assert len(asked) == 5
    assert all(a[:8] != b[:8] for a, b in itertools.combinations(asked, 2))


@pytest.mark.parametrize("secure", [False, True])
def test_the_card_names_the_generator_that_made_the_noise(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    normals = box_muller.normals
    monkeypatch.setattr(box_muller, "normals", lambda *a, **k: used.append("ChaCha20") or normals(*a, **k))  # type: ignore[func-returns-value]
    traced(tmp_path / "run", tmp_path, seed=0, secure_rng=secure)
    card = read_card(tmp_path / "run" / "privacy_card.json")
    assert (set(used) == {"ChaCha20"}) is secure
    assert card["randomness"]["rng"] == ("ChaCha20" if secure else "Philox (NumPy), keyed; not cryptographic")
    assert card["randomness"]["secure"] is secure
    words = "or on its generator, which is not cryptographic"
    assert any(words in gap for gap in card["not_covered"]) is not secure


@pytest.mark.costly
def test_noise_by_a_published_seed_repeats_and_leaves_no_claim_on_the_card(tmp_path: Path) -> None:
    seeded = [traced(tmp_path / name, tmp_path, seed=seed, noise_seed=7) for name, seed in (("a", 0), ("b", 1))]
    other = traced(tmp_path / "c", tmp_path, seed=0, noise_seed=8)
    assert equal(*seeded) == (True, True) and equal(seeded[0], other) == (False, False)
    assert not (tmp_path / "secret").exists(), "no secret is needed, and none is touched"
    traced(tmp_path / "d", tmp_path, seed=0, first=tmp_path / "a")  # which goes on without a seed, and stays marked
    assert read_card(tmp_path / "d")["claim"]["guarantee"] == "not_proved"
    card = read_card(tmp_path / "a" / "privacy_card.json")
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    broken = [a["text"] for a in card["assumptions"] if a["holds"] is False]
    assert any("privacy.noise_seed" in text for text in broken)
    plan = PrivacyLedger.read(tmp_path / "a" / "privacy_ledger.jsonl").records[0]
    assert plan["noise_seed"] == 7 and "privacy.noise_seed" in (tmp_path / "a" / "privacy_card.md").read_text("utf-8")


def test_a_seed_of_the_noise_is_a_whole_number() -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.noise_seed=-1"):
        dp(Path("."), noise_seed=-1)
    with pytest.raises(ConfigurationError, match=r"privacy\.noise_seed=1 .* privacy\.dataset_ledger=all"):
        dp(Path("."), noise_seed=1, dataset_ledger="all", total_eps=1.0)


# -- whole runs with noise on a grid: repeated bit by bit after a kill, and honest on the card --


def regression(folder: Path, **settings: Any) -> Regression:
    L.seed_everything(0, verbose=False)
    return Regression(privacy=dp(folder, **{"noise_multiplier": 2.0, "noise": "discrete"} | settings))


@pytest.mark.costly
def test_a_killed_run_repeats_its_step_bit_by_bit_and_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    whole = regression(tmp_path, noise_seed=7)
    fit(tmp_path / "whole", whole)
    killed = regression(tmp_path, noise_seed=7)
    accountant = PrivacyAccountant(run_dir=tmp_path / "killed", eps_log_points=1)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", killed, accountant=accountant, extra=[KillAt(3)])
    accountant.ledger.close()
    resumed = regression(tmp_path, noise_seed=7)
    fit(tmp_path / "killed", resumed, resume=True)
    for (name, one), two in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two), name
    with pytest.raises(ResumeError, match="noise"):
        fit(tmp_path / "killed", regression(tmp_path, noise="gaussian", noise_seed=7), resume=True)
    kinds = [record["kind"] for record in PrivacyLedger.read(tmp_path / "killed" / LEDGER_NAME).records]
    assert kinds.count("replay") == 1 and kinds.count("intent") == 6


@pytest.mark.costly
def test_the_card_of_a_run_says_which_noise_it_was_and_holds_against_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **key: Any) -> Tensor:
        raise RuntimeError("floating-point noise was drawn")

    monkeypatch.setattr(KeyedStream, "normal", never)
    folder = tmp_path / "run"
    fit(folder, regression(tmp_path, clip_fraction_budget=0.1, max_grad_norm=0.5), Numbers(sampling="poisson"), steps=2,
        extra=[PrivacyCard(run_dir=folder)])  # fmt: skip
    card = read_card(folder)
    assert verify_card(card, folder / LEDGER_NAME) == []
    assert card["randomness"]["rng"] == "ChaCha20" and card["randomness"]["secure"]
    assert not any("floating-point form" in gap or "generator" in gap for gap in card["not_covered"])
    assert card["mechanism"]["noise"] == "discrete"
    assert card["mechanism"]["sensitivity"] == pytest.approx(0.5 / 0.9**0.5 * (1 + ROUNDING_SHARE), rel=1e-12)
