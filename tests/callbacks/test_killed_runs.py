"""Runs that the operating system kills at random moments, and what is left of them after a resume."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_runs import BUDGET_EXCEEDED, STEPS, Server
from safetensors.torch import load_file
from stand_ins import records

from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.ledger.run_ledger import charged_releases, check_no_key_reuse, noise_keys

pytestmark = pytest.mark.slow
MOMENTS = {"anywhere": 8, "checkpoint": 5, "step": 4, "ledger": 3}
# Six steps cost epsilon 0.376, eight 0.429, nine 0.454: under `never` two steps may be paid for twice.
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"replay": "auto", "eps": 0.38},
    "never": {"replay": "never", "eps": 0.43, "reserve": 2},
}


def begun(folder: Path) -> bool:
    """Whether the run came so far as to have a ledger, with which alone it goes on."""
    return (folder / "privacy_ledger.jsonl").exists()


def spent(folder: Path) -> float:
    return epsilon(charged_releases(records(folder)), delta=1 / 400, neighbours="zero_out", accountant="rdp")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def random_moments(calls: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Twenty moments, evenly drawn from what an uninterrupted run does; the same ones in every test run."""
    coins = random.Random(7)
    moments = []
    for where, count in MOMENTS.items():
        for _ in range(count):
            nth = coins.randrange(len(calls[where]))
            moments.append({"where": where, "nth": nth, "after": coins.randint(1, calls[where][nth])})
    return moments


def check_draws(path: Path, announced: set[tuple[int, int]], *, repeats: bool) -> None:
    """Hold every draw of noise of a run against its key: secret, run, attempt, step, parameter, shard.

    A key is drawn again only by a bit-identical replay, so with the same salt (the tag of the clipped sum).
    """
    draws = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    salts: dict[tuple[Any, ...], str] = {}
    times: Counter[tuple[Any, ...]] = Counter()
    noise: dict[str, tuple[Any, ...]] = {}
    for *key, salt, made in draws:
        name = tuple(key)
        assert (name[2], name[3]) in announced, "noise was drawn that no ledger announced"
        assert salts.setdefault(name, salt) == salt, f"{name} was drawn for two sums"
        assert noise.setdefault(made, name) == name, f"{name} and {noise[made]} drew the same noise"
        times[name] += 1
    assert repeats or not times or max(times.values()) == 1, "without replay no key is drawn twice"


@pytest.mark.parametrize("replay", ["auto", "never"])
def test_a_run_killed_at_twenty_random_moments_goes_on_honestly(server: Server, replay: str, tmp_path: Path) -> None:
    settings = SETTINGS[replay]
    whole = tmp_path / "whole" / "run"
    assert server.run(whole, resume=False, count=True, **settings) == 0
    expected, cost = load_file(whole / "model.safetensors"), spent(whole)
    calls = json.loads((whole / "calls.json").read_text(encoding="utf-8"))
    half_written, unconfirmed = 0, 0
    for number, moment in enumerate(random_moments(calls)):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        shutil.copy2(whole.with_name("secret"), folder.with_name("secret"))  # the same streams as the whole run's
        assert server.run(folder, resume=False, moment=moment, **settings) == -9, moment
        killed = records(folder)  # a torn last line is not read
        half_written += bool(list((folder / "checkpoints").glob(".*.tmp")))
        unconfirmed += bool(killed) and killed[-1]["kind"] == "intent"
        if number % 4 == 0:  # and again, on the way
            again = {"where": "anywhere", "nth": 0, "after": 2000 * (1 + number)}
            assert server.run(folder, resume=begun(folder), moment=again, **settings) in (-9, 0, BUDGET_EXCEEDED)
        status = server.run(folder, resume=begun(folder), **settings)
        known = records(folder)
        check_no_key_reuse(known)
        check_draws(folder.with_name("run.draws"), set(noise_keys(known)), repeats=replay == "auto")
        launches = [record for record in known if record["kind"] == "plan"]
        assert len(launches) >= (2 if killed else 1), f"{moment}: the ledger does not say that the run was resumed"
        if replay == "auto":
            assert status == 0, moment
            got = load_file(folder / "model.safetensors")
            assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in got), moment
            assert spent(folder) == cost, moment
            assert noise_keys(known) == [(0, step) for step in range(STEPS)]
        else:
            assert status == 0 or (status == BUDGET_EXCEEDED and number % 4 == 0), moment
            assert cost <= spent(folder) <= settings["eps"], moment
    assert half_written >= 2 and unconfirmed >= 2, (
        "no kill hit a checkpoint that was being written, or a step in flight"
    )
