"""The two families of language models that write queries: encoder-decoder and decoder-only.

This module has all that training needs to know of a family: how a passage and its query become a row of tensors, and
which logits belong to the query. Tokens are padded on the right, so in a decoder-only model no real token follows
padding, and no mask is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lit_dpret.errors import UnsupportedModelError

IGNORED = -100
Features = dict[str, Tensor]


class EncoderDecoder:
    """T5, BART and similar models: the encoder reads the passage, the decoder writes the query.

    In both families the ``logits`` of a row depend, up to rounding, on that row alone: not on other rows, nor on how
    far the batch was padded.
    """

    default_prompt = "generate_query: "

    def collate(self, passages: Sequence[Sequence[int]], queries: Sequence[Sequence[int]], pad: int) -> Features:
        """Return the features of rows, padded to the longest; ``labels`` of shape ``(rows, query tokens)``."""
        return {
            "input_ids": padded(passages, pad),
            "attention_mask": padded([[1] * len(ids) for ids in passages], 0),
            "labels": padded(queries, IGNORED),
        }

    def place(
        self, features: Features, places: Sequence[int], rows: int, *, source: int, target: int, pad: int
    ) -> Features:
        """Return the features as ``rows`` rows, with the given ones at ``places`` and texts padded to full length.

        ``source`` and ``target`` are the maximum numbers of tokens of a passage and of a query.
        """
        attended = placed(features["attention_mask"], places, (rows, source), 0)
        attended[:, 0] = 1  # also in filled-in rows: attention to nothing is undefined
        # An additive mask: for a mask of zeros and ones, transformers would check whether all are ones.
        added = (1.0 - attended.float()) * torch.finfo(torch.float32).min
        return {
            "input_ids": placed(features["input_ids"], places, (rows, source), pad),
            "attention_mask": added[:, None, None, :],
            "labels": placed(features["labels"], places, (rows, target), IGNORED),
        }

    def logits(self, model: Any, features: Features) -> Tensor:
        """Return the logits of the query's tokens, ``(rows, query tokens, vocabulary)``."""
        found: Tensor = model(
            input_ids=features["input_ids"],
            attention_mask=features["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(features["labels"]),
            use_cache=False,
        ).logits
        return found


class DecoderOnly:
    """GPT-2, Llama, Qwen and similar models: one sequence, the prompt with the passage and then the query.

    ``starts`` of shape ``(rows,)`` is the index of a passage's last token, which predicts the query's first.
    """

    default_prompt = "Passage: {passage}\nQuestion: "

    def collate(self, passages: Sequence[Sequence[int]], queries: Sequence[Sequence[int]], pad: int) -> Features:
        whole = [[*passage, *query[:-1]] for passage, query in zip(passages, queries, strict=True)]
        return {
            "input_ids": padded(whole, pad),
            "labels": padded(queries, IGNORED),
            "starts": torch.tensor([len(ids) - 1 for ids in passages]),
        }

    def place(
        self, features: Features, places: Sequence[int], rows: int, *, source: int, target: int, pad: int
    ) -> Features:
        starts = features["starts"].new_zeros(rows)
        starts[list(places)] = features["starts"]
        return {
            "input_ids": placed(features["input_ids"], places, (rows, source + target - 1), pad),
            "labels": placed(features["labels"], places, (rows, target), IGNORED),
            "starts": starts,
        }

    def logits(self, model: Any, features: Features) -> Tensor:
        labels, ids = features["labels"], features["input_ids"]
        places = features["starts"][:, None] + torch.arange(labels.shape[1], device=ids.device)
        # After a row's query comes padding, whose labels are ignored.
        with only_at(model.get_output_embeddings(), places.clamp(max=ids.shape[1] - 1)):
            found: Tensor = model(input_ids=ids, use_cache=False).logits
        if found.shape[:2] != labels.shape:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not compute its logits by calling its output layer, so they cannot be "
                "computed for the query alone. Choose a model such as GPT-2, Llama, Qwen or Gemma."
            )
        return found


Family: TypeAlias = EncoderDecoder | DecoderOnly


@contextmanager
def only_at(head: nn.Module, places: Tensor) -> Iterator[None]:
    """Restrict the output layer to the hidden states at ``places``, ``(rows, query tokens)``.

    Logits of a passage's tokens would take most of a step's memory, and are never used.
    """

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, *others = inputs
        return (states.gather(1, places[..., None].expand(-1, -1, states.shape[-1])), *others)

    handle = head.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model with this config."""
    return EncoderDecoder() if config.is_encoder_decoder else DecoderOnly()


def require_writer(model: PreTrainedModel, source: object) -> None:
    """Refuse a model that cannot generate token by token, by trying it on four tokens."""
    ids = torch.tensor([[3, 5, 7, 3], [3, 5, 7, 5]]) % int(model.get_input_embeddings().num_embeddings)
    cache, was_training = DynamicCache(), model.training
    try:
        with torch.inference_mode():
            one, other = with_cache(model.eval(), cache, input_ids=ids.to(model.device)).logits[:, :-1].double()
    except (IndexError, AttributeError, TypeError, ValueError):  # models with another kind of cache fail in many ways
        cache.layers.clear()
    finally:
        model.train(was_training)
    if not cache.layers or not all(type(layer) is DynamicLayer for layer in cache.layers):
        raise UnsupportedModelError(
            f"{source} is a {type(model).__name__}, which has no key-value cache. Choose a T5, or a decoder-only model "
            "such as Llama, Qwen, Gemma or GPT-2."
        )
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max())):
        raise UnsupportedModelError(
            f"{source} is a {type(model).__name__} in which a token sees later ones: it fills gaps, and cannot write. "
            "Choose a T5, or a decoder-only model such as Llama, Qwen, Gemma or GPT-2."
        )


def with_cache(model: PreTrainedModel, cache: Cache, **inputs: Any) -> Any:
    """Run a model that reads and extends ``cache``; transformers 5 renamed the argument."""
    name = "cache" if "cache" in arguments_of(model) else "past_key_values"
    return model(**inputs, **{name: cache}, use_cache=True)


def arguments_of(model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the arguments of the model's forward method, or of its base model's if it has adapters."""
    plain = getattr(model, "get_base_model", lambda: model)()
    return inspect.signature(type(plain).forward).parameters


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Return the rows padded at the end, shape ``(rows, longest)``, int64.

    Example:
        >>> padded([[5, 6], [7]], 0).tolist()
        [[5, 6], [7, 0]]
    """
    width = max(len(ids) for ids in rows)
    return torch.tensor([[*ids, *[filler] * (width - len(ids))] for ids in rows], dtype=torch.long)


def placed(tensor: Tensor, places: Sequence[int], shape: tuple[int, int], filler: int) -> Tensor:
    """Return a tensor of ``shape`` with the rows of ``tensor`` at ``places``, and ``filler`` elsewhere.

    Example:
        >>> placed(torch.tensor([[5, 6], [7, 0]]), [0, 2], (3, 3), 0).tolist()
        [[5, 6, 0], [0, 0, 0], [7, 0, 0]]
    """
    found = tensor.new_full(shape, filler)
    found[list(places), : tensor.shape[1]] = tensor
    return found
