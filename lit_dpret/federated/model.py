"""Build the model of every round, always from the same public start, with serialisable settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_dpret.cards.start import traces_of_training
from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.backbones import keep_layers
from lit_dpret.encoders.st_folder import cut
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.federated.aggregation import Weights, take_weights
from lit_dpret.federated.data.planted import Planted, planted_words
from lit_dpret.modules.as2 import AS2DualEncoder
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.settings import require_whole

PLANTED = "planted"


@dataclass(frozen=True, kw_only=True)
class AS2Maker:
    """A builder of the `AS2DualEncoder` of a round: the same arguments give the same weights in any process."""

    encoder: str = "distilbert-base-uncased"
    layers: int | None = None
    train_embeddings: bool = True
    max_query_length: int = 32
    max_sentence_length: int = 512
    temperature: float = 1.0
    query_pooling: str = "cls"
    sentence_pooling: str = "mean"
    weight_decay: float = 0.01
    planted: Planted | None = None
    seed: int = 0

    def check(self) -> AS2Maker:
        """Load the encoder, so that a missing one is refused before anything else; return the maker."""
        require_whole("federated.model", self, 1, "max_query_length", "max_sentence_length")
        require_whole("federated.model", self, 1, "layers", null=True)
        _loaded(self)
        return self

    def describe(self) -> str:
        layers = "" if self.layers is None else f", its first {self.layers} layers"
        tables = "" if self.train_embeddings else ", embedding tables frozen at their public values"
        return (
            f"{Path(self.encoder).name}{layers}{tables}; question: {self.query_pooling}, at most "
            f"{self.max_query_length} tokens; sentence: {self.sentence_pooling}, at most {self.max_sentence_length}"
        )

    def __call__(self, *, privacy: PrivacyMode, optimizer_lr: float, **settings: Any) -> AS2DualEncoder:
        return AS2DualEncoder(
            privacy=privacy,
            optimizer=OptimizerSpec(name="adamw", lr=optimizer_lr, weight_decay=self.weight_decay),
            encoder=copy.deepcopy(_loaded(self)),
            query_pooling=self.query_pooling,
            passage_pooling=self.sentence_pooling,
            temperature=self.temperature,
            **settings,
        )


def start_and_dim(make: Callable[..., AS2DualEncoder]) -> tuple[Weights, int]:
    """Return the public initial weights of stage 1 and the dimension of an embedding: the shapes of messages."""
    module = make(privacy=NoPrivacy(), optimizer_lr=1e-3, towers="shared", passage_tower="trained")
    return take_weights(module), module.encoder.dim


def start_of(make: Callable[..., AS2DualEncoder]) -> Weights:
    """Return the public initial weights of stage 1."""
    return start_and_dim(make)[0]


def refuse_private_start(make: Callable[..., AS2DualEncoder]) -> None:
    """Refuse an encoder trained on private data for a federation with a budget."""
    place = str(getattr(make, "encoder", PLANTED))
    if next(traces_of_training(place), None) is not None:
        raise ConfigurationError(
            f"federated.model.encoder={place} was trained on private data, which no silo's epsilon counts. Start from "
            "a public encoder, or claim nothing (federated.privacy.eps=null and federated.train_on=queries).",
            trap="T30",
        )


@lru_cache(maxsize=2)
def _loaded(maker: AS2Maker) -> TextEncoder:
    lengths: dict[str, Any] = {
        "query_max_length": maker.max_query_length,
        "passage_max_length": maker.max_sentence_length,
    }
    if maker.encoder == PLANTED:
        if maker.planted is None:
            raise ConfigurationError(
                "federated.model.encoder=planted knows only the words of federated.silos=planted. Set that, or choose "
                "another encoder."
            )
        encoder = _new(maker.planted, maker.seed, lengths)
    else:
        towers = cut(load_towers(maker.encoder), **lengths)
        if towers.query_encoder.backbone is not towers.passage_encoder.backbone:
            raise UnsupportedModelError(
                f"federated.model.encoder={maker.encoder} has a separate transformer for each side. Choose one with a "
                "single transformer."
            )
        found = towers.query_encoder  # a starting point, whether or not it normalises its embeddings
        encoder = TextEncoder(
            found.backbone, found.tokenizer, replace(found.contract, normalise=True), found.projection
        )  # fmt: skip
        encoder.unused_weights = found.unused_weights
    if maker.layers is not None:
        keep_layers(encoder.backbone, maker.layers)
    if not maker.train_embeddings:
        # The tables of words, positions and types, or only the table of words if these are not in one module.
        backbone: Any = encoder.backbone
        tables = getattr(backbone, "embeddings", None) or getattr(backbone, "get_input_embeddings", lambda: None)()
        if not isinstance(tables, nn.Module):
            raise UnsupportedModelError(
                f"federated.model.train_embeddings=false: {type(backbone).__name__} does not identify its embedding "
                "tables. Set it to true."
            )
        tables.requires_grad_(False)
    return encoder


def _new(size: Planted, seed: int, lengths: dict[str, Any]) -> TextEncoder:
    """Build one layer of 64 dimensions over a word tokenizer of public, invented words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "[UNK]", "[CLS]", "[SEP]", *planted_words(size)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="[UNK]")
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
        max_position_embeddings=max(lengths.values()),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TextEncoder(BertModel(config), tokenizer, Contract(**lengths))
