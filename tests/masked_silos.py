"""Five silos under masks on a grid that writes everything down; imported by path, not a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process_grid import InProcessGrid
from messages import ByMessages
from tiny_silos import SMALL

from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.flower.client_app import build_client_app
from lit_dpret.federated.flower.library import Message, RecordDict
from lit_dpret.federated.keys import Credentials, identity_of, new_identity
from lit_dpret.federated.settings import PddAs2

NAMES = tuple(f"client{i}" for i in range(5))
START = {"w": torch.zeros(40, 25), "b": torch.ones(7)}
MASKED = replace(
    SMALL,
    stage1=replace(SMALL.stage1, warmup_rounds=0, rounds=1, weighting="uniform"),
    stage2=replace(SMALL.stage2, epochs=0),
    secure_sum=True,
    sum_threshold=3,
    update_norm=10.0,  # these silos drift by more than their first weights are long
)
PRIVATE_KEYS = {name: new_identity()[0] for name in NAMES}
PUBLIC_KEYS = {name: identity_of(key) for name, key in PRIVATE_KEYS.items()}


def drifted(weights: Mapping[str, torch.Tensor], name: str, number: int) -> Weights:
    """The weights of a silo after a round: coins that a test knows too."""
    generator = torch.Generator().manual_seed(1000 * number + int(name[-1]))
    return {key: weights[key] + 0.1 * torch.randn(weights[key].shape, generator=generator) for key in sorted(weights)}


class Drifts:
    """What the apps ask of a silo that has no data and learns nothing."""

    def __init__(self, name: str, state: Path, settings: PddAs2, credentials: Credentials | None) -> None:
        self.name, self.state, self.settings, self.credentials = name, state, settings, credentials
        self.ledgers = state / "private"
        self.examples = 5 + 7 * int(name[-1])
        self.model = (START, 16)

    def accept_round(self, weights: Mapping[str, torch.Tensor], number: int) -> None:
        """Has nothing to record."""

    def train_shared(self, weights: Mapping[str, torch.Tensor], number: int) -> Weights:
        return drifted(weights, self.name, number)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, np.ndarray]:
        return {"sentence/mrr@10": np.ones(1)}


class WritesDown(InProcessGrid):
    """Keeps what the server sent and got."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: list[tuple[str, int, str, RecordDict]] = []

    def _handled(self, message: Message, node: int) -> Message:
        kind = message.metadata.message_type
        self.seen.append((kind, node, "down", message.content))
        reply = super()._handled(message, node)
        if reply.has_content():
            self.seen.append((kind, node, "up", reply.content))
        return reply

    def of(self, kind: str, way: str = "up") -> dict[int, RecordDict]:
        """By node what was sent up, or down, in the last message of a kind."""
        return {node: content for found, node, found_way, content in self.seen if (found, found_way) == (kind, way)}


class Masked(ByMessages):
    """The run, its grid and its server."""

    grid_of = WritesDown

    def __init__(self, root: Path, settings: PddAs2 = MASKED, *, silo: Any = Drifts,
                 keys: Mapping[str, Credentials] | None = None, names: tuple[str, ...] = NAMES,
                 **more: Any) -> None:  # fmt: skip
        self.root, self._silo, self._keys = root, silo, dict(keys or {})
        super().__init__(settings, names, START, root / "server", **more)

    def silo_of(self, name: str) -> Any:
        return self._silo(name, self.root / name, self.settings, self._keys.get(name))

    def forget_between_messages(self) -> Masked:
        """Every message from now on is handled by a new app with new silos, as by a new process."""
        handled = self.grid._handled

        def anew(message: Message, node: int) -> Message:
            self.grid._app = build_client_app(self.client)
            return handled(message, node)

        self.grid._handled = anew
        return self


def credentials(**instead: bytes) -> dict[str, Credentials]:
    """Of all silos; one with another signing key has it on its own copy of the roster, and on no other."""
    return {
        name: Credentials(
            name=name,
            identity=instead.get(name, PRIVATE_KEYS[name]),
            roster={**PUBLIC_KEYS, name: identity_of(instead.get(name, PRIVATE_KEYS[name]))},
        )
        for name in NAMES
    }
