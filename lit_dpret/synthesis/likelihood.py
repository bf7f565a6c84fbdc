"""How likely given queries are: under the model itself, and under the distribution that is really sampled from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.synthesis.sampler import Decoding, Encoded, end_marks

_ROWS = 128


@dataclass(frozen=True)
class TargetScores:
    """Log probabilities (nats) of the tokens of some targets; zero where a target has ended.

    Attributes:
        log_probs: Under the model, shape ``(targets, tokens)``, float64.
        drawn: Under the decoding, of the same shape: minus infinity where the nucleus leaves a token out. None
            where no decoding was given.
    """

    log_probs: Tensor
    drawn: Tensor | None


@torch.inference_mode()
def target_scores(
    model: PreTrainedModel, encoded: Encoded, targets: Sequence[Sequence[int]], decoding: Decoding | None = None
) -> TargetScores:
    """Teacher forcing: each token of each target, given those before it and its passage.

    Args:
        model: The generator.
        encoded: One passage for every target, or one for all of them.
        targets: Token ids.
        decoding: Also score under this way of sampling.

    Raises:
        UnsupportedModelError: The model gives NaN or infinite scores.
    """
    width = max(map(len, targets))
    log_probs = torch.zeros(len(targets), width, dtype=torch.float64)
    drawn = torch.zeros_like(log_probs)
    start = int(model.config.decoder_start_token_id)
    shared = len(encoded.states) == 1
    for first in range(0, len(targets), _ROWS):
        part = targets[first : first + _ROWS]
        ids = torch.tensor([[start, *target[:-1], *[0] * (width - len(target))] for target in part])
        rows = slice(0, 1) if shared else slice(first, first + len(part))
        states, mask = (one[rows].expand(len(part), *one.shape[1:]) for one in (encoded.states, encoded.mask))
        logits = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=mask,
            decoder_input_ids=ids.to(states.device),
            use_cache=False,
        ).logits
        if not bool(torch.isfinite(logits).all()):
            raise UnsupportedModelError("The generator gives NaN or infinite scores: its weights are broken.")
        for row, target in enumerate(part):
            tokens = torch.tensor(target, device=logits.device)
            own = logits[row, : len(target)]
            chosen = own.gather(1, tokens[:, None])[:, 0].double() - torch.logsumexp(own, 1).double()
            log_probs[first + row, : len(target)] = chosen.cpu()
            if decoding is not None:
                drawn[first + row, : len(target)] = drawn_log_probs(own, tokens, decoding, ends=end_marks(model)).cpu()
    return TargetScores(log_probs, None if decoding is None else drawn)


def drawn_log_probs(logits: Tensor, tokens: Tensor, decoding: Decoding, *, ends: Sequence[int] = ()) -> Tensor:
    """Log probability (nats) with which the sampler draws each token, one after the other from the first position.

    The nucleus is that of `lit_dpret.synthesis.sampler`: after temperature and top-k the smallest set of most probable
    tokens of mass ``top_p``, equal probabilities by id. A token outside it, or after ``max_new_tokens``, is not drawn.

    Args:
        logits: Shape ``(tokens, vocabulary)``.
        tokens: Ids, shape ``(tokens,)``.
        decoding: How is sampled.
        ends: End marks, which are not drawn before ``min_new_tokens``.

    Returns:
        Shape ``(tokens,)``, float64.
    """
    scaled = logits.double() / decoding.temperature
    if ends:
        scaled[: decoding.min_new_tokens, list(ends)] = -math.inf
    values, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    if decoding.top_k is not None:
        values[:, decoding.top_k :] = -math.inf
    probabilities = values.softmax(1)
    cumulated = probabilities.cumsum(1)
    size = (cumulated < decoding.top_p).sum(1).clamp(max=values.shape[1] - 1)  # places before the one that reaches it
    place = (ids == tokens[:, None]).int().argmax(1)
    total = cumulated.gather(1, size[:, None])[:, 0]
    found = probabilities.gather(1, place[:, None])[:, 0] / total
    found = torch.where(place <= size, found, 0.0).log()
    found[decoding.max_new_tokens :] = -math.inf
    return found
