"""Low-rank adapters in a generator: what is trained, and what is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_generator import generator

from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import QueryGenerator

LORA = {"r": 2, "target_modules": ["q", "v"]}


def test_only_adapters_are_trained_and_the_export_has_them_merged_into_its_weights(tmp_path: Path) -> None:
    module = generator(lora=LORA)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    rows = {
        "input_ids": torch.tensor([[5, 6, 7, 1]]), "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "labels": torch.tensor([[8, 9, 1]]),
    }  # fmt: skip
    adapted = module.per_row_loss(rows).detach()
    folder = module.save_model(tmp_path / "generator")
    assert any("lora_" in name for name, _ in module.named_parameters()), "the export left the module as it was"
    exported = generator()
    exported.model = QueryGenerator.load_model(folder).model
    assert not any("lora" in name for name, _ in exported.named_parameters())
    torch.testing.assert_close(exported.per_row_loss(rows).detach(), adapted)
    assert (adapted - generator().per_row_loss(rows).detach()).abs() > 1e-3, "the adapters did something"


def test_adapters_and_patterns_are_not_both_what_is_trained() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.trainable_patterns and model\.lora"):
        generator(lora=LORA, trainable_patterns=[r"^decoder\."])
