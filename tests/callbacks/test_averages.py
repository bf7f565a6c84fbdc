"""An average of the weights is what a private run evaluates, saves and resumes, and it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_runs import Case
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from rank_runs import Server, told
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from tiny_tasks import retriever, trainer, write_log
from torch import Tensor, nn

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, RetrievalEvaluation, averages
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.cards.text import statement
from lit_dpret.cli import explain
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.ledger import gate as gate_module
from lit_dpret.privacy.ledger import private_run as run_module

DECAY = 0.6


def ema() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=DECAY)


def uniform() -> WeightAveraging:
    return WeightAveraging(use_buffers=False)


def stochastic() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=15)


class Watch(Callback):
    """Keeps the weights after every step, or at the start of every epoch."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.epochs: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.epochs.append(flat(module))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if batch.last:
            self.steps.append(flat(module))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def of_file(path: Path) -> Tensor:
    found = torch.load(path, weights_only=True)
    return torch.cat([value.flatten() for value in found.get("state_dict", found).values()])


def expected(kind: Callable[[], Any], watch: Watch) -> Tensor:
    if kind is stochastic:
        return torch.stack(watch.epochs).mean(0)
    if kind is uniform:
        return torch.stack(watch.steps).mean(0)
    mean = watch.steps[0]
    for step in watch.steps[1:]:
        mean = DECAY * mean + (1 - DECAY) * step
    return mean


KINDS = [ema, uniform, stochastic]
LENGTH: dict[str, Any] = {"steps": 20}  # two epochs; averages of epochs need some


def run(folder: Path, *extra: Callback, resume: bool = False, **settings: Any) -> Regression:
    torch.manual_seed(0)
    module = Regression(privacy=dp(folder.parent, noise_multiplier=4.0))
    accountant = PrivacyAccountant(run_dir=folder, resume=resume, eps_log_points=1)
    fixed = SimpleNamespace(token_hex=lambda size: "ab" * size)
    with pytest.MonkeyPatch.context() as patch:  # the same noise in every folder
        patch.setattr(run_module, "random_secrets", fixed)
        patch.setattr(gate_module, "random_secrets", fixed)
        fit(folder, module, Numbers(sampling="poisson"), resume=resume, accountant=accountant,
            extra=[PrivacyCard(run_dir=folder), *extra], **settings)  # fmt: skip
    return module


