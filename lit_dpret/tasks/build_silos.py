"""`task=build_silos`: split an existing data set into the clients of a federation, one folder each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_dpret.cards.file import refuse_another_claim
from lit_dpret.datamodules import InsuranceQADataModule, PairsDataModule
from lit_dpret.datamodules.layouts import find_part, folder_parts
from lit_dpret.datamodules.readers import RecordFile, parse_json_file
from lit_dpret.datamodules.silo_folder import Silo, read_manifest, write_silos
from lit_dpret.datamodules.splitting import divisions_of
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.federated.data import planted_silos, silos_by_article, silos_by_domain
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.data.questions import Question, read_genres, read_newsqa, squad_json
from lit_dpret.files import query_places
from lit_dpret.report.page import aligned
from lit_dpret.settings import Settings, built, picked
from lit_dpret.tasks.parts import Parts, check_run_dir, say

Source = Literal["insuranceqa", "medquad", "squad", "newsqa", "planted"]


@dataclass(kw_only=True)
class BuildSilos(Settings):
    """Write the silos of a source into ``RUN/silos``, and print the size of each client."""

    source: Source
    folder: str | Path | None = None
    topics: str | Path | None = None
    newsqa: str | Path | None = None
    cnn_urls: str | Path | None = None
    merge_world: bool = False
    clients: int | None = 10
    min_train: int = 20
    min_test: int = 5
    max_train_queries: int | None = None
    max_passages: int | None = None
    planted: Planted = field(default_factory=Planted)

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"newsqa": ("newsqa", "cnn_urls"), "medquad": ("folder",), "squad": ("folder",)}
        given = {"newsqa": self.newsqa, "cnn_urls": self.cnn_urls, "folder": self.folder}
        for name in needed.get(self.source, ()):
            if given[name] is None:
                raise ConfigurationError(f"task.source={self.source} needs task.{name}: the path of your copy.")
        if self.topics is not None and self.source != "squad":
            raise ConfigurationError(
                f"task.topics={self.topics} groups the articles of SQuAD, but task.source={self.source}. Leave it null."
            )
        self.sizes = picked(self, "clients", "min_train", "min_test")
        self.sample = picked(self, "max_train_queries", "max_passages")
        if not isinstance(self.planted, Planted):
            self.planted = built(Planted, self.planted, "task.planted")
        self.planted.check("task.planted")

    def run(self, parts: Parts) -> dict[str, float]:
        """Build, write and report; return the number of clients."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        out = parts.run_dir / "silos"
        if out.exists() and parts.resume:  # the folder is either whole or absent
            manifest = read_manifest(out, knob="hydra.run.dir")
            if manifest.get("source") != self.source:
                raise ResumeError(f"resume=true, but {out} was built from {manifest.get('source')}, not {self.source}.")
            counts = manifest["clients"]
            say(f"{statistics_table(counts)}\n\n{out}")
            return {"clients": float(len(counts))}
        if out.exists():
            raise ConfigurationError(f"{out} exists, and nothing is overwritten. Choose another hydra.run.dir.")
        silos, facts = self._build()
        write_silos(out, silos, facts={"source": self.source, **facts}, knob="hydra.run.dir")
        say(statistics_table({silo.name: silo.counts() for silo in silos}) + f"\n\n{out}")
        return {"clients": float(len(silos))}

    def _build(self) -> tuple[list[Silo], dict[str, Any]]:
        if self.source == "planted":
            return planted_silos(self.planted), {"planted": vars(self.planted)}
        if self.source == "newsqa":
            genres = read_genres(str(self.cnn_urls), merge_world=self.merge_world)
            stories, questions, left_out = read_newsqa(str(self.newsqa), genres)
            silos, counts = silos_by_article(stories, questions, **self.sizes)
            return silos, {"left_out": left_out | counts}
        if self.source == "squad":
            passages, questions = _read_squad(Path(str(self.folder)))
            left_out = {}
            if self.topics is not None:
                passages, questions, left_out = _by_topic(passages, questions, Path(self.topics))
            silos, counts = silos_by_article(passages, questions, **self.sizes)
            return silos, {"left_out": left_out | counts}
        data = InsuranceQADataModule(folder=self.folder) if self.source == "insuranceqa" else self._pairs()
        divided = sorted(divisions_of(*query_places(data)))  # text before user
        facts = {"division": divided[0]} if divided else {}
        return silos_by_domain(data.collection, **self.sizes, **self.sample), facts

    def _pairs(self) -> PairsDataModule:
        data = PairsDataModule(folder=str(self.folder), in_memory=True)
        refuse_another_claim(data)  # a silo promises an epsilon to the people who asked these very queries
        return data


