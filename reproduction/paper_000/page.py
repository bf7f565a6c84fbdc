"""The reproduction as one page, with the files of each of its tables beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lit_dpret.cards.page import Banner, Block, Bullets, Code, Paragraph, Section, to_markdown
from lit_dpret.files import write_whole
from lit_dpret.report.figures import can_draw, save_png
from lit_dpret.report.page import Page, Sheet
from reproduction.paper_000.table import PaperTable, figure_of

INTERNAL = (
    "Internal: these numbers were computed on queries that nobody declared public. No guarantee covers them; keep the "
    "page where the queries are kept."
)


class Shown(Protocol):
    """What a page shows of a part: a table of numbers, or one of examples."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    def blocks(self, picture: Path | None = None) -> list[Block]: ...
    def facts(self) -> dict[str, Any]: ...
    def sheet(self) -> Sheet: ...


@dataclass(frozen=True, kw_only=True)
class PaperPage:
    """What is told.

    Args:
        name: Of the files.
        title: Heading.
        tables: Done, in the order of the page.
        left_out: Parts that were not done, and why.
        spent: What all trainings together have spent.
        public: Whether the queries behind it were declared public.
        about: On what it was computed.
        command: What to type to get the same again.
        seconds: By result.
    """

    name: str
    title: str
    tables: Sequence[Shown]
    left_out: Mapping[str, str] = field(default_factory=dict)
    spent: str = ""
    public: bool = False
    about: str = ""
    command: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    def write(self, folder: Path) -> dict[str, Path]:
        """Write ``NAME.{md,html,json}``, and of each table ``.md``, ``.json``, ``.csv`` and, where drawn, ``.png``.

        Args:
            folder: Where to; made if absent. Readable by its owner alone, unless the page is public.

        Returns:
            The files of the page by name.

        Raises:
            StorageError: A file cannot be written.
        """
        hidden = not self.public
        sections = []
        for table in self.tables:
            picture = None
            if isinstance(table, PaperTable) and can_draw():
                picture = save_png(figure_of(table), folder / f"{table.name}.png", owner_only=hidden)
            section = Section(table.title, table.blocks(picture))
            sections.append(section)
            texts = {
                "md": to_markdown(table.title, "", [], [Section("Result", section.blocks)]),
                "csv": table.sheet().csv(),
                "json": json.dumps(table.facts(), indent=1, allow_nan=False, ensure_ascii=False) + "\n",
            }
            for ending, text in texts.items():
                write_whole(folder / f"{table.name}.{ending}", text, owner_only=hidden)
        lead: list[Block] = [Banner(INTERNAL)] if hidden else []
        lead += [Banner(self.spent, "caution")] if self.spent else []
        lead += [Paragraph(self.about)] if self.about else []
        if self.left_out:
            sections.append(Section("Left out", [Bullets([f"{name}: {why}" for name, why in self.left_out.items()])]))
        hours = sum(self.seconds.values()) / 3600
        again: list[Block] = [Code(self.command), Paragraph(f"{hours:.1f} hours of work.")]
        sections.append(Section("How to get this again", again))
        facts = {
            "title": self.title,
            "public": self.public,
            "about": self.about,
            "spent": self.spent,
            "left_out": dict(self.left_out),
            "command": self.command,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "tables": [table.facts() for table in self.tables],
        }
        page = Page(name=self.name, title=self.title, lead=lead, sections=sections, facts=facts, owner_only=hidden)
        return page.write(folder)
