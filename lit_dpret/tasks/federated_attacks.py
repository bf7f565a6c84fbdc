"""`task=federated_attacks`: the two attacks that paper 004 names and leaves open, before and after each defence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from lit_dpret.audit.statistics.evidence import check_confidence
from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.start import model_folder
from lit_dpret.datamodules.silo_folder import read_manifest, silo_folders
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.federated.centroids import CentroidPlan
from lit_dpret.federated.model import AS2Maker
from lit_dpret.report.federated_attacks import write_federated_attacks
from lit_dpret.settings import require_whole
from lit_dpret.tasks.federated_requests import Asker, Way, asker_of, attack_requests, ways
from lit_dpret.tasks.federated_updates import (
    Defence,
    attack_updates,
    defences,
    round_of,
    start_weights,
    tokens_of,
    updates_of,
    word_table,
)
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.stages import Stages, settings_fingerprint
from lit_dpret.tasks.uncovered import Owner, require_owner

Attack = Literal["requests", "updates"]


@dataclass(kw_only=True)
class FederatedAttacks:
    """A silo that matches requests, and a server that reads word embeddings, on a folder of silos.

    The attacked messages come from the code that a federation runs: requests from its centroids under its ledger,
    updates from a silo's first round. The model is the public one that a run begins with.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    silos: Path
    whose: Owner | None = None
    attacks: Sequence[Attack] = ("requests", "updates")
    encoder: str | Path = "minilm"
    layers: int | None = None
    candidates: int = 100
    request_eps: Sequence[float] = (8.0, 4.0, 1.0)
    update_eps: Sequence[float] = (8.0, 1.0)
    delta: float | None = None
    centroids: int = 16
    centroid_iterations: int = 3
    batch_size: int = 8
    negatives: int = 8
    lr: float = 3e-5
    weight_decay: float = 0.01
    max_query_length: int = 32
    max_passage_length: int = 128
    confidence: float = 0.95
    min_free_mb: float = 1000

    def __post_init__(self) -> None:
        require_owner(self.whose, "the numbers are about these silos' queries")
        if not self.attacks or set(self.attacks) - set(get_args(Attack)):
            raise ConfigurationError(
                f"task.attacks={list(self.attacks)} must be some of {', '.join(get_args(Attack))}."
            )
        require_whole("task", self, 1, "centroids", "centroid_iterations", "batch_size", "negatives")
        require_whole("task", self, 2, "candidates")
        require_whole("task", self, 3, "max_query_length", "max_passage_length")
        require_whole("task", self, 1, "layers", null=True)
        for knob, listed in (("request_eps", self.request_eps), ("update_eps", self.update_eps)):
            if any(not 0 < eps < float("inf") for eps in listed) or len(set(listed)) != len(listed):
                raise ConfigurationError(f"task.{knob}={list(listed)} must be positive, finite and all different.")
        if not self.lr > 0 or not 0 <= self.weight_decay < 1:
            raise ConfigurationError(
                f"task.lr={self.lr} must be above 0, and task.weight_decay={self.weight_decay} in [0, 1)."
            )
        check_confidence(self.confidence)
        self.silos = Path(self.silos)
        self.attacks = sorted(set(self.attacks))
        self.request_eps = [float(e) for e in self.request_eps]
        self.update_eps = [float(e) for e in self.update_eps]
        self.lr = float(self.lr)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``federated_attacks.json`` and ``.md``, or ``internal_federated_attacks`` about private silos.

        Raises:
            DataError: The silos are malformed.
            ConfigurationError: There is only one silo, or one that is too small.
        """
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        folders = silo_folders(self.silos, knob="task.silos")
        counts = {name: dict(read_manifest(data)["counts"]) for name, data in folders.items()}
        self._check_sizes(counts)
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint(parts))
        make = self._maker().check()
        facts = self._facts(parts, counts)
        if "requests" in self.attacks:
            facts["requests"] = self._requests(parts, stages, folders, make)
        if "updates" in self.attacks:
            facts["updates"] = self._updates(parts, stages, folders, make)
        written = write_federated_attacks(facts, parts.run_dir)
        console = Console()
        for line in written.lines:
            console.print(line, highlight=False, soft_wrap=True)
        scores = {}
        if facts["requests"]:
            scores["named_by_exact_requests"] = facts["requests"][0]["pooled"]["named"]["1"]["value"]
        if facts["updates"] and facts["updates"][0]["pooled"]["queries"]:
            scores["queries_told_from_collection"] = facts["updates"][0]["pooled"]["queries"]["auc"]
        return scores

    def _requests(
        self, parts: Parts, stages: Stages, folders: Mapping[str, Path], make: AS2Maker
    ) -> list[dict[str, Any]]:
        """Run the silo's attack on each way to ask."""
        module, _ = start_weights(make)
        plan = CentroidPlan(count=self.centroids, iterations=self.centroid_iterations, seed=parts.seed)
        askers: dict[str, Asker] = {}

        def attacked(folder: Path, _: bool, way: Way) -> dict[str, Any]:
            if not askers:  # only where a way is still to be attacked
                with ProgressLine("encoding the queries of all silos") as progress:
                    for place, (name, data) in enumerate(folders.items()):
                        progress(place, len(folders))
                        askers[name] = asker_of(data, module)
                    progress(len(folders), len(folders))
            return attack_requests(
                askers, way, folder, plan=plan, delta=self.delta, candidates=self.candidates,
                confidence=self.confidence, seed=parts.seed,
            )  # fmt: skip

        listed = enumerate(ways(self.request_eps))
        return [stages.run(f"request-{number}", partial(attacked, way=way)) for number, way in listed]

    def _updates(
        self, parts: Parts, stages: Stages, folders: Mapping[str, Path], make: AS2Maker
    ) -> list[dict[str, Any]]:
        """Run the server's attack on each defence."""
        module, start = start_weights(make)
        encoder = module.encoder
        table = word_table(module)
        tokens = {name: tokens_of(data, encoder) for name, data in folders.items()}

        def attacked(_: Path, __: bool, defence: Defence) -> dict[str, Any]:
            read = partial(
                attack_updates, defence, start=start[str(table)], table=str(table), tokens=tokens,
                special=encoder.tokenizer.all_special_ids, confidence=self.confidence,
            )  # fmt: skip
            if defence.frozen_words:
                if word_table(start_weights(replace(make, train_embeddings=False))[0]) is None:
                    return read(None)
                raise UnsupportedModelError(
                    "federated.model.train_embeddings=false left word embeddings in the update."
                )
            settings = round_of(
                defence, batch_size=self.batch_size, negatives=self.negatives, lr=self.lr, seed=parts.seed
            )
            with ProgressLine(f"a round of each silo: {defence.name}") as progress:
                return read(updates_of(defence, folders, parts.run_dir / "rounds", make, start, settings, progress))

        listed = enumerate(defences(self.update_eps))
        return [stages.run(f"update-{number}", partial(attacked, defence=defence)) for number, defence in listed]

    def _maker(self) -> AS2Maker:
        """Return the maker of the model of a federation with these settings."""
        place = model_folder(self.encoder) if Path(str(self.encoder)).is_dir() else self.encoder
        return AS2Maker(
            encoder=str(place), layers=self.layers, max_query_length=self.max_query_length,
            max_sentence_length=self.max_passage_length, weight_decay=self.weight_decay,
        )  # fmt: skip

    def _check_sizes(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        if len(counts) < 2:
            raise ConfigurationError(f"task.silos={self.silos} holds one silo, and both attacks are about another's.")
        few = min(counts, key=lambda name: counts[name]["dev"] + counts[name]["test"])
        others = counts[few]["dev"] + counts[few]["test"]
        if "requests" in self.attacks and others < 2 * (self.candidates - 1):
            raise ConfigurationError(
                f"task.candidates={self.candidates} takes {2 * (self.candidates - 1)} dev and test queries of every "
                f"silo, and {few} has {others}. Lower it, or build larger silos."
            )
        least = min(counts, key=lambda name: counts[name]["train"])
        if "updates" in self.attacks and counts[least]["train"] < self.batch_size:
            raise ConfigurationError(
                f"task.batch_size={self.batch_size} is more than {least} has train queries ({counts[least]['train']}). "
                "Lower it, or build larger silos."
            )

    def _facts(self, parts: Parts, counts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        return {
            "internal": self.whose == "private",
            "encoder": Path(str(self.encoder)).name,
            "layers": self.layers,
            "silos": counts,
            "requests": [],
            "updates": [],
            "candidates": self.candidates,
            "centroids": self.centroids,
            "batch_size": self.batch_size,
            "negatives": self.negatives,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "confidence": self.confidence,
            "command": parts.command,
        }

    def _fingerprint(self, parts: Parts) -> str:
        manifest = read_manifest(self.silos, knob="task.silos")
        return settings_fingerprint(self, but=["min_free_mb"], seed=parts.seed, manifest=manifest)
