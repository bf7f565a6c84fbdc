"""Two processes make the run that one process makes: the same update, the same ledger, the same end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import REFUSED, Server, ledger, told, weights
from stand_ins import granted, records

from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases


def clip_fractions(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["privacy/clip_fraction"] for line in lines if "privacy/clip_fraction" in line]


# Few units at a time: some steps leave a rank empty, and some both.
SPARSE: dict[str, Any] = {"size": 40, "expected_batch_size": None, "sample_rate": 0.03, "physical_batch_size": 2}
COUPLED: dict[str, Any] = {"size": 40, "expected_batch_size": None, "sample_rate": 0.15, "physical_batch_size": 40}
FROZEN: dict[str, Any] = {"expected_batch_size": None, "sample_rate": 0.3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp_sgd", {"data": SPARSE, "steps": 12}),
    ("dp_sgd, all rows of a unit", {"data": SPARSE | {"rows_per_unit": "all", "sample_rate": 0.1}}),
    ("dp_sgd, fewer units than ranks", {"data": SPARSE | {"size": 1, "sample_rate": 0.5}}),
    ("dp_sgd, vmap, per layer", {"mode": {"name": "dp_sgd", "engine": "vmap", "clip_groups": "per_layer"}}),
    ("dp_sgd, opacus", {"mode": {"name": "dp_sgd", "engine": "opacus"}, "data": SPARSE}),
    ("dp_sgd, loop", {"mode": {"name": "dp_sgd", "engine": "loop", "clip": "automatic"}, "data": SPARSE}),
    ("dp_sgd, T5 with tied weights", {"module": "t5", "data": SPARSE | {"sample_rate": 0.1}, "steps": 4}),
    ("dp_sgd, Llama with tied weights", {"module": "llama", "data": SPARSE | {"sample_rate": 0.1}, "steps": 4}),
    ("dp_sgd, share of clipped units", {"mode": {"name": "dp_sgd", "clip_fraction_budget": 0.1}, "data": SPARSE}),
    ("batch_clip", {"module": "pairs", "data": COUPLED,
                    "mode": {"name": "batch_clip", "max_grad_norm": 0.1, "sub_batches": 3}}),
    ("per_example_duplicated", {"module": "pairs", "data": COUPLED | {"sample_rate": 0.4},
                                "mode": {"name": "per_example_duplicated", "max_grad_norm": 0.1, "sub_batches": 3}}),
    ("logit_dp", {"module": "pairs", "data": COUPLED,
                  "mode": {"name": "logit_dp", "max_logit_grad_norm": 0.1, "sub_batches": 3}}),
    ("logit_dp, one sub-batch", {"module": "pairs", "data": COUPLED,
                                 "mode": {"name": "logit_dp", "max_logit_grad_norm": 0.1}}),
    ("public_passages", {"module": "frozen", "data": FROZEN,
                         "mode": {"name": "public_passages", "max_grad_norm": 0.1, "pool_size": 5}}),
    ("none", {"mode": {"name": "none"}, "data": SPARSE}),
    ("none, sub-batches", {"module": "pairs", "data": COUPLED, "mode": {"name": "none", "sub_batches": 3}}),
]  # fmt: skip


FAST = (
    "dp_sgd",
    "dp_sgd, all rows of a unit",
    "dp_sgd, share of clipped units",
    "logit_dp",
    "public_passages",
    "none, sub-batches",
)


@pytest.mark.costly
@pytest.mark.parametrize(
    "given", [pytest.param(given, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, given in CASES]
)
def test_two_ranks_make_the_update_and_the_ledger_of_one(given: dict[str, Any], server: Server, tmp_path: Path) -> None:
    for world in (1, 2):
        assert server.run("fit", tmp_path / f"{world}", world=world, **given) == [0] * world
    one, first, second = (told(tmp_path / folder, rank) for folder, rank in (("1", 0), ("2", 0), ("2", 1)))
    assert first["weights"] == second["weights"]
    assert (weights(one) - weights(first)).abs().max() < 1e-5
    assert one["eps"] == first["eps"] == second["eps"] and first["global_step"] == given.get("steps", 6)
    assert one["loss"] == pytest.approx(first["loss"]) and first["loss"] == second["loss"]
    assert ledger(tmp_path / "1") == ledger(tmp_path / "2")
    shares = clip_fractions(tmp_path / "1")
    assert shares == clip_fractions(tmp_path / "2")
    assert bool(shares) == ("clip_fraction_budget" in given.get("mode", {}))


@pytest.mark.costly
def test_two_ranks_keep_the_float32_masters_of_bfloat16_weights_and_go_on_from_them(
    server: Server, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": SPARSE | {"sample_rate": 0.2}, "trainer": {"precision": "bf16-true"}}
    masters = []
    for world in (1, 2):
        assert server.run("fit", tmp_path / f"{world}", world=world, **given) == [0] * world
        kept = torch.load(tmp_path / f"{world}" / "checkpoints" / "last.ckpt", weights_only=True)
        masters.append(torch.cat([value.flatten() for value in kept["state_dict"].values()]))
    assert masters[0].dtype == torch.float32 and not torch.equal(masters[0], masters[0].bfloat16().float())
    assert ledger(tmp_path / "1") == ledger(tmp_path / "2")
    assert (masters[0] - masters[1]).abs().max() < 1e-4, "gradients are of bfloat16 weights, a rounding apart"
    assert server.run("fit", tmp_path / "2", world=2, resume=True, **given) == [0, 0]
    first, second = (told(tmp_path / "2", rank) for rank in (0, 1))
    assert (
        first["weights"] == second["weights"]
        and ledger(tmp_path / "1") == ledger(tmp_path / "2")[: len(ledger(tmp_path / "1"))]
    )
    read = torch.cat([torch.tensor(first["weights"][name]).flatten() for name in kept["state_dict"]])
    assert torch.equal(read, masters[1].bfloat16().float()), "all steps are made: it ends with what it read"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"data": {"content": "b"}}, "data set"),
        ({"data": {"physical_batch_size": 3}}, "plan and way of batching"),
        ({"mode": {"name": "dp_sgd", "max_grad_norm": 2.0}}, "privacy setting and plan"),
        ({"steps": 7}, "number of steps and plan"),
        ({"module_settings": {"lr": 0.1}}, "optimizer"),
        ({"module": "pairs", "mode": {"name": "dp_sgd"}}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_was_started_otherwise_is_refused_by_all_before_a_ledger_is_begun(
    other: dict[str, Any], named: str, server: Server, tmp_path: Path
) -> None:
    assert server.run("fit", tmp_path / "run", other=other, timeout=60) == [2, 2]
    for rank in (0, 1):
        assert f"Rank 1 of 2 would train with a different {named}" in told(tmp_path / "run", rank)["text"]
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.costly
def test_ranks_that_begin_with_other_weights_train_those_of_rank_0(server: Server, tmp_path: Path) -> None:
    assert server.run("fit", tmp_path / "same") == [0, 0]
    assert server.run("fit", tmp_path / "shifted", shifted=True) == [0, 0]
    assert told(tmp_path / "shifted", 1)["weights"] == told(tmp_path / "same", 0)["weights"]


@pytest.mark.slow
def test_the_ledger_of_the_data_set_counts_a_run_once_however_many_ranks_it_has(server: Server, tmp_path: Path) -> None:
    found = []
    for world in (1, 2):
        path = tmp_path / f"all{world}.jsonl"
        mode = {"name": "dp_sgd", "dataset_ledger": str(path), "total_eps": 60.0}
        assert server.run("fit", tmp_path / f"{world}", world=world, mode=mode) == [0] * world
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = ("seq", "kind", "eps", "total_eps", "charged", "planned", "spent", "releases")
        found.append([{k: v for k, v in json.loads(line).items() if k in kept} for line in lines])
    assert found[0] == found[1] and len(found[0]) > 1


# -- a module with a step of its own runs on several processes only where it adds up over them --


@pytest.mark.costly
def test_a_foreign_module_is_refused_on_two_processes_before_a_ledger_is_begun(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run") == [REFUSED] * 2
    for rank in (0, 1):
        assert "Regression has a custom training step" in told(tmp_path / "run", rank)["text"]
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.costly
def test_ranks_that_say_they_add_up_and_do_not_are_refused_before_any_noise(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run", declares=True) == [REFUSED] * 2
    for rank in (0, 1):
        assert "different sums for step 0" in told(tmp_path / "run", rank)["text"]
    assert not granted(tmp_path / "run")


@pytest.mark.costly
def test_a_foreign_module_that_adds_up_makes_the_same_update_on_both(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run", declares=True, adds_up=True) == [0, 0]
    assert told(tmp_path / "run", 0)["weights"] == told(tmp_path / "run", 1)["weights"]
    assert len(records(tmp_path / "run", "release")) == 3
    assert [*(tmp_path / "run").rglob("*.ckpt")], "its checkpoints are written though it completes none"
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert any("None of it was checked" in each["text"] for each in card["assumptions"])


# -- memory that runs out on one of two processes: the other one neither hangs nor goes on alone --


DATA = {"sample_rate": 0.1, "expected_batch_size": None, "physical_batch_size": 4}


@pytest.mark.slow
def test_a_rank_on_which_nothing_fits_ends_all_of_them_unpaid(server: Server, tmp_path: Path) -> None:
    settings = {"data": DATA, "at": 5, "always": True}
    assert server.run("short_of_memory", tmp_path / "short", **settings) == [REFUSED, REFUSED]
    for rank in (0, 1):
        seen = told(tmp_path / "short", rank)
        assert seen["error"] == "DeviceMemoryError" and "resume=true" in seen["text"], seen
    paid = granted(tmp_path / "short")
    assert paid == [(0, step) for step in range(len(paid))] and len(paid) < 6
    assert server.run("fit", tmp_path / "short", data=DATA, resume=True) == [0, 0]
    # Without replay the steps since the last checkpoint are paid once more, and the one that ran short but once.
    again = [key for key in granted(tmp_path / "short") if key not in paid]
    assert [step for _, step in again] == list(range(again[0][1], 6)) and again[0][1] <= len(paid)


# -- a rank that dies ends the job soon and in words, and the job goes on from there without losing --


STEPS = 6


def lose(server: Server, folder: Path, **doom: Any) -> None:
    """Train until a rank dies, and see that the other one ends with a message that helps."""
    begun = time.monotonic()
    statuses = server.run("fit", folder, replay="auto", steps=STEPS, doom=doom, timeout=90)
    took = time.monotonic() - begun
    whose = doom["whose"]
    assert statuses[whose] != 0 and statuses[1 - whose] == 2, statuses
    assert took < 60
    said = told(folder, 1 - whose)["text"]
    assert "Another process of this job ended" in said and "resume=true" in said


SLOW = pytest.mark.slow


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "on", "errors"),
    [
        ("coupled late", 0, ["UnsupportedModelError", "UnsupportedModelError"]),
        ("coupled late", 1, ["UnsupportedModelError", "UnsupportedModelError"]),
        ("one update more", 1, ["WorkerError", "ConfigurationError"]),
    ],
)
def test_what_one_rank_finds_out_late_leaves_no_claim(
    kind: str, on: int, errors: list[str], server: Server, tmp_path: Path
) -> None:
    """Rank 0 holds the ledger, and another rank may find out, or end, alone."""
    folder = tmp_path / "run"
    statuses = server.run("fit", folder, module=kind, module_settings={"on": on}, steps=30, timeout=90)
    assert 0 not in statuses and [told(folder, rank)["error"] for rank in (0, 1)] == errors
    assert len(granted(folder)) >= 3
    found = charged_releases(PrivacyLedger.read(folder / "privacy_ledger.jsonl").records)
    assert found and all(isinstance(release, NonPrivateRelease) for release in found)


@pytest.mark.costly
@pytest.mark.parametrize("whose", [0, pytest.param(1, marks=SLOW)])
def test_a_killed_rank_ends_the_job_in_words_and_the_run_goes_on(whose: int, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lose(server, folder, whose=whose, at=3)
    assert granted(folder) == [(0, 0), (0, 1), (0, 2)]
    # The last checkpoint is of step 2: step 3 is repeated bit by bit, and paid for once.
    assert server.run("fit", folder, replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert granted(folder) == [(0, step) for step in range(STEPS)]
    assert [record["step"] for record in records(folder, "replay")] == [2]
    assert server.run("fit", tmp_path / "whole", replay="auto", steps=STEPS) == [0, 0]
    assert told(folder, 0)["weights"] == told(folder, 1)["weights"] == told(tmp_path / "whole", 0)["weights"]


@pytest.mark.costly
@pytest.mark.parametrize("whose", [pytest.param(0, marks=SLOW), 1])
def test_a_rank_that_dies_while_getting_ready_leaves_a_run_that_can_start(
    whose: int, server: Server, tmp_path: Path
) -> None:
    lose(server, tmp_path / "run", whose=whose, at=0, where="setup")
    assert granted(tmp_path / "run") == []
    assert server.run("fit", tmp_path / "run", replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert len(granted(tmp_path / "run")) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("whose", [0, 1])
def test_a_rank_that_is_stuck_ends_the_job_after_the_timeout(whose: int, server: Server, tmp_path: Path) -> None:
    doom = {"whose": whose, "at": 3, "how": "hang"}
    statuses = server.run("fit", tmp_path / "run", steps=STEPS, doom=doom, patience=4, timeout=25)
    assert statuses[whose] == -9 and statuses[1 - whose] == 2  # the stuck one is killed by the test
    assert "Another process of this job ended or stopped answering" in told(tmp_path / "run", 1 - whose)["text"]


@pytest.mark.slow
@pytest.mark.parametrize("whose", [-1, 0, 1])
def test_a_sigterm_ends_the_job_after_the_step_and_it_goes_on(whose: int, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    doom = {"whose": whose, "at": 3, "how": "sigterm"}
    statuses = server.run("fit", folder, replay="auto", steps=STEPS, doom=doom, timeout=60)
    assert 0 not in statuses and -9 not in statuses, "the job went on, or had to be killed"
    assert {told(folder, rank)["error"] for rank in (0, 1)} <= {"SIGTERMException", "WorkerError"}
    assert granted(folder) == [(0, step) for step in range(4)]
    assert server.run("fit", folder, replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert sorted(set(granted(folder))) == [(0, step) for step in range(STEPS)]


@pytest.mark.costly
@pytest.mark.parametrize(("how", "reason"), [("error", "failed"), pytest.param("interrupt", "WorkerError", marks=SLOW)])
def test_why_another_rank_went_decides_about_the_claim(how: str, reason: str, server: Server, tmp_path: Path) -> None:
    doom = {"whose": 1, "at": 3, "how": how, "where": "batch end"}  # rank 0 is done with its batch, and waits
    statuses = server.run("fit", tmp_path / "run", steps=STEPS, doom=doom, timeout=90)
    assert 0 not in statuses and told(tmp_path / "run", 0)["error"] == "WorkerError"
    (end,) = (
        one for one in PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records if one["kind"] == "end"
    )
    assert end["reason"] == reason


@pytest.mark.costly
@pytest.mark.parametrize(("before", "after"), [pytest.param(1, 2, marks=SLOW), (2, 1)])
def test_another_number_of_ranks_goes_on_with_fresh_noise_and_charges_it(
    before: int, after: int, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    statuses = server.run(
        "fit", folder, world=before, replay="auto", steps=STEPS, doom={"whose": 0, "at": 3}, timeout=90
    )
    assert statuses[0] == -9
    assert server.run("fit", folder, world=after, replay="auto", steps=STEPS, resume=True) == [0] * after
    # Step 2 was granted and not in the checkpoint: it is made again as another release.
    assert granted(folder) == [(0, 0), (0, 1), (0, 2), *((1, step) for step in range(2, STEPS))]
    assert server.run("fit", tmp_path / "whole", world=after, replay="auto", steps=STEPS) == [0] * after
    assert told(folder, 0)["eps"] > told(tmp_path / "whole", 0)["eps"], "the release that was lost is free"
