"""`task=filter`: filter synthetic queries without private data, and write the rest with the same claim."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.blocks import Grid
from lit_dpret.cards.file import CARD_NAME, read_card
from lit_dpret.cards.provenance import environment_facts
from lit_dpret.cards.tuning import TuningData
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.errors import ConfigurationError
from lit_dpret.report.page import shortened
from lit_dpret.settings import Natural, Settings
from lit_dpret.synthesis.filters import QueryFilter, apply_filters, load_released, write_selection
from lit_dpret.synthesis.filters.selection import Applied, check_is_new
from lit_dpret.tasks.parts import Parts, check_run_dir, say, say_unaccounted

_SHOWN = 160  # characters of a passage
FILTERED = "filtered"


@dataclass(kw_only=True)
class Filter(Settings):
    """Apply filters in order to a folder of synthetic queries.

    Guarantees:
        - Only the folder, public passages and the filters' models are read; a model that adds private data of its own
          is refused before any query is scored.
    """

    derives_from: ClassVar[tuple[str, ...]] = (
        "task.data", "task.filters.*.histogram", "task.filters.*.model", "task.filters.*.encoder",
    )  # fmt: skip

    data: Path
    filters: Mapping[str, QueryFilter]
    corpus: str | Path | None = None
    queries_are_public: bool = False
    examples: Natural = 5
    tuning_data: TuningData = "unknown"
    tuning_note: str | None = None
    min_free_mb: float = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.filters:
            raise ConfigurationError(
                "task.filters is empty: name at least one filter, for example filter=round_trip or "
                "filter=[round_trip,best_of]."
            )

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/filtered``, ``filter.json`` and ``examples.md``; return the kept share."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        check_is_new(parts.run_dir / FILTERED)
        released = load_released(self.data, corpus=self.corpus, declared_public=self.queries_are_public)
        filters = list(self.filters.values())
        kept, applied = apply_filters(
            released, filters, lambda name: ProgressLine(f"scoring by {name}"), examples=self.examples
        )
        tuning = {"data": self.tuning_data, "note": self.tuning_note or ""}
        devices = [one.device for one in filters]
        made_on = environment_facts(device=next((d for d in devices if d != "cpu"), "cpu"), precision="float32")
        folder = write_selection(kept, parts.run_dir / FILTERED, applied=applied, tuning=tuning, environment=made_on)
        report = {
            **data_facts(self.data, {query.query_id: [query.text, query.passage_id] for query in released}),
            "queries": len(released),
            "kept": len(kept),
            "filters": [one.to_dict() for one in applied],
        }
        (parts.run_dir / "filter.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (parts.run_dir / "examples.md").write_text(_examples(applied, released.passages), encoding="utf-8")
        for one in applied:
            say(f"{_line(one)}")
        say(f"kept {len(kept)} of {len(released)} queries: {folder}\nexamples: {parts.run_dir / 'examples.md'}")
        if (folder / CARD_NAME).is_file():
            say_unaccounted(read_card(folder))
        return {"kept": float(len(kept)), "kept_share": len(kept) / len(released)}


def _line(one: Applied) -> str:
    share = f"{one.kept} of {one.asked} ({one.kept / one.asked:.1%})"
    meaning = f" ({one.settings['score']})" if "score" in one.settings else ""
    line = f"{one.settings['filter']}: {share}, lowest score {one.lowest_kept:.3g}{meaning}"
    if "distance_after" in one.settings:
        before, after = one.settings["distance_before"], one.settings["distance_after"]
        line += f"; distance of its bins to the histogram {before:.3f} before, {after:.3f} after"
    return line


def _examples(applied: Sequence[Applied], passages: Mapping[str, str]) -> str:
    lines = ["# What the filters kept, and what they did not", ""]
    for one in applied:
        rows = [
            (word, f"{score:.3g}", text, f"{name}: {shortened(' '.join(passages[name].split()), _SHOWN)}")
            for word, examples in zip(("kept", "dropped"), one.examples, strict=True)
            for score, text, name in examples
        ]
        lines += [f"## {_line(one)}", "", Grid(("", "score", "query", "passage"), rows, frozenset({1})).markdown(), ""]
    return "\n".join(lines)
