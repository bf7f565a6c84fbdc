"""Which weights a run starts from, and whether its claim counts the runs that trained them on private data.

Known origins are the folders that modules and transformers remember, the runs that trained weights in this
process (`lit_dpret.privacy.ledger.trained`), and the run that ``init_from`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lit_dpret.cards.file import CARD_NAME, card_above, read_card
from lit_dpret.cards.start import Start, model_folder
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.ledger.trained import TrainedIn, fingerprints, held, mark, noted_in, remember, runs_behind


class OwnWeights:
    """The weights of one fit, known again by later runs in this process.

    Args:
        module: As the fit begins: values that it does not change are not its own.
        itself: The run.
        start: The run that ``init_from`` names.
    """

    def __init__(self, module: Any, itself: TrainedIn, start: Start | None) -> None:
        self._itself, self._before, self._marked = itself, fingerprints(module), False
        places = [*_origins(module, start), *([] if start is None else [model_folder(start.folder)])]
        # Under privacy=none nobody counts them, so that the names in what the run writes are all that is left of them.
        self._began_with = {run for place in places for run in noted_in(place) if run.privacy != "none"}

    def mark_trained(self, module: Any) -> None:
        """Mark a module that the run has trained, with all runs behind it; once."""
        if not self._marked:
            self._marked = True
            mark(module, [self._itself, *self._began_with, *runs_behind(module)])

    def remember(self, values: Mapping[str, Any]) -> None:
        """Remember the values that the run has given its weights."""
        remember(values, self._before, self._itself)


def refuse_other_weights(module: Any, counter: Any, data: Any) -> None:
    """Refuse weights that a run trained on private data whose releases this run's claim does not count.

    ``counter`` is the accountant of the run: it knows which runs are counted.
    """
    if counter.counted_by_others or module.privacy.guarantee == "none":
        return
    behind = runs_behind(module).union(*map(noted_in, _origins(module, counter.start())))
    if not behind:
        return
    known = counter.known_runs(module, data)
    unknown = sorted((not run.folder, run) for run in behind if run.run not in known)
    if not unknown:
        return
    run = unknown[0][1]
    place = f" in {run.folder}" if run.folder else ""
    way = "Build the module anew, from public weights"
    if run.folder and (Path(run.folder) / CARD_NAME).is_file():
        way += f", or start from what that run wrote: init_from={run.folder}"
    raise ConfigurationError(
        f"{type(module).__name__} holds weights that a run under privacy={run.privacy} trained{place}, and this run's "
        f"card would forget what that cost. {way}. To go on with that run itself, say resume=true in its folder.",
        trap="T30",
    )


def _origins(module: Any, start: Start | None) -> list[Path]:
    """Return the folders, other than the start's, that a module's settings or transformers say weights came from."""
    own = None if start is None else model_folder(start.folder).resolve()
    parts = [part for part in held(module) if isinstance(part, nn.Module)]
    remembered = (getattr(getattr(part, "config", None), "_name_or_path", None) for part in parts)
    said = (*(getattr(part, "pretrained", None) for part in parts), *remembered)
    named = dict.fromkeys(str(name) for name in said if isinstance(name, (str, Path)) and name != "")
    places = (Path(name).expanduser() for name in named)
    return [place for place in places if place.is_dir() and not (own and place.resolve().is_relative_to(own))]


def claim_of(data: Any) -> str:
    """Name the release behind the data of ``privacy=synthetic``: everything derived from one release has one claim."""
    card = read_card(data.privacy_card_path)
    return f"claim {(card['ledger'] or {}).get('head') or card['checksum']}"


def refuse_cards_behind(module: Any, start: Start | None) -> None:
    """Refuse weights from a folder with a privacy card, unless it is the run that ``init_from`` names."""
    for place in _origins(module, start):
        card = place / CARD_NAME if (place / CARD_NAME).is_file() else card_above(place)
        if card is not None:
            raise ConfigurationError(
                f"{place} carries a privacy card ({card}): its weights were trained on private data, and this run's "
                "card would forget what that cost. Name the run that it lies in as init_from, or start from a public "
                "model.",
                trap="T30",
            )
