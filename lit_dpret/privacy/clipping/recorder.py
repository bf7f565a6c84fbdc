"""Record in one forward pass what per-row gradients of each covered module need; then restore the module.

Each covered module runs its own forward with fresh leaf aliases in place of its parameters. So the real parameters are
in the graph only where the loss uses them outside the module. Three inputs without a batch axis get one: position ids
(expanded to the batch of their block), virtual tokens of a tuned prompt, and T5's relative position bias.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping.contributions import Contribution, Convolution, Dense, Geometry, Lookup, Outer
from lit_dpret.privacy.clipping.function import FunctionCall, swapped
from lit_dpret.privacy.clipping.rules import CONVOLUTIONS, LOOKUPS, WAYS_OUT, Plan, Site, qualified_name

Forward = Callable[..., Any]


@dataclass
class Use:
    """One call of one covered module."""

    site: Site  # the module
    call: int  # the index of this call among its calls in this forward pass, from 0
    edge: GradientEdge  # where the gradient of its output (or of its expanded weight) arrives
    shape: torch.Size  # the shape of that gradient
    saved: Tensor | None  # the input that its rule needs; None if the gradient itself suffices
    aliases: dict[str, Tensor]  # the leaves that replaced its parameters, by the module's own names
    version: int = field(default=0)  # the input's version when it was saved
    function: FunctionCall | None = None  # the call itself, for a module without a rule
    output: int = 0  # the index of this output among the tensors that such a module returned

    @property
    def axis(self) -> int:
        """The length of the gradient's first axis, which should be the batch; 0 without an axis."""
        return self.shape[0] if self.shape else 0

    def refuse_changed_input(self) -> None:
        """Refuse an input that was changed since the call."""
        changed = self.saved is not None and self.saved._version != self.version
        if changed or (self.function is not None and self.function.inputs_changed()):
            raise UnsupportedModelError(
                f"The input of {self.site.name} ({type(self.site.module).__name__}) was changed in place after "
                "the call, so its gradient cannot be computed. Use the out-of-place operation."
            )


