"""Modules that contrast pairs: two sides, one embedding each, and a matrix of similarities.

A subclass defines how rows become features of two sides, how features become embeddings, and the loss of the similarity
matrix. From these follow the row losses with the batch as candidates, those with copies of the batch, and the pairs
whose similarities are clipped individually.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.encoders import Contract, Side, TextEncoder
from lit_dpret.encoders.st_folder import load_towers
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.losses import InBatchSoftmaxLoss, MarginMSELoss, PairwiseLoss, PublicPoolSoftmaxLoss, SoftmaxPairLoss
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.negatives import RowNegatives
from lit_dpret.privacy.batches import UnitBatch, take_rows
from lit_dpret.privacy.clipping.pairs import PairBatch
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row
from lit_dpret.privacy.user_code import is_library


class PairModule(PrivateModule):
    """A module that moves a query towards its passage and away from the other rows' passages.

    A subclass sets ``loss`` and implements ``represent``. ``collate_rows`` returns a dict with ``query`` and
    ``passage``, features whose first axis is the rows, and may return ``answers``, booleans ``(rows,
    rows)``: which passages are not negatives of a row, decided from that row and the passage's row alone.

    Guarantees:
        - A user-defined method that the privacy mode, or the saved model, would ignore is refused.
        - A logical batch that would be split into physical batches is refused before the first update, unless
          the privacy mode assigns units to sub-batches: split in two, each query would see half of its negatives.
    """

    takes_public_passages: bool = False
    loss: Any

    def __init__(self, *, privacy: PrivacyMode, optimizer: OptimizerSpec, log_private_loss: bool = False) -> None:
        super().__init__(privacy=privacy, optimizer=optimizer, log_private_loss=log_private_loss)
        self._refuse_unused(privacy)
        self.coupled_loss = privacy.candidates != "pool"

    def _refuse_unused(self, privacy: PrivacyMode) -> None:
        """Refuse user-defined methods that are not called where a user would expect it."""
        name = type(self).__name__
        of_pairs = privacy.guarantee == "dp" and privacy.candidates in ("batch", "copies")
        for method in ("per_row_loss", "table_losses") if of_pairs and not privacy.clips_whole_batch else ():
            if not is_library(_owner(self, method).__module__):
                instead = "Pass a PairwiseLoss as loss=, or choose" if privacy.candidates == "batch" else "Choose"
                raise UnsupportedModelError(
                    f"privacy={privacy.name} never calls {name}.{method}: it computes the loss from the embeddings. "
                    f"{instead} privacy=batch_clip, which takes any loss."
                )
        for method in ("represent", "embed"):
            owner = _owner(self, method)
            if is_library(owner.__module__):
                continue
            below = [kind for kind in owner.__mro__[1:] if issubclass(kind, PairModule) and kind is not PairModule]
            others = [each for each in ("encode_queries", "encode_passages", "save_model") if hasattr(self, each)]
            if left := [each for each in others if _owner(self, each) in below]:
                raise UnsupportedModelError(
                    f"{name} overrides {method}, and {', '.join(left)} would not call it: the evaluated and saved "
                    "model would differ from the trained one. Override these as well."
                )

    def represent(self, features: Any, side: Side) -> Tensor:
        """Return the tower output of one side for its features, ``(rows, dim)``, not normalised."""
        raise UnsupportedModelError(f"{type(self).__name__} does not implement represent(features, side).")

    def embed(self, features: Any, side: Side) -> Tensor:
        """Return embeddings whose dot product is the loss's similarity, ``(rows, dim)``.

        For the cosine they have length 1; for a bounded dot product, those longer than the loss's ``radius`` are
        scaled down to it.
        """
        found = self.represent(features, side)
        if not isinstance(self.loss, PairwiseLoss) or self.loss.similarity == "cosine":
            return F.normalize(found, dim=-1)
        radius = self.loss.radius
        if radius is None:  # a loss that bounds the sensitivity for any dot product
            return found
        lengths = torch.linalg.vector_norm(found, dim=-1, keepdim=True)
        bounded: Tensor = found * (radius / lengths.clamp(min=radius))
        return bounded

    def per_row_loss(self, rows: dict[str, Any]) -> Tensor:
        """Return the loss of every row with in-batch negatives, ``(rows,)``."""
        queries, passages = self.embed(rows["query"], "query"), self.embed(rows["passage"], "passage")
        return self.table_losses(queries, passages, rows.get("answers"))

    def probe_features(self, side: Side) -> Any | None:
        """Return features of two rows that are not data; None if the module has none."""
        return None

    def probe_losses(self) -> Tensor | None:
        queries, passages = self.probe_features("query"), self.probe_features("passage")
        if queries is None or passages is None:
            return None
        tables = self.embed(queries, "query"), self.embed(passages, "passage")
        if isinstance(self.loss, MarginMSELoss):  # needs labels, which only data have
            return (tables[0] * tables[1]).sum(dim=1)
        if isinstance(self.loss, PublicPoolSoftmaxLoss):
            losses: Tensor = self.loss(*tables, positive_index=torch.arange(len(tables[0]), device=self.device))
            return losses
        return self.table_losses(*tables, None)

    def table_losses(self, queries: Tensor, passages: Tensor, answers: Tensor | None) -> Tensor:
        """Return the row losses of a matrix of similarities, ``(rows,)``; row i's own passage is passage i."""
        if isinstance(self.loss, PairwiseLoss):
            with torch.autocast(queries.device.type, enabled=False):
                wide = torch.promote_types(queries.dtype, torch.float32)
                expected = max(len(queries), 2)  # a lone row has no negatives, so their weight does not matter
                return self.pair_loss(expected).row_losses(queries.to(wide) @ passages.to(wide).T, answers)
        losses: Tensor = self.loss(queries, passages, mask=answers)
        return losses

    def pair_loss(self, expected: float) -> PairwiseLoss:
        """Return the loss as a function of the similarity matrix; refuse a loss that is not one.

        ``expected`` is the normaliser of a loss that has one and got no value: under privacy a public number.
        """
        loss = self.loss
        if isinstance(loss, InBatchSoftmaxLoss) and loss.similarity == "cosine":
            loss = SoftmaxPairLoss(temperature=loss.temperature)
        if not isinstance(loss, PairwiseLoss):
            raise UnsupportedModelError(
                f"privacy={self.privacy.name} clips the similarities of pairs, and {type(loss).__name__} is not a loss "
                "of their matrix. Choose a PairwiseLoss as model.loss."
            )
        return loss.for_expected_size(expected)

    def pair_batch(self, rows: dict[str, Any]) -> PairBatch:
        """Return the pairs of a sub-batch, for clipping each pair's similarity."""
        return PairBatch(
            queries=rows["query"],
            passages=rows["passage"],
            embed_queries=lambda features: self.embed(features, "query"),
            embed_passages=lambda features: self.embed(features, "passage"),
            n=_rows_of(rows["query"]),
        )

    def pair_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters that affect a similarity: all except those of the loss."""
        loss = self.loss
        learned = {id(p) for p in loss.parameters()} if isinstance(loss, nn.Module) else set()
        return [p for p in self.parameters() if p.requires_grad and id(p) not in learned]

    def pair_shape(self) -> dict[str, Any]:
        """Return public facts for choosing the method of pair norms.

        Returns:
            ``dim`` of an embedding, the maximum ``positions`` of a text or an image, whether both sides have
            ``shared`` parameters, and whether it is a bias-free ``linear_head`` on frozen features.
        """
        raise UnsupportedModelError(f"{type(self).__name__} does not implement pair_shape().")

    def row_temperature(self) -> float:
        """Return the temperature of a loss whose rows are softmaxes over passages; refuse another loss."""
        if not isinstance(self.loss, (InBatchSoftmaxLoss, SoftmaxPairLoss)) or self.loss.similarity != "cosine":
            raise UnsupportedModelError(
                f"privacy={self.privacy.name} clips the rows of a softmax over cosines; model.loss="
                f"{type(self.loss).__name__} is another loss. Set it to null, or choose privacy=logit_dp."
            )
        return self.loss.temperature

    def copied_loss(self, batch: UnitBatch, part: slice) -> Callable[[], Tensor]:
        """Return a function for the losses of rows ``part``, each with its own copy of the batch's passages.

        Rows share nothing in it, so each row has its own gradient. A unit has one row.
        """
        temperature, rows = self.row_temperature(), batch.rows
        count, of_part = len(batch.unit_ids), part.stop - part.start
        copies = torch.arange(count, device=batch.unit_ids.device).repeat(of_part)

        def losses() -> Tensor:
            queries = self.embed(take_rows(rows["query"], part), "query")
            passages = self.embed(take_rows(rows["passage"], copies), "passage").view(of_part, count, -1)
            wide = torch.promote_types(queries.dtype, torch.float32)
            with torch.autocast(queries.device.type, enabled=False):
                logits = torch.einsum("rd,rcd->rc", queries.to(wide), passages.to(wide)) / temperature
            own = torch.arange(part.start, part.stop, device=logits.device)
            if rows.get("answers") is not None:
                left_out = rows["answers"][part].scatter(1, own.unsqueeze(1), False)
                logits = logits.masked_fill(left_out, float("-inf"))
            found = F.cross_entropy(logits, own, reduction="none")
            self.note_loss(float(found.detach().sum()))
            return found

        return losses

    def text_encoder(self, side: Side) -> TextEncoder | None:
        """Return the text encoder of one side; None if its inputs are not texts."""
        return None

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]] | None:
        of_side: Side = "query" if side == "query" else "passage"
        encoder = self.text_encoder(of_side)
        return None if encoder is None else encoder.token_ids(texts, of_side, whole=whole)

    def canary_scores(self, rows: Sequence[Row]) -> Tensor:
        """Return the log odds of each row's own passage among those of the other rows; at least two rows.

        The rows of an audit are public except for the coins, so they are each other's candidates, whatever the
        candidates in training were.
        """
        with evaluation_mode(self), torch.no_grad():
            queries, passages = (side.double().cpu() for side in self._both_sides(rows))
            logits = queries @ passages.T / float(getattr(self.loss, "temperature", 1.0))
        own = logits.diagonal().clone()
        others = logits.fill_diagonal_(float("-inf")).logsumexp(dim=1)
        return own - others

    def _both_sides(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        own: Any = self
        if hasattr(own, "encode_queries") and hasattr(own, "encode_passages"):
            return own.encode_queries([r.query for r in rows]), own.encode_passages([r.passage for r in rows])
        found = [
            (self.embed(features["query"], "query"), self.embed(features["passage"], "passage"))
            for features in self.features_in_turn(rows)
        ]
        queries, passages = zip(*found, strict=True)
        return torch.cat(queries), torch.cat(passages)

    # -- negatives from sources other than the batch -------------------------------------------

    @property
    def row_sources(self) -> RowNegatives | None:
        return None

    def assumptions(self) -> list[str]:
        return [] if self.row_sources is None else self.row_sources.assumptions()

    def files_read(self) -> dict[str, Path]:
        """Return the files of negatives' sources by setting; a run protects their content too."""
        return {} if self.row_sources is None else self.row_sources.files_read()

    # -- whole batches -----------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        expected = getattr(data, "expected_batch_size", None)
        physical = getattr(data, "physical_batch_size", None)
        if self._takes_whole_batches and stage == "fit" and expected and physical and physical < expected:
            raise self._cut(f"datamodule.physical_batch_size={physical} is below {expected}, the expected_batch_size")
        if self._takes_whole_batches and stage == "fit" and self.trainer.world_size > 1:
            raise ConfigurationError(
                f"trainer.devices: {self.trainer.world_size} processes share each logical batch, and "
                f"{type(self).__name__} takes its negatives from the batch, which must not be split. Set "
                "privacy.sub_batches, which allows it, or trainer.devices=1."
            )

        in_batch = None if self.row_sources is None else self.row_sources.in_batch
        if stage == "fit" and self.trainer.world_size > 1 and in_batch is not None and in_batch.gather:
            raise ConfigurationError(
                "model.negatives.in_batch.gather=true waits for rows of every process in each pass, and a draw "
                "may leave a process without any: the job would hang. Set it to false, or write a custom training loop."
            )

    def training_step(self, batch: UnitBatch, batch_idx: int) -> None:
        if self._takes_whole_batches and not (batch.last and batch.part == 0):
            raise self._cut(f"A logical batch was cut into physical batches of {len(batch.mask)} units")
        super().training_step(batch, batch_idx)

    @property
    def _takes_whole_batches(self) -> bool:
        return self.coupled_loss and self.privacy.sub_batches is None

    def _cut(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what}: {type(self).__name__} takes its negatives from the batch, which must not be split. Raise "
            "datamodule.physical_batch_size to datamodule.expected_batch_size or more, or set privacy.sub_batches, "
            "which allows it. To save memory in a dual encoder, set model.gradient_checkpointing=true."
        )


