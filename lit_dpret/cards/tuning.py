"""The tuning block of a card: how hyper-parameters were chosen, and the cost of a declared search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.selection import RandomStopping, selection_epsilon
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.ledger.dataset_ledger import one_release, sweep_limit, sweep_of
from lit_dpret.privacy.ledger.judgement import Judged
from lit_dpret.privacy.ledger.run_ledger import recorded_start
from lit_dpret.privacy.ledger.siblings import siblings_of
from lit_dpret.settings import require_choice

TuningData = Literal["none", "public", "synthetic", "private", "unknown"]

_TUNING = {
    "none": "Hyper-parameters were fixed before the private data were used, as declared.",
    "public": "Hyper-parameters were chosen by trainings on public data alone, as declared, which costs no privacy.",
    "synthetic": "NOT ACCOUNTED: hyper-parameters were chosen on DP synthetic data. Their epsilon is not in this one: "
    "if they were made from the same people's data, both are spent.",
    "private": "NOT ACCOUNTED: hyper-parameters were chosen on private data; epsilon does not cover that choice.",
    "unknown": "NOT ACCOUNTED: the data that the hyper-parameters were chosen on were not stated.",
}

_ON_ONE_RELEASE = (
    "Hyper-parameters were chosen by scores on public data, as declared, among trainings on one release, which "
    "costs no privacy."
)

_CHOSEN = {
    "none": "its run is one of several",
    "public": "its run is one of several",
    "private": "hyper-parameters were chosen on private data",
    "unknown": "the data that the hyper-parameters were chosen on were not stated",
    "synthetic": "hyper-parameters were chosen on DP synthetic data",
}

#: The condition under which the planned epsilon of several runs holds for what they released.
_NONE_BEYOND = (
    "none of the others spent more than planned, as one that repeats steps after an interruption does; its own card "
    "then says so"
)
_BEYOND_PLAN = {
    "repeated_steps": "This run repeated steps after an interruption",
    "otherwise": "This run was charged with other noise or sampling than was planned for it",
}

#: Data that make a choice reveal private data, or possibly so. Trainings on private data reveal these whatever they
#: are scored on: the best of them is a function of all of them.
_OPEN = ("private", "unknown", "synthetic")  # the gravest first
#: The alternatives when one of several private trainings is chosen.
AMONG = "trainings on private data"
_METHODS = ("none", "random_stopping")
#: Data that trials are scored on, with a sentence on what the sum of their epsilons leaves out.
_COVERED = {"private": " The records on which the trials were scored are not covered.", "public": "", "none": ""}


def tuning_facts(
    tuning: Mapping[str, Any] | None,
    judged: Judged | None = None,
    sweep: Mapping[str, Any] | None = None,
    delta: float | None = None,
    siblings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the tuning block of a card: the given facts, a sentence, and whether an epsilon covers the choice.

    Guarantees:
        - A choice on private data is accounted only if the search was declared as `RandomStopping` and its cost is
          proved. ``epsilon`` is then that of the search including its best run; the claim's epsilon stays the run's.
        - A choice among trials of a sweep that trained on private data counts as made on private data, whatever they
          were scored on. If all were reserved beforehand, ``epsilon`` is the limit of the ledger that holds them. It
          is not stated if a trial had no privacy, the limit holds at a larger delta than the claim's, the run claims
          nothing, or the trials were scored on synthetic data (whose epsilon is in no such sum).
        - A choice among several runs of one command without a reservation is not accounted, even if the runs differ
          only in their seed. Their planned joint cost is stated, with its condition, unless this run's own ledger
          charges more than was planned for it.

    Args:
        tuning: ``data``, ``n_trials``, ``method``, ``mean_runs``, ``runs_law``, ``note``.
        judged: The releases that price a declared search; None if the artefact has no releases of its own.
        sweep: The sweep that the run is a trial of, from its ledger.
        delta: The claim's delta; None if nothing is claimed.
        siblings: The runs of its command, from its ledger.
    """
    given = {key: value for key, value in (tuning or {}).items() if value is not None}
    refuse_trials_of_no_choice(given)
    chosen: dict[str, Any] = {"data": "unknown", "n_trials": None, "method": None, "note": "", **given}
    if sweep is not None:
        chosen |= _as_told(chosen, sweep)
    require_choice("tuning.data", chosen["data"], get_args(TuningData))
    text, accounted = _TUNING[chosen["data"]], chosen["data"] not in _OPEN
    if chosen["n_trials"]:
        text += f" Number of trials: {chosen['n_trials']}."
    if (stopping := declared_search(chosen)) is not None:
        value, why = (
            _cost_of(stopping, judged) if judged is not None else (None, "this artefact makes no releases of its own")
        )
        if siblings is not None:
            value, why = None, "its proof needs a secret number of runs, but their command reveals it"
        accounted = value is not None
        text = _priced(stopping, value) if value is not None else f"{text} The cost of the declared search: {why}."
        chosen |= {"epsilon": value}
    elif sweep is not None:
        if chosen["data"] == "public" and one_release(sweep):
            text = text.replace(_TUNING["public"], _ON_ONE_RELEASE)
        text, limit = f"{text} {_of_sweep(sweep, claims=delta is not None)}", sweep_limit(sweep, delta)
        if chosen["data"] == "private" and sweep["metric_data"] in _COVERED and limit is not None:
            accounted, chosen = True, chosen | {"epsilon": limit}
            text = _summed(sweep, limit)
    if siblings is not None and sweep is None:
        beyond = judged.beyond_plan if judged is not None and siblings.get("planned") is not None else None
        if beyond is not None:
            siblings = {**siblings, "planned": None, "beyond_plan": beyond}
        accounted, chosen = False, chosen | {"siblings": dict(siblings)}
        text = f"{text} {_beside(siblings, claims=delta is not None)}"
    if chosen["note"]:
        text += f" {chosen['note']}"
    return {**chosen, "text": text, "accounted": accounted}