def uncompiled() -> AbstractContextManager[object]:
    """Run compiled modules uncompiled: a compiled graph does not call the hooks of a recorder."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


class Recorder:
    """A context that records the calls of covered modules, and restores the module at its end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.uses: list[Use] = []
        self.recording = True
        self._patched: list[tuple[nn.Module, str]] = []
        self._calls: dict[int, int] = {}
        self._batch_sizes: list[int] = []
        self._biases: list[tuple[Site, Tensor, Tensor]] | None = None

    def __enter__(self) -> Recorder:
        try:
            for site in self.plan.sites:
                replacement = self._function_forward if site.kind == "function" else self._site_forward
                self._patch(site.module, "forward", replacement(site))
            for _, module in self.plan.positioned:
                self._patch(module, "forward", self._sized_forward(module, slice(None)))
            for name, module in self.plan.relative:  # the hidden states come first, then masks of other shapes
                self._patch(module, "forward", self._sized_forward(module, slice(1)))
                self._patch(module, "compute_bias", self._compute_bias(name, module))
            for module in self.plan.prompted:
                self._patch(module, "get_prompt", self._get_prompt(module))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Also after an error: a patched module would record into a dead recorder.
        while self._patched:
            module, attribute = self._patched.pop()
            vars(module).pop(attribute, None)

    def _patch(self, module: nn.Module, attribute: str, replacement: Forward) -> None:
        if attribute in vars(module):
            raise UnsupportedModelError(
                f"{attribute} of a {type(module).__name__} was replaced on the instance, "
                f"so its batch axis is not known. Restore it. {WAYS_OUT}"
            )
        vars(module)[attribute] = replacement
        self._patched.append((module, attribute))

    def _record(self, site: Site, output: Tensor, saved: Tensor | None, aliases: dict[str, Tensor]) -> None:
        if not self.recording:  # a checkpoint's second forward pass
            return
        call = self._calls.get(id(site), 0)
        self._calls[id(site)] = call + 1
        # Detached, or every record would keep the graph below it alive.
        saved = None if saved is None else saved.detach()
        version = 0 if saved is None else saved._version
        self.uses.append(Use(site, call, _edge_below(output), output.shape, saved, aliases, version))

    def _site_forward(self, site: Site) -> Forward:
        original = site.module.forward
        own = {local: site.module._parameters[local] for local in site.parameters}

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            refuse_other_weights(site, site.module._parameters, own)
            if site.kind == "embedding" and qualified_name(site.module) in LOOKUPS:
                aliases = {"weight": site.module.get_parameter("weight").detach().requires_grad_()}
                with swapped(site.module, aliases), _LookupWatch(self, site, aliases["weight"]):
                    return original(*args, **kwargs)
            if len(args) + len(kwargs) != 1:
                raise UnsupportedModelError(f"{site.name} was called with more than its input. {WAYS_OUT}")
            value = args[0] if args else next(iter(kwargs.values()))
            if site.kind == "embedding":
                value = self._expanded(value)
            aliases = {local: _alias(site, p, value) for local, p in own.items() if p is not None}
            with swapped(site.module, aliases):
                output = original(value)
            if site.kind == "relative_bias":
                output = output.to(site.module.get_parameter("weight").dtype)
            self._record_call(site, value, output, aliases)
            return output

        return forward

    def _function_forward(self, site: Site) -> Forward:
        """Record every tensor that a module without a rule returns, as a copy that only other code reads."""
        original = site.module.forward
        own = {local: site.module.get_parameter(local) for local in site.parameters}

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            refuse_other_weights(site, {local: site.module.get_parameter(local) for local in own}, own)
            function = FunctionCall(site.name, site.module, original, args, kwargs)
            aliases = {local: p.detach().requires_grad_() for local, p in own.items()}
            with swapped(site.module, aliases):
                leaves, structure = tree_flatten(original(*args, **kwargs))
            function.returned(leaves)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    # A copy that only other code reads, so that its gradient comes from the use of this call alone.
                    leaves[i] = leaf.clone()
                    self._record(site, leaves[i], None, aliases)
                    if self.recording:
                        self.uses[-1].function, self.uses[-1].output = function, i
                    aliases = {}  # a call's aliases are recorded once
            return tree_unflatten(leaves, structure)

        return forward

    def _record_call(self, site: Site, value: Tensor, output: Tensor, aliases: dict[str, Tensor]) -> None:
        if site.kind == "relative_bias":
            if self._biases is None:
                raise UnsupportedModelError(
                    f"{site.name} was called outside compute_bias of its attention module, "
                    f"so its batch axis is not known. {WAYS_OUT}"
                )
            self._biases.append((site, value, aliases["weight"]))
        elif site.kind == "scale":
            self._record(site, aliases["weight"], None, aliases)
        elif isinstance(site.module, CONVOLUTIONS) and value.dim() != 2 + len(site.module.kernel_size):
            raise UnsupportedModelError(
                f"The input of {site.name} ({type(site.module).__name__}) has shape {tuple(value.shape)}: "
                f"no batch axis. {WAYS_OUT}"
            )
        elif site.kind in ("linear", "transposed_linear", "convolution") and "weight" not in aliases:
            self._record(site, output, None, aliases)
        else:
            self._record(site, output, value, aliases)

    def _expanded(self, ids: Tensor) -> Tensor:
        """Return ids that a block uses for its whole batch, such as positions of shape (1, length), once per row."""
        if self._batch_sizes and ids.dim() > 1 and ids.shape[0] == 1:
            return ids.expand(self._batch_sizes[-1], *ids.shape[1:])
        return ids

    def _sized_forward(self, module: nn.Module, inputs: slice) -> Forward:
        """Remember the batch size of a block while it runs: the longest first axis among its inputs."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            sizes = [v.shape[0] for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 1]
            self._batch_sizes.append(max(sizes[inputs], default=1))
            try:
                return original(*args, **kwargs)
            finally:
                self._batch_sizes.pop()

        return forward

    def _get_prompt(self, module: nn.Module) -> Forward:
        """Embed virtual tokens once per row, instead of once and then repeated."""
        original: Forward = module.get_prompt  # type: ignore[assignment]

        def get_prompt(batch_size: int, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(batch_size, *args, **kwargs)
            self._batch_sizes.append(batch_size)
            try:
                return original(1, *args, **kwargs)
            finally:
                self._batch_sizes.pop()

        return get_prompt

    def _compute_bias(self, name: str, module: nn.Module) -> Forward:
        original: Forward = module.compute_bias  # type: ignore[assignment]

        def compute_bias(*args: Any, **kwargs: Any) -> Any:
            self._biases = []
            try:
                bias = original(*args, **kwargs)
                found = self._biases
            finally:
                self._biases = None
            if not found:  # frozen, or without gradients
                return bias
            if len(found) > 1 or bias.dim() != 4 or bias.shape[0] != 1:
                raise UnsupportedModelError(
                    f"The relative position bias of {name} has shape {tuple(bias.shape)}; "
                    f"(1, heads, queries, keys) was expected. {WAYS_OUT}"
                )
            site, buckets, weight = found[0]
            # One bias for all rows has one gradient; expanded and copied, it has one for each row.
            bias = bias.expand(self._batch_sizes[-1], -1, -1, -1).clone(memory_format=torch.contiguous_format)
            self._record(site, bias, buckets, {"weight": weight})
            return bias

        return compute_bias


class _LookupWatch(TorchFunctionMode):
    """Record the one lookup that a subclass of nn.Embedding makes, with the ids that it derives from its input."""

    def __init__(self, recorder: Recorder, site: Site, weight: Tensor) -> None:
        super().__init__()
        self.recorder, self.site, self.weight = recorder, site, weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.embedding or args[1] is not self.weight:
            return func(*args, **kwargs)
        ids = self.recorder._expanded(args[0])
        output = func(ids, *args[1:], **kwargs)
        self.recorder._record(self.site, output, ids, {"weight": self.weight})
        return output


def refuse_other_weights(site: Site, now: Mapping[str, Tensor | None], own: Mapping[str, Tensor | None]) -> None:
    """Refuse a module that runs with parameters other than the trained ones."""
    if any(now[local] is not p for local, p in own.items()):
        raise UnsupportedModelError(
            f"{site.name} runs with weights other than its own (functional_call, or a module that swaps "
            f"them), so the gradient of its own weights is unknown. {WAYS_OUT}"
        )


def _edge_below(output: Tensor) -> GradientEdge:
    """Return where the gradient of ``output`` arrives, also after a write into it.

    A write into a tensor that is a view (a linear layer's output often is one) replaces the view's node in the graph;
    its base's node remains.
    """
    base = output._base
    if base is None or not base.requires_grad or base.numel() != output.numel():
        return get_gradient_edge(output)
    whole = base.is_contiguous() and output.is_contiguous()
    return get_gradient_edge(base if whole else output)


def _alias(site: Site, parameter: Tensor, value: Tensor) -> Tensor:
    """Return a fresh leaf for one call; a scale gets a batch axis, so that autograd itself separates the rows."""
    if site.kind == "scale":
        if value.dim() < 2:
            raise UnsupportedModelError(
                f"The input of {site.name} ({type(site.module).__name__}) has shape {tuple(value.shape)}: "
                f"no batch axis. {WAYS_OUT}"
            )
        shape = (value.shape[0], *[1] * (value.dim() - 2), *parameter.shape)
        return parameter.detach().expand(shape).requires_grad_()
    if site.kind == "relative_bias":
        # Autograd sums its gradient over all pairs of positions; in bfloat16 most of that sum would be lost. It is the
        # reference of the audit, so it is summed in float32. The looked-up values are rounded back, which changes none
        # of them.
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32)).requires_grad_()
    return parameter.detach().requires_grad_()


#: The order of a folded batch axis of rows * k: all k of the first row first, or one of each row first.
Layout = Literal["row_by_row", "turn_by_turn"]


def fold(tensor: Tensor, rows: int, layout: Layout) -> Tensor:
    """Reshape (rows * k, ...) to (rows, k, ...)."""
    if layout == "row_by_row":
        return tensor.reshape(rows, -1, *tensor.shape[1:])
    return tensor.reshape(-1, rows, *tensor.shape[1:]).transpose(0, 1)


def contributions_of(
    use: Use, g: Tensor, rows: int, layout: Layout, dtype: torch.dtype, *, audited: bool = False
) -> Iterator[tuple[str, Contribution]]:
    """Yield the contributions of one call to the gradients of its parameters, by their own names in the module."""
    module, trained = use.site.module, use.aliases

    def dense(terms: Tensor, summed: Callable[[Tensor], Tensor]) -> Dense:
        value = summed(terms)
        if not audited:
            return Dense(value)
        return Dense(value, summed(terms.abs()), max(1, terms.numel() // max(1, value.numel())))

    def over_positions(terms: Tensor) -> Tensor:
        return terms[:, 0].to(dtype) if terms.shape[1] == 1 else terms.sum(1, dtype=dtype)

    if use.function is not None:
        own = {local: module.get_parameter(local) for local in use.site.parameters}
        for local, gradient in use.function.gradients(g, use.output, own).items():
            yield local, dense(fold(gradient, rows, layout), over_positions)
        return
    if use.site.kind in ("linear", "transposed_linear"):
        folded = fold(g, rows, layout).reshape(rows, -1, g.shape[-1])
        if "weight" in trained:
            x = _saved(use)
            inputs = fold(x, rows, layout).reshape(rows, -1, x.shape[-1])
            yield "weight", Outer(inputs, folded) if use.site.kind == "linear" else Outer(folded, inputs)
        if "bias" in trained:
            yield "bias", dense(folded, over_positions)
    elif isinstance(module, CONVOLUTIONS):
        g = fold(g, rows, layout).flatten(3).movedim(2, -1).reshape(rows, -1, g.shape[1])
        if "weight" in trained:
            yield "weight", Convolution(fold(_saved(use), rows, layout), g, Geometry.of(module))
        if "bias" in trained:
            yield "bias", dense(g, over_positions)
    elif isinstance(module, nn.GroupNorm):
        g = g.to(dtype)
        if "weight" in trained:
            # Without affine weights: their gradient is the normalised input times the incoming gradient.
            normal = F.group_norm(_saved(use).to(dtype), module.num_groups, None, None, module.eps)
            yield "weight", dense(normal.mul_(g), lambda terms: _by_channel(terms, rows, layout))
        if "bias" in trained:
            yield "bias", dense(g, lambda terms: _by_channel(terms, rows, layout))
    elif use.site.kind == "embedding" and isinstance(module, nn.Embedding):
        ids = _saved(use)
        if module.padding_idx is not None:
            # As autograd does: the padding entry is never trained.
            g = g.masked_fill((ids == module.padding_idx)[..., None], 0)
        folded = fold(g, rows, layout).reshape(rows, -1, g.shape[-1])
        yield "weight", Lookup(fold(ids, rows, layout).reshape(rows, -1), folded)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = tuple(module.normalized_shape)
        g = g.to(dtype)

        def by_place(terms: Tensor) -> Tensor:
            return fold(terms, rows, layout).reshape(rows, -1, *shape).sum(1)

        if "weight" in trained:
            x = _saved(use)
            if isinstance(module, nn.LayerNorm):
                normal = F.layer_norm(x.to(dtype), shape, None, None, module.eps)
            else:
                eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
                normal = F.rms_norm(x.to(dtype), shape, None, eps)
            yield "weight", dense(normal.mul_(g), by_place)
        if "bias" in trained:
            yield "bias", dense(g, by_place)
    elif use.site.kind == "scale":
        folded = fold(g, rows, layout).reshape(rows, -1, g.shape[-1])
        yield "weight", dense(folded, over_positions)
    else:
        buckets, entries = _saved(use), len(trained["weight"])
        scores = fold(g, rows, layout)
        yield "weight", dense(scores, lambda terms: _bucketed(terms.sum(1, dtype=dtype), buckets, entries))


def _saved(use: Use) -> Tensor:
    if use.saved is None:
        raise RuntimeError(f"No input was recorded for {use.site.name}.")  # a rule and its recorder disagree
    return use.saved


def _by_channel(tensor: Tensor, rows: int, layout: Layout) -> Tensor:
    """Sum (rows * k, channels, *space) to (rows, channels)."""
    return fold(tensor, rows, layout).reshape(rows, -1, tensor.shape[1], tensor[0, 0].numel()).sum((1, 3))


def _bucketed(g: Tensor, buckets: Tensor, entries: int) -> Tensor:
    """Sum (rows, heads, queries, keys) over the positions of each bucket: (rows, entries, heads)."""
    rows, heads = g.shape[:2]
    flat = g.reshape(rows * heads, -1)
    total = torch.zeros(rows * heads, entries, dtype=g.dtype, device=g.device)
    places, each = buckets.flatten(), torch.arange(entries, device=g.device)
    step = max(1, (1 << 20) // entries)
    for start in range(0, len(places), step):  # a product with indicators: faster than scattering, same sums
        hot = (places[start : start + step, None] == each).to(g.dtype)
        total.addmm_(flat[:, start : start + step], hot)
    return total.view(rows, heads, entries).transpose(1, 2)
