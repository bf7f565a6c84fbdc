"""Our exact search beside sentence-transformers', BEIR's and faiss's, on random vectors, in one run.

    pip install sentence-transformers beir faiss-cpu
    python benchmarks/search.py --threads 2

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import apart, in_turns, machine, median_ratio, options, say, timed, write
from torch import Tensor

from lit_dpret.costs.measure import peak, reset_peak, resident
from lit_dpret.retrieval.backends import make_search
from lit_dpret.retrieval.rows import FileRows
from lit_dpret.retrieval.search import search
from lit_dpret.retrieval.topk import TopK

Found = Callable[[], list[list[int]]]


def systems(queries: Tensor, passages: Tensor, k: int) -> dict[str, Found]:
    """Name to a search that returns, for every query, indices best first; those not installed are left out.

    Each computes where the tensors are; BEIR's wants them on a CPU.
    """
    found: dict[str, Found] = {"lit-dpret": lambda: search(queries, passages, k).indices.tolist()}
    with contextlib.suppress(ImportError):
        from sentence_transformers.util import dot_score, semantic_search

        def theirs() -> list[list[int]]:
            hits = semantic_search(queries, passages, top_k=k, score_function=dot_score)
            return [[int(hit["corpus_id"]) for hit in row] for row in hits]

        found["sentence-transformers semantic_search"] = theirs
    with contextlib.suppress(ImportError):
        from beir.retrieval.search.dense import DenseRetrievalExactSearch

        class Vectors:
            """A model whose texts are places in a list of vectors."""

            def encode_queries(self, texts: list[str], **_: Any) -> Tensor:
                return queries[[int(text) for text in texts]]

            def encode_corpus(self, corpus: list[dict[str, str]], **_: Any) -> Tensor:
                first, last = int(corpus[0]["text"]), int(corpus[-1]["text"])
                return passages[first : last + 1]

        def beirs() -> list[list[int]]:
            corpus = {
                str(i): {"title": "", "text": f"{i:07d}"} for i in range(len(passages))
            }  # one length: kept in order
            asked = {str(i): str(i) for i in range(len(queries))}
            hits = DenseRetrievalExactSearch(Vectors()).search(corpus, asked, k, "dot")
            return [[int(name) for name, _ in sorted(hits[q].items(), key=lambda h: -h[1])[:k]] for q in asked]

        if queries.device.type == "cpu":
            found["beir DenseRetrievalExactSearch"] = beirs
    with contextlib.suppress(Exception):
        flat = make_search("faiss:Flat", device=queries.device.type)
        here = queries.cpu(), passages.cpu()
        found["lit-dpret search=faiss:Flat"] = lambda: flat(*here, k).indices.tolist()
    return found


def measured(work: Found) -> tuple[list[list[int]], dict[str, Any]]:
    load = os.getloadavg()[0]
    with contextlib.redirect_stderr(io.StringIO()):
        result, facts = timed(work)
    return result, facts | {"load_before": load, "load_after": os.getloadavg()[0]}


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.nn.functional.normalize(
        torch.randn(arguments.passages + arguments.queries, arguments.dim, generator=generator), dim=1
    )
    passages, queries = draw.to(arguments.device).split([arguments.passages, arguments.queries])
    runs: dict[str, list[dict[str, Any]]] = {}
    reference: list[set[int]] = []
    for _ in range(arguments.rounds):
        for name, work in systems(queries, passages, arguments.k).items():
            result, facts = measured(work)
            reference = reference or [set(row) for row in result]
            shared = sum(len(mine & set(row)) for mine, row in zip(reference, result, strict=True))
            facts["shared_with_ours"] = shared / sum(map(len, reference))
            runs.setdefault(name, []).append(facts)
            say(
                f"{name:40s} {facts['seconds']:8.1f} s  {facts['processor_seconds']:8.1f} s of processor  "
                f"shared {facts['shared_with_ours']:.6f}  load {facts['load_before']:.1f}"
            )
    ours = runs["lit-dpret"]
    ratios = {}
    for name, facts_of in runs.items():
        if name != "lit-dpret":
            pairs = list(zip(ours, facts_of, strict=True))
            ratios[name] = {key: [mine[key] / other[key] for mine, other in pairs]
                            for key in ("seconds", "processor_seconds")}  # fmt: skip
            say(f"ours / {name}: {ratios[name]}")
    return {"runs": runs, "ours_over_theirs": ratios}


def grid(rounds: int) -> list[dict[str, Any]]:
    generator, found = torch.Generator().manual_seed(0), []
    draw = torch.nn.functional.normalize(torch.randn(210_000, 384, generator=generator), dim=1)
    for passages in (10_000, 50_000, 200_000):
        for queries in (1, 10, 100, 1_000, 10_000):
            both = systems(draw[200_000 : 200_000 + queries], draw[:passages], 100)
            ours, theirs = "lit-dpret", "sentence-transformers semantic_search"
            times = in_turns({ours: both[ours], theirs: both[theirs]}, rounds)
            facts: dict[str, Any] = {"queries": queries, "passages": passages}
            for unit in ("seconds", "processor_seconds"):
                facts[unit] = statistics.median(each[ours][unit] for each in times)
                facts[f"{unit}_over_theirs"] = median_ratio(times, ours, theirs, unit)
            say(" ".join(f"{name} {value:.4g}" for name, value in facts.items()))
            found.append(facts)
    return found


def climb(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search a file of so many vectors in a process of its own; how high its memory rose over its start."""
    words = ["--child", count, "--queries", arguments.queries, "--k", arguments.k, "--dim", arguments.dim]
    facts: dict[str, Any] = apart(__file__, *words, "--threads", arguments.threads)
    say(f"{count:8d} vectors of {facts['file_mib']:.0f} MiB: {facts['risen_mib']:.0f} MiB")
    return facts


