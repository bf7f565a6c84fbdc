"""Train one embedding net: on two views of each image, or on pairs of texts.

The class of paper 002 (Kong, Munoz Medina and Ribero, 2310.03104, section 5.1): a record is a pair of inputs, whose
loss compares their embeddings with those of the other records. The privacy mode determines what can be promised about
such a loss: ``none``, ``batch_clip``, ``per_example_duplicated`` or ``logit_dp``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.encoders.vision import AugmentedViews
from lit_dpret.errors import ConfigurationError, DataError, StorageError, UnsupportedModelError, unwritten
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.files import read_json, settle_modes
from lit_dpret.losses import PairwiseLoss, SoftmaxPairLoss, false_negatives
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.pair_module import PairModule, make_encoder
from lit_dpret.privacy.batches import map_rows
from lit_dpret.privacy.clipping.base import refuse_batch_mixing
from lit_dpret.privacy.ledger.trained import note_folder
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.state_watch import state_of_part
from lit_dpret.privacy.user_generators import kept_generators

Collate = Callable[[Sequence[Any]], dict[str, Tensor]]


class EmbeddingTrainer(PairModule):
    """One net for both sides of a pair.

    Guarantees:
        - Without ``encoder`` the net starts as it was given, without any data.
        - A net that mixes the rows of a batch (batch normalisation) is refused under every private mode.
        - With texts, a passage is never a negative of a query that it answers.
        - `save_model` writes what ``model.encoder`` can read: a folder with safetensors or, for a text
          encoder, one that ``SentenceTransformer(folder)`` loads.

    Args:
        privacy: The privacy mode; not ``dp_sgd`` or ``public_passages``, since negatives come from the batch.
        optimizer: Name, learning rate and schedule of the optimizer.
        net: Maps a batch of images to embeddings of any length, ``(rows, dim)``; null for a text encoder.
        encoder: Without ``net``: ``minilm``, a hub name, a model folder, or a ready `TextEncoder`. With ``net``:
            a folder that `save_model` wrote, to start from its weights; null to keep the net's own.
        views: Maps rows to ``query`` and ``passage``, for a net; null for two augmented views of an image.
        loss: A loss of the similarity matrix; null for the softmax at temperature 1.
        dim: The width of the net's embeddings; null for its attribute ``dim``.
        positions: The number of output positions of the net's widest layer, from which ``privacy.norms=auto``
            estimates costs: 256 is 16 x 16, the output of `EmbeddingNet`'s first layer for 32 x 32 pixels.
        max_query_length: The maximum number of tokens of a query for a text encoder.
        max_passage_length: The same for a passage.
        query_prefix: A prefix for every query; null for that of the encoder's folder.
        passage_prefix: A prefix for every passage; null for that of the encoder's folder.
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        ConfigurationError: Two settings contradict each other, or the encoder cannot be found.
        UnsupportedModelError: The net mixes rows under a private mode, or the weights are those of another net.
    """

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        net: nn.Module | None = None,
        encoder: str | Path | TextEncoder | None = None,
        views: Collate | None = None,
        loss: PairwiseLoss | None = None,
        dim: int | None = None,
        positions: int = 256,
        max_query_length: int = 32,
        max_passage_length: int = 128,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        log_private_loss: bool = False,
    ) -> None:
        settings = dict(locals())
        super().__init__(privacy=privacy, optimizer=optimizer, log_private_loss=log_private_loss)
        if net is None and isinstance(encoder, (str, Path)):  # no file records how a net is built
            self.keep_settings(settings)
        if privacy.candidates == "pool":
            raise ConfigurationError(
                f"privacy={privacy.name} takes its candidates from a public list of passages, and model="
                "embedding_trainer takes them from the batch. Choose model=dual_encoder, or privacy=logit_dp."
            )
        if net is None and encoder is None:
            raise ConfigurationError(
                "model.net and model.encoder are both null: name a net for images, or a text encoder such as minilm."
            )
        if net is not None and isinstance(encoder, TextEncoder):
            raise ConfigurationError("model.encoder is a text encoder, which reads no images. Set model.net to null.")
        if net is None and views is not None:
            raise ConfigurationError(
                "model.views makes views of images, and model.net is null, so nothing reads them. Set model.views to "
                "null, or give a net."
            )
        self.loss = SoftmaxPairLoss(temperature=1.0) if loss is None else loss
        self.pretrained = str(encoder) if isinstance(encoder, (str, Path)) else None
        self.net: nn.Module
        if net is None:
            self.net = make_encoder(
                encoder,
                query_max_length=max_query_length,
                passage_max_length=max_passage_length,
                query_prefix=query_prefix,
                passage_prefix=passage_prefix,
            ).train()
        else:
            self.net = net
            if isinstance(encoder, (str, Path)):
                load_net(net, encoder)
        if privacy.guarantee == "dp":
            refuse_batch_mixing(self.net)
        self.views: Collate = AugmentedViews() if views is None else views
        if isinstance(self.net, TextEncoder):
            self.reads = "texts"
        elif isinstance(self.views, AugmentedViews):
            self.reads = "images"
        self.dim: int | None = getattr(self.net, "dim", None) if dim is None else dim
        self.positions = positions

    def collate_rows(self, rows: list[Any]) -> dict[str, Any]:
        """Return two views of each image; or the tokens of both texts, and the correct answers.

        Returns:
            ``query`` and ``passage``, features with the rows first; for texts also ``answers``, booleans of
            shape ``(rows, rows)``.
        """
        encoder = self.net
        if not isinstance(encoder, TextEncoder):
            return self.views(rows)
        ids = [row.passage_id for row in rows]
        return {
            "query": encoder.tokenize([row.query for row in rows], "query"),
            "passage": encoder.tokenize([row.passage for row in rows], "passage"),
            "answers": false_negatives(ids, ids, [row.positives for row in rows]),
        }

    def try_rows(self, rows: list[Any]) -> None:
        """Embed both sides of rows that are not data; rows that cannot be read raise torch's error.

        What views and net keep of them is discarded: some take a scale from their first images.
        """
        weight = next(self.parameters())
        with evaluation_mode(self), torch.no_grad(), kept_generators(), self.validating(on_trial=True):
            features = map_rows(
                lambda t: t.to(weight if t.is_floating_point() else weight.device), self.collate_rows(rows)
            )
            self.represent(features["query"], "query")
            self.represent(features["passage"], "passage")

    def text_encoder(self, side: Side) -> TextEncoder | None:
        return self.net if isinstance(self.net, TextEncoder) else None

    def probe_features(self, side: Side) -> Any | None:
        return self.net.tokenize(["one text", "another text"], side) if isinstance(self.net, TextEncoder) else None

    def represent(self, features: Any, side: Side) -> Tensor:
        """Return the net's output for one side's features, ``(rows, dim)``; both sides share the net."""
        found: Tensor = self.net(features)
        return found

    def pair_shape(self) -> dict[str, Any]:
        if self.dim is None:
            raise ConfigurationError(
                f"privacy.norms=auto estimates costs from the dimension of an embedding, and {type(self.net).__name__} "
                "has no attribute dim. Set model.dim."
            )
        positions = self.positions
        if isinstance(self.net, TextEncoder):
            positions = max(self.net.contract.query_max_length, self.net.contract.passage_max_length)
        return {"dim": self.dim, "positions": positions, "shared": True}

    def save_model(self, folder: str | Path) -> Path:
        """Write the net's weights, or the text encoder as a sentence-transformers folder."""
        if isinstance(self.net, TextEncoder):
            save_sentence_transformer(folder, self.net)
        else:
            save_net(self.net, folder)
        note_folder(self, folder)
        return Path(folder)


SCHEMA = "lit-dpret/net/1"
WEIGHTS = "model.safetensors"
FACTS = "net.json"


def save_net(net: nn.Module, folder: str | Path) -> Path:
    """Write ``model.safetensors`` and ``net.json``, which names the class."""
    place = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_of_part(net).items()}
    facts = {"schema": SCHEMA, "net": f"{type(net).__module__}.{type(net).__qualname__}"}
    try:
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / WEIGHTS)
        settle_modes(place / WEIGHTS)
        (place / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{place} could not be written to: {unwritten(error)}.") from error
    return place


def load_net(net: nn.Module, folder: str | Path) -> None:
    """Load exactly the weights that `save_net` wrote into ``net``."""
    place = Path(folder)
    try:
        read_json(place / FACTS, SCHEMA)
        net.load_state_dict(load_file(place / WEIGHTS), strict=True)
    except (DataError, OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(
            f"model.encoder={place} is not a folder with the weights of model.net={type(net).__name__}: {reason} Name "
            "the model folder of a run with the same net and the same settings."
        ) from error
