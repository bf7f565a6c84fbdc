"""How far and on which side a text is padded has no say in its embedding or its score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tiny_models import TEXTS, tiny_bert, tiny_t5, tiny_tokenizer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "pad_token_id": 0}
OPT = {"ffn_dim": 32, "word_embed_proj_dim": 16} | SIZES
XLNET: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
LONG_ROPE: dict[str, Any] = SIZES | {
    "max_position_embeddings": 160, "original_max_position_embeddings": 40, "rope_parameters": ROPE,
}  # fmt: skip
KINDS: dict[str, Callable[[], Any]] = {
    "absolute positions": tiny_bert,
    "positions counted from the padding": lambda: hf.RobertaModel(hf.RobertaConfig(**SIZES)),
    "relative positions": tiny_t5,
    "relative positions and segments": lambda: hf.XLNetModel(hf.XLNetConfig(**XLNET)),
    "decoder, absolute": lambda: hf.GPT2Model(hf.GPT2Config(**GPT2)),
    "decoder, from the mask": lambda: hf.OPTModel(hf.OPTConfig(**OPT)),
    "decoder, rotary": lambda: hf.LlamaModel(hf.LlamaConfig(**SIZES)),
    "decoder, long rope": lambda: hf.Phi3Model(hf.Phi3Config(**LONG_ROPE)),
    "decoder, slopes": lambda: hf.BloomModel(hf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)),
}
UNFIT: dict[str, Callable[[], Any]] = {
    "no mask": lambda: hf.FNetModel(hf.FNetConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)),
    "convolutions": lambda: hf.ConvBertModel(hf.ConvBertConfig(embedding_size=16, head_ratio=1, **SIZES)),
    "hashes beyond a length": lambda: hf.ReformerModel(hf.ReformerConfig(**REFORMER)),
    "lengths of a multiple": lambda: hf.NystromformerModel(hf.NystromformerConfig(**SIZES, segment_means_seq_len=12)),
    "landmarks": lambda: hf.NystromformerModel(hf.NystromformerConfig(**SIZES)),
}
REFORMER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "feed_forward_size": 32, "attention_head_size": 8,
    "axial_pos_shape": (8, 10), "axial_pos_embds_dim": (8, 8), "lsh_attn_chunk_length": 16, "pad_token_id": 0,
    "local_attn_chunk_length": 16, "max_position_embeddings": 80, "attn_layers": ["lsh", "local"], "is_decoder": False,
}  # fmt: skip
SIDES = pytest.mark.parametrize("side", ["left", "right"])
LENGTHS: dict[str, Any] = {"query_max_length": 32, "passage_max_length": 32}


def spread(model: Any) -> Any:
    """The model with weights so large that a token, or a position, counts."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def encoder(kind: str, side: str, **contract: Any) -> TextEncoder:
    tokenizer = tiny_tokenizer(padding_side=side)
    return TextEncoder(spread(KINDS[kind]()), tokenizer, Contract(**LENGTHS | contract)).eval()


@pytest.mark.like(4)
@SIDES
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_one_embedding_alone_in_a_batch_and_apart(
    kind: str, pooling: str, side: str, tmp_path: Path
) -> None:
    made = encoder(kind, side, pooling=pooling, normalise=False)
    alone = torch.cat([made.encode([text], "query") for text in TEXTS])
    found = {
        "batch": made.encode(TEXTS, "query"),
        "forward": made(made.tokenize(TEXTS, "query")).detach(),
        "at full length": made(made.at_full_length(made.tokenize(TEXTS, "query"), "query")).detach(),
        "apart": made.encode(TEXTS, "query", apart=True),
        "apart, cached": made.encode(TEXTS, "query", cache_dir=tmp_path, apart=True),
    }
    for how, rows in found.items():
        assert torch.allclose(rows, alone, rtol=0, atol=1e-5), how
    placed = made.placed(made.tokenize(TEXTS, "query"), "query", range(1, 1 + len(TEXTS)), len(TEXTS) + 2)
    torch.testing.assert_close(made(placed).detach()[1:-1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["absolute positions", "decoder, absolute"])
def test_sentence_transformers_pads_a_saved_folder_as_we_do(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    made = encoder(kind, "left")
    save_sentence_transformer(tmp_path, made, made)
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(theirs.float(), made.encode(TEXTS, "query"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_in_which_padding_counts_is_refused(kind: str) -> None:
    """A text's embedding, and its gradient, would follow from how long the other texts of its batch are."""
    with pytest.raises(UnsupportedModelError, match="padding"):
        TextEncoder(spread(UNFIT[kind]()), tiny_tokenizer(), Contract(query_max_length=16, passage_max_length=40))


def test_rotary_positions_that_change_with_the_longest_text_are_used_up_to_there() -> None:
    """Beyond it the positions of all texts in a batch followed from whether one of them was long."""
    model = spread(hf.Phi3Model(hf.Phi3Config(**LONG_ROPE)))
    short = torch.arange(3, 13)[None]
    beside = torch.cat([F.pad(short, (0, 40)), torch.arange(50)[None] % 60 + 3])
    with torch.no_grad():
        alone = model(input_ids=short).last_hidden_state
        moved = model(input_ids=beside, attention_mask=(beside > 0).long()).last_hidden_state[:1, :10] - alone
    assert moved.abs().max() > 0.1
    TextEncoder(model, tiny_tokenizer(), Contract(query_max_length=40, passage_max_length=40))
    buffers = [(buffer, buffer._version) for buffer in model.buffers()]
    with torch.no_grad():  # a buffer that is written while private rows are read would be refused
        assert torch.equal(model(input_ids=short).last_hidden_state, alone)
    assert all(buffer._version == version for buffer, version in buffers)
    for name in ("query_max_length", "passage_max_length"):
        with pytest.raises(ConfigurationError, match=name):
            TextEncoder(model, tiny_tokenizer(), Contract(**LENGTHS | {name: 41}))


@SIDES
@pytest.mark.parametrize("kind", ["Bert", "GPT2", "Llama"])
def test_a_pair_has_one_score_alone_and_in_a_batch(kind: str, side: str) -> None:
    config = getattr(hf, f"{kind}Config")(num_labels=1, **GPT2 if kind == "GPT2" else SIZES)
    model = spread(getattr(hf, f"{kind}ForSequenceClassification")(config))
    scorer = CrossEncoder(model, tiny_tokenizer(padding_side=side), max_length=32)
    queries, passages = TEXTS[:-1], TEXTS[1:]
    alone = [scorer.score([q], [p])[0] for q, p in zip(queries, passages, strict=True)]
    assert scorer.score(queries, passages) == pytest.approx(alone, abs=1e-5)


def test_a_cross_encoder_that_cannot_pad_is_refused(tmp_path: Path) -> None:
    config = hf.GPT2Config(num_labels=1, **{**GPT2, "pad_token_id": None})
    hf.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(model_max_length=32)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="padding"):
        CrossEncoder.load(tmp_path)
    hf.GPT2ForSequenceClassification(hf.GPT2Config(num_labels=1, **GPT2)).save_pretrained(tmp_path)
    CrossEncoder.load(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="padding"):
        CrossEncoder.load(tmp_path)
