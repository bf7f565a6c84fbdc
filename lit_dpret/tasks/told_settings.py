"""What a finished stage says of its settings, so that a later version with more of them can tell it was the same."""

from __future__ import annotations

import re


def told_settings(text: str) -> str:
    """The repr of settings without those that are null: what a later version brings, and nobody set, is left out.

    Example:
        >>> told_settings("Recipe(steps=3, lora=None, model=partial(T5, top_k=None, lr=0.1, seed=None))")
        'Recipe(steps=3, model=partial(T5, lr=0.1))'
    """
    return re.sub(r", \w+=None(?=[,)])", "", text)
