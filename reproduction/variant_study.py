"""`task=variants`: train the same encoder in several ways, some of them private, and report the results.

The experiments of paper 002, section 5.1. For public data only: curves and scores are computed from the train split, so
no card of a run states an epsilon. The study's own table states what each ledger charged for the updates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.datamodules.images import ImageRow
from lit_dpret.encoders.vision import AugmentedViews, KnnResult, evaluate_knn
from lit_dpret.errors import ConfigurationError, DataError, StorageError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.losses import PairwiseLoss, SoftmaxPairLoss
from lit_dpret.modules import EmbeddingTrainer, OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.settings import picked, require_choice, require_number, require_whole
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.parts import Parts, say, some_of
from lit_dpret.tasks.pipeline_stages import stage_callbacks
from reproduction.report.variant_runs import UNTRAINED, VariantRun
from reproduction.report.variants import Finished, write_study
from reproduction.study import Study

START = "untrained"
Part = Literal["paper", "batch_sizes", "equal_negatives", "losses"]
# The settings that all private variants share; each variant's own are in its `privacy`.
_SHARED = ("eps", "delta", "unit", "neighbours", "accountant", "noise", "secure_rng", "secret_file", "noise_seed")
# Settings of a command that do not change its results.
_HOW_NOT_WHAT = ("task.report_only=", "task.note=")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A privacy mode with the settings that were chosen for it."""

    label: str  # as shown in figures and tables. Variants of ``batch_sizes`` share one.
    # Makes the mode, given the settings that all private variants share (``eps``, ``delta`` and so on).
    privacy: Callable[..., PrivacyMode]
    lr: float  # of the optimizer
    loss: PairwiseLoss | None = None  # a loss of the table of similarities; null for the model's own
    batch_size: int | None = None  # average number of images in a logical batch; null for the task's
    part: Part = "paper"  # the figures and tables it belongs to
    seeds: int | None = None  # run only this many of the task's seeds, the first ones; null for all

    def __post_init__(self) -> None:
        require_choice("task.variants.part", self.part, get_args(Part))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigurationError(f"task.variants: lr={self.lr} of {self.label!r} must be positive.")
        for name in ("batch_size", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"task.variants: {name}={value} of {self.label!r} must be at least 1.")

    def make_privacy(self, shared: Mapping[str, Any]) -> PrivacyMode:
        """Make the mode; a mode without privacy ignores ``shared``."""
        factory: Any = self.privacy
        return self.privacy() if getattr(factory, "func", factory) is NoPrivacy else self.privacy(**shared)


