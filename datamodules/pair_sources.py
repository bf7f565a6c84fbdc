"""Where pairs are said to be: one folder, one file of pairs, or three files; and whether those are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.layouts import folder_parts, qrels_files
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class PairSource:
    """The settings of a `PairsDataModule` that name its files."""

    folder: str | Path | None
    corpus: str | Path | None
    queries: str | Path | None
    qrels: str | Path | Mapping[str, str | Path] | None
    pairs: str | Path | None


def check_one_source(source: PairSource) -> None:
    """Refuse settings that name no source, or two, or half of one; no file is looked at.

    Raises:
        ConfigurationError: They do.
    """
    parts = {"queries": source.queries, "qrels": source.qrels, "corpus": source.corpus}
    given = [name for name in ("folder", "pairs") if getattr(source, name)]
    if source.queries or source.qrels:
        given.append("queries and qrels")
    if len(given) != 1:
        found = " and ".join(f"datamodule.{name}" for name in given) or "none of them"
        raise ConfigurationError(
            "Say where the data is by one of datamodule.folder, datamodule.pairs, or datamodule.queries with "
            f"datamodule.qrels and datamodule.corpus; {found} is set."
        )
    missing = [name for name, value in parts.items() if not value]
    if given == ["queries and qrels"] and missing:
        raise ConfigurationError(f"datamodule.{missing[0]} is not set; queries, qrels and corpus go together.")


def find_sources(source: PairSource) -> dict[str, Any]:
    """The files by the name of the part that each holds; ``qrels`` are by split.

    Raises:
        DataError: One does not exist, or ``qrels`` is no folder of splits.
    """
    if source.pairs:
        found: dict[str, Any] = {"pairs": Path(source.pairs)}
        if source.corpus:
            found["corpus"] = Path(source.corpus)
    elif source.folder:
        found = folder_parts(source.folder, corpus=source.corpus)
    else:
        found = {"corpus": source.corpus, "queries": source.queries, "qrels": _qrels_by_split(source.qrels)}
        found["source"] = str(source.queries)
    parts = {name: path for name, path in found.items() if name not in ("qrels", "source")}
    parts |= {f"qrels.{split}": path for split, path in found.get("qrels", {}).items()}
    for name, path in parts.items():
        if not Path(path).exists():
            raise DataError(f"{path} does not exist; check datamodule.{name}.")
    return found


def _qrels_by_split(qrels: str | Path | Mapping[str, str | Path] | None) -> Mapping[str, str | Path]:
    if isinstance(qrels, Mapping):
        return qrels
    folder = Path(str(qrels))
    if not folder.is_dir():
        raise DataError(
            f"datamodule.qrels={qrels} is not a folder of splits; name the split of a single file: "
            f"datamodule.qrels.train={qrels}."
        )
    files = qrels_files(folder)
    if not files:
        raise DataError(f"datamodule.qrels={qrels} holds none of train.tsv, dev.tsv, test.tsv.")
    return files
