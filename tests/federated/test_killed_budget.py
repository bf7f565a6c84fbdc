"""A silo with a budget is killed by the operating system at a chosen moment, and goes on within that budget."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_silos import PRIVATE, SIZE, declare_public, federation

from lit_dpret.errors import LedgerError
from lit_dpret.federated import silo as silo_module
from lit_dpret.federated import silo_account
from lit_dpret.federated.fitting import RoundAccountant
from lit_dpret.federated.negatives import FedPool
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.silo_ledger import NothingLeftError, SiloLedger, spent_together
from lit_dpret.federated.storage import newest_round
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import merge
from lit_dpret.privacy.ledger import gate as gate_module
from lit_dpret.privacy.ledger.dataset_account import RunLock
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases

EPS = 20.0
TWO = replace(SIZE, clients=2, entities=4)
SETTINGS = replace(
    PRIVATE,
    stage1=replace(PRIVATE.stage1, batch_size=3),
    stage2=replace(PRIVATE.stage2, batch_size=3, epochs=2, centroid_iterations=3),
)
KEEP = replace(SETTINGS, stage1=replace(SETTINGS.stage1, optimizer_state="keep"))


def client(root: Path, settings: Any = SETTINGS, **shape: Any) -> SiloClient:
    return federation(root, settings, size=TWO, **shape).clients["client0"]


def train(root: Path, settings: Any = SETTINGS, **shape: Any) -> SiloClient:
    """Everything that a run asks of one silo, from where it stands."""
    one = client(root, settings, **shape)
    weights, first = newest_round(one.state, "stage1") or (one.model[0], 0)
    for number in range(first, 2):
        weights = one.train_shared(weights, number)
    torch.manual_seed(0)
    pool = FedPool(torch.randn(12, 16))
    for epoch in range(2):
        one.request(weights, epoch)
        one.personalise(weights, pool, epoch)
    return one


def killed(moment: Callable[[], None], run: Callable[[], object]) -> None:
    """Run in a process of its own, which ``moment`` prepares to be killed, and see that it was."""
    child = os.fork()
    if child == 0:
        try:
            moment()
            run()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_record(kind: str, part: str, *, nth: int = 1, after: bool = False) -> Callable[[], None]:
    """Die at the nth record of a kind in a ledger whose path has this part, before or after it is on the disk."""

    def prepare() -> None:
        append, seen = PrivacyLedger.append, 0

        def counted(self: PrivacyLedger, what: str, **facts: Any) -> Any:
            nonlocal seen
            counts = what == kind and part in str(self.path)
            seen += counts
            if counts and seen == nth and not after:
                die()
            found = append(self, what, **facts)
            if counts and seen == nth:
                die()
            return found

        PrivacyLedger.append = counted  # type: ignore[method-assign]

    return prepare


def at_result(name: str) -> Callable[[], None]:
    """Die when everything was released and charged, and its result is not on the disk."""

    def prepare() -> None:
        save = silo_module.save_tensors

        def dies(tensors: Any, path: Path) -> None:
            if name in path.name:
                die()
            save(tensors, path)

        silo_module.save_tensors = silo_account.save_tensors = dies

    return prepare


def ledgers(one: SiloClient) -> list[PrivacyLedger]:
    paths = [*one.state.glob("*/attempt-*/privacy_ledger.jsonl"), *one.ledgers.glob("releases/*.jsonl")]
    return [PrivacyLedger.read(path) for path in sorted(paths)]


def announced(one: SiloClient) -> float:
    """The epsilon of every release that is announced in any ledger of the silo."""
    releases = [release for ledger in ledgers(one) for release in charged_releases(ledger.records)]
    return epsilon(merge(releases), delta=1e-2, neighbours="zero_out", accountant="rdp")


def assert_within_budget(one: SiloClient) -> None:
    """What is charged is what any ledger announced, it is within the budget, and nothing is left reserved."""
    assert one.epsilon() == pytest.approx(announced(one), rel=1e-12) and (one.epsilon() or 0) <= EPS
    total = None if one.ledger is None else one.ledger.total()
    assert total is not None and total.running == 0


def more_noise(one: SiloClient, whole: SiloClient) -> bool:
    """Whether what was lost is paid for by more noise than was planned."""
    assert one.account.noise is not None and whole.account.noise is not None
    return one.account.noise.training > whole.account.noise.training


def intents(one: SiloClient, part: str) -> int:
    return sum(r["kind"] == "intent" for ledger in ledgers(one) if part in str(ledger.path) for r in ledger.records)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SiloClient:
    return train(tmp_path_factory.mktemp("whole"))


def moments(*every_day: str, **named: Callable[[], None]) -> Any:
    """Each moment as a case; some are enough for every day."""
    return pytest.mark.parametrize("moment", [
        pytest.param(moment, id=name, marks=() if name in every_day else pytest.mark.slow)
        for name, moment in named.items()
    ])  # fmt: skip


@pytest.mark.costly
@moments(
    "step_announced",
    ledger_begun=at_record("plan", "stage1-000", after=True),
    before_the_first_step=at_record("intent", "stage1-000"),
    step_announced=at_record("intent", "stage1-001", nth=2, after=True),
    step_released=at_record("release", "stage1-001", after=True),
    ended=at_record("end", "stage1-001", after=True),
    no_result=at_result("stage1-001"),
    last_epoch=at_record("intent", "personal-fed-001", nth=2, after=True),
    last_result=at_result("personal-fed-001"),
)
def test_a_fit_that_was_killed_goes_on_and_nothing_of_it_is_paid_twice(
    moment: Callable[[], None], whole: SiloClient, tmp_path: Path
) -> None:
    killed(moment, lambda: train(tmp_path))
    one = train(tmp_path)
    for part in ("stage1-000", "stage1-001", "personal-fed-000", "personal-fed-001"):
        assert intents(one, part) == intents(whole, part)
    assert_within_budget(one)
    assert one.epsilon() == pytest.approx(whole.epsilon(), rel=1e-12)
    assert one.account.noise == whole.account.noise


@pytest.mark.slow
def test_a_fit_with_a_kept_optimizer_and_dropout_is_repeated_bit_by_bit_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = silo_module.fit_epochs

    def after_other_work(*arguments: Any, **settings: Any) -> None:
        torch.manual_seed(os.getpid())  # whatever a process drew before
        arguments[0].train()
        fit(*arguments, **settings)

    monkeypatch.setattr(silo_module, "fit_epochs", after_other_work)
    killed(at_record("intent", "stage1-001", nth=2, after=True), lambda: train(tmp_path, KEEP, hidden_dropout_prob=0.3))
    one = train(tmp_path, KEEP, hidden_dropout_prob=0.3)
    (attempt,) = (one.state / "stage1-001").glob("attempt-*")
    kinds = [record["kind"] for record in PrivacyLedger.read(attempt / "privacy_ledger.jsonl").records]
    assert kinds.count("replay") == 2
    assert_within_budget(one)


@pytest.fixture
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where no step is repeated bit by bit."""
    init = RoundAccountant.__init__
    monkeypatch.setattr(RoundAccountant, "__init__", lambda self, **more: init(self, **more, replay="never"))


