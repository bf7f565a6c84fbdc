"""Sources of labelled images: CIFAR-10, CIFAR-100, Fashion-MNIST, a folder of classes, or the hub.

Nothing is downloaded unless a data set of the hub is named, and no code from a file is run. The 20 groups of CIFAR-100
are the classes of paper 002's second task (section 5.2); the groups of CIFAR-10 and Fashion-MNIST, which replace them,
are ours.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import DataError, first_line
from lit_dpret.lazy import optional

SourceName = Literal["cifar10", "cifar100", "fashion_mnist", "vision_folder"]
ImageSplit = Literal["train", "test"]

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_GROUPS = ("road vehicles", "craft", "pets", "hoofed animals", "other animals")
_CIFAR10_GROUP_OF = (1, 0, 4, 2, 3, 2, 4, 3, 1, 0)
_FASHION = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_FASHION_GROUPS = ("tops", "outfits and legwear", "footwear", "bags")
_FASHION_GROUP_OF = (0, 1, 0, 1, 0, 2, 0, 2, 3, 2)
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm"}
_UNSIGNED_BYTE = 0x08  # in an IDX file
_HARMLESS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True, kw_only=True)
class RawSplit:
    """One split as stored in its files."""

    source: str  # the file or folder, for messages
    ids: Sequence[str]  # one public id per image: its path, its name in the file, or its position there
    labels: Sequence[int]  # the label of each image, counted from 0
    # The images at some positions, uint8 of shape (positions, channels, height, width).
    decode: Callable[[Sequence[int]], Tensor]
    coarse: Sequence[int] | None = None  # the group of each image, if the files name groups
    label_names: tuple[str, ...] = ()  # names of the labels, if the files give them
    coarse_names: tuple[str, ...] = ()  # names of the groups, if the files give them


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of data set."""

    read: Callable[[Path, ImageSplit, int | None], RawSplit]  # reads the split, given (folder, split, image_size)
    missing: str  # where to get the data, as a sentence
    default_folder: Path | None = None  # its usual path; None if there is none
    label_column: str | None = None  # the column of its labels on the hub; None if it cannot be read from the hub
    label_names: tuple[str, ...] = ()
    # Names of the groups that replace coarse labels, and the group of each label.
    groups: tuple[tuple[str, ...], tuple[int, ...]] | None = None


def read_source(name: SourceName, folder: Path, split: ImageSplit, *, image_size: int | None = None) -> RawSplit:
    """Read one split of a data set in ``folder``, with the names and groups of its source."""
    if not folder.is_dir():
        raise DataError(f"datamodule.folder={folder} is not a folder. {SOURCES[name].missing}")
    return _described(name, SOURCES[name].read(folder, split, image_size))


def read_hub(name: SourceName, hub: str, split: ImageSplit) -> RawSplit:
    """Read one split of a data set of the Hugging Face hub, through the package ``datasets``, which downloads it."""
    datasets = optional("datasets", f"datamodule.hub={hub}", "lit-dpret[vision]")
    try:
        table: Any = datasets.load_dataset(hub, split=split)
    except Exception as error:  # the hub raises many kinds of error
        raise DataError(f"datamodule.hub={hub} cannot be loaded: {first_line(error)}.") from error
    column = next((c for c in ("img", "image") if c in table.column_names), None)
    labels = SOURCES[name].label_column
    if column is None or labels is None or labels not in table.column_names:
        raise DataError(
            f"datamodule.hub={hub} needs the columns img (or image) and {labels}; it has {table.column_names}."
        )
    grouped = "coarse_label" in table.column_names

    def decode(places: Any) -> Tensor:
        pixels = np.stack([np.asarray(table[int(place)][column].convert("RGB")) for place in places])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def names(of: str) -> tuple[str, ...]:
        return tuple(getattr(table.features[of], "names", None) or ())

    return _described(
        name,
        RawSplit(
            source=hub,
            ids=_positions(len(table)),
            labels=list(table[labels]),
            coarse=list(table["coarse_label"]) if grouped else None,
            decode=decode,
            label_names=names(labels),
            coarse_names=names("coarse_label") if grouped else (),
        ),
    )


def _described(name: SourceName, raw: RawSplit) -> RawSplit:
    """Return ``raw``, checked, with the source's names and replacement groups if the files have none."""
    source = SOURCES[name]
    if not raw.labels:
        raise DataError(f"{raw.source} holds no images.")
    raw = replace(raw, label_names=raw.label_names or source.label_names)
    if raw.coarse is None and source.groups is not None:
        group_names, group_of = source.groups
        if max(raw.labels) >= len(group_of):
            raise DataError(f"{raw.source} has the label {max(raw.labels)}; {name} has {len(group_of)} labels.")
        raw = replace(raw, coarse=[group_of[label] for label in raw.labels], coarse_names=group_names)
    for numbers, names in ((raw.labels, raw.label_names), (raw.coarse or [0], raw.coarse_names)):
        if min(numbers) < 0 or (names and max(numbers) >= len(names)):
            raise DataError(
                f"{raw.source} has labels from {min(numbers)} to {max(numbers)} and {len(names)} names. Labels count "
                "from 0, and each needs a name."
            )
    return raw


