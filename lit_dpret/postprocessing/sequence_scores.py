"""How likely a sequence-to-sequence model finds a query, given its passage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lit_dpret.modules.generator_folder import CONTRACT_NAME, GeneratorContract, TextCodec, load_generator
from lit_dpret.modules.model_loading import load_seq2seq, load_tokenizer
from lit_dpret.postprocessing.batches import in_batches_by_length

_NO_LABEL = -100


class SequenceScorer:
    """Log probabilities of queries by teacher forcing.

    Args:
        model: A sequence-to-sequence model, which is put into evaluation mode.
        codec: Turns passages and queries into tokens.
    """

    def __init__(self, model: Any, codec: TextCodec) -> None:
        self.model, self.codec = model.eval(), codec

    @classmethod
    def load(cls, source: str | Path, *, prompt: str = "", device: str = "cpu") -> SequenceScorer:
        """The generator of a folder, with its own prompt and lengths; or another model, with ``prompt``.

        Raises:
            UnsupportedModelError: There is no such model.
        """
        if (Path(str(source)) / CONTRACT_NAME).is_file():
            generator = load_generator(source)
            return cls(generator.model.to(torch.device(device)), generator.codec)
        codec = TextCodec(load_tokenizer(source), GeneratorContract(prompt=prompt))
        return cls(load_seq2seq(source).to(torch.device(device)), codec)

    @torch.inference_mode()
    def mean_log_probs(
        self,
        queries: Sequence[str],
        passages: Sequence[str],
        *,
        batch_size: int = 32,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Mean over a query's tokens, its end mark included, of their log probability in nats; ``(pairs,)``."""
        inputs, labels = self.codec.passages(list(passages)), self.codec.queries(list(queries))
        found = np.zeros(len(queries))
        for rows in in_batches_by_length([len(ids) for ids in inputs], batch_size, progress):
            target = _padded([labels[i] for i in rows], _NO_LABEL)
            source = _padded([inputs[i] for i in rows], _NO_LABEL)
            mask = source != _NO_LABEL
            logits = self.model(
                input_ids=source.masked_fill(~mask, int(self.model.config.pad_token_id)).to(self.model.device),
                attention_mask=mask.long().to(self.model.device),
                labels=target.to(self.model.device),
            ).logits
            losses = F.cross_entropy(logits.double().flatten(0, 1).cpu(), target.flatten(), reduction="none")
            counts = (target != _NO_LABEL).sum(1)
            found[rows] = (-losses.view(target.shape).sum(1) / counts).numpy()
        return found


def _padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*ids, *[filler] * (width - len(ids))] for ids in rows])
