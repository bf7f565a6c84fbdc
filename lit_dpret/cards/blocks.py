"""Blocks of a document (paragraphs, tables, banners), with an HTML and a Markdown form each.

The HTML is one file that loads no script, font or image, and its content policy forbids loading any. Every text is
escaped, because it may come from a data set, a file name or a model.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Tone = Literal["danger", "caution", "plain"]

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


class Block(Protocol):
    """A piece of a document that renders itself in both forms."""

    def html(self) -> str: ...
    def markdown(self) -> str: ...


@dataclass(frozen=True)
class Section:
    """A heading and its content."""

    title: str
    blocks: Sequence[Block]


def clean(text: object) -> str:
    """Return ``text`` without characters that no document may contain: control characters, lone surrogates."""
    whole = str(text).encode("utf-8", "replace").decode("utf-8")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", whole)


def esc(text: object) -> str:
    """Escape ``text`` for HTML, in content and in attributes."""
    return html.escape(clean(text), quote=True)


def md(text: object) -> str:
    """Escape ``text`` for one line of Markdown: nothing in it becomes markup, a link or a table border."""
    line = " ".join(clean(text).split())
    line = line.replace("&", "&amp;")
    line = re.sub(r"([\\`*\[\]<>|~])", r"\\\1", line)
    line = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)
    line = re.sub(r"^([#=+-])", r"\\\1", line)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)


@dataclass(frozen=True)
class Paragraph:
    """One or more sentences."""

    text: str
    small: bool = False

    def html(self) -> str:
        return f'<p class="small">{esc(self.text)}</p>' if self.small else f"<p>{esc(self.text)}</p>"

    def markdown(self) -> str:
        return md(self.text)


@dataclass(frozen=True)
class Banner:
    """A warning or a note in a box."""

    text: str
    tone: Tone = "danger"

    def html(self) -> str:
        role = ' role="alert"' if self.tone == "danger" else ""
        return f'<div class="banner {self.tone}"{role}>{esc(self.text)}</div>'

    def markdown(self) -> str:
        word = {"danger": "WARNING", "caution": "Note", "plain": "Note"}[self.tone]
        return f"> **{word}:** {md(self.text)}"


@dataclass(frozen=True)
class ClaimBox:
    """The epsilon with its delta, unit and neighbours."""

    epsilon: str
    facts: Sequence[tuple[str, str]]
    guaranteed: bool

    def html(self) -> str:
        value = f'<span class="value{"" if self.guaranteed else " none"}">{esc(self.epsilon)}</span>'
        cells = [f'<div class="first"><span class="label">epsilon (ε)</span>{value}</div>']
        cells += [
            f'<div><span class="label">{esc(name)}</span><span class="value">{esc(text)}</span></div>'
            for name, text in self.facts
        ]
        return f'<div class="claim">{"".join(cells)}</div>'

    def markdown(self) -> str:
        rest = "".join(f", {md(name)} = {md(text)}" for name, text in self.facts)
        return f"**epsilon = {md(self.epsilon)}**{rest}"


@dataclass(frozen=True)
class Bullets:
    """An unordered list."""

    items: Sequence[str]

    def html(self) -> str:
        return f"<ul>{''.join(f'<li>{esc(item)}</li>' for item in self.items)}</ul>"

    def markdown(self) -> str:
        return "\n".join(f"- {md(item)}" for item in self.items)


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    rows: Sequence[tuple[str, object]]

    def html(self) -> str:
        rows = "".join(f'<tr><th scope="row">{esc(name)}</th><td>{esc(value)}</td></tr>' for name, value in self.rows)
        return f'<table class="facts"><tbody>{rows}</tbody></table>'

    def markdown(self) -> str:
        return Grid(("", ""), [(name, value) for name, value in self.rows]).markdown()


@dataclass(frozen=True)
class Grid:
    """A table with a header; ``numeric`` columns are right-aligned, a ``narrow`` table is as wide as its texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    numeric: frozenset[int] = frozenset()
    narrow: bool = False

    def html(self) -> str:
        def cell(tag: str, column: int, value: object) -> str:
            kind = ' class="num"' if column in self.numeric else ""
            return f"<{tag}{kind}>{esc(value)}</{tag}>"

        head = "".join(cell("th", column, name) for column, name in enumerate(self.header))
        body = "".join(
            "<tr>" + "".join(cell("td", column, value) for column, value in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        width = ' class="narrow"' if self.narrow else ""
        return f'<div class="scroll"><table{width}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def markdown(self) -> str:
        rules = ["---:" if column in self.numeric else "---" for column in range(len(self.header))]
        lines = [[md(name) for name in self.header], rules, *([md(value) for value in row] for row in self.rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def csv(self) -> str:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.header, *self.rows])
        return text.getvalue()


@dataclass(frozen=True)
class Checks:
    """Statements, each True, False or ``unverified``."""

    rows: Sequence[tuple[bool | str, str]]

    def html(self) -> str:
        cells = [(*_MARKS[holds], esc(text)) for holds, text in self.rows]
        rows = "".join(f'<tr><td class="mark {kind}">{mark}</td><td>{text}</td></tr>' for kind, mark, text in cells)
        return f"<table><tbody>{rows}</tbody></table>"

    def markdown(self) -> str:
        return "\n".join(f"- **{_MARKS[holds][1]}:** {md(text)}" for holds, text in self.rows)


_MARKS = {True: ("yes", "✓ holds"), False: ("no", "✗ does not hold"), "unverified": ("open", "? not verified")}


@dataclass(frozen=True)
class Code:
    """A command to type."""

    text: str

    def html(self) -> str:
        return f"<pre>{esc(self.text)}</pre>"

    def markdown(self) -> str:
        return "\n".join("    " + line for line in clean(self.text).splitlines())


def to_html(title: str, subtitle: str, lead: Sequence[Block], sections: Sequence[Section], footer: str = "") -> str:
    """Return one self-contained HTML page."""
    body = "".join(block.html() for block in lead)
    for section in sections:
        body += f"<section><h2>{esc(section.title)}</h2>{''.join(block.html() for block in section.blocks)}</section>"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{esc(title)}</title><style>\n{_STYLE}</style></head><body><main>"
        f'<header><h1>{esc(title)}</h1><p class="sub">{esc(subtitle)}</p></header>{body}'
        f'<footer class="small">{esc(footer)}</footer></main></body></html>\n'
    )


def to_markdown(title: str, subtitle: str, lead: Sequence[Block], sections: Sequence[Section], footer: str = "") -> str:
    """Return the document in Markdown."""
    parts = [f"# {md(title)}", md(subtitle), *(block.markdown() for block in lead)]
    for section in sections:
        parts += [f"## {md(section.title)}", *(block.markdown() for block in section.blocks)]
    return "\n\n".join(part for part in [*parts, md(footer)] if part) + "\n"
