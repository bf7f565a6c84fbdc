"""Random crops, flips and colours for images, as tensor operations on a whole batch.

The steps and their strengths are those of SimCLR on CIFAR-10 (Chen et al. 2020, appendix B.9, no blur), with two
differences: the colour steps run in one fixed order (brightness, contrast, saturation, hue), and hue rotates the colour
plane of YIQ instead of the hexagon of HSV, so that saturation and hue are one matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

_CROP_TRIES = 10
UNIFORMS = 2 * _CROP_TRIES + 9
"""The number of uniform numbers that one augmented image uses."""

_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601
_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A random view of each image.

    Guarantees:
        - A view depends only on its own image and its own uniform numbers: contrast is stretched
          around the mean of that image, and nothing is normalised over the batch.
        - The same numbers give the same view; torch's global random state is neither read nor changed.
        - Views have the size of the images, and values between 0 and 1.
    """

    # The range of the share of the image's area that a crop keeps; drawn uniformly.
    crop_scale: tuple[float, float] = (0.08, 1.0)
    # The range of width over height of a crop, drawn uniformly in its logarithm. The first of ten drawn shapes that
    # fits is used; if none fits, the whole image.
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5  # probability of a left-right flip
    # Strength s of the colour jitter: brightness, contrast and saturation are scaled by a factor between 1 - 0.8 s and
    # 1 + 0.8 s (never below 0), and hue is rotated by up to 0.2 s of the circle.
    jitter: float = 0.5
    jitter_probability: float = 0.8  # probability of any colour jitter
    grey: float = 0.2  # probability of dropping all colour

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ConfigurationError(
                f"crop_scale={self.crop_scale} must be two shares of the area, 0 < low <= high <= 1."
            )
        low, high = self.crop_ratio
        if not 0 < low <= high < math.inf:
            raise ConfigurationError(f"crop_ratio={self.crop_ratio} must be two positive ratios, the lower one first.")
        for name in ("flip", "jitter_probability", "grey"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} is not a probability.")
        if not 0 <= self.jitter <= 2.5:
            raise ConfigurationError(
                f"jitter={self.jitter} must be from 0 to 2.5, at which the hue can take any value."
            )

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Return one view of each image, float32 between 0 and 1.

        Args:
            images: uint8, or float between 0 and 1; shape (n, 1 or 3, height, width).
            uniforms: Numbers between 0 and 1, shape (n, `UNIFORMS`).
        """
        if images.ndim != 4 or images.shape[1] not in (1, 3) or uniforms.shape != (len(images), UNIFORMS):
            raise DataError(
                f"Augmentation needs images of shape (n, 1 or 3, height, width) and {UNIFORMS} numbers for each; "
                f"got {tuple(images.shape)} and {tuple(uniforms.shape)}."
            )
        numbers = uniforms.to(images.device, torch.float32)
        shapes, rest = numbers[:, : 2 * _CROP_TRIES], numbers[:, 2 * _CROP_TRIES :].unbind(dim=1)
        place, flip, jittered, colours, grey = rest[:2], rest[2], rest[3], rest[4:8], rest[8]
        views = self._crop(_unit_range(images), shapes, place, flipped=flip < self.flip)
        coloured = self._recolour(views, colours)
        views = torch.where(_each(jittered < self.jitter_probability), coloured, views)
        return torch.where(_each(grey < self.grey), _grey(views).expand_as(views), views)

    def _crop(self, images: Tensor, shapes: Tensor, place: tuple[Tensor, ...], *, flipped: Tensor) -> Tensor:
        """Resize a box of each image to the whole, bilinearly, and mirror it where ``flipped``."""
        height, width = images.shape[-2:]
        scale_low, scale_high = self.crop_scale
        area = height * width * (scale_low + (scale_high - scale_low) * shapes[:, :_CROP_TRIES])
        ratio_low, ratio_high = math.log(self.crop_ratio[0]), math.log(self.crop_ratio[1])
        ratio = torch.exp(ratio_low + (ratio_high - ratio_low) * shapes[:, _CROP_TRIES:])
        wide, high = torch.sqrt(area * ratio) / width, torch.sqrt(area / ratio) / height  # (n, tries), shares
        fits = (wide <= 1) & (high <= 1)
        first = fits.int().argmax(dim=1, keepdim=True)  # the first that fits
        any_fits = fits.any(dim=1)
        box_wide = torch.where(any_fits, wide.gather(1, first)[:, 0], 1.0)
        box_high = torch.where(any_fits, high.gather(1, first)[:, 0], 1.0)
        # Output coordinate u in [-1, 1] reads input coordinate scale * u + shift.
        shift_x, shift_y = (1 - box_wide) * (2 * place[0] - 1), (1 - box_high) * (2 * place[1] - 1)
        zero = torch.zeros_like(box_wide)
        across = torch.stack([torch.where(flipped, -box_wide, box_wide), zero, shift_x], dim=1)
        down = torch.stack([zero, box_high, shift_y], dim=1)
        grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False).clamp(0, 1)

    def _recolour(self, images: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """Change brightness, contrast, saturation and hue in turn, each by its own random strength."""
        spread = 0.8 * self.jitter
        brightness, contrast, saturation = ((1 + spread * (2 * u - 1)).clamp(min=0) for u in numbers[:3])
        images = (images * _each(brightness)).clamp_(0, 1)
        mean = _each(_grey(images.mean(dim=(2, 3), keepdim=True))[:, 0, 0, 0])
        images = torch.lerp(mean, images, _each(contrast)).clamp_(0, 1)
        if images.shape[1] == 1:
            return images
        angle = 2 * math.pi * 0.2 * self.jitter * (2 * numbers[3] - 1)
        colours = _hue_turns(angle) @ _saturations(saturation)
        return torch.bmm(colours, images.flatten(2)).clamp_(0, 1).reshape(images.shape)


def as_input(images: Tensor) -> Tensor:
    """Return images as float32 between -1 and 1, by public constants: the data's mean and deviation are private."""
    return _unit_range(images) * 2 - 1


