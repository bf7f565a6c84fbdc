"""`task=audit`: measure the canaries of a run, and whether they contradict its claim.

It uses only the trained model and planted secrets: this is post-processing, so the results may go on the card. Files
with single canaries and generated queries are internal: under a broken guarantee they may contain private texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from lit_dpret.audit.canaries import CANARIES, Canary, CanarySet, read_canaries
from lit_dpret.audit.canaries.canary import set_sha256
from lit_dpret.audit.canaries.findings import (
    ALARM,
    PAPER_KINDS,
    POOLED,
    Cell,
    Excess,
    Limits,
    Outcome,
    cells_of,
    secret_limits,
)
from lit_dpret.audit.canaries.scores import Leak, Span, draw_leaks, score_canaries, score_pairs
from lit_dpret.audit.canaries.suite import QUERY_SIDE_ONLY
from lit_dpret.audit.statistics.evidence import NO_GUARANTEE, Evidence
from lit_dpret.audit.statistics.one_run import one_run_audit
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.amendments import AttackResult, add_evidence
from lit_dpret.cards.audits import BOUND
from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.cards.file import MODEL_FOLDER, check_artefact
from lit_dpret.cards.text import privacy_line
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError, PrivacyViolation, UnsupportedAccountingError
from lit_dpret.modules.generator_folder import is_generator, load_generator
from lit_dpret.privacy.accounting.ceilings import SecretCeiling
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.judgement import claimed_releases
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.report.canary_table import CanaryRow, write_canary_table
from lit_dpret.settings import picked, require_choice
from lit_dpret.synthesis.sampler import Decoding
from lit_dpret.tasks.parts import Parts, check_run_dir, say


class _MeasuredDecoding(Decoding):
    where = "task.measure"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Settings for measuring canaries; for a dual encoder, pairs are scored and nothing is drawn."""

    draws: int = 20  # queries drawn for each canary's passage
    # top_p, temperature, max_new_tokens: For those draws; use the settings of the release.
    top_p: float = 0.8
    temperature: float = 1.0
    max_new_tokens: int = 32
    span: Span = "secret"  # the part of a candidate that is scored: the ``secret`` alone, or the whole ``query``

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ConfigurationError(f"task.measure.draws={self.draws} must be at least 1.")
        require_choice("task.measure.span", self.span, get_args(Span))
        self.decoding()

    def decoding(self) -> Decoding:
        """Return the decoding settings."""
        return _MeasuredDecoding(top_p=self.top_p, temperature=self.temperature, max_new_tokens=self.max_new_tokens)

    def of(self, model: Path, canaries: Sequence[Canary], *, seed: int) -> list[dict[str, Any]]:
        """Return ``score`` and ``leak`` of each canary as JSON values; a dual encoder has leaks of zero draws."""
        if not is_generator(model):
            towers = load_towers(model)
            with ProgressLine("scoring canaries") as progress:
                pairs = score_pairs(towers, canaries, progress=progress)
            return [{"score": one.to_dict(), "leak": asdict(Leak(one.name, 0, 0, None, ()))} for one in pairs]
        generator = load_generator(model)
        with ProgressLine("scoring canaries") as progress:
            scores = score_canaries(generator, canaries, decoding=self.decoding(), span=self.span, progress=progress)
        with ProgressLine("drawing queries") as progress:
            leaks = draw_leaks(
                generator, canaries, decoding=self.decoding(), draws=self.draws, seed=seed, progress=progress
            )
        return [{"score": score.to_dict(), "leak": asdict(leak)} for score, leak in zip(scores, leaks, strict=True)]


def limits_by_copies(
    card: Mapping[str, Any], ledger: Path, measure: Measurement, *, copies: Sequence[int], candidates: int
) -> dict[int, Limits]:
    """Return, by number of copies, the limits that a card's ledger sets for secrets; trivial for groups without a
    bound.
    """
    claim = card["claim"]
    if claim["guarantee"] != "dp":
        return {}
    releases = claimed_releases(PrivacyLedger.read(ledger).records[: card["ledger"]["records"]])
    found = {}
    facts: dict[str, Any] = {"eps": claim["epsilon"], "delta": claim["delta"]}
    for k in copies:
        try:
            ceiling = SecretCeiling(releases, copies=k, neighbours=claim["neighbours"])
            together = group_epsilon(releases, delta=claim["delta"], units=k, neighbours=claim["neighbours"])
        except UnsupportedAccountingError:
            found[k] = Limits(**facts)
            continue
        found[k] = secret_limits(
            ceiling, candidates=candidates, draws=measure.draws, tokens=measure.max_new_tokens,
            group_eps=together if together < float("inf") else None, **facts,
        )  # fmt: skip
    return found


