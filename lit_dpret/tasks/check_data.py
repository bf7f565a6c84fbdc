"""`task=check_data`: report the content and the problems of a data set, and how to train on it, without training."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import refuse_another_claim
from lit_dpret.datamodules import survey
from lit_dpret.datamodules.cleaning import check_clean, refused_records, write_clean
from lit_dpret.datamodules.collection import Collection, TextData
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.datamodules.records import Problems
from lit_dpret.datamodules.splitting import SplitBy, checked_fractions, divides_by, split_collection, write_split
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import OutputFile, OutputFolder, write_whole
from lit_dpret.privacy.budget import LARGE_DELTA, large_delta
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.report.page import render
from lit_dpret.settings import Count, Natural, Settings
from lit_dpret.tasks.parts import Parts, check_run_dir, say, words_of
from lit_dpret.tasks.rulers import MAX_TEXTS, SIDES, fitting_batch, fitting_length, make_rulers

SCHEMA = "lit-dpret/data-check/1"
REPORT = "check_data.private.json"
PAGE = "check_data.private.md"
_PRIVATE = (
    "PRIVATE. These numbers and ids come from the data as they are; no differential privacy covers them. They are for "
    "the owner of the data: do not publish this file."
)
_COLUMNS = " datamodule.columns='{query: NAME, passage: NAME}' reads columns with other names."
_FRACTIONS = {"train": 0.8, "dev": 0.1, "test": 0.1}


@dataclass(kw_only=True)
class CheckData(Settings):
    """Read the datamodule's files to the end, collect every problem, and report on their content.

    The report is printed, and written into the run folder, readable by its owner alone; its name marks it private.
    """

    examples: Natural = 5
    max_texts: Count = MAX_TEXTS
    write_clean: OutputFile | None = None
    write_split: OutputFolder | None = None
    fractions: Mapping[str, float] = field(default_factory=lambda: _FRACTIONS)
    split_by: SplitBy = "auto"
    split_seed: Natural = 0
    resplit: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fractions = checked_fractions(_FRACTIONS if self.fractions is None else self.fractions)

    def run(self, parts: Parts, *, show: bool = True) -> dict[str, float]:
        """Write and ``show`` the report; write a clean log and a split if asked; return the number of problems."""
        check_run_dir(parts.run_dir, min_free_mb=1)
        if self.write_split is not None and self.write_split.exists():
            raise ConfigurationError(f"task.write_split={self.write_split} exists already. Name a new folder.")
        data = parts.make_datamodule()
        if not hasattr(data, "read_collection"):
            raise ConfigurationError(
                f"task=check_data examines queries and passages, but {type(data).__name__} has no read_collection to "
                "give them (lit_dpret.datamodules.collection.TextData)."
            )
        if self.write_split is not None:
            refuse_another_claim(data, "a new split would leave the card behind")
        log = self._log_to_clean(data)
        problems = Problems(examples=sys.maxsize)
        facts: dict[str, Any] = {"schema": SCHEMA, "private": _PRIVATE, "source": _source(data)}
        collection = self._read(data, problems, facts)
        if collection is not None:
            self._examine(parts, data, collection, problems, facts)
        knob = _COLUMNS if type(data) is PairsDataModule and data.pairs else ""
        if (everywhere := problems.shown.get("missing column")) and not (collection and collection.queries):
            once = {message.rpartition(": no ")[2]: message for message in reversed(everywhere)}  # by column
            everywhere[:] = [f"{message} It is missing from every record." for message in reversed(once.values())]
            everywhere[-1] += knob
        facts["problems"] = {"total": problems.total, "counts": problems.counts, "messages": problems.shown}
        if log is not None and problems.total:
            data, collection = self._clean(parts, data, collection, log, problems, facts)
        elif type(data) is PairsDataModule and data.pairs and collection is not None:
            facts["can_be_cleaned"] = bool(refused_records(problems.found, data.pairs))
        usable = not problems.total or "left_out" in facts
        not_written = self.write_split is not None and not usable
        facts["split_not_written"] = str(self.write_split) if not_written else None
        if collection is not None and usable:
            self._offer_split(parts, data, collection, facts)
        page = render("data_check.md", facts | {"examples": self.examples})
        for name, text in ((REPORT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n"), (PAGE, page)):
            write_whole(parts.run_dir / name, text, owner_only=True)
        if log is not None and not problems.total:
            say(f"task.write_clean={self.write_clean} was not written: there is nothing to leave out.")
        if show:
            say(page.removesuffix("\n"))
        if not usable:
            kinds = ", ".join(problems.counts)  # their counts would be numbers of the private data
            split = f" task.write_split={self.write_split} was not written." if not_written else ""
            raise DataError(f"{facts['source']} has problems: {kinds}.{split} See {parts.run_dir / PAGE}.")
        return {"problems": float(problems.total)}

    def _clean(
        self, parts: Parts, data: Any, readable: Collection | None, log: RecordFile, problems: Problems,
        facts: dict[str, Any],
    ) -> tuple[Any, Collection]:  # fmt: skip
        """Write the log without the refused lines; return the DataModule and the collection of the rest."""
        refused = refused_records(problems.found, log.path)
        if refused is None or readable is None:
            other = next(one for one in problems.found if one.record is None or one.record[0] != str(log.path))
            raise DataError(
                f"task.write_clean={self.write_clean} was not written: leaving records out of {log.path} does not fix "
                f"all of its problems. {other}"
            )
        facts["left_out"] = write_clean(
            log, Path(str(self.write_clean)), refused=refused, readable=readable, columns=data.pair_columns,
            read=lambda path, complain: parts.make_datamodule(pairs=str(path)).read_collection(complain),
        )  # fmt: skip
        clean: Any = parts.make_datamodule(pairs=str(self.write_clean))
        collection = clean.read_collection()
        self._examine(parts, clean, collection, problems, facts)  # the report covers the remaining records
        return clean, collection

    def _log_to_clean(self, data: Any) -> RecordFile | None:
        if self.write_clean is None:
            return None
        if type(data) is not PairsDataModule or not data.pairs:
            raise ConfigurationError(
                f"task.write_clean={self.write_clean} leaves records out of one log, datamodule.pairs=FILE with "
                "datamodule=pairs. Fix other data at their source."
            )
        refuse_another_claim(data, "a copy of them would leave the card behind")
        return check_clean(data.pairs, self.write_clean)

    def _read(self, data: TextData, problems: Problems, facts: dict[str, Any]) -> Collection | None:
        """Return everything readable, noting every problem; None if there is nothing to examine."""
        try:
            columns: dict[str, Any] = getattr(data, "file_columns", dict)()
            facts["columns"] = {part: list(names) for part, names in columns.items()}
            return data.read_collection(problems)
        except DataError as error:
            if error.kind == "missing file":
                raise
            problems(error)
            return None

    def _examine(
        self, parts: Parts, data: TextData, collection: Collection, problems: Problems, facts: dict[str, Any]
    ) -> None:
        for contradiction in collection.contradictions(allow_empty_passages=_says(data, "allow_empty_passages")):
            if not (_says(data, "drop_queries_without_passage") and contradiction.kind == "query without passage"):
                problems(contradiction)
        rulers, by = make_rulers(parts, NoPrivacy())
        texts: dict[Any, Any] = {"query": collection.queries.values(), "passage": collection.passages.values()}
        facts["passages"], facts["queries"] = len(collection.passages), len(collection.queries)
        facts["splits"] = survey.count_splits(collection)
        facts["duplicates"] = survey.find_duplicates(collection, examples=self.examples)
        facts["duplicates"]["queries"]["numbered"] = _numbered(data, facts)
        facts["invisible"] = {side: survey.count_invisible(texts[side], of_one_line=side == "query") for side in SIDES}
        facts["lengths"] = {"by": by} | {
            side: survey.measure_lengths(texts[side], count=ruler.count, limit=ruler.limit, at_most=self.max_texts)
            for side, ruler in rulers.items()
        }
        facts["users"] = survey.count_users(collection)

    def _offer_split(self, parts: Parts, data: TextData, collection: Collection, facts: dict[str, Any]) -> None:
        """Split unsplit data, write the split if asked, and advise how to train."""
        cap = facts["users"] and facts["users"]["recommended_cap"]
        # The cap was computed from the private rows, and the card of a run that uses it has to say so.
        chosen = {"datamodule.max_rows_per_unit": str(cap), "callbacks.card.tuning_data": "private"}
        unit = {"privacy.unit": "user", **chosen} if cap else {}
        is_split = set(collection.qrels) != {"train"}
        clean = {"datamodule.pairs": str(self.write_clean)} if "left_out" in facts else {}
        _advise(facts, parts.command, data, collection, {}, clean | unit)
        if is_split and self.write_split is None:
            return
        if is_split and not self.resplit:
            raise ConfigurationError(
                f"task.write_split={self.write_split}: {facts['source']} is already split into "
                f"{', '.join(collection.qrels)}. Set task.resplit=true to merge these and split again."
            )
        try:
            new = split_collection(collection, fractions=self.fractions, seed=self.split_seed, by=self.split_by)
        except DataError as error:
            if self.write_split is not None:
                raise
            facts["split"] = {"refused": str(error)}
            return
        by = divides_by(collection, self.split_by)
        sizes = {split: len(qrels) for split, qrels in new.qrels.items()}
        shared = survey.find_duplicates(new, examples=0)["shared_with_train"]
        facts["split"] = {"by": by, "seed": self.split_seed, "queries": sizes, "written": None}
        facts["split"]["shared_with_train"] = shared
        if self.write_split is not None:
            read_by = write_split(new, self.write_split, public_passages=_says(data, "has_public_passages"), by=by)
            facts["split"]["written"] = str(self.write_split)
            _advise(facts, parts.command, data, new, read_by, unit)


def _advise(
    facts: dict[str, Any], given: str, data: TextData, collection: Collection, read_by: Mapping[str, str],
    more: Mapping[str, str],
) -> None:  # fmt: skip
    """Add the training command for this log, with the settings it needs, and the weak points of the default promise."""
    # The protected units: users if a cap on their rows is recommended, otherwise train queries.
    users = survey.count_users(collection) if facts["users"] and facts["users"]["recommended_cap"] else None
    units = int(users["users"]) if users else len(collection.qrels.get("train", {}))
    delta = 1 / (2 * max(1, units))
    facts["command"] = _command(given, read_by, {**_fitting(data, units, facts), **more})
    facts["cautions"] = [large_delta(delta, units)] if delta > LARGE_DELTA else []


def _fitting(data: TextData, units: int, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a batch size that the log has enough units for, and a length that cuts few passages."""
    more = {"hydra.run.dir": "runs/mine"}
    if (batch := fitting_batch(units, asked := getattr(data, "expected_batch_size", None) or 256)) < asked:
        more["datamodule.expected_batch_size"] = str(batch)
    passages = facts["lengths"]["passage"]
    if (passages["share_cut"] or 0) > 0.05:
        more["model.max_passage_length"] = str(fitting_length([passages["p95"]]))
    return more


