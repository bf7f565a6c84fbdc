"""A dual encoder that learns the margins of a teacher: its loss by hand, what it learns, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from negative_cases import NOISE, PASSAGES, QUERIES, dual, in_double, lines
from pair_stand_ins import batch_of

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.modules import DualEncoder
from lit_dpret.negatives import InBatchNegatives, LabelledNegatives, NegativeSource, RandomNegatives
from lit_dpret.negatives.drawn import LabelledNegative
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.modes import DPSGD, LogitDP, PublicPassages

#: Query i is told from two passages; query 3 has no label.
LABELS = [
    LabelledNegative(query_id=f"q{i}", passage_id=f"p{2 * i}", negative_id=name, margin=margin)
    for i in (0, 1, 2)
    for name, margin in ((f"p{2 * i + 7}", 4.0 - i), (f"p{2 * i + 9}", -1.5))
]


def written(folder: Path, labels: list[LabelledNegative] = LABELS) -> Path:
    path = folder / "labels.tsv"
    path.write_text("".join(label.line() for label in labels))
    return path


def labelled(folder: Path, **settings: Any) -> LabelledNegatives:
    return LabelledNegatives(file=written(folder), **{"per_query": 2} | settings)


def ready(module: DualEncoder, *numbers: int, queries: dict[str, str] = QUERIES) -> UnitBatch:
    batch = batch_of(module.collate_rows(lines(*numbers, queries=queries)))
    module.before_batch(batch)
    return batch


def test_the_loss_of_a_row_is_the_error_of_its_labelled_margins(tmp_path: Path) -> None:
    module = in_double(loss=MarginMSELoss(temperature=0.1), negatives=[labelled(tmp_path)])
    found = module.per_row_loss(ready(module, 0, 2, 3).rows)
    for row, i in enumerate((0, 2)):
        own, *others = module.encode_passages(
            [PASSAGES[name] for name in (f"p{2 * i}", f"p{2 * i + 7}", f"p{2 * i + 9}")]
        )
        query = module.encode_queries([QUERIES[f"q{i}"]])[0]
        errors = [
            ((query @ own - query @ other) / 0.1 - wanted) ** 2
            for other, wanted in zip(others, (4.0 - i, -1.5), strict=True)
        ]
        assert found[row].item() == pytest.approx(sum(errors).item() / 2, rel=1e-5)
    assert found[2].item() == 0  # no label, no loss


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


def test_a_private_row_moves_its_own_loss_alone(tmp_path: Path) -> None:
    """Under DP-SGD the labels of a row are its own, so poisoning one query changes one row's loss."""
    mode = DPSGD(max_grad_norm=1.0, **NOISE)
    negatives = [labelled(tmp_path, lines_are_independent=True)]
    module = in_double(mode, loss=MarginMSELoss(), negatives=negatives)
    plain = ready(module, 0, 1, 2)
    poisoned = ready(module, 0, 1, 2, queries={**QUERIES, "q1": "policy best best"})
    for row in (0, 2):
        losses = [module.per_row_loss(batch.rows)[row] for batch in (plain, poisoned)]
        assert losses[0].item() == losses[1].item()
    assert module.per_row_loss(plain.rows)[1].item() != module.per_row_loss(poisoned.rows)[1].item()


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
