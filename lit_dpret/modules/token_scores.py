"""Log probability of each token of a query under a generator, given its passage and the previous tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.modules.families import DecoderOnly, family_of
from lit_dpret.modules.generator_folder import PASSAGE, GeneratorContract, TextCodec, is_generator, load_generator
from lit_dpret.modules.language_models import load_language_model, load_tokenizer

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Log probabilities of the tokens of some queries, one row for each, padded with zeros."""

    log_probs: Floats  # in nats, shape ``(queries, tokens)``; the end mark is a query's last token
    mask: NDArray[np.bool_]  # which entries are tokens; of the same shape
    tokens: NDArray[np.int64]  # their ids, -100 for padding; of the same shape
    # The expected log probability of a token drawn by the model itself, of the same shape; None if it was not
    # requested.
    means: Floats | None = None
    deviations: Floats | None = None  # its standard deviation, likewise

    def __repr__(self) -> str:
        return f"TokenScores(queries={len(self.mask)}, tokens={int(self.mask.sum())})"

    def sums(self) -> Floats:
        """Return the log probability of each query, shape ``(queries,)``."""
        return np.asarray(np.where(self.mask, self.log_probs, 0.0).sum(axis=1))

    def per_token(self) -> Floats:
        """Return the mean log probability of a query's tokens, shape ``(queries,)``."""
        return np.asarray(self.sums() / self.mask.sum(axis=1))


class TokenScorer:
    """Compute, by teacher forcing, the probability under the model of each token of a given query.

    Args:
        model: A language model, which is put into evaluation mode.
        codec: Turns passages and queries into tokens.
    """

    def __init__(self, model: Any, codec: TextCodec) -> None:
        self.model, self.codec, self._family = model.eval(), codec, family_of(model.config)

    @classmethod
    def load(
        cls, source: str | Path, *, prompt: str = "", contract: GeneratorContract | None = None, device: str = "cpu"
    ) -> TokenScorer:
        """Load the generator of a folder, with its own contract; or another model, with ``contract`` or ``prompt``."""
        if is_generator(source):
            generator = load_generator(source)
            return cls(generator.model.to(torch.device(device)), generator.codec)
        known = GeneratorContract(prompt=prompt) if contract is None else replace(contract, virtual_ids=())
        model = load_language_model(source, knob="")
        continues = not model.config.is_encoder_decoder
        if continues and PASSAGE not in known.prompt:
            known = replace(known, prompt=DecoderOnly.default_prompt)
        codec = TextCodec(load_tokenizer(source, knob=""), known, continues=continues)
        return cls(model.to(torch.device(device)), codec)

    @torch.inference_mode()
    def score(
        self,
        queries: Sequence[str],
        passages: Sequence[str],
        *,
        moments: bool = False,
        batch_size: int = 32,
        progress: Callable[[int, int], None] | None = None,
    ) -> TokenScores:
        """Return log probabilities of each query's tokens, given the passage at the same position.

        Guarantees:
            - A query's row depends on the query and its passage alone, up to the rounding of the model.
            - Logits are normalised in float64, whatever type the model computes in.

        Args:
            queries: Texts; one that is too long is cut as in training.
            passages: As many texts.
            moments: Also compute the mean and the deviation under the model's own next-token distribution.
            batch_size: Pairs per forward pass.
            progress: Called with (pairs done, total pairs).
        """
        if len(queries) != len(passages) or not queries:
            raise DataError(
                f"{len(queries)} queries and {len(passages)} passages: give one passage for each query, and at least "
                "one query."
            )
        inputs, labels = self.codec.passages(list(passages)), self.codec.queries(list(queries))
        shape = (len(queries), max(map(len, labels)))
        found = [np.zeros(shape) for _ in range(3 if moments else 1)]
        for rows in in_batches_by_length([len(ids) for ids in inputs], batch_size, progress):
            for row, logits in zip(rows, self._logits(inputs, labels, rows), strict=True):
                target = torch.tensor(labels[row], device=logits.device)
                wide = logits[: len(target)].double()
                norm = wide.logsumexp(dim=1)
                parts = [wide.gather(1, target[:, None])[:, 0] - norm]
                if moments:
                    log_probs = wide - norm[:, None]
                    mean = (log_probs.exp() * log_probs).nan_to_num().sum(dim=1)
                    square = (log_probs.exp() * log_probs.square()).nan_to_num().sum(dim=1)
                    parts += [mean, (square - mean.square()).clamp(min=0).sqrt()]
                for values, part in zip(found, parts, strict=True):
                    values[row, : len(target)] = part.cpu().numpy()
        if np.isnan(found[0]).any():
            raise UnsupportedModelError(
                "The model gives NaN for a query: its weights are broken. Check the run that trained it (learning "
                "rate, noise, precision)."
            )
        tokens = np.full(shape, -100, dtype=np.int64)
        for row, ids in enumerate(labels):
            tokens[row, : len(ids)] = ids
        return TokenScores(found[0], tokens >= 0, tokens, *found[1:])

    def _logits(self, inputs: list[list[int]], labels: list[list[int]], rows: list[int]) -> Any:
        pad = int(self.codec.tokenizer.pad_token_id)
        features = self._family.collate([inputs[i] for i in rows], [labels[i] for i in rows], pad)
        return self._family.logits(self.model, {name: each.to(self.model.device) for name, each in features.items()})


def token_scores(
    folder: str | Path, queries: Sequence[str], passages: Sequence[str], *, device: str = "cpu", **settings: Any
) -> TokenScores:
    """Apply `TokenScorer.score` with the generator in ``folder``, or the model of that name."""
    return TokenScorer.load(folder, device=device).score(queries, passages, **settings)


def in_batches_by_length(
    lengths: Sequence[int], batch_size: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[list[int]]:
    """Yield indices of all texts by length, longest first: little padding, and memory errors come first.

    ``progress`` is called with (texts done, total texts) after each batch.

    Example:
        >>> list(in_batches_by_length([3, 9, 5], 2))
        [[1, 2], [0]]
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size={batch_size} must be at least 1.")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        yield batch
        if progress is not None:
            progress(start + len(batch), len(order))
