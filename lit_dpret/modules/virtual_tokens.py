"""Prompt tuning: trained virtual tokens before a passage, the rest of the model frozen.

Virtual tokens cannot be merged into the weights, but they can be merged into the vocabulary: a saved generator is a
plain model with one more embedding row for each.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.language_models import shaped
from lit_dpret.settings import require_choice, require_whole

PromptInit = Literal["SAMPLE_VOCAB", "RANDOM", "TEXT"]


@dataclass(frozen=True, kw_only=True)
class PromptTuning:
    """The settings of `model.prompt_tuning`, named as in ``peft.PromptTuningConfig``."""

    num_virtual_tokens: int = 20  # vectors before every passage; each is as wide as an embedding
    # Their initial values, which are public in every case: ``SAMPLE_VOCAB``, embeddings of random words; ``RANDOM``,
    # standard normal numbers; ``TEXT``, the embeddings of ``prompt_tuning_init_text``.
    prompt_tuning_init: PromptInit = "SAMPLE_VOCAB"
    # Repeated or truncated to ``num_virtual_tokens``. It is published with the model: never take it from private
    # queries.
    prompt_tuning_init_text: str | None = None

    def __post_init__(self) -> None:
        text = self.prompt_tuning_init_text
        require_whole("model.prompt_tuning", self, 1, "num_virtual_tokens")
        require_choice("model.prompt_tuning.prompt_tuning_init", self.prompt_tuning_init, get_args(PromptInit))
        if (self.prompt_tuning_init == "TEXT") != bool(text):
            raise ConfigurationError(
                f"model.prompt_tuning: prompt_tuning_init={self.prompt_tuning_init} and prompt_tuning_init_text={text} "
                "do not go together: give a text with prompt_tuning_init=TEXT, and only with it."
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PromptTuning:
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(map(str, settings)) - set(known)):
            raise ConfigurationError(
                f"model.prompt_tuning.{unknown[0]} is not a setting. Its settings are {', '.join(known)}."
            )
        return cls(**{str(name): value for name, value in settings.items()})


class PromptedEmbedding(nn.Module):
    """Frozen embeddings of words, and trained ones of virtual tokens (Lester et al. 2021, 2104.08691, section 2).

    The ids of virtual tokens come after all words. The code that turns texts into ids puts them before every passage,
    so masks, lengths and other code that counts tokens need no changes. ``start`` has the shape ``(tokens, dim)``.
    """

    def __init__(self, words: nn.Embedding, start: Tensor) -> None:
        super().__init__()
        self.words = words
        self.prompt = nn.Embedding(len(start), start.shape[1], _weight=start)

    @property
    def num_embeddings(self) -> int:
        """The number of words; the ids of virtual tokens come after theirs."""
        return self.words.num_embeddings

    @property
    def ids(self) -> tuple[int, ...]:
        first = self.words.num_embeddings
        return tuple(range(first, first + self.prompt.num_embeddings))

    def forward(self, ids: Tensor) -> Tensor:
        first = self.words.num_embeddings
        virtual = ids >= first
        words = self.words(ids.masked_fill(virtual, 0))
        prompt = self.prompt((ids - first).clamp(min=0))
        return torch.where(virtual[..., None], prompt.to(words.dtype), words)


def add_prompt(
    model: PreTrainedModel, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Freeze a language model and add trainable virtual tokens, read by its encoder if it has one; return their ids.

    The caller must put the ids before every passage. Without ``tokenizer`` only shapes are created, as on ``meta``.
    """
    wanted = PromptTuning.of(settings)
    plain: Any = model
    if model.config.is_encoder_decoder and model.config.model_type != "t5":
        raise ConfigurationError(
            f"model.prompt_tuning puts virtual tokens before the encoder of a T5 or before a decoder-only model, and "
            f"this is a {model.config.model_type}. Train low-rank adapters instead (model.lora)."
        )
    words: Any = model.get_input_embeddings()
    if type(words) is not nn.Embedding:
        raise ConfigurationError(
            f"model.prompt_tuning needs embeddings that are a plain table, and those of {type(model).__name__} are a "
            f"{type(words).__name__}. Train low-rank adapters instead (model.lora)."
        )
    model.requires_grad_(False)
    count = wanted.num_virtual_tokens
    if tokenizer is None:
        start = torch.empty_like(words.weight[:1]).expand(count, -1).contiguous()
    else:
        start = _start(wanted, words, tokenizer)
    embedding = PromptedEmbedding(words, start)
    (plain.encoder if model.config.is_encoder_decoder else plain).set_input_embeddings(embedding)
    return embedding.ids


