"""How often a physical batch waits for the device: not once for each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.privacy.clipping import contributions, make_engine

READERS = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy", "unique")


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("room", [0.0, contributions.ROOM], ids=["parts", "written_out"])
def test_a_batch_reads_values_three_times_however_many_layers_there_are(
    clip_groups: str, masked: bool, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 5, 8, generator=generator)
    counted = []
    for layers in (2, 9):
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        engine: Any = make_engine("ghost", module, max_grad_norm=0.1, clip_groups=clip_groups)

        def losses(module: nn.Module = module) -> Tensor:
            found: Tensor = module(rows).square().mean((1, 2))
            return found

        ids, mask = torch.arange(6), torch.arange(6) < (5 if masked else 6)
        for _ in range(3):  # the first batches are checked, which reads more
            engine.add(losses, ids, mask)
        with monkeypatch.context() as patch:
            reads: list[str] = []
            for name in READERS:
                patch.setattr(Tensor, name, _noting(reads, getattr(Tensor, name), name))
            engine.add(losses, ids, mask)
        counted.append(len(reads))
    assert counted == [5, 5]  # two of them read the units' slots and the mask, which lie on the host


def _noting(reads: list[str], original: Any, name: str) -> Any:
    def noted(self: Tensor, *arguments: Any, **settings: Any) -> Any:
        reads.append(name)
        return original(self, *arguments, **settings)

    return noted
