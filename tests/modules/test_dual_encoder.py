"""The dual encoder trained end to end: its loss, its refusals, its folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_stand_ins import data_module
from stand_ins import Line, dp, fit
from tiny_models import tiny_bert, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertModel

from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.dual_encoder import DualEncoder
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy

SHAPE = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def dual(**settings: Any) -> DualEncoder:
    backbone = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    encoder = TextEncoder(backbone, tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    known = {"privacy": NoPrivacy(), "optimizer": OptimizerSpec(lr=0.003), "encoder": encoder, "temperature": 0.1}
    return DualEncoder(**{**known, **settings})


def line(query: str, passage_id: str, passage: str, *others: str) -> Line:
    return Line(query, query, passage_id, passage, frozenset({passage_id, *others}))


ROWS = [
    line("how to file", "p1", "flood insurance cover", "p2"),
    line("how to file", "p2", "does my house", "p1"),
    line("best life policy", "p3", "what is the best"),
    line("my house", "p3", "what is the best"),
    line("claim", "p4", "a life policy"),
]
NOT_NEGATIVES = {0: [1], 1: [0], 2: [3], 3: [2], 4: []}


def losses(module: DualEncoder, rows: list[Line]) -> Tensor:
    return module.per_row_loss(module.collate_rows(rows))


def test_a_passage_is_never_a_negative_of_a_query_that_it_answers() -> None:
    module = dual()
    queries = module.encode_queries([row.query for row in ROWS])
    passages = module.encode_passages([row.passage for row in ROWS])
    for i, loss in enumerate(losses(module, ROWS)):
        kept = [j for j in range(len(ROWS)) if j not in NOT_NEGATIVES[i]]
        logits = (passages[kept] @ queries[i] / 0.1).unsqueeze(0)
        torch.testing.assert_close(loss, cross_entropy(logits, torch.tensor([kept.index(i)])))


def test_it_is_refused_under_dp_sgd_before_training(tmp_path: Path) -> None:
    module = dual(privacy=dp(tmp_path, noise_multiplier=4.0))
    before = [parameter.clone() for parameter in module.parameters()]
    data = data_module(tmp_path / "data", sampling="truncated_poisson", cap=13)
    with pytest.raises(UnsupportedModelError, match="couples the examples"):
        fit(tmp_path / "run", module, data)
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_a_logical_batch_that_would_be_cut_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"datamodule\.physical_batch_size=4 is below 13"):
        fit(tmp_path / "run", dual(), data_module(tmp_path / "data", physical_batch_size=4))


def test_a_logical_batch_that_is_cut_after_all_is_refused_before_its_update(tmp_path: Path) -> None:
    module = dual()
    before = [parameter.clone() for parameter in module.parameters()]
    data = data_module(tmp_path / "data", expected_batch_size=None, sample_rate=1.0, physical_batch_size=4)
    with pytest.raises(ConfigurationError, match="must not be split"):
        fit(tmp_path / "run", module, data)
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    plain, saving = dual(), dual(gradient_checkpointing=True)
    assert saving.encoder.backbone.is_gradient_checkpointing
    for module in (plain, saving):
        losses(module.train(), ROWS).sum().backward()
    for one, two in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_an_encoder_is_loaded_from_a_folder_with_the_lengths_and_prefixes_given(tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    module = dual(
        encoder=tmp_path / "bert", max_query_length=6, max_passage_length=7, query_prefix="query: ", passage_prefix=""
    )
    contract = module.encoder.contract
    assert (contract.query_max_length, contract.passage_max_length, contract.query_prefix) == (6, 7, "query: ")
    assert (contract.pooling, contract.normalise) == ("mean", True)
    assert module.collate_rows(ROWS)["query"]["input_ids"].shape[1] <= 6


@pytest.mark.parametrize("left_by", ["separate towers", "a head on one side"])
def test_separate_towers_start_as_a_folder_has_them_and_share_no_weight(left_by: str, tmp_path: Path) -> None:
    if left_by == "separate towers":
        first = dual(towers="separate")
        with torch.no_grad():
            first.tower("passage").backbone.embeddings.word_embeddings.weight.mul_(2.0)
        first.save_model(tmp_path)
    else:
        base = dual().encoder
        head = torch.nn.Linear(base.dim, base.dim, bias=False)
        save_sentence_transformer(tmp_path, base.changed(projection=head), base)
    again = partial(dual, max_passage_length=10, query_prefix="q: ", max_query_length=6)
    second = again(towers="separate", encoder=str(tmp_path))
    loaded = load_towers(tmp_path)
    texts = [row.passage for row in ROWS]
    assert torch.equal(second.encode_passages(texts), loaded.passage_encoder.encode(texts, "passage"))
    assert not torch.equal(second.encode_passages(texts), second.tower("query").encode(texts, "passage"))
    contract = second.tower("passage").contract
    assert (contract.query_prefix, contract.query_max_length, contract.passage_max_length) == ("q: ", 6, 10)
    sides = [{id(weight) for weight in second.tower(side).parameters()} for side in ("query", "passage")]
    assert not sides[0] & sides[1] and second.tower("query").training and second.tower("passage").training
    second.save_model(tmp_path / "again")
    third = again(towers="separate", encoder=str(tmp_path / "again"))
    assert torch.equal(third.encode_queries(texts), second.encode_queries(texts))
    assert torch.equal(third.encode_passages(texts), second.encode_passages(texts))
    with pytest.raises(UnsupportedModelError, match=r"model\.towers=separate"):
        again(encoder=str(tmp_path))


def test_a_new_encoder_is_built_from_a_config(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    module = dual(encoder=None, config=SHAPE, tokenizer=tmp_path)
    assert isinstance(module.encoder.backbone, BertModel)
    assert losses(module, ROWS).isfinite().all()
    assert all(p.dtype == torch.float32 and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": None}, r"model\.encoder=None and model\.config=None"),
        ({"encoder": "minilm", "config": SHAPE}, "give one of them"),
        ({"encoder": None, "config": SHAPE}, r"needs model\.tokenizer"),
        ({"encoder": None, "config": {"hidden_size": 4}, "tokenizer": "HERE"}, "model_type"),
        ({"encoder": None, "config": {**SHAPE, "vocab_size": 3}, "tokenizer": "HERE"}, "do not belong together"),
        ({"temperature": 0.0}, "temperature"),
        (
            {
                "encoder": TextEncoder(
                    tiny_bert(), tiny_tokenizer(), Contract(normalise=False, query_max_length=8, passage_max_length=8)
                )
            },
            "normalise",
        ),
    ],
)
def test_settings_that_make_no_encoder_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {name: tmp_path if value == "HERE" else value for name, value in settings.items()}
    with pytest.raises(ConfigurationError, match=message):
        dual(**given)
