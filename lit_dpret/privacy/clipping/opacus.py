"""Opacus' per-row gradients, for models that Opacus handles correctly, at units x parameters of memory.

Models that it gets wrong (opacus 1.6) are refused: by name where the class shows it, and otherwise by comparing its
gradients with autograd's, as sums in every batch and weighted by unit where rows are selected in a new way.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy.clipping.arithmetic import gamma
from lit_dpret.privacy.clipping.base import (
    ClippedSum,
    ClipSettings,
    ClipStats,
    RowLoss,
    accumulator_dtype,
    broken_units,
    check_losses,
)
from lit_dpret.privacy.clipping.recording_check import RowPatterns, tolerance_of, unit_weights
from lit_dpret.privacy.clipping.rules import RELATIVE_ATTENTION, WAYS_OUT, qualified_name
from lit_dpret.privacy.clipping.units import UnitRows

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
INSTEAD = "Freeze it with requires_grad_(False), or choose privacy.engine=ghost or loop."


class OpacusClipping(ClippedSum):
    """Clip the per-row gradients of Opacus, in train mode; ``privacy.engine=opacus``.

    Refused by name: T5's trainable relative position bias (opacus takes the query length for the batch); trainable
    embeddings with a ``padding_idx`` (its gradient of the padding row is not zero); trainable layers with buffers;
    torch's recurrent layers; layers whose forward needs more than one tensor (DoRA's). Also refused: any parameter
    whose per-row gradients do not have one slice per row or do not add up to autograd's (broadcast position ids, folded
    rows, a use outside its module).
    """

    def __init__(self, module: nn.Module, **clipping: Unpack[ClipSettings]) -> None:
        super().__init__(module, **clipping)
        try:
            self._opacus: Any = importlib.import_module("opacus.grad_sample").GradSampleHooks
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                "privacy.engine=opacus needs opacus 1.6 or later (pip install opacus). privacy.engine=ghost does not."
            ) from error
        self._patterns, self._verified = RowPatterns(), set[object]()
        self._refuse_known_mistakes()

    def _refuse_known_mistakes(self) -> None:
        names = {id(p): name for name, p in self.parameters.items()}
        for name, layer in self.module.named_modules():
            if isinstance(layer, torch.jit.ScriptModule) and any(id(p) in names for p in layer.parameters()):
                raise UnsupportedModelError(
                    f"{name or 'the module'} was made by torch.jit.script or trace, whose layers "
                    f"privacy.engine=opacus cannot read. Use the original module. {WAYS_OUT}",
                    trap="T13",
                )
            own = [names[id(p)] for p in layer._parameters.values() if p is not None and id(p) in names]
            bias = getattr(layer, "relative_attention_bias", None)
            if qualified_name(layer) in RELATIVE_ATTENTION and bias is not None and id(bias.weight) in names:
                raise UnsupportedModelError(
                    f"Parameter {names[id(bias.weight)]} is T5's relative position bias, which has no batch axis: "
                    f"opacus mistakes the query length for the batch size. {INSTEAD}",
                    trap="T10",
                )
            if own and isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                raise UnsupportedModelError(
                    f"Parameter {own[0]} belongs to an Embedding with padding_idx={layer.padding_idx}, "
                    f"whose padding row gets a gradient in opacus and none in autograd. {INSTEAD}"
                )
            reason = self._cannot_repeat(layer) if own else None
            if reason is not None:
                raise UnsupportedModelError(
                    f"Parameter {own[0]} is not covered by privacy.engine=opacus. Its owner is {name or 'the module'} "
                    f"({type(layer).__name__}): {reason}. {WAYS_OUT}",
                    trap="T13",
                )
            if own and any(True for _ in layer.buffers()):
                raise UnsupportedModelError(
                    f"Parameter {own[0]} belongs to {name or 'the module'} ({type(layer).__name__}), "
                    f"which has buffers: opacus does not support it. {INSTEAD}"
                )

    def _cannot_repeat(self, layer: nn.Module) -> str | None:
        """Return why opacus cannot run a layer without a rule row by row, with its first input alone; or None."""
        if type(layer) in self._opacus.GRAD_SAMPLERS:
            return None
        if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
            return "opacus cannot run a recurrent layer of torch row by row"
        inputs = list(inspect.signature(layer.forward).parameters.values())
        needed = [each for each in inputs if each.default is each.empty and each.kind not in _ANY_NUMBER]
        if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
            return f"its forward needs {', '.join(each.name for each in needed)}, and opacus runs it with one tensor"
        return None

    def _add(self, row_loss: RowLoss, batch: UnitRows) -> ClipStats:
        for name, layer in self.module.named_modules():
            if not layer.training and any(p.requires_grad for p in layer.parameters(recurse=False)):
                raise ConfigurationError(
                    f"{name or 'the module'} is in eval mode, where opacus records nothing. "
                    "Call train() first, with the dropout rate set to 0 if dropout is not wanted."
                )
        # Created and removed in every batch: hooks that stay would record evaluation passes as well.
        hooks = self._opacus(self.module, batch_first=True, loss_reduction="sum", strict=True)
        try:
            losses = row_loss()
            check_losses(losses, batch.rows)
            samples = self._samples(hooks, losses, batch)
        finally:
            hooks.cleanup()
            for layer in self.module.modules():
                for attribute in ("activations", "max_batch_len"):
                    vars(layer).pop(attribute, None)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            return self._clip(samples, losses.detach(), batch)

    def _samples(self, hooks: Any, losses: Tensor, batch: UnitRows) -> dict[str, Tensor]:
        """Return per-row gradients, (rows, *shape), after comparing them with autograd's own."""
        real = torch.where(batch.row_is_real(), losses, torch.zeros_like(losses))
        pattern = self._patterns.of(losses, batch)
        weighing = not batch.one_unit and (pattern is None or pattern not in self._verified)
        parameters = list(self.parameters.values())
        with warnings.catch_warnings(), torch.autocast(losses.device.type, enabled=False):
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # a first layer's, as intended
            try:
                plain = torch.autograd.grad(real.sum(), parameters, allow_unused=True, retain_graph=weighing)
            except (torch.OutOfMemoryError, UnsupportedModelError):
                raise
            except (AttributeError, RuntimeError, ValueError, TypeError, IndexError) as error:
                raise UnsupportedModelError(
                    "privacy.engine=opacus cannot compute the gradients of this model row by row: "
                    f"{' '.join(str(error).split())}{self._without_rule()}. {WAYS_OUT}",
                    trap="T13",
                ) from error
            samples = {name: self._sample(name, p, batch.rows) for name, p in self.parameters.items()}
            tolerance = tolerance_of((losses, *(s for s in samples.values() if s is not None)))
            ones = torch.ones_like(real)
            self._compare(samples, plain, ones, tolerance)
            if weighing:
                # The second pass must not overwrite the per-row gradients of the first.
                hooks.disable_hooks()
                weights = unit_weights(batch).to(losses.dtype)[batch.unit_of_row]
                twins = torch.autograd.grad((real * weights).sum(), parameters, allow_unused=True)
                self._compare(samples, twins, weights, tolerance)
                # A batch with a broken row proves nothing, so the next one is weighted again.
                if pattern is not None and bool(real.isfinite().all()):
                    self._verified.add(pattern)
        return {name: sample for name, sample in samples.items() if sample is not None}

    def _without_rule(self) -> str:
        """Name the layers with trainable parameters that opacus runs again row by row."""
        layers = [
            f"{name or 'the module'} ({type(layer).__name__})"
            for name, layer in self.module.named_modules()
            if type(layer) not in self._opacus.GRAD_SAMPLERS and any(p.requires_grad for p in layer.parameters(False))
        ]
        return f"; it has no rule for {', '.join(layers)}" if layers else ""

    def _sample(self, name: str, parameter: Tensor, rows: int) -> Tensor | None:
        found = getattr(parameter, "grad_sample", None)
        if found is not None and (not isinstance(found, Tensor) or found.shape != (rows, *parameter.shape)):
            shape = tuple(found.shape) if isinstance(found, Tensor) else f"a list of {len(found)}"
            raise UnsupportedModelError(
                f"Parameter {name}: opacus returns per-row gradients of shape {shape} for {rows} rows, "
                f"so they cannot be assigned to rows. {INSTEAD}"
            )
        return found

    def _compare(
        self,
        samples: dict[str, Tensor | None],
        references: tuple[Tensor | None, ...],
        weights: Tensor,
        tolerance: float,
    ) -> None:
        """Refuse a parameter whose weighted per-row gradients do not add up to autograd's gradient."""
        whole = sum(float(g.double().square().sum()) for g in references if g is not None) ** 0.5
        if not torch.tensor(whole).isfinite():
            return
        for (name, sample), reference in zip(samples.items(), references, strict=True):
            if reference is None and sample is None:
                continue
            parameter = self.parameters[name]
            expected = torch.zeros_like(parameter) if reference is None else reference
            found = (
                torch.zeros_like(parameter)
                if sample is None
                else torch.tensordot(weights.to(sample.dtype), sample, dims=1)
            )
            gap = float((found - expected).double().norm())
            if not gap <= tolerance * (float(expected.double().norm()) + 1e-3 * whole):
                raise UnsupportedModelError(
                    f"Parameter {name}: the per-row gradients of opacus do not add up to autograd's (they differ "
                    f"by {gap:.3g}, norm {float(expected.norm()):.3g}): it is shared over the batch, used outside "
                    f"its module, or the loss of one unit depends on another unit. {INSTEAD}"
                )

    def _clip(self, samples: dict[str, Tensor], losses: Tensor, batch: UnitRows) -> ClipStats:
        # Squares in float64, as in the other engines: small parameters would vanish next to large ones.
        squares = torch.zeros(len(self.groups), batch.units, dtype=torch.float64, device=batch.real.device)
        for group in batch.groups:
            for name, sample in samples.items():
                rows = group.join(sample[:, None].to(accumulator_dtype(sample)))
                rows = rows.reshape(*group.rows.shape, -1)
                norm = torch.linalg.vector_norm(rows.sum(1), dim=1, dtype=torch.float64)
                if (count := rows.shape[1]) > 1:  # what adding them up may miss, here and in the sum
                    sizes = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64).sum(1)
                    norm += 2 * gamma(count + 2, torch.finfo(rows.dtype).eps / 2) * sizes
                squares[self.group_of[name], group.units] += norm.square()
        norms = torch.where(broken_units(losses, batch), torch.nan, squares.sqrt())
        coefficients = torch.where(batch.real, self.factors(norms), 0)[:, batch.unit_of_row]
        with self._all_or_nothing():
            for name, sample in samples.items():
                dtype = accumulator_dtype(self.parameters[name])
                factors = coefficients[self.group_of[name]]
                # Left out instead of multiplied: rows of a dropped unit may be NaN.
                keep = factors.nonzero().flatten()
                total = torch.tensordot(factors[keep].to(dtype), sample[keep].to(dtype), dims=1)
                self._sums[name] = self._sums[name].add_(total) if name in self._sums else total
        return self.stats(norms, batch)