def _numbered(data: TextData, facts: Mapping[str, Any]) -> str | None:
    """Return ``lines`` or ``rows``, the numbers that name queries in a log without query ids; None for others."""
    read, names = facts.get("columns", {}).get("pairs"), getattr(data, "pair_columns", None)
    if read is None or names is None or names.query_id in read:
        return None
    return "rows" if str(getattr(data, "pairs", "")).endswith(".parquet") else "lines"


def _source(data: TextData) -> str:
    named = (getattr(data, name, None) for name in ("folder", "pairs", "queries", "file"))
    return str(next(filter(None, named), type(data).__name__))


def _says(data: TextData, name: str) -> bool:
    return bool(getattr(data, name, False))


# DataModule settings that remain valid when its data are read from other files; the others locate the data.
_KEPT = {one.name for one in fields(PairsDataModule)} - {
    "folder", "corpus", "queries", "qrels", "pairs", "columns", "repeated_judgements", "passages_are_public",
}  # fmt: skip


def _command(given: str, read_by: Mapping[str, str], more: Mapping[str, str]) -> str:
    """Return the training command: the given one without its task, reading ``read_by`` if that is not empty."""
    words = words_of(given)
    program = list(takewhile(lambda word: "=" not in word, words))
    shown = list(program)
    for override in words[len(program) :]:
        key = override.lstrip("+~").partition("=")[0]
        if key.partition(".")[0] in ("task", "hydra", "run_dir") or key in more:
            continue
        group, _, name = key.partition(".")
        if read_by and group == "datamodule" and name not in _KEPT:
            continue
        shown.append(override)
    if read_by:
        at = len(program)
        shown[at:at] = ["datamodule=pairs", *(f"datamodule.{key}={value}" for key, value in read_by.items())]
    return shlex.join([*shown, *(f"{key}={value}" for key, value in more.items())])
