"""Query and passage into one space, by one transformer that is trained end to end.

The negatives of a query are the passages of the other rows of its batch. That is cheap and works
well, and it couples the rows: what one query contributes depends on who else was drawn, so clipping
each query's gradient bounds nothing. This module is therefore for training without privacy, on the
original queries (the upper bound) or on DP synthetic ones (post-processing). For direct per-query
privacy see `lit_dpret.modules.frozen_dual_encoder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import InBatchSoftmaxLoss, false_negatives
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row, UnitBatch
from lit_dpret.st_folder import save_sentence_transformer


class InBatchNegatives(PrivateModule):
    """A module whose negatives come from the batch, so that a logical batch must stay in one piece.

    Guarantees:
        - A logical batch that would be cut into physical batches is refused before the first update:
          cut in two, each query would see half of its negatives.
    """

    coupled_loss = True

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        expected = getattr(data, "expected_batch_size", None)
        physical = getattr(data, "physical_batch_size", None)
        if self.coupled_loss and stage == "fit" and expected and physical and physical < expected:
            raise self._cut(f"datamodule.physical_batch_size={physical} is below {expected}, the expected_batch_size")

    def training_step(self, batch: UnitBatch, batch_idx: int) -> None:
        if self.coupled_loss and not (batch.last and batch.part == 0):
            raise self._cut(f"A logical batch was cut into physical batches of {len(batch.mask)} units")
        super().training_step(batch, batch_idx)

    def _cut(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what}: {type(self).__name__} takes its negatives from the batch, which must stay in one piece. Raise "
            "datamodule.physical_batch_size to datamodule.expected_batch_size or more; if memory is short, set "
            "model.gradient_checkpointing=true or lower both."
        )


class DualEncoder(InBatchNegatives):
    """One encoder for queries and passages, trained with in-batch negatives.

    Guarantees:
        - A passage is never a negative of a query that it answers: neither another copy of the row's
          own passage, nor another positive of the same query.
        - ``privacy=dp_sgd`` is refused before training: the loss couples the queries of a batch.
        - `save_model` writes a folder that ``SentenceTransformer(folder)`` loads, with the same
          embeddings.

    Args:
        privacy: The privacy mode: ``none``, or ``synthetic`` on data that carries a privacy card.
        optimizer: Name, learning rate and schedule of the optimizer.
        encoder: ``minilm``, a hub name, a model folder, or a ready `TextEncoder` whose own
            lengths and prefixes then hold; null to build a new, untrained one from ``config``.
        config: Fields of the Hugging Face config of a new encoder, ``model_type`` among them.
        tokenizer: Folder or hub name of a new encoder's tokenizer.
        temperature: Divides the cosine similarity.
        max_query_length: Tokens of a query that are read, special tokens among them.
        max_passage_length: The same for a passage.
        query_prefix: Put before every query; null for what the encoder's folder says.
        passage_prefix: Put before every passage; null for what the encoder's folder says.
        gradient_checkpointing: Recompute activations to save memory.
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        ConfigurationError: Two settings contradict each other, or the encoder cannot be found.
    """

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        encoder: str | Path | TextEncoder | None = "minilm",
        config: Mapping[str, Any] | None = None,
        tokenizer: str | Path | None = None,
        temperature: float = 0.05,
        max_query_length: int = 32,
        max_passage_length: int = 128,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        gradient_checkpointing: bool = False,
        log_private_loss: bool = False,
    ) -> None:
        super().__init__(privacy=privacy, optimizer=optimizer, log_private_loss=log_private_loss)
        self.loss = InBatchSoftmaxLoss(temperature=temperature, similarity="cosine")
        self.pretrained = str(encoder) if isinstance(encoder, (str, Path)) else None
        self.encoder = make_encoder(
            encoder,
            config=config,
            tokenizer=tokenizer,
            query_max_length=max_query_length,
            passage_max_length=max_passage_length,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
        ).train()
        if gradient_checkpointing:
            self.encoder.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def collate_rows(self, rows: list[Row]) -> dict[str, Any]:
        """Tokens of both sides, and which passages of the batch are right answers.

        Returns:
            ``query`` and ``passage``, each with ``input_ids`` and ``attention_mask`` of shape
            ``(rows, tokens)``, and ``answers``, booleans of shape ``(rows, rows)``.
        """
        ids = [row.passage_id for row in rows]
        return {
            "query": self.encoder.tokenize([row.query for row in rows], "query"),
            "passage": self.encoder.tokenize([row.passage for row in rows], "passage"),
            "answers": false_negatives(ids, ids, [row.positives for row in rows]),
        }

    def per_row_loss(self, rows: dict[str, Any]) -> Tensor:
        """Cross entropy in nats of each query's own passage among those of the batch, ``(rows,)``."""
        queries, passages = self.encoder(rows["query"]), self.encoder(rows["passage"])
        losses: Tensor = self.loss(queries, passages, mask=rows["answers"])
        return losses

    def encode_queries(self, texts: Sequence[str], *, progress: Any = None) -> Tensor:
        """Embeddings of queries of length 1 on the CPU, ``(texts, dim)``; their dot product is the cosine."""
        return self.encoder.encode(texts, "query", progress=progress)

    def encode_passages(self, texts: Sequence[str], *, progress: Any = None) -> Tensor:
        """Embeddings of passages, as `encode_queries`."""
        return self.encoder.encode(texts, "passage", progress=progress)

    def save_model(self, folder: str | Path) -> Path:
        """Write the encoder as a sentence-transformers folder with its contract.

        Raises:
            StorageError: The folder cannot be written.
        """
        save_sentence_transformer(folder, self.encoder)
        return Path(folder)


