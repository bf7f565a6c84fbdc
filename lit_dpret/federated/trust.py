"""A table of what each party sees in clear, derived from the settings, for reports and for approval of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lit_dpret.federated.settings import PddAs2


@dataclass(frozen=True)
class Sight:
    """One thing that leaves a silo."""

    what: str
    server: str  # the part that the server, which relays everything, can read
    silos: str  # the part that the other silos can read
    protection: str  # the guarantee that limits the harm, or that there is none
    # How the server, and the other silos, can count the queries that the silo trains on; empty if they cannot.
    counts: tuple[str, str] = ("", "")


_NONE = "none: in clear"
#: The result that each rule of `Stage1.aggregation` gives from the updates.
_NEXT = {
    "mean": "the mean",
    "median": "the median of each weight",
    "trimmed_mean": "the trimmed mean of each weight",
    "krum": "one silo's, the one that krum chose",
    "multi_krum": "the mean of those that krum chose",
}


def sights(run: PddAs2, systems: Collection[str] = ("fed_negative",)) -> list[Sight]:
    """Return everything that leaves a silo in one run of one of ``systems`` under these settings; nothing else does.

    A budget covers all runs that share the silo's folder of ledgers. Each system and each seed of ``task=federated``
    has its own copy, so releasing several of them costs more.

    Without ``seal`` the server can read whatever it relays between silos. Without a ``roster`` the server is trusted to
    map keys to silos.
    """
    eps = run.privacy.eps
    made = "computed from queries that the silo's DP generator wrote: its privacy card"
    delta = "1/(2n)" if run.privacy.delta is None else f"{run.privacy.delta:g}"
    terms = f"delta={delta}, {run.privacy.neighbours}"
    dp = _NONE
    if eps is not None:
        dp = f"differential privacy of each {run.privacy.unit}, eps={eps:g} ({terms}) for all that leaves in one run"
    if run.train_on == "synthetic":
        dp = made if eps is None else f"{made}, within eps={eps:g} ({terms}) of the silo"
    bare = dp if run.train_on == "synthetic" else _NONE  # what protects the things that are sent without noise
    update = dp
    if eps is not None and run.train_on == "queries":
        update += "; nothing is promised for the sentences that it is trained on"
    hidden = run.secure_sum
    least = "2n/3 + 1" if run.sum_threshold is None else f"{run.sum_threshold} (at least n/2 + 1)"
    summed = f"the sum of t or more of them, t={least}"
    masks = f"masks, {_against(run)}, with {_keys(run)}"
    found = [
        Sight(
            "the update of a round (stage 1)",
            summed if hidden else "each silo's",
            f"{_NEXT[run.stage1.aggregation]}, in the next global model",
            f"{update}; {masks}" if hidden else update,
        )
    ]
    if hidden:
        found.append(
            Sight(
                "that a silo has no update in a round: training failed, or federated.update_norm forbids sending it",
                "whether t silos have one" if run.stage1.weighting != "uniform" else "how many silos have one",
                "which silos have none",
                f"sealed from the server, with {_keys(run)}; against the silos, and anyone they inform: none, and no "
                "ledger counts it",
            )
        )
    if run.stage2.epochs and run.stage2.negatives == "fed" and "fed_negative" in systems:
        found += [_request(run, dp, bare), _response(run)]
    if count := _count(run, found, bare, masks):
        found.insert(1, count)
    kept = "personal query encoders, rankings, measures of single queries"
    if eps is not None:  # measures are never reported under a budget
        what, knob = "what is spent of its budget, from which the number of its train queries follows", "share_epsilon"
    else:
        what, knob = "the means of its measures, and the number of test queries", "share_measures"
        if run.train_on == "synthetic" or not count:
            kept += f", {_TRAIN_QUERIES}"
    found.append(Sight(what, f"nothing, unless the silo sets {knob}", "nothing", "each silo's own choice"))
    found.append(Sight(f"{kept}: never", "nothing", "nothing", "they stay in the silo"))
    return found


_TRAIN_QUERIES = "how many train queries a silo has"


def _count(run: PddAs2, sent: Sequence[Sight], bare: str, masks: str) -> Sight | None:
    """Return who can count the queries that a silo trains on, by its weight or by what else it sends; None for no one.

    Masks over the weights and seals do not hide a count that is sent in clear: sizes stay visible.
    """
    server, silos = ([one for one in ways if one] for ways in zip(*(one.counts for one in sent), strict=True))
    limit = bare if server else masks
    if run.reports_examples:
        server, limit = ["each silo's number", *server], bare
    elif run.stage1.weighting != "uniform":
        server = ["the sum of the weights", *server]
    if not server:
        return None
    what = _TRAIN_QUERIES if run.train_on == "queries" else "how many queries its DP generator wrote"
    return Sight(what, ", and ".join(server), ", and ".join(silos) or "nothing", limit)


def _against(run: PddAs2) -> str:
    if not run.roster:
        return "against an honest-but-curious server only"
    return "against any server with c < 2 t - n colluders, of n on the roster (it learns a sum of t - c or more others)"


def _keys(run: PddAs2) -> str:
    return "keys signed by the roster" if run.roster else "keys taken on trust"


def _relayed(run: PddAs2, seen: str, limit: str) -> tuple[str, str]:
    """Return what the server sees of something between two silos, and what protects it."""
    if not run.seal:
        return seen, limit
    against = "against the silos: " if limit.startswith(_NONE) else ""
    return "who asks whom, and sizes", f"sealed from the server, with {_keys(run)}; {against}{limit}"


def _request(run: PddAs2, dp: str, bare: str) -> Sight:
    stage, what = run.stage2, "a request for negatives"
    if stage.request == "none":
        return Sight(what, "that it was sent", "that it was sent", "it contains nothing of the queries")
    if stage.request == "dp_centroid":
        server, limit = _relayed(run, "the centroids", dp)
        of = f"{stage.centroids} noised centroids of the queries"
        return Sight(f"{what}: {of}", server, "the centroids (those that are asked)", limit)
    server, limit = _relayed(run, "all of them", bare)
    of = "train query" if run.train_on == "queries" else "query that its DP generator wrote"
    ways = (f"the {'size' if run.seal else 'rows'} of a request", "the rows of a request (those that are asked)")
    return Sight(
        f"{what}: the embedding of every {of}", server, "all of them (those that are asked)", limit, counts=ways
    )


def _response(run: PddAs2) -> Sight:
    privacy = run.privacy
    what, limit = {
        "raw": ("embeddings of its sentences", f"{_NONE}; repeated requests map the collection"),
        "public": ("embeddings of sentences that it declares public", "the declaration"),
        "dp_centroid": (
            "noised centroids of its collection",
            f"differential privacy of each passage, eps={privacy.collection_eps or 0:g} "
            f"(delta={privacy.collection_delta:g}, {privacy.neighbours}) in one run",
        ),
        "synthetic": (
            "embeddings of queries that its DP generator wrote for public sentences",
            "the verified card of the generator; that the sentences are public, the declaration",
        ),
    }[run.stage2.response]
    server, limit = _relayed(run, "all of it", limit)
    return Sight(f"an answer with negatives: {what}", server, "all of it (the asker)", limit)


def trust_table(run: PddAs2) -> str:
    """Return `sights` as a Markdown table."""
    lines = ["| what leaves a silo | the server sees | other silos see | protection |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.what} | {one.server} | {one.silos} | {one.protection} |" for one in sights(run)]
    return "\n".join(lines)
