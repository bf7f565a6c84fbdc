"""Positive pairs of contrastive training: two random views of the same image.

Each view takes its random numbers from a key of its own, so that what becomes of an image does not
depend on which others were drawn with it, nor on torch's global random state, nor on how often a
batch was made. That independence is what pairwise clipping rests on: a pair's similarity gradient
must be a function of its two records, the weights and public data (paper 002, Theorem 4.2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lit_dpret.encoders.vision.augment import UNIFORMS, Augmentation, as_input


class DrawnImage(Protocol):
    """A row with one image: `lit_dpret.datamodules.images.ImageRow`."""

    @property
    def image_id(self) -> str: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def draw(self) -> int: ...


class AugmentedViews:
    """Rows of images to two batches of views: a ``collate_rows`` for modules that compare images.

    Guarantees:
        - A row's views depend on (seed, image id, draw) and its own pixels, up to nothing else.
        - The two views of a row, and the views of two draws, come from unrelated random numbers.

    Args:
        augmentation: How a view is made; None for the defaults.
        seed: Public; the draw's number, which is keyed by the run's secret, keeps steps apart.
    """

    def __init__(self, augmentation: Augmentation | None = None, *, seed: int = 0) -> None:
        self.augmentation = augmentation or Augmentation()
        self.seed = seed

    def __call__(self, rows: Sequence[DrawnImage]) -> dict[str, Tensor]:
        """Two views of each row.

        Args:
            rows: At least one, all images of one shape.

        Returns:
            ``query`` and ``passage``, each float32 between -1 and 1 of shape (rows, channels, height,
            width); row i of both comes from the same image.
        """
        images = torch.stack([row.image for row in rows])
        return {side: as_input(self.augmentation(images, self._uniforms(rows, side))) for side in ("query", "passage")}

    def _uniforms(self, rows: Sequence[DrawnImage], side: str) -> Tensor:
        numbers = [keyed_uniforms(self.seed, row.image_id, row.draw, side, count=UNIFORMS) for row in rows]
        return torch.from_numpy(np.stack(numbers))


def keyed_uniforms(*key: object, count: int) -> np.ndarray:
    """``count`` uniform numbers that belong to ``key``, float32; the same on every machine.

    Keys that differ in any part give unrelated numbers.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"lit-dpret views")
    for part in key:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))
    return generator.random(count, dtype=np.float32)