@dataclass(kw_only=True, eq=False)
class VariantStudy(Study):
    """Train every variant under every seed; write k-NN scores, figures and tables.

    Guarantees:
        - With ``resume=true`` a finished run is not repeated, and an interrupted one continues from its newest
          checkpoint.
        - Runs of one seed start from the same weights, which are kept and evaluated as the row of untrained encoders.
          Noise and batches come from the run's own secret.
        - The report is written again after every seed, so that a stopped study leaves one.
    """

    growing = Study.growing | {"note", "report_only", "seeds"}

    variants: Mapping[str, Variant]
    seeds: Sequence[int]
    epochs: float
    batch_size: int
    only: Sequence[str] | None = None
    baseline: str = "non_private"
    k: int = 3
    held_out_images: int = 2000
    held_out_group: int = 400
    # Of every variant's Adam. A noised sum of 1e-5 over a batch of 10,000 has coordinates of 2e-9. Adam's own 1e-8
    # would shrink them to a sixth of the step that the learning rate implies, for that variant alone.
    adam_eps: float = 1e-15
    report_only: bool = False
    note: str = ""
    tuning_note: str | None = None
    tuning_data: str = "unknown"
    min_free_mb: float = 200

    def __post_init__(self) -> None:
        known, chosen = self.variants, some_of("task.only", self.only, list(self.variants))
        if START in known:
            raise ConfigurationError(
                f"task.variants.{START}: that is the name of the encoders before any training. Rename the variant."
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigurationError(f"task.seeds={list(self.seeds)} must be one or more different numbers.")
        require_number("task", self, "epochs", "adam_eps")
        require_whole("task", self, 1, "batch_size")
        self.variants = {name: known[name] for name in chosen}
        self._base = known[self.baseline].label if self.baseline in chosen else None

    def run(self, parts: Parts) -> dict[str, float]:
        """Run what is not done yet; return the mean k-NN accuracy by variant."""
        mode = parts.make_privacy()
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"task=variants compares training with and without privacy, but privacy={mode.name} names no "
                "budget for its private variants. Choose privacy=logit_dp."
            )
        self._shared = {name: getattr(mode, name) for name in _SHARED}
        self.begin(parts, shared=json.dumps(self._shared, default=str, sort_keys=True))
        self._data: ImagesDataModule = parts.make_datamodule()
        self._data.setup("fit")
        test = self._data.labelled("test")[0]
        self._held_out = HeldOutLoss(test[: self.held_out_images], group=self.held_out_group)
        unused: EmbeddingTrainer = parts.make_module(privacy=NoPrivacy(), optimizer=OptimizerSpec())
        self._net = type(unused.net).__name__
        planned = self._planned()
        if self.report_only:
            planned = [(seed, name) for seed, name in planned if self._stages.is_done(_stage(name, seed))]
            if not planned:
                raise ConfigurationError(f"task.report_only=true: no run in {parts.run_dir} is finished.")
        finished: list[Finished] = []
        starts: list[VariantRun] = []
        page = Path()

        def work(one: tuple[int, str]) -> str:
            nonlocal page
            seed, name = one
            if seed not in {run.seed for run in starts}:
                starts.extend(self._start(seed))
            finished.append(self._finished(name, seed))
            if [other for other, _ in planned[len(finished) :]][:1] != [seed]:  # the last one of its seed
                page = self._tell(finished, starts)
            return ""

        self.in_turn(planned, lambda one: _stage(one[1], one[0]), work, label="variants and seeds")
        say(f"written: {page}")
        reached: dict[str, list[float]] = {}
        for each in finished:
            reached.setdefault(each.name, []).append(each.run.metrics["accuracy"])
        return {name: float(np.mean(values)) for name, values in reached.items()}

    def kept_models(self) -> list[str]:
        return [
            name for name, one in self.variants.items() if getattr(one.privacy, "func", one.privacy) is not NoPrivacy
        ]

    def _planned(self) -> list[tuple[int, str]]:
        """Return seed and variant of each run: those of the paper's own comparison first, seed by seed."""
        paper = [name for name, variant in self.variants.items() if variant.part == "paper"]
        more = [name for name in self.variants if name not in paper]
        wanted = [(seed, name) for group in (paper, more) for seed in self.seeds for name in group]
        return [(seed, name) for seed, name in wanted if seed in self.seeds[: self.variants[name].seeds]]

    # -- one run -----------------------------------------------------------------------------

    def _finished(self, name: str, seed: int) -> Finished:
        result = self._stages.run(_stage(name, seed), lambda folder, resume: self._train(name, seed, folder, resume))
        part = self.variants[name].part
        return Finished(name=name, part=part, run=VariantRun(**result["run"]), facts=result["facts"])

    def _start(self, seed: int) -> list[VariantRun]:
        """Return the encoder from which the variants of ``seed`` start; empty if `report_only` finds it missing."""
        if self.report_only and not self._stages.is_done(_stage(START, seed)):
            return []
        return [VariantRun(**self._stages.run(_stage(START, seed), lambda folder, _: self._untrained(seed, folder)))]

    def _untrained(self, seed: int, folder: Path) -> dict[str, Any]:
        L.seed_everything(seed, verbose=False)
        module: EmbeddingTrainer = self._parts.make_module(privacy=NoPrivacy(), optimizer=OptimizerSpec())
        module.save_model(folder / "model")
        loss, knn = self._held_out(module), self._judge(module)
        # A single point instead of a curve: nothing was trained, so it is the held-out loss.
        run = VariantRun(
            variant=UNTRAINED, seed=seed, steps=[0], losses=[loss], confusion=knn.confusion.tolist(),
            metrics={**knn_metrics(knn), "held_out_loss": loss},
        )  # fmt: skip
        return asdict(run)

    def _judge(self, module: EmbeddingTrainer) -> KnnResult:
        train, test = (self._data.labelled(split) for split in ("train", "test"))
        return evaluate_knn(module.net, train=train, test=test, classes=len(self._data.class_names()), k=self.k)

    def _train(self, name: str, seed: int, folder: Path, resume: bool) -> dict[str, Any]:
        variant = self.variants[name]
        batch = variant.batch_size or self.batch_size
        L.seed_everything(seed, verbose=False)
        own_loss = {} if variant.loss is None else {"loss": variant.loss}
        module: EmbeddingTrainer = self._parts.make_module(
            privacy=variant.make_privacy(self._shared),
            optimizer=OptimizerSpec(name="adam", lr=variant.lr, eps=self.adam_eps),
            log_private_loss=True,
            **own_loss,
        )
        data = self._data
        data.expected_batch_size = batch
        data.physical_batch_size = data.n_units  # without sub-batches, a batch of any size stays in one piece
        steps = max(1, round(self.epochs * data.n_units / batch))
        callbacks = stage_callbacks(
            folder, resume=resume, label=f"{variant.label}, seed {seed}", accountant={"eps_log_points": 1},
            tuning_note=self.tuning_note, tuning_data=self.tuning_data,
        )  # fmt: skip
        curve_file = folder / "curve.jsonl"
        make_trainer = partial(self._parts.make_trainer, max_steps=steps, max_epochs=-1)
        how = Training(
            run_dir=folder, make_trainer=make_trainer, loggers=self._parts.make_loggers(run_dir=folder), resume=resume,
            callbacks=[*callbacks, CurveRecorder(curve_file, held_out=self._held_out)],
        )  # fmt: skip
        train(module, data, how)
        curve, knn = read_curve(curve_file), self._judge(module)
        run = VariantRun(
            variant=variant.label, seed=seed, **curve, examples=[batch * step for step in curve["steps"]],
            metrics={**knn_metrics(knn), "held_out_loss": curve["held_out"][-1]}, confusion=knn.confusion.tolist(),
            batch_size=batch,
        )  # fmt: skip
        return {"run": asdict(run), "facts": self._facts(module, callbacks[0], folder, run)}

    def _facts(self, module: Any, accountant: PrivacyAccountant, folder: Path, run: VariantRun) -> dict[str, Any]:
        """Return the facts of a run from its plan and its ledger."""
        mode, plan = module.privacy, accountant.plan
        facts: dict[str, Any] = {
            "mode": mode.name, "loss": repr(module.loss), "lr": module.optimizer_spec.lr,
            "adam_eps": module.optimizer_spec.eps, "first_step": run.moved[0],
            "mean_step": float(np.mean(run.moved)), "sub_batches": mode.sub_batches, "steps": len(run.steps),
            "seconds_per_step": run.seconds[-1] / len(run.seconds),
            "trainable_parameters": sum(p.numel() for p in module.pair_parameters()),
            "card": read_card(folder)["claim"]["guarantee"],
        }  # fmt: skip
        if plan is None or plan.coupling is None:
            return facts
        norms = {"norms": getattr(mode, "norms", None), "exact_norms": getattr(mode, "has_exact_norms", None)}
        return facts | picked(plan.budget, "eps", "delta", "unit", "neighbours") | norms | {
            "law": plan.law.to_dict(), "noise_multiplier": plan.noise_multiplier, "l2_sensitivity": plan.sensitivity,
            "bounded": plan.coupling.bounded, "bound": plan.max_grad_norm, "n_max": plan.coupling.n_max,
            "eps_of_the_updates": accountant.epsilon(),
        }  # fmt: skip

    def _tell(self, finished: Sequence[Finished], starts: Sequence[VariantRun]) -> Path:
        return write_study(
            finished, self._parts.run_dir / "report", baseline=self._base, class_names=self._data.class_names(),
            note=self.note, command=self._parts.command_again(*_HOW_NOT_WHAT), net=self._net,
            untrained=starts,
        )  # fmt: skip


