"""Accelerators by name, as their makers describe them; none of these numbers was measured here.

Peak rates are of dense bfloat16 products with float32 accumulation, from memory of the makers' data sheets: look them
up before you buy by them. What share of it a private step reaches is not known before it ran: `UTILISATION` is an
assumption, and every prediction that rests on it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_dpret.errors import ConfigurationError

UTILISATION = 0.3
"""Assumed: model FLOP utilisation of a private step on a GPU. Nothing supports it but that it is far from the peak."""


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Attributes:
        name: As it is asked for.
        bf16_flops: Peak operations per second, dense bfloat16.
        memory: Bytes.
        link: Bytes per second to the other devices of a node, in one direction.
        source: Where the numbers stand.
    """

    name: str
    bf16_flops: float
    memory: float
    link: float
    source: str


_GIB = 2**30
ACCELERATORS: Mapping[str, Accelerator] = {
    each.name: each
    for each in (
        Accelerator("v100-32gb", 125e12, 32 * _GIB, 150e9, "NVIDIA V100 datasheet (float16: it has no bfloat16)"),
        Accelerator("a100-40gb", 312e12, 40 * _GIB, 300e9, "NVIDIA A100 datasheet, SXM"),
        Accelerator("a100-80gb", 312e12, 80 * _GIB, 300e9, "NVIDIA A100 datasheet, SXM"),
        Accelerator("h100-80gb", 989e12, 80 * _GIB, 450e9, "NVIDIA H100 datasheet, SXM"),
        Accelerator("h200-141gb", 989e12, 141 * _GIB, 450e9, "NVIDIA H200 datasheet, SXM"),
        Accelerator("l4-24gb", 121e12, 24 * _GIB, 32e9, "NVIDIA L4 datasheet, PCIe 4"),
        Accelerator("tpu-v4", 275e12, 32 * _GIB, 150e9, "Google Cloud TPU v4 documentation"),
    )
}


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name.

    Raises:
        ConfigurationError: It is none of `ACCELERATORS`.
    """
    if name not in ACCELERATORS:
        raise ConfigurationError(f"task.device={name!r} is not one of {', '.join(ACCELERATORS)}.")
    return ACCELERATORS[name]
