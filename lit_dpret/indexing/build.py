"""Making a searchable folder: embed texts, resumably, and build a structure over them.

Embeddings of public passages are post-processing of the encoder: they carry its claim, by a card that
names the encoder's. Embeddings of private queries are private, whoever trained the encoder: from an
embedding a text can be guessed. They are written only where the caller says which of the two they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lit_dpret.cards.card import CARD_NAME, card_sha256, inherit_card, subject_of, write_card
from lit_dpret.cards.facts import environment_facts
from lit_dpret.cards.file import file_sha256
from lit_dpret.distributed.crew import Crew
from lit_dpret.encoders import Progress, Side, cut, load_towers
from lit_dpret.encoders.backbones import resolve_folder
from lit_dpret.encoders.bulk import in_order
from lit_dpret.encoders.embedding_cache import content_hash, encode_with_crew
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, StorageError
from lit_dpret.indexing.folder import (
    EMBEDDINGS,
    FAISS,
    MANIFEST,
    OFFSETS,
    TEXTS,
    IndexFolder,
    Kind,
    Manifest,
    told_from,
)
from lit_dpret.retrieval.backends import Faiss
from lit_dpret.retrieval.rows import STORAGES, Storage

Declared = Literal["public", "private"]


def encode_folder(
    encoder: str | Path,
    texts: Mapping[str, str],
    out: str | Path,
    *,
    side: Side = "passage",
    queries: Declared | None = None,
    dtype: str = "float32",
    storage: Storage = "float32",
    batch_size: int = 64,
    max_length: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> IndexFolder:
    """Embed texts into a folder that can be searched; go on where an earlier call was stopped.

    Guarantees:
        - Run again after any interruption it goes on, and its files have the bytes of a call that was
          never interrupted (same machine and library versions), by however many ranks.
        - An encoder with a privacy card gives the folder a card that carries its claim, never a better one.
        - Private queries leave files that their owner alone can read, and no card.

    Args:
        encoder: As for `load_towers`.
        texts: Text by id; passages are public.
        out: The folder to write or to go on with.
        side: Whether the texts are passages or queries.
        queries: Where they are queries, whether those are ``public`` (synthetic ones under their claim,
            published ones) or ``private``.
        dtype: In which the encoder computes: ``float32``, ``bfloat16``, ``float64``, or ``float16`` except for T5.
        storage: ``float32``, or ``bfloat16`` for half the disk; scores are compared in float32 either way.
        batch_size: Texts per forward pass.
        max_length: Tokens of a text that are read; None for what the encoder's folder says.
        device: Where to compute.
        progress: Called with (texts done, texts in all).
        crew: The ranks that share the work, each calling this with the same arguments and a folder that all of them
            see; the first one writes the folder, and the others wait for it.

    Raises:
        ConfigurationError: A setting is impossible, or queries are neither declared public nor private.
        DataError: There are no texts, an embedding is not finite, or the encoder's card is not about these weights.
        ResumeError: ``out`` was begun with another encoder, texts or settings.
        StorageError: ``out`` cannot be written.
        WorkerError: Another rank died.
    """
    crew = crew or Crew()
    folder, private = Path(out), _is_private(side, queries)
    if storage not in STORAGES:
        raise ConfigurationError(f"storage={storage!r} is not one of {', '.join(STORAGES)}.")
    if not texts:
        raise DataError(f"There are no {'passages' if side == 'passage' else 'queries'} to encode.")
    parent = _card_of(encoder)
    towers = load_towers(encoder, dtype=dtype)
    asked_by = towers.query_encoder.fingerprint()
    towers = cut(towers, **{f"{side}_max_length": max_length})
    tower = towers.query_encoder if side == "query" else towers.passage_encoder
    manifest = Manifest(
        side=side,
        count=len(texts),
        dim=tower.dim,
        storage=storage,
        encoder={
            "folder": told_from(folder, encoder),
            "dtype": dtype,
            "fingerprints": {"query": asked_by} | ({"passage": tower.fingerprint()} if side == "passage" else {}),
            "contract": asdict(tower.contract),
        },
        private=private,
    )
    key = content_hash(["texts", storage], {}, (part for pair in texts.items() for part in pair))
    begun = {"encoder": tower.fingerprint(), "side": side, "texts": key}
    where = None if device is None else str(crew.place(torch.device(device)))

    def prepare() -> bool:
        """Whether there is anything to compute."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private:
            folder.chmod(0o700)
        if finished := _is_finished(folder, begun):
            return not finished
        _refuse_another(folder, begun)
        return True

    def seal() -> None:
        _write_texts(folder, texts)
        for name in (EMBEDDINGS, TEXTS, OFFSETS):
            (folder / name).chmod(0o600 if private else 0o644)
        what = "embedding public passages with it" if side == "passage" else "embedding public queries with it"
        made_on = environment_facts(device=where or next(tower.parameters()).device, precision=dtype)
        names = (EMBEDDINGS, TEXTS, OFFSETS)
        _seal(folder, manifest, names, None if private else parent, what, begun, environment=made_on)

    try:
        if crew.share(prepare):
            encode_with_crew(
                crew,
                tower.one_side(side, where),
                in_order(texts),
                folder / EMBEDDINGS,
                dtype=STORAGES[storage],
                facts=begun,
                batch_size=batch_size,
                progress=progress,
            )
        crew.share(seal)
    except OSError as error:
        raise _storage(folder, error) from error
    return IndexFolder(folder)


