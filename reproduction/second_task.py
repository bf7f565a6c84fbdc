"""`task=second_task`: train a classifier for other labels on the frozen encoders of a finished `task=variants`.

Paper 002, section 5.2: the value of a privately trained encoder to a user who does not train privately. The
classifier's losses and scores are computed from the second data set without privacy, and nothing is claimed about it.
The paper's appendix B.2 names a sensitivity and an epsilon for this task, which contradicts its section 5.2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.datamodules.images import Labels
from lit_dpret.encoders.vision.knn import ClassificationScores, confusion_matrix
from lit_dpret.encoders.vision.nets import embed
from lit_dpret.errors import DataError
from lit_dpret.modules import EmbeddingTrainer, OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.settings import picked, require_number, require_whole
from lit_dpret.tasks.parts import Parts, say
from reproduction.published import PAPER_002
from reproduction.report.variant_runs import UNTRAINED, VariantRun
from reproduction.report.variants import SETTINGS, MetricsTable, VariantReport, beside_the_paper, made_by
from reproduction.study import Study
from reproduction.variant_study import START

Labelled = tuple[Tensor, Tensor]


@dataclass(kw_only=True)
class Classifier:
    """A small classifier on frozen embeddings; the defaults are the paper's (appendix B.2)."""

    learning_rate: float = 1e-2  # of Adam
    batch_size: int = 400  # images of a step
    epochs: int = 10  # passes over the train images
    hidden: Sequence[int] = (64, 32)  # widths of the hidden layers, with ReLU between them

    def __post_init__(self) -> None:
        require_number("task", self, "learning_rate")
        require_whole("task", self, 1, "batch_size", "epochs")


@dataclass(frozen=True, kw_only=True)
class SecondTaskResult:
    """The results of the classifier."""

    losses: list[float]  # cross entropy of each step's batch, in order
    examples: list[int]  # images seen up to and including each step
    seconds: list[float]  # at each step, since the first step began
    scores: ClassificationScores  # on the test images, after the last step
    confusion: Tensor  # counts, shape (classes, classes); row: true, column: predicted


def train_second_task(
    net: nn.Module, *, train: Labelled, test: Labelled, classes: int, seed: int = 0, how: Classifier | None = None
) -> SecondTaskResult:
    """Train a classifier on the embeddings of the frozen ``net``, computed once, and score it.

    ``train`` and ``test`` are images and labels; ``seed`` determines the initial weights and the order of the images.

    Guarantees:
        - ``net`` keeps its weights and gathers no gradient.
        - The same seed gives the same result on the same machine. torch's global random state is left unchanged.
    """
    how = how or Classifier()
    known, unseen = (embed(net, images) for images, _ in (train, test))
    for embeddings, labels in ((known, train[1]), (unseen, test[1])):
        if labels.shape != embeddings.shape[:1] or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise DataError(f"{len(embeddings)} images need one label each, from 0 to {classes - 1}.")
        if not torch.isfinite(embeddings).all():
            raise DataError("An embedding is not finite: the encoder has diverged.")
    batches: DataLoader[tuple[Tensor, ...]] = DataLoader(
        TensorDataset(known, train[1]), batch_size=how.batch_size, shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    losses: list[float] = []
    examples: list[int] = []
    seconds: list[float] = []
    start = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for wide_in, wide_out in zip((known.shape[1], *how.hidden), how.hidden, strict=False):
            layers += [nn.Linear(wide_in, wide_out), nn.ReLU()]
        classifier = nn.Sequential(*layers, nn.Linear(how.hidden[-1], classes))
        optimizer = torch.optim.Adam(classifier.parameters(), lr=how.learning_rate)
        for _ in range(how.epochs):
            for embeddings, labels in batches:
                loss = F.cross_entropy(classifier(embeddings), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.detach()))
                examples.append((examples[-1] if examples else 0) + len(labels))
                seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        confusion = confusion_matrix(test[1], classifier(unseen).argmax(dim=1), classes=classes)
    scores = ClassificationScores.of(confusion)
    return SecondTaskResult(losses=losses, examples=examples, seconds=seconds, scores=scores, confusion=confusion)


@dataclass(frozen=True)
class Encoder:
    """A run of the study."""

    variant: str
    seed: int
    folder: Path


@dataclass(kw_only=True, eq=False)
class SecondTask(Classifier, Study):
    """Train the classifier on every encoder of a study: figure 2, tables 2 and 4.

    Guarantees:
        - The encoders' weights are read and never changed.
        - With ``resume=true`` a trained classifier is not trained again.
    """

    growing = Study.growing | {"seeds", "data", "baseline"}

    study: Path
    data: ImagesDataModule | None = None
    seeds: Sequence[int] | None = None
    baseline: str | None = "Non-private"
    min_free_mb: float = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.study = Path(self.study)

    def run(self, parts: Parts) -> dict[str, float]:
        """Train what is not trained yet; return test accuracy by run."""
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
        say(f"written: {page}")
        return {name: run.metrics["accuracy"] for name, run in runs.items()}

    def _second_data(self, parts: Parts) -> tuple[ImagesDataModule, Labels]:
        if self.data is not None and (self.data.folder is None or Path(self.data.folder).is_dir()):
            return self.data, self.data.labels
        return parts.make_datamodule(), "coarse"

    def _encoders(self) -> list[Encoder]:
        path = self.study / "report" / SETTINGS
        if not path.is_file():
            raise DataError(f"task.study={self.study} holds no {path.name}: it is not a run folder of task=variants.")
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
        train, test = ((fitted(images, shape), labels) for images, labels in (splits["train"], splits["test"]))
        found = train_second_task(module.net, train=train, test=test, classes=classes, seed=encoder.seed, how=self)
        run = VariantRun(
            **picked(encoder, "variant", "seed"), **picked(found, "losses", "examples", "seconds"),
            steps=list(range(1, len(found.losses) + 1)), metrics=found.scores.to_dict(),
            confusion=found.confusion.tolist(), batch_size=self.batch_size,
        )  # fmt: skip
        return asdict(run)

    def _tell(self, parts: Parts, runs: list[VariantRun], class_names: tuple[str, ...], *, learned: str) -> Path:
        base = self.baseline if any(run.variant == self.baseline for run in runs) else None
        layers = ", ".join(map(str, self.hidden))
        said = (
            f"Frozen encoders under a classifier with layers of {layers} and {len(class_names)}, which learned "
            f"{learned} without privacy. The paper's classifier learned the twenty coarse labels of CIFAR-100, so its "
            "numbers are shown for their form, not as a target."
        )
        table, theirs = MetricsTable.of(runs, baseline=base), (PAPER_002["table_2"], PAPER_002["table_4"])
        return VariantReport(
            runs=runs, baseline=base, class_names=class_names, title="A second task",
            lead=made_by(parts.command, said),
            more=[beside_the_paper(table, "Table 2", theirs[0], "Table 4, absolute.", theirs[1])],
        ).write(parts.run_dir / "report")  # fmt: skip


def fitted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fit images to a net for ``shape`` (channels, height, width): repeat a grey channel, add a black border."""
    channels, height, width = images.shape[1:]
    if channels not in (1, shape[0]) or height > shape[1] or width > shape[2]:
        raise DataError(f"Images of shape {tuple(images.shape[1:])} do not fit a net for images of shape {shape}.")
    above, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    border = (left, shape[2] - width - left, above, shape[1] - height - above)
    return F.pad(images.expand(-1, shape[0], -1, -1), border)
