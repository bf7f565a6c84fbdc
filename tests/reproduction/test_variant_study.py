"""`task=variants` and `task=second_task` on a dozen images: every figure and table, and going on after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny_images as tiny
import torch

from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.encoders.vision import EmbeddingNet
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.losses import SigmoidPairLoss
from lit_dpret.modules import EmbeddingTrainer, OptimizerSpec
from lit_dpret.privacy.modes import BatchClip, LogitDP, NoPrivacy
from lit_dpret.tasks.parts import Parts
from reproduction import SecondTask, Variant, VariantStudy
from reproduction.report.variant_runs import read_runs
from reproduction.second_task import fitted
from reproduction.variant_study import HeldOutLoss, read_curve

STEPS = 3
# Noise is declared, not calibrated: that takes longer than the runs themselves.
NAIVE = partial(BatchClip, l2_sensitivity=1e-2, noise_multiplier=2.0)
# So small that the coordinates of a noised mean, some 5e-9, are below the eps that Adam has by itself.
LOGIT = partial(LogitDP, l2_sensitivity=1e-8, sub_batches=2, norms="jacobian", noise_multiplier=2.0)
VARIANTS = {
    "logit_dp": Variant(label="Logit-DP", privacy=LOGIT, lr=0.01),
    "non_private": Variant(label="Non-private", privacy=NoPrivacy, lr=0.001),
    "naive_small": Variant(label="Naive-DP", privacy=NAIVE, lr=0.01, batch_size=2, part="batch_sizes", seeds=1),
    "sigmoid": Variant(label="Sigmoid", privacy=LOGIT, lr=0.01, loss=SigmoidPairLoss(temperature=0.2), part="losses",
                       seeds=1),
    "equal": Variant(label="Non-private, parts", privacy=partial(NoPrivacy, sub_batches=2), lr=0.001,
                     part="equal_negatives", seeds=1),
}  # fmt: skip


def module(**settings: Any) -> EmbeddingTrainer:
    return EmbeddingTrainer(net=EmbeddingNet(dim=4, channels=(4, 4)), **settings)


def trainer(**settings: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return L.Trainer(accelerator="cpu", devices=1, **quiet, **settings)  # type: ignore[arg-type]


def parts(tmp_path: Path, privacy: Callable[..., Any] | None = None, **changes: Any) -> Parts:
    folder = tmp_path / "images"
    private = partial(LogitDP, eps=50.0, delta=1e-3, unit="image", max_logit_grad_norm=1.0,
                      secret_file=tmp_path / "secret")  # fmt: skip
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "make_privacy": privacy or private,
        "make_datamodule": partial(ImagesDataModule, source="cifar10",
                                   folder=folder if folder.exists() else tiny.parquet(folder), sampling="shuffle"),
        "make_module": module,
        "make_trainer": trainer,
        "command": "python train.py experiment=tiny",
    }  # fmt: skip
    return Parts(**settings | changes)


def study(**changes: Any) -> VariantStudy:
    settings: dict[str, Any] = {
        "variants": VARIANTS, "seeds": [0, 1], "epochs": 1, "batch_size": 4, "held_out_images": 6, "held_out_group": 3,
        "min_free_mb": 1,
    }  # fmt: skip
    return VariantStudy(**settings | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of all variants; tests read it."""
    folder = tmp_path_factory.mktemp("study")
    assert set(study(note="Twelve images.").run(parts(folder))) == set(VARIANTS)
    return folder


