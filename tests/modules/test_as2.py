"""The dual encoder of answer selection: what a row's loss is, which sides learn, what one row can do to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from negative_cases import JUDGED, NOISE, PASSAGES, QUERIES, lines, texts
from negative_cases import tower as tiny_tower
from pair_stand_ins import batch_of
from stand_ins import Line
from torch import Tensor

from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.aggregation import take_weights
from lit_dpret.federated.negatives import FedNegatives, FedPool
from lit_dpret.modules import AS2DualEncoder, OptimizerSpec
from lit_dpret.negatives import BM25Negatives, DynamicNegatives, InBatchNegatives, NegativeSource, StaticNegatives
from lit_dpret.privacy.modes import DPSGD, LogitDP, NoPrivacy


def as2(privacy: Any = None, **settings: Any) -> AS2DualEncoder:
    module = AS2DualEncoder(
        privacy=privacy or NoPrivacy(), optimizer=OptimizerSpec(lr=0.01), **{"encoder": tiny_tower(), **settings}
    ).double()
    module.learn_negatives(texts())
    return module


def losses(module: AS2DualEncoder, *numbers: int) -> Tensor:
    return module.per_row_loss(ready(module, *numbers))


def ready(module: AS2DualEncoder, *numbers: int) -> Any:
    batch = batch_of(module.collate_rows(lines(*numbers)))
    module.before_batch(batch)
    return batch.rows


def test_a_question_is_its_cls_a_sentence_its_mean_and_neither_is_scaled() -> None:
    module = as2()
    words = ["how to file"]
    features = module.encoder.tokenize(words, "query")
    hidden = module.encoder.backbone(**features).last_hidden_state
    torch.testing.assert_close(module.encode_queries(words), hidden[:, 0].detach())
    torch.testing.assert_close(module.encode_passages(words), hidden.mean(1).detach())
    assert float(module.encode_queries(words).norm()) != pytest.approx(1.0, abs=0.05)


def test_the_loss_is_the_softmax_of_dot_products_over_the_batch_or_over_the_rows_own_negatives() -> None:
    rows = lines(0, 1, 2)
    module = as2()
    queries, sentences = (
        module.encode_queries([row.query for row in rows]),
        module.encode_passages([row.passage for row in rows]),
    )
    wanted = torch.nn.functional.cross_entropy(queries @ sentences.T, torch.arange(3), reduction="none")
    torch.testing.assert_close(losses(module, 0, 1, 2), wanted)
    mined = as2(negatives=[StaticNegatives(per_query=2, depth=2)])
    rows_of_3 = ready(mined, 3)
    own = mined.encode_passages([texts().passages[place] for place in rows_of_3["own_at"][0].tolist()])
    row = lines(3)[0]
    logits = torch.cat([mined.encode_passages([row.passage]), own]) @ mined.encode_queries([row.query])[0]
    torch.testing.assert_close(
        mined.per_row_loss(rows_of_3), torch.nn.functional.cross_entropy(logits[None], torch.tensor([0]))[None]
    )


def test_stage_2_starts_from_the_weights_of_stage_1_on_both_sides() -> None:
    shared = as2()
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.add_(0.1)
    personal = as2(towers="separate", passage_tower="frozen")
    personal.put_global(take_weights(shared))
    words = ["life policy", "my house"]
    torch.testing.assert_close(personal.encode_queries(words), shared.encode_queries(words), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(personal.encode_passages(words), shared.encode_passages(words), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigurationError, match="are of another model: encoder"):
        personal.put_global({})


def test_frozen_word_embeddings_are_in_no_update_and_stage_2_still_starts_from_it() -> None:
    def as2_of_frozen(**settings: Any) -> AS2DualEncoder:
        tower = tiny_tower()
        tower.backbone.get_input_embeddings().requires_grad_(False)
        return as2(encoder=tower, **settings)

    frozen = as2_of_frozen()
    table = frozen.encoder.backbone.get_input_embeddings().weight
    shared = take_weights(frozen)
    assert not [name for name in shared if "word_embeddings" in name]
    assert len(shared) == len(take_weights(as2())) - 1
    before = table.detach().clone()
    losses(frozen, 0, 1).sum().backward()
    assert table.grad is None and torch.equal(table.detach(), before)
    moved = {name: value + 0.25 for name, value in shared.items()}
    second = as2_of_frozen(towers="separate", passage_tower="frozen")
    second.put_global(moved)
    for tower in (second.encoder, second.tower("passage")):
        found = dict(tower.named_parameters())
        assert all(torch.equal(found[name.removeprefix("encoder.")].float(), moved[name]) for name in moved)
    assert not second.encoder.backbone.get_input_embeddings().weight.requires_grad


def test_what_is_saved_loads_as_two_poolings_of_one_transformer(tmp_path: Path) -> None:
    module = as2().float()
    towers = load_towers(module.save_model(tmp_path / "model"))
    words = list(PASSAGES.values())[:4]
    torch.testing.assert_close(towers.query_encoder.encode(words, "query"), module.encode_queries(words))
    torch.testing.assert_close(towers.passage_encoder.encode(words, "passage"), module.encode_passages(words))


# -- one row and another ---------------------------------------------------------------------

STAGE_2 = {"towers": "separate", "passage_tower": "frozen"}
POOL = FedPool(torch.randn(9, 16, generator=torch.Generator().manual_seed(0)))
SOURCES: dict[str, Callable[[], list[NegativeSource]]] = {
    "bm25": lambda: [BM25Negatives(per_query=2, depth=6)],
    "static": lambda: [StaticNegatives(per_query=2, depth=6)],
    "dynamic": lambda: [DynamicNegatives(per_query=2, depth=5)],
    "fed": lambda: [FedNegatives(POOL, per_query=3, depth=6)],
}


def clipped_gradients(
    sources: list[NegativeSource] | None, *, other_record: bool, **settings: Any
) -> list[list[Tensor]]:
    """Each row's clipped gradient out of one batch; with ``other_record`` query 0 asks, and is answered, otherwise."""
    queries, judged, rows = dict(QUERIES), {name: dict(grades) for name, grades in JUDGED.items()}, lines(0, 1, 2, 3)
    if other_record:
        queries["q0"], judged["q0"] = "best life policy", {"p19": 1}
        rows[0] = Line("q0", queries["q0"], "p19", PASSAGES["p19"], frozenset(["p19"]))
    module = AS2DualEncoder(
        privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=tiny_tower(), negatives=sources, **settings
    ).double()
    module.learn_negatives(texts(queries=queries, judged=judged))
    batch = batch_of(module.collate_rows(rows))
    module.before_batch(batch)
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = []
    for loss in module.per_row_loss(batch.rows):
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        found.append([g * min(1.0, float(0.1 / norm)) for g in gradients if g is not None])
    return found


