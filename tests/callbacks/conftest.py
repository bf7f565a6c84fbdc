"""One server of processes for all tests of several ranks: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_runs import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()
