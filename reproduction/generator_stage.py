"""Train one generator and draw from it, as stages of a longer task: resumable, and measured."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.start import model_folder
from lit_dpret.costs.measure import peak, reset_peak, resident
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks.fit import train
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks
from lit_dpret.tasks.similarity import Similarity
from reproduction.recipe import GeneratorRecipe


def train_generator(
    recipe: GeneratorRecipe, folder: Path, *, parts: Parts, eps: float, delta: float, seed: int, resume: bool,
    noise_multiplier: float | None, tuning: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Train a generator on all private queries; ``folder/model`` and the privacy card are what it leaves.

    Returns:
        ``trained_parameters``, and ``extra_bytes``: the peak of the process during training above what it held before.
    """
    L.seed_everything(seed, verbose=False)
    known = {} if noise_multiplier is None else {"noise_multiplier": noise_multiplier}
    weights, start = {}, {}
    if recipe.public_start is not None:
        weights = {"pretrained": str(model_folder(recipe.public_start))}
        start = {"init_from": recipe.public_start, "init_from_is_public": True}
    model = recipe.model(privacy=recipe.privacy(eps=eps, delta=delta, **known), **weights)
    data = parts.make_datamodule(
        max_passages=None, expected_batch_size=recipe.batch, sample_rate=None, physical_batch_size=recipe.physical_batch
    )
    here = torch.device("cpu")
    before = resident(here)
    reset_peak(here)
    train(
        model,
        data,
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
        loggers=[],
        resume=resume,
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
    """BLEU and MAUVE of made queries against the private ones: no epsilon covers them, as the card then says."""
    task = Similarity(
        synthetic=data, reference="private", card_entry=True, measures=("bleu", "mauve"), features=("query",),
        max_texts=max_texts, seeds=3, ceiling=False, plot=False,
    )  # fmt: skip
    scores = task.run(replace(parts, run_dir=folder, resume=False))
    return {"bleu": scores["bleu"], "mauve": scores["mauve/query"]}
