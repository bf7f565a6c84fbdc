"""Memory that runs out at any moment of a run leaves the ledger right, and the weights what they would have been."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit, records
from torch import Tensor, nn

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.errors import DataError, DeviceMemoryError, ResumeError, UnsupportedModelError
from lit_dpret.memory import is_out_of_memory
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.physical_batches import PhysicalBatches, Tally, refuse_where_none_fits
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.clipping.ghost import GhostClipping
from lit_dpret.privacy.ledger.run_ledger import noise_keys, read_keys
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, PrivacyMode

STEPS = 4
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to ...")


class WholeNumbers(PrivateModule):
    """Gradients that are whole numbers below the clip bound: their sum is exact in whatever order it is made."""

    public_metrics = ("calls", "sizes")  # declared, so that the tests can read them

    def __init__(self, *, privacy: PrivacyMode, largest: int | None = None, fail_at: tuple[int, ...] = ()) -> None:
        super().__init__(privacy=privacy, optimizer=OptimizerSpec(name="sgd", lr=0.5))
        self.layer = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.largest, self.fail_at = largest, fail_at
        self.calls, self.sizes, self.counted = 0, [], itertools.count(1)

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        numbers = torch.tensor([[int(row.query) % 3, int(row.passage) % 2, 1] for row in rows], dtype=torch.float32)
        return {"numbers": numbers}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self.calls = next(self.counted)  # a plain number would be put back after each look for couplings
            self.sizes.append(len(rows["numbers"]))
            if self.calls in self.fail_at or len(rows["numbers"]) > (self.largest or 10**9):
                raise CUDA if self.calls % 2 else CPU
        return self.layer(rows["numbers"]).squeeze(-1)


def private(tmp_path: Path, **settings: Any) -> DPSGD:
    return dp(tmp_path, max_grad_norm=100.0, noise_seed=3, **settings)  # the same draws in every test run


def kinds(folder: Path) -> list[tuple[str, int]]:
    return [(r["kind"], r["step"]) for r in records(folder) if r["kind"] in ("intent", "release", "replay")]


def same_streams(run: Path, other: Path) -> None:
    other.mkdir()
    first = (run / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (other / "privacy_ledger.jsonl").write_text(first + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, int]:
    """The folder of a run, the weights it ended with, and how many forward passes it made."""
    folder = tmp_path_factory.mktemp("whole")
    module = WholeNumbers(privacy=private(folder))
    fit(folder / "run", module, Numbers(physical_batch_size=8), steps=STEPS)
    return folder, module.layer.weight.detach().clone(), module.calls


def once_more(undisturbed: tuple[Path, Tensor, int], folder: Path, *, units: int = 8, **settings: Any) -> WholeNumbers:
    """Make the same run, with the same noise, in ``folder/run``; its weights are those of the undisturbed one."""
    whole, weight, _ = undisturbed
    if not (folder / "run").exists():
        same_streams(whole / "run", folder / "run")
    module = WholeNumbers(privacy=private(whole), **settings)
    fit(folder / "run", module, Numbers(physical_batch_size=units), steps=STEPS, resume=True)
    assert torch.equal(module.layer.weight, weight) and bool(weight.abs().sum() > 0)
    return module


@pytest.mark.parametrize("moment", ["first", "middle", "last", "three times in a row"])
def test_a_step_that_runs_out_of_memory_begins_again_and_is_charged_once(
    moment: str, undisturbed: tuple[Path, Tensor, int], tmp_path: Path
) -> None:
    whole, _, calls = undisturbed
    assert calls > 2 * STEPS, "a step has several physical batches"
    at = {"first": (1,), "middle": (calls // 2,), "last": (calls,), "three times in a row": (3, 4, 5)}[moment]
    module = once_more(undisturbed, tmp_path, fail_at=at)
    assert module.calls > calls and max(module.sizes) == 8
    assert kinds(tmp_path / "run") == kinds(whole / "run")
    assert len(noise_keys(records(tmp_path / "run"))) == STEPS
    tags = [[r["sum_tag"] for r in records(each / "run") if r["kind"] == "intent"] for each in (whole, tmp_path)]
    assert tags[0] == tags[1], "every unit was counted once"


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1, 3, 5])
def test_the_size_that_fits_is_found_once_and_kept(
    largest: int, undisturbed: tuple[Path, Tensor, int], tmp_path: Path
) -> None:
    module = once_more(undisturbed, tmp_path, largest=largest)
    assert kinds(tmp_path / "run") == kinds(undisturbed[0] / "run")
    assert len([size for size in module.sizes if size > largest]) == {1: 3, 3: 2, 5: 1}[largest]


def test_a_model_of_which_no_unit_fits_ends_the_run_unpaid_and_a_smaller_one_goes_on(tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match=r"every unit of step 2.*before the step was noised or charged") as e:
        fit(tmp_path / "run", _FailsFrom(privacy=private(tmp_path), step=2), steps=STEPS)
    assert "resume=true" in str(e.value)
    assert [step for kind, step in kinds(tmp_path / "run") if kind == "intent"] == [0, 1]
    assert records(tmp_path / "run")[-1]["reason"] == "failed"
    fit(tmp_path / "run", WholeNumbers(privacy=private(tmp_path)), Numbers(physical_batch_size=2), steps=STEPS,
        resume=True)  # fmt: skip
    assert sorted(noise_keys(records(tmp_path / "run"))) == [(0, step) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        ([Tally(1, 0, lone=True)], True),
        ([Tally(1, 0, lone=True, fitted=True)], False),
        ([Tally(2, 0, lone=True, fitted=True)], True),
        ([Tally(2, 1, lone=True, fitted=True)], False),
        ([Tally(3, 3, fitted=True), Tally(1, 0, lone=True)], False),
        ([Tally(3, 3, fitted=True), Tally(2, 0, lone=True)], True),
        ([Tally(0, 0), Tally(1, 0, lone=True)], True),
        ([Tally(0, 0), Tally(0, 0)], False),
    ],
)
def test_the_only_unit_of_a_rank_ends_no_run_in_which_units_fit_elsewhere(ranks: list[Tally], ends: bool) -> None:
    with pytest.raises(DeviceMemoryError) if ends else nullcontext():
        refuse_where_none_fits(ranks, 0, "")


class _HasALongText(WholeNumbers):
    """Wherever the row of unit 7 is, memory runs out; or, with ``as_zero``, it has no gradient."""

    as_zero = False

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        long = torch.tensor([float(int(row.query) == 7) for row in rows])
        return {**super().collate_rows(rows), "long": long}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        loss = super().per_row_loss(rows)
        if not self.as_zero and torch.is_grad_enabled() and bool(rows["long"].any()):
            raise CUDA
        return loss * (1 - rows["long"])


@pytest.mark.costly
def test_a_unit_that_fits_nowhere_counts_as_zero_and_only_the_terminal_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = {"size": 24, "sampling": "full_batch", "expected_batch_size": None, "physical_batch_size": 8}
    module = _HasALongText(privacy=dp(tmp_path, max_grad_norm=100.0, noise_multiplier=9.0))
    with caplog.at_level("DEBUG"):
        fit(tmp_path / "run", module, Numbers(**data), steps=STEPS, extra=[PrivacyCard()])
    assert capfd.readouterr().err.count("Kept on this machine") == STEPS
    assert not [one for one in caplog.records if "memory" in one.getMessage().lower()], "a logger may have a file"
    assert module.sizes.count(8) >= STEPS, "the others are not computed one by one for ever"
    written = [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".jsonl", ".json", ".md", ".log")]
    assert not [
        path for path in written if "memory" in path.read_text(encoding="utf-8").lower().replace("a memory", "")
    ]
    claim = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))["claim"]
    assert claim["guarantee"] == "dp" and records(tmp_path / "run")[-1]["reason"] == "finished"

    (tmp_path / "zero").mkdir()
    same_streams(tmp_path / "run", tmp_path / "zero" / "run")
    other = _HasALongText(privacy=dp(tmp_path, max_grad_norm=100.0, noise_multiplier=9.0))
    other.as_zero = True
    fit(tmp_path / "zero" / "run", other, Numbers(**data), steps=STEPS, resume=True)
    assert torch.equal(module.layer.weight, other.layer.weight) and bool(other.layer.weight.abs().sum() > 0)
    assert kinds(tmp_path / "run") == kinds(tmp_path / "zero" / "run")


def test_without_a_guarantee_a_unit_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match="a single unit"):
        fit(tmp_path / "run", _HasALongText(privacy=NoPrivacy()), Numbers(24, expected_batch_size=24), steps=STEPS)


class _FailsFrom(WholeNumbers):
    def __init__(self, *, privacy: PrivacyMode, step: int) -> None:
        super().__init__(privacy=privacy)
        self.bad = step

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if self.trainer.global_step >= self.bad and torch.is_grad_enabled():
            raise MemoryError
        return super().per_row_loss(rows)


@pytest.mark.parametrize("where", ["privatize", "optimizer"])
def test_memory_that_runs_out_after_the_permit_is_charged_once_and_the_step_is_repeated(
    where: str, undisturbed: tuple[Path, Tensor, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = undisturbed[0]
    same_streams(whole / "run", tmp_path / "run")
    owner: Any = DPSGD if where == "privatize" else torch.optim.SGD
    name, real, count = ("privatize" if where == "privatize" else "step"), None, {"calls": 0}
    real = getattr(owner, name)

    def fails_at_the_third(*args: Any, **kwargs: Any) -> Any:
        count["calls"] += 1
        if count["calls"] == 3:
            raise CUDA
        return real(*args, **kwargs)

    vars(fails_at_the_third)["hooked"] = True  # torch would wrap a step once more that does not say so
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_at_the_third)
        with pytest.raises(DeviceMemoryError, match="the ledger holds what was charged"):
            fit(tmp_path / "run", WholeNumbers(privacy=private(whole)), Numbers(physical_batch_size=8), steps=STEPS,
                resume=True)  # fmt: skip
    assert [step for kind, step in kinds(tmp_path / "run") if kind == "intent"] == [0, 1, 2]
    once_more(undisturbed, tmp_path)
    assert sorted(noise_keys(records(tmp_path / "run"))) == [(0, step) for step in range(STEPS)], "charged once"
    assert ("replay", 2) in kinds(tmp_path / "run")
    read_keys(records(tmp_path / "run"))


@pytest.mark.slow
def test_a_sum_that_was_torn_in_the_middle_is_forgotten(
    undisturbed: tuple[Path, Tensor, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a batch may be in the sum when memory runs out: then nothing of it may stay."""
    whole, weight, _ = undisturbed
    same_streams(whole / "run", tmp_path / "run")
    module, torn = WholeNumbers(privacy=private(whole)), []
    real = GhostClipping._add_up

    def tears(self: Any, *args: Any) -> None:
        real(self, *args)
        if len(torn) < 2 and module.calls > 4:
            torn.append({name: total.clone() for name, total in self._sums.items()})
            raise CUDA

    monkeypatch.setattr(GhostClipping, "_add_up", tears)
    fit(tmp_path / "run", module, Numbers(physical_batch_size=8), steps=STEPS, resume=True)
    assert len(torn) == 2 and all(bool(total.any()) for sums in torn for total in sums.values())
    assert torch.equal(module.layer.weight, weight) and kinds(tmp_path / "run") == kinds(whole / "run")


