"""`task=federated`: PDD-AS2 and its baselines over silos, and the paper's Table 1 with our values.

Every system of every seed is a stage that runs once: ``resume=true`` continues an interrupted run, and adds systems or
seeds to a finished one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np

from lit_dpret.callbacks import ProgressLine
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.silo_folder import read_manifest, read_silo
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.silo_ledger import PASSAGE_LEDGER
from lit_dpret.federated.synthetic import PUBLIC, public_sentences
from lit_dpret.federated.systems import (
    FEDERATED,
    System,
    SystemResult,
    SystemRunner,
    check_elsewhere,
    check_seeds_and_split,
    check_stage2,
    check_systems,
)
from lit_dpret.federated.transport import ELSEWHERE
from lit_dpret.federated.trust import sights
from lit_dpret.files import json_sha256
from lit_dpret.report.federated_report import FederatedFacts, FederatedRow, write_federated_report
from lit_dpret.settings import picked
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.stages import Stages

PRIVATE = "private"
_HOW_NOT_WHAT = ("hydra.run.dir=", "federated.secret_file=")


@dataclass(kw_only=True)
class Federated:
    """Run the unfinished systems, and report their results."""

    takes_federation: ClassVar[bool] = True

    systems: Sequence[System]
    seeds: Sequence[int] = (0, 1, 2)
    split: str = "test"
    note: str = ""
    save_encoder: bool = False
    keep_models: bool = False
    min_free_mb: float = 1000

    def __post_init__(self) -> None:
        self.systems = check_systems(self.systems)
        if self.save_encoder and not set(FEDERATED) & set(self.systems):
            raise ConfigurationError(
                f"task.save_encoder=true saves the model of stage 1, but task.systems={list(self.systems)} trains "
                "none. Add stage1 to them, or set it to false."
            )
        self.seeds = list(self.seeds)
        check_seeds_and_split(self.seeds, self.split)

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every unfinished system and seed; return sentence MRR@10 by system, the mean over silos."""
        plan: FederationPlan = parts.federation()
        for system in self.systems:
            check_stage2(system, plan.settings(self.seeds[0]))
        if plan.transport in ELSEWHERE:
            check_elsewhere(self.systems, self.seeds)
        plan.model.check()
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint(plan)).begin()
        silos = plan.folders(parts.run_dir / "silos")
        stages.on_data({name: read_manifest(folder)["sha256"] for name, folder in silos.items()}).begin()
        plan.check_state(silos)
        runner = SystemRunner(plan, silos, parts.run_dir / PRIVATE, split=self.split)
        todo = [
            (system, seed)
            for seed in self.seeds
            for system in self.systems
            if system != "bm25" or seed == self.seeds[0]
        ]
        results: dict[System, dict[int, SystemResult]] = {system: {} for system in self.systems}
        with ProgressLine("systems and seeds", every=0.0) as progress:
            for done, (system, seed) in enumerate(todo):
                progress(done, len(todo), f"{system}, seed {seed}")
                results[system][seed] = self._result(stages, runner, system, seed)
            progress(len(todo), len(todo))
        if self.save_encoder:
            runner.stage1_model(self.seeds[0]).save_model(parts.run_dir / PRIVATE / "encoder")
        return self._tell(parts, runner, results)

    def _result(self, stages: Stages, runner: SystemRunner, system: System, seed: int) -> SystemResult:
        def work(folder: Path, resume: bool) -> dict[str, Any]:
            folder.chmod(0o700)  # values of single queries are as private as the queries
            L.seed_everything(seed, verbose=False)
            return asdict(runner.run(system, seed))

        name = system if system == "bm25" else f"{system}-seed{seed}"
        result = SystemResult(**stages.run(name, work))
        if not self.keep_models:
            runner.tidy(system, seed)
        return result

    def _fingerprint(self, plan: FederationPlan) -> str:
        """Hash the settings that finished runs depend on; systems and seeds can be added."""
        facts = {**plan.describe(), "split": self.split}
        if plan.privacy.eps is not None:  # all noise is calibrated with room for requests
            facts["fed_negative"] = "fed_negative" in self.systems
        return json_sha256(facts)

    def _tell(
        self, parts: Parts, runner: SystemRunner, results: dict[System, dict[int, SystemResult]]
    ) -> dict[str, float]:
        plan, silos = runner.plan, runner.silos
        rows = [_row(system, by_seed, runner) for system, by_seed in results.items() if by_seed]
        together = runner.spent() if plan.privacy.eps is not None else {}
        if plan.transport in ELSEWHERE:  # all rows come from one run, with one ledger in each silo
            told = [(name, value) for row in rows for name, value in row.epsilon.items() if value is not None]
            together = {name: max(value for other, value in told if other == name) for name, _ in told}
        settings = plan.settings(self.seeds[0])
        facts = FederatedFacts(
            silos={name: read_silo(folder).counts() for name, folder in silos.items()},
            data=data_facts(plan.silos, {name: read_manifest(folder)["sha256"] for name, folder in silos.items()}),
            split=self.split,
            model=plan.model.describe(),
            trust=[(one.what, one.server, one.silos, one.protection) for one in sights(settings, self.systems)],
            **picked(plan.privacy, "eps", "unit", "delta", "neighbours"),
            together=together,
            passages=runner.spent(ledger=PASSAGE_LEDGER) if plan.privacy.eps is not None else {},
            command=parts.command_again(*_HOW_NOT_WHAT),
            settings=plan.describe(),
            notes=[*filter(None, (self.note, plan.note)), *_notes(plan, self.seeds, silos), *_withheld(plan, rows)],
        )
        written = write_federated_report(parts.run_dir, rows, facts)
        say(written["pdd_as2.md"].read_text(encoding="utf-8"))
        return {
            row.system: float(np.mean(list(row.over_silos("sentence/mrr@10").values())))
            for row in rows
            if any(row.values.values())
        }


