"""`task=hard_negatives`: the nearest sentences that are not labelled answers, and who may read them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import WORDS
from tiny_models import tiny_bert, words_tokenizer
from tiny_tasks import parts

from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, write_silos
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError
from lit_dpret.tasks import HardNegatives


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder and a silo whose second passage repeats the answer of its question."""
    root = tmp_path_factory.mktemp("made")
    tower = TextEncoder(
        tiny_bert(num_hidden_layers=1), words_tokenizer(WORDS[:40]), Contract(query_max_length=8, passage_max_length=8)
    )
    save_sentence_transformer(root / "encoder", tower)
    texts = {f"s{i}": f"{WORDS[i]} {WORDS[i + 1]}" for i in range(8)} | {"again": f"{WORDS[0]}  {WORDS[1]}"}
    silo = Silo(
        name="one",
        passages={"p": ""},
        sentences=texts,
        passage_of=dict.fromkeys(texts, "p"),
        queries=[
            SiloQuery("q", f"{WORDS[0]} {WORDS[1]}", ("s0", "s5"), "train"),
            SiloQuery("d", "b", ("s1",), "dev"),
            SiloQuery("t", "c", ("s2",), "test"),
        ],
    )
    write_silos(root / "silos", [silo], facts={"source": "test"})
    return root


def task(made: Path, **settings: Any) -> HardNegatives:
    small: dict[str, Any] = {"whose": "public", "questions": 1, "min_free_mb": 1}
    return HardNegatives(**{"silo": made / "silos/clients/one", "encoder": made / "encoder"} | small | settings)


def test_negatives_are_the_best_that_are_no_answer_nor_repeat_one(made: Path, tmp_path: Path) -> None:
    task(made, negatives=3).run(parts(tmp_path, run_dir=tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "hard_negatives.json").read_text())
    assert found["data"] == "one" and len(found["data_sha256"]) == 64
    (case,) = found["cases"]
    assert case["answer"] == f"{WORDS[0]} {WORDS[1]}"  # of the two the one that says what is asked
    assert len(case["negatives"]) == 3 and list(case["scores"]) == sorted(case["scores"], reverse=True)
    assert {" ".join(text.split()) for text in case["negatives"]}.isdisjoint(
        {f"{WORDS[0]} {WORDS[1]}", f"{WORDS[5]} {WORDS[6]}"}
    )
    page = (tmp_path / "run" / "hard_negatives.md").read_text()
    assert "| Hard negative 3 |" in page and case["question"] in page


def test_private_questions_go_to_a_file_of_their_owner(made: Path, tmp_path: Path) -> None:
    task(made, whose="private").run(parts(tmp_path, run_dir=tmp_path / "run"))
    assert not (tmp_path / "run" / "hard_negatives.json").exists()
    path = tmp_path / "run" / "internal_hard_negatives.md"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "Internal" in path.read_text()


def test_more_questions_than_there_are_is_refused_before_anything_is_encoded(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.questions=2"):
        task(made, questions=2, encoder=tmp_path / "none").run(parts(tmp_path, run_dir=tmp_path / "run"))