def make_encoder(
    encoder: str | Path | TextEncoder | None,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    query_max_length: int,
    passage_max_length: int,
    query_prefix: str | None,
    passage_prefix: str | None,
) -> TextEncoder:
    """The shared tower that a dual encoder's settings describe, normalised, in float32.

    Raises:
        ConfigurationError: ``encoder`` and ``config`` are both given or both missing.
    """
    if isinstance(encoder, TextEncoder):
        if not encoder.contract.normalise:
            raise ConfigurationError("model.encoder does not normalise its embeddings; set normalise=True in it.")
        return encoder
    if (encoder is None) == (config is None):
        raise ConfigurationError(
            f"model.encoder={encoder} and model.config={config}: give one of them, an encoder to start from or the "
            "shape of a new one."
        )
    if encoder is not None:
        return TextEncoder.from_pretrained(
            encoder,
            normalise=True,
            query_max_length=query_max_length,
            passage_max_length=passage_max_length,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
        )
    contract = Contract(
        query_max_length=query_max_length,
        passage_max_length=passage_max_length,
        query_prefix=query_prefix or "",
        passage_prefix=passage_prefix or "",
    )
    backbone, words = _new_transformer(dict(config or {}), tokenizer)
    return TextEncoder(backbone, words, contract)


def _new_transformer(config: dict[str, Any], tokenizer: str | Path | None) -> tuple[Any, Any]:
    import transformers

    if tokenizer is None:
        raise ConfigurationError("model.encoder=null needs model.tokenizer: a new encoder has no words of its own.")
    try:
        words = transformers.AutoTokenizer.from_pretrained(tokenizer)
        shape = transformers.AutoConfig.for_model(**{"vocab_size": len(words)} | config)
        backbone = transformers.AutoModel.from_config(shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"model.config and model.tokenizer={str(tokenizer)!r} make no encoder: {reason} model.config needs "
            "model_type, for instance bert, and the fields of that type's config."
        ) from error
    if backbone.get_input_embeddings().num_embeddings < len(words):
        raise ConfigurationError(
            f"model.tokenizer has {len(words)} tokens, but model.config has embeddings for "
            f"{backbone.get_input_embeddings().num_embeddings}: they do not belong together."
        )
    return backbone.to(torch.float32), words
