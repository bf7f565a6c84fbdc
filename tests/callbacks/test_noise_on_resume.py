"""A resumed run never adds noise again that it has added before, unless it repeats the very same release.

The commonest setting in public code does: a seed at the top of the script, a resume, and the noise of the
first step comes back under another sum; subtracting the two shows the difference of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from cards import rewrite_chain
from stand_ins import KillAt, Killed, Regression, dp, fit
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.errors import DataError, ResumeError
from lit_dpret.privacy.ledger.gate import ReleaseGate
from lit_dpret.privacy.ledger.private_run import PrivateRun
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, charged_releases
from lit_dpret.privacy.noise import CHACHA_STREAM, PHILOX_STREAM, KeyedStream

Patch = pytest.MonkeyPatch
Key = tuple[Any, ...]
honest = KeyedStream.normal


def noise_of_a_resumed_run(
    folder: Path,
    replay: str,
    patch: Patch,
    between: Callable[[Path], None] = lambda ledger: None,
    *,
    secure: bool = False,
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
            between(folder / "run" / LEDGER_NAME)
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


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("replay", ["auto", "never"])
def test_a_resumed_run_never_adds_old_noise_to_a_new_sum(
    replay: str, secure: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    drawn = noise_of_a_resumed_run(tmp_path, replay, monkeypatch, secure=secure)
    check_that_no_noise_comes_again(drawn)
    repeated = {key[:2] for place, (key, _) in enumerate(drawn) if key in [k for k, _ in drawn[:place]]}
    assert repeated == ({(0, 2)} if replay == "auto" else set()), "one step is repeated bit by bit, or none is"


def written_with_other_noise(ledger: Path) -> None:
    """Make the ledger one of a version whose noise was another one."""

    def older(record: dict[str, Any]) -> None:
        if record["kind"] == "plan":
            record["schema"] = "lit-dpret/privacy-ledger/1"
            record["noise_stream"] -= 1

    rewrite_chain(ledger, older)


@pytest.mark.parametrize(("secure", "stream"), [(False, PHILOX_STREAM), (True, CHACHA_STREAM)])
def test_a_run_of_a_version_with_other_noise_goes_on_and_repeats_none_of_its_steps(
    secure: bool, stream: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    drawn = noise_of_a_resumed_run(tmp_path, "auto", monkeypatch, between=written_with_other_noise, secure=secure)
    steps = list(dict.fromkeys(key[:2] for key, _ in drawn))
    assert steps == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3), (1, 4), (1, 5)]
    records = PrivacyLedger.read(tmp_path / "run" / LEDGER_NAME).records
    assert not [record for record in records if record["kind"] == "replay"]
    assert sum(release.count for release in charged_releases(records)) == 7, "the step that ran twice is paid twice"
    assert [record.get("noise_stream") for record in records if record["kind"] == "plan"] == [stream - 1, stream]


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
    with pytest.raises(DataError, match="A batch of step 0, attempt 1, arrived where step 2"):
        noise_of_a_resumed_run(tmp_path, "never", monkeypatch)
