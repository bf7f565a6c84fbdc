"""A report as files: the same content as HTML, Markdown and data, with a spreadsheet for each table."""

from __future__ import annotations

import base64
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from lit_dpret.cards.blocks import Block, Section, esc, md, to_html, to_markdown
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.ledger.chain import today


def render(template: str, facts: Mapping[str, Any]) -> str:
    """Fill in a template of ``report/templates``; a missing fact is an error."""
    return str(_templates().get_template(template).render(facts))


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("lit_dpret.report"), undefined=StrictUndefined, extensions=["jinja2.ext.do"],
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip  # Markdown for its reader; values that may contain markup pass through the filter md
    found.filters |= {"n": "{:,}".format, "md": md, "interval": "{0[value]:.3f} [{0[low]:.3f}, {0[high]:.3f}]".format}
    found.filters |= {"delta": show_delta, "epsilon": show_epsilon, "wrap": wrapped}
    found.globals["table"] = aligned
    return found


def aligned(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table that is also readable on a console: first column left, others right."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join([row[0].ljust(first), *map(str.rjust, row[1:], others)])} |" for row in lines)


def wrapped(text: str, first: str = "") -> str:
    """Wrap a text into lines of at most 80 columns, aligned after ``first``."""
    return textwrap.fill(
        text, 80, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def shortened(text: str, most: int) -> str:
    """Return a text, or its first ``most`` characters."""
    return text if len(text) <= most else text[:most].rstrip() + " …"


class Sheet(Protocol):
    """An object with a spreadsheet form."""

    def csv(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report before it is written."""

    name: str
    title: str
    sections: Sequence[Section]
    facts: Mapping[str, Any]
    lead: Sequence[Block] = ()
    subtitle: str | None = None
    tables: Mapping[str, Sheet] = field(default_factory=dict)
    owner_only: bool = True

    def markdown(self) -> str:
        """Return the content of ``NAME.md``."""
        return to_markdown(*self._parts())

    def _parts(self) -> tuple[str, str, Sequence[Block], Sequence[Section]]:
        subtitle = f"lit-dpret report, {today()}" if self.subtitle is None else self.subtitle
        return self.title, subtitle, self.lead, self.sections

    def write(self, folder: Path) -> dict[str, Path]:
        """Write ``NAME.html``, ``NAME.md``, ``NAME.json`` and the tables; return the paths by file name."""
        texts = {
            f"{self.name}.html": to_html(*self._parts()),
            f"{self.name}.md": self.markdown(),
            f"{self.name}.json": json.dumps(self.facts, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        }
        texts |= {name: table.csv() for name, table in self.tables.items()}
        return {name: write_whole(folder / name, text, owner_only=self.owner_only) for name, text in texts.items()}


@dataclass(frozen=True)
class Picture:
    """A PNG or an SVG: embedded in HTML, a separate file next to the Markdown."""

    path: Path
    says: str

    def html(self) -> str:
        data = base64.b64encode(self.path.read_bytes()).decode()
        kind = "svg+xml" if self.path.suffix == ".svg" else "png"
        image = f'<img src="data:image/{kind};base64,{data}" alt="{esc(self.says)}" style="max-width:100%">'
        return f"<figure>{image}</figure>"

    def markdown(self) -> str:
        return f"![{md(self.says)}]({self.path.name})"


@dataclass(frozen=True)
class Drawing:
    """An SVG element drawn by this package."""

    svg: str

    def html(self) -> str:
        return f'<figure><div class="scroll">{self.svg}</div></figure>'

    def markdown(self) -> str:
        return ""


def copied_picture(source: Path, path: Path, says: str) -> Picture:
    """Copy the picture of another report to ``path``."""
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}.") from error
    return Picture(write_whole(path, content, owner_only=True), says)


@dataclass(frozen=True)
class Written:
    """The files of a report, and its lines for the console."""

    files: tuple[Path, ...]
    lines: tuple[str, ...]


INTERNAL = (
    "Internal: computed from private {what}, and covered by no guarantee. Keep it where the {what} are kept, and put "
    "nothing from it on a card."
)


def write_short(
    folder: Path, name: str, title: str, facts: Mapping[str, Any], lines: Sequence[str], *, internal: str
) -> Written:
    """Write a short report without a page: ``NAME.json`` for programs and ``NAME.md`` for people."""
    lines = [f"# {title}", "", *([f"**{internal}**", ""] if internal else []), *lines]
    stem = folder / (f"internal_{name}" if internal else name)
    texts = {".json": json.dumps(facts, indent=2, allow_nan=False), ".md": "\n".join(lines)}
    files = tuple(
        write_whole(stem.with_name(f"{stem.name}{ending}"), f"{text}\n", owner_only=bool(internal))
        for ending, text in texts.items()
    )
    if internal:  # an earlier report that treated the same data as public could still be passed on
        for file in files:
            file.with_name(file.name.removeprefix("internal_")).unlink(missing_ok=True)
    return Written(files, (*lines, "", *(f"written: {path}" for path in files)))
