"""The plan of a run covers the files that a training reads beside its DataModule: a resume with others is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frozen_heads import frozen
from negative_cases import dual
from pair_stand_ins import data_module
from stand_ins import fit

from lit_dpret.callbacks.planning import fingerprint_of_files
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.negatives import LabelledNegatives
from lit_dpret.negatives.drawn import LabelledNegative
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.tasks.uncovered import refuse_training_data

KEY = bytes(32)


def labels(path: Path, margin: float = 1.0) -> Path:
    records = [
        LabelledNegative(
            query_id=f"queries{i}", passage_id=f"corpus{i}", negative_id=f"corpus{(i + 5) % 13}", margin=margin
        )
        for i in range(13)
    ]
    path.write_text("".join(record.line() for record in records), encoding="utf-8")
    return path


def head(**settings: Any) -> FrozenDualEncoder:
    """Not prepared: it looks through the data that it is given."""
    return FrozenDualEncoder(optimizer=frozen().optimizer_spec, encoder=frozen().encoder, **settings)


def module_of(folder: Path, family: Any = head, **mode: Any) -> Any:
    known = {"eps": 8.0, "delta": 1e-2, "max_grad_norm": 0.1, "noise_multiplier": 4.0, "secret_file": folder / "secret"}
    privacy = DPSGD(**known | mode)
    source = LabelledNegatives(file=folder / "labels.tsv", lines_are_independent=True)
    return family(privacy=privacy, negatives=[source], loss=MarginMSELoss())


def private_data(folder: Path) -> PairsDataModule:
    if not (folder / "data").exists():
        data_module(folder / "data")
    return PairsDataModule(folder=folder / "data", sampling="poisson", expected_batch_size=4, physical_batch_size=16)


def test_a_run_goes_on_with_the_labels_that_it_began_with_and_no_others(tmp_path: Path) -> None:
    labels(tmp_path / "labels.tsv")
    fit(tmp_path / "run", module_of(tmp_path), private_data(tmp_path), steps=2)
    labels(tmp_path / "labels.tsv", margin=-1.0)
    with pytest.raises(ResumeError, match="another file of labels or negatives"):
        fit(tmp_path / "run", module_of(tmp_path), private_data(tmp_path), steps=2, resume=True)
    labels(tmp_path / "labels.tsv")
    fit(tmp_path / "run", module_of(tmp_path), private_data(tmp_path), steps=2, resume=True)


def test_the_data_of_a_run_with_labels_are_known_as_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks the ledger whether somebody's public queries are the ones it trained on is not led astray."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    labels(tmp_path / "labels.tsv")
    module = module_of(tmp_path, secret_file=None)
    fit(tmp_path / "run", module, private_data(tmp_path), steps=1)
    data = private_data(tmp_path)
    data.setup("fit")
    with pytest.raises(ConfigurationError, match=r"task\.reference=public"):
        refuse_training_data(data, tmp_path / "run", knob="task.reference")


@pytest.mark.parametrize("family", [head, dual])
def test_the_fingerprint_is_keyed_and_covers_the_files(family: Any, tmp_path: Path) -> None:
    labels(tmp_path / "labels.tsv")
    module = module_of(tmp_path, family)
    found = fingerprint_of_files(module, KEY)
    assert found == fingerprint_of_files(module, KEY) != fingerprint_of_files(module, bytes([1] * 32))
    assert fingerprint_of_files(frozen(), KEY) is None
    labels(tmp_path / "labels.tsv", margin=2.0)
    assert fingerprint_of_files(module, KEY) != found
    (tmp_path / "labels.tsv").unlink()
    with pytest.raises(DataError, match=r"labels\.tsv, which model\.negatives names, cannot be read"):
        fingerprint_of_files(module, KEY)
