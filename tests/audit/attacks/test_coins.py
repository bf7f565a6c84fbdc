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
from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.tasks import Fit


def test_coins_are_fair_and_independent_of_the_data() -> None:
    heads = sum(len(Coins.toss(str(i) for i in range(400)).trained_on) for _ in range(25))
    assert abs(heads - 5000) < 5 * 50  # five standard deviations of a Binomial(10000, 1/2)
    assert Coins.toss("abcdefghijklmnop").heads != Coins.toss("abcdefghijklmnop").heads  # but once in 65,536


def test_coins_are_read_as_they_were_written_by_their_owner_alone_and_broken_or_newer_ones_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=COINS_NAME):
        Coins.read(tmp_path)
    coins = Coins({"q1": True, "q2": False})
    path = coins.write(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Coins.read(tmp_path) == coins
    assert coins.trained_on == {"q1"}
    assert "q1" not in repr(coins)
    written = path.read_text()
    for old, new, named in (("coins/1", "coins/2", "membership-coins/2"), ("true", "1", "each query")):
        path.write_text(written.replace(old, new))
        with pytest.raises(DataError, match=named):
            Coins.read(tmp_path)
    with pytest.raises(DataError, match="1 queries"):
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


def fit_settings(tmp_path: Path, **privacy: Any) -> dict[str, Any]:
    mode: dict[str, Any] = {"eps": 8.0, "noise_multiplier": 2.0, "secret_file": tmp_path / "secret", **privacy}
    data = {"folder": write_log(tmp_path / "log"), "sampling": "poisson", "expected_batch_size": 8}
    return {
        "make_privacy": partial(DPSGD, **mode),
        "make_datamodule": partial(PairsDataModule, **data),
        "make_module": lambda privacy: generator(privacy=privacy),
        "make_callbacks": lambda: [PrivacyAccountant(run_dir=tmp_path / "run")],
    }


@pytest.mark.slow
def test_a_run_with_coins_trains_on_heads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made = parts(tmp_path, **fit_settings(tmp_path))
    keep, trainer = PairsDataModule.train_on, made.make_trainer
    monkeypatch.setattr(PairsDataModule, "train_on", lambda self, ids: (keep(self, ids), seen.append(len(ids)))[0])
    Fit(membership_coins=True).run(replace(made, make_trainer=lambda **s: trainer(max_steps=2, **s)))
    coins = Coins.read(tmp_path / "run")
    assert seen == [len(coins.trained_on)]
    assert len(coins.heads) == 56


def test_coins_of_an_earlier_run_are_not_forgotten_and_no_person_is_put_on_both_sides(tmp_path: Path) -> None:
    made = parts(tmp_path, **fit_settings(tmp_path))
    (tmp_path / "run").mkdir()
    Coins({"q1": True, "other": False}).write(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="membership_coins=true"):
        Fit().run(made)
    with pytest.raises(DataError, match="other train queries"):
        Fit(membership_coins=True).run(made)
    assert (tmp_path / "run" / COINS_NAME).exists()
    with pytest.raises(ConfigurationError, match="one person"):
        Fit(membership_coins=True).run(parts(tmp_path / "users", **fit_settings(tmp_path / "users", unit="user")))
