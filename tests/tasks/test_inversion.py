"""`task=inversion` on a random encoder of forty words, and `task=hard_negatives` on a silo."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import WORDS
from tiny_models import tiny_bert, words_tokenizer
from tiny_tasks import parts

from lit_dpret.audit.attacks.decoder import new_language_model
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, write_silos
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.tasks import HardNegatives, Inversion
from lit_dpret.tasks.parts import Parts

pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder, and the same behind a secret rotation."""
    root = tmp_path_factory.mktemp("encoders")
    contract = Contract(query_max_length=8, passage_max_length=8)
    tower = TextEncoder(tiny_bert(num_hidden_layers=1), words_tokenizer(WORDS[:40]), contract)
    rotation = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.orthogonal_(rotation.weight)
    save_sentence_transformer(root / "plain", tower)
    save_sentence_transformer(root / "rotated", tower.changed(projection=rotation))
    return {name: root / name for name in ("plain", "rotated")}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    made = {" ".join(rng.choices(WORDS[:40], k=3)) for _ in range(400)}
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sorted(made)))
    return path


def task(encoder: Path, texts: Path, **settings: Any) -> Inversion:
    small: dict[str, Any] = {"whose": "public", "known": 200, "attacked": 50, "candidates": 20, "steps": 4}
    small |= {"max_tokens": 6, "batch_size": 25, "min_free_mb": 1}
    return Inversion(**{"encoder": encoder, "texts": texts} | small | settings)


def run_of(folder: Path) -> Parts:
    return parts(folder.parent, run_dir=folder)


@pytest.mark.costly
def test_public_texts_are_attacked_in_three_ways(
    encoders: dict[str, Path], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = task(encoders["plain"], texts).run(run_of(tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "inversion.json").read_text())
    assert found["ranking"]["direct"]["value"] == 1.0 and found["ranking"]["mapped"] is None
    assert scores["bits_per_token"] == found["probe"]["bits"]
    assert found["probe"]["low"] <= found["probe"]["nats"] <= found["probe"]["high"]
    assert set(found["inverter"]) == {"own", "shuffled"} and found["inverter"]["own"]["texts"] == 50
    told = " ".join(capsys.readouterr().out.split())
    assert "absence of evidence is no guarantee" in told and "chance is 0.05" in told
    assert not list((tmp_path / "run").rglob("decoder*"))


@pytest.mark.costly
def test_a_rotated_encoder_hides_texts_until_some_known(encoders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    task(encoders["rotated"], texts, attacker_encoder=encoders["plain"]).run(run_of(tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "inversion.json").read_text())["ranking"]
    assert found["direct"]["low"] < found["direct"]["chance"] and found["mapped"]["value"] > 0.9


@pytest.mark.costly
def test_a_report_on_private_texts_is_internal(encoders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    task(encoders["plain"], texts, whose="private").run(run_of(tmp_path / "run"))
    written = list((tmp_path / "run").glob("*inversion.*"))
    assert {path.name for path in written} == {"internal_inversion.json", "internal_inversion.md"}
    for path in [*written, *(tmp_path / "run").rglob("losses.pt")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "put nothing from it on a card" in " ".join((tmp_path / "run" / "internal_inversion.md").read_text().split())


def test_there_must_be_enough_texts(encoders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="known=1000"):
        task(encoders["plain"], texts, known=1000).run(run_of(tmp_path / "run"))


@pytest.mark.costly
@pytest.mark.parametrize("how", ["key_value", "embedding"])
def test_an_own_language_model_is_taken(encoders: dict[str, Path], texts: Path, tmp_path: Path, how: str) -> None:
    model = new_language_model(44, max_tokens=12, places=2, seed=0, n_embd=16, n_layer=2, n_head=2)
    model.save_pretrained(tmp_path / "gpt2")
    words_tokenizer(WORDS[:40]).save_pretrained(tmp_path / "gpt2")
    settings = {"language_model": tmp_path / "gpt2", "how": how, "places": 2, "attacked": 20, "known": 20}
    task(encoders["plain"], texts, **settings).run(run_of(tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "inversion.json").read_text())
    assert found["language_model"] == "gpt2" and found["how"] == how


# -- hard negatives ------------------------------------------------------------------------------


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


def mining(made: Path, **settings: Any) -> HardNegatives:
    small: dict[str, Any] = {"whose": "public", "questions": 1, "min_free_mb": 1}
    return HardNegatives(**{"silo": made / "silos/clients/one", "encoder": made / "encoder"} | small | settings)


def test_negatives_are_the_best_that_are_no_answer_nor_repeat_one(made: Path, tmp_path: Path) -> None:
    mining(made, negatives=3).run(parts(tmp_path, run_dir=tmp_path / "run"))
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
    mining(made, whose="private").run(parts(tmp_path, run_dir=tmp_path / "run"))
    assert not (tmp_path / "run" / "hard_negatives.json").exists()
    path = tmp_path / "run" / "internal_hard_negatives.md"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "Internal" in path.read_text()


def test_more_questions_than_there_are_is_refused_before_anything_is_encoded(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.questions=2"):
        mining(made, questions=2, encoder=tmp_path / "none").run(parts(tmp_path, run_dir=tmp_path / "run"))
