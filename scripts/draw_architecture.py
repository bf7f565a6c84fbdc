"""Draw the packages and their imports: ``python scripts/draw_architecture.py`` writes the picture.

The floors follow from the imports alone: a package is one floor above the highest that it imports. Arrows that other
arrows imply are left out. `tests/test_architecture.py` compares the committed picture with the drawn one.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "architecture.svg"
STATISTICS = "audit.statistics"
TOP = ("callbacks", "datamodules", "reproduction")  # folders at the top of the repository
WIDTH, BOX, HEIGHT, FLOOR = 1180, 168, 76, 132
_CELL = 190


def rooms() -> dict[str, Path]:
    inside = {path.name: path for path in sorted((ROOT / "lit_dpret").iterdir()) if path.is_dir()}
    found = {name: path for name, path in inside.items() if (path / "__init__.py").exists() and not path.is_symlink()}
    # The statistics of an audit are on the ground floor, below the attacks that use them, so they count as a package.
    return found | {name: ROOT / name for name in TOP} | {STATISTICS: ROOT / "lit_dpret" / "audit" / "statistics"}


def first_sentence(folder: Path) -> str:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("`", "")


def imports(found: Mapping[str, Path]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for name, folder in found.items():
        seen: set[str] = set()
        for path in folder.rglob("*.py"):
            if name == "audit" and path.is_relative_to(found[STATISTICS]):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    parts = (node.module or "").removeprefix("lit_dpret.").split(".")
                    seen.add(STATISTICS if parts[:2] == STATISTICS.split(".") else parts[0])
        edges[name] = seen & set(found) - {name}
    return edges


def floors(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the number of packages below each package, along the longest path of imports.

    Raises:
        ValueError: Packages import each other in a cycle.
    """
    height: dict[str, int] = {}

    def climb(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise ValueError(f"{' -> '.join([*above[above.index(name) :], name])} is a cycle.")
        if name not in height:
            height[name] = max((climb(below, (*above, name)) + 1 for below in sorted(edges[name])), default=0)
        return height[name]

    for name in edges:
        climb(name, ())
    return height


def needed(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    def reached(names: Iterable[str]) -> set[str]:
        return {deeper for name in names for deeper in edges[name] | reached(edges[name])}

    return {name: below - reached(below) for name, below in edges.items()}


def draw() -> str:
    found = rooms()
    edges = imports(found)
    height = floors(edges)
    top = max(height.values())
    place: dict[str, tuple[float, float]] = {}
    for floor in range(top + 1):
        here = sorted(name for name in found if height[name] == floor)
        left = (WIDTH - _CELL * len(here)) / 2 + (_CELL - BOX) / 2
        for column, name in enumerate(here):
            place[name] = (left + column * _CELL, 20 + (top - floor) * FLOOR)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {(top + 1) * FLOOR + 10}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#8a94a6"/></marker>',
    ]
    for name, below in sorted(needed(edges).items()):
        x, y = place[name][0] + BOX / 2, place[name][1] + HEIGHT
        for target in sorted(below):
            u, v = place[target][0] + BOX / 2, place[target][1]
            bend = (v - y) / 2
            lines.append(
                f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v - 2:.0f}" '
                'fill="none" stroke="#8a94a6" stroke-width="1.2" marker-end="url(#a)"/>'
            )
    for name, (x, y) in sorted(place.items()):
        lines.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#eef3fb" stroke="#3b5b92"/>'
            f'<text x="{x + 8:.0f}" y="{y + 17:.0f}" font-size="13" font-weight="bold" fill="#1d2b44">{name}</text>'
        )
        for row, text in enumerate(textwrap.wrap(first_sentence(found[name]), 31)[:4]):
            at = f'x="{x + 8:.0f}" y="{y + 32 + 12 * row:.0f}"'
            lines.append(f'<text {at} font-size="9.5" fill="#33415c">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
