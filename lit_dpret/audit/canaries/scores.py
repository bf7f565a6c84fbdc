r"""What a trained generator thinks of planted secrets: perplexity, rank and exposure, by likelihood alone.

**Secret in the query** (``query``, ``both``). The log2 perplexity of the secret is the sum of -log2 p over its tokens,
given the passage and the query before it (Carlini et al. 2019, section 3). Every candidate is put into the same place.
Where the secret stands in the passage too, it is replaced there as well.

**Secret in the passage** (``passage``, the papers' letter). A sequence-to-sequence model gives its input no likelihood,
so a candidate is judged by what it makes of the output: -log2 p of the whole query, the end mark included, given the
passage with that candidate's digits in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lit_dpret.audit.canaries.canary import Canary
from lit_dpret.audit.canaries.lengths import check_all_fit
from lit_dpret.audit.statistics.exposure import exposure_of_rank, extrapolated_exposure, rank
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.generator_folder import GeneratorModel
from lit_dpret.synthesis.likelihood import target_scores
from lit_dpret.synthesis.sampler import Decoding, Encoded, encode

Span = Literal["secret", "query"]


@dataclass(frozen=True, kw_only=True)
class SecretScore:
    """What the model thinks of one canary's secret.

    Attributes:
        name, kind, side, copies, included: Of the canary.
        bits: log2 perplexity of the secret.
        rank: Among the candidates, from 1; ties count against the finding.
        exposure: log2(candidates / rank) bits.
        margin: By how many bits the secret is likelier than the other candidates on average.
        extrapolated: Exposure by a skew-normal that is fitted to the other candidates; None where that is infinite.
        log_probability: Natural logarithm of the probability that one draw begins with the canary's query and secret,
            under the decoding; minus infinity where the nucleus excludes it, None where no query holds the secret.
    """

    name: str
    kind: str
    side: str
    copies: int
    included: bool
    bits: float
    rank: int
    exposure: float
    margin: float
    extrapolated: float | None
    log_probability: float | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; minus infinity as None beside ``never_drawn``."""
        facts = asdict(self)
        never = self.log_probability is not None and math.isinf(self.log_probability)
        return facts | {"log_probability": None if never else self.log_probability, "never_drawn": never}


def score_canaries(
    generator: GeneratorModel,
    canaries: Iterable[Canary],
    *,
    decoding: Decoding,
    span: Span = "secret",
    progress: Callable[[int, int], None] | None = None,
) -> list[SecretScore]:
    """Score every canary, planted or left out by its coin.

    Args:
        generator: The trained model with its tokenizer.
        canaries: Their candidates are ranked.
        decoding: How queries are drawn, for `SecretScore.log_probability`.
        span: ``secret`` alone, or the whole ``query`` with its end mark. Secrets in passages are always judged by the
            whole query.
        progress: Called with (canaries done, canaries in all).

    Raises:
        ConfigurationError: A secret is cut away by the model's lengths, or its tokenizer cannot tell candidates apart.
    """
    if span not in get_args(Span):
        raise ConfigurationError(f"task.span={span!r} is not one of {', '.join(get_args(Span))}.")
    listed = list(canaries)
    check_all_fit(generator.codec, listed)
    found = []
    for done, canary in enumerate(listed):
        found.append(_score(generator, canary, decoding, span))
        if progress is not None:
            progress(done + 1, len(listed))
    return found


def _score(generator: GeneratorModel, canary: Canary, decoding: Decoding, span: Span) -> SecretScore:
    codec, model = generator.codec, generator.model
    targets = codec.queries([canary.query_with(secret) for secret in canary.candidates])
    passages = [canary.passage_with(secret) for secret in canary.candidates]
    encoded = _encoded(generator, passages[:1] if canary.side == "query" else passages)
    scores = target_scores(model, encoded, targets)
    starts = [0] * len(targets)
    if span == "secret" and canary.side != "passage":
        stem = codec.queries([canary.query])[0][:-1] if canary.query else []
        starts = [_common(stem, target) for target in targets]
    ends = [len(target) - (span == "secret" and canary.side != "passage") for target in targets]
    bits = [
        -float(row[start:end].sum()) / math.log(2)
        for row, start, end in zip(scores.log_probs, starts, ends, strict=True)
    ]
    own = canary.candidates.index(canary.secret)
    others = bits[:own] + bits[own + 1 :]
    place = rank(bits[own], others)
    extrapolated = extrapolated_exposure(bits[own], others) if len(set(others)) > 1 else 0.0
    return SecretScore(
        name=canary.name,
        kind=canary.kind,
        side=canary.side,
        copies=canary.copies,
        included=canary.included,
        bits=bits[own],
        rank=place,
        exposure=exposure_of_rank(place, len(canary.candidates)),
        margin=sum(others) / len(others) - bits[own],
        extrapolated=extrapolated if math.isfinite(extrapolated) else None,
        log_probability=None if canary.side == "passage" else _drawn(generator, canary, targets[own], decoding),
    )


def _drawn(generator: GeneratorModel, canary: Canary, target: Sequence[int], decoding: Decoding) -> float:
    """Log probability that a draw begins with the query and its secret, given what nobody needs the secret for."""
    encoded = _encoded(generator, [prompt_without_secret(canary)])
    drawn = target_scores(generator.model, encoded, [target], decoding).drawn
    return -math.inf if drawn is None else float(drawn[0, : len(target) - 1].sum())


def prompt_without_secret(canary: Canary) -> str:
    """The passage that queries are drawn for: the canary's own, with another candidate where it holds the secret.

    What is found in those queries was remembered; from the passage as it was planted it could have been copied.
    """
    other = next(candidate for candidate in canary.candidates if candidate != canary.secret)
    return canary.passage_with(other)


def _encoded(generator: GeneratorModel, passages: Sequence[str]) -> Encoded:
    return encode(generator.model, generator.codec.passages(list(passages)))


def _common(stem: Sequence[int], target: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(stem, target, strict=False)) if a != b), min(len(stem), len(target)))
