"""The folder that a synthetic set is written into: who may write there, whether it fits, and what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lit_dpret.distributed.crew import Crew
from lit_dpret.errors import StorageError
from lit_dpret.synthesis.dataset_folder import DATA_FILES
from lit_dpret.synthesis.shards import MANIFEST_NAME, SHARDS_NAME, RankShards, ShardStore, storage_error


@contextmanager
def opened(
    folder: Path, configuration: Mapping[str, Any], count: int, *, crew: Crew, check: Callable[[], None]
) -> Iterator[ShardStore | RankShards]:
    """The shards, as this rank may write them; the first rank looks what is missing, and all learn it.

    Args:
        folder: The output folder, which all ranks see.
        configuration: Everything that the content depends on.
        count: How many shards make the whole.
        crew: The ranks.
        check: Asked by the first rank before anything is written there.

    Raises:
        ResumeError: The folder was begun with another configuration.
        StorageError: It cannot be written, or is in use by another job.
    """
    if crew.is_first:
        with ExitStack() as stack:

            def prepare() -> ShardStore:
                check()
                stack.enter_context(alone_in(folder))
                return ShardStore(folder, configuration, count)

            found: list[ShardStore] = []
            crew.share(lambda: found.append(prepare()) or found[0].missing)  # type: ignore[func-returns-value]
            yield found[0]
    else:
        missing: list[int] = crew.share(list)
        yield RankShards(folder, {"shards": count, **configuration}, crew.ranks.rank, missing)


def check_disk(folder: Path, texts: Mapping[str, str], *, draws: int, max_new_tokens: int) -> None:
    """Refuse before hours of work what the disk cannot hold at the end.

    The passages are written once as corpus and once per draw as pairs; a drawn query stands in a
    shard, in two files of queries and in two qrels, at some 6 bytes a token and 300 of framing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = [] if (folder / MANIFEST_NAME).exists() else [name for name in DATA_FILES if (folder / name).exists()]
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(folder).free
        finished = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError as error:
        raise storage_error(folder, error) from error
    if foreign:
        raise StorageError(
            f"{folder / foreign[0]} exists and was not made by this; it will not be replaced. Give another out."
        )
    text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts.values())
    needed = int(1.1 * (1 + draws) * text_bytes) + len(texts) * (200 + draws * (500 + 3 * 6 * min(max_new_tokens, 32)))
    if free + finished < needed:
        raise StorageError(
            f"{folder} has {free / 1e6:.0f} MB free, and {len(texts)} passages with {draws} queries each need about "
            f"{(needed - finished) / 1e6:.0f} MB. Free some space, give fewer passages, or another out folder."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the shards folder for one process; the operating system lets go when the process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    shards = folder / SHARDS_NAME
    shards.mkdir(exist_ok=True)
    descriptor = os.open(shards, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"{folder} is being written by another process. Wait for it, or give another out folder."
            ) from error
        yield
    finally:
        os.close(descriptor)
