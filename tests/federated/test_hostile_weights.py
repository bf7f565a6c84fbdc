"""A server that sends absurd weights hears the same of a silo whether a private query holds a word or not.

Each pair of silos differs in one train query, which holds a word or does not. The replies to every message are
compared: that it is an answer or which refusal, the charge, and, where the answer is noised, how far the sum before the
noise moved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_silos import PRIVATE, SMALL, declare_public, encoder
from torch import Tensor

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import DIM, Run

from lit_dpret.federated import silo_account
from lit_dpret.federated.aggregation import fingerprint
from lit_dpret.federated.flower.client_app import unheard
from lit_dpret.federated.flower.payloads import pool_record, tensors_record
from lit_dpret.federated.negatives import FedPool
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.modules.as2 import AS2DualEncoder
from lit_dpret.privacy.ledger import private_run
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.retrieval.search import unbroken

WORDS = "encoder.backbone.embeddings.word_embeddings.weight"
LAST = "encoder.backbone.encoder.layer.0.output.LayerNorm"
C = PRIVATE.privacy.max_grad_norm
ONLY_STATIC = replace(PRIVATE, stage1=replace(PRIVATE.stage1, warmup_rounds=0))
FREE = replace(SMALL, stage1=replace(SMALL.stage1, warmup_rounds=0, in_batch=False, weighting="uniform"))
WORD = "entity1x0"  # the tokenizer knows it, and the silo says it nowhere


def plant(folder: Path, word: str) -> None:
    """Put a word into the first train query of the silo."""
    path, manifest = folder / "queries.jsonl", folder / "manifest.json"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = next(row for row in rows if row["split"] == "train")
    chosen["text"] = " ".join([word, *chosen["text"].split()[1:]])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    facts = json.loads(manifest.read_text(encoding="utf-8"))
    facts["sha256"]["queries.jsonl"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(facts), encoding="utf-8")


def signs(seed: int) -> Tensor:
    return torch.sign(torch.randn(DIM, generator=torch.Generator().manual_seed(seed)))


def of_word(value: float) -> Callable[[dict[str, Tensor], int], None]:
    """The embedding of the word alone is absurd."""

    def spoil(weights: dict[str, Tensor], place: int) -> None:
        weights[WORDS][place] = value * signs(1)

    return spoil


def lengths(scale: float) -> Callable[[dict[str, Tensor], int], None]:
    """All embeddings are long, and the word decides how long."""

    def spoil(weights: dict[str, Tensor], place: int) -> None:
        weights[f"{LAST}.weight"] *= scale
        weights[WORDS][place] = 30.0 * signs(1)

    return spoil


def cancels(weights: dict[str, Tensor], place: int) -> None:
    """Scores are large and nearly equal, so that a loss is what rounding leaves of them."""
    weights[f"{LAST}.bias"] += 3e3
    weights[WORDS][place] = 30.0 * signs(1)


def infinite_times_zero(weights: dict[str, Tensor], place: int) -> None:
    weights[WORDS][place] = 3e38
    weights["encoder.backbone.embeddings.LayerNorm.weight"].zero_()


HOSTILE: dict[str, Callable[[dict[str, Tensor], int], None]] = {
    "a variance overflows": of_word(1e25),
    "infinity minus infinity": of_word(3e38),
    "nearly too large": of_word(1e19),
    "zero times infinity": infinite_times_zero,
    "a score is nearly too large": lengths(1e18),
    "a score is too large": lengths(1e19),
    "a length is too large": lengths(3e37),
    "scores cancel": cancels,
}
TOO_LONG = [HOSTILE["a score is too large"], HOSTILE["a length is too large"]]


@pytest.fixture(autouse=True)
def both_have_the_same_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which every run has its own, keyed by its random name."""
    monkeypatch.setattr(private_run.random_secrets, "token_hex", lambda size: f"{COINS.pop():0{2 * size}x}")
    monkeypatch.setattr(silo_account, "split_budget", PLANNED)


