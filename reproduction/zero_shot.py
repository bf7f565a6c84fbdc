"""`task=zero_shot`: one system on many public BEIR sets, set by set, into one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as ConsoleTable

from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.cards.page import Bullets, Paragraph, Section
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules import BeirDataModule, PairsDataModule
from lit_dpret.datamodules.beir import beir_folder
from lit_dpret.datamodules.beir_sets import BEIR_SETS, BeirSet, beir_set
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.report.page import Page
from lit_dpret.report.table import Table
from lit_dpret.retrieval.metrics import Metric, Values
from lit_dpret.retrieval.runs import check_qrels, evaluate
from lit_dpret.retrieval.statistics import Interval, bootstrap_interval, macro_interval
from lit_dpret.settings import picked
from lit_dpret.tasks.evaluate import SUMMARY, checked_metrics
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.ranking import Ranker, read_per_query, write_evaluation
from lit_dpret.tasks.stages import Stages


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """One data set: means with intervals by metric, none where it was not measured, and what departs or is missing."""

    name: str
    metrics: dict[str, Interval] = field(default_factory=dict)
    queries: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ZeroShotTable:
    """All data sets of one system, missing ones among them, and their mean, in which each measured set counts alike."""

    system: str
    privacy: str
    metrics: Sequence[str]
    sets: tuple[SetResult, ...]
    mean: dict[str, Interval] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """The sets without a number."""
        return [one.name for one in self.sets if not one.metrics]

    @property
    def mean_name(self) -> str:
        """What the last row is the mean of; a mean over some sets is not that over all."""
        measured = len(self.sets) - len(self.missing)
        return f"mean of all {measured}" if not self.missing else f"mean of {measured} of {len(self.sets)}"

    def definitions(self) -> dict[str, str]:
        """Return each metric as it is shown, with its definition."""
        return {metric.shown: metric.definition for metric in map(Metric.parse, self.metrics)}

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values."""
        return {
            "system": self.system,
            "privacy": self.privacy,
            "definitions": {name: Metric.parse(name).definition for name in self.metrics},
            "sets": [asdict(one) for one in self.sets],
            "mean": {name: asdict(interval) for name, interval in self.mean.items()},
            "mean_of": self.mean_name,
            "missing": self.missing,
        }

    def table(self, *, measured_only: bool = False) -> Table:
        """Return the sets, the mean last, without the missing ones if asked for."""
        listed = [*self.sets, SetResult(name=self.mean_name, metrics=self.mean)]
        rows = [
            [one.name, one.queries or None, *(one.metrics.get(metric) for metric in self.metrics), one.note]
            for one in listed
            if one.metrics or not measured_only
        ]
        places = frozenset(range(2, 2 + len(self.metrics)))
        return Table(
            ["data set", "queries", *self.definitions(), "note"], rows, measured=places, numeric=frozenset({1})
        )

    def console(self) -> ConsoleTable:
        """Return the measured sets for ``rich.print``."""
        caption = "mean over queries, below it the 95 % bootstrap interval"
        return self.table(measured_only=True).console(title=f"{self.system}\n{self.privacy}", caption=caption)

    def write(self, folder: Path) -> dict[str, Path]:
        """Write ``zero_shot.json``, ``.md``, ``.html`` and ``.csv``."""
        meant = [f"{name}: {text}." for name, text in self.definitions().items()]
        said = Paragraph("Means over queries with 95 % bootstrap intervals.")
        sections = [Section("By data set", [self.table(), said, Bullets(meant)])]
        return Page(
            name="zero_shot", title=self.system, subtitle=self.privacy, sections=sections, facts=self.to_dict(),
            tables={"zero_shot.csv": self.table()}, owner_only=False,
        ).write(folder)  # fmt: skip


