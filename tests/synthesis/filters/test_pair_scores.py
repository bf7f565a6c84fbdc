"""Scores of pairs are the same whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_dpret.errors import ConfigurationError, WorkerError
from lit_dpret.synthesis.filters import CrossEncoderScore, LanguageModelScore, ReleasedQueries, pair_scores


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_filters_by_two_workers_are_those_of_one_process(
    released: ReleasedQueries, generator_folder: Path, cross_encoder_folder: Path
) -> None:
    for make, model, declared in (
        (CrossEncoderScore, cross_encoder_folder, {"model_is_public": True}),
        (LanguageModelScore, generator_folder, {}),
    ):
        settings: Any = {"model": model, "keep_share": 1.0, "batch_size": 1, **declared}
        here, there = (make(workers=workers, **settings).choose(released)[0] for workers in (0, 2))
        assert len(here) > 16 and np.array_equal(here, there)


def test_workers_with_other_weights_under_the_name_are_refused(
    released: ReleasedQueries, cross_encoder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def two(*_: object, **__: object) -> Iterator[Any]:
        yield lambda pieces: ((at, np.zeros(len(asked)), f"weights {at % 32}") for at, asked, _ in pieces)

    monkeypatch.setattr(pair_scores, "ray_workers", two)
    by = CrossEncoderScore(cross_encoder_folder, model_is_public=True, keep_share=0.5, batch_size=1, workers=2)
    with pytest.raises(WorkerError, match="not the same model"):
        by.score(released)


def test_a_device_that_is_not_here_is_refused_by_name(released: ReleasedQueries, cross_encoder_folder: Path) -> None:
    by = CrossEncoderScore(cross_encoder_folder, model_is_public=True, keep_share=0.5, device="nowhere")
    with pytest.raises(ConfigurationError, match="device=nowhere"):
        by.score(released)
