"""What people do to a module of their own before they give it to ``trainer.fit``."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from own_modules import Classifier, made, row_loss
from own_modules import fit as fit_own
from stand_ins import CALIBRATED, Numbers, Regression, StopAfter, Units, dp, fit, granted
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, ResumeError, UnsupportedModelError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, NoPrivacy


class Keeps(Regression):
    def __init__(self, *, width: int = 3, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()


@pytest.mark.slow
def test_a_module_that_saves_its_hyperparameters_trains_logs_them_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for resume in (False, True):
        module = Keeps(privacy=dp(tmp_path), optimizer=OptimizerSpec(lr=0.01))
        assert dict(module.hparams) == {"width": 3}
        fit(folder, module, Numbers(), resume=resume, logger=CSVLogger(folder, version=f"{resume}"))
    assert "width: 3" in (folder / "lightning_logs" / "False" / "hparams.yaml").read_text(encoding="utf-8")


class Lazy(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("private", [True, False])
def test_a_layer_without_a_shape_is_refused_by_name_and_trains_once_it_has_one(private: bool, tmp_path: Path) -> None:
    mode = dp(tmp_path) if private else NoPrivacy()
    module = Lazy(privacy=mode)
    with pytest.raises(ConfigurationError, match=r"net\.0\.weight"):
        fit(tmp_path / "lazy", module)
    assert not (tmp_path / "lazy" / "privacy_ledger.jsonl").exists()
    module.net(torch.zeros(1, 4))
    fit(tmp_path / "built", module, steps=1)


@pytest.mark.parametrize("private", [True, False])
def test_a_module_inside_torch_compile_is_refused(private: bool, tmp_path: Path) -> None:
    module: Any = torch.compile(Regression(privacy=dp(tmp_path) if private else NoPrivacy()), backend="eager")
    with pytest.raises(ConfigurationError, match=r"torch\.compile"):
        fit(tmp_path / "run", module)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


class ForwardCompiled(Classifier):
    forward = torch.compile(Classifier.forward, backend="eager")


@pytest.mark.costly
@pytest.mark.parametrize("what", ["forward", "loss", "part", "script"])
def test_what_is_compiled_within_a_module_trains(
    what: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    module = ForwardCompiled() if what == "forward" else Classifier()
    if what in ("part", "script"):
        compiled = torch.jit.script(module.net) if what == "script" else torch.compile(module.net, backend="eager")
        module.net = compiled  # type: ignore[assignment]
    loss = torch.compile(row_loss, backend="eager") if what == "loss" else row_loss
    fit_own(tmp_path, made(module, per_row_loss=loss, engine="loop"), max_steps=3)
    assert not [each for each in recwarn if "keeps in" in str(each.message)]
    assert "recompile_limit" not in caplog.text


class Masked(DPSGD):
    name = "masked"
    share: Any = 0.5

    def facts(self) -> dict[str, Any]:
        return {"masked_share": self.share}


@pytest.mark.costly
def test_a_mode_of_ones_own_is_believed_by_the_card_and_its_fact_stands_there_and_is_verified(tmp_path: Path) -> None:
    mode = Masked(eps=3.0, max_grad_norm=1.0, noise_multiplier=CALIBRATED, secret_file=tmp_path / "secret")
    fit(tmp_path / "run", Regression(privacy=mode), extra=[PrivacyCard(run_dir=tmp_path / "run")])
    card = read_card(tmp_path / "run")
    assert [each["holds"] for each in card["assumptions"] if each["text"].startswith("Masked is a ")] == ["unverified"]
    assert card["mechanism"]["mode_facts"] == {"masked_share": 0.5}
    assert "Facts of the mode masked: masked share: 0.5." in card["claim"]["statement"]
    assert not verify_chain(tmp_path / "run").failed
    card["mechanism"]["mode_facts"] = {"masked_share": 0.9}
    card["checksum"] = checksum(card)
    write_card(card, tmp_path / "run")
    assert [one.check for one in verify_chain(tmp_path / "run").failed][:1] == ["numbers"]


@pytest.mark.costly
def test_another_fact_of_a_mode_on_resume_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**more: Any) -> None:
        mode = Masked(eps=3.0, max_grad_norm=1.0, noise_multiplier=CALIBRATED, secret_file=tmp_path / "secret")
        fit(tmp_path / "run", Regression(privacy=mode), **more)

    monkeypatch.setattr(Masked, "share", (0.5, 0.25))  # the ledger gives a list back
    run()
    run(resume=True)
    monkeypatch.setattr(Masked, "share", 0.25)
    with pytest.raises(ResumeError, match=r"mode_facts\.masked_share"):
        run(resume=True)


@pytest.mark.parametrize("value", [{1, 2}, math.nan, torch.ones(2), {(1, 2): 3}])
def test_a_fact_of_a_mode_that_is_no_json_value_is_refused_by_its_name(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masked, "share", value)
    mode = Masked(eps=3.0, max_grad_norm=1.0, noise_multiplier=CALIBRATED, secret_file=tmp_path / "secret")
    with pytest.raises(ConfigurationError, match=r"mode_facts\.masked_share"):
        fit(tmp_path / "run", Regression(privacy=mode))
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


class MadeInSetup(Regression):
    """Standardises by what it finds in the private rows before training."""

    public_metrics: tuple[str, ...] = ()

    def setup(self, stage: str) -> None:
        rows = [row for unit in range(20) for row in Units(20).rows(unit)]
        self.register_buffer("mean", self.collate_rows(rows)["inputs"].mean(0))


class ShiftedInSetup(Regression):
    def setup(self, stage: str) -> None:
        rows = [row for unit in range(20) for row in Units(20).rows(unit)]
        with torch.no_grad():
            self.net[0].bias += self.collate_rows(rows)["inputs"].mean()


class KeepsNoBuffer(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def setup(self, stage: str) -> None:
        self.mean.fill_(2.0)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (MadeInSetup, "32-true"), (MadeInSetup, "bf16-true"), (ShiftedInSetup, "32-true"),
        (ShiftedInSetup, "bf16-true"), (KeepsNoBuffer, "64-true"),
    ],
)  # fmt: skip
def test_what_setup_makes_of_private_rows_is_refused_in_every_precision_saved_or_not(
    kind: type[Regression], precision: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"of {kind.__name__}") as refused:
        fit(tmp_path / "run", kind(privacy=dp(tmp_path)), precision=precision)
    assert refused.value.trap == "T11"


def test_what_setup_makes_and_declares_to_be_public_is_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeInSetup, "public_metrics", ("mean",))
    fit(tmp_path / "run", MadeInSetup(privacy=dp(tmp_path)))


def test_what_is_written_after_the_last_batch_is_refused_in_a_module_of_ones_own(tmp_path: Path) -> None:
    shifts = LambdaCallback(on_train_end=lambda trainer, module: module.net[0].bias.data.add_(1))
    with pytest.raises(UnsupportedModelError, match=r"net\.0\.bias of Regression"):
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), extra=[shifts, PrivacyCard(run_dir=tmp_path / "run")])


class KeepsRows(Regression):
    def __init__(self, rows: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()


@pytest.mark.parametrize("rows", [["a query"] * 100, torch.ones(3), "long" * 200, {"a": {"b": [b"x"]}}])
def test_hyper_parameters_that_hold_data_are_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"KeepsRows\.save_hyperparameters keeps rows") as refused:
        fit(tmp_path / "run", KeepsRows(rows, privacy=dp(tmp_path)))
    assert refused.value.trap == "T25"


@pytest.mark.costly
@pytest.mark.parametrize("private", [True, False])
def test_another_optimizer_on_resume_is_refused_by_its_setting(private: bool, tmp_path: Path) -> None:
    def module(**optimizer: Any) -> Regression:
        mode = dp(tmp_path) if private else NoPrivacy()
        return Regression(privacy=mode, optimizer=OptimizerSpec(**{"name": "adam", "lr": 0.05} | optimizer))

    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path / "run", module(), extra=[StopAfter(4)])
    for setting, value in (("lr", 7.0), ("name", "sgd")):
        with pytest.raises(ResumeError, match=rf"model\.optimizer\.{setting}"):
            fit(tmp_path / "run", module(**{setting: value}), resume=True)


class Sparse(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.table = nn.Embedding(2, 4, sparse=True)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        moved = rows["inputs"] + self.table((rows["inputs"][:, 0] > 0).long())
        return super().per_row_loss(rows | {"inputs": moved})


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop"])
def test_an_embedding_with_sparse_gradients_trains(engine: Any, tmp_path: Path) -> None:
    fit(tmp_path / "run", Sparse(privacy=dp(tmp_path, engine=engine)))


def named_as_trusted(folder: Path) -> str:
    stated = read_card(folder)["assumptions"]
    return next(
        (one["text"].partition(":")[0] for one in stated if "in this code, the loss of a row" in one["text"]), ""
    )


def weighed(*_: Any) -> None:
    pass


def test_the_card_names_code_that_objects_of_this_package_and_of_lightning_were_given(tmp_path: Path) -> None:
    own = [
        LambdaCallback(on_train_batch_end=lambda trainer, *rest: None, on_train_epoch_end=partial(weighed)),
        EMAWeightAveraging(decay=0.9, update_every_n_steps=1),
    ]
    module = Regression(privacy=dp(tmp_path))
    fit(tmp_path / "run", module, extra=[PrivacyCard(run_dir=tmp_path / "run"), *own])
    named = named_as_trusted(tmp_path / "run")
    assert "test_the_card_names_code" in named and "lambda" in named and "weighed" in named and "Averag" not in named


def test_a_fit_without_an_accountant_names_the_callbacks_that_are_missing(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=1, default_root_dir=tmp_path, callbacks=[PrivacyCard()], **quiet)
    with pytest.raises(ConfigurationError, match=r"PrivacyAccountant\(\), PrivacyCard\(\)") as found:
        trainer.fit(Regression(privacy=dp(tmp_path)), datamodule=Numbers())
    assert found.value.trap == "T7"


class KeepsALittle(KeepsRows):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_module_that_says_nothing_of_saving_leaves_its_state_dict_beside_the_card(tmp_path: Path) -> None:
    module = KeepsALittle(["a"], privacy=dp(tmp_path))
    fit(tmp_path / "run", module, extra=[PrivacyCard()])
    fresh = KeepsALittle(["a"], privacy=NoPrivacy())
    fresh.load_state_dict(torch.load(tmp_path / "run" / "model" / "weights.pt", weights_only=True))
    assert all(torch.equal(old, new) for old, new in zip(module.parameters(), fresh.parameters(), strict=True))
    card = read_card(tmp_path / "run")
    assert card["subject"]["sha256"] and not verify_chain(tmp_path / "run").failed
    texts = [one["text"] for one in card["assumptions"] if one["holds"] == "unverified"]
    assert any("KeepsALittle.rows" in text for text in texts), "small hyper-parameters are believed"


# -- optimizers and schedules of a module's own: those that a run cannot follow are refused before i--


def by_a_metric(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss"}}


OPTIMIZERS: dict[str, Any] = {
    "LBFGS": lambda module: torch.optim.LBFGS(module.parameters()),
    "SparseAdam": lambda module: torch.optim.SparseAdam(module.parameters()),
    "two": lambda module: [torch.optim.Adam(module.net[at].parameters()) for at in (0, 3)],
    "none": lambda module: None,
    "ReduceLROnPlateau": by_a_metric,
}


@pytest.mark.parametrize(("name", "private"), [*((name, True) for name in OPTIMIZERS), ("two", False)])
def test_an_optimizer_that_a_run_cannot_follow_is_refused_by_its_setting(
    name: str, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Regression, "configure_optimizers", OPTIMIZERS[name])
    with pytest.raises(ConfigurationError, match="configure_optimizers") as found:
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path) if private else NoPrivacy()))
    assert found.value.trap == ("T25" if name == "ReduceLROnPlateau" else None)
    assert not granted(tmp_path / "run")


class Halving(torch.optim.Adam):
    """Has a step of its own, which calls that of its base."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class Halved(Regression):
    def configure_optimizers(self) -> Any:
        return Halving(self.parameters(), lr=1.0)


