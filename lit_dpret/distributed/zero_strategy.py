"""Lightning's DeepSpeed strategy, with checkpoints that any number of ranks can go on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from lit_dpret.distributed.handover import is_zero_state
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.zero import ZeroHandover, zero_handover
from lit_dpret.errors import ConfigurationError, ResumeError


class ZeroStrategy(DeepSpeedStrategy):
    """`lightning.pytorch.strategies.DeepSpeedStrategy` as a private run needs it.

    It differs in four things. DeepSpeed gets finished gradients (`lit_dpret.distributed.zero`). A checkpoint is one
    file with the whole state, written by rank 0, which appears whole or not at all, is read without running code from
    it, and resumes on any number of ranks; DeepSpeed's own are a folder of pickles, one for each rank, that a kill can
    leave half written. What DeepSpeed does by itself unless it is told otherwise (clip the sum to norm 1, refuse other
    optimizers than its own) is off. And it runs on CPUs too, for a trial: slowly, over gloo.

    Args:
        stage: 1 and 2 divide master weights, optimizer state, finished gradients and noise over the ranks; 3 the
            parameters too, which each rank gathers while it clips.
        offload_optimizer: Keep master weights and optimizer state in host memory, and step there.
        offload_parameters: Under stage 3, keep parameters in host memory too.
        timeout_minutes: How long ranks wait for one that is stuck.
        settings: Of Lightning's strategy; what is not shown to keep the claim is refused when training starts.

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
        if not (math.isfinite(timeout_minutes) and timeout_minutes > 0):
            raise ConfigurationError(f"trainer.strategy.timeout_minutes={timeout_minutes} is not a positive number.")
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            timeout=timedelta(minutes=timeout_minutes),
            **settings,
        )
        self.config: dict[str, Any] = self.config or {}
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # for DeepSpeed's log: nothing is divided by it
        self.config.setdefault("gradient_clipping", 0.0)  # its own default is 1
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # the module's optimizer, offloaded or not
        self.config.setdefault("zero_allow_untested_optimizer", True)
        self.handover: ZeroHandover | None = None

    # -- CPUs, for a trial -------------------------------------------------------------------

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
                f"trainer.accelerator=cpu, and DeepSpeed found {deepspeed.get_accelerator().device_name()}. Set the "
                "environment variable DS_ACCELERATOR=cpu too."
            )
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for minutes
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

    # -- the hand-over -----------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        if trainer.training and hasattr(module, "receive_handover"):
            self.handover = zero_handover(self.model, module, Ranks.here())
            module.receive_handover(self.handover)

    def _own(self) -> ZeroHandover:
        if self.handover is None:
            raise ConfigurationError("trainer=deepspeed trains a PrivateModule; nothing else was shown.")
        return self.handover

    # -- checkpoints: one file ---------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What the module's own ``state_dict`` holds, with master weights, whole, on rank 0."""
        module: Any = self.lightning_module
        with self._own().assembled(here=self.is_global_zero):
            state = module.state_dict() if self.is_global_zero else {}
        return {name: value.detach().cpu() for name, value in state.items()}

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
                "optimizer state. Go on with another trainer: trainer=cpu, gpu, ddp and fsdp read each other's."
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
