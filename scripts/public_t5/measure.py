"""Measure a warm-up on pairs it did not see: the loss per token, and how much it copies.

The copy rate is the share of the generated questions' content words that occur in the passage they are about.
The control uses another pair's passage instead: the rate left there is chance and habit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from lit_dpret.assets.overlap import HASH_FILE, read_hashes
from public_t5.sources import Pair, clean, window
from public_t5.tasks import MAX_WORDS, PROMPT, Example, content_words
from public_t5.training import MAX_SOURCE, MAX_TARGET, batches, encode


def held_out(pairs: Sequence[Pair], count: int, seed: int = 0) -> list[Example]:
    """Return `count` of the pairs as fixed examples, the passage cut around its anchor."""
    rng = random.Random(f"held out {seed}")
    chosen = rng.sample(list(pairs), min(count, len(pairs)))
    return [
        Example("real", p.source, PROMPT + clean(window(p.passage, p.anchor, rng, MAX_WORDS)), clean(p.question))
        for p in chosen
    ]


@torch.no_grad()
def token_loss(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> float:
    """Return the mean negative log-likelihood (nats) of a target token, `</s>` included, in float32."""
    model.eval()
    total = tokens = 0.0
    for batch in batches(encode(tokenizer, examples, MAX_SOURCE, MAX_TARGET), 4096):
        count = int((batch["labels"] >= 0).sum())
        total += float(model(**batch).loss) * count
        tokens += count
    return total / tokens


@torch.no_grad()
def ask(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    *,
    top_p: float | None,
    seed: int = 0,
    batch: int = 32,
) -> list[str]:
    """Return a question for each input: greedy if `top_p` is None, otherwise by nucleus sampling."""
    model.eval()
    torch.manual_seed(seed)
    options = {"do_sample": False, "num_beams": 1} if top_p is None else {"do_sample": True, "top_p": top_p, "top_k": 0}
    questions: list[str] = []
    for at in range(0, len(texts), batch):
        some = list(texts[at : at + batch])
        rows = tokenizer(some, truncation=True, max_length=MAX_SOURCE, padding=True, return_tensors="pt")
        out = model.generate(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], max_new_tokens=MAX_TARGET, **options
        )
        questions += tokenizer.batch_decode(out, skip_special_tokens=True)
    return questions


def copy_rate(questions: Sequence[str], texts: Sequence[str]) -> float:
    """Return the share of the questions' content words that occur in the text of the same index."""
    found = total = 0
    for question, text in zip(questions, texts, strict=True):
        there = set(content_words(text))
        words = content_words(question)
        found += sum(word in there for word in words)
        total += len(words)
    return found / total if total else 0.0


@dataclass(frozen=True)
class Measures:
    """Measurements on one held-out set."""

    pairs: int
    loss: float
    copy_greedy: float
    copy_nucleus: float
    copy_reference: float
    copy_control: float
    distinct_greedy: float
    samples: list[tuple[str, str, str]]


def measure(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    *,
    asked: int = 200,
    shown: int = 5,
) -> Measures:
    """Return loss on all examples, copy rates on the first `asked`, and `shown` nucleus samples with references."""
    texts = [e.text.removeprefix(PROMPT) for e in examples[:asked]]
    greedy = ask(model, tokenizer, [PROMPT + t for t in texts], top_p=None)
    nucleus = ask(model, tokenizer, [PROMPT + t for t in texts], top_p=0.8)
    return Measures(
        pairs=len(examples),
        loss=token_loss(model, tokenizer, examples),
        copy_greedy=copy_rate(greedy, texts),
        copy_nucleus=copy_rate(nucleus, texts),
        copy_reference=copy_rate([e.target for e in examples[:asked]], texts),
        copy_control=copy_rate(nucleus, texts[1:] + texts[:1]),
        distinct_greedy=len(set(greedy)) / len(greedy),
        samples=[(texts[i], nucleus[i], examples[i].target) for i in range(min(shown, len(texts)))],
    )


# -- the model card


TEMPLATE = Path(__file__).with_name("card.md")
TITLES = {"squad": "SQuAD", "medquad": "MedQuAD"}


def write_card(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Fill ``card.md`` with the facts of a training and write it as ``folder/README.md``.

    Args:
        folder: The exported model with its question hashes.
        facts: The measurements at the end of ``train_public_t5.py``.
    """
    settings, held_out = facts["settings"], facts["held_out"]
    shape = ("d_model", "d_ff", "heads", "layers", "vocabulary", "learning_rate", "batch_tokens")
    text = TEMPLATE.read_text(encoding="utf-8").format(
        **{name: settings[name] for name in shape},
        embedding_factor=f"{settings['embedding_factor']:g}",
        parameters=f"{facts['parameters']:,}",
        minutes=f"{facts['minutes']:.0f}",
        steps=f"{facts['steps']:,}",
        examples=f"{facts['examples']:,}",
        source=f"{facts['source_tokens'] / 1e6:.1f}",
        target=f"{facts['target_tokens'] / 1e6:.2f}",
        rate=f"{facts['tokens_per_second']:,.0f}",
        megabytes=f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        hashes=f"{len(read_hashes(folder / HASH_FILE)):,}",
        measured="\n".join(_row(name, found) for name, found in held_out.items()),
        samples="\n\n".join(f"{TITLES[name]}\n{_samples(found)}" for name, found in held_out.items()),
    )
    card = folder / "README.md"
    card.write_text(text, encoding="utf-8")
    return card


def _row(name: str, found: Mapping[str, Any]) -> str:
    rates = ("copy_greedy", "copy_nucleus", "copy_reference", "copy_control", "distinct_greedy")
    cells = [name, found["pairs"], f"{found['loss']:.3f}", *(f"{found[rate]:.2f}" for rate in rates)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _samples(found: Mapping[str, Any]) -> str:
    lines = []
    for passage, sample, reference in found["samples"]:
        words = passage.split()
        shown = " ".join(words[:32]) + (" ..." if len(words) > 32 else "")
        lines.append(f"* *{shown}*\n  sample: **{sample}** (reference: {reference})")
    return "\n".join(lines)


# -- the model folder


def export(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, vocabulary: Path, folder: Path
) -> None:
    """Write the model into `folder`, renaming each file into place, so that a reader never sees half a file.

    The embedding, which the head shares, is stored once. The config asks for float32, so loading widens the
    weights; only one rounding to float16 is lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as name:
        partial = Path(name)
        weights = {"shared.weight": model.shared.weight}
        weights |= {n: p for n, p in model.named_parameters() if p is not model.shared.weight}
        save_file(
            {n: p.detach().to(torch.float16).contiguous() for n, p in weights.items()},
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = model.config.to_dict() | {"architectures": ["T5ForConditionalGeneration"], "dtype": "float32"}
        config.pop("_name_or_path", None)
        config.pop("transformers_version", None)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        generation = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 32}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(partial)
        shutil.copyfile(vocabulary, partial / "spiece.model")
        for path in partial.iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)
