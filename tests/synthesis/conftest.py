"""A saved generator with a card, and a data set that it wrote in one go."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_generator import PASSAGES, SETTINGS, lively_generator, write_parent_card

from lit_dpret.synthesis.writer import synthesize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lively_generator().save_model(tmp_path_factory.mktemp("generator") / "g")
    write_parent_card(folder)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set made in one go."""
    return synthesize(source, PASSAGES, tmp_path_factory.mktemp("whole") / "set", **SETTINGS)
