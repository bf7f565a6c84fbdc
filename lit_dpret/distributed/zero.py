"""DeepSpeed's ZeRO receives finished gradients: what it shards is already noised.

The clipping engine gets its gradients inside the forward pass of DeepSpeed's engine. The clipped sums are reduced in
float32 or wider (`ShardLayout`), each rank adds the noise of the coordinates whose master weights it keeps, and the
result is stored where ZeRO's ``step`` expects an averaged gradient. A share of the noise from each rank, before
DeepSpeed's own reduction, is not offered: rounded separately, the sum would not be post-processing of the noised sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_dpret.distributed.handover import Handover, is_zero_state, replaced
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.shards import Shard, ShardLayout
from lit_dpret.errors import ConfigurationError, ResumeError, UnsupportedModelError
from lit_dpret.settings import require_number


def zero_handover(engine: Any, module: nn.Module, ranks: Ranks) -> ZeroHandover:
    """Return the handover of ``module`` for the engine that ``deepspeed.initialize`` returned; a collective call."""
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return _Stage12(engine, module, ranks)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return _Stage3(engine, module, ranks)
    raise ConfigurationError(
        f"DeepSpeed built a {kind} from these settings, and private steps are tested for ZeRO's stages 1 to 3 alone. "
        "Set zero_optimization.stage to 1, 2 or 3, and leave data_types.grad_accum_dtype out."
    )


@dataclass(frozen=True)
class _Group:
    """One group of parameters as DeepSpeed flattens it on this rank."""

    master: Tensor  # the flat float32 parameter of the wrapped optimizer
    places: Mapping[str, int]  # the offset in it of each parameter's shard, by name
    held: Mapping[str, int]  # the number of elements of each parameter's shard in it, including padding


class ZeroHandover(Handover, ABC):
    """Base of all stages: shards of parameters (``own`` on this rank) in the flat tensors of ``groups``."""

    in_shards = True

    def __init__(self, engine: Any, module: nn.Module, ranks: Ranks, groups: list[_Group], own: list[Shard],
                 shapes: Mapping[str, torch.Size]) -> None:  # fmt: skip
        super().__init__(module, ranks)
        self._zero = engine.optimizer
        self._groups, self._shapes = groups, dict(shapes)
        self._shards = ShardLayout.agree(own, {name: shape.numel() for name, shape in shapes.items()}, ranks)
        self.starts = self._shards.starts

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        # Under stage 3, a sum to which no unit contributed has the shape of a parameter that is not gathered now.
        whole = {name: total if total.shape == self._shapes[name] else total.new_zeros(self._shapes[name])
                 for name, total in sums.items()}  # fmt: skip
        return self._shards.add_up(whole)

    def give(self, gradients: Mapping[str, Tensor], optimizer: object) -> None:
        device = next((gradient.device for gradient in gradients.values()), self._groups[0].master.device)
        for index, group in enumerate(self._groups):
            flat = group.master.grad
            if not self._offloads or flat is None:
                flat = torch.zeros(group.master.shape, dtype=group.master.dtype, device=device)
            flat.zero_()
            for name, place in group.places.items():
                if name in gradients:
                    flat[place : place + len(gradients[name])].copy_(gradients[name])
            if not self._offloads:
                self._zero.averaged_gradients[index] = self._laid_out(group, flat)

    @property
    @abstractmethod
    def _offloads(self) -> bool:
        """Whether the optimizer steps in host memory."""

    def _laid_out(self, group: _Group, flat: Tensor) -> list[Tensor]:
        return [flat]

    # -- for checkpoints and export ----------------------------------------------------------

    def masters(self) -> dict[str, Tensor]:
        """Return whole master weights by name on rank 0, on the CPU, nothing elsewhere; a collective call."""
        whole = self._shards.collect(self._parts([group.master for group in self._groups]))
        return {name: flat.view(self._shapes[name]) for name, flat in whole.items()}

    def load_masters(self, whole: Mapping[str, Tensor]) -> None:
        self._refuse_others(whole, "weights")
        with torch.no_grad():
            self._lay([group.master for group in self._groups], whole)
            self._load_parameters(whole)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the whole optimizer state by name on rank 0, nothing elsewhere; a collective call."""
        states: list[dict[str, Any]] = [self._zero.optimizer.state.get(group.master, {}) for group in self._groups]
        keys = sorted(set().union(*self._ranks.gather({key for state in states for key in state})))
        found: dict[str, Any] = {"groups": self._settings(), "states": {}, "numbers": {}}
        for key in keys:
            values: list[Any] = [state.get(key) for state in states]
            flat = [isinstance(v, Tensor) and v.dim() > 0 and v.shape == g.master.shape
                    for v, g in zip(values, self._groups, strict=True)]  # fmt: skip
            if all(flat):
                found["states"][key] = self._shards.collect(self._parts(values))
            else:
                found["numbers"][key] = [None if value is None else float(value) for value in values]
        return found if self._ranks.is_first else {}

    def load_optimizer_state(self, found: Mapping[str, Any]) -> None:
        """Load the state from `optimizer_state`, on any number of ranks."""
        if not is_zero_state(found) or len(found["groups"]) != len(self._groups):
            raise ResumeError("The checkpoint's optimizer state is not one of trainer=deepspeed for this model.")
        for whole in found["states"].values():
            self._refuse_others(whole, "optimizer state")
        wrapped = self._zero.optimizer
        for group, settings in zip(wrapped.param_groups, found["groups"], strict=True):
            group.update(settings)
        for index, group in enumerate(self._groups):
            state = wrapped.state[group.master]
            for key in found["states"]:
                state[key] = torch.zeros_like(group.master)
            for key, values in found["numbers"].items():
                dtype = torch.float64 if _wide(wrapped) else torch.float32
                state[key] = None if values[index] is None else torch.tensor(values[index], dtype=dtype)
        for key, whole in found["states"].items():
            self._lay([wrapped.state[group.master][key] for group in self._groups], whole)

    @contextmanager
    def assembled(self, *, here: bool) -> Iterator[None]:
        """Put the whole master weights, on the CPU, into the module of the rank with ``here`` (rank 0)."""
        whole = self.masters()
        with self.whole():
            frozen = {name: p.detach().cpu().clone() for name, p in self._module.named_parameters()
                      if here and name not in self._shapes}  # fmt: skip
        made = {name: nn.Parameter(v, requires_grad=name in self._shapes) for name, v in (whole | frozen).items()}
        with replaced(self._module, {id(p): made[name] for name, p in self._module.named_parameters() if here}):
            yield

    def _parts(self, flats: list[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for group, flat in zip(self._groups, flats, strict=True):
            for name, place in group.places.items():
                if name in self._shards.own:
                    found[name] = flat.detach()[place : place + self._shards.own[name].count]
        return found

    def _lay(self, flats: list[Tensor], whole: Mapping[str, Tensor]) -> None:
        own = self._shards.take(whole)
        for group, flat in zip(self._groups, flats, strict=True):
            for name, place in group.places.items():
                if name in own:
                    flat.data[place : place + len(own[name])].copy_(own[name])

    def _load_parameters(self, whole: Mapping[str, Tensor]) -> None:
        for name, parameter in self._module.named_parameters():
            if name in whole:
                parameter.data.copy_(whole[name])

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._zero.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def _refuse_others(self, whole: Mapping[str, Tensor], what: str) -> None:
        wrong = [
            name for name, shape in self._shapes.items() if name not in whole or whole[name].numel() != shape.numel()
        ]
        if wrong:
            raise ResumeError(
                f"The checkpoint's {what} are of another model: {wrong[0]} is missing or of another shape."
            )


class _Stage12(ZeroHandover):
    """Stages 1 and 2: parameters are whole, and each rank has a flat partition of each group's master weights."""

    def __init__(self, engine: Any, module: nn.Module, ranks: Ranks) -> None:
        zero = engine.optimizer
        names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        groups: list[_Group] = []
        own: list[Shard] = []
        for index, parameters in enumerate(zero.bit16_groups):
            places: dict[str, int] = {}
            held: dict[str, int] = {}
            for parameter in parameters:
                name, mapping = _name_of(parameter, names), parameter._hp_mapping
                if mapping is not None:
                    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
                    own.append(Shard(name, int(lp.start), int(lp.numel)))
                    places[name], held[name] = int(hp.start), int(hp.numel)
                    _refuse_other_values(name, mapping.hp_fragment, parameter.detach().flatten()[int(lp.start) :])
            groups.append(_Group(zero.single_partition_of_fp32_groups[index], places, held))
        shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        super().__init__(engine, module, ranks, groups, own, shapes)

    @property
    def _offloads(self) -> bool:
        return bool(self._zero.cpu_offload)


class _Stage3(ZeroHandover):
    """Stage 3: each rank has an equal part of every parameter, and of its master weights."""

    def __init__(self, engine: Any, module: nn.Module, ranks: Ranks) -> None:
        zero = engine.optimizer
        # Typed as Any: ZeRO adds attributes to parameters.
        everything: list[tuple[str, Any]] = [(n, p) for n, p in module.named_parameters() if hasattr(p, "ds_id")]
        names = {id(p): name for name, p in everything if p.requires_grad}
        groups: list[_Group] = []
        own: list[Shard] = []
        for index, parameters in enumerate(zero.fp16_groups):
            places: dict[str, int] = {}
            held: dict[str, int] = {}
            for parameter in parameters:
                name, size = _name_of(parameter, names), int(parameter.ds_tensor.numel())
                start = size * ranks.rank
                own.append(Shard(name, start, max(0, min(size, int(parameter.ds_numel) - start))))
                places[name], held[name] = sum(held.values()), size
            groups.append(_Group(zero.fp32_partitioned_groups_flat[index], places, held))
        shapes = {name: torch.Size(p.ds_shape) for name, p in everything if p.requires_grad}
        self._parameters = [parameter for _, parameter in everything]
        super().__init__(engine, module, ranks, groups, own, shapes)
        # They would free a layer's parameters after its forward pass, but the clipping pass needs all at once.
        for hook in (*zero.parameter_offload.forward_hooks, *zero.parameter_offload.backward_hooks):
            hook.remove()

    @property
    def _offloads(self) -> bool:
        return bool(self._zero.offload_optimizer)

    @contextmanager
    def whole(self) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._parameters):
            yield

    def _laid_out(self, group: _Group, flat: Tensor) -> list[Tensor]:
        return [flat[place : place + group.held[name]] for name, place in group.places.items()]

    def _load_parameters(self, whole: Mapping[str, Tensor]) -> None:
        own = self._shards.take({name: value for name, value in whole.items() if name in self._shapes})
        parameters: dict[str, Any] = dict(self._module.named_parameters())
        for name, part in own.items():
            parameters[name].ds_tensor.data[: len(part)].copy_(part)


def _wide(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "DPAdamBC"


def _name_of(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise UnsupportedModelError(
            f"DeepSpeed's optimizer has a parameter of shape {tuple(parameter.shape)} that is not a trainable "
            "parameter of the module: it would be updated without a clipped gradient.",
            trap="T14",
        )
    return names[id(parameter)]


def _refuse_other_values(name: str, master: Tensor, here: Tensor) -> None:
    if not torch.equal(master.to(here.device, here.dtype), here[: master.numel()]):
        raise UnsupportedModelError(
            f"DeepSpeed's master weights of {name} are not where they were expected, so its gradient would be given "
            "to another parameter. Use a tested version (pip install lit-dpret[deepspeed]), and leave "
            "zero_optimization.round_robin_gradients out."
        )


class ZeroStrategy(DeepSpeedStrategy):
    """`lightning.pytorch.strategies.DeepSpeedStrategy` adapted to private runs.

    It differs in four ways. DeepSpeed gets finished gradients (`lit_dpret.distributed.zero`). A checkpoint is one file
    with the whole state, written atomically by rank 0; it is read without running code from it, and resumes on any
    number of ranks. (DeepSpeed's own checkpoints are a folder of pickles, one per rank, that a kill can leave half
    written.) DeepSpeed's defaults of clipping the sum to norm 1 and refusing other optimizers than its own are off. And
    it also runs on CPUs, for trials: slowly, over gloo.

    Args:
        stage: 1 and 2 divide master weights, optimizer state, finished gradients and noise over the ranks; 3 also
            divides the parameters, which each rank gathers while it clips.
        offload_optimizer: Keep master weights and optimizer state in host memory, and step there.
        offload_parameters: Under stage 3, keep parameters in host memory too.
        timeout_minutes: How long ranks wait for one that is stuck.
        settings: Arguments of Lightning's strategy; those not shown to keep the claim are refused when training starts.

    Raises:
        ConfigurationError: DeepSpeed is not installed, or a value is out of range.
    """

    def __init__(
        self,
        *,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        timeout_minutes: float = 5.0,
        **settings: Any,
    ) -> None:
        if find_spec("deepspeed") is None:
            raise ConfigurationError("trainer=deepspeed needs DeepSpeed. Run: pip install 'lit-dpret[deepspeed]'")
        if stage not in (1, 2, 3):
            raise ConfigurationError(f"trainer.strategy.stage={stage} is not 1, 2 or 3; trainer=ddp divides nothing.")
        if offload_parameters and stage != 3:
            raise ConfigurationError(
                f"trainer.strategy.offload_parameters=true needs stage 3: under stage {stage} each rank has them whole."
            )
        require_number("trainer.strategy", {"timeout_minutes": timeout_minutes})
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            timeout=timedelta(minutes=timeout_minutes),
            **settings,
        )
        self.config: dict[str, Any] = self.config or {}
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # for DeepSpeed's log: nothing is divided by it
        self.config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default is 1
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # use the module's optimizer, offloaded or not
        self.config.setdefault("zero_allow_untested_optimizer", True)
        self.handover: ZeroHandover | None = None

    # -- CPUs, for trials --------------------------------------------------------------------

    @property
    def _on_cpu(self) -> bool:
        return self.root_device.type == "cpu"

    def setup_environment(self) -> None:
        if not self._on_cpu:
            super().setup_environment()
            return
        import deepspeed

        if deepspeed.get_accelerator().device_name() != "cpu":
            raise ConfigurationError(
                f"trainer.accelerator=cpu, but DeepSpeed found {deepspeed.get_accelerator().device_name()}. Set the "
                "environment variable DS_ACCELERATOR=cpu too."
            )
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        if not self._on_cpu:
            super().setup_distributed()
            return
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        if not self._on_cpu:
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        import deepspeed

        engine, made, *_ = deepspeed.initialize(
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, made

    # -- the handover ------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        if trainer.training and hasattr(module, "receive_handover"):
            self.handover = zero_handover(self.model, module, Ranks.here())
            module.receive_handover(self.handover)

    def _own(self) -> ZeroHandover:
        if self.handover is None:
            raise ConfigurationError(
                "trainer=deepspeed trains only a PrivateModule. Choose another trainer for others."
            )
        return self.handover

    # -- checkpoints: one file ---------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's own ``state_dict`` with master weights, whole, on rank 0."""
        module: Any = self.lightning_module
        with self._own().assembled(here=self.is_global_zero):
            state = module.state_dict() if self.is_global_zero else {}
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._own().optimizer_state()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=True)
        if not all(map(is_zero_state, found.get("optimizer_states", ()))):
            raise ResumeError(
                f"The checkpoint {checkpoint_path} was not written under trainer=deepspeed, and ZeRO cannot read its "
                "optimizer state. Continue with another trainer: trainer=cpu, gpu, ddp and fsdp read each other's."
            )
        return found

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state: Mapping[str, Tensor] = checkpoint["state_dict"]
        self._own().load_masters(state)
        module: Any = self.lightning_module
        for name, buffer in module.named_buffers():
            if name in state:
                buffer.copy_(state[name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != 1:
            raise ResumeError(f"The checkpoint has {len(states)} optimizers, and trainer=deepspeed has one.")
        self._own().load_optimizer_state(states[0])
