"""A searchable folder: embeddings, ids, texts, and a manifest that describes them.

``index.json`` records the SHA-256 of every file, the fingerprints of the encoder's two towers, and whether private data
went in. It is written last, so a folder without it is unfinished. The fingerprint is compared before a query is
embedded: another model would return meaningless results without any sign of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_dpret.cards.card import CARD_NAME, CardFacts, card_sha256, inherit_card, subject_of, write_card
from lit_dpret.cards.file import card_names, check_artefact, check_dataset_card, names_behind, read_card
from lit_dpret.cards.provenance import environment_facts
from lit_dpret.cards.tuning import TuningData
from lit_dpret.encoders import Progress, Side, TextEncoder, cut, load_towers
from lit_dpret.encoders.backbones import resolve_folder
from lit_dpret.encoders.bulk import OneSide, in_order
from lit_dpret.encoders.embedding_cache import Rows, content_hash, encode_to_file
from lit_dpret.encoders.remote import embedding_workers
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError, ResumeError, StorageError
from lit_dpret.files import file_sha256, meant, read_json, settle_modes, write_whole
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.retrieval.backends import Faiss, search_with
from lit_dpret.retrieval.rows import STORAGES, FileRows, Storage, TensorRows
from lit_dpret.retrieval.search import lexicographic_rank, search
from lit_dpret.retrieval.topk import TopK
from lit_dpret.settings import Count, Natural, settle
from lit_dpret.synthesis.filters.released import ReleasedQueries, require_covered, shown

SCHEMA = "lit-dpret/index/1"
MANIFEST = "index.json"
EMBEDDINGS = "embeddings.bin"
TEXTS = "texts.jsonl"
OFFSETS = "texts.offsets"
RANK = "texts.rank"  # of every id in the order that breaks ties
FAISS = "index.faiss"
_FILES = (EMBEDDINGS, TEXTS, OFFSETS, RANK)
_SMALL = 256 * 2**20  # bytes of embeddings that are read into memory by the first search
_GOES_ON = "Finished work is kept: fix this and run the same command again."

Kind = Literal["exact", "faiss"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a folder of embeddings."""

    side: Side  # whether its texts are passages or queries
    count: int  # number of texts
    dim: int  # the width of an embedding
    storage: Storage  # number format of the stored embeddings
    # ``folder`` (a hub name, or its path relative to this folder), ``dtype``, the ``fingerprints`` of both towers and
    # the ``contract`` of the one that computed the embeddings.
    encoder: Mapping[str, Any]
    private: bool  # whether the texts, and so everything here, are private
    card: str | None = None  # SHA-256 of the privacy card next to the manifest; None where the encoder had none
    kind: Kind = "exact"  # ``exact``, or ``faiss`` with a structure in ``index.faiss``
    factory: str | None = None  # the string that faiss built it from
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by name
    # The data set of the texts, as every result states it (`data_facts`).
    about: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"


def told_from(folder: str | Path, encoder: str | Path) -> str:
    """Return the name of an encoder for a manifest in ``folder``, without revealing paths of this machine.

    A folder is named relative to ``folder``; where the two share only the root, by its last part alone.
    """
    given = Path(encoder).expanduser()
    if not given.is_dir():
        return str(encoder)
    path, here = given.resolve(), Path(folder).resolve()
    if os.path.commonpath([path, here]) == path.anchor:
        return path.name
    return Path(os.path.relpath(path, here)).as_posix()