def index_folder(
    source: str | Path,
    out: str | Path,
    *,
    search: str = "exact",
    private: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> IndexFolder:
    """Build a search structure over the embeddings of a folder, in a folder of its own.

    The embeddings are linked, not copied, where the file system allows it.

    Args:
        source: What `encode_folder` wrote.
        out: The folder to write.
        search: ``exact``, or ``faiss:FACTORY``.
        private: Whether an index of private queries is wanted; without it one is refused.
        device: ``cpu``, or ``cuda`` to build faiss's structure on GPUs.
        seed: Of the sample that faiss trains on.

    Raises:
        ConfigurationError: The search is unknown or not installed, or the texts are private and that was not said.
        DataError: ``source`` is not what its manifest says, or too small for the structure.
        StorageError: ``out`` cannot be written.
    """
    kind, _, factory = search.partition(":")
    if search != "exact" and (kind != "faiss" or not factory):
        raise ConfigurationError(
            f"task.search={search!r} cannot be kept as an index: choose exact, or faiss:FACTORY (faiss:Flat, "
            "faiss:IVF4096,Flat, faiss:HNSW32)."
        )
    given, folder = IndexFolder(source, verify=True), Path(out)
    if given.manifest.private and not private:
        raise ConfigurationError(
            f"{source} holds embeddings of private queries: whoever has an index of them can ask it what people asked. "
            "Set task.private=true to build one that stays where the queries are."
        )
    if folder.resolve() == given.folder.resolve():
        raise ConfigurationError(f"The index would be written over its own source {source}. Give another folder.")
    names = [EMBEDDINGS, TEXTS, OFFSETS]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if given.manifest.private else 0o777)
        for name in names:
            _link(given.folder / name, folder / name)
        if search != "exact":
            draft = folder / f".{FAISS}.tmp"
            Faiss.build(given.rows, factory, device=device, seed=seed).write(draft)
            draft.chmod(0o600 if given.manifest.private else 0o644)
            os.replace(draft, folder / FAISS)
            names.append(FAISS)
    except OSError as error:
        raise _storage(folder, error) from error
    encoder = {**given.manifest.encoder, "folder": told_from(folder, given.encoder_folder)}
    structure: Kind = "exact" if search == "exact" else "faiss"
    manifest = replace(given.manifest, kind=structure, factory=factory or None, encoder=encoder)
    parent = given.folder / CARD_NAME if given.manifest.card else None
    what = f"building a search structure ({search}) over it"
    made_on = environment_facts(device=device, precision="float32")
    return _seal(folder, manifest, names, parent, what, {}, environment=made_on)


