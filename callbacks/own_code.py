"""The user's own code in a private run: what of it is refused or tried before the first step, and what is trusted."""

from __future__ import annotations

from itertools import islice
from typing import Any

import lightning as L
from lightning.pytorch.core.hooks import DataHooks

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.sampling import ALONE, Draw, PrivateBatchSampler

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_KNOWN = ("lit_dpret.", "lightning.", "pytorch_lightning.")


def refuse_changed_batches(module: Any, data: Any) -> None:
    """Refuse hooks that change a batch on its way to the device: nobody could compare rows without their company.

    Raises:
        ConfigurationError: Naming the hook.
    """
    for owner in (module, data):
        for hook in _HOOKS:
            if getattr(type(owner), hook, None) not in (getattr(DataHooks, hook), None):
                raise ConfigurationError(
                    f"{type(owner).__name__}.{hook} changes batches after they were put together, where nothing shows "
                    "whether rows are mixed there. Do it in collate_rows, or in per_row_loss for what runs on the "
                    "device.",
                    trap="T11",
                )


def refuse_replaced_weighting(module: Any) -> None:
    """Refuse a ``unit_loss`` of the user's own: clipping takes rows as they are weighted there, unexamined.

    Raises:
        ConfigurationError: Naming the class.
    """
    owner = next((kind for kind in type(module).__mro__ if "unit_loss" in vars(kind)), None)
    if owner is not None and not owner.__module__.startswith("lit_dpret."):
        raise ConfigurationError(
            f"{owner.__name__}.unit_loss replaces how rows are weighted inside a unit, where nothing shows whether "
            "units weigh each other. Leave it, and weight rows in per_row_loss.",
            trap="T11",
        )


def refuse_remembering_collation(module: Any, dataset: Any, sampler: PrivateBatchSampler) -> None:
    """Have the rows of some units collated alone, after others and with others, before the first step.

    Raises:
        UnsupportedModelError: ``collate_rows`` remembers what it was given.
    """
    examine = getattr(module, "examine_collation", None)
    if examine is None or dataset is None:
        return
    answers = (dataset[Draw(unit, 0, 0, False)][1] for unit in range(sampler.units))
    found = [rows[0] for rows in islice(filter(None, map(list, answers)), 4 * ALONE)]
    if len(found) > ALONE:
        examine(found[:ALONE], found[ALONE:])


def trusted_code(trainer: L.Trainer, module: Any, data: Any) -> list[str]:
    """What the claim takes on trust about code from outside this package and Lightning, for the card."""
    owners = [getattr(module, "own_class", type(module)), type(data), *map(type, trainer.callbacks)]  # type: ignore[attr-defined]
    own = dict.fromkeys(kind.__name__ for kind in owners if not kind.__module__.startswith(_KNOWN))
    mode = type(module.privacy)
    bound = [] if mode.__module__.startswith(_KNOWN) else [
        f"{mode.__name__} is a privacy mode from outside lit-dpret: that one unit moves the sum of a step by no more "
        "than this card says rests on its code. Its noise was measured in every step."
    ]  # fmt: skip
    if not own:
        return bound
    text = (
        f"{', '.join(own)}: in this code, the loss of a row depends on no other row, and nothing of a private row ends "
        "the run, sets a learning rate, changes an update or a weight, or reaches a file. Samples of it were examined "
        "while the run trained, and nothing was found; that proves none of it."
    )
    public = ", ".join(getattr(module, "public_metrics", ()))
    return [*bound, text] + ([f"No private row is behind {public} but through trained weights."] if public else [])
