"""Let a generator read each passage once for all of its queries.

An encoder-decoder model keeps its encoder's hidden states. A decoder-only model keeps the key-value cache of the
prompts, padded on the left, so that every query begins at the same position. From either, `begin` writes new queries
and `teacher_forced` reads given ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from lit_dpret.modules.families import arguments_of, only_at, padded, with_cache

ENCODED_AT_ONCE = 8  # rows that the encoder processes together on a CPU
#: A common prefix of at least this many tokens, such as few-shot examples, is read once for all prompts of a group.
SHARED_FROM = 32


@torch.inference_mode()
def prefill(model: PreTrainedModel, passages: Sequence[Sequence[int]]) -> Prefilled:
    """Read passages once; their draws share the result and do not change it."""
    return _encoded(model, passages) if model.config.is_encoder_decoder else _cached(model, passages)


class _Encoded:
    """Passages after the encoder: hidden states ``(rows, tokens, dim)`` and mask ``(rows, tokens)``.

    Like `_Cached`, it provides ``part`` of the passages, a single one ``repeated``, and ``teacher_forced``, the logits
    of each token of given queries. ``begin`` begins a query for each: ``first`` and ``next`` return logits ``(rows,
    vocabulary)``, and ``keep`` continues with only these rows.
    """

    def __init__(self, model: PreTrainedModel, states: Tensor, mask: Tensor) -> None:
        self._model: Any = model
        self.states, self.mask = states, mask

    def __len__(self) -> int:
        return len(self.states)

    def part(self, rows: slice) -> _Encoded:
        return _Encoded(self._model, self.states[rows], self.mask[rows])

    def repeated(self, count: int) -> _Encoded:
        return _Encoded(self._model, self.states.expand(count, -1, -1), self.mask.expand(count, -1))

    def begin(self) -> _EncodedDecoder:
        return _EncodedDecoder(self._model, self.states, self.mask)

    def teacher_forced(self, targets: Tensor) -> Tensor:
        start = int(self._model.config.decoder_start_token_id)
        logits: Tensor = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
            attention_mask=self.mask,
            decoder_input_ids=functional.pad(targets[:, :-1], (1, 0), value=start),
            use_cache=False,
        ).logits
        return logits


def _encoded(model: PreTrainedModel, passages: Sequence[Sequence[int]]) -> _Encoded:
    """Encode passages, on a CPU a few rows at a time: padded to their own longest, with attention that fits a cache."""
    device = model.device
    at_once = ENCODED_AT_ONCE if device.type == "cpu" else len(passages)
    width, pad = max(len(ids) for ids in passages), int(model.config.pad_token_id)
    mask = padded([[1] * len(ids) for ids in passages], 0).to(device)
    parts = []
    for start in range(0, len(passages), at_once):
        tokens = padded(passages[start : start + at_once], pad).to(device)
        longest = tokens.shape[1]
        shown = mask[start : start + at_once, :longest]
        states = model.get_encoder()(input_ids=tokens, attention_mask=shown).last_hidden_state
        parts.append(functional.pad(states, (0, 0, 0, width - longest)))
    return _Encoded(model, torch.cat(parts), mask)


class _EncodedDecoder:
    def __init__(self, model: Any, states: Tensor, mask: Tensor) -> None:
        self._model, self._states, self._mask = model, states, mask
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def first(self) -> Tensor:
        start = int(self._model.config.decoder_start_token_id)
        return self.next(torch.full((len(self._states),), start, dtype=torch.long, device=self._states.device))

    def next(self, tokens: Tensor) -> Tensor:
        logits: Tensor = with_cache(
            self._model,
            self._cache,
            encoder_outputs=BaseModelOutput(last_hidden_state=self._states),
            attention_mask=self._mask,
            decoder_input_ids=tokens[:, None],
        ).logits
        return logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self._states, self._mask = self._states[rows], self._mask[rows]
        self._cache.batch_select_indices(rows)


class _Cached:
    """Prompts in a key-value cache, their mask ``(rows, tokens)``, and the logits of the token after each prompt."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, logits: Tensor) -> None:
        self._model, self._cache = model, cache
        self.mask, self.logits = mask, logits

    def __len__(self) -> int:
        return len(self.logits)

    def part(self, rows: slice) -> _Cached:
        return self._chosen(torch.arange(len(self), device=self.mask.device)[rows])

    def repeated(self, count: int) -> _Cached:
        return self._chosen(torch.zeros(count, dtype=torch.long, device=self.mask.device))

    def _chosen(self, rows: Tensor) -> _Cached:
        cache = _shared(self._cache)
        cache.batch_select_indices(rows)
        return _Cached(self._model, cache, self.mask[rows], self.logits[rows])

    def begin(self) -> _CachedDecoder:
        return _CachedDecoder(self._model, _shared(self._cache), self.mask, self.logits)

    def teacher_forced(self, targets: Tensor) -> Tensor:
        if targets.shape[1] == 1:
            return self.logits[:, None]
        rest, _ = _continued(self._model, _shared(self._cache), self.mask, targets[:, :-1])
        return torch.cat([self.logits[:, None], rest], dim=1)


