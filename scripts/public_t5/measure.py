"""What a warm-up is worth, on pairs it did not see: the loss per token, and how much it copies.

The copy rate is the share of the content words of the generated questions that occur in the passage they
were asked about. The control asks the same of another pair's passage: what is left there is chance and habit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from public_t5.sources import Pair, clean, window
from public_t5.tasks import MAX_WORDS, PROMPT, Example, content_words
from public_t5.training import MAX_SOURCE, MAX_TARGET, batches, encode


def held_out(pairs: Sequence[Pair], count: int, seed: int = 0) -> list[Example]:
    """`count` of the pairs as fixed examples, the passage cut around its anchor."""
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
    """Mean negative log-likelihood (nats) of a target token, `</s>` included, in float32."""
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
    """A question for each input: greedy when `top_p` is None, otherwise nucleus sampling."""
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
    """The share of the questions' content words that occur in the text of the same index."""
    found = total = 0
    for question, text in zip(questions, texts, strict=True):
        there = set(content_words(text))
        words = content_words(question)
        found += sum(word in there for word in words)
        total += len(words)
    return found / total if total else 0.0


@dataclass(frozen=True)
class Measures:
    """Of one held-out set."""

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
    """Loss on all examples; copy rates on the first `asked`; `shown` nucleus samples (passage, sample, reference)."""
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
