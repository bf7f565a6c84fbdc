"""Attacks from inside a federation, before and after each defence: JSON for programs, Markdown for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.report.page import INTERNAL, Written, write_short

Facts = Mapping[str, Any]

LIMIT = (
    "These numbers are evidence of leakage of at least so much; absence of evidence is no guarantee. None of them "
    "bounds an epsilon, and no epsilon in these tables was checked by them: what a defence promises, its accountant "
    "says alone."
)
_NONE = "–"


def write_federated_attacks(facts: Facts, folder: Path) -> Written:
    """Write the report; about private silos under ``internal_federated_attacks``, readable for its owner alone.

    Raises:
        StorageError: A file cannot be written.
    """
    train = [one["train"] for one in facts["silos"].values()]
    layers = "" if facts["layers"] is None else f", its first {facts['layers']} layers"
    lines = [
        f"{len(train)} silos with {min(train):,} to {max(train):,} train queries; encoder {facts['encoder']}{layers}.",
        "",
        *(_silo_part(facts) if facts["requests"] else []),
        *(_server_part(facts) if facts["updates"] else []),
        LIMIT,
    ]
    internal = INTERNAL.format(what="queries") if facts["internal"] else ""
    return write_short(folder, "federated_attacks", "Attacks from inside a federation", facts, lines, internal=internal)


def _silo_part(facts: Facts) -> list[str]:
    return [
        "## A silo that matches requests", "", *request_table(facts), "",
        "* Named: a query that the rows were made of, among unsent queries of the same silo; a tie is no hit. By "
        "nearness to a row, by tracing where rows are centroids. The control puts unsent queries in its place. Queries "
        "share their candidates and are not independent, so hold a rate against the control before the guess. The last "
        "column takes the rows of another silo.",
        *_own(facts),
        "* Sealing the rows between silos hides them from the server that relays them. A silo that is asked opens "
        "them, so against this attack it does nothing.", "",
    ]  # fmt: skip


def _server_part(facts: Facts) -> list[str]:
    return [
        "## A server that reads word embeddings", "", *update_table(facts), "",
        f"* One round of one epoch, batches of {facts['batch_size']}, {facts['negatives']} BM25 negatives, AdamW "
        f"{facts['lr']:g} with weight decay {facts['weight_decay']:g}, whose factor is read off the median row and "
        "taken off. An epsilon is that of this round, and all that the silo may spend.",
        "* Queries: tokens of train queries told from tokens that stand in the collection alone (AUC); "
        "then the same of rows that stand out alone, where only how far they moved is left to tell. Queries only: "
        "among tokens that the collection does not have. Whose: own tokens told from those of other silos' queries. "
        "Control: tokens of dev and test queries that stand in no text of the round, told from tokens of no text.",
        *_anyone(facts), "",
    ]  # fmt: skip


def request_table(facts: Facts) -> list[str]:
    """The silo's attack as a Markdown table, one row for each way to ask."""
    tops = sorted(map(int, facts["requests"][0]["pooled"]["named"]))
    head = [f"named, {top} guess{'es' if top > 1 else ''} of {facts['candidates']}" for top in tops]
    lines = [
        f"| request | rows | {' | '.join(head)} | control, 1 guess | sent told from unsent (AUC): nearness | "
        "traced | by another silo's rows |",
        "| :-- | --: |" + " --: |" * (len(tops) + 4),
    ]
    for one in facts["requests"]:
        if not one["rows"]:
            cells = ["nothing to match", *[_NONE] * (len(tops) + 3)]
        else:
            found = one["pooled"]
            cells = [_rate(found["named"][str(top)]) for top in tops]
            foreign = one["rows_of_another_silo"]
            cells += [_rate(found["control"]["1"]), _auc(found["nearness"]), _auc(found["traced"])]
            cells += [_auc(foreign["traced"] or foreign["nearness"])]
        lines.append(f"| {one['name']} | {one['rows']:,} | {' | '.join(cells)} |")
    chance = " | ".join(f"{top / facts['candidates']:.3f}" for top in tops)
    return [*lines, f"| *a guess* | | {chance} | {1 / facts['candidates']:.3f} | 0.500 | 0.500 | 0.500 |"]


def update_table(facts: Facts) -> list[str]:
    """The server's attack as a Markdown table, one row for each defence."""
    lines = [
        "| defence | queries (AUC) | of rows that moved | queries only: AUC | recall | precision (of a guess) "
        "| whose (AUC) | control (AUC) |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for one in facts["updates"]:
        found = one["pooled"]
        if found is None:
            cells = ["no row of any word is in the update", *[_NONE] * 6]
        else:
            only = found["queries_only"]
            guess = "" if only is None else f" ({only['prevalence']:.2g})"
            cells = [_auc(found[kind]) for kind in ("queries", "queries_touched", "queries_only")]
            cells += [_rate(only and only["recall"]), f"{_rate(only and only['precision'])}{guess}"]
            cells += [_auc(found["whose"]), _auc(found["control"])]
        lines.append(f"| {one['name']} | {' | '.join(cells)} |")
    return lines


def _own(facts: Facts) -> list[str]:
    exact = facts["requests"][0]["own_texts"]
    return [
        "* Without any list of suspects: the own query nearest to an exact row shares words with the query behind it, "
        f"F1 {exact['similarity']:.3f}; one drawn at random {exact['control']:.3f}. "
        f"{100 * exact['equal']:.1f} % of rows are queries that the curious silo has word for word."
    ]


def _anyone(facts: Facts) -> list[str]:
    lines = []
    for one in facts["updates"]:
        if one["anyone"] is not None:
            lines.append(
                f"* {one['name']}: that a token stands in *somebody's* queries and in nobody's collection is told with "
                f"AUC {one['anyone']['auc']:.3f}, recall {one['anyone']['recall']['value']:.3f}. A sum hides "
                "whose update it was, and not what all of them hold."
            )
    return lines


def _rate(one: Facts | None) -> str:
    return _NONE if one is None else f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _auc(one: Facts | None) -> str:
    return _NONE if one is None else f"{one['auc']:.3f} ({one['auc_least']:.3f} to {one['auc_most']:.3f})"
