"""A public cross-encoder: one logit for a query and a passage, read together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from lit_dpret.encoders.backbones import position_limit, refuse_if_padding_counts, resolve_folder
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.modules.token_scores import in_batches_by_length


class CrossEncoder:
    """Score pairs of texts with a sequence classifier with one output.

    Guarantees:
        - The score of a pair is the model's logit, before any sigmoid, as ``sentence_transformers.CrossEncoder``
          gives it with the identity as activation.
        - It depends on the order, number and lengths of other pairs only through rounding; all are padded on the
          right.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_length: int) -> None:
        self.model, self.tokenizer, self.max_length = model.eval(), tokenizer, max_length

    @classmethod
    def load(cls, source: str | Path, *, max_length: int | None = None, device: str = "cpu") -> CrossEncoder:
        """Load from a folder or a hub name."""
        folder = resolve_folder(source)
        try:
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            raise UnsupportedModelError(f"{source} cannot be loaded as a cross-encoder: {first_line(error)}") from error
        if missing := sorted(report["missing_keys"]):
            raise UnsupportedModelError(
                f"{source} lacks {len(missing)} weights of a cross-encoder, {missing[0]} among them: it is another "
                "kind of model, and its scores would be noise. Choose a trained cross-encoder."
            )
        if model.config.num_labels != 1:
            raise UnsupportedModelError(
                f"{source} has {model.config.num_labels} outputs for a pair; a cross-encoder that scores relevance has "
                "one. Choose such a model."
            )
        if tokenizer.pad_token_id is None:
            raise UnsupportedModelError(f"{source}: its tokenizer has no padding token, so it cannot batch pairs.")
        limits = [position_limit(model.base_model), tokenizer.model_max_length]
        known = min(int(limit) for limit in limits if limit)
        if max_length is None and known > 100_000:
            raise ConfigurationError(f"{source} does not state how long a pair may be. Set max_length.")
        if max_length is not None and max_length > known:
            raise ConfigurationError(
                f"max_length={max_length} is more than the {known} tokens that {source} can read. Lower it."
            )
        refuse_if_padding_counts(
            model, tokenizer("a query", "a passage")["input_ids"], tokenizer.pad_token_id,
            lambda features: model(**features).logits, longest=max_length or known,
        )  # fmt: skip
        return cls(model.to(device), tokenizer, max_length=max_length or known)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights, which detects another model under the same name."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @torch.inference_mode()
    def score(
        self,
        queries: Sequence[str],
        passages: Sequence[str],
        *,
        batch_size: int = 32,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Return the logit of each pair, float64, shape ``(pairs,)``."""
        found = np.zeros(len(queries))
        lengths = [len(q) + len(p) for q, p in zip(queries, passages, strict=True)]
        for rows in in_batches_by_length(lengths, batch_size, progress):
            tokens = self.tokenizer(
                [queries[i] for i in rows], [passages[i] for i in rows], truncation="longest_first",
                max_length=self.max_length, padding=True, padding_side="right", return_tensors="pt",
            )  # fmt: skip
            found[rows] = self.model(**tokens.to(self.model.device)).logits[:, 0].double().cpu().numpy()
        return found
