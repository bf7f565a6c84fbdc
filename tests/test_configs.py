"""Every option of every group composes, and its keys are the arguments of the class that it names."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from configured import composed, wrong_keys
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lit_dpret import __version__, cli
from lit_dpret.cli.composition import build_parts
from lit_dpret.config import Choice, choices, configuration_page, groups, names, tasks_by_kind
from lit_dpret.distributed.rank_watch import new_name
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.data.planted import Planted
from lit_dpret.negatives import NegativeSource

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
TOPS = (CONFIGS, ROOT / "reproduction" / "configs")
_FILES = [p for top in TOPS for p in top.glob("*/[!_]*.yaml")]
# configs/sweep holds files of W&B, which name options and are none.
OPTIONS = sorted((p.parent.name, p.stem) for p in _FILES if p.parent.name != "sweep")


SAFE = {
    "privacy": [p.stem for p in (CONFIGS / "privacy").glob("[!_]*.yaml")],
    "trainer": ["cpu"],
    "task": [option for group, option in OPTIONS if group == "task"],
    "callbacks": ["default"],
    "logger": ["none", "csv"],
    "canaries": [p.stem for p in (CONFIGS / "canaries").glob("*.yaml")],
    "datamodule": [p.stem for p in (CONFIGS / "datamodule").glob("[!_]*.yaml")],
}

NEEDED = {
    **{
        f"datamodule.{name}": ["datamodule.folder=x"]
        for name in ("synthetic", "msmarco", "squad", "cifar10", "cifar100", "vision_folder")
    },
    "datamodule.pairs": ["datamodule.pairs=x.jsonl"],
    "datamodule.beir": ["datamodule.name=scifact", "datamodule.root=x"],
    "datamodule.hf": ["datamodule.path=x"],
    "task.synthesize": ["task.generator=x"],
    "task.histogram": ["task.generator=x"],
    "task.export": ["task.checkpoint=x"],
    "privacy.logit_dp": ["privacy.delta=1e-6"],
    "task.second_task": ["task.study=x"],
    "task.fit_scored": ["task.data=public"],
    "task.sweep": [f"task.file={CONFIGS / 'sweep' / 'quickstart.yaml'}"],
    "task.zero_shot": ["task.root=."],
    "task.compare": ["task.run_a=x", "task.run_b=y"],
    "task.verify": ["task.card=x"],
    "task.federated_study": ["task.study=hubness"],
    "task.federated_generators": ["task.eps=3"],
    "task.audit": ["task.run=x"],
    "task.index": ["task.embeddings=x"],
    "task.export_embeddings": ["task.embeddings=x"],
    "task.membership": ["task.run=x"],
    "task.hard_negatives": ["task.silo=x", "task.encoder=x", "task.whose=public"],
    "task.inversion": ["task.encoder=x", "task.whose=public"],
    "task.federated_attacks": ["task.silos=x", "task.whose=public"],
    "task.similarity": ["task.synthetic=x", "task.reference=public"],
    "task.pretraining_overlap": ["task.corpus=x", "task.queries=public"],
    "task.search": ["task.index=x", "task.query=y"],
    "task.filter": ["task.data=x", "filter=round_trip"],
    "bins.labels": ["task.bins.labels=x"],
    "task.pseudo_labels": ["task.data=x", "task.cross_encoder=y"],
}


@pytest.mark.costly
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_of_arguments_and_what_is_safe_is_made(group: str, option: str, tmp_path: Path) -> None:
    # One of the models that have a loss; a task that has filters.
    pairs = {
        "loss": ["model=dual_encoder"], "negatives": ["model=dual_encoder"], "filter": ["task=filter", "task.data=x"],
        "bins": ["task=histogram", "task.generator=x"],
    }.get(group, [])  # fmt: skip
    cfg = composed(f"run_dir={tmp_path}", *pairs, f"{group}={option}", *NEEDED.get(f"{group}.{option}", []))
    assert wrong_keys(cfg) == []
    if option in SAFE.get(group, ()) and cfg[group] is not None:
        assert instantiate(cfg[group], _convert_="all") is not None


@pytest.mark.parametrize("name", ["insuranceqa", "msmarco", "pairs", "squad", "synthetic"])
def test_what_a_refusal_of_judgements_names_can_be_set(name: str) -> None:
    given = {"repeated_judgements": "highest", "drop_queries_without_passage": True}
    chosen = [f"datamodule.{knob}={value}" for knob, value in given.items()]
    found = composed(f"datamodule={name}", *NEEDED.get(f"datamodule.{name}", []), *chosen)
    assert wrong_keys(found) == [] and {knob: found.datamodule[knob] for knob in given} == given


def test_a_model_is_given_the_sources_of_negatives_that_were_made(tmp_path: Path) -> None:
    names = [option for group, option in OPTIONS if group == "negatives"]
    chosen = [f"negatives=[{','.join(names)}]", "model.negatives.labelled.file=x"]
    cfg = composed(f"run_dir={tmp_path}", "model=dual_encoder", *chosen, "model._target_=builtins.dict")
    given = build_parts(cfg).make_module()["negatives"]
    assert [one.name for one in given.values() if isinstance(one, NegativeSource)] == names


@pytest.mark.parametrize("chosen", [option for group, option in OPTIONS if group == "callbacks"])
def test_a_trainer_is_given_the_callbacks_that_were_made(chosen: str, tmp_path: Path) -> None:
    parts = build_parts(composed(f"run_dir={tmp_path}", "model=dual_encoder", f"callbacks={chosen}"))
    made = parts.make_callbacks()
    trainer = parts.make_trainer(callbacks=made, logger=False)
    assert made and all(any(one is given for one in trainer.callbacks) for given in made)


@pytest.mark.parametrize("where", ["federated", "task"])
def test_every_size_of_planted_silos_can_be_given_and_is_shown_with_its_default(where: str) -> None:
    group = {"federated": ["federated=inprocess"], "task": ["task=build_silos"]}[where]
    sizes = {"clients": 5, "phrasings": 3, "shared": 0.5, "duplicates": 1}
    for given in ({}, sizes):
        chosen = f"{where}.planted={{{', '.join(f'{name}: {value}' for name, value in given.items())}}}"
        found = composed(*group, *([chosen] if given else []))[where].planted
        assert Planted(**found) == Planted(**given) and len(found) == len(fields(Planted))


def test_a_point_is_a_mode_and_its_epsilon_so_that_infinity_is_no_privacy() -> None:
    for name, eps in (("eps3", 3.0), ("eps8", 8.0), ("eps16", 16.0)):
        privacy = composed(f"point={name}", "privacy.delta=1e-6").privacy
        assert privacy._target_.endswith("DPSGD") and privacy.eps == eps and privacy.delta == 1e-6
    assert composed("point=eps_inf").privacy._target_.endswith("NoPrivacy")
    with pytest.raises(Exception, match="eps"):
        composed("point=eps_inf", "privacy.eps=3")


def test_sources_of_negatives_compose() -> None:
    cfg = composed("model=dual_encoder", "negatives=[in_batch,bm25]", "model.negatives.bm25.per_query=3")
    assert list(cfg.model.negatives) == ["in_batch", "bm25"] and cfg.model.negatives.bm25.per_query == 3
    assert cfg.model.negatives.bm25.cache_dir == "run/private/negatives"
    assert composed("model=dual_encoder").model.negatives is None


def test_bins_and_the_scores_of_best_of_are_chosen_with_their_own_settings() -> None:
    assert composed("task=histogram", "task.generator=x").task.bins is None
    bins = composed("task=histogram", "task.generator=x", "bins=topics", "task.bins.topics=3").task.bins
    assert instantiate(bins).topics == 3
    best = composed(
        "task=filter", "task.data=x", "filter=best_of", "filter@task.filters.best_of.by=round_trip",
        "task.filters.best_of.by.k=3",
    )  # fmt: skip
    assert instantiate(best.task.filters.best_of).by.k == 3
    assert instantiate(composed("task=filter", "task.data=x", "filter=best_of").task.filters.best_of).by.name


def test_a_folder_without_a_name_tells_the_day_and_no_time() -> None:
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        found = [compose("train", return_hydra_config=True).hydra for _ in range(2)]
    for kind, root in (("run", "runs"), ("sweep", "multirun")):
        names = [one[kind].dir for one in found]
        assert all(re.fullmatch(rf"{root}/\d{{4}}-\d\d-\d\d/[0-9a-f]{{8}}", name) for name in names)
        assert names[0] != names[1] and found[0][kind].dir == names[0]


def test_processes_of_one_launcher_name_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    named = set()
    for rank in range(2):
        for key, value in (("WORLD_SIZE", "2"), ("RANK", str(rank)), ("TORCHELASTIC_RUN_ID", "none")):
            monkeypatch.setenv(key, value)
        named.add(new_name())
    assert len(named) == 1


def _said(settings: object) -> dict[str, object]:
    """What an experiment says of how its settings were chosen, at any depth."""
    found: dict[str, object] = {}
    for name, value in settings.items() if isinstance(settings, dict) else ():
        found |= {name: value} if name in ("tuning_data", "tuning_note", "note") else _said(value)
    return found


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_names_the_data_of_its_choice_and_declares_nothing_of_the_users(path: Path) -> None:
    said = _said(yaml.safe_load(path.read_text(encoding="utf-8")))
    # That nothing private was looked at is a user's word.
    assert said.get("tuning_data", "unknown") in ("unknown", "private")
    notes = [note for name, note in said.items() if name != "tuning_data"]
    assert all("InsuranceQA" in str(note) for note in notes) and (notes or "tuning_data" not in said)


# -- what `lit-dpret list` and the page of settings say ------------------------------------------

ALL = [choice for group in groups() for choice in choices(group)]


def test_every_file_of_every_group_is_a_choice() -> None:
    files = {path.relative_to(top).with_suffix("").as_posix() for top in TOPS for path in top.glob("*/[!_]*.yaml")}
    assert {f"{choice.group}/{choice.name}" for choice in ALL} == files and len(files) > 80


def test_the_keys_of_a_choice_are_those_that_compose() -> None:
    cfg = composed("filter=round_trip", "task=filter", "task.data=x", "loss=softmax")
    for group, name in (("privacy", "dp_sgd"), ("datamodule", "insuranceqa"), ("filter", "round_trip")):
        (choice,) = [choice for choice in choices(group) if choice.name == name]
        assert choice.keys
        for key in choice.keys:
            assert OmegaConf.select(cfg, key.name, default="absent") != "absent", key.name


@pytest.mark.parametrize("choice", choices("task"), ids=lambda choice: choice.name)
def test_every_setting_of_a_task_is_explained(choice: Choice) -> None:
    unexplained = [key.name for key in choice.keys if key.name.count(".") == 1 and not (key.text or key.comment)]
    assert not unexplained


def test_the_page_of_settings_has_a_row_for_every_key() -> None:
    page = configuration_page()
    for choice in ALL:
        for key in choice.keys:
            assert f"| `{key.name}` | " in page


@pytest.mark.parametrize(("words", "told"), [(["--version"], f"lit-dpret {__version__}\n"), ([], "group.key=VALUE")])
def test_the_version_and_a_bare_command_start_nothing(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-dpret", *words])
    cli.main()
    assert told in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_help_shows_each_task_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lit-dpret", "--help"])
    cli.main()
    shown = capsys.readouterr().out
    listed = [task for tasks in tasks_by_kind().values() for task in tasks]
    assert sorted(listed) == names("task") and all(task in shown for task in listed)
    assert set(tasks_by_kind()["studies"]) == {path.stem for path in TOPS[1].glob("task/*.yaml")}
    examples = [line.split(maxsplit=1) for line in shown.splitlines() if line.startswith("  ") and "lit-dpret" in line]
    assert {task for task, _ in examples} >= set(listed) - set(tasks_by_kind()["studies"]), "each with an example"
    assert "_pairs" not in shown and "_pairs" not in cli.listing([])


def test_the_settings_of_a_choice_are_listed_with_their_defaults_and_values() -> None:
    shown = cli.listing(["privacy=dp_sgd"])
    (choice,) = [choice for choice in choices("privacy") if choice.name == "dp_sgd"]
    assert all(f"{key.name} = {key.default}\n" in shown for key in choice.keys)
    assert "prv" in shown, "what the accountant takes"
    assert "opacus | loop" in " ".join(shown.split()), "a comment that goes on in the next line"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("accountant", "privacy.accountant"),
        ("privacy.accountant", "privacy.accountant"),
        ("sampling", "datamodule.sampling"),
        ("clipping", "privacy.clip"),
        ("opacus", "privacy.engine"),
        ("resume", "resume"),
    ],
)
def test_a_word_finds_the_settings_that_are_called_or_described_so(word: str, name: str) -> None:
    found = cli.listing([word]).splitlines()
    assert any(line.startswith(f"{name} = ") for line in found)


def test_a_setting_that_is_called_as_the_word_comes_first() -> None:
    settings = [line for line in cli.listing(["accountant"]).splitlines() if not line.startswith(" ")]
    assert settings[0].split(" = ")[0].endswith(".accountant")


def test_a_word_finds_a_choice() -> None:
    assert "filter=round_trip" in cli.listing(["round_trip"]).splitlines()


def test_what_no_group_choice_or_setting_is_called_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"'xyzzy'.* privacy"):
        cli.listing(["xyzzy"])
    with pytest.raises(ConfigurationError, match="accountant"):
        cli.listing(["acountant"])
    with pytest.raises(ConfigurationError, match=r"'dpsgd'.* dp_sgd"):
        cli.listing(["privacy=dpsgd"])
    with pytest.raises(ConfigurationError, match=r"'privacies'.* privacy"):
        cli.listing(["privacies=dp_sgd"])
    with pytest.raises(ConfigurationError, match="privacy loss"):
        cli.listing(["privacy", "loss"])


def test_no_key_is_told_twice_nor_by_an_anchor() -> None:
    for choice in ALL:
        names = [key.name for key in choice.keys]
        assert len(set(names)) == len(names), choice.name
        assert not any("<<" in name for name in names)
