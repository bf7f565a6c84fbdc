"""Who does a piece of work changes no byte, and whoever dies costs its piece; on Ray, on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import PASSAGES, SETTINGS, content, lively_generator, passage, write_parent_card
from tiny_models import tiny_bert, tiny_tokenizer

from lit_dpret.distributed import ray_workers as engine
from lit_dpret.distributed.ray_workers import ray_workers
from lit_dpret.encoders import Contract, TextEncoder, bulk, embedding_cache
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, WorkerError
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import Ranker
from lit_dpret.tasks.index_folder import Encoding, IndexFolder, encode_folder

MANY = {f"p{number}": passage(number, 2 + number % 9) for number in range(60)}
WORDS = ["how", "to", "file", "a", "claim", "flood", "insurance", "cover", "my", "house"]
TEXTS = {f"p{i}{j}": f"{one} {two}{' house' * (i % 4)}" for i, one in enumerate(WORDS) for j, two in enumerate(WORDS)}


def squares(dies_over: tuple[int, ...] = (), fails_over: int | None = None) -> Callable[[int], tuple[int, int]]:
    """What does a piece: the square, and the process that made it."""

    def work(piece: int) -> tuple[int, int]:
        if piece in dies_over:
            os.kill(os.getpid(), signal.SIGKILL)
        if piece == fails_over:
            raise ValueError("no square")
        return piece * piece, os.getpid()

    return work


def dying() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_pieces_are_read_when_a_worker_is_free_and_workers_stay_from_one_list_to_the_next() -> None:
    read: list[int] = []

    def pieces() -> Iterator[int]:
        for number in range(40):
            read.append(number)
            yield number

    with ray_workers(squares, 2) as over:
        found = []
        for result in over(pieces()):
            found.append(result)
            assert len(read) <= len(found) + 4
        again = list(over(range(5)))
        assert list(over([])) == []
    assert sorted(value for value, _ in found) == [number * number for number in range(40)]
    assert {process for _, process in again} <= {process for _, process in found} != {os.getpid()}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_more_workers_than_the_cluster_has_places_wait_and_hold_nothing_up() -> None:
    with ray_workers(squares, 6) as over:
        assert len(list(over(range(20)))) == 20


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_piece_that_kills_each_worker_ends_the_work_and_another_error_is_said() -> None:
    with (
        pytest.raises(WorkerError, match="3 workers died over the same piece"),
        ray_workers(partial(squares, dies_over=(3,)), 2) as over,
    ):
        list(over(range(8)))
    with pytest.raises(WorkerError, match="no square"), ray_workers(partial(squares, fails_over=3), 1) as over:
        list(over(range(8)))
    with pytest.raises(WorkerError, match="before they were ready"), ray_workers(dying, 1) as over:
        list(over(range(8)))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("place", "setting"), [({"threads": 3}, "task.threads"), ({"device": "cuda"}, "task.device")])
def test_a_cluster_without_a_place_for_one_worker_is_refused(place: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigurationError, match=setting), ray_workers(squares, 1, **place):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_with_other_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_versions", lambda: {"torch": "1.0"})
    with pytest.raises(WorkerError, match=r"torch.*1\.0"), ray_workers(squares, 1) as over:
        list(over(range(3)))


def one_killed() -> Callable[[int, int], None]:
    """Progress that kills one worker process of this machine, once."""
    done: list[int] = []

    def progress(finished: int, _: int) -> None:
        if finished and not done:
            mine = [
                int(folder.name) for folder in Path("/proc").iterdir()
                if folder.name.isdigit() and b"ray::_Worker" in _command(folder)
            ]  # fmt: skip
            if mine:
                os.kill(mine[0], signal.SIGKILL)
                done.append(mine[0])

    progress.killed = done  # type: ignore[attr-defined]
    return progress


def _command(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_set_has_the_bytes_of_one_process_also_after_a_worker_is_killed(tmp_path: Path, precision: str) -> None:
    source = lively_generator().save_model(tmp_path / "g")
    write_parent_card(source)
    settings = {**SETTINGS, "precision": precision, "queries_per_passage": 4}
    alone = content(synthesize(source, MANY, tmp_path / "alone" / "set", **settings))
    killer: Any = one_killed()
    out = synthesize(source, MANY, tmp_path / "ray" / "set", workers=2, progress=killer, **settings)
    assert killer.killed and content(out) == alone


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_refuses_in_its_own_words_and_what_is_finished_is_kept(tmp_path: Path) -> None:
    module = lively_generator()
    with torch.no_grad():
        module.model.shared.weight.fill_(float("nan"))
    broken = module.save_model(tmp_path / "g")
    write_parent_card(broken)
    with pytest.raises(UnsupportedModelError, match="weights are broken"):
        synthesize(broken, PASSAGES, tmp_path / "set", **SETTINGS, workers=1)


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    tower = TextEncoder(tiny_bert(0), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=8))
    save_sentence_transformer(tmp_path / "encoder", tower, tower)
    return tmp_path / "encoder"


def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a piece hold one batch."""
    for module in (bulk, embedding_cache):
        monkeypatch.setattr(module, "BATCHES_PER_PIECE", 1)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_embeddings_have_the_bytes_of_one_process_also_after_a_worker_is_killed(
    encoder: Path, tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_batches(monkeypatch)
    how: dict[str, Any] = {"batch_size": 8, "storage": storage}
    whole = encode_folder(encoder, TEXTS, tmp_path / "whole", Encoding(**how)).folder
    killer: Any = one_killed()
    out = encode_folder(encoder, TEXTS, tmp_path / "set", Encoding(workers=2, **how), progress=killer).folder
    assert killer.killed and files(out) == files(whole)
    IndexFolder(out, verify=True)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("cached", [False, True])
def test_a_ranking_is_that_of_one_process(
    encoder: Path, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_batches(monkeypatch)
    found = []
    for workers in (0, 2):
        cache = str(tmp_path / f"cache{workers}") if cached else None
        ranker = Ranker(encoder=str(encoder), workers=workers, batch_size=8, cache_dir=cache)
        found.append(ranker.rank({"q": "flood insurance", "r": "my house"}, TEXTS, k=7).top)
    assert torch.equal(found[0].indices, found[1].indices) and torch.equal(found[0].scores, found[1].scores)


def test_a_part_that_is_torn_or_of_another_matrix_is_not_believed(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_batches(monkeypatch)
    whole = files(encode_folder(encoder, TEXTS, tmp_path / "whole", Encoding(batch_size=8)).folder)
    parts = tmp_path / "set" / "embeddings.bin.parts"
    parts.mkdir(parents=True)
    rows = whole["embeddings.bin"][: 8 * 16 * 4]
    (parts / f"0-0-{'0' * 16}-{embedding_cache.hashlib.sha256(rows).hexdigest()}.part").write_bytes(rows)
    seen: list[int] = []
    piece = embedding_cache.WindowGroups.piece
    monkeypatch.setattr(
        embedding_cache.WindowGroups, "piece", lambda self, start: seen.append(start) or piece(self, start)
    )
    encode_folder(encoder, TEXTS, tmp_path / "set", Encoding(batch_size=8))
    assert files(tmp_path / "set") == whole and 0 in seen and not parts.exists()


def test_without_ray_the_way_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"task\.workers=2.*lit-dpret\[ray\]"), ray_workers(squares, 2):
        pass


def test_private_queries_go_to_no_worker() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.workers"):
        Encoding(side="query", queries="private", workers=2)
