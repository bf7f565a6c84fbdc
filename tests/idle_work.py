"""What takes a third of the time of each tiny fit and decides nothing of what the tests look at.

Imported by path through ``conftest.py``, and by the programs that run fits in processes of their own; not a test.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def leave_out(put: Callable[[Any, str, Any], None]) -> None:
    """Replace it by ``put(object, name, value)``, as far as the modules that it is in are loaded.

    What was written outlives a killed process without the disk; `os.fstat` still refuses a file that is closed.
    `torch.manual_seed` keeps a traceback for each kind of device that is not there, for when it should come.
    Each Trainer searches all installed packages for callbacks. Each composition parses a dozen files of YAML in Python,
    where libyaml reads the same. Garbage is collected where memory ran out, which takes long beside all other tests.
    """
    put(os, "fsync", os.fstat)
    if (torch := sys.modules.get("torch")) is not None:
        for kind in ("cuda", "xpu", "mtia"):
            if not getattr(torch, kind).is_available():
                put(getattr(torch, kind), "manual_seed_all", lambda seed: None)
    if (yaml := sys.modules.get("yaml")) is not None and hasattr(yaml, "CSafeLoader"):
        put(yaml, "SafeLoader", yaml.CSafeLoader)
    if (physical := sys.modules.get("lit_dpret.modules.physical_batches")) is not None:
        put(physical, "give_back_memory", lambda: None)
    connector = sys.modules.get("lightning.pytorch.trainer.connectors.callback_connector")
    if connector is not None:
        put(connector, "_load_external_callbacks", functools.cache(connector._load_external_callbacks))
