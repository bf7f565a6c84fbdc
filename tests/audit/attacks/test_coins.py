"""Coins that hold half of the train queries out, and what a run does with them."""

from __future__ import annotations

import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import generator
from tiny_tasks import parts, write_log

from lit_dpret.audit.attacks.coins import COINS_NAME, Coins
from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.tasks import Fit


def test_coins_are_fair_and_independent_of_the_data() -> None:
    heads = sum(len(Coins.toss(str(i) for i in range(400)).trained_on) for _ in range(25))
    assert abs(heads - 5000) < 5 * 50  # five standard deviations of a Binomial(10000, 1/2)
    assert Coins.toss("abcdefghijklmnop").heads != Coins.toss("abcdefghijklmnop").heads  # but once in 65,536


def test_coins_are_read_as_they_were_written_and_by_their_owner_alone(tmp_path: Path) -> None:
    coins = Coins({"q1": True, "q2": False})
    assert stat.S_IMODE(coins.write(tmp_path).stat().st_mode) == 0o600
    assert Coins.read(tmp_path) == coins and coins.trained_on == {"q1"}
    assert "q1" not in repr(coins)


def test_broken_newer_or_too_few_coins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        Coins.read(tmp_path)
    path = Coins({"q1": True, "q2": False}).write(tmp_path)
    path.write_text(path.read_text().replace("coins/1", "coins/2"))
    with pytest.raises(DataError, match="membership-coins/2"):
        Coins.read(tmp_path)
    path.write_text(path.read_text().replace("coins/2", "coins/1").replace("true", "1"))
    with pytest.raises(DataError, match="does not state for each query"):
        Coins.read(tmp_path)
    with pytest.raises(DataError, match="too few"):
        Coins.toss(["q1"])


# -- in the data and in a run --------------------------------------------------------------------


def data_of(folder: Path, **settings: Any) -> PairsDataModule:
    made = PairsDataModule(folder=folder, sampling="poisson", expected_batch_size=8, **settings)
    made.setup("fit")
    made.use_unit("query")
    return made


def test_train_on_keeps_those_queries_and_takes_others_over_from_their_split(tmp_path: Path) -> None:
    data = data_of(write_log(tmp_path / "log"))
    data.train_on({"q0", "q1", "q60"})
    assert set(data.collection.split("train")) == {"q0", "q1", "q60"} and data.n_units == 3
    assert "q60" not in data.collection.split("test") and "q61" in data.collection.split("test")
    assert "q2" not in data.collection.queries
    with pytest.raises(DataError, match="none of the queries"):
        data.train_on({"nobody"})


def fit_settings(tmp_path: Path) -> dict[str, Any]:
    run = tmp_path / "run"
    return {
        "make_privacy": partial(DPSGD, eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret"),
        "make_datamodule": partial(
            PairsDataModule, folder=write_log(tmp_path / "log"), sampling="poisson", expected_batch_size=8
        ),
        "make_module": make_generator,
        "make_callbacks": lambda: [PrivacyAccountant(run_dir=run)],
    }


def make_generator(privacy: Any) -> Any:
    return generator(privacy=privacy)


@pytest.mark.slow
def test_a_run_with_coins_trains_on_heads_alone_and_says_where_its_model_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    made = parts(tmp_path, **fit_settings(tmp_path))
    keep = PairsDataModule.train_on
    monkeypatch.setattr(PairsDataModule, "train_on", lambda self, ids: (keep(self, ids), seen.append(len(ids)))[0])
    trainer, run = made.make_trainer, tmp_path / "run"
    made = replace(
        made,
        make_trainer=lambda **s: trainer(max_steps=2, **s),
        make_callbacks=lambda: [PrivacyAccountant(run_dir=run), PrivacyCard(run_dir=run)],
    )
    Fit(membership_coins=True).run(made)
    coins = Coins.read(run)
    assert seen == [len(coins.trained_on)] and len(coins.heads) == 56
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        f"privacy: {privacy_line(read_card(run))}",
        f"model: {run / 'model'}",
        f"privacy card: {run / 'privacy_card.json'}",
    ]
    assert "callbacks.card.tuning_data" in told.err, "the card says that the choice of settings is not accounted"


def test_coins_of_an_earlier_run_are_not_forgotten(tmp_path: Path) -> None:
    made = parts(tmp_path, **fit_settings(tmp_path))
    (tmp_path / "run").mkdir()
    Coins({"q1": True, "other": False}).write(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="membership_coins=true"):
        Fit().run(made)
    with pytest.raises(DataError, match="tossed for other train queries"):
        Fit(membership_coins=True).run(made)
    assert (tmp_path / "run" / COINS_NAME).exists()


def test_a_person_is_not_put_on_both_sides(tmp_path: Path) -> None:
    settings = fit_settings(tmp_path)
    settings["make_privacy"] = partial(settings["make_privacy"], unit="user")
    with pytest.raises(ConfigurationError, match="one person on both sides"):
        Fit(membership_coins=True).run(parts(tmp_path, **settings))
