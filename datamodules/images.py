"""A private set of images as a LightningDataModule: one image is one unit of privacy.

The positive pair of contrastive training is two random augmentations of an image, computed when rows are collated
(`lit_dpret.encoders.vision.augment`). Each drawn row carries a random number from the keyed stream that also drew it,
so a repeated step sees the same pixels, and other images have no influence on them.
"""

from __future__ import annotations

import heapq
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_dpret.datamodules.image_sources import SOURCES, ImageSplit, RawSplit, SourceName, read_hub, read_source
from lit_dpret.datamodules.rows import stable_hash
from lit_dpret.datamodules.sampled import PhysicalBatchSize, SampledDataModule, UnitItems
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.batches import Draw
from lit_dpret.settings import require_whole

Labels = Literal["fine", "coarse"]


@dataclass(frozen=True, slots=True, eq=False)
class ImageRow:
    """One image for training; its ``repr`` shows neither pixels nor label."""

    image_id: str  # public id
    image: Tensor = field(repr=False)  # its pixels, uint8, shape (channels, height, width)
    label: int = field(repr=False)  # its label; contrastive training does not read it
    draw: int = 0  # random number of the draw that selected it, from the run's keyed stream; 0 outside a draw


class ImageUnits:
    """The train images as units of privacy, one row each, in file order, followed by the planted units."""

    duplicates = "keep"

    def __init__(
        self, ids: Sequence[str], images: Tensor, labels: Tensor, planted: Sequence[Sequence[ImageRow]] = ()
    ) -> None:
        self._ids, self._images, self._labels, self._planted = ids, images, labels, planted

    def __len__(self) -> int:
        """The number of units: public under ``zero_out`` and ``replace_one``, private under ``add_or_remove``."""
        return len(self._ids) + len(self._planted)

    def rows(self, unit: int) -> Sequence[ImageRow]:
        """Return the single row of unit number ``unit`` (0 to ``len(self) - 1``); no row if it was planted blank."""
        if not 0 <= unit < len(self):
            raise IndexError(f"There is no unit {unit}; units are numbered from 0 to {len(self) - 1}.")
        if unit >= len(self._ids):
            return self._planted[unit - len(self._ids)]
        return (ImageRow(self._ids[unit], self._images[unit], int(self._labels[unit])),)

    def most_units_of_a_user(self) -> int | None:
        """Return None: these data sets have no users."""
        return None


class ImageItems(UnitItems):
    """A map-style data set indexed by draws; each row includes the draw's random number."""

    def __getitem__(self, draw: Draw) -> tuple[Any, Sequence[ImageRow]]:
        _, rows = super().__getitem__(draw)
        return draw, tuple(replace(row, draw=draw.pick) for row in rows)


@dataclass(frozen=True)
class _Split:
    ids: tuple[str, ...]
    images: Tensor
    labels: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]


