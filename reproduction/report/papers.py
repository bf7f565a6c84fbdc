"""The papers whose tables and figures can be shown beside ours."""

from __future__ import annotations

from lit_dpret.errors import ConfigurationError
from reproduction.report.paper_002_items import PAPER_002
from reproduction.report.paper_004_items import PAPER_004
from reproduction.report.reproduction import Paper

PAPERS = {paper.name: paper for paper in (PAPER_002, PAPER_004)}


def paper_of(name: str) -> Paper:
    """The paper of a name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in PAPERS:
        raise ConfigurationError(f"task.paper={name} is not one of {', '.join(PAPERS)}.")
    return PAPERS[name]
