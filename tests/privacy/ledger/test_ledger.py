from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cards import rewrite_chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_dpret.errors import LedgerError, StorageError
from lit_dpret.privacy.accounting.releases import (
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Shuffle,
)
from lit_dpret.privacy.ledger.chain import GENESIS, canonical_json, record_hash
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases, noise_keys, read_keys

LAW = Poisson(sample_rate=0.01)
STEP = GaussianRelease(noise_multiplier=1.0, law=LAW)


def take_step(
    ledger: PrivacyLedger,
    step: int,
    *,
    attempt: int = 0,
    release: Any = STEP,
    noise_std: float | None = 0.5,
    **facts: Any,
) -> None:
    """One announced and confirmed step; sensitivity 0.5, so that 0.5 is the intended noise."""
    ledger.append("intent", attempt=attempt, step=step, release=release.to_dict())
    ledger.append("release", attempt=attempt, step=step, noise_std=noise_std, sensitivity=0.5, **facts)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "privacy_ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Iterator[PrivacyLedger]:
    with PrivacyLedger.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound ledger of ten records."""
    path = tmp_path_factory.mktemp("sound") / "privacy_ledger.jsonl"
    with PrivacyLedger.open(path) as ledger:
        ledger.append("plan", plan={"eps": 3.0}, attempt=0, run_id="a", nonce="n", mode="dp_sgd", planned_steps=4)
        for step in range(4):
            take_step(ledger, step)
        ledger.append("end", reason="budget", steps=4)
    return path.read_bytes()


# --- the file ---------------------------------------------------------------------------------


def test_a_reader_sees_exactly_what_append_returned(path: Path) -> None:
    with PrivacyLedger.open(path) as ledger:
        assert ledger.head == GENESIS
        written = [
            ledger.append("event", text="Ünïcode \u2028 \ud800 \x00", pair=(1, 2), sizes={10: 1, 9: 2}),
            ledger.append("event", number=-0.1, flag=True, nothing=None),
        ]
        head = ledger.head
    read = PrivacyLedger.read(path)
    assert read.records == written
    assert read.head == head == written[-1]["hash"]
    assert written[0]["pair"] == [1, 2]
    assert written[1]["prev"] == written[0]["hash"]
    assert [record["seq"] for record in read.records] == [0, 1]


@pytest.mark.parametrize("fact", [math.nan, math.inf, {1, 2}, b"bytes", object()])
def test_a_fact_that_json_cannot_hold_is_refused_and_nothing_is_written(
    ledger: PrivacyLedger, path: Path, fact: object
) -> None:
    with pytest.raises(LedgerError, match="plain, finite JSON"):
        ledger.append("event", fact=fact)
    assert path.read_bytes() == b""


def test_an_unknown_kind_and_a_name_of_the_chain_are_refused(ledger: PrivacyLedger) -> None:
    with pytest.raises(LedgerError, match=r"'epsilon'.*intent"):
        ledger.append("epsilon")
    with pytest.raises(LedgerError, match="'prev'"):
        ledger.append("event", prev="x")


def test_every_append_is_on_the_disk_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def noting(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", noting)
    with PrivacyLedger.open(path) as ledger:
        for _ in range(3):
            ledger.append("event")
            assert synced[-1] == path.stat().st_size


# --- tampering --------------------------------------------------------------------------------


def detected(edited: bytes, tmp_path: Path) -> bool:
    path = tmp_path / "edited.jsonl"
    path.write_bytes(edited)
    try:
        PrivacyLedger.read(path)
    except LedgerError as error:
        assert "line " in str(error)
        return True
    return False


@pytest.mark.costly
@settings(max_examples=400, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_byte_and_any_deletion_swap_or_insertion_of_lines_is_detected(
    content: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    """Either of single bytes or of whole lines."""
    parts = data.draw(st.sampled_from([[bytes([byte]) for byte in content], content.splitlines(keepends=True)])).copy()
    places = st.integers(0, len(parts) - 1)
    a, b = data.draw(places), data.draw(places)
    new = data.draw(st.binary(min_size=1, max_size=1)) if len(parts) == len(content) else parts[b]
    change = data.draw(st.sampled_from(["delete", "swap", "insert", "replace"]))
    if change == "delete":
        del parts[a]
    elif change == "swap":
        parts[a], parts[b] = parts[b], parts[a]
    elif change == "insert":
        parts.insert(a, new)
    else:
        parts[a] = new
    edited = b"".join(parts)
    cut = content.startswith(edited)  # of its end alone, which a chain cannot see
    assert edited == content or cut or detected(edited, tmp_path)


def joined(records: list[dict[str, Any]]) -> bytes:
    return b"".join(canonical_json(record).encode() + b"\n" for record in records)


def forged_with_a_right_hash(records: list[dict[str, Any]]) -> bytes:
    records[2]["noise_std"] = 100.0
    records[2]["hash"] = record_hash(records[2])
    return joined(records)


def in_other_json(records: list[dict[str, Any]]) -> bytes:
    """With spaces: the same object, other bytes."""
    return json.dumps(records[0], sort_keys=True).encode() + b"\n" + joined(records[1:])


def linked_anew_without_a_record(records: list[dict[str, Any]]) -> bytes:
    del records[4]
    for before, record in pairwise(records):
        record["prev"] = before["hash"]
        record["hash"] = record_hash(record)
    return joined(records)


def linked_anew_with_a_noise_key_twice(records: list[dict[str, Any]]) -> bytes:
    again = {**records[1], "seq": 10, "prev": records[-1]["hash"]}
    return joined([*records, {**again, "hash": record_hash(again)}])


def edited_without_a_hash(records: list[dict[str, Any]]) -> bytes:
    return joined(records).replace(b'"noise_std":0.5', b'"noise_std":0.9', 1)


EDITS: list[tuple[Callable[[list[dict[str, Any]]], bytes], str]] = [
    (forged_with_a_right_hash, "line 4: does not follow"),
    (in_other_json, "line 1: not a record in canonical JSON"),
    (linked_anew_without_a_record, "line 5"),
    (linked_anew_with_a_noise_key_twice, "line 11: attempt 0, step 0 was announced twice"),
    (edited_without_a_hash, "line 3: the content does not match its hash"),
    *((lambda records, end=end: joined(records)[:-1] + end, "line 10, without a line end")
      for end in (b" ", b"x", b"}", b"\r", b"\x00")),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "complaint"), EDITS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_forged_chain_is_refused_with_its_line_and_never_repaired(
    edit: Callable[[list[dict[str, Any]]], bytes], complaint: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "edited.jsonl"
    edited = edit([json.loads(line) for line in content.splitlines()])
    path.write_bytes(edited)
    for reading in (PrivacyLedger.read, PrivacyLedger.open):
        with pytest.raises(LedgerError, match=complaint):
            reading(path)
    assert path.read_bytes() == edited


# --- crashes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_torn_last_line_is_cut_and_noted(content: bytes, path: Path, seed: int) -> None:
    lines = content.splitlines(keepends=True)
    whole = b"".join(lines[:-1])
    torn = lines[-1][: random.Random(seed).randrange(1, len(lines[-1]) - 1)]
    path.parent.mkdir()
    path.write_bytes(whole + torn)
    assert PrivacyLedger.read(path).torn_bytes == len(torn)
    assert path.read_bytes() == whole + torn  # reading repairs nothing
    with PrivacyLedger.open(path) as ledger:
        assert [record["kind"] for record in ledger.records][-2:] == ["release", "repair"]
        assert ledger.records[-1]["cut_bytes"] == len(torn)
        take_step(ledger, 4)
    assert len(PrivacyLedger.read(path).records) == len(lines) + 2


def test_what_a_power_loss_leaves_behind_the_last_line_is_cut(content: bytes, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(content + b"\x00" * 300)
    with PrivacyLedger.open(path) as ledger:
        assert ledger.records[-1]["cut_bytes"] == 300


def test_a_whole_last_record_without_its_line_end_is_kept_and_charged(path: Path) -> None:
    with PrivacyLedger.open(path) as ledger:
        ledger.append("intent", attempt=0, step=0, release=STEP.to_dict())
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with PrivacyLedger.open(path) as ledger:
        assert [record["kind"] for record in ledger.records] == ["intent", "repair"]
        with pytest.raises(LedgerError, match="announced twice"):
            ledger.append("intent", attempt=0, step=0, release=STEP.to_dict())
    assert charged_releases(PrivacyLedger.read(path).records) == [STEP]


def test_a_kill_at_any_moment_leaves_a_ledger_that_opens_with_every_returned_append(path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w", encoding="utf-8") as told:
            ledger = PrivacyLedger.open(path)
            for i in range(10**6):
                print(ledger.append("event", i=i)["seq"], file=told, flush=True)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as said:
        said.readline()
        with pytest.raises(LedgerError, match="open in another run"):
            PrivacyLedger.open(path)
        time.sleep(0.2)
        os.kill(child, signal.SIGKILL)
        returned = [int(line) for line in said if line.endswith("\n")]
    os.waitpid(child, 0)
    with PrivacyLedger.open(path) as ledger:
        assert returned and len(ledger.records) > returned[-1]


# --- a disk that fails ------------------------------------------------------------------------


def test_a_write_cut_short_by_the_system_leaves_the_file_whole(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with PrivacyLedger.open(path) as ledger:
        ledger.append("event")
        good = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) + 100, limits[1]))  # a partial write, then EFBIG
        try:
            with pytest.raises(StorageError, match=r"privacy_ledger\.jsonl could not be written: .*ulimit"):
                ledger.append("event", text="x" * 500)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == good
        ledger.append("event", text="afterwards")
    assert [record.get("text") for record in PrivacyLedger.read(path).records] == [None, "afterwards"]


def test_a_failed_sync_takes_the_record_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PrivacyLedger.open(path) as ledger:
        ledger.append("event")
        good = path.read_bytes()
        failures = iter([True])
        real = os.fsync

        def failing(fd: int) -> None:
            if next(failures, False):
                raise OSError(errno.ENOSPC, "full")
            real(fd)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(StorageError, match=r"privacy_ledger\.jsonl"):
            ledger.append("intent", attempt=0, step=0, release=STEP.to_dict())
        assert path.read_bytes() == good
        ledger.append("intent", attempt=0, step=0, release=STEP.to_dict())  # the failed one took no noise key
    assert len(PrivacyLedger.read(path).records) == 2


def test_a_ledger_that_cannot_be_put_back_accepts_nothing_more(
    ledger: PrivacyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.append("event")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(StorageError):
        ledger.append("event")
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="not open for writing"):
        ledger.append("event")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/privacy_ledger.jsonl.*hydra\.run\.dir"):
        PrivacyLedger.open(tmp_path / "file" / "privacy_ledger.jsonl")
    with pytest.raises(StorageError, match="is a folder"):
        PrivacyLedger.open(tmp_path)


def test_a_ledger_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be read"):
        PrivacyLedger.read(tmp_path / "absent.jsonl")


# --- one writer -------------------------------------------------------------------------------


def test_a_second_writer_is_refused_while_the_first_is_open(path: Path) -> None:
    with PrivacyLedger.open(path) as ledger:
        with pytest.raises(LedgerError, match=r"open in another run.*hydra\.run\.dir"):
            PrivacyLedger.open(path)
        assert PrivacyLedger.read(path).records == ledger.records  # reading is free
    PrivacyLedger.open(path).close()


def test_a_forked_worker_cannot_write(ledger: PrivacyLedger) -> None:
    if (child := os.fork()) == 0:
        try:
            ledger.append("event")
        except LedgerError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ledger.append("event")
    assert len(ledger.records) == 1


def _outside_replace(path: Path) -> None:
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.parametrize(
    "interfere", [lambda path: path.write_bytes(path.read_bytes() + b"x"), _outside_replace, Path.unlink]
)
def test_a_file_touched_by_somebody_else_during_the_run_is_noticed(
    ledger: PrivacyLedger, path: Path, interfere: Callable[[Path], None]
) -> None:
    ledger.append("event")
    interfere(path)
    with pytest.raises(LedgerError, match=r"another program|removed"):
        ledger.append("event")


# --- what is charged --------------------------------------------------------------------------


@pytest.mark.parametrize("noise_std", [0.5, 0.4])
def test_a_replay_charges_nothing_and_takes_nothing_back(ledger: PrivacyLedger, noise_std: float) -> None:
    take_step(ledger, 0, noise_std=noise_std, update_hash="u")
    ledger.append("replay", attempt=0, step=0)
    ledger.append("release", attempt=0, step=0, noise_std=0.5, sensitivity=0.5, update_hash="u")
    assert charged_releases(ledger.records) == [GaussianRelease(noise_multiplier=noise_std / 0.5, law=LAW)]


@pytest.mark.parametrize(
    ("noise_std", "sensitivity", "charged"),
    [
        (0.4, 0.5, 0.8),
        (0.499, 0.5, 0.998),
        (5.0, 0.5, 1.0),  # more noise earns nothing
        (0.5 * (1 - 1e-15), 0.5, 1.0),  # and rounding splits nothing
        (None, 0.5, 1.0),
        (0.5, 1.0, 0.5),
        (0.0, 0.5, None),
        (9.0, None, None),  # over an unbounded sensitivity it is not a noise
    ],
)
def test_a_step_is_charged_as_it_was_where_that_is_more_than_was_announced(
    ledger: PrivacyLedger, noise_std: float | None, sensitivity: float | None, charged: float | None
) -> None:
    ledger.append("intent", attempt=0, step=0, release=STEP.to_dict())
    ledger.append("release", attempt=0, step=0, noise_std=noise_std, sensitivity=sensitivity)
    bare = NonPrivateRelease(label="train")
    expected = bare if charged is None else GaussianRelease(noise_multiplier=charged, law=LAW)
    assert charged_releases(ledger.records) == [expected]


def test_an_attempt_whose_draws_left_their_law_is_charged_without_amplification(ledger: PrivacyLedger) -> None:
    take_step(ledger, 0)
    take_step(ledger, 1)
    ledger.append("event", name="sampling_departure", attempt=0, step=2, law=Poisson(sample_rate=0.5).to_dict())
    take_step(ledger, 0, attempt=1)
    assert charged_releases(ledger.records) == [
        GaussianRelease(noise_multiplier=1.0, law=FullBatch(), count=2),
        GaussianRelease(noise_multiplier=1.0, law=LAW),
    ]


def test_a_release_without_privacy_stays_one_whatever_is_stated_later(ledger: PrivacyLedger) -> None:
    take_step(ledger, 0, release=NonPrivateRelease(label="train"), noise_std=9.0)
    assert charged_releases(ledger.records) == [NonPrivateRelease(label="train")]


@pytest.mark.parametrize(
    ("steps", "epochs", "n"),
    [
        ([(0, step) for step in range(10)], 1, 100),
        ([(0, step) for step in range(11)], 2, 100),
        ([(0, step) for step in range(5)] + [(1, step) for step in range(5, 10)], 2, 100),
        ([(0, step) for step in range(5)] + [(1, step) for step in range(5, 15)], 3, 100),
        ([(0, step) for step in (0, 10, 20)], 3, 100),
        ([(0, step) for step in range(4)], 2, 19),  # a short last batch belongs to its epoch
    ],
)
def test_under_shuffling_every_epoch_touched_in_an_attempt_is_charged_whole(
    ledger: PrivacyLedger, steps: list[tuple[int, int]], epochs: int, n: int
) -> None:
    release = GaussianRelease(noise_multiplier=1.0, law=Shuffle(batch_size=10, n=n))
    for attempt, step in steps:
        ledger.append("intent", attempt=attempt, step=step, release=release.to_dict())
    (charged,) = charged_releases(ledger.records)
    assert isinstance(charged, GaussianRelease) and isinstance(charged.law, Shuffle)
    assert charged.law.epochs(charged.count) == epochs


# --- noise keys -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [("run_id", 3), ("nonce", None), ("attempt", "0"), ("mode", None), ("planned_steps", None), ("plan", []),
     ("reason", None), ("steps", "4")],
)  # fmt: skip
def test_a_plan_or_end_without_what_all_of_them_state_is_refused(
    name: str, value: object, path: Path, content: bytes
) -> None:
    for change in (lambda record: record.update({name: value}), lambda record: record.pop(name)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        rewrite_chain(path, lambda record, change=change: change(record) if name in record else None)
        with pytest.raises(LedgerError, match=name):
            PrivacyLedger.read(path)


@pytest.mark.parametrize(
    "event, name, value",
    [("units_unknown", "attempt", None), ("sampling_departure", "attempt", "0"), ("fresh_attempt", "attempt", None),
     ("init_from", "start", []), ("not_counted", "dataset_ledger", None), ("private_log", "logged", 1),
     ("declared_evaluation", "data", None), ("units_unnamed", "unit", None), ("private_evaluation", "release", {})],
)  # fmt: skip
def test_an_event_without_what_the_claim_reads_of_it_is_refused(
    event: str, name: str, value: object, path: Path
) -> None:
    with PrivacyLedger.open(path) as ledger:
        for facts in ({}, {name: value}):
            with pytest.raises(LedgerError, match=rf"{event} .*{name}"):
                ledger.append("event", name=event, **facts)


def test_a_noise_key_is_never_used_twice(path: Path) -> None:
    with PrivacyLedger.open(path) as ledger:
        take_step(ledger, 0)
        take_step(ledger, 0, attempt=1)
        size = path.stat().st_size
        with pytest.raises(LedgerError, match="attempt 1, step 0 was announced twice"):
            ledger.append("intent", attempt=1, step=0, release=STEP.to_dict())
        assert path.stat().st_size == size
        read_keys(ledger.records)
        doubled = [*ledger.records, ledger.records[0]]
    assert noise_keys(doubled) == [(0, 0), (1, 0), (0, 0)]
    with pytest.raises(LedgerError, match="announced twice"):
        read_keys(doubled)
    with pytest.raises(LedgerError, match="announced twice"):
        charged_releases(doubled)


@pytest.mark.parametrize("kind", ["release", "replay"])
def test_a_record_of_a_step_that_was_never_announced_is_refused(ledger: PrivacyLedger, kind: str) -> None:
    take_step(ledger, 0)
    with pytest.raises(LedgerError, match=f"{kind} of attempt 0, step 1 without an earlier intent"):
        ledger.append(kind, attempt=0, step=1, noise_std=0.5, sensitivity=0.5)


@pytest.mark.parametrize("name", ["state_hash", "sum_tag", "update_hash"])
def test_a_replay_that_differs_from_the_first_execution_is_refused(ledger: PrivacyLedger, name: str) -> None:
    ledger.append("intent", attempt=0, step=0, release=STEP.to_dict(), **{name: "a"})
    released = {"attempt": 0, "step": 0, "noise_std": 0.5, "sensitivity": 0.5, "law": LAW.to_dict()}
    ledger.append("release", **released, **{name: "a"})
    with pytest.raises(LedgerError, match=f"{name} differs"):
        ledger.append("replay", attempt=0, step=0, **{name: "b"})
    ledger.append("replay", attempt=0, step=0)
    with pytest.raises(LedgerError, match=f"{name} differs"):
        ledger.append("release", **released, **{name: "b"})
    with pytest.raises(LedgerError, match="another sampling law"):
        ledger.append("release", **released | {"law": FullBatch().to_dict()})
    ledger.append("release", **released, **{name: "a"})


def test_one_announcement_allows_one_release(ledger: PrivacyLedger) -> None:
    take_step(ledger, 0)
    with pytest.raises(LedgerError, match="released twice"):
        ledger.append("release", attempt=0, step=0, noise_std=0.5, sensitivity=0.5)


@pytest.mark.parametrize(
    "facts",
    [
        {"attempt": 0, "step": -1, "release": STEP.to_dict()},
        {"attempt": True, "step": 0, "release": STEP.to_dict()},
        {"step": 0, "release": STEP.to_dict()},
        {"attempt": 0, "step": 0},
        {"attempt": 0, "step": 0, "release": {"kind": "laplace"}},
        {"attempt": 0, "step": 0, "release": {**STEP.to_dict(), "noise_multiplier": -1.0}},
    ],
)
def test_an_intent_that_no_accountant_could_charge_is_refused(path: Path, facts: dict[str, Any]) -> None:
    with PrivacyLedger.open(path) as ledger, pytest.raises(LedgerError):
        ledger.append("intent", **facts)


@pytest.mark.parametrize("facts", [{"noise_std": -1.0, "sensitivity": 1.0}, {"noise_std": "1", "sensitivity": 1.0}])
def test_a_release_with_an_impossible_size_is_refused(ledger: PrivacyLedger, facts: dict[str, Any]) -> None:
    ledger.append("intent", attempt=0, step=0, release=STEP.to_dict())
    with pytest.raises(LedgerError, match="noise_std"):
        ledger.append("release", attempt=0, step=0, **facts)
