"""Nucleus sampling in which every random number belongs to one query, independent of batches.

The numbers of a query (passage, draw) form a separate stream, keyed by a hash of (seed, passage id, draw); the seed is
public. The nucleus (Holtzman et al., 2020, section 3.1) is the smallest set of most probable tokens with mass p, in
float64; equal tokens are ordered by id. The last bits of logits depend on the shape of the batch, which `groups` fixes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.settings import require_number, require_whole
from lit_dpret.synthesis.prefill import Prefilled

HEADS = (256, 2048)  # this many of the largest scores are tried before the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings for drawing queries."""

    top_p: float = 0.8  # mass of the nucleus; 1 samples from the whole distribution
    temperature: float = 1.0  # divides the logits before the nucleus is taken
    top_k: int | None = None  # keep this many tokens before the nucleus is taken; null keeps all
    max_new_tokens: int = 128  # length of the longest query, including the end mark
    min_new_tokens: int = 1  # tokens before the end mark may be drawn

    where: ClassVar[str] = "task"  # the prefix of these settings in errors

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"{self.where}.top_p={self.top_p} is not in (0, 1].")
        require_number(self.where, self, "temperature")
        require_whole(self.where, self, 1, "top_k", null=True)
        require_whole(self.where, self, 1, "max_new_tokens")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigurationError(
                f"{self.where}.min_new_tokens={self.min_new_tokens} is not between 0 and "
                f"{self.where}.max_new_tokens={self.max_new_tokens}."
            )


@dataclass(frozen=True)
class Sampled:
    """One drawn sequence."""

    tokens: list[int]  # token ids, without the end mark
    # Log probability (nats) of all drawn tokens, including the end mark, under the model itself: before temperature and
    # truncation.
    log_prob: float
    finished: bool  # whether the end mark or a line break was drawn


