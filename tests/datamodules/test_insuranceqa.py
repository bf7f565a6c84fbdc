from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dpret.datamodules.insuranceqa import InsuranceQADataModule
from lit_dpret.errors import ConfigurationError, DataError

Write = Callable[..., Path]
QUESTION = {"en": "Does  Fog  Count?", "zh": "", "domain": "sea", "answers": ["1"], "negatives": []}


@pytest.fixture(scope="module")
def installed() -> InsuranceQADataModule:
    pytest.importorskip("insuranceqa_data", reason="needs pip install 'lit-dpret[quickstart]'")
    datamodule = InsuranceQADataModule()
    datamodule.setup()
    return datamodule


@pytest.fixture
def package(write: Write, tmp_path: Path) -> Path:
    """A made-up copy of the package's four files."""
    for name in ("train", "valid", "test"):
        write(f"{name}.json.gz", gzip.compress(json.dumps({"0": {**QUESTION, "en": f"{name}  Fog?"}}).encode()))
    write("answers.json.gz", gzip.compress(json.dumps({"1": {"en": " It \u00a0 does. ", "zh": ""}}).encode()))
    return tmp_path


def test_the_package_s_files_become_ids_splits_and_collapsed_texts(package: Path) -> None:
    data = InsuranceQADataModule(folder=package, lower_case_queries=False).collection
    assert data.passages == {"a1": "It does."}
    assert data.queries == {"train-0": "train Fog?", "dev-0": "valid Fog?", "test-0": "test Fog?"}
    assert data.qrels["dev"] == {"dev-0": {"a1": 1}}
    assert data.domains["test-0"] == data.passage_domains["a1"] == "sea"
    assert InsuranceQADataModule(folder=package).collection.queries["train-0"] == "train fog?"


@pytest.mark.slow
def test_the_installed_data_has_the_published_sizes(installed: InsuranceQADataModule) -> None:
    data = installed.collection
    assert len(data.passages) == 27_413
    assert {split: len(qrels) for split, qrels in data.qrels.items()} == {"train": 12_889, "dev": 2_000, "test": 2_000}
    assert len(set(data.domains.values())) == 12
    installed.use_unit("query")
    units = installed.train_units()
    sizes = Counter(len(units.rows(unit)) for unit in range(len(units)))
    assert len(units) == 12_889 and max(sizes) == 15
    assert sum(size * count for size, count in sizes.items()) == 21_325 == len(installed.pair_rows("train"))


def test_the_installed_data_equals_the_converted_folder(installed: InsuranceQADataModule, shared_data: Path) -> None:
    theirs = InsuranceQADataModule(folder=shared_data / "insuranceqa").collection
    ours = installed.collection
    assert list(ours.passages.items()) == list(theirs.passages.items())
    assert list(ours.queries.items()) == list(theirs.queries.items())
    assert ours.domains == theirs.domains and ours.passage_domains == theirs.passage_domains
    for split in ("train", "dev", "test"):
        pairs = [
            [(query, *pair) for query, judged in data.qrels[split].items() for pair in judged.items()]
            for data in (ours, theirs)
        ]
        assert pairs[0] == pairs[1]
    key = bytes(32)
    assert ours.fingerprint(key) == theirs.fingerprint(key)


def test_without_the_package_or_its_data_the_extra_and_the_version_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_data = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for spec, told in ((None, r"'lit-dpret\[quickstart\]'"), (without_data, r"insuranceqa-data==1\.0")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(ConfigurationError, match=told):
            InsuranceQADataModule()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train", b"not gzip", "cannot be read"),
        ("test", gzip.compress(mtime=0, data=b'{"0": {}}' * 500)[:-9], "cannot be read"),
        ("answers", gzip.compress(mtime=0, data=b'{"1":\n {"en": }}'), "line 2: malformed JSON"),
        ("answers", gzip.compress(mtime=0, data=b"{}"), "holds no entries"),
        (
            "valid",
            gzip.compress(mtime=0, data=b'{"0": {"en": "secret", "domain": "d"}}'),
            "entry '0': no key 'answers'; found: en",
        ),
        ("valid", gzip.compress(mtime=0, data=b'{"0": {"en": 3}}'), "'en' is not a str"),
        ("valid", gzip.compress(mtime=0, data=b'{"0": 3}'), "found: no object"),
    ],
)
def test_a_broken_file_of_the_package_is_refused(
    package: Path, write: Write, name: str, content: bytes, reason: str
) -> None:
    path = write(f"{name}.json.gz", content)
    with pytest.raises(DataError) as error:
        InsuranceQADataModule(folder=package).setup()
    assert str(path) in str(error.value) and reason in str(error.value) and "secret" not in str(error.value)


def test_an_answer_or_a_file_that_does_not_exist_is_refused(package: Path, write: Write) -> None:
    broken: dict[str, Any] = {"0": {**QUESTION, "answers": ["9"]}}
    write("train.json.gz", gzip.compress(json.dumps(broken).encode()))
    with pytest.raises(DataError, match="unknown passage 'a9'"):
        InsuranceQADataModule(folder=package).setup()
    (package / "valid.json.gz").unlink()
    with pytest.raises(DataError, match=r"valid\.json\.gz does not exist"):
        InsuranceQADataModule(folder=package).prepare_data()
