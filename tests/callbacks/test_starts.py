"""Whatever weights a private run begins with have a known origin: fresh, public as declared, or counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from stand_ins import Regression, Units, dp, fit
from start_runs import Kept, begin, checkpoint, numbers, private, refused, the_same, trained_by
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.callbacks.origins import OwnWeights
from lit_dpret.cards.card import read_card
from lit_dpret.errors import LitDpretError
from lit_dpret.privacy.ledger.trained import MARK, TrainedIn
from lit_dpret.privacy.modes import NoPrivacy


class Plain(L.LightningModule):
    """A Lightning module like anybody's, with the parameters of `Regression`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Regression(privacy=NoPrivacy()).net

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Kept]:
    """A run without privacy, for those that change nothing of its module."""
    folder = tmp_path_factory.mktemp("earlier") / "first"
    return folder, trained_by("none", folder)


# -- checkpoints -----------------------------------------------------------------------------


def foreign_checkpoint(tmp_path: Path) -> Path:
    data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    runner = L.Trainer(accelerator="cpu", max_epochs=1, barebones=True, default_root_dir=tmp_path)
    runner.fit(Plain(), data)
    runner.save_checkpoint(tmp_path / "foreign.ckpt")
    return tmp_path / "foreign.ckpt"


def fit_from(folder: Path, module: Any, path: Path, **settings: Any) -> None:
    accountant = PrivacyAccountant(run_dir=folder, eps_log_points=1, **settings)
    runner = L.Trainer(
        accelerator="cpu", devices=1, max_steps=6, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[accountant], default_root_dir=folder,
    )  # fmt: skip
    runner.fit(module, datamodule=numbers(), ckpt_path=str(path), weights_only=True)


@pytest.mark.parametrize("whose", ["plain", "none", "dp", "resumed"])
def test_a_checkpoint_that_is_not_of_the_run_is_refused_and_its_weights_are_not_forgotten(
    whose: str, tmp_path: Path
) -> None:
    resume = whose == "resumed"
    if whose == "plain":
        path = foreign_checkpoint(tmp_path)
    else:
        trained_by("none" if whose == "none" else "dp", tmp_path / "first")
        path = checkpoint(tmp_path / "first")
    module = private(tmp_path)
    if resume:  # a folder of its own, with releases of its own
        fit(tmp_path / "second", private(tmp_path), numbers(), steps=6)
    with pytest.raises(LitDpretError) as raised:
        fit_from(tmp_path / "second", module, path, resume=resume)
    assert raised.value.trap == "T30"
    refused(tmp_path / "again", module)


@pytest.mark.costly
def test_a_resume_of_the_same_run_goes_on_and_so_does_a_second_fit_in_its_folder(tmp_path: Path) -> None:
    for mode in ("dp", "none"):
        folder = tmp_path / mode / "first"
        trained_by(mode, folder)
        module = private(tmp_path / mode) if mode == "dp" else Kept(privacy=NoPrivacy())
        fit(folder, module, numbers(), steps=4, resume=True)
        for path in checkpoint(folder).parent.iterdir():
            path.unlink()
        fit(folder, module, numbers(), steps=4, resume=True)  # from the start, with weights that this ledger counts


# -- objects, copies and files ---------------------------------------------------------------