class IndexFolder:
    """A folder from `encode_folder` or `index_folder`.

    Guarantees:
        - Queries are embedded by the encoder that built the folder, or not at all.
        - Ids and texts are read from the file as needed. So are embeddings of more than 256 MiB in the first search;
          the second keeps them in memory, as the first does with fewer, unless they take more than ``keep`` bytes.

    ``verify`` compares every file with its SHA-256 first, which reads all of it. By default ``keep`` is half of the
    memory that is free at the second search.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False, keep: int | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        if verify:
            for name, digest in self.manifest.files.items():
                if file_sha256(self.folder / name) != digest:
                    raise DataError(f"{self.folder / name} is not the file that {MANIFEST} describes: SHA-256 differ.")
        self._indexes: dict[str, Faiss] = {}
        self._keep, self._asked = keep, False
        self._kept: TensorRows | None = None
        self.rows = FileRows(self.folder / EMBEDDINGS, dim=self.manifest.dim, storage=self.manifest.storage)
        if len(self.rows) != self.manifest.count:
            raise DataError(
                f"{self.folder} holds {len(self.rows)} embeddings, not the {self.manifest.count} it claims."
            )

    @property
    def promise(self) -> str:
        """The privacy claim of the folder, in one sentence."""
        if self.manifest.private:
            return (
                "PRIVATE: these are embeddings of private queries, and their texts can be guessed from them. No "
                "guarantee covers them; do not publish the folder."
            )
        if self.manifest.card:
            whose = "the encoder's" if self.manifest.side == "passage" else "that of the encoder or of the queries"
            return f"privacy card: {self.folder / CARD_NAME} (embedding is post-processing: the claim is {whose})"
        return (
            "The encoder has no privacy card: nothing is claimed. If it saw no private data, neither did these "
            "embeddings."
        )

    @cached_property
    def tie_rank(self) -> Tensor:
        """Return the order that breaks ties."""
        return torch.from_numpy(np.fromfile(self.folder / RANK, dtype="<i8"))

    def record(self, place: int) -> dict[str, Any]:
        """Read ``_id`` and ``text`` of the text at an index from the file."""
        return next(self.records(place, place + 1))

    @property
    def encoder_folder(self) -> str:
        """The folder of the encoder, if it is still at its path; otherwise its name."""
        name = str(self.manifest.encoder["folder"])
        beside = (self.folder / name).resolve()
        return str(beside) if beside.is_dir() else name

    def query_encoder(self, encoder: str | Path | None = None) -> TextEncoder:
        """Return the query encoder for these passages; ``encoder`` is its current path, if it has moved."""
        if self.manifest.side != "passage":
            raise ConfigurationError(f"{self.folder} holds queries; only passages can be searched.")
        known = self.manifest.encoder
        found = load_towers(encoder or self.encoder_folder, dtype=known["dtype"])
        if found.query_encoder.fingerprint() != known["fingerprints"]["query"]:
            raise ConfigurationError(
                f"encoder={encoder or self.encoder_folder} is not the encoder that built {self.folder} (its "
                "fingerprint differs): its queries would give meaningless results. Set task.encoder to the folder of "
                "that encoder, or encode the passages again."
            )
        return found.query_encoder

    def search(self, query_embeddings: Tensor, k: int, *, device: str | None = None) -> TopK:
        """Return the ``k`` best passages of query embeddings of shape ``(queries, dim)``."""
        if self.manifest.kind == "exact":
            return search(query_embeddings, self._searched(), k, tie_rank=self.tie_rank, device=device)
        where = "cpu" if device is None else torch.device(device).type
        if where not in self._indexes:
            self._indexes[where] = Faiss.read(self.folder / FAISS, device=where)
        return search_with(self._indexes[where], query_embeddings, self.rows, k, tie_rank=self.tie_rank)

    def _searched(self) -> FileRows | TensorRows:
        """Return the embeddings, in memory if they are small or asked again, and fit."""
        if self._kept is not None:
            return self._kept
        size = self.rows.path.stat().st_size
        if self._asked or size <= _SMALL:
            limit = self._keep if self._keep is not None else max(_SMALL, _free_memory() // 2)
            if size <= limit:
                self._kept = TensorRows(self.rows.chunk(0, len(self.rows)))
        self._asked = True
        return self._kept or self.rows

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield ``_id`` and ``text`` of the texts from ``start`` to ``stop``, in order, without holding them."""
        (offset,) = np.fromfile(self.folder / OFFSETS, dtype="<i8", count=1, offset=8 * start).tolist()
        with (self.folder / TEXTS).open("rb") as file:
            file.seek(offset)
            for line in islice(file, None if stop is None else stop - start):
                yield json.loads(line)


def _free_memory() -> int:
    """Return the bytes that the system and the container of this process have left; 0 if they do not say."""
    found = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=0)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder} has no {MANIFEST}: it is not a folder of task=encode or task=index, or an unfinished one."
            f"{meant(folder, MANIFEST)}"
        )
    content = read_json(path, SCHEMA)
    del content["schema"]
    try:
        return Manifest(**content)
    except TypeError as error:
        raise DataError(f"{path} is malformed: {error}.") from error


