"""The rows of the paper's Table 1, each a system that runs once per seed.

Systems of the same seed share its stage 1. The baselines without a federation are trained with the same losses, for as
many epochs as the federation has rounds.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from safetensors.torch import load_file

from lit_dpret.datamodules.silo_folder import CLIENTS, read_silo, write_silos
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.aggregation import Weights
from lit_dpret.federated.data import merged_silo, pseudo_silo
from lit_dpret.federated.federation import PerClient
from lit_dpret.federated.model import start_of
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Phase, Stage1Negatives
from lit_dpret.federated.silo import MakeModule, SiloClient
from lit_dpret.federated.silo_ledger import QUERY_LEDGER, spent_together
from lit_dpret.federated.storage import copy_once, newest_round
from lit_dpret.federated.transport import ELSEWHERE, run_federation, silo_state
from lit_dpret.files import file_sha256
from lit_dpret.modules.as2 import AS2DualEncoder
from lit_dpret.privacy.budget import AccountantName
from lit_dpret.privacy.ledger.trained import TrainedIn, mark_trained
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.progress import ProgressLine

System = Literal[
    "bm25", "zero_shot", "pseudo_queries", "single_random", "single_bm25", "single_star", "stage1", "customised",
    "fed_negative", "central",
]  # fmt: skip
SYSTEMS: tuple[System, ...] = get_args(System)
FEDERATED: tuple[System, ...] = ("stage1", "customised", "fed_negative")
CENTRAL = "central"


@dataclass
class SystemResult:
    """The results of one system with one seed. Values are per query, and as private as the queries."""

    values: dict[str, dict[str, list[float]]]  # by client and measure, one value for each query
    # Spent by each silo on this system, stage 1 included; None if nothing is promised.
    epsilon: dict[str, float | None] = field(default_factory=dict)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by silo and phase
    faults: list[str] = field(default_factory=list)  # clients whose answers were left out, and why
    cpu_seconds: float = 0.0  # of this process


class SystemRunner:
    """Run systems over one set of silos.

    Guarantees:
        - An interrupted system continues from what is finished. Stage 1 of a seed is trained once.
        - Under a budget every system has its own ledgers, which continue those of stage 1. A system's epsilon is what
          releasing that system alone would cost.
    """

    def __init__(self, plan: FederationPlan, silos: Mapping[str, Path], folder: Path, *, split: str) -> None:
        self.plan, self.silos, self.folder, self.split = plan, dict(silos), folder, split

    def run(self, system: System, seed: int) -> SystemResult:
        began = time.process_time()
        settings = self.plan.settings(seed)
        if system == "bm25":
            settings = replace(settings, stage2=replace(settings.stage2, negatives="fed"))
            elsewhere = self.plan.transport in ELSEWHERE  # there all phases are one run
            folder = self._shared(settings) if elsewhere else self.folder / "bm25"
            found = self._federation(settings, folder, "bm25")
        elif system in FEDERATED:
            found = self._federated(system, settings)
        else:
            folder = self.folder / f"seed{seed}" / system
            measured = trained_alone(system, settings, self.silos, self.plan.model, folder, split=self.split)
            found = SystemResult(as_lists(measured))
        found.cpu_seconds = time.process_time() - began
        return found

    def stage1_model(self, seed: int) -> AS2DualEncoder:
        """Return the global model of stage 1, marked as trained on the silos' queries; all silos must be local."""
        found = sorted((self._shared(self.plan.settings(seed)) / "server").glob("global-*.safetensors"))
        if not found:
            raise ConfigurationError(
                "task.save_encoder=true needs a global model that was trained here. Set federated=inprocess."
            )
        made = self.plan.model(privacy=NoPrivacy(), optimizer_lr=1e-3, towers="shared", passage_tower="trained")
        made.put_global(load_file(found[-1]))
        # Its rounds have one ledger per silo, and no single run could count those as its start.
        mark_trained(made, [TrainedIn(f"federation {file_sha256(found[-1])[:16]}", "federated")], whole=True)
        return made

    def spent(
        self, system: System | None = None, seeds: Sequence[int] = (), *, ledger: str = QUERY_LEDGER
    ) -> dict[str, float]:
        """Return by silo the joint cost of one system's runs with these seeds; for null, of all runs in the folder.

        A silo whose ledger is elsewhere is left out.
        """
        if system is None:
            folders = sorted(path for path in self.folder.glob("seed*/*") if not path.name.startswith("."))
        else:
            name = "federation" if system == "stage1" else system
            folders = [self.folder / f"seed{seed}" / name for seed in seeds] if system in FEDERATED else []
        return spent_in(folders, accountant=self.plan.privacy.accountant, ledger=ledger)

    def tidy(self, system: System, seed: int) -> None:
        """Remove weights that no other system needs; keep the ledgers and the global model of stage 1."""
        state = self.folder / f"seed{seed}"
        if system in FEDERATED:
            root = state / (system if (state / system).exists() else "federation") / "silos"
            kinds = {"stage1": ("stage1", "optimizer"), "customised": ("personal-dynamic",)}
            patterns = [f"*/{kind}-*" for kind in kinds.get(system, ("personal-fed",))]
        else:
            root, patterns = state / system, ["*/*"]
        for pattern in patterns:
            for path in root.glob(pattern):
                if path.suffix in (".safetensors", ".pt"):
                    path.unlink()

    def _federated(self, system: System, settings: PddAs2) -> SystemResult:
        shared = self._shared(settings)
        # Stage 2 will ask for negatives: under a budget stage 1 leaves room for the requests.
        settings = replace(settings, stage2=replace(settings.stage2, negatives="fed"))
        if system == "stage1":
            return self._federation(settings, shared, "stage1")
        kind: Literal["fed", "dynamic"] = "fed" if system == "fed_negative" else "dynamic"
        own = replace(settings, stage2=replace(settings.stage2, negatives=kind))
        if settings.privacy.eps is None:
            return self._federation(own, shared, "stage2")
        self._federation(settings, shared, "stage1")
        copied = shared.with_name(system)
        copy_once(shared, copied)
        return self._federation(own, copied, "stage2")

    def _shared(self, settings: PddAs2) -> Path:
        return self.folder / f"seed{settings.seed}" / "federation"

    def _federation(self, settings: PddAs2, folder: Path, what: Phase) -> SystemResult:
        # Under a budget, keep a generator that the system does not use out of its ledgers.
        if settings.generated or settings.privacy.eps is None:
            self.plan.begin_states(self.silos, folder)
        return run_phase(self.plan, settings, self.silos, folder, what, split=self.split)