@pytest.mark.slow
def test_a_study_ends_with_the_papers_figures_tables_and_what_was_promised(finished: Path) -> None:
    report = finished / "run" / "report"
    pictures = {"relative_loss", "smoothed_loss", "batch_sizes", "confusion", "runtime", "held_out_loss", "losses",
                "equal_negatives"}  # fmt: skip
    assert pictures == {path.stem for path in report.glob("*.png")}
    runs = read_runs(report / "runs.jsonl")
    assert sorted((run.variant, run.seed) for run in runs) == [
        ("Logit-DP", 0), ("Logit-DP", 1), ("Non-private", 0), ("Non-private", 1),
    ]  # fmt: skip
    assert all(len(run.losses) == STEPS and run.examples == [4, 8, 12] for run in runs)
    assert sum(map(sum, runs[0].confusion or [])) == tiny.TEST
    starts = read_runs(report / "untrained.jsonl")
    assert [(run.variant, run.seed) for run in starts] == [("Untrained", 0), ("Untrained", 1)]
    for start in starts:  # scores of the very weights that the variants started from
        kept = module(privacy=NoPrivacy(), optimizer=OptimizerSpec(),
                      encoder=finished / "run" / f"untrained_seed{start.seed}" / "model")  # fmt: skip
        torch.manual_seed(start.seed)
        fresh = module(privacy=NoPrivacy(), optimizer=OptimizerSpec())
        assert all(map(torch.equal, kept.net.state_dict().values(), fresh.net.state_dict().values()))
        assert start.metrics["held_out_loss"] == start.losses[0] and len(start.metrics) == len(runs[0].metrics)
    for name in ("metrics", "losses", "equal_negatives"):
        assert "\nUntrained," in (report / f"{name}.csv").read_text(encoding="utf-8"), name
    page = (report / "README.md").read_text(encoding="utf-8")
    assert "Twelve images." in page and "python train.py experiment=tiny" in page
    settings = {run["name"]: run for run in json.loads((report / "settings.json").read_text(encoding="utf-8"))}
    facts = settings["logit_dp"]
    assert facts["eps_of_the_updates"] > 0 and facts["l2_sensitivity"] == 1e-8 and facts["norms"] == "jacobian"
    assert facts["exact_norms"] is True and settings["non_private"].get("exact_norms") is None
    metrics = runs[0].metrics
    assert 0 <= metrics["tied_votes"] <= 1 and set(metrics) > {"lowest_accuracy", "lowest_best_recall"}
    assert settings["sigmoid"]["loss"].startswith("SigmoidPairLoss")


@pytest.mark.slow
def test_every_variant_takes_the_step_that_its_learning_rate_says(finished: Path, tmp_path: Path) -> None:
    runs = read_runs(finished / "run" / "report" / "runs.jsonl")
    first = {(run.variant, run.seed): run.moved[0] for run in runs}
    assert all(0.99 < first["Logit-DP", seed] <= 1.001 for seed in (0, 1))
    assert all(0.5 < first["Non-private", seed] <= 1.001 for seed in (0, 1)), "weights behind a dead unit stay"
    study(only=["logit_dp"], seeds=[0], adam_eps=1e-8).run(parts(tmp_path))
    (shrunk,) = read_runs(tmp_path / "run" / "report" / "runs.jsonl")
    assert shrunk.moved[0] < 0.5
    settings = json.loads((finished / "run" / "report" / "settings.json").read_text(encoding="utf-8"))
    assert {run["adam_eps"] for run in settings} == {1e-15}
    assert all(run["first_step"] > 0.5 and run["mean_step"] > 0 for run in settings)


@pytest.mark.costly
def test_no_card_of_a_study_states_an_epsilon_since_its_losses_are_shown(finished: Path) -> None:
    for name, guarantee in (("logit_dp", "not_proved"), ("non_private", "none")):
        claim = read_card(finished / "run" / f"{name}_seed0")["claim"]
        assert claim["guarantee"] == guarantee and claim["epsilon"] is None


@pytest.mark.slow
def test_runs_of_one_seed_start_from_the_same_weights_and_others_from_others(tmp_path: Path) -> None:
    starts: list[tuple[str, torch.Tensor]] = []

    def noting(**settings: Any) -> EmbeddingTrainer:
        made = module(**settings)
        starts.append((made.privacy.name, made.net.state_dict()["embedding.weight"].clone()))
        return made

    study(only=["logit_dp", "non_private"]).run(parts(tmp_path, make_module=noting))
    del starts[0]  # made to see which net it is
    assert [name for name, _ in starts] == ["none", "logit_dp", "none"] * 2, "the first is judged untrained"
    untrained, first, second, other, third, _ = (weight for _, weight in starts)
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert torch.equal(untrained, first) and torch.equal(other, third)


