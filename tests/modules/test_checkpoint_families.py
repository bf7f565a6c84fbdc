"""A checkpoint of one family of strategies under another: the run goes on, or is refused in one line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_runs import REFUSED, told
from zero_runs import ZeroServer

KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("zero_fit", 1, {}),
    "ddp": ("fit", 2, {}),
    "fsdp": ("shard_jobs:fit", 2, {}),
    "zero1": ("zero_fit", 2, {"zero": {"stage": 1}}),
    "zero2": ("zero_fit", 2, {"zero": {"stage": 2}}),
    "zero3": ("zero_fit", 2, {"zero": {"stage": 3}}),
}
WAY_OUT = {False: r"trainer=cpu, gpu, ddp and fsdp", True: r"with trainer=deepspeed"}


@pytest.fixture(scope="module")
def killed(zero_server: ZeroServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """A run of a kind that was killed in its fourth step, made once."""
    root = tmp_path_factory.mktemp("killed")

    def copy(kind: str, place: Path) -> Path:
        job, world, settings = KINDS[kind]
        folder = root / kind / "run"
        if not folder.exists():
            doom = {"whose": -1, "at": 3}
            assert zero_server.run(job, folder, world=world, doom=doom, steps=5, **settings) == [-9] * world
        shutil.copy2(folder.parent / "secret", place / "secret")
        return Path(shutil.copytree(folder, place / "run"))

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_every_pair_goes_on_or_is_refused_in_one_line(
    before: str, after: str, zero_server: ZeroServer, killed: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    folder = killed(before, tmp_path)
    job, world, settings = KINDS[after]
    statuses = zero_server.run(job, folder, world=world, steps=5, resume=True, **settings)
    of_zero = before.startswith("zero")
    if of_zero == after.startswith("zero"):
        assert statuses == [0] * world, told(folder, 0).get("text")
        assert told(folder, 0)["global_step"] == 5
        return
    assert statuses == [REFUSED] * world
    text = told(folder, 0)["text"]
    assert told(folder, 0)["error"] == "ResumeError" and re.search(WAY_OUT[of_zero], text) and "\n" not in text