@pytest.mark.slow
@moments(
    "request_announced",  # and of the steps `test_another_secret_repeats_nothing_and_stays_within_the_budget`
    before_the_first_step=at_record("intent", "stage1-000"),
    step_announced=at_record("intent", "stage1-001", after=True),
    step_released=at_record("release", "stage1-000", nth=2, after=True),
    last_epoch=at_record("intent", "personal-fed-001", after=True),
    request_reserved=at_record("intent", "fed_request"),
    request_announced=at_record("intent", "fed_request", after=True),
    last_request=at_record("release", "fed_request", nth=5, after=True),
    no_rows=at_result("request-000"),
)
@pytest.mark.usefixtures("no_repeats")
def test_what_cannot_be_repeated_stays_charged_and_more_noise_pays_for_it(
    moment: Callable[[], None], whole: SiloClient, tmp_path: Path
) -> None:
    killed(moment, lambda: train(tmp_path))
    one = train(tmp_path)
    assert_within_budget(one)
    assert more_noise(one, whole) is (intents(one, "") > intents(whole, ""))


@pytest.mark.slow
@pytest.mark.usefixtures("no_repeats")
@pytest.mark.parametrize("again", [False, True], ids=["once", "and once more"])
def test_where_everything_was_released_and_cannot_be_repeated_the_run_ends_with_the_weights_from_before(
    again: bool, tmp_path: Path
) -> None:
    killed(at_result("personal-fed-001"), lambda: train(tmp_path))
    spent = client(tmp_path).epsilon()
    if again:  # its own end is lost as well
        killed(at_result("personal-fed-001"), lambda: train(tmp_path))
        one = train(tmp_path)
    else:
        with pytest.warns(UserWarning, match=r"client0.*federated\.privacy\.eps=20"):
            one = train(tmp_path)
    assert_within_budget(one)
    assert one.epsilon() == spent
    assert "lost" in (one.account.ended or "")
    before, after = (load_file(one.state / f"personal-fed-{number:03}.safetensors") for number in (0, 1))
    assert all(torch.equal(after[name], before[name]) for name in before), "the last epoch is lost, and no other"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(tmp_path).epsilon() == spent, "a finished run asks for nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("no_repeats")
