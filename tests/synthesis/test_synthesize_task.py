"""`task=synthesize` says on the card what its own settings were chosen on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_generator import PASSAGES

from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError
from lit_dpret.tasks import Synthesize
from lit_dpret.tasks.parts import Parts


class Public:
    """A datamodule with passages and nothing else."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def public_passages(self) -> dict[str, str]:
        return dict(PASSAGES)


class WithLog(Public):
    collection = SimpleNamespace(queries={"q": "Bana elo, ibi omu?"})


def synthetic_card(source: Path, folder: Path, make: Any = Public, **settings: Any) -> dict[str, Any]:
    def no_part(**_: Any) -> Any:
        raise AssertionError("generating trains nothing")

    parts = Parts(run_dir=folder, make_privacy=no_part, make_datamodule=make, make_module=no_part,
                  make_trainer=no_part)  # fmt: skip
    Synthesize(generator=source, passages_are_public=True, max_passages=2, max_new_tokens=4, **settings).run(parts)
    return read_card(folder / "synthetic")


def test_settings_that_were_fixed_beforehand_are_no_gap_of_the_card(source: Path, tmp_path: Path) -> None:
    gap = "synthetic: The choice of hyper-parameters: on which data it was made was not stated."
    assert gap in synthetic_card(source, tmp_path / "unknown")["not_covered"]
    card = synthetic_card(source, tmp_path / "none", tuning_data="none", tuning_note="as they come")
    assert card["tuning"]["data"] == "none" and card["tuning"]["note"] == "as they come"
    assert gap not in card["not_covered"]
    with pytest.raises(ConfigurationError, match=r"task\.tuning_data='?mine"):
        Synthesize(generator=source, tuning_data="mine")


@pytest.mark.parametrize("told", [{"tuning_note": "unlike bana elo ibi omu"}, {"license": "bana-elo-ibi-omu"}])
def test_a_query_of_the_log_is_no_note_on_the_card(source: Path, tmp_path: Path, told: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\.{next(iter(told))}") as refused:
        synthetic_card(source, tmp_path / "run", WithLog, **told)
    assert refused.value.trap == "T25" and not (tmp_path / "run" / "synthetic").exists()
    assert synthetic_card(source, tmp_path / "other", WithLog, tuning_note="unlike bana elo")
