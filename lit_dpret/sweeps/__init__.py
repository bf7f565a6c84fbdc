"""Sweeps: many runs from one file, their cost reserved before the first one starts.

The file is a W&B sweep, which ``wandb sweep`` and ``wandb agent`` accept unchanged. This package runs the same file
without a server, and reserves the cost of all trials in the ledger of the data set beforehand.
"""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

if TYPE_CHECKING:
    from lit_dpret.sweeps.file import SweepFile, Trial
    from lit_dpret.sweeps.folder import SweepFolder, SweepTerms, trial_ledger, write_result
    from lit_dpret.sweeps.runner import run_trials
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "SweepFile": "file",
            "SweepFolder": "folder",
            "SweepTerms": "folder",
            "Trial": "file",
            "run_trials": "runner",
            "trial_ledger": "folder",
            "write_result": "folder",
        },
    )

__all__ = ["SweepFile", "SweepFolder", "SweepTerms", "Trial", "run_trials", "trial_ledger", "write_result"]