@dataclass(kw_only=True, eq=False, repr=False)
class ImagesDataModule(SampledDataModule):
    """CIFAR-10, CIFAR-100, Fashion-MNIST or a folder of classes; each train image is one private unit.

    `lit_dpret.datamodules.image_sources` lists the files and the groups of labels. Nothing is downloaded, unless
    ``hub`` names a data set.

    Args:
        source: ``cifar10``, ``cifar100``, ``fashion_mnist`` or ``vision_folder``.
        folder: The path of the data; None for the source's usual path, if it has one.
        hub: A data set of the Hugging Face hub, read instead of ``folder`` (needs ``datasets`` and a network).
        labels: The labels that rows and `labelled` use: ``fine`` or ``coarse``.
        image_size: Resize the images of a ``vision_folder`` to squares with sides of this many pixels.
        max_images: Train on a public sample of this many images, those whose ids hash lowest under ``seed``; refused
            under ``add_or_remove``.
        max_test_images: The same for the test split.
        physical_batch_size: As for `SampledDataModule`, with a default of 256.
    """

    source: SourceName
    folder: str | Path | None = None
    hub: str | None = None
    labels: Labels = "fine"
    image_size: int | None = None
    max_images: int | None = None
    max_test_images: int | None = None
    physical_batch_size: PhysicalBatchSize = 256

    def __post_init__(self) -> None:
        self._check_choices(source=SourceName, labels=Labels)
        require_whole("datamodule", self, 1, "image_size", "max_images", "max_test_images", null=True)
        self.folder = self._folder(self.folder)
        super().__post_init__()
        self._splits: dict[ImageSplit, _Split] = {}
        self._unit: str | None = None

    @property
    def unit_by(self) -> str | None:
        """None: every image has an id."""
        return None

    def _folder(self, folder: str | Path | None) -> Path | None:
        """Return the path of the data, or None if the hub is read; refuse contradictory settings."""
        known = SOURCES[self.source]
        if self.image_size is not None and self.source != "vision_folder":
            raise ConfigurationError(
                f"datamodule.image_size={self.image_size} has no meaning for datamodule.source={self.source}, whose "
                "images have one size. Set it to null."
            )
        if self.hub is not None:
            if folder is not None:
                raise ConfigurationError(
                    f"datamodule.folder={folder} and datamodule.hub={self.hub} both name the data; set only one."
                )
            if known.label_column is None:
                raise ConfigurationError(
                    f"datamodule.hub={self.hub} cannot be read as datamodule.source={self.source}. Set "
                    f"datamodule.hub to null. {known.missing}"
                )
            return None
        if folder is None and known.default_folder is None:
            raise ConfigurationError(f"datamodule.folder is not set. {known.missing}")
        return Path(folder) if folder is not None else known.default_folder

    # -- reading -----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Check that the folder exists; `setup` downloads the hub's data sets."""
        if self.folder is not None and not Path(self.folder).is_dir():
            raise DataError(f"datamodule.folder={self.folder} is not a folder. {SOURCES[self.source].missing}")

    def setup(self, stage: str | None = None) -> None:
        """Read the train split, once; the test split is read on first use."""
        self._split("train")

    def _split(self, split: ImageSplit) -> _Split:
        if split not in get_args(ImageSplit):
            raise DataError(f"There is no split {split!r} of images; the splits are {', '.join(get_args(ImageSplit))}.")
        if split not in self._splits:
            if self.folder is None:
                raw = read_hub(self.source, str(self.hub), split)
            else:
                raw = read_source(self.source, Path(self.folder), split, image_size=self.image_size)
            self._splits[split] = self._sampled(raw, split)
        return self._splits[split]

    def _sampled(self, raw: RawSplit, split: ImageSplit) -> _Split:
        """Return the decoded public sample of a split: the images whose ids hash lowest, in their original order."""
        limit = self.max_images if split == "train" else self.max_test_images
        kept: Sequence[int] = range(len(raw.ids))
        if limit is not None and limit < len(kept):
            hashes = [stable_hash("lit-dpret images", str(self.seed), split, image_id) for image_id in raw.ids]
            kept = sorted(heapq.nsmallest(limit, kept, key=hashes.__getitem__))
        labels = {"fine": torch.tensor([raw.labels[place] for place in kept])}
        if raw.coarse is not None:
            labels["coarse"] = torch.tensor([raw.coarse[place] for place in kept])
        names = {"fine": _names(raw.label_names, raw.labels), "coarse": _names(raw.coarse_names, raw.coarse or [0])}
        return _Split(tuple(raw.ids[place] for place in kept), raw.decode(list(kept)), labels, names)

    # -- the private side --------------------------------------------------------------------

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        """Set the run's unit of privacy: an image, named ``image``, ``query`` or ``pair``."""
        if unit == "user":
            raise ConfigurationError(
                f"privacy.unit=user needs user ids, and datamodule.source={self.source} names no users. Set "
                "privacy.unit=image."
            )
        self._refuse_sample(neighbours, "max_images", several=None)
        self._unit = unit

    def train_units(self) -> ImageUnits:
        """Return the train images, one unit each."""
        train = self._split("train")
        planted = () if self._planted is None else self._planted.units
        return ImageUnits(train.ids, train.images, self._labels_of(train, None), planted)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images; public."""
        channels, height, width = self._split("train").images.shape[1:]
        return int(channels), int(height), int(width)

    def blank_row(self) -> ImageRow:
        """Return a black image of the same shape, which contains no data."""
        return ImageRow("blank", torch.zeros(self.image_shape, dtype=torch.uint8), 0)

    def _train_items(self) -> Dataset[Any]:
        return ImageItems(self.train_units())

    def _without_a_plan(self) -> str:
        return "for plain images in a custom loop, use labelled('train')"

    def data_fingerprint(self, key: bytes, *, planted: bool = True) -> str:
        """Return a fingerprint of train images and labels, keyed by the run's secret, as `PairsDataModule` does."""
        train = self._split("train")
        mac = hmac.new(key, digestmod="sha256")
        mac.update(stable_hash("lit-dpret image data", self.labels, str(tuple(train.images.shape)), *train.ids))
        mac.update(train.images.numpy().tobytes())
        mac.update(self._labels_of(train, None).numpy().tobytes())
        if planted and self._planted is not None:
            for rows in self._planted.units:
                mac.update(stable_hash("lit-dpret planted images", *(row.image_id for row in rows)))
                for row in rows:
                    mac.update(row.image.numpy().tobytes())
        return mac.hexdigest()

    # -- the evaluation side -----------------------------------------------------------------

    def labelled(self, split: ImageSplit = "test", *, labels: Labels | None = None) -> tuple[Tensor, Tensor]:
        """Return images, uint8 ``(n, channels, height, width)``, and labels, int64 ``(n,)``, without privacy.

        The train split is private: a score computed from it (the neighbours of k-NN, a classifier on top) is a release
        that no accountant counts. ``labels`` are ``fine`` or ``coarse``; None for ``datamodule.labels``.
        """
        found = self._split(split)
        return found.images, self._labels_of(found, labels)

    def class_names(self, labels: Labels | None = None) -> tuple[str, ...]:
        """Return the name of each class, in label order."""
        found = self._split("train")
        self._labels_of(found, labels)
        return found.names[labels or self.labels]

    def _labels_of(self, split: _Split, labels: Labels | None) -> Tensor:
        wanted = labels or self.labels
        if wanted not in split.labels:
            raise ConfigurationError(
                f"datamodule.labels={wanted}: datamodule.source={self.source} has no such labels here. Set it to fine."
            )
        return split.labels[wanted]


def _names(names: tuple[str, ...], labels: Sequence[int]) -> tuple[str, ...]:
    """Return ``names``, or numbered names if there are none."""
    return names or tuple(f"class {label}" for label in range(max(labels) + 1))
