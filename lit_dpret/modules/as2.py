"""The dual encoder of PDD-AS2 (paper 004, section 2): [CLS] of a question, mean of a sentence, and their dot product.

It differs from `DualEncoder` in two ways: each side has its own pooling, with one backbone or with two, and embeddings
keep their length. Passages are sentences here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.errors import ConfigurationError
from lit_dpret.files import OutputFolder
from lit_dpret.losses import HardNegativeSoftmaxLoss, InBatchSoftmaxLoss
from lit_dpret.modules.dual_encoder import DualEncoder, PassageTower, TowerChoice
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.negatives.row_negatives import Sources
from lit_dpret.privacy.modes import PrivacyMode


class AS2DualEncoder(DualEncoder):
    """Embed questions and sentences in one space, compared by the dot product.

    Stage 1 trains both sides (``towers=shared``: one transformer, which the paper leaves open; or ``separate``). Stage
    2 freezes the sentence side (``towers=separate, passage_tower=frozen``) and trains the question side alone. With
    ``passage_cache_dir``, or a source that searches, sentences are then embedded once.

    Guarantees:
        - A row's loss is the softmax of ``<query, sentence> / temperature`` over its own sentence and its negatives.
        - Under ``privacy=dp_sgd`` negatives come from sources that couple no rows; the loss of a row is a function
          of its own record, of the collection, of public coins and of released weights.
        - `save_model` writes a folder that ``SentenceTransformer(folder)`` loads, with the same embeddings.

    Args:
        privacy: ``none``, ``dp_sgd`` or ``synthetic``. The other modes' bounds are for the cosine.
        optimizer: Name, learning rate and schedule; the paper uses AdamW at 3e-5.
        encoder: As for `DualEncoder`, like ``config``, ``tokenizer``, ``towers``, ``passage_tower`` and
            ``passage_cache_dir``; the paper uses ``distilbert-base-uncased``.
        negatives: As for `DualEncoder`; null for the other sentences of the batch.
        query_pooling: ``cls``, ``mean`` or ``max``.
        passage_pooling: The same, for a sentence.
        temperature: Divides the dot product; the paper has none, which is 1.
        max_query_length: The maximum number of tokens of a question.
        max_passage_length: The maximum number of tokens of a sentence.
        gradient_checkpointing: Recompute activations to save memory.
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        ConfigurationError: Two settings contradict each other, or the encoder cannot be found.
    """

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        encoder: str | Path | TextEncoder | None = "distilbert-base-uncased",
        config: Mapping[str, Any] | None = None,
        tokenizer: str | Path | None = None,
        towers: TowerChoice = "shared",
        passage_tower: PassageTower = "trained",
        negatives: Sources | None = None,
        passage_cache_dir: str | OutputFolder | None = None,
        query_pooling: str = "cls",
        passage_pooling: str = "mean",
        temperature: float = 1.0,
        max_query_length: int = 32,
        max_passage_length: int = 512,
        gradient_checkpointing: bool = False,
        log_private_loss: bool = False,
    ) -> None:
        settings = dict(locals())
        if privacy.guarantee == "dp" and privacy.candidates != "rows":
            raise ConfigurationError(
                f"AS2DualEncoder selects answers by the dot product, which privacy={privacy.name} does not support. "
                "Choose privacy=synthetic or none, or privacy=dp_sgd with negatives of each row (such as "
                "negatives=bm25)."
            )
        own = ("self", "__class__", "query_pooling", "passage_pooling")
        super().__init__(**{name: value for name, value in settings.items() if name not in own})
        self.keep_settings(settings)
        # Parameters frozen in the given encoder are in no message: they are equal in every module that starts from it.
        self._never_trained = frozenset(
            f"{side}.{name}"
            for side in ("encoder", "passage_encoder")
            for name, parameter in self.encoder.named_parameters()
            if not parameter.requires_grad
        )
        second = self.encoder if self.passage_encoder is None else self.passage_encoder
        self.encoder = _pooled(self.encoder, query_pooling)
        self.passage_encoder = _pooled(second, passage_pooling)
        self.train()
        self.loss = InBatchSoftmaxLoss(temperature=temperature, similarity="dot")
        self._listwise = HardNegativeSoftmaxLoss(temperature=temperature, similarity="dot")

    def embed(self, features: Any, side: Side) -> Tensor:
        """Return embeddings of any length, ``(rows, dim)``; their dot product is the score."""
        return self.represent(features, side)

    def put_global(self, weights: Mapping[str, Tensor]) -> None:
        """Set both sides to the weights that `take_weights` took from a stage-1 module; refuse another model's."""
        sides = (("encoder", self.encoder), ("passage_encoder", self.passage_encoder))
        for side, tower in sides:
            if tower is None:
                continue
            state = dict(tower.named_parameters())
            source = {name: weights.get(f"{side}.{name}", weights.get(f"encoder.{name}")) for name in state}
            for name, value in source.items():
                if value is None and f"{side}.{name}" in self._never_trained:
                    continue
                if value is None or value.shape != state[name].shape:
                    raise ConfigurationError(
                        f"The weights are of another model: {side}.{name} is missing or has another shape. Use "
                        "the encoder that stage 1 was trained with."
                    )
                state[name].data.copy_(value)


def _pooled(encoder: TextEncoder, pooling: str) -> TextEncoder:
    return encoder.changed(contract=replace(encoder.contract, pooling=pooling, normalise=False))
