"""Every family of models and every privacy mode carries the audit: blank units among the drawn, scores at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from memoriser import audited, large_log, write_large_log
from tiny_generator import WORDS as GENERATOR_WORDS
from tiny_generator import generator
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from tiny_tasks import retriever

sys.path.insert(0, str(Path(__file__).parents[1] / "audit" / "canaries"))
from conftest import digit_module, digit_tokenizer

from lit_dpret.callbacks import OneRunAudit
from lit_dpret.cards.file import read_card
from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.datamodules.rows import Row
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.vision import EmbeddingNet
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import DualEncoder, EmbeddingTrainer, OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, NoPrivacy, PerExampleDuplicated, PublicPassages

NOISE: dict[str, Any] = {"eps": 50.0, "delta": 1e-5, "noise_multiplier": 20.0}
ADAM = OptimizerSpec(lr=0.01)


def encoder() -> TextEncoder:
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    return TextEncoder(tiny_bert(**plain), tiny_tokenizer(), Contract(query_max_length=16, passage_max_length=8))


def dual(privacy: Any) -> DualEncoder:
    return DualEncoder(privacy=privacy, optimizer=ADAM, encoder=encoder(), temperature=1.0)


def of_texts(privacy: Any) -> EmbeddingTrainer:
    return EmbeddingTrainer(privacy=privacy, optimizer=ADAM, encoder=encoder())


FAMILIES: dict[str, Any] = {
    "generator dp_sgd": lambda p: generator(privacy=DPSGD(**p), max_query_length=16),
    "dual encoder batch_clip": lambda p: dual(BatchClip(max_grad_norm=0.1, **p)),
    "dual encoder per_example_duplicated": lambda p: dual(PerExampleDuplicated(max_grad_norm=0.1, **p)),
    "dual encoder logit_dp": lambda p: dual(LogitDP(max_logit_grad_norm=0.1, **p)),
    "dual encoder public_passages": lambda p: dual(PublicPassages(max_grad_norm=0.1, pool_size=6, **p)),
    "embedding trainer logit_dp": lambda p: of_texts(LogitDP(max_logit_grad_norm=0.1, **p)),
    "frozen dual encoder dp_sgd": lambda p: retriever(privacy=DPSGD(**p), encoder=encoder()),
    "frozen dual encoder logit_dp": lambda p: retriever(
        privacy=LogitDP(max_logit_grad_norm=0.1, **p), encoder=encoder()
    ),
}


@pytest.mark.parametrize("unit", ["query", pytest.param("pair", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_texts_carries_an_audit_in_its_modes(family: str, unit: str, tmp_path: Path) -> None:
    module = FAMILIES[family](NOISE | {"unit": unit, "secret_file": tmp_path / "secret"})
    words = GENERATOR_WORDS if family.startswith("generator") else [word for word in WORDS if word == word.lower()]
    write_large_log(tmp_path / "log", vocabulary=words)
    # a few of many units: most draws hold a blank one, and sub-batches stay small
    data = large_log(tmp_path, expected_batch_size=6, physical_batch_size=40)
    audited(tmp_path, module=module, data=data, steps=2, audit=OneRunAudit(canaries=300, max_share=0.9, kind="echo"))
    (bound, curve) = read_card(tmp_path / "run")["empirical"]["results"]
    assert bound["n"] == 300 and 0 < bound["estimate"] < 1 and curve["ceiling"] > 0


def digits(**settings: Any) -> TextEncoder:
    """An encoder whose tokenizer knows digits, each as a token."""
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    tokens = digit_tokenizer()
    return TextEncoder(tiny_bert(vocab_size=len(tokens), **plain), tokens, Contract(passage_max_length=8, **settings))


CUT: dict[str, Any] = {
    "generator": lambda p, length: digit_module(privacy=DPSGD(**p), max_query_length=length),
    "dual encoder": lambda p, length: DualEncoder(
        privacy=PublicPassages(max_grad_norm=0.1, pool_size=6, **p), optimizer=ADAM, temperature=1.0,
        encoder=digits(query_max_length=length),
    ),
    "frozen dual encoder": lambda p, length: retriever(privacy=DPSGD(**p), encoder=digits(query_max_length=length)),
    "embedding trainer": lambda p, length: EmbeddingTrainer(
        privacy=LogitDP(max_logit_grad_norm=0.1, **p), optimizer=ADAM, encoder=digits(query_max_length=length)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["random_passage", "own_passage", "echo"])
@pytest.mark.parametrize("family", CUT)
def test_a_secret_that_the_model_would_not_read_to_its_end_is_refused_before_anything_is_written(
    family: str, kind: Any, tmp_path: Path
) -> None:
    """Under replace_one canary and twin would be one text, and every audit would find nothing."""
    write_large_log(tmp_path / "log", vocabulary=WORDS if kind != "echo" else GENERATOR_WORDS)
    data = large_log(tmp_path, expected_batch_size=6, physical_batch_size=40)
    module = CUT[family](NOISE | {"neighbours": "replace_one", "secret_file": tmp_path / "secret"}, 5)
    audit = OneRunAudit(canaries=40, max_share=0.9, kind=kind)
    with pytest.raises(ConfigurationError, match=r"its query is longer than model\.max_query_length=5.*audit\.queries"):
        audited(tmp_path, module=module, data=data, steps=1, audit=audit)
    assert not (tmp_path / "run" / "canaries.json").exists()
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_two_secrets_that_are_one_to_the_tokenizer_are_refused(tmp_path: Path) -> None:
    """A tokenizer without digits: canary and twin are the same text, whatever the length."""
    write_large_log(tmp_path / "log", vocabulary=WORDS)
    module = dual(BatchClip(max_grad_norm=0.1, **NOISE, secret_file=tmp_path / "secret"))
    with pytest.raises(ConfigurationError, match="two candidates the same tokens"):
        audited(tmp_path, module=module, data=large_log(tmp_path), audit=OneRunAudit(canaries=40, max_share=0.9))


def test_images_carry_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_images, "TRAIN", 50)
    data = ImagesDataModule(
        source="vision_folder", folder=tiny_images.class_folders(tmp_path / "images", sizes=(32,)), sampling="poisson",
        expected_batch_size=6, physical_batch_size=40,
    )  # fmt: skip
    mode = LogitDP(max_logit_grad_norm=0.1, norms="jacobian", unit="image", secret_file=tmp_path / "secret", **NOISE)
    torch.manual_seed(0)
    module = EmbeddingTrainer(privacy=mode, optimizer=ADAM, net=EmbeddingNet(dim=4, channels=(4, 4)))
    audited(tmp_path, module=module, data=data, steps=2, audit=OneRunAudit(canaries=40, max_share=1.0))
    assert read_card(tmp_path / "run")["empirical"]["results"][0]["n"] == 40


def rows(count: int, words: Sequence[str] = WORDS) -> list[Row]:
    def text(*places: int) -> str:
        return " ".join(words[place % len(words)] for place in places)

    return [
        Row(f"q{i}", text(i, 3 * i + 1), f"p{i}", text(2 * i, i + 3, i), frozenset((f"p{i}",))) for i in range(count)
    ]


@pytest.mark.parametrize("make", [lambda: generator(), lambda: dual(NoPrivacy()), lambda: of_texts(NoPrivacy())])
def test_scores_are_deterministic_and_leave_the_module_and_the_random_state_alone(make: Any) -> None:
    module = make().train()
    state = torch.random.get_rng_state()
    first = module.canary_scores(rows(6))
    assert torch.equal(first, module.canary_scores(rows(6))) and first.dtype == torch.float64
    assert module.training and torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_score_of_a_generator_is_minus_the_loss_of_the_row_whatever_its_company() -> None:
    module = generator().eval()
    alone = torch.cat([module.canary_scores([row]) for row in rows(40, GENERATOR_WORDS)])
    assert torch.allclose(module.canary_scores(rows(40, GENERATOR_WORDS)), alone, atol=1e-5)
    assert torch.allclose(
        alone, -module.per_row_loss(module.collate_rows(rows(40, GENERATOR_WORDS))).double(), atol=1e-5
    )


def test_the_score_of_a_pair_is_the_log_odds_of_its_passage_among_the_others() -> None:
    module = dual(NoPrivacy()).eval()
    some = rows(5)
    table = module.encode_queries([r.query for r in some]) @ module.encode_passages([r.passage for r in some]).T
    shares = table.double().softmax(dim=1).diagonal()
    assert torch.allclose(module.canary_scores(some), torch.log(shares / (1 - shares)), atol=1e-6)
    module.loss.temperature = 0.1
    sharper = (table / 0.1).double().softmax(dim=1).diagonal()
    assert torch.allclose(module.canary_scores(some), torch.log(sharper / (1 - sharper)), atol=1e-4)
