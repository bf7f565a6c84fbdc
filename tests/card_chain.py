"""A chain of cards written by the program: generator, synthetic queries, retriever, embeddings, index. Not a test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from tiny_generator import generator
from tiny_tasks import retriever, trainer, write_log

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.privacy.modes import DPSGD, SyntheticData
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.index_folder import encode_folder, index_folder


@dataclass(frozen=True)
class Chain:
    """The folders of the chain, each written by the program."""

    root: Path

    @property
    def generator(self) -> Path:
        return self.root / "generator"

    @property
    def synthetic(self) -> Path:
        return self.root / "made" / "synthetic"

    @property
    def encoder(self) -> Path:
        return self.root / "encoder"

    @property
    def embeddings(self) -> Path:
        return self.root / "corpus" / "embeddings"

    @property
    def index(self) -> Path:
        return self.root / "corpus" / "index"


def run(folder: Path, module: Any, data: Any, *, steps: int = 3, card: dict[str, Any] | None = None) -> None:
    """Run a training as ``task=fit`` does."""
    folder.mkdir(parents=True)
    callbacks: list[Callback] = [
        PrivacyAccountant(run_dir=folder, eps_log_points=1), PrivacyCard(run_dir=folder, **(card or {})),
    ]  # fmt: skip
    train(module, data, Training(run_dir=folder, make_trainer=partial(trainer, max_steps=steps), callbacks=callbacks))


def make_chain(root: Path, *, card: dict[str, Any] | None = None) -> Chain:
    """Train, generate, train on the result, embed and index, each with models of a few thousand weights."""
    chain = Chain(root)
    log = PairsDataModule(folder=write_log(root / "log"), sampling="poisson", expected_batch_size=8)
    mode = DPSGD(eps=50.0, noise_multiplier=4.0, max_grad_norm=0.5, secret_file=root / "secret")
    run(chain.generator, generator(privacy=mode, seed=0), log, card=card)
    synthesize(chain.generator / "model", log.public_passages(), chain.synthetic, passages_are_public=True)
    made = SyntheticDataModule(folder=chain.synthetic, expected_batch_size=8)
    run(chain.encoder, retriever(privacy=SyntheticData()), made)
    encode_folder(chain.encoder / "model", log.public_passages(), chain.embeddings)
    index_folder(chain.embeddings, chain.index)
    return chain
