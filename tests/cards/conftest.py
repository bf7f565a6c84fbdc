from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from card_chain import Chain, make_chain

OWNER = "home-of-the-owner"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain whose generator registered a protocol and whose settings were chosen on private data, to be read."""
    folder = tmp_path_factory.mktemp(OWNER)
    protocol = folder / "protocol.md"
    protocol.write_text("1000 canaries", encoding="utf-8")
    return make_chain(folder / "runs", card={"audit_protocols": [protocol], "tuning_data": "private"})


@pytest.fixture
def chain(made: Chain, tmp_path: Path) -> Chain:
    """A copy of its own, to be broken."""
    return Chain(shutil.copytree(made.root, tmp_path / "runs"))
