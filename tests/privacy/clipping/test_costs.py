"""What a batch costs a device beside its products: waits, kernels, and the memory of sums that are kept elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from clipping_cases import Case, add, check_exact, difference, small, t5
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import arithmetic, contributions, ghost, make_engine
from lit_dpret.privacy.clipping.base import RowLoss
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


#: Start no kernel: they look at a tensor in another way, allocate one, or are marks for a profile.
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "as_strided", "split", "reshape", "_reshape_alias", "unbind", "split_with_sizes", "diagonal",
    "lift_fresh", "empty", "empty_like", "new_empty", "_local_scalar_dense", "is_same_size", "promote_types",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
#: The number of tensors that CUDA takes at a time for an operation on a list of them.
AT_A_TIME = 64


class Kernels(TorchDispatchMode):
    """Count the operations that start a kernel on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ not in VIEWS:
            several = args and isinstance(args[0], list)
            self.count += -(-len(args[0]) // AT_A_TIME) if several else 1
        return function(*args, **(kwargs or {}))

    def product(self, x: Tensor, y: Tensor, form: Any) -> Tensor:
        """Count a product as one kernel, as on a GPU: a CPU emulates low precision by casts."""
        self.count += 1
        with _disable_current_modes():
            return arithmetic_product(x, y, form)


arithmetic_product = arithmetic.product


def small_t5(layers: int) -> tuple[nn.Module, RowLoss]:
    ids, labels = torch.randint(1, 64, (3, 32)), torch.randint(1, 64, (3, 8))
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, vocab_size=64)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)).train()

    def losses() -> Tensor:
        logits = model(input_ids=ids, labels=labels, use_cache=False).logits
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    return model, losses


#: At 8 positions, a unit's gradient is larger than what it is computed from, so its norm comes from Gram matrices.
LENGTHS = {"bert": 32, "short bert": 8, "llama": 32, "short llama": 8}


def small_bert(layers: int, length: int) -> tuple[nn.Module, RowLoss]:
    ids = torch.randint(1, 64, (3, length))
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, max_position_embeddings=64)
    model = BertModel(BertConfig(num_hidden_layers=layers, vocab_size=64, **sizes), add_pooling_layer=False).train()
    return model, lambda: model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1).sin().sum(1)


def small_llama(layers: int, length: int) -> tuple[nn.Module, RowLoss]:
    ids = torch.randint(1, 64, (3, length))
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=64, tie_word_embeddings=True, **sizes))

    def losses() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)

    return model.train(), losses


MODELS: dict[str, Callable[[int], tuple[nn.Module, RowLoss]]] = {"t5": small_t5}
MODELS |= {name: partial(small_bert if "bert" in name else small_llama, length=n) for name, n in LENGTHS.items()}


def kernels_of(name: str, model: nn.Module, losses: RowLoss, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the kernels of a plain step and of a private batch."""

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(losses().sum())

    engine: Any = make_engine(name, model, max_grad_norm=0.1)
    counted = []
    for step in (plain, lambda: add(engine, losses, 3)):
        for _ in range(4):  # counted each time: autograd records another graph under a dispatch mode
            with Kernels() as kernels, monkeypatch.context() as patch:
                patch.setattr(arithmetic, "product", kernels.product)
                step()
        counted.append(kernels.count)
    return counted[0], counted[1]


@pytest.mark.parametrize(("name", "model", "layers", "most"), [
    ("ghost", "t5", 4, 1.45), ("ghost", "t5", 12, 1.3), ("ghost", "bert", 12, 1.4), ("ghost", "short bert", 12, 1.75),
    ("ghost", "llama", 12, 1.25), ("ghost", "short llama", 12, 1.5),
    ("ghost_tf32", "t5", 12, 2.0), ("ghost_bf16", "t5", 12, 1.9),
])  # fmt: skip
def test_a_private_batch_starts_no_more_kernels_than_so_many_times_those_of_a_plain_one(
    name: str, model: str, layers: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, private = kernels_of(name, *MODELS[model](layers), monkeypatch)
    assert private <= most * plain, (plain, private)


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
