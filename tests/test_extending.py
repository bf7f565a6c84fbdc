"""The three examples of `CONTRIBUTING.md` work as it says: a privacy mode, a DataModule and a task of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from configured import composed
from test_cli import TINY, write_log

from lit_dpret.cards.verification import verify_chain
from lit_dpret.cli import run
from lit_dpret.errors import DataError
from lit_dpret.privacy.modes import DPSGD, GaussianMode, PrivacyMode, base

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "extending"
LOG = """question,answer,split
what is a water butt,A water butt collects rain.,train
how do i collect rain,A water butt collects rain.,train
where do ships rest,A harbour shelters ships.,test
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def command(folder: Path, *overrides: str) -> Any:
    """The configuration of ``python train.py --config-dir examples/extending/configs``, in ``folder``."""
    return composed(f"hydra.searchpath=[file://{EXAMPLES / 'configs'}]", *overrides, f"run_dir={folder}")


@pytest.mark.costly
def test_an_own_mode_trains_masked_sums_and_its_facts_are_verified(tmp_path: Path) -> None:
    noise = ["privacy.noise_multiplier=5.0", f"privacy.secret_file={tmp_path / 'secret'}"]
    pairs = f"datamodule.pairs={write_log(tmp_path)}"
    run(command(tmp_path / "run", *TINY, pairs, "privacy=masked", "privacy.mask_seed=3", *noise))
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["mechanism"]["mode"] == "masked"
    assert card["mechanism"]["mode_facts"] == {"masked_share": 0.5, "mask_seed": 3}
    assert not verify_chain(tmp_path / "run").failed


def test_the_module_of_the_modes_lists_what_each_mode_defines() -> None:
    listed = set(re.findall(r"^\* ``(\w+)``", str(base.__doc__), re.MULTILINE))
    declared = {name for name in PrivacyMode.__annotations__ if not name.startswith("_")}
    without_default = {name for name in declared if not hasattr(PrivacyMode, name)}
    assert listed == PrivacyMode.__abstractmethods__ | without_default
    assert GaussianMode.__abstractmethods__ == {"plan"} and not DPSGD.__abstractmethods__


def log(folder: Path, more: str = "") -> str:
    (folder / "log.csv").write_text(LOG + more, encoding="utf-8")
    return f"datamodule.file={folder / 'log.csv'}"


def test_an_own_datamodule_is_examined_and_every_bad_row_is_reported(tmp_path: Path) -> None:
    check = ["task=check_data", "datamodule=questions"]
    run(command(tmp_path / "good", *check, log(tmp_path)))
    facts = json.loads((tmp_path / "good" / "check_data.private.json").read_text(encoding="utf-8"))
    assert facts["queries"] == 3 and facts["passages"] == 2
    with pytest.raises(DataError, match="empty text"):
        run(command(tmp_path / "bad", *check, log(tmp_path, ",A harbour shelters ships.,train\n")))


def test_an_own_task_is_run_by_its_name(tmp_path: Path) -> None:
    run(command(tmp_path / "run", "task=count_words", "task.most=1", "datamodule=questions", log(tmp_path)))
    assert json.loads((tmp_path / "run" / "words.json").read_text(encoding="utf-8")) == [["a", 2]]
