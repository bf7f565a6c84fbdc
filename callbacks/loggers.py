"""Loggers for a private run: ``metrics.jsonl``, and external services, which receive only public values.

By default W&B, MLflow and TensorBoard collect the command line, paths of private files, console output, code and
measurements of the machine. All of that is off here. No text is logged, since a private query looks like a public one.
"""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.errors import ConfigurationError, StorageError, first_line
from lit_dpret.lazy import optional
from lit_dpret.settings import require_choice


class MetricsFile(Logger):
    """A Lightning logger that appends to ``metrics.jsonl`` in the run folder, on rank 0.

    It never writes hyper-parameters: a configuration may name private paths, and the run folder
    contains it already.

    Args:
        run_dir: The folder of the file.
    """

    writes_no_times = True
    """Metrics of a private run are written at once: a line has the step, never the time."""

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
                f"{self._path} cannot be written: {error.strerror}. Fix that, then continue with resume=true."
            ) from error


_UNTOLD = ("secret", "noise_seed", "path", "dir", "folder", "file")
_CLAIM = ("guarantee", "epsilon", "delta", "unit", "neighbours")


class _PublicLogger(Logger):
    """The common base of the service loggers; in a class's bases it precedes the Lightning logger.

    Guarantees:
        - The service gets curves, numbers and the card. It gets no text, path, command line, code or console output,
          and neither the arguments nor a graph of the module.
        - The service begins its run with the first number that it gets. Under a guarantee that is after training
          (`LogGate`), so none of its times depends on a private step.
        - When the run ends, the service gets the settings that are numbers, booleans or class names, and the claim of
          the card.
    """

    _begun = _claimed = False

    def _keep(self, package: str, save_dir: str | Path, settings: Mapping[str, Any] | None) -> Any:
        self._run_dir, self._settings = Path(save_dir), dict(public_settings(settings or {}))
        return optional(package, f"logger={package}", f"lit-dpret[{package}]")

    @property
    def experiment(self) -> Any:
        """The run of the service; it begins when an attribute is used, not when Lightning prepares a fit."""
        below: Any = super()
        return below.experiment if self._begun else _Later(self._begin)

    def _begin(self) -> Any:
        self._begun = True
        below: Any = super()
        return below.experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the arguments that a module keeps may name private paths."""

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: tracing the graph needs rows."""

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        if not self._begun:
            return
        if not self._claimed and (self._run_dir / CARD_NAME).is_file():
            self._claimed = True
            claim = read_card(self._run_dir)["claim"]
            page = self._run_dir / Path(CARD_NAME).with_suffix(".html")
            self._log_claim({name: claim.get(name) for name in _CLAIM}, page if page.is_file() else None)
        below: Any = super()
        below.finalize(status)

    def _log_claim(self, claim: Mapping[str, Any], page: Path | None) -> None:
        raise NotImplementedError


class PublicWandbLogger(_PublicLogger, WandbLogger):
    """A W&B Lightning logger that receives only public values (`_PublicLogger`).

    Guarantees:
        - This also holds for W&B's files, offline or online, except W&B's own debug logs, which stay on this machine.
        - When the run ends, the claim of its card is in the summary, and the card is next to the curves.

    Args:
        save_dir: The run folder, where W&B keeps its files and the card is looked for.
        project: The W&B project.
        name: The run's name; null lets W&B choose.
        offline: Write to ``save_dir`` and send nothing; ``wandb sync`` uploads it later.
        log_model: Upload checkpoints: ``true``, ``false`` or ``all``.
        settings: Groups of settings; their numbers, booleans and class names become W&B's config.

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
        wandb = self._keep("wandb", save_dir, settings)
        where = os.environ.get("WANDB_MODE") or "online"
        # W&B treats any other word as online, and asks for the key after the training.
        require_choice("WANDB_MODE", where, ("online", "run", "shared", "offline", "dryrun", "disabled"))
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
            config=self._settings,
        )  # fmt: skip
        if not offline and where in ("online", "run", "shared"):
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

    def log_text(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as does ``log_table``: both send texts."""
        raise ConfigurationError(
            "logger=wandb: log_text() and log_table() would send texts, which may be private queries. Log numbers; "
            "the card is logged automatically."
        )

    log_table = log_text

    def watch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: its hooks see gradients before the noise."""
        raise ConfigurationError(
            "logger=wandb: watch() logs gradients before clipping and noise, which no claim covers. Remove it."
        )

    def _log_claim(self, claim: Mapping[str, Any], page: Path | None) -> None:
        import wandb

        if page is not None:  # not a W&B table, whose file would contain the user's home path
            self.experiment.log({"privacy/card": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
        self.experiment.summary.update({f"privacy/{name}": value for name, value in claim.items()})


class PublicTensorBoardLogger(_PublicLogger, TensorBoardLogger):
    """A TensorBoard Lightning logger that receives only public values, in ``tensorboard/`` of the run.

    Guarantees:
        - The folder contains no text except the claim's, and no name of the machine.
        - The name of its file reveals nothing about private steps.

    Args:
        save_dir: The run folder, where the card is looked for.
        settings: Groups of settings; their numbers, booleans and class names become its HPARAMS.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """

    def __init__(self, *, save_dir: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        self._keep("tensorboard", save_dir, settings)
        super().__init__(save_dir, name="tensorboard", version="", default_hp_metric=False)

    def _log_claim(self, claim: Mapping[str, Any], page: Path | None) -> None:
        rows = [f"| {name} | {value} |" for name, value in claim.items()]
        self.experiment.add_text("privacy/claim", "\n".join(["| claim | value |", "| --- | --- |", *rows]))
        numbers = {f"privacy/{name}": value for name, value in claim.items() if isinstance(value, float)}
        TensorBoardLogger.log_hyperparams(self, dict(self._settings), numbers)

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Close the file, and remove the machine and the process from its name."""
        super().finalize(status)
        for file in sorted(Path(self.log_dir).glob("events.out.tfevents.*.*")):
            names = (file.with_name(f"events.out.tfevents.{number}") for number in count(1))
            file.rename(next(name for name in names if not name.exists()))


