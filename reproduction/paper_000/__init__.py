"""`task=paper_000`: every table of paper 000 again, ours beside the paper's. One file for each part."""

from reproduction.paper_000.task import Paper000

__all__ = ["Paper000"]
