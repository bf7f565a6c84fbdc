"""A private run that begins with weights which it names: whose they are, what it counts, and what its card says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from stand_ins import Numbers, Texts, dp, fit
from start_runs import Kept, begin, checkpoint, numbers, private, refused, the_same, trained_by
from tiny_tasks import write_log, write_synthetic
from torch import nn

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.callbacks.origins import assumed_weights
from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import LitDpretError
from lit_dpret.privacy.modes import NoPrivacy, SyntheticData


@pytest.mark.costly
def test_a_start_that_is_named_counts_what_trained_it(tmp_path: Path) -> None:
    module = trained_by("dp", tmp_path / "first")
    counting = PrivacyAccountant(run_dir=tmp_path / "second", init_from=tmp_path / "first", eps_log_points=1)
    begin(tmp_path, module, accountant=counting, extra=[PrivacyCard(run_dir=tmp_path / "second")])
    one, two = (read_card(tmp_path / name)["claim"]["epsilon"] for name in ("first", "second"))
    assert two > one
    third = PrivacyAccountant(run_dir=tmp_path / "third", init_from=tmp_path / "second", eps_log_points=1)
    fit(tmp_path / "third", module, numbers(), steps=2, accountant=third)
    refused(tmp_path / "elsewhere", module)


def trained_further(module: nn.Module) -> None:
    optimizer = torch.optim.Adam(module.parameters())
    module.net(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    module.zero_grad()


def copied_over(module: nn.Module) -> None:
    with torch.no_grad():
        module.net[0].weight.mul_(1.5)


@pytest.mark.costly
@pytest.mark.parametrize("changed", [trained_further, copied_over])
def test_a_start_that_is_named_counts_nothing_that_came_after_it(
    changed: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    module = trained_by("dp", tmp_path / "first")
    changed(module)
    assert "init_from" in str(refused(tmp_path, module, accountant=PrivacyAccountant(
        run_dir=tmp_path / "second", init_from=tmp_path / "first", eps_log_points=1
    )))  # fmt: skip
    for path in checkpoint(tmp_path / "first").parent.iterdir():
        path.unlink()
    with pytest.raises(LitDpretError) as raised:  # and so does a resume from the start
        fit(tmp_path / "first", module, numbers(), steps=6, resume=True)
    assert raised.value.trap == "T30"


class Tables(Kept):
    """It keeps tables that are saved with it: random ones, and counts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("table", torch.randn(8, 4))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))
        self.register_buffer("pairs", torch.eye(4).to_sparse())


@pytest.mark.parametrize("name", ["table", "counts", "pairs"])
def test_a_buffer_that_was_set_after_the_module_was_built_is_refused(name: str, tmp_path: Path) -> None:
    begin(tmp_path / "built", Tables(privacy=dp(tmp_path, noise_multiplier=4.0)))
    module = Tables(privacy=dp(tmp_path, noise_multiplier=4.0))
    if name == "pairs":
        module.pairs = torch.cov(torch.randn(4, 9)).to_sparse()
    else:
        module.get_buffer(name)[2] += 3
    assert name in str(refused(tmp_path, module))