@pytest.mark.slow
def test_what_a_forgotten_try_counted_is_forgotten_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is counted as clipped twice would move a count by more than anybody could have noised it for."""
    counted: list[list[tuple[int, int]]] = []
    real = DPSGD.privatize

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted[-1].append((self.counts.units, self.counts.clipped))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DPSGD, "privatize", noting)
    for number, at in enumerate([(), (2, 9)]):
        counted.append([])
        module = WholeNumbers(privacy=dp(tmp_path, max_grad_norm=0.1, noise_seed=3), fail_at=at)
        fit(tmp_path / str(number), module, Numbers(physical_batch_size=8), steps=STEPS)
    assert counted[0] == counted[1] and sum(clipped for _, clipped in counted[0]) > 0


def a_batch(units: Sequence[int], *, step: int = 0, part: int = 0, last: bool = True) -> UnitBatch:
    """A physical batch with one row for each unit."""
    places, mask = torch.arange(len(units)), torch.ones(len(units), dtype=torch.bool)
    rows = {"x": torch.tensor([*units])}
    return UnitBatch(rows=rows, unit_ids=places, mask=mask, step=step, part=part, last=last)


def test_a_step_that_an_earlier_fit_broke_off_is_not_added_to_the_next_one() -> None:
    """On another rank than the first, no batch has part 0: that cannot be what a new step is known by."""
    added: list[int] = []
    fails = iter([False, True, False, False, False])

    def contribute(piece: UnitBatch, number: int) -> None:
        if next(fails):
            raise CUDA
        added.extend([] if piece.rows is None else piece.rows["x"].tolist())

    physical = PhysicalBatches(contribute, added.clear)
    physical.add(a_batch([1], part=1, last=False), may_split=True, advice="")
    added.clear()  # the fit ends here, and the next one begins
    physical.begin()
    wide = replace(a_batch([2], part=1), mask=torch.tensor([True, True]))
    physical.add(wide, may_split=True, advice="")
    assert added == [2]


@pytest.mark.parametrize("limit", [None, 3])
def test_where_failures_are_kept_here_each_unit_adds_itself_once_or_fails_alone(limit: int | None) -> None:
    """Units 2 and 5 fail, and 7 in company."""
    added: list[int] = []

    def contribute(piece: UnitBatch, number: int) -> None:
        units = piece.rows["x"].tolist()
        added.extend(units[:1])  # a failure may come halfway
        if {2, 5} & set(units) or (7 in units and len(units) > 1):
            raise UnsupportedModelError("a private row")
        added.extend(units[1:])

    def step(**settings: Any) -> list[int]:
        added.clear()
        physical = PhysicalBatches(contribute, added.clear)
        physical.limit = limit
        for part, units in enumerate([[0, 1, 2, 3], [4], [5, 6, 7]]):
            physical.add(a_batch(units, part=part, last=part == 2), may_split=True, advice="", **settings)
        return sorted(added)

    assert step(drops="all") == [0, 1, 3, 4, 6, 7]
    with pytest.raises(UnsupportedModelError):
        step()


@pytest.mark.parametrize(("fails", "most"), [((0,), 20), ((63,), 20), ((5, 6), 30), ((0, 21, 42, 63), 60), ((), 1)])
def test_a_unit_that_fails_is_found_by_bisection_and_costs_the_next_step_nothing(
    fails: tuple[int, ...], most: int
) -> None:
    calls: list[list[int]] = []
    physical = PhysicalBatches(lambda piece, first: tries(piece, first), lambda: None)
    failing = set(fails)

    def tries(piece: UnitBatch, first: int) -> None:
        units = [] if piece.rows is None else piece.rows["x"].tolist()
        assert units[0] == first
        calls.append(units)
        if failing & set(units):
            raise ValueError("a private row")

    def step(number: int) -> list[list[int]]:
        calls.clear()
        physical.add(a_batch(range(64), step=number), may_split=True, advice="", drops="all")
        return list(calls)

    assert len(step(0)) <= most  # and not 64
    failing.clear()
    assert step(1) == [list(range(64))] and physical.limit is None


def test_the_size_that_fits_memory_stays_also_where_units_fail() -> None:
    added: list[int] = []
    sizes: list[int] = []

    def contribute(piece: UnitBatch, first: int) -> None:
        units = [] if piece.rows is None else piece.rows["x"].tolist()
        sizes.append(len(units))
        if len(units) > 4:
            raise CUDA
        added.extend(units)
        if 7 in units and fails:
            raise ValueError("a private row")

    physical = PhysicalBatches(contribute, added.clear)
    for step, fails in enumerate([True, False, True, False]):
        added.clear()
        sizes.clear()
        physical.add(a_batch(range(16), step=step), may_split=True, advice="", drops="all")
        assert sorted(added) == [unit for unit in range(16) if unit != 7 or not fails]
        assert physical.limit == (None if step == 0 else 4)
    assert sizes == [4] * 4


def test_a_run_goes_on_with_another_physical_batch_size_under_one_claim(
    undisturbed: tuple[Path, Tensor, int], tmp_path: Path
) -> None:
    module = once_more(undisturbed, tmp_path, units=3)
    assert max(module.sizes) == 3 and sorted(noise_keys(records(tmp_path / "run"))) == [(0, i) for i in range(STEPS)]


@pytest.mark.costly
def test_a_step_that_was_begun_with_another_cut_is_not_repeated_but_paid_again(tmp_path: Path) -> None:
    """Rounding may differ with the cut: the old noise on a sum that differs by rounding would be a second release."""
    accountant = PrivacyAccountant(run_dir=tmp_path / "run", eps_log_points=1)
    with pytest.raises(Killed):
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), accountant=accountant, extra=[KillAt(3)])
    accountant.ledger.close()
    reserved = PrivacyAccountant(run_dir=tmp_path / "run", resume=True, eps_log_points=1)
    with pytest.raises(Exception, match="budget"):  # six steps just fit, and one is paid twice
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), Numbers(physical_batch_size=5), resume=True,
            accountant=reserved)  # fmt: skip
    assert not [r for r in records(tmp_path / "run") if r["kind"] == "replay"]
    assert {attempt for attempt, _ in noise_keys(records(tmp_path / "run"))} == {0, 1}
    read_keys(records(tmp_path / "run"))


def test_units_that_see_each_other_are_not_taken_apart(tmp_path: Path) -> None:
    class Coupled(WholeNumbers):
        coupled_loss = True

    module = Coupled(privacy=NoPrivacy(), fail_at=(1,))
    assert not module.may_split
    with pytest.raises(DeviceMemoryError, match=r"never taken apart.*datamodule\.expected_batch_size"):
        fit(tmp_path / "run", module, steps=STEPS)


def test_another_failure_is_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    class Broken(WholeNumbers):
        def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        fit(tmp_path / "run", Broken(privacy=private(tmp_path)), steps=STEPS)
    for error in (CUDA, CPU, MemoryError(), RuntimeError("HIP out of memory.")):
        assert is_out_of_memory(error)
    wrapped = ValueError("x")
    wrapped.__cause__ = CUDA
    assert is_out_of_memory(wrapped)
    for other in (
        ResumeError("out of memory"),
        ValueError("out of memory"),
        RuntimeError("no"),
        DeviceMemoryError("x"),
    ):
        assert not is_out_of_memory(other)


def test_a_run_that_begins_anew_begins_with_the_first_part_and_takes_each_once() -> None:
    physical = PhysicalBatches(lambda piece, first: None, lambda: None)

    def add(part: int, *, last: bool = False) -> None:
        batch = replace(a_batch([], part=part, last=last), rows=None, mask=torch.ones(1).bool())
        physical.add(batch, may_split=True, advice="", parts=(1, 2))

    add(1)
    for wrong in (1, 2, 5):
        with pytest.raises(DataError):
            add(wrong)
    physical.begin()
    add(1)
    add(3, last=True)
