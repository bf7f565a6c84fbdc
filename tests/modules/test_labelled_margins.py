"""Dual encoders that learn the margins of a teacher: the loss by hand, what they learn, and what they refuse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_heads import frozen
from negative_cases import JUDGED, NOISE, PASSAGES, QUERIES, dual, in_double, lines
from pair_stand_ins import batch_of
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.modules import DualEncoder, FrozenDualEncoder
from lit_dpret.negatives import BM25Negatives, InBatchNegatives, LabelledNegatives, NegativeSource, RandomNegatives
from lit_dpret.negatives.drawn import LabelledNegative
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.clipping import ENGINES, make_engine
from lit_dpret.privacy.clipping.base import room_for_rounding
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, NoPrivacy, PublicPassages, SyntheticData

#: Query i is told from two passages; query 3 has no label.
LABELS = [
    LabelledNegative(query_id=f"q{i}", passage_id=f"p{2 * i}", negative_id=name, margin=margin)
    for i in (0, 1, 2)
    for name, margin in ((f"p{2 * i + 7}", 4.0 - i), (f"p{2 * i + 9}", -1.5))
]


def labelled(folder: Path, records: list[LabelledNegative] = LABELS, **settings: Any) -> LabelledNegatives:
    path = folder / "labels.tsv"
    path.write_text("".join(record.line() for record in records))
    return LabelledNegatives(file=path, **{"per_query": 2} | settings)


def ready(module: DualEncoder, *numbers: int, queries: dict[str, str] = QUERIES) -> UnitBatch:
    batch = batch_of(module.collate_rows(lines(*numbers, queries=queries)))
    module.before_batch(batch)
    return batch


def test_fewer_are_drawn_where_fewer_are_asked_for_anew_in_every_epoch(tmp_path: Path) -> None:
    source = labelled(tmp_path, per_query=1)
    module = in_double(loss=MarginMSELoss(), negatives=[source])
    names, seen = sorted(PASSAGES), set()
    for epoch in range(20):
        made = module._negatives.of_rows.places(  # type: ignore[union-attr]
            ready(module, 0).rows, step=0, epoch=epoch, embed=lambda: torch.zeros(1, 1)
        )
        name, margin = names[int(made["own_at"])], float(made["own_margins"])
        assert (name, margin) in {("p7", 4.0), ("p9", -1.5)}
        seen.add(name)
    assert seen == {"p7", "p9"}


@pytest.mark.parametrize("sources", [None, [InBatchNegatives()], [RandomNegatives()]])
def test_the_loss_without_labels_is_refused(sources: list[NegativeSource] | None) -> None:
    with pytest.raises(ConfigurationError, match=r"Set negatives=labelled and model.negatives.labelled.file"):
        dual(loss=MarginMSELoss(), negatives=sources)


def test_labels_go_with_a_softmax_too_and_beside_other_sources(tmp_path: Path) -> None:
    module = in_double(negatives=[InBatchNegatives(), labelled(tmp_path)])
    assert bool(torch.isfinite(module.per_row_loss(ready(module, 0, 1, 3).rows)).all())
    with pytest.raises(ConfigurationError, match=r"in_batch,labelled cannot go with model\.loss=MarginMSELoss"):
        dual(loss=MarginMSELoss(), negatives=[InBatchNegatives(), labelled(tmp_path)])


def test_private_modes_ask_for_the_declaration_and_take_no_other_loss_than_they_prove(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"labelled.lines_are_independent=true"):
        dual(DPSGD(max_grad_norm=1.0, **NOISE), loss=MarginMSELoss(), negatives=[labelled(tmp_path)])
    declared = [labelled(tmp_path, lines_are_independent=True)]
    with pytest.raises(ConfigurationError, match="privacy=public_passages"):
        dual(PublicPassages(max_grad_norm=1.0, **NOISE), loss=MarginMSELoss(), negatives=declared)
    with pytest.raises(ConfigurationError, match="cannot go with privacy=logit_dp"):
        dual(LogitDP(max_logit_grad_norm=1.0, **NOISE), loss=MarginMSELoss(), negatives=declared)


# -- also as the head of a frozen encoder -----------------------------------------------------


class _Data:
    """A DataModule as far as labels look at it."""

    planted_facts = None

    def public_passages(self) -> dict[str, str]:
        return PASSAGES

    def pair_rows(self, split: str = "train") -> list[Any]:
        return list(lines(*range(8)))

    def evaluation_set(self, split: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        return QUERIES, JUDGED


def head(folder: Path, privacy: Any = None, **settings: Any) -> FrozenDualEncoder:
    settings.setdefault("loss", MarginMSELoss(temperature=0.1))
    if "negatives" not in settings:
        settings["negatives"] = {"labelled": labelled(folder)}
    module = frozen(privacy=privacy or NoPrivacy(), **settings)
    module.prepare(_Data())
    return module


def losses_of(module: Any, *numbers: int, queries: dict[str, str] = QUERIES) -> Tensor:
    return module.per_row_loss(ready(module, *numbers, queries=queries).rows)


def trained_whole(folder: Path) -> DualEncoder:
    return in_double(loss=MarginMSELoss(temperature=0.1), negatives=[labelled(folder)])


@pytest.mark.parametrize(
    ("make", "close"),
    [
        (trained_whole, {"rtol": 1e-5, "atol": 0.0}),
        (head, {"rtol": 1e-4, "atol": 1e-4}),
        (partial(head, head_dim=5), {"rtol": 1e-4, "atol": 1e-4}),
    ],
)
def test_the_loss_of_a_row_is_the_error_of_its_labelled_margins(make: Any, close: Any, tmp_path: Path) -> None:
    module = make(tmp_path)
    found = losses_of(module, 0, 2, 3)
    for row, i in enumerate((0, 2)):
        own, *others = module.encode_passages(
            [PASSAGES[name] for name in (f"p{2 * i}", f"p{2 * i + 7}", f"p{2 * i + 9}")]
        )
        query = module.encode_queries([QUERIES[f"q{i}"]])[0]
        margins = [(query @ own - query @ other) / 0.1 for other in others]
        wanted = sum((margin - label) ** 2 for margin, label in zip(margins, (4.0 - i, -1.5), strict=True)) / 2
        torch.testing.assert_close(found[row], wanted.to(found), **close)
    assert found[2].item() == 0  # no label, no loss


def test_places_are_those_of_the_embeddings_whatever_the_order_of_the_list(tmp_path: Path) -> None:
    """Labels count passages by the order of their ids, and embeddings stand in the order of `prepare_texts`."""
    module = head(tmp_path)
    wanted = losses_of(module, 0, 1, 2)
    module.prepare_texts(dict(reversed(sorted(PASSAGES.items()))), QUERIES)
    torch.testing.assert_close(losses_of(module, 0, 1, 2), wanted)


def test_a_private_row_moves_its_own_loss_alone(tmp_path: Path) -> None:
    """Under DP-SGD the labels of a row are its own, so poisoning one query changes one row's loss."""
    mode = DPSGD(max_grad_norm=1.0, **NOISE)
    sources: list[NegativeSource] = [labelled(tmp_path, lines_are_independent=True)]
    for module in (head(tmp_path, mode, negatives=sources), in_double(mode, loss=MarginMSELoss(), negatives=sources)):
        plain = losses_of(module, 0, 1, 2)
        poisoned = losses_of(module, 0, 1, 2, queries={**QUERIES, "q1": "policy best best"})
        assert torch.equal(plain[[0, 2]], poisoned[[0, 2]]) and plain[1] != poisoned[1]


