"""Choose the trained part of a model: parameters by name, low-rank adapters, or virtual tokens before a passage.

Adapters are merged into the weights after training. Virtual tokens cannot be, but they can be merged into the
vocabulary: a saved generator is a plain model with so many rows of embeddings more.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_dpret.encoders import TextEncoder
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.lazy import optional
from lit_dpret.modules.language_models import shaped
from lit_dpret.settings import require_choice, require_whole


def add_lora(encoder: TextEncoder, settings: Mapping[str, Any]) -> None:
    """Freeze the encoder and train its low-rank adapters instead (LoRA, 2106.09685, by ``peft``).

    Args:
        encoder: Changed in place. A projection after pooling stays trainable.
        settings: Arguments of ``peft.LoraConfig``.

    Raises:
        ConfigurationError: peft is missing, or refuses the settings.
    """
    encoder.backbone = with_lora(encoder.backbone, settings)


def with_lora(model: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Return a Hugging Face model with low-rank adapters and all else frozen.

    Args:
        model: Changed in place.
        settings: Arguments of ``peft.LoraConfig``.

    Raises:
        ConfigurationError: peft is missing, or refuses the settings; they train one use of a tied weight; or what they
            train could not be merged into the weights and saved.
    """
    peft = _peft()
    tied = _tied(model)
    try:
        config = peft.LoraConfig(**{str(name): value for name, value in settings.items()})
        with warnings.catch_warnings():  # peft asks by a name that transformers 5 has renamed
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted: nn.Module = peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model.lora={dict(settings)} makes no adapters: {first_line(error)} Its keys are the arguments of "
            "peft.LoraConfig."
        ) from error
    for name, part in adapted.named_modules():
        setting, base = None, part
        if isinstance(part, peft.tuners.lora.LoraLayer):
            setting, base = "target_modules", part.get_base_layer()
        elif isinstance(part, peft.utils.ModulesToSaveWrapper):
            setting, base = "modules_to_save", part.original_module
        uses = next((tied[id(p)] for p in base.parameters() if id(p) in tied), None) if setting else None
        if uses is not None:
            raise ConfigurationError(
                f"model.lora.{setting} names {name.removeprefix('base_model.model.')}, and {', '.join(uses)} are one "
                "weight: trained in one use alone they would be two, and the saved model, in which they are one, would "
                "be another than was trained. Leave it out, or train all uses together by model.trainable_patterns "
                "in place of model.lora."
            )
        if setting == "target_modules":
            _check_merge(part, settings)
    frozen = {id(parameter) for parameter in adapted.parameters() if not parameter.requires_grad}
    if shared := [uses for key, uses in _tied(adapted).items() if key in frozen and key not in tied]:
        raise ConfigurationError(
            f"model.lora={dict(settings)} makes one weight of {' and '.join(shared[0][:2])}, and a saved model holds "
            "each by itself. Leave out what shares them, as layer_replication."
        )
    return adapted


def _check_merge(layer: Any, settings: Mapping[str, Any]) -> None:
    """Refuse an adapter that trains and cannot become a part of its weight: no model could be written in the end."""
    if any(parameter.is_meta for parameter in layer.parameters()):
        return
    try:
        copy.deepcopy(layer).merge()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"model.lora={dict(settings)} makes adapters that cannot be merged into the weights, which a saved "
            f"model needs: {first_line(error)} Leave out the setting that it names."
        ) from error


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter that has several, by the parameter's id.

    None on the ``meta`` device: a configuration ties what stored weights may hold apart, as those of T5 1.1 do.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            names.setdefault(id(parameter), []).append(name)
    return {key: found for key, found in names.items() if len(found) > 1}


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model with its adapters merged into a copy of the weights; itself without adapters."""
    merge: Any = getattr(model, "merge_and_unload", None)
    if merge is None:
        return model
    plain: nn.Module = _twin(model).merge_and_unload()
    return plain


def _twin(model: Any) -> Any:
    """Return a copy of a model with adapters. One that is trained in shards cannot be copied, and is built again."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return copy.deepcopy(model)
    base = model.get_base_model()
    with torch.random.fork_rng(devices=[]):  # weights that are replaced are drawn first
        fresh = type(base)(copy.deepcopy(base.config))
        for name, part in base._modules.items():
            if part is None:  # an encoder without its pooler
                fresh._modules[name] = None
        twin = _peft().get_peft_model(fresh, copy.deepcopy(model.peft_config[model.active_adapter]))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def merged(encoder: TextEncoder) -> TextEncoder:
    """Return the encoder with its adapters merged into the weights; itself without adapters."""
    backbone = without_adapters(encoder.backbone)
    return encoder if backbone is encoder.backbone else encoder.changed(backbone=backbone)


