"""A synthetic data set as a folder in standard formats.

The layout is BEIR's, with a JSONL mirror of the qrels and a file of (query, positive) pairs, because ``datasets``
reads one file type per repository and would read JSONL as CSV next to a TSV. ``README.md`` is the data card: every
number on it comes from the privacy card in the same folder, or from counting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import Path
from string import Template
from typing import Any

from lit_dpret.cards.hub import check_license, claim_metadata, front_matter, stated_languages
from lit_dpret.cards.text import not_covered
from lit_dpret.datamodules.rows import stable_hash
from lit_dpret.errors import DataError
from lit_dpret.files import SUMMARY_NAME, SYNTHETIC_SCHEMA
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.plan import EVOLUTION, HISTOGRAM
from lit_dpret.synthesis.shards import json_line, write_chunks

DATA_FILES = ("queries.jsonl", "qrels/train.tsv", "qrels/train.jsonl", "pairs/train.jsonl", "corpus.jsonl")


@dataclass(frozen=True, kw_only=True)
class SyntheticQuery:
    """One drawn query, as stored in a shard."""

    passage_id: str
    draw: int
    text: str
    # Log probability in nats of all its tokens under the generator; None if there is none.
    log_prob: float | None = None
    finished: bool = True  # whether the end mark was drawn within the allowed length


@dataclass
class Counts:
    """The numbers of drawn, dropped and kept queries."""

    drawn: int = 0
    empty: int = 0  # of these, without any word; dropped
    duplicates: int = 0  # of these, equal to an earlier query of the same passage; merged into it
    unfinished: int = 0  # of these, cut at the maximum length; kept
    queries: int = 0
    passages: int = 0  # passages with at least one query


@dataclass(frozen=True, kw_only=True)
class ReleasedQuery:
    """One query of a data set and its passage."""

    query_id: str
    text: str
    passage_id: str
    metadata: Mapping[str, Any]  # its metadata in ``queries.jsonl``: ``draw``, ``copies``, ``log_prob``

    @property
    def log_prob(self) -> float | None:
        """Log probability in nats of the whole query under its generator, if recorded."""
        found = self.metadata.get("log_prob")
        return None if found is None else float(found)


def check_passages(passages: Mapping[str, str]) -> None:
    """Refuse ids that the formats cannot represent."""
    if not passages:
        raise DataError("There are no passages to write queries for.")
    for name in passages:
        if not isinstance(name, str) or not name or any(mark in name for mark in "\t\n\r"):
            raise DataError(
                f"The passage id {name!r} cannot be written to a qrels file: an id must be text without tabs or line "
                "breaks."
            )


def write_dataset(
    folder: Path, queries: Callable[[], Iterable[SyntheticQuery]], passages: Mapping[str, str]
) -> tuple[Counts, dict[str, str]]:
    """Write the data files of the layout; return the counts, and the SHA-256 of each file.

    Guarantees:
        - Each file appears whole or not at all, and equal input gives equal bytes.
        - Every query of ``qrels`` is in ``queries.jsonl``, and its passage in ``corpus.jsonl``.
        - A query that its passage drew several times appears once, with ``metadata.copies``.

    ``queries`` yields the drawn queries again at each call, those of one passage next to each other.
    """
    counts = Counts()
    for _ in _entries(queries(), counts):
        pass
    return counts, write_entries(folder, lambda: _entries(queries(), Counts()), passages)


def write_entries(
    folder: Path, entries: Callable[[], Iterable[ReleasedQuery]], passages: Mapping[str, str]
) -> dict[str, str]:
    """Write the data files of the layout from queries with ids; return the SHA-256 of each file.

    ``entries`` yields them again at each call. Only passages with a query are written, ordered by their first query.
    """
    written: set[str] = set()

    def corpus_line(entry: ReleasedQuery) -> str:
        if entry.passage_id in written:
            return ""
        written.add(entry.passage_id)
        return json_line({"_id": entry.passage_id, "title": "", "text": passages[entry.passage_id]})

    lines: tuple[Callable[[ReleasedQuery], str], ...] = (
        lambda entry: json_line({"_id": entry.query_id, "text": entry.text, "metadata": dict(entry.metadata)}),
        lambda entry: f"{entry.query_id}\t{entry.passage_id}\t1\n",
        lambda entry: json_line({"query-id": entry.query_id, "corpus-id": entry.passage_id, "score": 1}),
        lambda entry: json_line({"query": entry.text, "positive": passages[entry.passage_id]}),
        corpus_line,
    )
    hashes = {}
    for name, line in zip(DATA_FILES, lines, strict=True):
        head = ["query-id\tcorpus-id\tscore\n"] if name.endswith(".tsv") else []
        hashes[name] = write_chunks(folder / name, chain(head, map(line, entries())))
    return hashes


def write_summary(
    folder: Path,
    configuration: Mapping[str, Any],
    counts: Counts,
    hashes: Mapping[str, str],
    *,
    terms: Mapping[str, str],
) -> None:
    """Write ``generation.json``: how the data set was generated, counts, files, language and licence."""
    facts = {
        "schema": SYNTHETIC_SCHEMA,
        "configuration": dict(configuration),
        "counts": asdict(counts),
        "sha256": dict(hashes),
        "terms": dict(terms),
    }
    write_chunks(folder / SUMMARY_NAME, [json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False) + "\n"])


def _entries(queries: Iterable[SyntheticQuery], counts: Counts) -> Iterator[ReleasedQuery]:
    """Yield the queries of the data set in order, counting on the way."""
    for passage_id, drawn in groupby(queries, key=lambda query: query.passage_id):
        kept: dict[str, SyntheticQuery] = {}
        copies: dict[str, int] = {}
        for query in drawn:
            counts.drawn += 1
            if not query.text:
                counts.empty += 1
                continue
            counts.unfinished += not query.finished
            counts.duplicates += query.text in kept
            kept.setdefault(query.text, query)
            copies[query.text] = copies.get(query.text, 0) + 1
        counts.passages += bool(kept)
        for text, query in kept.items():
            counts.queries += 1
            metadata: dict[str, Any] = {"passage_id": passage_id, "draw": query.draw, "copies": copies[text]}
            if query.log_prob is not None:
                metadata["log_prob"] = query.log_prob
            name = f"genQ{counts.queries}"
            yield ReleasedQuery(query_id=name, text=text, passage_id=passage_id, metadata=metadata)


def passages_hash(passages: Mapping[str, str]) -> str:
    """Return the SHA-256 of ids and texts, independent of order."""
    return stable_hash(*chain.from_iterable(sorted(passages.items()))).hex()


_SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
#: The files that `datasets` finds under each name.
_CONFIGS = [
    {"config_name": name, "data_files": [{"split": split, "path": path}]}
    for name, split, path in (
        ("default", "train", "qrels/train.jsonl"),
        ("corpus", "corpus", "corpus.jsonl"),
        ("queries", "queries", "queries.jsonl"),
        ("pairs", "train", "pairs/train.jsonl"),
    )
]


_NO_SAMPLE = (
    " It is not a sample of what people asked: do not count frequencies in it, and do not conclude from a query that "
    "anyone has asked it, or that no one has. A score on these queries is not a score on real ones."
)
_FROM_PASSAGES = {
    "kind": "pseudo-queries",
    "written": "Each was composed by a program from words of its passage.",
    "use": _NO_SAMPLE,
    "privacy": "No private query was read to create these: they come from the passages alone.",
}
_DECLARED = {
    "kind": "queries",
    "written": "Their authors are not known here: they were selected, not written.",
    "use": "",
    "privacy": "There is no privacy card. The person who selected these declared that no private query went into them; "
    "the declaration was not checked.",
}


@dataclass(frozen=True, kw_only=True)
class DataCard:
    """The text of a data card, without counts and privacy claim."""

    title: str
    origin: list[str] = field(default_factory=list)  # where the queries come from, as Markdown list items
    # Whether the queries are derived from public passages alone. A set without a privacy card for which this is false
    # relies on a declaration, and its card says so.
    from_passages: bool = False
    # Tags for the Hugging Face hub.
    tags: list[str] = field(default_factory=lambda: ["synthetic", "query-generation", "beir"])
    language: str | None = None  # comma-separated ISO codes of the texts; None if not stated
    license: str | None = None  # licence of the set as the hub calls it (``cc-by-4.0``); None if not stated

    def __post_init__(self) -> None:
        stated_languages(self.language)
        check_license(self.license)

    @property
    def terms(self) -> dict[str, str]:
        """Language and licence, if stated, for ``generation.json``."""
        stated = {"language": self.language, "license": self.license}
        return {name: value for name, value in stated.items() if value is not None}


def terms_of(folder: Path) -> dict[str, str]:
    """Return language and licence of an earlier set, for a set derived from it; empty if it states none."""
    try:
        facts = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
        return {name: str(facts["terms"][name]) for name in ("language", "license") if name in facts["terms"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_readme(folder: Path, card: DataCard, counts: Counts, privacy: Mapping[str, Any] | None) -> None:
    """Write the data card, from the template ``data_card.md`` next to this file.

    ``privacy`` is the privacy card of the folder, or None if there is none.
    """
    if privacy is None:
        told = _FROM_PASSAGES if card.from_passages else _DECLARED
    else:
        told = _generated(privacy)
    drawn = (
        f"- {counts.drawn} queries drawn; {counts.empty} without words dropped; {counts.duplicates} repeated for "
        f"the same passage merged (`metadata.copies`); {counts.unfinished} cut at the length limit."
    )
    own = "The passages keep the licence of their source, and so does text derived from them"
    declared = f"`{card.license}`, as declared by the creator of the set. {own}."
    header = {
        "pretty_name": card.title,
        "language": stated_languages(card.language),
        "license": card.license,
        "task_categories": ["text-retrieval"],
        "task_ids": ["document-retrieval"],
        "size_categories": [next((name for bound, name in _SIZES if counts.queries < bound), "n>10M")],
        "tags": card.tags,
        "privacy": None if privacy is None else claim_metadata(privacy),
        "configs": _CONFIGS,
    }
    text = Template(Path(__file__).with_name("data_card.md").read_text(encoding="utf-8")).substitute(
        header=front_matter(header),
        title=card.title,
        queries=counts.queries,
        passages=counts.passages,
        **told,
        # A selection of queries has drawn nothing itself.
        origin="\n".join([*(f"- {line}" for line in card.origin), *([drawn] if counts.drawn else [])]),
        licence=f"None was stated for the set. {own}." if card.license is None else declared,
    )
    write_chunks(folder / "README.md", [text])


def _generated(privacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the data card's text about queries that a generator wrote; ``privacy`` is its privacy card."""
    bound = "only by coincidence, or by memorisation within the bounds stated below"
    if privacy["claim"]["guarantee"] != "dp":
        bound = "as often as the generator memorised one, which nothing bounds"
    written = f"The queries were written by a program; a query that a person typed is among them {bound}."
    return {
        "kind": "synthetic queries",
        "written": written,
        "use": _NO_SAMPLE,
        "privacy": "\n".join(_privacy_lines(privacy)),
    }