def _is_private(side: Side, queries: Declared | None) -> bool:
    if side == "passage":
        if queries is not None:
            raise ConfigurationError(f"task.queries={queries} says something about queries, but task.side=passage.")
        return False
    if queries not in ("public", "private"):
        raise ConfigurationError(
            f"task.side=query with task.queries={queries or 'null'}: embeddings of private queries are private, since "
            "texts can be guessed from them. Say task.queries=private, which keeps the files to their owner and gives "
            "them no card, or task.queries=public for queries that are published or covered by a claim."
        )
    return queries == "private"


def _card_of(encoder: str | Path) -> Path | None:
    folder = resolve_folder(encoder)
    return folder / CARD_NAME if (folder / CARD_NAME).is_file() else None


def _is_finished(folder: Path, begun: Mapping[str, Any]) -> bool:
    """Whether these very embeddings are there already."""
    try:
        known = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(
            known["encoder"]["begun"] == begun and file_sha256(folder / EMBEDDINGS) == known["files"][EMBEDDINGS]
        )
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return False


def _refuse_another(folder: Path, begun: Mapping[str, Any]) -> None:
    """Refuse to write over a finished folder of something else."""
    if not (folder / MANIFEST).is_file():
        return
    known = IndexFolder(folder).manifest.encoder.get("begun", {})
    if changed := sorted(name for name in begun if known.get(name) != begun[name]):
        raise ResumeError(
            f"{folder} holds embeddings made with another {', '.join(changed)}. Give another folder, or delete it."
        )
    (folder / MANIFEST).unlink()  # its embeddings are damaged, and made anew


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    offsets = np.zeros(len(texts) + 1, dtype="<i8")
    draft, end = folder / f".{TEXTS}.tmp", 0
    with draft.open("wb") as file:
        for place, (name, text) in enumerate(texts.items(), start=1):
            line = json.dumps({"_id": name, "text": text}, ensure_ascii=False) + "\n"
            end += file.write(line.encode("utf-8", "surrogatepass"))
            offsets[place] = end
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / TEXTS)
    draft = folder / f".{OFFSETS}.tmp"
    offsets.tofile(draft)
    os.replace(draft, folder / OFFSETS)


def _seal(
    folder: Path,
    manifest: Manifest,
    names: tuple[str, ...] | list[str],
    parent: Path | None,
    description: str,
    begun: Mapping[str, Any],
    *,
    environment: Mapping[str, Any],
) -> IndexFolder:
    """Write the card, and then the manifest that makes the folder whole."""
    files = [folder / name for name in names]
    card = None
    if parent is not None:
        subject = subject_of("index", folder.resolve().name, files, root=folder)
        write_card(inherit_card(parent, subject, description=description, environment=environment), folder)
        card = card_sha256(folder)
    digests = {file.name: file_sha256(file) for file in files}
    encoder = {**manifest.encoder, **({"begun": dict(begun)} if begun else {})}
    whole = replace(manifest, files=digests, card=card, encoder=encoder)
    draft = folder / f".{MANIFEST}.tmp"
    try:
        draft.write_text(whole.to_json(), encoding="utf-8")
        draft.chmod(0o600 if manifest.private else 0o644)
        os.replace(draft, folder / MANIFEST)
    except OSError as error:
        raise _storage(folder, error) from error
    return IndexFolder(folder)


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _storage(folder: Path, error: OSError) -> OSError:
    if isinstance(error, StorageError):
        return error
    return StorageError(
        f"{folder} could not be written: {error.strerror or error}. What is finished is kept: mend this and run the "
        "same command again."
    )
