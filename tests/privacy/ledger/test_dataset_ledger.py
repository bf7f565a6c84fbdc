"""All runs on one data set together stay within its limit, whoever runs, stops, dies or copies files."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Release,
    TruncatedPoisson,
    release_from_dict,
)
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget
from lit_dpret.privacy.ledger.chain import canonical_json, record_hash
from lit_dpret.privacy.ledger.dataset_file import SCHEMA, compose_across_runs
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger

DELTA = 1e-5
LAW = Poisson(sample_rate=0.02)


def trained(noise: float = 2.0, count: int = 100) -> list[Release]:
    return [GaussianRelease(noise_multiplier=noise, law=LAW, count=count)]


def cost(*runs: list[Release], delta: float = DELTA) -> float:
    return epsilon([release for run in runs for release in run], delta=delta, neighbours="zero_out")


def ledger(path: Path, total_eps: float | None = 1.0, **budget: Any) -> DatasetLedger:
    terms = {"eps": 3.0, "delta": DELTA, **budget}
    return DatasetLedger(path / "data.jsonl", total_eps=total_eps, budget=PrivacyBudget(**terms))


def reserve(book: DatasetLedger, run: str, planned: list[Release], *, spent: Any = (), heads: Any = ("h0",)) -> Any:
    return book.reserve(run, spent=list(spent), planned=planned, heads=list(heads), name=f"runs/{run}")


def settle(book: DatasetLedger, run: str, spent: list[Release], *, heads: Any = ("h0",)) -> Any:
    return book.settle(run, spent=spent, heads=list(heads), name=f"runs/{run}")


# -- the total ---------------------------------------------------------------------------------


def test_the_total_is_one_composition_of_all_runs_and_below_the_sum_of_their_epsilons(tmp_path: Path) -> None:
    book = ledger(tmp_path, 10.0)
    runs = [trained(2.0), trained(1.0, 50), trained(2.0)]
    for index, run in enumerate(runs):
        total = reserve(book, f"r{index}", run)
    assert total.epsilon == cost(*runs) == book.total().epsilon
    assert max(map(cost, runs)) < total.epsilon < sum(map(cost, runs))
    assert (total.runs, total.running, total.delta, total.total_eps, total.accountant) == (3, 3, DELTA, 10.0, "pld")


def test_the_limit_itself_is_within_it(tmp_path: Path) -> None:
    one = trained()
    assert reserve(ledger(tmp_path, cost(one)), "a", one).epsilon == cost(one)


def test_a_run_without_noise_is_never_covered(tmp_path: Path) -> None:
    with pytest.raises(BudgetExceededError, match="inf"):
        reserve(ledger(tmp_path, 1e6), "a", [NonPrivateRelease(label="loss")])


def test_settling_gives_back_what_was_reserved_and_not_released(tmp_path: Path) -> None:
    one = trained(count=100)
    book = ledger(tmp_path, 1.2 * cost(one))
    reserve(book, "a", one)
    with pytest.raises(BudgetExceededError):
        reserve(book, "b", one)
    total = settle(book, "a", trained(count=10))
    assert (total.epsilon, total.running) == (cost(trained(count=10)), 0)
    assert reserve(book, "b", one).epsilon == cost(trained(count=110))


def test_settling_charges_what_was_spent_even_past_the_limit(tmp_path: Path) -> None:
    book = ledger(tmp_path, 1.2 * cost(trained()))
    reserve(book, "a", trained())
    assert settle(book, "a", trained(noise=0.5)).epsilon == cost(trained(noise=0.5)) > book.total().total_eps
    with pytest.raises(BudgetExceededError):
        reserve(book, "b", trained(noise=50.0, count=1))


def test_a_resume_that_is_refused_settles_to_what_the_run_had_spent(tmp_path: Path) -> None:
    book = ledger(tmp_path, 1.2 * cost(trained(count=100)))
    reserve(book, "a", trained(count=100))
    with pytest.raises(BudgetExceededError):
        reserve(book, "a", trained(count=1000), spent=trained(count=30), heads=["h0", "h1"])
    total = book.total()
    assert (total.epsilon, total.running) == (cost(trained(count=30)), 0)


def test_a_copied_or_restored_run_folder_cannot_shrink_its_charge(tmp_path: Path) -> None:
    book = ledger(tmp_path, 10.0)
    reserve(book, "a", trained(), heads=["h0"])
    settle(book, "a", trained(), heads=["h0", "h1"])
    for heads in (["h0"], ["h0", "x1", "x2"]):
        with pytest.raises(LedgerError, match="copied or restored"):
            reserve(book, "a", trained(count=1), heads=heads)
        with pytest.raises(LedgerError, match="copied or restored"):
            settle(book, "a", trained(count=1), heads=heads)
    assert book.total().epsilon == cost(trained())


# -- the terms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"neighbours": "replace_one"}, "privacy.neighbours"),
        ({"unit": "user"}, "privacy.unit"),
        ({"duplicates": "merge"}, "datamodule.duplicates"),
        ({"total_eps": 2.0}, "privacy.total_eps"),
        ({"total_eps": 0.5}, "privacy.total_eps"),
    ],
)
def test_another_guarantee_or_limit_than_the_files_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    reserve(ledger(tmp_path), "a", trained(count=1))
    for use in (lambda book: book.require(trained(count=1)), lambda book: reserve(book, "b", trained(count=1))):
        with pytest.raises(ConfigurationError, match=named):
            use(ledger(tmp_path, **change))


def test_the_limit_may_be_left_to_a_file_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.total_eps"):
        reserve(ledger(tmp_path, None), "a", trained(count=1))
    reserve(ledger(tmp_path, 1.0), "a", trained(count=1))
    assert reserve(ledger(tmp_path, None), "b", trained(count=1)).total_eps == 1.0


@pytest.mark.parametrize(("delta", "holds_at"), [(1e-3, DELTA), (1e-7, 1e-7)])
def test_the_total_holds_at_the_smaller_delta_of_the_file_and_of_the_run(
    tmp_path: Path, delta: float, holds_at: float
) -> None:
    """A log that has grown has a smaller delta, and at the file's the total would be one for fewer units."""
    reserve(ledger(tmp_path, 10.0), "a", trained())
    total = reserve(ledger(tmp_path, 10.0, delta=delta), "b", trained())
    assert (total.delta, total.epsilon) == (holds_at, cost(trained(), trained(), delta=holds_at))
    settle(ledger(tmp_path, 10.0, delta=delta), "b", trained())
    for book in (ledger(tmp_path, 10.0), ledger(tmp_path, 10.0, delta=1e-4)):
        later = book.total()
        assert (later.delta, later.epsilon) == (holds_at, total.epsilon), "what is promised to many stays promised"


