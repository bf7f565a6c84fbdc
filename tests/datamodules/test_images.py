"""Images as private units: every format, public samples, what the privacy plan asks for, and refusals."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_images as tiny
import torch

from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.accounting.releases import TruncatedPoisson
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler

KEY = bytes(range(32))
Make = Callable[[Path], Path]


@pytest.mark.parametrize(
    ("source", "make", "shape", "train"),
    [
        ("cifar10", tiny.cifar10_pickles, (3, 32, 32), 10),
        ("cifar10", tiny.parquet, (3, 32, 32), 12),
        ("cifar100", tiny.cifar100_pickles, (3, 32, 32), 12),
        ("fashion_mnist", tiny.idx, (1, 28, 28), 12),
        ("vision_folder", tiny.class_folders, (3, 8, 8), 12),
    ],
)
def test_every_format_gives_bytes_and_labels(
    source: Any, make: Make, shape: tuple[int, ...], train: int, tmp_path: Path
) -> None:
    data = ImagesDataModule(source=source, folder=make(tmp_path))
    data.prepare_data()
    data.setup("fit")
    images, labels = data.labelled("train")
    assert images.shape == (train, *shape) and images.dtype == torch.uint8
    assert labels.shape == (train,) and labels.dtype == torch.int64
    assert len(data.class_names()) > int(labels.max())
    assert len(data.labelled("test")[0]) == len(data.labelled("test")[1]) > 0


def test_pixels_and_labels_arrive_as_they_were_written_in_channels_rows_and_columns(tmp_path: Path) -> None:
    for as_struct in (False, True):  # plain bytes, or a struct of them as on the hub
        folder = tiny.parquet(tmp_path / str(as_struct), as_struct=as_struct)
        images, labels = ImagesDataModule(source="cifar10", folder=folder).labelled("train")
        assert torch.equal(images, torch.from_numpy(tiny.pixels(tiny.TRAIN)))
        assert labels.tolist() == [i % 10 for i in range(tiny.TRAIN)]
    pickled = ImagesDataModule(source="cifar10", folder=tiny.cifar10_pickles(tmp_path / "pickles"))
    images, labels = pickled.labelled("train")
    assert torch.equal(images[2:4], torch.from_numpy(tiny.pixels(2, seed=2))) and labels[2:4].tolist() == [2, 3]


def test_the_coarse_labels_of_cifar100_are_its_own(tmp_path: Path) -> None:
    data = ImagesDataModule(source="cifar100", folder=tiny.cifar100_pickles(tmp_path))
    fine, coarse = data.labelled("test")[1], data.labelled("test", labels="coarse")[1]
    assert torch.equal(coarse, fine // 5)
    assert len(data.class_names("coarse")) == 20 and data.class_names("coarse")[3] == "group 3"


@pytest.mark.parametrize(("source", "make", "groups"), [("cifar10", tiny.parquet, 5), ("fashion_mnist", tiny.idx, 4)])
def test_a_stand_in_groups_labels_and_each_label_is_in_one_group(
    source: Any, make: Make, groups: int, tmp_path: Path
) -> None:
    data = ImagesDataModule(source=source, folder=make(tmp_path), labels="coarse")
    fine, coarse = data.labelled("train", labels="fine")[1].tolist(), data.labelled("train")[1].tolist()
    assert len(set(zip(fine, coarse, strict=True))) == len(set(fine)) == 10
    assert set(coarse) == set(range(groups)) and len(data.class_names()) == groups


# -- public samples --------------------------------------------------------------------------


def test_a_public_sample_is_of_any_file_order_follows_its_seed_and_leaves_the_test_split_alone(tmp_path: Path) -> None:
    made = [tiny.parquet(tmp_path / "a"), tiny.parquet(tmp_path / "b", order=list(reversed(range(tiny.TRAIN))))]

    def chosen(folder: Path, seed: int) -> frozenset[str]:
        data = ImagesDataModule(source="cifar10", folder=folder, max_images=5, seed=seed)
        assert len(data.labelled("test")[0]) == tiny.TEST
        return frozenset(data.train_units().rows(unit)[0].image_id for unit in range(data.n_units))

    assert chosen(made[0], 0) == chosen(made[1], 0) and len(chosen(made[0], 0)) == 5
    assert len({chosen(made[0], seed) for seed in range(4)}) > 1
    limited = ImagesDataModule(source="cifar10", folder=made[0], max_test_images=2)
    assert len(limited.labelled("test")[0]) == 2


# -- the private side ------------------------------------------------------------------------


def drawn_batches(data: ImagesDataModule, secret: bytes = KEY) -> list[UnitBatch]:
    """Three steps, drawn as a privacy plan would; rows are collated to (id, draw)."""
    data.use_unit("pair", "zero_out")
    stream = KeyedStream(secret, "run")
    law = TruncatedPoisson(sample_rate=0.4, cap=6, n=data.n_units)
    sampler = PrivateBatchSampler(law, units=data.n_units, steps_per_epoch=3, physical_batch_size=4, stream=stream)
    data.attach(sampler, UnitCollator(lambda rows: [(row.image_id, row.draw) for row in rows], data.rows_per_unit))
    return list(data.train_dataloader())


def test_rows_carry_a_random_number_of_their_draw_that_a_repeated_run_repeats(tmp_path: Path) -> None:
    data = ImagesDataModule(source="cifar10", folder=tiny.parquet(tmp_path))
    first, again, other = (drawn_batches(data, secret) for secret in (KEY, KEY, bytes(32)))
    rows = [row for batch in first for row in batch.rows or []]
    assert rows == [row for batch in again for row in batch.rows or []]
    assert len({draw for _, draw in rows}) == len(rows) > 3
    assert {draw for _, draw in rows}.isdisjoint(draw for batch in other for _, draw in batch.rows or [])


def test_a_fingerprint_is_keyed_and_notices_one_pixel_and_a_row_shows_none(tmp_path: Path) -> None:
    data = ImagesDataModule(source="cifar10", folder=tiny.parquet(tmp_path))
    same = ImagesDataModule(source="cifar10", folder=tmp_path)
    changed = ImagesDataModule(source="cifar10", folder=tmp_path)
    assert repr(same.train_units().rows(0)[0]) == "ImageRow(image_id='train/0', draw=0)"
    pixel = changed.train_units().rows(3)[0].image[0, 0, 0]
    pixel += 1
    assert data.data_fingerprint(KEY) == same.data_fingerprint(KEY)
    assert len({data.data_fingerprint(KEY), data.data_fingerprint(bytes(32)), changed.data_fingerprint(KEY)}) == 3


def test_users_are_no_unit_of_images_nor_is_a_sample_one_of_a_private_number(tmp_path: Path) -> None:
    data = ImagesDataModule(source="cifar10", folder=tmp_path, max_images=5)
    data.use_unit("pair", "zero_out")
    with pytest.raises(ConfigurationError, match=r"max_images=5 cannot go with privacy\.neighbours=add_or_remove"):
        data.use_unit("pair", "add_or_remove")
    with pytest.raises(ConfigurationError, match=r"privacy\.unit=user"):
        data.use_unit("user")


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["cifar10", "cifar100", "fashion_mnist", "vision_folder"])
def test_a_missing_folder_says_where_to_get_the_data(source: Any, tmp_path: Path) -> None:
    data = ImagesDataModule(source=source, folder=tmp_path / "nowhere")
    where = {"cifar10": "kriz/cifar.*folder=null", "cifar100": "kriz/cifar", "fashion_mnist": "dataset-fashion-mnist"}
    for look in (data.prepare_data, data.setup):
        with pytest.raises(DataError, match=where.get(source, "train/CLASS/IMAGE")):
            look()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "mnist"}, r"datamodule\.source='mnist' is not one of"),
        ({}, r"datamodule\.folder is not set\. Set datamodule\.folder"),
        ({"folder": "x", "hub": "y"}, "both name the data"),
        ({"source": "vision_folder", "hub": "y"}, r"datamodule\.hub=y cannot be read.*datamodule\.hub to null"),
        ({"folder": "x", "image_size": 8}, r"datamodule\.image_size=8 has no meaning"),
        ({"folder": "x", "labels": "rough"}, r"datamodule\.labels='rough'"),
        ({"folder": "x", "max_images": 0}, r"datamodule\.max_images=0"),
        ({"folder": "x", "max_test_images": True}, r"datamodule\.max_test_images=True"),
        ({"folder": "x", "sampling": "sorted"}, r"datamodule\.sampling='sorted'"),
        ({"folder": "x", "sampling": "poisson", "cap": 3}, r"datamodule\.cap=3 has no meaning"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ImagesDataModule(**{"source": "cifar10", **settings})


def test_a_folder_of_classes_has_no_coarse_labels_and_its_images_are_of_one_size_or_resized(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"datamodule\.labels=coarse"):
        folder = tiny.class_folders(tmp_path / "plain")
        ImagesDataModule(source="vision_folder", folder=folder, labels="coarse").labelled("train")
    folder = tiny.class_folders(tmp_path, sizes=(8, 10))
    with pytest.raises(DataError, match=r"differ in size.*datamodule\.image_size"):
        ImagesDataModule(source="vision_folder", folder=folder).setup()
    resized = ImagesDataModule(source="vision_folder", folder=folder, image_size=6)
    assert resized.labelled("train")[0].shape == (tiny.TRAIN, 3, 6, 6)


def test_a_class_of_the_test_split_alone_and_a_file_that_is_no_image_are_refused(tmp_path: Path) -> None:
    tiny.class_folders(tmp_path)
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "lynx")
    with pytest.raises(DataError, match="class 'lynx'"):
        ImagesDataModule(source="vision_folder", folder=tmp_path).labelled("test")
    (tmp_path / "train" / "cat" / "00.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="image 0 cannot be decoded"):
        ImagesDataModule(source="vision_folder", folder=tmp_path).setup()


class _Shout:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this code ran",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.cifar10_pickles(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps({b"data": _Shout()}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2.*__builtin__\.print"):
        ImagesDataModule(source="cifar10", folder=tmp_path).setup()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-8], "cannot be read"),
        (lambda data: b"\0\0\x0d\x03" + data, "IDX file of unsigned bytes"),
        (lambda data: b"\0\0\x08\x01\0\0\0\x09abc", "states the shape"),
    ],
)
def test_a_broken_idx_file_is_refused_by_name(spoil: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = tiny.idx(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte\.gz.*{message}"):
        ImagesDataModule(source="fashion_mnist", folder=tmp_path).setup()


# -- the hub, through a stand-in of its package ----------------------------------------------


class _HubTable:
    """As much of ``datasets.Dataset`` as is read."""

    column_names: tuple[str, ...] = ("img", "fine_label", "coarse_label")

    def __init__(self) -> None:
        names = SimpleNamespace(names=[f"fine {i}" for i in range(100)])
        self.features = {"fine_label": names, "coarse_label": SimpleNamespace(names=[f"g{i}" for i in range(20)])}
        self._images = tiny.pixels(4)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> Any:
        from PIL import Image

        if isinstance(key, str):
            return [5 * i for i in range(4)] if key == "fine_label" else list(range(4))
        return {"img": Image.fromarray(self._images[key].transpose(1, 2, 0))}


def test_a_data_set_of_the_hub_is_read_by_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> _HubTable:
        asked.append((name, split))
        return _HubTable()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    data = ImagesDataModule(source="cifar100", hub="uoft-cs/cifar100", labels="coarse")
    images, labels = data.labelled("train")
    assert asked == [("uoft-cs/cifar100", "train")]
    assert torch.equal(images, torch.from_numpy(tiny.pixels(4)))
    assert labels.tolist() == [0, 1, 2, 3] and data.class_names()[2] == "g2"


def test_the_hub_without_its_package_or_network_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ImagesDataModule(source="cifar10", hub="uoft-cs/cifar10")
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs datasets"):
        data.setup()

    def offline(name: str, *, split: str) -> None:
        raise OSError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"datamodule\.hub=uoft-cs/cifar10 cannot be loaded: no route"):
        data.setup()