def _notes(plan: FederationPlan, seeds: Sequence[int], silos: Mapping[str, Path]) -> list[str]:
    notes = [f"Seeds: {', '.join(map(str, seeds))}. Silos and their samples are the same for all."]
    if plan.silos == "insuranceqa" and any(value for name, value in plan.sample.items() if name.startswith("max")):
        notes.append(
            "The queries are a sample drawn with a public seed, and each collection holds only the passages that "
            "answer them: smaller and easier than the whole, and chosen by the queries."
        )
    if (run := plan.settings(seeds[0])).generated:
        notes.append(
            "Negatives or training queries were written by each silo's own DP generator, which its ledger counts. A "
            "run continues a copy of that ledger, in which the generator counts once."
        )
    if silos and (run.generated or (run.asks and run.stage2.response == "public")):
        of = {name: read_silo(folder, verify=False).counts()["sentences"] for name, folder in silos.items()}
        each = ", ".join(f"{name} {_declared(folder)} of {of[name]}" for name, folder in silos.items())
        notes.append(f"Sentences that silos declare public ({PUBLIC}), which is not proved: {each}.")
    return notes


def _declared(folder: Path) -> int:
    try:
        return len(public_sentences(folder))
    except DataError:  # none, for a silo that was only measured
        return 0


def _withheld(plan: FederationPlan, rows: Sequence[FederatedRow]) -> list[str]:
    if plan.transport not in ELSEWHERE or all(any(row.values.values()) for row in rows):
        return []
    return [
        "The run is finished. Where a cell says withheld, no silo shares its measures: each keeps them in its own "
        "state folder, and under a budget they stay there. The weights are on the server."
    ]


def _row(system: System, by_seed: Mapping[int, SystemResult], runner: SystemRunner) -> FederatedRow:
    """Combine all seeds of a system into a row: the largest epsilon and the joint one, and the mean of the bytes."""
    epsilon: dict[str, float | None] = {}
    sent: dict[str, dict[str, float]] = {}
    for result in by_seed.values():
        for name, value in result.epsilon.items():
            known = epsilon.get(name, 0.0)
            epsilon[name] = None if value is None or known is None else max(value, known)
        for name, phases in result.sent.items():
            for phase, count in phases.items():
                of_silo = sent.setdefault(name, {})
                of_silo[phase] = of_silo.get(phase, 0.0) + count / len(by_seed)
    return FederatedRow(
        system=system,
        values={seed: result.values for seed, result in by_seed.items()},
        epsilon=epsilon,
        over_seeds=runner.spent(system, list(by_seed)) if runner.plan.privacy.eps is not None else {},
        sent=sent,
        cpu_seconds=sum(result.cpu_seconds for result in by_seed.values()),
        faults=[f"seed {seed}: {fault}" for seed, result in by_seed.items() for fault in result.faults],
    )
