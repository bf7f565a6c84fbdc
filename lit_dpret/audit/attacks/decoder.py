"""A language model conditioned on an embedding before the first word.

Paper 004 (PDD-AS2, section 3.6) feeds sentence embeddings to GPT-2 as keys and values of a few positions before the
text; ``embedding`` turns them into word vectors of those positions instead. The baseline is the same network without an
embedding, or with that of another text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GPT2Config, GPT2LMHeadModel

from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.evaluation_mode import evaluation_mode

How = Literal["key_value", "embedding"]
Progress = Callable[[int, int], None]
SMALL = {"n_embd": 192, "n_layer": 3, "n_head": 4}


class Words:
    """Texts as token ids with an end token, by any Hugging Face tokenizer.

    ``max_tokens`` includes the end mark. With ``only_of``, the vocabulary of a new model is the tokens of these texts,
    the end mark, and one token for all others, which makes it many times faster.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, *, only_of: Sequence[str] | None = None) -> None:
        marks = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id)
        end = next((mark for mark in marks if mark is not None), None)
        if end is None:
            raise UnsupportedModelError("The tokenizer has no end, separator or padding token, so no text would end.")
        if max_tokens < 2:
            raise ConfigurationError(f"task.max_tokens={max_tokens} leaves no room for a word. Give at least 2.")
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self._own: dict[int, int] | None = None  # from the tokenizer's ids to ours: 0 is the end mark, 1 is unknown
        if only_of is not None:
            seen = sorted({token for ids in self._tokens(only_of) for token in ids})
            self._own = {token: place for place, token in enumerate(seen, start=2)}
            self._back = {place: token for token, place in self._own.items()}
        self.end = int(end) if self._own is None else 0
        self.size = len(tokenizer) if self._own is None else 2 + len(self._own)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids without special tokens, truncated, followed by the end token."""
        found, own = self._tokens(texts), self._own
        if own is not None:
            found = [[own.get(token, 1) for token in ids] for ids in found]
        return [[*ids[: self.max_tokens - 1], self.end] for ids in found]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; unknown tokens are omitted."""
        tokens = list(ids) if self._own is None else [self._back[token] for token in ids if token in self._back]
        return " ".join(str(self.tokenizer.decode(tokens, skip_special_tokens=True)).split())

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found


