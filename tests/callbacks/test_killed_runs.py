"""Runs that the operating system kills at random moments, and what is left of them after a resume."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from killed_runs import BUDGET_EXCEEDED, STEPS, Server
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from safetensors.torch import load_file
from stand_ins import KillAt, Killed, Regression, dp, fit, records
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.errors import DataError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.ledger.gate import ReleaseGate
from lit_dpret.privacy.ledger.private_run import PrivateRun
from lit_dpret.privacy.ledger.run_ledger import charged_releases, noise_keys, read_keys
from lit_dpret.privacy.noise import KeyedStream

MOMENTS = {"anywhere": 8, "checkpoint": 5, "step": 4, "ledger": 3}
# Six steps cost epsilon 0.376, eight 0.429, nine 0.454: under `never` two steps may be paid for twice.
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"replay": "auto", "eps": 0.38},
    "never": {"replay": "never", "eps": 0.43, "reserve": 2},
}


def begun(folder: Path) -> bool:
    """Whether the run came so far as to have a ledger, with which alone it goes on."""
    return (folder / "privacy_ledger.jsonl").exists()


def spent(folder: Path) -> float:
    return epsilon(charged_releases(records(folder)), delta=1 / 400, neighbours="zero_out", accountant="rdp")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def random_moments(calls: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Twenty moments, evenly drawn from what an uninterrupted run does; the same ones in every test run."""
    coins = random.Random(7)
    moments = []
    for where, count in MOMENTS.items():
        for _ in range(count):
            nth = coins.randrange(len(calls[where]))
            moments.append({"where": where, "nth": nth, "after": coins.randint(1, calls[where][nth])})
    return moments


def check_draws(path: Path, announced: set[tuple[int, int]], *, repeats: bool) -> None:
    """Hold every draw of noise of a run against its key: secret, run, attempt, step, parameter, shard.

    A key is drawn again only by a bit-identical replay, so with the same salt (the tag of the clipped sum).
    """
    draws = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    salts: dict[tuple[Any, ...], str] = {}
    times: Counter[tuple[Any, ...]] = Counter()
    noise: dict[str, tuple[Any, ...]] = {}
    for *key, salt, made in draws:
        name = tuple(key)
        assert (name[2], name[3]) in announced, "noise was drawn that no ledger announced"
        assert salts.setdefault(name, salt) == salt, f"{name} was drawn for two sums"
        assert noise.setdefault(made, name) == name, f"{name} and {noise[made]} drew the same noise"
        times[name] += 1
    assert repeats or not times or max(times.values()) == 1, "without replay no key is drawn twice"


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["auto", "never"])
def test_a_run_killed_at_twenty_random_moments_goes_on_honestly(server: Server, replay: str, tmp_path: Path) -> None:
    settings = SETTINGS[replay]
    whole = tmp_path / "whole" / "run"
    assert server.run(whole, resume=False, count=True, **settings) == 0
    expected, cost = load_file(whole / "model.safetensors"), spent(whole)
    calls = json.loads((whole / "calls.json").read_text(encoding="utf-8"))
    half_written, unconfirmed = 0, 0
    for number, moment in enumerate(random_moments(calls)):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        shutil.copy2(whole.with_name("secret"), folder.with_name("secret"))  # the same streams as the whole run's
        assert server.run(folder, resume=False, moment=moment, **settings) == -9, moment
        killed = records(folder)  # a torn last line is not read
        half_written += bool(list((folder / "checkpoints").glob(".*.tmp")))
        unconfirmed += bool(killed) and killed[-1]["kind"] == "intent"
        if number % 4 == 0:  # and again, on the way
            again = {"where": "anywhere", "nth": 0, "after": 2000 * (1 + number)}
            assert server.run(folder, resume=begun(folder), moment=again, **settings) in (-9, 0, BUDGET_EXCEEDED)
        status = server.run(folder, resume=begun(folder), **settings)
        known = records(folder)
        read_keys(known)
        check_draws(folder.with_name("run.draws"), set(noise_keys(known)), repeats=replay == "auto")
        launches = [record for record in known if record["kind"] == "plan"]
        assert len(launches) >= (2 if killed else 1), f"{moment}: the ledger does not say that the run was resumed"
        if replay == "auto":
            assert status == 0, moment
            got = load_file(folder / "model.safetensors")
            assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in got), moment
            assert spent(folder) == cost, moment
            assert noise_keys(known) == [(0, step) for step in range(STEPS)]
        else:
            assert status == 0 or (status == BUDGET_EXCEEDED and number % 4 == 0), moment
            assert cost <= spent(folder) <= settings["eps"], moment
    assert half_written >= 2 and unconfirmed >= 2, (
        "no kill hit a checkpoint that was being written, or a step in flight"
    )


