"""What a federation is measured against: no query at all, silos that train alone, one party that holds everything.

Those that train are `SiloClient` without a server: the losses, negatives and batches of stage 1, as many epochs as the
federation has rounds, and no budget, since nothing leaves. Whoever trains alone has no need to add noise.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from lit_dpret.datamodules.silo_folder import CLIENTS, read_silo, write_silos
from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.data import merged_silo, pseudo_silo
from lit_dpret.federated.inprocess import PerClient
from lit_dpret.federated.model import start_of
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Stage1Negatives
from lit_dpret.federated.silo import MakeModule, SiloClient
from lit_dpret.progress import ProgressLine

CENTRAL = "central"


def alone(settings: PddAs2, negatives: Stage1Negatives = "static") -> PddAs2:
    """The settings of one that trains alone: stage 1's, on its people's queries, without budget, server and stage 2."""
    return replace(
        settings,
        stage1=replace(settings.stage1, negatives=negatives, strategy="fedavg", strength=0.0),
        stage2=replace(settings.stage2, epochs=0),
        privacy=FederatedPrivacy(),
        train_on="queries",
        secure_sum=False,
        sum_threshold=None,
    )


_NEGATIVES: Mapping[str, Stage1Negatives] = {"single_random": "random", "single_bm25": "bm25"}


def trained_alone(
    system: str,
    settings: PddAs2,
    silos: Mapping[str, Path],
    make_module: MakeModule,
    folder: Path,
    *,
    split: str,
) -> PerClient:
    """What one of the rows reaches that need no federation.

    Args:
        system: ``zero_shot``, ``pseudo_queries``, ``central`` or a ``single_...``.
        settings: Of the federation.
        silos: The data folder of each client.
        make_module: Builds the model.
        folder: Of the state.
        split: On which questions.
    """
    train = {"central": central, "zero_shot": untrained, "pseudo_queries": pseudo_clients}.get(system, single_clients)
    return train(alone(settings, _NEGATIVES.get(system, "static")), silos, make_module, folder, split=split)


def train_alone(client: SiloClient, make_module: MakeModule) -> Weights:
    """All rounds of stage 1 with one client, its weights carried from each to the next.

    Guarantees:
        - A round that is finished is not made again.
    """
    stage = client.settings.stage1
    weights, first = start_of(make_module), 0
    done = sorted(client.state.glob("stage1-*.safetensors"))
    if done:
        weights, first = load_file(done[-1]), int(done[-1].stem.partition("-")[2]) + 1
    for number in range(first, stage.warmup_rounds + stage.rounds):
        weights = client.train_shared(weights, number)
    return weights


def untrained(
    settings: PddAs2, silos: Mapping[str, Path], make_module: MakeModule, folder: Path, *, split: str
) -> PerClient:
    """The public weights that everything starts from, measured on each silo's own collection; arguments as below."""
    weights = start_of(make_module)
    judges = {name: SiloClient(data, folder / name, settings, make_module) for name, data in silos.items()}
    return {name: judge.evaluate(weights, personal=False, split=split) for name, judge in judges.items()}


def single_clients(
    settings: PddAs2, silos: Mapping[str, Path], make_module: MakeModule, folder: Path, *, split: str
) -> PerClient:
    """Each silo trains alone and is measured on its own collection.

    Args:
        settings: From `alone`.
        silos: The data folder of each client.
        make_module: Builds the model.
        folder: Of the state.
        split: On which questions.
    """
    found: PerClient = {}
    with ProgressLine(f"silos that train alone, {settings.stage1.negatives} negatives", every=0.0) as progress:
        for done, (name, data) in enumerate(silos.items()):
            progress(done, len(silos), name)
            client = SiloClient(data, folder / name, settings, make_module)
            found[name] = client.evaluate(train_alone(client, make_module), personal=False, split=split)
        progress(len(silos), len(silos))
    return found


def pseudo_clients(
    settings: PddAs2, silos: Mapping[str, Path], make_module: MakeModule, folder: Path, *, split: str
) -> PerClient:
    """Each silo alone, on questions made of its own sentences; arguments as above.

    Guarantees:
        - Given a silo's collection, no train query has a say in its weights. They are made of its sentences, which may
          be private: what trains here is no public model.
    """
    made = folder / "data"
    if not made.exists():
        write_silos(made, [pseudo_silo(read_silo(data)) for data in silos.values()], facts={}, knob="hydra.run.dir")
    own = {name: made / CLIENTS / read_silo(data, verify=False).name for name, data in silos.items()}
    found = single_clients(settings, own, make_module, folder, split=split)
    shutil.rmtree(made)
    return found


def central(
    settings: PddAs2, silos: Mapping[str, Path], make_module: MakeModule, folder: Path, *, split: str
) -> PerClient:
    """One model of all silos' data, measured on each silo's own collection: the paper's upper bound.

    Args:
        settings: From `alone`.
        silos: The data folder of each client.
        make_module: Builds the model.
        folder: Of the state, and of a copy of all data.
        split: On which questions.
    """
    pooled = folder / "data"
    if not pooled.exists():
        write_silos(pooled, [merged_silo([read_silo(data) for data in silos.values()])], facts={}, knob="hydra.run.dir")
    client = SiloClient(pooled / CLIENTS / CENTRAL, folder / CENTRAL, settings, make_module)
    total = settings.stage1.warmup_rounds + settings.stage1.rounds
    with ProgressLine(f"central training, {total} epochs of all silos' data", every=0.0) as progress:
        progress(0, 1)
        weights = train_alone(client, make_module)
        progress(1, 1)
    judges = {name: SiloClient(data, folder / name, settings, make_module) for name, data in silos.items()}
    found = {name: judge.evaluate(weights, personal=False, split=split) for name, judge in judges.items()}
    shutil.rmtree(pooled)
    return found
