"""A server that sends one message of a secure sum several times at once is answered as if it had sent them in turn."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dpret.errors import LitDpretError
from lit_dpret.federated.keys import Credentials, new_identity
from lit_dpret.federated.secure_sum import Client, Server
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.silo_sum import SiloSum, SumPlan

SILOS = 5


def test_one_vector_is_masked_in_a_sum_however_many_processes_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PddAs2(stage1=Stage1(weighting="uniform"), secure_sum=True, roster=True).check()
    names = [f"silo{i}" for i in range(1, SILOS + 1)]
    pairs = {name: new_identity() for name in names}
    roster = {name: pair[1] for name, pair in pairs.items()}

    def silo(number: int) -> SiloSum:
        name = names[number - 1]
        return SiloSum(tmp_path / name, settings, Credentials(name=name, identity=pairs[name][0], roster=roster))

    plan = SumPlan(run="r", round=0, attempt="a", weights="w", clients=tuple(range(1, SILOS + 1)))
    start, update = {"w": torch.ones(50)}, {"w": torch.full((50,), 1.01)}
    server = Server(plan.session(None))
    server.keys = {i: silo(i).begin(plan, i, start, update, examples=5) for i in plan.clients}
    boxes = server.route({i: silo(i).share("a", server.keys.values()) for i in plan.clients})[1]
    asked = [boxes, *({peer: box for peer, box in boxes.items() if peer != left} for left in boxes)]

    honest, answers, refusals = Client.mask, [], []

    def slow(self: Client, *given: Any) -> Any:
        found = honest(self, *given)
        time.sleep(0.05)  # as it takes for a large model
        return found

    def ask(sealed: Any) -> None:
        try:
            answers.append(silo(1).mask("a", sealed))
        except LitDpretError as refusal:
            refusals.append(refusal)

    monkeypatch.setattr(Client, "mask", slow)
    threads = [threading.Thread(target=ask, args=(sealed,)) for sealed in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 1 and len(refusals) == len(asked) - 1
