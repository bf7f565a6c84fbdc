"""The accountant's promises, each as a run that tries to break it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit, records, weights
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson
from lit_dpret.privacy.ledger.run_ledger import charged_releases, noise_keys, read_keys
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler


def spent(folder: Path, delta: float = 1 / 400) -> float:
    return epsilon(charged_releases(records(folder)), delta=delta, neighbours="zero_out")


def seeded(tmp_path: Path, **settings: Any) -> Regression:
    L.seed_everything(0, verbose=False)
    return Regression(privacy=dp(tmp_path, **settings))


def killed_run(tmp_path: Path, at: int, data: Any = None, *, reserve: int = 0, **settings: Any) -> Path:
    folder = tmp_path / "run"
    accountant = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume_reserve=reserve)
    with pytest.raises(Killed):
        fit(folder, seeded(tmp_path, **settings), data, accountant=accountant, extra=[KillAt(at)])
    accountant.ledger.close()
    return folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its fourth step, and its secret."""
    folder = tmp_path_factory.mktemp("killed")
    killed_run(folder, 3)
    return folder


@pytest.fixture
def killed(made_once: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)) / "run"


def begin_with_the_streams_of(run: Path, other: Path) -> None:
    """Give ``other`` the first ledger record of ``run``: the same run id, and nothing released yet."""
    other.mkdir()
    first = (run / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (other / "privacy_ledger.jsonl").write_text(first + "\n", encoding="utf-8")


def test_a_run_spends_at_most_its_budget_and_logs_what_the_ledger_recomputes(tmp_path: Path) -> None:
    runner = fit(tmp_path / "run", seeded(tmp_path))
    value = spent(tmp_path / "run")
    assert 2.9 < value <= 3.0
    assert runner.callback_metrics["privacy/eps_spent"].item() == pytest.approx(value, rel=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["privacy/eps_spent"] for line in lines if "privacy/eps_spent" in line][-1] == pytest.approx(value)
    assert not [line for line in lines if "train/loss" in line], "the loss on private rows is a release"
    assert len(noise_keys(records(tmp_path / "run"))) == 6


def test_min_epochs_cannot_push_a_run_past_its_budget(tmp_path: Path) -> None:
    module = seeded(tmp_path)
    accountant = PrivacyAccountant(eps_log_points=1, run_dir=tmp_path / "run")
    with pytest.raises((BudgetExceededError, ConfigurationError)):
        # 6 steps are planned and calibrated for; min_epochs asks Lightning to go on.
        fit(tmp_path / "run", module, Numbers(sampling="truncated_poisson"), accountant=accountant,
            max_epochs=100, min_epochs=100, extra=[StretchTo(1000)])  # fmt: skip
    assert spent(tmp_path / "run") <= 3.0
    assert accountant.epsilon() <= 3.0


class StretchTo(Callback):
    """Move the end of the run after the plan was made."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.fit_loop.epoch_loop.max_steps = self.steps


@pytest.mark.costly
@pytest.mark.parametrize(("killed_at", "repeated"), [(1, 1), (4, 2)])  # the last checkpoint is at step 0, and 2
def test_a_killed_run_resumes_to_the_weights_and_epsilon_of_an_uninterrupted_one(
    tmp_path: Path, killed_at: int, repeated: int
) -> None:
    folder = killed_run(tmp_path, killed_at)
    resumed = seeded(tmp_path)
    fit(folder, resumed, resume=True)
    whole = seeded(tmp_path)
    begin_with_the_streams_of(folder, tmp_path / "whole")
    fit(tmp_path / "whole", whole, resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert spent(folder) == spent(tmp_path / "whole")
    read_keys(records(folder))
    replays = [record for record in records(folder) if record["kind"] == "replay"]
    assert len(replays) == repeated, "steps after the last checkpoint are repeated, not paid for again"


@pytest.mark.costly
@pytest.mark.parametrize("replay", ["never", "auto"])
def test_steps_that_were_made_again_are_charged_and_the_card_says_what_that_takes_on_trust(
    replay: str, tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", {"noise_multiplier": 2.0}
    fit(folder, seeded(tmp_path, **settings), steps=6, save_every=4)  # none is saved at the end
    once = spent(folder)
    again = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume=True, replay=replay)
    card = PrivacyCard(run_dir=folder)
    fit(folder, seeded(tmp_path, **settings), accountant=again, resume=True, extra=[card])
    told = [each for each in read_card(folder)["assumptions"] if "earlier checkpoint" in each["text"]]
    if replay == "auto":  # the same release once more
        assert not told and spent(folder) == once and len(noise_keys(records(folder))) == 6
    else:
        assert spent(folder) > once and len(noise_keys(records(folder))) == 8
        assert [each["holds"] for each in told] == ["unverified"] and "2 steps" in told[0]["text"]


@pytest.mark.costly
@pytest.mark.parametrize("made", [0, 3])
def test_a_run_that_goes_on_with_another_secret_warns_and_its_card_assumes_that_its_data_are_the_same(
    made: int, tmp_path: Path
) -> None:
    folder = killed_run(tmp_path, 3, noise_multiplier=2.0)
    if made == 0:  # killed before its first step
        path = folder / "privacy_ledger.jsonl"
        path.write_text(path.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
        for checkpoint in folder.rglob("*.ckpt"):
            checkpoint.unlink()
    (tmp_path / "secret").unlink()
    card = PrivacyCard(run_dir=folder)
    with pytest.warns(UserWarning, match=r"privacy\.secret_file"):
        fit(folder, seeded(tmp_path, noise_multiplier=2.0), resume=True, extra=[card])
    told = [
        one["holds"] for one in read_card(folder)["assumptions"] if "in at most one query of the data" in one["text"]
    ]
    assert told == (["unverified"] if made else [])
    assert {attempt for attempt, _ in noise_keys(records(folder))} == ({0, 1} if made else {1})
    assert verify_card(read_card(folder), folder / "privacy_ledger.jsonl") == []


@pytest.mark.costly
def test_a_run_that_changed_its_secret_stays_in_its_new_attempt(tmp_path: Path) -> None:
    folder = killed_run(tmp_path, 3, noise_multiplier=2.0)
    (tmp_path / "secret").unlink()
    idle = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume=True)
    with pytest.raises(Killed):  # after the new secret was noted, before anything was released under it
        fit(folder, seeded(tmp_path, noise_multiplier=2.0), accountant=idle, resume=True, extra=[KillFirst()])
    idle.ledger.close()
    fit(folder, seeded(tmp_path, noise_multiplier=2.0), resume=True)
    assert {attempt for attempt, _ in noise_keys(records(folder))} == {0, 1}
    assert not [r for r in records(folder) if r.get("name") == "replay_failed"]


class KillFirst(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        raise Killed


@pytest.mark.costly
def test_a_shuffled_epoch_is_paid_for_whole_once_and_again_by_a_fresh_attempt(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"noise_multiplier": None}
    folder = killed_run(tmp_path, 3, Numbers(sampling="shuffle"), **settings)
    assert 2.9 < spent(folder) <= 3.0, "three of an epoch's ten steps cost the epoch"
    again = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume=True, replay="never")
    with pytest.raises(BudgetExceededError, match="already spent"):
        fit(folder, seeded(tmp_path, **settings), Numbers(sampling="shuffle"), accountant=again, resume=True)
    assert spent(folder) <= 3.0 and len(noise_keys(records(folder))) == 3
    fit(folder, seeded(tmp_path, **settings), Numbers(sampling="shuffle"), resume=True, steps=6)
    assert spent(folder) <= 3.0 and len(noise_keys(records(folder))) == 6


@pytest.mark.costly
def test_a_step_that_does_not_repeat_bit_by_bit_is_refused_and_then_charged(killed: Path, tmp_path: Path) -> None:
    disturbed = seeded(tmp_path)
    original = disturbed.per_row_loss
    disturbed.per_row_loss = lambda rows: original(rows) * 1.0001  # type: ignore[method-assign]
    with pytest.raises(ResumeError, match=r"bit by bit .*another clipped sum"):
        fit(killed, disturbed, resume=True)
    with pytest.raises(BudgetExceededError):
        fit(killed, seeded(tmp_path), resume=True)
    assert {attempt for attempt, _ in noise_keys(records(killed))} == {0, 1}


def test_a_resume_with_another_mechanism_or_data_set_is_refused(killed: Path, tmp_path: Path) -> None:
    for change in (
        {"noise_multiplier": 5.0}, {"max_grad_norm": 2.0}, {"clip_groups": "per_layer"}, {"engine": "ghost_bf16"},
        {"eps": 4.0}, {"secure_rng": True},
    ):  # fmt: skip
        with pytest.raises(ResumeError, match=next(iter(change))):
            fit(killed, seeded(tmp_path, **change), resume=True)
    with pytest.raises(ResumeError, match="data set"):
        fit(killed, seeded(tmp_path), Numbers(content="b"), resume=True)


CALIBRATED_QUICKLY: dict[str, Any] = {"noise_multiplier": None, "accountant": "rdp"}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed run whose noise was calibrated, and its secret."""
    folder = tmp_path_factory.mktemp("calibrated")
    killed_run(folder, 3, Numbers(sampling="poisson"), **CALIBRATED_QUICKLY)
    return folder


@pytest.mark.costly
@pytest.mark.parametrize(
    ("module", "data", "trainer", "named"),
    [
        ({}, {}, {"max_steps": 8}, r"trainer\.max_steps"),
        ({}, {"expected_batch_size": 50}, {}, "expected_batch_size"),
        ({}, {"size": 240}, {}, "number of units"),
        ({"delta": 1e-4}, {}, {}, "delta"),
        ({"eps": 2.0}, {}, {"max_steps": 4}, "eps"),
    ],
)
def test_a_resume_names_the_setting_that_was_changed_and_not_the_noise_that_follows_from_it(
    tmp_path: Path, calibrated: Path, module: dict[str, Any], data: dict[str, Any], trainer: dict[str, Any], named: str
) -> None:
    folder = shutil.copytree(calibrated, tmp_path, dirs_exist_ok=True) / "run"
    with pytest.raises(ResumeError, match=named) as found:
        mode = seeded(tmp_path, **CALIBRATED_QUICKLY, **module)
        fit(folder, mode, Numbers(sampling="poisson", **data), resume=True, **trainer)
    assert "noise_multiplier" not in str(found.value)


@pytest.mark.costly
def test_a_run_without_budget_for_its_last_steps_is_finished_with_those_that_it_made(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"noise_multiplier": None}  # whoever calibrates it to fewer steps gets another one
    folder = killed_run(tmp_path, 3, **settings)
    accountant = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume=True, replay="never")
    with pytest.raises(BudgetExceededError, match=r"trainer\.max_steps=") as found:
        fit(folder, seeded(tmp_path, **settings), accountant=accountant, resume=True, save_every=100)
    made_steps = int(re.search(r"max_steps=(\d+)", str(found.value))[1])  # type: ignore[index]
    keys = noise_keys(records(folder))
    assert made_steps == 5 and not (folder / "model").exists()
    resumed = seeded(tmp_path, **settings)
    accountant = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume=True, replay="never")
    extra = [PrivacyCard(run_dir=folder)]
    fit(folder, resumed, accountant=accountant, resume=True, extra=extra, steps=made_steps)
    assert noise_keys(records(folder)) == keys, "nothing more is paid"
    saved = torch.load(folder / "model" / "weights.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in resumed.state_dict().items())
    card = read_card(folder)
    assert verify_card(card, folder / "privacy_ledger.jsonl", folder=folder / "model") == []
    claim, planned = card["claim"], records(folder)[0]["plan"]["budget"]["eps"]
    assert spent(folder) <= claim["epsilon"] <= planned
    assert records(folder)[-1]["kind"] == "end" and records(folder)[-1]["steps"] == made_steps


@pytest.mark.costly
def test_a_resume_with_fewer_steps_claims_those_that_were_planned(killed: Path, tmp_path: Path) -> None:
    fit(killed, seeded(tmp_path), resume=True, extra=[PrivacyCard(run_dir=killed)], steps=4)
    assert len(noise_keys(records(killed))) == 4
    whole = fit(tmp_path / "whole", seeded(tmp_path), extra=[PrivacyCard(run_dir=tmp_path / "whole")])
    assert whole.global_step == 6
    assert read_card(killed)["claim"]["epsilon"] == pytest.approx(read_card(tmp_path / "whole")["claim"]["epsilon"])


@pytest.mark.costly
def test_a_mode_that_says_that_it_adds_less_noise_is_charged_for_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, privatize = KeyedStream.normal, DPSGD.privatize

    def weaker(self: Any, *given: Any, **key: Any) -> Any:
        return replace(privatize(self, *given, **key), noise_std=0.7 * self._plan.noise_std)

    monkeypatch.setattr(KeyedStream, "normal", lambda *a, **k: honest(*a, **k) * 0.7)
    monkeypatch.setattr(DPSGD, "privatize", weaker)
    with pytest.raises(BudgetExceededError):
        fit(tmp_path / "run", seeded(tmp_path))
    assert 3.0 < spent(tmp_path / "run") < float("inf")


@pytest.mark.costly
def test_a_sampler_built_for_another_law_raises_epsilon(tmp_path: Path) -> None:
    class Greedy(PrivacyAccountant):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            self.sampler.law = Poisson(sample_rate=0.9)

    with pytest.raises(BudgetExceededError):
        fit(tmp_path / "run", seeded(tmp_path), accountant=Greedy(eps_log_points=1, run_dir=tmp_path / "run"))
    assert spent(tmp_path / "run") > 3.0


def test_a_sampler_that_draws_more_than_it_says_is_noticed_and_charged(tmp_path: Path) -> None:
    class Liar(PrivacyAccountant):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            self.sampler.draw = lambda step: np.arange(180)  # type: ignore[method-assign]

    liar = Liar(eps_log_points=1, run_dir=tmp_path / "run")
    honest_cost = epsilon([GaussianRelease(noise_multiplier=2.0, law=Poisson(sample_rate=0.1))], delta=1 / 400,
                          neighbours="zero_out")  # fmt: skip
    with pytest.raises(LedgerError, match=r"draws 0\.\d+ of the units per step, but the plan says 0\.1"):
        fit(tmp_path / "run", seeded(tmp_path, noise_multiplier=2.0), Numbers(sampling="poisson"), accountant=liar)
    assert spent(tmp_path / "run") > 2 * honest_cost, "the step that was made before it was noticed is charged in full"


def test_a_run_is_not_ended_by_the_noised_share_of_clipped_units(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="EarlyStopping"):
        fit(tmp_path / "run", seeded(tmp_path), extra=[EarlyStopping(monitor="privacy/clip_fraction")])


class SeesItsWeights(Callback):
    """Lets a number out that is computed from the released weights alone, as a metric of public queries is."""

    public_metrics = ("val/spread",)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        pl_module.log("val/spread", torch.tensor(0.0))


@pytest.mark.costly
def test_a_run_that_a_released_number_stopped_claims_the_epsilon_of_its_plan(tmp_path: Path) -> None:
    """How many steps it made is then an outcome of the mechanism, and no number that was fixed before."""
    stop = EarlyStopping(monitor="val/spread", patience=1, check_on_train_epoch_end=True)
    for name, extra in (("whole", []), ("stopped", [SeesItsWeights(), stop])):
        card = PrivacyCard(run_dir=tmp_path / name)
        fit(tmp_path / name, seeded(tmp_path, noise_multiplier=2.0, eps=50.0), Numbers(sampling="full_batch"), steps=12,
            extra=[*extra, card])  # fmt: skip
    whole, stopped = (read_card(tmp_path / name) for name in ("whole", "stopped"))
    assert stopped["mechanism"]["steps_done"] == 2 and stopped["mechanism"]["steps_counted"] == 12
    assert stopped["claim"]["epsilon"] == whole["claim"]["epsilon"] > 1.5 * spent(tmp_path / "stopped")
    assert stopped["claim"]["curve"] == whole["claim"]["curve"]
    assert verify_card(stopped, tmp_path / "stopped" / "privacy_ledger.jsonl") == []


def test_a_checkpoint_may_be_chosen_by_what_no_data_decide(tmp_path: Path) -> None:
    by = ["privacy/eps_spent", "privacy/delta", "step", "epoch"]
    settings = {"mode": "max", "every_n_train_steps": 1, "filename": "best"}
    best = [ModelCheckpoint(dirpath=tmp_path / name, monitor=name, **settings) for name in by]
    fit(tmp_path / "run", seeded(tmp_path), steps=2, extra=best)
    assert all((tmp_path / name / "best.ckpt").is_file() for name in by) and spent(tmp_path / "run") > 0


class TellsItsLoss(Regression):
    """Logs a number of private rows under a name by which a checkpoint may be chosen."""

    name = "step"

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        self.log(self.name, found.detach().mean())
        return found


@pytest.mark.parametrize("name", ["privacy/eps_spent", "epoch", "step", "trainer/global_step"])
def test_a_private_number_under_such_a_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TellsItsLoss, "name", name)
    best = ModelCheckpoint(dirpath=tmp_path / "kept", monitor=name, every_n_train_steps=1)
    with pytest.raises(ConfigurationError) as refused:
        fit(tmp_path / "run", TellsItsLoss(privacy=dp(tmp_path, noise_seed=1)), steps=2, extra=[best])
    assert refused.value.trap == "T25"


