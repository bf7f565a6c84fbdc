"""A T5 that copies before it has learned anything: circuits written into the initial weights.

What a query generator must do is to take telling words out of the passage. From random weights a small
T5 needs tens of thousands of steps to find the attention patterns for that; a budget of one hour of one core
has a few thousand. So the patterns are written in by hand and training starts from there, on all weights, in
the spirit of mimetic initialisation (Trockman and Kolter 2023, section 3). No data is involved but token counts:

* coordinate 0 of an embedding is the token's log frequency, coordinate 1 is one, the others are random;
* encoder head 0 looks one token back and writes what it sees, rotated, beside the token itself;
* cross-attention of the last decoder block: head 0 looks for the place whose *previous* token is the one just
  written (so copies go on), the other heads look at rare tokens; what they see is passed on as it is, and raises
  its own probability, as the embedding is tied to the head;
* the feed-forward of the first decoder block takes the current token back out of the stream (else a tied T5 repeats
  it), that of the last adds a constant to coordinate 0 (else a T5, which has no biases, does not know unigrams).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

FREQUENCY, ONE = 0, 1


def log_frequencies(targets: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Log of the smoothed count of each token in the targets, standardised: (vocabulary,)."""
    counts = torch.zeros(vocabulary)
    for row in targets:
        counts += torch.bincount(torch.tensor(row), minlength=vocabulary)
    logs = (counts + 0.5).log()
    standard: Tensor = (logs - logs.mean()) / logs.std()
    return standard


@torch.no_grad()
def write_circuits(model: T5ForConditionalGeneration, frequencies: Tensor, *, noise: float = 0.3) -> None:
    """Write the circuits into `model`; what they do not use keeps `noise` times its random start."""
    config = model.config
    width, heads, size = config.d_model, config.num_heads, config.d_kv
    generator = torch.Generator().manual_seed(1)
    identity = torch.eye(width)
    identity[FREQUENCY, FREQUENCY] = identity[ONE, ONE] = 0.0

    def rotation() -> Tensor:
        basis: Tensor = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:size].clone()
        basis[:, [FREQUENCY, ONE]] = 0.0
        return basis

    table = model.shared.weight
    table[:, FREQUENCY] = frequencies
    table[:, ONE] = 1.0

    back, beside = rotation(), rotation()
    look = model.encoder.block[0].layer[0].SelfAttention
    look.relative_attention_bias.weight[1, 0] = 6.0
    look.q.weight[:size] *= noise
    look.k.weight[:size] *= noise
    look.v.weight[:size] = back
    look.o.weight[:, :size] = beside.T * (width / size) ** 0.5

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

    forget = model.decoder.block[0].layer[-1].DenseReluDense
    forget.wi.weight.mul_(noise)
    forget.wo.weight.mul_(noise)
    forget.wi.weight[: 2 * width] = torch.cat([identity, -identity])
    forget.wo.weight[:, : 2 * width] = -0.8 * torch.cat([identity, -identity], dim=1)

    constant = model.decoder.block[-1].layer[-1].DenseReluDense
    constant.wi.weight[0] = 0.0
    constant.wi.weight[0, ONE] = 1.0
    constant.wo.weight[:, 0] = 0.0
    constant.wo.weight[FREQUENCY, 0] = 1.0
    model.decoder.final_layer_norm.weight[FREQUENCY] = 3.0
