"""A reproduction as one page, with the files of each of its tables beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lit_dpret.cards.page import Banner, Block, Bullets, Code, Paragraph, Section, to_markdown
from lit_dpret.files import write_whole
from lit_dpret.report.figures import can_draw
from lit_dpret.report.page import Page
from reproduction.report.paper_table import PaperTable, draw_paper_table

INTERNAL = (
    "Internal: these numbers were computed on queries that nobody declared public. No guarantee covers them; keep the "
    "page where the queries are kept."
)


class Table(Protocol):
    """What a page shows of a part."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    def section(self, picture: Path | None = None) -> Section: ...
    def facts(self) -> dict[str, Any]: ...
    def csv(self) -> str: ...


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
    tables: Sequence[Table]
    left_out: Mapping[str, str] = field(default_factory=dict)
    spent: str = ""
    public: bool = False
    about: str = ""
    command: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


def write_paper_page(page: PaperPage, folder: Path) -> dict[str, Path]:
    """Write the page as ``NAME.{md,html,json}``, and of each table ``.md``, ``.json``, ``.csv`` and, drawn, ``.png``.

    Args:
        page: What is told.
        folder: Where to; made if absent. Readable by its owner alone, unless the page is public.

    Returns:
        The files of the page by name.

    Raises:
        StorageError: A file cannot be written.
    """
    hidden = not page.public
    sections = []
    for table in page.tables:
        section = table.section(_drawn(table, folder, hidden))
        sections.append(section)
        alone = {"md": to_markdown(table.title, "", [], [Section("Result", section.blocks)]), "csv": table.csv()}
        alone["json"] = json.dumps(table.facts(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        for ending, text in alone.items():
            write_whole(folder / f"{table.name}.{ending}", text, owner_only=hidden)
    lead: list[Block] = [Banner(INTERNAL)] if hidden else []
    lead += [Banner(page.spent, "caution")] if page.spent else []
    lead += [Paragraph(page.about)] if page.about else []
    if page.left_out:
        sections.append(Section("Left out", [Bullets([f"{name}: {why}" for name, why in page.left_out.items()])]))
    hours = sum(page.seconds.values()) / 3600
    sections.append(Section("How to get this again", [Code(page.command), Paragraph(f"{hours:.1f} hours of work.")]))
    facts = {
        "title": page.title,
        "public": page.public,
        "about": page.about,
        "spent": page.spent,
        "left_out": dict(page.left_out),
        "command": page.command,
        "seconds": {name: round(value, 1) for name, value in page.seconds.items()},
        "tables": [table.facts() for table in page.tables],
    }
    whole = Page(name=page.name, title=page.title, lead=lead, sections=sections, facts=facts, owner_only=hidden)
    return whole.write(folder)


def _drawn(table: Table, folder: Path, hidden: bool) -> Path | None:
    """The picture of a table of numbers, where matplotlib is installed."""
    if not isinstance(table, PaperTable) or not can_draw():
        return None
    return draw_paper_table(table, folder / f"{table.name}.png", owner_only=hidden)