def test_the_limit_is_held_at_the_smaller_delta(tmp_path: Path) -> None:
    between = (cost(trained(), trained()) + cost(trained(), trained(), delta=1e-7)) / 2
    reserve(ledger(tmp_path, between), "a", trained())
    ledger(tmp_path, between).require(trained())
    with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
        reserve(ledger(tmp_path, between, delta=1e-7), "b", trained())


# -- the file ----------------------------------------------------------------------------------


def test_the_file_says_nothing_about_the_data_and_names_its_schema(tmp_path: Path) -> None:
    reserve(ledger(tmp_path), "a", trained(count=1))
    first, second = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    chain = {"seq", "day", "kind", "prev", "hash"}
    facts = {"schema", "id", "total_eps", "delta", "unit", "neighbours", "duplicates"}
    assert set(first) - chain == facts and first["schema"] == SCHEMA
    assert set(second) - chain == {"run_id", "run", "run_head", "releases"}


def test_each_file_has_an_identity_of_its_own_from_its_first_record_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    reserve(ledger(tmp_path / "a"), "r", trained(count=1))
    identities = [ledger(tmp_path / name).begin() for name in ("a", "b", "a", "b")]
    assert identities[:2] == identities[2:] and identities[0] != identities[1]
    first = json.loads((tmp_path / "a" / "data.jsonl").read_text().splitlines()[0])
    assert first["id"] == identities[0] and len(bytes.fromhex(first["id"])) == 16


