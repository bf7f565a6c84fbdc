"""The settings of a fit that a resumed run must keep: those that determine the trained model, not speed or location.

They are written into the run folder when the fit begins, and compared under ``resume=true``.
`lit_dpret.privacy.ledger.private_run.PrivateRun.open` compares what the ledger records about a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.distributed import rank_watch
from lit_dpret.errors import ConfigurationError
from lit_dpret.files import read_json, write_whole
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.tasks.parts import CHECKPOINTS, Parts

SETTINGS = "settings.json"
_SETTINGS_SCHEMA = "lit-dpret/fit-settings/1"

LENGTHS = ("max_steps", "max_epochs")
"""The Trainer settings that a resumed run must keep or shorten."""

_MAY_CHANGE = {  # on resume: speed settings, and paths; what the files contain is compared by `PrivateRun.open`
    "physical_batch_size", "num_workers", "gradient_checkpointing", "grad_cache_rows", "cache_dir", "passage_cache_dir",
    "secret_file", "dataset_ledger", "total_eps", "folder", "root", "pairs", "queries",
    "corpus", "qrels", "path", "file",
}  # fmt: skip


def trained_settings(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by full name, the settings that determine what a fit trains, without those of speed and paths."""
    found: dict[str, Any] = {"seed": groups["seed"]}

    def add(node: Any, place: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                add(value, f"{place}.{key}")
            elif key not in _MAY_CHANGE:
                moved = key in ("pretrained", "encoder") and isinstance(value, str)  # a folder may have moved
                found[place if key == "_target_" else f"{place}.{key}"] = Path(value).name if moved else value

    for group in ("model", "datamodule", "privacy", "trainer"):
        add(groups[group], group)
    return found


def _is_shorter(name: str, now: Any, before: Any) -> bool:
    """Return whether a resume plans fewer steps; the run then ends under the claim of the originally planned steps."""
    whole = isinstance(now, int) and isinstance(before, int)
    return whole and name.partition(".")[2] in LENGTHS and now > 0 and (before < 0 or now < before)


def keep_settings(parts: Parts) -> None:
    """Record what the run trains; refuse to resume with something else, naming the setting in the user's terms."""
    path, now = parts.run_dir / SETTINGS, json.loads(json.dumps(parts.trained_settings(), default=str))
    if parts.resume:
        before = read_json(path, _SETTINGS_SCHEMA)["settings"] if path.exists() else now
        for name in sorted(now.keys() | before.keys()):
            value, first = now.get(name), before.get(name)
            if value != first and not _is_shorter(name, value, first):
                raise ConfigurationError(
                    f"{name}={value} with resume=true, but the run was started with {first}. Restore that, or choose "
                    "another hydra.run.dir."
                )
    elif rank_watch.is_first() and not any((parts.run_dir / name).exists() for name in (CHECKPOINTS, LEDGER_NAME)):
        write_whole(path, json.dumps({"schema": _SETTINGS_SCHEMA, "settings": now}, indent=2) + "\n")
