"""Searches of other libraries as ``search``: faiss and ScaNN propose passages, and we score them.

Scores and order of the proposals are computed as in the exact search. So a flat index of either library gives our own
ranking, unless passages at its end differ by less than float32 resolves. An approximate index gives a part of it, and
proposes four times as many passages as are wanted, since its own order of them is rough.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.lazy import optional
from lit_dpret.retrieval.products import prepared
from lit_dpret.retrieval.rows import Rows, as_rows
from lit_dpret.retrieval.scores import canonical_scores
from lit_dpret.retrieval.search import Similarity, require_positive, search
from lit_dpret.retrieval.topk import MISSING, TopK, best_of

FAISS_GPU_LIMIT = 2048
"""The deepest search of faiss on a GPU."""

_READ = 65_536
_TRAINED_ON = 2**20
_QUERIES = 1024


class Faiss:
    """An inner-product index made by faiss's ``index_factory``; `propose` pads with -1."""

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def build(cls, passages: Rows, factory: str, *, cosine: bool = False, device: str = "cpu", seed: int = 0) -> Faiss:
        """Train and fill an index over passages, which ``cosine`` normalises.

        ``factory`` is ``Flat``, ``IVF4096,Flat``, ``HNSW32``, ``OPQ64,IVF4096,PQ64`` and so on. After a semicolon it
        sets parameters of the search, which `write` keeps: ``IVF4096,Flat;nprobe=32``, ``HNSW32;efSearch=128``.
        ``device`` is ``cpu`` or ``cuda`` (all GPUs); ``seed`` draws the sample that an index is trained on.
        """
        faiss = load_faiss()
        if not len(passages):
            raise DataError("There are no passages to index.")
        structure, _, parameters = factory.partition(";")
        try:
            index = faiss.index_factory(passages.dim, structure, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigurationError(f"search=faiss:{factory} is not an index that faiss can build.") from error
        try:
            faiss.ParameterSpace().set_index_parameters(index, parameters)
        except RuntimeError as error:
            raise ConfigurationError(
                f"search=faiss:{factory}: faiss cannot set {parameters} on {structure}. IVF has nprobe, HNSW efSearch."
            ) from error
        if device != "cpu":
            index = _on_gpus(faiss, index)
        try:
            if not index.is_trained:
                chosen = np.sort(np.random.default_rng(seed).permutation(len(passages))[:_TRAINED_ON])
                index.train(_float32(passages.take(torch.from_numpy(chosen)), cosine))
            for start in range(0, len(passages), _READ):
                index.add(_float32(passages.chunk(start, min(start + _READ, len(passages))), cosine))
        except RuntimeError as error:
            reason = str(error).split(": ")[-1].strip()
            raise DataError(f"faiss cannot build {factory!r} of {len(passages)} passages: {reason}") from error
        return cls(index)

    @classmethod
    def read(cls, path: str | Path, *, device: str = "cpu") -> Faiss:
        """Read an index that `write` wrote."""
        faiss = load_faiss()
        try:
            # Mapped, so that an index takes the memory of what searches touch, and opens at once.
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if device == "cpu" else 0)
        except RuntimeError as error:
            raise DataError(f"{path} is not an index that faiss can read.") from error
        return cls(index if device == "cpu" else _on_gpus(faiss, index))

    def write(self, path: str | Path) -> None:
        """Write the index; a GPU index as a CPU index."""
        faiss = load_faiss()
        on_gpu = hasattr(faiss, "index_gpu_to_cpu") and "Gpu" in type(self.index).__name__
        faiss.write_index(faiss.index_gpu_to_cpu(self.index) if on_gpu else self.index, str(path))

    def depth(self, k: int) -> int:
        """Return how many proposals to score for the ``k`` best."""
        kind, near = type(self.index).__name__, _near(k)
        if kind.removeprefix("Gpu").startswith("IndexFlat"):
            return near
        return max(near, min(4 * k + 64, FAISS_GPU_LIMIT if "Gpu" in kind else 4 * k + 64))

    def propose(self, queries: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        if "Gpu" in type(self.index).__name__ and count > FAISS_GPU_LIMIT:
            raise ConfigurationError(
                f"On a GPU, faiss finds at most {FAISS_GPU_LIMIT} passages per query, not {count} (task.top_k and a "
                "margin). Lower task.top_k, or set task.device=cpu."
            )
        return np.asarray(self.index.search(queries, count)[1], dtype=np.int64)


class Scann:
    """ScaNN's brute-force search, as in the papers; passages are kept in memory, in float32."""

    def __init__(self, passages: Rows, *, cosine: bool = False) -> None:
        scann = optional("scann", "search=scann", "lit-dpret[scann]")
        if not len(passages):
            raise DataError("There are no passages to index.")
        self._count = len(passages)
        table = _float32(passages.chunk(0, len(passages)), cosine)
        self._searcher = scann.scann_ops_pybind.builder(table, 10, "dot_product").score_brute_force(False).build()

    def depth(self, k: int) -> int:
        return _near(k)

    def propose(self, queries: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        count = min(count, self._count)
        return np.asarray(self._searcher.search_batched(queries, final_num_neighbors=count)[0], dtype=np.int64)


BackEnd: TypeAlias = Faiss | Scann


def search_with(
    back_end: BackEnd,
    query_embeddings: Tensor,
    passage_embeddings: Tensor | Rows,
    k: int,
    *,
    tie_rank: Tensor | None = None,
    similarity: Similarity = "dot",
) -> TopK:
    """Return the ``k`` best of a back end's candidates, scored and ordered like `search`.

    A passage that a flat index omits scores at most a float32 rounding error more than its proposals. ``back_end``
    must be built over these passages, with that ``similarity``; the rest is as in `search`.
    """
    require_positive(k=k)
    rows, cosine = as_rows(passage_embeddings), similarity == "cosine"
    rank = None if tie_rank is None else tie_rank.cpu()
    queries = prepared(query_embeddings.detach().cpu().double(), cosine)
    count, found = min(len(rows), back_end.depth(k)), []
    for start in range(0, len(queries), _QUERIES):
        part = queries[start : start + _QUERIES]
        proposed = torch.from_numpy(back_end.propose(np.ascontiguousarray(part.float().numpy()), count))
        if proposed.numel() and int(proposed.max()) >= len(rows):
            raise DataError(
                f"The index returned passage {int(proposed.max())}, but there are only {len(rows)} passages: it was "
                "built over another corpus."
            )
        proposed = torch.nn.functional.pad(proposed.clamp(min=MISSING), (0, max(0, k - count)), value=MISSING)
        found.append(best_of(TopK(canonical_scores(part, rows, proposed, cosine=cosine), proposed), k, rank))
    if not found:
        return TopK(torch.empty(0, k), torch.empty(0, k, dtype=torch.long))
    return TopK(torch.cat([top.scores for top in found]), torch.cat([top.indices for top in found]))


def _near(k: int) -> int:
    """Return how many proposals of a flat index hold the ``k`` best, with room for scores that float32 confuses."""
    return k + 64 + k // 64


def make_search(name: str, *, device: str | None = None) -> Callable[..., TopK]:
    """Return the search named ``exact``, ``scann`` or ``faiss:FACTORY``; called like `search`.

    Raises:
        ConfigurationError: It is none of these, or a library that it needs is not installed.
    """
    check_search(name)
    if name == "exact":
        return lambda *arguments, **settings: search(*arguments, device=device, **settings)

    def other(queries: Tensor, passages: Tensor | Rows, k: int, **settings: Any) -> TopK:
        rows, cosine = as_rows(passages), settings.get("similarity") == "cosine"
        back_end: BackEnd
        if name == "scann":
            back_end = Scann(rows, cosine=cosine)
        else:
            where = "cpu" if device is None else torch.device(device).type
            back_end = Faiss.build(rows, name.removeprefix("faiss:"), cosine=cosine, device=where)
        return search_with(back_end, queries, rows, k, **settings)

    return other


def check_search(name: str) -> None:
    """Refuse, before any work, an unknown search or one that is not installed."""
    if name.startswith("faiss:"):
        load_faiss()
    elif name == "scann":
        if importlib.util.find_spec("scann") is None:
            raise ConfigurationError('search=scann needs the [scann] extra: pip install "lit-dpret[scann]".')
    elif name != "exact":
        raise ConfigurationError(
            f"search={name!r} is not one of exact, scann and faiss:FACTORY, where FACTORY is a string for faiss's "
            "index_factory, as in faiss:Flat."
        )


def load_faiss() -> Any:
    """Import faiss; exactly one of its packages must be installed."""
    found = [name for name in ("faiss-cpu", "faiss-gpu") if _installed(name)]
    if len(found) == 2:
        raise ConfigurationError(
            "faiss-cpu and faiss-gpu are both installed and overwrite each other's files. Uninstall both, then "
            "install one."
        )
    return optional("faiss", "search=faiss", "lit-dpret[faiss-cpu]", instead="Or install the extra [faiss-gpu].")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _on_gpus(faiss: Any, index: Any) -> Any:
    if not hasattr(faiss, "index_cpu_to_all_gpus") or not faiss.get_num_gpus():
        raise ConfigurationError(
            "search=faiss on a GPU needs the [faiss-gpu] extra (in place of [faiss-cpu]) and a GPU that it can use."
        )
    return faiss.index_cpu_to_all_gpus(index)


def _float32(embeddings: Tensor, cosine: bool) -> NDArray[np.float32]:
    return np.ascontiguousarray(prepared(embeddings.detach().cpu().float(), cosine).numpy())
