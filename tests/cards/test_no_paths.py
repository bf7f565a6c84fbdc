"""Files that are handed on do not tell where on its owner's machine they were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain
from stand_ins import Regression, dp, fit

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.tasks.index_folder import IndexFolder, told_from

OWNER = "home-of-the-owner"


def test_no_card_ledger_set_model_or_index_tells_where_it_was_made(made: Chain) -> None:
    files = [path for path in made.root.rglob("*") if path.is_file()]
    # Lightning keeps the place of each checkpoint inside it; they are for going on, and a model folder is handed on.
    telling = [path.name for path in files if OWNER.encode() in path.read_bytes() and path.suffix != ".ckpt"]
    assert len(files) > 30 and not telling


def test_an_index_finds_its_encoder_where_it_was_left(made: Chain, tmp_path: Path) -> None:
    assert IndexFolder(made.index).encoder_folder == str((made.encoder / "model").resolve())
    assert IndexFolder(made.index).query_encoder().dim == IndexFolder(made.index).manifest.dim
    assert told_from(tmp_path, "org/name") == "org/name"
    assert told_from("/somewhere/else", tmp_path) == tmp_path.name


@pytest.mark.parametrize(
    ("pretrained", "told"), [("org/name", "org/name"), (None, "unstated"), (f"/{OWNER}/models/small", "small")]
)
def test_a_card_names_a_model_by_its_hub_or_by_its_folder_alone(pretrained: Any, told: str, tmp_path: Path) -> None:
    module = Regression(privacy=dp(tmp_path))
    module.pretrained = pretrained
    fit(tmp_path / "run", module, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    card = read_card(tmp_path / "run")
    assert card["pretraining"]["model"] == told
    assert OWNER not in (tmp_path / "run" / "privacy_card.json").read_text()