def _cached(model: PreTrainedModel, passages: Sequence[Sequence[int]]) -> _Cached:
    """Read the prompts padded on the right, where no real token sees padding, and move the padding to the left."""
    lengths = torch.tensor([len(ids) for ids in passages], device=model.device)
    ids = padded(passages, 0).to(model.device)
    width, shared = ids.shape[1], _shared_tokens(passages)
    cache = DynamicCache()
    if shared:
        with only_at(model.get_output_embeddings(), lengths[:1, None] * 0):
            with_cache(model, cache, input_ids=ids[:1, :shared])
        cache.batch_repeat_interleave(len(ids))
    with only_at(model.get_output_embeddings(), lengths[:, None] - 1 - shared):
        output = with_cache(model, cache, input_ids=ids[:, shared:])
    source = torch.arange(width, device=model.device) - (width - lengths)[:, None]
    mask = (source >= 0).long()
    for layer in cache.layers:
        places = source.clamp(min=0)[:, None, :, None]
        for name in ("keys", "values"):
            states = getattr(layer, name)
            moved = states.gather(2, places.expand(-1, states.shape[1], -1, states.shape[3]))
            setattr(layer, name, moved)
    return _Cached(model, cache, mask, output.logits[:, -1])


def _shared_tokens(passages: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all prompts share, leaving at least one of each; 0 if it is not worth it."""
    first, last = min(map(list, passages)), max(map(list, passages))
    most = min(len(ids) for ids in passages) - 1
    same = next((place for place in range(most) if first[place] != last[place]), most)
    return same if same >= SHARED_FROM and len(passages) > 1 else 0


class _CachedDecoder:
    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, logits: Tensor) -> None:
        self._model, self._cache, self._mask, self._first = model, cache, mask, logits

    def first(self) -> Tensor:
        return self._first

    def next(self, tokens: Tensor) -> Tensor:
        logits, self._mask = _continued(self._model, self._cache, self._mask, tokens[:, None])
        return logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)


def _continued(model: PreTrainedModel, cache: DynamicCache, mask: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Read tokens that follow the cache; return their logits and the longer mask."""
    places = mask.sum(1, keepdim=True) + torch.arange(ids.shape[1], device=ids.device)
    longer = functional.pad(mask, (0, ids.shape[1]), value=1)
    told = {"position_ids": places} if "position_ids" in arguments_of(model) else {}
    return with_cache(model, cache, input_ids=ids, attention_mask=longer, **told).logits, longer


def _shared(cache: DynamicCache) -> DynamicCache:
    """Return a cache with the same keys and values, which a model may extend: it never writes into them."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    return found


Prefilled: TypeAlias = _Encoded | _Cached