class HalvedAndMore(Halved):
    """Makes an update more in the last step, past Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch.rows is not None and batch.step == 2:
            raw: Any = self.optimizers(use_pl_optimizer=False)
            self.per_row_loss(batch.rows).mean().backward()
            raw.step()


@pytest.mark.slow
def test_a_step_that_calls_its_base_is_one_update(tmp_path: Path) -> None:
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # from now on torch runs the hooks in the step of Adam too
    trainer = fit(tmp_path / "run", Halved(privacy=dp(tmp_path)), steps=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**3
    with pytest.raises(ConfigurationError) as found:
        fit(tmp_path / "more", HalvedAndMore(privacy=dp(tmp_path)), steps=3)
    assert found.value.trap == "T7"


# -- what a stranger's mode, callback and DataModule declare ---------------------------------------


class Misspelt(DPSGD):
    guarantee = "approximate_dp"  # type: ignore[assignment]


class Unclaimed(DPSGD):
    guarantee = "none"


@pytest.mark.parametrize("mode", [Misspelt, Unclaimed])
def test_a_mode_whose_guarantee_is_unknown_or_that_plans_without_one_is_refused(mode: Any, tmp_path: Path) -> None:
    given = dp(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"{mode.__name__}.*guarantee"):
        fit(tmp_path / "run", Regression(privacy=mode(eps=given.eps, delta=given.delta)), steps=2)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize("of", ["module", "callback"])
def test_names_of_public_numbers_that_are_one_string_are_refused(of: str, tmp_path: Path) -> None:
    module, callback = Regression(privacy=dp(tmp_path)), L.Callback()
    (module if of == "module" else callback).public_metrics = "steps"
    with pytest.raises(ConfigurationError, match=r"public_metrics='steps'"):
        fit(tmp_path / "run", module, steps=2, extra=[callback])


class OfUsers(Numbers):
    """Its units know no users."""

    def train_units(self) -> Any:
        return _Plain()


class _Plain:
    def __len__(self) -> int:
        return 200

    def rows(self, unit: int) -> list[Any]:
        return [unit]


def test_a_bound_on_units_of_a_user_is_trusted_where_the_data_name_no_user(tmp_path: Path) -> None:
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path, max_units_per_user=3)), OfUsers(), steps=2,
        extra=[PrivacyCard()])  # fmt: skip
    assert read_card(tmp_path / "run")["claim"]["max_units_per_user"] == 3


class Storing(Regression):
    stored_as = ""

    def save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / self.stored_as)


def test_a_card_does_not_list_the_weights_of_another_run(tmp_path: Path) -> None:
    def trained(name: str) -> None:
        counting = [PrivacyAccountant(run_dir=tmp_path / name), PrivacyCard(run_dir=tmp_path / "out")]
        module = Storing(privacy=dp(tmp_path, noise_multiplier=4.0))
        module.stored_as = f"{name}.pt"
        fit(tmp_path / name, module, steps=2, callbacks=counting)

    trained("one")
    with pytest.raises(ConfigurationError, match=r"callbacks\.card\.run_dir"):
        trained("two")
