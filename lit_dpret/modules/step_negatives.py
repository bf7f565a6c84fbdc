"""The negatives of a batch's rows: chosen before the step, embedded and compared within it.

Passages are chosen before the forward pass and stored in the batch as features of their row, so that
code that splits a batch by rows (clipping row by row, the check that no row sees another) includes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.distributed.ranks import all_rows
from lit_dpret.encoders.bulk import embed_apart
from lit_dpret.errors import ConfigurationError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.negatives import RowNegatives, TrainTexts
from lit_dpret.negatives.rankings import silenced
from lit_dpret.negatives.row_negatives import Sources
from lit_dpret.privacy.batches import UnitBatch, map_rows
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.progress import ProgressLine


@dataclass
class Compared:
    """The candidates of each row; the arguments of `HardNegativeSoftmaxLoss`."""

    # Parts of each row's own candidates, ``(rows, some, dim)``, and which to leave out, ``(rows, some)``.
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # Parts of the candidates of all rows, ``(passages, dim)``, and which to leave out, ``(rows, passages)``.
    shared: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def arguments(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parts, axis in (("own", self.own, 1), ("shared", self.shared, 0)):
            if parts:
                found[name] = torch.cat([embeddings for embeddings, _ in parts], dim=axis)
                found[f"{name}_mask"] = torch.cat([mask for _, mask in parts], dim=1)
        return found


class StepNegatives:
    """Sources of negatives in a dual encoder.

    With ``passage_cache_dir``, or with ``dynamic``, the public list is embedded once, and looked up in every step.
    """

    def __init__(
        self, sources: Sources, privacy: PrivacyMode, *, passages_are_frozen: bool, passage_cache_dir: Path | None
    ) -> None:
        self.of_rows = RowNegatives(sources, privacy)
        if self.of_rows.dynamic is not None and not passages_are_frozen:
            raise ConfigurationError(
                "model.negatives=dynamic searches an index of passages that must not change while the query tower "
                "learns. Set model.towers=separate and model.passage_tower=frozen."
            )
        self._cache_dir = passage_cache_dir
        self._apart = privacy.guarantee == "dp"  # then no row affects what another one is compared with
        self.looks_up = self.of_rows.dynamic is not None or self._cache_dir is not None
        self.index: Tensor | None = None

    def learn(self, module: Any, texts: TrainTexts, device: torch.device | None) -> None:
        """Let the sources read the texts, and embed frozen passages once."""
        cache = self._cache_dir if self.looks_up else None
        towers = ModuleTowers(module, device, cache, keep=self.looks_up, apart=self._apart)
        self.of_rows.learn(texts, towers)
        if self.looks_up and self.of_rows.dynamic is None:
            self.index = towers.embeddings(texts.passages, "passage", None)

    def before_batch(self, module: Any, batch: UnitBatch) -> None:
        """Choose the passages of a batch and add them to it."""
        rows, negatives = batch.rows, self.of_rows
        epoch = int(module.current_epoch)
        negatives.before_step(epoch)
        if negatives.texts is None or not negatives.names_passages:
            return

        def embed() -> Tensor:
            tower = module.tower("query")
            with evaluation_mode(tower), torch.no_grad():
                found: Tensor
                if not self._apart:
                    found = module.embed(rows["query"], "query")
                    return found
                full = tower.at_full_length(rows["query"], "query")
                found = embed_apart(lambda batch: module.embed(batch, "query"), full, tower.tokenizer.pad_token_id)
                return silenced(found)

        places = negatives.places(rows, step=batch.step, epoch=epoch, embed=embed)
        rows.update(places)
        if not self.looks_up:
            for name, at in (("own_negatives", places["own_at"]), ("shared_negatives", places["shared_at"])):
                if at.shape[1]:
                    rows[name] = self._tokens(module, at, negatives.texts, batch.data_rows)

    def _tokens(self, module: Any, places: Tensor, texts: TrainTexts, data_rows: Tensor | None) -> dict[str, Tensor]:
        tower = module.tower("passage")
        listed = ["" if place < 0 else texts.passages[place] for place in places.flatten().tolist()]
        features = tower.tokenize(listed, "passage")
        if data_rows is not None:  # a batch of fixed shape, in which filled-in rows have texts of one token
            kept = data_rows.cpu().repeat_interleave(places.shape[1]).nonzero().flatten()
            some = map_rows(lambda t: t[kept], features)
            features = tower.placed(some, "passage", kept.tolist(), len(listed))
        return map_rows(lambda t: t.view(*places.shape, -1).to(places.device), features)  # type: ignore[no-any-return]

    def positives(self, module: Any, rows: Mapping[str, Any]) -> Tensor:
        """Return the embeddings of the rows' own passages, ``(rows, dim)``."""
        if not self.looks_up:
            found: Tensor = module.embed(rows["passage"], "passage")
            return found
        return self._looked_up(rows["answers_at"][:, 0])

    def compare(self, module: Any, rows: Mapping[str, Any], positives: Tensor) -> Compared:
        """Return the candidates of the rows, after `before_batch`; ``positives`` is the result of `positives`."""
        negatives, found = self.of_rows, Compared()
        texts = negatives.texts
        if texts is None:
            raise ConfigurationError("model.negatives were not prepared. Call learn_negatives first.")
        answers = texts.group_of(rows["answers_at"])
        if negatives.in_batch is not None:
            columns, groups = positives, answers[:, 0]
            if negatives.in_batch.gather:
                columns, groups = all_rows(columns), all_rows(groups)
            found.shared.append((columns, same_group(answers, groups)))
        if negatives.pre_batch is not None:
            before = negatives.pre_batch.remembered()
            if before is not None:
                found.shared.append((before[0].to(positives.dtype), same_group(answers, before[1])))
            if module.training and torch.is_grad_enabled():
                negatives.pre_batch.remember(positives, answers[:, 0])
        if negatives.names_passages:
            own_at, shared_at = rows["own_at"], rows["shared_at"]
            if own_at.shape[1]:
                found.own.append((self._embedded(module, rows.get("own_negatives"), own_at), own_at < 0))
            if shared_at.shape[1]:
                flat = shared_at.flatten()
                embeddings = self._embedded(module, rows.get("shared_negatives"), shared_at).flatten(0, 1)
                found.shared.append((embeddings, same_group(answers, texts.group_of(flat)) | (flat < 0)))
        return found

    def _embedded(self, module: Any, features: Any, places: Tensor) -> Tensor:
        """Return the passages' embeddings, ``(rows, each, dim)``."""
        if features is None:
            return self._looked_up(places)
        # Flattened row by row, which engines that keep rows apart recognise by the length of the axis.
        flat = map_rows(lambda t: t.flatten(0, 1), features)
        found: Tensor = module.embed(flat, "passage").view(*places.shape, -1)
        return found

    def _looked_up(self, places: Tensor) -> Tensor:
        holder: Any = self.of_rows.dynamic or self
        if holder.index is None:
            raise ConfigurationError("model.negatives were not prepared. Call learn_negatives first.")
        holder.index = holder.index.to(places.device)
        found: Tensor = holder.index[places.clamp(min=0)]
        return found


