"""What embeddings told of their texts: JSON for programs, Markdown for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import md
from lit_dpret.report.page import INTERNAL, Written, write_short

Facts = Mapping[str, Any]

LIMIT = (
    "What these attacks do not recover, a better one may: they are evidence of leakage, and absence of evidence is no "
    "guarantee."
)


def write_inversion(facts: Facts, folder: Path) -> Written:
    """Write the report; about private texts under ``internal_inversion``, readable for its owner alone."""
    internal = INTERNAL.format(what="texts") if facts["internal"] else ""
    title = f"Inversion of embeddings by {facts['encoder']}"
    return write_short(folder, "inversion", title, facts, _lines(facts), internal=internal)


def _lines(facts: Facts) -> list[str]:
    texts, probe, ranking = facts["texts"], facts["probe"], facts["ranking"]
    sure = f"{100 * facts['confidence']:g} %"
    verdict = "more than shuffled ones" if probe["significant"] else "no more than shuffled ones, as far as this sees"
    lines = [
        f"{texts['attacked']:,} {texts['whose']} texts are attacked, embedded as {texts['side']}; the attacker knows "
        f"{texts['known']:,} others with their embeddings. Decoder: {facts['language_model']}, {facts['steps']:,} "
        f"steps, embeddings as {facts['how']}.", "",
        "| language model | perplexity |", "| :-- | --: |",
        f"| without embeddings | {probe['perplexity_without']:.2f} |",
        f"| with shuffled embeddings | {probe['shuffled_perplexity']:.2f} |",
        f"| with the texts' own | {probe['perplexity']:.2f} |", "",
        f"* An embedding tells {probe['nats']:.4f} nats of a token [{probe['low']:.4f}, {probe['high']:.4f}] ({sure}, "
        f"paired bootstrap over texts), {probe['bits']:.4f} bits: {verdict}.",
        *_named(ranking, sure), "",
        "| written out | BLEU | F1 of word sets | exact | cosine of its embedding |", "| :-- | --: | --: | --: | --: |",
    ]  # fmt: skip
    for arm, label in (("own", "from the texts' own embeddings"), ("shuffled", "control: trained on shuffled ones")):
        one = facts["inverter"][arm]
        cells = f"{one['bleu']:.2f} | {one['token_f1']:.3f} | {one['exact']:.3f} | {one['cosine']:.3f}"
        lines.append(f"| {label} | {cells} |")
    for sample in facts["samples"]:
        words = {"text": "embedded", "own": "written from it", "shuffled": "control"}
        lines += ["", *(f"* {words[kind]}: {md(sample[kind])}" for kind in words)]
    return [*lines, "", LIMIT]


def _named(ranking: Facts, sure: str) -> list[str]:
    lines = []
    for kind, how in (("direct", ""), ("mapped", ", its space mapped by the known texts")):
        if (one := ranking[kind]) is not None:
            lines.append(
                f"* Named among {ranking['candidates']} candidates by {ranking['attacker']}{how}: {one['value']:.3f} "
                f"[{one['low']:.3f}, {one['high']:.3f}] ({sure}, exact); chance is {one['chance']:g}."
            )
    return lines
