"""The data card of a synthetic set: what somebody who finds the folder has to know before using it.

It is ``README.md`` with the header that the Hugging Face hub and ``datasets`` read. Every number on it comes
from the privacy card or from counting; nothing is claimed here that is not claimed there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.cards.text import show_delta, show_epsilon
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.plan import HISTOGRAM
from lit_dpret.synthesis.dataset_folder import SUMMARY_NAME, Counts
from lit_dpret.synthesis.shards import write_whole

_SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True, kw_only=True)
class DataCard:
    """What the data card says beside counts and the privacy claim.

    Args:
        title: Its heading.
        origin: What wrote the queries, as Markdown list items.
        tags: Tags for the Hugging Face hub.
        language: ISO codes of the texts, with commas between them.
        license: Licence of the set as the hub calls it (``cc-by-4.0``); ``other`` where it is that of the passages.

    Raises:
        ConfigurationError: A code is none.
    """

    title: str
    origin: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["synthetic", "query-generation", "beir"])
    language: str = "en"
    license: str = "other"

    def __post_init__(self) -> None:
        for code in self.languages:
            if not _LANGUAGE.fullmatch(code):
                raise ConfigurationError(f"language={self.language!r}: {code!r} is no ISO code such as en or pt-BR.")
        if not _LICENSE.fullmatch(self.license):
            raise ConfigurationError(
                f"license={self.license!r} is no licence as the Hugging Face hub writes it, such as cc-by-4.0 or other."
            )

    @property
    def languages(self) -> list[str]:
        """The codes, one by one."""
        return [code.strip() for code in self.language.split(",")]

    @property
    def terms(self) -> dict[str, str]:
        """Language and licence, for ``generation.json``."""
        return {"language": self.language, "license": self.license}


def terms_of(folder: Path) -> dict[str, str]:
    """Language and licence of a set that was written before, for one that is made from it; none where it says none."""
    try:
        facts = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
        return {name: str(facts["terms"][name]) for name in ("language", "license")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_readme(folder: Path, card: DataCard, counts: Counts, privacy: Mapping[str, Any] | None) -> None:
    """Write the data card; ``privacy`` is the privacy card of the folder, or None where no private data was touched."""
    size = next((name for bound, name in _SIZES if counts.queries < bound), "n>10M")
    text = "\n".join(
        [
            *_header(card, size),
            f"# {card.title}",
            "",
            f"{counts.queries} synthetic queries for {counts.passages} passages. The queries were written by a "
            "program; a query that somebody typed is among them only by coincidence, or by memorisation within the "
            "bounds stated below.",
            "",
            "## Privacy",
            "",
            *_privacy_lines(privacy),
            "",
            "## Origin",
            "",
            *[f"- {line}" for line in card.origin],
            *_drawn(counts),
            "",
            "## Intended use",
            "",
            "Training retrievers and rerankers, and trying out retrieval systems. It is no sample of what people "
            "asked: do not count in it, and do not conclude from a query that somebody has asked it or that nobody "
            "has. A score on these queries is no score on real ones.",
            "",
            "## Files",
            "",
            "`corpus.jsonl`, `queries.jsonl` and `qrels/train.tsv` are BEIR's. `qrels/train.jsonl` says the same as "
            "the TSV, and `pairs/train.jsonl` holds (query, positive) texts for training. `metadata.log_prob` is the "
            "log probability of a query under its generator. Where there are `shards/` and `manifest.jsonl`, they are "
            "the state of the generation and may be deleted.",
            "",
            "## How to load",
            "",
            *_LOADING,
            "",
            "## Licence",
            "",
            _licence(card.license),
            "",
        ]
    )
    write_whole(folder / "README.md", [text])


_LOADING = """```python
from datasets import load_dataset

load_dataset("FOLDER", "corpus")  # _id, title, text
load_dataset("FOLDER", "queries")  # _id, text, metadata
load_dataset("FOLDER", "default")  # query-id, corpus-id, score
pairs = load_dataset("FOLDER", "pairs", split="train")  # query, positive
```

```python
from beir.datasets.data_loader import GenericDataLoader

corpus, queries, qrels = GenericDataLoader("FOLDER").load(split="train")
```

```python
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss

model = SentenceTransformer("MODEL")
SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)).train()
```""".splitlines()


def _header(card: DataCard, size: str) -> list[str]:
    return [
        "---",
        f"pretty_name: {json.dumps(card.title, ensure_ascii=False)}",
        f"language: {json.dumps(card.languages)}",  # quoted, or Norwegian (no) would be false
        f"license: {card.license}",
        "task_categories: [text-retrieval]",
        "task_ids: [document-retrieval]",
        f'size_categories: ["{size}"]',
        f"tags: [{', '.join(card.tags)}]",
        "configs:",
        "- config_name: default",
        "  data_files: [{split: train, path: qrels/train.jsonl}]",
        "- config_name: corpus",
        "  data_files: [{split: corpus, path: corpus.jsonl}]",
        "- config_name: queries",
        "  data_files: [{split: queries, path: queries.jsonl}]",
        "- config_name: pairs",
        "  data_files: [{split: train, path: pairs/train.jsonl}]",
        "---",
        "",
    ]


def _drawn(counts: Counts) -> list[str]:
    if not counts.drawn:  # nothing was drawn here: a selection of queries that were
        return []
    return [
        f"- {counts.drawn} queries drawn; {counts.empty} without words dropped; {counts.duplicates} repeated for "
        f"the same passage merged (`metadata.copies`); {counts.unfinished} cut at the length limit."
    ]


def _privacy_lines(privacy: Mapping[str, Any] | None) -> list[str]:
    if privacy is None:
        return ["No private query was read to make these: they come from the passages alone."]
    return [
        *[f"**{banner}**" for banner in privacy["banners"]],
        *_claim_table(privacy),
        "",
        str(privacy["claim"]["statement"]),
        "",
        f"The claim is that of {_whose(privacy)}, inherited: drawing queries for a public list of passages, and "
        "choosing among them, is post-processing. `privacy_card.json` says all of it; `lit-dpret verify FOLDER` "
        "checks it. Diagnostics computed on private data are not covered by differential privacy, and none are part "
        "of this data set.",
        "",
        "### What is not covered",
        "",
        *[f"- {gap}" for gap in privacy["not_covered"]],
    ]


def _whose(privacy: Mapping[str, Any]) -> str:
    parts = (privacy["accounting"] or {}).get("composition", [])
    counted = any(part["release"].get("label") == HISTOGRAM for part in parts)
    return "the generator and of a histogram of the private queries together" if counted else "the generator"


def _claim_table(privacy: Mapping[str, Any]) -> list[str]:
    """The claim in a table; only what the privacy card states."""
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


def _licence(name: str) -> str:
    own = "The passages keep the licence of their source, and so does text derived from them"
    return f"{own}; hence `other`." if name == "other" else f"`{name}`, as declared by whoever made the set. {own}."
