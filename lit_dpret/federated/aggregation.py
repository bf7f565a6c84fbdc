"""From the clients' weights to the server's: FedAvg and its relatives, as arithmetic on named tensors.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (1602.05629); equations
5 and 6 of paper 004. Only trainable floating-point tensors travel.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.budget import require_choice

Weighting = Literal["examples", "uniform", "capped"]
Aggregation = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"]
Weights = dict[str, Tensor]


def client_weights(counts: Mapping[str, int], weighting: Weighting, *, n_hat: int | None = None) -> dict[str, float]:
    """How much each client counts; not normalised.

    Args:
        counts: Train queries of each client.
        weighting: ``examples``, |D_i| as in the paper; ``uniform``; or ``capped``, min(|D_i| / n_hat, 1), which
            bounds what a large client can do (McMahan et al., 1710.06963, section 2.1).
        n_hat: Where ``capped`` stops to grow; a public number.

    Raises:
        ConfigurationError: ``n_hat`` is missing or has no meaning.
        DataError: A client has nothing to train on.
    """
    require_choice("federated.stage1.weighting", weighting, get_args(Weighting))
    if (weighting == "capped") != (n_hat is not None) or (n_hat is not None and n_hat < 1):
        raise ConfigurationError(
            f"federated.stage1.n_hat={n_hat} with federated.stage1.weighting={weighting}: the cap is a positive number "
            "and goes with weighting=capped alone."
        )
    empty = next((name for name, count in counts.items() if count < 1), None)
    if empty is not None:
        raise DataError(f"Client {empty!r} has no train query, so it has nothing to contribute. Leave it out.")
    if weighting == "uniform":
        return dict.fromkeys(counts, 1.0)
    return {name: float(count) if n_hat is None else min(count / n_hat, 1.0) for name, count in counts.items()}


def take_weights(module: nn.Module) -> Weights:
    """A copy of the trainable parameters, float32 on the CPU, each once however many names it has."""
    return {
        name: parameter.detach().to("cpu", torch.float32).clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters.

    Raises:
        DataError: A name, a shape or a value is not what the module has room for.
    """
    own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    check_weights("the weights", weights, own)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{tuple(weights[name].shape)}".encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_weights(whose: str, weights: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not of the model: other names or shapes, NaN or infinity.

    Raises:
        DataError: Naming whose, and the first tensor that is wrong.
    """
    if set(weights) != set(like):
        odd = sorted(set(weights) ^ set(like))
        raise DataError(
            f"{whose}: {len(odd)} tensors are missing or too many, {odd[0]!r} among them.", kind="bad update"
        )
    for name, value in weights.items():
        if value.shape != like[name].shape:
            raise DataError(
                f"{whose}: {name!r} has shape {tuple(value.shape)} where {tuple(like[name].shape)} is needed.",
                kind="bad update",
            )
        if not bool(torch.isfinite(value).all()):
            raise DataError(f"{whose}: {name!r} holds values that are not finite.", kind="bad update")


def check_norm(whose: str, start: Mapping[str, Tensor], update: Mapping[str, Tensor], most: float | None) -> None:
    """Refuse a change of the weights that is too long beside the weights themselves (L2, over all of them).

    Args:
        whose: For the message.
        start: The weights before.
        update: The weights after.
        most: ``federated.update_norm``; null for no bound.

    Raises:
        DataError: Naming whose, and how long it is.
    """
    if most is None:
        return
    length = math.sqrt(sum(float(value.double().square().sum()) for value in start.values()))
    change = math.sqrt(
        sum(float((update[name].double() - value.double()).square().sum()) for name, value in start.items())
    )
    if not change <= most * length:
        raise DataError(
            f"{whose}: the change of its weights has length {change:.3g} beside weights of length {length:.3g}, and "
            f"federated.update_norm={most:g} times that is allowed. If it is honest, raise that setting.",
            kind="bad update",
        )


def weighted_mean(updates: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> Weights:
    """Equation 6: the mean of the clients' tensors, weighted by theirs, summed in float64.

    Guarantees:
        - Each tensor lies within the least and the greatest value of the clients, up to rounding.
        - The order of the clients changes nothing.

    Raises:
        DataError: There is no client, one has no weight, or their tensors do not fit together.
    """
    if not updates:
        raise DataError("No client answered, so there is nothing to average.")
    names = sorted(updates)
    first = updates[names[0]]
    for name in names:
        check_weights(f"client {name!r}", updates[name], first)
        if not weights.get(name, 0.0) > 0:
            raise DataError(f"Client {name!r} has no positive weight.")
    total = sum(weights[name] for name in names)
    mean: Weights = {}
    for key, value in first.items():
        summed = sum(
            (updates[name][key].double() * weights[name] for name in names), torch.zeros((), dtype=torch.float64)
        )
        mean[key] = (summed / total).to(value.dtype)
    return mean


class TowardsAnchor(Callback):
    """Adds ``strength * (w - anchor)`` to every gradient: the term ``strength / 2 * |w - anchor|^2`` of the loss.

    With the weights of the round's start as the anchor it is FedProx (Li et al., 1812.06127, equation 2); with
    the mean of the clients' personal models MR-MTL (Liu et al., "On Privacy and Personalization in Cross-Silo
    Federated Learning", 2206.07902, section 5). The term is a function of released weights alone. It is added
    after clipping and noise, so that it costs no privacy and takes no part of the clipped gradient.

    Args:
        anchor: By parameter name.
        strength: mu of FedProx, lambda of MR-MTL; positive.
    """

    #: What it writes while the optimizer steps: made of released weights alone.
    public_metrics = ("grad",)

    def __init__(self, anchor: Mapping[str, Tensor], strength: float) -> None:
        if not strength > 0:
            raise ConfigurationError(
                f"federated.stage1.strength={strength} must be positive; strategy=fedavg has none."
            )
        self._anchor, self._strength = dict(anchor), strength

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and name in self._anchor:
                away = parameter.detach() - self._anchor[name].to(parameter)
                parameter.grad.add_(away, alpha=self._strength)
