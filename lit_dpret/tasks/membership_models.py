"""Signals of the same suspects under any saved model: a generator's, or an encoder's."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.attacks.signals import (
    EncodedPairs,
    encode_pairs,
    encoder_signals,
    generator_signals,
    mean_by_query,
)
from lit_dpret.encoders import load_towers
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.modules.generator_folder import is_generator, load_generator
from lit_dpret.modules.token_scores import TokenScorer, TokenScores
from lit_dpret.tasks.membership_suspects import Suspects

Signals = Mapping[str, NDArray[np.float64]]
Progress = Callable[[int, int], None]


@dataclass(eq=False, repr=False)
class Attacker:
    """What is the same for target, reference and shadow models: the suspects, the pool and the settings.

    Args:
        target: The folder of the attacked model; the others are read as what it is.
        suspects: Queries with their passages.
        pool: Public passages that encoders are asked to tell the right ones from.
        temperature: Of the encoders' softmax.
        batch_size: Texts per forward pass.
        device: Where to compute.
    """

    target: Path
    suspects: Suspects
    pool: list[str]
    temperature: float
    batch_size: int
    device: str
    _reference: TokenScores | EncodedPairs | None = None

    def learn_reference(self, source: str | Path, progress: Progress) -> None:
        """Look at the suspects with a model that never saw private data."""
        self._reference = self._look(source, progress)

    def signals(
        self, source: str | Path, progress: Progress, *, moments: bool = False
    ) -> dict[str, NDArray[np.float64]]:
        """Signals of every suspect, the mean over its rows, each of shape ``(suspects,)``.

        ``moments`` adds the signal of a generator that needs the mean and deviation over its whole vocabulary.
        """
        seen, suspects = self._look(source, progress, moments=moments), self.suspects
        if isinstance(seen, TokenScores):
            known = self._reference if isinstance(self._reference, TokenScores) else None
            found = generator_signals(seen, suspects.queries, reference=known)
        else:
            paired = self._reference if isinstance(self._reference, EncodedPairs) else None
            found = encoder_signals(seen, temperature=self.temperature, reference=paired)
        return mean_by_query(found, suspects.row_of, len(suspects.ids))

    def _look(self, source: str | Path, progress: Progress, *, moments: bool = False) -> TokenScores | EncodedPairs:
        texts = (self.suspects.queries, self.suspects.passages)
        settings: dict[str, Any] = {"batch_size": self.batch_size, "progress": progress}
        if is_generator(self.target):
            contract = None if is_generator(source) else load_generator(self.target).contract
            scorer = TokenScorer.load(source, contract=contract, device=self.device)
            return scorer.score(*texts, moments=moments, **settings)
        return encode_pairs(load_towers(source), *texts, self.pool, device=self.device, **settings)


def write_signals(path: Path, signals: Signals) -> None:
    """Write signals of private queries, whole or not at all, for their owner alone.

    Raises:
        StorageError: The file cannot be written.
    """
    content = io.BytesIO()
    np.savez(content, **signals)  # type: ignore[arg-type]
    write_whole(path, content.getvalue(), owner_only=True)


def read_signals(path: Path) -> dict[str, NDArray[np.float64]]:
    """What `write_signals` wrote.

    Raises:
        DataError: The file is missing or broken.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: np.asarray(stored[name], dtype=np.float64) for name in stored.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} holds no signals of a shadow model. Remove its folder, and resume.") from error