def with_earlier_tuning(
    own: Mapping[str, Any], earlier: Mapping[str, Any] | None, name: str, *, composed: bool, proved: bool = True
) -> dict[str, Any]:
    """Add to a tuning block how the settings of the parent artefact were chosen.

    An artefact made from the parent without private data keeps the parent's tuning epsilon. A claim ``composed`` of
    both runs has no proved tuning epsilon, nor has an artefact whose guarantee is not ``proved``.
    """
    if earlier is None or not _is_open(earlier):
        return dict(own)
    if not own["accounted"] and own["data"] == earlier["data"] and str(earlier["text"]) in str(own["text"]):
        return dict(own)
    if not proved:
        lost = f"NOT ACCOUNTED: {_CHOSEN[earlier['data']]}, and nothing is claimed of what is made here."
        earlier = {**earlier, "epsilon": None, "accounted": False, "text": lost}
    text = f"{own['text']} Of {name}: {earlier['text']}"
    if not composed and not _is_open(own):
        return {**earlier, "text": text}
    if earlier["accounted"]:
        text += " NOT ACCOUNTED: the epsilon of this card does not cover that choice."
    data = next((one for one in _OPEN if one in (own["data"], earlier["data"])), own["data"])
    return {**own, "data": data, "accounted": False, "text": text}


def hides_earlier_tuning(own: Mapping[str, Any], earlier: Mapping[str, Any], *, composed: bool) -> bool:
    """Return whether a tuning block omits what `with_earlier_tuning` adds to it from another card."""
    if not _is_open(earlier):
        return False
    told = str(earlier["text"]) in str(own["text"])
    if not composed and told and {**earlier, "text": own["text"]} == own:
        return False
    if earlier["data"] not in _OPEN:
        return bool(own["accounted"]) or not told
    graver = own["data"] in _OPEN[: _OPEN.index(earlier["data"]) + 1]
    return bool(own["accounted"]) or not graver or not (told or own["data"] == earlier["data"])


def _is_open(tuning: Mapping[str, Any]) -> bool:
    return tuning["data"] in _OPEN or not tuning["accounted"]


def tuning_of_run(tuning: Mapping[str, Any] | None, judged: Judged) -> dict[str, Any]:
    """Return the tuning block of a run: its declaration, and its ledger's facts on sweep and start."""
    start = recorded_start(judged.records) or {}
    delta = None if judged.claimed_plan is None else judged.claimed_plan.budget.delta
    sweep, siblings = sweep_of(judged.records), siblings_of(judged.records)
    own = tuning_facts(tuning, judged, sweep, delta, siblings)
    return with_earlier_tuning(own, start.get("tuning"), str(start.get("name")), composed=True)


