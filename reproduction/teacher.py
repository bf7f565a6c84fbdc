"""A public cross-encoder as teacher of an ablation's rows: what made queries are labelled by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_dpret.callbacks import ProgressLine
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.retrieval.runs import Ranking
from lit_dpret.synthesis.filters import ReleasedQueries
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.pseudo_labels import label
from lit_dpret.synthesis.filters.released import require_covered
from lit_dpret.tasks.ranking import rank_embeddings


@dataclass(frozen=True)
class Teacher:
    """A cross-encoder that is declared public.

    Args:
        source: A folder or a hub name.
    """

    source: str

    def check(self) -> None:
        """Refuse one that is not there, that is no cross-encoder, or that a privacy card tells of.

        Raises:
            ConfigurationError: There is no such folder or model on the hub.
            UnsupportedModelError: It is another kind of model.
            PrivateDataError: It was trained on private data.
        """
        nothing = ReleasedQueries(queries=(), passages={}, provenance="declared public")
        require_covered(self.source, nothing, declared_public=True, knob="task.teacher")
        CrossEncoder.load(self.source)

    def fingerprint(self) -> str:
        """As `CrossEncoder.fingerprint`: another model behind the same name has another one."""
        return CrossEncoder.load(self.source).fingerprint()

    def label(
        self, released: ReleasedQueries, folder: Path, *, zero_shot: FrozenDualEncoder, per_query: int, seed: int
    ) -> dict[str, Any]:
        """Write the file of labels, ``folder/gpl-training-data.tsv``, for queries and passages of their first fifty.

        Args:
            released: What is labelled.
            folder: Where it is written, or gone on with.
            zero_shot: Finds the passages; it saw no private query.
            per_query: How many for each query.
            seed: Of the draws among them; public.

        Returns:
            How many queries have labels, and the teacher's fingerprint.
        """
        with ProgressLine("labelling made queries") as progress:
            label(
                released,
                folder,
                ranker=_Untrained(zero_shot),
                cross_encoder=self.source,
                cross_encoder_is_public=True,
                encoder_is_public=True,
                per_query=per_query,
                seed=seed,
                progress=progress,
            )
        return {"queries": len(released), "teacher": self.fingerprint()}


def of_those(released: ReleasedQueries, kept: Path | None) -> ReleasedQueries:
    """The queries whose ids a file lists; all of them without one."""
    if kept is None:
        return released
    ids = set(kept.read_text(encoding="utf-8").splitlines())
    return replace(released, queries=tuple(query for query in released.queries if query.query_id in ids))


class _Untrained:
    """A frozen encoder that ranks, and finds the embeddings of its passages in its cache."""

    def __init__(self, model: FrozenDualEncoder) -> None:
        self.model, self.encoder = model, model.pretrained or "encoder"

    def rank(self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int) -> Ranking:
        return rank_embeddings(
            list(queries),
            self.model.encode_queries(list(queries.values())),
            list(passages),
            self.model.encode_passages(list(passages.values())),
            k=k,
        )
