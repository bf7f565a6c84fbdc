"""What cannot be clipped exactly is refused, by name and with a way out; never skipped, never broadcast."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clipping_cases import ENGINES, Case, Positions, Scaled, case_of, check_exact, check_refused, head
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.modes import DPSGD


def test_an_unknown_engine_or_grouping_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.engine='fast'"):
        make_engine("fast", nn.Linear(2, 2), max_grad_norm=1.0)
    with pytest.raises(ConfigurationError, match=r"privacy\.clip_groups='global'"):
        DPSGD(eps=1.0, clip_groups="global")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_grad_norm": 0.0}, "privacy.max_grad_norm=0.0"),
        ({"max_grad_norm": float("inf")}, "privacy.max_grad_norm=inf"),
        ({"max_grad_norm": 1.0, "clip": "hard"}, "privacy.clip='hard'"),
        ({"max_grad_norm": 1.0, "clip": "automatic", "gamma": 0.0}, "privacy.gamma=0.0"),
        ({"max_grad_norm": 1.0, "clip_groups": "per_block"}, "privacy.clip_groups='per_block'"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_setting_out_of_range_is_refused_by_its_key(engine: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        make_engine(engine, nn.Linear(2, 2), **settings)


class Phase(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


MAX_NORM = r"0 \(Embedding.*\) has max_norm=1, .* set max_norm to None"
NEVER_TRAINED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a complex parameter": (Phase, "phase", "trainable"),
    "an embedding that rewrites its rows": (lambda: nn.Embedding(3, 2, max_norm=1.0), MAX_NORM, "frozen too"),
    "a bag that rewrites its rows": (lambda: nn.EmbeddingBag(3, 2, max_norm=1.0), MAX_NORM, "frozen too"),
    "an embedding that counts the ids of the batch": (
        lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq=True", "trainable"
    ),
    "a bag that counts the ids of the batch": (
        lambda: nn.EmbeddingBag(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq=True", "trainable"
    ),
    "batch norm": (lambda: nn.BatchNorm1d(3), "GroupNorm", "frozen too"),
    "batch norm without running statistics": (
        lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(), "GroupNorm", "frozen too"
    ),
    "synchronised batch norm": (lambda: nn.SyncBatchNorm(3), "GroupNorm", "frozen too"),
    "instance norm with running statistics": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "GroupNorm", "frozen too"
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", NEVER_TRAINED)
def test_a_layer_that_no_engine_can_clip_is_refused_before_anything_runs(kind: str, engine: str) -> None:
    build, words, when = NEVER_TRAINED[kind]
    model = nn.Sequential(build(), nn.Linear(2, 1))
    with pytest.raises(UnsupportedModelError, match=words):
        make_engine(engine, model, max_grad_norm=1.0)
    model[0].requires_grad_(False)
    if when == "trainable":
        make_engine(engine, model, max_grad_norm=1.0)
        return
    with pytest.raises(UnsupportedModelError, match=words):
        make_engine(engine, model, max_grad_norm=1.0)


def test_a_module_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no trainable parameter"):
        make_engine("ghost", nn.Linear(2, 2).requires_grad_(False), max_grad_norm=1.0)


class Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class ScaledKernel(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * 2, bias)


UNCOVERED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "bare_parameter": (Scaled, "temperature", "Scaled"),
    "transposed_convolution": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 2, 1)), "0.weight", "ConvTranspose1d"),
    "bilinear": (lambda: nn.Sequential(nn.Bilinear(2, 2, 2)), "0.weight", "Bilinear"),
    "convolution_that_scales_its_kernel": (lambda: nn.Sequential(ScaledKernel(2, 2, 1)), "0.weight", "ScaledKernel"),
    "positions_as_a_parameter": (Positions, "positions", "Positions"),
    "subclass_with_its_own_forward": (lambda: nn.Sequential(Subclass(2, 2)), "0.weight", "Subclass"),
    "lstm": (lambda: nn.LSTM(2, 2), "weight_ih_l0", "LSTM"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight", "MultiheadAttention"),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
        "original0",
        "ParametrizationList",
    ),
}


@pytest.mark.parametrize("kind", sorted(UNCOVERED))
def test_an_uncovered_parameter_is_refused_with_its_name_its_class_and_the_ways_out(kind: str) -> None:
    build, parameter, owner = UNCOVERED[kind]
    with pytest.raises(UnsupportedModelError) as caught:
        make_engine("ghost", build(), max_grad_norm=1.0)
    message = str(caught.value)
    for words in (parameter, owner, "requires_grad_(False)", "privacy.engine=loop"):
        assert words in message
    assert ("privacy.engine=vmap" in message) == (kind != "lstm"), "vmap covers no recurrent layer"


def test_a_frozen_uncovered_parameter_is_accepted() -> None:
    model = Scaled(3)
    model.temperature.requires_grad_(False)
    check_exact(case_of(model, 4, 3))


def test_batch_norm_in_eval_mode_is_accepted_until_it_trains() -> None:
    case = case_of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False)).eval(), 4, 3)
    clipping = check_exact(case)
    case.module.train()
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        case.run(clipping)


@pytest.mark.parametrize("change", ["was replaced", "became trainable", "was frozen"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_changed_after_the_engine_was_made_is_refused(engine: str, change: str) -> None:
    case = head()
    model = nn.ModuleList([case.module, nn.Linear(2, 2).double().requires_grad_(False)])
    clipping = make_engine(engine, model, max_grad_norm=1.0)
    if change == "was replaced":
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    elif change == "became trainable":
        model[1].weight.requires_grad_(True)
    else:
        model[0].weight.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match=f"{'1' if change == 'became trainable' else '0'}.weight {change}"):
        case.run(clipping)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_not_one_per_row_is_refused(engine: str) -> None:
    case = head()
    plain, case.losses = case.losses, lambda b: plain(b).mean()
    check_refused(case, "one loss per row", engine=engine)


@pytest.mark.parametrize("engine", ["ghost", "opacus"])
def test_in_batch_negatives_are_refused(engine: str) -> None:
    case = case_of(model := nn.Linear(4, 3), 5, 4)
    case.losses = lambda b: F.cross_entropy(model(b["x"]) @ model(b["x"]).sin().T, torch.arange(5), reduction="none")
    check_refused(case, "another unit", engine=engine)


def test_a_weak_coupling_is_refused_and_a_late_one_where_every_batch_is_verified() -> None:
    case, strength = case_of(model := nn.Linear(4, 3), 30, 4), 1e-6

    def losses(batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"]).square().sum(1)
        return out + strength * out.mean().square()

    case.losses = losses
    check_refused(case, "another unit")
    strength = 0.0
    clipping = make_engine("ghost", model, max_grad_norm=1.0, verify=True)
    case.run(clipping)
    strength = 1e-6
    with pytest.raises(UnsupportedModelError, match="another unit"):
        case.run(clipping)


def test_negatives_from_the_units_own_rows_are_accepted() -> None:
    case = case_of(model := nn.Linear(4, 3), 6, 4)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        pairs = model(batch["x"]).view(-1, 2, 3)
        return (pairs @ pairs.mT).log_softmax(-1)[:, :, 0].flatten()

    case.losses = losses
    check_exact(case, unit_ids=torch.tensor([0, 0, 1, 1, 2, 2]))
    check_refused(case, "another unit")


def time_first(rows: int, length: int) -> Case:
    case = case_of(model := nn.ModuleDict({"linear": nn.Linear(3, 4)}), rows, length, 3)
    case.losses = lambda b: model["linear"](b["x"].transpose(0, 1)).sin().sum((0, 2))
    return case


@pytest.mark.parametrize("length", [2, 4, 5, 8])
@pytest.mark.parametrize("engine", ["ghost", "opacus"])
def test_a_first_axis_that_is_not_the_batch_is_refused_also_where_the_lengths_agree(length: int, engine: str) -> None:
    check_refused(time_first(4, length), "linear", engine=engine)


def test_a_batch_of_one_row_says_nothing_about_the_axis_of_the_next() -> None:
    case = time_first(4, 4)
    clipping = make_engine("ghost", case.module, max_grad_norm=1.0)
    assert case.run(clipping, rows=case.take(torch.tensor([0]))).norms[0] > 0  # any axis is right for one unit
    with pytest.raises(UnsupportedModelError, match="not the batch"):
        case.run(clipping)


@pytest.mark.parametrize("shared", [torch.arange(4), torch.arange(4)[None]])
@pytest.mark.parametrize("rows", [3, 4])
def test_positions_shared_by_the_batch_are_refused_outside_the_known_embeddings(rows: int, shared: Tensor) -> None:
    model = nn.ModuleList([nn.Embedding(9, 4), nn.Embedding(4, 4)]).double()
    data = {"ids": torch.randint(0, 9, (rows, 4))}
    case = Case(model, lambda b: (model[0](b["ids"]) + model[1](shared)).sin().sum((1, 2)), data)
    check_refused(case, "expand shared tensors")


def test_a_weight_used_outside_its_module_is_refused_in_every_batch() -> None:
    model, functional = nn.ModuleDict({"embed": nn.Embedding(7, 3)}).double(), True

    def losses(batch: dict[str, Tensor]) -> Tensor:
        hidden = model["embed"](batch["ids"])
        return (hidden @ model["embed"].weight.T if functional else hidden).logsumexp(-1).sum(1)

    case = Case(model, losses, {"ids": torch.randint(0, 7, (4, 5))})
    check_refused(case, r"embed\.weight is also used outside")
    functional = False
    clipping = check_exact(case)
    functional = True
    with pytest.raises(UnsupportedModelError, match=r"embed\.weight is also used outside"):
        case.run(clipping)


def test_a_module_whose_call_does_not_stand_is_refused() -> None:
    case = case_of(model := nn.Linear(3, 3), 4, 3)

    def changed(batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone()
        out = model(x)
        x.mul_(2)
        return out.sum(1)

    def doubled(batch: dict[str, Tensor]) -> Tensor:
        weights = {name: 2 * p for name, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (batch["x"],)).sum(1)

    for case.losses, words in ((changed, "changed in place"), (doubled, "weights other than its own")):
        check_refused(case, words)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_on_a_parameter_is_refused(engine: str) -> None:
    case = head()
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    case.module.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(UnsupportedModelError, match="weight has a gradient hook"):
        case.run(clipping)
    with pytest.raises(UnsupportedModelError, match="weight has a gradient hook"):
        make_engine(engine, case.module, max_grad_norm=1.0)


def test_inputs_may_be_passed_by_name() -> None:
    case = case_of(model := nn.ModuleList([nn.Linear(3, 3), nn.RMSNorm(3), nn.LayerNorm(3)]), 4, 2, 3)
    case.losses = lambda b: model[2](input=model[1](x=model[0](input=b["x"]))).sin().sum((1, 2))
    check_exact(case)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [([0, 1, 2, 3, 4, 6], [True] * 6), ([0, 1, 2, 3, 4, -1], [True] * 6), ([[0, 1]], [True] * 6), ([0], [1.0])],
)
def test_rows_outside_the_mask_are_refused(ids: list[Any], mask: list[Any]) -> None:
    case = head()
    with pytest.raises(DataError):
        make_engine("ghost", case.module, max_grad_norm=1.0).add(
            lambda: case.losses(case.rows), torch.tensor(ids), torch.tensor(mask)
        )
