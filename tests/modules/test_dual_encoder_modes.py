"""The dual encoder under every privacy mode: towers, adapters, a T5, and public passages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_stand_ins import batch_of, clipped_sum, data_module, plan_of
from stand_ins import Line, fit
from tiny_models import WORDS, tiny_bert, tiny_t5, tiny_tokenizer
from torch.nn.functional import cross_entropy

from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import SigmoidPairLoss, SymmetricSoftmaxPairLoss
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.privacy.clipping.base import room_for_rounding
from lit_dpret.privacy.clipping.pairs import BruteForce
from lit_dpret.privacy.modes import BatchClip, LogitDP, NoPrivacy, PerExampleDuplicated, PrivacyMode, PublicPassages

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["query", "value", "q", "v"]}
NOISE: dict[str, Any] = {"eps": 3.0, "delta": 1e-3, "noise_multiplier": 20.0}


def modes(folder: Path) -> dict[str, PrivacyMode]:
    secret = {"secret_file": folder / "secret"}
    return {
        "none": NoPrivacy(),
        "batch_clip": BatchClip(max_grad_norm=0.1, **NOISE, **secret),
        "per_example_duplicated": PerExampleDuplicated(max_grad_norm=0.1, **NOISE, **secret),
        "logit_dp": LogitDP(max_logit_grad_norm=0.1, **NOISE, **secret),
        "public none": PublicPassages(max_grad_norm=0.1, pool_size=6, **NOISE, **secret),
        "public own": PublicPassages(max_grad_norm=0.1, pool_size=6, passage_gradient="own", **NOISE, **secret),
        "public full": PublicPassages(max_grad_norm=0.1, pool_size=6, passage_gradient="full", **NOISE, **secret),
    }


MODES = ["none", "batch_clip", "per_example_duplicated", "logit_dp", "public none", "public own", "public full"]


def tower(kind: str) -> TextEncoder:
    contract = Contract(query_max_length=6, passage_max_length=8)
    if kind == "t5":
        return TextEncoder(tiny_t5(dropout_rate=0.0), tiny_tokenizer(eos_only=True), contract)
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return TextEncoder(tiny_bert(num_hidden_layers=1, **plain), tiny_tokenizer(), contract)


def dual(privacy: PrivacyMode, kind: str = "bert", **settings: Any) -> DualEncoder:
    known = {"optimizer": OptimizerSpec(lr=0.01), "encoder": tower(kind), "temperature": 1.0}
    return DualEncoder(privacy=privacy, **{**known, **settings})


def some_rows(n: int, seed: int = 0) -> list[Line]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        words = [WORDS[k] for k in torch.randint(len(WORDS), (8,), generator=generator).tolist()]
        rows.append(Line(f"q{i}", " ".join(words[:3]), f"p{i}", " ".join(words[3:]), frozenset({f"p{i}"})))
    return rows


def public(n: int = 9) -> dict[str, str]:
    return {f"p{i}": " ".join(WORDS[(3 * i + k) % len(WORDS)] for k in range(5)) for i in range(n)}


TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("bert", {}),
    "t5": ("t5", {}),
    "separate": ("bert", {"towers": "separate"}),
    "frozen": ("bert", {"towers": "separate", "passage_tower": "frozen"}),
    "lora": ("bert", {"lora": LORA}),
    "t5-lora-separate": ("t5", {"lora": LORA, "towers": "separate"}),
}
#: Every mode under the shared tower, and under one of the others in turn.
OTHERS = [name for name in TOWERS if name != "shared"]
SOON = {*((mode, "shared") for mode in MODES), *zip(MODES, itertools.cycle(OTHERS), strict=False)}


@pytest.mark.like(3)
@pytest.mark.parametrize(
    ("name", "towers"),
    [pytest.param(*pair, marks=() if pair in SOON else pytest.mark.slow) for pair in itertools.product(MODES, TOWERS)],
)
def test_every_mode_trains_every_kind_of_tower(name: str, towers: str, tmp_path: Path) -> None:
    kind, settings = TOWERS[towers]
    frozen = settings.get("passage_tower") == "frozen"
    if frozen and name in ("public own", "public full"):
        with pytest.raises(ConfigurationError, match=r"passage_gradient=(own|full) has nothing to train"):
            dual(modes(tmp_path)[name], kind, **settings)
        return
    module = dual(modes(tmp_path)[name], kind, **settings)
    before = {key: value.clone() for key, value in module.named_parameters()}
    sampling = {"sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6}
    fit(tmp_path / "run", module, data_module(tmp_path / "data", **sampling), steps=2)
    for key, value in module.named_parameters():
        assert torch.equal(value, before[key]) != value.requires_grad, key
    trained = {side for side in ("query", "passage") if any(p.requires_grad for p in module.tower(side).parameters())}
    assert trained == ({"query"} if frozen else {"query", "passage"})


def test_a_saved_folder_holds_both_towers_and_merged_adapters(tmp_path: Path) -> None:
    module = dual(NoPrivacy(), lora=LORA, towers="separate")
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.requires_grad):
            parameter.add_(0.3)
    module.save_model(tmp_path / "model")
    loaded = load_towers(tmp_path / "model")
    texts = ["flood insurance", "my house"]
    torch.testing.assert_close(loaded.query_encoder.encode(texts, "query"), module.encode_queries(texts))
    torch.testing.assert_close(loaded.passage_encoder.encode(texts, "passage"), module.encode_passages(texts))
    assert not torch.allclose(module.encode_queries(texts), dual(NoPrivacy()).encode_queries(texts), atol=1e-3)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_the_step_of_logit_dp_is_algorithm_1_on_a_transformer(kind: str, tmp_path: Path) -> None:
    module = dual(LogitDP(max_logit_grad_norm=0.02, norms="pair_ghost", **NOISE), kind).double()
    rows = module.collate_rows(some_rows(3))
    plan = plan_of(module.privacy, module, n_max=3)
    found = clipped_sum(module, plan, rows)
    module.eval()
    gradients = BruteForce(module).gradients(module.pair_batch(rows))
    flat = torch.cat([g.flatten(2) for g in gradients.values()], dim=2)
    lowered = room_for_rounding(0.02, [flat])
    bounded = flat * (lowered / flat.norm(dim=2, keepdim=True)).clamp(max=1.0)
    scores = module.embed(rows["query"], "query") @ module.embed(rows["passage"], "passage").T
    expected = torch.einsum("ij,ijp->p", module.pair_loss(3).coefficients(scores.detach(), rows["answers"]), bounded)
    # T5 takes its mean square in fp32, so two ways to the same sum differ by that
    close = 1e-6 if kind == "t5" else 1e-10
    assert float((found - expected).norm() / expected.norm()) < close


# -- public passages -------------------------------------------------------------------------


def against_public(gradient: Any, n: int = 3, **settings: Any) -> tuple[DualEncoder, dict[str, Any]]:
    mode = PublicPassages(max_grad_norm=1e6, pool_size=5, passage_gradient=gradient, **NOISE)
    module = dual(mode, **settings).double()
    module.learn_public_passages(public())
    return module, module.collate_rows(some_rows(n))


@pytest.mark.parametrize("gradient", ["none", "own", "full"])
def test_the_gradient_of_a_row_is_that_of_its_softmax_over_public_passages(gradient: str) -> None:
    module, rows = against_public(gradient)
    plan = plan_of(module.privacy, module, n_max=8)
    found = clipped_sum(module, plan, rows)
    assert module._pool is not None
    chosen, _ = module._pool.draw(0)
    assert chosen is not None
    names = list(dict(sorted(public().items())))
    queries, own = module.embed(rows["query"], "query"), module.embed(rows["passage"], "passage")
    pool = module.embed(module.encoder.tokenize([public()[names[i]] for i in chosen.tolist()], "passage"), "passage")
    own = own.detach() if gradient == "none" else own
    pool = pool if gradient == "full" else pool.detach()
    total = torch.zeros(())
    for i in range(3):
        candidates = [own[i]] + [pool[k] for k, place in enumerate(chosen.tolist()) if names[place] != f"p{i}"]
        logits = torch.stack(candidates) @ queries[i]
        total = total + cross_entropy(logits.unsqueeze(0), torch.zeros(1, dtype=torch.long))
    grads = torch.autograd.grad(total, [p for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in grads]), rtol=1e-6, atol=1e-9)


def test_a_row_alone_has_a_loss_although_its_normaliser_was_left_open() -> None:
    module = dual(NoPrivacy(), loss=SigmoidPairLoss(temperature=0.5))
    rows = module.collate_rows(some_rows(1))
    assert torch.isfinite(module.per_row_loss(rows)).all()


def test_a_row_never_counts_a_further_positive_as_a_negative() -> None:
    module, _ = against_public("none", n=1)
    all_right = Line("q0", "my house", "p0", public()["p0"], frozenset(public()))
    batch = batch_of(module.collate_rows([all_right]))
    module.before_batch(batch)
    assert float(module.per_row_loss(batch.rows)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("privacy", "settings", "message"),
    [
        (PublicPassages(**NOISE), {"loss": SymmetricSoftmaxPairLoss(temperature=1.0)}, "couple them"),
        (NoPrivacy(), {"passage_tower": "frozen"}, r"model\.towers=separate"),
        (NoPrivacy(), {"lora": {"rank": 2}}, r"peft\.LoraConfig"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(privacy: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dual(privacy, **settings)
