"""What `lit-dpret list` and the page of settings say is what the files of configs/ say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from configured import composed
from omegaconf import OmegaConf

from lit_dpret import __version__, cli
from lit_dpret.config import Choice, choices, configuration_page, groups, names, tasks_by_kind
from lit_dpret.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = (ROOT / "configs", ROOT / "reproduction" / "configs")
ALL = [choice for group in groups() for choice in choices(group)]


def test_every_file_of_every_group_is_a_choice() -> None:
    files = {path.relative_to(top).with_suffix("").as_posix() for top in CONFIGS for path in top.glob("*/[!_]*.yaml")}
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
    assert set(tasks_by_kind()["studies"]) == {path.stem for path in CONFIGS[1].glob("task/*.yaml")}
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
