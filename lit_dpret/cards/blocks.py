"""Blocks of a document (paragraphs, tables, banners), with an HTML and a Markdown form each.

A document is a list of sections, a section a list of blocks, and each block can say itself in HTML
and in Markdown, so that the two never tell different stories. The HTML is one file: no script, no
font and no image is loaded from anywhere, and a content policy forbids it. Every text is escaped;
it may come from a data set, a file name or a model.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Tone = Literal["danger", "caution", "plain"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #56606f; --paper: #fff; --panel: #f4f6f9; --line: #d5dbe3;
  --accent: #1f5fa8; --danger: #a61b1b; --danger-bg: #fdecec; --caution: #7a4b00; --caution-bg: #fff4dc;
  --good: #1b6b3a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #a9b4c2; --paper: #14181e; --panel: #1d232c;
  --line: #37414e; --accent: #79b2f2; --danger: #ff9d9d; --danger-bg: #421b1e; --caution: #f3c568;
  --caution-bg: #3a2e14;  --good: #7fd6a2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.2rem 1.4rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .2rem; }
h2 { font-size: 1.18rem; margin: 2.3rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
p { margin: .55rem 0; } .sub, .small { color: var(--soft); } .small { font-size: .88rem; }
ul { margin: .4rem 0; padding-left: 1.3rem; } li { margin: .25rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; margin: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .42rem .9rem .42rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
th.num, td.num { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td.num { white-space: nowrap; }
table.narrow { width: auto; } table.narrow th, table.narrow td { padding-right: 2.2rem; }
table.samples { table-layout: fixed; } table.samples ul { margin: 0; }
table.facts th { width: 15rem; color: var(--soft); font-weight: 500; }
.scroll { overflow-x: auto; width: min-content; min-width: 100%; max-width: min(100vw - 2.8rem, 50vw + 28.2rem); }
.scroll th:not(.num), .scroll td:not(.num) { min-width: 9rem; overflow-wrap: break-word; }
.banner { margin: 1rem 0; padding: .7rem 1rem; border-radius: .4rem; border-left: .35rem solid var(--line);
  background: var(--panel); }
.banner.danger { border-color: var(--danger); background: var(--danger-bg); color: var(--danger); font-weight: 600; }
.banner.caution { border-color: var(--caution); background: var(--caution-bg); color: var(--caution); }
.claim { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; align-items: flex-end; margin: 1.2rem 0;
  padding: 1.1rem 1.3rem;  background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; }
.claim div { min-width: 5rem; } .claim .label { display: block; color: var(--soft); font-size: .8rem; }
.claim .value { font-size: 1.1rem; font-weight: 600; } .claim .first .value { font-size: 2.3rem; line-height: 1.1; }
.claim .none { color: var(--danger); }
.mark { white-space: nowrap; font-weight: 600; padding-right: 1rem; } .mark.yes { color: var(--good); }
.mark.no { color: var(--danger); } .mark.open { color: var(--caution); }
pre, code { font: .88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .4rem;
  padding: .7rem .9rem; white-space: pre-wrap; }
.text { unicode-bidi: isolate; white-space: pre-line; } footer { margin-top: 3rem; }
figure { margin: .8rem 0; } svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --panel: #f6f6f6; --line: #bbb; --accent: #1f5fa8;
  --danger: #a61b1b; --danger-bg: #fff; --caution: #7a4b00; --caution-bg: #fff; --good: #1b6b3a; }
  main { max-width: none; padding: 0; } body { font-size: 10.5pt; } h2 { break-after: avoid; }
  tr, .banner, .claim, figure, .sample { break-inside: avoid; } .scroll { overflow: visible; } }
"""


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
        rest = ", ".join(f"{md(name)} = {md(text)}" for name, text in self.facts)
        return f"**epsilon = {md(self.epsilon)}**, {rest}"


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
        """Return the table for a spreadsheet."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.header, *self.rows])
        return text.getvalue()


@dataclass(frozen=True)
class Checks:
    """Statements, each True, False or not verified."""

    rows: Sequence[tuple[object, str]]

    def html(self) -> str:
        rows = "".join(
            f'<tr><td class="mark {_mark(holds)[0]}">{_mark(holds)[1]}</td><td>{esc(text)}</td></tr>'
            for holds, text in self.rows
        )
        return f"<table><tbody>{rows}</tbody></table>"

    def markdown(self) -> str:
        return "\n".join(f"- **{_mark(holds)[1]}:** {md(text)}" for holds, text in self.rows)


def _mark(holds: object) -> tuple[str, str]:
    if holds is True:
        return "yes", "✓ holds"
    return ("no", "✗ does not hold") if holds is False else ("open", "? not verified")


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
        f"<title>{esc(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<header><h1>{esc(title)}</h1><p class="sub">{esc(subtitle)}</p></header>{body}'
        f'<footer class="small">{esc(footer)}</footer></main></body></html>\n'
    )


def to_markdown(title: str, subtitle: str, lead: Sequence[Block], sections: Sequence[Section], footer: str = "") -> str:
    """Return the document in Markdown."""
    parts = [f"# {md(title)}", md(subtitle), *(block.markdown() for block in lead)]
    for section in sections:
        parts += [f"## {md(section.title)}", *(block.markdown() for block in section.blocks)]
    return "\n\n".join(part for part in [*parts, md(footer)] if part) + "\n"
