"""Compare our throughput of queries with plain ``model.generate``: same model, settings, batch size and threads.

    pip install "lit-dpret[quickstart]"
    python benchmarks/synthesize.py

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, options, say, timed, write
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from lit_dpret.datamodules import InsuranceQADataModule
from lit_dpret.modules.generator_folder import GeneratorContract, GeneratorModel, TextCodec
from lit_dpret.modules.language_models import load_language_model, load_tokenizer
from lit_dpret.synthesis.groups import canonical_groups, draw_group, fixed_arithmetic
from lit_dpret.synthesis.sampler import Decoding

OURS, PLAIN = "lit-dpret", "model.generate"
SHORTEST, LONGEST = 8, 300  # words of a passage with mixed lengths


def models(names: list[str]) -> Iterator[tuple[str, GeneratorModel]]:
    codec = TextCodec(load_tokenizer("public_t5"), GeneratorContract(prompt="", max_passage_length=384))
    for name in names:
        if name == "public_t5":
            model: PreTrainedModel = load_language_model("public_t5")
        else:
            torch.manual_seed(0)
            model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))
        yield name, GeneratorModel(model.eval(), codec, Path())


def passages(count: int, *, mixed: bool) -> dict[str, str]:
    data = InsuranceQADataModule()
    data.setup("test")
    texts = list(data.public_passages().values())
    if not mixed:
        return {f"p{number}": text for number, text in enumerate(texts[:count])}
    words = " ".join(texts).split()
    lengths = np.exp(np.random.default_rng(0).uniform(math.log(SHORTEST), math.log(LONGEST), count)).astype(int)
    ends = np.cumsum(lengths)
    return {
        f"p{number}": " ".join(words[end - length : end])
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    }


def ours(generator: GeneratorModel, texts: Mapping[str, str], decoding: Decoding, batch: int, seed: int) -> list[str]:
    drawn = []
    for group in canonical_groups(generator.codec, texts, batch):
        drawn += draw_group(generator, {name: texts[name] for name in group}, 1, seed, decoding)
    return [query.text for query in drawn]


@torch.inference_mode()
def plain(generator: GeneratorModel, texts: Mapping[str, str], decoding: Decoding, batch: int, seed: int) -> list[str]:
    torch.manual_seed(seed)
    tokenizer, drawn, rows = generator.tokenizer, list[str](), generator.codec.passages(list(texts.values()))
    for start in range(0, len(rows), batch):
        padded = tokenizer.pad({"input_ids": rows[start : start + batch]}, return_tensors="pt")
        padded = padded.to(generator.model.device)
        found = generator.model.generate(
            input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], do_sample=True,
            top_p=decoding.top_p, top_k=0, temperature=decoding.temperature,
            max_new_tokens=decoding.max_new_tokens, min_new_tokens=decoding.min_new_tokens,
        )  # fmt: skip
        drawn += tokenizer.batch_decode(found, skip_special_tokens=True)
    return drawn


def side_by_side(generator: GeneratorModel, texts: Mapping[str, str], decoding: Decoding, chosen: Any) -> Any:
    """Run both in turns; the other one goes first in every second round."""
    ways: dict[str, Callable[..., list[str]]] = {OURS: ours, PLAIN: plain}
    unit = "processor_seconds" if chosen.device == "cpu" else "seconds"
    few = dict(list(texts.items())[: chosen.batch_size])
    for way in ways.values():
        way(generator, few, Decoding(max_new_tokens=2), chosen.batch_size, 0)  # the first run is slower for both
    rounds = []
    for turn in range(chosen.rounds):
        facts: dict[str, Any] = {"load": os.getloadavg()[0]}
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            way = ways[name]
            drawn, spent = timed(
                lambda way=way, turn=turn: way(generator, texts, decoding, chosen.batch_size, turn)  # type: ignore[misc]
            )
            used = spent[unit]
            facts[name] = {
                **spent,
                f"queries_per_{unit.removesuffix('s')}": len(drawn) / used,
                "mean_words": sum(len(text.split()) for text in drawn) / len(drawn),
            }
            say(f"  {name:15s} {used:7.2f} {unit}, {len(drawn) / used:7.1f} queries/s")
        facts["throughput_over_plain"] = facts[PLAIN][unit] / facts[OURS][unit]
        rounds.append(facts)
    ratios = [facts["throughput_over_plain"] for facts in rounds]
    return {"rounds": rounds, "throughput_over_plain": summary(ratios)}


def summary(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def main() -> None:
    parser = options(__doc__, "synthesize_cpu.json", batch_size=32, max_new_tokens=32, rounds=3, threads=1)
    parser.add_argument("--models", nargs="+", default=["public_t5", "t5-small-shape"])
    parser.add_argument("--passages", type=int, nargs="+", default=[512, 128], help="for each model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    chosen = parser.parse_args()
    lengths = {"equal tokens": chosen.max_new_tokens, "natural ends": 1}
    rows: dict[str, Any] = {}
    with fixed_arithmetic(chosen.threads):
        for (name, generator), count in zip(models(chosen.models), chosen.passages, strict=True):
            generator.model.to(chosen.device)
            for corpus in ("insuranceqa", "mixed lengths"):
                texts = passages(count, mixed=corpus == "mixed lengths")
                tokens = [len(row) for row in generator.codec.passages(list(texts.values()))]
                for regime, least in lengths.items():
                    if regime == "natural ends" and name != "public_t5":
                        continue  # random weights do not end their queries
                    decoding = Decoding(top_p=0.8, max_new_tokens=chosen.max_new_tokens, min_new_tokens=least)
                    row = f"{name}, {corpus}, {regime}"
                    say(row)
                    rows[row] = {
                        "queries": count,
                        "passage_tokens": {"mean": statistics.mean(tokens), "least": min(tokens), "most": max(tokens)},
                        **side_by_side(generator, texts, decoding, chosen),
                    }
                    found = rows[row]["throughput_over_plain"]
                    say(f"  over plain: {found['median']:.2f} ({found['least']:.2f} to {found['greatest']:.2f})")
    report = {
        "rows": rows,
        "settings": {"top_p": 0.8, "temperature": 1.0, "top_k": None, "max_new_tokens": chosen.max_new_tokens},
        "batch_size": chosen.batch_size,
        "dtype": "float32",
        "threads": chosen.threads,
        "device": chosen.device,
        **machine("torch", "transformers"),
    }
    write(report, chosen.out)


if __name__ == "__main__":
    main()
