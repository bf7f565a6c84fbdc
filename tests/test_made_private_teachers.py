"""A model that another private run of this process trained teaches no run that does not count it, wherever it is."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from own_modules import Classifier, data, fit, made, row_loss, rows
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.data import Dataset, default_collate

from lit_dpret import PrivacyAccountant, PrivacyCard
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger


def distance(model: Any, batch: Any, teacher: Callable[[Tensor], Tensor]) -> Tensor:
    return (model(batch[0]) - teacher(batch[0]).detach()).square().mean(1)


def reads(found: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Settings of a run whose loss learns from what a function answers."""
    return {"per_row_loss": lambda model, batch: distance(model, batch, found)}


def in_a_wrapped_loss(teacher: nn.Module) -> dict[str, Any]:
    def loss(model: Any, batch: Any) -> Tensor:
        return distance(model, batch, teacher)

    @functools.wraps(loss)
    def timed(*given: Any) -> Tensor:
        return loss(*given)

    return {"per_row_loss": timed}


class Labelled(Dataset[Any]):
    """Rows that a model labels when they are asked for, once."""

    def __init__(self, teacher: nn.Module) -> None:
        self.ask = functools.cache(lambda row: (rows()[row][0], teacher(rows()[row][0]).detach().argmax()))

    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, row: int) -> Any:
        return self.ask(row)


def collating(teacher: nn.Module) -> dict[str, Any]:
    def collate(found: list[Any]) -> Any:
        x, _ = default_collate(found)
        return x, teacher(x).detach().argmax(1)

    return {"collate_fn": collate}


class Asks(L.Callback):
    """Writes what a model answers into a buffer, which the loss reads."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def on_train_batch_start(self, trainer: Any, private: Any, batch: Any, batch_idx: int) -> None:
        self.teacher(rows().tensors[0])


def in_a_transform(teacher: nn.Module) -> dict[str, Any]:
    one = torch.func.vmap(lambda x: torch.func.jvp(teacher, (x,), (torch.zeros_like(x),))[0])
    return reads(lambda x: one(x))


PLACES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "closure": lambda teacher: {"per_row_loss": lambda model, batch: distance(model, batch, teacher)},
    "weights in a closure": lambda t: {
        "per_row_loss": lambda model, batch: distance(model, batch, lambda x: linear(x, t.net[0].weight)[:, :3])
    },
    "list": lambda teacher: reads(functools.partial(lambda held, x: held["a"][0](x), {"a": [teacher]})),
    "object": lambda teacher: reads(functools.partial(lambda held, x: held.model(x), SimpleNamespace(model=teacher))),
    "helper": lambda teacher: reads(torch.no_grad()(lambda x: teacher(x))),
    "partial": lambda teacher: {"per_row_loss": functools.partial(distance, teacher=teacher)},
    "wraps": in_a_wrapped_loss,
    "transform": in_a_transform,
    "collate_fn": collating,
    "data set": lambda teacher: {"datamodule": data(Labelled(teacher))},
    "data set in another process": lambda teacher: {"datamodule": data(Labelled(teacher), num_workers=1)},
    "callback": lambda teacher: {"callbacks": [Asks(teacher)]},
}  # fmt: skip


def student(folder: Path, how: dict[str, Any]) -> None:
    """Train another classifier, private in its turn, in one of `PLACES`."""
    given = {name: value for name, value in how.items() if name not in ("datamodule", "callbacks")}
    of_trainer = {name: how[name] for name in ("callbacks",) if name in how}
    fit(folder, made(Classifier(), **given), how.get("datamodule"), max_steps=2, **of_trainer)


@pytest.fixture(scope="module")
def teaching(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Return a model that a private run trained, and the folder of that run."""
    module, folder = Classifier(), tmp_path_factory.mktemp("teacher")
    fit(folder, made(module), max_steps=2)
    return module, folder


@pytest.fixture
def teacher(teaching: tuple[nn.Module, Path]) -> nn.Module:
    return teaching[0]


def copied(teacher: nn.Module) -> nn.Module:
    """Return another module with the same values, which nothing but these connects with the run."""
    new = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    new.load_state_dict({name.removeprefix("net."): value.clone() for name, value in teacher.state_dict().items()})
    return new


def refuses(folder: Path, how: dict[str, Any]) -> None:
    with pytest.raises(LitDpretError, match="init_from"):
        student(folder, how)
    ledger = folder / "privacy_ledger.jsonl"
    assert not ledger.exists() or not [r for r in PrivacyLedger.read(ledger).records if r["kind"] == "intent"]


@pytest.mark.parametrize("place", PLACES)
def test_a_teacher_is_refused_before_a_release_wherever_the_run_reads_it(
    place: str, teacher: nn.Module, tmp_path: Path
) -> None:
    refuses(tmp_path, PLACES[place](teacher))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": copy.deepcopy,
    "values": copied,
    "values in low precision": lambda teacher: copied(teacher).bfloat16().float(),
    "part": lambda teacher: nn.Sequential(nn.Linear(4, 8), teacher.net[2]),  # type: ignore[index]
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_teacher_or_a_part_of_it_is_known_as_well(how: str, teacher: nn.Module, tmp_path: Path) -> None:
    refuses(tmp_path, PLACES["list"](COPIES[how](teacher)))


