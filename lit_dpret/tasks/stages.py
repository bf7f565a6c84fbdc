"""Stages of a long task: each has a folder, runs once, and is skipped when finished."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import CARD_NAME, read_card
from lit_dpret.datamodules.identity import content_sha256
from lit_dpret.errors import ResumeError
from lit_dpret.files import json_sha256, write_whole
from lit_dpret.privacy.ledger.run_ledger import STAGES_NAME
from lit_dpret.privacy.ledger.run_ledger import holds_a_run as holds_a_run

DONE = "stage.json"


def settings_fingerprint(task: object, *, but: Collection[str] = (), **more: object) -> str:
    """Hash the settings on which a task's finished stages depend: public attributes, except ``but``."""
    settings = {name: described(value) for name, value in vars(task).items() if name[0] != "_" and name not in but}
    settings |= {name: described(value) for name, value in more.items()}
    return json_sha256(settings)


def described(settings: object) -> str:
    """Return settings as a text that is equal in every process: without addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(settings))


class Stages:
    """Run named stages in order inside one run folder; stage ``x`` gets ``run_dir/x``.

    Guarantees:
        - A finished stage is not run again; its recorded result is returned.
        - A stage is recorded as finished only after all of it was written. Only the owner can read the record: results
          are often measures of single private queries.
        - The output of a finished stage whose card claims nothing is in a folder that only its owner can read.
        - A run that is bound to its data (`on_data`) does not continue with other data, nor with another
          ``fingerprint``.
        - If the first stage fails before it writes anything but ``scratch``, the run counts as never begun: the
          corrected command may use its folder.
    """

    def __init__(self, run_dir: Path, *, resume: bool, fingerprint: str, scratch: Sequence[str] = ()) -> None:
        self.run_dir, self.resume = run_dir, resume
        self._fingerprint, self._scratch = fingerprint, tuple(scratch)
        self.seconds: dict[str, float] = {}
        mark, self._data = run_dir / STAGES_NAME, ""
        if mark.exists() and not resume:
            raise ResumeError(
                f"{run_dir} holds an earlier run of this task. Use resume=true to continue it, or choose another "
                "hydra.run.dir."
            )
        begun = mark.read_text(encoding="utf-8").split("\n") if mark.exists() else [fingerprint]
        if begun[0] != fingerprint:
            raise ResumeError(
                f"resume=true, but the run in {run_dir} was started with other settings. Restore them, or choose "
                "another hydra.run.dir."
            )
        self._begun_on = begun[1] if len(begun) > 1 else ""

    def on_data(self, *measured: Mapping[str, Any]) -> Stages:
        """Bind the run to the content of its inputs, by id; return self."""
        self._data = content_sha256(*measured)
        if self._begun_on not in ("", self._data):
            raise ResumeError(
                f"resume=true, but the data differ from those that the run in {self.run_dir} was started with: its "
                "results would mix both. Restore the data, or choose another hydra.run.dir."
            )
        return self

    def begin(self) -> Stages:
        """Mark the folder for this run, which ``resume=true`` with the same settings continues; return self.

        The first stage calls it; a task that writes before its first stage calls it itself.
        """
        # Only for the owner: where a task reads private texts, their hash would let a reader check guesses.
        mark = f"{self._fingerprint}\n{data}" if (data := self._data or self._begun_on) else self._fingerprint
        write_whole(self.run_dir / STAGES_NAME, mark, owner_only=True)
        return self

    def is_done(self, name: str) -> bool:
        """Return whether stage ``name`` finished, in this attempt or an earlier one."""
        return (self.run_dir / name / DONE).exists()

    def result(self, name: str) -> dict[str, Any]:
        """Return the recorded result of a finished stage."""
        record: dict[str, Any] = json.loads((self.run_dir / name / DONE).read_text(encoding="utf-8"))
        self.seconds[name] = record["seconds"]
        return dict(record["result"])

    def run(self, name: str, work: Callable[[Path, bool], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of stage ``name``; ``work(folder, resume)`` computes it if it is missing."""
        if self.is_done(name):
            return self.result(name)
        folder = self.run_dir / name
        before = None if (self.run_dir / STAGES_NAME).exists() else self._files()
        self.begin()
        folder.mkdir(exist_ok=True)
        start = time.monotonic()
        try:
            result = work(folder, self.resume)
        except BaseException:
            if before is not None and self._files() == before:
                shutil.rmtree(folder)
                (self.run_dir / STAGES_NAME).unlink()
            raise
        for card in folder.rglob(CARD_NAME):
            if read_card(card.parent)["claim"]["guarantee"] != "dp":
                card.parent.chmod(0o700)
        self.seconds[name] = time.monotonic() - start
        write_whole(folder / DONE, json.dumps({"result": result, "seconds": self.seconds[name]}), owner_only=True)
        return result

    def _files(self) -> set[Path]:
        """Return all files of the run except logs, hidden files, the mark and ``scratch``."""
        found = (path.relative_to(self.run_dir) for path in self.run_dir.rglob("*") if path.is_file())
        return {
            path
            for path in found
            if path.parts[0] not in (STAGES_NAME, *self._scratch)
            and not path.parts[0].startswith(".")
            and path.suffix != ".log"
        }