def uniforms(seed: int, passage_id: str, draw: int, count: int) -> np.ndarray:
    """Return the first ``count`` numbers in [0, 1) of one query's stream; a larger count only extends them."""
    message = f"lit-dpret/generation\x1f{seed}\x1f{draw}\x1f{passage_id}".encode("utf-8", "surrogatepass")
    key = int.from_bytes(hashlib.blake2b(message, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose_tokens(
    logits: Tensor, numbers: np.ndarray, decoding: Decoding, *, forbidden: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Choose a token per row of logits, ``(rows, vocabulary)``, by inverting its nucleus's distribution function.

    Return token ids and their log probabilities under the unmodified logits, both ``(rows,)``. A token depends only on
    its row's logits and number, and has its probability inside the nucleus, up to float64 rounding.
    """
    log_mass = torch.logsumexp(logits.double(), dim=1)
    if not bool(torch.isfinite(log_mass).all()):
        raise UnsupportedModelError(
            "The generator gives NaN or infinite scores: its weights are broken. Check the run that trained "
            "it (learning rate, noise, precision)."
        )
    scores, scaled_mass = logits, log_mass
    if forbidden or decoding.temperature != 1:
        scores = logits.clone()
        scores[:, list(forbidden)] = -math.inf
        scaled_mass = torch.logsumexp(scores.double() / decoding.temperature, dim=1)
    mass = scaled_mass.cpu().numpy()
    vocabulary = logits.shape[1]
    tokens = np.full(len(logits), -1)
    unsorted = scores.device.type == "cpu" and decoding.top_k is None  # a full sort is slow there
    heads = [head for head in (HEADS[:1] if unsorted else HEADS) if head < vocabulary]
    for width in (*heads, vocabulary):
        rows = np.flatnonzero(tokens < 0)
        if len(rows) == 0:
            break
        part = scores if len(rows) == len(scores) else scores[torch.from_numpy(rows).to(scores.device)]
        if unsorted and width == vocabulary:
            scaled = part.double().numpy() / decoding.temperature
            for row, values, u in zip(rows, scaled, numbers[rows], strict=True):
                tokens[row] = from_nucleus_unsorted(values, mass[row], u, decoding.top_p)
            break
        values, ids = _largest(part, width)
        tokens[rows] = _from_nucleus(
            values / decoding.temperature, ids, mass[rows], numbers[rows], decoding, whole=width == vocabulary
        )
    chosen = torch.from_numpy(tokens).to(logits.device)
    log_probs = logits.gather(1, chosen[:, None])[:, 0].double() - log_mass
    return tokens, log_probs.cpu().numpy()


def _largest(scores: Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``width`` largest scores of each row in float64, and their ids; equal scores are ordered by id."""
    if width == scores.shape[1]:
        ranked, order = torch.sort(scores, dim=1, descending=True, stable=True)
        return ranked.double().cpu().numpy(), order.cpu().numpy()
    top, places = torch.topk(scores, width, dim=1)
    values, ids = top.double().cpu().numpy(), places.cpu().numpy()
    tied = np.flatnonzero((values[:, 1:] == values[:, :-1]).any(axis=1))
    if len(tied):
        by_id = np.lexsort((ids[tied], -values[tied]), axis=-1)
        ids[tied] = np.take_along_axis(ids[tied], by_id, 1)
    return values, ids


def _from_nucleus(
    values: np.ndarray, ids: np.ndarray, mass: np.ndarray, numbers: np.ndarray, decoding: Decoding, *, whole: bool
) -> np.ndarray:
    """Return a token for each row, or -1 where ``values``, the largest ones in order, do not determine the nucleus.

    Which ids are given for values equal to the smallest one is arbitrary (``topk`` breaks ties arbitrarily). So a
    nucleus that reaches those values is not determined unless ``whole``.
    """
    allowed = np.isfinite(values)
    settled = np.ones(len(values), dtype=bool)
    if decoding.top_k is not None:
        kept = min(decoding.top_k, values.shape[1])
        if not whole:
            settled = values[:, kept - 1] > values[:, -1]
        allowed &= np.arange(values.shape[1]) < kept
        shifted = np.where(allowed, values - values[:, :1], -math.inf)
        mass = values[:, 0] + np.log(np.exp(shifted).sum(axis=1))
    probabilities = np.where(allowed, np.exp(values - mass[:, None]), 0.0)
    cumulated = np.cumsum(probabilities, axis=1)
    reached = cumulated >= decoding.top_p
    size = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, allowed.sum(axis=1))
    last = np.take_along_axis(values, size[:, None] - 1, 1)[:, 0]
    if not whole:
        settled &= last > values[:, -1]
    total = np.take_along_axis(cumulated, size[:, None] - 1, 1)
    index = (cumulated <= numbers[:, None] * total).sum(axis=1)
    index = np.minimum(index, size - 1)  # rounding may raise u * total to total
    return np.where(settled, np.take_along_axis(ids, index[:, None], 1)[:, 0], -1)


@torch.inference_mode()
def decode(
    model: PreTrainedModel, passages: Prefilled, numbers: np.ndarray, decoding: Decoding,
    *, line_breaks: Sequence[int] = (),
) -> list[Sampled]:  # fmt: skip
    """Draw one sequence per row with a key-value cache; finished rows leave the batch.

    ``numbers`` are uniform, shape ``(rows, at least max_new_tokens)``. The tokens ``line_breaks`` end a query just as
    the model's end mark does.
    """
    rows = len(passages)
    ends = [*end_marks(model), *line_breaks]
    sequences: list[list[int]] = [[] for _ in range(rows)]
    log_probs = np.zeros(rows)
    finished = np.zeros(rows, dtype=bool)
    alive = np.arange(rows)  # the original row of each row of the shrinking batch
    writing = passages.begin()
    logits = writing.first()
    for position in range(decoding.max_new_tokens):
        forbidden = ends if position < decoding.min_new_tokens else ()
        tokens, gained = choose_tokens(logits, numbers[alive, position], decoding, forbidden=forbidden)
        going = ~np.isin(tokens, ends)
        running = ~finished[alive]
        log_probs[alive[running]] += gained[running]
        finished[alive[running & ~going]] = True
        for row, new in zip(alive[running & going], tokens[running & going], strict=True):
            sequences[row].append(int(new))
        going &= running
        if not going.any() or position + 1 == decoding.max_new_tokens:
            break
        if going.sum() <= 0.75 * len(alive):
            writing.keep(torch.from_numpy(np.flatnonzero(going)).to(logits.device))
            alive, tokens = alive[going], tokens[going]
        logits = writing.next(torch.from_numpy(tokens).to(logits.device))
    return [Sampled(s, float(p), bool(f)) for s, p, f in zip(sequences, log_probs, finished, strict=True)]


def end_marks(model: PreTrainedModel) -> list[int]:
    """Return the token ids that end a query."""
    end = model.config.eos_token_id
    if end is None:
        raise UnsupportedModelError(
            f"The config of {type(model).__name__} names no eos_token_id, so no query would end. Set it in config.json."
        )
    return [int(mark) for mark in (end if isinstance(end, list | tuple) else [end])]


_BUCKETS = 2048
_DEPTH = 40.0  # scores this many nats or more below the largest share the last bucket


def from_nucleus_unsorted(scores: np.ndarray, log_mass: float, u: float, top_p: float) -> int:
    """Return the token at ``u`` of the distribution function of one row's nucleus, in the order of (score, id).

    Sorting a flat distribution at every step takes longer than the model. Only two positions in the order are needed:
    the end of the nucleus and that of the drawn token. So scores ``(vocabulary,)`` are put into buckets by size, masses
    are summed per bucket, and only the one or two buckets with these positions are sorted. ``log_mass`` is the
    log-sum-exp of the scores.
    """
    depth = scores.max() - scores
    finite = depth < np.inf
    span = min(float(depth[finite].max()), _DEPTH)
    scale = (_BUCKETS - 1) / span if span > 0 else 0.0
    with np.errstate(invalid="ignore"):  # inf * 0: a row whose allowed scores are all equal
        bucket = np.where(finite, np.minimum(depth * scale, _BUCKETS - 1), _BUCKETS).astype(np.int64)
    probabilities = np.exp(scores - log_mass)
    through = np.cumsum(np.bincount(bucket, weights=probabilities, minlength=_BUCKETS)[:_BUCKETS])

    def within(number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of one bucket in order, and the cumulative mass up to and including each of them."""
        ids = np.flatnonzero(bucket == number)
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        before = through[number - 1] if number else 0.0
        return ids, before + np.cumsum(probabilities[ids])

    end = int(np.searchsorted(through, top_p))  # the bucket in which the nucleus reaches top_p
    end = min(end, int(bucket[finite].max()))  # rounding may keep the whole vocabulary from reaching top_p
    ids, cumulated = within(end)
    last = min(int(np.searchsorted(cumulated, top_p)), len(ids) - 1)
    target = u * cumulated[last]
    number = int(np.searchsorted(through[:end], target, side="right"))
    if number < end:
        ids, cumulated = within(number)
        last = len(ids) - 1
    return int(ids[min(int(np.searchsorted(cumulated, target, side="right")), last)])  # u * total may round up to it


_ROWS = 128


@dataclass(frozen=True)
class TargetScores:
    """Log probabilities (nats) of the tokens of some targets; zero after the end of a target."""

    log_probs: Tensor  # under the model, shape ``(targets, tokens)``, float64
    # Under the decoding, same shape: minus infinity for a token outside the nucleus. None if no decoding was given.
    drawn: Tensor | None


@torch.inference_mode()
def target_scores(
    model: PreTrainedModel, passages: Prefilled, targets: Sequence[Sequence[int]], decoding: Decoding | None = None,
    *, line_breaks: Sequence[int] = (),
) -> TargetScores:  # fmt: skip
    """Score each token of each target, given the tokens before it and its passage (teacher forcing).

    ``passages`` has one passage per target, or one for all of them. With ``decoding``, targets are also scored under
    that way of sampling.
    """
    width = max(map(len, targets))
    log_probs = torch.zeros(len(targets), width, dtype=torch.float64)
    drawn = torch.zeros_like(log_probs)
    shared = len(passages) == 1
    for first in range(0, len(targets), _ROWS):
        part = targets[first : first + _ROWS]
        ids = torch.tensor([[*target, *[0] * (width - len(target))] for target in part], device=model.device)
        read = passages.repeated(len(part)) if shared else passages.part(slice(first, first + len(part)))
        logits = read.teacher_forced(ids)
        if not bool(torch.isfinite(logits).all()):
            raise UnsupportedModelError(
                "The generator gives NaN or infinite scores: its weights are broken. Check the run that trained it "
                "(learning rate, noise, precision)."
            )
        for row, target in enumerate(part):
            tokens = torch.tensor(target, device=logits.device)
            own = logits[row, : len(target)]
            chosen = own.gather(1, tokens[:, None])[:, 0].double() - torch.logsumexp(own, 1).double()
            log_probs[first + row, : len(target)] = chosen.cpu()
            if decoding is not None:
                ends = [*end_marks(model), *line_breaks]
                drawn[first + row, : len(target)] = drawn_log_probs(own, tokens, decoding, ends=ends).cpu()
    return TargetScores(log_probs, None if decoding is None else drawn)


def drawn_log_probs(logits: Tensor, tokens: Tensor, decoding: Decoding, *, ends: Sequence[int] = ()) -> Tensor:
    """Return the log probability (nats) with which the sampler draws each token, float64 ``(tokens,)``.

    The probability of a token outside the nucleus, or after ``max_new_tokens``, is 0; so is that of ``ends`` before
    ``min_new_tokens``. ``logits`` are ``(tokens, vocabulary)``, from the first position on.
    """
    scaled = logits.double() / decoding.temperature
    if ends:
        scaled[: decoding.min_new_tokens, list(ends)] = -math.inf
    values, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    if decoding.top_k is not None:
        values[:, decoding.top_k :] = -math.inf
    probabilities = values.softmax(1)
    cumulated = probabilities.cumsum(1)
    size = (cumulated < decoding.top_p).sum(1).clamp(max=values.shape[1] - 1)  # positions before the one reaching it
    place = (ids == tokens[:, None]).int().argmax(1)
    total = cumulated.gather(1, size[:, None])[:, 0]
    found = probabilities.gather(1, place[:, None])[:, 0] / total
    found = torch.where(place <= size, found, 0.0).log()
    found[decoding.max_new_tokens :] = -math.inf
    return found
