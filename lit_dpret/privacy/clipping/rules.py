"""Which modules the book-keeping engine covers, and the names of those it does not.

A rule is tied to one forward function: a subclass that overrides ``forward``, a module whose
forward was patched, or one with unfamiliar parameters (weight norm, pruning, parametrisations)
is not covered, and a trainable parameter without a covered owner is refused by name. Modules that
need more than their own input are listed by their qualified class name and never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError

Kind = Literal["linear", "embedding", "layer_norm", "rms_norm", "scale", "relative_bias"]

#: y = weight * normalise(x), with one weight over the last axis.
SCALES = {"transformers.models.t5.modeling_t5.T5LayerNorm"}

#: Attention modules that add ``compute_bias(...)``, of shape (1, heads, queries, keys), to the scores of the batch.
RELATIVE_ATTENTION = {"transformers.models.t5.modeling_t5.T5Attention"}

#: Modules that look up position ids of shape (1, length) and add the result to the whole batch.
POSITIONED = {
    "transformers.models.bert.modeling_bert.BertEmbeddings",
    "transformers.models.distilbert.modeling_distilbert.Embeddings",
    "transformers.models.roberta.modeling_roberta.RobertaEmbeddings",
}

WAYS_OUT = (
    "Freeze it with requires_grad_(False), or choose privacy.engine=loop, which is exact for every layer but slow."
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
    """What to watch during a forward pass."""

    sites: tuple[Site, ...]
    relative: tuple[tuple[str, nn.Module], ...]
    positioned: tuple[tuple[str, nn.Module], ...]


def qualified_name(module: nn.Module) -> str:
    """The dotted name of the module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def kind_of(module: nn.Module) -> Kind | str:
    """The rule that covers ``module``, or the reason why none does (a sentence with spaces)."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    forward = type(module).forward
    kind: Kind
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        kind = "linear"
    elif isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        if module.max_norm is not None:
            return "max_norm rewrites its weight during the forward pass"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides by the frequencies of the whole batch"
        kind = "embedding"
    elif isinstance(module, nn.LayerNorm) and forward is nn.LayerNorm.forward:
        kind = "layer_norm"
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


def make_plan(module: nn.Module, trainable: dict[str, nn.Parameter]) -> Plan:
    """Find the covered modules; refuse a trainable parameter that none of them owns.

    Raises:
        UnsupportedModelError: Names the parameter, the class that owns it, the reason and the
            ways out.
    """
    names = {id(p): name for name, p in trainable.items()}
    relative, positioned, biases = [], [], set()
    for name, layer in module.named_modules():
        qualified = qualified_name(layer)
        if qualified in RELATIVE_ATTENTION and getattr(layer, "has_relative_attention_bias", False):
            relative.append((name, layer))
            biases.add(id(layer.relative_attention_bias))
        elif qualified in POSITIONED:
            positioned.append((name, layer))
    sites: list[Site] = []
    covered: set[str] = set()
    reasons: dict[str, str] = {}
    for name, layer in module.named_modules():
        own = {local: names[id(p)] for local, p in layer._parameters.items() if p is not None and id(p) in names}
        if not own:
            continue
        kind = kind_of(layer)
        if " " in kind:
            for full in own.values():
                reasons.setdefault(full, f"{name or 'the module'} ({type(layer).__name__}): {kind}")
            continue
        if id(layer) in biases:
            kind = "relative_bias" if kind == "embedding" else kind
        sites.append(Site(name=name or "the module", module=layer, kind=kind, parameters=own))  # type: ignore[arg-type]
        covered.update(own.values())
    for full in trainable:
        if full not in covered:
            raise UnsupportedModelError(
                f"Parameter {full} is not covered by privacy.engine=ghost, owned by {reasons[full]}. {WAYS_OUT}"
            )
    return Plan(sites=tuple(sites), relative=tuple(relative), positioned=tuple(positioned))


def refuse_functional_use(names: Sequence[str], found: Sequence[Tensor | None]) -> None:
    """Refuse parameters that the loss reaches by another way than a recorded call of their module."""
    used = [name for name, grad in zip(names, found, strict=True) if grad is not None]
    if used:
        raise UnsupportedModelError(
            f"Parameter {used[0]} is also used outside the forward of the module that owns it (for example "
            "F.linear(x, module.weight)), so a part of its gradient would escape clipping. "
            f"Call the module instead. {WAYS_OUT}"
        )
