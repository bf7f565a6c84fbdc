"""Tiny image data sets in each of the formats that `ImagesDataModule` reads, written by the tests themselves."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path

import numpy as np

TRAIN, TEST = 12, 6


def pixels(count: int, *, channels: int = 3, size: int = 32, seed: int = 0) -> np.ndarray:
    """Return random bytes of shape (count, channels, size, size)."""
    drawn = np.random.default_rng(seed).integers(0, 256, (count, channels, size, size))
    return drawn.astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """Return an image of shape (channels, height, width) as a PNG, which is lossless."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def cifar10_pickles(root: Path, *, images: int = 2) -> Path:
    """Write ``cifar-10-batches-py`` with bytes as keys, as Python 2 did; ``images`` in each of its six files."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, seed in [(f"data_batch_{part}", part) for part in range(1, 6)] + [("test_batch", 6)]:
        batch = {b"data": pixels(images, seed=seed).reshape(images, -1),
                 b"labels": [(seed + i) % 10 for i in range(images)]}  # fmt: skip
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return root


def cifar100_pickles(root: Path) -> Path:
    """Write ``cifar-100-python`` with its names; twenty groups of five consecutive labels."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, count in (("train", TRAIN), ("test", TEST)):
        fine = [(17 * i) % 100 for i in range(count)]
        batch = {b"data": pixels(count, seed=count).reshape(count, -1), b"fine_labels": fine,
                 b"coarse_labels": [label // 5 for label in fine]}  # fmt: skip
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"fine_label_names": [f"fine {i}".encode() for i in range(100)],
            b"coarse_label_names": [f"group {i}".encode() for i in range(20)]}  # fmt: skip
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    return root


def parquet(root: Path, *, order: list[int] | None = None, as_struct: bool = False) -> Path:
    """Write ``train.parquet`` and ``test.parquet``: PNG bytes, labels and names, in any order of rows."""
    import pyarrow
    from pyarrow import parquet

    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TRAIN), ("test", TEST)):
        places = order if order is not None and split == "train" else list(range(count))
        images = [png(image) for image in pixels(count)]
        bytes_of = [{"bytes": images[i], "path": None} if as_struct else images[i] for i in places]
        columns = {"image": bytes_of, "label": [i % 10 for i in places], "name": [f"{split}/{i}" for i in places]}
        parquet.write_table(pyarrow.table(columns), root / f"{split}.parquet")
    return root


def idx(root: Path) -> Path:
    """Write the four files of Fashion-MNIST, gzipped."""
    root.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", TRAIN), ("t10k", TEST)):
        images = pixels(count, channels=1, size=28)[:, 0]
        for part, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
            (root / f"{stem}-{part}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return root


def class_folders(root: Path, *, sizes: tuple[int, ...] = (8,)) -> Path:
    """Write ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE`` for the classes cat and dog."""
    for split, count in (("train", TRAIN), ("test", TEST)):
        for i in range(count):
            path = root / split / ("cat", "dog")[i % 2] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(pixels(1, size=sizes[i % len(sizes)], seed=i)[0]))
    return root
