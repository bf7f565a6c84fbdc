"""`QueryGenerator`: a language model that learns to write the query answered by a passage.

Fine-tuned under DP-SGD, it may write any number of queries: they are post-processing (papers: "query-level privacy for
deep retrieval", section 4). That holds only if the loss is a sum over units, so a row's loss is divided by its *own*
number of target tokens. Hugging Face's loss divides by the number in the whole batch: one long query would change the
weight of all others, and clipping each example would bound nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_dpret.distributed.handover import on_host
from lit_dpret.encoders.backbones import hold_rotary_positions, position_limit, refuse_if_padding_counts
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.families import IGNORED, DecoderOnly, family_of
from lit_dpret.modules.fine_tuning import freeze_all_but, refuse_two_choices, with_lora, without_adapters
from lit_dpret.modules.generator_folder import (
    PASSAGE,
    Example,
    GeneratorContract,
    GeneratorModel,
    TextCodec,
    load_generator,
    refuse_tuned_prompt,
    save_generator,
    whole_prompt,
)
from lit_dpret.modules.language_models import (
    build_language_model,
    enable_checkpointing,
    load_language_model,
    load_tokenizer,
)
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.modules.virtual_tokens import PromptTuning, add_prompt, without_prompt
from lit_dpret.privacy.ledger.assumptions import RANDOM_WEIGHTS
from lit_dpret.privacy.ledger.trained import note_folder
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row
from lit_dpret.settings import require_choice
from lit_dpret.texts import refuse_quoted

LossNormalisation = Literal["mean", "sum"]
_SIDES = ("passage", "query")


class QueryGenerator(PrivateModule):
    r"""Learn to write the query answered by a passage.

    Guarantees:
        - The loss of a row depends on that row alone: not on the other rows of the batch, nor on
          how far the batch was padded.
        - Weights are trained and noised in float32, whatever type they were stored in.
        - ``save_model`` writes a plain Hugging Face folder, and ``load_model`` reads back a model
          that writes the same queries.

    Args:
        privacy: The privacy mode.
        optimizer: Name, learning rate and schedule of the optimizer.
        pretrained: Hub name or model folder of an encoder-decoder model (T5, BART) or a decoder-only one (Llama,
            Qwen, Gemma, GPT-2); ``public_t5`` for the model that ships with this package; null to build a new one
            from ``config``.
        config: Fields of the Hugging Face config of a new model (``pretrained`` null).
        tokenizer: Hub name, folder or tokenizer; null for the one of ``pretrained``.
        prompt: A prefix for every passage; or the text around the passage, which it marks by ``{passage}``, as a
            decoder-only model needs it. It is public. Null for the family's own: ``generate_query: ``, or
            ``Passage: {passage}\nQuestion: ``.
        chat: Put the prompt into the tokenizer's chat template, as the user's turn.
        few_shot: Public examples that a decoder-only model reads before each passage: a file of JSON lines, or records,
            with ``passage`` and ``query``. They are part of the prompt, which is published, and count towards
            ``max_passage_length``. A query of the run's own data is refused among them; the card says that the
            others were declared public.
        max_passage_length: The maximum number of tokens of prompt and passage together.
        max_query_length: The maximum number of tokens of a query.
        lower_case: Lower-case passages and queries.
        dropout: Overrides the model's dropout rate; null keeps it.
        trainable_patterns: Regular expressions; a parameter is trained if one of them matches in its
            name, and all others are frozen. Null trains everything.
        lora: Arguments of ``peft.LoraConfig`` (``r``, ``lora_alpha``, ``target_modules`` and so on): train
            low-rank adapters instead of the weights; `save_model` merges them. Null trains the weights.
        prompt_tuning: Settings of `PromptTuning` (``num_virtual_tokens`` and so on, named as in peft): train
            virtual tokens before every passage instead of the weights; `save_model` writes them as rows of the
            embeddings. Null trains the weights.
        loss_normalisation: ``mean`` over a row's own target tokens, or their ``sum``.
        gradient_checkpointing: Recompute activations to save memory.
        fixed_shapes: Pad every physical batch to ``datamodule.physical_batch_size`` units and every text to its
            maximal length, so that a compiler sees one shape; null for XLA devices only. It changes no update. In
            low precision under a guarantee, batches are padded in any case (docs/modes.md).
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        UnsupportedModelError: The model cannot be loaded, or cannot generate text.
        ConfigurationError: Two settings contradict each other.
    """

    gathers_blocks = True
    reads = "texts"
    optimizer_spec: OptimizerSpec

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        pretrained: str | Path | None,
        config: Mapping[str, Any] | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        prompt: str | None = None,
        chat: bool = False,
        few_shot: str | Path | Sequence[Mapping[str, str]] | None = None,
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
        if (pretrained is None) == (config is None):
            raise ConfigurationError(
                f"model.pretrained={pretrained} and model.config={config}: give one of them, a model to start from "
                "or the shape of a new one."
            )
        source = tokenizer if tokenizer is not None else pretrained
        if source is None:
            raise ConfigurationError("model.pretrained=null needs model.tokenizer: a new model has no vocabulary.")
        chosen = {"trainable_patterns": trainable_patterns, "lora": lora, "prompt_tuning": prompt_tuning}
        refuse_two_choices(chosen)
        known = load_tokenizer(source, knob="model.pretrained" if tokenizer is None else "model.tokenizer")
        if pretrained is not None:
            refuse_tuned_prompt(pretrained)
            model = load_language_model(pretrained, dropout=dropout)
        else:
            model = build_language_model(config or {}, known, dropout=dropout)
        self.pretrained = RANDOM_WEIGHTS if pretrained is None else str(pretrained)
        self.family = family_of(model.config)
        self.examples = Example.read(few_shot)
        if lower_case:
            self.examples = [Example(each.passage.lower(), each.query.lower()) for each in self.examples]
        contract = GeneratorContract(
            prompt=self._prompt(prompt, known, chat),
            max_passage_length=max_passage_length,
            max_query_length=max_query_length,
            lower_case=lower_case,
        )
        self.codec = TextCodec(known, contract, continues=not model.config.is_encoder_decoder)
        self.codec.require_room()
        self.loss_normalisation = loss_normalisation
        self.fixed_shapes = fixed_shapes
        self.model = model.train()  # from_pretrained leaves it in evaluation mode, where dropout is off
        self._check_sizes()
        self._check_lengths()
        hold_rotary_positions(self.model)
        self._refuse_if_padding_counts()
        self._outlined: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing, **chosen}
        if gradient_checkpointing:
            enable_checkpointing(self.model)
        if lora is not None:
            self.model = cast(PreTrainedModel, with_lora(self.model, lora))
        self._tuned_from: str | None = None
        if prompt_tuning is not None:
            self._tuned_from = PromptTuning.of(prompt_tuning).prompt_tuning_init_text
            ids = add_prompt(self.model, prompt_tuning, known)
            self.codec = replace(self.codec, contract=replace(contract, virtual_ids=ids))
            self._check_lengths(virtual=len(ids))
        if trainable_patterns is not None:
            freeze_all_but(self.model, list(trainable_patterns))

    @staticmethod
    def outline(**settings: Any) -> GeneratorOutline:
        """Return the outline of a generator with these arguments, for a plan, without loading any weight."""
        return GeneratorOutline.of_settings(**settings)

    @property
    def outlined(self) -> GeneratorOutline:
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
        """Return the tokens of the rows, padded to the longest row.

        Returns:
            The features of the model's family: ``input_ids`` of passages, with ``attention_mask``, or of passages with
            their queries and ``starts``; and ``labels`` of shape ``(rows, query tokens)``, padded with -100.
        """
        passages = self.codec.passages([row.passage for row in rows])
        queries = self.codec.queries([row.query for row in rows])
        return self.family.collate(passages, queries, int(self.codec.tokenizer.pad_token_id))

    def place_rows(self, features: dict[str, Tensor], places: Sequence[int], rows: int) -> dict[str, Tensor]:
        """Like `PrivateModule.place_rows`, with every text padded to its maximal length."""
        contract, pad = self.codec.contract, int(self.codec.tokenizer.pad_token_id)
        source, target = contract.source_length, contract.max_query_length
        return self.family.place(features, places, rows, source=source, target=target, pad=pad)

    def longest_rows(self, count: int) -> dict[str, Tensor]:
        """Return rows of random tokens at the contract's full length, for measuring peak memory."""
        contract, coins = self.codec.contract, torch.Generator().manual_seed(0)
        words = int(self.model.get_input_embeddings().num_embeddings)

        def texts(length: int) -> list[list[int]]:
            drawn: list[list[int]] = torch.randint(1, words, (count, length), generator=coins).tolist()
            return drawn

        passages = [[*contract.virtual_ids, *ids] for ids in texts(contract.max_passage_length)]
        return self.family.collate(passages, texts(contract.max_query_length), int(self.codec.tokenizer.pad_token_id))

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
        return self.codec.token_ids(texts, side, whole=whole)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy in nats over each row's target tokens, in float32 or wider, ``(rows,)``."""
        labels = rows["labels"]
        logits = self.family.logits(self.model, rows)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        by_token = cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        loss = by_token.view(labels.shape).sum(dim=1)
        if self.loss_normalisation == "mean":
            loss = loss / (labels != IGNORED).sum(dim=1).clamp(min=1)
        return loss

    def save_model(self, folder: str | Path) -> Path:
        """Write the generator as a Hugging Face folder with its contract, atomically.

        Raises:
            StorageError: The folder cannot be written, or holds something that is not a generator.
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

    def _prompt(self, prompt: str | None, known: PreTrainedTokenizerBase, chat: bool) -> str:
        text = self.family.default_prompt if prompt is None else prompt
        if isinstance(self.family, DecoderOnly) and PASSAGE not in text:
            raise ConfigurationError(
                f"model.prompt={text!r} has no {PASSAGE}: a decoder-only model reads passage and query as one text, "
                f"and must see where the query begins. Write {self.family.default_prompt!r}, or leave it null."
            )
        if self.examples and not isinstance(self.family, DecoderOnly):
            raise ConfigurationError(
                "model.few_shot needs a decoder-only model, which continues a text; an encoder-decoder is trained to "
                "answer one passage. Leave it null."
            )
        return whole_prompt(known, text, self.examples, chat=chat)

    def refuse_protected(self, data: Any, published: Mapping[str, str] = MappingProxyType({})) -> None:
        """Refuse a query of ``data`` in the prompt, its examples or other ``published`` texts (by setting).

        A query is refused if it equals such a text, or has at least four words and occurs in one. Case and punctuation
        are ignored.
        """
        collection = getattr(data, "collection", None)
        if self.privacy.guarantee != "dp" or collection is None:
            return
        texts = dict(published)
        if self._tuned_from is not None:
            texts["model.prompt_tuning.prompt_tuning_init_text"] = self._tuned_from
        for number, example in enumerate(self.examples):
            texts |= {f"model.few_shot, example {number + 1}, {side}": getattr(example, side) for side in _SIDES}
        refuse_quoted(collection.queries.values(), texts, {"model.prompt": self.codec.contract.prompt})

    def assumptions(self) -> list[str]:
        told = []
        if self.examples:
            told.append(
                f"The {len(self.examples)} examples of model.few_shot, which are published word for word with the "
                "model, are public, as declared."
            )
        if self._tuned_from is not None:
            told.append(
                "The text that the virtual tokens of model.prompt_tuning start from, which can be read off the model, "
                "is public, as declared."
            )
        return told

    def _check_sizes(self) -> None:
        vocabulary, words = self.model.get_input_embeddings().num_embeddings, len(self.codec.tokenizer)
        if vocabulary < words:
            raise ConfigurationError(
                f"model.tokenizer has {words} tokens, but the model has embeddings for {vocabulary}: they do not "
                "belong together."
            )
        if self.codec.continues:
            ends = self.model.config.eos_token_id
            if self.codec.tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
                raise ConfigurationError(
                    f"model.tokenizer ends a text with token {self.codec.tokenizer.eos_token_id}, and the model's "
                    f"config with {ends} (eos_token_id): sampling would not stop where a query ends. Use the model's "
                    "own tokenizer, or make the two equal."
                )

    def _check_lengths(self, virtual: int = 0) -> None:
        """Refuse texts that, with ``virtual`` tokens before them, are longer than the model's positions allow."""
        model: Any = self.model
        passage, query = self.codec.contract.max_passage_length + virtual, self.codec.contract.max_query_length
        if self.codec.continues:
            read = [("max_passage_length + model.max_query_length", passage + query, model.base_model)]
        else:
            read = [
                ("max_passage_length", passage, model.get_encoder()),
                ("max_query_length", query, model.get_decoder()),
            ]
        for name, length, part in read:
            limit = position_limit(part)
            if limit is not None and length > limit:
                beside = f", with {virtual} of model.prompt_tuning," if virtual else ""
                raise ConfigurationError(
                    f"model.{name}={length}{beside} is more than the {limit} tokens up to which the positions of "
                    f"{type(model).__name__} do not depend on other texts. Lower it."
                )

    def _refuse_if_padding_counts(self) -> None:
        """Refuse a model whose output for a passage or a query changes when padding follows it."""
        contract, tokenizer, model = self.codec.contract, self.codec.tokenizer, self.model
        ids, pad = self.codec.token_ids(["a text"], "query", whole=True)[0], int(tokenizer.pad_token_id)
        text = torch.tensor([ids], device=model.device)

        def reads(features: dict[str, Tensor]) -> Tensor:
            beside = {} if self.codec.continues else {"decoder_input_ids": text}
            masked = {"input_ids": features["input_ids"]} if self.codec.continues else features
            found: Tensor = model(**masked, **beside, use_cache=False).logits
            return found

        def writes(features: dict[str, Tensor]) -> Tensor:
            found: Tensor = model(input_ids=text, decoder_input_ids=features["input_ids"], use_cache=False).logits
            return found

        if self.codec.continues:
            longest = contract.max_passage_length + contract.max_query_length
            refuse_if_padding_counts(model, ids, pad, reads, longest=longest)
        else:
            refuse_if_padding_counts(model, ids, pad, reads, longest=contract.max_passage_length)
            refuse_if_padding_counts(model, ids, pad, writes, longest=contract.max_query_length)
