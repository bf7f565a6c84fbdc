"""The file formats in which labelled images come, each read into bytes and numbers and nothing more.

Reading is in two steps, so that a public sample of a data set decodes only the images that it
keeps: a `RawSplit` knows ids and labels at once, and decodes the images asked for.

Nothing here runs code from a file: pickled batches are read by an unpickler that can build NumPy
arrays, and refuses everything else.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

_IDX_TYPES = {0x08: np.dtype(np.uint8)}
_HARMLESS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True, kw_only=True)
class RawSplit:
    """One split as its files hold it.

    Attributes:
        source: The file or folder, for messages.
        ids: One public id per image; the same image keeps its id whatever else the files hold.
        labels: The label of each image, counted from 0.
        coarse: The group of each image, where the files name groups.
        decode: The images at some positions, uint8 of shape (positions, channels, height, width).
        label_names: Names of the labels, where the files give them.
        coarse_names: Names of the groups, where the files give them.
    """

    source: str
    ids: Sequence[str]
    labels: Sequence[int]
    decode: Callable[[Sequence[int]], Tensor]
    coarse: Sequence[int] | None = None
    label_names: tuple[str, ...] = ()
    coarse_names: tuple[str, ...] = ()


def stacked(pixels: np.ndarray) -> Callable[[Sequence[int]], Tensor]:
    """The ``decode`` of images that lie in memory as one uint8 array of shape (n, channels, height, width)."""
    return lambda positions: torch.from_numpy(np.ascontiguousarray(pixels[np.asarray(positions, dtype=np.int64)]))


def encoded(
    images: Callable[[int], bytes], *, source: str, size: int | None = None
) -> Callable[[Sequence[int]], Tensor]:
    """The ``decode`` of JPEG, PNG and other files of one size; with ``size`` each is resized to that square.

    Raises:
        ConfigurationError: Pillow is not installed.
        DataError: On decoding, a file is no image, or the images differ in size.
    """
    pillow = optional("PIL.Image", "Pillow", source)

    def one(position: int) -> np.ndarray:
        try:
            with pillow.open(io.BytesIO(images(position))) as image:
                rgb = image.convert("RGB")
                return np.asarray(rgb if size is None else rgb.resize((size, size), pillow.Resampling.BILINEAR))
        except (OSError, SyntaxError) as error:
            raise DataError(f"{source}: image {position} cannot be decoded ({type(error).__name__}).") from error

    def decode(positions: Sequence[int]) -> Tensor:
        pixels = [one(position) for position in positions]
        if len({image.shape for image in pixels}) > 1:
            raise DataError(
                f"{source}: the images differ in size. Set datamodule.image_size to resize them to a square."
            )
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()

    return decode


def optional(module: str, package: str, source: str) -> Any:
    """An optional package.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f'Reading {source} needs {package}, which is not installed. Run: pip install "lit-dpret[vision]"'
        ) from error


def read_idx(path: Path) -> np.ndarray:
    """The array of an IDX file of bytes (the format of MNIST), compressed with gzip or not.

    Raises:
        DataError: The file cannot be read, or is no IDX file of unsigned bytes.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_TYPES or data[3] < 1:
        raise DataError(f"{path} is no IDX file of unsigned bytes.")
    start = 4 + 4 * data[3]
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], dtype=">u4"))
    if len(data) - start != int(np.prod(shape)) or len(shape) != data[3]:
        raise DataError(f"{path} states the shape {shape} and holds {len(data) - start} bytes.")
    return np.frombuffer(data, dtype=_IDX_TYPES[data[2]], offset=start).reshape(shape)


class _ArraysOnly(pickle.Unpickler):
    """Reads dictionaries, lists, strings, numbers and NumPy arrays; a pickle may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of a pickled CIFAR batch, its keys as text; written by Python 2 or 3.

    Raises:
        DataError: The file cannot be read, is no such dictionary, or holds more than plain data.
    """
    try:
        with path.open("rb") as file:
            found = _ArraysOnly(file, encoding="bytes").load()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # a broken pickle raises almost anything
        raise DataError(f"{path} is no pickled batch of images: {error or type(error).__name__}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is no pickled batch of images: it holds a {type(found).__name__}.")
    return {text(key): value for key, value in found.items()}


def text(value: Any) -> str:
    """A name that Python 2 may have pickled as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def read_parquet(paths: Sequence[Path], *, labels: str, coarse: str | None = None) -> RawSplit:
    """A table with encoded images in ``image`` or ``img`` (bytes, or the hub's struct of them) and labels.

    Args:
        paths: The parts of the table, in order.
        labels: The column of the labels.
        coarse: The column of the groups, read where it is there.

    Raises:
        DataError: A file cannot be read, or a column is missing.
        ConfigurationError: pyarrow or Pillow is not installed.
    """
    source = str(paths[0]) if len(paths) == 1 else str(paths[0].parent)
    parquet = optional("pyarrow.parquet", "pyarrow", source)
    arrow = optional("pyarrow", "pyarrow", source)
    try:
        table = arrow.concat_tables([parquet.read_table(path) for path in paths])
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{source} cannot be read: {type(error).__name__}.") from error
    column = next((name for name in ("image", "img") if name in table.column_names), None)
    if column is None or labels not in table.column_names:
        raise DataError(f"{source} needs the columns image (or img) and {labels}; it has {table.column_names}.")
    images = table.column(column).combine_chunks()
    if arrow.types.is_struct(images.type):
        images = images.field("bytes")
    numbers = table.column(labels).to_pylist()
    return RawSplit(
        source=source,
        ids=table.column("name").to_pylist() if "name" in table.column_names else positions(len(numbers)),
        labels=numbers,
        coarse=table.column(coarse).to_pylist() if coarse in table.column_names else None,
        decode=encoded(lambda position: bytes(images[position].as_py()), source=source),
    )


def positions(count: int) -> list[str]:
    """Ids of images that have no names: their places in the file."""
    return [str(position) for position in range(count)]
