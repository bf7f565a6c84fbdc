"""The paper's presets: what is trained with which settings, and a plan of each without any weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from configured import composed

from lit_dpret import cli
from lit_dpret.modules.outline import PUBLISHED

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
