"""The round trip of the pipeline is a choice among released queries, and is held to the same rule as a filter."""

from __future__ import annotations

from pathlib import Path

import pytest
from cards import Run, make_plan
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import retriever, write_log, write_synthetic

from lit_dpret.cards.card import subject_of, write_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import PrivateDataError
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.synthesis.filters import load_released
from lit_dpret.tasks.pipeline_stages import KEPT, check_round_trip


def test_an_encoder_of_other_private_training_takes_no_part_in_the_round_trip(tmp_path: Path) -> None:
    """The pipeline trains under privacy=none here, so that no check of a fit looks at where the encoder is from."""
    released = load_released(write_synthetic(tmp_path / "made", PairsDataModule(folder=write_log(tmp_path / "log"))))
    folder = tmp_path / "private"
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    save_sentence_transformer(folder, tower, tower)
    files = [path for path in folder.rglob("*") if path.is_file()]
    plan, subject = make_plan(), subject_of("weights", "FrozenDualEncoder", files, root=folder)
    write_card(Run(tmp_path / "other", plan).train().card(plan=plan, subject=subject), folder)
    model = retriever(privacy=NoPrivacy(), encoder=str(folder), max_passage_length=10, max_query_length=8)
    with pytest.raises(PrivateDataError, match=r"model\.encoder=.*private data of its own"):
        check_round_trip(model, released, tmp_path, k=3, seed=0)
    assert not (tmp_path / KEPT).exists()
