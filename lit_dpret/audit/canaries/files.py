"""The file of a run's canaries: secrets and coins, kept beside the run and handed to nobody."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lit_dpret.audit.canaries.canary import Canary, CanarySet
from lit_dpret.errors import DataError, schema_problem
from lit_dpret.files import write_whole

CANARIES = "canaries.json"
SCHEMA = "lit-dpret/canaries/1"


def set_sha256(canaries: CanarySet) -> str:
    """SHA-256 of the file's content: what was planted, fixed before training and told without telling the secrets."""
    return hashlib.sha256(_text(canaries).encode()).hexdigest()


def write_canaries(canaries: CanarySet, folder: str | Path) -> Path:
    """Write ``canaries.json``, whole or not at all, readable by its owner alone.

    Raises:
        StorageError: It cannot be written.
    """
    return write_whole(Path(folder) / CANARIES, _text(canaries), owner_only=True)


def read_canaries(path: str | Path) -> CanarySet:
    """What `write_canaries` wrote, from the file or its folder.

    Raises:
        DataError: It is missing, malformed, or a newer version wrote it.
    """
    path = Path(path)
    path = path / CANARIES if path.is_dir() else path
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"There is no readable file of canaries at {path}: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON.") from error
    if problem := schema_problem(facts.get("schema") if isinstance(facts, dict) else None, SCHEMA):
        raise DataError(f"{path} cannot be read: {problem}")
    try:
        canaries = tuple(Canary(**one | {"candidates": tuple(one["candidates"])}) for one in facts["canaries"])
        return CanarySet(canaries, dict(facts["settings"]), str(facts["nonce"]))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is malformed: a field of a canary is missing or unknown.") from error


def _text(canaries: CanarySet) -> str:
    facts = {
        "schema": SCHEMA,
        "note": "Secrets and coins of an audit: whoever reads this before the audit could make it say anything.",
        "nonce": canaries.nonce,
        "settings": canaries.settings,
        "canaries": [canary.to_dict() for canary in canaries.canaries],
    }
    return json.dumps(facts, indent=1, ensure_ascii=True) + "\n"
