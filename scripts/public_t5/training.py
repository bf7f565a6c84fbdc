"""Train on one core for a fixed time: batches by tokens, bf16 products, a learning rate that ends at zero.

The schedule follows the clock, not the step count, so the run always ends annealed, whatever the speed and load of
the machine. The price is that two runs with one seed are similar, not identical.
A checkpoint holds the elapsed time, so a killed run continues with the time it had left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from lit_dpret.errors import ResumeError
from public_t5.tasks import Example, Mixture

Batch = dict[str, Tensor]
POOL = 1024
MAX_SOURCE, MAX_TARGET = 96, 32
WARMUP, CHECKPOINT_EVERY = 0.03, 180.0


def build_model(*, vocabulary: int, d_model: int, d_ff: int, heads: int, layers: int) -> T5ForConditionalGeneration:
    """Return a T5 v1.0 (ReLU, tied embeddings, relative positions) with equally many encoder and decoder layers."""
    config = T5Config(
        vocab_size=vocabulary, d_model=d_model, d_kv=d_model // heads, d_ff=d_ff, num_layers=layers,
        num_decoder_layers=layers, num_heads=heads, dropout_rate=0.0, feed_forward_proj="relu",
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def collate(sources: Sequence[list[int]], targets: Sequence[list[int]]) -> Batch:
    """Return padded input_ids and attention_mask (rows, source tokens), labels (rows, target tokens; padding -100)."""
    ids = pad_sequence([torch.tensor(source) for source in sources], batch_first=True)
    labels = pad_sequence([torch.tensor(target) for target in targets], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], max_source: int, max_target: int
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each example, truncated to `max_source` and `max_target` tokens, `</s>` kept."""

    def ids(texts: list[str], limit: int) -> list[list[int]]:
        return [list(row) for row in tokenizer(texts, truncation=True, max_length=limit)["input_ids"]]

    return list(
        zip(ids([e.text for e in examples], max_source), ids([e.target for e in examples], max_target), strict=True)
    )


def batches(rows: list[tuple[list[int], list[int]]], tokens: int) -> Iterator[Batch]:
    """Yield rows sorted by length, cut where the padded tokens would pass `tokens`; a target token counts as three.

    (A target token costs that much more because of the product with the whole vocabulary.)
    """
    rows = sorted(rows, key=lambda row: (len(row[0]), len(row[1])))
    at = 0
    while at < len(rows):
        end = at + 1
        tall = 3 * len(rows[at][1])
        while end < len(rows) and (end + 1 - at) * (len(rows[end][0]) + max(tall, 3 * len(rows[end][1]))) <= tokens:
            tall = max(tall, 3 * len(rows[end][1]))
            end += 1
        yield collate([r[0] for r in rows[at:end]], [r[1] for r in rows[at:end]])
        at = end


@dataclass
class Progress:
    """The state that a checkpoint needs besides weights and optimizer."""

    elapsed: float = 0.0
    steps: int = 0
    pools: int = 0
    examples: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Trainer:
    """Train `model` on `mixture` for `seconds` of training time."""

    model: T5ForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    mixture: Mixture
    seconds: float
    checkpoint: Path  # the file to resume from, written every `CHECKPOINT_EVERY` seconds
    seed: int = 0
    # Peak rate for the matrices; that of the embedding, whose entries are of order one in T5, is `embedding_factor`
    # times as high.
    learning_rate: float = 2e-3
    embedding_factor: float = 2.0
    batch_tokens: int = 2048  # padded source tokens in a batch
    on_checkpoint: Callable[[float], None] | None = None  # called after each checkpoint, with the progress in [0, 1]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        table = self.model.shared.weight
        matrices = [p for p in self.model.parameters() if p is not table]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "factor": 1.0}, {"params": [table], "factor": self.embedding_factor}],
            lr=self.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=True,
        )

    def resume(self, settings: dict[str, Any]) -> bool:
        """Load the checkpoint if there is one, else return False.

        Raises:
            ResumeError: The checkpoint was written under other settings.
        """
        if not self.checkpoint.is_file():
            return False
        state = torch.load(self.checkpoint, weights_only=True)
        if state["settings"] != settings:
            raise ResumeError(
                f"{self.checkpoint} was written with {state['settings']}, not {settings}: "
                "use those settings, or choose another --work folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True

    def save(self, settings: dict[str, Any]) -> None:
        """Write the checkpoint; a crash leaves the previous one whole."""
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "settings": settings,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": vars(self.progress),
            },
            partial,
        )
        partial.replace(self.checkpoint)

    def _rate(self, done: float) -> float:
        """Return the learning rate after the share `done` of the time: up to a peak at `WARMUP`, down to 0 at 1."""
        return self.learning_rate * min(done / WARMUP, max(0.0, 1.0 - done) / (1.0 - WARMUP))

    def run(self, settings: dict[str, Any], log: Callable[[str], None]) -> None:
        state = self.progress
        self.model.train()
        saved = time.monotonic()
        spoken = time.monotonic()
        sums: list[float] = []
        while state.elapsed < self.seconds:
            rng = random.Random(f"pool {self.seed} {state.pools}")
            examples = self.mixture.draw(POOL, state.elapsed / self.seconds, rng)
            pool = list(batches(encode(self.tokenizer, examples, MAX_SOURCE, MAX_TARGET), self.batch_tokens))
            rng.shuffle(pool)
            state.pools += 1
            clock = time.monotonic()
            for batch in pool:
                done = state.elapsed / self.seconds
                if done >= 1.0:
                    break
                for group in self.optimizer.param_groups:
                    group["lr"] = self._rate(done) * group["factor"]
                with torch.autocast("cpu", torch.bfloat16):
                    loss = self.model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                sums.append(loss.item())
                state.steps += 1
                state.examples += len(batch["labels"])
                state.source_tokens += int(batch["attention_mask"].sum())
                state.target_tokens += int((batch["labels"] >= 0).sum())
                now = time.monotonic()
                state.elapsed += now - clock
                clock = now
                if now - spoken > 30:
                    mean = sum(sums) / len(sums)
                    tokens = state.source_tokens + state.target_tokens
                    state.losses.append({"elapsed": state.elapsed, "step": state.steps, "loss": mean})
                    log(
                        f"step {state.steps} loss {mean:.3f} rate {self._rate(done):.1e} "
                        f"{tokens / state.elapsed:.0f} tokens/s {state.examples / state.elapsed:.1f} examples/s "
                        f"left {(self.seconds - state.elapsed) / 60:.1f} min"
                    )
                    sums, spoken = [], now
            if time.monotonic() - saved > CHECKPOINT_EVERY or state.elapsed >= self.seconds:
                self.save(settings)
                if self.on_checkpoint is not None:
                    self.on_checkpoint(min(1.0, state.elapsed / self.seconds))
                    self.model.train()
                saved = time.monotonic()