Declared = Literal["public", "private"]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Settings for embedding texts, and the kind of the texts."""

    side: Side = "passage"  # ``passage``, which is public, or ``query``
    # For queries, whether they are ``public`` (published, or synthetic, whose claim the embeddings then inherit) or
    # ``private``; required for queries.
    queries: Declared | None = None
    # The encoder's computing precision: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
    dtype: str = "float32"
    # ``float32``, or ``bfloat16`` for half the disk; scores are compared in float32 either way.
    storage: Storage = "float32"
    batch_size: Count = 64  # texts per forward pass
    max_length: int | None = None  # maximum tokens read of a text; null for the value in the encoder's folder
    device: str | None = None  # ``cpu``, ``cuda`` and so on
    # Processes of a Ray cluster that embed, each with the encoder and as many threads as this process; 0 embeds in this
    # process. The bytes are the same.
    workers: Natural = 0
    tuning_data: TuningData = "unknown"  # data on which the settings above, and the encoder, were chosen, for the card

    def __post_init__(self) -> None:
        settle(self)
        if self.side == "passage" and self.queries is not None:
            raise ConfigurationError(
                f"task.queries={self.queries} is for task.side=query, but task.side=passage. Leave task.queries null."
            )
        if self.side == "query" and self.queries not in ("public", "private"):
            raise ConfigurationError(
                f"task.side=query with task.queries={self.queries or 'null'}: embeddings of private queries are "
                "private, since texts can be guessed from them. Set task.queries=private, which restricts the files to "
                "their owner and gives them no card, or task.queries=public for queries that are published or covered "
                "by a claim."
            )
        if self.workers and self.is_private:
            raise ConfigurationError(
                f"task.workers={self.workers} with task.queries=private: Ray would copy private queries to other "
                "processes and to its files. Set task.workers=0."
            )

    @property
    def is_private(self) -> bool:
        """Whether the texts, and so everything computed from them, are private."""
        return self.queries == "private"


def encode_folder(
    encoder: str | Path, texts: Mapping[str, str], out: str | Path, how: Encoding | None = None, *,
    progress: Progress | None = None, claim: Path | None = None,
    about: Mapping[str, str] | None = None,
) -> IndexFolder:  # fmt: skip
    """Embed texts, by id, into a searchable folder; resume an interrupted call.

    Guarantees:
        - Run again after any interruption, it resumes, and its files have the bytes of an uninterrupted call (same
          machine and library versions), with any number of workers.
        - An encoder with a privacy card gives the folder a card that carries its claim, never a better one; so do
          queries with a card (``claim``). Where both have a card, one claim has to cover both.
        - For private queries, only their owner can read the files, and there is no card.
    """
    how = how or Encoding()
    folder, side, private = Path(out), how.side, how.is_private
    if not texts:
        raise DataError(f"There are no {'passages' if side == 'passage' else 'queries'} to encode.")
    place = resolve_folder(encoder)
    parent, trusts = (place / CARD_NAME if (place / CARD_NAME).is_file() else None), list[Assumption]()
    if parent is not None:
        check_artefact(place, read_card(place))
    if claim is not None and side == "query" and not private:
        parent, trusts = _claim_of_both(encoder, parent, claim)
    elif side == "query" and not private:
        trusts.append(Assumption("The embedded queries are public, as declared (task.queries=public).", "unverified"))
    towers = load_towers(encoder, dtype=how.dtype)
    asked_by = towers.query_encoder.fingerprint()
    towers = cut(towers, **{f"{side}_max_length": how.max_length})
    tower = towers.query_encoder if side == "query" else towers.passage_encoder
    made_by = {
        "folder": told_from(folder, encoder),
        "dtype": how.dtype,
        "fingerprints": {"query": asked_by} | ({"passage": tower.fingerprint()} if side == "passage" else {}),
        "contract": asdict(tower.contract),
    }
    manifest = Manifest(
        side=side, count=len(texts), dim=tower.dim, storage=how.storage, encoder=made_by, private=private,
        about=about or {},
    )  # fmt: skip
    key = content_hash(["texts", how.storage], {}, (part for pair in texts.items() for part in pair))
    claimed = parent is not None and not private
    begun = {"encoder": tower.fingerprint(), "side": side, "texts": key, "private": private, "claimed": claimed}
    declared = {"tuning_data": how.tuning_data}  # only the card depends on it
    where = how.device

    def prepare() -> bool:
        """Prepare the folder; return whether there is anything to compute."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private:
            folder.chmod(0o700)
        return not _is_finished(folder, begun | declared)

    def seal() -> None:
        write_texts(folder, texts)
        settle_modes(*(folder / name for name in _FILES), owner_only=private)
        what = "embedding public passages with it" if side == "passage" else "embedding public queries with it"
        if parent is not None and parent == claim:
            what = f"embedding these queries with {shown(encoder)}"
        made_on = environment_facts(device=where or next(tower.parameters()).device, precision=how.dtype)
        facts = CardFacts(environment=made_on, assumptions=trusts, tuning={"data": how.tuning_data})
        _seal(folder, manifest, _FILES, None if private else parent, what, begun | declared, facts)

    with _storing(folder):
        if prepare():
            rows = Rows(dtype=STORAGES[how.storage], batch_size=how.batch_size)
            with embedding_workers(
                encoder, tower, side, how.workers, device=where, stored=rows.dtype, dtype=how.dtype,
                max_length=how.max_length,
            ) as over:  # fmt: skip
                encode_to_file(
                    OneSide(tower, side, None if how.workers else where), in_order(texts), folder / EMBEDDINGS, rows,
                    facts=begun, progress=progress, over=over,
                )  # fmt: skip
        seal()
    return IndexFolder(folder)


