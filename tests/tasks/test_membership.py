"""`task=membership` on generators of a hundred words: from the coins to the report and the exit."""

from __future__ import annotations

import json
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from tiny_generator import WORDS, generator
from tiny_models import tiny_bert, tiny_tokenizer, words_tokenizer
from tiny_tasks import parts, trainer, write_beir

from lit_dpret.audit.attacks.coins import COINS_NAME, Coins
from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder, Towers
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError, PrivacyViolation, ResumeError
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.tasks import Fit, Membership
from lit_dpret.tasks.membership_shadows import Attacker, Shadows, choose_suspects
from lit_dpret.tasks.parts import Parts

QUERIES, STEPS = 160, 80
SHAPE = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
Make = Callable[..., Parts]


def write_queries(folder: Path) -> Path:
    """A BEIR folder of random words: what a model knows of a query, it knows from training on it."""
    rng = random.Random(0)

    def some(count: int) -> str:
        return " ".join(rng.choices(WORDS[:40], k=count))

    corpus, queries = ({f"{kind}{i}": some(count) for i in range(QUERIES + 40)} for kind, count in (("p", 4), ("q", 5)))
    pairs = list(zip(queries, corpus, strict=True))
    return write_beir(folder, corpus, queries, {"train": pairs[:QUERIES], "dev": pairs[QUERIES:]})


def make_generator(privacy: Any) -> Any:
    return generator(privacy=privacy, config=SHAPE)