def changed_rows(sources: Callable[[], list[NegativeSource] | None], **settings: Any) -> list[int]:
    before, after = (clipped_gradients(sources(), other_record=other, **settings) for other in (False, True))
    return [row for row in range(4) if not all(map(torch.equal, before[row], after[row]))]


@pytest.mark.parametrize(
    ("name", "settings"), [("bm25", {}), ("static", {}), ("dynamic", STAGE_2), ("fed", STAGE_2), ("bm25", STAGE_2)]
)
def test_another_record_leaves_every_other_clipped_gradient_as_it_was_bit_by_bit(name: str, settings: Any) -> None:
    assert changed_rows(SOURCES[name], **settings) == [0]


def test_a_private_mode_refuses_negatives_of_the_batch_and_modes_for_cosines_are_refused() -> None:
    private = DPSGD(**NOISE)
    with pytest.raises(ConfigurationError, match=r"model\.negatives=in_batch cannot go with privacy=dp_sgd"):
        as2(private, negatives=[InBatchNegatives(), BM25Negatives()])
    assert as2(private).coupled_loss and not as2(private, negatives=[BM25Negatives()]).coupled_loss
    with pytest.raises(ConfigurationError, match="by the dot product"):
        as2(LogitDP(eps=1.0, delta=1e-6, max_logit_grad_norm=0.1))
