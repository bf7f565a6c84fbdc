"""What a card says about the choice of hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lit_dpret.privacy.budget import require_choice

TuningData = Literal["none", "public", "synthetic", "private", "unknown"]

_TUNING = {
    "none": "Hyper-parameters were fixed before the private data were used.",
    "public": "Hyper-parameters were chosen on public data, which costs no privacy.",
    "synthetic": "Hyper-parameters were chosen on DP synthetic data, which is post-processing.",
    "private": "NOT ACCOUNTED: hyper-parameters were chosen on private data; epsilon does not cover that choice.",
    "unknown": "NOT ACCOUNTED: it was not stated on which data the hyper-parameters were chosen.",
}


def tuning_facts(tuning: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tuning block of a card: the facts given, a sentence, and whether epsilon covers the choice.

    Raises:
        ConfigurationError: ``data`` is no known word.
    """
    chosen = {"data": "unknown", "n_trials": None, "method": None, "note": "", **(tuning or {})}
    require_choice("tuning.data", chosen["data"], get_args(TuningData))
    text = _TUNING[chosen["data"]]
    if chosen["n_trials"]:
        text += f" Number of trials: {chosen['n_trials']}."
    if chosen["note"]:
        text += f" {chosen['note']}"
    return {**chosen, "text": text, "accounted": chosen["data"] not in ("private", "unknown")}
