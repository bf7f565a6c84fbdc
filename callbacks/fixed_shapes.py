"""Getting a run ready for a device that compiles: batches of one shape, and the module in place in time."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities import find_shared_parameters, set_shared_parameters

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.fixed_shape import FixedShape
from lit_dpret.privacy.xla import cut, is_lazy, use_full_precision

Shared = list[list[str]]


def shape_of_batches(trainer: L.Trainer, module: Any, data: Any) -> FixedShape | None:
    """The shape that every physical batch is filled up to; None where a batch is as large as what was drawn.

    Raises:
        ConfigurationError: As `FixedShape.of`.
    """
    wanted = getattr(module, "fixed_shapes", False)
    wanted = is_lazy(trainer.strategy.root_device) if wanted is None else wanted
    return FixedShape.of(data, module.place_rows) if wanted else None


def refuse_changing_shapes(trainer: L.Trainer, module: Any) -> None:
    """Refuse what an XLA device would compile anew for every batch, or compute in too low a precision.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if not is_lazy(trainer.strategy.root_device):
        return
    if getattr(module, "fixed_shapes", False) is False:
        raise ConfigurationError(
            f"{type(module).__name__} has batches of changing shapes (model.fixed_shapes=false, or it cannot fill them "
            "up), and XLA would compile each shape anew, for minutes. Train model=generator with "
            "model.fixed_shapes=null, or choose another trainer."
        )
    if str(trainer.precision) != "32-true":
        raise ConfigurationError(
            f"trainer.precision={trainer.precision} on XLA turns every float32 tensor into a shorter one, the clipped "
            "norms, their sum and the noise among them. Set trainer.precision=32-true.",
            trap="T8",
        )


def place_early(trainer: L.Trainer, module: L.LightningModule) -> Shared:
    """Move the module to its XLA device before anybody looks at its parameters, and have products computed in full.

    There, unlike on a GPU, moving makes new parameters, and unties those that are shared. Lightning, which does this
    later, then finds everything in place.

    Returns:
        The names of the parameters that are shared, for `tie_again`: when the training is over, Lightning moves the
        module back to the CPU, and unties them.
    """
    device = trainer.strategy.root_device
    if not is_lazy(device):
        return []
    shared: Any = find_shared_parameters(module)  # lists of names, though it is declared as names
    module.to(device)
    set_shared_parameters(module, shared)
    use_full_precision(device)
    cut(device)
    return list(shared)


def tie_again(module: L.LightningModule, shared: Shared) -> None:
    """Share parameters as they were before the training; those of a name hold the same values."""
    set_shared_parameters(module, shared)