def test_every_engine_clips_a_row_with_labels_alone(tmp_path: Path) -> None:
    sources = [labelled(tmp_path, lines_are_independent=True)]
    module = head(tmp_path, DPSGD(max_grad_norm=1.0, **NOISE), negatives=sources)
    batch = ready(module, 0, 1, 2)
    assert not module.coupled_loss
    (assumed,) = module.assumptions()
    assert "model.negatives.labelled (labels.tsv)" in assumed and "as declared" in assumed
    by_hand = torch.zeros_like(module.query_head.weight)
    for loss in module.per_row_loss(batch.rows):
        (gradient,) = torch.autograd.grad(loss, module.query_head.weight, retain_graph=True)
        by_hand += gradient * min(1.0, room_for_rounding(0.5, [gradient]) / float(gradient.norm()))
    for engine in ENGINES.keys() - {"ghost_tf32", "ghost_bf16"}:  # which round what they clip
        clipper = make_engine(engine, module, max_grad_norm=0.5)
        clipper.add(module.unit_loss(batch), batch.unit_ids, batch.mask)
        torch.testing.assert_close(clipper.take()["query_head.weight"], by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": None}, r"model\.negatives=labelled .* model\.loss=null\. Set loss=margin_mse"),
        ({"negatives": "pool"}, r"model\.negatives=pool has no labels for model\.loss=MarginMSELoss"),
        ({"negatives": [RandomNegatives()]}, r"must be auto, pool, batch or labelled, not random"),
        ({"negatives": []}, r"labelled, not \[\]"),
        ({"negatives": {"bm25": BM25Negatives()}}, "model=dual_encoder"),
        ({"head": "both"}, r"model\.head=both .* cannot go with model\.negatives=labelled"),
        ({"pool_size": 4}, r"model\.pool_size=4 cannot go with model\.negatives=labelled"),
        (
            {"privacy": PublicPassages(max_grad_norm=1.0, **NOISE)},
            r"privacy=public_passages is for a loss over passages",
        ),
        (
            {"privacy": BatchClip(max_grad_norm=1.0, sub_batches=2, **NOISE)},
            r"privacy=batch_clip is for a loss over passages",
        ),
        ({"privacy": DPSGD(max_grad_norm=1.0, **NOISE), "declare": False}, r"labelled\.lines_are_independent=true"),
    ],
)
def test_what_cannot_go_with_labels_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    declared = settings.pop("declare", True)
    known: dict[str, Any] = {"negatives": [labelled(tmp_path, lines_are_independent=declared)]}
    with pytest.raises(ConfigurationError, match=message):
        head(tmp_path, **known | settings)


def test_synthetic_queries_need_no_declaration_and_labels_of_other_data_are_refused(tmp_path: Path) -> None:
    (assumed,) = head(tmp_path, SyntheticData()).assumptions()
    assert "from the queries that the parent of this card covers" in assumed and "declared" not in assumed
    other = [LabelledNegative(query_id="x", passage_id="p0", negative_id="p1", margin=1.0)]
    with pytest.raises(DataError, match="labels no train query"):
        head(tmp_path, negatives=[labelled(tmp_path, other)])
    missing = FrozenDualEncoder(
        privacy=NoPrivacy(), optimizer=frozen().optimizer_spec, encoder=frozen().encoder, loss=MarginMSELoss(),
        negatives=[LabelledNegatives(file=tmp_path / "missing.tsv")],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"missing\.tsv cannot be read"):
        missing.prepare(_Data())
    assert not len(missing.passage_embeddings), "nothing was encoded before"
    with pytest.raises(ConfigurationError, match=r"Call prepare\(datamodule\)"):
        losses_of(frozen(loss=MarginMSELoss(), negatives=[labelled(tmp_path)]), 0)
