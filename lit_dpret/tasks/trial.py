"""A run as the trial of a sweep: known before it starts, and told when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lit_dpret.errors import ConfigurationError
from lit_dpret.sweeps import SweepFolder, write_result


class TrialOf:
    """The sweep that ``trial_of=folder`` names.

    Args:
        folder: Of the sweep.
        run_dir: Of the trial.

    Raises:
        ConfigurationError: There is no such sweep, or the trial lies where nobody would look for it.
    """

    def __init__(self, folder: str | Path, run_dir: Path) -> None:
        self.sweep, self.run_dir = SweepFolder.read(folder), run_dir
        if run_dir.resolve().parent != self.sweep.trial_folder("x").resolve().parent:
            raise ConfigurationError(
                f"trial_of={folder}, but hydra.run.dir={run_dir} is no folder in {folder}/trials: "
                "the sweep would not find the trial. Put it there."
            )

    def finish(self, overrides: Sequence[str], result: Any) -> None:
        """Write down what the trial was and what it reached; of several ranks the first one does.

        Args:
            overrides: The settings that it was called with.
            result: The metrics that its task returned.
        """
        if getattr(rank_zero_only, "rank", 0):
            return
        varied = set(self.sweep.describe()["varied"])
        settings = [override for override in overrides if override.partition("=")[0] in varied]
        write_result(self.run_dir, settings, result if isinstance(result, Mapping) else {})
