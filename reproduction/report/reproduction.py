"""Every table and figure of a paper on one page, numbered as there, with ours beside it or why it is not.

What stands in a page is made from the stored results of the parts that were run; nothing is typed. Which parts there
are, and in which sizes they were run, says `reproduction.suite`; what a paper holds, says its list of items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_dpret.cards.page import Banner, Block, Bullets, Code, Grid, Paragraph, Section
from lit_dpret.errors import DataError
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.report.page import Page, Picture

SCHEMA = "lit-dpret/reproduction/1"
# Blocks from the folder of a part's results; a picture is drawn to the second path. `DataError` where they lack it.
Show = Callable[[Path, Path], Sequence[Block]]
State = Literal["shown", "left out", "not reproduced"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure."""

    number: str  # as in the paper, ``Table 1``; with what is shown of it, where that is one half
    says: str  # what the paper shows there
    parts: tuple[str, ...] = ()  # that can make it; the first that has results does
    show: Show | None = None  # makes the blocks; None for what no part makes
    differs: str = ""  # how ours is another thing than the paper's, beside the sizes of the part
    why_not: str = ""  # for what no part makes: why
    quotes: bool = False  # its tables hold texts of the data, which may not be anybody's to pass on


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper: its tables and figures in its order, and what is promised of the models behind ours."""

    name: str
    title: str
    promise: str
    items: tuple[Item, ...]
    internal: bool = False


def read_paper(name: str, shows: Mapping[str, Show]) -> Paper:
    """Return the paper of ``NAME.yaml`` beside this file; ``shows`` makes the blocks of its items, by their numbers."""
    facts = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    items = tuple(
        Item(**{**one, "parts": tuple(one.get("parts", ())), "show": shows.get(one["number"])})
        for one in facts.pop("items")
    )
    return Paper(name=name, items=items, **facts)


@dataclass(frozen=True, kw_only=True)
class PartTold:
    """What is known of a part."""

    name: str  # of the part
    sizes: str  # in which sizes it is run, beside the paper's
    command: str  # what runs it alone
    results: Path | None = None  # the folder of its results; None where there are none
    absent: str = ""  # then why
    seconds: float | None = None  # its last attempt took; None where nobody measured
    taken: bool = False  # its results are those of an earlier run


@dataclass(frozen=True)
class _Told:
    item: Item
    state: State
    blocks: Sequence[Block]
    part: PartTold | None
    reason: str = ""


def write_reproduction(
    paper: Paper,
    parts: Sequence[PartTold],
    folder: Path,
    *,
    command: str,
    quote: bool = True,
    notes: Sequence[str] = (),
) -> dict[str, State]:
    """Write ``NAME.md``, ``.html``, ``.json``, tables as ``.csv``, and pictures; returns what became of each item."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {part.name: part for part in parts}
    told = [_tell(item, known, folder, quote=quote) for item in paper.items]
    sections = [
        Section("What there is", [_overview(told)]),
        *(Section(one.item.number, _blocks(one)) for one in told),
        Section("How this was made", _made_by(parts, command)),
        *([Section("Notes", [Bullets(list(notes))])] if notes else []),
    ]
    known_parts = [{name: value for name, value in asdict(part).items() if name != "results"} for part in parts]
    facts = {
        "schema": SCHEMA, "paper": paper.name, "title": paper.title, "promise": paper.promise, "command": command,
        "notes": list(notes), "items": [_facts(one) for one in told], "parts": known_parts,
    }  # fmt: skip
    tables = _tables(told)
    for item in paper.items:  # an earlier page may have shown what this one must not
        for stale in {*folder.glob(f"{_slug(item.number)}.csv"), *folder.glob(f"{_slug(item.number)}_[0-9].csv")}:
            if stale.name not in tables:
                stale.unlink()
    Page(
        name=paper.name, title=paper.title, subtitle=today(), lead=[Banner(paper.promise, "caution")],
        sections=sections, facts=facts, tables=tables, owner_only=paper.internal,
    ).write(folder)  # fmt: skip
    return {one.item.number: one.state for one in told}


def _tell(item: Item, parts: Mapping[str, PartTold], folder: Path, *, quote: bool) -> _Told:
    if item.show is None:
        return _Told(item, "not reproduced", [], None, item.why_not)
    reasons = []
    for name in item.parts:
        part = parts.get(name)
        if part is None or part.results is None:
            reasons.append(f"{name}: {part.absent if part else 'there is no such part'}")
            continue
        try:
            blocks = item.show(part.results, folder / f"{_slug(item.number)}.png")
        except DataError as error:
            reasons.append(f"{name} was run without it: {error}")
            continue
        if item.quotes and not quote:
            kept = [block for block in blocks if not isinstance(block, Grid)]
            return _Told(item, "left out", kept, part, "It quotes texts of the data (task.quote=false).")
        return _Told(item, "shown", blocks, part)
    return _Told(item, "left out", [], None, " ".join(reasons))


def _tables(told: Sequence[_Told]) -> dict[str, Grid]:
    """Files of what stands in tables; a further one of the same item has a number."""
    tables: dict[str, Grid] = {}
    for one in told:
        grids = [block for block in one.blocks if isinstance(block, Grid)]
        for place, grid in enumerate(grids, 1):
            tables[f"{_slug(one.item.number)}{f'_{place}' if place > 1 else ''}.csv"] = grid
    return tables


def _slug(number: str) -> str:
    return re.sub(r"\W+", "_", number).strip("_").lower()


def _overview(told: Sequence[_Told]) -> Grid:
    rows = [(one.item.number, one.state, one.reason or (one.part.name if one.part else "")) for one in told]
    return Grid(("in the paper", "here", "by the part, or why not"), rows)


def _blocks(one: _Told) -> list[Block]:
    blocks: list[Block] = [Paragraph(f"The paper: {one.item.says}"), *one.blocks]
    if one.state != "shown":
        blocks.append(Banner(f"{one.state.capitalize()}. {one.reason}", "plain"))
    if one.part is None:
        return blocks
    differs = " ".join(filter(None, (one.item.differs, one.part.sizes)))
    return [*blocks, Paragraph(f"Not as in the paper: {differs}", small=True)] if differs else blocks


def _made_by(parts: Sequence[PartTold], command: str) -> list[Block]:
    rows = []
    for part in parts:
        state = part.absent or ("taken from an earlier run" if part.taken else "run")
        minutes = "–" if part.seconds is None else f"{part.seconds / 60:.1f}"
        rows.append((part.name, state, minutes, part.sizes))
    grid = Grid(("part", "state", "minutes of the last attempt", "sizes"), rows, frozenset({2}))
    commands = "\n".join(part.command for part in parts if part.results is not None)
    blocks: list[Block] = [Paragraph("All of it:"), Code(command), grid]
    return [*blocks, Paragraph("Each part alone:"), Code(commands)] if commands else blocks


def _facts(one: _Told) -> dict[str, Any]:
    return {
        "number": one.item.number, "state": one.state, "part": one.part.name if one.part else None,
        "reason": one.reason, "differs": one.item.differs, "blocks": [_plain(block) for block in one.blocks],
    }  # fmt: skip


def _plain(block: Block) -> dict[str, Any]:
    if isinstance(block, Grid):
        return {"header": list(block.header), "rows": [list(row) for row in block.rows]}
    return (
        {"picture": block.path.name, "says": block.says} if isinstance(block, Picture) else {"text": block.markdown()}
    )
