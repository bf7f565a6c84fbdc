"""Work that several processes share, each told by the environment which one it is; started by the tests as a program.

    python job_ranks.py JOB FOLDER WORLD [KILL_RANK AFTER]

Everything is imported once, and each rank is a fork of that. A rank that is to be killed is killed when so many pieces
are on the disk. The exit status of each rank is the last line on stdout. Nothing outlives the program.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 150.0  # seconds for a whole job


def run(job: str, folder: Path, world: int, *, kill: tuple[int, int] | None = None) -> tuple[list[int], str]:
    """The exit status of each rank and what all of them said."""
    words = [sys.executable, __file__, job, str(folder), str(world), *map(str, kill or ())]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID"):
        environment.pop(name, None)
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=LIMIT + 60, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


# -- jobs -----------------------------------------------------------------------------------------


def synthesize(folder: Path) -> None:
    """The data set of the tiny generator in ``folder/g``, in ``folder/set``."""
    from tiny_generator import PASSAGES, SETTINGS

    from lit_dpret.distributed.job import job_here
    from lit_dpret.synthesis import groups, writer

    at_once = groups.draw_group

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.2)  # so that every rank gets some
        return at_once(*arguments)

    groups.draw_group = slowly
    with job_here() as job:
        writer.synthesize(folder / "g", PASSAGES, folder / "set", job=job, **SETTINGS)
        print("made", getattr(job.ranks, "rank", 0), file=sys.stderr)


def encode(folder: Path) -> None:
    """Embeddings of texts by the encoder in ``folder/encoder``, in ``folder/set``."""
    from lit_dpret.distributed.job import job_here
    from lit_dpret.encoders import embedding_cache
    from lit_dpret.tasks.index_folder import Encoding, encode_folder

    embedding_cache._BATCHES_PER_GROUP = 1
    slow = embedding_cache.WindowGroups.embed

    def embed(self: Any, start: int) -> Any:
        time.sleep(0.3)
        return slow(self, start)

    embedding_cache.WindowGroups.embed = embed  # type: ignore[method-assign]
    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    with job_here() as job:
        encode_folder(folder / "encoder", texts, folder / "set", Encoding(batch_size=8), job=job)


def refuse(folder: Path) -> None:
    """Rank 1 alone cannot do its part."""
    from tiny_generator import PASSAGES, SETTINGS

    from lit_dpret.distributed.job import job_here
    from lit_dpret.errors import StorageError
    from lit_dpret.synthesis import shards, writer

    def full(self: Any, index: int, records: Any) -> None:
        raise StorageError("the disk of rank 1 is full")

    shards.RankShards.add = full  # type: ignore[method-assign]
    with job_here() as job:
        writer.synthesize(folder / "g", PASSAGES, folder / "set", job=job, **SETTINGS)


def differ(folder: Path) -> None:
    """Each rank believes in another run folder."""
    from lit_dpret.distributed.job import job_here

    with job_here() as job:
        job.require_same("hydra.run.dir", f"runs/{job.ranks.rank}")


JOBS: dict[str, Callable[[Path], None]] = {job.__name__: job for job in (synthesize, encode, refuse, differ)}


# -- the program ----------------------------------------------------------------------------------


def main() -> None:
    job, folder, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).resolve().parent))

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_fork(JOBS[job], folder, rank, world, port) for rank in range(world)]
    if len(sys.argv) > 4:
        _kill_when(children[int(sys.argv[4])], folder / "set", int(sys.argv[5]))
    end, statuses = time.monotonic() + LIMIT, dict[int, int]()
    while len(statuses) < world:
        for child in children:
            if child not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    print(json.dumps([statuses[child] for child in children]))


def _fork(job: Callable[[Path], None], folder: Path, rank: int, world: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the program
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status = 0
    try:
        job(folder)
    except Exception as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        if not type(error).__module__.startswith("lit_dpret"):
            traceback.print_exc()
        status = 2
    sys.stderr.flush()
    os._exit(status)


def _kill_when(child: int, folder: Path, pieces: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and len([*folder.glob("shards/[0-9]*"), *folder.glob("*.parts/*")]) < pieces:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
