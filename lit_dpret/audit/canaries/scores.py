r"""Measure what a trained model reveals of planted secrets: perplexity, rank and exposure, and leaks in generated text.

A generator scores a secret in the query by its log2 perplexity (Carlini et al. 2019, section 3), and one in the passage
by -log2 p of the whole query given that passage. Leaks are searched for in queries drawn for the passage *without* the
secret. A dual encoder scores a candidate by -log2 of the softmax share of the canary's own passage among those of the
other canaries, without their secrets: ranks must be functions of the model and public texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch

from lit_dpret.audit.canaries.canary import Canary, check_all_fit
from lit_dpret.audit.statistics.exposure import exposure_of_rank, extrapolated_exposure, rank
from lit_dpret.encoders import Side, TextEncoder, Towers
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.generator_folder import GeneratorModel
from lit_dpret.synthesis.prefill import prefill
from lit_dpret.synthesis.sampler import Decoding, decode, target_scores, uniforms

Span = Literal["secret", "query"]
Progress = Callable[[int, int], None]
Result = TypeVar("Result")

TEMPERATURE = 0.05
"""Of the softmax, if embeddings have length 1; dot products of any length are used unscaled."""

_BETWEEN_DIGITS = re.compile(r"(?<=\d)[\s.,\-]+(?=\d)")
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True)
class SecretScore:
    """How well the model knows one canary's secret."""

    # name, kind, side, copies, included: Those of the canary.
    name: str
    kind: str
    side: str
    copies: int
    included: bool
    bits: float  # log2 perplexity of the secret
    rank: int  # among the candidates, from 1; ties count against the finding
    exposure: float  # log2(candidates / rank) bits
    margin: float  # by how many bits the secret is likelier than the average of the other candidates
    # Exposure by a skew-normal fitted to the other candidates; None where that is infinite.
    extrapolated: float | None
    # Natural logarithm of the probability that one draw begins with the canary's query and secret, under the decoding;
    # minus infinity if the nucleus excludes it, None if no query holds the secret.
    log_probability: float | None

    @classmethod
    def of(cls, canary: Canary, bits: Sequence[float], log_probability: float | None = None) -> SecretScore:
        """Rank the canary's secret by the perplexity of each of its candidates, in their order."""
        own = canary.candidates.index(canary.secret)
        others = [*bits[:own], *bits[own + 1 :]]
        place = rank(bits[own], others)
        extrapolated = extrapolated_exposure(bits[own], others) if len(set(others)) > 1 else 0.0
        return cls(
            name=canary.name, kind=canary.kind, side=canary.side, copies=canary.copies, included=canary.included,
            bits=bits[own], rank=place, exposure=exposure_of_rank(place, len(canary.candidates)),
            margin=sum(others) / len(others) - bits[own],
            extrapolated=extrapolated if math.isfinite(extrapolated) else None, log_probability=log_probability,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; minus infinity becomes None with ``never_drawn`` true."""
        facts = asdict(self)
        never = self.log_probability is not None and math.isinf(self.log_probability)
        return facts | {"log_probability": None if never else self.log_probability, "never_drawn": never}


def score_canaries(
    generator: GeneratorModel,
    canaries: Iterable[Canary],
    *,
    decoding: Decoding,
    span: Span = "secret",
    progress: Progress | None = None,
) -> list[SecretScore]:
    """Score every canary under a generator, whether its coin included or excluded it.

    ``span`` is the ``secret`` alone, or the whole ``query`` with its end mark. Secrets in passages are always scored
    by the latter. ``progress`` is called with (canaries done, canaries in total).
    """
    if span not in get_args(Span):
        raise ConfigurationError(f"task.measure.span={span!r} is not one of {', '.join(get_args(Span))}.")
    listed = list(canaries)
    check_all_fit(generator.codec, listed)
    return _each(listed, lambda canary: _score_text(generator, canary, decoding, span), progress)


def _each(canaries: Sequence[Canary], work: Callable[[Canary], Result], progress: Progress | None) -> list[Result]:
    found = []
    for done, canary in enumerate(canaries, start=1):
        found.append(work(canary))
        if progress is not None:
            progress(done, len(canaries))
    return found


def _score_text(generator: GeneratorModel, canary: Canary, decoding: Decoding, span: Span) -> SecretScore:
    codec, model = generator.codec, generator.model
    targets = codec.queries([canary.query_with(secret) for secret in canary.candidates])
    passages = [canary.passage_with(secret) for secret in canary.candidates]
    read = prefill(model, codec.passages(passages[:1] if canary.side == "query" else passages))
    log_probs = target_scores(model, read, targets).log_probs
    if span == "secret" and canary.side != "passage":
        stem = codec.queries([canary.query])[0][:-1] if canary.query else []
        parts = [slice(_common(stem, target), len(target) - 1) for target in targets]
    else:
        parts = [slice(0, len(target)) for target in targets]
    bits = [-float(row[part].sum()) / math.log(2) for row, part in zip(log_probs, parts, strict=True)]
    drawn = None
    if canary.side != "passage":
        target = targets[canary.candidates.index(canary.secret)]
        drawn = _log_probability_of_draw(generator, canary, target, decoding)
    return SecretScore.of(canary, bits, drawn)


def _log_probability_of_draw(
    generator: GeneratorModel, canary: Canary, target: Sequence[int], decoding: Decoding
) -> float:
    """Return the log probability that a draw for the passage without the secret begins with the query and secret."""
    read = prefill(generator.model, generator.codec.passages([prompt_without_secret(canary)]))
    line_breaks = generator.codec.line_breaks
    drawn = target_scores(generator.model, read, [target], decoding, line_breaks=line_breaks).drawn
    return -math.inf if drawn is None else float(drawn[0, : len(target) - 1].sum())


def _common(stem: Sequence[int], target: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(stem, target, strict=False)) if a != b), min(len(stem), len(target)))


def prompt_without_secret(canary: Canary) -> str:
    """Return the passage to draw queries for: the canary's own, with another candidate instead of the secret.

    A secret found in those queries was memorised; with the planted passage it could have been copied.
    """
    other = next(candidate for candidate in canary.candidates if candidate != canary.secret)
    return canary.passage_with(other)


@dataclass(frozen=True)
class Leak:
    """The queries generated for a canary."""

    name: str
    draws: int
    found: int
    copied: int | None  # the same for the passage that contains the secret; None if the passage never does
    sample: tuple[str, ...]  # the first query drawn, and the first with the secret if there is one


def draw_leaks(
    generator: GeneratorModel,
    canaries: Sequence[Canary],
    *,
    decoding: Decoding,
    draws: int,
    seed: int,
    progress: Progress | None = None,
) -> list[Leak]:
    """Draw queries for each canary's passage and search them for its secret.

    Guarantees:
        - The queries of a canary depend only on model, passage, seed and the canary's name.
    """
    if draws < 1:
        raise ConfigurationError(f"task.measure.draws={draws} must be at least 1.")

    def drawn(canary: Canary, passage: str) -> list[str]:
        read = prefill(generator.model, generator.codec.passages([passage])).repeated(draws)
        label, length = f"canary:{canary.name}", decoding.max_new_tokens
        numbers = np.stack([uniforms(seed, label, draw, length) for draw in range(draws)])
        sampled = decode(generator.model, read, numbers, decoding, line_breaks=generator.codec.line_breaks)
        # Keep special tokens, which `TextCodec.text` omits: new-token canaries consist of them.
        return [str(generator.tokenizer.decode(each.tokens, skip_special_tokens=False)) for each in sampled]

    def leak(canary: Canary) -> Leak:
        texts = drawn(canary, prompt_without_secret(canary))
        hits = [text for text in texts if holds(text, canary.secret)]
        copied = None
        if canary.side != "query":
            copied = sum(holds(text, canary.secret) for text in drawn(canary, canary.passage_with(canary.secret)))
        return Leak(canary.name, draws, len(hits), copied, tuple(dict.fromkeys([texts[0], *hits[:1]])))

    return _each(canaries, leak, progress)


def holds(text: str, secret: str) -> bool:
    """Return whether a text contains a secret, ignoring case, white space and separators between digits.

    Example:
        >>> holds("call 48 29-137 755", "4829137755"), holds("call 482913775", "4829137755")
        (True, False)
    """

    def normalised(of: str) -> str:
        return _SPACES.sub("", _BETWEEN_DIGITS.sub("", of)).casefold()

    return normalised(secret) in normalised(text)


def score_pairs(towers: Towers, canaries: Sequence[Canary], *, progress: Progress | None = None) -> list[SecretScore]:
    """Score every canary under a dual encoder, whether its coin included or excluded it."""
    check_all_fit(_BothSides(towers), canaries)
    texts = list(dict.fromkeys(canary.passage for canary in canaries))
    pool = towers.passage_encoder.encode(texts, "passage").double()
    if len(texts) == 1:
        raise ConfigurationError(
            "All canaries have the same passage, and a dual encoder must distinguish a query's passage from others. "
            "Plant several canaries of kind random_passage or own_passage."
        )

    def score(canary: Canary) -> SecretScore:
        return SecretScore.of(canary, _bits(towers, canary, pool[[text != canary.passage for text in texts]]))

    return _each(canaries, score, progress)


def _bits(towers: Towers, canary: Canary, others: torch.Tensor) -> list[float]:
    """Return for each candidate -log2 of the share that the encoders give the query's own passage."""
    queries = [canary.query_with(secret) for secret in canary.candidates]
    passages = [canary.passage_with(secret) for secret in canary.candidates]
    asked = towers.query_encoder.encode(queries, "query").double()
    own = towers.passage_encoder.encode(passages, "passage").double()
    divisor = TEMPERATURE if towers.query_encoder.contract.normalise else 1.0
    right = (asked * own).sum(dim=1, keepdim=True) / divisor
    table = torch.cat([right, asked @ others.T / divisor], dim=1)
    return [float(value) for value in (table.logsumexp(dim=1) - right[:, 0]) / math.log(2)]


class _BothSides:
    """Two towers that tokenize the texts of either side, as `check_all_fit` needs."""

    def __init__(self, towers: Towers) -> None:
        self._of: dict[Side, TextEncoder] = {"query": towers.query_encoder, "passage": towers.passage_encoder}

    def token_ids(self, texts: Sequence[str], side: Side, *, whole: bool = False) -> list[list[int]]:
        return self._of[side].token_ids(texts, side, whole=whole)