@dataclass
class Averaged:
    kind: Callable[[], Any]
    folder: Path
    watch: Watch
    module: Regression


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def averaged(request: pytest.FixtureRequest, runs: Path) -> Averaged:
    """A whole run under each kind of average."""
    folder, watch = runs / request.param.__name__, Watch()
    return Averaged(request.param, folder, watch, run(folder, watch, request.param(), **LENGTH))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all runs have one secret."""
    return tmp_path_factory.mktemp("averages")


@pytest.fixture(scope="module")
def plain(runs: Path) -> dict[str, Any]:
    """The card of the same run without an average."""
    run(runs / "plain", **LENGTH)
    return read_card(runs / "plain")


@pytest.mark.costly
def test_the_model_is_the_average_and_the_claim_is_that_of_the_steps(averaged: Averaged, plain: dict[str, Any]) -> None:
    mean, card = expected(averaged.kind, averaged.watch), read_card(averaged.folder)
    assert torch.allclose(flat(averaged.module), mean, atol=1e-6)
    assert torch.allclose(of_file(averaged.folder / "model" / "weights.pt"), mean, atol=1e-6)
    assert not torch.allclose(averaged.watch.steps[-1], mean, atol=1e-3)
    assert card["claim"]["epsilon"] == plain["claim"]["epsilon"]
    assert "post-processing" in card["mechanism"]["averaging"] and "averaging" not in plain["mechanism"]
    assert card["mechanism"]["averaging"] in statement(card) and "verag" not in statement(plain)
    assert verify_card(card, averaged.folder / "privacy_ledger.jsonl") == []
    if averaged.kind is ema:  # a checkpoint holds the average as its model
        assert torch.allclose(of_file(averaged.folder / "checkpoints" / "last.ckpt"), mean, atol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize("averaged", [ema, stochastic], indirect=True, ids=lambda kind: kind.__name__)
def test_a_killed_run_goes_on_to_the_same_average(averaged: Averaged, runs: Path) -> None:
    kind = averaged.kind
    for at in (5, 13) if kind is stochastic else (13,):  # which leaves its first epoch out
        folder = runs / f"{kind.__name__} killed at {at}"
        with pytest.raises(Killed):
            run(folder, kind(), KillAt(at), **LENGTH)
        resumed = run(folder, kind(), resume=True, **LENGTH)
        assert torch.equal(flat(resumed), flat(averaged.module))
        again = run(folder, kind(), resume=True, **LENGTH)  # from its last step: nothing is trained
        assert torch.equal(of_file(folder / "model" / "weights.pt"), flat(averaged.module)), flat(again)


@pytest.mark.costly
def test_what_is_evaluated_is_the_average_and_training_goes_on_from_the_weights(tmp_path: Path) -> None:
    watch, seen = Watch(), []

    class Looks(RetrievalEvaluation):
        def setup(self, *of_a_run: Any, **named: Any) -> None: ...

        def refuse_undeclared(self, *of_a_run: Any) -> None: ...

        def refuse_protected(self, *of_a_run: Any) -> None: ...

        def measure(self, module: Any) -> Any:
            seen.append(flat(module))
            return SimpleNamespace(means={})

    run(tmp_path / "run", watch, ema(), Looks(data="public", every_n_steps=3), steps=6)
    steps = watch.steps
    for mean, done in zip(seen, (3, 6), strict=True):
        watch.steps = steps[:done]
        assert torch.allclose(mean, expected(ema, watch), atol=1e-6)


@pytest.mark.slow
def test_two_processes_keep_the_average_of_one(server: Server, tmp_path: Path) -> None:
    for name, world in (("one", 1), ("two", 2)):
        assert server.run("fit", tmp_path / name, world=world, average=DECAY) == [0] * world
    one, *two = told(tmp_path / "one", 0), told(tmp_path / "two", 0), told(tmp_path / "two", 1)
    for name, values in one["weights"].items():
        assert two[0]["weights"][name] == two[1]["weights"][name]
        assert two[0]["weights"][name] == pytest.approx(values, abs=1e-5)


# -- refused ---------------------------------------------------------------------------------


class Normalised(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net.insert(1, nn.BatchNorm1d(8))


class Positions(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("positions", torch.arange(8))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"StochasticWeightAveraging.*BatchNorm", {"callbacks": [stochastic()], "make_module": Normalised}),
    (r"use_buffers=False", {"callbacks": [ema()], "make_module": Positions}),
    (r"trainer\.precision=bf16-true", {"callbacks": [ema()], "trainer": {"precision": "bf16-true"}}),
    (r"update_starting_at_step", {"callbacks": [EMAWeightAveraging(decay=DECAY, update_starting_at_step=100)]}),
    (r"Keep one", {"callbacks": [ema(), uniform()]}),
    (r"EMAWeightAveraging\.decay=1 ", {"callbacks": [EMAWeightAveraging(decay=1, use_buffers=False)]}),
]


@pytest.mark.parametrize(("words", "change"), REFUSED, ids=[words[:20] for words, _ in REFUSED])
def test_an_average_that_would_read_private_rows_or_lose_weights_is_refused(
    words: str, change: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(LitDpretError, match=words):
        Case(tmp_path, **change).fitted()


@pytest.mark.parametrize("decay", [1, -0.1, True, "abc", float("nan")])
def test_a_decay_under_which_nothing_is_averaged_is_refused_as_it_is_written(decay: Any) -> None:
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        chosen = compose("train", overrides=["callbacks=with_averaging", "run_dir=x"]).callbacks.averaging
    with pytest.raises(InstantiationException) as refused:
        instantiate(chosen, decay=decay)
    assert isinstance(refused.value.__cause__, ConfigurationError)
    assert f"callbacks.averaging.decay={decay!r}" in str(explain(refused.value))


@pytest.mark.parametrize(
    ("knob", "value"),
    [*(("update_every_n_steps", value) for value in ("2", 1.5, True)), ("update_starting_at_step", -1)],
)
def test_a_number_of_steps_that_is_none_is_refused_with_the_setting(knob: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"callbacks\.averaging\.{knob}={value!r}"):
        averages.exponential_average(decay=DECAY, **{knob: value})
    callback = ema()
    setattr(callback, knob, value)
    with pytest.raises(ConfigurationError, match=rf"EMAWeightAveraging\.{knob}={value!r}"):
        Case(tmp_path, callbacks=[callback]).fitted()


def test_a_retriever_that_reads_its_passages_in_setup_can_be_averaged(tmp_path: Path) -> None:
    module = retriever(privacy=dp(tmp_path, noise_multiplier=4.0))
    accountant = PrivacyAccountant(run_dir=tmp_path / "run", eps_log_points=1)
    data = PairsDataModule(folder=write_log(tmp_path / "log"), sampling="poisson", expected_batch_size=8)
    runner = trainer(max_steps=2, callbacks=[accountant, ema()], logger=False, enable_checkpointing=False,
                     default_root_dir=tmp_path)  # fmt: skip
    runner.fit(module, datamodule=data)
    assert module.encode_queries(["how"]).shape[1] == module.encoder.dim


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "xla"])
def test_a_strategy_under_which_no_process_has_the_weights_whole_is_named(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averages, "strategy_name", lambda trainer: strategy)
    with pytest.raises(ConfigurationError, match=rf"EMAWeightAveraging.*trainer\.strategy={strategy}"):
        Case(tmp_path, callbacks=[ema()]).fitted()
