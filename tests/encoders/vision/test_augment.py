"""Views of images: what each step does, and that a view is a function of its own image and key alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lit_dpret.datamodules.images import ImageRow
from lit_dpret.encoders.vision.augment import UNIFORMS, Augmentation, AugmentedViews, keyed_uniforms
from lit_dpret.errors import ConfigurationError, DataError

STILL: dict[str, Any] = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter_probability": 0.0,
                         "grey": 0.0}  # fmt: skip


def images(count: int = 4, *, channels: int = 3, size: int = 16, seed: int = 0) -> Tensor:
    """Random uint8 images."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)


def numbers(count: int = 4, *, seed: int = 0) -> Tensor:
    return torch.rand(count, UNIFORMS, generator=torch.Generator().manual_seed(seed))


def rows(count: int = 5, *, seed: int = 0, first_draw: int = 100) -> list[ImageRow]:
    return [ImageRow(f"i{i}", image, 0, draw=first_draw + i) for i, image in enumerate(images(count, seed=seed))]


# -- the steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"crop_ratio": (3.0, 3.0)}], ids=["no step", "a crop that cannot fit"])
def test_a_view_without_a_step_is_its_image_and_a_flip_mirrors_it(settings: dict[str, Any]) -> None:
    plain = images().float() / 255
    assert torch.allclose(Augmentation(**STILL | settings)(images(), numbers()), plain, atol=1e-5)
    assert torch.allclose(
        Augmentation(**STILL | settings | {"flip": 1.0})(images(), numbers()), plain.flip(3), atol=1e-5
    )


def test_a_crop_keeps_the_drawn_share_of_the_area_and_shape() -> None:
    # An image whose value is its place: the corners of a view tell the box, to half a pixel.
    size, count = 64, 200
    line = (torch.arange(size) + 0.5) / size
    ramps = torch.stack([line.expand(size, size), line[:, None].expand(size, size), torch.zeros(size, size)])
    settings = {**STILL, "crop_scale": (0.2, 0.6), "crop_ratio": (0.5, 2.0)}
    views = Augmentation(**settings)(ramps.expand(count, -1, -1, -1), numbers(count))
    wide, high = ((views[:, axis].amax(dim=(1, 2)) - views[:, axis].amin(dim=(1, 2))) * size / (size - 1)
                  for axis in (0, 1))  # fmt: skip
    area, ratio = wide * high, wide / high
    assert 0.19 < float(area.min()) < 0.25 and 0.55 < float(area.max()) < 0.61
    assert 0.49 < float(ratio.min()) < 0.6 and 1.7 < float(ratio.max()) < 2.03


@pytest.mark.parametrize("channels", [1, 3])
def test_views_stay_between_black_and_white_whatever_the_strength(channels: int) -> None:
    view = Augmentation(jitter=2.5, jitter_probability=1.0)(images(64, channels=channels), numbers(64))
    assert view.shape == (64, channels, 16, 16) and view.dtype == torch.float32
    assert float(view.min()) >= 0 and float(view.max()) <= 1


def test_a_turn_of_the_hue_keeps_greys_and_the_luma() -> None:
    # Only hue: the middle of their ranges leaves brightness, contrast and saturation alone.
    drawn = torch.full((4, UNIFORMS), 0.5)
    drawn[:, -2] = torch.tensor([0.1, 0.4, 0.6, 0.9])
    augmentation = Augmentation(**{**STILL, "jitter_probability": 1.0})
    grey = images(channels=1).expand(4, 3, 16, 16).float() / 255
    assert torch.allclose(augmentation(grey, drawn), grey, atol=1e-3)
    soft = 0.4 + 0.2 * images().float() / 255  # far from black and white, so that nothing is cut off
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    turned = augmentation(soft, drawn)
    assert torch.allclose((turned * weights).sum(1), (soft * weights).sum(1), atol=2e-3)
    assert float((turned - soft).abs().max()) > 0.05


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"crop_scale": (0.0, 1.0)}, "crop_scale"),
        ({"crop_scale": (0.5, 1.1)}, "crop_scale"),
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio"),
        ({"flip": 1.5}, "flip=1.5"),
        ({"grey": -0.1}, "grey=-0.1"),
        ({"jitter_probability": 2.0}, "jitter_probability=2.0"),
        ({"jitter": 3.0}, "jitter=3.0"),
    ],
)
def test_a_strength_out_of_range_is_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Augmentation(**settings)


def test_numbers_that_do_not_fit_the_images_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(3, 3, 16, 16\) and \(4, 29\)"):
        Augmentation()(images(3), numbers(4))


# -- keys ------------------------------------------------------------------------------------


def test_a_view_does_not_depend_on_the_other_images_of_its_batch() -> None:
    whole, mixed = AugmentedViews()(rows()), AugmentedViews()([*rows(seed=1)[:2], rows()[2], *rows(seed=1)[3:]])
    alone = AugmentedViews()([rows()[2]])
    for side in ("query", "passage"):
        assert torch.equal(whole[side][2], mixed[side][2])
        assert not torch.allclose(whole[side][1], mixed[side][1])
        assert torch.allclose(whole[side][2], alone[side][0], atol=1e-6)


def test_views_change_with_the_draw_the_seed_the_image_and_the_side() -> None:
    first = AugmentedViews()(rows(1))["query"]
    others = [
        AugmentedViews()(rows(1))["passage"],
        AugmentedViews(seed=1)(rows(1))["query"],
        AugmentedViews()(rows(1, first_draw=101))["query"],
        AugmentedViews()([ImageRow("another", rows(1)[0].image, 0, draw=100)])["query"],
    ]
    assert all(not torch.allclose(first, other) for other in others)


def test_views_neither_read_nor_move_the_global_random_state() -> None:
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), AugmentedViews()(rows())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(AugmentedViews()(rows())["query"], first["query"])


def test_keyed_numbers_are_the_same_on_every_machine() -> None:
    assert keyed_uniforms(0, "i0", 100, "query", count=3) == pytest.approx([0.1146108, 0.3745432, 0.6997951], abs=1e-6)


def test_keyed_numbers_are_uniform_and_unrelated_between_keys() -> None:
    drawn = np.stack([keyed_uniforms("seed", i, count=50) for i in range(400)])
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    correlations = np.corrcoef(drawn)[np.triu_indices(400, k=1)]
    assert np.abs(correlations).max() < 0.75 and abs(correlations.mean()) < 0.01


def test_parts_of_a_key_cannot_run_into_each_other() -> None:
    assert not np.allclose(keyed_uniforms("ab", "c", count=4), keyed_uniforms("a", "bc", count=4))
