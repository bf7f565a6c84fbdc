"""The modules that the ghost engine covers, and the refusal of others by name.

A rule is tied to one forward function: a subclass that overrides it, a patched module, or unfamiliar parameters are not
covered. Modules that need more than their own input are listed by qualified class name and never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lit_dpret.errors import UnsupportedModelError

Kind = Literal[
    "linear",
    "transposed_linear",
    "convolution",
    "embedding",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "scale",
    "relative_bias",
    "function",
]

#: Convolutions, whose patches make them linear layers.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: y = weight * normalise(x) or (1 + weight) * normalise(x), with one weight over the last axis.
SCALES = {
    "transformers.models.t5.modeling_t5.T5LayerNorm",
    "transformers.models.llama.modeling_llama.LlamaRMSNorm",
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm",
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm",
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm",
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm",
    "transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm",
    "transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm",
}

#: y = x @ weight + bias, with a weight of shape (in, out).
TRANSPOSED_LINEAR = {"transformers.pytorch_utils.Conv1D"}

#: Subclasses of nn.Embedding that look up once in their own weight, with ids or a result that they compute themselves.
LOOKUPS = {
    "transformers.models.bart.modeling_bart.BartLearnedPositionalEmbedding",
    "transformers.models.bart.modeling_bart.BartScaledWordEmbedding",
    "transformers.models.gemma.modeling_gemma.GemmaTextScaledWordEmbedding",
    "transformers.models.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding",
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding",
}

#: Attention modules that add ``compute_bias(...)``, of shape (1, heads, queries, keys), to the scores of the batch.
RELATIVE_ATTENTION = {"transformers.models.t5.modeling_t5.T5Attention"}

#: Modules that look up position ids of shape (1, length) and add the result to the whole batch.
POSITIONED = {
    "transformers.models.bart.modeling_bart.BartDecoder",
    "transformers.models.bert.modeling_bert.BertEmbeddings",
    "transformers.models.distilbert.modeling_distilbert.Embeddings",
    "transformers.models.gpt2.modeling_gpt2.GPT2Model",
    "transformers.models.roberta.modeling_roberta.RobertaEmbeddings",
}

#: Classes whose ``get_prompt(batch_size)`` embeds virtual tokens once and repeats the result for every row.
PROMPTED = {"peft.peft_model.PeftModel"}

#: Kinds of peft prompts that are already embedded row by row.
ROW_BY_ROW_PROMPTS = {"PREFIX_TUNING", "CARTRIDGE"}

WAYS_OUT = (
    "Freeze it with requires_grad_(False), or choose privacy.engine=loop (with privacy=logit_dp "
    "privacy.norms=brute_force), which is exact for every layer but slow."
)


@dataclass(frozen=True)
class Site:
    """A covered module with trainable parameters: ``parameters`` maps its own names to the full ones."""

    name: str
    module: nn.Module
    kind: Kind
    parameters: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """The modules to watch during a forward pass."""

    sites: tuple[Site, ...]
    relative: tuple[tuple[str, nn.Module], ...]
    positioned: tuple[tuple[str, nn.Module], ...]
    prompted: tuple[nn.Module, ...]


def qualified_name(module: nn.Module) -> str:
    """Return the dotted name of the module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def repeats_prompts(module: nn.Module) -> bool:
    """Return whether virtual tokens, embedded once, are prepended to every row of the batch."""
    known = any(f"{base.__module__}.{base.__qualname__}" in PROMPTED for base in type(module).__mro__)
    config = getattr(module, "active_peft_config", None) if known else None
    learned = bool(getattr(config, "is_prompt_learning", False))
    return learned and str(getattr(config, "peft_type", "")).rpartition(".")[2] not in ROW_BY_ROW_PROMPTS


def kind_of(module: nn.Module) -> Kind | str:
    """Return the rule that covers ``module``, or a sentence with the reason why none does."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    forward = type(module).forward
    kind: Kind
    # By the method, not by the class: a subclass with its own forward may compute anything.
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        kind = "linear"
    elif qualified_name(module) in TRANSPOSED_LINEAR:
        kind = "transposed_linear"
    elif isinstance(module, nn.Embedding) and (forward is nn.Embedding.forward or qualified_name(module) in LOOKUPS):
        kind = "embedding"
    elif isinstance(module, nn.LayerNorm) and forward is nn.LayerNorm.forward:
        kind = "layer_norm"
    elif isinstance(module, nn.GroupNorm) and forward is nn.GroupNorm.forward:
        kind = "group_norm"
    elif any(
        forward is c.forward and getattr(type(module), "_conv_forward", None) is c._conv_forward for c in CONVOLUTIONS
    ):
        kind = "convolution"
    elif isinstance(module, nn.RMSNorm) and forward is nn.RMSNorm.forward:
        kind = "rms_norm"
    elif qualified_name(module) in SCALES:
        kind = "scale"
    else:
        return "no rule covers this class"
    strange = [name for name, p in module._parameters.items() if p is not None and name not in ("weight", "bias")]
    if strange:
        return f"it holds {', '.join(strange)} in place of a plain weight"
    return kind


def refuse_embedding(name: str, module: nn.Module) -> None:
    """Refuse an embedding that writes into its weight, frozen or not, or whose gradient counts the ids of the batch."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    shown = f"{name or 'the module'} ({type(module).__name__})"
    if module.max_norm is not None:
        raise UnsupportedModelError(
            f"{shown} has max_norm={module.max_norm:g}, which rewrites the rows of its weight that are looked up, "
            "frozen or not, and no noise covers that. Renormalise the weight once before training and set max_norm to "
            "None.",
            trap="T11",
        )
    if module.scale_grad_by_freq and module.weight.requires_grad:
        raise UnsupportedModelError(
            f"{shown} has scale_grad_by_freq=True, which divides the gradient of a row by how often all rows of the "
            "batch hold its ids. Set it to False.",
            trap="T11",
        )


