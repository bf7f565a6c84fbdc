"""`task=paper_000`: the tables of paper 000 again, part by part, ours beside the paper's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from lit_dpret.errors import ConfigurationError
from lit_dpret.tasks.fit import refuse_several_ranks
from lit_dpret.tasks.parts import Parts, check_run_dir
from reproduction.paper_000 import canaries, examples, grid, overlap, retrieval, similarity, zero_shot
from reproduction.paper_000.page import PaperPage, Shown
from reproduction.paper_000.study import SHRUNK, Choices, LeftOut, Trainings
from reproduction.published import SIZES
from reproduction.spent import spent_under

Part = Literal["retrieval", "examples", "canaries", "similarity", "zero_shot", "overlap", "grid"]
REPORT = "report"
_TITLE = "Paper 000, its tables again: synthetic queries by DP language models"
_SIZES, _BESIDE = {"small": "public_t5", "mini": SHRUNK}, {"small": "T5-Base", "mini": "T5-Small"}
_HOW_NOT_WHAT = ("hydra.run.dir=", "task.only=", "privacy.secret_file=")


class Paper000:
    """Every table of "Synthetic Query Generation for Privacy-Preserving Deep Retrieval Systems" (Carranza et al.).

    Guarantees:
        - A training that is finished is not done again, whichever part asks for it; an interrupted one goes on.
        - The report is written again after each part, so that a reproduction that is stopped leaves one.
        - Original queries, and queries made of them without privacy, are shown or measured only where they were
          declared public; otherwise all reports are for their owner alone.
    """

    def __init__(
        self,
        *,
        pipeline: Callable[..., Any],
        shrink: Callable[..., Path],
        similarity: Callable[..., Any],
        zero_shot: Callable[..., Any],
        overlap: Callable[..., Any],
        canaries: Callable[..., Any],
        grid: grid.Grid,
        sizes: Mapping[str, str] | None = None,
        beside: Mapping[str, str] | None = None,
        main: str | None = None,
        eps: Sequence[float | None] = (3.0, 8.0, 16.0, None),
        others_at: Sequence[float | None] | None = None,
        originals_are_public: bool = False,
        canaries_from: str | Path | None = None,
        canary_queries: int | None = None,
        shrink_passages: int = 4000,
        examples: int = 3,
        example_texts: bool = True,
        only: Sequence[Part] | None = None,
        min_free_mb: float = 5000,
    ) -> None:
        chosen = get_args(Part) if only is None else tuple(only)
        if not chosen or not set(chosen) <= set(get_args(Part)):
            raise ConfigurationError(
                f"task.only={list(chosen)} must name at least one of {', '.join(get_args(Part))}, and no other."
            )
        if beside is None:
            beside = _BESIDE if sizes is None else {name: name for name in sizes if name in SIZES}
        sizes = _SIZES if sizes is None else sizes
        main = next(iter(sizes), "") if main is None else main
        if main not in sizes:
            raise ConfigurationError(f"task.main={main} is none of task.sizes: {', '.join(sizes) or 'there are none'}.")
        if unknown := sorted(set(beside) - set(sizes)):
            raise ConfigurationError(
                f"task.beside names {unknown[0]!r}, which is none of task.sizes: {', '.join(sizes)}."
            )
        if wrong := [name for name in sizes if not name or set(name) & set("/\\ ")]:
            raise ConfigurationError(f"task.sizes: {wrong[0]!r} names a folder, so it must have no slash and no space.")
        if not eps or len(set(eps)) < len(eps) or any(value is not None and not value > 0 for value in eps):
            raise ConfigurationError(f"task.eps={list(eps)} must be different positive numbers, null for no privacy.")
        others = list(eps) if others_at is None else list(others_at)
        if not set(others) <= set(eps):
            raise ConfigurationError(f"task.others_at={others} must be some of task.eps={list(eps)}.")
        for knob, value in (("examples", examples), ("shrink_passages", shrink_passages)):
            if value < 1:
                raise ConfigurationError(f"task.{knob}={value} must be at least 1.")
        self.choices = Choices(
            sizes=dict(sizes), beside=dict(beside), main=main, eps=list(eps), others_at=others,
            originals_are_public=originals_are_public,
        )  # fmt: skip
        self.example_texts = example_texts
        self.only, self.examples, self.grid, self.min_free_mb = chosen, examples, grid, min_free_mb
        self.make_pipeline, self.shrink, self.shrink_passages = pipeline, shrink, shrink_passages
        self.make_similarity, self.make_zero_shot = similarity, zero_shot
        self.make_overlap, self.make_canaries = overlap, canaries
        self.canaries_from = None if canaries_from is None else Path(canaries_from)
        self.canary_queries = canary_queries

    def run(self, parts: Parts) -> dict[str, float]:
        """Every chosen part that is not done yet, and the report; returns the first number of each row of table 3.

        Raises:
            ResumeError: The folder holds a run, or something in it was made with other settings.
        """
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        refuse_several_ranks(parts.make_trainer(logger=False))
        study = Trainings(
            parts, self.choices, make_pipeline=self.make_pipeline, shrink=self.shrink,
            shrink_passages=self.shrink_passages,
        )  # fmt: skip
        self._refuse_wrong_parts(study)
        console = Console()
        tables: list[Shown] = []
        left_out: dict[str, str] = {}
        for name in [part for part in get_args(Part) if part in self.only]:
            console.rule(f"paper 000: {name}")
            try:
                tables += self._tables(name, study)
            except LeftOut as why:
                left_out[name] = str(why)
                console.print(f"left out, {name}: {why}", highlight=False, soft_wrap=True)
            written = self._page(study, tables, left_out).write(parts.run_dir / REPORT)
        shutil.rmtree(study.embeddings, ignore_errors=True)
        for path in written.values():
            console.print(f"written: {path}", highlight=False, soft_wrap=True)
        return _first_numbers(tables)

    def _refuse_wrong_parts(self, study: Trainings) -> None:
        """Refuse settings of any chosen part before the first training; what is only absent is told in its turn.

        Raises:
            LitDpretError: A setting is wrong.
        """
        study.refuse_wrong_privacy()
        declared: dict[str, Any] = {"card_entry": True}
        checks: dict[Part, Callable[[], object]] = {
            "similarity": lambda: self.make_similarity(synthetic=".", reference="private", **declared),
            "zero_shot": lambda: zero_shot.check(self.make_zero_shot),
            "overlap": lambda: self.make_overlap(queries="private", corpus=".", **declared),
            "canaries": lambda: canaries.check(study, self.make_canaries, **self._planted()),
        }
        for name, check in checks.items():
            if name in self.only:
                with suppress(LeftOut):
                    check()

    def _tables(self, name: Part, study: Trainings) -> Sequence[Shown]:
        made: dict[Part, Callable[[], Sequence[Shown]]] = {
            "retrieval": lambda: retrieval.tables(study),
            "examples": lambda: examples.tables(study, passages=self.examples, texts=self.example_texts),
            "similarity": lambda: similarity.tables(study, self.make_similarity),
            "zero_shot": lambda: zero_shot.tables(study, self.make_zero_shot),
            "grid": lambda: grid.tables(study, self.grid),
            "overlap": lambda: overlap.tables(study, self.make_overlap),
            "canaries": lambda: canaries.tables(study, self.make_canaries, **self._planted()),
        }
        return made[name]()

    def _planted(self) -> dict[str, Any]:
        return {"finished": self.canaries_from, "train_queries": self.canary_queries}

    def _page(self, study: Trainings, tables: Sequence[Shown], left_out: Mapping[str, str]) -> PaperPage:
        taken = self.canaries_from if any(table.name == canaries.TABLE for table in tables) else None
        return PaperPage(
            name="paper_000",
            title=_TITLE,
            tables=sorted(tables, key=lambda table: (not table.name.startswith("table_"), table.name)),
            left_out=left_out,
            spent=spent_under(
                study.parts.run_dir,
                taken=taken,
                taken_private=0 if taken is None else canaries.private_trainings(taken),
            ).text,
            public=self.choices.originals_are_public,
            about=(
                "Ours beside the paper's, on other data, with other models and sizes: compare orders, not levels. Rows "
                "marked public only are had without any private query, and show what the private ones bought."
            ),
            command=study.parts.command_again(*_HOW_NOT_WHAT),
            seconds=study.seconds,
        )


def _first_numbers(tables: Sequence[Shown]) -> dict[str, float]:
    """nDCG@10 of the rows of table 3; empty where that part was not asked for."""
    found: dict[str, float] = {}
    for table in tables:
        if table.name == "table_3_retrieval":
            for row in table.facts()["rows"]:
                if (ours := row["ours"].get("nDCG@10")) is not None:
                    found[f"{row['source']}, {row['epsilon']}"] = ours["mean"]
    return found