def make_encoder(privacy: Any) -> Any:
    bert = tiny_bert(
        hidden_size=32, num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )  # fmt: skip
    tower = TextEncoder(bert, words_tokenizer(WORDS[:40]), Contract(query_max_length=8, passage_max_length=8))
    return DualEncoder(
        privacy=privacy, optimizer=OptimizerSpec(name="adam", lr=2e-3), encoder=tower, max_query_length=8,
        max_passage_length=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    root = tmp_path_factory.mktemp("membership")
    folder = write_queries(root / "log")

    def made(run: Path, *, steps: int = STEPS, private: bool = False, **changes: Any) -> Parts:
        mode = partial(DPSGD, eps=2.0, max_grad_norm=0.1, secret_file=root / "secret")
        data = partial(
            PairsDataModule, folder=folder, sampling="poisson", expected_batch_size=40, physical_batch_size=64
        )
        return parts(
            root,
            run_dir=run,
            make_privacy=mode if private else NoPrivacy,
            make_datamodule=data,
            make_trainer=lambda **s: trainer(**({"max_steps": steps} | s)),
            make_callbacks=lambda: [PrivacyAccountant(run_dir=run), PrivacyCard(run_dir=run)],
            **{"make_module": make_generator} | changes,
        )

    return made


@pytest.fixture(scope="module")
def open_run(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without privacy that went over its queries thirty times."""
    folder = tmp_path_factory.mktemp("targets") / "open"
    Fit(min_free_mb=1, membership_coins=True).run(make(folder))
    return folder


@pytest.fixture(scope="module")
def private_run(make: Make, open_run: Path) -> Path:
    """A run at epsilon 2, on the queries that the open one was trained on."""
    folder = open_run.with_name("private")
    folder.mkdir()
    shutil.copy(open_run / COINS_NAME, folder)
    Fit(min_free_mb=1, membership_coins=True).run(make(folder, steps=5, private=True))
    return folder


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "internal_membership.json").read_text(encoding="utf-8"))


def attack(run: Path, **settings: Any) -> Membership:
    return Membership(**{"run": run, "queries": 120, "shadows": 0, "min_free_mb": 1, "resamples": 50} | settings)


@pytest.mark.slow
def test_a_run_without_privacy_gives_its_members_away_and_the_report_is_internal(
    make: Make, open_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aucs = attack(open_run).run(make(tmp_path / "attack"))
    assert aucs["auc/loss"] > 0.8 and aucs["auc/reference"] > 0.8
    found = report(tmp_path / "attack")
    assert found["internal"] is True and found["claim"]["ceilings"] is None
    assert "/" not in found["data"] and len(found["data_sha256"]) == 64
    assert "The run has no guarantee" in found["caveats"][0]
    assert {one["attack"] for one in found["attacks"]} == {"loss", "logit", "zlib", "min_k", "min_k_plus", "reference"}
    assert max(one["evidence"]["eps_lower"] for one in found["attacks"]) > 0.5
    for path in (tmp_path / "attack").glob("internal_membership.*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = capsys.readouterr().out
    assert "absence of evidence is no guarantee" in " ".join(told.split())
    assert "put nothing from it on a card" in " ".join(told.split())


@pytest.mark.costly
def test_a_private_run_stays_below_its_ceilings(make: Make, private_run: Path, tmp_path: Path) -> None:
    attack(private_run).run(make(tmp_path / "attack", private=True))
    found = report(tmp_path / "attack")
    assert found["claim"]["epsilon"] == pytest.approx(2.0, rel=0.05)
    assert 0.5 < found["claim"]["ceilings"]["membership_accuracy"] < 0.8
    assert not any(one["exceeded"] for one in found["attacks"])
    assert any("the claim (zero_out) is about emptying it" in text for text in found["caveats"])


def test_a_model_that_leaks_too_much_fails(make: Make, private_run: Path, open_run: Path, tmp_path: Path) -> None:
    """The open run's model under the private run's name is what a mechanism without noise would be."""
    with pytest.raises(PrivacyViolation, match="contradict the claim"):
        attack(private_run, model=open_run).run(make(tmp_path / "attack", private=True))
    assert any(one["exceeded"] for one in report(tmp_path / "attack")["attacks"])


def test_another_split_raises_no_alarm(make: Make, private_run: Path, open_run: Path, tmp_path: Path) -> None:
    attack(private_run, model=open_run, others="dev", queries=60).run(make(tmp_path / "attack", private=True))
    found = report(tmp_path / "attack")
    assert "different splits" in found["caveats"][0] and not found["suspects"]["fair_coins"]
    assert all(one["evidence"] is None for one in found["attacks"])


@pytest.mark.slow
def test_shadow_attacks_resume_by_the_model_and_give_the_same(make: Make, open_run: Path, tmp_path: Path) -> None:
    task = partial(attack, open_run, shadows=4, minutes=5.0)
    made = make(tmp_path / "attack", steps=6)
    first = task().run(made)
    assert {"auc/lira_online_logit", "auc/lira_offline_reference", "auc/rmia"} <= set(first)
    found = report(tmp_path / "attack")
    assert found["shadows"]["models"] == 4 and found["shadows"]["steps"] == 6
    assert len(found["memorisation"]["most"]) == 10
    assert stat.S_IMODE((tmp_path / "attack" / "shadow_0").stat().st_mode) == 0o700
    left = {path.name for path in (tmp_path / "attack" / "shadow_0").iterdir()}
    assert "signals.npz" in left and "model" not in left and "checkpoints" not in left
    with pytest.raises(ResumeError, match="resume=true"):
        task().run(made)
    with pytest.raises(ResumeError, match="other settings"):
        task(queries=100).run(replace(made, resume=True))
    # One model was interrupted, the others are done and are not touched.
    (tmp_path / "attack" / "shadow_2" / "stage.json").unlink()
    before = {n: (tmp_path / "attack" / f"shadow_{n}" / "signals.npz").stat().st_mtime_ns for n in range(4)}
    again = task().run(replace(made, resume=True))
    after = {n: (tmp_path / "attack" / f"shadow_{n}" / "signals.npz").stat().st_mtime_ns for n in range(4)}
    assert [n for n in range(4) if before[n] != after[n]] == [2]
    assert set(again) == set(first) and again["auc/loss"] == first["auc/loss"]


def test_a_shadow_model_that_stopped_early_is_not_taken_for_done(make: Make, open_run: Path, tmp_path: Path) -> None:
    class StopAtTwo(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 2

    made = make(tmp_path / "attack", steps=6)

    def stopping(callbacks: Any = (), **settings: Any) -> Any:
        return trainer(**settings | {"max_steps": 6, "callbacks": [*callbacks, StopAtTwo()]})

    with pytest.raises(ResumeError, match="2 of 5 steps"):
        attack(open_run, shadows=4).run(replace(made, make_trainer=stopping))
    assert not (tmp_path / "attack" / "pilot" / "stage.json").exists()


@pytest.mark.costly
def test_a_slow_machine_has_fewer(make: Make, open_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def fitted(self: Shadows, *args: Any, **settings: Any) -> Path:
        steps.append(settings["steps"])
        return fit(self, *args, **settings)

    fit = Shadows._fit
    monkeypatch.setattr(Shadows, "_fit", fitted)
    # 6 steps of 10 seconds: five models fit into five minutes, and their number is even
    monkeypatch.setattr(Shadows, "_pace", lambda *_: {"seconds_per_step": 9.0, "around": 1.0})
    attack(open_run, shadows=8, minutes=5.0).run(make(tmp_path / "attack", steps=6))
    found = report(tmp_path / "attack")
    assert steps == [6] * 4
    assert found["shadows"] | {"seconds": 0} == {"models": 4, "wanted": 8, "steps": 6, "seconds": 0}
    assert "There are 4 shadow models of task.shadows=8" in " ".join(found["caveats"])


@pytest.mark.costly
def test_a_time_too_short_for_four_shadow_models_has_none(make: Make, open_run: Path, tmp_path: Path) -> None:
    told = attack(open_run, shadows=4, minutes=1e-4).run(make(tmp_path / "attack", steps=30))
    found = report(tmp_path / "attack")
    assert found["shadows"] is None and "auc/loss" in told and "auc/rmia" not in told
    assert "no shadow models, so the strongest attacks are missing" in " ".join(found["caveats"])


def test_a_wrong_release_is_told(make: Make, open_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attacker, "signals", lambda *_, **__: pytest.fail("the target was scored"))
    for setting in ("release", "release_reference"):
        with pytest.raises(LitDpretError, match=rf"nowhere .*\btask\.{setting}\."):
            attack(open_run, **{"release": tmp_path / "folder", setting: tmp_path / "nowhere"}).run(
                make(tmp_path / "attack")
            )


@pytest.fixture(scope="module")
def encoder_run(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "encoder"
    Fit(min_free_mb=1, membership_coins=True).run(make(folder, make_module=make_encoder, steps=60))
    return folder


@pytest.mark.costly
def test_an_encoder_is_held_against_the_coins(make: Make, private_run: Path, encoder_run: Path, tmp_path: Path) -> None:
    """The auxiliary-model audit: attack what was trained on the release, by the coins of the run behind it."""
    task = partial(attack, private_run, model=encoder_run, pool=60)
    with pytest.raises(ConfigurationError, match="of another kind"):
        task().run(make(tmp_path / "a", private=True))
    aucs = task(reference=str(encoder_run / "model")).run(make(tmp_path / "b", private=True))
    assert aucs["auc/shift"] == 0.5  # its own reference
    assert report(tmp_path / "b")["claim"]["epsilon"] == pytest.approx(2.0, rel=0.05)


@pytest.mark.slow
def test_an_encoder_is_attacked_by_shadow_models(make: Make, encoder_run: Path, tmp_path: Path) -> None:
    task = attack(encoder_run, shadows=4, minutes=5.0, pool=60)
    aucs = task.run(make(tmp_path / "attack", make_module=make_encoder, steps=20))
    assert aucs["auc/rmia"] > 0.6 and aucs["auc/logit"] > 0.7
    assert {"auc/shift", "auc/norm", "auc/margin_reference", "auc/lira_online_logit_reference"} <= set(aucs)
    assert report(tmp_path / "attack")["target"]["kind"] == "encoder"


def test_a_release_gives_itself_up(make: Make, open_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that repeats all trained queries, and as many held-out ones as phantoms."""
    coins = Coins.read(open_run)
    data = make(tmp_path).make_datamodule()
    data.setup("fit")
    queries, train = data.collection.queries, data.collection.split("train")
    made = [query for query in train if coins.heads[query]] + [query for query in train if not coins.heads[query]][:5]
    released = {f"s{i}": queries[query] for i, query in enumerate(made)}
    folder = write_beir(
        tmp_path / "release", {"p0": "bana delo"}, released, {"train": [(name, "p0") for name in released]}
    )

    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=8))
    monkeypatch.setattr("lit_dpret.tasks.membership.load_towers", lambda name: Towers(tower, tower))
    aucs = attack(open_run, release=folder).run(make(tmp_path / "attack"))
    assert aucs["auc/release_bigrams"] > 0.9
    found = report(tmp_path / "attack")["disclosures"]
    assert found["trained"] > 30 and found["phantoms"] <= 5 and found["evidence"]["eps_lower"] > 1