def _owner(module: nn.Module, method: str) -> type:
    """Return the class that defines a module's ``method``."""
    return next(kind for kind in type(module).__mro__ if method in vars(kind))


def _rows_of(features: Any) -> int:
    while isinstance(features, dict):
        features = next(iter(features.values()))
    return len(features)


def make_encoder(
    encoder: str | Path | TextEncoder | None,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    query_max_length: int,
    passage_max_length: int,
    query_prefix: str | None,
    passage_prefix: str | None,
) -> TextEncoder:
    """Return the shared tower that a dual encoder's settings describe, normalised; in float32 unless given."""
    if isinstance(encoder, TextEncoder):
        if not encoder.contract.normalise:
            raise ConfigurationError("model.encoder does not normalise its embeddings. Load it with normalise=True.")
        return encoder
    if (encoder is None) == (config is None):
        raise ConfigurationError(
            f"model.encoder={encoder} and model.config={config}: give one of them, an encoder to start from or the "
            "shape of a new one."
        )
    if encoder is not None:
        return TextEncoder.from_pretrained(
            encoder,
            normalise=True,
            query_max_length=query_max_length,
            passage_max_length=passage_max_length,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
        )
    contract = Contract(
        query_max_length=query_max_length,
        passage_max_length=passage_max_length,
        query_prefix=query_prefix or "",
        passage_prefix=passage_prefix or "",
    )
    backbone, words = _new_transformer(dict(config or {}), tokenizer)
    return TextEncoder(backbone, words, contract)


