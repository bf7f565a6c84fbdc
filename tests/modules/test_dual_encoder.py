"""The dual encoder: its loss, its towers under every privacy mode, public passages, GradCache, and its folder."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from negative_cases import NOISE, PASSAGES, dual, in_double, lines, texts
from negative_cases import tower as bert_tower
from pair_stand_ins import batch_of, clipped_sum, data_module, plan_of
from stand_ins import Line, dp, fit
from tiny_models import WORDS, tiny_bert, tiny_t5, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertModel

from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.losses import SigmoidPairLoss, SymmetricSoftmaxPairLoss
from lit_dpret.modules import DualEncoder
from lit_dpret.negatives import BM25Negatives, DynamicNegatives, InBatchNegatives
from lit_dpret.privacy.batches import rows_in_turn, take_rows
from lit_dpret.privacy.clipping.base import room_for_rounding
from lit_dpret.privacy.clipping.pairs import BruteForce
from lit_dpret.privacy.modes import BatchClip, LogitDP, NoPrivacy, PerExampleDuplicated, PrivacyMode, PublicPassages

SHAPE = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LENGTHS = {"query_max_length": 6, "passage_max_length": 8}
FROZEN = {"towers": "separate", "passage_tower": "frozen"}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["query", "value", "q", "v"]}


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


def test_a_passage_is_never_a_negative_of_a_query_that_it_answers() -> None:
    module = dual()
    queries = module.encode_queries([row.query for row in ROWS])
    passages = module.encode_passages([row.passage for row in ROWS])
    for i, loss in enumerate(module.per_row_loss(module.collate_rows(ROWS))):
        kept = [j for j in range(len(ROWS)) if j not in NOT_NEGATIVES[i]]
        logits = (passages[kept] @ queries[i] / 0.5).unsqueeze(0)
        torch.testing.assert_close(loss, cross_entropy(logits, torch.tensor([kept.index(i)])))


def test_processes_do_not_share_a_batch_that_its_loss_takes_whole() -> None:
    trainer: Any = SimpleNamespace(world_size=2)
    module = dual()
    module._trainer = trainer
    with pytest.raises(ConfigurationError, match=r"2 processes share .* Set privacy\.sub_batches"):
        module.setup("fit")
    module = dual(NoPrivacy(sub_batches=2))
    module._trainer = trainer
    module.setup("fit")


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"physical_batch_size": 4}, r"datamodule\.physical_batch_size=4"),
        ({"physical_batch_size": 4, "expected_batch_size": None, "sample_rate": 1.0}, "must not be split"),
        ({"sampling": "truncated_poisson", "cap": 13}, "couples the examples"),
    ],
    ids=["that would be cut", "that is cut after all", "of dp_sgd"],
)
def test_a_batch_that_its_loss_cannot_take_is_refused_before_an_update(
    sampling: dict[str, Any], named: str, tmp_path: Path
) -> None:
    module = dual(dp(tmp_path, noise_multiplier=4.0) if "cap" in sampling else None)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=named):
        fit(tmp_path / "run", module, data_module(tmp_path / "data", **sampling))
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    plain, saving = dual(), dual(gradient_checkpointing=True)
    assert saving.encoder.backbone.is_gradient_checkpointing
    for module in (plain, saving):
        module.train().per_row_loss(module.collate_rows(ROWS)).sum().backward()
    for one, two in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_a_row_alone_has_a_loss_although_its_normaliser_was_left_open() -> None:
    module = dual(loss=SigmoidPairLoss(temperature=0.5))
    assert torch.isfinite(module.per_row_loss(module.collate_rows(ROWS[:1]))).all()


# -- where its encoder comes from, and what it saves ------------------------------------------


def test_an_encoder_is_loaded_from_a_folder_or_built_from_a_config(tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    module = dual(encoder=tmp_path, max_query_length=6, max_passage_length=7, query_prefix="query: ", passage_prefix="")
    contract = module.encoder.contract
    assert (contract.query_max_length, contract.passage_max_length, contract.query_prefix) == (6, 7, "query: ")
    assert (contract.pooling, contract.normalise) == ("mean", True)
    assert module.collate_rows(ROWS)["query"]["input_ids"].shape[1] <= 6
    new = dual(encoder=None, config=SHAPE, tokenizer=tmp_path)
    assert isinstance(new.encoder.backbone, BertModel)
    assert new.per_row_loss(new.collate_rows(ROWS)).isfinite().all()
    assert all(p.dtype == torch.float32 and p.requires_grad for p in new.parameters())


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
    given = [row.passage for row in ROWS]
    assert torch.equal(second.encode_passages(given), loaded.passage_encoder.encode(given, "passage"))
    assert not torch.equal(second.encode_passages(given), second.tower("query").encode(given, "passage"))
    contract = second.tower("passage").contract
    assert (contract.query_prefix, contract.query_max_length, contract.passage_max_length) == ("q: ", 6, 10)
    sides = [{id(weight) for weight in second.tower(side).parameters()} for side in ("query", "passage")]
    assert not sides[0] & sides[1] and second.tower("query").training and second.tower("passage").training
    second.save_model(tmp_path / "again")
    third = again(towers="separate", encoder=str(tmp_path / "again"))
    assert torch.equal(third.encode_queries(given), second.encode_queries(given))
    assert torch.equal(third.encode_passages(given), second.encode_passages(given))
    with pytest.raises(UnsupportedModelError, match=r"model\.towers=separate"):
        again(encoder=str(tmp_path))


def test_a_saved_folder_holds_both_towers_and_merged_adapters(tmp_path: Path) -> None:
    module = dual(lora=LORA, towers="separate")
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.requires_grad):
            parameter.add_(0.3)
    module.save_model(tmp_path / "model")
    loaded = load_towers(tmp_path / "model")
    given = ["flood insurance", "my house"]
    torch.testing.assert_close(loaded.query_encoder.encode(given, "query"), module.encode_queries(given))
    torch.testing.assert_close(loaded.passage_encoder.encode(given, "passage"), module.encode_passages(given))
    assert not torch.allclose(module.encode_queries(given), dual().encode_queries(given), atol=1e-3)


# -- every mode and every kind of tower -------------------------------------------------------


MODES = ["none", "batch_clip", "per_example_duplicated", "logit_dp", "public none", "public own", "public full"]


def mode_of(name: str, folder: Path) -> PrivacyMode:
    private = {**NOISE, "secret_file": folder / "secret"}
    if name.startswith("public"):
        gradient: Any = name.removeprefix("public ")
        return PublicPassages(max_grad_norm=0.1, pool_size=6, passage_gradient=gradient, **private)
    if name == "logit_dp":
        return LogitDP(max_logit_grad_norm=0.1, **private)
    kinds = {"batch_clip": BatchClip, "per_example_duplicated": PerExampleDuplicated}
    return NoPrivacy() if name == "none" else kinds[name](max_grad_norm=0.1, **private)


def t5_tower() -> TextEncoder:
    return TextEncoder(tiny_t5(dropout_rate=0.0), tiny_tokenizer(eos_only=True), Contract(**LENGTHS))


TOWERS: dict[str, Any] = {
    "shared": lambda: {},
    "t5": lambda: {"encoder": t5_tower()},
    "separate": lambda: {"towers": "separate"},
    "frozen": lambda: FROZEN,
    "lora": lambda: {"lora": LORA},
    "t5-lora-separate": lambda: {"encoder": t5_tower(), "lora": LORA, "towers": "separate"},
}
#: Every mode under the shared tower, and under one of the others in turn; the rest of the table is slow.
OTHERS = [name for name in TOWERS if name != "shared"]
SOON = {*((mode, "shared") for mode in MODES), *zip(MODES, itertools.cycle(OTHERS), strict=False)}


@pytest.mark.costly
@pytest.mark.like(3)
@pytest.mark.parametrize(
    ("name", "towers"),
    [pytest.param(*pair, marks=() if pair in SOON else pytest.mark.slow) for pair in itertools.product(MODES, TOWERS)],
)
def test_every_mode_trains_every_kind_of_tower(name: str, towers: str, tmp_path: Path) -> None:
    settings, frozen = TOWERS[towers](), towers == "frozen"
    if frozen and name in ("public own", "public full"):
        with pytest.raises(ConfigurationError, match=r"passage_gradient=(own|full) has nothing to train"):
            dual(mode_of(name, tmp_path), **settings)
        return
    module = dual(mode_of(name, tmp_path), temperature=1.0, **settings)
    before = {key: value.clone() for key, value in module.named_parameters()}
    sampling = {"sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6}
    fit(tmp_path / "run", module, data_module(tmp_path / "data", **sampling), steps=2)
    for key, value in module.named_parameters():
        assert torch.equal(value, before[key]) != value.requires_grad, key
    trained = {side for side in ("query", "passage") if any(p.requires_grad for p in module.tower(side).parameters())}
    assert trained == ({"query"} if frozen else {"query", "passage"})


def some_rows(n: int) -> list[Line]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        words = [WORDS[k] for k in torch.randint(len(WORDS), (8,), generator=generator).tolist()]
        rows.append(line(" ".join(words[:3]), f"p{i}", " ".join(words[3:])))
    return rows


@pytest.mark.parametrize("make", [bert_tower, t5_tower], ids=["bert", "t5"])
def test_the_step_of_logit_dp_is_algorithm_1_on_a_transformer(make: Any) -> None:
    mode = LogitDP(max_logit_grad_norm=0.02, norms="pair_ghost", **NOISE)
    module = dual(mode, encoder=make(), temperature=1.0).double()
    rows = module.collate_rows(some_rows(3))
    found = clipped_sum(module, plan_of(mode, module, n_max=3), rows)
    module.eval()
    gradients = BruteForce(module).gradients(module.pair_batch(rows))
    flat = torch.cat([g.flatten(2) for g in gradients.values()], dim=2)
    lowered = room_for_rounding(0.02, [flat])
    bounded = flat * (lowered / flat.norm(dim=2, keepdim=True)).clamp(max=1.0)
    scores = module.embed(rows["query"], "query") @ module.embed(rows["passage"], "passage").T
    expected = torch.einsum("ij,ijp->p", module.pair_loss(3).coefficients(scores.detach(), rows["answers"]), bounded)
    # T5 takes its mean square in fp32, so two ways to the same sum differ by that
    close = 1e-6 if make is t5_tower else 1e-10
    assert float((found - expected).norm() / expected.norm()) < close


@pytest.mark.parametrize("hard", [False, True], ids=["the pool alone", "the pool and mined negatives"])
@pytest.mark.parametrize("gradient", ["none", "own", "full"])
def test_the_clipped_sum_is_that_of_each_rows_softmax_over_public_passages(gradient: Any, hard: bool) -> None:
    mode = PublicPassages(max_grad_norm=1e6, pool_size=5, passage_gradient=gradient, **NOISE)
    module = in_double(mode, **({"negatives": [BM25Negatives(per_query=2, depth=8)]} if hard else {}))
    batch = batch_of(module.collate_rows(lines(0, 1, 4)))
    module.before_batch(batch)
    found = clipped_sum(module, plan_of(mode, module, n_max=8), batch.rows)
    pool = module._pool.draw(0, module.device).chosen  # type: ignore[union-attr]
    names = sorted(PASSAGES)
    total = torch.zeros(())
    for i, row in enumerate(lines(0, 1, 4)):
        own = [row.passage_id, *(names[p] for p in (batch.rows["own_at"][i].tolist() if hard else ()))]
        drawn = [names[p] for p in pool.tolist() if names[p] not in row.positives]  # type: ignore[union-attr]
        parts = []
        for ids, through in ((own, gradient != "none"), (drawn, gradient == "full")):
            embedded = module.embed(module.encoder.tokenize([PASSAGES[p] for p in ids], "passage"), "passage")
            parts.append(embedded if through else embedded.detach())
        query = module.embed(module.encoder.tokenize([row.query], "query"), "query")[0]
        logits = torch.cat(parts) @ query / 0.5
        total = total + cross_entropy(logits.unsqueeze(0), torch.tensor([0]))
    expected = torch.autograd.grad(total, [p for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in expected]), rtol=1e-6, atol=1e-9)


def test_a_row_whose_answers_are_the_whole_pool_has_no_loss() -> None:
    module = in_double(PublicPassages(max_grad_norm=1e6, pool_size=5, **NOISE))
    batch = batch_of(module.collate_rows([Line("q0", "my house", "p0", PASSAGES["p0"], frozenset(PASSAGES))]))
    module.before_batch(batch)
    assert float(module.per_row_loss(batch.rows)) == pytest.approx(0.0, abs=1e-9)


# -- GradCache: the gradient of a large batch from small passes, dropout included -------------


DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
HARD = {"negatives": [InBatchNegatives(), BM25Negatives(per_query=2, depth=8)]}
CACHED: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"towers": "separate"},
    "hard negatives": HARD,
    "shared hard negatives": {"negatives": [InBatchNegatives(), BM25Negatives(depth=8, shared_in_batch=True)]},
    "separate, hard negatives": {"towers": "separate", **HARD},
    "dynamic": {**FROZEN, "negatives": [InBatchNegatives(), DynamicNegatives()]},
    "another loss": {"loss": SigmoidPairLoss(temperature=1.0)},
    "checkpointing inside": {"gradient_checkpointing": True},
    "lora": {"lora": {**LORA, "lora_dropout": 0.2, "target_modules": ["query", "value"]}},
}


def with_dropout(case: dict[str, Any], at_once: int | None, dtype: torch.dtype = torch.float64) -> DualEncoder:
    module = dual(encoder=bert_tower(**DROPOUT), grad_cache_rows=at_once, **case).to(dtype).train()
    module.learn_negatives(texts())
    return module


def gradients(module: DualEncoder, *, seed: int = 7, autocast: bool = False) -> list[Tensor]:
    """The losses of a batch, and their gradients."""
    batch = batch_of(module.collate_rows(lines(0, 1, 3, 4, 6)))
    module.before_batch(batch)
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        losses = module.per_row_loss(batch.rows)
    found = torch.autograd.grad(losses.sum(), [p for p in module.parameters() if p.requires_grad], allow_unused=True)
    return [losses, *(torch.zeros(()) if g is None else g for g in found)]


def in_one_graph(module: DualEncoder, at_once: int, **settings: Any) -> list[Tensor]:
    """`gradients` of chunk after chunk, and so with the same random numbers, in one graph that is kept whole."""

    def embed_all(embed: Any, features: Any, *, count: int, rows_at_once: int) -> Tensor:
        return torch.cat([embed(take_rows(features, part)) for part in rows_in_turn(count, at_once)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_dpret.modules.dual_encoder.embed_in_chunks", embed_all)
        return gradients(module, **settings)


@pytest.mark.parametrize("name", CACHED)
def test_cached_gradients_are_those_of_one_graph_with_dropout_on(name: str) -> None:
    module = with_dropout(CACHED[name], 2)
    found, expected = gradients(module), in_one_graph(module, 2)
    assert any(float(g.abs().max()) > 1e-3 for g in expected[1:])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_they_are_the_same_in_lower_precision_and_others_under_other_masks(autocast: bool) -> None:
    module = with_dropout(HARD, 2, torch.float32)
    found, expected = gradients(module, autocast=autocast), in_one_graph(module, 2, autocast=autocast)
    assert found[0].dtype == torch.float32, "the loss is taken outside of autocast"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], gradients(module, seed=8, autocast=autocast)[0])


def test_without_dropout_they_are_those_of_a_pass_over_all_rows_at_once() -> None:
    found = [gradients(dual(grad_cache_rows=at_once).double().train()) for at_once in (None, 2)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    sums = []
    for at_once in (None, 2):
        module = dual(BatchClip(max_grad_norm=0.01, **NOISE), grad_cache_rows=at_once).double()
        rows = module.collate_rows(lines(0, 1, 2, 3, 4))
        sums.append(clipped_sum(module, plan_of(module.privacy, module, n_max=8), rows))
    assert float(sums[0].norm()) == pytest.approx(0.01)
    torch.testing.assert_close(*sums, rtol=1e-8, atol=1e-12)


def test_the_cache_leaves_the_random_state_as_it_was_and_keeps_nothing_without_a_gradient() -> None:
    module = with_dropout({}, 2)
    losses = module.per_row_loss(module.collate_rows(lines(0, 1, 2)))
    before = torch.get_rng_state()
    losses.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        assert not module.per_row_loss(module.collate_rows(lines(0, 1, 2))).requires_grad


def test_no_more_than_a_chunk_is_remembered() -> None:
    """What is kept for the backward pass, counted in the encoder's own tensors."""

    def kept(at_once: int | None) -> int:
        module, sizes = with_dropout({}, at_once, torch.float32), []
        rows = module.collate_rows(lines(0, 1, 2, 3, 4, 5, 6, 7))
        weights = {p.data_ptr() for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(0 if tensor.data_ptr() in weights else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module.per_row_loss(rows)
        return sum(sizes)

    whole = kept(None)
    assert kept(2) < whole / 10


# -- refusals ---------------------------------------------------------------------------------


UNSCALED = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(normalise=False, **LENGTHS))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"encoder": None}, r"model\.encoder=None and model\.config=None"),
        ({"encoder": "minilm", "config": SHAPE}, r"model\.encoder"),
        ({"encoder": None, "config": SHAPE}, r"model\.tokenizer"),
        ({"encoder": None, "config": {"hidden_size": 4}, "tokenizer": "HERE"}, "model_type"),
        ({"encoder": None, "config": {**SHAPE, "vocab_size": 3}, "tokenizer": "HERE"}, "vocab_size|do not belong"),
        ({"temperature": 0.0}, "temperature"),
        ({"encoder": UNSCALED}, "normalise"),
        (
            {"privacy": PublicPassages(**NOISE), "loss": SymmetricSoftmaxPairLoss(temperature=1.0)},
            "privacy=public_passages|couple them",
        ),
        ({"passage_tower": "frozen"}, r"model\.towers=separate"),
        ({"lora": {"rank": 2}}, r"peft\.LoraConfig"),
        ({"grad_cache_rows": 0}, r"model\.grad_cache_rows=0"),
        ({"negatives": [DynamicNegatives()]}, r"model\.passage_tower=frozen"),
        ({"negatives": [InBatchNegatives()], "passage_cache_dir": Path("cache")}, r"model\.passage_tower=frozen"),
        ({**HARD, "loss": SigmoidPairLoss(temperature=1.0)}, r"model\.negatives=in_batch,bm25.*model\.loss"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {name: tmp_path if value == "HERE" else value for name, value in settings.items()}
    with pytest.raises(ConfigurationError, match=named):
        dual(**given)


@pytest.mark.parametrize("name", ["public none", "logit_dp", "per_example_duplicated"])
def test_modes_that_clip_inside_the_batch_refuse_the_cache(name: str, tmp_path: Path) -> None:
    mode = mode_of(name, tmp_path)
    smaller = r"lower datamodule\.physical_batch_size" if name == "public none" else r"raise privacy\.sub_batches"
    with pytest.raises(ConfigurationError, match=rf"grad_cache_rows=8 cannot go with privacy={mode.name}.*{smaller}\."):
        dual(mode, grad_cache_rows=8)