def _privacy_lines(privacy: Mapping[str, Any]) -> list[str]:
    return [
        *[f"**{banner}**" for banner in privacy["banners"]],
        *_claim_table(privacy),
        "",
        str(privacy["claim"]["statement"]),
        "",
        f"The claim is inherited from {_whose(privacy)}: drawing queries for a public list of passages, and choosing "
        "among them, is post-processing. `privacy_card.json` states it in full; `lit-dpret verify FOLDER` checks it. "
        "Diagnostics computed on private data are not covered by differential privacy, and none are part of this data "
        "set.",
        "",
        "### What is not covered",
        "",
        *[f"- {gap}" for gap in not_covered(privacy)],
    ]


def _whose(privacy: Mapping[str, Any]) -> str:
    labels = {part["release"].get("label") for part in (privacy["accounting"] or {}).get("composition", [])}
    if EVOLUTION in labels:
        return "the noised votes of the private queries"
    if HISTOGRAM in labels:
        return "what wrote the queries together with a histogram of the private queries"
    return "the generator"


def _claim_table(privacy: Mapping[str, Any]) -> list[str]:
    """Return the claim as a table, with only what the privacy card states."""
    claim, accounting, parents = privacy["claim"], privacy["accounting"] or {}, privacy["parents"]
    rows = [("epsilon", "none is claimed" if claim["epsilon"] is None else show_epsilon(claim["epsilon"]))]
    if claim["delta"] is not None:
        rows.append(("delta", show_delta(claim["delta"])))
    rows += [
        ("unit of privacy", claim["unit_text"] or "none"),
        ("neighbouring data sets", claim["neighbours_text"] or "none"),
    ]
    for part in accounting.get("composition", []):
        rows.append(("mechanism and sampling", f"{part['text']}; {part['count']} times"))
    if accounting:
        rows.append(("accountant", f"{accounting['accountant']} ({accounting['library']} {accounting['version']})"))
    if parents:
        rows.append(("derived from", f"`{parents[0]['name']}`, privacy card `{parents[0]['sha256']}` (SHA-256)"))
    return ["", "| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows)]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")