class Extra(Kept):
    """It saves a number beside its tensors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.shift = 0.0

    def get_extra_state(self) -> Any:
        return {"shift": self.shift}

    def set_extra_state(self, state: Any) -> None:
        self.shift = state["shift"]


def test_an_extra_state_that_was_set_after_the_module_was_built_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "built", Extra(privacy=dp(tmp_path, noise_multiplier=4.0)))
    module = Extra(privacy=dp(tmp_path, noise_multiplier=4.0))
    module.shift = 1.5
    assert "_extra_state" in str(refused(tmp_path, module))


def test_a_start_that_is_declared_public_is_no_declaration_for_what_came_after_it(tmp_path: Path) -> None:
    module = private(tmp_path)
    module.save_model(tmp_path / "public")
    trained_further(module)
    refused(tmp_path, module, accountant=PrivacyAccountant(
        run_dir=tmp_path / "second", init_from=tmp_path / "public", init_from_is_public=True, eps_log_points=1
    ))  # fmt: skip


@pytest.mark.costly
def test_all_that_a_run_saved_may_be_loaded_to_start_from_it(
    tmp_path: Path, another_process: Callable[[], None]
) -> None:
    first = Tables(privacy=dp(tmp_path, noise_multiplier=4.0))
    fit(tmp_path / "first", first, numbers(), steps=4, extra=[PrivacyCard(run_dir=tmp_path / "first")])
    another_process()
    given = Tables.load_from_checkpoint(checkpoint(tmp_path / "first"), privacy=dp(tmp_path, noise_multiplier=4.0))
    begin(tmp_path, given, accountant=PrivacyAccountant(
        run_dir=tmp_path / "second", init_from=tmp_path / "first", eps_log_points=1
    ))  # fmt: skip


class Copied(Kept):
    """Weights read from a file in the constructor, of which nothing tells who trained them."""

    def __init__(self, *, file: Path, privacy: Any, changed: Callable[[nn.Module], Any] = lambda module: None) -> None:
        super().__init__(privacy=privacy)
        saved = torch.load(file, weights_only=True)["state_dict"]
        self.net.load_state_dict({name.removeprefix("net."): each for name, each in saved.items()})
        changed(self)


def as_loaded(module: nn.Module) -> None:
    pass


def with_a_new_head(module: nn.Module) -> None:
    module.net[0].requires_grad_(False)
    module.net[3].reset_parameters()


def wider(module: nn.Module) -> None:
    module.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.costly
@pytest.mark.parametrize("changed", [as_loaded, nn.Module.bfloat16, nn.Module.half, with_a_new_head, wider])
def test_weights_that_no_file_of_the_named_run_holds_are_assumed_to_be_of_it_and_so_it_says(
    changed: Callable[[nn.Module], Any], tmp_path: Path, another_process: Callable[[], None]
) -> None:
    for name in ("named", "other"):
        trained_by("dp", tmp_path / name)
    another_process()
    counting = PrivacyAccountant(run_dir=tmp_path / "second", init_from=tmp_path / "named", eps_log_points=1)
    of_named, of_other = (
        Copied(file=checkpoint(tmp_path / name), privacy=dp(tmp_path, noise_multiplier=4.0), changed=changed)
        for name in ("named", "other")
    )
    assert not assumed_weights(of_named, counting)
    if changed is wider:  # a wider layer may be made of that run's
        assert not assumed_weights(of_other, counting)
    elif changed is as_loaded:
        with pytest.warns(UserWarning, match="init_from"):
            begin(tmp_path, of_other, accountant=counting, extra=[PrivacyCard(run_dir=tmp_path / "second")])
        stated = [one for one in read_card(tmp_path / "second")["assumptions"] if "Copied began with" in one["text"]]
        assert [one["holds"] for one in stated] == ["unverified"]
    else:
        with pytest.warns(UserWarning, match="init_from"):
            assert assumed_weights(of_other, counting)


def test_no_privacy_may_go_on_from_anything(tmp_path: Path) -> None:
    module = trained_by("dp", tmp_path / "first")
    module.privacy = NoPrivacy()
    begin(tmp_path, module)


def test_runs_on_data_of_one_release_share_its_claim_and_no_other(tmp_path: Path) -> None:
    log = PairsDataModule(folder=write_log(tmp_path / "log"))
    card = write_synthetic(tmp_path / "synthetic", log) / "privacy_card.json"

    def data() -> Numbers:
        made = numbers()
        made.privacy_card_path = card  # type: ignore[attr-defined]
        return made

    module = Kept(privacy=SyntheticData())
    fit(tmp_path / "first", module, data(), steps=4)
    fit(tmp_path / "first", Kept(privacy=SyntheticData()), data(), steps=4, resume=True)
    fit(tmp_path / "second", module, data(), steps=2)
    refused(tmp_path / "private", the_same(module, tmp_path))
    other = trained_by("none", tmp_path / "other")
    other.privacy = SyntheticData()
    with pytest.raises(LitDpretError, match="privacy=none"):
        fit(tmp_path / "third", other, data(), steps=2)


def test_a_list_of_the_synthetic_queries_to_train_on_stands_on_the_card(tmp_path: Path) -> None:
    log = PairsDataModule(folder=write_log(tmp_path / "log"))
    folder = write_synthetic(tmp_path / "synthetic", log)
    data = SyntheticDataModule(folder=folder, expected_batch_size=4)
    data.setup("fit")
    listed = tmp_path / "keep.txt"
    listed.write_text("\n".join(dict.fromkeys(row.query_id for row in data.pair_rows("train"))), encoding="utf-8")
    for name, keep in (("all", None), ("listed", listed)):
        data = SyntheticDataModule(folder=folder, keep=keep, expected_batch_size=4)
        run = tmp_path / name
        fit(run, Texts(privacy=SyntheticData()), data, steps=1, extra=[PrivacyCard(run_dir=run)])
        told = [each["holds"] for each in read_card(run)["assumptions"] if "datamodule.keep" in each["text"]]
        assert told == ([] if keep is None else ["unverified"])


class ReadsTheLog(Callback):
    """Could log something of private rows, and end the training by them."""


def test_a_card_of_training_on_synthetic_queries_names_own_code_which_could_read_the_log(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path / "synthetic", PairsDataModule(folder=write_log(tmp_path / "log")))
    for number, own in enumerate(([], [ReadsTheLog()])):
        run = tmp_path / str(number)
        data = SyntheticDataModule(folder=folder, expected_batch_size=4)
        fit(run, Texts(privacy=SyntheticData()), data, steps=1, extra=[PrivacyCard(run_dir=run), *own])
        named = [a["text"].partition(":")[0] for a in read_card(run)["assumptions"] if a["holds"] == "unverified"]
        assert ["Texts", "Texts, ReadsTheLog"][number] in named
