"""What a batch costs a device beside its products: waits, kernels, and the memory of sums that are kept elsewhere."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from clipping_cases import Case, add, check_exact, difference, small, t5
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import contributions, ghost, make_engine
from lit_dpret.privacy.clipping.recording_check import Comparison

READERS = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy", "unique")


def _noting(reads: list[str], original: Any, name: str) -> Any:
    def noted(self: Tensor, *arguments: Any, **settings: Any) -> Any:
        reads.append(name)
        return original(self, *arguments, **settings)

    return noted


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


@pytest.mark.costly
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


# -- sums in parts, which an engine hands over one after the other -------------------------------------------------


class Kept:
    """Sums by parts of two parameters each; most numbers that were handed over at once."""

    def __init__(self, names: list[str]) -> None:
        self.parts = [tuple(names[i : i + 2]) for i in range(0, len(names), 2)]
        self.sums: dict[str, Tensor] = {}
        self.calls: list[int] = []
        self.most = 0

    def free(self) -> None:
        pass

    def add(self, part: int, sums: dict[str, Tensor]) -> None:
        assert set(sums) <= set(self.parts[part])
        self.calls.append(part)
        self.most = max(self.most, sum(each.numel() for each in sums.values()))
        for name, each in sums.items():
            self.sums[name] = self.sums.get(name, 0) + each

    def take(self) -> dict[str, Tensor]:
        found, self.sums = self.sums, {}
        return found

    def forget(self) -> None:
        self.sums = {}


def in_parts(case: Case, **settings: Any) -> tuple[Any, Kept]:
    engine = make_engine("ghost", case.module, **settings)
    store = Kept(list(engine.parameters))
    engine.store = store
    return engine, store


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
@pytest.mark.parametrize("case", [t5, lambda: t5(untied=True), small], ids=["tied", "untied", "small"])
def test_sums_in_parts_are_those_of_the_engine(case: Any, clip_groups: str) -> None:
    made = case()
    whole = check_exact(made, clip_groups=clip_groups)
    engine, store = in_parts(made, max_grad_norm=whole.max_grad_norm, clip_groups=clip_groups)
    for _ in range(2):  # the first of which is checked
        stats, other = made.run(engine), made.run(whole)
        assert torch.equal(stats.norms, other.norms) and stats.clipped == other.clipped
        found, expected = engine.take(), whole.take()
        found = {name: found.get(name, torch.zeros_like(each)) for name, each in expected.items()}
        assert difference(found, expected) < 1e-14
    made.run(engine)
    engine.forget()
    assert not store.sums
    assert store.calls == [*range(len(store.parts))] * 3, "in one order, whatever the batch: other processes take part"
    assert store.most < sum(parameter.numel() for parameter in engine.parameters.values()) / 2


def test_a_gradient_that_no_rule_explains_is_refused_in_parts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ghost.contributions_of

    def without(use: Any, *rest: Any, **key: Any) -> Any:
        return [] if "DenseReluDense.wi" in use.site.name else plain(use, *rest, **key)

    monkeypatch.setattr(ghost, "contributions_of", without)
    made = t5()
    engine, store = in_parts(made, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match="another gradient than autograd"):
        made.run(engine)
    assert not store.sums


def test_a_loss_that_couples_units_is_refused_in_parts_as_well() -> None:
    made = small()
    own = made.losses
    made.losses = lambda rows: (losses := own(rows)) * losses.mean()
    engine, store = in_parts(made, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match="cannot be assigned to units"):
        made.run(engine)
    assert not store.sums


def test_autograds_gradients_are_compared_one_by_one_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that held them all would hold as much as the model."""
    made = t5(rows=3)
    engine, _ = in_parts(made, max_grad_norm=1.0)
    seen: list[str] = []
    alive: list[int] = []
    references: list[weakref.ref[Tensor]] = []
    real = Comparison.add

    def add(self: Comparison, name: str, reference: Tensor) -> None:
        seen.append(name)
        references.append(weakref.ref(reference))
        real(self, name, reference)
        alive.append(sum(each() is not None for each in references))

    monkeypatch.setattr(Comparison, "add", add)
    made.run(engine)
    assert sorted(seen) == sorted(name for name, _ in made.module.named_parameters()), "each once, the tied one too"
    assert max(alive) <= 2
