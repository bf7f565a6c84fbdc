r"""DeepSpeed's ZeRO takes finished gradients: what it divides over the ranks is noised already.

ZeRO gives each rank a part of the master weights, of the optimizer's state and of the gradients (stages 1 and 2), and
of the parameters themselves (stage 3), and averages gradients over the ranks while it runs a backward pass. A private
step runs no backward pass of its own. So nothing is left to DeepSpeed that a claim rests on:

* the clipping engine gets its gradients from PyTorch, inside the forward pass of DeepSpeed's engine;
* the clipped sums are added up in float32 or wider, in one message that gives each rank the coordinates whose master
  weights it keeps (`Pieces`), whatever DeepSpeed was told about communication;
* each rank adds the noise of its coordinates, which is the noise that one process would add there;
* the result is laid where ZeRO's optimizer would have put an averaged gradient, and its ``step`` does the rest.

The update is that of one process. Shares of the noise, one for each rank, added before DeepSpeed's own reduction, are
not offered: each share would be rounded to the parameters' type before it is added, and a sum of numbers that were
rounded apart is no post-processing of the noised sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.handover import Handover
from lit_dpret.privacy.pieces import Piece, Pieces
from lit_dpret.privacy.ranks import Ranks


def is_engine(model: object) -> bool:
    """Whether a Trainer's model is an engine of DeepSpeed."""
    return any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)


def zero_handover(engine: Any, module: nn.Module, ranks: Ranks) -> Handover:
    """Who takes the gradients of ``module`` for a DeepSpeed engine; called by all ranks.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        module: The module whose parameters the engine trains.
        ranks: The engine's data-parallel ranks.

    Raises:
        ConfigurationError: The engine's optimizer is none of ZeRO's stages 1 to 3.
        UnsupportedModelError: What is trained is not what the optimizer keeps.
    """
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return _Stage12(engine, module, ranks)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return _Stage3(engine, module, ranks)
    raise ConfigurationError(
        f"DeepSpeed made a {kind} of these settings, and a private step is shown for ZeRO's stages 1 to 3 alone. Set "
        "zero_optimization.stage to 1, 2 or 3, and leave data_types.grad_accum_dtype out."
    )


class _Stage12:
    """Stages 1 and 2: parameters are whole, a flat partition of the master weights of each group is here."""

    in_parts = True

    def __init__(self, engine: Any, module: nn.Module, ranks: Ranks) -> None:
        self._zero = engine.optimizer
        sizes = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
        names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._places: list[dict[str, tuple[int, int]]] = []
        own: list[Piece] = []
        for group in self._zero.bit16_groups:
            places: dict[str, tuple[int, int]] = {}
            for parameter in group:
                name = _name_of(parameter, names)
                mapping = parameter._hp_mapping
                if mapping is not None:
                    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
                    own.append(Piece(name, int(lp.start), int(lp.numel)))
                    places[name] = (int(hp.start), int(hp.numel))
                    _refuse_other_values(name, mapping.hp_fragment, parameter.detach().flatten()[own[-1].start :])
            self._places.append(places)
        self._pieces = Pieces.agree(own, sizes, ranks)
        self.starts: Mapping[str, int] | None = self._pieces.starts

    def whole(self) -> AbstractContextManager[object]:
        return nullcontext()

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._pieces.add_up(sums)

    def give(self, gradients: Mapping[str, Tensor], optimizer: object) -> None:
        for index, places in enumerate(self._places):
            master = self._zero.single_partition_of_fp32_groups[index]
            if self._zero.cpu_offload:
                flat = master.grad.zero_()
            else:
                device = next(iter(gradients.values())).device if gradients else master.device
                flat = torch.zeros(int(self._zero.partition_size[index]), dtype=master.dtype, device=device)
                self._zero.averaged_gradients[index] = [flat]
            for name, (start, count) in places.items():
                flat[start : start + count].copy_(gradients[name])


class _Stage3:
    """Stage 3: of every parameter, and of its master weights, each rank has an equal part."""

    in_parts = True

    def __init__(self, engine: Any, module: nn.Module, ranks: Ranks) -> None:
        self._zero = engine.optimizer
        # What ZeRO writes on a parameter, no type knows of.
        everything: list[tuple[str, Any]] = [(n, p) for n, p in module.named_parameters() if hasattr(p, "ds_id")]
        self._parameters = [parameter for _, parameter in everything]
        self._shapes = {name: torch.Size(p.ds_shape) for name, p in everything if p.requires_grad}
        names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        own: list[Piece] = []
        self._groups: list[list[tuple[str, int]]] = []
        for group in self._zero.fp16_groups:
            parts: list[tuple[str, int]] = []
            for parameter in group:
                name, held = _name_of(parameter, names), int(parameter.ds_tensor.numel())
                start = held * ranks.rank
                own.append(Piece(name, start, max(0, min(held, int(parameter.ds_numel) - start))))
                parts.append((name, held))
            self._groups.append(parts)
        self._pieces = Pieces.agree(own, {name: shape.numel() for name, shape in self._shapes.items()}, ranks)
        # They would give a layer's parameters up after its forward pass, of which the clipping pass needs all at once.
        for hook in (*self._zero.parameter_offload.forward_hooks, *self._zero.parameter_offload.backward_hooks):
            hook.remove()
        self.starts: Mapping[str, int] | None = self._pieces.starts

    @contextmanager
    def whole(self) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._parameters):
            yield

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        # A sum that no unit touched was made in the shape of a parameter that is not here now.
        whole = {name: total if total.shape == self._shapes[name] else total.new_zeros(self._shapes[name])
                 for name, total in sums.items()}  # fmt: skip
        return self._pieces.add_up(whole)

    def give(self, gradients: Mapping[str, Tensor], optimizer: object) -> None:
        for index, parts in enumerate(self._groups):
            master = self._zero.fp32_partitioned_groups_flat[index]
            device = self._zero.device if not gradients else next(iter(gradients.values())).device
            found: list[Tensor] = []
            for name, held in parts:
                padded = torch.zeros(held, dtype=master.dtype, device=device)
                if name in gradients:
                    padded[: len(gradients[name])] = gradients[name]
                found.append(padded)
            if self._zero.offload_optimizer:
                master.grad.copy_(torch.cat(found))
            else:
                self._zero.averaged_gradients[index] = found


def _name_of(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise UnsupportedModelError(
            f"DeepSpeed's optimizer has a parameter of shape {tuple(parameter.shape)} that is not a trainable "
            "parameter of the module: it would be updated without a clipped gradient.",
            trap="T14",
        )
    return names[id(parameter)]


def _refuse_other_values(name: str, master: Tensor, here: Tensor) -> None:
    """Make sure that what is taken for a parameter's master weights are those."""
    if not torch.equal(master.to(here.device, here.dtype), here[: master.numel()]):
        raise UnsupportedModelError(
            f"DeepSpeed's master weights of {name} are not where they were looked for, so its gradient would be given "
            "to another parameter. Use a tested version (pip install lit-dpret[deepspeed]), and leave "
            "zero_optimization.round_robin_gradients out."
        )
