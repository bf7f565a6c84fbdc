"""Jobs for the ranks of `rank_runs.Server` on which parameters are cut up (FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_dpret.modules.sharding_strategy import ShardingStrategy


def fit(folder: Path, rank: int, world: int, *, trainer: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """`rank_runs.fit`, in shards where there are several ranks."""
    import rank_runs

    chosen = {"strategy": ShardingStrategy(), "devices": world} if world > 1 else {}
    found: dict[str, Any] = rank_runs.fit(folder, rank, world, trainer=chosen | (trainer or {}), **given)
    return found


def generate(
    folder: Path, rank: int, world: int, *, sharded: bool = True, steps: int = 4, resume: bool = False,
    privacy: dict[str, Any] | None = None, model: dict[str, Any] | None = None, precision: str = "32-true",
    lora: bool = False, kill_at: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A tied T5 trained by ``task=fit``'s own function, its model and card written; whole weights come back."""
    import functools
    from types import SimpleNamespace

    import lightning as L
    import rank_runs
    import tiny_generator
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from stand_ins import KillAt, Numbers, Units, _Items
    from torch.utils.data import DataLoader

    from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
    from lit_dpret.privacy import gate, run
    from lit_dpret.privacy.modes import DPSGD, NoPrivacy
    from lit_dpret.tasks.fit import CHECKPOINTS, train

    run.random_secrets = gate.random_secrets = SimpleNamespace(token_hex=lambda size: "ab" * size)  # type: ignore[assignment]
    pairs = tiny_generator.copy_pairs(40)

    class Pairs(Units):
        def rows(self, unit: int) -> list[Any]:
            return [pairs[unit]]

    class Texts(Numbers):
        def train_dataloader(self) -> Any:
            items = _Items(Pairs(self.size))
            return DataLoader(items, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)

    L.seed_everything(0, verbose=False)
    chosen = {"eps": 8.0, "delta": 1e-3, "noise_multiplier": 2.0, "accountant": "rdp", "max_grad_norm": 0.1,
              "secret_file": folder.parent / "secret"}  # fmt: skip
    mode = NoPrivacy() if privacy == {"none": True} else DPSGD(**chosen | (privacy or {}))
    module = tiny_generator.generator(privacy=mode, **(model or {}))
    if lora:
        from peft import LoraConfig, get_peft_model

        module.model = get_peft_model(module.model, LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False))
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": world, "max_steps": steps, "max_epochs": -1}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "precision": precision}
    if sharded:
        settings["strategy"] = ShardingStrategy()
    accountant = PrivacyAccountant(run_dir=folder, resume=resume, eps_log_points=1, replay="never")
    callbacks = [accountant, *([] if lora else [PrivacyCard(run_dir=folder)]),
                 ModelCheckpoint(dirpath=folder / CHECKPOINTS, every_n_train_steps=2, save_last=True),
                 *([] if kill_at is None else [KillAt(kill_at)])]  # fmt: skip
    train(
        module, Texts(40, sampling="poisson", expected_batch_size=None, sample_rate=0.2, physical_batch_size=4),
        run_dir=folder, make_trainer=functools.partial(L.Trainer, **settings), callbacks=callbacks, loggers=[],
        resume=resume,
    )  # fmt: skip
    held = {name: type(p).__name__ for name, p in module.named_parameters()}
    found = {name: rank_runs.whole(p.detach()).double().flatten().tolist() for name, p in module.named_parameters()}
    optimizer = module.optimizers()
    state = [v for each in optimizer.state.values() for v in each.values() if torch.is_tensor(v) and v.dim()]
    local = sum((v.to_local() if hasattr(v, "to_local") else v).numel() for v in state)
    return {"weights": found, "held": held, "state": local, "attempt": accountant._gate.attempt}