# -- a resumed run never adds noise again that it has added before, unless it repeats the very same --


Patch = pytest.MonkeyPatch
Key = tuple[Any, ...]


def noise_of_a_resumed_run(
    folder: Path, replay: str, patch: Patch, *, secure: bool = False
) -> list[tuple[Key, Tensor]]:
    """All noise, with its keys, of a run that is killed after step 3 and resumes from the checkpoint of step 2."""
    drawn: list[tuple[Key, Tensor]] = []
    source = KeyedStream.normal

    def watched(stream: Any, shape: Any, **key: Any) -> Tensor:
        made = source(stream, shape, **key)
        drawn.append(((key["attempt"], key["step"], key["parameter"], key["salt"]), made.clone()))
        return made

    patch.setattr(KeyedStream, "normal", watched)
    for resume in (False, True):
        L.seed_everything(0, verbose=False)
        module = Regression(privacy=dp(folder, noise_multiplier=2.0, secure_rng=secure))
        accountant = PrivacyAccountant(run_dir=folder / "run", resume=resume, replay=replay, eps_log_points=1)
        if resume:
            fit(folder / "run", module, accountant=accountant, resume=True)
            continue
        with pytest.raises(Killed):
            fit(folder / "run", module, accountant=accountant, extra=[KillAt(3)])
        accountant.ledger.close()
    return drawn


def check_that_no_noise_comes_again(drawn: list[tuple[Key, Tensor]]) -> None:
    assert len({key[:2] for key, _ in drawn}) >= 6, "fewer steps than were planned"
    for place, (key, noise) in enumerate(drawn):
        for earlier, before in drawn[:place]:
            if key != earlier and noise.shape == before.shape:
                assert not torch.equal(noise, before), f"the noise of {earlier} came again as {key}"


@pytest.mark.costly
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("replay", ["auto", "never"])
def test_a_resumed_run_never_adds_old_noise_to_a_new_sum(
    replay: str, secure: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    drawn = noise_of_a_resumed_run(tmp_path, replay, monkeypatch, secure=secure)
    check_that_no_noise_comes_again(drawn)
    repeated = {key[:2] for place, (key, _) in enumerate(drawn) if key in [k for k, _ in drawn[:place]]}
    assert repeated == ({(0, 2)} if replay == "auto" else set()), "one step is repeated bit by bit, or none is"


@pytest.mark.costly
def test_a_resume_that_forgets_to_begin_a_new_attempt_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(PrivateRun, "resume_or_begin_attempt", lambda self, step, state: None)
    with pytest.raises(ResumeError, match="its noise must not be used again"):
        noise_of_a_resumed_run(tmp_path, "never", monkeypatch)


def test_a_resume_that_starts_its_sampler_anew_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    begin = ReleaseGate.begin

    def mutant(self: Any, *rest: Any) -> None:
        begin(self, *rest)
        self.sampler.next_step = 0

    monkeypatch.setattr(ReleaseGate, "begin", mutant)
    with pytest.raises(DataError, match="A batch of step 0, attempt 1, arrived, but step 2"):
        noise_of_a_resumed_run(tmp_path, "never", monkeypatch)


# -- in double precision, to which Lightning converts the module after it has loaded the checkpoint --


AVERAGES: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "exponential": lambda: [EMAWeightAveraging()],
}


@pytest.mark.costly
@pytest.mark.parametrize("average", AVERAGES.values(), ids=list(AVERAGES))
def test_a_run_killed_in_double_precision_repeats_its_steps_bit_by_bit(
    average: Callable[[], list[Callback]], tmp_path: Path
) -> None:
    mode = partial(dp, tmp_path, noise_multiplier=4.0, noise_seed=1)
    start = Regression(privacy=mode()).state_dict()

    def run(folder: str, *extra: Callback, resume: bool = False) -> Any:
        module = Regression(privacy=mode())
        module.load_state_dict(start)
        fit(tmp_path / folder, module, resume=resume, extra=[*average(), *extra], precision="64-true", steps=14)
        return torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True)

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", KillAt(13))
    resumed = run("killed", resume=True)
    assert noise_keys(records(tmp_path / "killed")) == [(0, step) for step in range(14)]
    for part in {"state_dict", "current_model_state"} & whole.keys():
        for name, value in whole[part].items():
            assert value.dtype == torch.float64 and value.equal(resumed[part][name]), (part, name)
    assert not whole["state_dict"]["net.0.weight"].float().double().equal(whole["state_dict"]["net.0.weight"])
