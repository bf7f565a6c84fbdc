"""Rows and batches of a Lightning user's own collation and loss under `make_private`."""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from own_modules import Classifier, RowsOf, card_in, data, fit, made, row_loss, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from lit_dpret import (
    PrivacyAccountant,
)  # fmt: skip
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.modes import DPSGD


@pytest.mark.costly
def test_items_of_dicts_and_of_lone_tensors_reach_the_loss_as_the_collation_makes_them(tmp_path: Path) -> None:
    x, y = rows().tensors

    def of_dict(model: Any, batch: Any) -> Tensor:
        # No assertion: what the loss can reach is looked at, and from one of pytest's that is every collected test.
        if not isinstance(batch["in"], list | tuple) or batch["in"][0].shape[1] != 4:
            raise AssertionError
        return row_loss(model, (batch["in"][0], batch["label"]))

    dicts = [{"in": (a,), "label": b} for a, b in zip(x, y, strict=True)]
    fit(tmp_path / "dict", made(per_row_loss=of_dict), data(dicts))
    lone = made(per_row_loss=lambda model, batch: model(batch).square().sum(1))
    fit(tmp_path / "lone", lone, data(list(x)))


class RunningMean:
    seen, mean = 0, 0.0

    def add(self, rows: Tensor) -> Any:
        for row in rows.numpy():
            self.seen += 1
            self.mean = self.mean + (row - self.mean) / self.seen
        return self.mean


def test_a_running_mean_in_collate_fn_is_called_by_its_name(tmp_path: Path) -> None:
    running = RunningMean()

    def centred(given: list[Any]) -> Any:
        x, y = default_collate(given)
        return x - torch.tensor(running.add(x)).float(), y

    with pytest.raises(UnsupportedModelError, match="running mean") as refused:
        fit(tmp_path, made(collate_fn=centred), data(physical_batch_size=8))
    assert refused.value.trap == "T11"


class Weighted(nn.Module):
    """A loss with class weights, as a module; and a collation with a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_classes", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, model: Any, batch: Any = None) -> Any:
        if batch is None:
            x, y = default_collate(model)
            return x - self.of_classes.mean(), y
        return F.cross_entropy(model(batch[0]), batch[1], weight=self.of_classes, reduction="none")


@pytest.mark.costly
def test_a_loss_and_a_collation_may_be_modules_and_are_no_part_of_what_is_saved(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    given = {"per_row_loss": Weighted(), "collate_fn": Weighted()}
    fit(tmp_path / "run", made(**given), callbacks=[kept], max_steps=4)
    (path,) = (tmp_path / "kept").glob("*step=2.ckpt")
    Classifier.load_from_checkpoint(path)
    fit(tmp_path / "run", made(**given), callbacks=[PrivacyAccountant(resume=True)], ckpt_path=path, max_steps=4)
    assert card_in(tmp_path / "run")["mechanism"]["steps_done"] == 4


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Halved(Pair):
    """Is given other numbers than it holds, as a row that is normalised at once."""

    def __new__(cls, x: Tensor, y: Tensor) -> Halved:
        return super().__new__(cls, x / 2, y)


class HalvedDict(UserDict[str, Tensor]):
    def __init__(self, found: dict[str, Tensor]) -> None:
        super().__init__({"x": found["x"] / 2, "y": found["y"]})


KINDS: dict[str, Callable[..., Any]] = {
    "rows": lambda *batch: batch,
    "tuple": Halved,
    "dict": lambda x, y: HalvedDict({"x": x, "y": y}),
}


@pytest.mark.parametrize("of", KINDS)
def test_rows_and_batches_are_made_once(of: str, tmp_path: Path) -> None:
    """Their constructors are the user's, and may change what they are given."""

    def collate(found: list[Any]) -> Any:
        return KINDS[of](*map(torch.stack, zip(*found, strict=True)))

    def loss(model: Any, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["y"]) if of == "dict" else batch
        if float(x.max()) != 0.5:
            raise LookupError("These are other numbers than those of the data set.")
        return row_loss(model, (x, y))

    kind = Halved if of == "rows" else Pair
    dataset = RowsOf(lambda row: kind(torch.ones(4), torch.tensor(row % 3)))
    fit(tmp_path, made(per_row_loss=loss, collate_fn=collate), data(dataset))


def in_place(found: list[Any]) -> Any:
    for x, _ in found:
        x /= 255
    return default_collate(found)


def in_a_file(row: int) -> Any:
    x, y = rows()[row]
    return {"x": BytesIO(x.numpy().tobytes()), "y": y}


def from_files(found: list[Any]) -> Any:
    x = [torch.frombuffer(bytearray(row["x"].read()), dtype=torch.float32) for row in found]
    return torch.stack(x), torch.stack([row.pop("y") for row in found])


def labels_taken_out(given: list[Any]) -> Any:
    labels: list[Tensor] = []
    while len(labels) < len(given):
        labels.append(given[len(labels)].pop("y"))
    return from_files([{**row, "y": label} for row, label in zip(given, labels, strict=True)])


@pytest.mark.parametrize("collate", [in_place, from_files, labels_taken_out])
def test_a_collation_may_write_into_its_rows_and_use_them_up(collate: Any, tmp_path: Path) -> None:
    fit(tmp_path, made(collate_fn=collate), data(rows() if collate is in_place else RowsOf(in_a_file)), max_steps=3)


