"""Batches of one shape, for compiling devices and low precision, and early placement of modules.

In low precision, the gradient of a row changes when the batch has another shape, or when texts are padded further. A
bound on one unit's effect assumes that the other units' gradients are the same without it. So under a guarantee all
batches have one shape, and every unit keeps its position in the batch. A run for which this is impossible is refused.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import find_shared_parameters, set_shared_parameters

from lit_dpret.callbacks.own_code import trusted_code
from lit_dpret.distributed.xla import is_lazy, sync_device, use_full_precision
from lit_dpret.errors import ConfigurationError
from lit_dpret.matmul_precision import shortened_products
from lit_dpret.privacy.batches import FixedShape, copied_rows
from lit_dpret.privacy.collation import Collate, RowsAlone, UnitCollator
from lit_dpret.privacy.sampling import PrivateBatchSampler

Shared = list[list[str]]

_WHOLE = ("32-true", "64-true")


def shape_of_batches(trainer: L.Trainer, module: Any, data: Any) -> FixedShape | None:
    """Return the shape to which every physical batch is padded; None for variable batches."""
    ragged = getattr(module, "ragged_features", ())
    if rests_on_shapes(trainer, module):
        place_rows = module.place_rows if getattr(module, "fills_up", False) else copied_rows
        return FixedShape.of(data, place_rows, spare=1, ragged=ragged)
    return FixedShape.of(data, module.place_rows, ragged=ragged) if asks_for_one_program(trainer, module) else None


def attach_batches(trainer: L.Trainer, module: Any, data: Any, sampler: PrivateBatchSampler) -> None:
    """Attach the sampler and collator to ``data``, with the shape that this run needs."""
    mode, shape = module.privacy, shape_of_batches(trainer, module, data)
    mode.fixed_shapes = asks_for_one_program(trainer, module)
    sampler.scatters = shape is not None and mode.neighbours == "add_or_remove"
    collate, apart = collate_of(trainer, module), mode.guarantee == "dp"
    # If a user's function names the units, two of them may hold the same query and passage.
    or_row, one = not hasattr(data, "unit_of"), data.rows_per_unit
    own = bool(trusted_code(trainer, module, data))
    settings = {"unit": mode.unit, "or_row": or_row, "shape": shape, "apart": apart, "own": own}
    data.attach(sampler, UnitCollator(collate, one, **settings))


def collate_of(trainer: L.Trainer, module: Any) -> Collate:
    """Return the function from rows to features: the module's, or one with shapes independent of other rows."""
    if getattr(module, "fills_up", False) or not rests_on_shapes(trainer, module):
        return module.collate_rows  # type: ignore[no-any-return]
    return RowsAlone(module.collate_rows, type(module).__name__)


def asks_for_one_program(trainer: L.Trainer, module: Any) -> bool:
    """Return whether a compiler should see the same operations in every batch."""
    wanted = getattr(module, "fixed_shapes", False)
    return bool(is_lazy(trainer.strategy.root_device) if wanted is None else wanted)


def rests_on_shapes(trainer: L.Trainer, module: Any) -> bool:
    """Return whether a unit's bound holds only if the batch has the same shape without it."""
    mode = module.privacy
    return mode.guarantee == "dp" and not mode.bounds_any_rows and below_float32(trainer, module) is not None


def below_float32(trainer: L.Trainer, module: Any) -> str | None:
    """Return the setting that lowers precision below float32; None without one."""
    precision = str(trainer.precision)
    if precision not in _WHOLE:
        return f"trainer.precision={precision}"
    if (setting := shortened_products()) is not None:
        return setting
    parameters = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
    short = next((f"{name} in {p.dtype}" for name, p in parameters if p.dtype.itemsize < 4), None)
    return None if short is None else f"trainer.precision={precision} with {short}"


def refuse_changing_rows(trainer: L.Trainer, module: Any) -> None:
    """Refuse low precision under a guarantee if other rows' gradients would change without a unit."""
    if not rests_on_shapes(trainer, module):
        return
    found, mode = below_float32(trainer, module), module.privacy
    why = None
    if mode.candidates not in ("rows", "pool"):
        why = (
            f"privacy={mode.name} bounds the weight of each pair, and assumes that the other pairs have the same "
            "gradients without a record; in low precision these change with the number of records"
        )
    elif mode.candidates == "pool" and mode.passage_gradient == "full" and mode.units_at_once > 1:
        why = f"privacy.units_at_once={mode.units_at_once} splits batches by their units; 1 computes each by itself"
    if why is not None:
        way = "Set trainer.precision=32-true."
        if str(trainer.precision) in _WHOLE:  # then products are shortened, or weights are in half precision
            way = "Use float32 weights." if shortened_products() is None else "Leave that setting at its default."
        raise ConfigurationError(f"{found} under privacy={mode.name}: {why}. {way}", trap="T39")


def precision_assumptions(trainer: L.Trainer, module: Any) -> list[str]:
    """Return the claim's trusted assumptions about low precision, for the card."""
    if not rests_on_shapes(trainer, module):
        return []
    return [
        f"{below_float32(trainer, module)}: a row has the same loss and gradient, to the last bit, whatever the "
        "other rows of a batch of the same shape contain. Every physical batch has one shape, and every unit keeps its "
        "position; that kernels compute rows independently of each other was tested on a CPU only."
    ]


def refuse_changing_shapes(trainer: L.Trainer, module: Any) -> None:
    """Refuse whatever an XLA device would recompile for every batch, or compute in too low a precision."""
    if not is_lazy(trainer.strategy.root_device):
        return
    if getattr(module, "fixed_shapes", False) is False:
        raise ConfigurationError(
            f"{type(module).__name__} has batches of varying shapes (model.fixed_shapes=false), and XLA would "
            "recompile for each of them. Train model=generator with model.fixed_shapes=null, or choose another trainer."
        )
    if str(trainer.precision) != "32-true":
        raise ConfigurationError(
            f"trainer.precision={trainer.precision} on XLA lowers the precision of norms, sums and noise as well. Set "
            "trainer.precision=32-true.",
            trap="T8",
        )


def place_early(trainer: L.Trainer, module: L.LightningModule) -> Shared:
    """Move the module to its XLA device early; return the names of shared parameters for `tie_again`.

    Unlike on a GPU, moving to XLA creates new parameters and unties shared ones. Lightning's move back to the CPU does
    so again.
    """
    device = trainer.strategy.root_device
    if not is_lazy(device):
        return []
    shared: Any = find_shared_parameters(module)  # returns lists of names, although annotated as names
    module.to(device)
    set_shared_parameters(module, shared)
    use_full_precision(device)
    sync_device(device)
    return list(shared)


def tie_again(module: L.LightningModule, shared: Shared) -> None:
    """Restore the sharing of parameters from before the training; tied ones hold the same values."""
    set_shared_parameters(module, shared)