def child(count: int, arguments: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors"
        with path.open("wb") as file:
            for start in range(0, count, 10_000):
                part = torch.randn(min(10_000, count - start), arguments.dim, generator=generator)
                file.write(torch.nn.functional.normalize(part, dim=1).numpy().tobytes())
        queries = torch.randn(arguments.queries, arguments.dim, generator=generator)
        search(queries[:4], FileRows(path, dim=arguments.dim), 10, tie_rank=torch.arange(count))  # loads libraries
        here = torch.device("cpu")
        reset_peak(here)
        before = resident(here) / 2**20
        top: TopK = search(queries, FileRows(path, dim=arguments.dim), arguments.k)
        facts = {"vectors": count, "file_mib": path.stat().st_size / 2**20, "before_mib": before}
        highest = peak(here) / 2**20
        facts |= {"peak_mib": highest, "risen_mib": highest - before, "answers": top.indices.numel()}
        say(json.dumps(facts))


def main() -> None:
    parser = options(
        __doc__, "search_cpu.json", queries=6980, passages=200_000, dim=256, k=1000, rounds=1, threads=os.cpu_count()
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="without --grid and --memory")
    parser.add_argument("--memory", type=int, nargs="*", help="corpus sizes; without any 50000 200000 800000")
    parser.add_argument("--grid", action="store_true", help="many sizes, --rounds times each")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child is not None:
        child(arguments.child, arguments)
        return
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    facts = {key: getattr(arguments, key) for key in ("queries", "passages", "dim", "k", "threads")}
    facts |= machine("torch", "numpy", "sentence-transformers", "beir", "faiss-cpu")
    if arguments.grid:
        del facts["queries"], facts["passages"]
        report["grid"] = facts | {"dim": 384, "k": 100, "sizes": grid(arguments.rounds)}
    elif arguments.memory is None:
        report["speed"] = facts | {"device": arguments.device} | compare(arguments)
    else:
        sizes = arguments.memory or [50_000, 200_000, 800_000]
        del facts["passages"]
        report["memory"] = facts | {"sizes": [climb(size, arguments) for size in sizes]}
    write(report, arguments.out)


if __name__ == "__main__":
    main()