@dataclass(kw_only=True)
class ZeroShot:
    """An encoder, or BM25, on every set of a list that is there; each by BEIR's protocol.

    Guarantees:
        - Nothing is downloaded unless ``download=true``; a set that is missing is named, and is in no mean.
        - A set that was finished is not done again with ``resume=true``.
        - The mean counts every set alike, CQADupStack (itself the mean of twelve forums) as one.
    """

    sets: Sequence[str]
    also: Sequence[str] = ()
    root: Path | None = None
    encoder: str = "minilm"
    metrics: Sequence[str] = ("ndcg@10", "recall@10", "success@10")
    top_k: int = 100
    download: bool = False
    max_passage_length: int | None = None
    max_query_length: int | None = None
    cache_dir: str | Path | None = None
    min_free_mb: float = 200

    def __post_init__(self) -> None:
        others = [BeirSet(name=name) for name in self.also]
        self._sets = [beir_set(name) for name in self.sets] + others
        self._known = {**BEIR_SETS, **{one.name: one for one in others}}
        names = [one.name for one in self._sets]
        if not names or len(set(names)) != len(names):
            raise ConfigurationError(f"task.sets names {', '.join(names) or 'no set'}; each must be there once.")
        if self.root is None and not self.download:
            raise ConfigurationError(
                "task.root is null: name the folder that holds one folder per BEIR set. Nothing is downloaded unless "
                "task.download=true."
            )
        if self.root is not None and not Path(self.root).is_dir():
            raise DataError(f"task.root={self.root} does not exist or is not a folder.")
        self.root = None if self.root is None else Path(self.root)
        self.metrics = checked_metrics(self.metrics, self.top_k)
        self._ranker = Ranker(**picked(self, "encoder", "max_query_length", "max_passage_length", "cache_dir"))

    def run(self, parts: Parts) -> dict[str, float]:
        """Measure set after set, write and print ``zero_shot.{json,md,csv}``; returns the first metric by set."""
        present = self.present()
        if not present:
            raise DataError(
                f"task.root={self.root} holds none of the sets {', '.join(one.name for one in self._sets)}. Each must "
                "lie in a folder of that name with corpus, queries and qrels, as BEIR's archives unpack."
            )
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint()).begin()
        done: dict[str, dict[str, Any]] = {}
        for name in present:
            (parts.run_dir / name).mkdir(parents=True, exist_ok=True)
            done[name] = stages.run(name, partial(self._measure, self._known[name]))
        values = {name: read_per_query(parts.run_dir / name, self.metrics) for name in present}
        table = self._table(done, values)
        console = Console()
        console.print(table.console())
        for shown, text in table.definitions().items():
            console.print(f"{shown}: {text}", highlight=False)
        if table.missing:
            console.print(f"missing: {', '.join(table.missing)}", highlight=False)
        for path in table.write(parts.run_dir).values():
            console.print(f"written: {path}", highlight=False, soft_wrap=True)
        return {one.name: one.metrics[self.metrics[0]].mean for one in table.sets if one.metrics}

    def present(self) -> list[str]:
        """Return the sets that are there, or can be fetched; members of a mean by their own names."""
        wanted = {member for one in self._sets for member in (one.members or (one.name,))}
        return sorted(name for name in wanted if self._has(self._known[name]))

    def _has(self, wanted: BeirSet) -> bool:
        fetched = self.download and bool(wanted.source)
        return fetched or (self.root is not None and self._folder(wanted) is not None)

    def _folder(self, wanted: BeirSet) -> Path | None:
        """Return the set's own folder; the root itself is one only where a single set is asked for."""
        found = None if self.root is None else beir_folder(self.root, wanted)
        alone = len(self._sets) == 1 and not self._sets[0].members
        return found if found != self.root or alone else None

    def _fingerprint(self) -> str:
        """Return what must be the same on resume; of a local encoder also the state of its files."""
        folder = Path(self.encoder)
        files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
        state = [(p.relative_to(folder).as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        facts = [
            self.encoder,
            state,
            [one.name for one in self._sets],
            self.metrics,
            self.top_k,
            self.max_query_length,
            self.max_passage_length,
        ]
        return json.dumps(facts)

    def _measure(self, wanted: BeirSet, folder: Path, resume: bool) -> dict[str, Any]:
        here = self._folder(wanted)
        data = self._data(wanted, here)
        data.prepare_data()
        data.setup("test")
        queries, qrels = data.evaluation_set(wanted.split)
        passages = data.public_passages()
        check_qrels(qrels, query_ids=queries, passage_ids=passages)
        ranking = self._ranker.rank(
            queries, passages, k=self.top_k, drop_self_matches=wanted.drops_self_matches
        )  # fmt: skip
        result = evaluate(ranking, qrels, self.metrics)
        facts = {
            "set": wanted.name,
            "encoder": self.encoder,
            "split": wanted.split,
            "top_k": self.top_k,
            "drops_self_matches": wanted.drops_self_matches,
            "departures": data.departures(wanted.split, qrels)
            if isinstance(data, BeirDataModule)
            else ["no set of BEIR's"],
        }
        write_evaluation(folder, ranking=ranking, qrels=qrels, result=result, facts=facts, name=SUMMARY)
        Console().print(f"{wanted.name}: {self.metrics[0]} {result.means[self.metrics[0]]:.4f}", highlight=False)
        return {"queries": len(qrels), "departures": facts["departures"]}

    def _data(self, wanted: BeirSet, here: Path | None) -> PairsDataModule:
        if wanted.name in BEIR_SETS:
            return BeirDataModule(name=wanted.name, root=here, download=here is None, only_evaluation=True)
        return PairsDataModule(folder=str(here), allow_empty_passages=True, drop_queries_without_passage=True)

    def _table(self, done: dict[str, dict[str, Any]], values: dict[str, dict[str, Values]]) -> ZeroShotTable:
        rows = [self._row(one, done, values) for one in self._sets]
        groups: list[str] = []
        weights: list[float] = []
        for one, row in zip(self._sets, rows, strict=True):
            members = (one.members or (one.name,)) if row.metrics else ()
            groups += members
            weights += [1 / len(members) for _ in members]
        mean = {m: macro_interval([values[name][m] for name in groups], weights) for m in self.metrics if groups}
        return ZeroShotTable(
            system=self.encoder, privacy=_promise(self.encoder), metrics=self.metrics, sets=tuple(rows), mean=mean
        )

    def _row(self, one: BeirSet, done: dict[str, dict[str, Any]], values: dict[str, dict[str, Values]]) -> SetResult:
        members = one.members or (one.name,)
        missing = [name for name in members if name not in done]
        if missing:
            note = "not there" if len(missing) == len(members) else f"lacks {', '.join(missing)}"
            return SetResult(name=one.name, note=f"missing: {note}")
        notes = [f"{name}: {text}" if one.members else text for name in members for text in done[name]["departures"]]
        if len(members) == 1:
            metrics = {m: bootstrap_interval(values[one.name][m]) for m in self.metrics}
        else:
            metrics = {m: macro_interval([values[name][m] for name in members]) for m in self.metrics}
        queries = sum(int(done[name]["queries"]) for name in members)
        return SetResult(name=one.name, metrics=metrics, queries=queries, note="; ".join(notes))


def _promise(encoder: str) -> str:
    """Return what the encoder's privacy card claims, in one line."""
    folder = Path(encoder)
    if not (folder / CARD_NAME).is_file():
        return f"{encoder} carries no privacy card: it claims nothing about private queries."
    return privacy_line(read_card(folder))