def possible_tuning(stated: Mapping[str, Any], judged: Judged) -> list[dict[str, Any]]:
    """Return the possible tuning blocks of a run with this ledger, given what only the run declares (``stated``)."""
    declared = {name: stated.get(name) for name in ("n_trials", "method", "mean_runs", "runs_law", "note")}
    found = []
    for data in get_args(TuningData) if sweep_of(judged.records) is None else ("unknown",):
        for trials in {declared["n_trials"], None}:
            with suppress(ConfigurationError):
                found.append(tuning_of_run({**declared, "n_trials": trials, "data": data}, judged))
    return found


def same_facts(stated: Mapping[str, Any], possible: Mapping[str, Any]) -> bool:
    """Return whether two tuning blocks agree except for wording and epsilon."""

    def facts(block: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in block.items() if key not in ("text", "epsilon") and value is not None}

    return facts(stated) == facts(possible)


def refuse_other_tuning(tuning: Mapping[str, Any], metric_data: str, *, knob: str = "callbacks.card.tuning_") -> None:
    """Refuse a trial's declaration about its settings that contradicts its sweep's ``metric_data``."""
    refuse_told_number(tuning, "trial_of", knob=knob)
    if (data := tuning.get("data")) not in (None, "unknown", metric_data):
        raise ConfigurationError(
            f"{knob}data={data} in a trial of a sweep with task.metric_data={metric_data}: the card would contradict "
            f"the sweep's choice. Leave {knob}data unknown to use the sweep's declaration."
        )


def refuse_told_number(tuning: Mapping[str, Any], teller: str, *, knob: str = "callbacks.card.tuning_") -> None:
    """Refuse random stopping together with the setting ``teller``, which reveals the number of runs."""
    if tuning.get("method") == "random_stopping":
        raise ConfigurationError(
            f"{knob}method=random_stopping with {teller}: its cost is proved only for a secret number of runs, and "
            f"{teller} reveals it. Remove one of the two."
        )


def refuse_trials_of_no_choice(tuning: Mapping[str, Any], *, knob: str = "tuning_") -> None:
    """Refuse a number of trials together with the declaration that nothing was chosen."""
    if tuning.get("data") == "none" and (tuning.get("n_trials") or 0) > 1:
        raise ConfigurationError(
            f"{knob}trials={tuning['n_trials']} with tuning_data=none: trying several settings means choosing one. "
            "State in tuning_data what the choice was made on, or set the number of trials to null."
        )


def refuse_told_as_none(data: str | None, chooser: str, among: str, *, knob: str, way: str = "") -> None:
    """Refuse ``none`` and ``public`` on the cards of runs if the setting ``chooser`` allows a choice among them."""
    if data in ("none", "public"):
        raise ConfigurationError(
            f"{knob}data={data} with {chooser}: selecting one of these runs is a choice among {among}, "
            f"whatever data scored them. Leave {knob}data unknown{way}."
        )


def _cost_of(stopping: RandomStopping, judged: Judged) -> tuple[float | None, str | None]:
    """Return the epsilon of a search among runs with these releases, or None and the reason."""
    if (plan := judged.claimed_plan) is None:
        return None, "not computed, because there is no guarantee"
    budget = plan.budget
    try:
        value = selection_epsilon(judged.charged, stopping, delta=budget.delta, neighbours=budget.neighbours)
    except UnsupportedAccountingError as error:
        return None, f"not proved ({error.sentence.rstrip('.')})"
    return (value, None) if math.isfinite(value) else (None, "infinite")


def declared_search(chosen: Mapping[str, Any]) -> RandomStopping | None:
    """Return the search declared by a tuning block; None if there is none."""
    if chosen.get("method") is not None:
        require_choice("tuning_method", chosen["method"], _METHODS)
    declared = [name for name in ("mean_runs", "runs_law") if chosen.get(name) is not None]
    if chosen.get("method") != "random_stopping":
        if declared:
            raise ConfigurationError(
                f"tuning_{declared[0]} is for tuning_method=random_stopping only. Set both or none."
            )
        return None
    if chosen["data"] != "private":
        raise ConfigurationError(
            f"tuning_method=random_stopping with tuning_data={chosen['data']}: a search has this cost if its runs "
            "train on private data, whatever they are scored on. Set tuning_data=private, or tuning_method to null."
        )
    if "mean_runs" not in declared:
        raise ConfigurationError("tuning_method=random_stopping needs tuning_mean_runs, the mean number of runs.")
    if chosen.get("n_trials"):
        raise ConfigurationError(
            "tuning_trials reveals the number of runs, and the cost of tuning_method=random_stopping is proved only "
            "if that is secret. Set tuning_trials to null."
        )
    return RandomStopping(chosen["mean_runs"], chosen["runs_law"] if "runs_law" in declared else "geometric")


