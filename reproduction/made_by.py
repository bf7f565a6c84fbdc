"""Which training made what a study goes on from, by the ledger that cards name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import read_card
from lit_dpret.errors import ResumeError
from lit_dpret.tasks.stages import Stages

_READ = "ledger_head"


def made_by(folder: Path) -> dict[str, str]:
    """For the result of a stage that reads what a private training made: which one that was, by the card in ``folder``.

    It is the last record of the ledger that the card rests on, and no two trainings have the same.
    """
    return {_READ: str(read_card(folder)["ledger"]["head"])}


def refuse_other_training(
    stages: Stages, run_dir: Path, generator: str, *, cards: Mapping[str, Path], readers: Sequence[str]
) -> None:
    """Refuse finished stages that come from another training than the one in a generator's folder.

    Args:
        stages: Of the study.
        run_dir: Where they lie.
        generator: The stage of the training.
        cards: The folder of the card of each stage that has one.
        readers: Stages without a card, whose results hold `made_by`.

    Raises:
        ResumeError: Naming the first one.
    """
    source = made_by(run_dir / generator) if stages.is_done(generator) else None
    for stage in filter(stages.is_done, [*cards, *readers]):
        found: Mapping[str, Any] = made_by(cards[stage]) if stage in cards else stages.run(stage, _not_again)
        if source is None or found[_READ] != source[_READ]:
            raise ResumeError(
                f"resume=true, but {stage} comes from another training than the one in {generator}, which was moved "
                f"away, or made anew. Restore that, or move {run_dir / stage} and what was made with it elsewhere as "
                "well; what a ledger is charged with stays spent."
            )


def _not_again(folder: Path, resume: bool) -> dict[str, Any]:
    raise AssertionError(f"{folder} is finished")
