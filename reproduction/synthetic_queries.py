"""What an ablation learns from: generators and their queries, a teacher's labels, and where they came from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.file import read_card
from lit_dpret.cards.start import model_folder
from lit_dpret.costs.measure import peak, reset_peak, resident
from lit_dpret.errors import ResumeError
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.retrieval.trec_runs import Ranking
from lit_dpret.synthesis.filters import ReleasedQueries
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.pseudo_labels import Labelling, label
from lit_dpret.synthesis.filters.released import require_covered
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks
from lit_dpret.tasks.ranking import rank_embeddings
from lit_dpret.tasks.similarity import Similarity
from lit_dpret.tasks.stages import Stages
from reproduction.recipe import GeneratorRecipe

_READ = "ledger_head"


def train_generator(
    recipe: GeneratorRecipe, privacy: PrivacyMode, folder: Path, *, parts: Parts, seed: int, resume: bool,
    tuning: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Train a generator on all private queries; ``folder/model`` and the privacy card are what it leaves.

    Returns:
        ``trained_parameters``, and ``extra_bytes``: the peak of the process during training above what it held before.
    """
    L.seed_everything(seed, verbose=False)
    weights, start = {}, {}
    if recipe.public_start is not None:
        weights = {"pretrained": str(model_folder(recipe.public_start))}
        start = {"init_from": recipe.public_start, "init_from_is_public": True}
    model = recipe.model(privacy=privacy, **weights)
    data = parts.make_datamodule(
        max_passages=None, expected_batch_size=recipe.batch, sample_rate=None, physical_batch_size=recipe.physical_batch
    )
    here = torch.device("cpu")
    before = resident(here)
    reset_peak(here)
    train(
        model,
        data,
        Training(
            run_dir=folder,
            make_trainer=lambda **settings: parts.make_trainer(max_steps=recipe.steps, **settings),
            callbacks=stage_callbacks(
                folder,
                resume=resume,
                label=f"generator {folder.name}",
                tuning_trials=recipe.trials,
                start=start,
                **tuning,
            ),
            resume=resume,
        ),
    )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "extra_bytes": max(peak(here) - before, 0),
    }


def draw(
    recipe: GeneratorRecipe, generator: Path, passages: Mapping[str, str], folder: Path, *, count: int, seed: int,
    tuning: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Write ``count`` queries for each public passage into ``folder/data``."""
    with ProgressLine(f"generating queries, {folder.name}") as progress:
        synthesize(
            generator / "model",
            passages,
            folder / "data",
            passages_are_public=True,
            queries_per_passage=count,
            seed=seed,
            top_p=recipe.top_p,
            temperature=recipe.temperature,
            tuning=tuning,
            progress=progress,
        )
    return {"passages": len(passages)}


def likeness(data: Path, folder: Path, *, parts: Parts, max_texts: int) -> dict[str, Any]:
    """BLEU and MAUVE of synthetic queries against the private ones: no epsilon covers them, as the card then says."""
    task = Similarity(
        synthetic=data, reference="private", card_entry=True, measures=("bleu", "mauve"), features=("query",),
        max_texts=max_texts, seeds=3, ceiling=False, plot=False,
    )  # fmt: skip
    scores = task.run(replace(parts, run_dir=folder, resume=False))
    return {"bleu": scores["bleu"], "mauve": scores["mauve/query"]}


@dataclass(frozen=True)
class Teacher:
    """A cross-encoder that is declared public."""

    source: str

    def check(self) -> None:
        """Refuse one that is not there, that is no cross-encoder, or that a privacy card tells of."""
        nothing = ReleasedQueries(queries=(), passages={}, provenance="declared public")
        require_covered(self.source, nothing, declared_public=True, knob="task.teacher")
        CrossEncoder.load(self.source)

    def fingerprint(self) -> str:
        """Return `CrossEncoder.fingerprint`: another model behind the same name has another one."""
        return CrossEncoder.load(self.source).fingerprint()

    def label(
        self, released: ReleasedQueries, folder: Path, *, zero_shot: FrozenDualEncoder, per_query: int, seed: int
    ) -> dict[str, Any]:
        """Write the file of labels, ``folder/gpl-training-data.tsv``, for queries and passages of their first fifty.

        Returns:
            How many queries have labels, and the teacher's fingerprint.
        """
        with ProgressLine("labelling synthetic queries") as progress:
            label(
                released,
                folder,
                Labelling(
                    cross_encoder=self.source,
                    cross_encoder_is_public=True,
                    encoder_is_public=True,
                    per_query=per_query,
                    seed=seed,
                ),
                ranker=_Untrained(zero_shot),
                progress=progress,
            )
        return {"queries": len(released), "teacher": self.fingerprint()}


def of_those(released: ReleasedQueries, kept: Path | None) -> ReleasedQueries:
    """Return the queries whose ids a file lists; all of them without one."""
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


def made_by(folder: Path) -> dict[str, str]:
    """For the result of a stage that reads what a private training made: which one that was, by the card in ``folder``.

    It is the last record of the ledger that the card rests on, and no two trainings have the same.
    """
    return {_READ: str(read_card(folder)["ledger"]["head"])}


def refuse_other_training(
    stages: Stages, run_dir: Path, generator: str, *, cards: Mapping[str, Path], readers: Sequence[str]
) -> None:
    """Refuse finished stages that come from another training than the one in a generator's folder."""
    source = made_by(run_dir / generator) if stages.is_done(generator) else None
    for stage in filter(stages.is_done, [*cards, *readers]):
        found: Mapping[str, Any] = made_by(cards[stage]) if stage in cards else stages.run(stage, _not_again)
        if source is None or found[_READ] != source[_READ]:
            raise ResumeError(
                f"resume=true, but {stage} comes from another training than the one in {generator}, which was moved "
                f"away, or trained again. Restore that, or move {run_dir / stage} and what was made with it elsewhere "
                "as well; what a ledger is charged with stays spent."
            )


def _not_again(folder: Path, resume: bool) -> dict[str, Any]:
    raise AssertionError(f"{folder} is finished")