def _as_told(chosen: Mapping[str, Any], sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Take facts about the choice from the sweep; `refuse_other_tuning` compared them with the run's declaration."""
    scored = sweep["metric_data"]
    # Even if no comparison is declared: trials on several releases, or on one and without privacy, reveal each other as
    # private ones do.
    mixed = len(sweep.get("releases") or ()) > 1
    private = (sweep.get("planned") is not None or mixed) and scored != "unknown"
    told: dict[str, Any] = {"sweep": dict(sweep), "data": "private" if private else scored}
    if not chosen["n_trials"] and chosen.get("method") in (None, "none"):
        told["n_trials"] = sweep["trials"]
    return told


def _of_sweep(sweep: Mapping[str, Any], *, claims: bool) -> str:
    varied = ", ".join(sweep["varied"]) or "nothing"
    text = f"This run is one of the {sweep['trials']} trials of sweep {sweep['id']} (varied: {varied})"
    planned = sweep.get("planned")
    if one_release(sweep):
        return f"{text}, all of which train on one release. Its claim covers all of them together."
    if planned is None:
        return f"{text}, none of which was planned as private."
    if not claims:
        return f"{text}. It claims nothing by itself, so no epsilon covers a choice that looked at it."
    if bare := sweep.get("without_privacy"):
        text += f", {bare} of them without privacy or on what others released, which no epsilon of the sweep bounds,"
    return (
        f"{text}, whose {sweep['private_runs']} private trainings were reserved in the ledger of the data set before "
        f"the first of them: as planned, all of them together are within epsilon = {show_epsilon(planned['epsilon'])} "
        f"at delta = {show_delta(planned['delta'])}, if none repeats steps after an interruption. "
        "For anyone who sees several of the models, or one chosen among them, that holds, not the epsilon of one."
    )


def _beside(siblings: Mapping[str, Any], *, claims: bool) -> str:
    runs, planned, bare = siblings["runs"], siblings.get("planned"), siblings.get("without_privacy")
    varied = ", ".join(siblings["varied"]) or "nothing"
    text = f"This run is one of {runs or 'several'} that one command started (varied: {varied})"
    if not claims:
        return f"{text}. It claims nothing by itself, so no epsilon covers a choice that looked at it."
    text += f", {bare} of them without privacy, which no epsilon bounds." if bare else "."
    if (beyond := siblings.get("beyond_plan")) is not None:
        text += f" {_BEYOND_PLAN[beyond]}, so that together they cost more than was planned."
    if planned is None:
        text += (
            " What they cost together was not computed. With the same data, units and neighbours it is at most the "
            "sum of their epsilons, at the sum of their deltas; epsilons of different ones do not add up."
        )
    else:
        text += (
            f" As planned, the {siblings['private_runs']} private ones together are within epsilon = "
            f"{show_epsilon(planned['epsilon'])} at delta = {show_delta(planned['delta'])}. That holds if "
            f"{_NONE_BEYOND}."
        )
    return (
        f"{text} That, not the epsilon of one run, covers several of them, and one that was chosen among them, such as "
        "the one with the best score, whatever data it was scored on."
    )


def _summed(sweep: Mapping[str, Any], limit: float) -> str:
    scored = str(sweep["metric_data"])
    how = "without a comparison, as declared," if scored == "none" else f"by scores on {scored} data"
    return (
        f"Hyper-parameters were chosen {how} among the trials of one sweep, which were trained on private data. "
        f"{_of_sweep(sweep, claims=True)} Including the choice, epsilon = {show_epsilon(limit)} at the delta of the "
        f"claim, the limit of that ledger at delta = {show_delta(sweep['ledger_delta'])}, which no trial may exceed "
        f"(composition of all of them); the epsilon of the claim is for the one run.{_COVERED[scored]}"
    )


def _priced(stopping: RandomStopping, epsilon: float) -> str:
    return (
        "Hyper-parameters were chosen among private trainings, as declared: the best of a number of runs that was "
        f"drawn from a {stopping.describe()} and kept secret; none of them released more than this one, and nothing "
        f"of the others was shown. Including that choice, epsilon = {show_epsilon(epsilon)} at the same delta (Renyi "
        "accounting; Papernot and Steinke 2022); the epsilon of the claim is for the one run. The records on which the "
        "runs were scored are not covered."
    )