class Stop(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.privacy.name == "none" and batch.last and batch.step == 1:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def stopping(callbacks: list[Any], **settings: Any) -> L.Trainer:
        return trainer(callbacks=[*callbacks, Stop()], **settings)

    chosen = study(only=["logit_dp", "non_private"], seeds=[0])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        chosen.run(parts(tmp_path, make_trainer=stopping))
    made = (tmp_path / "run" / "logit_dp_seed0" / "stage.json").stat().st_mtime_ns
    partial_report = study(only=["logit_dp", "non_private"], seeds=[0], report_only=True)
    assert set(partial_report.run(parts(tmp_path, resume=True))) == {"logit_dp"}
    with pytest.raises(ResumeError):
        study(only=["logit_dp", "non_private"], seeds=[0], epochs=2).run(parts(tmp_path, resume=True))
    study(only=["logit_dp", "non_private"], seeds=[0, 1]).run(parts(tmp_path, resume=True))  # and it grows by a seed
    assert {run.seed for run in read_runs(tmp_path / "run" / "report" / "runs.jsonl")} == {0, 1}
    assert (tmp_path / "run" / "logit_dp_seed0" / "stage.json").stat().st_mtime_ns == made
    assert read_curve(tmp_path / "run" / "non_private_seed0" / "curve.jsonl")["steps"] == [1, 2, 3]


@pytest.mark.slow
def test_the_second_task_trains_a_classifier_on_each_frozen_encoder(finished: Path, tmp_path: Path) -> None:
    weights = finished / "run" / "logit_dp_seed0" / "model" / "model.safetensors"
    before = weights.read_bytes()
    missing = ImagesDataModule(source="fashion_mnist", folder=tmp_path / "nowhere")
    second = SecondTask(study=finished / "run", data=missing, epochs=2, batch_size=4, min_free_mb=1)
    told = second.run(parts(tmp_path))
    assert set(told) == {"logit_dp_seed0", "non_private_seed0", "untrained_seed0"}
    page = (tmp_path / "run" / "report" / "README.md").read_text(encoding="utf-8")
    assert "the coarse labels of cifar10" in page
    assert weights.read_bytes() == before
    assert second.run(parts(tmp_path, resume=True)) == told


@pytest.mark.costly
def test_the_second_task_takes_fashion_mnist_where_it_is(finished: Path, tmp_path: Path) -> None:
    there = ImagesDataModule(source="fashion_mnist", folder=tiny.idx(tmp_path / "fashion"))
    SecondTask(study=finished / "run", data=there, epochs=1, batch_size=4, min_free_mb=1).run(parts(tmp_path))
    written = tmp_path / "run" / "report" / "README.md"
    assert "the fine labels of fashion_mnist" in written.read_text(encoding="utf-8")


def test_grey_images_are_fitted_to_a_net_for_colour_and_larger_ones_refused() -> None:
    grey = torch.full((2, 1, 28, 28), 7, dtype=torch.uint8)
    found = fitted(grey, (3, 32, 32))
    assert found.shape == (2, 3, 32, 32) and found.dtype == torch.uint8
    assert int(found.sum()) == 3 * int(grey.sum()) and int(found[:, :, :2].sum()) == 0
    with pytest.raises(DataError, match="do not fit"):
        fitted(torch.zeros(1, 3, 40, 40), (3, 32, 32))


def test_the_held_out_loss_is_the_same_function_for_all_variants(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = module(privacy=NoPrivacy(), optimizer=OptimizerSpec())
    torch.manual_seed(0)
    other = module(privacy=NoPrivacy(), optimizer=OptimizerSpec(), loss=SigmoidPairLoss(temperature=0.2))
    held_out = HeldOutLoss(images, group=3)
    assert held_out(plain) == held_out(other) == HeldOutLoss(images, group=3)(plain)
    with pytest.raises(DataError, match="fill no group of 7"):
        HeldOutLoss(images, group=7)


def test_a_study_without_a_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="privacy=none names no budget"):
        study().run(parts(tmp_path, privacy=NoPrivacy))


@pytest.mark.slow
def test_variants_beside_the_papers_can_be_run_alone(tmp_path: Path) -> None:
    """As where several processes share the work, each with some of the variants."""
    study(only=["sigmoid"], seeds=[0]).run(parts(tmp_path))
    assert "Sigmoid" in (tmp_path / "run" / "report" / "losses.csv").read_text()
