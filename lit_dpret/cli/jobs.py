"""The jobs of a multirun (``-m``): their names, their settings, and the current one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_dpret.cli.arguments import shown_overrides
from lit_dpret.errors import ResumeError
from lit_dpret.tasks.stages import holds_a_run

_VARIED = ("params", "search_space")  # the settings of a sweeper that contain those of its jobs


def swept() -> tuple[list[str], list[list[str]] | None]:
    """Return the names that ``-m`` varies, and each run's settings; None for the settings if a sweeper chooses them."""
    known: Any = HydraConfig.get()
    params = [f"{name}={value}" for name, value in (known.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found = parser.parse_overrides([*params, *shown_overrides()])
    found = [one for one in found if not re.match("hydra[./]", one.key_or_group)]
    runs = None
    if is_basic(known):
        runs = BasicSweeper.split_arguments(found, None)[0]
    return [one.get_key_element() for one in found if one.is_sweep_override()], runs


def job_name(number: int) -> str:
    """Name the folder of a job: its unique number, and a word for each varied setting; for a path, only its last part.

    Cards include folder names, and must not contain paths.
    """
    names, _ = swept()
    given = dict(setting.partition("=")[::2] for setting in HydraConfig.get().overrides.task)

    def plain(text: str) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:24]

    def last(value: str) -> str:
        return re.split(r"[/\\]", value.rstrip("/"))[-1]

    words = [f"{plain(name.rpartition('.')[2])}_{plain(last(given.get(name, '')))}" for name in names]
    return "-".join([str(number), *words])[:64].rstrip("-.")


def settings_folder() -> str | None:
    """Return where Hydra records a run's settings; None for a folder with a run: a refusal must not change anything
    there.
    """
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    return None if known is not None and holds_a_run(Path(known.runtime.output_dir)) else ".hydra"


def multirun() -> Any:
    """Return Hydra's own configuration in a multirun; None elsewhere."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    return known if known is not None and known.mode == RunMode.MULTIRUN else None


def close_sweep() -> None:
    """Make the folder of a multirun private to its owner, before its sweeper can write a score there."""
    if (known := multirun()) is not None:
        folder = Path(known.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def begin_what_is_left(cfg: DictConfig) -> None:
    """Under ``-m``, let ``resume=true`` start the jobs that an interrupted multirun had not reached."""
    known = multirun() if cfg.resume else None
    if known is not None and holds_a_run(Path(known.sweep.dir)) and not holds_a_run(Path(cfg.run_dir)):
        with read_write(cfg):
            cfg.resume = False


def refuse_other_proposals(cfg: DictConfig) -> None:
    """Refuse to continue the jobs of a sweeper that would propose other settings for their numbers.

    With a seed, a sweeper proposes the same settings again, job by job, because finished jobs return the same results.
    """
    known: Any = HydraConfig.get()
    if not cfg.resume or is_basic(known) or not holds_a_run(Path(known.sweep.dir)):
        return
    sweeper: Any = OmegaConf.to_container(known.sweeper, resolve=True)
    how = next((f"hydra.sweeper.{name}={value}" for name, value in sweeper.items() if name == "storage" and value), "")
    if how or not has_seed(sweeper):
        raise ResumeError(
            f"resume=true with {how or 'no hydra.sweeper.sampler.seed'}: this sweeper now proposes other settings for "
            f"the job numbers in {known.sweep.dir}, whose runs started with those in their .hydra/overrides.yaml. "
            "Finish an interrupted run by itself, with those settings and its hydra.run.dir. A new sweep with a seed "
            "and without a storage can be resumed."
        )


def is_basic(known: Any) -> bool:
    """Return whether Hydra itself lists the jobs."""
    return str(known.sweeper._target_).endswith(".BasicSweeper")


def has_seed(sweeper: Mapping[str, Any]) -> bool:
    """Return whether the settings of a sweeper, without those that it varies, name a seed."""
    inner = [value for name, value in sweeper.items() if isinstance(value, dict) and name not in _VARIED]
    return sweeper.get("seed") is not None or any(map(has_seed, inner))


@contextmanager
def one_job() -> Iterator[None]:
    """Make Lightning's ranks repeat only this job of a multirun, in its folder."""
    if (known := multirun()) is None:
        yield
        return
    before = sys.argv
    options = [a for a in before[1:] if "=" not in a and a[0] != "~" and a not in ("-m", "--multirun")]
    with read_write(known), open_dict(known):
        known.run.dir = known.runtime.output_dir
    sys.argv = [before[0], *options, *known.overrides.task]
    try:
        yield
    finally:
        sys.argv = before
