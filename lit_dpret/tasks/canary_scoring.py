"""Measuring the canaries of one generator or dual encoder: what audits and the canary study have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lit_dpret.audit.canaries import Canary
from lit_dpret.audit.canaries.findings import Limits, secret_limits
from lit_dpret.audit.canaries.scores import Leak, Span, draw_leaks, score_canaries, score_pairs
from lit_dpret.callbacks import ProgressLine
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.modules.generator_folder import is_generator, load_generator
from lit_dpret.privacy.accounting.ceilings import SecretCeiling
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, claimed_releases
from lit_dpret.synthesis.sampler import Decoding


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How canaries are measured.

    Args:
        draws: Queries that are drawn for each canary's passage.
        top_p, temperature, max_new_tokens: Of those draws; take the settings of the release.
        span: What a candidate is judged by: the ``secret`` alone, or the whole ``query``.

    A dual encoder draws nothing, and judges pairs (`lit_dpret.audit.canaries.scores`); none of this is about it.
    """

    draws: int = 20
    top_p: float = 0.8
    temperature: float = 1.0
    max_new_tokens: int = 32
    span: Span = "secret"

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ConfigurationError(f"task.measure.draws={self.draws} must be at least 1.")
        if self.span not in get_args(Span):
            raise ConfigurationError(f"task.measure.span={self.span!r} is not one of {', '.join(get_args(Span))}.")
        self.decoding()

    def decoding(self) -> Decoding:
        """The way of sampling."""
        return Decoding(top_p=self.top_p, temperature=self.temperature, max_new_tokens=self.max_new_tokens)

    def of(self, model: Path, canaries: Sequence[Canary], *, seed: int) -> list[dict[str, Any]]:
        """``score`` and ``leak`` of each canary, as JSON values; samples of generated queries among them.

        A model that writes no text is taken for a dual encoder: its leaks are of no draw.
        """
        if not is_generator(model):
            towers = load_towers(model)
            with ProgressLine("scoring canaries") as progress:
                pairs = score_pairs(towers, canaries, progress=progress)
            return [{"score": one.to_dict(), "leak": Leak(one.name, 0, 0, None, ()).to_dict()} for one in pairs]
        generator = load_generator(model)
        with ProgressLine("scoring canaries") as progress:
            scores = score_canaries(generator, canaries, decoding=self.decoding(), span=self.span, progress=progress)
        with ProgressLine("drawing queries") as progress:
            leaks = draw_leaks(
                generator, canaries, decoding=self.decoding(), draws=self.draws, seed=seed, progress=progress
            )
        return [{"score": score.to_dict(), "leak": leak.to_dict()} for score, leak in zip(scores, leaks, strict=True)]


def limits_by_copies(
    card: Mapping[str, Any], ledger: Path, measure: Measurement, *, copies: Sequence[int], candidates: int
) -> dict[int, Limits]:
    """What the ledger behind a card allows for secrets that stand so often in the data.

    Where several units together have no known bound, the ceilings are trivial. Without a guarantee there are none.
    """
    claim = card["claim"]
    if claim["guarantee"] != "dp":
        return {}
    releases = claimed_releases(PrivacyLedger.read(ledger).records[: card["ledger"]["records"]])
    found = {}
    for k in copies:
        group: dict[str, Any] = {"neighbours": claim["neighbours"]}
        facts: dict[str, float | None] = {"eps": claim["epsilon"], "delta": claim["delta"], "group_eps": None}
        try:
            ceiling = SecretCeiling(releases, copies=k, **group)
            together = group_epsilon(releases, delta=claim["delta"], max_units=k, **group)
        except UnsupportedAccountingError:
            found[k] = Limits(eps=claim["epsilon"], delta=claim["delta"])
            continue
        facts["group_eps"] = together if together < float("inf") else None
        found[k] = secret_limits(
            ceiling, candidates=candidates, draws=measure.draws, tokens=measure.max_new_tokens, **facts
        )
    return found
