"""Tiny private runs on several processes, as torchrun would start them.

`Server` starts this file as a program. It imports everything once and then forks one process for each rank of a
job, so that a job takes a second or two. A job is the name of a function below and its arguments; each rank leaves
what it saw in ``rank0.json``, ``rank1.json`` and so on in the job's folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

REFUSED = 2
CRASHED = 1


class Server:
    """Jobs in order, each on processes of its own."""

    def __init__(self) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, job: str, folder: Path, *, world: int = 2, timeout: float = 120, **given: Any) -> list[int]:
        """The exit status of each rank; -9 for one that was killed, also because of ``timeout`` (seconds)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        line = {"job": job, "folder": str(folder), "world": world, "timeout": timeout, "given": given}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return [int(status) for status in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def told(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank of the last job in ``folder`` left."""
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
    return found


# -- jobs: each runs on every rank ---------------------------------------------------------------


def fit(folder: Path, rank: int, world: int, *, module: str = "regression", privacy: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None, steps: int = 6, resume: bool = False, seed: int = 0,
        replay: str = "never", trainer: dict[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    """A private fit without dropout, whose noise is keyed by the step alone; the weights of each rank come back."""
    import lightning as L
    import stand_ins
    import torch

    from lit_dpret.callbacks import PrivacyAccountant
    from lit_dpret.privacy import gate as gate_module
    from lit_dpret.privacy import run as run_module

    class Fixed:
        @staticmethod
        def token_hex(size: int) -> str:
            return "ab" * size

    # The same streams and noise in every folder.
    run_module.random_secrets = gate_module.random_secrets = Fixed  # type: ignore[assignment]
    L.seed_everything(seed, verbose=False)
    chosen = {"secret_file": folder.parent / "secret", "accountant": "rdp", "noise_multiplier": 2.0} | (privacy or {})
    made = stand_ins.Regression(privacy=stand_ins.dp(folder.parent, **chosen), dropout=0.0)
    with torch.no_grad():  # another seed on every rank must not matter
        if seed != 0:
            for parameter in made.parameters():
                parameter.add_(seed * rank)
    settings = {"strategy": "ddp", "devices": world} if world > 1 else {}
    runner = stand_ins.fit(
        folder, made, stand_ins.Numbers(**{"sampling": "poisson"} | (data or {})), steps=steps, resume=resume,
        accountant=PrivacyAccountant(run_dir=folder, resume=resume, eps_log_points=1, replay=replay),
        **settings | (trainer or {}),
    )  # fmt: skip
    return {
        "weights": {name: p.flatten().tolist() for name, p in made.state_dict().items()},
        "eps": next(c for c in runner.callbacks if hasattr(c, "counts_releases")).epsilon(),
        "global_step": runner.global_step,
    }


def shared(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Every method of `Ranks`, by what it promises."""
    import torch
    import torch.distributed as dist

    from lit_dpret.errors import DataError
    from lit_dpret.privacy import ranks as ranks_module
    from lit_dpret.privacy.ranks import Ranks

    dist.init_process_group("gloo")
    ranks_module.BUCKET = 10
    ranks = Ranks.here()
    half = torch.full((3,), 1.0 + rank / 256, dtype=torch.bfloat16)
    tensors = {
        "wide": torch.arange(24.0).reshape(4, 6) * (rank + 1),
        "exact": torch.full((2,), 1 + rank * 1e-12, dtype=torch.float64),
        "narrow": half,
        "turned": (torch.arange(6.0).reshape(2, 3) * (rank + 1)).T,
        "scalar": torch.tensor(float(rank)),
        "none": torch.zeros(0),
    }
    counts = torch.tensor([rank, 10 + rank], dtype=torch.float64)
    ranks.sum_(tensors, counts)
    seen: dict[str, Any] = {
        "ranks": [ranks.rank, ranks.world_size, ranks.is_first],
        "sums": {name: tensor.tolist() for name, tensor in tensors.items()},
        "counts": counts.tolist(),
        "shared": ranks.share(lambda: {"from": ranks.rank}),
        "gathered": ranks.gather(rank * 2),
    }

    class Unsendable(Exception):
        pass

    def refuse(error: BaseException) -> None:
        raise error

    def last(rank: int) -> None:
        if rank == world - 1:
            raise DataError("bad rows", kind="empty", trap="T1")

    attempts = {
        "shared_error": lambda: ranks.share(lambda: refuse(DataError(f"rank {rank}", kind="empty", trap="T1"))),
        "unsendable": lambda: ranks.share(lambda: refuse(Unsendable("words"))),
        "interrupted": lambda: ranks.share(lambda: refuse(KeyboardInterrupt())),
        "together": lambda: ranks.together(lambda: last(rank)),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            seen[name] = None
        except BaseException as error:
            seen[name] = [type(error).__name__, str(error), getattr(error, "trap", None)]
    ranks.barrier()
    return seen


# -- the program ---------------------------------------------------------------------------------


def one_rank(line: dict[str, Any], rank: int, port: int) -> int:
    from lit_dpret.errors import LitDpretError

    world, folder = int(line["world"]), Path(line["folder"])
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
    place = folder / f"rank{rank}.json"
    place.unlink(missing_ok=True)
    try:
        seen = globals()[line["job"]](folder, rank, world, **line["given"])
        status = 0
    except LitDpretError as error:
        seen, status = {"error": type(error).__name__, "text": str(error)}, REFUSED
    except BaseException as error:
        traceback.print_exc()
        seen, status = {"error": type(error).__name__, "text": str(error)}, CRASHED
    place.write_text(json.dumps(seen), encoding="utf-8")
    return status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_the_server() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve() -> None:
    """Fork for every rank of the job on each line of standard input, and answer with the exit statuses."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_ins  # noqa: F401  (imported before the fork)

    from lit_dpret.tasks import fit  # noqa: F401

    for text in sys.stdin:
        line, port = json.loads(text), _free_port()
        ranks = []
        for rank in range(int(line["world"])):
            child = os.fork()
            if child == 0:
                _die_with_the_server()
                os._exit(one_rank(line, rank, port))
            ranks.append(child)
        found: dict[int, int] = {}
        deadline = time.monotonic() + float(line["timeout"])
        while len(found) < len(ranks):
            for child in set(ranks) - set(found):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    found[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        answers.write(json.dumps([found[child] for child in ranks]) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
