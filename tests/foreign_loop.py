"""The module of ``examples/own_loop``, which is not a `PrivateModule`, as a job of `rank_runs`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_loop" / "train.py"


class _Helper:
    """An object whose address differs between ranks, as any object's can."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"<_Helper object at 0x{0x7F00 + self._rank:x}>"


def fit(folder: Path, rank: int, world: int, *, declares: bool = False, adds_up: bool = False) -> dict[str, Any]:
    """Train it for three steps; it can declare that it adds up over ranks, and can do so."""
    import lightning as L
    import torch

    from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
    from lit_dpret.distributed.ranks import Ranks
    from lit_dpret.privacy.modes import DPSGD, StepCounts

    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    mode = DPSGD(eps=3.0, noise_multiplier=2.0, secret_file=folder.parent / "secret")
    mode.helper = _Helper(rank)  # type: ignore[attr-defined]
    module = example.Regression(mode)
    if declares:
        module.adds_up_over_ranks = True
    if adds_up:
        alone = mode.take

        def take() -> dict[str, torch.Tensor]:
            sums, counts = alone(), torch.tensor([mode.counts.units], dtype=torch.float64)
            Ranks.here().sum_(sums, counts)
            mode.counts = StepCounts(units=int(counts))
            return sums

        mode.take = take  # type: ignore[method-assign]
        guard_of = module.receive_guard

        def receive(guard: Any) -> None:
            class Counting:
                """A guard that reads the counts as the example would, before it takes the sums."""

                def authorise(self, attempt: int, number: int, units: int, sums: Any) -> Any:
                    return guard.authorise(attempt, number, mode.counts.units, sums)

                record = staticmethod(guard.record)

            guard_of(Counting())

        module.receive_guard = receive
    settings = {"strategy": "ddp", "devices": world} if world > 1 else {"devices": 1}
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, max_epochs=-1, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[PrivacyAccountant(run_dir=folder, eps_log_points=1), PrivacyCard(run_dir=folder)], **settings,
    )  # fmt: skip
    trainer.fit(module, datamodule=example.PointsData())
    return {"weights": [p.tolist() for p in module.parameters()]}
