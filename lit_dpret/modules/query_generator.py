"""Passage in, query out: the model that learns to ask, and the only part that sees a private query.

Fine-tuning a sequence-to-sequence model on (passage, query) pairs under DP-SGD gives a model that
may write as many queries as one likes: they are post-processing (papers: "query-level privacy for
deep retrieval", section 4). That holds only if the loss is a sum over units, so the loss of a row is
normalised by the row's *own* number of target tokens. Hugging Face's built-in loss divides by the
token count of the whole batch: one long query would then change the weight of all the others, and
clipping each example would bound nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_dpret.distributed.xla import on_host
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.fine_tuning import (
    add_prompt,
    freeze_all_but,
    refuse_two_choices,
    with_lora,
    without_adapters,
    without_prompt,
)
from lit_dpret.modules.generator_folder import (
    GeneratorContract,
    GeneratorModel,
    TextCodec,
    load_generator,
    padded,
    placed,
    refuse_tuned_prompt,
    save_generator,
)
from lit_dpret.modules.language_models import build_seq2seq, enable_checkpointing, load_seq2seq, load_tokenizer
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.budget import require_choice
from lit_dpret.privacy.ledger.facts import RANDOM_WEIGHTS
from lit_dpret.privacy.ledger.trained import note_folder
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row

LossNormalisation = Literal["mean", "sum"]
IGNORED = -100


class QueryGenerator(PrivateModule):
    """Learn to write the query that a passage answers.

    Guarantees:
        - The loss of a row depends on that row alone: not on the other rows of the batch, nor on
          how far the batch was padded.
        - Weights are trained and noised in float32, whatever type they were stored in.
        - ``save_model`` writes a plain Hugging Face folder, and ``load_model`` reads back a model
          that writes the same queries.

    Args:
        privacy: The privacy mode.
        optimizer: Name, learning rate and schedule of the optimizer.
        pretrained: Hub name, model folder, or ``public_t5`` for the model that ships with this
            package; null to build a new one from ``config``.
        config: Fields of the Hugging Face config of a new model (``pretrained`` null).
        tokenizer: Hub name, folder or tokenizer; null for the one of ``pretrained``.
        prompt: Put before every passage.
        max_passage_length: Tokens of prompt and passage together.
        max_query_length: Tokens of a query.
        lower_case: Lower-case passages and queries.
        dropout: Overrides the model's own rate; null keeps it.
        trainable_patterns: Regular expressions; a parameter is trained where one of them matches
            in its name, all others are frozen. Null trains everything.
        lora: Arguments of ``peft.LoraConfig`` (``r``, ``lora_alpha``, ``target_modules`` and so on): train
            low-rank adapters instead of the weights; `save_model` merges them. Null trains the weights.
        prompt_tuning: Settings of `PromptTuning` (``num_virtual_tokens`` and so on, called as peft calls them): train
            virtual tokens before every passage instead of the weights; in what `save_model` writes they are rows of
            the embeddings. Null trains the weights.
        loss_normalisation: ``mean`` over a row's own target tokens, or their ``sum``.
        gradient_checkpointing: Recompute activations to save memory.
        fixed_shapes: Fill every physical batch up to ``datamodule.physical_batch_size`` units and every text to its
            maximal length, so that a compiler sees one shape; null for XLA devices only. It changes no update. In
            low precision under a guarantee they are filled up whatever it says (docs/modes.md).
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        UnsupportedModelError: The model cannot be loaded, or is no sequence-to-sequence model.
        ConfigurationError: Two settings contradict each other.
    """

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        pretrained: str | Path | None,
        config: Mapping[str, Any] | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        prompt: str = "generate_query: ",
        max_passage_length: int = 384,
        max_query_length: int = 128,
        lower_case: bool = False,
        dropout: float | None = None,
        trainable_patterns: Sequence[str] | None = None,
        lora: Mapping[str, Any] | None = None,
        prompt_tuning: Mapping[str, Any] | None = None,
        loss_normalisation: LossNormalisation = "mean",
        gradient_checkpointing: bool = False,
        fixed_shapes: bool | None = None,
        log_private_loss: bool = False,
    ) -> None:
        settings = dict(locals())
        super().__init__(privacy=privacy, optimizer=optimizer, log_private_loss=log_private_loss)
        self.keep_settings(settings)
        require_choice("model.loss_normalisation", loss_normalisation, get_args(LossNormalisation))
        contract = GeneratorContract(
            prompt=prompt,
            max_passage_length=max_passage_length,
            max_query_length=max_query_length,
            lower_case=lower_case,
        )
        if (pretrained is None) == (config is None):
            raise ConfigurationError(
                f"model.pretrained={pretrained} and model.config={config}: give one of them, a model to start from "
                "or the shape of a new one."
            )
        source = tokenizer if tokenizer is not None else pretrained
        if source is None:
            raise ConfigurationError(
                "model.pretrained=null needs model.tokenizer: a new model has no words of its own."
            )
        chosen = {"trainable_patterns": trainable_patterns, "lora": lora, "prompt_tuning": prompt_tuning}
        refuse_two_choices(chosen)
        words = load_tokenizer(source)
        if pretrained is not None:
            refuse_tuned_prompt(pretrained)
            model = load_seq2seq(pretrained, dropout=dropout)
        else:
            model = build_seq2seq(config or {}, words, dropout=dropout)
        self.pretrained = RANDOM_WEIGHTS if pretrained is None else str(pretrained)
        self.codec = TextCodec(words, contract)
        self.loss_normalisation = loss_normalisation
        self.fixed_shapes = fixed_shapes
        self.model = model.train()  # from_pretrained leaves it in evaluation mode, where dropout is off
        self._check_sizes()
        self._outlined: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing, **chosen}
        if gradient_checkpointing:
            enable_checkpointing(self.model)
        if lora is not None:
            self.model = cast(PreTrainedModel, with_lora(self.model, lora))
        if prompt_tuning is not None:
            ids = add_prompt(self.model, prompt_tuning, words)
            self.codec = replace(self.codec, contract=replace(contract, virtual_ids=ids))
        if trainable_patterns is not None:
            freeze_all_but(self.model, list(trainable_patterns))

    @staticmethod
    def outline(**settings: Any) -> GeneratorOutline:
        """Return the generator of the same arguments without its weights, for a plan; nothing is read or downloaded."""
        return GeneratorOutline.of_settings(**settings)

    @property
    def outlined(self) -> GeneratorOutline:
        """This generator as a plan sees it."""
        return GeneratorOutline(
            model=self.model,
            name=self.pretrained,
            max_passage_length=self.codec.contract.max_passage_length,
            max_query_length=self.codec.contract.max_query_length,
            optimizer=self.optimizer_spec.name,
            **self._outlined,
        )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        precision = str(getattr(self.trainer, "precision", ""))
        if precision.startswith("16"):
            raise ConfigurationError(
                f"trainer.precision={precision}: the activations of T5 models overflow in float16, and the loss scaler "
                "would skip steps. Choose bf16-mixed or 32-true."
            )

    def collate_rows(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return tokens of the rows, padded to the longest of them.

        Returns:
            ``input_ids`` and ``attention_mask`` of shape ``(rows, passage tokens)``, and ``labels``
            of shape ``(rows, query tokens)`` with -100 where there is padding.
        """
        passages = self.codec.passages([row.passage for row in rows])
        queries = self.codec.queries([row.query for row in rows])
        pad = int(self.codec.tokenizer.pad_token_id)
        return {
            "input_ids": padded(passages, pad),
            "attention_mask": padded([[1] * len(ids) for ids in passages], 0),
            "labels": padded(queries, IGNORED),
        }

    def place_rows(self, features: dict[str, Tensor], places: Sequence[int], rows: int) -> dict[str, Tensor]:
        """As `PrivateModule.place_rows`, every text filled up to its maximal length."""
        contract = self.codec.contract
        passages, queries = (rows, contract.encoder_length), (rows, contract.max_query_length)
        attended = placed(features["attention_mask"], places, passages, 0)
        attended[:, 0] = 1  # also of a filled-in row: attention to nothing is not defined
        # Added to the scores as it is: of a mask of zeros and ones, transformers would ask whether all are ones.
        added = (1.0 - attended.float()) * torch.finfo(torch.float32).min
        return {
            "input_ids": placed(features["input_ids"], places, passages, int(self.codec.tokenizer.pad_token_id)),
            "attention_mask": added[:, None, None, :],
            "labels": placed(features["labels"], places, queries, IGNORED),
        }

    def longest_rows(self, count: int) -> dict[str, Tensor]:
        """Rows as long as the contract lets them be, of random tokens: what takes most memory, and no data."""
        contract, coins = self.codec.contract, torch.Generator().manual_seed(0)
        source, target = contract.max_passage_length, contract.max_query_length
        words = int(self.model.get_input_embeddings().num_embeddings)
        virtual = torch.tensor(contract.virtual_ids, dtype=torch.long).expand(count, -1)
        return {
            "input_ids": torch.cat([virtual, torch.randint(1, words, (count, source), generator=coins)], dim=1),
            "attention_mask": torch.ones(count, contract.encoder_length, dtype=torch.long),
            "labels": torch.randint(1, words, (count, target), generator=coins),
        }

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
        return self.codec.token_ids(texts, side, whole=whole)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        """Cross entropy in nats over each row's own target tokens, in float32 or wider, ``(rows,)``."""
        labels = rows["labels"]
        logits = self.model(
            input_ids=rows["input_ids"],
            attention_mask=rows["attention_mask"],
            decoder_input_ids=self.model.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,
        ).logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        by_token = cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        loss = by_token.view(labels.shape).sum(dim=1)
        if self.loss_normalisation == "mean":
            loss = loss / (labels != IGNORED).sum(dim=1).clamp(min=1)
        return loss

    def save_model(self, folder: str | Path) -> Path:
        """Write the generator as a Hugging Face folder with its contract, all of it or nothing.

        Raises:
            StorageError: The folder cannot be written, or holds something that is no generator.
        """
        with on_host(self.model):
            merged = cast(PreTrainedModel, without_adapters(self.model))
            place = save_generator(folder, without_prompt(merged), self.codec)
        note_folder(self, place)
        return place

    @staticmethod
    def load_model(folder: str | Path) -> GeneratorModel:
        """Load what ``save_model`` wrote, ready to generate."""
        return load_generator(folder)

    def _check_sizes(self) -> None:
        vocabulary, words = self.model.get_input_embeddings().num_embeddings, len(self.codec.tokenizer)
        if vocabulary < words:
            raise ConfigurationError(
                f"model.tokenizer has {words} tokens, but the model has embeddings for {vocabulary}: they do not "
                "belong together."
            )
        positions = getattr(self.model.config, "max_position_embeddings", None)
        for name in ("max_passage_length", "max_query_length"):
            length = getattr(self.codec.contract, name)
            if isinstance(positions, int) and length > positions:
                raise ConfigurationError(
                    f"model.{name}={length} is more than the {positions} positions that the model has."
                )