class ModuleTowers:
    """The towers of a dual encoder, for mining: in evaluation mode, on one device, with the current weights.

    With ``keep`` passages never change, so their embeddings are computed once; with ``apart`` no query affects another
    one's embedding.
    """

    holds_module = True  # not followed by `trained.objects_in`: it may serve another module next

    def __init__(
        self, module: Any, device: torch.device | None, passage_cache_dir: Path | None, *, keep: bool, apart: bool
    ) -> None:
        self._module, self.device, self._cache_dir, self._keep = module, device, passage_cache_dir, keep
        self._apart = apart
        self._passages: Tensor | None = None

    def embeddings(self, texts: Sequence[str], side: Any, folder: Path | None) -> Tensor:
        if side == "query" or not self._keep:
            return self._encoded(texts, side, folder)
        if self._passages is None:
            self._passages = self._encoded(texts, side, self._cache_dir)
        return self._passages

    def _encoded(self, texts: Sequence[str], side: Any, folder: Path | None) -> Tensor:
        tower = self._module.tower(side)
        found: Tensor
        with ProgressLine(f"encoding {side}s for negatives") as line:
            settings = {"device": self.device, "progress": line if side == "passage" else None}
            if side == "query" and self._apart:
                found = silenced(tower.encode(texts, side, device=self.device, apart=True))
            else:
                found = tower.encode(texts, side, cache_dir=folder, **settings)
        return found

    def fingerprint(self) -> str:
        return "".join(self._module.tower(side).fingerprint() for side in ("query", "passage"))


def same_group(answers: Tensor, columns: Tensor) -> Tensor:
    """Return which columns have the text group of one of a row's answers (padded with -1), ``(rows, columns)``."""
    found = torch.zeros(len(answers), len(columns), dtype=torch.bool, device=answers.device)
    for each in answers.unbind(1):
        found |= (each.unsqueeze(1) == columns.unsqueeze(0)) & (each >= 0).unsqueeze(1)
    return found
