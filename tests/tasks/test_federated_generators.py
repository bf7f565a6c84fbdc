"""`task=federated_generators` on planted silos: one budget with the federation that uses what was written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import generator, tokenizer
from tiny_silos import encoder
from tiny_tasks import no_parts

from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, LitDpretError, PrivateDataError, ResumeError
from lit_dpret.federated.data import planted_words
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.documents import SiloSettings
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.synthetic import open_ledger
from lit_dpret.tasks import Federated, FederatedGenerators
from lit_dpret.tasks.parts import Parts

TINY = {"clients": 2, "entities": 4, "attributes": 4, "told": 3, "questions": 3, "hubs": 1}
MODEL = {"encoder": "planted", "max_query_length": 8, "max_sentence_length": 12}
ONE = {"warmup_rounds": 1, "rounds": 0, "batch_size": 4, "bm25_n": 1, "static_n": 1, "top_k": 4, "lr": 3e-3}
TWO = {"batch_size": 4, "n": 2, "top_k": 4, "lr": 3e-3, "centroids": 2, "centroid_iterations": 1}
WORDS = planted_words(Planted(**TINY))
BUDGET = {"eps": 20.0, "delta": 1e-2, "accountant": "rdp"}


def plan(root: Path, **changes: Any) -> FederationPlan:
    settings: dict[str, Any] = {
        "silos": "planted", "planted": TINY, "model": MODEL, "stage1": ONE, "declare_public": True, "privacy": BUDGET,
        "stage2": {**TWO, "response": "synthetic"}, "secret_file": str(root / "secret"),
    }  # fmt: skip
    return FederationPlan(**{**settings, **changes})


def over(root: Path, **changes: Any) -> FederationPlan:
    """A federation over the silos that a run of the task left, and their states."""
    where = {"silos": str(root / "silos"), "state": str(root / "private")}
    return plan(root, **{**where, "model": {**MODEL, "encoder": str(root / "encoder")}, **changes})


def parts(folder: Path, made: FederationPlan | None, *, resume: bool = False, model: Any = None) -> Parts:
    make_module = model or (lambda *, privacy: generator(privacy=privacy, tokenizer=tokenizer(WORDS)))
    return no_parts(folder, resume=resume, make_module=make_module, make_federation=lambda: made)


def task(**changes: Any) -> FederatedGenerators:
    settings = {"eps": 5.0, "batch_size": 4, "min_new_tokens": 3, "max_new_tokens": 4, "min_free_mb": 1}
    return FederatedGenerators(**{**settings, **changes})


def spent(root: Path, name: str = "client0") -> float:
    made = plan(root)
    return open_ledger(root / "silos" / "clients" / name, root / "private" / name, made.privacy).epsilon()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    task().run(parts(root, plan(root)))
    save_sentence_transformer(root / "encoder", encoder(Planted(**TINY)))
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
def test_every_silo_gets_a_verified_set_and_is_told_what_it_spent_and_what_is_left(made: Path) -> None:
    told = json.loads((made / "internal_generators.json").read_text())["silos"]
    assert set(told) == {"client0", "client1"}
    for name, one in told.items():
        assert one["queries"] > 0 and "epsilon" in one["claim"] and 2.5 < one["eps_spent"] <= 5.0
        assert one["eps_spent"] == pytest.approx(spent(made, name)) and one["left"] == 20.0 - one["eps_spent"]
        assert (made / "silos" / "clients" / name / "synthetic" / "queries.jsonl").is_file()
    page = (made / "internal_generators.md").read_text()
    assert re.search(rf"\| client0 \| +{told['client0']['queries']} \|", page) and "federated.state=" in page


@pytest.mark.costly
def test_the_finished_is_kept_and_other_settings_are_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = spent(world)
    shutil.rmtree(world / "generator-client1")  # as if it was killed between two silos
    trained: list[str] = []
    monkeypatch.setattr(
        "lit_dpret.federated.synthetic.fit_epochs", lambda *_, **__: trained.append("a generator of its own")
    )
    task().run(parts(world, plan(world), resume=True))
    assert not trained and spent(world) == before
    with pytest.raises(ResumeError, match="resume=true"):
        task().run(parts(world, plan(world)))
    with pytest.raises(ResumeError, match="other settings"):
        task(eps=4.0).run(parts(world, plan(world), resume=True))


@pytest.mark.slow
def test_one_silo_of_a_folder_and_one_of_its_owner(world: Path, tmp_path: Path) -> None:
    alone = world / "silos" / "clients" / "client1"
    shutil.rmtree(alone / "synthetic")
    task(data=alone).run(parts(tmp_path / "owner", plan(world)))
    assert [path.name for path in (tmp_path / "owner" / "private").iterdir()] == ["client1"]
    for wrong in (["client7"], []):
        named = rf"task\.names={re.escape(str(wrong))} must name .* silos client0, client1"
        with pytest.raises(ConfigurationError, match=named):
            task(names=wrong).run(parts(tmp_path / "other", over(world)))


@pytest.mark.costly
@pytest.mark.parametrize("train_on", [pytest.param("queries", marks=pytest.mark.slow), "synthetic"])
def test_generator_and_federation_are_one_epsilon(world: Path, tmp_path: Path, train_on: str) -> None:
    before = spent(world)
    found = Federated(systems=["fed_negative"], seeds=[0], min_free_mb=1).run(
        parts(tmp_path / "run", over(world, train_on=train_on))
    )
    assert set(found) == {"fed_negative"}
    told = json.loads((tmp_path / "run" / "pdd_as2.json").read_text())["systems"]["fed_negative"]
    for epsilon in told["epsilon"].values():
        if train_on == "synthetic":  # nothing that is made of them costs anything
            assert epsilon == pytest.approx(before, abs=1e-6)
        else:
            assert before < epsilon <= 20.0
    assert spent(world) == before  # the run went on with copies


@pytest.mark.costly
def test_what_trains_alone_trains_on_peoples_queries(world: Path, tmp_path: Path) -> None:
    found = Federated(systems=["single_bm25"], seeds=[0], min_free_mb=1).run(
        parts(tmp_path / "run", over(world, train_on="synthetic"))
    )
    assert found["single_bm25"] > 0


@pytest.mark.costly
def test_a_system_that_uses_no_generator_is_not_charged_with_one(world: Path, tmp_path: Path) -> None:
    made = over(world, stage2={**TWO, "response": "public"})
    Federated(systems=["stage1"], seeds=[0], min_free_mb=1).run(parts(tmp_path / "run", made))
    ledger = tmp_path / "run" / "private" / "seed0" / "federation" / "silos" / "client0" / "private"
    assert "generator" not in (ledger / "silo_ledger.query.jsonl").read_text()


@pytest.mark.slow
def test_an_owners_silo_reads_the_set_with_the_state_of_its_generator_and_with_no_other(world: Path) -> None:
    from lit_dpret.federated.flower.node import check_silo

    made = over(world)
    data, state = world / "silos" / "clients" / "client0", world / "private" / "client0"
    settings = SiloSettings(
        data=data, state=state, federated=made.settings(0), model=made.model, secret_file=world / "secret",
        ledgers=state / "private",
    )  # fmt: skip
    assert "silo client0" in check_silo(settings)
    with pytest.raises(LedgerError, match="has no entry for"):
        check_silo(SiloSettings(**{**vars(settings), "ledgers": None}))
    with pytest.raises(PrivateDataError, match="--state of lit-dpret silo"):
        check_silo(SiloSettings(**{**vars(settings), "state": world / "elsewhere"}))


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("removed", "written", "changes", "message"),
    [
        (None, None, {"state": None}, r"ledgers begin empty.*federated\.state=RUN/private"),
        (None, None, {"state": "{root}/silos"}, r"no state of client 'client0'.*task=federated_generators"),
        ("private/client1/private/silo_ledger.query.jsonl", None, {}, r"not charged to silo_ledger\.query\.jsonl"),
        (None, "private/client1/run.json", {}, "already holds rounds of another run"),
        (None, None, {"privacy": {**BUDGET, "eps": 8.0}}, r"federated\.privacy\.eps=8"),
        ("silos/clients/client1/synthetic", None, {}, "task=federated_generators"),
    ],
)
def test_a_federation_that_would_not_count_the_generator_is_refused_before_any_round(
    world: Path, tmp_path: Path, removed: str | None, written: str | None, changes: dict[str, Any], message: str
) -> None:
    if removed is not None:
        (world / removed).rename(tmp_path / "removed")
    if written is not None:
        (world / written).write_text("{}")
    if changes.get("state"):
        changes = {"state": changes["state"].format(root=world)}
    with pytest.raises(LitDpretError, match=message):
        Federated(systems=["single_bm25", "fed_negative"], seeds=[0], min_free_mb=1).run(
            parts(tmp_path / "run", over(world, **changes))
        )
    assert not (tmp_path / "run" / "private").exists()


@pytest.mark.parametrize(
    ("changes", "federation", "message"),
    [
        ({"eps": 0.0}, {}, r"task\.eps=0"),
        ({"eps": 21.0}, {}, r"federated\.privacy\.eps=20"),
        ({"batch_size": 500}, {}, "batch_size="),
        ({"epochs": 0}, {}, r"task\.epochs=0"),
        ({"names": ["client0"], "data": "x"}, {}, r"task\.names"),
        ({}, None, r"federated=inprocess"),
        ({}, {"privacy": {}}, r"federated\.privacy\.eps=null"),
        ({}, {"declare_public": False}, r"public_sids\.txt is missing"),
    ],
)
def test_a_generator_that_cannot_be_trained_is_refused_before_the_first(
    tmp_path: Path, changes: dict[str, Any], federation: dict[str, Any] | None, message: str
) -> None:
    made = None if federation is None else plan(tmp_path, **federation)
    with pytest.raises((ConfigurationError, DataError), match=message):
        task(**changes).run(parts(tmp_path, made))
    assert not (tmp_path / "private").exists()


def test_another_kind_of_model_is_refused_before_the_first_generator(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="model=generator"):
        task().run(parts(tmp_path, plan(tmp_path), model=lambda **_: object()))
    assert not (tmp_path / "private").exists()


def test_a_set_that_another_run_wrote_is_not_written_over(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not written by a generator of this run"):
        task().run(parts(tmp_path / "another", over(world, state=None)))
