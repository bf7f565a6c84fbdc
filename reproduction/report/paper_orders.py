"""What a paper says is better than what, and whether it is so here: orders, since levels cannot be compared."""

from __future__ import annotations

from dataclasses import dataclass

from reproduction.report.paper_table import PaperRow


@dataclass(frozen=True)
class Order:
    """A pair of rows of which the first one is said to be better.

    Args:
        better, worse: The rows, with ours and the paper's numbers where there are any.
        paper: Whether the paper's numbers are what says so; else it is a question of ours.
    """

    better: PaperRow
    worse: PaperRow
    paper: bool = True

    def told(self, metric: str, title: str) -> str | None:
        """The order in words; None where ours has not both.

        Both rows are judged on the same queries, so that overlapping intervals neither show an order nor exclude one.
        Nor do they know of the luck of a run: `experiment=compare_modes` tests differences over queries and runs.
        """
        ours, other = self.better.ours.get(metric), self.worse.ours.get(metric)
        if ours is None or other is None:
            return None
        theirs = ""
        a, b = self.better.paper.get(metric), self.worse.paper.get(metric)
        if self.paper and isinstance(a, float) and isinstance(b, float):
            theirs = f" The paper: {a:.4f} against {b:.4f}."
        if ours.mean == other.mean:
            verdict = "equal here"
        else:
            verdict = "so here" if ours.mean > other.mean else "the other way round here"
        apart = ours.low > other.high or other.low > ours.high
        sure = "and the intervals do not overlap" if apart else "and the intervals overlap, which decides nothing"
        return (
            f"{_name(self.better)} above {_name(self.worse)}, in {title}: {verdict}, {ours.mean:.3f} against "
            f"{other.mean:.3f}, {sure}.{theirs}"
        )


def _name(row: PaperRow) -> str:
    return row.source if row.epsilon == "public only" else f"{row.source} at ε = {row.epsilon}"
