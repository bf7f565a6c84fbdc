"""The model card of the public T5, written from what its training measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.assets.overlap import HASH_FILE, read_hashes

TEMPLATE = Path(__file__).with_name("card.md")
TITLES = {"squad": "SQuAD", "medquad": "MedQuAD"}


def write_card(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Fill ``card.md`` with the facts of a training and write it as ``folder/README.md``.

    Args:
        folder: The exported model with its question hashes.
        facts: What ``train_public_t5.py`` measured at its end.
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
