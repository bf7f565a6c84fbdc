"""Cards of whole runs: a private number of queries, users with several units, and coupled losses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_stand_ins import Pairs, data_module
from stand_ins import Texts, dp, fit
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.modes import BatchClip, LogitDP, PerExampleDuplicated

N = 397
DECLARED: dict[str, Any] = {"sampling": "poisson", "sample_rate": 0.05, "expected_batch_size": 16}
PRIVATE: dict[str, Any] = {"neighbours": "add_or_remove", "delta": 0.001, "noise_multiplier": 3.0}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    words = ["tide", "rope", "harbour", "moon"]
    rows = [{"query": f"{words[i % 4]} {'x' * (i % 31)} {'y' * (i // 31)}", "passage": words[i % 3]} for i in range(N)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(tmp_path: Path, log: Path, data: dict[str, Any], mode: dict[str, Any]) -> Path:
    folder = tmp_path / "run"
    module = Texts(privacy=dp(tmp_path, **mode))
    fit(folder, module, PairsDataModule(pairs=log, physical_batch_size=8, **data), steps=4,
        extra=[PrivacyCard(run_dir=folder)])  # fmt: skip
    return folder


def says_n(text: str) -> bool:
    """Whether N stands there as a number, not inside a hash, a longer number or the fraction of a second."""
    return re.search(rf"(?<![0-9a-z.]){N}(?![0-9a-z])", text) is not None


@pytest.mark.costly
def test_a_run_on_declared_constants_writes_the_number_of_queries_nowhere(tmp_path: Path, log: Path) -> None:
    folder = run(tmp_path, log, DECLARED, PRIVATE)
    records = PrivacyLedger.read(folder / "privacy_ledger.jsonl").records
    assert 0 < epsilon(charged_releases(records), delta=0.001, neighbours="add_or_remove") <= 3.0
    card = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["neighbours"] == "add_or_remove" and card["claim"]["delta"] == 0.001
    texts = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    assert len(texts) >= 4
    for path in texts:
        assert not says_n(path.read_text(encoding="utf-8")), path
    for path in folder.rglob("*.ckpt"):
        numbers = tree_leaves(torch.load(path, weights_only=True))
        values = torch.cat(
            [torch.as_tensor(n).flatten().double() for n in numbers if isinstance(n, (int, float, Tensor))]
        )
        assert N not in values.tolist(), path


@pytest.mark.parametrize(
    ("data", "mode", "named"),
    [
        ({"sample_rate": None, "expected_batch_size": 4000}, {}, r"datamodule\.sample_rate"),
        ({"expected_batch_size": None}, {}, r"datamodule\.expected_batch_size"),
        ({"sampling": "truncated_poisson"}, {}, r"datamodule\.sampling=poisson"),
        ({}, {"delta": None}, r"privacy\.delta"),
    ],
)
def test_what_would_have_to_be_derived_from_the_data_is_refused_without_its_number(
    tmp_path: Path, log: Path, data: dict[str, Any], mode: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named) as error:
        run(tmp_path, log, DECLARED | data, PRIVATE | mode)
    assert not says_n(str(error.value))


# -- the declared number of units of one person ----------------------------------------------------


def run_of_users(tmp_path: Path, users: int | None, bound: int | None, **data: Any) -> Path:
    """A run on 60 queries, of 60 / users each where users are known."""
    log = tmp_path / "log.jsonl"
    rows = [{"query": f"tide {'x' * i}", "passage": f"p{i % 3}"} for i in range(60)]
    if users is not None:
        rows = [{**row, "user_id": f"user {i % users}"} for i, row in enumerate(rows)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = tmp_path / "run"
    module = Texts(privacy=dp(tmp_path, noise_multiplier=6.0, max_units_per_user=bound))
    settings = {"sampling": "poisson", "expected_batch_size": 6, "physical_batch_size": 8, **data}
    fit(folder, module, PairsDataModule(pairs=log, **settings), steps=3, extra=[PrivacyCard(run_dir=folder)])
    return folder


def test_the_card_of_a_run_states_the_epsilon_of_a_user(tmp_path: Path) -> None:
    folder = run_of_users(tmp_path, users=20, bound=3)
    claim = read_card(folder)["claim"]
    releases = charged_releases(PrivacyLedger.read(folder / "privacy_ledger.jsonl").records)
    assert claim["user_level_epsilon"] == group_epsilon(releases, delta=claim["delta"], units=3) > claim["epsilon"]
    assert verify_card(read_card(folder), folder / "privacy_ledger.jsonl") == []


def test_where_no_user_is_known_the_bound_is_taken_as_declared(tmp_path: Path) -> None:
    assert read_card(run_of_users(tmp_path, users=None, bound=2))["claim"]["max_units_per_user"] == 2


@pytest.mark.parametrize(
    ("bound", "data", "named"),
    [(2, {}, r"privacy\.max_units_per_user=2"), (3, {"duplicates": "merge"}, r"datamodule\.duplicates=merge")],
    ids=["the user ids contradict it", "people share units"],
)
def test_a_bound_that_cannot_hold_is_refused_before_the_first_step(
    bound: int, data: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        run_of_users(tmp_path, users=20, bound=bound, **data)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


# -- coupled losses ----------------------------------------------------------------------------------


NOISE: dict[str, Any] = {"eps": 3.0, "delta": 1e-3, "noise_multiplier": 20.0, "n_max": 6}
SAMPLING: dict[str, Any] = {
    "sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6,
}  # fmt: skip
MODES: dict[str, Any] = {
    "logit_dp": lambda **settings: LogitDP(max_logit_grad_norm=0.1, **NOISE, **settings),
    "batch_clip": lambda **settings: BatchClip(max_grad_norm=0.1, **NOISE, **settings),
    "per_example_duplicated": lambda **settings: PerExampleDuplicated(max_grad_norm=0.1, **NOISE, **settings),
}


def card_of(folder: Path, module: Pairs) -> dict[str, Any]:
    fit(folder / "run", module, data_module(folder / "data", **SAMPLING), steps=2, extra=[PrivacyCard()])
    return dict(read_card(folder / "run" / "privacy_card.json"))


@pytest.mark.parametrize("name", MODES)
def test_the_card_states_the_mode_the_bound_and_a_claim_that_its_ledger_confirms(name: str, tmp_path: Path) -> None:
    card = card_of(tmp_path, Pairs(privacy=MODES[name](secret_file=tmp_path / "secret"), temperature=1.0))
    worth = {"logit_dp": 0.1 * 7.909, "batch_clip": 0.2, "per_example_duplicated": 1.1}[name]
    assert card["mechanism"]["mode"] == name
    assert card["mechanism"]["sensitivity"] == pytest.approx(worth, rel=1e-3)
    assert card["mechanism"]["noise_std"] == pytest.approx(20 * worth, rel=1e-3)
    assert card["mechanism"]["coupling"]["n_max"] == 6
    assert 0 < card["claim"]["epsilon"] < 3
    assert verify_card(card, tmp_path / "run" / "privacy_ledger.jsonl") == []
