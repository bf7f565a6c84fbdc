"""Settings of PyTorch by which products of float32 matrices have fewer digits, said in either of its two ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lit_dpret.matmul_precision import shortened_products, tf32_products, whole_convolutions, whole_products

BACKENDS = torch.backends
FAMILIES: list[Any] = [BACKENDS, BACKENDS.mkldnn, BACKENDS.cudnn]
KINDS: list[Any] = [
    BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn, BACKENDS.cudnn.conv,
    BACKENDS.cudnn.rnn,
]  # fmt: skip

pytestmark = pytest.mark.skipif(not hasattr(BACKENDS, "fp32_precision"), reason="PyTorch has one way before 2.9")


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    before = [(backend, backend.fp32_precision) for backend in (*FAMILIES, *KINDS)]
    yield
    torch.set_float32_matmul_precision("highest")
    for backend, value in before:
        backend.fp32_precision = value


def found() -> list[str]:
    return [backend.fp32_precision for backend in KINDS]


SHORT = [(BACKENDS, "tf32"), (BACKENDS.mkldnn, "bf16"), *((backend, "tf32") for backend in KINDS[:2])]


@pytest.mark.parametrize(
    ("backend", "value", "named"),
    [
        *((*each, "fp32_precision") for each in SHORT), (BACKENDS.mkldnn.conv, "bf16", "fp32_precision"),
        (BACKENDS.mkldnn.rnn, "bf16", "fp32_precision"), (None, "high", "high"), (None, "medium", "medium"),
        *((backend, "ieee", None) for backend in (BACKENDS, BACKENDS.cudnn, BACKENDS.cuda.matmul)),
    ],
)  # fmt: skip
def test_a_setting_of_either_kind_counts_as_short_unless_it_asks_for_all_digits(
    backend: Any, value: str, named: str | None
) -> None:
    assert shortened_products() is None
    if backend is None:
        torch.set_float32_matmul_precision(value)
    else:
        backend.fp32_precision = value
    found = shortened_products()
    assert found is None if named is None else named in str(found)


@pytest.mark.parametrize(("backend", "value"), [*SHORT, (BACKENDS.cudnn, "ieee"), (BACKENDS.cudnn.conv, "ieee")])
def test_products_and_convolutions_are_whole_for_a_while_and_the_setting_is_given_back(
    backend: Any, value: str
) -> None:
    backend.fp32_precision = value
    before = found()
    with whole_products(), whole_convolutions():
        inside = found()
        assert {inside[0], inside[1], inside[4], inside[5]} <= {"ieee", "none"}
    assert found() == before


@pytest.mark.parametrize(("backend", "value"), [(BACKENDS.cuda.matmul, "none"), *SHORT])
def test_products_of_cuda_are_tf32_for_a_while_inside_of_whole_ones(backend: Any, value: str) -> None:
    backend.fp32_precision = value
    before = found()
    with whole_products():
        whole = found()
        with tf32_products():
            assert found()[0] == "tf32" and found()[1] == whole[1]
        assert found() == whole
    assert found() == before


def test_tf32_products_leave_the_older_setting_readable() -> None:
    with whole_products():
        for _ in range(2):
            with tf32_products():
                pass
    assert torch.get_float32_matmul_precision() == "highest" and shortened_products() is None