@pytest.mark.costly
def test_what_a_loss_swallows_was_not_computed(teacher: nn.Module, tmp_path: Path) -> None:
    answered = tmp_path / "answered"  # a file, since what a loss keeps in a list is put back

    def stubborn(x: Tensor) -> Tensor:
        for _ in range(9):  # a gate that forgot its refusal would let one layer more through each time
            with suppress(ConfigurationError):
                teacher(x)
                answered.touch()
        return torch.zeros(len(x), 3)

    student(tmp_path, reads(stubborn))
    assert not answered.exists()


def several(_: nn.Module) -> dict[str, Any]:
    public = [nn.Linear(4, 3), nn.Linear(4, 3)]
    stacked, base = torch.func.stack_module_state(public), copy.deepcopy(public[0])  # type: ignore[arg-type]
    one = torch.func.vmap(lambda held, x: torch.func.functional_call(base, held, (x,)), (0, None))
    return reads(lambda x: one(stacked, x).mean(0))


@pytest.mark.parametrize(
    "place", ["closure", "transform", "collate_fn", "data set in another process", "callback", "several"]
)
def test_a_public_teacher_is_nobodys(place: str, teacher: nn.Module, tmp_path: Path) -> None:
    student(tmp_path, (PLACES | {"several": several})[place](Classifier()))


@pytest.mark.costly
def test_a_run_may_ask_itself_and_its_copies_and_others_once_it_is_over(teacher: nn.Module, tmp_path: Path) -> None:
    asked = []

    class Evaluates(L.Callback):
        def on_train_epoch_end(self, trainer: Any, private: Any) -> None:
            asked.append([each(rows().tensors[0]) for each in (private.module, copy.deepcopy(private.module))])

        def on_train_end(self, trainer: Any, private: Any) -> None:
            asked.append(teacher(rows().tensors[0]))

    fit(tmp_path / "own", made(), callbacks=[PrivacyAccountant(), PrivacyCard(), Evaluates()], max_steps=6)
    assert len(asked) == 3 and (tmp_path / "own" / "privacy_card.json").exists()
    fails = L.Callback()
    fails.on_exception = lambda *_: 1 / 0  # type: ignore[assignment]
    for number, others in enumerate([[], [fails]]):
        with pytest.raises((LitDpretError, ZeroDivisionError)):
            student(tmp_path / f"refused{number}", PLACES["list"](teacher) | {"callbacks": others})
        assert teacher(rows().tensors[0]).shape == (60, 3)  # nothing of a fit is left


@pytest.mark.costly
def test_a_teacher_may_be_asked_by_a_run_that_counts_it(teaching: tuple[nn.Module, Path], tmp_path: Path) -> None:
    teacher, folder = teaching
    student(tmp_path, PLACES["list"](teacher) | {"callbacks": [PrivacyAccountant(init_from=folder)]})


@pytest.fixture
def trained() -> Classifier:
    """Return a model that an optimizer of this process trained without privacy, on data that nobody named."""
    return step_of(Classifier())


def step_of(plain: Classifier) -> Classifier:
    lr = random.uniform(0.1, 0.2)  # otherwise another test may have left the same values
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    row_loss(plain, rows()[:]).mean().backward()
    optimizer.step()
    return plain


def before_another_step(each: Classifier) -> Classifier:
    best = copy.deepcopy(each)
    step_of(each)
    return best


@pytest.mark.parametrize(
    ("place", "copies"),
    [
        *(
            (place, lambda each: each)
            for place in ("closure", "list", "transform", "collate_fn", "data set", "callback")
        ),
        ("list", copy.deepcopy),
        ("callback", copy.deepcopy),
        ("list", before_another_step),
    ],
)
def test_a_teacher_that_was_trained_without_privacy_is_refused(
    place: str, copies: Any, trained: Classifier, tmp_path: Path
) -> None:
    refuses(tmp_path, PLACES[place](copies(trained)))


@pytest.mark.parametrize("place", ["list", "collate_fn", "data set"])
def test_a_teacher_that_was_trained_on_public_data_is_declared(place: str, trained: Classifier, tmp_path: Path) -> None:
    how = PLACES[place](trained)
    student(tmp_path, how | {"callbacks": [PrivacyAccountant(init_from_is_public=True)]})
    assert "init_from_is_public" in (tmp_path / "privacy_card.json").read_text(encoding="utf-8")


class Probes(L.Callback):
    """Trains a classifier of its own on public rows after each step, and asks it, copies, and parts of the model."""

    def on_fit_start(self, trainer: Any, private: Any) -> None:
        self.probe = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer: Any, private: Any, *_: Any) -> None:
        net, public = private.module.net, torch.ones(2, 4)
        with torch.enable_grad():
            self.probe(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        for each in (net[:2], copy.deepcopy(net), nn.Sequential(net, copy.deepcopy(self.probe))):
            each(public)


def part_of_itself(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model.net[2:](model.net[:2](batch[0])), batch[1], reduction="none")


@pytest.mark.costly
def test_parts_and_copies_of_what_is_trained_meanwhile_may_be_asked(tmp_path: Path) -> None:
    fit(tmp_path, made(per_row_loss=part_of_itself), max_steps=6, callbacks=[Probes()])
