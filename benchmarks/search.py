"""Compare our exact search with those of sentence-transformers, BEIR and faiss, on random vectors, in one run.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import apart, in_turns, machine, median_ratio, options, say, timed, write
from torch import Tensor

from lit_dpret.costs.measure import peak, reset_peak, resident
from lit_dpret.retrieval.backends import make_search
from lit_dpret.retrieval.rows import FileRows, TensorRows
from lit_dpret.retrieval.search import search
from lit_dpret.retrieval.topk import TopK
from lit_dpret.tasks.index_folder import EMBEDDINGS, MANIFEST, IndexFolder, Manifest, write_texts

Found = Callable[[], list[list[int]]]


def systems(queries: Tensor, passages: Tensor, k: int) -> dict[str, Found]:
    """Return searches by name, each giving every query's indices, best first; leave out those not installed.

    Each computes on the device of the tensors; BEIR's needs a CPU.
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
            """A model whose texts are indices into a list of vectors."""

            def encode_queries(self, texts: list[str], **_: Any) -> Tensor:
                return queries[[int(text) for text in texts]]

            def encode_corpus(self, corpus: list[dict[str, str]], **_: Any) -> Tensor:
                first, last = int(corpus[0]["text"]), int(corpus[-1]["text"])
                return passages[first : last + 1]

        def beirs() -> list[list[int]]:
            corpus = {
                str(i): {"title": "", "text": f"{i:07d}"} for i in range(len(passages))
            }  # texts of equal length keep their order
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


def grid(passages: list[int], rounds: int) -> dict[str, Any]:
    """Compare our search with sentence-transformers' in many sizes, and time one question to a `task=index` folder."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.empty(max(passages) + 10_000, 384)
    for part in draw.split(50_000):
        part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, generator=generator), dim=1))
    sizes = [
        of_size(draw[-10_000:][:queries], draw[:count], rounds)
        for count in passages
        for queries in (1, 10, 100, 1_000, 10_000)
        if queries * count <= 10**9
    ]
    with tempfile.TemporaryDirectory() as place:
        for count in passages:
            index_of(draw[:count], Path(place) / str(count))
        question = draw[-1:].clone()
        del draw, part  # the folder keeps its own
        return {"sizes": sizes, "index": [of_folder(question, Path(place) / str(count), rounds) for count in passages]}


def of_size(asked: Tensor, corpus: Tensor, rounds: int) -> dict[str, Any]:
    """Time searches of a new tensor (``first``) and of rows that are kept between searches (``later``)."""
    both, rows = systems(asked, corpus, 100), TensorRows(corpus)
    theirs = both["sentence-transformers semantic_search"]
    works = {"first": both["lit-dpret"], "later": partial(found_in, asked, rows), "theirs": theirs}
    facts = {"queries": len(asked), "passages": len(corpus)}
    return facts | in_rounds(works, rounds, len(asked) * len(corpus))


def of_folder(question: Tensor, folder: Path, rounds: int) -> dict[str, Any]:
    """Time the first question to a folder, and one to a folder that keeps its embeddings; theirs searches its file."""
    index = IndexFolder(folder)
    for _ in range(2):
        index.search(question, 100)
    count, dim = index.manifest.count, index.manifest.dim
    corpus = torch.from_file(str(folder / EMBEDDINGS), size=count * dim).view(count, dim)
    works = {
        "first": lambda: IndexFolder(folder).search(question, 100),
        "later": partial(index.search, question, 100),
        "theirs": systems(question, corpus, 100)["sentence-transformers semantic_search"],
    }
    return {"passages": count} | in_rounds(works, rounds, 10 * count)


def found_in(queries: Tensor, rows: TensorRows) -> list[list[int]]:
    found: list[list[int]] = search(queries, rows, 100).indices.tolist()
    return found


def in_rounds(works: dict[str, Callable[[], Any]], rounds: int, pairs: int) -> dict[str, Any]:
    """Return the medians of works that take turns, small ones more often, and their ratios to ``theirs``."""
    for work in works.values():
        work()
    times, facts = in_turns(works, rounds * max(1, min(40, 10**7 // pairs))), dict[str, Any]()
    for name in works:
        for unit in ("seconds", "processor_seconds"):
            facts[f"{name}_{unit}"] = statistics.median(each[name][unit] for each in times)
            if name != "theirs":
                facts[f"{name}_{unit}_over_theirs"] = median_ratio(times, name, "theirs", unit)
    say(f"{pairs:12d} pairs, {len(times)} rounds: " + " ".join(f"{name} {value:.3g}" for name, value in facts.items()))
    return facts | {"rounds": len(times), "load": os.getloadavg()[0]}


def index_of(embeddings: Tensor, folder: Path) -> None:
    """Write the folder that `task=encode` would write, from vectors that no encoder computed."""
    folder.mkdir()
    embeddings.numpy().tofile(folder / EMBEDDINGS)
    write_texts(folder, {str(place): f"passage {place}" for place in range(len(embeddings))})
    manifest = Manifest(
        side="passage", count=len(embeddings), dim=embeddings.shape[1], storage="float32", encoder={}, private=False
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def climb(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search a file of ``count`` vectors in a separate process; return how far its memory rose above the start."""
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
    parser.add_argument("--memory", type=int, nargs="*", help="corpus sizes; default 50000 200000 800000")
    parser.add_argument("--grid", type=int, nargs="*", help="corpus sizes; default 10000 100000 1000000")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child is not None:
        child(arguments.child, arguments)
        return
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    facts = {key: getattr(arguments, key) for key in ("queries", "passages", "dim", "k", "threads")}
    facts |= machine("torch", "numpy", "sentence-transformers", "beir", "faiss-cpu")
    if arguments.grid is not None:
        del facts["queries"], facts["passages"]
        sizes = arguments.grid or [10_000, 100_000, 1_000_000]
        report["grid"] = facts | {"dim": 384, "k": 100} | grid(sizes, arguments.rounds)
    elif arguments.memory is None:
        report["speed"] = facts | {"device": arguments.device} | compare(arguments)
    else:
        sizes = arguments.memory or [50_000, 200_000, 800_000]
        del facts["passages"]
        report["memory"] = facts | {"sizes": [climb(size, arguments) for size in sizes]}
    write(report, arguments.out)


if __name__ == "__main__":
    main()
