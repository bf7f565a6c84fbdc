"""A task of one's own: count the words of the public passages."""

from __future__ import annotations

import json
from collections import Counter

from lit_dpret.errors import ConfigurationError
from lit_dpret.files import write_whole
from lit_dpret.tasks.parts import Parts, check_run_dir


class CountWords:
    """Write the most frequent words of the passages to ``words.json``; queries are private and not read.

    Args:
        most: How many words.
    """

    def __init__(self, *, most: int = 20) -> None:
        if most < 1:
            raise ConfigurationError(f"task.most={most} must be at least 1.")
        self.most = most

    def run(self, parts: Parts) -> dict[str, float]:
        """Return how many different words there are."""
        check_run_dir(parts.run_dir, min_free_mb=1)
        data = parts.make_datamodule()
        data.prepare_data()
        data.setup("fit")
        words: Counter[str] = Counter()
        for text in data.public_passages().values():
            words.update(text.lower().split())
        write_whole(parts.run_dir / "words.json", json.dumps(words.most_common(self.most), indent=2) + "\n")
        return {"words": float(len(words))}
