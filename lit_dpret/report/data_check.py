"""What ``task=check_data`` found, as a page of markdown that also reads well on a console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PRIVATE = (
    "PRIVATE. These numbers and ids come from the data as they are; no differential privacy covers them. They are for "
    "the owner of the data: do not publish this file."
)


def format_check(facts: Mapping[str, Any]) -> str:
    """The whole report. It has ids, file names and counts, and never a text of the data."""
    parts = [f"# Data check: {facts['source']}", PRIVATE, _problems(facts)]
    for title, section in (
        ("Files and columns", _columns),
        ("Splits", _splits),
        ("Duplicates", _duplicates),
        ("Lengths", _lengths),
        ("Users", _users),
        ("Split", _offer),
        ("Next", _next),
    ):
        text = section(facts)
        if text:
            parts.append(f"## {title}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _problems(facts: Mapping[str, Any]) -> str:
    found = facts["problems"]
    if not found["total"]:
        return "No problems: training would accept this data."
    lines = [f"## Problems: {found['total']:,}", "", "Training refuses the first of these; mend or leave out all.", ""]
    for kind, count in found["counts"].items():
        lines.append(f"* {kind}: {count:,}")
        lines += [f"  * {message}" for message in found["examples"][kind]]
        if count > len(found["examples"][kind]):
            lines.append(f"  * ... and {count - len(found['examples'][kind]):,} more")
    return "\n".join(lines)


def _columns(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"* {part}: {', '.join(names) or 'none'}" for part, names in facts.get("columns", {}).items())


def _splits(facts: Mapping[str, Any]) -> str:
    if "splits" not in facts:
        return ""
    rows = [
        (split, *(f"{found[key]:,}" for key in ("queries", "judgements", "positives", "positive_passages")))
        for split, found in facts["splits"].items()
    ]
    head = ("split", "queries", "judgements", "of grade > 0", "passages with one")
    return f"{facts['passages']:,} passages, {facts['queries']:,} queries.\n\n{_table(head, rows)}"


def _duplicates(facts: Mapping[str, Any]) -> str:
    if "duplicates" not in facts:
        return ""
    lines = []
    for what, policy in (
        ("queries", " datamodule.duplicates says what they are to the guarantee."),
        ("passages", " Equal passages make right answers look wrong."),
    ):
        found = facts["duplicates"][what]
        told = f"texts that stand under several ids: {found['texts']:,}, under {found['ids']:,} ids in all."
        if found["texts"]:
            told += policy + " For example: " + "; ".join(" = ".join(ids) for ids in found["examples"]) + "."
        lines.append(f"* {what}: {told if found['texts'] else 'none.'}")
    for split, shared in facts["duplicates"]["shared_with_train"].items():
        told = f"queries that repeat a train query: {shared['queries']:,}; positive passages that are also positive in "
        told += f"train: {shared['positive_passages']:,}."
        if shared["queries"]:
            told += " datamodule.drop_overlap=true leaves the train queries concerned out."
        lines.append(f"* {split} and train: {told}")
    return "\n".join(lines)


def _lengths(facts: Mapping[str, Any]) -> str:
    if "lengths" not in facts:
        return ""
    found, rows = facts["lengths"], []
    for side in ("query", "passage"):
        one = found[side]
        cut = "–" if one["share_cut"] is None else f"{one['share_cut']:.1%}"
        numbers = [str(one.get(key, "–")) for key in ("p50", "p90", "p99", "max")]
        rows.append((side, f"{one['measured']:,}", *numbers, str(one["limit"] or "–"), cut))
    head = ("side", "measured", "p50", "p90", "p99", "max", "cut at", "share cut")
    return f"In {found['by']}.\n\n{_table(head, rows)}"


def _users(facts: Mapping[str, Any]) -> str:
    if "users" not in facts:
        return ""
    found = facts["users"]
    if found is None:
        return (
            "No user ids. privacy.unit=query protects one query; a person with k queries is then protected as a group "
            "of k. A user_id column makes privacy.unit=user possible."
        )
    per_user, lines = found["rows_per_user"], []
    lines.append(
        f"{found['users']:,} users with {found['rows']:,} rows in {found['split']}; rows of a user: "
        f"p50 {per_user['p50']:,}, p90 {per_user['p90']:,}, p99 {per_user['p99']:,}, most {per_user['max']:,}."
    )
    if found["queries_without_user"]:
        lines.append(f"{found['queries_without_user']:,} queries have no user: privacy.unit=user would refuse them.")
    rows = [
        (str(cap["cap"]), f"{cap['rows_kept']:,}", f"{cap['share_kept']:.1%}", f"{cap['users_cut']:,}")
        for cap in found["caps"]
    ]
    lines += ["", _table(("rows per user", "rows kept", "share kept", "users cut"), rows), ""]
    lines.append(
        f"Suggested: privacy.unit=user datamodule.max_rows_per_unit={found['recommended_cap']} (the smallest of these "
        "that keeps four rows in five). A cap chosen by looking at private data is a release of its own, if a small "
        "one; a cap fixed beforehand is none."
    )
    return "\n".join(lines)


def _offer(facts: Mapping[str, Any]) -> str:
    offer = facts.get("split")
    if not offer:
        return ""
    if "refused" in offer:
        return f"This data is not split: there is nothing to evaluate on. {offer['refused']}"
    sizes = ", ".join(f"{split} {count:,}" for split, count in offer["queries"].items())
    told = f"By {offer['by']}, seed {offer['seed']}: queries in {sizes}."
    if offer["written"]:
        return f"{told} Written to {offer['written']}."
    return (
        f"This data is not split: there is nothing to evaluate on. {told} "
        "To write it, add task.write_split=FOLDER (task.fractions, task.split_by and task.split_seed change it)."
    )


def _next(facts: Mapping[str, Any]) -> str:
    return f"    {facts['command']}" if facts.get("command") else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [tuple(head), *map(tuple, rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])
