"""The heads over frozen embeddings under every privacy mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pair_stand_ins import clipped_sum, data_module, plan_of
from stand_ins import fit
from tiny_models import tiny_bert, tiny_tokenizer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import SigmoidPairLoss
from lit_dpret.modules import FrozenDualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import (
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PrivacyMode,
    PublicPassages,
    SyntheticData,
)

NOISE: dict[str, Any] = {"eps": 3.0, "delta": 1e-3, "noise_multiplier": 20.0}
SAMPLING: dict[str, Any] = {
    "sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6,
}  # fmt: skip


def frozen(privacy: PrivacyMode, **settings: Any) -> FrozenDualEncoder:
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    known = {"optimizer": OptimizerSpec(name="sgd", lr=0.1), "encoder": tower, "temperature": 1.0}
    return FrozenDualEncoder(privacy=privacy, **{**known, **settings})


@pytest.mark.parametrize("head", ["query", "both", "shared"])
@pytest.mark.parametrize("name", ["none", "batch_clip", "per_example_duplicated", "logit_dp", "public_passages"])
def test_every_mode_trains_every_head(name: str, head: str, tmp_path: Path) -> None:
    secret = {"secret_file": tmp_path / "secret"}
    mode: PrivacyMode = {
        "none": NoPrivacy(sub_batches=2),
        "batch_clip": BatchClip(max_grad_norm=0.1, sub_batches=2, **NOISE, **secret),
        "per_example_duplicated": PerExampleDuplicated(max_grad_norm=0.1, sub_batches=2, **NOISE, **secret),
        "logit_dp": LogitDP(max_logit_grad_norm=0.1, sub_batches=2, **NOISE, **secret),
        "public_passages": PublicPassages(max_grad_norm=0.1, pool_size=5, **NOISE, **secret),
    }[name]
    if name == "public_passages" and head != "query":
        with pytest.raises(ConfigurationError, match=r"model\.head=query"):
            frozen(mode, head=head)
        return
    module = frozen(mode, head=head)
    before = {key: value.clone() for key, value in module.named_parameters()}
    fit(tmp_path / "run", module, data_module(tmp_path / "data", **SAMPLING), steps=2)
    assert before and all(not torch.equal(value, before[key]) for key, value in module.named_parameters())
    module.save_model(tmp_path / "model")


@pytest.mark.parametrize("head", ["query", "both", "shared"])
def test_auto_takes_the_closed_form_and_it_gives_the_sum_of_the_exact_norms(head: str, tmp_path: Path) -> None:
    sums = {}
    data = data_module(tmp_path / "data")
    for norms in ("auto", "brute_force"):
        module = frozen(LogitDP(max_logit_grad_norm=0.01, norms=norms, **NOISE), head=head).double()
        module.prepare(data)
        with torch.no_grad():  # away from the identity, where a shared head has no gradient of some pairs
            module.query_head.weight.add_(0.1 * torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
        rows = module.collate_rows(list(data.pair_rows())[:5])
        rows = {name: value.double() if value.is_floating_point() else value for name, value in rows.items()}
        sums[norms] = clipped_sum(module, plan_of(module.privacy, module, n_max=5), rows)
        mode: Any = module.privacy
        assert type(mode._norms).__name__ == ("LinearHead" if norms == "auto" else "BruteForce")
    torch.testing.assert_close(sums["auto"], sums["brute_force"], rtol=1e-9, atol=1e-13)


def test_negatives_from_the_batch_are_refused_against_public_passages() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.negatives=batch cannot go with privacy=public_passages"):
        frozen(PublicPassages(**NOISE), negatives="batch")


def test_a_loss_of_pairs_is_refused_against_a_pool() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.loss=SigmoidPairLoss"):
        frozen(PublicPassages(**NOISE), loss=SigmoidPairLoss(temperature=1.0))


def test_passages_without_a_gradient_cannot_be_asked_for_one() -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.passage_gradient=own"):
        frozen(PublicPassages(passage_gradient="own", **NOISE))


@pytest.mark.parametrize("mode", [NoPrivacy(), SyntheticData()], ids=lambda mode: mode.name)
def test_without_a_mechanism_of_its_own_it_can_be_trained_either_way(mode: PrivacyMode) -> None:
    assert frozen(mode, negatives="batch").coupled_loss
    assert not frozen(mode, negatives="pool").coupled_loss
