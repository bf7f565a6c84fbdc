"""`task=zero_shot`: evaluate one system on many public BEIR sets, one by one, and report them in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_dpret.cards.blocks import Block, Bullets, Paragraph, Section
from lit_dpret.datamodules import BeirDataModule, PairsDataModule
from lit_dpret.datamodules.beir import BEIR_SETS, BeirSet, beir_folder, beir_set
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.report.page import Page
from lit_dpret.report.table import Table
from lit_dpret.retrieval.metrics import Metric, Values
from lit_dpret.retrieval.statistics import Interval, bootstrap_interval, macro_interval
from lit_dpret.retrieval.trec_runs import SUMMARY, check_qrels, evaluate, read_per_query, write_evaluation
from lit_dpret.settings import picked
from lit_dpret.synthesis.filters.released import shown
from lit_dpret.tasks.encoder_privacy import PUBLIC, privacy_of_encoder
from lit_dpret.tasks.evaluate import checked_metrics
from lit_dpret.tasks.parts import Parts, say
from lit_dpret.tasks.ranking import Ranker
from reproduction.study import Study


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """One data set: means with intervals by metric, empty if not measured, and a note on departures or gaps."""

    name: str
    metrics: dict[str, Interval] = field(default_factory=dict)
    queries: int = 0
    note: str = ""


@dataclass(kw_only=True)
class ZeroShot(Study):
    """An evaluation of an encoder, or of BM25, on every listed set that is present, each by BEIR's protocol.

    Guarantees:
        - Nothing is downloaded unless ``download=true``. A missing set is named, and is part of no mean.
        - With ``resume=true`` a finished set is not evaluated again.
        - The mean weights every set equally, and CQADupStack (itself the mean of twelve forums) as one set.
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
            raise ConfigurationError(f"task.sets names {', '.join(names) or 'no set'}; name each one once.")
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
        """Measure set after set, write and print ``zero_shot.{json,md,csv}``; return the first metric by set."""
        present = self.present()
        if not present:
            raise DataError(
                f"task.root={self.root} holds none of the sets {', '.join(one.name for one in self._sets)}. Each must "
                "be in a folder of that name with corpus, queries and qrels, as BEIR's archives unpack."
            )
        promise = PUBLIC if self.encoder == "bm25" else privacy_of_encoder(self.encoder)
        self.begin(parts, fingerprint=self._fingerprint())
        done: dict[str, dict[str, Any]] = {}
        for name in present:
            (parts.run_dir / name).mkdir(parents=True, exist_ok=True)
            done[name] = self._stages.run(name, partial(self._measure, self._known[name]))
        values = {name: read_per_query(parts.run_dir / name, self.metrics) for name in present}
        rows = [self._row(one, done, values) for one in self._sets]
        self._tell(parts.run_dir, rows, self._mean(rows, values), promise)
        return {row.name: row.metrics[self.metrics[0]].mean for row in rows if row.metrics}

    def present(self) -> list[str]:
        """Return the sets that are present or can be downloaded; list the members of a set individually."""
        wanted = {member for one in self._sets for member in (one.members or (one.name,))}
        sets = [self._known[name] for name in sorted(wanted)]
        return [one.name for one in sets if (self.download and one.source) or self._folder(one) is not None]

    def _folder(self, wanted: BeirSet) -> Path | None:
        """Return the set's own folder; the root itself counts only if a single set is requested."""
        found = None if self.root is None else beir_folder(self.root, wanted)
        alone = len(self._sets) == 1 and not self._sets[0].members
        return found if found != self.root or alone else None

    def _fingerprint(self) -> str:
        """Return what must be the same on resume, including the state of a local encoder's files."""
        folder = Path(self.encoder)
        files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
        state = [(p.relative_to(folder).as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        cuts = picked(self, "metrics", "top_k", "max_query_length", "max_passage_length")
        return json.dumps([self.encoder, state, [one.name for one in self._sets], cuts])

    def _measure(self, wanted: BeirSet, folder: Path, resume: bool) -> dict[str, Any]:
        here = self._folder(wanted)
        data = self._data(wanted, here)
        data.prepare_data()
        data.setup("test")
        queries, qrels = data.evaluation_set(wanted.split)
        passages = data.public_passages()
        check_qrels(qrels, query_ids=queries, passage_ids=passages)
        ranking = self._ranker.rank(queries, passages, k=self.top_k, drop_self_matches=wanted.drops_self_matches)
        result = evaluate(ranking, qrels, self.metrics)
        known = isinstance(data, BeirDataModule)
        departures = data.departures(wanted.split, qrels) if isinstance(data, BeirDataModule) else ["not a BEIR set"]
        facts = {
            "whose": "public" if known else None, "set": wanted.name, "departures": departures,
            **picked(self, "encoder", "top_k"), **picked(wanted, "split", "drops_self_matches"),
        }  # fmt: skip
        write_evaluation(folder, ranking=ranking, qrels=qrels, result=result, facts=facts, name=SUMMARY)
        say(f"{wanted.name}: {self.metrics[0]} {result.means[self.metrics[0]]:.4f}")
        return {"queries": len(qrels), "departures": departures}

    def _data(self, wanted: BeirSet, here: Path | None) -> PairsDataModule:
        if wanted.name in BEIR_SETS:
            return BeirDataModule(name=wanted.name, root=here, download=here is None, only_evaluation=True)
        return PairsDataModule(folder=str(here), allow_empty_passages=True, drop_queries_without_passage=True)

    def _mean(self, rows: Sequence[SetResult], values: dict[str, dict[str, Values]]) -> dict[str, Interval]:
        """Return the mean with equal weight for every measured set; a set of several members counts as one."""
        groups: list[str] = []
        weights: list[float] = []
        for one, row in zip(self._sets, rows, strict=True):
            members = (one.members or (one.name,)) if row.metrics else ()
            groups += members
            weights += [1 / len(members) for _ in members]
        return {m: macro_interval([values[name][m] for name in groups], weights) for m in self.metrics if groups}

    def _tell(self, folder: Path, rows: Sequence[SetResult], mean: dict[str, Interval], promise: str) -> None:
        missing = [row.name for row in rows if not row.metrics]
        measured = len(rows) - len(missing)  # a mean over some sets must not pass for the mean over all
        name = f"mean of all {measured}" if not missing else f"mean of {measured} of {len(rows)}"
        meant = {metric.shown: metric.definition for metric in map(Metric.parse, self.metrics)}
        listed = [*rows, SetResult(name=name, metrics=mean)]
        whole = self._table(listed, list(meant))
        caption = "mean over queries, below it the 95 % bootstrap interval"
        console = self._table([one for one in listed if one.metrics], list(meant))
        Console().print(console.console(title=f"{shown(self.encoder)}\n{promise}", caption=caption))
        say(*(f"{metric}: {text}" for metric, text in meant.items()))
        if missing:
            say(f"missing: {', '.join(missing)}")
        facts = {
            "system": shown(self.encoder), "privacy": promise, "sets": [asdict(row) for row in rows],
            "definitions": {metric: Metric.parse(metric).definition for metric in self.metrics},
            "mean": {metric: asdict(interval) for metric, interval in mean.items()}, "mean_of": name,
            "missing": missing,
        }  # fmt: skip
        said = Paragraph("Means over queries with 95 % bootstrap intervals.")
        blocks: list[Block] = [whole, said, Bullets([f"{metric}: {text}." for metric, text in meant.items()])]
        page = Page(
            name="zero_shot", title=shown(self.encoder), subtitle=promise, sections=[Section("By data set", blocks)],
            facts=facts, tables={"zero_shot.csv": whole}, owner_only=bool(self.also),  # those may not be public
        )  # fmt: skip
        say(*(f"written: {path}" for path in page.write(folder).values()))

    def _table(self, listed: Sequence[SetResult], titles: Sequence[str]) -> Table:
        rows = [
            [one.name, one.queries or None, *(one.metrics.get(metric) for metric in self.metrics), one.note]
            for one in listed
        ]
        places = frozenset(range(2, 2 + len(self.metrics)))
        return Table(["data set", "queries", *titles, "note"], rows, measured=places, numeric=frozenset({1}))

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
