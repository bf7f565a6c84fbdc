"""What a physical batch costs a device beside its products: waits, and the number of kernels that it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipping_cases import add
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration

from lit_dpret.privacy.clipping import contributions, make_engine

READERS = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy", "unique")


@pytest.mark.parametrize("name", ["ghost", "ghost_tf32", "ghost_bf16"])
@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("room", [0.0, contributions.ROOM], ids=["parts", "written_out"])
def test_a_batch_reads_values_three_times_however_many_layers_there_are(
    clip_groups: str, masked: bool, room: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 5, 8, generator=generator)
    counted = []
    for layers in (2, 9):
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        engine: Any = make_engine(name, module, max_grad_norm=0.1, clip_groups=clip_groups)

        def losses(module: nn.Module = module) -> Tensor:
            found: Tensor = module(rows).square().mean((1, 2))
            return found

        ids, mask = torch.arange(6), torch.arange(6) < (5 if masked else 6)
        for _ in range(3):  # the first batches are checked, which reads more
            engine.add(losses, ids, mask)
        with monkeypatch.context() as patch:
            reads: list[str] = []
            for reader in READERS:
                patch.setattr(Tensor, reader, _noting(reads, getattr(Tensor, reader), reader))
            engine.add(losses, ids, mask)
        counted.append(len(reads))
    assert counted == [5, 5]  # two of them read the units' slots and the mask, which lie on the host


#: Start no kernel: they look at a tensor in another way, or allocate one.
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "as_strided", "split", "reshape", "_reshape_alias", "unbind", "split_with_sizes", "diagonal",
    "lift_fresh", "empty", "empty_like", "new_empty", "_local_scalar_dense", "is_same_size",
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Count the operations that start a kernel on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "most"), [("ghost", 2.2), ("ghost_tf32", 3.1), ("ghost_bf16", 3.4)])
def test_a_private_batch_of_a_t5_starts_no_more_kernels_than_so_many_times_those_of_a_plain_one(
    name: str, most: float
) -> None:
    ids, labels = torch.randint(1, 64, (3, 32)), torch.randint(1, 64, (3, 8))
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, vocab_size=64)
    config = T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config).train()

    def losses() -> Tensor:
        logits = model(input_ids=ids, labels=labels, use_cache=False).logits
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(losses().sum())

    engine: Any = make_engine(name, model, max_grad_norm=0.1)
    counted = []
    for step in (plain, lambda: add(engine, losses, 3)):
        for _ in range(4):  # counted each time: autograd records another graph under a dispatch mode
            with Kernels() as kernels:
                step()
        counted.append(kernels.count)
    assert counted[1] <= most * counted[0], counted


def _noting(reads: list[str], original: Any, name: str) -> Any:
    def noted(self: Tensor, *arguments: Any, **settings: Any) -> Any:
        reads.append(name)
        return original(self, *arguments, **settings)

    return noted
