"""Share independent work among the processes of a Ray cluster: passages to write queries for, or texts to embed.

Only the calling process writes files. The workers are actors of Ray core, not Ray Data: a piece is read when a worker
is free for it, the model stays loaded from one list of pieces to the next, and a piece that repeatedly kills its worker
ends the work instead of being retried without end.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from lit_dpret.errors import ConfigurationError, LitDpretError, WorkerError

T = TypeVar("T")
R = TypeVar("R")

_DEATHS = 3
"""The number of worker deaths over one piece, or at the start of workers, that ends the work."""

_KEPT = "Finished work is kept: the same command continues from there."
_SAME = ("torch", "transformers")


def device_named(name: str, *, knob: str = "device") -> torch.device:
    """Return the device of a setting; ``auto`` prefers a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"{knob}={name} is not a device of this machine. Choose cpu, or one that it has."
        ) from error
    return device


@contextmanager
def ray_workers(
    make: Callable[[], Callable[[T], R]], workers: int, *, device: str | torch.device = "cpu", threads: int = 1
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """Yield a function that maps pieces of work to results, in order of completion, on ``workers`` processes.

    Guarantees:
        - The result of each piece is returned once, from a worker with the PyTorch and transformers versions of this
          process.
        - If a worker or node dies, other workers do the pieces that it held. A cluster with room for fewer workers is
          only slower.
        - Pieces are read as they are handed out.

    The cluster is the one of ``RAY_ADDRESS``, else one that runs on this machine, else a new one of this process alone.

    Args:
        make: Called once in each worker; returns the function that does a piece there. Picklable.
        workers: The number of processes.
        device: With ``cuda``, each worker has its own GPU.
        threads: Processors that each worker reserves, and threads of PyTorch.

    Raises:
        ConfigurationError: Ray is not installed, or its cluster has no room for one worker.
        LitDpretError: A worker raised it.
        WorkerError: Workers died or failed for another reason, or Ray could not be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read at import: otherwise Ray reports usage to its makers
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            f"task.workers={workers} runs on Ray, which cannot be imported ({error}). Run: pip install "
            "'lit-dpret[ray]', or set task.workers=0 to work in this process."
        ) from error
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise WorkerError(
                f"Ray could not be started or reached (RAY_ADDRESS={os.environ.get('RAY_ADDRESS', 'not set')}): "
                f"{error} Set RAY_ADDRESS to a cluster that runs, or task.workers=0 to work in this process."
            ) from error
    needs = {"num_cpus": threads, "num_gpus": int(torch.device(device).type == "cuda")}
    try:
        _require_places(ray.cluster_resources(), needs)  # type: ignore[no-untyped-call]
        remote: Any = ray.remote(**needs)  # type: ignore[call-overload]
        pool = _Pool(ray, remote(_Worker), make, workers, threads)
        try:
            yield pool.results
        finally:
            pool.close()
    finally:
        if started:
            ray.shutdown()


def _require_places(has: Mapping[str, float], needs: Mapping[str, int]) -> None:
    """Refuse workers of which none would ever start."""
    cpus, gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0))
    if cpus < needs["num_cpus"] or gpus < needs["num_gpus"]:
        raise ConfigurationError(
            f"A worker needs {needs['num_cpus']} processors (task.threads, or OMP_NUM_THREADS for task=encode and "
            f"task=evaluate) and {needs['num_gpus']} GPUs (task.device), but the Ray cluster has {cpus} and {gpus}. "
            "Lower them, or set task.workers=0 to work in this process."
        )


class _Worker:
    """One process of the cluster."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], threads: int) -> None:
        self._make, self._threads = make, threads

    def get_ready(self) -> tuple[dict[str, str], Any]:
        """Return this worker's versions, and the error that kept it from getting ready, if any."""
        torch.set_num_threads(self._threads)
        self._work, error = _caught(self._make)
        return _versions(), error

    def work(self, piece: Any) -> tuple[Any, Any]:
        return _caught(self._work, piece)


def _caught(work: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """Return a result and None, or None and an error: Ray would wrap it in one of its own."""
    try:
        return work(*given), None
    except LitDpretError as error:
        return None, error
    except Exception as error:
        said = traceback.format_exception_only(error)[-1].strip()
        return None, WorkerError(f"A worker failed: {said} {_KEPT}")


def _versions() -> dict[str, str]:
    return {package: version(package) for package in _SAME}


class _Pool(Generic[T, R]):
    """Workers that are free, busy or not ready yet."""

    def __init__(self, ray: Any, worker: Any, make: Callable[[], Callable[[T], R]], workers: int, threads: int) -> None:
        self._ray, self._worker, self._given = ray, worker, (make, threads)
        self._free: list[Any] = []
        self._coming: dict[Any, Any] = {}  # by the reference to its first answer
        self._busy: dict[Any, tuple[Any, T, int]] = {}  # by the reference to a result: worker, piece, deaths before
        self._still_born = 0
        for _ in range(workers):
            self._start()

    def _start(self) -> None:
        worker = self._worker.remote(*self._given)
        self._coming[worker.get_ready.remote()] = worker

    def results(self, pieces: Iterable[T]) -> Iterator[R]:
        """Yield the result of each piece."""
        left, queue = iter(pieces), deque[tuple[T, int]]()  # a piece, and how many workers have died over it

        def more() -> bool:
            queue.extend((piece, 0) for piece in islice(left, 0 if queue else 1))
            return bool(queue)

        def hand_out() -> None:
            while self._free and more():
                worker, (piece, deaths) = self._free.pop(), queue.popleft()
                self._busy[worker.work.remote(piece)] = worker, piece, deaths

        while more() or self._busy:
            hand_out()
            [answered], _ = self._ray.wait([*self._busy, *self._coming])
            if answered in self._coming:
                self._welcome(answered)
                continue
            worker, piece, deaths = self._busy.pop(answered)
            try:
                result, error = self._ray.get(answered)
            except self._ray.exceptions.RayActorError as death:
                if deaths + 1 == _DEATHS:
                    raise WorkerError(
                        f"{_DEATHS} workers died over the same piece of work, as they do when memory runs out. Each "
                        f"holds the model: use fewer (task.workers). {_KEPT}"
                    ) from death
                queue.append((piece, deaths + 1))
                self._start()
                continue
            if error is not None:
                raise error
            self._free.append(worker)
            hand_out()  # before the caller writes the result
            yield result

    def _welcome(self, answered: Any) -> None:
        worker = self._coming.pop(answered)
        try:
            versions, error = self._ray.get(answered)
        except self._ray.exceptions.RayActorError as death:
            self._still_born += 1
            if self._still_born == _DEATHS:
                raise WorkerError(
                    f"{_DEATHS} workers died before they were ready. Each holds the model; use fewer (task.workers) "
                    f"if memory was the reason. Ray says: {death}"
                ) from death
            self._start()
            return
        if error is not None:
            raise error
        if versions != (here := _versions()):
            raise WorkerError(
                f"A worker has {versions}, but this process {here}: their results might differ. Install the same "
                "versions on all machines."
            )
        self._free.append(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._free, *self._coming.values(), *(worker for worker, *_ in self._busy.values())):
            self._ray.kill(worker)