def _unit_range(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _each(numbers: Tensor) -> Tensor:
    """Return one number per image in the shape (n, 1, 1, 1), which broadcasts over the images."""
    return numbers[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    """Return the luma, shape (n, 1, height, width); a grey image is returned unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)  # type: ignore[no-untyped-call]
    grey: Tensor = _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue
    return grey


def _saturations(factors: Tensor) -> Tensor:
    """Return the RGB matrices (n, 3, 3) that scale the distance to grey by each of the ``factors``, shape (n,)."""
    to_grey = torch.tensor(_GREY, device=factors.device).expand(3, 3)
    return torch.lerp(to_grey, torch.eye(3, device=factors.device), factors[:, None, None])


def _hue_turns(angle: Tensor) -> Tensor:
    """Return the RGB matrices (n, 3, 3) that rotate the colour plane of YIQ by each ``angle`` (radians, shape (n,))."""
    to_yiq = torch.tensor(_YIQ, device=angle.device)
    one, zero = torch.ones_like(angle), torch.zeros_like(angle)
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = [torch.stack(row, dim=1) for row in ((one, zero, zero), (zero, cos, -sin), (zero, sin, cos))]
    turns: Tensor = torch.linalg.inv(to_yiq) @ torch.stack(rows, dim=1) @ to_yiq
    return turns


class DrawnImage(Protocol):
    """A row with one image: `lit_dpret.datamodules.images.ImageRow`."""

    @property
    def image_id(self) -> str: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def draw(self) -> int: ...


class AugmentedViews:
    """Turn rows of images into two batches of views: a ``collate_rows`` for modules that compare images.

    Each view takes its random numbers from a separate key, (``seed``, image id, draw, side), so it depends only on
    that key and its own pixels. Pairwise clipping relies on this: a pair's similarity gradient must be a function of
    its two records, the weights and public data (paper 002, Theorem 4.2). The seed is public; the draw's number,
    which is keyed by the run's secret, makes steps differ.
    """

    def __init__(self, augmentation: Augmentation | None = None, *, seed: int = 0) -> None:
        self.augmentation = augmentation or Augmentation()
        self.seed = seed

    def __call__(self, rows: Sequence[DrawnImage]) -> dict[str, Tensor]:
        """Return ``query`` and ``passage``, two views of each row, each as `as_input` gives them."""
        images = torch.stack([row.image for row in rows])
        return {side: as_input(self.augmentation(images, self._uniforms(rows, side))) for side in ("query", "passage")}

    def _uniforms(self, rows: Sequence[DrawnImage], side: str) -> Tensor:
        numbers = [keyed_uniforms(self.seed, row.image_id, row.draw, side, count=UNIFORMS) for row in rows]
        return torch.from_numpy(np.stack(numbers))


def keyed_uniforms(*key: object, count: int) -> np.ndarray:
    """Return ``count`` uniform float32 numbers determined by ``key``; the same on every machine.

    Keys that differ in any part give unrelated numbers.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"lit-dpret views")
    for part in key:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))
    return generator.random(count, dtype=np.float32)