def make_towers(
    encoder: str | Path | TextEncoder | None, *, separate: bool, **settings: Any
) -> tuple[TextEncoder, TextEncoder | None]:
    """Return the encoders of queries and of passages for the settings of `make_encoder`; None for a shared one.

    Separate encoders start as a folder stores them, and equal if it stores one for both sides; they share no weight.
    """
    if separate and isinstance(encoder, (str, Path)) and settings.get("config") is None:
        found = load_towers(encoder)
        if found.query_encoder is not found.passage_encoder:
            names = ("query_max_length", "passage_max_length", "query_prefix", "passage_prefix")
            said = {name: settings[name] for name in names if settings[name] is not None}
            query, passage = (
                tower.changed(contract=replace(tower.contract, normalise=True, **said)) for tower in found
            )
            return query, copy.deepcopy(passage) if passage.backbone is query.backbone else passage
    shared = make_encoder(encoder, **settings)
    return shared, copy.deepcopy(shared) if separate else None


def _new_transformer(config: dict[str, Any], tokenizer: str | Path | None) -> tuple[Any, Any]:
    import transformers

    if tokenizer is None:
        raise ConfigurationError("model.encoder=null needs model.tokenizer: a new encoder has no vocabulary.")
    try:
        words = transformers.AutoTokenizer.from_pretrained(tokenizer)
        shape = transformers.AutoConfig.for_model(**{"vocab_size": len(words)} | config)
        backbone = transformers.AutoModel.from_config(shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"model.config and model.tokenizer={str(tokenizer)!r} give no encoder: {first_line(error)} model.config "
            "needs model_type, for instance bert, and fields of that type's config."
        ) from error
    if backbone.get_input_embeddings().num_embeddings < len(words):
        raise ConfigurationError(
            f"model.tokenizer has {len(words)} tokens, but model.config has embeddings for "
            f"{backbone.get_input_embeddings().num_embeddings}: they do not belong together."
        )
    return backbone.to(torch.float32), words
