"""Checkpoints that are on the disk whole or not at all.

Lightning writes a checkpoint into the machine's temporary folder and moves it; between two file
systems that move is a copy, and a kill in the middle of it leaves half a checkpoint under the name
of a whole one. Whatever made a checkpoint unreadable, it costs no more than the steps since the one
before it: the ledger knows which steps were released, so going on from an older checkpoint, or from
the start, is charged for what it repeats.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_dpret.callbacks.checkpoints import DRAFT
from lit_dpret.privacy.ledger.chain import storage_error, sync_folder


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's way of writing checkpoints, made safe against a kill at any moment.

    Guarantees:
        - Under the checkpoint's name there is at any moment the old file, the new one, or none;
          never a part of one.
        - When ``save_checkpoint`` returns, the file and its name are on the disk (fsync).
        - A write that fails leaves what was there before, and no draft.

    A path with a scheme (``s3://``) is left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, str(path), storage_options)
            return
        target = Path(path)
        draft = target.with_name(DRAFT.format(target.name))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
            sync_folder(target.parent)
        except BaseException as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise storage_error(target, "written", error) from error
            raise
