"""`task=second_task`: the encoders of a finished `task=variants`, frozen, under a classifier for other labels.

Paper 002, section 5.2: what a privately trained encoder is worth to somebody who does not train
privately. The classifier's losses and scores are computed from the second data set without privacy, and
nothing is claimed about it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.datamodules.images import Labels
from lit_dpret.errors import DataError
from lit_dpret.modules import EmbeddingTrainer, OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.tasks.parts import Parts
from reproduction.frozen_classifier import train_second_task
from reproduction.published import PAPER_002
from reproduction.report.metrics_table import MetricsTable
from reproduction.report.variant_report import SETTINGS, VariantReport, beside_the_paper, made_by
from reproduction.report.variant_runs import UNTRAINED, VariantRun
from reproduction.study import Study
from reproduction.variant_study import START

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Encoder:
    """A run of the study."""

    variant: str
    seed: int
    folder: Path


@dataclass(kw_only=True, eq=False)
class SecondTask(Study):
    """Train the classifier on every encoder of a study: figure 2, tables 2 and 4.

    Guarantees:
        - The encoders' weights are read and never changed.
        - A classifier that was trained is not trained again after ``resume=true``.
    """

    growing = Study.growing | {"seeds", "data", "baseline"}

    study: Path
    data: ImagesDataModule | None = None
    seeds: Sequence[int] | None = None
    learning_rate: float = 1e-2
    batch_size: int = 400
    epochs: int = 10
    baseline: str | None = "Non-private"
    min_free_mb: float = 100

    def __post_init__(self) -> None:
        self.study = Path(self.study)

    def run(self, parts: Parts) -> dict[str, float]:
        """Train what is not trained yet; returns test accuracy by run."""
        encoders = self._encoders()
        data, labels = self._second_data(parts)
        splits: dict[str, Labelled] = {split: data.labelled(split, labels=labels) for split in ("train", "test")}
        names = data.class_names(labels)
        self.begin(parts, source=data.source, labels=labels)
        runs: dict[str, VariantRun] = {}

        def train(encoder: Encoder) -> str:
            name = encoder.folder.name
            result = self._stages.run(name, lambda *_: self._train(parts, encoder, splits, classes=len(names)))
            runs[name] = VariantRun(**result)
            return f"accuracy {runs[name].metrics['accuracy']:.4f}"

        self.in_turn(encoders, lambda encoder: encoder.folder.name, train, label="second task")
        page = self._tell(parts, list(runs.values()), names, learned=f"the {labels} labels of {data.source}")
        sys.stdout.write(f"written: {page}\n")
        return {name: run.metrics["accuracy"] for name, run in runs.items()}

    def _second_data(self, parts: Parts) -> tuple[ImagesDataModule, Labels]:
        """Return what is classified, and by which labels."""
        if self.data is not None and (self.data.folder is None or self.data.folder.is_dir()):
            return self.data, self.data.labels
        return parts.make_datamodule(), "coarse"

    def _encoders(self) -> list[Encoder]:
        """Return the study's runs of the paper's variants, and what they started from where the study kept it."""
        path = self.study / "report" / SETTINGS
        if not path.is_file():
            raise DataError(f"task.study={self.study} holds no {path.name}: it is no run folder of task=variants.")
        runs = [run for run in json.loads(path.read_text(encoding="utf-8")) if run["part"] == "paper"]
        lowest = min((run["seed"] for run in runs), default=0)
        wanted = [lowest] if self.seeds is None else self.seeds
        found = [
            Encoder(run["variant"], run["seed"], self.study / f"{run['name']}_seed{run['seed']}")
            for run in runs
            if run["seed"] in wanted
        ]
        if not found:
            raise DataError(f"task.study={self.study} has no finished run of task.seeds={wanted}.")
        starts = [Encoder(UNTRAINED, seed, self.study / f"{START}_seed{seed}") for seed in wanted]
        return found + [start for start in starts if (start.folder / "model").is_dir()]

    def _train(self, parts: Parts, encoder: Encoder, splits: dict[str, Labelled], *, classes: int) -> dict[str, Any]:
        module: EmbeddingTrainer = parts.make_module(
            privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=str(encoder.folder / "model")
        )
        shape = tuple(parts.make_datamodule().train_units().rows(0)[0].image.shape)
        found = train_second_task(
            module.net,
            train=(fitted(splits["train"][0], shape), splits["train"][1]),
            test=(fitted(splits["test"][0], shape), splits["test"][1]),
            classes=classes,
            seed=encoder.seed,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            epochs=self.epochs,
        )
        run = VariantRun(
            variant=encoder.variant,
            seed=encoder.seed,
            steps=list(range(1, len(found.losses) + 1)),
            losses=list(found.losses),
            examples=list(found.examples),
            metrics=found.scores.to_dict(),
            confusion=found.confusion.tolist(),
            batch_size=self.batch_size,
        )
        return asdict(run)

    def _tell(self, parts: Parts, runs: list[VariantRun], class_names: tuple[str, ...], *, learned: str) -> Path:
        base = self.baseline if any(run.variant == self.baseline for run in runs) else None
        said = (
            f"Frozen encoders under a classifier with layers of 64, 32 and {len(class_names)}, which learned {learned} "
            "without privacy. The paper's classifier learned the twenty coarse labels of CIFAR-100, so its numbers "
            "stand beside ours for their form, not as a goal."
        )
        table, theirs = MetricsTable.of(runs, baseline=base), (PAPER_002["table_2"], PAPER_002["table_4"])
        return VariantReport(
            runs=runs, baseline=base, class_names=class_names, title="A second task",
            lead=made_by(parts.command, said),
            more=[beside_the_paper(table, "Table 2", theirs[0], "Table 4, absolute.", theirs[1])],
        ).write(parts.run_dir / "report")  # fmt: skip


def fitted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images as a net for ``shape`` (channels, height, width) reads them: grey repeated, a black border added."""
    channels, height, width = images.shape[1:]
    if channels not in (1, shape[0]) or height > shape[1] or width > shape[2]:
        raise DataError(f"Images of shape {tuple(images.shape[1:])} do not fit a net for images of shape {shape}.")
    above, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    border = (left, shape[2] - width - left, above, shape[1] - height - above)
    return F.pad(images.expand(-1, shape[0], -1, -1), border)
