"""Draw the results table and the card of the quickstart: ``python scripts/draw_quickstart.py`` writes the picture.

Given a run folder, ``python scripts/draw_quickstart.py runs/quickstart`` first copies the numbers from there into
``docs/assets/quickstart.json``. A test compares the committed picture with the drawn one.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
FACTS, PICTURE = ASSETS / "quickstart.json", ASSETS / "quickstart.svg"
METRICS, CARD = ("nDCG@10", "Recall@10"), "privacy_card.json"
WIDTH, MARGIN, ROW = 1000, 28, 44
BAR, BAR_WIDTH, BOX = 330, 300, 284
INK, SOFT, LINE, BLUE, GREY, PANEL = "#1c2430", "#56606f", "#d5dbe3", "#0072B2", "#9aa3af", "#f4f6f9"


def taken_from(run: Path) -> dict[str, Any]:
    def read(*place: str) -> Any:
        return json.loads(run.joinpath(*place).read_text(encoding="utf-8"))

    results, card, generator = read("results.json"), read("synthetic", "data", CARD), read("generator", CARD)
    counts = read("synthetic", "data", "generation.json")["counts"]
    return {
        "rows": [
            {"system": row["system"], "privacy": row["privacy"], **{name: row["metrics"][name] for name in METRICS}}
            for row in results
        ],
        "claim": {name: card["claim"][name] for name in ("epsilon", "delta", "unit", "neighbours", "protected")},
        "not_covered": len(card["not_covered"]),
        "training": [
            generator["claim"]["statement"].partition(" Batches were drawn ")[0],
            f"The generator then wrote {counts['queries']} queries for {counts['passages']} public passages.",
        ],
        "created": card["created"],
    }


def draw(facts: Mapping[str, Any]) -> str:
    rows = facts["rows"]
    top = 82
    height = top + ROW * len(rows) + 30 + BOX + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="Helvetica, Arial, sans-serif" font-size="14">',
        f"<title>{escape(_about(facts))}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fff" stroke="{LINE}"/>',
        _text(MARGIN, 36, "What the quickstart ends with", size=19, bold=True),
        _text(MARGIN, 62, "Retrieval on InsuranceQA, test queries", colour=SOFT),
        _text(BAR, 62, "nDCG@10, with its 95 % interval", colour=SOFT),
        _text(BAR + BAR_WIDTH + 76, 62, "guarantee for those who asked", colour=SOFT),
    ]
    longest = max(row["nDCG@10"]["high"] for row in rows)
    for place, row in enumerate(rows):
        parts += _row(row, top + ROW * place, longest)
    parts += _card(facts, top + ROW * len(rows) + 30)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(row: Mapping[str, Any], y: float, longest: float) -> list[str]:
    scale, middle, value = BAR_WIDTH / longest, y + ROW / 2, row["nDCG@10"]
    ends = [BAR + value[name] * scale for name in ("low", "mean", "high")]
    private = row["privacy"].startswith("epsilon")
    return [
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="{LINE}"/>',
        _text(MARGIN, middle + 5, row["system"], bold=private),
        f'<rect x="{BAR}" y="{y + 12}" width="{ends[1] - BAR:.1f}" height="{ROW - 24}" '
        f'fill="{BLUE if private else GREY}"/>',
        f'<path d="M{ends[0]:.1f} {middle}H{ends[2]:.1f}m0 -5v10M{ends[0]:.1f} {middle - 5}v10" stroke="{INK}" '
        'stroke-width="1.5" fill="none"/>',
        _text(BAR + BAR_WIDTH + 16, middle + 5, f"{value['mean']:.3f}", bold=private),
        *(
            _text(BAR + BAR_WIDTH + 76, middle + 5 + 17 * (line - (len(lines) - 1) / 2), text, size=12.5, colour=SOFT)
            for lines in [textwrap.wrap(_promise(row["privacy"]), 42)[:2]]
            for line, text in enumerate(lines)
        ),
    ]


def _promise(text: str) -> str:
    for long, short in (("neighbours = zero_out", "zero-out"), (" = ", " "), ("epsilon", "ε"), ("delta", "δ")):
        text = text.replace(long, short)
    return text


def _card(facts: Mapping[str, Any], y: float) -> list[str]:
    claim = facts["claim"]
    found = [
        f'<rect x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{BOX}" rx="8" fill="{PANEL}" '
        f'stroke="{LINE}"/>',
        _text(MARGIN + 20, y + 32, "The card of the synthetic queries", size=16, bold=True),
        _text(
            MARGIN + 20, y + 92, f"ε = {math.ceil(1000 * claim['epsilon']) / 1000:.3f}", size=44, bold=True, colour=BLUE
        ),
        _text(MARGIN + 20, y + 122, f"δ = {claim['delta']:.3g}, unit = {claim['unit']},", colour=SOFT),
        _text(MARGIN + 20, y + 142, f"neighbours = {claim['neighbours']}", colour=SOFT),
        _text(MARGIN + 20, y + 178, "recomputed from the ledger of what ran:", size=13, colour=SOFT),
        _text(MARGIN + 20, y + 198, "lit-dpret verify runs/quickstart/synthetic/data", size=12, mono=True),
    ]
    left = BAR + 130
    line = y + 32
    for head, texts in (
        ("Protected", claim["protected"]),
        ("How", facts["training"]),
        (
            "Not covered",
            [f"{facts['not_covered']} points, listed on the card: passages, people with several queries, …"],
        ),
    ):
        found.append(_text(left, line, head, bold=True))
        for text in texts:
            for wrapped in textwrap.wrap(text, 66, initial_indent="• ", subsequent_indent="  "):
                line += 19
                found.append(_text(left + (11 if wrapped.startswith("  ") else 0), line, wrapped.strip(), size=13))
        line += 30
    return found


def _text(
    x: float, y: float, text: str, *, size: float = 14, bold: bool = False, colour: str = INK, mono: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    family = ' font-family="Menlo, Consolas, monospace"' if mono else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{weight}{family}>{escape(text)}</text>'


def _about(facts: Mapping[str, Any]) -> str:
    found = [f"{row['system']}: nDCG@10 {row['nDCG@10']['mean']:.3f}, {row['privacy']}" for row in facts["rows"]]
    return f"Results and privacy card of the quickstart. {'; '.join(found)}."


def main(arguments: Sequence[str]) -> None:
    if arguments:
        facts = json.dumps(taken_from(Path(arguments[0])), indent=1, ensure_ascii=False)
        FACTS.write_text(facts + "\n", encoding="utf-8")
    PICTURE.write_text(draw(json.loads(FACTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
