"""How large each client is: the numbers of the paper's Figure 3, as a table."""

from __future__ import annotations

from collections.abc import Mapping

_COLUMNS = ("passages", "sentences", "train", "dev", "test")


def statistics_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """A Markdown table of clients, largest first, with totals; private where the counts are.

    Example:
        >>> print(statistics_table({"a": {"passages": 2, "sentences": 9, "train": 4, "dev": 1, "test": 1}}))
        | client | passages | sentences | train | dev | test |
        | --- | ---: | ---: | ---: | ---: | ---: |
        | a | 2 | 9 | 4 | 1 | 1 |
        | all | 2 | 9 | 4 | 1 | 1 |
    """
    rows = sorted(counts.items(), key=lambda item: (-item[1].get("train", 0), item[0]))
    total = {column: sum(found.get(column, 0) for _, found in rows) for column in _COLUMNS}
    lines = [f"| client | {' | '.join(_COLUMNS)} |", f"| --- |{' ---: |' * len(_COLUMNS)}"]
    for name, found in [*rows, ("all", total)]:
        lines.append(f"| {name} | {' | '.join(str(found.get(column, 0)) for column in _COLUMNS)} |")
    return "\n".join(lines)