def _start(wanted: PromptTuning, words: nn.Embedding, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the virtual tokens' initial values: from public weights, public settings and public random draws."""
    count, dim = wanted.num_virtual_tokens, words.embedding_dim
    if wanted.prompt_tuning_init == "RANDOM":
        return torch.randn(count, dim, dtype=words.weight.dtype)
    special = set(tokenizer.all_special_ids)
    if wanted.prompt_tuning_init == "TEXT":
        spelled: list[int] = tokenizer(wanted.prompt_tuning_init_text, verbose=False)["input_ids"]
        ids = torch.tensor([i for i in spelled if i not in special])
        if len(ids) == 0:
            raise ConfigurationError(
                f"model.prompt_tuning.prompt_tuning_init_text={wanted.prompt_tuning_init_text!r} has no token. "
                "Give at least one word."
            )
        ids = ids.repeat(-(-count // len(ids)))[:count]
    else:
        known = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
        ids = known[torch.randint(len(known), (count,))]
    return words.weight.detach()[ids].clone()


def without_prompt(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model whose last embedding rows are the virtual tokens; itself without virtual tokens.

    Guarantees:
        - Only those rows differ from the model that training started from.
        - What it writes by ``generate`` contains no virtual token: its generation config suppresses them.
    """
    place = next((name for name, module in model.named_modules() if isinstance(module, PromptedEmbedding)), None)
    if place is None:
        return model
    trained: Any = model
    embedding: Any = model.get_submodule(place)
    words, rows = embedding.words.weight.detach(), embedding.prompt.weight.detach()
    table = torch.cat([words, rows.to(words)])
    head = trained.get_output_embeddings()
    head_place = next(name for name, module in model.named_modules() if module is head)
    longer = {f"{place}.weight": table}
    if model.config.is_encoder_decoder:
        longer |= dict.fromkeys(("shared.weight", "decoder.embed_tokens.weight"), table)
    tied = head.weight is embedding.words.weight
    longer[f"{head_place}.weight"] = table if tied else _with_zeros(head.weight, len(rows))
    if getattr(head, "bias", None) is not None:
        longer[f"{head_place}.bias"] = _with_zeros(head.bias, len(rows))
    config = copy.deepcopy(model.config)
    config.vocab_size = len(table)
    with torch.device("meta"):  # without copying weights or drawing numbers; and parts of FSDP cannot be copied
        made = shaped(config, words.dtype)
    kept = {name: weight for name, weight in model.state_dict().items() if not name.startswith(f"{place}.")}
    made.load_state_dict(kept | longer, assign=True)
    made.generation_config = copy.deepcopy(model.generation_config)
    made.generation_config.suppress_tokens = list(embedding.ids)
    return made


def _with_zeros(weight: Tensor, rows: int) -> Tensor:
    return torch.cat([weight.detach(), torch.zeros_like(weight.detach()[:1]).repeat(rows, *[1] * (weight.dim() - 1))])


def drop_virtual_tokens(model: PreTrainedModel, count: int) -> None:
    """Prevent a saved generator from generating virtual tokens, the last ``count`` rows of the vocabulary."""
    head: Any = model.get_output_embeddings()
    weight = head.weight.detach()[:-count]
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if head.bias is not None:
        made.bias = nn.Parameter(head.bias.detach()[:-count])
    model.set_output_embeddings(made)