# -- circuits in the initial weights


FREQUENCY, ONE = 0, 1


def log_frequencies(targets: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Return the log of the smoothed count of each token in the targets, standardised: (vocabulary,)."""
    counts = torch.zeros(vocabulary)
    for row in targets:
        counts += torch.bincount(torch.tensor(row), minlength=vocabulary)
    logs = (counts + 0.5).log()
    standard: Tensor = (logs - logs.mean()) / logs.std()
    return standard


@torch.no_grad()
def write_circuits(model: T5ForConditionalGeneration, frequencies: Tensor, *, noise: float = 0.3) -> None:
    """Write circuits into `model` that copy before any training; all other weights are scaled by `noise`.

    A query generator must copy distinctive words from the passage. From random weights a small T5 needs tens of
    thousands of steps to find the attention patterns for that; a budget of one hour on one core allows a few thousand.
    The patterns are therefore written by hand, and training of all weights starts there, in the spirit of mimetic
    initialisation (Trockman and Kolter 2023, section 3). The only data used are token counts.
    """
    config = model.config
    width, heads, size = config.d_model, config.num_heads, config.d_kv
    generator = torch.Generator().manual_seed(1)
    identity = torch.eye(width)
    identity[FREQUENCY, FREQUENCY] = identity[ONE, ONE] = 0.0

    def rotation() -> Tensor:
        basis: Tensor = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:size].clone()
        basis[:, [FREQUENCY, ONE]] = 0.0
        return basis

    # Coordinate 0 of an embedding is the token's log frequency, coordinate 1 is one, the others are random.
    table = model.shared.weight
    table[:, FREQUENCY] = frequencies
    table[:, ONE] = 1.0

    # Encoder head 0 looks one token back and adds what it sees, rotated, to the token's own stream.
    back, beside = rotation(), rotation()
    look = model.encoder.block[0].layer[0].SelfAttention
    look.relative_attention_bias.weight[1, 0] = 6.0
    look.q.weight[:size] *= noise
    look.k.weight[:size] *= noise
    look.v.weight[:size] = back
    look.o.weight[:, :size] = beside.T * (width / size) ** 0.5

    # Cross-attention of the last decoder block: head 0 looks for the position whose previous token is the one just
    # written (so copies continue), the other heads look at rare tokens. What they see is passed on unchanged and raises
    # its own probability, because the embedding is tied to the head.
    cross = model.decoder.block[-1].layer[1].EncDecAttention
    cross.v.weight.mul_(noise).add_(identity[: heads * size])
    cross.o.weight.mul_(noise).add_(identity[:, : heads * size])
    gain = (0.15) ** 0.5
    cross.q.weight[:size] = back * gain * (width / size) ** 0.25
    cross.k.weight[:size] = beside * gain * (width / size) ** 0.25
    for head in range(1, heads):
        cross.q.weight[head * size] = 0.0
        cross.k.weight[head * size] = 0.0
        cross.q.weight[head * size, ONE] = 0.5
        cross.k.weight[head * size, FREQUENCY] = -(0.5 + 0.25 * head)

    # The first decoder block removes the current token from the stream; otherwise a tied T5 repeats it.
    forget = model.decoder.block[0].layer[-1].DenseReluDense
    forget.wi.weight.mul_(noise)
    forget.wo.weight.mul_(noise)
    forget.wi.weight[: 2 * width] = torch.cat([identity, -identity])
    forget.wo.weight[:, : 2 * width] = -0.8 * torch.cat([identity, -identity], dim=1)

    # The last block adds a constant to coordinate 0; otherwise a T5, which has no biases, cannot represent unigrams.
    constant = model.decoder.block[-1].layer[-1].DenseReluDense
    constant.wi.weight[0] = 0.0
    constant.wi.weight[0, ONE] = 1.0
    constant.wo.weight[:, 0] = 0.0
    constant.wo.weight[FREQUENCY, 0] = 1.0
    model.decoder.final_layer_norm.weight[FREQUENCY] = 3.0
