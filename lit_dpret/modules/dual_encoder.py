"""`DualEncoder`: transformers that embed queries and passages in one space, trained end to end.

The privacy mode determines where a query's negatives come from: the other rows of its (sub-)batch (``none``,
``synthetic``, ``batch_clip``, ``logit_dp``), copies of them (``per_example_duplicated``), or a public pool
(``public_passages``). With in-batch negatives a query's gradient depends on the other queries drawn, so clipping it
bounds nothing: ``dp_sgd`` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_dpret.encoders import Side, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError
from lit_dpret.files import OutputFolder
from lit_dpret.losses import HardNegativeSoftmaxLoss, InBatchSoftmaxLoss, MarginMSELoss, PairwiseLoss, false_negatives
from lit_dpret.modules.fine_tuning import with_lora, without_adapters
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.pair_module import PairModule, make_towers
from lit_dpret.modules.public_pool import Candidates, PublicPool
from lit_dpret.modules.step_negatives import Compared, StepNegatives
from lit_dpret.negatives import RowNegatives, TrainTexts
from lit_dpret.negatives.row_negatives import Sources
from lit_dpret.privacy.batches import UnitBatch, copied_rows, map_rows, rows_in_turn, take_rows
from lit_dpret.privacy.ledger.trained import note_folder
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import Row
from lit_dpret.settings import require_choice, require_whole

TowerChoice = Literal["shared", "separate"]
PassageTower = Literal["trained", "frozen"]
_NEGATIVES_KEY = "lit_dpret_negatives"


class DualEncoder(PairModule):
    """Encoders of queries and passages: a shared one, or one for each.

    Guarantees:
        - A passage is never a negative of a query that it answers: neither another copy of the row's
          own passage, nor another positive of the same query.
        - ``privacy=dp_sgd`` is refused before training: the loss couples the queries of a batch.
        - Under ``privacy=public_passages`` a row's loss is a function of its own query and positives, of
          public passages and of released weights.
        - `save_model` writes a folder that ``SentenceTransformer(folder)`` loads, with the same
          embeddings; adapters are merged into the weights.

    Args:
        privacy: The privacy mode.
        optimizer: Name, learning rate and schedule of the optimizer.
        encoder: ``minilm``, ``public_t5``, a hub name, a model folder, or a ready `TextEncoder`, which keeps its own
            lengths and prefixes; null to build a new, untrained one from ``config``.
        config: Fields of the Hugging Face config of a new encoder, including ``model_type``.
        tokenizer: Folder or hub name of a new encoder's tokenizer.
        towers: ``shared``, one encoder for both sides, or ``separate``, two that start equal, or as a folder with
            two stores them.
        passage_tower: ``trained``, or ``frozen`` if the towers are separate.
        lora: Arguments of ``peft.LoraConfig`` (``r``, ``lora_alpha``, ``target_modules`` and so on): train
            low-rank adapters instead of the weights. Null trains all weights.
        loss: A loss of the similarity matrix (`lit_dpret.losses.pairs`), or `MarginMSELoss` for labelled
            negatives, either with its own temperature; null for the softmax over the passages.
        negatives: Sources of negatives (`lit_dpret.negatives`), listed or by name; null for the default of the
            privacy mode, the passages of the batch or a public pool. Sources other than ``in_batch`` need the
            softmax, or ``labelled`` with `MarginMSELoss`.
        passage_cache_dir: The folder that keeps embeddings of a frozen passage tower between runs, for ``negatives``
            and `encode_passages`; they depend on passages alone. Null keeps none.
        temperature: Divides the cosine similarity in the softmax.
        max_query_length: The maximum number of tokens of a query, including special tokens.
        max_passage_length: The same for a passage.
        query_prefix: A prefix for every query; null for that of the encoder's folder.
        passage_prefix: A prefix for every passage; null for that of the encoder's folder.
        gradient_checkpointing: Recompute activations to save memory.
        grad_cache_rows: Embed this many texts at a time, and once more for the gradient, so that a large batch
            needs the memory of a small one (`embed_in_chunks`); null embeds all together.
        log_private_loss: Log the training loss although it is an unaccounted release.

    Raises:
        ConfigurationError: Two settings contradict each other, or the encoder cannot be found.
    """

    takes_public_passages = True
    reads = "texts"
    ragged_features = ("answers", "answers_at")

    def __init__(
        self,
        *,
        privacy: PrivacyMode,
        optimizer: OptimizerSpec,
        encoder: str | Path | TextEncoder | None = "minilm",
        config: Mapping[str, Any] | None = None,
        tokenizer: str | Path | None = None,
        towers: TowerChoice = "shared",
        passage_tower: PassageTower = "trained",
        lora: Mapping[str, Any] | None = None,
        loss: PairwiseLoss | MarginMSELoss | None = None,
        negatives: Sources | None = None,
        passage_cache_dir: str | OutputFolder | None = None,
        temperature: float = 0.05,
        max_query_length: int = 32,
        max_passage_length: int = 128,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        gradient_checkpointing: bool = False,
        grad_cache_rows: int | None = None,
        log_private_loss: bool = False,
    ) -> None:
        settings = dict(locals())
        super().__init__(privacy=privacy, optimizer=optimizer, log_private_loss=log_private_loss)
        self.keep_settings(settings)
        require_choice("model.towers", towers, get_args(TowerChoice))
        require_choice("model.passage_tower", passage_tower, get_args(PassageTower))
        if towers == "shared" and passage_tower == "frozen":
            raise ConfigurationError(
                "model.passage_tower=frozen cannot go with model.towers=shared, where both sides are one encoder. "
                "Set model.towers=separate."
            )
        self.loss = InBatchSoftmaxLoss(temperature=temperature, similarity="cosine") if loss is None else loss
        self.pretrained = str(encoder) if isinstance(encoder, (str, Path)) else None
        made = make_towers(
            encoder,
            separate=towers == "separate",
            config=config,
            tokenizer=tokenizer,
            query_max_length=max_query_length,
            passage_max_length=max_passage_length,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
        )
        self.encoder = made[0].train()
        self.passage_encoder = None if made[1] is None else made[1].train()
        self._frozen_passages = passage_tower == "frozen"
        if lora is not None:
            for tower in (self.encoder, None if self._frozen_passages else self.passage_encoder):
                if tower is not None:
                    tower.backbone = with_lora(tower.backbone, lora)
        if self._frozen_passages:
            self.tower("passage").eval().requires_grad_(False)
        if gradient_checkpointing:
            for side in (self.encoder, self.passage_encoder):
                if side is not None:
                    side.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._pool: PublicPool | None = None
        if privacy.candidates == "pool":
            if not isinstance(self.loss, InBatchSoftmaxLoss):
                raise ConfigurationError(
                    f"model.loss={type(self.loss).__name__} cannot go with privacy={privacy.name}, whose loss is each "
                    "query's softmax over public passages: another loss may couple them. Set model.loss to null."
                )
            if self._frozen_passages and privacy.passage_gradient != "none":
                raise ConfigurationError(
                    f"privacy.passage_gradient={privacy.passage_gradient} has nothing to train with "
                    "model.passage_tower=frozen. Set it to none."
                )
            self._pool = PublicPool(privacy.pool_size, privacy.pool_seed)
        self._listwise = HardNegativeSoftmaxLoss(temperature=temperature, similarity="cosine")
        self._pool_texts: list[str] = []
        self._candidates: Candidates | None = None
        self._all_passages: Tensor | None = None
        if passage_cache_dir is not None and not self._frozen_passages:
            raise ConfigurationError(
                f"model.passage_cache_dir={passage_cache_dir} caches embeddings of passages, which change with every "
                "step while their tower is trained. Set model.towers=separate and model.passage_tower=frozen, or set "
                "it to null."
            )
        self._passage_cache_dir = None if passage_cache_dir is None else Path(passage_cache_dir)
        self._negatives = self._make_negatives(negatives)
        require_whole("model", {"grad_cache_rows": grad_cache_rows}, 1, null=True)
        if grad_cache_rows is not None and privacy.guarantee == "dp" and not privacy.clips_whole_batch:
            whole = privacy.sub_batches is None
            smaller = "lower datamodule.physical_batch_size" if whole else "raise privacy.sub_batches"
            raise ConfigurationError(
                f"model.grad_cache_rows={grad_cache_rows} cannot go with privacy={privacy.name}, whose clipping "
                f"records one pass over all rows. Set it to null; to save memory, {smaller}."
            )
        self._grad_cache_rows = grad_cache_rows

    def _make_negatives(self, sources: Sources | None) -> StepNegatives | None:
        """Return sources that do more than the privacy mode does by default; None if there are none."""
        if isinstance(self.loss, MarginMSELoss):
            listed = sources.values() if isinstance(sources, Mapping) else sources or ()
            if [source.name for source in listed] != ["labelled"]:
                names = ",".join(source.name for source in listed) or "null"
                raise ConfigurationError(
                    f"model.negatives={names} cannot go with model.loss=MarginMSELoss, which learns the labels of one "
                    "source. Set negatives=labelled and model.negatives.labelled.file, and no other source."
                )
        if sources is None:
            return None
        made = StepNegatives(
            sources, self.privacy, passages_are_frozen=self._frozen_passages, passage_cache_dir=self._passage_cache_dir
        )
        pairs = self.privacy.guarantee == "dp" and not self.privacy.clips_whole_batch
        if made.of_rows.only_in_batch and (pairs or not made.looks_up):
            return None
        if not isinstance(self.loss, (InBatchSoftmaxLoss, MarginMSELoss)):
            names = ",".join(source.name for source in made.of_rows.sources)
            raise ConfigurationError(
                f"model.loss={type(self.loss).__name__} compares only the rows of the batch, and cannot use "
                f"model.negatives={names}. Set model.loss or model.negatives to null."
            )
        self.coupled_loss = made.of_rows.couples_rows
        return made

    @property
    def row_sources(self) -> RowNegatives | None:
        return None if self._negatives is None else self._negatives.of_rows

    def tower(self, side: Side) -> TextEncoder:
        return self.encoder if side == "query" or self.passage_encoder is None else self.passage_encoder

    def text_encoder(self, side: Side) -> TextEncoder:
        return self.tower(side)

    def train(self, mode: bool = True) -> DualEncoder:
        super().train(mode)
        if self._frozen_passages:
            self.tower("passage").eval()
        return self

    # -- batches -----------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage != "fit" or data is None:
            return
        # In every fit again: the data of an earlier fit may differ, and no claim of this one counts them.
        if self._pool is not None:
            self.learn_public_passages(data.public_passages())
        if self._negatives is not None:
            self.learn_negatives(TrainTexts.of(data), device=self.trainer.strategy.root_device)

    def learn_negatives(self, texts: TrainTexts, *, device: torch.device | None = None) -> None:
        """Let the sources of negatives read the texts, encoding on ``device``; ``setup`` calls this in a fit."""
        if self._negatives is not None:
            self._negatives.learn(self, texts, device)

    def learn_public_passages(self, passages: Mapping[str, str]) -> None:
        """Set the public passages by id; ``setup`` calls this for the Trainer's DataModule."""
        listed = dict(sorted(passages.items()))
        self._pool_texts = list(listed.values())
        self._candidates = self._all_passages = None
        if self._pool is not None:
            self._pool.learn(list(listed))

    def collate_rows(self, rows: list[Row]) -> dict[str, Any]:
        """Return the tokens of both sides, and which passages are correct answers.

        Returns:
            ``query`` and ``passage``, each with ``input_ids`` and ``attention_mask`` of shape
            ``(rows, tokens)``, and ``answers``, booleans of shape ``(rows, rows)``. Against a public pool,
            ``answers`` are the indices of the row's own and other positives in the public list,
            ``(rows, most of them)``, padded with -1. With sources of negatives the keys of the rows are added
            (`TrainTexts.keys`), ``answers`` is present only against a pool, and ``passage`` only if its embedding is
            not looked up.
        """
        negatives = self._negatives
        batch: dict[str, Any] = {"query": self.tower("query").tokenize([row.query for row in rows], "query")}
        if negatives is None or not negatives.looks_up:
            batch["passage"] = self.tower("passage").tokenize([row.passage for row in rows], "passage")
        ids, positives = [row.passage_id for row in rows], [row.positives for row in rows]
        if negatives is not None:
            batch |= negatives.of_rows.keys(rows)
        if self._pool is not None:
            own, others = self._pool.places(ids, positives)
            return batch | {"answers": torch.cat([own.unsqueeze(1), others], dim=1)}
        return batch if negatives is not None else batch | {"answers": false_negatives(ids, ids, positives)}

    def place_rows(self, features: Any, places: Sequence[int], rows: int) -> Any:
        """Like `PrivateModule.place_rows`, with every text padded to its maximal length."""
        found: dict[str, Any] = {}
        for name, value in features.items():
            if name == "query" or name == "passage":
                found[name] = self.tower(name).placed(value, name, places, rows)
            else:
                found[name] = copied_rows(value, places, rows)
        return found

    def represent(self, features: Any, side: Side) -> Tensor:
        """Return the embeddings of tokenised texts, ``(rows, dim)``."""
        tower, at_once = self.tower(side), self._grad_cache_rows
        if at_once is not None:
            return embed_in_chunks(tower, features, count=len(features["input_ids"]), rows_at_once=at_once)
        found: Tensor = tower(features)
        return found

    def probe_features(self, side: Side) -> Any:
        return self.tower(side).tokenize(["one text", "another text"], side)

    def pair_shape(self) -> dict[str, Any]:
        contract = self.encoder.contract
        return {
            "dim": self.encoder.dim,
            "positions": max(contract.query_max_length, contract.passage_max_length),
            "shared": self.passage_encoder is None,
        }

    # -- candidates besides the batch ---------------------------------------------------------

    def before_batch(self, batch: UnitBatch) -> None:
        """Choose the rows' negatives, and embed the public passages of a new step."""
        if self._negatives is not None:
            self._negatives.before_batch(self, batch)
        if self._pool is None or (self._candidates is not None and self._candidates.step == batch.step):
            return
        if not self._pool_texts:
            raise ConfigurationError(
                "privacy=public_passages has no public passages: give the Trainer a DataModule that lists them, or "
                "call learn_public_passages."
            )
        drawn = self._pool.draw(batch.step, self.device)
        listed = self._pool_texts
        texts = listed if drawn.chosen is None else [listed[i] for i in drawn.chosen.tolist()]
        if self.privacy.passage_gradient == "full":
            tokens = self.tower("passage").tokenize(texts, "passage")
            self._candidates = replace(drawn, features=map_rows(lambda t: t.to(self.device), tokens))
            return
        if self._passage_cache_dir is None:
            embeddings = self.encode_passages(texts)
        else:
            if self._all_passages is None:  # frozen: computed once, and read from the cache by later runs
                self._all_passages = self.encode_passages(listed)
            embeddings = drawn.of(self._all_passages)
        self._candidates = replace(drawn, embeddings=embeddings.to(self.device))

    def per_row_loss(self, rows: dict[str, Any]) -> Tensor:
        """Return the loss of every row, ``(rows,)``: cross entropy in nats of its own passage among its candidates.

        Under `MarginMSELoss`, return the squared error of its margins.
        """
        negatives = self._negatives
        if negatives is None and self._candidates is None:
            return super().per_row_loss(rows)
        queries = self.embed(rows["query"], "query")
        through_passages = self.privacy.passage_gradient != "none"
        with torch.set_grad_enabled(torch.is_grad_enabled() and through_passages):
            if negatives is None:
                own, compared = self.embed(rows["passage"], "passage"), Compared()
            else:
                own = negatives.positives(self, rows)
                compared = negatives.compare(self, rows, own)
        if self._candidates is not None:
            self._candidates.add_to(compared, rows["answers"], lambda features: self.embed(features, "passage"))
        losses: Tensor
        if isinstance(self.loss, MarginMSELoss):
            ((embeddings, left_out),) = compared.own
            margins = rows["own_margins"]
            losses = self.loss(queries, own, embeddings, margins, left_out | margins.isnan())
        else:
            losses = self._listwise(queries, own, **compared.arguments())
        return losses

    # -- checkpoints --------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._negatives is not None:
            checkpoint[_NEGATIVES_KEY] = self._negatives.of_rows.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self._negatives is not None and _NEGATIVES_KEY in checkpoint:
            self._negatives.of_rows.load_state_dict(checkpoint[_NEGATIVES_KEY], self.device)

    # -- encoding and export ------------------------------------------------------------------

    def encode_queries(self, texts: Sequence[str], *, progress: Any = None) -> Tensor:
        """Return embeddings of queries of length 1 on the CPU, ``(texts, dim)``; their dot product is the cosine."""
        return self.tower("query").encode(texts, "query", progress=progress)

    def encode_passages(self, texts: Sequence[str], *, progress: Any = None) -> Tensor:
        """Return embeddings of passages like `encode_queries`, from ``passage_cache_dir`` if cached."""
        return self.tower("passage").encode(texts, "passage", progress=progress, cache_dir=self._passage_cache_dir)

    def save_model(self, folder: str | Path) -> Path:
        """Write the encoder, or both encoders, as a sentence-transformers folder with its contract."""
        towers = []
        for tower in filter(None, (self.encoder, self.passage_encoder)):
            backbone = without_adapters(tower.backbone)
            towers.append(tower if backbone is tower.backbone else tower.changed(backbone=backbone))
        save_sentence_transformer(folder, *towers)
        note_folder(self, folder)
        return Path(folder)


def embed_in_chunks(embed: Callable[[Any], Tensor], features: Any, *, count: int, rows_at_once: int) -> Tensor:
    """Return embeddings of rows, ``(count, dim)``, storing activations for only ``rows_at_once`` rows at a time.

    A contrastive loss needs the embeddings of all rows together, but not the activations that led to them. This is
    GradCache (Gao et al., 2101.06983): a checkpoint around each chunk. Values and gradients equal those of embedding
    the chunks one after the other in one graph, dropout masks included. A backward pass leaves the random state as it
    found it. ``embed`` must not write any state.
    """
    if not torch.is_grad_enabled():
        return torch.cat([embed(take_rows(features, part)) for part in rows_in_turn(count, rows_at_once)])
    chunks: list[Tensor] = [
        checkpoint(embed, take_rows(features, part), use_reentrant=False)  # type: ignore[no-untyped-call]
        for part in rows_in_turn(count, rows_at_once)
    ]
    return torch.cat(chunks)
