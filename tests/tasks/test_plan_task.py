"""`task=plan` from a configuration to the console, plan.json and plan.png; nothing is trained, nothing is read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from configured import composed
from pair_stand_ins import Pairs, logit_dp
from tiny_generator import generator
from tiny_tasks import write_log

from lit_dpret import cli
from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.callbacks import OneRunAudit, PrivacyAccountant
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.outline import PUBLISHED
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.clipping.pairs import costs
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.report import figures
from lit_dpret.tasks import Fit, Plan
from lit_dpret.tasks import plan as plan_task
from lit_dpret.tasks.parts import Parts

UNITS, STEPS = 2886, 72  # the same plan in all tests: what it costs is computed once


def parts(tmp_path: Path, **changes: Any) -> Parts:
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "make_privacy": partial(DPSGD, eps=3.0, noise_multiplier=2.0),
        "make_datamodule": partial(
            PairsDataModule, pairs=tmp_path / "no such file", sampling="poisson", expected_batch_size=20
        ),
        "make_module": lambda privacy: generator(privacy=privacy),
        "make_outline": lambda privacy: generator(privacy=privacy).outlined,
        "make_trainer": partial(L.Trainer, accelerator="cpu", max_steps=STEPS, max_epochs=-1),
    }
    return Parts(**settings | changes)


def test_the_plan_of_clipped_pairs_tells_how_their_norms_are_computed_and_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {
        "make_module": lambda privacy: Pairs(privacy=privacy),
        "make_privacy": partial(logit_dp, eps=3.0, noise_multiplier=2.0, sub_batches=2, norms="pair_ghost"),
    }
    Plan(units=UNITS, plot=False).run(parts(tmp_path, **changes))
    facts = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))["pair_norms"]
    of_ten = costs(n_max=10, dim=3, positions=1, width=4, shared=True)
    assert facts == {"norms": "pair_ghost", "ordinary_steps": pytest.approx(of_ten["pair_ghost"])}
    assert f"pair_ghost, about {facts['ordinary_steps']:.2g} times" in capsys.readouterr().out


@pytest.mark.costly
def test_a_plan_is_printed_and_drawn_without_reading_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Plan(units=UNITS, plot=True).run(parts(tmp_path))
    facts = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert found == {"noise_multiplier": 2.0, "epsilon": facts["epsilon"]}
    assert facts["steps"] == STEPS and facts["cost"]["estimate"]["rows"] == facts["plan"]["physical_batch_size"]
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"epsilon {show_epsilon(facts['epsilon'])} at delta 0.000174" in shown, "as on the card: rounded up"
    for heading in ("by sampling and neighbours", "the knee", "one-run audit", "No attack", "Time and memory"):
        assert heading in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_a_missing_model_leaves_the_privacy_plan_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(privacy: Any) -> Any:
        raise UnsupportedModelError("model.pretrained=nowhere cannot be loaded.")

    Plan(units=UNITS, plot=False).run(parts(tmp_path, make_outline=refuse))
    assert "not estimated. model.pretrained=nowhere" in capsys.readouterr().out
    with pytest.raises(UnsupportedModelError, match="nowhere"):
        Plan(units=UNITS, plot=False, measure=True).run(parts(tmp_path, make_outline=refuse))


@pytest.mark.costly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")
def test_a_measurement_stands_beside_the_estimate_of_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = partial(L.Trainer, accelerator="cpu", max_steps=3, max_epochs=-1)
    Plan(units=UNITS, epochs=0.5, plot=False, measure=True).run(parts(tmp_path, make_trainer=trainer))
    facts = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert facts["steps"] == STEPS and facts["epochs"] == pytest.approx(0.5, rel=0.01)
    assert set(facts["cost"]) == {"estimate", "measurement"}
    assert "\n| measurement " in capsys.readouterr().out


def test_without_matplotlib_a_picture_is_refused_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan_task, figures):
        monkeypatch.setattr(module, "can_draw", lambda: False)
    with pytest.raises(ConfigurationError, match="privacy=none"):
        Plan(units=UNITS).run(parts(tmp_path, make_privacy=NoPrivacy))
    with pytest.raises(ConfigurationError, match=r"task\.plot=true.*lit-dpret\[plot\]"):
        Plan(units=UNITS, plot=True).run(parts(tmp_path))
    Plan(units=UNITS).run(parts(tmp_path))
    assert not (tmp_path / "run" / "plan.png").exists()


def audited(folder: Path) -> list[Any]:
    return [
        PrivacyAccountant(run_dir=folder, resume_reserve=30),
        OneRunAudit(run_dir=folder, canaries=32, max_share=0.9),
    ]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("given", "neighbours", "units"),
    [
        pytest.param({"make_callbacks": audited}, "replace_one", None, id="an audit and a reserve"),
        pytest.param(
            {"make_canaries": lambda folder: CanarySuite(repetitions=[1, 2], candidates=10)},
            "zero_out",
            56,
            id="canaries",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_plan_is_that_of_the_fit_of_the_same_words(
    given: Any, neighbours: str, units: int | None, tmp_path: Path
) -> None:
    made = parts(
        tmp_path,
        make_datamodule=partial(PairsDataModule, folder=write_log(tmp_path / "log"), sampling="poisson",
                                expected_batch_size=16),
        make_privacy=partial(DPSGD, eps=8.0, neighbours=neighbours),
        make_trainer=partial(L.Trainer, accelerator="cpu", max_steps=2, max_epochs=-1),
        **{name: partial(make, tmp_path / "run") for name, make in given.items()},
    )  # fmt: skip
    (fit,) = Fit(min_free_mb=1).planned_fits(made)
    reserve = sum(one.resume_reserve for one in made.make_callbacks() if isinstance(one, PrivacyAccountant))
    assert fit.plan.steps == fit.steps + reserve, "what is paid for in advance is part of the plan"
    told = Plan(plot=False, units=units).run(made)
    facts = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert told["noise_multiplier"] == fit.plan.noise_multiplier
    assert facts["plan"] == fit.plan.to_dict()


@pytest.mark.slow
def test_a_plan_of_read_data_cautions_of_cut_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "log")
    made = parts(
        tmp_path,
        make_datamodule=partial(PairsDataModule, folder=log, sampling="poisson", expected_batch_size=40),
        make_privacy=partial(DPSGD, eps=8.0),
        trained_settings=lambda: {"model.max_passage_length": 3, "model.max_query_length": 64},
    )
    Plan(plot=False).run(made)
    told = " ".join(capsys.readouterr().out.split())
    assert "model.max_passage_length=3" in told and "model.max_query_length" not in told
    facts = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert len(facts["cautions"]) == 2 and all(" ".join(one.split()) in told for one in facts["cautions"])
    assert "max_passage_length" not in json.dumps(facts["cautions"]), "a share of private texts is for the owner alone"


# -- the presets of the paper --------------------------------------------------------------------

PRESETS = {
    "small": "google-t5/t5-small",
    "base": "google-t5/t5-base",
    "large": "google-t5/t5-large",
    "xl": "google-t5/t5-3b",
}
LORA = "model.lora={r: 16, lora_alpha: 32, target_modules: [q, v]}"


@pytest.mark.parametrize("size", PRESETS)
def test_a_preset_has_the_hyper_parameters_of_the_paper(size: str) -> None:
    cfg = composed(f"experiment=generator_t5_{size}", "run_dir=run")
    assert cfg.model.pretrained == PRESETS[size] and cfg.model.pretrained in PUBLISHED
    assert cfg.model.optimizer.name == "adam" and cfg.model.optimizer.lr == 0.001
    assert (cfg.model.max_passage_length, cfg.model.max_query_length) == (384, 128)
    assert cfg.privacy.max_grad_norm == 0.1 and cfg.privacy.delta is None  # 1/(2n)
    assert cfg.datamodule.expected_batch_size == 1024 and cfg.trainer.max_epochs == 30 and cfg.trainer.max_steps == -1
    assert cfg.model._target_.endswith("QueryGenerator") and cfg.privacy._target_.endswith("DPSGD")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "lora"), [("small", False), ("xl", False), ("xl", True)])
def test_a_preset_is_planned_where_there_are_no_weights_and_no_gpu(size: str, lora: bool, tmp_path: Path) -> None:
    cfg = composed(
        f"experiment=generator_t5_{size}", f"run_dir={tmp_path}", "task=plan", "task.units=500000", "task.plot=false",
        "task.epochs=0.01", "privacy.noise_multiplier=2.0", *([LORA] if lora else []),
    )  # fmt: skip
    cli.run(cfg)
    facts = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    cost = facts["cost"]["estimate"]
    assert (cost["passage_tokens"], cost["query_tokens"]) == (384, 128)
    assert cost["trained_parameters"] == (11_796_480 if lora else cost["parameters"])
    assert cost["rows"] == cfg.datamodule.physical_batch_size
    assert facts["plan"]["sensitivity"] == 0.1 and facts["plan"]["denominator"] == 1024