def _cifar10(folder: Path, split: ImageSplit, image_size: int | None) -> RawSplit:
    pickles = _first(folder / "cifar-10-batches-py", folder, holding="data_batch_1")
    if pickles is None:
        return _parquet(folder, split, "cifar10", labels="label")
    names = [f"data_batch_{part}" for part in range(1, 6)] if split == "train" else ["test_batch"]
    return _pickled(pickles, names, labels="labels")


def _cifar100(folder: Path, split: ImageSplit, image_size: int | None) -> RawSplit:
    pickles = _first(folder / "cifar-100-python", folder, holding="train")
    if pickles is None:
        return _parquet(folder, split, "cifar100", labels="fine_label", coarse="coarse_label")
    raw = _pickled(pickles, [split], labels="fine_labels", coarse="coarse_labels")
    if not (pickles / "meta").exists():
        return raw
    meta = _read_pickle(pickles / "meta")
    return replace(
        raw,
        label_names=tuple(_text(name) for name in meta.get("fine_label_names", ())),
        coarse_names=tuple(_text(name) for name in meta.get("coarse_label_names", ())),
    )


def _fashion_mnist(folder: Path, split: ImageSplit, image_size: int | None) -> RawSplit:
    stem, arrays = "train" if split == "train" else "t10k", []
    for part in ("images-idx3", "labels-idx1"):
        packed, plain = (folder / f"{stem}-{part}-ubyte{suffix}" for suffix in (".gz", ""))
        if not packed.is_file() and not plain.is_file():
            raise DataError(f"{packed} does not exist. {SOURCES['fashion_mnist'].missing}")
        arrays.append(_read_idx(packed if packed.is_file() else plain))
    images, labels = arrays
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{folder}: {split} has images of shape {images.shape} and labels of shape {labels.shape}, which do not "
            "match."
        )
    return RawSplit(
        source=str(folder), ids=_positions(len(labels)), labels=labels.tolist(), decode=_stacked(images[:, None])
    )


def _vision_folder(folder: Path, split: ImageSplit, image_size: int | None) -> RawSplit:
    names = tuple(sorted(path.name for path in (folder / "train").glob("*") if path.is_dir()))
    root = folder / split
    files = sorted(path for path in root.glob("*/*") if path.suffix.lower() in _IMAGE_SUFFIXES)
    if not files:
        raise DataError(f"{root} holds no images. {SOURCES['vision_folder'].missing}")
    if unknown := {path.parent.name for path in files} - set(names):
        raise DataError(f"{root} has the class {sorted(unknown)[0]!r}, which {folder / 'train'} lacks.")
    return RawSplit(
        source=str(root),
        ids=[path.relative_to(root).as_posix() for path in files],
        labels=[names.index(path.parent.name) for path in files],
        decode=_encoded(lambda position: files[position].read_bytes(), source=str(root), size=image_size),
        label_names=names,
    )


def _pickled(folder: Path, names: list[str], *, labels: str, coarse: str | None = None) -> RawSplit:
    batches = []
    for name in names:
        batch = _read_pickle(folder / name)
        missing = [key for key in ("data", labels, coarse) if key is not None and key not in batch]
        if missing:
            raise DataError(f"{folder / name} has no {missing[0]}; it holds {sorted(batch)}.")
        data, count = batch["data"], len(batch[labels])
        if getattr(data, "dtype", None) != np.uint8 or data.shape != (count, 3072):
            raise DataError(f"{folder / name}: data is not one row of 3072 bytes for each of {count} labels.")
        batches.append(batch)
    pixels = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    return RawSplit(
        source=str(folder),
        ids=_positions(len(pixels)),
        labels=[int(label) for batch in batches for label in batch[labels]],
        coarse=[int(label) for batch in batches for label in batch[coarse]] if coarse else None,
        decode=_stacked(pixels),
    )


def _first(*folders: Path, holding: str) -> Path | None:
    return next((folder for folder in folders if (folder / holding).is_file()), None)


def _stacked(pixels: np.ndarray) -> Callable[[Sequence[int]], Tensor]:
    """Return the ``decode`` function for images in memory, uint8 of shape (n, channels, height, width)."""
    return lambda positions: torch.from_numpy(np.ascontiguousarray(pixels[np.asarray(positions, dtype=np.int64)]))


def _encoded(
    images: Callable[[int], bytes], *, source: str, size: int | None = None
) -> Callable[[Sequence[int]], Tensor]:
    """Return the ``decode`` function for encoded images of one size; with ``size``, each is resized to that square."""
    pillow = optional("PIL.Image", f"Reading {source}", "lit-dpret[vision]", package="Pillow")

    def one(position: int) -> np.ndarray:
        try:
            with pillow.open(io.BytesIO(images(position))) as image:
                rgb = image.convert("RGB")
                return np.asarray(rgb if size is None else rgb.resize((size, size), pillow.Resampling.BILINEAR))
        except (OSError, SyntaxError) as error:
            why = "it is broken, or of a format that Pillow does not read"
            raise DataError(f"{source}: image {position} cannot be decoded: {why}.") from error

    def decode(positions: Sequence[int]) -> Tensor:
        pixels = [one(position) for position in positions]
        if len({image.shape for image in pixels}) > 1:
            raise DataError(
                f"{source}: the images differ in size, but one size is needed. With datamodule.source=vision_folder, "
                "datamodule.image_size resizes them to squares."
            )
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()

    return decode