def index_folder(
    source: str | Path, out: str | Path, *, search: str = "exact", private: bool = False, device: str = "cpu",
    seed: int = 0, tuning_data: str = "unknown",
) -> IndexFolder:  # fmt: skip
    """Build a search index over embeddings of `encode_folder` in a new folder, hard-linking files where possible.

    ``search`` is ``exact`` or ``faiss:FACTORY``. An index of private queries is refused without ``private``.
    """
    kind, _, factory = search.partition(":")
    if search != "exact" and (kind != "faiss" or not factory):
        raise ConfigurationError(
            f"task.search={search!r} cannot be stored as an index: choose exact, or faiss:FACTORY (faiss:Flat, "
            "faiss:IVF4096,Flat, faiss:HNSW32)."
        )
    given, folder = IndexFolder(source, verify=True), Path(out)
    if given.manifest.private and not private:
        raise ConfigurationError(
            f"{source} holds embeddings of private queries: an index of them reveals what people asked. Set "
            "task.private=true to build one that stays where the queries are."
        )
    there = _read_manifest(folder) if (folder / MANIFEST).is_file() else given.manifest
    if (there.private, there.card is None) != (given.manifest.private, given.manifest.card is None):
        raise ResumeError(
            f"{folder} holds an index of other embeddings, which differ from these in being private or in having a "
            "card: the old description would remain. Choose another folder, or delete it."
        )
    if folder.resolve() == given.folder.resolve():
        raise ConfigurationError(f"The index would overwrite its own source {source}. Choose another folder.")
    names = list(_FILES)
    with _storing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if given.manifest.private else 0o777)
        if given.manifest.private:
            folder.chmod(0o700)
        draft = folder / f".{FAISS}.tmp"
        if search != "exact":  # may be refused, or killed after hours: an existing index stays whole until then
            Faiss.build(given.rows, factory, device=device, seed=seed).write(draft)
            settle_modes(draft, owner_only=given.manifest.private)
        (folder / MANIFEST).unlink(missing_ok=True)  # from here on the folder is unfinished
        (folder / FAISS).unlink(missing_ok=True)
        for name in names:
            (folder / name).unlink(missing_ok=True)
            try:
                os.link(given.folder / name, folder / name)
            except OSError:  # another file system
                shutil.copy2(given.folder / name, folder / name)
        if search != "exact":
            os.replace(draft, folder / FAISS)
            names.append(FAISS)
    encoder = {**given.manifest.encoder, "folder": told_from(folder, given.encoder_folder)}
    structure: Kind = "exact" if search == "exact" else "faiss"
    manifest = replace(given.manifest, kind=structure, factory=factory or None, encoder=encoder)
    parent = given.folder / CARD_NAME if given.manifest.card else None
    what = f"building a search structure ({search}) over it"
    made_on = environment_facts(device=device, precision="float32")
    facts = CardFacts(environment=made_on, tuning={"data": tuning_data})
    return _seal(folder, manifest, names, parent, what, {}, facts)


