"""Batches of texts of like length, longest first: little padding, and a batch that is too large fails at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lit_dpret.errors import ConfigurationError


def in_batches_by_length(
    lengths: Sequence[int], batch_size: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[list[int]]:
    """Places of all texts, ``batch_size`` at a time, by length from the longest on.

    Args:
        lengths: Of each text, in any unit.
        batch_size: Most places in a batch.
        progress: Called with (texts done, texts in all) after each batch.

    Example:
        >>> list(in_batches_by_length([3, 9, 5], 2))
        [[1, 2], [0]]
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size={batch_size} must be at least 1.")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        yield batch
        if progress is not None:
            progress(start + len(batch), len(order))
