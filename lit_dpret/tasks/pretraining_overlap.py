"""`task=pretraining_overlap`: count queries and passages that a public model may have been pre-trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Section
from lit_dpret.cards.file import CARD_NAME
from lit_dpret.cards.provenance import text_hashes
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.report.page import Page
from lit_dpret.settings import Count, Settings
from lit_dpret.synthesis.textsim.overlap import Share
from lit_dpret.synthesis.textsim.pretraining_overlap import bounds, find_in_corpus
from lit_dpret.tasks.parts import Parts, by_hash, check_run_dir, say
from lit_dpret.tasks.uncovered import Whose, check_declared, check_synthetic, declare, refuse_training_data

NAME = "pretraining_overlap"
_QUERIES, _PASSAGES = "queries", "passages"


@dataclass(kw_only=True)
class PretrainingOverlap(Settings):
    """Search for the datamodule's queries and passages in the pre-training corpus of a public model."""

    corpus: Path
    queries: Whose | None = None
    card_entry: bool = False
    card: Path | None = None
    field: str = "text"
    split: str = "train"
    max_texts: Count | None = 10_000
    subsets: Count = 1
    ngram: Count = 13
    sampled: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queries = check_declared(
            self.queries, self.card_entry, knob="task.queries", measured="the share found in a corpus"
        )
        if self.sampled is not None and not 0 < self.sampled <= 1:
            raise ConfigurationError(
                f"task.sampled={self.sampled} must be a share of a corpus: above 0, and at most 1."
            )

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``pretraining_overlap.json``, ``.md`` and ``.html``; return the shares found."""
        check_run_dir(parts.run_dir, min_free_mb=1)
        if self.card is not None and not (self.card / CARD_NAME).is_file():
            raise DataError(
                f"task.card={self.card} holds no {CARD_NAME}, so there is no card to mark. Name the folder of the run, "
                "model or data set that was trained on these queries, or set it to null."
            )
        files = corpus_files(self.corpus)
        data = parts.read_data("test")
        if self.queries == "synthetic":
            check_synthetic(data, self.split)
        if self.queries == "public":
            refuse_training_data(data, self.card, knob="task.queries")
        sources = {_QUERIES: data.evaluation_set(self.split)[0], _PASSAGES: data.public_passages()}
        lists = {
            name if self.subsets == 1 else f"{name}, subset {i + 1}": self._chosen(texts, i)
            for name, texts in sources.items()
            for i in range(self.subsets)
        }
        warning = declare(
            self.card, self.queries, measured="Overlap with a pre-training corpus", where="this folder",
        )  # fmt: skip
        with ProgressLine("reading the corpus") as progress:
            found, read = find_in_corpus(lists, self._documents(files, progress), n=self.ngram)
        if not read.documents:
            raise DataError(f"task.corpus={self.corpus} holds no record.")
        facts: dict[str, Any] = {
            **data_facts(data, sources[_PASSAGES], sources[_QUERIES]),
            "corpus": {"name": self.corpus.name, "documents": read.documents, "words": read.words},
            "sampled": self.sampled,
            "split": self.split,
            "whose": self.queries,
            "not_covered": warning,
            "found": {name: each.to_dict() for name, each in found.items()},
            # Hashes of private queries must not be published: guesses could be tested.
            "queries_sha256": [] if self.queries == "private" else text_hashes(sources[_QUERIES].values()),
        }
        if self.sampled is not None:
            facts["whole_corpus"] = {
                name: {"exact": bounds(each.exact, self.sampled), "ngram": bounds(each.ngram, self.sampled)}
                for name, each in found.items()
            }
        page = self._page(parts, facts)
        say(page.markdown(), *(f"written: {path}" for path in page.write(parts.run_dir).values()))
        return {name: each.exact.value or 0.0 for name, each in found.items()}

    def _chosen(self, texts: Mapping[str, str], subset: int) -> list[str]:
        salt = f"{subset}:".encode() if subset else b""
        names = sorted(texts, key=lambda name: by_hash(name, salt))
        return [texts[name] for name in names[: self.max_texts]]

    def _documents(self, files: list[Path], progress: Any) -> Iterator[str]:
        for done, path in enumerate(files):
            progress(done, len(files))
            file = RecordFile(path, knob="task.corpus")
            for number, record in file:
                yield file.text(number, record, self.field)
        progress(len(files), len(files))

    def _reach(self) -> str:
        """Explain what the shares mean for the corpus as a whole."""
        if self.sampled == 1.0:
            return "This is the whole corpus, as declared."
        known = "" if self.sampled is None else f" The bounds treat the files as a random {self.sampled:.3%} of it."
        return (
            "A sample of the corpus gives a lower bound: a text that was not found may occur in the rest of it. The "
            f"intervals concern the choice of texts, not the choice of documents.{known}"
        )

    def _page(self, parts: Parts, facts: Mapping[str, Any]) -> Page:
        corpus = facts["corpus"]
        title = f"Overlap with {corpus['name']}"
        subtitle = f"{corpus['documents']:,} documents, {corpus['words']:,} words; queries of the split {self.split}"
        lead: list[Block] = [Banner(facts["not_covered"])] if facts["not_covered"] else []
        rows = []
        for name, each in facts["found"].items():
            for kind, what in (("exact", "whole text"), ("ngram", f"{self.ngram} words in a row")):
                share = each[kind]
                shown = str(Share(share["positives"], share["total"], share["level"]))
                limits = facts.get("whole_corpus", {}).get(name, {}).get(kind)
                rows.append((name, what, shown, "" if limits is None else f"{limits[0]:.2%} to {limits[1]:.2%}"))
        notes = [
            self._reach(),
            "A text is found when its words occur in one document in a row, ignoring case, punctuation and line "
            "breaks.",
            f"Texts with fewer than {self.ngram} words cannot have that many in common and are left out of that share.",
        ]
        sections = [
            Section("Found", [Grid(("texts", "what", "found, with its 95 % interval", "whole corpus"), rows)]),
            Section("What this says", [Bullets(notes)]),
            *([Section("How to reproduce this", [Code(parts.command)])] if parts.command else []),
        ]
        return Page(
            name=NAME, title=title, subtitle=subtitle, lead=lead, sections=sections, facts=facts,
            owner_only=self.queries == "private",
        )  # fmt: skip


def corpus_files(path: Path) -> list[Path]:
    """Return the files of a corpus, sorted by name."""
    if not path.exists():
        raise DataError(f"{path} does not exist; check task.corpus.")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    read = [file for file in found if set(file.suffixes) & {".jsonl", ".tsv", ".csv", ".parquet"}]
    if not read:
        raise DataError(f"task.corpus={path} holds no .jsonl, .tsv, .csv or .parquet file (.gz and .zst too).")
    return read
