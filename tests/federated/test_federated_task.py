"""task=federated: every system done once, what is refused before anything is trained, and what is told."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_silos import ran
from tiny_tasks import no_parts

from lit_dpret.cli import run
from lit_dpret.datamodules.silo_folder import read_silo, silo_folders, write_silos
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, UnsupportedModelError
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.model import AS2Maker, start_of
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.settings import FederatedPrivacy, Stage1, Stage2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.systems import SystemResult, SystemRunner, alone, train_alone, trained_alone
from lit_dpret.federated.transport import InProcessFederation
from lit_dpret.federated.trust import trust_table
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import merge
from lit_dpret.privacy.ledger.dataset_file import DatasetFile
from lit_dpret.privacy.ledger.trained import noted_in
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.tasks import Federated, HardNegatives
from lit_dpret.tasks.parts import Parts
from reproduction import FederatedStudy

TINY = {"clients": 2, "entities": 4, "attributes": 4, "told": 3, "questions": 3, "hubs": 1}
MODEL = {"encoder": "planted", "max_query_length": 8, "max_sentence_length": 12}
ONE = {"warmup_rounds": 1, "rounds": 1, "batch_size": 4, "bm25_n": 1, "static_n": 1, "top_k": 4, "lr": 3e-3}
TWO = {"batch_size": 4, "n": 2, "top_k": 4, "lr": 3e-3, "centroids": 2, "centroid_iterations": 1}
EPS = {"eps": 20.0, "delta": 1e-2, "accountant": "rdp"}


def plan(**changes: Any) -> FederationPlan:
    settings: dict[str, Any] = {
        "silos": "planted", "planted": TINY, "model": MODEL, "stage1": ONE, "stage2": TWO, "declare_public": True,
    }  # fmt: skip
    return FederationPlan(**{**settings, **changes})


def parts(folder: Path, made: FederationPlan | None, *, resume: bool = False) -> Parts:
    command = "python train.py experiment=pdd_as2 resume=true"
    return no_parts(folder, make_federation=lambda: made, resume=resume, command=command)


# -- what is done, and what is not done again --------------------------------------------------


@pytest.mark.slow
def test_every_system_and_seed_is_run_once_told_beside_the_paper_and_a_later_start_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = str(tmp_path / "secret")
    told = Federated(systems=["bm25", "single_star", "stage1", "fed_negative"], seeds=[0]).run(
        parts(tmp_path, plan(secret_file=secret))
    )
    assert list(told) == ["bm25", "single_star", "stage1", "fed_negative"]
    # Measures of each private query are the owner's alone, wherever they are written down.
    private = [tmp_path / "pdd_as2.json", *tmp_path.glob("*/stage.json")]
    assert len(private) == 5 and {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    data = json.loads((tmp_path / "pdd_as2.json").read_text(encoding="utf-8"))
    assert "/" not in data["data"] and len(data["data_sha256"]) == 64
    assert data["eps"] is None and data["systems"]["stage1"]["measures"]["sentence/mrr@10"]["paper"] == 0.261
    assert data["systems"]["fed_negative"]["sent_bytes"]["client0"]["requests"] > 0
    markdown = (tmp_path / "pdd_as2.md").read_text(encoding="utf-8")
    assert (
        "/ 0.261" in markdown and "resume=true" not in markdown
    )  # the command gives the same run, not the rest of one
    assert "<svg" in (tmp_path / "pdd_as2.html").read_text(encoding="utf-8")
    assert (tmp_path / "gain_per_client.svg").read_text(encoding="utf-8").startswith("<svg")

    trained: list[str] = []
    original = SystemRunner.run

    def counted(self: SystemRunner, system: Any, seed: int) -> SystemResult:
        trained.append(f"{system}{seed}")
        return original(self, system, seed)

    monkeypatch.setattr(SystemRunner, "run", counted)
    more = Federated(systems=["bm25", "single_star", "stage1", "fed_negative", "customised"], seeds=[0, 1])
    monkeypatch.setattr(
        "lit_dpret.federated.systems.SystemRunner._federation",
        lambda *_: SystemResult({"client0": {}, "client1": {}}),
    )
    monkeypatch.setattr("lit_dpret.federated.systems.trained_alone", lambda *_, **__: {})
    monkeypatch.setattr("lit_dpret.tasks.federated.write_federated_report", lambda *_: {"pdd_as2.md": tmp_path / "x"})
    (tmp_path / "x").write_text("", encoding="utf-8")
    monkeypatch.setattr("lit_dpret.report.federated_report.FederatedRow.over_silos", lambda *_: {0: 0.0})
    more.run(parts(tmp_path, plan(secret_file=secret), resume=True))
    assert trained == ["customised0", "single_star1", "stage11", "customised1", "fed_negative1"]
    with pytest.raises(ResumeError, match="resume=true"):
        more.run(parts(tmp_path, plan(secret_file=secret)))
    with pytest.raises(ResumeError, match="other settings"):
        more.run(parts(tmp_path, plan(stage1={**ONE, "lr": 1e-3}), resume=True))


@pytest.mark.costly
def test_a_run_that_was_interrupted_goes_on_and_makes_no_finished_round_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[str, int]] = []
    original = SiloClient.train_shared

    def broken(self: SiloClient, weights: Any, number: int) -> Any:
        rounds.append((self.name, number))
        if (self.name, number) == ("client1", 1) and rounds.count((self.name, number)) == 1:
            raise KeyboardInterrupt
        return original(self, weights, number)

    monkeypatch.setattr(SiloClient, "train_shared", broken)
    task = Federated(systems=["stage1"], seeds=[0])
    with pytest.raises(KeyboardInterrupt):
        task.run(parts(tmp_path, plan()))
    task.run(parts(tmp_path, plan(), resume=True))
    assert rounds[4:] == [("client0", 1), ("client1", 1)]  # the whole of round 0 stands; client0 has its own of round 1
    fits = list((tmp_path / "private" / "seed0" / "federation" / "silos" / "client0").glob("stage1-*/attempt-*"))
    assert sorted(path.parent.name for path in fits) == ["stage1-000", "stage1-001"]


@pytest.mark.slow
def test_under_a_budget_systems_go_on_from_the_ledgers_of_stage_1_and_each_stays_within(tmp_path: Path) -> None:
    made = plan(privacy=EPS, secret_file=str(tmp_path / "secret"))
    Federated(systems=["stage1", "customised", "fed_negative"], seeds=[0, 1]).run(parts(tmp_path / "run", made))
    data = json.loads((tmp_path / "run" / "pdd_as2.json").read_text(encoding="utf-8"))
    spent = {name: found["epsilon"] for name, found in data["systems"].items()}
    for silo in ("client0", "client1"):
        assert 0 < spent["stage1"][silo] < spent["customised"][silo] < spent["fed_negative"][silo] <= 20.0
    assert data["eps"] == 20.0 and "federated.declare_public" in (tmp_path / "run" / "pdd_as2.md").read_text("utf-8")
    assert "weight" not in data["trust"][1][0]  # uniform: how many queries a silo has is told to nobody
    # A row is a mean over seeds, and the page holds all rows: each private run behind them counts once.
    for silo in ("client0", "client1"):
        everything = charged_once(tmp_path / "run", f"**/silos/{silo}/private/*.query.jsonl")
        row = charged_once(tmp_path / "run", f"**/fed_negative/silos/{silo}/private/*.query.jsonl")
        assert data["epsilon_of_page"][silo] == pytest.approx(everything, rel=1e-9)
        assert data["systems"]["fed_negative"]["epsilon_over_seeds"][silo] == pytest.approx(row, rel=1e-9)
        assert 20.0 < row < everything


def charged_once(root: Path, pattern: str) -> float:
    """The epsilon of every private run that a ledger under ``root`` charges, each by its identity once."""
    runs: dict[str, Any] = {}
    for path in root.glob(pattern):
        runs |= {name: entry.charge for name, entry in DatasetFile.read(path).book.entries.items()}
    releases = [release for charge in runs.values() for release in charge.releases]
    return epsilon(merge(releases), delta=1e-2, neighbours="zero_out", accountant="rdp")


# -- baselines ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("silos") / "planted"
    return silo_folders(write_silos(folder, planted_silos(Planted(**TINY)), facts={}))


def maker(**changes: Any) -> AS2Maker:
    return AS2Maker(**{**MODEL, "planted": Planted(**TINY), **changes})


@pytest.mark.costly
def test_a_silo_that_trains_alone_is_a_federation_of_one(silos: dict[str, Path], tmp_path: Path) -> None:
    settings, make = alone(plan().settings(0)), maker()
    client = SiloClient(silos["client0"], tmp_path / "alone", settings, make)
    weights = train_alone(client, make)
    other = SiloClient(silos["client0"], tmp_path / "federation", settings, make)
    mean = InProcessFederation([other], settings, start_of(make), tmp_path / "server").train_shared()
    for name, value in mean.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
    moved = max(float((weights[name] - value).abs().max()) for name, value in start_of(make).items())
    assert moved > 1e-3


@pytest.mark.parametrize(("negatives", "expected"), [
    ("random", ["in_batch", "random"]), ("bm25", ["in_batch", "bm25"]), ("static", ["in_batch", "static"]),
])  # fmt: skip
def test_baselines_differ_in_their_negatives_alone(
    negatives: Any, expected: list[str], silos: dict[str, Path], tmp_path: Path
) -> None:
    client = SiloClient(silos["client0"], tmp_path, alone(plan().settings(0), negatives), maker())
    assert [source.name for source in client._shared_negatives(1)] == expected
    warm = [source.name for source in client._shared_negatives(0)]
    assert warm == (["in_batch", "bm25", "other_positives"] if negatives == "static" else expected)


@pytest.mark.costly
def test_central_training_sees_all_silos_and_is_measured_on_each_ones_own_collection(
    silos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def noted(client: SiloClient, make: Any) -> Any:
        trained.append(client.examples)
        return start_of(make)

    monkeypatch.setattr("lit_dpret.federated.systems.train_alone", noted)
    settings, make = alone(plan().settings(0)), maker()
    found = trained_alone("central", settings, silos, make, tmp_path / "central", split="test")
    own = [SiloClient(folder, tmp_path / name, settings, make) for name, folder in silos.items()]
    assert trained == [sum(client.examples for client in own)]
    for client in own:
        expected = client.evaluate(start_of(make), personal=False)
        assert all(np.array_equal(found[client.name][metric], values) for metric, values in expected.items())


@pytest.mark.costly
def test_kept_optimizer_state_counts_on_over_rounds_and_stays_with_the_silo(
    silos: dict[str, Path], tmp_path: Path
) -> None:
    make = maker()
    weights: dict[str, list[Any]] = {}
    for choice in ("reset", "keep"):
        settings = alone(plan(stage1={**ONE, "optimizer_state": choice}).settings(0))
        client = SiloClient(silos["client0"], tmp_path / choice, settings, make)
        first = client.train_shared(start_of(make), 0)
        weights[choice] = [first, client.train_shared(first, 1)]
    assert all(torch.equal(weights["reset"][0][name], weights["keep"][0][name]) for name in weights["keep"][0])
    assert any(not torch.equal(weights["reset"][1][name], weights["keep"][1][name]) for name in weights["keep"][1])
    assert not list((tmp_path / "reset").glob("optimizer-*"))
    (kept,) = (tmp_path / "keep").glob("optimizer-*")  # the newest alone
    steps = {float(one["step"]) for one in torch.load(kept, weights_only=True)["state"].values()}
    each = -(-client.examples // ONE["batch_size"])
    assert kept.name == "optimizer-001.pt" and steps == {2.0 * each}


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ({"systems": ["bm25", "stage3"]}, r"task\.systems=.*'stage3'"),
    ({"systems": ["bm25", "bm25"]}, r"task\.systems="),
    ({"systems": []}, r"task\.systems=\[\]"),
    ({"systems": ["bm25"], "seeds": [1, 1]}, r"task\.seeds=\[1, 1\]"),
    ({"systems": ["bm25"], "seeds": []}, r"task\.seeds=\[\]"),
    ({"systems": ["bm25"], "split": "train"}, r"task\.split='train'"),
    ({"systems": ["bm25", "central"], "save_encoder": True}, r"task\.save_encoder=true"),
])  # fmt: skip
def test_what_the_task_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Federated(**settings)


@pytest.mark.parametrize(("changes", "message"), [
    ({"secure_sum": True, "roster": True}, r"federated\.roster=true"),
    ({"transport": "pigeons"}, r"federated\.transport='pigeons' .*flower, inprocess, simulation"),
    ({"stage1": {"eps": 3}}, r"federated\.stage1\.eps"),
    ({"privacy": {"eps": 8.0}, "stage1": {"in_batch": True}}, r"federated\.stage1\.in_batch=true"),
    ({"privacy": {"eps": 8.0}, "declare_public": False}, r"federated\.privacy\.collection_eps"),
    *(({"clients": value}, r"federated\.clients=") for value in ("abc", True, 0, 2.5)),
    *(({"planted": {knob: value}}, rf"^federated\.planted\.{knob}={value!r} ") for knob, value in (
        ("clients", "3"), ("entities", "many"), ("questions", 1.5), ("hubs", "0"), ("duplicates", -1), ("seed", True),
        ("common", "false"), ("shared", "half"), ("skew", "abc"), ("skew", float("nan")),
    )),
])  # fmt: skip
def test_what_a_federation_refuses_before_any_data_is_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(**changes)


def test_a_sample_of_queries_is_refused_where_replacing_a_pair_moves_the_pairs_of_others() -> None:
    budget = {"eps": 8.0, "neighbours": "replace_one"}
    given: dict[str, Any] = {
        "sample": {"max_train_queries": 2}, "privacy": budget | {"unit": "pair"}, "declare_public": True,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"federated\.sample\.max_train_queries=2"):
        FederationPlan(**given)
    for sound in ({"unit": "query"}, {"unit": "pair", "neighbours": "zero_out"}):
        FederationPlan(**given | {"privacy": budget | sound})
    FederationPlan(**given | {"sample": {}})


def test_an_encoder_that_is_missing_is_refused_before_silos_are_built(tmp_path: Path) -> None:
    made = plan(model={"encoder": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigurationError, match="nowhere"):
        Federated(systems=["bm25"], seeds=[0]).run(parts(tmp_path / "run", made))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match="federated=inprocess"):
        Federated(systems=["bm25"], seeds=[0]).run(parts(tmp_path / "run", None))


def test_silos_that_cannot_be_run_over_are_refused_by_name(tmp_path: Path) -> None:
    found = planted_silos(Planted(**TINY))
    (tmp_path / "empty").mkdir()
    write_silos(tmp_path / "one", found[:1], facts={})
    for split in ("train", "dev", "test"):
        kept = [query for query in found[1].queries if query.split != split]
        write_silos(tmp_path / split, [found[0], replace(found[1], queries=kept)], facts={})
    refused = {"missing": r"federated\.silos", "empty": r"federated\.silos", "one": r"federated\.clients=10"}
    refused |= {split: f"'client1' .* no {split}" for split in ("train", "dev", "test")}
    for name, message in refused.items():
        made = FederationPlan(silos=str(tmp_path / name), model={**MODEL, "planted": None})
        with pytest.raises((DataError, ConfigurationError), match=message):
            made.folders(tmp_path / "built")
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize("impossible", [
    {"secure_sum": True, "sum_threshold": 4},
    {"secure_sum": True, "planted": TINY},  # of two silos, each knows the other's update
    {"stage1": {**ONE, "aggregation": "krum"}},
])  # fmt: skip
def test_what_so_many_silos_can_never_meet_is_refused_before_a_baseline_is_trained(
    impossible: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    monkeypatch.setattr(SiloClient, "train_shared", lambda self, *_: trained.append(self.name))
    made = plan(**{"planted": {**TINY, "clients": 3}, **impossible})
    for task in (
        Federated(systems=["single_random", "stage1"], seeds=[0]), FederatedStudy(study="gain", seeds=[0]),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"federated\.(sum_threshold|secure_sum|stage1\.aggregation)"):
            task.run(parts(tmp_path / type(task).__name__, made))
    with pytest.raises(ConfigurationError):
        folders = made.folders(tmp_path / "built")
        ran(made.settings(0), folders, made.model, tmp_path / "state")
    assert not trained


# -- settings ----------------------------------------------------------------------------------


def test_the_doctor_says_that_it_examines_no_federation_and_who_sees_what_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*more: str) -> Any:
        with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
            return compose(
                "train", overrides=["experiment=pdd_as2_planted", "task=doctor", f"run_dir={tmp_path}", *more]
            )

    with pytest.raises(ConfigurationError, match=r"task=federated.*lit-dpret silo --check"):
        run(chosen())
    assert trust_table(plan(stage1={}, stage2={}).settings(0)) in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"federated\.privacy\.eps=8: federated\.stage2\.request=exact"):
        run(chosen("federated.privacy.eps=8", "federated.stage2.request=exact"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("eps", [None, 20.0])
def test_without_stage_2_its_systems_are_refused_and_stage_1_is_run_and_charged_alone(
    eps: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = {**EPS, "eps": eps} if eps else {}
    made = plan(stage2={**TWO, "epochs": 0, "batch_size": 1000}, privacy=privacy, secret_file=str(tmp_path / "secret"))
    for task in (
        Federated(systems=["zero_shot", "fed_negative"], seeds=[0]), Federated(systems=["customised"], seeds=[0]),
        FederatedStudy(study="negatives", seeds=[0]),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"federated\.stage2\.epochs=0"):
            task.run(parts(tmp_path / "refused", made))
    assert not list((tmp_path / "refused").rglob("stage.json"))
    told = Federated(systems=["stage1"], seeds=[0]).run(parts(tmp_path / "one", made))
    assert list(told) == ["stage1"]
    data = json.loads((tmp_path / "one" / "pdd_as2.json").read_text(encoding="utf-8"))
    spent = data["systems"]["stage1"]["epsilon"]
    assert all(value is None if eps is None else 0 < value <= eps for value in spent.values())
    assert not any("request" in row[0] or "answer" in row[0] for row in data["trust"])
    # Weights that nothing goes on from are removed, and ledgers stay.
    state = tmp_path / "one" / "private" / "seed0" / "federation"
    assert [path.name for path in state.rglob("*.safetensors")] == ["global-001.safetensors"]
    assert len(list(state.rglob("silo_ledger.query.jsonl"))) == (0 if eps is None else 2)
    assert (tmp_path / "one" / "stage1-seed0").stat().st_mode & 0o077 == 0


def test_what_is_not_set_follows_from_the_budget() -> None:
    free = FederationPlan(silos="planted").settings(0)
    assert free.stage1.in_batch and free.stage1.weighting == "examples" and free.stage2.request == "exact"
    held = FederationPlan(silos="planted", privacy={"eps": 8.0}, declare_public=True).settings(3)
    assert not held.stage1.in_batch and held.stage1.weighting == "uniform" and held.stage1.other_positives == 0
    assert held.stage2.request == "dp_centroid" and held.stage2.response == "public" and held.seed == 3
    masked = FederationPlan(silos="planted", secure_sum=True, stage1={"n_hat": 50}).settings(0)
    assert masked.stage1.weighting == "capped"
    robust = FederationPlan(silos="planted", stage1={"aggregation": "median"}, update_norm=None).settings(0)
    assert robust.stage1.weighting == "uniform" and robust.update_norm is None


def test_the_config_names_every_setting_and_its_defaults_are_the_papers() -> None:
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        found = OmegaConf.to_container(compose("train", overrides=["federated=inprocess", "run_dir=x"]).federated)
    assert isinstance(found, dict)
    for name, kind in (("stage1", Stage1), ("stage2", Stage2), ("privacy", FederatedPrivacy)):
        assert set(found[name]) == set(kind.__dataclass_fields__), name
    assert set(found["model"]) == set(AS2Maker.__dataclass_fields__) - {"planted"}
    made = FederationPlan(**{key: value for key, value in found.items() if key != "_target_"})
    assert replace(made.settings(0)).stage1 == Stage1() and made.settings(0).stage2 == Stage2()


@pytest.mark.parametrize(("chosen", "named"), [
    (["task=plan"], "federated="),
    (["task=federated", "privacy.dataset_ledger=d.jsonl"], r"privacy\.dataset_ledger=d\.jsonl"),
])  # fmt: skip
def test_what_no_federation_does_is_refused_in_one_line(chosen: list[str], named: str, tmp_path: Path) -> None:
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        cfg = compose("train", overrides=[*chosen, "federated=inprocess", f"run_dir={tmp_path}"])
    with pytest.raises(ConfigurationError, match=named):
        run(cfg)


def test_what_stage_1_saved_is_a_start_of_another_run_and_a_transformer_for_each_side_is_none(tmp_path: Path) -> None:
    made = maker()
    shared = made(privacy=NoPrivacy(), optimizer_lr=1e-3, towers="shared", passage_tower="trained")
    again = replace(made, encoder=str(shared.save_model(tmp_path / "one")), planted=None)
    for (name, value), (other, same) in zip(start_of(made).items(), start_of(again).items(), strict=True):
        assert name == other and torch.equal(value, same)
    separate = made(privacy=NoPrivacy(), optimizer_lr=1e-3, towers="separate", passage_tower="trained")
    with pytest.raises(UnsupportedModelError, match=r"federated\.model\.encoder"):
        replace(made, encoder=str(separate.save_model(tmp_path / "two"))).check()


@pytest.mark.costly
def test_the_global_encoder_of_stage_1_is_saved_for_other_tasks_and_is_no_public_start_of_a_claim(
    tmp_path: Path,
) -> None:
    made = plan(secret_file=str(tmp_path / "secret"))
    Federated(systems=["stage1"], seeds=[0], save_encoder=True).run(parts(tmp_path / "run", made))
    saved = load_towers(tmp_path / "run" / "private" / "encoder")
    (weights,) = (tmp_path / "run" / "private" / "seed0" / "federation" / "server").glob("global-*.safetensors")
    module = made.model(privacy=NoPrivacy(), optimizer_lr=1e-3, towers="shared", passage_tower="trained")
    start = module.encode_passages(["entity0 attribute0"])
    module.put_global(load_file(weights))
    trained = module.encode_passages(["entity0 attribute0"])
    assert not torch.allclose(start, trained)
    assert torch.allclose(saved.passage_encoder.encode(["entity0 attribute0"], "passage"), trained, atol=1e-5)
    assert saved.query_encoder.contract.pooling == "cls" and saved.passage_encoder.contract.pooling == "mean"
    # Rounds without noise, and then a budget: each silo would say what the second federation alone had cost.
    encoder = tmp_path / "run" / "private" / "encoder"
    changes: dict[str, Any] = {"model": {**MODEL, "encoder": str(encoder)}, "planted": None}
    silos = str(tmp_path / "run" / "silos")
    with pytest.raises(ConfigurationError, match=r"federated\.model\.encoder") as refused:
        again = plan(secret_file=str(tmp_path / "secret"), silos=silos, privacy=EPS, **changes)
        Federated(systems=["stage1"], seeds=[0]).run(parts(tmp_path / "second", again))
    assert refused.value.trap == "T30"
    assert {run.privacy for run in noted_in(encoder)} == {"federated"}, "what refuses it in every other run"


@pytest.mark.costly
def test_under_a_budget_the_page_counts_public_sentences_and_the_saved_encoder_does_not_measure_its_silos_as_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folders = silo_folders(write_silos(tmp_path / "silos", planted_silos(Planted(**TINY)), facts={}))
    for count, folder in enumerate(folders.values(), start=1):
        chosen = list(read_silo(folder, verify=False).sentences)[:count]
        (folder / "public_sids.txt").write_text("".join(f"{sid}\n" for sid in chosen), encoding="utf-8")
    one_round = {**ONE, "warmup_rounds": 0}
    model = {**MODEL, "planted": TINY}
    made = plan(silos=str(tmp_path / "silos"), model=model, privacy=EPS, stage1=one_round, declare_public=True)
    Federated(systems=["bm25", "stage1"], seeds=[0], save_encoder=True).run(parts(tmp_path / "run", made))
    page = (tmp_path / "run" / "pdd_as2.md").read_text(encoding="utf-8")
    assert "client0 1 of " in page and "client1 2 of " in page
    encoder = tmp_path / "run" / "private" / "encoder"
    measured = HardNegatives(silo=folders["client0"], encoder=encoder, whose="public", questions=1)
    with pytest.raises(ConfigurationError, match=r"task\.whose=public"):
        measured.run(parts(tmp_path / "out", None))