def test_a_file_that_took_the_place_of_the_runs_own_is_refused(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    book.begin()
    (tmp_path / "data.jsonl").unlink()
    for make in (lambda: None, lambda: ledger(tmp_path).begin()):
        make()
        with pytest.raises(LedgerError, match="another file than at the start"):
            reserve(book, "a", trained(count=1))


def test_an_unknown_schema_is_refused_by_name(tmp_path: Path) -> None:
    record = {"seq": 0, "day": "", "kind": "dataset", "prev": "0" * 64, "schema": "lit-dpret/dataset-ledger/2"}
    record |= {"total_eps": 1.0, "delta": DELTA, "unit": "query", "neighbours": "zero_out"}
    record["hash"] = record_hash(record)
    (tmp_path / "data.jsonl").write_text(canonical_json(record) + "\n", encoding="ascii")
    for use in (lambda book: book.total(), lambda book: reserve(book, "a", trained(count=1))):
        with pytest.raises(LedgerError, match="dataset-ledger/2"):
            use(ledger(tmp_path))


def test_a_reservation_that_a_crash_tore_was_never_made(tmp_path: Path) -> None:
    reserve(ledger(tmp_path), "a", trained(count=1))
    whole = (tmp_path / "data.jsonl").read_bytes()
    reserve(ledger(tmp_path), "b", trained(count=5))
    torn = (tmp_path / "data.jsonl").read_bytes()[:-40]
    (tmp_path / "data.jsonl").write_bytes(torn)
    assert reserve(ledger(tmp_path), "c", trained(count=1)).runs == 2
    assert (tmp_path / "data.jsonl").read_bytes().startswith(whole)


# -- composition across accountants ------------------------------------------------------------


def test_what_no_accountant_judges_whole_is_added_up_at_shares_of_delta() -> None:
    drawn = GaussianRelease(noise_multiplier=2.0, law=FixedSize(batch_size=40, n=2000), count=50)
    capped = GaussianRelease(noise_multiplier=2.0, law=TruncatedPoisson(sample_rate=0.02, cap=90, n=2000), count=50)
    both = {"delta": DELTA, "neighbours": "replace_one"}
    value, how = compose_across_runs([drawn, capped], **both)  # type: ignore[arg-type]
    parts = [
        epsilon([release], delta=DELTA / 2, neighbours="replace_one", accountant=name)  # type: ignore[arg-type]
        for release, name in ((drawn, "rdp"), (capped, "pld"))
    ]
    assert value == pytest.approx(sum(parts), rel=1e-12) and "basic composition" in how
    assert compose_across_runs([drawn], **both)[1] == "rdp"  # type: ignore[arg-type]
    assert compose_across_runs([capped], **both)[1] == "pld"  # type: ignore[arg-type]


def test_rdp_is_used_where_it_is_asked_for_and_can_judge() -> None:
    assert compose_across_runs(trained(), delta=DELTA, neighbours="zero_out", accountant="rdp") == (
        epsilon(trained(), delta=DELTA, neighbours="zero_out", accountant="rdp"),
        "rdp",
    )
    capped = GaussianRelease(noise_multiplier=2.0, law=TruncatedPoisson(sample_rate=0.02, cap=90, n=2000))
    assert compose_across_runs([capped], delta=DELTA, neighbours="zero_out", accountant="rdp")[1] == "pld"


@pytest.mark.parametrize("neighbours", ["zero_out", "add_or_remove"])
def test_a_law_that_nobody_judges_is_refused(neighbours: Neighbours) -> None:
    drawn = GaussianRelease(noise_multiplier=2.0, law=FixedSize(batch_size=40, n=2000))
    with pytest.raises(UnsupportedAccountingError):
        compose_across_runs(
            [drawn, GaussianRelease(noise_multiplier=1.0, law=FullBatch())], delta=DELTA, neighbours=neighbours
        )


# -- processes that share a file never overspend it, whoever comes first ----------------------------


def of_round(folder: Path, number: int, limit: float) -> DatasetLedger:
    terms = PrivacyBudget(eps=3.0, delta=DELTA)
    return DatasetLedger(folder / f"round{number}.jsonl", total_eps=limit, budget=terms, accountant="rdp")


def by_rdp(releases: list[Release]) -> float:
    return epsilon(releases, delta=DELTA, neighbours="zero_out", accountant="rdp")


def race(name: str, folder: Path, limit: float, rounds: int, attempts: int, start: Any, answers: Any) -> None:
    """In each round, when all are ready, reserve ``attempts`` runs on the round's file; end every second one early."""
    for number in range(rounds):
        start.wait(timeout=60)
        book = of_round(folder, number, limit)
        for attempt in range(attempts):
            run = f"{name}{attempt}"
            try:
                book.reserve(run, spent=[], planned=trained(count=100), heads=["h"], name=run)
            except BudgetExceededError:
                answers.put((number, run, "refused"))
                continue
            answers.put((number, run, "granted"))
            if attempt % 2:
                book.settle(run, spent=trained(count=40), heads=["h"], name=run)


def compete(
    folder: Path, limit: float, *, rounds: int, attempts: int, processes: int = 2
) -> list[tuple[int, str, str]]:
    """What processes were answered that began every round at the same moment."""
    fork = multiprocessing.get_context("fork")
    start, answers = fork.Barrier(processes), fork.Queue()
    runners = [
        fork.Process(target=race, args=(name, folder, limit, rounds, attempts, start, answers))
        for name in "abcd"[:processes]
    ]
    for runner in runners:
        runner.start()
    found = [answers.get(timeout=120) for _ in range(processes * rounds * attempts)]
    for runner in runners:
        runner.join(timeout=60)
    assert [runner.exitcode for runner in runners] == [0] * processes
    return found


def totals(path: Path) -> list[float]:
    """The epsilon of everything held, after each record of the file, composed here and not by the ledger."""
    held: dict[str, list[Release]] = {}
    after = []
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if record["kind"] in ("reserve", "settle"):
            held[record["run_id"]] = [release_from_dict(release) for release in record["releases"]]
            after.append(by_rdp([release for releases in held.values() for release in releases]))
    return after


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_limit_holds_after_every_single_record_while_runs_begin_and_end(tmp_path: Path, processes: int) -> None:
    limit, rounds = 1.001 * by_rdp(trained(count=300)), 4
    answers = compete(tmp_path, limit, rounds=rounds, attempts=6, processes=processes)
    for number in range(rounds):
        path = tmp_path / f"round{number}.jsonl"
        granted = [run for at, run, answer in answers if at == number and answer == "granted"]
        assert max(totals(path)) <= limit
        book = of_round(tmp_path, number, limit).total()
        assert book.runs == len(set(granted)) == len(granted) >= 3
        assert book.epsilon == pytest.approx(totals(path)[-1])
