"""The README.md of a model folder: how to load it, what it scored, and what is promised of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.cards.text import privacy_line, statement

_ENCODER = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
queries = model.encode_query(["does flood insurance cover my basement?"])
passages = model.encode_document(["Flood policies cover ..."])
scores = queries @ passages.T
```"""
_GENERATOR = """```python
from lit_dpret.modules import QueryGenerator

generator = QueryGenerator.load_model("{folder}")
```"""


def write_model_card(folder: str | Path, card: Mapping[str, Any], *, metrics: Mapping[str, Any] | None = None) -> Path:
    """Write ``README.md`` into a model folder.

    Args:
        folder: A sentence-transformers folder, or one of a generator.
        card: Its privacy card; the claim in the README is the card's, in its words.
        metrics: What ``task=evaluate`` wrote: ``metrics`` by name with ``mean``, ``low`` and ``high``, ``queries``,
            ``split``.
    """
    folder = Path(folder)
    encoder = (folder / "modules.json").is_file()
    use = (_ENCODER if encoder else _GENERATOR).format(folder=folder.name)
    lines = [
        *_header(encoder, card),
        f"# {card['subject']['name']}",
        "",
        f"**Privacy: {privacy_line(card)}**",
        "",
        statement(card),
        "",
        "The whole card is `privacy_card.json`, for people `privacy_card.html`. Whoever passes this folder on passes "
        "the card on with it.",
        "",
        "## Use",
        "",
        use,
        "",
        *_scores(metrics or {}),
    ]
    path = folder / "README.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _header(encoder: bool, card: Mapping[str, Any]) -> list[str]:
    kind = "sentence-transformers" if encoder else "transformers"
    task = "sentence-similarity" if encoder else "text2text-generation"
    tags = ["differential-privacy"] if card["claim"]["guarantee"] == "dp" else []
    tags += ["feature-extraction", "dense-retrieval"] if encoder else ["query-generation"]
    return ["---", f"library_name: {kind}", f"pipeline_tag: {task}", f"tags: [{', '.join(tags)}]", "---", ""]


def _scores(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    rows = [
        f"| {name} | {value['mean']:.4f} | {value['low']:.4f} to {value['high']:.4f} |"
        for name, value in found["metrics"].items()
    ]
    about = f"{found.get('queries', 'unknown many')} queries of the {found.get('split', 'unknown')} split"
    return [
        "## Scores",
        "",
        f"On {about}, with 95 percent bootstrap intervals over queries. Scores that were computed on private "
        "queries are not covered by the claim above.",
        "",
        "| metric | mean | interval |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]