def _peft() -> Any:
    return optional("peft", "model.lora", "lit-dpret[peft]", instead="Or set model.lora to null.")


def refuse_two_choices(choices: Mapping[str, Any]) -> None:
    """Refuse more than one setting of ``model`` that selects the trained parameters.

    Raises:
        ConfigurationError: More than one is not null.
    """
    given = [f"model.{name}" for name, value in choices.items() if value is not None]
    if len(given) > 1:
        raise ConfigurationError(
            f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} select the trained parameters. Set all but "
            "one of them to null."
        )


def freeze_all_but(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train only the parameters whose name matches a pattern.

    Raises:
        ConfigurationError: A pattern is no regular expression, or matches nothing.
        UnsupportedModelError: There is no pattern.
    """
    parameters = dict(model.named_parameters())
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in parameters if re.search(pattern, name)}
        except re.error as error:
            raise ConfigurationError(
                f"model.trainable_patterns: {pattern!r} is no regular expression: {error}."
            ) from error
        if not found:
            raise ConfigurationError(
                f"model.trainable_patterns: {pattern!r} matches no parameter. Tied weights go by their first name; "
                f"the names begin with {', '.join(sorted({name.split('.')[0] for name in parameters}))}."
            )
        chosen |= found
    if not chosen:
        raise UnsupportedModelError("model.trainable_patterns is empty: nothing would be learnt.")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)


PromptInit = Literal["SAMPLE_VOCAB", "RANDOM", "TEXT"]


@dataclass(frozen=True, kw_only=True)
class PromptTuning:
    """The settings of `model.prompt_tuning`, named as in ``peft.PromptTuningConfig``."""

    num_virtual_tokens: int = 20  # vectors before every passage; each is as wide as an embedding
    # What they start from, which is public in every case: ``SAMPLE_VOCAB``, embeddings of random words; ``RANDOM``,
    # standard normal numbers; ``TEXT``, the embeddings of ``prompt_tuning_init_text``.
    prompt_tuning_init: PromptInit = "SAMPLE_VOCAB"
    # Repeated or cut until it has so many tokens. It is published with the model: never take it from private queries.
    prompt_tuning_init_text: str | None = None

    def __post_init__(self) -> None:
        text = self.prompt_tuning_init_text
        require_whole("model.prompt_tuning", self, 1, "num_virtual_tokens")
        require_choice("model.prompt_tuning.prompt_tuning_init", self.prompt_tuning_init, get_args(PromptInit))
        if (self.prompt_tuning_init == "TEXT") != bool(text):
            raise ConfigurationError(
                f"model.prompt_tuning: prompt_tuning_init={self.prompt_tuning_init} and prompt_tuning_init_text={text} "
                "do not go together. A text is what prompt_tuning_init=TEXT starts from, and only that."
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PromptTuning:
        """Return the settings of a configuration.

        Raises:
            ConfigurationError: One of them is unknown or out of range.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(map(str, settings)) - set(known)):
            raise ConfigurationError(f"model.prompt_tuning.{unknown[0]} is no setting. There are: {', '.join(known)}.")
        return cls(**{str(name): value for name, value in settings.items()})


