"""What is exported, read by other people's programs: the same embeddings on a thousand texts, the same scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import WORDS, tiny_bert, tiny_t5, tiny_tokenizer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer

MANY = 1040


def texts(count: int = MANY) -> list[str]:
    """Texts of 0 to 60 words, so that many are longer than what is read; some repeat, some words are unknown."""
    draw = random.Random(0)
    return ["", *(" ".join(draw.choices([*WORDS, "unseen"], k=draw.randrange(61))) for _ in range(count - 1))]


def tower(family: str, seed: int = 0) -> TextEncoder:
    backbone = tiny_bert(seed) if family == "bert" else tiny_t5(seed)
    contract = Contract(query_max_length=9, passage_max_length=14, query_prefix="query: ", passage_prefix="passage: ")
    return TextEncoder(backbone, tiny_tokenizer(eos_only=family == "t5"), contract).eval()


def batches(listed: list[str]) -> list[list[str]]:
    """Some 60 texts each, longest first and no two of one length, so that sorting by length leaves them as they are."""
    ordered = sorted(set(listed), key=len, reverse=True)
    made: list[list[str]] = []
    for text in ordered:
        free = next((batch for batch in made if len(batch[-1]) > len(text) and len(batch) < 64), None)
        if free is None:
            made.append([text])
        else:
            free.append(text)
    return made


def compare_all(library: Any, folder: Path, query: TextEncoder, passage: TextEncoder, listed: list[str]) -> None:
    """Batches of the same texts in the same order give the same bits there and here."""
    model = library.SentenceTransformer(str(folder), device="cpu")
    seen = 0
    for batch in batches(listed):
        settings = {"batch_size": len(batch), "convert_to_tensor": True}
        with torch.inference_mode():
            queries = query(query.tokenize(batch, "query"))
            passages = passage(passage.tokenize(batch, "passage"))
        assert torch.equal(model.encode_query(batch, **settings), queries)
        assert torch.equal(model.encode_document(batch, **settings), passages)
        seen += len(batch)
    assert seen == len(set(listed)) > 1000


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_thousand_texts_have_the_same_bits_in_sentence_transformers(
    family: str, separate: bool, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="compares with sentence-transformers")
    query, other = tower(family), tower(family, seed=1) if separate else None
    save_sentence_transformer(tmp_path, query, other)
    listed = texts()
    lengths = [len(query.tokenizer(text)["input_ids"]) for text in listed]
    assert sum(length > 14 for length in lengths) > 500  # truncation is part of it
    compare_all(library, tmp_path, query, other or query, listed)
