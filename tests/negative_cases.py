"""A small corpus with queries and judgements, dual encoders over it, and towers that need no transformer.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from stand_ins import Line
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from torch import Tensor

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.negatives import TrainTexts
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode

PASSAGES = {f"p{i}": " ".join(WORDS[(5 * i + k * (1 + i % 4)) % 17] for k in range(5)) for i in range(20)}
QUERIES = {f"q{i}": " ".join(PASSAGES[f"p{2 * i}"].split()[:3]) for i in range(8)}
#: Query i is answered by passage 2 i, every other one also by 2 i + 1; passage 2 i + 2 was judged not to answer it.
JUDGED: dict[str, dict[str, int]] = {
    f"q{i}": {f"p{2 * i}": 1, f"p{2 * i + 2}": 0} | ({f"p{2 * i + 1}": 2} if i % 2 else {}) for i in range(8)
}
NOISE: dict[str, Any] = {"eps": 3.0, "delta": 1e-3, "noise_multiplier": 20.0}


def texts(
    passages: Mapping[str, str] = PASSAGES,
    queries: Mapping[str, str] = QUERIES,
    judged: Mapping[str, Mapping[str, int]] = JUDGED,
) -> TrainTexts:
    return TrainTexts(passages, queries, judged)


def lines(*numbers: int, queries: Mapping[str, str] = QUERIES) -> list[Line]:
    """Return rows of some queries, each with its first passage."""
    return [
        Line(
            f"q{i}",
            queries[f"q{i}"],
            f"p{2 * i}",
            PASSAGES[f"p{2 * i}"],
            frozenset(name for name, grade in JUDGED[f"q{i}"].items() if grade > 0),
        )
        for i in numbers
    ]


class WordTowers:
    """Encoders that embed a text by its words, and count the texts that they embedded."""

    device = None

    def __init__(self, weights: str = "first") -> None:
        self.weights, self.asked = weights, 0

    def embeddings(self, texts: Sequence[str], side: str, folder: Path | None) -> Tensor:
        self.asked += len(texts)
        scale = 1.0 if self.weights == "first" else -1.0
        table = torch.tensor([[float(text.split().count(w)) for w in WORDS] for text in texts])
        return torch.nn.functional.normalize(
            scale ** (side == "query") * table + 1e-3 * torch.arange(len(WORDS)), dim=1
        )

    def fingerprint(self) -> str:
        return self.weights


def tower(**settings: Any) -> TextEncoder:
    plain = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return TextEncoder(
        tiny_bert(**plain | settings), tiny_tokenizer(), Contract(query_max_length=6, passage_max_length=8)
    )


def dual(privacy: PrivacyMode | None = None, **settings: Any) -> DualEncoder:
    known = {"optimizer": OptimizerSpec(lr=0.01), "temperature": 0.5}
    if "encoder" not in settings:
        known["encoder"] = tower()
    return DualEncoder(privacy=privacy or NoPrivacy(), **{**known, **settings})


def loss_by_hand(module: Any, row: Line, others: Sequence[str]) -> Tensor:
    """Return the cross entropy of a row's passage among ``others``, by their ids, at the temperature of `dual`."""
    passages = module.encode_passages([PASSAGES[name] for name in (row.passage_id, *others)])
    logits = passages @ module.encode_queries([row.query])[0] / 0.5
    return torch.nn.functional.cross_entropy(logits.unsqueeze(0), torch.tensor([0]))


def in_double(privacy: PrivacyMode | None = None, **settings: Any) -> DualEncoder:
    """Return a dual encoder in float64 whose sources are prepared with `texts`."""
    module = dual(privacy, **settings).double()
    module.learn_public_passages(PASSAGES)
    module.learn_negatives(texts())
    return module
