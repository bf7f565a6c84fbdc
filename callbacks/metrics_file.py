"""`metrics.jsonl`: one line per logged step, readable without any tool and whole after a crash."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_dpret.errors import StorageError


class MetricsFile(Logger):
    """A Lightning logger that appends to ``metrics.jsonl`` in the run folder, on rank 0.

    It never writes hyper-parameters: a configuration may name private paths, and the run folder
    holds it already.

    Args:
        run_dir: The folder of the file.
    """

    writes_no_times = True
    """What is logged inside a private run is written at once: a line says which step, never when."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self._path = Path(run_dir) / "metrics.jsonl"

    @property
    def name(self) -> str:
        return "metrics_file"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        return None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        line = {"step": step} | {
            key: value if math.isfinite(value) else str(value)
            for key, value in ((key, float(value)) for key, value in metrics.items())
            if key != "epoch"
        }
        if len(line) == 1:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}. Free space, then resume=true."
            ) from error
