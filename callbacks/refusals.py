"""Settings of a run under which its claim would be false, refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.card_file import CARD_NAME, file_sha256, read_card


def refuse_broken_claims(trainer: L.Trainer, module: Any, data: Any) -> None:
    """Refuse a Trainer, module or DataModule with which the run would release what nobody counts.

    Raises:
        ConfigurationError: Naming the setting and what to do instead.
        DataError: ``privacy=synthetic`` on data that its card does not describe.
    """
    if not hasattr(module, "privacy") or not hasattr(module, "receive_guard"):
        raise ConfigurationError(
            f"{type(module).__name__} is not a PrivateModule: the accountant could not see what it releases."
        )
    if data is None or not hasattr(data, "attach"):
        raise ConfigurationError(
            "The accountant reads the sampling law from the DataModule, and there is none that states "
            "one. Pass datamodule= to trainer.fit, a PairsDataModule or a class with its methods."
        )
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"trainer.devices={trainer.world_size} processes: this version trains on one device, and "
            "refuses to guess how noise and batches are shared. Set trainer.devices=1."
        )
    if module.privacy.guarantee != "none":
        _refuse_private_start(module)
    if module.privacy.guarantee == "inherited":
        check_dataset_card(data.privacy_card_path)
    if module.privacy.guarantee != "dp":
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping):
            raise ConfigurationError(
                f"EarlyStopping(monitor={callback.monitor!r}) decides by private data: that is a release "
                "nobody counts. Remove it, or fix trainer.max_steps beforehand."
            )
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            raise ConfigurationError(
                f"ModelCheckpoint(monitor={callback.monitor!r}) chooses by private data: that is a "
                "release nobody counts. Leave monitor unset, and keep the last checkpoint."
            )
    if type(module).validation_step is not L.LightningModule.validation_step:
        raise ConfigurationError(
            f"{type(module).__name__}.validation_step computes metrics inside a private run: on private rows each "
            "of them is a release nobody counts. Evaluate afterwards (task=evaluate), on public or held-out data."
        )
    if trainer.limit_train_batches not in (1.0, None) or getattr(trainer, "overfit_batches", False):
        raise ConfigurationError(
            "trainer.limit_train_batches and trainer.overfit_batches cut a logical batch short and change "
            "the sampling law. Use trainer.max_steps."
        )
    if str(trainer.precision).startswith("16"):
        raise ConfigurationError(
            f"trainer.precision={trainer.precision}: the loss scaler skips steps that were paid for. "
            "Choose bf16-mixed or 32-true."
        )


def refuse_false_bound(mode: Any, data: Any) -> None:
    """Refuse a declared ``privacy.max_units_per_user`` that the user ids of the data contradict.

    Where the data name no users, nothing is known and nothing is refused.

    Raises:
        ConfigurationError: A user has more units, or shares one with somebody else.
    """
    bound = getattr(mode, "max_units_per_user", None)
    if bound is None or not hasattr(data, "train_units"):
        return
    units = data.train_units()
    if units.duplicates == "merge":
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} cannot go with datamodule.duplicates=merge: a merged unit may belong "
            "to several people, and taking one of them out changes it instead of blanking it. Set "
            "datamodule.duplicates=keep, or leave the bound null."
        )
    most = units.most_units_of_a_user()
    if most is not None and most > bound:
        raise ConfigurationError(
            f"privacy.max_units_per_user={bound} is not true of these data: a user id has more {mode.unit} units than "
            "that. Declare a bound that holds, take rows out of the data, or set privacy.unit=user."
        )


def check_dataset_card(path: Path | None) -> None:
    """Refuse data that its privacy card does not describe, file by file.

    Raises:
        DataError: The card is missing, is not one of a data set, or lists other contents than the
            folder's queries, judgements and passages.
    """
    if path is None:
        raise DataError("privacy=synthetic trains on data that carries a privacy card, and this folder has none.")
    subject = read_card(path)["subject"]
    if subject["artifact_type"] != "dataset" or not subject["sha256"]:
        raise DataError(
            f"{path} is the card of {subject['artifact_type']} {subject['name']!r}, not of the data set it lies with: "
            "its claim says nothing about these queries. Take the folder that task=synthesize wrote."
        )
    folder = path.parent
    read = [p for pattern in ("queries.*", "corpus.*", "qrels/train.*") for p in folder.glob(pattern)]
    for name in {p.relative_to(folder).as_posix() for p in read} | set(subject["sha256"]):
        file = folder / name
        if not file.is_file() or file_sha256(file) != subject["sha256"].get(name):
            raise DataError(f"{file} is not the file that {path.name} describes; its claim does not cover it.")


def _refuse_private_start(module: Any) -> None:
    """Refuse to start from weights that were themselves trained on private data: the claims would add up."""
    start = getattr(module, "pretrained", None)
    if start and (Path(str(start)) / CARD_NAME).is_file():
        raise ConfigurationError(
            f"{start} carries a privacy card: its weights were trained on private data, and this run's card would "
            "forget what that cost. Start from a public model."
        )
