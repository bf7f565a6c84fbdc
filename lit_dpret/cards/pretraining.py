"""What is known of the private data in the text that a public model was trained on, for the card.

A model that has seen a query before private training tells it whatever the noise was, and no claim covers that. How
often it has is found by `task=pretraining_overlap`. Of private queries the share is itself a number computed from
them, so a card takes it of public texts alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError

KNOB = "callbacks.card.pretraining_overlap"


def overlap_facts(file: str | Path) -> dict[str, Any]:
    """The block ``pretraining.overlap_check`` from the ``pretraining_overlap.json`` that the task wrote.

    Returns:
        ``corpus`` (name, documents, words), ``sampled``, ``whose`` the queries are, ``split``, and ``found``: by kind
        of text, the share found exactly and by words in a row, with their intervals.

    Raises:
        ConfigurationError: It cannot be read, is no such file, or holds shares of private queries.
    """
    path = Path(file).expanduser()
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        found = {name: facts[name] for name in ("corpus", "sampled", "split", "whose", "found")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{KNOB}={file} cannot be read: name the pretraining_overlap.json of a run of task=pretraining_overlap."
        ) from error
    if found["whose"] not in ("public", "synthetic") or facts.get("not_covered"):
        raise ConfigurationError(
            f"{KNOB}={file} holds shares of private queries, which no noise covers, and the card is released. Run "
            "task=pretraining_overlap with task.queries=public, or leave this null."
        )
    return found