def spent_in(
    folders: Sequence[Path], *, accountant: AccountantName, ledger: str = QUERY_LEDGER,
    client: Callable[[str], str] = str,
) -> dict[str, float]:  # fmt: skip
    """Return by client the joint cost of the federations in several folders, from their ledgers."""
    ledgers: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(silo_state(folder, "*").parent.glob(f"*/private/{ledger}")):
            ledgers.setdefault(client(path.parent.parent.name), []).append(path)
    return {name: spent_together(found, accountant=accountant) for name, found in sorted(ledgers.items())}


def run_phase(
    plan: FederationPlan, settings: PddAs2, silos: Mapping[str, Path], folder: Path, phase: Phase, *, split: str
) -> SystemResult:
    """Run what a phase needs, with the state of all silos in ``folder``, and evaluate only that phase."""
    run = replace(plan.federation(settings, silos, folder), measure=[phase], split=split)
    found = run_federation(run)
    values = as_lists(found.systems[phase])
    if phase == "bm25" and plan.transport not in ELSEWHERE:  # elsewhere all phases are one run with shared costs
        return SystemResult(values)
    sent = {name: dict(count) for name, count in found.traffic.by_silo().items()}
    return SystemResult(values, dict(found.epsilon), sent, list(found.faults))


def as_lists(found: PerClient) -> dict[str, dict[str, list[float]]]:
    """Return the measures of each client as plain lists, for JSON."""
    return {
        name: {metric: [float(value) for value in values] for metric, values in measures.items()}
        for name, measures in found.items()
    }


def check_systems(systems: Sequence[str]) -> list[System]:
    """Return the systems in the order of the paper's table; refuse unknown or repeated ones, and none at all."""
    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown or not systems or max(Counter(systems).values()) > 1:
        raise ConfigurationError(
            f"task.systems={list(systems)} must be one or more of {', '.join(SYSTEMS)}, each once"
            f"{f', and {unknown[0]!r} is not one of them' if unknown else ''}."
        )
    return [system for system in SYSTEMS if system in systems]


def check_seeds_and_split(seeds: Sequence[int], split: str) -> None:
    """Refuse missing or repeated seeds, and a split without evaluation."""
    if not seeds or len(set(seeds)) != len(seeds) or any(isinstance(one, bool) or one < 0 for one in seeds):
        raise ConfigurationError(f"task.seeds={list(seeds)} must be one or more different integers of at least 0.")
    if split not in ("dev", "test"):
        raise ConfigurationError(f"task.split={split!r} must be dev or test.")


