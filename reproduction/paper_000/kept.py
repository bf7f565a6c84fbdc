"""Results that are made once: each is a stage of the reproduction, remembered with the settings that made it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_dpret.errors import ResumeError
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.stages import Stages


class Kept:
    """Stages of one run folder that do not depend on each other's settings.

    Guarantees:
        - A result is computed once; what was interrupted goes on where it was.
        - A result that was made with other settings is refused, and no other one is touched.

    Args:
        parts: Of the reproduction.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=f"paper_000, seed {parts.seed}")

    @property
    def seconds(self) -> dict[str, float]:
        """By result, of those that were asked for."""
        return self._stages.seconds

    def folder(self, name: str) -> Path:
        """Where the result ``name`` lies."""
        return self.parts.run_dir / name

    def result(self, name: str, settings: object, work: Callable[[Parts], Any]) -> Any:
        """What ``work`` returned, now or in an earlier attempt.

        Args:
            name: Of its folder.
            settings: What it depends on; its ``repr`` must tell all of it.
            work: Makes it, given the parts of a run in its own folder; returns JSON values.

        Raises:
            ResumeError: It was made with other settings.
        """
        said = re.sub(r" at 0x[0-9a-f]+", "", repr(settings))  # where a function lies in memory is no setting
        mark = hashlib.sha256(said.encode()).hexdigest()

        def made(folder: Path, resume: bool) -> dict[str, Any]:
            return {"settings": mark, "result": work(replace(self.parts, run_dir=folder, resume=resume))}

        found = self._stages.run(name, made)
        if found["settings"] != mark:
            raise ResumeError(
                f"resume=true, but {self.folder(name)} was made with other settings. Restore them, or move it "
                "elsewhere to have it made again; what its ledger is charged with stays spent."
            )
        return found["result"]
