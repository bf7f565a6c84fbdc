"""A W&B sweep file means here what it means to W&B's agent, and what has no list of trials is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from configured import composed

from lit_dpret.errors import ConfigurationError
from lit_dpret.sweeps import SweepFile

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted((ROOT / "configs" / "sweep").glob("*.yaml"))
SMALL: dict[str, Any] = {
    "program": "train.py",
    "method": "grid",
    "metric": {"name": "val/loss", "goal": "minimize"},
    "parameters": {
        "point": {"values": ["eps3", "eps_inf"]}, "seed": {"value": 7}, "model.optimizer.lr": {"values": [0.1, 0.2]},
    },
    "command": ["${env}", "${interpreter}", "${program}", "task=fit", "trial_of=${envvar:LIT_DPRET_SWEEP}",
                "hydra.run.dir=${envvar:LIT_DPRET_SWEEP}/trials/${oc.env:WANDB_RUN_ID}", "${args_no_hyphens}"],
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({k: v for k, v in (SMALL | changes).items() if v is not None}, sort_keys=False), encoding="utf-8"
    )
    return path


def test_a_grid_is_every_combination_in_order_and_each_has_an_identity_of_its_own(tmp_path: Path) -> None:
    trials = SweepFile.read(written(tmp_path)).trials()
    assert [trial.overrides for trial in trials] == [
        ["point=eps3", "seed=7", "model.optimizer.lr=0.1"],
        ["point=eps3", "seed=7", "model.optimizer.lr=0.2"],
        ["point=eps_inf", "seed=7", "model.optimizer.lr=0.1"],
        ["point=eps_inf", "seed=7", "model.optimizer.lr=0.2"],
    ]
    assert len({trial.id for trial in trials}) == 4
    assert [trial.id for trial in trials] == [trial.id for trial in SweepFile.read(written(tmp_path)).trials()]


def test_random_draws_so_many_different_trials_by_a_public_seed(tmp_path: Path) -> None:
    file = SweepFile.read(written(tmp_path, method="random", run_cap=3))
    assert len(set(file.trials(seed=1))) == 3
    assert file.trials(seed=1) == file.trials(seed=1) != file.trials(seed=2)
    assert len(SweepFile.read(written(tmp_path, method="random", run_cap=99)).trials()) == 4, "all there are"


@pytest.mark.slow
def test_the_command_line_is_the_one_that_wandbs_agent_would_make(tmp_path: Path) -> None:
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    file = SweepFile.read(written(tmp_path))
    trial = file.trials()[2]
    environment = {"LIT_DPRET_SWEEP": "runs/s"}
    theirs = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in trial.settings}})
    theirs |= {"env": [], "interpreter": [sys.executable], "program": [file.program]}
    words: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_DPRET_SWEEP", "runs/s")
        for part in utils.create_sweep_command([*file.command]):
            macro = part.startswith("${") and part.endswith("}")
            words += theirs[part[2:-1]] if macro else [part]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert file.command_line(trial, environment) == words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "bayes"}, "chooses its next trial by results"),
        ({"method": "random"}, "never ends without run_cap"),
        ({"parameters": {"lr": {"min": 0.1, "max": 1.0}}}, "no list of trials"),
        ({"parameters": {"lr": {"values": [1, 1]}}}, "lists a value twice"),
        ({"parameters": {}}, "no parameters to vary"),
        ({"run_cap": 0}, "run_cap=0"),
        ({"command": ["${program}"]}, "lacks"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate"),
        ({"metric": {"name": "x", "goal": "up"}}, "minimize or maximize"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SweepFile.read(written(tmp_path, **changes))


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml cannot be read"):
        SweepFile.read(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text('{"query": "a private one"}\n{"query": "another"}\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"bad\.yaml is not YAML") as found:
        SweepFile.read(tmp_path / "bad.yaml")
    assert "private one" not in str(found.value)  # a log may stand there


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_sweep_that_is_shipped_composes_in_every_trial(path: Path) -> None:
    file = SweepFile.read(path)
    shown = {}
    for trial in file.trials():
        shown |= {setting.partition("=")[0]: (trial, setting) for setting in trial.overrides}
    for trial in {trial for trial, _ in shown.values()}:
        task = composed(*file.fixed, *trial.overrides).task._target_
        assert task in ("lit_dpret.tasks.Fit", "lit_dpret.tasks.FitScored", "lit_dpret.tasks.Pipeline")
    assert "trial_of=${envvar:LIT_DPRET_SWEEP}" in file.command


def test_a_shipped_sweep_is_found_by_name_after_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = SweepFile.read("quickstart")
    assert shipped.fingerprint() == SweepFile.read(ROOT / "configs" / "sweep" / "quickstart.yaml").fingerprint()
    with pytest.raises(ConfigurationError, match=r"It takes a file, or one of eps_by_size, paper_grid, quickstart\."):
        SweepFile.read("quickstrat")
    written(tmp_path).rename("quickstart")
    assert SweepFile.read("quickstart").fingerprint() != shipped.fingerprint()