class PublicMlflowLogger(_PublicLogger, MLFlowLogger):
    """An MLflow Lightning logger that receives only public values (`_PublicLogger`).

    Guarantees:
        - Nor is the name of a user or script, or a commit, sent or stored. A database on this machine holds two paths
          of MLflow's own: where it keeps the card, and where it was created.
        - When the run ends, its tags have the claim of its card, and its artifacts include the card.

    Args:
        save_dir: The run folder, where the card is looked for.
        experiment_name: The MLflow experiment.
        run_name: The run's name; null lets MLflow choose.
        tracking_uri: A server or a database; null takes ``MLFLOW_TRACKING_URI``, or a database in the run folder.
        settings: Groups of settings; their numbers, booleans and class names become MLflow's params.

    Raises:
        ConfigurationError: mlflow is not installed, or has no store at ``tracking_uri``.
    """

    def __init__(
        self,
        *,
        save_dir: str | Path,
        experiment_name: str = "lit-dpret",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report to mlflow.org when a run begins
        self._keep("mlflow", save_dir, settings)
        self._experiment_name, self._run_name, self._run_id = experiment_name, run_name, None
        self._prefix = ""  # read before the run begins
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._tracking_uri = given or f"sqlite:///{self._run_dir.absolute() / 'mlflow.db'}"
        self._artifact_location = None
        if not self._tracking_uri.startswith("sqlite:"):
            self._connect()
            return  # a database records its creation time, so it is opened after training
        folder = Path(self._tracking_uri.removeprefix("sqlite:///")).absolute().parent
        self._artifact_location = (folder / "mlartifacts").as_uri()
        if given and not folder.is_dir():
            raise ConfigurationError(f"logger.mlflow.tracking_uri={given}: the folder of that file does not exist.")

    def _connect(self) -> None:
        """Open the store; refuse at once one that does not answer."""
        import mlflow

        patience = mlflow.environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES
        given = patience.get_raw()
        patience.set(1)
        try:
            super().__init__(
                self._experiment_name, self._run_name, self._tracking_uri, artifact_location=self._artifact_location
            )
            self._place = self._mlflow_client.get_experiment_by_name(self._experiment_name)
        except (mlflow.MlflowException, ImportError) as error:
            raise ConfigurationError(f"logger.mlflow.tracking_uri={self._tracking_uri}: {first_line(error)}") from error
        finally:
            patience.unset() if given is None else patience.set(given)

    @property
    def name(self) -> str:
        return self._experiment_name

    @property
    def version(self) -> str | None:
        return self._run_id  # None before the run begins: reading the version does not begin it

    @property
    def save_dir(self) -> str:
        return str(self._run_dir)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Do nothing: a checkpoint contains the path of its folder."""

    def _begin(self) -> Any:
        self._make_run()
        experiment = super()._begin()
        MLFlowLogger.log_hyperparams(self, dict(self._settings))
        return experiment

    @rank_zero_only
    def _make_run(self) -> None:
        """Create a run without the user, script and commit that MLflow detects."""
        self._connect()
        client, place = self._mlflow_client, self._place
        if place is None:
            self._experiment_id = client.create_experiment(self.name, self._artifact_location)
        else:
            self._experiment_id = place.experiment_id
        self._run_id = client.create_run(self._experiment_id, run_name=self._run_name).info.run_id
        self._initialized = True  # otherwise Lightning sets this store for every later run of this process

    def _log_claim(self, claim: Mapping[str, Any], page: Path | None) -> None:
        for name, value in claim.items():
            self.experiment.set_tag(self._run_id, f"privacy.{name}", value)
        for file in (self._run_dir / CARD_NAME, page):
            if file is not None:
                self.experiment.log_artifact(self._run_id, str(file))


class _Later:
    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._begin(), name)


def public_settings(groups: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, booleans and class names among settings, by dotted name.

    Example:
        >>> dict(public_settings({"privacy": {"_target_": "lit_dpret.privacy.modes.DPSGD", "eps": 3.0,
        ...                                   "secret_file": "/home/me/secret", "noise_seed": 7}}))
        {'privacy': 'DPSGD', 'privacy.eps': 3.0}
    """
    for key, value in groups.items():
        if not str(key).isidentifier():  # a key that the user wrote, such as the path of a file
            continue
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from public_settings(value, name)
        elif key == "_target_":
            yield prefix, str(value).rpartition(".")[2]
        elif any(word in str(key) for word in _UNTOLD):
            continue
        elif isinstance(value, bool) or (isinstance(value, (int, float)) and math.isfinite(value)):
            yield name, value
