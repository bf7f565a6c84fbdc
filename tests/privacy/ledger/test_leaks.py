from __future__ import annotations

import pytest

from lit_dpret.privacy.ledger.judgement import DECLARED_EVENT, PRIVATE_EVENT, leaks


@pytest.mark.parametrize("mode", ["dp_sgd", "logit_dp", "batch_clip", "per_example_duplicated", "public_passages"])
def test_a_declared_leak_is_told_in_every_mode_that_promises_something(mode: str) -> None:
    plan = {"kind": "plan", "mode": mode, "log_private_loss": True, "noise_seed": 7}
    assert [leak.standing for leak in leaks([plan])] == ["refuted", "refuted"]
    assert leaks([{**plan, "mode": "none"}]) == []


def test_each_kind_of_private_metric_is_told_once_with_how_often_it_was_logged() -> None:
    def event(label: str) -> dict[str, object]:
        return {"kind": "event", "name": PRIVATE_EVENT, "release": {"kind": "non_private", "label": label, "count": 1}}

    found = leaks([event("a of dev"), event("b of dev"), event("a of dev")])
    assert [leak.text.split(": ")[1] for leak in found] == [
        "a of dev were logged during training, 2 times.",
        "b of dev were logged during training, 1 times.",
    ]
    assert all(leak.refuted and leak.consequence == "no_guarantee" for leak in found)


def test_a_declaration_is_told_once_and_left_open() -> None:
    event = {"kind": "event", "name": DECLARED_EVENT, "data": "public", "split": "dev"}
    (said,) = leaks([event, event])
    assert said.standing == "unverified" and "are public, as declared" in said.text
