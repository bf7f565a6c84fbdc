"""A frozen dual encoder over a dozen passages, with helpers for its tests. Imported by path; not a test."""

from __future__ import annotations

from typing import Any

import torch
from stand_ins import Line
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from torch import Tensor, nn

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.modules.frozen_dual_encoder import FrozenDualEncoder
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.privacy.ledger.trained import note_built
from lit_dpret.privacy.modes import NoPrivacy

PASSAGES = {f"p{i}": " ".join(WORDS[(3 * i + j * j) % 13] for j in range(5)) for i in range(12)}
QUERIES = {f"q{i}": " ".join(WORDS[(5 * i + j) % 13] for j in range(3)) for i in range(6)}
POSITIVES = {f"q{i}": [f"p{i}", f"p{i + 6}"][: 1 + i % 2] for i in range(6)}


def tower(**contract: Any) -> TextEncoder:
    lengths = {"query_max_length": 8, "passage_max_length": 10}
    return TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(**{**lengths, **contract}))


def frozen(**settings: Any) -> FrozenDualEncoder:
    """Return a module whose head is no longer the identity, so that no test passes by accident."""
    known = {"privacy": NoPrivacy(), "optimizer": OptimizerSpec(lr=0.01), "encoder": tower(), "temperature": 0.1}
    module = FrozenDualEncoder(**{**known, **settings})
    module.prepare_texts(PASSAGES, QUERIES)
    torch.manual_seed(1)
    for head in filter(None, (module.query_head, module.passage_head)):
        nn.init.normal_(head.weight, std=0.3)
    note_built(module)
    return module


def rows(queries: dict[str, str] = QUERIES) -> list[Line]:
    return [
        Line(name, text, passage, PASSAGES[passage], frozenset(POSITIVES[name]))
        for name, text in queries.items()
        for passage in POSITIVES[name]
    ]


def losses(module: FrozenDualEncoder, lines: list[Line]) -> Tensor:
    return module.per_row_loss(module.collate_rows(lines))
