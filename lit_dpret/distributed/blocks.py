"""The blocks of a model, each of which a strategy that shards gathers by itself."""

from __future__ import annotations

from torch import nn


def own_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: elements of a top-level ``ModuleList`` with exclusive parameters."""
    users: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        users[id(parameter)] = users.get(id(parameter), 0) + 1
    found: list[nn.Module] = []
    inside: set[int] = set()
    for layer in module.modules():
        if not isinstance(layer, nn.ModuleList):
            continue
        for block in layer:
            own: dict[int, int] = {}
            for _, parameter in block.named_parameters(remove_duplicate=False):
                own[id(parameter)] = own.get(id(parameter), 0) + 1
            alone = bool(own) and all(users[key] == count for key, count in own.items())
            if alone and id(block) not in inside and any(True for _ in block.children()):
                found.append(block)
                inside.update(id(part) for part in block.modules())
    return found
