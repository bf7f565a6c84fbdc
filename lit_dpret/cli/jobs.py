"""The jobs of a multirun (``-m``): their names, their settings, and the current one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from lit_dpret.tasks.stages import holds_a_run


def swept() -> tuple[list[str], list[list[str]] | None]:
    """Return the names that ``-m`` varies, and each run's settings; None for these if a sweeper chooses them."""
    known: Any = HydraConfig.get()
    params = [f"{name}={value}" for name, value in (known.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found = parser.parse_overrides([*params, *(a for a in sys.argv[1:] if "=" in a and a[:1] != "-")])
    found = [one for one in found if not re.match("hydra[./]", one.key_or_group)]
    runs = None
    if known.sweeper._target_.endswith(".BasicSweeper"):
        runs = BasicSweeper.split_arguments(found, None)[0]
    return [one.get_key_element() for one in found if one.is_sweep_override()], runs


def job_name(number: int) -> str:
    """Name the folder of a job: its unique number, and a word for each varied setting; of a path its last part alone.

    Cards take the names of folders, and hold no paths.
    """
    names, _ = swept()
    given = dict(setting.partition("=")[::2] for setting in HydraConfig.get().overrides.task)

    def plain(text: str) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:24]

    def last(value: str) -> str:
        return re.split(r"[/\\]", value.rstrip("/"))[-1]

    words = [f"{plain(name.rpartition('.')[2])}_{plain(last(given.get(name, '')))}" for name in names]
    return "-".join([str(number), *words])[:64].rstrip("-.")


def close_sweep() -> None:
    """Make the folder of a multirun private to its owner, before its sweeper can write a score there."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    if known is not None and known.mode == RunMode.MULTIRUN:
        folder = Path(known.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def begin_what_is_left(cfg: DictConfig) -> None:
    """Under ``-m``, let ``resume=true`` start the jobs that an interrupted multirun had not reached."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    if known is None or known.mode != RunMode.MULTIRUN or not cfg.resume:
        return
    if holds_a_run(Path(known.sweep.dir)) and not holds_a_run(Path(cfg.run_dir)):
        with read_write(cfg):
            cfg.resume = False


@contextmanager
def one_job() -> Iterator[None]:
    """Make Lightning's ranks repeat only this job of a multirun, in its folder."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    if known is None or known.mode != RunMode.MULTIRUN:
        yield
        return
    before = sys.argv
    options = [a for a in before[1:] if "=" not in a and a not in ("-m", "--multirun")]
    with read_write(known), open_dict(known):
        known.run.dir = known.runtime.output_dir
    sys.argv = [before[0], *options, *known.overrides.task]
    try:
        yield
    finally:
        sys.argv = before
