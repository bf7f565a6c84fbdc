"""`task=paper_000`: the tables of paper 000, part by part, with our numbers and the paper's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.cards.blocks import Bullets, Section
from lit_dpret.settings import require_whole
from lit_dpret.tasks.fit import refuse_several_ranks
from lit_dpret.tasks.parts import Parts, say, some_of
from reproduction.paper_000 import canaries, examples, grid, measures, retrieval
from reproduction.paper_000.study import LeftOut, Trainings
from reproduction.paper_000.table import Shown, write_page
from reproduction.spent import spent_under
from reproduction.study import refuse_other_modes

Part = Literal["retrieval", "examples", "canaries", "similarity", "zero_shot", "overlap", "grid"]
_TITLE = "Paper 000, its tables again: synthetic queries by DP language models"
_ABOUT = (
    "Our data, models and sizes differ from the paper's: compare orders, not levels. Rows marked public only use no "
    "private query, and show what the private ones gain."
)
_HOW_NOT_WHAT = ("hydra.run.dir=", "task.only=", "privacy.secret_file=")


@dataclass(kw_only=True, eq=False)
class Paper000(Trainings):
    """Every table of "Synthetic Query Generation for Privacy-Preserving Deep Retrieval Systems" (Carranza et al.).

    Guarantees:
        - A finished training is not repeated, whichever part asks for it; an interrupted one continues.
        - The report is written again after each part, so that a stopped reproduction leaves one.
        - Original queries, and queries written from them without privacy, are shown or measured only if they were
          declared public. Otherwise all reports are readable only by their owner.
    """

    similarity: Callable[..., Any]
    zero_shot: Callable[..., Any]
    overlap: Callable[..., Any]
    canaries: Callable[..., Any]
    grid: grid.Grid
    canaries_from: Path | None = None
    canary_queries: int | None = None
    examples: int = 3
    example_texts: bool = True
    only: Sequence[Part] = get_args(Part)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only = some_of("task.only", self.only, get_args(Part))
        require_whole("task", self, 1, "examples")
        self.canaries_from = None if self.canaries_from is None else Path(self.canaries_from)

    def kept_models(self) -> set[str]:
        searched = "grid" in self.only and self.originals_are_public
        return {*super().kept_models(), *(self.grid.names if searched else ())}

    def run(self, parts: Parts) -> dict[str, float]:
        """Do every chosen part that is not done yet, and report; return the first number of each row of table 3."""
        refuse_several_ranks(parts.make_trainer(logger=False))
        self.open(parts)
        self._refuse_wrong_parts()
        tables: list[Shown] = []
        left_out: dict[str, str] = {}
        for name in self.only:
            say(f"-- paper 000: {name}")
            try:
                tables += self._tables(name)
            except LeftOut as why:
                left_out[name] = str(why)
                say(f"left out, {name}: {why}")
            written = self._write(tables, left_out)
        shutil.rmtree(self.embeddings, ignore_errors=True)
        say(*(f"written: {path}" for path in written.values()))
        return _first_numbers(tables)

    def _refuse_wrong_parts(self) -> None:
        """Refuse wrong settings of any chosen part before the first training; what is missing is reported later."""
        for eps in self.finite:
            refuse_other_modes(self.parts.make_privacy(eps=eps), eps)
        declared: dict[str, Any] = {"card_entry": True}
        checks: dict[Part, Callable[[], object]] = {
            "similarity": lambda: self.similarity(synthetic=".", reference="private", **declared),
            "zero_shot": lambda: measures.check_zero_shot(self.zero_shot),
            "overlap": lambda: self.overlap(queries="private", corpus=".", **declared),
            "canaries": lambda: canaries.check(self, self.canaries, **self._planted()),
        }
        for name, check in checks.items():
            if name in self.only:
                with suppress(LeftOut):
                    check()

    def _tables(self, name: Part) -> Sequence[Shown]:
        made: dict[Part, Callable[[], Sequence[Shown]]] = {
            "retrieval": lambda: retrieval.tables(self),
            "examples": lambda: examples.tables(self, passages=self.examples, texts=self.example_texts),
            "similarity": lambda: measures.similarity_tables(self, self.similarity),
            "zero_shot": lambda: measures.zero_shot_tables(self, self.zero_shot),
            "grid": lambda: grid.tables(self, self.grid),
            "overlap": lambda: measures.overlap_tables(self, self.overlap),
            "canaries": lambda: canaries.tables(self, self.canaries, **self._planted()),
        }
        return made[name]()

    def _planted(self) -> dict[str, Any]:
        return {"finished": self.canaries_from, "train_queries": self.canary_queries}

    def _write(self, tables: Sequence[Shown], left_out: Mapping[str, str]) -> dict[str, Path]:
        tables = sorted(tables, key=lambda table: (not table.name.startswith("table_"), table.name))
        taken = self.canaries_from if any(table.name == canaries.TABLE for table in tables) else None
        private = 0 if taken is None else canaries.private_trainings(taken)
        absent = [Section("Left out", [Bullets([f"{name}: {why}" for name, why in left_out.items()])])]
        return write_page(
            "paper_000", _TITLE, tables, self.parts.run_dir, about=_ABOUT, public=self.originals_are_public,
            spent=spent_under(self.parts.run_dir, taken=taken, taken_private=private).text,
            more=absent if left_out else [], command=self.parts.command_again(*_HOW_NOT_WHAT), seconds=self.seconds,
            facts={"left_out": dict(left_out)},
        )  # fmt: skip


def _first_numbers(tables: Sequence[Shown]) -> dict[str, float]:
    found: dict[str, float] = {}
    for table in tables:
        if table.name == "table_3_retrieval":
            for row in table.facts()["rows"]:
                if (ours := row["ours"].get("nDCG@10")) is not None:
                    found[f"{row['source']}, {row['epsilon']}"] = ours["mean"]
    return found