def _claim_of_both(encoder: str | Path, own: Path | None, claim: Path) -> tuple[Path, list[Assumption]]:
    """Return the card that covers both encoder and queries, and the assumptions it needs; refuse separate claims."""
    check_dataset_card(claim)
    card = read_card(claim)
    names = card_names(claim, card)
    ancestors = names_behind(claim, card)
    released = ReleasedQueries(queries=(), passages={}, provenance="card", ancestors=frozenset(ancestors),
                               claim=claim.parent)  # fmt: skip
    try:
        place = encoder if str(encoder) == "minilm" else resolve_folder(encoder)
        trusts = require_covered(place, released, declared_public=True, knob="task.encoder")
    except PrivateDataError as error:
        if own is None:  # the encoder lost its card, which is a separate reason
            raise
        raise ConfigurationError(
            f"task.encoder={encoder} cannot embed these queries: they have their own privacy card ({claim}), whose "
            "claim does not cover the encoder: the embeddings would spend both, and their card would state only one. "
            "Encode passages (task.side=passage), or use an encoder that was trained on these queries, or a public "
            "one."
        ) from error
    derived = own is not None and any(str(parent["sha256"]) in names for parent in read_card(own)["parents"])
    return (own if own is not None and derived else claim), trusts


def _is_finished(folder: Path, begun: Mapping[str, Any]) -> bool:
    """Return whether exactly these embeddings are present and whole; refuse to overwrite different ones."""
    if not (folder / MANIFEST).is_file():
        return False
    manifest = _read_manifest(folder)
    known = manifest.encoder.get("begun", {})
    if changed := sorted(name for name in begun if known.get(name) != begun[name]):
        raise ResumeError(
            f"{folder} holds embeddings computed with another {', '.join(changed)}. Choose another folder, or delete "
            "it."
        )
    with suppress(DataError, KeyError):
        if file_sha256(folder / EMBEDDINGS) == manifest.files[EMBEDDINGS]:
            return True
    (folder / MANIFEST).unlink()  # the embeddings are damaged and will be recomputed
    return False


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write texts, by id, where each begins, and the order that breaks ties between their ids."""
    offsets = np.zeros(len(texts) + 1, dtype="<i8")

    def lines() -> Iterator[bytes]:
        for place, (name, text) in enumerate(texts.items()):
            line = json.dumps({"_id": name, "text": text}, ensure_ascii=False) + "\n"
            yield (encoded := line.encode("utf-8", "surrogatepass"))
            offsets[place + 1] = offsets[place] + len(encoded)

    write_whole(folder / TEXTS, lines())
    write_whole(folder / OFFSETS, offsets.tobytes())
    write_whole(folder / RANK, lexicographic_rank(list(texts)).numpy().astype("<i8").tobytes())


def _seal(
    folder: Path, manifest: Manifest, names: Sequence[str], parent: Path | None, description: str,
    begun: Mapping[str, Any], facts: CardFacts,
) -> IndexFolder:  # fmt: skip
    files, card = [folder / name for name in names], None
    if parent is not None:
        subject = subject_of("index", folder.resolve().name, files, root=folder)
        write_card(inherit_card(parent, subject, facts, description=description), folder)
        card = card_sha256(folder)
    encoder = {**manifest.encoder, **({"begun": dict(begun)} if begun else {})}
    whole = replace(manifest, files={file.name: file_sha256(file) for file in files}, card=card, encoder=encoder)
    write_whole(folder / MANIFEST, whole.to_json(), owner_only=manifest.private, advice=_GOES_ON)
    return IndexFolder(folder)


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder} could not be written: {error.strerror or error}. {_GOES_ON}") from error