# -- what is refused, and who is a suspect ---------------------------------------------------------


def test_a_run_without_coins_card_or_matching_data_is_refused(make: Make, open_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder of a saved model"):
        attack(tmp_path / "nothing").run(make(tmp_path / "a"))
    shutil.copytree(open_run, tmp_path / "bare")
    (tmp_path / "bare" / COINS_NAME).unlink()
    with pytest.raises(ConfigurationError, match=r"task\.membership_coins=true"):
        attack(tmp_path / "bare", others="coins").run(make(tmp_path / "b"))
    (tmp_path / "bare" / "privacy_card.json").unlink()
    with pytest.raises(DataError, match="finished run"):
        attack(tmp_path / "bare").run(make(tmp_path / "c"))
    shutil.copytree(open_run, tmp_path / "other")
    weights = next((tmp_path / "other" / "model").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(DataError):  # the report would name the promise of the run
        attack(tmp_path / "other").run(make(tmp_path / "d"))


def test_shadow_models_are_charged_to_no_data_set_and_start_where_the_target_did(
    make: Make, private_run: Path, tmp_path: Path
) -> None:
    assert Membership.takes_start
    made = make(tmp_path / "attack", private=True)
    charged = partial(made.make_privacy, dataset_ledger=tmp_path / "all.jsonl", total_eps=9)
    for change, named in (
        ({"make_privacy": charged}, r"privacy\.dataset_ledger"),
        ({"start": {"init_from": tmp_path / "nowhere"}}, "init_from="),
    ):
        with pytest.raises(ConfigurationError, match=named):
            attack(private_run, shadows=4).run(replace(made, **change))


def test_who_is_attacked_rests_on_no_coin_and_who_cannot_be_asked_is_left_out(make: Make, tmp_path: Path) -> None:
    data = make(tmp_path).make_datamodule()
    data.setup("fit")
    queries = data.collection.queries
    queries["q0"] = queries["q1"].upper()  # the same text under another id
    train = list(data.collection.split("train"))
    data.collection.qrels["train"]["q5"].clear()  # as where a sample of passages holds none of its answers
    attacked = []
    for heads in ({0}, {1}, {0, 1, 2}):  # of each four: also how many are attacked rests on no coin
        coins = Coins({query: place % 4 in heads for place, query in enumerate(train)})
        found = choose_suspects(data, "coins", coins, count=100, rows=2, seed=1)
        attacked.append(found.ids[: found.attacked])
        assert not found.member[found.population].any()
        assert found.left_out == 2 and found.unanswered == 1 and not {"q0", "q1", "q5"} & set(found.ids)
    assert attacked[0] == attacked[1] == attacked[2]
