"""What a step would take on an accelerator: counted by data type, told as a range that hides no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5ForConditionalGeneration

from lit_dpret.costs.prediction import _NOISE_BYTES, ASSUMED, predict, products_of
from lit_dpret.costs.work import ACCELERATORS, work_of
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.privacy.budget import NoiseName
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.noise import KeyedStream

XL = GeneratorOutline.of_settings(optimizer=OptimizerSpec(), pretrained="google-t5/t5-3b", gradient_checkpointing=True)


def told(world: int = 8, strategy: str = "fsdp", device: str = "h100-80gb", **changes: Any) -> dict[str, Any]:
    settings = {"batch": 1024, "world": world, "strategy": strategy, "device": device, "seconds_of_a_normal": 1e-8}
    return predict(XL, **settings | changes)


@pytest.mark.costly
@pytest.mark.like(2)
@pytest.mark.parametrize("name", ["ghost", "ghost_tf32", "ghost_bf16"])
@pytest.mark.parametrize("width", [128, 512])  # gradients written out, and norms from pairs
def test_the_products_of_a_row_are_those_that_a_private_step_makes(width: int, name: str) -> None:
    source, target = 96, 32
    rows = 2
    config = T5Config(
        d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=2, num_heads=4, vocab_size=512,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)

    class Outline:
        name = "a T5"
        source_length = source
        max_query_length = target

    Outline.model = model  # type: ignore[attr-defined]
    ids, labels = torch.randint(1, 512, (rows, source)), torch.randint(1, 512, (rows, target))

    def losses() -> Any:
        logits = model(input_ids=ids, labels=labels, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    engine: Any = make_engine(name, model, max_grad_norm=1.0)
    units, real = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    for _ in range(3):
        engine.add(losses, units, real)
    engine.forget()  # torch does not count what is added to a sum in place
    with FlopCounterMode(display=False) as counter:
        engine.add(losses, units, real)
    half, low, full = products_of(work_of(Outline()), again=False, size=2 if name == "ghost_bf16" else 4, engine=name)
    assert bool(low) == (name != "ghost")
    assert rows * (half + low + full) == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_no_part_of_a_step_is_left_out_of_its_range() -> None:
    found = told()
    least, most = found["seconds_per_step"]
    assert least == sum(each["at_peak"] for each in found["seconds"].values()) < most
    assert set(ASSUMED) - {"tf32 products"} | {"noise"} == set(found["seconds"]) and all(
        0 < each["at_peak"] <= each["assumed"] for each in found["seconds"].values()
    )


@pytest.mark.parametrize("engine", ["ghost_tf32", "ghost_bf16"])
def test_low_precision_products_take_the_place_of_most_float32_products(engine: str) -> None:
    before, after = told(), told(engine=engine)
    full = [found["seconds"]["float32 products"]["at_peak"] for found in (before, after)]
    assert full[1] < 0.05 * full[0]
    assert set(after["seconds"]) - set(before["seconds"]) == ({"tf32 products"} if engine == "ghost_tf32" else set())
    assert after["seconds_per_step"][1] < before["seconds_per_step"][1] - 0.5 * full[0]


def test_noise_is_divided_among_shards_and_drawn_by_every_rank_under_ddp() -> None:
    shards, whole = told()["seconds"]["noise"]["at_peak"], told(strategy="ddp", device="h200-141gb")["seconds"]["noise"]
    assert whole["at_peak"] == pytest.approx(8 * shards)


def test_secure_noise_is_priced_by_the_memory_of_the_accelerator_and_other_noise_by_the_processor() -> None:
    slow, fast = (told(device=name, seconds_of_a_normal=1e-7) for name in ("h100-80gb", "h200-141gb"))
    assert slow["seconds"]["noise"] == fast["seconds"]["noise"] and slow["noise_drawn_on"] == "processor"
    for changes in ({"secure_rng": True}, {"noise": "discrete"}, {"noise": "discrete", "secure_rng": True}):
        slow, fast = (told(device=name, **changes) for name in ("h100-80gb", "h200-141gb"))
        assert slow["noise_drawn_on"] == "accelerator"
        ratio = slow["seconds"]["noise"]["at_peak"] / fast["seconds"]["noise"]["at_peak"]
        assert ratio == pytest.approx(ACCELERATORS["h200-141gb"].bandwidth / ACCELERATORS["h100-80gb"].bandwidth)
        assert slow["seconds"]["noise"]["assumed"] > slow["seconds"]["noise"]["at_peak"]


class Moved(TorchDispatchMode):
    """Bytes that operations read and write; views and fresh memory move none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not is_view and "empty" not in func._schema.name:
            tensors = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return found


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
def test_the_bytes_of_noise_are_what_it_moves(noise: NoiseName, set_threads: Callable[[int], None]) -> None:
    set_threads(1)  # a mode sees the operations of its own thread
    stream, count = KeyedStream(bytes(32), "run", secure_rng=True), 1 << 18
    key: dict[str, Any] = {"attempt": 0, "step": 0, "parameter": "w"}
    with Moved() as moved:
        if noise == "gaussian":
            stream.normal(torch.Size([count]), **key)
        else:
            stream.rounded_normal(torch.Size([count]), bits=33, **key)
    assert moved.bytes / count == pytest.approx(_NOISE_BYTES[noise], rel=0.03)


def test_one_device_sends_nothing_and_more_than_a_node_send_slowly() -> None:
    assert told(world=1, strategy="ddp", device="h200-141gb")["seconds"]["messages"]["at_peak"] == 0
    node, more = told(world=8)["seconds"]["messages"], told(world=64)["seconds"]["messages"]
    assert more["assumed"] / more["at_peak"] > 5 * node["assumed"] / node["at_peak"]


def test_where_no_row_fits_no_time_is_told() -> None:
    found = told(world=1, strategy="ddp", device="l4-24gb")
    assert found["rows_that_fit"] == 0 and found["seconds_per_step"] is None and found["seconds"] is None
