"""Sweeps: many runs from one file, their cost reserved before the first one starts.

The file is a W&B sweep: ``wandb sweep`` and ``wandb agent`` take it as it is. What is here runs the same file
without a server, and tells the ledger of the data set beforehand what all trials will cost together.
"""

from lit_dpret.sweeps.file import SweepFile, Trial
from lit_dpret.sweeps.folder import SweepFolder, trial_ledger, write_result
from lit_dpret.sweeps.runner import run_trials

__all__ = ["SweepFile", "SweepFolder", "Trial", "run_trials", "trial_ledger", "write_result"]