def check_stage2(system: System, run: PddAs2) -> None:
    """Refuse a system that is trained in stage 2 if stage 2 has no epoch."""
    if system in ("customised", "fed_negative") and not run.stage2.epochs:
        raise ConfigurationError(
            f"federated.stage2.epochs=0 trains no query encoder for {system} (task.systems). Raise it, or leave "
            f"{system} out."
        )


def check_elsewhere(systems: Sequence[System], seeds: Sequence[int]) -> None:
    """Refuse systems that need silos' data here, or need more of a silo than the one run its owner agreed to."""
    apart = [system for system in systems if system not in ("bm25", *FEDERATED)]
    if apart:
        raise ConfigurationError(
            f"task.systems has {', '.join(apart)}, which need the silos' data here. With federated=flower set "
            "task.systems=[bm25,stage1,fed_negative]."
        )
    if {"customised", "fed_negative"} <= set(systems):
        raise ConfigurationError(
            "task.systems has both customised and fed_negative: with federated=flower a silo's state and budget belong "
            "to one run. Leave one of them out."
        )
    if len(seeds) > 1:
        raise ConfigurationError(
            f"task.seeds={list(seeds)}: with federated=flower a silo's state and budget belong to one run. Set one "
            "seed."
        )


def alone(settings: PddAs2, negatives: Stage1Negatives = "static") -> PddAs2:
    """Return the settings of a silo that trains alone: those of stage 1, without budget, server or stage 2."""
    return replace(
        settings,
        stage1=replace(settings.stage1, negatives=negatives, strategy="fedavg", strength=0.0),
        stage2=replace(settings.stage2, epochs=0),
        privacy=FederatedPrivacy(),
        train_on="queries",
        secure_sum=False,
        sum_threshold=None,
    )


def trained_alone(
    system: System, settings: PddAs2, silos: Mapping[str, Path], make_module: MakeModule, folder: Path, *, split: str
) -> PerClient:
    """Return the results of a system without federation, evaluated on each silo's own collection.

    A `SiloClient` trains without a server. It uses the losses, negatives and batches of stage 1, as many epochs as the
    federation has rounds, and no budget, since nothing leaves the silo.

    Guarantees:
        - Given a silo's collection, ``pseudo_queries`` depends on no train query. The pseudo-queries come from its
          sentences, which may be private: a model trained on them is not public.
    """
    negatives: dict[str, Stage1Negatives] = {"single_random": "random", "single_bm25": "bm25"}
    settings = alone(settings, negatives.get(system, "static"))
    copied = folder / "data"
    if system == "pseudo_queries" and not copied.exists():
        write_silos(copied, [pseudo_silo(read_silo(data)) for data in silos.values()], facts={}, knob="hydra.run.dir")
    if system == "central" and not copied.exists():
        write_silos(copied, [merged_silo([read_silo(data) for data in silos.values()])], facts={}, knob="hydra.run.dir")
    if system == "pseudo_queries":
        silos = {name: copied / CLIENTS / read_silo(data, verify=False).name for name, data in silos.items()}

    shared = start_of(make_module) if system == "zero_shot" else None
    found: PerClient = {}
    with ProgressLine(f"{system}: silos without a federation", every=0.0) as progress:
        if system == "central":
            progress(0, len(silos), "training on all silos' data")
            shared = train_alone(
                SiloClient(copied / CLIENTS / CENTRAL, folder / CENTRAL, settings, make_module), make_module
            )
        for done, (name, data) in enumerate(silos.items()):
            progress(done, len(silos), name)
            client = SiloClient(data, folder / name, settings, make_module)
            weights = train_alone(client, make_module) if shared is None else shared
            found[name] = client.evaluate(weights, personal=False, split=split)
        progress(len(silos), len(silos))
    shutil.rmtree(copied, ignore_errors=True)
    return found


def train_alone(client: SiloClient, make_module: MakeModule) -> Weights:
    """Run all rounds of stage 1 with one client and return its final weights; finished rounds are kept."""
    stage = client.settings.stage1
    weights, first = newest_round(client.state, "stage1") or (start_of(make_module), 0)
    for number in range(first, stage.warmup_rounds + stage.rounds):
        weights = client.train_shared(weights, number)
    return weights
