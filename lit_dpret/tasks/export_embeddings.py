"""`task=export_embeddings`: write embeddings of `task=encode` as parquet shards, for other engines.

The shards lie in ``OUT/parquet``, apart from the manifest ``OUT/embeddings.json`` and the privacy card: Spark reads
every file of a folder. A shard appears only whole and states which rows of which embeddings it holds, so the same
command continues after an interruption. The manifest is written last.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any, ClassVar

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import CARD_NAME, CardFacts, card_sha256, inherit_card, write_card
from lit_dpret.cards.file import read_card
from lit_dpret.cards.provenance import environment_facts
from lit_dpret.cards.tuning import TuningData
from lit_dpret.datamodules.shards import is_url
from lit_dpret.errors import ConfigurationError, LitDpretError, ResumeError, StorageError, first_line
from lit_dpret.files import write_whole
from lit_dpret.lazy import optional
from lit_dpret.settings import Count, Settings
from lit_dpret.tasks.index_folder import EMBEDDINGS, TEXTS, IndexFolder, told_from
from lit_dpret.tasks.parts import Parts, check_run_dir, say, say_unaccounted

SCHEMA = "lit-dpret/parquet-embeddings/1"
MANIFEST = "embeddings.json"
SHARDS = "parquet"
_STATED = b"lit_dpret"  # the key of a shard's own description, in the metadata of its schema
_AT_ONCE = 8192  # rows in memory, and in a row group


@dataclass(kw_only=True)
class ExportEmbeddings(Settings):
    """Write the columns ``id``, ``text`` and ``embedding`` (float32 lists of fixed size), in the order of the folder.

    Guarantees:
        - Embeddings are those of the folder, bit for bit (bfloat16 is widened to float32, which is exact).
        - Run again after any interruption, it resumes: finished shards are not written again.
        - An encoder's claim travels as with ``task=index``. Embeddings of private queries are refused without
          ``private``, are then readable by their owner alone, and are never sent to a URL.
    """

    embeddings: Path
    out: str | None = None
    rows_per_shard: Count = 100_000
    private: bool = False
    tuning_data: TuningData = "unknown"
    derives_from: ClassVar[tuple[str, ...]] = ("task.embeddings",)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``out``, or ``run_dir/export``."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        pyarrow = optional("pyarrow", "task=export_embeddings", "lit-dpret[parquet]")
        given = IndexFolder(self.embeddings)
        private, out = given.manifest.private, self.out or str(parts.run_dir / "export")
        out = out if is_url(out) else str(Path(out).expanduser())
        if private and not self.private:
            raise ConfigurationError(
                f"task.embeddings={self.embeddings} holds embeddings of private queries, and their texts: shards of "
                "them reveal what people asked. Set task.private=true to write some that stay where the queries are."
            )
        if private and is_url(out):
            raise ConfigurationError(
                f"task.out={out} is a URL, and task.embeddings={self.embeddings} holds embeddings of private queries. "
                "Who may read a bucket is not decided here, so private texts are not sent there. Name a local folder."
            )
        given = IndexFolder(self.embeddings, verify=True)
        with _storing(out):
            place = _Place(out, parts.run_dir, owner_only=private)
            files = self._write_shards(place, given, pyarrow)
            self._seal(place, given, files)
        say(f"parquet: {out}/{SHARDS} ({len(files)} shards, {given.manifest.count} x {given.manifest.dim})")
        if given.manifest.card:
            say_unaccounted(read_card(place.notes))
        return {"texts": float(given.manifest.count), "shards": float(len(files))}

    def _write_shards(self, place: _Place, given: IndexFolder, pyarrow: Any) -> dict[str, str]:
        """Write the shards that are missing; return the SHA-256 of all by name."""
        parquet = importlib.import_module("pyarrow.parquet")
        manifest, starts = given.manifest, range(0, given.manifest.count, self.rows_per_shard)
        names = {f"part-{i:05d}-of-{len(starts):05d}.parquet": start for i, start in enumerate(starts)}
        if foreign := sorted(place.shards() - set(names)):
            raise ResumeError(
                f"{place.out} holds {foreign[0]}, which is no shard of this export: task.rows_per_shard or "
                "task.embeddings differs. Choose another task.out, or delete it."
            )
        vector = pyarrow.list_(pyarrow.float32(), manifest.dim)
        columns = [("id", pyarrow.string()), ("text", pyarrow.string()), ("embedding", vector)]
        source = {name: manifest.files[name] for name in (EMBEDDINGS, TEXTS)}
        source |= {"card": str(manifest.card), "private": str(manifest.private)}
        found, there = {}, place.shards()
        with ProgressLine(f"exporting {manifest.count} embeddings") as progress:
            for name, start in names.items():
                stop = min(start + self.rows_per_shard, manifest.count)
                stated = json.dumps({"source": source, "rows": [start, stop]}, sort_keys=True).encode()
                if name in there:
                    with place.opened(name) as file:
                        known = (parquet.read_schema(file).metadata or {}).get(_STATED)
                    if known != stated:
                        raise ResumeError(
                            f"{place.out}/{SHARDS}/{name} holds other embeddings. Choose another task.out."
                        )
                    with place.opened(name) as file:
                        found[name] = file_digest(file, "sha256").hexdigest()
                    continue
                schema = pyarrow.schema(columns, metadata={_STATED: stated})
                with (
                    place.draft(name) as draft,
                    parquet.ParquetWriter(draft, schema, use_dictionary=False) as writer,
                ):
                    for low in range(start, stop, _AT_ONCE):
                        high = min(low + _AT_ONCE, stop)
                        records = list(given.records(low, high))
                        flat = pyarrow.array(given.rows.chunk(low, high).float().numpy().reshape(-1))
                        rows = [
                            pyarrow.array([record["_id"] for record in records], pyarrow.string()),
                            pyarrow.array([record["text"] for record in records], pyarrow.string()),
                            pyarrow.FixedSizeListArray.from_arrays(flat, type=vector),
                        ]
                        writer.write_table(pyarrow.Table.from_arrays(rows, schema=schema))
                        progress(high, manifest.count)
                found[name] = place.publish(name)
        return found

    def _seal(self, place: _Place, given: IndexFolder, files: Mapping[str, str]) -> None:
        """Write the card and the manifest."""
        known, digests = given.manifest, {f"{SHARDS}/{name}": digest for name, digest in sorted(files.items())}
        card = None
        if known.card:
            subject = {"artifact_type": "index", "name": place.out.rstrip("/").rpartition("/")[2], "sha256": digests}
            facts = CardFacts(
                environment=environment_facts(device="cpu", precision="float32"), tuning={"data": self.tuning_data}
            )
            write_card(
                inherit_card(given.folder / CARD_NAME, subject, facts, description="writing them as parquet shards"),
                place.notes,
            )
            card = card_sha256(place.notes)
        encoder = {name: fact for name, fact in known.encoder.items() if name != "begun"}
        encoder["folder"] = told_from("/" if is_url(place.out) else place.notes, given.encoder_folder)
        told = asdict(replace(known, storage="float32", card=card, files=digests, encoder=encoder))
        told = {"schema": SCHEMA, **told, "rows_per_shard": self.rows_per_shard}
        told = {name: fact for name, fact in told.items() if name not in ("kind", "factory")}
        write_whole(place.notes / MANIFEST, json.dumps(told, indent=2) + "\n", owner_only=known.private)
        place.send_notes(card is not None)


class _Place:
    """A local folder or a URL that receives whole files."""

    def __init__(self, out: str, run_dir: Path, *, owner_only: bool) -> None:
        self.out, self._owner_only = out, owner_only
        if is_url(out):
            fsspec = importlib.import_module("fsspec")
            self._fs, self._root = fsspec.core.url_to_fs(out)
            self.notes = run_dir / "sent"  # when the shards are there
            self._staging = run_dir
        else:
            self._fs, self._root = importlib.import_module("fsspec").filesystem("file"), str(Path(out).absolute())
            self.notes, self._staging = Path(out), Path(out) / SHARDS
        if self._fs.exists(f"{self._root}/{CARD_NAME}") and not self.shards():
            raise ConfigurationError(f"task.out={out} holds another artefact with a privacy card. Name a new folder.")
        for folder in (self.notes, self._staging):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700 if owner_only else 0o777)
            if owner_only:
                folder.chmod(0o700)
        self._fs.makedirs(f"{self._root}/{SHARDS}", exist_ok=True)

    def shards(self) -> set[str]:
        """Return the names of the shards that are there."""
        self._fs.invalidate_cache()
        return {path.rpartition("/")[2] for path in self._fs.glob(f"{self._root}/{SHARDS}/*.parquet")}

    def opened(self, name: str) -> Any:
        """Open a shard that is there."""
        return self._fs.open(f"{self._root}/{SHARDS}/{name}", "rb")

    @contextmanager
    def draft(self, name: str) -> Iterator[Any]:
        """Open a local draft of a shard."""
        draft = self._staging / f".{name}.tmp"
        draft.unlink(missing_ok=True)  # of a killed run, in any mode
        mode = 0o600 if self._owner_only else 0o666
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self, name: str) -> str:
        """Move a finished draft to its place; return its SHA-256."""
        draft = self._staging / f".{name}.tmp"
        with draft.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        if is_url(self.out):
            self._send(draft, f"{SHARDS}/{name}")
            draft.unlink()
        else:
            os.replace(draft, self._staging / name)
        return digest

    def send_notes(self, card: bool) -> None:
        """Send the manifest, and the card before it, to a URL."""
        if is_url(self.out):
            for file in [*(sorted(self.notes.glob("privacy_card.*")) if card else []), self.notes / MANIFEST]:
                self._send(file, file.name)

    def _send(self, file: Path, name: str) -> None:
        # Many file systems show a file while it is written. Names that begin with a dot are no shards to anyone.
        folder, _, last = f"{self._root}/{name}".rpartition("/")
        self._fs.put_file(str(file), f"{folder}/.{last}.tmp")
        self._fs.mv(f"{folder}/.{last}.tmp", f"{folder}/{last}")


@contextmanager
def _storing(out: str) -> Iterator[None]:
    try:
        yield
    except LitDpretError:
        raise
    except ImportError as error:  # its message names the library
        raise ConfigurationError(
            f"task.out={out} needs a library that is not installed: {first_line(error)}. Install it, or name a local "
            "folder."
        ) from error
    except Exception as error:  # of any kind: a disk, a network, credentials, an unknown protocol
        raise StorageError(
            f"task.out={out} cannot be written: {first_line(error)}. Finished shards are kept: fix this and run the "
            "same command again."
        ) from error
