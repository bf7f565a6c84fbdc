"""Tiny private runs in separate processes, killed by the operating system at a chosen moment.

`Server` starts this file as a program. It imports everything once and then forks one process for each
run, so that a run takes a second. A *moment* is counted in function calls, of Python and C alike:
``{"where": "anywhere", "nth": 0, "after": 5000}`` is the 5000th call of the run. With ``where``
``checkpoint`` (while one is being written), ``step`` (after a release was granted and before it was
confirmed) or ``ledger`` (in an append), calls are counted from the ``nth`` time that the run gets there.
``anywhere`` begins when the ledger is opened: before that, a run has nothing to lose.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BUDGET_EXCEEDED = 3
STEPS = 6
NOISE = 2.0  # with Poisson sampling and RDP, accounting takes no time


class Server:
    """Runs in order, each in a separate process."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, folder: Path, **job: Any) -> int:
        """Train in ``folder``; return the exit status, which is -9 if the process was killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Watch:
    """A profiler that counts calls, and kills its own process at a moment or notes the counts."""

    def __init__(self, folder: Path, moment: dict[str, Any] | None) -> None:
        from lit_dpret.callbacks.checkpoint_files import WholeCheckpoints
        from lit_dpret.privacy.ledger.chain import ChainedFile
        from lit_dpret.privacy.ledger.gate import ReleaseGate
        from lit_dpret.privacy.ledger.private_run import PrivateRun

        self.folder, self.moment = folder, moment
        self.starts = {
            (PrivateRun.open.__func__.__code__, "call"): "anywhere",  # type: ignore[attr-defined]
            (WholeCheckpoints.save_checkpoint.__code__, "call"): "checkpoint",
            (ReleaseGate.authorise.__code__, "return"): "step",
            (ChainedFile._write.__code__, "call"): "ledger",
        }
        self.ends = {
            (WholeCheckpoints.save_checkpoint.__code__, "return"): "checkpoint",
            (ReleaseGate.record.__code__, "call"): "step",
            (ChainedFile._write.__code__, "return"): "ledger",
        }
        self.inside: dict[str, int] = {}
        self.lengths: dict[str, list[int]] = {"anywhere": [], "checkpoint": [], "step": [], "ledger": []}

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if start := self.starts.get((frame.f_code, event)):
            self.inside[start] = 0
        for name in self.inside:
            self.inside[name] += 1
            if self.moment is not None and self.moment["where"] == name:
                here = (len(self.lengths[name]), self.inside[name])
                if here == (self.moment["nth"], self.moment["after"]):
                    os.kill(os.getpid(), signal.SIGKILL)
        if end := self.ends.get((frame.f_code, event)):
            self.lengths[end].append(self.inside.pop(end))

    def end(self) -> None:
        sys.setprofile(None)
        self.lengths["anywhere"].append(self.inside.get("anywhere", 0))
        (self.folder / "calls.json").write_text(json.dumps(self.lengths), encoding="utf-8")


def train_once(job: dict[str, Any]) -> None:
    """Do one run as `train.py` would, with fixed streams; note every draw of noise next to its folder."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from safetensors.torch import save_file
    from stand_ins import Numbers, Regression

    from lit_dpret.callbacks import PrivacyAccountant
    from lit_dpret.privacy.ledger import private_run as run_module
    from lit_dpret.privacy.ledger.private_run import PrivateRun
    from lit_dpret.privacy.modes import DPSGD
    from lit_dpret.privacy.noise import KeyedStream
    from lit_dpret.tasks.fit import Training, train

    class Export(Callback):
        """Save the weights without a card, which would cost more than the run; other tests cover the card."""

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            save_file(dict(module.state_dict()), folder / "model.safetensors")

    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    run_module.random_secrets = SimpleNamespace(token_hex=lambda size: "ab" * size)  # the same streams in every folder
    honest = KeyedStream.normal

    def noted(stream: Any, shape: Any, **key: Any) -> Any:
        made = honest(stream, shape, **key)
        names = ("attempt", "step", "parameter", "shard", "salt")
        line = [hashlib.sha256(stream._secret).hexdigest(), stream.run_id, *(key.get(name, 0) for name in names)]
        line.append(hashlib.sha256(made.numpy().tobytes()).hexdigest())
        with open(folder.with_name(f"{folder.name}.draws"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return made

    KeyedStream.normal = noted  # type: ignore[method-assign, assignment]
    reserve = int(job.get("reserve", 0))
    accountant = PrivacyAccountant(
        run_dir=folder,
        resume=job["resume"],
        replay=job["replay"],
        eps_log_points=1,
        resume_reserve=reserve,
    )
    checkpoint = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=2, save_last=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    watch = Watch(folder, job.get("moment"))
    opened = PrivateRun.open

    def watched(*given: Any, **named: Any) -> PrivateRun:
        if job.get("moment") or job.get("count"):
            sys.setprofile(watch)
        return opened(*given, **named)

    PrivateRun.open = watched  # type: ignore[method-assign, assignment]
    L.seed_everything(0, verbose=False)
    privacy = DPSGD(eps=job["eps"], noise_multiplier=NOISE, accountant="rdp", secret_file=folder.with_name("secret"))
    train(
        Regression(privacy=privacy),
        Numbers(sampling="poisson"),
        Training(
            run_dir=folder,
            make_trainer=functools.partial(
                L.Trainer, accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, log_every_n_steps=1, **quiet
            ),
            callbacks=[accountant, Export(), checkpoint],
            resume=job["resume"],
        ),
    )
    watch.end()
    PrivateRun.open, KeyedStream.normal = opened, honest  # type: ignore[method-assign]


def serve() -> None:
    """Fork for every line on standard input, and answer with the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_ins  # noqa: F401  (imported before the fork)

    from lit_dpret.errors import BudgetExceededError
    from lit_dpret.tasks import fit  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train_once(job)
                status = 0
            except BudgetExceededError:
                status = BUDGET_EXCEEDED
            except BaseException:
                sys.setprofile(None)
                traceback.print_exc()
            os._exit(status)
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


if __name__ == "__main__":
    serve()