def test_a_federation_of_which_a_silo_has_nothing_left_ends_and_says_so(tmp_path: Path) -> None:
    federation(tmp_path, SETTINGS, size=TWO)
    declare_public(tmp_path)
    killed(at_result("personal-fed-001"), lambda: federation(tmp_path, SETTINGS, size=TWO).run())
    with pytest.warns(UserWarning, match=r"federated\.privacy\.eps=20"):
        run = federation(tmp_path, SETTINGS, size=TWO)
        result = run.run()
    assert set(result.systems) and set(result.epsilon) == set(run.clients)
    assert [fault for fault in result.faults if fault.startswith("client0: ") and "lost" in fault]
    for one in run.clients.values():
        assert_within_budget(one)


@pytest.mark.costly
@pytest.mark.usefixtures("no_repeats")
def test_what_is_still_to_come_is_left_out_where_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_left(*_: object, **__: object) -> Any:
        raise NothingLeftError("federated.privacy.eps=20 leaves nothing for the rest")

    killed(at_record("intent", "stage1-000", nth=2, after=True), lambda: train(tmp_path))
    monkeypatch.setattr(silo_account, "noise_of_rest", nothing_left)
    with pytest.warns(UserWarning, match=r"federated\.privacy\.eps=20"):
        one = train(tmp_path)
    assert intents(one, "stage1-001") == intents(one, "fed_request") == intents(one, "personal") == 0
    assert_within_budget(one)
    assert torch.equal(one.request(one.model[0], 1), torch.zeros(1, 16)), "it says nothing"


@pytest.mark.slow
def test_another_secret_repeats_nothing_and_stays_within_the_budget(whole: SiloClient, tmp_path: Path) -> None:
    killed(at_record("intent", "stage1-001", nth=2, after=True), lambda: train(tmp_path))
    (tmp_path / "secret").unlink()
    one = train(tmp_path)
    assert len(list((one.state / "stage1-001").glob("attempt-*"))) == 2
    assert_within_budget(one)
    assert more_noise(one, whole)


@pytest.mark.slow
def test_a_repeat_that_fails_at_a_step_is_charged_with_what_was_announced_and_not_with_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(at_record("intent", "stage1-000", after=True), lambda: train(tmp_path))
    monkeypatch.setattr(gate_module, "sum_tag", lambda stream, sums: "that of another processor")
    one = train(tmp_path)
    lost = PrivacyLedger.read(one.state / "stage1-000" / "attempt-0" / "privacy_ledger.jsonl").records
    assert "replay_failed" in [record.get("name") for record in lost]
    assert_within_budget(one)


@pytest.mark.costly
def test_centroids_of_a_collection_that_were_broken_off_are_released_within_their_budget(tmp_path: Path) -> None:
    settings = replace(
        SETTINGS,
        stage2=replace(SETTINGS.stage2, request="none", response="dp_centroid"),
        privacy=replace(SETTINGS.privacy, collection_eps=5.0, collection_delta=1e-3),
    )

    def serve() -> SiloClient:
        one = client(tmp_path, settings)
        one.serve(one.model[0], torch.empty(0, 16), refresh=0)
        return one

    killed(at_record("intent", "fed_response", nth=2, after=True), serve)
    one = serve()
    (path,) = one.ledgers.glob("silo_ledger.passage.jsonl")
    assert sum(r["kind"] == "intent" for ledger in ledgers(one) for r in ledger.records) == 5
    assert 0.9 * 5.0 < spent_together([path], accountant="rdp") <= 5.0


@pytest.mark.costly
def test_what_still_goes_on_is_not_settled(tmp_path: Path) -> None:
    one = client(tmp_path)
    assert isinstance(one.ledger, SiloLedger)
    with one.ledger.gaussian("fed_request", noise_multiplier=20.0, count=3) as noised:
        noised(torch.zeros(2), 1.0)
        reserved = one.epsilon()
        other = client(tmp_path)
        assert other.ledger is not None
        other.ledger.settle_broken_releases()
        assert other.epsilon() == reserved
        (path,) = (one.ledgers / "releases").iterdir()
        with pytest.raises(LedgerError):
            other.ledger.settle_broken(path)
    killed(at_record("intent", "stage1-000", after=True), lambda: train(tmp_path))
    (path,) = (one.state / "stage1-000").glob("attempt-*/privacy_ledger.jsonl")
    run_id = next(record["run_id"] for record in PrivacyLedger.read(path).records if record["kind"] == "plan")
    lock = RunLock(one.ledger.path, run_id)
    lock.take()
    with pytest.raises(LedgerError):
        one.ledger.settle_broken(path)
    lock.release()
    before = one.epsilon() or 0
    one.ledger.settle_broken(path)
    assert 0 < (one.epsilon() or 0) < before
