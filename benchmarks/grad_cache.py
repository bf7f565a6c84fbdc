"""Measure peak memory and processor time of one training step, with and without `model.grad_cache_rows`.

    python benchmarks/grad_cache.py

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from typing import Any

import torch
from common import apart, machine, options, say, timed, write

UNIT = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    parser = options(__doc__, "grad_cache_cpu.json", at_once=16, width=384, layers=6, tokens=64, threads=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--step", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = {"width": arguments.width, "layers": arguments.layers, "tokens": arguments.tokens}
    if arguments.step is not None:
        say(json.dumps(measure(**arguments.step)))
        return
    rows: list[dict[str, Any]] = []
    for count in arguments.rows:
        for at_once in (None, arguments.at_once):
            load = os.getloadavg()[0]
            step = json.dumps({"rows": count, "at_once": at_once, **shape})
            told = apart(__file__, "--threads", arguments.threads, "--step", step)
            found = {"rows": count, "grad_cache_rows": at_once, "load": load, **told}
            rows.append(found)
            say(
                f"{count:5d} rows, grad_cache_rows {at_once!s:>5}: {found['peak_bytes'] / 2**20:7.0f} MiB, "
                f"{found['processor_seconds']:6.2f} s of processor"
            )
    write({**shape, "threads": arguments.threads, **machine("torch"), "rows": rows}, arguments.out)


def measure(*, rows: int, at_once: int | None, width: int, layers: int, tokens: int) -> dict[str, float]:
    """Return one step's loss, its peak memory above what was in use before it, and its processor time."""
    from transformers import BertConfig, BertModel

    from lit_dpret.encoders.contract import get_pooling
    from lit_dpret.losses import InBatchSoftmaxLoss
    from lit_dpret.modules.dual_encoder import embed_in_chunks

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    config = BertConfig(
        num_attention_heads=12 if width % 12 == 0 else 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    model, pool = BertModel(config, add_pooling_layer=False).train(), get_pooling("mean")

    def embed(features: dict[str, torch.Tensor]) -> torch.Tensor:
        return pool(model(**features).last_hidden_state, features["attention_mask"])

    def step(count: int) -> torch.Tensor:
        sides = []
        for _ in range(2):
            ids = torch.randint(5, config.vocab_size, (count, tokens))
            features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if at_once is None:
                sides.append(embed(features))
            else:
                sides.append(embed_in_chunks(embed, features, count=count, rows_at_once=at_once))
        loss = InBatchSoftmaxLoss(0.05)(*sides).mean()
        loss.backward()
        return loss.detach()

    step(2)  # allocates gradients, and memory that libraries keep
    before = _peak()
    loss, spent = timed(lambda: step(rows))
    return {"loss": float(loss), "peak_bytes": _peak() - before, "processor_seconds": spent["processor_seconds"]}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


if __name__ == "__main__":
    main()
