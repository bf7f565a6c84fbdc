"""The weights of a net that is not a transformer, as a folder that says what they belong to."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from lit_dpret.errors import StorageError, UnsupportedModelError, schema_problem

SCHEMA = "lit-dpret/net/1"
WEIGHTS = "model.safetensors"
FACTS = "net.json"


def save_net(net: nn.Module, folder: str | Path) -> Path:
    """Write ``model.safetensors`` and ``net.json``, which names the class.

    Raises:
        StorageError: The folder cannot be written.
    """
    place = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}
    facts = {"schema": SCHEMA, "net": f"{type(net).__module__}.{type(net).__qualname__}"}
    try:
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / WEIGHTS)
        (place / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{place} could not be written to: {error.strerror}.") from error
    return place


def load_net(net: nn.Module, folder: str | Path) -> None:
    """Give ``net`` the weights that `save_net` wrote, all of them and no others.

    Raises:
        UnsupportedModelError: The folder holds no net, one of a newer format, or one of another shape.
    """
    place = Path(folder)
    try:
        facts = json.loads((place / FACTS).read_text(encoding="utf-8"))
        if problem := schema_problem(facts.get("schema"), SCHEMA):
            raise UnsupportedModelError(f"{place / FACTS} cannot be read: {problem}")
        net.load_state_dict(load_file(place / WEIGHTS), strict=True)
    except (OSError, json.JSONDecodeError, AttributeError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(
            f"model.encoder={place} is no folder with the weights of model.net={type(net).__name__}: {reason} Name the "
            "model folder of a run with the same net and the same settings."
        ) from error
