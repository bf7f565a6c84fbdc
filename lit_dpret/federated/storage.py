"""State of silo and server on disk, written atomically and readable only by its owner: tensors, facts, traffic."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from lit_dpret.errors import DataError, ResumeError, StorageError
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.chain import sync_folder


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically."""
    write_whole(path, save({name: value.detach().contiguous() for name, value in tensors.items()}), owner_only=True)


def newest_round(folder: Path, kind: str) -> tuple[dict[str, Tensor], int] | None:
    """Return the weights of the last finished round, ``KIND-NUMBER.safetensors``, and the number of the next one."""
    done = sorted(folder.glob(f"{kind}-*.safetensors"))
    return (load_file(done[-1]), int(done[-1].stem.rpartition("-")[2]) + 1) if done else None


def save_json(path: Path, content: object) -> None:
    """Write JSON atomically."""
    write_whole(path, json.dumps(content), owner_only=True)


def keep_once(path: Path, fact: str) -> str:
    """Store a fact under a path permanently, unless one is already stored there; return the stored fact.

    Guarantees:
        - If several processes store at once, one of their facts is kept, and all of them get that one.
        - The fact is on disk before this returns.
    """
    if path.is_file():
        return path.read_text(encoding="utf-8")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_whole(draft, fact, owner_only=True)
    try:
        os.link(draft, path)
        sync_folder(path.parent)
    except FileExistsError:
        pass
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        draft.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8")


def keep_facts(path: Path, name: str, facts: Mapping[str, object]) -> None:
    """Record under ``name`` the initial settings of a state folder; refuse to continue it with different ones."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    now = json.loads(json.dumps(facts))
    if name in known:
        odd = [key for key in now.keys() | known[name].keys() if now.get(key) != known[name].get(key)]
        if odd:
            key = min(odd)
            raise ResumeError(
                f"{path.parent} was begun with {_setting(name, key)}={known[name].get(key)!r}, and now it is "
                f"{now.get(key)!r}. Restore it, or choose another folder."
            )
        return
    write_whole(path, json.dumps(known | {name: now}, indent=2).encode(), owner_only=True)


def _setting(record: str, key: str) -> str:
    """Return the user's name for a fact of `keep_facts`."""
    if record == "generator":
        return {"budget": "federated.privacy", "seed": "seed"}.get(key, f"task.{key}")
    if key in FederatedPrivacy.__dataclass_fields__:
        return f"federated.privacy.{key}"
    if key in PddAs2.__dataclass_fields__:
        return f"federated.{key}"
    if key in ("start", "clients"):
        return {"start": "initial weights of federated.model", "clients": "clients of federated.silos"}[key]
    return f"federated.{'stage2' if record.startswith('personal-') else 'stage1'}.{key}"


def copy_once(source: Path, target: Path) -> None:
    """Copy a folder atomically, unless the copy already exists."""
    if not target.exists():
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source, draft)
        draft.rename(target)


class Traffic:
    """The bytes sent in one run, stored next to the server's state.

    Guarantees:
        - An event that is repeated after an interruption counts once. One that is not repeated stays counted.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        known = path is not None and path.is_file()
        self._events: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8")) if known and path else {}

    def note(self, phase: str, event: str, sent: dict[str, int]) -> None:
        """Record the bytes that each silo sent to or received from the server in one event of a phase."""
        self._events[f"{phase}/{event}"] = dict(sent)
        if self._path is not None:
            save_json(self._path, self._events)

    def by_silo(self) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        for event, sent in self._events.items():
            for silo, count in sent.items():
                found.setdefault(silo, Counter())[event.split("/")[0]] += count
        return found

    def by_phase(self) -> Counter[str]:
        return sum(self.by_silo().values(), Counter())


class Served:
    """The turns that one silo has answered, each once, so that no server gets more than planned.

    Without this record, a server could ask for rounds 0, 1, 0 with different weights each time, and get several updates
    of the same queries. A turn is recorded with the hash of the question before anything is computed. The silo repeats
    its answer to the same question. It refuses a different question, and earlier rounds after a later one. The record
    is in the state folder, so it also binds a new server.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state / "served"

    def round(self, number: int, weights: dict[str, Tensor]) -> None:
        """Begin a round of stage 1 from these weights, or repeat the last round."""
        self._once(f"round-{number:03}", fingerprint(weights), f"round {number} with other weights")
        # Check the record, not the answer: a failed round leaves no answer, so that would reveal the failure.
        if any(int(path.name.partition("-")[2]) > number for path in self._folder.glob("round-*")):
            raise _served(f"a later round than {number}")

    def stage2(self, digest: str) -> None:
        """Accept the global weights of stage 2, by hash; refuse any that differ from those accepted before."""
        self._once("weights", digest, "stage 2 with other weights")

    def known(self, refresh: int, asked: Sequence[Tensor]) -> list[bool]:
        """Return which requests belong to the start of this refresh; the first call starts it with its requests."""
        digests = [hashlib.sha256(rows.float().numpy(force=True).tobytes()).hexdigest() for rows in asked]
        kept = json.loads(keep_once(self._folder / f"asked-{refresh:03}", json.dumps(sorted(set(digests)))))
        return [digest in kept for digest in digests]

    def _once(self, turn: str, digest: str, what: str) -> None:
        if keep_once(self._folder / turn, digest) != digest:
            raise _served(what)


def _served(what: str) -> DataError:
    return DataError(
        f"This silo has already served {what}, and serves each turn of a run once. If the server has lost its folder, "
        "start over with new state folders at the silos (state) and the remaining budget.",
        kind="served already",
    )