class Lazy:
    """Looks nothing up before it is bound to something, as proxies and stand-ins of libraries do."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is bound to nothing")


LAZY = Lazy()


class Settings:
    lazy = LAZY


class Unset(Classifier):
    """Keeps a configuration of which nobody reads what is not set."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.settings = settings


UNSET = OmegaConf.create({"temperature": 1.0, "later": "???", "home": "${oc.env:IS_NOT_SET}", "some": ["???"]})


@pytest.mark.parametrize("where", ["module", "class of an attribute", "loss", "data set", "collation", "settings"])
def test_an_object_whose_attributes_cannot_be_asked_for_is_no_matter(where: str, tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return row_loss(model, batch) / UNSET.temperature * (1 if LAZY else 0)

    model, found = Unset(UNSET) if where == "settings" else Classifier(), rows()
    collation = partial(collated, lazy=LAZY if where == "collation" else None)
    if where == "module":
        model.lazy = LAZY  # type: ignore[assignment]
    if where == "class of an attribute":
        model.settings = Settings()  # type: ignore[assignment]
    if where == "data set":
        found.lazy = LAZY  # type: ignore[attr-defined]
    private = made(model, per_row_loss=loss if where == "loss" else row_loss, collate_fn=collation)
    fit(tmp_path, private, data(found), max_steps=2)


def collated(found: list[Any], lazy: Any) -> Any:
    return default_collate(found)


def doubled(model: Any, batch: Any) -> Tensor:
    x, y = batch
    x *= 2
    return row_loss(model, (x, y))


def noised(model: Any, batch: Any) -> Tensor:
    x, y = batch
    x.add_(torch.randn_like(x) * 0.1)
    return row_loss(model, (x, y))


def expanded(found: list[Any]) -> Any:
    """A mask that has one memory for all rows, which the loss fills row by row."""
    x, y = default_collate(found)
    return x, y, torch.zeros(1, 4).expand(len(found), 4)


def views_of_each_other(found: list[Any]) -> Any:
    x, y = default_collate(found)
    mask = torch.zeros(len(found) + 1, 4)
    return x, y, mask[1:], mask[:-1]


def filled(model: Any, batch: Any) -> Tensor:
    x, y, mask, *others = batch
    lengths = 1 + (x[:, 0] > 1).long() * 3
    for row, length in enumerate(lengths.tolist()):
        mask[row, :length] = 1
    return row_loss(model, (x * (mask + sum(others)), y))


@pytest.mark.parametrize("collate", [expanded, views_of_each_other])
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_rows_of_a_batch_share_no_memory_that_a_loss_may_write_into(
    collate: Any, engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both batches hold the same numbers when the loss begins, so their clipped sums are equal."""
    sums: dict[str, dict[str, Tensor]] = {}
    privatize = DPSGD.privatize

    for name, whose in (("shared", collate), ("own", lambda found: tuple(each.clone() for each in collate(found)))):

        def record(self: Any, found: Any, *, name: str = name, **given: Any) -> Any:
            sums.setdefault(name, {at: each.detach().clone() for at, each in found.items()})
            return privatize(self, found, **given)

        monkeypatch.setattr(DPSGD, "privatize", record)
        private = made(per_row_loss=filled, collate_fn=whose, engine=engine, noise_seed=1)
        settings = {"sampling": "full_batch", "expected_batch_size": None, "physical_batch_size": 60}
        fit(tmp_path / name, private, data(**settings), max_steps=1)
    assert all(torch.allclose(each, sums["own"][at], atol=1e-6) for at, each in sums["shared"].items())


@pytest.mark.parametrize("engine", ["ghost", "loop"])
@pytest.mark.parametrize("loss", [doubled, noised])
def test_a_loss_may_write_into_its_batch(loss: Any, engine: str, tmp_path: Path) -> None:
    fit(tmp_path, made(per_row_loss=loss, engine=engine), max_steps=4)


def test_a_collation_that_sorts_its_rows_is_called_by_it(tmp_path: Path) -> None:
    def by_size(found: list[Any]) -> Any:
        return default_collate(sorted(found, key=lambda row: float(row[0].sum())))

    with pytest.raises(UnsupportedModelError, match="sorts"):
        fit(tmp_path, made(collate_fn=by_size), max_steps=1)


def mapping_of(kind: Any) -> Any:
    made = {UserDict: UserDict, defaultdict: partial(defaultdict, list)}[kind]
    return lambda found: made(zip("xy", default_collate(found), strict=True))


@pytest.mark.parametrize("kind", [Pair, UserDict, defaultdict, dict])
def test_the_loss_gets_what_collate_fn_returned(kind: Any, tmp_path: Path) -> None:
    x, y = rows().tensors
    seen = set()

    def loss(model: Any, batch: Any) -> Tensor:
        seen.add(type(batch))
        if kind is Pair:
            return row_loss(model, (batch.x, batch.y))
        return row_loss(model, (batch[1], batch[0]) if kind is dict else (batch["x"], batch["y"]))

    one: Any = {Pair: Pair, dict: lambda x, y: {1: x, 0: y}}.get(kind, lambda *both: both)
    items = [one(*each) for each in zip(x, y, strict=True)]
    collate = {"collate_fn": mapping_of(kind)} if kind in (UserDict, defaultdict) else {}
    fit(tmp_path, made(per_row_loss=loss, **collate), data(items), max_steps=2)
    assert seen == {dict if kind is defaultdict else kind}  # whose constructor takes a factory first
