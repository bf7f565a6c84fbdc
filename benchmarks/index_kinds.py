"""Compare kinds of index: recall, size on disk, memory, and the time to build it and to answer one question.

    python benchmarks/index_kinds.py --embeddings RUN/embeddings --threads 1

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import apart, machine, options, say, timed, write
from torch import Tensor

from lit_dpret.costs.measure import peak, reset_peak, resident
from lit_dpret.retrieval.backends import Faiss, load_faiss, search_with
from lit_dpret.retrieval.rows import FileRows
from lit_dpret.retrieval.search import search
from lit_dpret.retrieval.topk import TopK, merged
from lit_dpret.tasks.index_folder import IndexFolder

K, QUESTIONS, SHARDS = 100, 200, 4
Answer = Callable[[Tensor], Any]


def kinds(passages: int) -> list[tuple[str, str]]:
    """Return what to build, and parameters of the search, for each row of the table."""
    lists = 2 ** round(np.log2(2 * passages**0.5))
    inverted, codes = f"IVF{lists},Flat", f"IVF{lists},PQ48"
    found = [("exact", ""), (f"exact, {SHARDS} shards", ""), ("Flat", "")]
    found += [(inverted, f"nprobe={probes}") for probes in (1, 16, 64)]
    found += [("HNSW32", f"efSearch={depth}") for depth in (16, 128)]
    found += [(codes, f"nprobe={probes}") for probes in (16, 64)]
    with contextlib.suppress(ImportError):
        importlib.import_module("lancedb")
        found += [(f"lancedb {lists}", f"nprobes=64, refine_factor={factor}") for factor in (1, 10)]
    return found


def vectors(count: int, source: Path | None, dim: int) -> Iterator[Tensor]:
    """Yield unit vectors in parts: each is a real embedding, moved by 0.3 times the difference of two others.

    Without ``source`` the real ones are random.
    """
    random = torch.Generator().manual_seed(0)
    real = torch.randn(1_000, dim, generator=random) if source is None else IndexFolder(source).rows.chunk(0, 10**7)
    real = torch.nn.functional.normalize(real.float(), dim=1)
    for start in range(0, count, 50_000):
        size = min(50_000, count - start)
        first, plus, minus = (torch.randint(len(real), (size,), generator=random) for _ in range(3))
        yield torch.nn.functional.normalize(real[first] + 0.3 * (real[plus] - real[minus]), dim=1)


def written(count: int, source: Path | None, dim: int, folder: Path) -> int:
    """Write vectors to ``folder``, in one file and in shards, and questions; return their width."""
    questions, done = [], 0
    with (folder / "vectors").open("wb") as file:
        for part in vectors(count + QUESTIONS, source, dim):
            file.write(part[: max(0, count - done)].numpy().tobytes())
            questions.append(part[max(0, count - done) :].numpy())
            done += len(part)
    np.save(folder / "questions.npy", np.concatenate(questions))
    rows = FileRows(folder / "vectors", dim=questions[-1].shape[1])
    for shard in range(SHARDS):
        with (folder / f"shard{shard}").open("wb") as file:
            for start in range(shard * count // SHARDS, (shard + 1) * count // SHARDS, 50_000):
                file.write(rows.chunk(start, min(start + 50_000, (shard + 1) * count // SHARDS)).numpy().tobytes())
    return rows.dim


def build(kind: str, folder: Path, dim: int) -> None:
    rows = FileRows(folder / "vectors", dim=dim)
    if kind.startswith("lancedb"):
        pyarrow = importlib.import_module("pyarrow")

        def batches() -> Iterator[Any]:
            for start in range(0, len(rows), 50_000):
                flat = pyarrow.array(rows.chunk(start, start + 50_000).numpy().ravel())
                places = pyarrow.array(np.arange(start, min(start + 50_000, len(rows))))
                vector = pyarrow.FixedSizeListArray.from_arrays(flat, dim)
                yield pyarrow.RecordBatch.from_arrays([places, vector], ["place", "vector"])

        schema = next(batches()).schema
        database = importlib.import_module("lancedb").connect(folder / "lance")
        table = database.create_table("passages", batches(), schema=schema)
        partitions = int(kind.split()[1])
        table.create_index(metric="dot", num_partitions=partitions, num_sub_vectors=48, vector_column_name="vector")
    else:
        Faiss.build(rows, kind).write(folder / "index.faiss")


def opened(kind: str, parameters: str, folder: Path, dim: int) -> Answer:
    """Open what was built; return a function from questions to the indices of the best passages."""
    rows = FileRows(folder / "vectors", dim=dim)
    if kind == "exact":
        return lambda asked: search(asked, rows, K).indices.tolist()
    if kind.startswith("exact"):
        shards = [FileRows(folder / f"shard{shard}", dim=dim) for shard in range(SHARDS)]
        starts = np.cumsum([0, *map(len, shards)]).tolist()
        rank = torch.arange(len(rows))

        def both(asked: Tensor) -> Any:
            parts = [search(asked, shard, K) for shard in shards]
            moved = [TopK(part.scores, part.indices + start) for part, start in zip(parts, starts, strict=False)]
            return merged(moved, K, tie_rank=rank).indices.tolist()

        return both
    if kind.startswith("lancedb"):
        table = importlib.import_module("lancedb").connect(folder / "lance").open_table("passages")
        given = dict(item.split("=") for item in parameters.split(", "))

        def theirs(asked: Tensor) -> Any:
            found = []
            for question in asked.numpy():
                query = table.search(question).metric("dot").nprobes(int(given["nprobes"])).select(["place"]).limit(K)
                found.append(query.refine_factor(int(given["refine_factor"])).to_arrow()["place"].to_pylist())
            return found

        return theirs
    index = Faiss.read(folder / "index.faiss")
    load_faiss().ParameterSpace().set_index_parameters(index.index, parameters)
    return lambda asked: search_with(index, asked, rows, K).indices.tolist()


def ask(kind: str, parameters: str, folder: Path, dim: int) -> dict[str, Any]:
    """Answer all questions one by one, then together; return times, memory and the answers."""
    questions = torch.from_numpy(np.load(folder / "questions.npy"))
    here = torch.device("cpu")
    reset_peak(here)
    before = resident(here)
    answer, opening = timed(lambda: opened(kind, parameters, folder, dim))
    first = timed(lambda: answer(questions[:1]))[1]
    times = [timed(lambda asked=question: answer(asked[None]))[1] for question in questions]  # type: ignore[misc]
    risen = (peak(here) - before) / 2**20
    found, together = timed(lambda: answer(questions))
    return {
        "first_seconds": opening["seconds"] + first["seconds"],
        "one_question_seconds": statistics.median(each["seconds"] for each in times),
        "one_question_processor_seconds": statistics.median(each["processor_seconds"] for each in times),
        "together_processor_seconds": together["processor_seconds"] / len(questions),
        "risen_mib": risen,
        "found": found,
    }  # fmt: skip


def size_of(folder: Path) -> float:
    """Return the MiB of an index beside the vectors."""
    files = [folder / "index.faiss", *(folder / "lance").rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


def compare(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    built, exact, facts = "", [], dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
        folder = Path(place)
        dim = written(count, arguments.embeddings, arguments.dim, folder)
        common = ["--folder", folder, "--dim", dim, "--threads", arguments.threads]
        for kind, parameters in kinds(count):
            if not kind.startswith("exact") and kind != built:
                (folder / "index.faiss").unlink(missing_ok=True)
                shutil.rmtree(folder / "lance", ignore_errors=True)
                facts, built = apart(__file__, "--build", kind, *common), kind
                facts["index_mib"] = size_of(folder)
            row = apart(__file__, "--ask", kind, "--parameters", parameters, *common)
            answers = row.pop("found")
            exact = exact or answers
            for k in (10, K):
                shared = sum(len({*mine[:k]} & {*found[:k]}) for mine, found in zip(exact, answers, strict=True))
                row[f"recall@{k}"] = shared / (k * len(exact))
            rows.append({"kind": kind, "parameters": parameters} | facts | row)
            say(f"{count:9d} {json.dumps(rows[-1])}")
    return {"passages": count, "dim": dim, "rows": rows}


def main() -> None:
    parser = options(__doc__, "index_kinds_cpu.json", dim=384, threads=1)
    parser.add_argument("--embeddings", type=Path, help="folder of task=encode; random vectors without it")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--scratch", type=Path, help="folder for some 5 KB per passage; default the system's")
    for name in ("build", "ask", "parameters", "folder"):
        parser.add_argument(f"--{name}", type=Path if name == "folder" else str, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.build or arguments.ask:
        load_faiss().omp_set_num_threads(arguments.threads)
    if arguments.build:
        _, times = timed(lambda: build(arguments.build, arguments.folder, arguments.dim))
        say(json.dumps({f"build_{unit}": value for unit, value in times.items()}))
    elif arguments.ask:
        say(json.dumps(ask(arguments.ask, arguments.parameters, arguments.folder, arguments.dim)))
    else:
        facts = {"k": K, "questions": QUESTIONS, "threads": arguments.threads}
        facts |= machine("torch", "numpy", "faiss-cpu", "lancedb")
        write(facts | {"sizes": [compare(count, arguments) for count in arguments.sizes]}, arguments.out)


if __name__ == "__main__":
    main()