@pytest.mark.costly
@pytest.mark.parametrize("sampling", ["poisson", "shuffle", "full_batch"])
def test_every_law_runs_and_stays_in_budget(tmp_path: Path, sampling: str) -> None:
    module = seeded(tmp_path, noise_multiplier=4.0)
    fit(tmp_path / "run", module, Numbers(sampling=sampling, rows_per_unit="all"), steps=4)
    assert spent(tmp_path / "run") <= 3.0


def test_an_empty_draw_takes_its_step_and_is_counted(tmp_path: Path) -> None:
    data = Numbers(sampling="poisson", expected_batch_size=None, sample_rate=0.002)
    module = seeded(tmp_path)
    before = weights(module)
    fit(tmp_path / "run", module, data, steps=4)
    assert len(noise_keys(records(tmp_path / "run"))) == 4
    assert not torch.equal(weights(module), before)


@pytest.mark.costly
def test_no_privacy_has_infinite_epsilon_and_logs_its_loss(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    runner = fit(tmp_path / "run", Regression(privacy=NoPrivacy(), dropout=0.0), steps=60)
    assert spent(tmp_path / "run") == float("inf")
    assert runner.callback_metrics["train/loss"] < 0.5


def test_the_secret_reaches_no_file_of_the_run(tmp_path: Path) -> None:
    fit(tmp_path / "run", seeded(tmp_path))
    secret = (tmp_path / "secret").read_bytes()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert secret not in content and secret.hex().encode() not in content, path


@pytest.mark.costly
def test_a_copied_run_folder_never_adds_the_same_noise_to_two_sums(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "copy")
    drawn: list[dict[tuple[Any, ...], torch.Tensor]] = []
    honest = KeyedStream.normal
    for name, dropout in (("run", 0.1), ("copy", 0.5)):
        noise: dict[tuple[Any, ...], torch.Tensor] = {}

        def watched(stream: Any, shape: Any, noise: Any = noise, **key: Any) -> torch.Tensor:
            made = honest(stream, shape, **key)
            noise[key["attempt"], key["step"], key["parameter"]] = made.clone()
            return made

        L.seed_everything(0, verbose=False)
        module = Regression(privacy=dp(tmp_path), dropout=dropout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyedStream, "normal", watched)
            try:
                fit(tmp_path / name, module, resume=True)
            except ResumeError:
                L.seed_everything(0, verbose=False)
                with pytest.raises(BudgetExceededError):
                    fit(tmp_path / name, Regression(privacy=dp(tmp_path), dropout=dropout), resume=True)
        drawn.append(noise)
    shared = [key for key in drawn[0] if key in drawn[1] and key[1] >= 3]
    assert not [key for key in shared if torch.equal(drawn[0][key], drawn[1][key])]


@pytest.mark.costly
@pytest.mark.parametrize("sampling", ["poisson", "truncated_poisson"])
def test_a_fresh_attempt_tosses_fresh_coins_and_goes_on_at_the_right_step(tmp_path: Path, sampling: str) -> None:
    data = Numbers(sampling=sampling)
    folder = killed_run(tmp_path, 3, data, noise_multiplier=2.0)
    again = PrivacyAccountant(eps_log_points=1, run_dir=folder, resume=True, replay="never")
    drawn: list[tuple[int, int]] = []
    honest = PrivateBatchSampler.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PrivateBatchSampler, "draw", lambda self, step: drawn.append((self.attempt, step)) or honest(self, step)
        )
        fit(folder, seeded(tmp_path, noise_multiplier=2.0), data, accountant=again, resume=True)
    assert drawn[:4] == [(1, step) for step in range(2, 6)]  # a loader without a length fetches one batch more
    assert noise_keys(records(folder)) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3), (1, 4), (1, 5)]


def test_a_checkpoint_that_is_newer_than_the_ledger_is_refused(tmp_path: Path) -> None:
    folder = killed_run(tmp_path, 4)
    ledger = folder / "privacy_ledger.jsonl"
    ledger.write_text("".join(ledger.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    with pytest.raises(ResumeError, match="older than the checkpoint"):
        fit(folder, seeded(tmp_path), resume=True)


def test_a_card_before_the_accountant_is_refused_before_a_step(tmp_path: Path) -> None:
    """The ledger would go on after the card that names its last record."""
    callbacks = [PrivacyCard(run_dir=tmp_path), PrivacyAccountant(run_dir=tmp_path)]
    with pytest.raises(ConfigurationError, match="PrivacyAccountant"):
        fit(tmp_path, seeded(tmp_path), callbacks=callbacks)
    assert not list(tmp_path.glob("privacy_card.*"))
