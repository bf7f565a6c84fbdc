"""A head in the principal directions of the public passages: what it leaves alone, how it is clipped, what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_heads import PASSAGES, QUERIES, frozen, gradients, losses, rows, tower
from torch import Tensor, nn

from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.frozen_dual_encoder import FrozenDualEncoder, principal_directions
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.clipping.base import room_for_rounding

DIM = 3


def matrix(module: FrozenDualEncoder, head: nn.Linear) -> Tensor:
    """The head as a matrix on embeddings, from its definition."""
    assert module.basis is not None
    inside = torch.eye(DIM) - head.weight.detach()
    return torch.eye(len(module.basis)) - module.basis @ inside @ module.basis.T


def test_the_directions_are_those_of_the_largest_singular_values() -> None:
    embeddings = torch.randn(50, 6) * torch.tensor([5.0, 4.0, 3.0, 1.0, 0.5, 0.1])
    found = principal_directions(embeddings, 3)
    _, _, directions = torch.linalg.svd(embeddings.double())
    torch.testing.assert_close((found.double().T @ directions[:3].T).abs(), torch.eye(3).double(), atol=1e-5, rtol=0)


def test_what_lies_across_the_directions_stays_as_it_is() -> None:
    module = frozen(head_dim=DIM)
    assert module.basis is not None and module.query_head.weight.shape == (DIM, DIM)
    features = torch.randn(5, len(module.basis))
    across = features - features @ module.basis @ module.basis.T
    torch.testing.assert_close(module.represent(across, "query"), across)
    torch.testing.assert_close(module.represent(features, "query"), features @ matrix(module, module.query_head).T)


def test_untrained_it_ranks_as_the_encoder_does() -> None:
    module = frozen(head_dim=DIM)
    nn.init.eye_(module.query_head.weight)
    texts = list(QUERIES.values())
    torch.testing.assert_close(module.encode_queries(texts), frozen().encoder.encode(texts, "query"))


@pytest.mark.parametrize("head", ["query", "both", "shared"])
def test_the_saved_folder_makes_the_same_embeddings(tmp_path: Path, head: str) -> None:
    module = frozen(head=head, head_dim=DIM)
    towers = load_towers(str(module.save_model(tmp_path / "model")))
    queries, passages = list(QUERIES.values()), list(PASSAGES.values())
    torch.testing.assert_close(towers.query_encoder.encode(queries, "query"), module.encode_queries(queries))
    torch.testing.assert_close(towers.passage_encoder.encode(passages, "passage"), module.encode_passages(passages))


def test_each_row_is_clipped_exactly() -> None:
    module, lines, bound = frozen(head_dim=DIM), rows(), 0.05
    clipper = make_engine("ghost", module, max_grad_norm=bound)
    batch = module.collate_rows(lines)
    clipper.add(lambda: module.per_row_loss(batch), torch.arange(len(lines)), torch.ones(len(lines), dtype=torch.bool))
    found = clipper.take()
    wanted = torch.zeros(DIM, DIM)
    for line in lines:
        (gradient,) = gradients(module, [line])
        wanted += gradient * min(1.0, room_for_rounding(bound, [gradient]) / float(gradient.norm()))
    assert set(found) == {"query_head.weight"} and found["query_head.weight"].norm() > 0.1 * bound
    torch.testing.assert_close(found["query_head.weight"], wanted, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_keeps_its_directions_whatever_passages_come_later() -> None:
    module, other = frozen(head_dim=DIM), frozen(head_dim=DIM)
    assert module.basis is not None and other.basis is not None
    module.basis.neg_()  # as another library might have signed them
    other.load_state_dict(module.state_dict())
    other.prepare_texts(dict(list(PASSAGES.items())[:4]))
    torch.testing.assert_close(other.basis, module.basis)
    other.prepare_texts(PASSAGES, QUERIES)
    torch.testing.assert_close(losses(other, rows()), losses(module, rows()))


@pytest.mark.parametrize("dim", [0, 1000])
def test_a_size_that_no_embedding_has_is_refused(dim: int) -> None:
    settings: dict[str, Any] = {"encoder": tower(), "head_dim": dim}
    with pytest.raises(ConfigurationError, match=f"model.head_dim={dim} is not between 1 and"):
        frozen(**settings)
