"""Train one retriever as a stage of a longer task: resumable, with a ledger and a card of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, StepProgress
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import DataError
from lit_dpret.modules import DualEncoder, FrozenDualEncoder
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.retrieval.statistics import bootstrap_interval
from lit_dpret.synthesis.filters import ReleasedQueries
from lit_dpret.synthesis.filters.released import require_covered, require_released
from lit_dpret.synthesis.round_trip import hits, wrong_sources
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.ranking import rank_embeddings


def stage_callbacks(
    folder: Path, *, resume: bool, label: str, save_every: int = 5, trial_of: Any = None,
    start: Mapping[str, Any] | None = None, **tuning: Any,
) -> list[Any]:  # fmt: skip
    """Return the callbacks of a training inside a longer task; one that was not begun begins, also on ``resume``.

    ``start`` goes to `PrivacyAccountant`: the run that this one starts from; ``tuning`` goes to `PrivacyCard`.
    """
    return [
        PrivacyAccountant(run_dir=folder, resume=is_begun(folder, resume), trial_of=trial_of, **(start or {})),
        PrivacyCard(run_dir=folder, **tuning),
        ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=save_every, save_last=True, save_top_k=1),
        StepProgress(label),
    ]


def is_begun(folder: Path, resume: bool) -> bool:
    """Return whether a training inside a longer task goes on, and does not begin."""
    return resume and (folder / LEDGER_NAME).exists()


def set_batch(data: PairsDataModule, mode: Any, batch: int) -> None:
    """Have ``data`` drawn in batches of ``batch`` units, or of all where there are fewer and that may be known."""
    data.use_unit(mode.unit, mode.neighbours)
    data.expected_batch_size = batch if mode.neighbours == "add_or_remove" else min(batch, data.n_units)


def train_retriever(
    model: Any, data: PairsDataModule, folder: Path, *, parts: Parts, steps: int, batch: int, callbacks: list[Any],
    resume: bool,
) -> None:  # fmt: skip
    """Train ``model`` for ``steps`` logical steps of ``batch`` units on average, as `set_batch` has it."""
    data.setup("fit")
    set_batch(data, model.privacy, batch)

    def make_trainer(**settings: Any) -> L.Trainer:
        made: L.Trainer = parts.make_trainer(max_steps=steps, **settings)
        return made

    train(model, data, Training(run_dir=folder, make_trainer=make_trainer, callbacks=callbacks, resume=resume))


KEPT = "kept_queries.txt"


def check_round_trip(
    model: DualEncoder | FrozenDualEncoder, released: ReleasedQueries, folder: Path, *, k: int, seed: int
) -> dict[str, Any]:
    """Measure the round trip of released queries; ``folder/kept_queries.txt`` lists the ids of those that pass.

    Args:
        model: A retriever that saw neither the private nor the synthetic queries.
        released: Synthetic queries with their sources; all their passages are searched.
        folder: Where the list is written.
        k: How far down the list a source may stand.
        seed: Of the control, in which every query is held against a wrong passage.

    Returns:
        ``recall`` and ``control`` as [mean, low, high], ``k``, ``queries`` and ``kept``, as JSON values.

    Raises:
        DataError: No query passes.
        PrivateDataError: ``released`` is something else, or the model was trained on other private data.
    """
    require_released(released, "check_round_trip")
    if model.pretrained is not None:  # without a trace of a run it is public, as everywhere in training
        require_covered(model.pretrained, released, declared_public=True, knob="model.encoder")
    queries = {query.query_id: query.text for query in released}
    sources = {query.query_id: query.passage_id for query in released}
    names = list(released.passages)
    ranking = rank_embeddings(
        list(queries),
        model.encode_queries(list(queries.values())),
        names,
        model.encode_passages(list(released.passages.values())),
        k=k,
    )
    places = zip(queries, ranking.top.indices.tolist(), strict=True)
    ranked = {query: [names[i] for i in row if i >= 0] for query, row in places}
    found = hits(sources, ranked, k=k)
    wrong = hits(wrong_sources(sources, seed=seed), ranked, k=k)
    kept = [query for query, hit in found.items() if hit]
    if not kept:
        raise DataError(
            f"None of {len(found)} synthetic queries finds its own passage among the first {k} results: they say "
            "nothing about their passages. Train the generator longer, or set task.round_trip_filter=null."
        )
    (folder / KEPT).write_text("".join(f"{query}\n" for query in kept), encoding="utf-8")
    recall, control = (bootstrap_interval([float(hit) for hit in each.values()]) for each in (found, wrong))
    return {
        "recall": [recall.mean, recall.low, recall.high],
        "control": [control.mean, control.low, control.high],
        "k": k,
        "queries": len(found),
        "kept": len(kept),
    }