NAME = "audit"
_OF_A_BOUND = ("eps_lower", "delta", "confidence", "method", "assumption")


class Audit:
    """Score and rank the canaries of a finished run, draw queries for them, bound epsilon, and amend the card."""

    def __init__(self, *, run: str | Path, measure: Measurement, card: bool = True, min_free_mb: float = 50) -> None:
        self.run_folder, self.measure, self.card, self.min_free_mb = Path(run), measure, card, min_free_mb

    def run(self, parts: Parts) -> dict[str, float]:
        """Measure, write ``audit.*`` into the task's folder and the results to the card; return bounds by row."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        card, canaries = self._read()
        copies = sorted({canary.copies for canary in canaries.canaries})
        candidates = _candidates(canaries)
        limits = limits_by_copies(
            card, self.run_folder / LEDGER_NAME, self.measure, copies=copies, candidates=candidates
        )
        found = self.measure.of(self.run_folder / MODEL_FOLDER, canaries.canaries, seed=parts.seed)
        claim = card["claim"]
        claimed = claim["guarantee"] == "dp"
        law: dict[str, Any] = {"delta": claim["delta"], "neighbours": claim["neighbours"]} if claimed else {}
        tossed = {one["score"]["copies"] for one in found if not one["score"]["included"]}
        planted = [Outcome.of(0, one["score"], one["leak"]) for one in found if one["score"]["included"]]
        tables = 2 if tossed else 1  # ranks and coins share the error of a contradiction
        cells = cells_of(planted, candidates=candidates, limits=limits, tables=tables, **law) if planted else []
        sure = 1 - ALARM / (2 * max(1, len(tossed)))
        coins, surely = (self._coins(found, law.get("delta", 0.0), level) for level in (0.95, sure))
        for copies in sorted(tossed - {one["score"]["copies"] for one in found if one["score"]["included"]}):
            say(f"{copies} copies: no coin included a canary, so they give no bound")
        above = [one for one in surely if claimed and one.eps_lower > claim["epsilon"]]
        rows = [CanaryRow(model=privacy_line(card), cell=cell, candidates=candidates) for cell in cells]
        facts = {
            "run": self.run_folder.name,
            "candidates": candidates,
            "measure": vars(self.measure),
            "sha256": set_sha256(canaries),
            "canaries": found,
            "one_run": [evidence.to_dict() for evidence in coins],
        }
        notes = [
            f"{len(canaries.canaries)} canaries were in the training data, as {len(canaries.units())} units: this "
            "is the canaried model.",
            *map(str, coins),
        ]
        written, contradictions = write_canary_table(
            parts.run_dir, rows, name=NAME, title="Audit of a run by its canaries", facts=facts, notes=notes,
            command=parts.command,
        )  # fmt: skip
        contradictions += [
            f"CONTRADICTION: the claim is epsilon = {show_epsilon(claim['epsilon'])}, but the audit found {one}"
            for one in above
        ]
        pooled = {(cell.side, cell.copies) for cell in cells if cell.kind == POOLED}
        told = [(cell.side, cell.copies) not in pooled or cell.kind not in PAPER_KINDS for cell in cells]
        results = [
            result for cell, tell in zip(cells, told, strict=True) for result in _results(cell, candidates, told=tell)
        ]
        results += [_coin_result(one, canaries) for one in coins]
        results += [_coin_result(one, canaries, ceiling=claim["epsilon"]) for one in above]
        self._tell(cells, coins, written, results)
        if contradictions:
            raise PrivacyViolation(
                f"The audit contradicts the claim of {self.run_folder.name} ({privacy_line(card)}): "
                f"{contradictions[0]} The report is {written[f'{NAME}.html']}."
            )
        say(
            f"audited {self.run_folder.name} with {len(canaries.canaries)} canaries: nothing contradicts its claim "
            f"({privacy_line(card)}); {NO_GUARANTEE}"
        )
        return {f"{cell.side}, {cell.copies}, {cell.kind}": cell.bounds[0].eps_lower for cell in cells}

    def _read(self) -> tuple[dict[str, Any], CanarySet]:
        path = self.run_folder / CANARIES
        if not path.is_file():
            raise DataError(
                f"task.run={self.run_folder} has no {CANARIES}: it is not a run with canaries, so there is "
                "nothing to look for. Train one with canaries=papers."
            )
        card, canaries = read_card(self.run_folder), read_canaries(path)
        planted = card["empirical"].get("planted")
        if planted is None or planted["sha256"] != set_sha256(canaries):
            raise DataError(
                f"{path} does not hold the canaries that the ledger of this run says were planted: its SHA-256 is not "
                "the one on the card. An audit with secrets that were chosen afterwards proves nothing."
            )
        check_artefact(self.run_folder / MODEL_FOLDER, card)  # the findings are written onto its card
        return card, canaries

    def _coins(self, found: Sequence[dict[str, Any]], delta: float, confidence: float) -> list[Evidence]:
        evidence = []
        for copies in sorted({one["score"]["copies"] for one in found}):
            scores = [one["score"] for one in found if one["score"]["copies"] == copies]
            included = [score["included"] for score in scores]
            if len(set(included)) == 1:  # without coins all are included; with few coins sometimes none
                continue
            values = CanaryScores.of([score["margin"] for score in scores], included)
            evidence.append(one_run_audit(values, delta=delta, copies=copies, confidence=confidence))
        return evidence

    def _tell(
        self, cells: Sequence[Cell], coins: Sequence[Evidence], written: dict[str, Path],
        results: Sequence[AttackResult],
    ) -> None:  # fmt: skip
        for cell in cells:
            leaked = f", leaked {cell.leaked.mean:.0%}" if cell.draws else ""
            say(
                f"{cell.side}, {cell.copies} copies, {cell.kind}: mean rank {cell.mean_rank.mean:.1f}, rank 1 "
                f"{cell.top.mean:.0%}{leaked}; {cell.bounds[0]}"
            )
        say(*map(str, coins), *(f"{name}: {path}" for name, path in written.items()))
        if self.card:
            for folder in (self.run_folder, self.run_folder / MODEL_FOLDER):
                known = read_card(folder)["empirical"]["results"] if (folder / CARD_NAME).is_file() else []
                add_evidence(folder, [result for result in results if result.to_dict() not in known])


def _candidates(canaries: CanarySet) -> int:
    counts = {len(canary.candidates) for canary in canaries.canaries}
    if len(counts) != 1:
        raise ConfigurationError(
            "The canaries have different numbers of candidates, so their ranks cannot be compared."
        )
    return counts.pop()


def _results(cell: Cell, candidates: int, *, told: bool) -> list[AttackResult]:
    """Return the card's results for a cell; an untold cell reports only contradictions of the claim."""
    what = f"planted secrets ({cell.kind}, secret in the {cell.side})"
    common: dict[str, Any] = {"n": cell.canaries, "copies": cell.copies}
    surely = [_excess_result(one, f"{what}, held against the claim", common) for one in cell.excesses]
    if not told:
        return surely
    claimed, limits = cell.limits.eps is not None, cell.limits
    common["confidence"] = 0.95
    ranked = AttackResult(
        attack=f"{what}, ranked among {candidates}", metric="share of rank 1", estimate=cell.top.mean,
        ci=(cell.top.low, cell.top.high), ceiling=limits.top if claimed else None,
        **picked(cell.bounds[0], "eps_lower", "delta", "method", "assumption"), **common,
    )  # fmt: skip
    if not cell.draws:
        return [ranked, *surely]
    leaked = AttackResult(
        attack=f"{what}, looked for in {cell.draws} generated queries each", metric="leaked share",
        estimate=cell.leaked.mean, ci=(cell.leaked.low, cell.leaked.high),
        ceiling=limits.leak if claimed and cell.kind not in QUERY_SIDE_ONLY else None, **common,
    )  # fmt: skip
    return [ranked, leaked, *surely]


def _excess_result(excess: Excess, attack: str, common: dict[str, Any]) -> AttackResult:
    if (bound := excess.evidence) is None:
        return AttackResult(
            attack=attack, metric=excess.what, estimate=excess.estimate, ci=(excess.at_least, 1.0),
            ceiling=excess.ceiling, confidence=excess.confidence, **common,
        )  # fmt: skip
    return AttackResult(
        attack=attack, metric=BOUND, estimate=bound.eps_lower, ceiling=excess.ceiling, **picked(bound, *_OF_A_BOUND),
        **common,
    )  # fmt: skip


def _coin_result(evidence: Evidence, canaries: CanarySet, *, ceiling: float | None = None) -> AttackResult:
    return AttackResult(
        attack="one-run audit of planted secrets", n=sum(one.copies == evidence.copies for one in canaries.canaries),
        metric="none" if ceiling is None else BOUND, estimate=None if ceiling is None else evidence.eps_lower,
        copies=evidence.copies, ceiling=ceiling, **picked(evidence, *_OF_A_BOUND),
    )  # fmt: skip