class PromptedEmbedding(nn.Module):
    """Frozen embeddings of words, and trained ones of virtual tokens (Lester et al. 2021, 2104.08691, section 2).

    The ids of virtual tokens come after all words. Whoever turns texts into ids puts them before every passage, so
    masks, lengths and whatever else counts tokens need not know of them.

    Guarantees:
        - An embedding is a function of its id alone, wherever it stands and whatever stands beside it.

    Args:
        words: Embeddings of the words, ids ``0 .. vocabulary - 1``.
        start: What the virtual tokens, ids from ``vocabulary``, start from, of shape ``(tokens, dim)``.
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
        """The ids of the virtual tokens."""
        first = self.words.num_embeddings
        return tuple(range(first, first + self.prompt.num_embeddings))

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``(rows, tokens)`` to ``(rows, tokens, dim)``."""
        first = self.words.num_embeddings
        virtual = ids >= first
        words = self.words(ids.masked_fill(virtual, 0))
        prompt = self.prompt((ids - first).clamp(min=0))
        return torch.where(virtual[..., None], prompt.to(words.dtype), words)


def add_prompt(
    model: PreTrainedModel, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Freeze a language model and add trainable virtual tokens, read by its encoder if it has one.

    Args:
        model: Changed in place.
        settings: Those of `PromptTuning`.
        tokenizer: That of the model; null for shapes alone, as on the ``meta`` device.

    Returns:
        The ids of the virtual tokens, which are to be put before every passage.

    Raises:
        ConfigurationError: A setting is refused, or the model's embeddings are not a plain table.
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
    """Return what the virtual tokens start from: public weights, public settings, and coins that are no secret."""
    count, dim = wanted.num_virtual_tokens, words.embedding_dim
    if wanted.prompt_tuning_init == "RANDOM":
        return torch.randn(count, dim, dtype=words.weight.dtype)
    special = set(tokenizer.all_special_ids)
    if wanted.prompt_tuning_init == "TEXT":
        spelled: list[int] = tokenizer(wanted.prompt_tuning_init_text, verbose=False)["input_ids"]
        ids = torch.tensor([i for i in spelled if i not in special])
        if len(ids) == 0:
            raise ConfigurationError(
                f"model.prompt_tuning.prompt_tuning_init_text={wanted.prompt_tuning_init_text!r} has no token."
            )
        ids = ids.repeat(-(-count // len(ids)))[:count]
    else:
        known = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
        ids = known[torch.randint(len(known), (count,))]
    return words.weight.detach()[ids].clone()


def without_prompt(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model whose last embedding rows are the virtual tokens; itself without virtual tokens.

    Guarantees:
        - Nothing but those rows differs from the model that training started from.
        - What it writes by ``generate`` holds no virtual token: its generation config suppresses them.
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
    with torch.device("meta"):  # no copy of the weights, no numbers drawn; and parts of FSDP cannot be copied
        made = shaped(config, words.dtype)
    kept = {name: weight for name, weight in model.state_dict().items() if not name.startswith(f"{place}.")}
    made.load_state_dict(kept | longer, assign=True)
    made.generation_config = copy.deepcopy(model.generation_config)
    made.generation_config.suppress_tokens = list(embedding.ids)
    return made


def _with_zeros(weight: Tensor, rows: int) -> Tensor:
    return torch.cat([weight.detach(), torch.zeros_like(weight.detach()[:1]).repeat(rows, *[1] * (weight.dim() - 1))])


def speak_words_only(model: PreTrainedModel, count: int) -> None:
    """Prevent a saved generator from generating virtual tokens, the last ``count`` rows of the vocabulary.

    Guarantees:
        - Its scores are those of the model in training, of the same shape.
    """
    head: Any = model.get_output_embeddings()
    weight = head.weight.detach()[:-count]
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if head.bias is not None:
        made.bias = nn.Parameter(head.bias.detach()[:-count])
    model.set_output_embeddings(made)