COINS: list[int] = []
PLANNED = cache(silo_account.split_budget)
QUICK = ("a variance overflows", "a score is too large", "scores cancel")
every_hostile = pytest.mark.parametrize(
    "spoil",
    [pytest.param(spoil, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, spoil in HOSTILE.items()],
)


class Neighbours:
    """Two silos that differ in one query, and a server that sends both the same."""

    def __init__(self, root: Path, settings: PddAs2 = PRIVATE, **told: bool) -> None:
        self.runs = [Run(root / name, settings, **told) for name in ("with", "without")]
        for run, word in zip(self.runs, (WORD, "filler1"), strict=True):
            plant(run.folders["client0"], word)
        for run in self.runs:
            declare_public(run.root)
            (run.root / "secret").write_bytes(bytes(range(32)))
            (run.root / "secret").chmod(0o600)
        self.start = self.runs[0].server.start

    def spoilt(self, spoil: Callable[[dict[str, Tensor], int], None]) -> dict[str, Tensor]:
        weights = {name: value.clone() for name, value in self.start.items()}
        spoil(weights, encoder().tokenizer.get_vocab()[WORD])
        return weights

    def hear(self, kind: str, content: Mapping[str, Any] | None = None, **facts: Any) -> list[dict[str, Any]]:
        """What the server hears of both: the error, or the names, shapes and head of the records; and the charge."""
        found = []
        for run in self.runs:
            COINS[:] = range(64 * len(kind), 64 * len(kind) + 64)
            reply = run.ask(10, kind, content, **facts)
            spent = run.client(run.grid.context(10)).epsilon()
            if reply.has_error():
                found.append({"error": reply.error.reason, "spent": spent})
                continue
            records = {
                name: {key: array.shape for key, array in record.items()}
                for name, record in reply.content.array_records.items()
            }
            finite = all(torch.isfinite(torch.from_numpy(array.numpy().astype("float64"))).all()
                         for record in reply.content.array_records.values() for array in record.values())  # fmt: skip
            found.append({"head": dict(reply.content["head"]), "records": records, "finite": bool(finite),
                          "others": sorted(set(reply.content) - set(records)), "spent": spent})  # fmt: skip
        return found

    def ask_both(self, kind: str, weights: dict[str, Tensor], content: Mapping[str, Any] | None = None,
                 **facts: Any) -> dict[str, Any]:  # fmt: skip
        """What the server hears of both, which is the same."""
        sent = {"weights": tensors_record(weights), **(content or {})}
        one, other = self.hear(kind, sent, weights=fingerprint(weights), **facts)
        assert one == other
        return one


@contextmanager
def sums_of_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The clipped sum of every step, before noise."""
    found: list[Tensor] = []
    taken = DPSGD.take

    def take(self: DPSGD) -> dict[str, Tensor]:
        sums = taken(self)
        found.append(torch.cat([value.flatten() for value in sums.values()]))
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(DPSGD, "take", take)
        yield found


def moved(sums: list[Tensor]) -> float:
    """How far the sums of the first step of two fits are from each other: those after it have other weights."""
    half = len(sums) // 2
    return float((sums[0] - sums[half]).norm())


@pytest.mark.costly
@every_hostile
@pytest.mark.parametrize("settings", [
    pytest.param(PRIVATE, id="words"), pytest.param(ONLY_STATIC, id="static", marks=pytest.mark.slow),
])  # fmt: skip
def test_under_a_budget_no_message_tells_of_the_word_and_a_sum_moves_by_no_more_than_is_charged(
    spoil: Any, settings: PddAs2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Neighbours(tmp_path, settings, share=True, spent=True)
    weights = both.spoilt(spoil)
    with sums_of_steps(monkeypatch) as sums:
        heard = both.ask_both("train.stage1", weights, round=0)
    if "error" in heard:  # sentences are too long, and no query was looked at
        assert spoil in TOO_LONG and not heard["spent"]
    else:
        assert heard["finite"] and heard["spent"] > 0
        assert sums and all(bool(one.isfinite().all()) for one in sums)
        assert moved(sums) <= 2 * C * 1.01
    asked = both.ask_both("query.fedneg_request", weights, refresh=0)
    assert asked["finite"] and asked["spent"] > heard["spent"]
    pool = FedPool(torch.randn(12, DIM, generator=torch.Generator().manual_seed(3)))
    content = {"pool": pool_record(pool, send_as=torch.float32)}
    with sums_of_steps(monkeypatch) as sums:
        assert "error" not in both.ask_both("train.personalise", weights, content, epoch=0)
    assert not sums or moved(sums) <= 2 * C * 1.01
    measured = both.ask_both("evaluate.retrieval", weights, system="stage1", split="train")
    assert measured["head"]["withheld"] is True


@pytest.mark.costly
@every_hostile
def test_masks_and_seals_tell_of_no_summand_and_of_no_measure_that_failed(spoil: Any, tmp_path: Path) -> None:
    for name, settings in (
        ("budget", replace(ONLY_STATIC, secure_sum=True)),
        ("masks", replace(FREE, secure_sum=True)),
        ("seals", replace(FREE, seal=True)),
    ):
        both = Neighbours(tmp_path / name, settings, share=True)
        weights = both.spoilt(spoil)
        if settings.secure_sum:
            both.ask_both("train.secagg_setup", weights, round=0, attempt="a", clients=[1, 2, 3], number=1)
        if name != "budget":
            heard = both.ask_both("evaluate.retrieval", weights, system="stage1", split="train")
            if "error" in heard:
                assert spoil in TOO_LONG
            else:
                assert heard["head"]["withheld"] is False and heard["others"] == ["head", "measures"]


@pytest.mark.costly
def test_a_round_that_failed_cannot_be_told_by_asking_for_it_again_after_a_later_one(tmp_path: Path) -> None:
    both = Neighbours(tmp_path, replace(FREE, secure_sum=True, stage1=replace(FREE.stage1, rounds=3)))
    spoilt = both.spoilt(of_word(1e25))
    for weights, number, attempt in ((spoilt, 0, "a"), (both.start, 2, "b"), (spoilt, 0, "c")):
        turn = {"round": number, "attempt": attempt, "clients": [1, 2, 3], "number": 1}
        heard = both.ask_both("train.secagg_setup", weights, **turn)
        assert ("error" in heard) == (attempt == "c")


@pytest.mark.parametrize("value", [1e20, 3e38])
def test_a_pool_whose_lengths_overflow_is_refused_before_a_query_is_looked_at(value: float, tmp_path: Path) -> None:
    both = Neighbours(tmp_path)
    content = {"pool": pool_record(FedPool(torch.full((12, DIM), value)), send_as=torch.float32)}
    heard = both.ask_both("train.personalise", both.start, content, epoch=0)
    assert heard["error"] == "DataError (bad answer)" and not heard["spent"]


def fails_with_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    place, found = encoder().tokenizer.get_vocab()[WORD], AS2DualEncoder.per_row_loss

    def per_row_loss(self: AS2DualEncoder, rows: Any) -> Tensor:
        if bool((rows["query"]["input_ids"] == place).any()):
            raise RuntimeError("a query holds the word")
        return found(self, rows)

    monkeypatch.setattr(AS2DualEncoder, "per_row_loss", per_row_loss)


@pytest.mark.costly
def test_a_query_that_fails_for_any_reason_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its batch fails with it, as the check does that rows do not depend on each other."""
    fails_with_the_word(monkeypatch)
    both = Neighbours(tmp_path)
    with sums_of_steps(monkeypatch) as sums:
        heard = both.ask_both("train.stage1", both.start, round=0)
    assert "error" not in heard and heard["spent"] > 0
    assert 0 < moved(sums) <= 2 * C * 1.01


def test_in_one_process_the_owner_of_the_silos_hears_of_the_same_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with_the_word(monkeypatch)
    both = Neighbours(tmp_path)
    with pytest.raises(RuntimeError, match="holds the word"):
        both.runs[0].silo_of("client0").train_shared(both.start, 0)


@pytest.mark.parametrize("promised", [True, False])
def test_an_epoch_whose_outcome_stays_here_fails_unheard(promised: bool, tmp_path: Path) -> None:
    class Breaks(SiloClient):
        def personalise(self, *_: Any) -> None:
            raise ValueError("of a private query")

    free = replace(SMALL, stage2=replace(SMALL.stage2, request="none"))
    run = Run(tmp_path, PRIVATE if promised else free, silo=Breaks)
    start = run.server.start
    pool = pool_record(FedPool(torch.ones(3, DIM)), send_as=torch.float32)
    content = {"weights": tensors_record(start), "pool": pool}
    reply = run.ask(10, "train.personalise", content, weights=fingerprint(start), epoch=0)
    assert reply.has_error() is not promised


def test_a_sealed_request_can_be_answered_whatever_its_weights(tmp_path: Path) -> None:
    both = Neighbours(tmp_path, replace(SMALL, seal=True))
    rows = both.runs[0].silo_of("client0").request(both.spoilt(of_word(1e25)), 0)
    assert bool(unbroken(rows).all()) and int((rows == 0).all(dim=1).sum()) == 1


def test_only_the_terminal_of_a_silo_tells_of_a_failure_over_its_queries(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("a text of the silo")

    with caplog.at_level("DEBUG"):
        assert unheard(fails) is None
    told = capfd.readouterr()
    assert "Kept on this machine" in told.err and "Traceback" in told.err and not told.out
    assert not caplog.records, "a logger may have a file"