def knn_metrics(found: KnnResult) -> dict[str, float]:
    """Return the scores with ties to the nearest neighbour, those with ties to the lowest label, and the tie count."""
    lowest = {f"lowest_{name}": value for name, value in found.lowest.to_dict().items()}
    return {**found.scores.to_dict(), **lowest, "tied_votes": found.tied}


def _stage(name: str, seed: int) -> str:
    return f"{name}_seed{seed}"


# -- the training curve, one line per step, so that an interrupted run keeps its part


class HeldOutLoss:
    """The softmax loss at temperature 1 of fixed groups of images, which is comparable between variants.

    A training loss is not comparable: it depends on how many negatives a row has, and on which loss is trained.

    Args:
        images: uint8, shape (n, channels, height, width); not among the training images.
        group: How many images are each other's negatives; a rest too small for a group is left out.
    """

    def __init__(self, images: Tensor, *, group: int) -> None:
        views = AugmentedViews(seed=0)
        rows = [ImageRow(f"held out {i}", image, 0, 0) for i, image in enumerate(images)]
        groups = range(0, len(rows) - group + 1, group)
        self._batches = [views(rows[start : start + group]) for start in groups]
        self._loss = SoftmaxPairLoss(temperature=1.0)
        if not self._batches:
            raise DataError(f"{len(rows)} held-out images fill no group of {group}. Lower task.held_out_group.")

    @torch.no_grad()
    def __call__(self, module: Any) -> float:
        """Return the mean over all images, in nats."""
        with evaluation_mode(module):
            losses = [
                self._loss.row_losses(
                    _unit(module, batch["query"], "query") @ _unit(module, batch["passage"], "passage").T
                )
                for batch in self._batches
            ]
        return float(torch.cat(losses).mean())


