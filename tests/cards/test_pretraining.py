"""A card says what public training text held of the data, where that was counted on public texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from memoriser import Memoriser, large_log
from tiny_tasks import trainer

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.file import read_card
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import DPSGD

SCHEMA = json.loads((Path(__file__).parents[2] / "lit_dpret/cards/privacy_card.schema.json").read_text("utf-8"))
SHARE = {"exact": {"positives": 2, "total": 10, "value": 0.2, "interval": [0.06, 0.51]}}


def counted(folder: Path, **changes: Any) -> Path:
    facts = {"corpus": {"name": "sample.jsonl", "documents": 90, "words": 4000}, "sampled": None, "split": "dev",
             "whose": "public", "not_covered": None, "found": {"queries": SHARE, "passages": SHARE}}  # fmt: skip
    path = folder / "pretraining_overlap.json"
    path.write_text(json.dumps(facts | changes), encoding="utf-8")
    return path


def test_what_was_counted_on_public_texts_stands_on_the_card(tmp_path: Path) -> None:
    run = tmp_path / "run"
    callbacks = [PrivacyAccountant(run_dir=run), PrivacyCard(run_dir=run, pretraining_overlap=counted(tmp_path))]
    module = Memoriser(DPSGD(eps=2.0, delta=1e-5, noise_multiplier=2.0, secret_file=tmp_path / "secret"))
    trainer(max_steps=1, logger=False, callbacks=callbacks, default_root_dir=str(run)).fit(module, large_log(tmp_path))
    card = read_card(run)
    assert card["pretraining"]["overlap_check"]["found"]["queries"] == SHARE
    assert not list(Draft202012Validator(SCHEMA).iter_errors(card))
    assert "sample.jsonl" in (run / "privacy_card.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("changes", [{"whose": "private"}, {"not_covered": "Overlap of private queries"}])
def test_shares_of_private_queries_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="shares of private queries"):
        PrivacyCard(pretraining_overlap=counted(tmp_path, **changes))


@pytest.mark.parametrize("text", ["no json", "{}", "[]", None])
def test_another_file_is_refused_before_the_run(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"pretraining_overlap=.*cannot be read"):
        PrivacyCard(pretraining_overlap=path)
