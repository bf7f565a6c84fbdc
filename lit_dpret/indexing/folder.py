"""A searchable folder: embeddings, ids, texts, and a manifest that says what they are.

``index.json`` names every file by SHA-256, the encoder by the fingerprint of its two towers, and
whether anything private went in. It is written last, so a folder without it is unfinished. A query
encoded by another model finds nothing sensible in here, and nothing would show it: the fingerprint is
compared before a query is embedded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_dpret.cards.file import file_sha256
from lit_dpret.encoders import Side, TextEncoder, load_towers
from lit_dpret.errors import ConfigurationError, DataError, schema_problem
from lit_dpret.retrieval.backends import Faiss, search_with
from lit_dpret.retrieval.rows import FileRows, Storage
from lit_dpret.retrieval.search import lexicographic_rank, search
from lit_dpret.retrieval.topk import TopK

SCHEMA = "lit-dpret/index/1"
MANIFEST = "index.json"
EMBEDDINGS = "embeddings.bin"
TEXTS = "texts.jsonl"
OFFSETS = "texts.offsets"
FAISS = "index.faiss"

Kind = Literal["exact", "faiss"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds.

    Args:
        side: Whether its texts are passages or queries.
        count: How many.
        dim: The width of an embedding.
        storage: What a number is stored as.
        encoder: ``folder`` (a hub's name, or where it lies as seen from this folder), ``dtype``, the ``fingerprints``
            of both towers and the ``contract`` of the one that made the embeddings.
        private: Whether the texts are private, and so everything here.
        card: SHA-256 of the privacy card beside the manifest; None where the encoder had none.
        kind: ``exact``, or ``faiss`` with a structure in ``index.faiss``.
        factory: The string that faiss made it from.
        files: SHA-256 by name.
    """

    side: Side
    count: int
    dim: int
    storage: Storage
    encoder: Mapping[str, Any]
    private: bool
    card: str | None = None
    kind: Kind = "exact"
    factory: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"


def told_from(folder: str | Path, encoder: str | Path) -> str:
    """How a manifest in ``folder`` names an encoder, without telling where on a machine both lie.

    A folder is named as seen from there; where both have no more than the root in common, by its last part alone.
    """
    given = Path(encoder).expanduser()
    if not given.is_dir():
        return str(encoder)
    path, here = given.resolve(), Path(folder).resolve()
    if os.path.commonpath([path, here]) == path.anchor:
        return path.name
    return Path(os.path.relpath(path, here)).as_posix()


class IndexFolder:
    """A folder that `encode_folder` or `index_folder` wrote.

    Guarantees:
        - Queries are embedded by the encoder that the folder was made with, or not at all.
        - Embeddings are read from the file as they are needed, never as a whole.

    Args:
        folder: The folder.
        verify: Compare every file with its SHA-256 first; reads all of it.

    Raises:
        DataError: It is unfinished, malformed, newer than this version reads, or not what its manifest says.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        if verify:
            for name, digest in self.manifest.files.items():
                if file_sha256(self.folder / name) != digest:
                    raise DataError(f"{self.folder / name} is not the file that {MANIFEST} describes: SHA-256 differ.")
        self.rows = FileRows(self.folder / EMBEDDINGS, dim=self.manifest.dim, storage=self.manifest.storage)
        if len(self.rows) != self.manifest.count:
            raise DataError(
                f"{self.folder} holds {len(self.rows)} embeddings, not the {self.manifest.count} it claims."
            )

    @cached_property
    def ids(self) -> list[str]:
        """The id of every text, in the order of the embeddings."""
        return [str(record["_id"]) for record in self._records()]

    @cached_property
    def tie_rank(self) -> Tensor:
        """The order that breaks ties."""
        return lexicographic_rank(self.ids)

    def text(self, place: int) -> str:
        """The text at a place, read from the file."""
        start, stop = np.fromfile(self.folder / OFFSETS, dtype="<i8", count=2, offset=8 * place).tolist()
        with (self.folder / TEXTS).open("rb") as file:
            file.seek(start)
            return str(json.loads(file.read(stop - start))["text"])

    @property
    def encoder_folder(self) -> str:
        """The encoder that the folder was made with, where it was left; else its name."""
        name = str(self.manifest.encoder["folder"])
        beside = (self.folder / name).resolve()
        return str(beside) if beside.is_dir() else name

    def query_encoder(self, encoder: str | Path | None = None) -> TextEncoder:
        """The encoder of queries that belongs to these passages.

        Args:
            encoder: Where it lies now, if it has moved.

        Raises:
            ConfigurationError: The encoder found there is another one, or this folder holds queries.
        """
        if self.manifest.side != "passage":
            raise ConfigurationError(f"{self.folder} holds queries; only passages can be searched.")
        known = self.manifest.encoder
        found = load_towers(encoder or self.encoder_folder, dtype=known["dtype"])
        if found.query_encoder.fingerprint() != known["fingerprints"]["query"]:
            raise ConfigurationError(
                f"encoder={encoder or self.encoder_folder} is not the encoder that {self.folder} was made with (its "
                "fingerprint differs): its queries would find nothing sensible. Give task.encoder the folder of that "
                "one, or encode the passages again."
            )
        return found.query_encoder

    def search(self, query_embeddings: Tensor, k: int, *, device: str | None = None) -> TopK:
        """The ``k`` best passages of each query, by the structure that this folder has.

        Args:
            query_embeddings: From `query_encoder`, shape ``(queries, dim)``.
            k: How many.
            device: ``cpu``, ``cuda`` and so on; the CPU by default.
        """
        if self.manifest.kind == "exact":
            return search(query_embeddings, self.rows, k, tie_rank=self.tie_rank, device=device)
        where = "cpu" if device is None else torch.device(device).type
        index = Faiss.read(self.folder / FAISS, device=where)
        return search_with(index, query_embeddings, self.rows, k, tie_rank=self.tie_rank)

    def _records(self) -> Iterable[dict[str, Any]]:
        with (self.folder / TEXTS).open(encoding="utf-8", errors="surrogatepass") as file:
            for line in file:
                yield json.loads(line)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{folder} has no {MANIFEST}: it is no index, or one that is not finished. Run its task=encode again."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is no manifest of an index.")
    if problem := schema_problem(content.pop("schema", None), SCHEMA):
        raise DataError(f"{path} cannot be read: {problem}")
    try:
        return Manifest(**content)
    except TypeError as error:
        raise DataError(f"{path} is malformed: {error}.") from error
