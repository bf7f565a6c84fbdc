"""Weights that code of the user's copied after some step of a run are that run's, also out of an average of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from own_modules import Classifier, fit, made
from torch import Tensor, nn

from lit_dpret import PrivacyAccountant
from lit_dpret.errors import ConfigurationError

STEPS, COPIED = 6, 3


class OwnAverage(L.Callback):
    """An average as people write them: new tensors in a dict after each step."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.last:
            now = module.module.state_dict()
            self.shadow = {name: 0.5 * self.shadow.get(name, value) + 0.5 * value for name, value in now.items()}


class Copies(L.Callback):
    """Copies after one step in the middle all that there is."""

    def __init__(self, average: Any) -> None:
        self._average = average

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not batch.last or batch.step != COPIED:
            return
        inside = module.module
        COPIES.update({"module": copy.deepcopy(inside), "state": cloned(inside)})
        if (average := getattr(self._average, "_average_model", None)) is not None:
            COPIES["average"] = copy.deepcopy(average.module.module)
            COPIES["state of the average"] = cloned(average.module.module)
        if isinstance(self._average, OwnAverage):
            COPIES["state of the average"] = {name: value.clone() for name, value in self._average.shadow.items()}


COPIES: dict[str, Any] = {}


def cloned(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(ConfigurationError) as found:
        yield
    assert found.value.trap == "T30"


EMA = partial(EMAWeightAveraging, decay=0.5)


@pytest.fixture(scope="module", params=[EMA])
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    COPIES.clear()
    folder, average = tmp_path_factory.mktemp("run"), request.param()
    # The copier first, so that it sees an average before and after the accountant does.
    fit(folder / "a", made(Classifier()), callbacks=[Copies(average), average], max_steps=STEPS)
    return dict(COPIES)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("copies", "name"),
    [(EMA, name) for name in ("module", "state", "average", "state of the average")]
    + [(WeightAveraging, "average"), (OwnAverage, "state of the average")],
    indirect=["copies"],
)
def test_a_copy_of_any_step_is_not_taken_for_fresh_weights(name: str, copies: dict[str, Any], tmp_path: Path) -> None:
    found, begun = copies[name], Classifier()
    if isinstance(found, nn.Module):
        begun = found
    else:
        begun.load_state_dict(found)
    with refused():
        fit(tmp_path, made(begun), max_steps=2)


@pytest.mark.costly
def test_what_the_run_began_with_and_what_it_never_had_begins_another_run(
    copies: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path / "same", made(Classifier()), max_steps=2)
    other = Classifier()
    other.load_state_dict({name: torch.randn_like(value) for name, value in cloned(other).items()})
    fit(tmp_path / "other", made(other), max_steps=2)


@pytest.mark.costly
def test_weights_that_a_resumed_run_begins_with_are_known_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Early(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            found.setdefault("state", cloned(module.module))

    found: dict[str, Any] = {}
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path / "a", made(), callbacks=[kept])
    for name, store in (("trained._values", {}), ("passed._noted", [])):  # as in a new process
        monkeypatch.setattr(f"lit_dpret.privacy.ledger.{name}", store)
    (path,) = (tmp_path / "kept").glob("*step=4.ckpt")
    fit(tmp_path / "a", made(), ckpt_path=path, callbacks=[PrivacyAccountant(resume=True), Early()])
    begun = Classifier()
    begun.load_state_dict(found["state"])
    with refused():
        fit(tmp_path / "b", made(begun), max_steps=2)