def _unit(module: Any, images: Tensor, side: str) -> Tensor:
    found: Tensor = torch.nn.functional.normalize(module.represent(images.to(module.device), side), dim=1).float()
    return found


class CurveRecorder(Callback):
    """Append a line to ``file`` after each step.

    A curve is computed from the training rows, and no accountant counts it. So it is for public data only, and the
    module has to declare it (``log_private_loss``).
    """

    def __init__(self, file: Path, *, held_out: Callable[[Any], float]) -> None:
        self._file, self._held_out = file, held_out
        self._mark = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = _weights(pl_module)
        self._mark = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not batch.last:
            return
        seconds, after = time.monotonic() - self._mark, _weights(pl_module)
        moved = float((after - self._before).square().mean().sqrt())
        self._before = after
        line = {
            "step": batch.step + 1,
            "seconds": seconds,  # since the previous step, without the time that observing took
            "losses": float(trainer.callback_metrics["train/loss"]),  # in terms of the variant's own loss
            "held_out": self._held_out(pl_module),
            "moved": moved / trainer.optimizers[0].param_groups[0]["lr"],
        }
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StorageError(f"{self._file} could not be written: {error.strerror}.") from error
        self._mark = time.monotonic()


def _weights(module: L.LightningModule) -> Tensor:
    return torch.cat([p.detach().double().flatten().cpu() for p in module.parameters() if p.requires_grad])


def read_curve(file: Path) -> dict[str, list[Any]]:
    """Read the curve that a `CurveRecorder` wrote, each step once, in the form that `VariantRun` takes."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = dict(sorted({line["step"]: line for line in lines}.items()))
    columns = {name: [line[name] for line in found.values()] for name in ("losses", "held_out", "seconds", "moved")}
    return {"steps": list(found), **columns, "seconds": list(accumulate(columns["seconds"]))}