def make_plan(module: nn.Module, trainable: dict[str, nn.Parameter], fallback: bool = False) -> Plan:
    """Find the covered modules; refuse a trainable parameter outside them, with its owner and the ways out.

    With ``fallback``, a module without a rule, and everything in it, becomes a function to differentiate row by row.
    """
    names = {id(p): name for name, p in trainable.items()}
    sites: list[Site] = []
    reasons: dict[str, tuple[str, nn.Module]] = {}
    inside: set[int] = set()
    for name, layer in module.named_modules():
        own = {local: names[id(p)] for local, p in layer._parameters.items() if p is not None and id(p) in names}
        stored = fallback and _keeps_parameters_in_children(layer, names)
        if id(layer) in inside or not (own or stored):
            continue
        kind = "its parameters are those of a child" if stored else kind_of(layer)
        if fallback and " " in kind:
            kind = kind_as_function(layer) or kind
        if " " in kind:
            for full in own.values():
                reasons.setdefault(full, (f"{name or 'the module'} ({type(layer).__name__}): {kind}", layer))
            continue
        if kind == "function":
            # Run as a whole: rules for its parts would count their gradients twice.
            inside.update(id(part) for part in layer.modules())
            whole = layer.named_parameters(remove_duplicate=False)
            own = {local: names[id(p)] for local, p in whole if id(p) in names}
        sites.append(Site(name=name or "the module", module=layer, kind=kind, parameters=own))  # type: ignore[arg-type]
    covered = {full for site in sites for full in site.parameters.values()}
    # Refuse a parameter that no module covers: it would train without clipping.
    for full in trainable:
        if full not in covered:
            engine, (reason, owner) = "vmap" if fallback else "ghost", reasons[full]
            hint = " privacy.engine=vmap may cover it, with one gradient per row in memory."
            hint = "" if fallback or kind_as_function(owner) is None else hint
            raise UnsupportedModelError(
                f"Parameter {full} is not covered by privacy.engine={engine}. Its owner is {reason}. {WAYS_OUT}{hint}",
                trap="T13",
            )
    return _with_blocks(sites, [(name, layer) for name, layer in module.named_modules() if id(layer) not in inside])


def kind_as_function(module: nn.Module) -> Kind | None:
    """Return ``function`` if vmap may run ``module`` row by row, else None; the rest is checked at run time."""
    if "forward" in vars(module) or isinstance(module, (nn.RNNBase, nn.Embedding)):
        return None
    return "function"


def _keeps_parameters_in_children(module: nn.Module, trainable: Mapping[int, str]) -> bool:
    """Return whether ``module`` computes with trainable parameters of a child that only stores them."""
    stores: list[nn.Module] = [c for c in module.children() if isinstance(c, (nn.ParameterDict, nn.ParameterList))]
    if is_parametrized(module):
        stores.append(module.get_submodule("parametrizations"))
    return any(id(p) in trainable for store in stores for p in store.parameters())


def _with_blocks(sites: list[Site], modules: list[tuple[str, nn.Module]]) -> Plan:
    """Add the blocks that share a tensor over the batch, and mark T5's position biases among the sites."""
    relative, positioned, prompted, biases = [], [], [], set()
    for name, layer in modules:
        qualified = qualified_name(layer)
        if qualified in RELATIVE_ATTENTION and getattr(layer, "has_relative_attention_bias", False):
            relative.append((name, layer))
            biases.add(id(layer.relative_attention_bias))
        elif qualified in POSITIONED:
            positioned.append((name, layer))
        elif repeats_prompts(layer):
            prompted.append(layer)
    sites = [replace(s, kind="relative_bias") if s.kind == "embedding" and id(s.module) in biases else s for s in sites]
    return Plan(sites=tuple(sites), relative=tuple(relative), positioned=tuple(positioned), prompted=tuple(prompted))


def refuse_functional_use(names: Sequence[str], found: Sequence[Tensor | None]) -> None:
    """Refuse parameters that the loss uses outside a recorded call of their module."""
    used = [name for name, grad in zip(names, found, strict=True) if grad is not None]
    if used:
        raise UnsupportedModelError(
            f"Parameter {used[0]} is also used outside the forward of the module that owns it (for example "
            "F.linear(x, module.weight)), so a part of its gradient would escape clipping. "
            f"Call the module instead. {WAYS_OUT}",
            trap="T9",
        )