class Wrapped(Kept):
    """Another class around somebody's layers."""

    def __init__(self, net: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = net  # type: ignore[assignment]


def its_layers_changed(module: Kept, folder: Path) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    return Wrapped(module.net, privacy=dp(folder, noise_multiplier=4.0))


def one_of_its_parameters(module: Kept, folder: Path) -> Any:
    fresh = private(folder)
    with torch.no_grad():
        module.net[0].weight.mul_(1.5)
    fresh.net[0].weight = module.net[0].weight
    return fresh


def its_values(module: Kept, folder: Path) -> Any:
    fresh = private(folder)
    with torch.no_grad():
        for mine, given in zip(fresh.parameters(), module.parameters(), strict=True):
            mine.copy_(given)
    return fresh


CHANGING = (the_same, its_layers_changed, one_of_its_parameters)
WAYS = [the_same, its_layers_changed, one_of_its_parameters, its_values]


@pytest.mark.parametrize(
    ("way", "mode"),
    [*((way, "none") for way in WAYS), (the_same, "dp"), (its_values, "dp")],
    ids=lambda way: getattr(way, "__name__", way),
)
def test_weights_that_were_trained_in_this_process_are_known_again(
    way: Callable[[Kept, Path], Any], mode: str, tmp_path: Path, earlier: tuple[Path, Kept]
) -> None:
    folder, first = earlier
    if mode == "dp" or way in CHANGING:
        folder, first = tmp_path / "first", trained_by(mode, tmp_path / "first")
    error = refused(tmp_path, way(first, tmp_path))
    assert str(folder) in str(error)
    assert ("init_from" in str(error)) == (folder / "privacy_card.json").is_file()


@pytest.mark.parametrize("mode", ["none", "dp"])
def test_files_of_this_package_tell_another_process_who_trained_them(
    mode: str, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    trained_by(mode, tmp_path / "first")
    another_process()
    path, privacy = checkpoint(tmp_path / "first"), dp(tmp_path, noise_multiplier=4.0)
    refused(tmp_path, Kept.load_from_checkpoint(path, privacy=privacy))
    for content in (torch.load(path, weights_only=True)["state_dict"],
                    torch.load(tmp_path / "first" / "model" / "weights.pt", weights_only=True)):  # fmt: skip
        module = private(tmp_path)
        module.load_state_dict(content)
        refused(tmp_path, module)
    Kept.load_from_checkpoint(path).canary_scores(Units(4).rows(1))  # to look at it costs nothing


def layers_with(values: dict[str, Tensor]) -> nn.Sequential:
    """New layers like those of a `Regression`, with these values: nothing but numbers is handed on."""
    net: nn.Sequential = Kept(privacy=NoPrivacy()).net
    net.load_state_dict({name: value.clone() for name, value in values.items()})
    return net


def test_a_part_of_what_was_loaded_from_a_checkpoint_is_known_by_its_values(
    tmp_path: Path, another_process: Callable[[], None]
) -> None:
    trained_by("dp", tmp_path / "first")
    another_process()
    old = Kept.load_from_checkpoint(checkpoint(tmp_path / "first"))
    error = refused(tmp_path, Wrapped(layers_with(old.net.state_dict()), privacy=dp(tmp_path, noise_multiplier=4.0)))
    assert "privacy=dp_sgd" in str(error), "which nobody knows of weights of no known origin"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_values_of_half_the_precision_are_known_again(
    kind: torch.dtype, tmp_path: Path, earlier: tuple[Path, Kept]
) -> None:
    values = {name: value.to(kind) for name, value in earlier[1].net.state_dict().items()}
    for name, part in (("all", values), ("one row", {"bias": values["3.bias"], "weight": values["3.weight"]})):
        given = layers_with(part) if name == "all" else nn.Linear(8, 1)
        given.load_state_dict(part)
        refused(tmp_path / name.replace(" ", ""), Holder([given], privacy=dp(tmp_path, noise_multiplier=4.0)))


def averages(one: Kept, folder: Path) -> Any:
    """What no fingerprint knows: a user's own arithmetic, set after the module was built."""
    fresh = private(folder)
    with torch.no_grad():
        for mine, given in zip(fresh.parameters(), one.parameters(), strict=True):
            mine.lerp_(given, 0.5)
    return fresh


def picked_out(one: Kept, folder: Path) -> Any:
    """As in another process: numbers out of a checkpoint, for one part."""
    content = torch.load(checkpoint(folder / "first"), weights_only=True)["state_dict"]
    fresh = private(folder)
    fresh.net.load_state_dict({name.removeprefix("net."): value for name, value in content.items()})
    return fresh


@pytest.mark.costly
@pytest.mark.parametrize("way", [averages, picked_out])
def test_weights_of_no_known_origin_are_refused_or_declared_on_the_card(
    way: Callable[[Kept, Path], Any], tmp_path: Path, another_process: Callable[[], None]
) -> None:
    first = trained_by("dp", tmp_path / "first")
    another_process()
    error = refused(tmp_path, way(first, tmp_path))
    assert "init_from_is_public" in str(error)
    folder = tmp_path / "declared"
    declaring = PrivacyAccountant(run_dir=folder, init_from_is_public=True, eps_log_points=1)
    cards = [PrivacyCard(run_dir=folder)]
    fit(folder, way(first, tmp_path), numbers(), steps=2, accountant=declaring, extra=cards)
    assert [each for each in declarations(folder) if "set after" in each]
    built = PrivacyAccountant(run_dir=tmp_path / "built", init_from_is_public=True, eps_log_points=1)
    fit(tmp_path / "built", private(tmp_path), numbers(), steps=2, accountant=built,
        extra=[PrivacyCard(run_dir=tmp_path / "built")])  # fmt: skip
    assert not [each for each in declarations(tmp_path / "built") if "set after" in each]


def declarations(folder: Path) -> list[str]:
    found = [each["text"] for each in read_card(folder)["assumptions"] if "init_from_is_public" in each["text"]]
    assert found, "a model that the run asks may be under it"
    return found


def test_values_that_another_module_was_built_with_have_no_known_origin_in_this_one(tmp_path: Path) -> None:
    values = {name: torch.randn_like(value) for name, value in private(tmp_path).net.state_dict().items()}
    Wrapped(layers_with(values), privacy=dp(tmp_path))
    module = private(tmp_path)
    module.net.load_state_dict(values)
    assert "init_from" in str(refused(tmp_path, module))


@pytest.mark.costly
def test_a_copy_or_a_cast_of_a_module_as_it_was_built_goes_on(tmp_path: Path) -> None:
    begin(tmp_path / "copy", copy.deepcopy(private(tmp_path)))
    for kind in (torch.float64, torch.bfloat16):
        begin(tmp_path / str(kind), private(tmp_path).to(kind).float())


# -- weights beside the module tree ----------------------------------------------------------


class Holder(Kept):
    """It keeps something of somebody's, where no optimizer and no state dict sees it."""

    def __init__(self, kept: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.kept = kept


class Buffered(Kept):
    """It keeps a table that is saved with it, and trained by nobody."""

    def __init__(self, table: Tensor, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("table", table)


PLACES: dict[str, Callable[[nn.Sequential], Any]] = {
    "list": lambda net: [net],
    "nested": lambda net: {"teachers": ("first", [net[0]])},
    "object": lambda net: SimpleNamespace(inner=SimpleNamespace(teacher=net)),
    "method": lambda net: net.forward,
    "partial": lambda net: partial(torch.nn.functional.mse_loss, target=net),
    "parameter": lambda net: [net[0].weight],
    "values": lambda net: [net[0].weight.detach().clone()],
    "state dict": lambda net: {name: value.bfloat16() for name, value in net.state_dict().items()},
}


def test_weights_that_a_module_keeps_unregistered_are_known_again(tmp_path: Path, earlier: tuple[Path, Kept]) -> None:
    mode, fresh = dp(tmp_path, noise_multiplier=4.0), Kept(privacy=NoPrivacy()).net
    begin(tmp_path, Holder([place(fresh) for place in PLACES.values()], privacy=mode))
    for name, place in PLACES.items():
        error = refused(tmp_path / f"again in a {name}", Holder(place(earlier[1].net), privacy=mode))
        assert str(earlier[0]) in str(error)


def test_trained_values_in_a_buffer_or_a_frozen_parameter_are_known_again(
    tmp_path: Path, earlier: tuple[Path, Kept]
) -> None:
    mode, weight = dp(tmp_path, noise_multiplier=4.0), earlier[1].net[0].weight
    refused(tmp_path / "buffer", Buffered(weight.detach().clone(), privacy=mode))
    frozen = Kept(privacy=mode)
    frozen.table = nn.Parameter(weight.detach().clone(), requires_grad=False)
    refused(tmp_path / "frozen", frozen)
    begin(tmp_path, Buffered(torch.randn(8, 4), privacy=mode))


class Averaged(Kept):
    """Its teacher is an average of what is trained, made by a hook; in the module tree or beside it."""

    def __init__(self, beside: bool) -> None:
        super().__init__(privacy=NoPrivacy())
        teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.teacher = [teacher] if beside else teacher
        self.public = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        (teacher,) = self.teacher if isinstance(self.teacher, list) else (self.teacher,)
        with torch.no_grad():
            for mine, new in zip(teacher.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(new, 0.5)


@pytest.mark.parametrize("beside", [False, True])
def test_what_hooks_make_of_trained_weights_is_known_again_and_what_stays_as_it_was_is_nobodys(
    beside: bool, tmp_path: Path
) -> None:
    module, mode = Averaged(beside), dp(tmp_path, noise_multiplier=4.0)
    fit(tmp_path / "first", module, numbers(), steps=4)
    (teacher,) = module.teacher if isinstance(module.teacher, list) else (module.teacher,)
    refused(tmp_path / "copied", Wrapped(copy.deepcopy(teacher).requires_grad_(True), privacy=mode))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    refused(tmp_path / "changed", Holder([teacher], privacy=mode))
    begin(tmp_path, Holder([module.public], privacy=mode))


# -- honest runs -----------------------------------------------------------------------------


def test_a_module_that_is_built_anew_is_not_refused_whatever_was_trained_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained_by("none", tmp_path / "first")
    torch.manual_seed(0)  # the same fresh weights: what a run began with is not what it trained
    begin(tmp_path, private(tmp_path))


@pytest.mark.costly
@pytest.mark.parametrize("where", ["here", "in another process"])
def test_what_a_checkpoint_has_as_it_was_built_is_nobodys(
    where: str, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    class Probed(Kept):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.net[0].requires_grad_(False)

    def seeded(privacy: Any) -> Probed:
        torch.manual_seed(0)
        return Probed(privacy=privacy)

    fit(tmp_path / "first", seeded(NoPrivacy()), numbers(), steps=2)
    if where == "in another process":
        another_process()
    Probed.load_from_checkpoint(checkpoint(tmp_path / "first"))  # begun with other random numbers
    begin(tmp_path, seeded(dp(tmp_path, noise_multiplier=4.0)))


def test_two_runs_whose_short_biases_are_equal_after_a_first_step_of_adam_are_not_behind_each_other() -> None:
    def after_a_step(name: str) -> Regression:
        torch.manual_seed(0)
        module = Regression(privacy=NoPrivacy())
        own = OwnWeights(module, TrainedIn(name, "dp_sgd"), None)
        with torch.no_grad():
            module.net[0].bias += 0.05  # one of few patterns that such a step makes of eight values
        own.mark_trained(module)
        own.note_step()
        return module

    after_a_step("first")
    assert vars(after_a_step("second"))[MARK] == {TrainedIn("second", "dp_sgd")}
