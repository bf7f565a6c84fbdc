"""`task=membership`: membership inference on a model, compared with its claim."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.attacks.coins import COINS_NAME, Coins
from lit_dpret.audit.attacks.membership import AttackResult, Ceilings, Promise, measure
from lit_dpret.audit.attacks.release import bigram_scores, disclosures, nearest_scores, repeated
from lit_dpret.audit.statistics.evidence import check_confidence
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.audit.statistics.shadow import counterfactual_memorisation, shadow_scores
from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.check import judge_card
from lit_dpret.cards.file import CARD_NAME, check_artefact, read_card
from lit_dpret.cards.recomputed import ceilings_of
from lit_dpret.cards.start import model_folder
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation
from lit_dpret.files import file_sha256
from lit_dpret.modules.generator_folder import is_generator
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.settings import Count, Least, Settings, picked, require_number
from lit_dpret.synthesis.filters.released import load_released
from lit_dpret.tasks.membership_shadows import SHIFT, Attacker, Others, Shadows, Suspects, Trained, choose_suspects
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.ranking import embedded_texts
from lit_dpret.tasks.stages import Stages, settings_fingerprint
from lit_dpret.tasks.uncovered import tell_attack

#: The effect of a coin that leaves a query out, if the claim uses another relation.
DROPPED = {
    "zero_out": "A coin leaves a query out, but the claim (zero_out) is about emptying it: the number of units, which "
    "the claim treats as public, depends on the coin flips. Evidence and ceilings hold apart from what that reveals.",
    "replace_one": "A coin leaves a query out, but the claim (replace_one) is about replacing it with another, in data "
    "of the same size: it covers nothing that is found here, neither evidence nor ceilings.",
}


@dataclass
class Claim:
    """The claim of a run, as ceilings at any false positive rate."""

    line: str  # the card's claim, in words
    eps: float | None = None  # recomputed from the ledger; None if nothing is claimed about whole queries
    delta: float | None = None
    neighbours: str | None = None
    ceilings: Ceilings | None = None  # None if no library computes them
    caveats: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Claim:
        """Return the claim of a finished run, from its card and ledger."""
        if not (folder / CARD_NAME).is_file() or not (folder / LEDGER_NAME).is_file():
            raise DataError(f"task.run={folder} lacks {CARD_NAME} or {LEDGER_NAME}: it is not a finished run.")
        card, records = read_card(folder), PrivacyLedger.read(folder / LEDGER_NAME).records
        found = cls(privacy_line(card))
        judged = judge_card(card, records)
        plan, verdict = judged.plan, judged.verdict
        if plan is None or verdict.epsilon is None:
            found.caveats.append("The run has no guarantee, so there are no ceilings to compare attacks with.")
            return found
        found.eps, found.delta, found.neighbours = verdict.epsilon, plan.budget.delta, plan.budget.neighbours
        if plan.budget.unit == "pair":
            found.eps = None
            found.caveats.append(
                "The claim is about single pairs, but the attacks are on whole queries: it gives them no ceiling."
            )
            return found

        @lru_cache(maxsize=8)
        def cached(rates: tuple[float, ...]) -> Mapping[str, Any] | None:
            return ceilings_of(judged, false_positive_rates=rates)

        if cached((0.1,)) is None:
            found.caveats.append("No library computes attack ceilings for this sampling: only epsilon bounds them.")
        else:
            found.ceilings = lambda rates: cached(tuple(rates)) or {}
        return found


@dataclass(kw_only=True)
class MembershipSettings(Settings):
    """Attack settings without the run folder, since a field ``run`` would clash with the method."""

    model: Path | None = None
    others: Others | None = None
    queries: Annotated[int, Least(20)] = 1000
    rows_per_query: Count = 2
    reference: str | None = "start"
    shadows: int = 8
    minutes: float = 20.0
    pool: Annotated[int, Least(2)] = 500
    temperature: float = 0.05
    release: str | Path | None = None
    release_reference: str | Path | None = None
    release_encoder: str = "minilm"
    repeats: float = 0.8
    confidence: float = 0.95
    alarm: float = 0.9999
    resamples: Count = 1000
    batch_size: Count = 32
    device: str = "cpu"
    min_free_mb: float = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("task", self, "minutes", "temperature")
        if self.shadows != 0 and (not isinstance(self.shadows, int) or self.shadows < 4 or self.shadows % 2):
            raise ConfigurationError(f"task.shadows={self.shadows} must be 0, or an even number of at least 4.")
        if self.release is None and self.release_reference is not None:
            raise ConfigurationError(
                f"task.release_reference={self.release_reference} is for task.release, which is null. Set both, or "
                "neither."
            )
        if self.model is not None and self.shadows:
            raise ConfigurationError(
                f"task.model={self.model} is derived from the run, but shadow models repeat only the run's own "
                "training. Set task.shadows=0, or task.model to null."
            )
        check_confidence(self.confidence)
        check_confidence(self.alarm)


class Membership(MembershipSettings):
    """Attack a finished run with all available signals, and compare the results with its claim.

    The composed configuration is the target's: its ``datamodule`` finds the queries, and shadow models are trained with
    its ``model``, ``privacy`` and ``trainer``.
    """

    private_results = True  # results on the attacked queries
    takes_start: ClassVar[bool] = True  # shadow models start where the target did

    def __init__(self, *, run: str | Path, **settings: Any) -> None:
        super().__init__(**settings)
        self.run_folder = Path(run)

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``internal_membership.json`` and ``.md``; return AUC by attack."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        target = self._target()
        self._releases()
        coins = Coins.read(self.run_folder) if (self.run_folder / COINS_NAME).exists() else None
        claim = Claim.of(self.run_folder)
        if self.model is None:
            check_artefact(target, read_card(self.run_folder))
        others: Others = self.others or ("dev" if coins is None else "coins")
        shadows = Shadows(parts, count=self.shadows, minutes=self.minutes) if self.shadows else None
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint(parts, target))
        data = parts.read_data()
        stages.on_data(data.collection.queries, data.collection.passages, data.collection.qrels).begin()
        suspects = choose_suspects(
            data, others, coins, count=self.queries, rows=self.rows_per_query, seed=parts.seed
        )  # fmt: skip
        attacker = Attacker(
            target, suspects, _sample(data.collection.passages, self.pool, parts.seed), self.temperature,
            self.batch_size, self.device,
        )  # fmt: skip
        self._learn_reference(parts, attacker, target)
        start = time.monotonic()
        with ProgressLine("signals of the target") as progress:
            signals = attacker.signals(target, progress, moments=True)
        scoring = time.monotonic() - start
        scores: dict[str, NDArray[np.float64]] = dict(signals)
        trained = None if shadows is None else shadows.train(suspects, attacker, stages, scoring=scoring)
        if trained is not None:
            scores |= shadow_scores(signals, trained.matrix, population=suspects.population)
        facts = self._facts(target, suspects, claim, trained)
        facts |= data_facts(data, dict(zip(suspects.ids, suspects.texts(), strict=True)))
        if shadows is not None and shadows.why_none is not None:
            facts["caveats"].append(shadows.why_none)
        if self.release is not None:
            scores |= self._release_scores(suspects)
            facts["disclosures"] = self._disclosures(suspects, claim)
        results = self._measured(scores, suspects, claim)
        facts["attacks"] = [result.to_dict() for result in results]
        return self._tell(parts, facts, results, suspects)

    # -- target and reference ------------------------------------------------------------------

    def _target(self) -> Path:
        folder = model_folder(self.run_folder if self.model is None else self.model)
        if not folder.is_dir() or not any(folder.iterdir()):
            knob = "task.run" if self.model is None else "task.model"
            raise DataError(f"{knob}={folder} is not the folder of a saved model.")
        return folder

    def _releases(self) -> tuple[list[str], list[str] | None]:
        """Return the queries of the release and of its reference; read early, so that a wrong folder fails at once."""
        reference = (
            None if self.release_reference is None else _texts_of(self.release_reference, "task.release_reference")
        )
        return ([] if self.release is None else _texts_of(self.release, "task.release")), reference

    def _fingerprint(self, parts: Parts, target: Path) -> str:
        weights = [file_sha256(file) for file in sorted(target.glob("*.safetensors"))]
        return settings_fingerprint(
            self, but=("alarm", "confidence", "resamples"), seed=parts.seed, attacked_weights=weights
        )

    def _learn_reference(self, parts: Parts, attacker: Attacker, target: Path) -> None:
        if self.reference is None:
            return
        source: str | Path = self.reference
        with ProgressLine("signals of the reference") as progress:
            if self.reference == "start":
                module = parts.make_module(privacy=parts.make_privacy())
                if not hasattr(module, "save_model"):
                    raise ConfigurationError("task.reference=start needs a model that can be saved. Set it to null.")
                source = module.save_model(parts.run_dir / "reference")
                if is_generator(source) != is_generator(target):
                    raise ConfigurationError(
                        "task.reference=start is the model that this configuration starts from, but the attacked model "
                        "is of another kind. Name a public model (task.reference=minilm or public_t5), or set it to "
                        "null."
                    )
            attacker.reference = attacker.look(source, progress)

    def _facts(self, target: Path, suspects: Suspects, claim: Claim, trained: Trained | None) -> dict[str, Any]:
        usual = None if claim.ceilings is None else claim.ceilings((0.1, 0.01, 0.001))
        facts: dict[str, Any] = {
            "internal": True,
            "target": {
                "name": self.run_folder.resolve().name,
                "kind": "generator" if is_generator(target) else "encoder",
                "privacy": claim.line,
            },
            "suspects": {
                "attacked": suspects.attacked,
                "members": int(suspects.member[: suspects.attacked].sum()),
                "population": len(suspects.ids) - suspects.attacked,
                "fair_coins": suspects.fair,
                "left_out_as_copies": suspects.left_out,
                "left_out_without_passage": suspects.unanswered,
            },
            "caveats": [] if suspects.fair else [SHIFT],
            "confidence": self.confidence,
            "alarm": self.alarm,
            "claim": {"epsilon": claim.eps, "delta": claim.delta, "ceilings": usual},
            "disclosures": None,
            "shadows": None,
            "memorisation": None,
        }
        facts["caveats"] += claim.caveats
        if suspects.fair and claim.neighbours in DROPPED:
            facts["caveats"].append(DROPPED[claim.neighbours])
        if trained is not None:
            models = len(trained.matrix.included)
            facts["shadows"] = {
                "models": models, "wanted": trained.wanted, "steps": trained.steps,
                "seconds": round(trained.seconds, 1),
            }  # fmt: skip
            facts["memorisation"] = _memorisation(trained, suspects)
            if models < trained.wanted:
                facts["caveats"].append(
                    f"There are {models} shadow models of task.shadows={trained.wanted}: a timed trial showed that "
                    f"task.minutes={self.minutes:g} allows no more. The attacks that use them are weaker for it."
                )
        return facts

    # -- attacks -------------------------------------------------------------------------------

    def _release_scores(self, suspects: Suspects) -> dict[str, NDArray[np.float64]]:
        texts, (made, reference) = suspects.texts(), self._releases()
        encoder = load_towers(self.release_encoder).query_encoder
        how: dict[str, Any] = {"batch_size": self.batch_size, "device": self.device}
        embedded = embedded_texts(encoder, [*texts, *made], "query", **how).double().numpy()
        return {
            "release_bigrams": bigram_scores(texts, made, reference),
            "release_nearest": nearest_scores(embedded[: len(texts)], embedded[len(texts) :]),
        }

    def _disclosures(self, suspects: Suspects, claim: Claim) -> dict[str, Any] | None:
        """Count the attacked queries that the release repeats; None without coins, where phantoms mean nothing."""
        if not suspects.fair:
            return None
        own = suspects.texts()[: suspects.attacked]
        hit = repeated(own, _texts_of(self.release, "task.release"), overlap=self.repeats)
        inside = int((hit & suspects.member[: suspects.attacked]).sum())
        found = disclosures(
            queries=len(own), repeated=int(hit.sum()), trained=inside, delta=claim.delta or 0.0,
            confidence=self.confidence,
        )  # fmt: skip
        return {"overlap": self.repeats, **found.to_dict()}

    def _measured(
        self, scores: Mapping[str, NDArray[np.float64]], suspects: Suspects, claim: Claim
    ) -> list[AttackResult]:
        count, member = suspects.attacked, suspects.member
        results = []
        delta = (claim.delta or 0.0) if suspects.fair else None
        promise = Promise(ceilings=claim.ceilings, delta=delta, epsilon=claim.eps)
        how = picked(self, "confidence", "alarm", "resamples")
        with ProgressLine("intervals") as progress:
            for done, (name, values) in enumerate(scores.items()):
                progress(done, len(scores))
                pair = CanaryScores.of(values[:count], member[:count])
                results.append(measure(name, pair, promise, attacks=len(scores), **how))
            progress(len(scores), len(scores))
        return sorted(results, key=lambda result: -result.auc.value)

    def _tell(
        self, parts: Parts, facts: dict[str, Any], results: Sequence[AttackResult], suspects: Suspects
    ) -> dict[str, float]:
        title = f"Membership attacks on {facts['target']['name']}"
        report = tell_attack(parts, "membership", title, facts, of="queries")
        above = [f"{result.attack}: {one}" for result in results for one in result.exceeded]
        if above and suspects.fair:
            raise PrivacyViolation(
                f"{len(above)} findings contradict the claim of {self.run_folder} with confidence {self.alarm:g}: "
                f"{above[0]}. Look for the bug in sampling, clipping or noise; {report.name} has them all."
            )
        return {f"auc/{result.attack}": result.auc.value for result in results}


def _memorisation(trained: Trained, suspects: Suspects) -> dict[str, Any]:
    matrix = trained.matrix
    name = "loss" if "loss" in matrix.signals else "logit"
    values = counterfactual_memorisation(matrix.signals[name], matrix.included)[: suspects.attacked]
    counts, edges = np.histogram(values, bins=20)
    most = np.argsort(-values)[:10]
    return {
        "signal": name,
        "mean": float(values.mean()),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        "most": [{"query_id": suspects.ids[place], "value": float(values[place])} for place in most],
    }


def _texts_of(folder: str | Path | None, knob: str) -> list[str]:
    return [query.text for query in load_released(str(folder), declared_public=True, knob=knob)]


def _sample(passages: Mapping[str, str], count: int, seed: int) -> list[str]:
    names = sorted(passages)
    chosen = np.random.default_rng(seed).permutation(len(names))[:count]
    return [passages[names[place]] for place in sorted(chosen)]
