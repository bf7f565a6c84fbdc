"""The T5 that ships with the package: it loads offline, it is small, and it saw no private query."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase, T5ForConditionalGeneration

from lit_dpret.assets import public_t5_path
from lit_dpret.assets.overlap import (
    HASH_BYTES,
    HASH_FILE,
    overlap,
    query_hash,
    read_hashes,
    without_punctuation,
    write_hashes,
)
from lit_dpret.errors import DataError, ResumeError

DATA = Path(os.environ.get("LIT_DPRET_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PASSAGE = "generate_query: Flood insurance is sold by the national program and pays for damage to the house."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(public_t5_path())
    assert isinstance(loaded, PreTrainedTokenizerBase)
    return loaded


@pytest.fixture(scope="module")
def model() -> T5ForConditionalGeneration:
    loaded = AutoModelForSeq2SeqLM.from_pretrained(public_t5_path())
    assert isinstance(loaded, T5ForConditionalGeneration)
    return loaded.eval()


@pytest.fixture(scope="module")
def private_questions() -> list[str]:
    with contextlib.suppress(ImportError, AttributeError):  # releases after 1.0 hold no data
        package = importlib.import_module("insuranceqa_data")
        splits = (package.load_train, package.load_valid, package.load_test)
        return [row["en"] for load in splits for row in load().values()]
    try:
        with gzip.open(DATA / "insuranceqa" / "queries.jsonl.gz", "rt", encoding="utf-8") as lines:
            return [json.loads(line)["text"] for line in lines]
    except FileNotFoundError:
        pytest.skip(f"needs InsuranceQA: pip install insuranceqa-data==1.0, or LIT_DPRET_DATA (looked in {DATA})")


@pytest.mark.costly
def test_the_public_warm_up_saw_no_question_of_the_private_set(private_questions: list[str]) -> None:
    assert len(private_questions) > 16_000
    assert overlap(private_questions, read_hashes(public_t5_path() / HASH_FILE)) == []


def test_case_punctuation_and_spacing_do_not_hide_a_copy() -> None:
    assert without_punctuation("Does\tGEICO's  plan, cover ÉCLAIRS?") == without_punctuation(
        "does geicos plan cover éclairs"
    )
    assert without_punctuation("is it covered") != without_punctuation("is it not covered")
    assert overlap(["a b", "c"], {query_hash("AB")}) == ["a b"]
    assert overlap([], {query_hash("x")}) == []


def test_hashes_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / HASH_FILE
    assert write_hashes(["One?", "one", "two"], path) == 2
    assert read_hashes(path) == {query_hash("one"), query_hash("TWO")}
    path.write_bytes(b"\0" * (HASH_BYTES + 1))
    with pytest.raises(DataError, match="not a whole number"):
        read_hashes(path)
    with pytest.raises(DataError, match="no hashes"):
        read_hashes(tmp_path / "nowhere")


def test_the_weights_are_small_finite_safetensors_with_tied_embeddings_and_nothing_is_pickled(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> None:
    files = list(public_t5_path().iterdir())
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".model", ".md", ".sha256_48"}
    assert sum(path.stat().st_size for path in files) < 20_000_000
    weights = list(model.parameters())
    assert {parameter.dtype for parameter in weights} == {torch.float32}
    assert all(torch.isfinite(parameter).all() for parameter in weights)
    assert 2_000_000 < sum(parameter.numel() for parameter in weights) < 8_000_000
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.shared.weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.decoder_start_token_id == tokenizer.pad_token_id == 0


def test_the_tokenizer_lower_cases_appends_the_end_and_knows_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(PASSAGE)["input_ids"]
    assert ids == tokenizer(PASSAGE.lower())["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id == 1 and tokenizer.unk_token_id == 2
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["▁", "generate_query:"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == PASSAGE.lower()
    assert len(tokenizer(PASSAGE * 10, truncation=True, max_length=96)["input_ids"]) == 96


def test_the_prior_asks_about_the_passage_it_is_given(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> None:
    passages = [
        "The mutual fund charges an annual fee, and the fee of the fund lowers what the investor earns.",
        "A landlord must return the deposit within thirty days after the tenant leaves the apartment.",
        "The drug metformin lowers blood sugar in people who have diabetes; nausea is a common side effect.",
        "Volcanoes form where plates of the earth's crust move apart, and lava rises through the cracks.",
    ]
    rows = tokenizer([f"generate_query: {p}" for p in passages], padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**{k: rows[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=24)
    questions = tokenizer.batch_decode(out, skip_special_tokens=True)
    own = [
        bool({w for w in q.strip("?").split() if len(w) > 4} & set(p.lower().split()))
        for q, p in zip(questions, passages, strict=True)
    ]
    assert sum(own) >= 3, questions


def test_an_installation_without_the_weights_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = importlib.import_module("lit_dpret.assets")
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(DataError, match="train_public_t5"):
        assets.public_t5_path()


# The script that made the model. It lives in the repository, not in the package.

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def _write_world(data: Path, words: list[str]) -> None:
    """The smallest folder that the script accepts, of made-up text."""
    rng = random.Random(0)

    def text(n: int) -> str:
        return ". ".join(" ".join(rng.choices(words, k=9)).capitalize() for _ in range(n)) + "."

    def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)

    for name in ("squad_dev", "medquad"):
        passages = [{"_id": f"p{i}", "text": text(4)} for i in range(24)]
        jsonl(data / name / "corpus.jsonl.gz", passages)
        questions = []
        for i, passage in enumerate(passages):
            asked = f"what is {' '.join(passage['text'].lower().split()[3:6])}?"
            questions.append(
                {"_id": f"q{i}", "text": asked, "answers": [passage["text"].split()[4]], "qtype": "x", "focus": ""}
            )
        jsonl(data / name / "queries.jsonl.gz", questions)
        for split, ids in {"train": range(12), "dev": range(12, 18), "test": range(18, 24)}.items():
            path = data / name / "qrels" / f"{split}.tsv"
            path.parent.mkdir(exist_ok=True)
            path.write_text("q\tp\ts\n" + "".join(f"q{i}\tp{i}\t1\n" for i in ids))
    jsonl(data / "squad_dev" / "unanswerable.jsonl.gz", [{"doc": "p1", "text": "why not?", "split": "train"}])
    alone = [{"source": "nq-dev", "text": f"who made the {a} for {b}"} for a, b in pairwise(words)]
    jsonl(
        data / "real_queries" / "queries.jsonl.gz",
        [*alone, {"source": "msmarco-passage-dev", "text": "not to be used"}],
    )
    prose = [{"source": "novels", "text": text(5)} for _ in range(40)]
    jsonl(data / "pretrain_text" / "text.jsonl", [*prose, {"source": "openstax", "text": "Never used either."}])


@pytest.mark.slow
def test_the_script_trains_and_resumes_and_keeps_to_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    train = importlib.import_module("train_public_t5")
    measure = importlib.import_module("public_t5.measure")
    rng = random.Random(1)
    words = sorted({"".join(rng.choices("abdefgiklmnoprstuvz", k=rng.randint(4, 8))) for _ in range(300)})
    _write_world(tmp_path / "data", words)
    monkeypatch.setattr(train, "held_out", lambda pairs, count: measure.held_out(pairs, 4))
    command = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "t5"), "--vocabulary", "500", "--layers", "1"]
    command += ["--d-model", "32", "--d-ff", "64", "--heads", "2", "--salient", "200", "--minutes"]

    assert train.main([*command, "0.02"]) == 0
    first = torch.load(tmp_path / "t5.work" / "checkpoint.pt", weights_only=True)
    assert first["progress"]["elapsed"] >= 1.2
    assert train.main([*command, "0.04"]) == 0
    second = torch.load(tmp_path / "t5.work" / "checkpoint.pt", weights_only=True)
    assert second["progress"]["steps"] > first["progress"]["steps"]
    with pytest.raises(ResumeError, match="was written with"):
        train.main([*command, "0.06", "--heads", "4"])

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    assert loaded.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "t5")) == 500
    seen = read_hashes(tmp_path / "t5" / HASH_FILE)
    assert overlap([f"Who made the {words[0]} for {words[1]}?"], seen)
    assert not overlap(["not to be used", "never used either"], seen)
