"""Loggers that a private run may write to: ``metrics.jsonl``, and Weights & Biases with what may be told.

W&B by itself collects private things: the command line and the configuration hold paths of private files, the console
may show whatever a library prints, and the code of the working tree is the owner's. All of that is off here, and so is
measuring the machine. No text is logged: nobody can tell a private query from a public one by looking at it.
"""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.errors import ConfigurationError, StorageError


class MetricsFile(Logger):
    """A Lightning logger that appends to ``metrics.jsonl`` in the run folder, on rank 0.

    It never writes hyper-parameters: a configuration may name private paths, and the run folder
    holds it already.

    Args:
        run_dir: The folder of the file.
    """

    writes_no_times = True
    """Metrics of a private run are written at once: a line says which step, never when."""

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


_UNTOLD = ("secret", "noise_seed", "path", "dir", "folder", "file")
_CLAIM = ("guarantee", "epsilon", "delta", "unit", "neighbours")


class PublicWandbLogger(WandbLogger):
    """A Lightning logger that gives W&B curves, numbers and the card, and nothing that was written by a person.

    Guarantees:
        - No text, no path, no command line, no code and no console output reaches W&B's files, offline or online;
          W&B's own debug logs, which stay on this machine, are no part of that.
        - W&B's run begins with the first number that it is told. Under a guarantee that is when training is over
          (`LogGate`), so that no time in W&B's files depends on a private step, and the machine is not measured.
        - When the run ends, the claim of its card stands in the summary, and the card beside the curves.

    Args:
        save_dir: The run folder, where W&B keeps its files and the card is looked for.
        project: W&B's project.
        name: Of the run; null lets W&B choose.
        offline: Write to ``save_dir`` and send nothing; ``wandb sync`` uploads it later.
        log_model: Upload checkpoints: ``true``, ``false`` or ``all``.
        settings: Groups of settings; the numbers and switches in them, and names of classes, become W&B's config.

    Raises:
        ConfigurationError: wandb is not installed.
    """

    def __init__(
        self,
        *,
        save_dir: str | Path,
        project: str = "lit-dpret",
        name: str | None = None,
        offline: bool = False,
        log_model: Any = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError('logger=wandb needs wandb. Run: pip install "lit-dpret[wandb]".') from error
        told = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            host="",
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        super().__init__(
            name=name, save_dir=save_dir, project=project, offline=offline, log_model=log_model, settings=told,
            config=dict(public_settings(settings or {})),
        )  # fmt: skip
        self._run_dir = Path(save_dir)
        self._card_logged = False
        if not offline and os.environ.get("WANDB_MODE", "online") == "online":
            self._log_in(wandb)

    @rank_zero_only
    def _log_in(self, wandb: Any) -> None:
        """Ask for W&B's key before the training, although nothing is sent before its end."""
        try:
            there = wandb.login()
        except wandb.errors.Error as error:
            raise ConfigurationError(f"logger=wandb: {error} Or set logger.wandb.offline=true.") from error
        if not there:
            raise ConfigurationError("logger=wandb has no key. Run: wandb login. Or set logger.wandb.offline=true.")

    @property
    def experiment(self) -> Any:
        """W&B's run; it begins when something of it is used, not when Lightning prepares a fit."""
        return self._experiment if self._experiment is not None else _Later(self._begin)

    def _begin(self) -> Any:
        return super().experiment

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: what a module keeps of its arguments may name private paths."""

    def log_text(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise _refused("log_text")

    def log_table(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise _refused("log_table")

    def watch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: its hooks see gradients before the noise."""
        raise ConfigurationError(
            "logger=wandb: watch() logs gradients as they are before clipping and noise, which no claim covers. Leave "
            "it out."
        )

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Give W&B the card of the run, once it is there."""
        if not self._card_logged and self._experiment is not None and (self._run_dir / CARD_NAME).is_file():
            self._card_logged = True
            self._log_card()
        super().finalize(status)

    def _log_card(self) -> None:
        import wandb

        card = read_card(self._run_dir)
        claim = {name: card["claim"].get(name) for name in _CLAIM}
        table = wandb.Table(columns=["claim", "value"], data=[[name, str(value)] for name, value in claim.items()])
        shown: dict[str, Any] = {"privacy/claim": table}
        if (page := self._run_dir / Path(CARD_NAME).with_suffix(".html")).is_file():
            shown["privacy/card"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
        self.experiment.log(shown)
        self.experiment.summary.update({f"privacy/{name}": value for name, value in claim.items()})


class _Later:
    """Stands for W&B's run before it begins."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._begin(), name)


def public_settings(groups: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, switches and names of classes among settings, by their dotted names.

    Example:
        >>> dict(public_settings({"privacy": {"_target_": "lit_dpret.privacy.modes.DPSGD", "eps": 3.0,
        ...                                   "secret_file": "/home/me/secret", "noise_seed": 7}}))
        {'privacy': 'DPSGD', 'privacy.eps': 3.0}
    """
    for key, value in groups.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from public_settings(value, name)
        elif key == "_target_":
            yield prefix, str(value).rpartition(".")[2]
        elif any(word in str(key) for word in _UNTOLD):
            continue
        elif isinstance(value, bool) or (isinstance(value, (int, float)) and math.isfinite(value)):
            yield name, value


def _refused(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"logger=wandb: {what}() would send texts, and nobody can tell by looking whether they are private queries. "
        "Log numbers; the card is logged by itself."
    )
