"""Table 6: how near the synthetic queries are to the original ones, by BLEU and MAUVE."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_dpret.report.table import RowResult
from lit_dpret.retrieval.statistics import Interval
from lit_dpret.synthesis.textsim.words import need
from lit_dpret.tasks.parts import Parts
from reproduction.paper_000.retrieval import sizes_note
from reproduction.paper_000.study import BASELINES, LeftOut, Trainings
from reproduction.paper_000.table import PUBLIC_ONLY, PaperRow, PaperTable, row_beside, rows_of_the_paper_alone
from reproduction.published import PAPER_000

COLUMNS = {"bleu": "BLEU", "mauve": "MAUVE"}
_CAPTION = (
    "Corpus BLEU as a share, against all original queries of the same passage; it has no interval. MAUVE by MiniLM "
    "features of the query, mean over seeds of k-means with one standard deviation on both sides. The features, sizes "
    "of samples and buckets are not the paper's, so its MAUVE is on another scale."
)


def tables(study: Trainings, make_similarity: Callable[..., Any]) -> list[PaperTable]:
    """Return one row for each synthetic data set, and one for the pseudo-queries."""
    if not study.originals_are_public:
        raise LeftOut(
            "similarity is a measure of the original queries, and task.originals_are_public=false. task=similarity "
            "measures one data set and writes so on its card."
        )
    for package in ("sacrebleu", "sklearn"):
        need(package)  # type: ignore[arg-type]
    rows = []
    for cell in study.cells():
        ours = _measured(study, f"similarity-{cell.name}", study.queries_of(cell), make_similarity)
        made = RowResult(study.described(cell.size), ours, study.synthetic(cell).privacy)
        rows.append(row_beside("table_6", study.point(cell), COLUMNS, made))
    rows += rows_of_the_paper_alone("table_6", COLUMNS, rows)
    study.baselines()
    pseudo = _measured(study, "similarity-pseudo", study.folder(BASELINES) / "pseudo_queries", make_similarity)
    made = RowResult("pseudo-queries of the passages", pseudo, "no private data")
    rows.append(PaperRow(**vars(made), epsilon=PUBLIC_ONLY))
    notes = [
        PAPER_000["table_6_footnote"],
        "The zero-shot encoder writes no queries, so it has no row here.",
        "These are measures of the original queries: no epsilon covers them. They were declared public.",
        *sizes_note(study),
    ]
    title = "Table 6: similarity of synthetic and original queries"
    return [PaperTable("table_6_similarity", title, COLUMNS, rows, _CAPTION, notes)]


def _measured(study: Trainings, name: str, folder: Path, make: Callable[..., Any]) -> dict[str, Interval]:
    def work(parts: Parts) -> Any:
        make(synthetic=folder, reference="private", card_entry=True, plot=False).run(parts)
        facts = json.loads((parts.run_dir / "similarity.json").read_text(encoding="utf-8"))
        found = facts["mauve"]["query"]
        return {"bleu": facts["bleu"]["as_in_the_papers"], "mauve": [found["mean"], found["sd"]]}

    found = study.result(name, [make, str(folder.name)], work)
    mean, sd = found["mauve"]
    reach = math.nan if sd is None else sd
    return {"bleu": Interval(found["bleu"], math.nan, math.nan), "mauve": Interval(mean, mean - reach, mean + reach)}
