"""The prerequisites of the Python snippets in the pages. Not a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import stand_ins
import tiny_images
import torch
from page_stages import private_log, table_log
from stand_ins import Line, Numbers, Regression
from tiny_generator import PASSAGES, SETTINGS, generator, lively_generator, write_parent_card
from tiny_tasks import retriever, write_log
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lit_dpret import PrivacyCard, make_private
from lit_dpret.privacy.modes import DPSGD, NoPrivacy

# Parts of a snippet that need another machine or much time, and their replacements.
REPLACED: dict[str, str] = {
    'accelerator="gpu"': 'accelerator="cpu"',
    "max_steps=60": "max_steps=2",
    "every=20": "every=1",
    "every_n_train_steps=20": "every_n_train_steps=1",
    "delta=1e-5)": "delta=1e-5, trials=60)",
    "delta=1e-5, per_row_loss": "delta=1e-5, trials=60, per_row_loss",
    "Stage1(in_batch": "Stage1(rounds=1, bm25_n=2, static_n=2, top_k=8, in_batch",
    "Stage2(in_batch": "Stage2(batch_size=4, epochs=1, n=2, top_k=6, centroids=4, in_batch",
    "dim=768": "dim=16",
    "FederatedPrivacy(eps=8.0)": 'FederatedPrivacy(eps=8.0, accountant="rdp")',
    "expected_batch_size=32": 'expected_batch_size=32, sampling="poisson"',
}

# Third-party packages, by the start of the snippet that is skipped without them.
PACKAGES = {
    "import mteb": "mteb",
    "from beir": "beir",
    "import lightning as L\nfrom lightning.pytorch.cli": "jsonargparse",
}


class Classifier(L.LightningModule):
    """A reader's module, with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))


def log(folder: Path) -> dict[str, Any]:
    """Return a log of queries, and the objects that a Lightning user already has."""
    private_log(folder)
    dataset = TensorDataset(torch.randn(80, 3), torch.arange(80) % 2)
    return {
        "model": Classifier(), "fresh": Classifier, "dataset": dataset, "users": torch.arange(80) // 2,
        "public_loader": DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), 4),
    }  # fmt: skip


def table(folder: Path) -> dict[str, Any]:
    table_log(folder)
    return {}


def fit(folder: Path) -> dict[str, Any]:
    """Return the trainer, module and data of a private fit."""
    from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard

    data = Numbers(sampling="poisson")
    data.setup("fit")
    callbacks = [PrivacyAccountant(run_dir=folder / "run"), PrivacyCard(run_dir=folder / "run")]
    trainer = L.Trainer(accelerator="cpu", max_steps=2, max_epochs=-1, logger=False, callbacks=callbacks,
                        default_root_dir=folder / "run")  # fmt: skip
    return {"trainer": trainer, "datamodule": data, "module": Regression(privacy=DPSGD(eps=3, accountant="rdp"))}


def saved_encoder(folder: Path) -> dict[str, Any]:
    """Write a retriever as a run leaves it, next to a collection."""
    write_log(folder / "collection")
    retriever(privacy=NoPrivacy()).save_model(folder / "runs" / "encoder" / "model")
    return {}


def to_be_tested(folder: Path) -> dict[str, Any]:
    """Return a module and rows, and a net with a tensor for each row."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    return {
        "make_private": make_private, "model": Classifier(), "dataset": dataset,
        "row_losses": lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        "my_pairs": [Line(f"q{i}", str(i), f"p{i}", str(i % 3), frozenset()) for i in range(8)],
        "MyModule": Regression, "DPSGD": DPSGD,
        "net": torch.nn.Linear(3, 1), "x": torch.randn(4, 3), "y": torch.ones(4),
    }  # fmt: skip


def released(folder: Path) -> dict[str, Any]:
    """Write a synthetic set next to the generator that wrote it."""
    from lit_dpret.synthesis.writer import synthesize

    generator = lively_generator().save_model(folder / "runs" / "generator" / "model")
    write_parent_card(generator)
    synthesize(generator, PASSAGES, folder / "runs" / "synthetic", **SETTINGS)
    return {}


def with_a_prompt(folder: Path) -> dict[str, Any]:
    """Write a generator with a tuned prompt."""
    generator(prompt_tuning={"num_virtual_tokens": 3}).save_model(folder / "runs" / "generator" / "model")
    return {}


def split_log(folder: Path) -> dict[str, Any]:
    write_log(folder / "log_split")
    return {}


def images(folder: Path) -> dict[str, Any]:
    tiny_images.cifar10_pickles(folder / "cifar10")
    return {}


def by_messages(folder: Path) -> dict[str, Any]:
    """Return planted silos under the names of the page, and the parts of its apps."""
    pytest.importorskip("flwr", reason="needs the extra federated (flwr)")
    from tiny_silos import SIZE, SMALL, declare_public, maker

    from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
    from lit_dpret.federated.data import planted_silos
    from lit_dpret.federated.documents import Patience
    from lit_dpret.federated.flower import client_app, server_app
    from lit_dpret.federated.silo import SiloClient

    size = replace(SIZE, entities=16)  # enough for a batch of the page's settings
    write_silos(folder / "silos", planted_silos(size), facts={})
    declare_public(folder)
    silos = dict(zip(("cdc", "gard", "nhlbi"), silo_folders(folder / "silos").values(), strict=True))
    client = partial(SiloClient, secret_file=folder / "secret")
    start = client(silos["cdc"], folder / "start", SMALL, maker(size)).model[0]
    return {
        "build_client_app": client_app.build_client_app, "build_server_app": server_app.build_server_app,
        "FlowerFederation": server_app.FlowerFederation, "Patience": Patience,
        "SiloClient": client, "make_module": maker(size), "start": start,
        "data_of": lambda context: silos[str(context.node_config["client"])],
        "state_of": lambda context: folder / "state" / str(context.node_config["client"]),
    }  # fmt: skip


def poisson_run(folder: Path) -> dict[str, Any]:
    """Do the run of the page's command, with six steps of a line."""
    module = Regression(privacy=DPSGD(eps=3.0, secret_file=folder / "secret"))
    stand_ins.fit(folder / "runs" / "poisson", module, Numbers(sampling="poisson"), extra=[PrivacyCard()])
    return {}


SURROUNDINGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": log,
    "docs/data.md": table,
    "docs/doctor.md": fit,
    "docs/federated.md": by_messages,
    "docs/filters.md": released,
    "docs/howto/federation.md": split_log,
    "docs/howto/lightning.md": log,
    "docs/howto/tools.md": saved_encoder,
    "docs/images.md": images,
    "docs/synthesis.md": with_a_prompt,
    "docs/testing.md": to_be_tested,
    "docs/verify.md": poisson_run,
}
"""The names defined before the first snippet of a page; none if a page is not listed."""
