"""`scripts/public_cross_encoder.py`: a teacher from public pairs, of the smallest size."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import WORDS, tiny_bert, tiny_tokenizer

from lit_dpret.errors import ConfigurationError
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from reproduction.recipe import Teacher

ROOT = Path(__file__).resolve().parent.parent


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_cross_encoder", ROOT / "scripts" / "public_cross_encoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_pairs(file: Path, count: int = 96) -> Path:
    """Questions that share their first word with the right passage."""
    rows = [
        {
            "query": f"{WORDS[i % 12]} {WORDS[(i * 5) % 12]}",
            "passage": f"{WORDS[i % 12]} {WORDS[i % 12]} {WORDS[(i * 7) % 12]}",
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny_bert().save_pretrained(tmp_path / "encoder")
    tiny_tokenizer().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.mark.slow
def test_it_writes_a_cross_encoder_that_tells_right_passages_from_near_ones(tmp_path: Path, encoder: Path) -> None:
    pairs, out = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "cross_encoder"
    settings = ["--max-length", "16", "--lr", "0.005", "--depth", "8", "--epochs", "30", "--negatives", "2"]
    script().main(["--pairs", str(pairs), "--encoder", str(encoder), "--out", str(out), *settings])
    teacher = Teacher(str(out))
    teacher.check()
    scorer = CrossEncoder.load(out)
    assert scorer.max_length == 16
    asked = [f"{WORDS[i]} {WORDS[(i * 5) % 12]}" for i in range(12)]
    right = [f"{WORDS[i]} {WORDS[i]} {WORDS[(i * 7) % 12]}" for i in range(12)]
    wrong = right[1:] + right[:1]
    margins = scorer.score(asked, right, batch_size=12) - scorer.score(asked, wrong, batch_size=12)
    assert (margins > 0).mean() > 0.7
    assert margins.max() > 3, "margins of log odds, and not of labels between 0 and 1"


def test_pairs_without_enough_passages_are_refused(tmp_path: Path, encoder: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", count=2)
    with pytest.raises(ConfigurationError, match=r"--pairs .*pairs\.jsonl.* --negatives=3"):
        script().main(["--pairs", str(pairs), "--encoder", str(encoder), "--out", str(tmp_path / "out")])
