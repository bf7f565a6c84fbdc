"""A frozen encoder, and a linear head trained on private queries.

Passages are public, so their embeddings are computed once. With fixed passages, the softmax of a query over a *public*
pool of them does not depend on other queries: the loss is a sum over queries, and plain DP-SGD protects each of them.
The classical in-batch loss has no such form; it is available here as well, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.encoders.st_folder import load_towers, save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import OutputFolder
from lit_dpret.losses import InBatchSoftmaxLoss, MarginMSELoss, PairwiseLoss, PublicPoolSoftmaxLoss, false_negatives
from lit_dpret.modules.labelled_margins import LabelledMargins
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.pair_module import PairModule, make_encoder
from lit_dpret.modules.public_pool import Candidates, PublicPool, row_by_row
from lit_dpret.negatives.row_negatives import RowNegatives, Sources
from lit_dpret.privacy.batches import UnitBatch, copied_rows
from lit_dpret.privacy.ledger.trained import note_folder
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row
from lit_dpret.settings import require_choice

Head = Literal["query", "both", "shared"]
Negatives = Literal["auto", "pool", "batch"]
_LOGITS_AT_ONCE = 8_000_000


class FrozenDualEncoder(PairModule):
    """Linear heads on the embeddings of a frozen encoder.

    A query's embedding e becomes W e, scaled to length 1. W starts as the identity, so the
    untrained module is the encoder itself. Every text is encoded once.

    With ``head="query"`` passages keep their embeddings, and a query's loss is the softmax of its
    passage among a pool of public passages. **Under ``privacy=dp_sgd`` this rests on an assumption:**
    the texts of the passages and their list are public, and were chosen without looking at the
    queries. Which passage answers which query is protected; that a passage exists is not. Then the
    loss is a sum over queries, for any pool size and temperature, and the sensitivity of its clipped
    gradient is ``max_grad_norm``.

    Negatives from the batch couple the queries. ``batch_clip``, ``per_example_duplicated`` and
    ``logit_dp`` bound this coupling. A head on the passage side (``both``: a second head, ``shared``: the
    same one) needs negatives from the batch.

    Guarantees:
        - Untrained, it ranks as the encoder does.
        - With ``negatives="pool"``, the loss and gradient of a row depend on its own query, positives
          and passage, and on public passages; with labels, on its own labels too.
        - No positive of a query is a negative of the same query.
        - The encoder is not among the module's parameters, nor in its checkpoints.
        - The pool of a step is drawn by public coins from (``pool_seed``, step) and from nothing else.
        - `save_model` writes a folder that ``SentenceTransformer(folder)`` loads, with the same
          embeddings.

    Args:
        privacy: The privacy mode.
        optimizer: Name, learning rate and schedule of the optimizer.
        encoder: ``minilm``, a hub name, a model folder, or a ready `TextEncoder`, which keeps its own lengths
            and prefixes. It must not have been trained on the private queries. From a folder that
            `save_model` wrote with ``head="query"``, training continues with that head, and with the lengths and
            prefixes of that run.
        head: ``query``, ``both`` for one head per side, or ``shared`` for the same head on both sides.
        head_dim: The number of principal directions of the public passages in which a head learns; it leaves all
            other directions unchanged. Null for all directions. A head has the square of this number of parameters,
            and the noise grows with their square root.
        negatives: From a public ``pool``, or from the ``batch``; ``auto`` takes the kind that the privacy mode is for
            and, if it is for both, the pool with ``head="query"``, otherwise the batch. Or the source ``labelled``.
        loss: A loss of the similarity matrix, for negatives from the batch; `MarginMSELoss` for labelled ones; null
            for the softmax.
        pool_size: The number of public passages that a step draws as candidates; null for all of them.
        pool_seed: The seed of those draws; public.
        temperature: Divides the cosine similarity.
        max_query_length: The maximum number of tokens of a query, including special tokens.
        max_passage_length: The same for a passage.
        query_prefix: A prefix for every query; null for that of the encoder's folder.
        passage_prefix: A prefix for every passage; null for that of the encoder's folder.
        cache_dir: The folder that keeps embeddings between runs; null keeps none. It contains embeddings of
            private queries, from which their texts can be guessed: it is as private as the queries.
        encode_batch_size: Texts per forward pass of the encoder. Under a guarantee each query is embedded apart.
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        ConfigurationError: Two settings contradict each other, or the encoder cannot be found.
    """

    #: Buffers that `prepare_texts` computes from public passages once the run has begun.
    made_of_public = ("basis", "passage_embeddings")

    passage_embeddings: Tensor
    basis: Tensor | None
    coupled_loss: bool
    takes_public_passages = True
    reads = "texts"
    ragged_features = ("others", "answers_at")

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        encoder: str | Path | TextEncoder = "minilm",
        head: Head = "query",
        head_dim: int | None = None,
        negatives: Negatives | Sources = "auto",
        loss: PairwiseLoss | MarginMSELoss | None = None,
        pool_size: int | None = None,
        pool_seed: int = 0,
        temperature: float = 0.05,
        max_query_length: int = 32,
        max_passage_length: int = 128,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        cache_dir: str | OutputFolder | None = None,
        encode_batch_size: int = 64,
        log_private_loss: bool = False,
    ) -> None:
        settings = dict(locals())
        super().__init__(privacy=privacy, optimizer=optimizer, log_private_loss=log_private_loss)
        self.keep_settings(settings)
        require_choice("model.head", head, get_args(Head))
        self._labels = None if isinstance(negatives, str) else LabelledMargins(negatives, loss, privacy)
        if isinstance(negatives, str):
            require_choice("model.negatives", negatives, get_args(Negatives))
            if isinstance(loss, MarginMSELoss):
                raise ConfigurationError(
                    f"model.negatives={negatives} has no labels for model.loss=MarginMSELoss. Set negatives=labelled "
                    "and model.negatives.labelled.file."
                )
        if privacy.candidates == "pool":
            if privacy.passage_gradient != "none":
                raise ConfigurationError(
                    f"privacy.passage_gradient={privacy.passage_gradient}: the passages of model=frozen_dual_encoder "
                    "keep their embeddings, and have no gradient. Set it to none."
                )
            pool_size, pool_seed = privacy.pool_size, privacy.pool_seed
        self.coupled_loss = isinstance(negatives, str) and not _takes_pool(negatives, head, privacy)
        if self._labels is not None and (head != "query" or pool_size is not None):
            raise ConfigurationError(
                f"model.head={head} with model.pool_size={pool_size} cannot go with model.negatives=labelled, which "
                "compares a query with the embeddings of labelled passages, unchanged. Set model.head=query and "
                "model.pool_size=null."
            )
        if not self.coupled_loss and head != "query":
            raise ConfigurationError(
                f"model.head={head} cannot be trained against a public pool, whose passages keep their embeddings "
                f"(privacy={privacy.name}, model.negatives={negatives}). Set model.head=query."
            )
        if self.coupled_loss and privacy.guarantee == "dp" and privacy.candidates in ("rows", "pool"):
            raise ConfigurationError(
                f"privacy={privacy.name} cannot train model.head={head} with model.negatives={negatives}: negatives of "
                "the batch couple the queries. Set model.head=query and model.negatives=pool, or privacy=logit_dp."
            )
        if loss is not None and not self.coupled_loss and self._labels is None:
            raise ConfigurationError(
                f"model.loss={type(loss).__name__} is a loss of the batch's table of similarities; against a public "
                "pool it is the softmax of each query. Set model.loss to null, or model.negatives=batch."
            )
        if pool_size is not None and head != "query":
            raise ConfigurationError(
                f"model.pool_size={pool_size} must be null with model.head={head}, which has no pool."
            )
        self.pretrained = str(encoder) if isinstance(encoder, (str, Path)) else None
        base, trained = _trained_head(encoder) if head == "query" and head_dim is None else (None, None)
        tower = make_encoder(
            base or encoder,
            query_max_length=max_query_length,
            passage_max_length=max_passage_length,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
        )
        self._frozen = FrozenTexts(tower, cache_dir, encode_batch_size, queries_apart=privacy.guarantee == "dp")
        if head_dim is not None and not 1 <= head_dim <= tower.dim:
            raise ConfigurationError(
                f"model.head_dim={head_dim} is not between 1 and {tower.dim}, the size of an embedding."
            )
        self.head = head
        width = head_dim or tower.dim
        self.query_head = _identity(width) if trained is None else trained
        self.passage_head = _identity(width) if head == "both" else None
        #: The directions in which a head learns, as columns; saved with the head, which is meaningless without them.
        self.register_buffer("basis", None if head_dim is None else torch.zeros(tower.dim, head_dim))
        self.loss: Any = loss
        if loss is None:
            softmax = InBatchSoftmaxLoss if self.coupled_loss else PublicPoolSoftmaxLoss
            self.loss = softmax(temperature=temperature, similarity="cosine" if self.coupled_loss else "dot")
        self.register_buffer("passage_embeddings", torch.empty(0, tower.dim), persistent=False)
        self._pool = PublicPool(pool_size, pool_seed)
        self._step = 0

    @property
    def encoder(self) -> TextEncoder:
        """The frozen encoder; not a submodule, so that nothing trains, saves or moves it."""
        return self._frozen.tower

    def text_encoder(self, side: Side) -> TextEncoder:
        return self._frozen.tower

    # -- texts to embeddings, once -----------------------------------------------------------

    def prepare(self, data: Any, *, progress: Progress | None = None) -> None:
        """Encode the public passages and train queries of a DataModule, or read the cache; ``setup`` calls it."""
        queries = {row.query_id: row.query for row in data.pair_rows("train")}
        passages = dict(sorted(data.public_passages().items()))  # a fixed order, so that the cache recognises the set
        if self._labels is not None:  # fail early on an unreadable file
            self._labels.learn(data)
        self.prepare_texts(passages, queries, progress=progress)

    def prepare_texts(
        self, passages: Mapping[str, str], queries: Mapping[str, str] | None = None, *, progress: Progress | None = None
    ) -> None:
        """Encode texts by id, or read them from the cache; candidate passages must be public under ``dp_sgd``."""
        if not passages:
            raise DataError("There are no passages to encode.")
        self.passage_embeddings = self._frozen.learn(passages.values(), "passage", progress).to(self.device)
        self._pool.learn(list(passages))
        if self.basis is not None and not self.basis.any():  # keep a basis that came from a checkpoint
            self.basis = principal_directions(self.passage_embeddings, self.basis.shape[1])
        if queries:
            self._frozen.learn(queries.values(), "query", progress)

    @property
    def row_sources(self) -> RowNegatives | None:
        return None if self._labels is None else self._labels.of_rows

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage == "fit" and data is not None:  # again in every fit, since an earlier one may have had other data
            self.prepare(data)

    def encode_queries(self, texts: Sequence[str], *, progress: Progress | None = None, keep: bool = False) -> Tensor:
        """Return embeddings of queries after the head, of length 1, on the CPU, ``(texts, dim)``.

        With ``keep`` the encoder's output is kept in ``cache_dir``, for other heads with the same queries.
        """
        return self._headed(self.query_head, self._frozen.encode(texts, "query", progress, keep=keep))

    def encode_passages(self, texts: Sequence[str], *, progress: Progress | None = None) -> Tensor:
        """Return embeddings of passages, after their head if they have one; like `encode_queries`."""
        return self._headed(self._head_of("passage"), self._frozen.encode(texts, "passage", progress))

    def _headed(self, head: nn.Linear | None, embeddings: Tensor) -> Tensor:
        if head is None:
            return embeddings
        with torch.no_grad():
            weight = self._matrix(head).to(embeddings.dtype)
            return F.normalize(F.linear(embeddings, weight), dim=-1)

    def _matrix(self, head: nn.Linear) -> Tensor:
        weight = head.weight.detach().cpu()
        if self.basis is None:
            return weight
        basis = self.basis.detach().to("cpu", weight.dtype)
        return torch.eye(len(basis)) + basis @ (weight - torch.eye(len(weight))) @ basis.T

    # -- training ----------------------------------------------------------------------------

    def collate_rows(self, rows: list[Row]) -> dict[str, Tensor]:
        """Look up the rows' embeddings.

        Returns:
            ``query``, ``(rows, dim)``. Against a pool also ``positive``, the index of each row's passage,
            ``(rows,)``, and ``others``, the indices of the query's other positives, ``(rows, most of
            them)``, padded with -1. With labels the keys of the rows replace ``others``. With negatives
            from the batch ``passage``, ``(rows, dim)``, and ``answers``, booleans ``(rows, rows)``.

        Raises:
            DataError: A row's passage was not among those of `prepare`.
        """
        ids, positives = [row.passage_id for row in rows], [row.positives for row in rows]
        positive, others = self._pool.places(ids, positives)
        queries = self._frozen.encode([row.query for row in rows], "query")
        if self.coupled_loss:
            passages = self.passage_embeddings[positive.to(self.passage_embeddings.device)].cpu()
            return {"query": queries, "passage": passages, "answers": false_negatives(ids, ids, positives)}
        if self._labels is not None:
            return {"query": queries, "positive": positive, **self._labels.keys(rows)}
        return {"query": queries, "positive": positive, "others": others}

    def place_rows(self, features: Any, places: Sequence[int], rows: int) -> Any:
        return copied_rows(features, places, rows)

    def probe_features(self, side: Side) -> Tensor:
        return torch.eye(2, self.encoder.dim)

    def represent(self, features: Any, side: Side) -> Tensor:
        """Return the embeddings of one side after its head, if it has one, ``(rows, dim)``."""
        head, found = self._head_of(side), features
        if head is not None and self.basis is None:
            found = head(features)
        elif head is not None and self.basis is not None:
            inside = features @ self.basis
            found = features + (head(inside) - inside) @ self.basis.T
        result: Tensor = found
        return result

    def _head_of(self, side: Side) -> nn.Linear | None:
        return self.query_head if side == "query" or self.head == "shared" else self.passage_head

    def pair_shape(self) -> dict[str, Any]:
        return {
            "dim": self.encoder.dim,
            "positions": 1,
            "shared": self.head == "shared",
            "linear_head": self.basis is None and getattr(self.loss, "similarity", "cosine") == "cosine",
        }

    def before_batch(self, batch: UnitBatch) -> None:
        """Record the step, which determines the pool, or look up the labels of its rows."""
        self._step = batch.step
        if self._labels is not None:
            self._labels.before_batch(batch, self._pool.place, epoch=int(self.current_epoch))

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy in nats of each query's own passage among its candidates, ``(rows,)``.

        Under `MarginMSELoss`, return the squared error of its margins.
        """
        if self.coupled_loss:
            return super().per_row_loss(rows)
        queries = self.embed(rows["query"], "query")
        if self._labels is not None:
            return self._labels.row_losses(queries, rows, self.passage_embeddings)
        candidates, table = self.pool(self._step), self.passage_embeddings
        pool = candidates.of(table)

        def of_rows(part: slice, embeddings: Tensor) -> Tensor:
            positive, others = rows["positive"][part], rows["others"][part]
            own, answers = {"positive_index": positive}, others
            if candidates.chosen is not None:  # a row's own passage may not be drawn
                own, answers = {"positive_embeddings": table[positive]}, torch.cat([positive.unsqueeze(1), others], 1)
            found: Tensor = self.loss(embeddings, pool, mask=candidates.mask(answers), **own)
            return found

        return row_by_row(of_rows, queries, rows_at_once=_LOGITS_AT_ONCE // len(pool))

    def pool(self, step: int) -> Candidates:
        """Return the candidates of logical step ``step``, on the module's device."""
        return self._pool.draw(step, self.device)

    def save_model(self, folder: str | Path) -> Path:
        """Write the encoder and the heads as a sentence-transformers folder with its contract."""
        query, passage = (self._head_of(side) for side in get_args(Side))
        save_sentence_transformer(folder, self._with_head(query), self._with_head(passage))
        note_folder(self, folder)
        return Path(folder)

    def _with_head(self, head: nn.Linear | None) -> TextEncoder:
        """Return the encoder with one linear map: the head, folded into the encoder's own map if it has one."""
        encoder = self.encoder
        if head is None:
            return encoder
        inner, weight, bias = encoder.projection, self._matrix(head), None
        if inner is not None:
            bias = None if inner.bias is None else weight @ inner.bias.cpu().to(weight.dtype)
            weight = weight @ inner.weight.cpu().to(weight.dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        return encoder.changed(projection=linear)


def _takes_pool(negatives: Negatives, head: Head, privacy: PrivacyMode) -> bool:
    if privacy.candidates == "pool":
        if negatives == "batch":
            raise ConfigurationError(
                f"model.negatives=batch cannot go with privacy={privacy.name}: passages of the batch couple the "
                "queries. Set model.negatives=pool, or choose privacy=logit_dp."
            )
        return True
    if negatives != "auto":
        return negatives == "pool"
    return head == "query" and (privacy.candidates == "rows" or privacy.guarantee != "dp")


def principal_directions(embeddings: Tensor, count: int) -> Tensor:
    """Return the orthonormal directions of largest mean square (not centred), as columns, ``(dim, count)``."""
    wide = embeddings.detach().double()
    _, directions = torch.linalg.eigh(wide.T @ wide)
    chosen: Tensor = directions.flip(1)[:, :count]
    return chosen.to(embeddings.dtype)


def _identity(dim: int) -> nn.Linear:
    head = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(head.weight)
    return head


def _trained_head(encoder: str | Path | TextEncoder) -> tuple[TextEncoder | None, nn.Linear | None]:
    """Return the frozen encoder and the query head of a folder that `save_model` wrote; None for other encoders."""
    if isinstance(encoder, TextEncoder) or not Path(encoder).expanduser().is_dir():
        return None, None
    query, passage = load_towers(encoder)
    head = query.projection
    apart = query is passage or query.backbone is not passage.backbone or passage.projection is not None
    if apart or head is None or head.bias is not None or head.in_features != head.out_features:
        return None, None
    return passage, head.requires_grad_(True)


Progress = Callable[[int, int], None]
_AT_ONCE = 1024  # texts per call of the encoder, which embeds each of them apart


class FrozenTexts:
    """A frozen encoder and a cache of its embeddings, hidden from ``nn.Module``.

    A pickle or copy of it keeps only the passages, and encodes queries again.
    """

    #: Deep copies of a module, made to try something on it, share this object.
    holds_texts = True

    def __init__(
        self, tower: TextEncoder, cache_dir: str | Path | None, batch_size: int, *, queries_apart: bool
    ) -> None:
        self._apart = queries_apart
        self.tower = tower.eval().requires_grad_(False)
        self._cache_dir, self._batch_size = cache_dir, batch_size
        self._known: dict[str, tuple[dict[str, int], Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_known": {side: known for side, known in self._known.items() if side == "passage"}}

    def learn(self, texts: Any, side: Side, progress: Progress | None) -> Tensor:
        """Store only ``texts`` of this side; reuse stored embeddings if they include all of them."""
        listed = list(texts)
        rows, known = self._known.get(side, ({}, torch.empty(0, self.tower.dim)))
        if listed == list(rows):
            return known
        if all(text in rows for text in listed):
            found = known[[rows[text] for text in listed]]
        else:
            found = self._made(listed, side, self._cache_dir, progress)
        self._known[side] = ({text: row for row, text in enumerate(listed)}, found)
        return found

    def encode(
        self, texts: Sequence[str], side: Side, progress: Progress | None = None, *, keep: bool = False
    ) -> Tensor:
        """Return the embeddings of ``texts``: stored, or computed; with ``keep`` cached together."""
        if keep:
            place = {text: row for row, text in enumerate(dict.fromkeys(texts))}
            return self._made(list(place), side, self._cache_dir, progress)[[place[text] for text in texts]]
        rows, known = self._known.get(side, ({}, torch.empty(0, self.tower.dim)))
        new = list(dict.fromkeys(text for text in texts if text not in rows))
        if not new:
            return known[[rows[text] for text in texts]]
        fresh = self._made(new, side, None, progress)
        place = {**rows, **{text: len(known) + row for row, text in enumerate(new)}}
        return torch.cat([known.to(fresh.dtype), fresh])[[place[text] for text in texts]]

    def _made(
        self, texts: Sequence[str], side: Side, cache_dir: str | Path | None, progress: Progress | None
    ) -> Tensor:
        apart = self._apart and side == "query"
        size = max(self._batch_size, _AT_ONCE) if apart else self._batch_size
        return self.tower.encode(texts, side, batch_size=size, progress=progress, apart=apart, cache_dir=cache_dir)
