"""`task=federated_generators`: train each silo's DP query generator, and write queries for its public sentences.

Everything is charged to the ledger in the silo's state folder, ``RUN/private/NAME``, and its rounds continue there:
``federated.state=RUN/private`` of ``task=federated``, ``lit-dpret silo --state RUN/private/NAME``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L

from lit_dpret.callbacks import ProgressLine
from lit_dpret.datamodules.silo_folder import read_silo
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.synthetic import (
    SYNTHETIC,
    GeneratorTerms,
    check_generated,
    check_generator,
    finished_generator,
    open_ledger,
    public_sentences,
    train_generator,
    write_synthetic,
)
from lit_dpret.files import json_sha256
from lit_dpret.modules import QueryGenerator
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.report.page import aligned, write_short
from lit_dpret.settings import Count, picked, require_whole
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.stages import Stages
from lit_dpret.tasks.synthesize import Drawing

PRIVATE = "private"


@dataclass(kw_only=True)
class FederatedGenerators(Drawing):
    """Train the missing generators, let them write queries, and report the spending of each budget.

    Guarantees:
        - Every silo is checked before the first is trained.
        - ``resume=true`` repeats nothing that is finished. A killed generator stays charged, and is trained again only
          if the budget covers both.
    """

    takes_federation: ClassVar[bool] = True

    eps: float
    names: Sequence[str] | None = None
    data: Path | None = None
    epochs: int = 1
    batch_size: int = 32
    queries_per_passage: Count = 2
    min_free_mb: float = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("task", self, 1, "max_new_tokens")
        if self.names is not None and self.data is not None:
            raise ConfigurationError(
                "task.names chooses among the silos of the federation, but task.data is one silo. Set one of them."
            )
        self.training = GeneratorTerms(eps=self.eps, epochs=self.epochs, batch_size=self.batch_size)
        self.writing = picked(
            self, "queries_per_passage", "top_p", "temperature", "top_k", "max_new_tokens", "min_new_tokens",
            "group_size",
        )  # fmt: skip

    def run(self, parts: Parts) -> dict[str, float]:
        """Return the largest epsilon spent by a silo; write ``internal_generators.json``."""
        plan: FederationPlan = parts.federation()
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        settings = plan.settings(parts.seed)
        folders = self._folders(plan, parts.run_dir)
        self._check(folders, settings, parts)
        facts = {**asdict(self.training), **self.writing, "plan": plan.describe(), "seed": parts.seed}
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=json_sha256(facts))
        found: dict[str, dict[str, Any]] = {}
        with ProgressLine("generators of silos", every=0.0) as progress:
            for done, (name, data) in enumerate(folders.items()):
                progress(done, len(folders), name)

                def work(_: Path, __: bool, name: str = name, data: Path = data) -> dict[str, Any]:
                    return self._make(name, data, settings, parts, plan)

                found[name] = stages.run(f"generator-{name}", work)
            progress(len(folders), len(folders))
        self._tell(found, parts, settings)
        return {"eps_spent": max(one["eps_spent"] for one in found.values())}

    def _folders(self, plan: FederationPlan, run_dir: Path) -> dict[str, Path]:
        if self.data is not None:
            return {read_silo(self.data).name: self.data}
        found = plan.folders(run_dir / "silos")
        if not found:
            raise ConfigurationError(
                f"federated.transport={plan.transport}: the silos belong to others. Each owner names its own with "
                "task.data=DIR; or set federated=inprocess."
            )
        if self.names == [] or set(self.names or ()) - set(found):
            raise ConfigurationError(
                f"task.names={list(self.names or ())} must name one or more of the silos {', '.join(found)}, or be "
                "null for all of them."
            )
        return {name: data for name, data in found.items() if self.names is None or name in self.names}

    def _check(self, folders: dict[str, Path], settings: PddAs2, parts: Parts) -> None:
        for name, data in folders.items():
            check_generator(data, settings, self.training)
            public_sentences(data)
            if (data / SYNTHETIC).exists() and finished_generator(parts.run_dir / PRIVATE / name) is None:
                raise ConfigurationError(
                    f"{data / SYNTHETIC} exists and was not written by a generator of this run. Move it away, or "
                    "continue the run that wrote it (its hydra.run.dir, resume=true)."
                )
        _generator(parts, NoPrivacy())

    def _make(self, name: str, data: Path, settings: PddAs2, parts: Parts, plan: FederationPlan) -> dict[str, Any]:
        state = parts.run_dir / PRIVATE / name
        L.seed_everything(parts.seed, verbose=False)
        run = train_generator(
            data, state, settings, lambda *, privacy: _generator(parts, privacy), self.training,
            secret_file=plan.secret_file, label=f"generator of {name}",
        )  # fmt: skip
        with ProgressLine(f"queries of {name}") as progress:
            write_synthetic(data, run, seed=parts.seed, progress=progress, **self.writing)
        written = check_generated(data, state, settings)
        ledger = open_ledger(data, state, settings.privacy)
        spent, budget = ledger.epsilon(), ledger.budget
        return {
            "queries": len(written.texts), "eps_spent": spent, "eps": budget.eps, "left": budget.eps - spent,
            "delta": budget.delta, "claim": written.claim,
        }  # fmt: skip

    def _tell(self, found: dict[str, dict[str, Any]], parts: Parts, settings: PddAs2) -> None:
        privacy = settings.privacy
        state = parts.run_dir / PRIVATE
        rows = [
            [name, one["queries"], show_epsilon(one['eps_spent']), f"{one['eps']:g}", f"{one['left']:.3f}",
             show_delta(one["delta"])]
            for name, one in found.items()
        ]  # fmt: skip
        lines = [
            f"Epsilon holds for each {privacy.unit} of the silo, {privacy.neighbours}.",
            "",
            aligned(["silo", "queries", "spent", "budget", "left", "delta"], rows),
            "",
            "Spent: everything in the silo's ledger, including a generator that was killed. Left: the difference; the "
            "rounds will be composed with what is spent. Using the queries costs nothing more.",
            "",
            f"Next: federated.state={state} with federated.stage2.response=synthetic or federated.train_on=synthetic, "
            f"or lit-dpret silo --state {state}/NAME.",
        ]
        title, internal = "Queries by each silo's own generator", "Internal: what each silo spent."
        written = write_short(parts.run_dir, "generators", title, {"silos": found}, lines, internal=internal)
        say(*written.lines)


def _generator(parts: Parts, privacy: Any) -> QueryGenerator:
    made = parts.make_module(privacy=privacy)
    if not isinstance(made, QueryGenerator):
        raise ConfigurationError(
            f"task=federated_generators trains query generators, but the model is {type(made).__name__}. Set "
            "model=generator."
        )
    return made
