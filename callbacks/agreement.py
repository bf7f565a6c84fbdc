"""Ranks that were started differently are found before they train, instead of waiting for each other for ever.

One machine of several with an older checkout, another file of data or another setting would draw other units, or hand
out another number of batches: at best the job hangs, at worst the claim is about nothing that happened. Each rank
therefore tells what it is about to do, in hashes, and all must tell the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lit_dpret
from lit_dpret.callbacks.inputs import fingerprint_of_files
from lit_dpret.callbacks.planning import PlannedRun
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.noise import KeyedStream

# Where a rank may be set up in its own way.
_OF_ONE_RANK = ("secret_file", "dataset_ledger", "counts")


def require_agreement(
    trainer: L.Trainer, module: Any, data: Any, *, planned: PlannedRun, stream: KeyedStream, ranks: Ranks
) -> None:
    """Refuse ranks that are not about to do the same.

    Args:
        trainer: Of this rank.
        module: Before training; its weights may differ, because the strategy makes them equal.
        data: Set up, its unit chosen.
        planned: What this rank planned by itself.
        stream: The shared stream; keys the hash of the data.
        ranks: Who takes part.

    Raises:
        ConfigurationError: On every rank, naming what differs and on which of them.
    """
    if ranks.world_size == 1:
        return
    told = ranks.gather(ranks.together(lambda: facts_of(trainer, module, data, planned=planned, stream=stream)))
    for rank, facts in enumerate(told):
        differing = [name for name in told[0] if facts[name] != told[0][name]]
        if differing:
            raise ConfigurationError(
                f"Rank {rank} of {ranks.world_size} is about to train with another {' and '.join(differing)} than rank "
                "0. All must run the same command, with the same code, on the same data; compare what was started "
                "there."
            )


def facts_of(trainer: L.Trainer, module: Any, data: Any, *, planned: PlannedRun, stream: KeyedStream) -> dict[str, str]:
    """What all ranks must have in common, as hashes by the name that a refusal gives it."""
    mode = {k: v for k, v in vars(module.privacy).items() if not k.startswith("_") and k not in _OF_ONE_RANK}
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    key = bytes.fromhex(stream.tag("ranks"))
    facts: dict[str, Any] = {
        "version of the code": [lit_dpret.__version__, code_sha256(), torch.__version__],
        "number of steps": [planned.steps, planned.steps_per_epoch],
        "privacy setting": [module.privacy.name, mode],
        "plan": [None if planned.plan is None else planned.plan.to_dict(), planned.law.to_dict(), planned.sub_batches],
        "data set": [data.n_units, data.data_fingerprint(key)],
        "file of labels or negatives": fingerprint_of_files(module, key),
        "way of batching": [data.physical_batch_size, data.rows_per_unit],
        "model": parameters,
        "optimizer": _plain(getattr(module, "optimizer_spec", None)),
        "precision": str(trainer.precision),
    }
    return {name: _sha256(value) for name, value in facts.items()}


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """SHA-256 of every Python file of this package, whatever its version says."""
    digest = hashlib.sha256()
    root = Path(lit_dpret.__file__).parent
    folders = [root, *(root / name for name in ("callbacks", "datamodules"))]  # links in a checkout
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_described).encode()).hexdigest()


def _described(value: Any) -> str:
    """What JSON has no form for, without the address of an object, which differs between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else _described(value)