def _read_squad(path: Path) -> tuple[dict[str, tuple[str, str]], list[Question]]:
    """Read SQuAD's JSON, or a BEIR folder with articles as ``domain`` and ``answers`` in its queries."""
    if path.is_file():
        try:
            content = parse_json_file(path)
            if not isinstance(content, dict) or not isinstance(content.get("data"), list):
                raise DataError("it has no list 'data'.")
            return squad_json(content["data"], split=None)
        except DataError as error:
            raise DataError(f"task.folder={path} is not a SQuAD file: {error.sentence}") from error
    if not path.is_dir() or find_part(path, "corpus") is None:
        raise DataError(f"task.folder={path} is neither a SQuAD JSON file nor a BEIR folder.")
    found = folder_parts(path, knob="task.folder")
    passages = {
        str(record.get("_id")): (str(record.get("domain", "")), str(record.get("text", "")))
        for _, record in RecordFile(found["corpus"], knob="task.folder")
    }
    asked = {str(record.get("_id")): record for _, record in RecordFile(found["queries"], knob="task.folder")}
    questions = []
    for file in found["qrels"].values():
        for _, judged in RecordFile(file, knob="task.folder"):
            record = asked.get(str(judged.get("query-id")))
            if record is None or not record.get("answers"):
                raise DataError(f"{found['queries']} lacks the answers of a judged question; check task.folder.")
            pid = str(judged.get("corpus-id"))
            questions.append(Question(str(record["_id"]), str(record["text"]), pid, answers=record["answers"]))
    return passages, questions


def _by_topic(
    passages: Mapping[str, tuple[str, str]], questions: Sequence[Question], path: Path
) -> tuple[dict[str, tuple[str, str]], list[Question], dict[str, int]]:
    """Put the topic of each article in its place; leave out articles without a topic, and count their questions."""
    topics: dict[str, str] = {}
    for line, record in RecordFile(path, knob="task.topics"):
        article, topic = record.get("article"), record.get("topic")
        if not article or not topic:
            raise DataError(f"task.topics={path} line {line} has no article or no topic; both columns are needed.")
        if topics.setdefault(str(article), str(topic)) != str(topic):
            raise DataError(f"task.topics={path} line {line} gives a second topic to {article}.")
    unknown = sorted(topics.keys() - {article for article, _ in passages.values()})
    if unknown:
        raise DataError(f"task.topics={path} names the article {unknown[0]}, which task.folder does not have.")
    grouped = {pid: (topics[article], text) for pid, (article, text) in passages.items() if article in topics}
    kept = [question for question in questions if question.pid in grouped]
    return grouped, kept, {"without_topic": len(questions) - len(kept)}


_COLUMNS = ("passages", "sentences", "train", "dev", "test")


def statistics_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return a Markdown table of clients, largest first, with totals; private if the counts are.

    Example:
        >>> print(statistics_table({"a": {"passages": 2, "sentences": 9, "train": 4, "dev": 1, "test": 1}}))
        | client | passages | sentences | train | dev | test |
        | ------ | -------: | --------: | ----: | --: | ---: |
        | a      |        2 |         9 |     4 |   1 |    1 |
        | all    |        2 |         9 |     4 |   1 |    1 |
    """
    rows = sorted(counts.items(), key=lambda item: (-item[1].get("train", 0), item[0]))
    total = {column: sum(found.get(column, 0) for _, found in rows) for column in _COLUMNS}
    lines = [[name, *(found.get(column, 0) for column in _COLUMNS)] for name, found in [*rows, ("all", total)]]
    return aligned(["client", *_COLUMNS], lines)