def _read_idx(path: Path) -> np.ndarray:
    """Read the array of an IDX file of bytes (the format of MNIST), with or without gzip."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTE or data[3] < 1:
        raise DataError(f"{path} is not an IDX file of unsigned bytes.")
    start = 4 + 4 * data[3]
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], dtype=">u4"))
    if len(data) - start != int(np.prod(shape)) or len(shape) != data[3]:
        raise DataError(f"{path} states the shape {shape} but holds {len(data) - start} bytes of data.")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


class _ArraysOnly(pickle.Unpickler):
    """Read only dictionaries, lists, strings, numbers and NumPy arrays; other pickles could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def _read_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary of a CIFAR batch pickled by Python 2 or 3, with its keys as text."""
    try:
        with path.open("rb") as file:
            found = _ArraysOnly(file, encoding="bytes").load()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # a broken pickle raises almost anything
        raise DataError(f"{path} is not a pickled batch of images: {first_line(error)}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a pickled batch of images: it holds a {type(found).__name__}.")
    return {_text(key): value for key, value in found.items()}


def _text(value: Any) -> str:
    """Return a name that Python 2 may have pickled as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _parquet(folder: Path, split: ImageSplit, name: SourceName, *, labels: str, coarse: str | None = None) -> RawSplit:
    """Read a table in parts, with labels and encoded images in ``image`` or ``img`` (bytes, or the hub's struct)."""
    whole = folder / f"{split}.parquet"
    paths = [whole] if whole.exists() else sorted(folder.glob(f"{split}-*.parquet"))
    if not paths:
        raise DataError(f"{folder} holds neither pickled batches nor {split}.parquet. {SOURCES[name].missing}")
    source = str(paths[0]) if len(paths) == 1 else str(paths[0].parent)
    arrow = optional("pyarrow", f"Reading {source}", "lit-dpret[vision]")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        table = arrow.concat_tables([parquet.read_table(path) for path in paths])
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{source} cannot be read: {first_line(error)}.") from error
    column = next((name for name in ("image", "img") if name in table.column_names), None)
    if column is None or labels not in table.column_names:
        raise DataError(f"{source} needs the columns image (or img) and {labels}; it has {table.column_names}.")
    images = table.column(column).combine_chunks()
    if arrow.types.is_struct(images.type):
        images = images.field("bytes")
    numbers = table.column(labels).to_pylist()
    return RawSplit(
        source=source,
        ids=table.column("name").to_pylist() if "name" in table.column_names else _positions(len(numbers)),
        labels=numbers,
        coarse=table.column(coarse).to_pylist() if coarse in table.column_names else None,
        decode=_encoded(lambda position: bytes(images[position].as_py()), source=source),
    )


def _positions(count: int) -> list[str]:
    """Return ids of images that have no names: their positions in the file."""
    return [str(position) for position in range(count)]


SOURCES: dict[SourceName, Source] = {
    "cifar10": Source(
        read=_cifar10,
        missing=(
            "Set datamodule.folder to a folder with cifar-10-batches-py (unpack cifar-10-python.tar.gz of "
            "https://www.cs.toronto.edu/~kriz/cifar.html) or with train.parquet and test.parquet (columns image and "
            "label), or set datamodule.folder=null datamodule.hub=uoft-cs/cifar10."
        ),
        label_column="label",
        label_names=_CIFAR10,
        groups=(_CIFAR10_GROUPS, _CIFAR10_GROUP_OF),
    ),
    "cifar100": Source(
        read=_cifar100,
        missing=(
            "Set datamodule.folder to a folder with cifar-100-python (unpack cifar-100-python.tar.gz of "
            "https://www.cs.toronto.edu/~kriz/cifar.html) or with train.parquet and test.parquet (columns img, "
            "fine_label and coarse_label), or set datamodule.folder=null datamodule.hub=uoft-cs/cifar100."
        ),
        label_column="fine_label",
    ),
    "fashion_mnist": Source(
        read=_fashion_mnist,
        missing=(
            "Install the Debian package dataset-fashion-mnist, or set datamodule.folder to a folder with the four IDX "
            "files of https://github.com/zalandoresearch/fashion-mnist."
        ),
        default_folder=Path("/usr/share/datasets/fashion-mnist"),
        label_names=_FASHION,
        groups=(_FASHION_GROUPS, _FASHION_GROUP_OF),
    ),
    "vision_folder": Source(
        read=_vision_folder,
        missing=(
            "Set datamodule.folder to a folder with train/CLASS/IMAGE and test/CLASS/IMAGE, with images in PNG, JPEG, "
            "BMP, WebP or PPM."
        ),
    ),
}
