"""The trials of a sweep on this machine, without a server: one process each, one after another.

This does with a folder what W&B's agent does with a server. Several runners may work in one folder at once: a trial
that another process is running is left to it. An interrupted trial resumes from its last checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lit_dpret.errors import ConfigurationError, LedgerError, StorageError
from lit_dpret.privacy.ledger.dataset_account import RunLock
from lit_dpret.privacy.ledger.run_ledger import holds_a_run
from lit_dpret.sweeps.file import SweepFile, Trial
from lit_dpret.sweeps.folder import SWEEP, TRIALS, SweepFolder

LOG = "trial.log"
_GRACE = 30.0  # seconds for a trial to end by itself and write its card when the sweep is interrupted
SWEEP_VARIABLE = "LIT_DPRET_SWEEP"


@dataclass
class Outcome:
    """The outcome of the trials."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def settled(self) -> int:
        """The number of trials without remaining work here."""
        return len(self.done) + len(self.failed) + len(self.elsewhere)


def run_trials(
    sweep: SweepFolder, file: SweepFile, trials: list[Trial], *, offline: bool,
    progress: Callable[[int, int, str], None] = lambda done, total, extra: None,
) -> Outcome:  # fmt: skip
    """Run every trial that is neither finished nor running in another process.

    Guarantees:
        - A finished trial is not run again; an interrupted one resumes where it stopped.
        - No two processes run one trial at the same time.
        - A failed trial is reported with its reason, and the others still run.
        - When the sweep is interrupted, the running trial is ended too, with time to settle what it spent.

    ``offline``: W&B writes to the trials' folders and sends nothing. ``progress`` takes (done, all, the last one).
    """
    outcome = Outcome()
    progress(0, len(trials), "")
    for trial in trials:
        folder = sweep.trial_folder(trial.id)
        if sweep.result(trial.id) is not None:
            outcome.done.append(trial.id)
        else:
            lock = RunLock(sweep.folder / SWEEP, trial.id)
            try:
                lock.take()
            except LedgerError:
                outcome.elsewhere.append(trial.id)
                progress(outcome.settled, len(trials), f"{trial.id} is run by another process")
                continue
            try:
                reason = None if sweep.result(trial.id) is not None else _run(sweep, file, trial, folder, offline)
            finally:
                lock.release()
            if reason is None:
                outcome.done.append(trial.id)
            else:
                outcome.failed[trial.id] = reason
        progress(outcome.settled, len(trials), " ".join(trial.overrides))
    return outcome


def environment_of(sweep: SweepFolder, trial: Trial, *, offline: bool) -> dict[str, str]:
    """Return the environment of a trial, as W&B's agent would set it, as far as possible without a server."""
    own = {
        SWEEP_VARIABLE: str(sweep.folder),
        "WANDB_RUN_ID": trial.id,
        "WANDB_RUN_GROUP": f"sweep-{sweep.id}",
        "WANDB_RESUME": "allow",
    }
    # A sweep id would make the upload look for a sweep that no server knows; the group keeps its trials together.
    known = {
        name: value for name, value in os.environ.items() if name not in ("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
    }
    return known | own | ({"WANDB_MODE": "offline"} if offline else {})


def check_command(file: SweepFile, trial: Trial, folder: Path) -> None:
    """Refuse a command whose trials would not know the sweep in ``folder``, or would write outside of it."""
    known = {SWEEP_VARIABLE: str(folder), "WANDB_RUN_ID": trial.id}
    given = dict(word.partition("=")[::2] for word in file.command_line(trial, known))
    place = f"${{envvar:{SWEEP_VARIABLE}}}"
    wanted = {"trial_of": (folder, place),
              "hydra.run.dir": (folder / TRIALS / trial.id, f"{place}/{TRIALS}/${{oc.env:WANDB_RUN_ID}}")}  # fmt: skip
    for name, (path, shown) in wanted.items():
        value = given.get(name, "").strip("'\"")
        for variable, text in known.items():
            value = value.replace(f"${{oc.env:{variable}}}", text)
        if Path(value).resolve() != path.resolve():
            raise ConfigurationError(
                f"task.file={file.path}: its command must pass {name}={shown}. Otherwise its trials do not belong to "
                "this sweep: they use no reservation, and their results are not found."
            )


def _run(sweep: SweepFolder, file: SweepFile, trial: Trial, folder: Path, offline: bool) -> str | None:
    """Run one trial to its end; return the reason if it failed."""
    environment = environment_of(sweep, trial, offline=offline)
    words = file.command_line(trial, environment)
    if holds_a_run(folder):
        words.append("resume=true")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Readable by its owner alone, like the report: a task may print scores of private queries.
        with open(folder / LOG, "ab", opener=partial(os.open, mode=0o600)) as log:
            process = subprocess.Popen(
                words, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
            code = _wait(process)
    except OSError as error:
        raise StorageError(f"A trial cannot be started in {folder}: {error.strerror or error}.") from error
    if code == 0 and sweep.result(trial.id) is None:
        raise ConfigurationError(
            f"task.file={file.path}: a trial ended without a result, so its command trains no model. See "
            f"{folder / LOG}."
        )
    return None if code == 0 else _reason(code, folder / LOG)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except BaseException:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        raise


def _reason(code: int, log: Path) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return said[-1] if said else f"ended with exit code {code}; see {log}"