class PrefixDecoder(nn.Module):
    """A causal language model conditioned through one linear map from embeddings.

    Guarantees:
        - A token's loss depends only on the row's embedding and on the tokens before it.
        - Without embeddings the language model sees only the text.

    Args:
        language_model: GPT-2, or another causal model; for ``key_value`` one with as many key as query heads.
        dim: The width of the embeddings; None for a decoder without embeddings.
        end: The end mark, which is also put before the first word.
        how: Whether the map produces keys and values, or word vectors.
        places: Positions of the prefix.
    """

    def __init__(
        self, language_model: Any, *, dim: int | None, end: int, how: How = "key_value", places: int = 1
    ) -> None:
        super().__init__()
        if how not in get_args(How) or places < 1:
            raise ConfigurationError(
                f"task.how={how!r} must be one of {', '.join(get_args(How))}, and task.places={places} at least 1."
            )
        config = language_model.config
        self.language_model, self.end, self.how, self.places = language_model, end, how, places
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self.heads = int(config.num_attention_heads)
        self.map: nn.Linear | None = None
        if dim is not None:
            per_place = 2 * self.layers * self.width if how == "key_value" else self.width
            self.map = nn.Linear(dim, places * per_place)

    def forward(self, tokens: Tensor, mask: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return the cross entropy of each token in nats, zero where ``mask`` is false, shape ``(rows, tokens)``.

        ``tokens`` and ``mask`` have that shape, ``embeddings`` has ``(rows, dim)``; it is None exactly if there is no
        map.
        """
        before = torch.cat([tokens.new_full((len(tokens), 1), self.end), tokens[:, :-1]], dim=1)
        logits = self._logits(before, embeddings)
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
        return losses.view(tokens.shape) * mask

    @torch.inference_mode()
    def write(self, embeddings: Tensor, *, max_tokens: int) -> list[list[int]]:
        """Write the likeliest tokens from the embedding alone, until every row has ended."""
        with evaluation_mode(self):
            written = torch.full((len(embeddings), 1), self.end, device=embeddings.device)
            ended = torch.zeros(len(embeddings), dtype=torch.bool, device=embeddings.device)
            for _ in range(max_tokens):
                following = self._logits(written, embeddings)[:, -1].argmax(dim=1).masked_fill(ended, self.end)
                written = torch.cat([written, following[:, None]], dim=1)
                ended |= following == self.end
                if bool(ended.all()):
                    break
        rows: list[list[int]] = written[:, 1:].tolist()
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]

    def _logits(self, before: Tensor, embeddings: Tensor | None) -> Tensor:
        if embeddings is None or self.map is None:
            plain: Tensor = self.language_model(input_ids=before, use_cache=False).logits
            return plain
        prefix = self.map(embeddings)
        if self.how == "embedding":
            words = self.language_model.get_input_embeddings()(before)
            vectors = torch.cat([prefix.view(len(before), self.places, self.width), words], dim=1)
            both: Tensor = self.language_model(inputs_embeds=vectors, use_cache=False).logits
            return both[:, self.places :]
        # From (rows, places, layers, key or value, heads, head dim) to (rows, heads, places, head dim) for each layer.
        shape = (len(before), self.places, self.layers, 2, self.heads, self.width // self.heads)
        pairs = prefix.view(shape).permute(2, 3, 0, 4, 1, 5)
        cache = DynamicCache(config=self.language_model.config)
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys.contiguous(), values.contiguous(), layer)
        seen: Tensor = self.language_model(input_ids=before, past_key_values=cache, use_cache=True).logits
        return seen


def new_language_model(vocabulary: int, *, max_tokens: int, places: int, seed: int, **shape: Any) -> GPT2LMHeadModel:
    """Build a small GPT-2 with random weights, without dropout; ``shape`` overrides fields of its config."""
    torch.manual_seed(seed)
    still = {"bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings = {"vocab_size": vocabulary, "n_positions": max_tokens + places + 1, **still, **SMALL, **shape}
    return GPT2LMHeadModel(GPT2Config(**settings))


def load_language_model(folder: str | Path) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a local folder."""
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"task.language_model={folder} is not a folder of a causal language model with its tokenizer "
            f"({first_line(error)}). Pass one, or null for a small new GPT-2."
        ) from error


def fit_decoder(
    decoder: PrefixDecoder,
    ids: Sequence[Sequence[int]],
    embeddings: Tensor | None,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    progress: Progress | None = None,
) -> list[float]:
    """Train the whole decoder by Adam on the mean token loss; batches depend only on ``seed``, ``lr`` falls to zero.

    Returns:
        The mean token loss of each step's batch, in nats, before its update.
    """
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    decoder.train()
    seen: list[float] = []
    for step in range(steps):
        rows = torch.randperm(len(ids), generator=generator)[:batch_size]
        tokens, mask = (part.to(device) for part in padded([ids[row] for row in rows.tolist()], decoder.end))
        given = None if embeddings is None else embeddings[rows].to(device)
        losses = decoder(tokens, mask, given)
        optimizer.zero_grad()
        mean = losses.sum() / mask.sum()
        seen.append(float(mean.detach()))
        mean.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps)
    return seen


@torch.inference_mode()
def losses_of(
    decoder: PrefixDecoder, ids: Sequence[Sequence[int]], embeddings: Tensor | None, *, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return the summed loss in nats and the number of tokens of each text, both ``(texts,)`` in float64."""
    device = next(decoder.parameters()).device
    sums, counts = [], []
    with evaluation_mode(decoder):
        for start in range(0, len(ids), batch_size):
            tokens, mask = (part.to(device) for part in padded(ids[start : start + batch_size], decoder.end))
            given = None if embeddings is None else embeddings[start : start + batch_size].to(device)
            sums.append(decoder(tokens, mask, given).double().sum(dim=1).cpu())
            counts.append(mask.double().sum(dim=1).cpu())
    return torch.cat(sums), torch.cat(counts)


def padded(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Return token ids padded at the end, and a mask of the tokens, both ``(rows, longest)``."""
    width = max(map(len, rows))
    tokens = torch.tensor([[*ids, *[filler] * (width - len(ids))] for ids in rows])
    return tokens, torch.tensor([[place < len(ids) for place in range(width)] for ids in rows])
