"""A forecast as a text for a terminal of 80 columns: the claim first, then what it hides."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lit_dpret.cards.forecast import OTHER_BOUND
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.budget import show_delta

WIDTH = 80
_RELATIONS = ("zero_out", "add_or_remove", "replace_one")


def format_plan(facts: Mapping[str, Any]) -> str:
    """The facts of `describe_plan` as tables.

    Guarantees:
        - No line is longer than 80 columns, save for a name or number that alone is.
        - The first line holds epsilon with its delta, unit and relation.
        - A number that is not proved is not printed; the combination is named instead. Where no epsilon may be
          stated at all, the text ends with what would be done.
    """
    if facts["epsilon"] is None:
        return "\n".join(line.rstrip() for line in _claim(facts))
    sections = [
        _claim(facts),
        _matrix(facts),
        _noises(facts),
        _knee(facts["knee"]),
        _users(facts),
        _audits(facts),
        _ceilings(facts["ceilings"]),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in section) for section in sections if section)


def _claim(facts: Mapping[str, Any]) -> list[str]:
    plan, budget = facts["plan"], facts["plan"]["budget"]
    shared = ", / sqrt(K) for each of K layers" if plan["clip_groups"] == "per_layer" else ""
    passes = "" if facts["epochs"] is None else f" ({facts['epochs']:.4g} passes over the data)"
    known = facts["epsilon"] is not None
    claim = [
        f"epsilon {facts['epsilon']:.4g} at delta {show_delta(budget['delta'])}, "
        f"unit={budget['unit']}, neighbours={budget['neighbours']}"
    ] if known else list(_paragraph("no epsilon: the sensitivity is refuted, and nothing is promised", ""))  # fmt: skip
    return [
        *claim,
        "",
        f"  plan                 {facts['fingerprint'][:12]}" + (f", budget {budget['eps']:g}" if known else ""),
        *_paragraph(facts["law"], "  sampling             "),
        f"  steps                {facts['steps']}{passes}",
        *_bound(plan, shared),
        f"  noise multiplier     {facts['noise_multiplier']:.6g}",
        f"  noise std on the sum {facts['noise_std']:.6g} (sensitivity {plan['sensitivity']:g})",
        f"  noise to batch       {facts['noise_to_batch']:.3g} (divided by {facts['expected_batch_size']:g})",
        *(line for caution in facts["cautions"] for line in _paragraph(caution, "  note: ")),
    ]


def _bound(plan: Mapping[str, Any], shared: str) -> list[str]:
    coupling = plan.get("coupling")
    if coupling is None:
        return [f"  clipping bound       {plan['max_grad_norm']:g} ({plan['clip']}{shared})", *_clip_fraction(plan)]
    proved = {"proved": "", "declared": ", as declared for this loss", "refuted": ", which is NOT PROVED"}
    return [
        f"  clipping bound       {plan['max_grad_norm']:g} on each {coupling['bounded'].replace('_', '-')}",
        *_paragraph(
            f"{coupling['sub_batches']} of at most {coupling['n_max']} units; one unit moves the sum by "
            f"{plan['sensitivity'] / plan['max_grad_norm']:.4g} clipping bounds{proved[coupling['claim']]}",
            "  sub-batches          ",
        ),
    ]


def _clip_fraction(plan: Mapping[str, Any]) -> Sequence[str]:
    share = plan.get("clip_fraction_budget")
    if not share:
        return []
    seen = clip_fraction.deviation(plan["noise_multiplier"], share=share, denominator=plan["denominator"])
    return _paragraph(
        f"released with standard deviation {seen:.2g} each step, for {1 / math.sqrt(1 - share) - 1:.2%} more noise on "
        "the gradient",
        "  share of clipped     ",
    )


def _matrix(facts: Mapping[str, Any]) -> list[str]:
    rows = facts["epsilon_matrix"]
    found = {(row["sampling"], row["neighbours"]): row for row in rows}
    kinds = list(dict.fromkeys(row["sampling"] for row in rows))
    lines = [
        "Epsilon of the same noise, by sampling and neighbours",
        f"  {'':<22}" + "".join(f"{relation:>15}" for relation in _RELATIONS),
    ]
    for kind in kinds:
        cells = [found[kind, relation] for relation in _RELATIONS]
        shown = [_number(cell) + ("*" if cell["accountant"] == "rdp" else " ") for cell in cells]
        lines.append(f"  {kind:<22}" + "".join(f"{text:>15}" for text in shown))
    unproved = facts["epsilon_if_shuffled"]
    lines.append(
        f"  {'no amplification':<22}" + f"{_number(unproved):>14}   under {facts['plan']['budget']['neighbours']}"
    )
    others = [row for row in facts["epsilon_by"] if row["epsilon"] is not None and row["accountant"] != "pld"]
    counted = [f"{row['accountant']} {row['epsilon']:.4g} ({row['neighbours']}, {row['sampling']})" for row in others]
    starred = any(row["accountant"] == "rdp" for row in rows)
    notes = ["By pld" + (", * by rdp (a plan takes it with privacy.accountant=rdp)." if starred else ".")]
    if counted:
        notes.append(f"By other accountants: {', '.join(counted)}.")
    if "shuffle" in kinds:
        notes.append("shuffle: each pass counts as if it saw every unit; that shuffling amplifies is not proved.")
    refused = [
        f"{kind} under {' and '.join(none)}"
        for kind in kinds
        if (none := [r for r in _RELATIONS if _unjudged(found[kind, r])])
    ]
    if refused:
        notes.append(f"Judged by no library, so refused: {'; '.join(refused)}.")
    if any(row.get("why") == OTHER_BOUND for row in rows):
        notes.append(f"Where else there is no number, {OTHER_BOUND}: a plan of its own tells.")
    return [*lines, *(line for note in notes for line in _paragraph(note, "  "))]


def _unjudged(cell: Mapping[str, Any]) -> bool:
    return cell["accountant"] is None and cell.get("why") != OTHER_BOUND


def _noises(facts: Mapping[str, Any]) -> list[str]:
    lines = ["Noise multiplier for other budgets, and its ratio to the batch"]
    for row in facts["noise_for"]:
        noise = "-" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.4g}"
        ratio = "-" if row["noise_to_batch"] is None else f"{row['noise_to_batch']:.3g}"
        lines.append(f"  eps {row['eps']:<6g}{noise:>10}{ratio:>12}")
    return lines


def _knee(table: Mapping[str, Any] | None) -> list[str]:
    if table is None:
        return []
    width = len(table["epochs"])
    lines = [
        f"Noise to batch at epsilon {table['eps']:g}, by passes over the data (Poisson sampling, pld)",
        f"  {'batch':>8}" + "".join(f"{epochs:>14.4g}" for epochs in table["epochs"]),
    ]
    for place, batch in enumerate(table["batches"]):
        cells = table["cells"][place * width : (place + 1) * width]
        shown = [
            ("-" if cell["noise_to_batch"] is None else f"{cell['noise_to_batch']:.3g}")
            + ("<" if knee["batch"] == batch else " ")
            for cell, knee in zip(cells, table["knees"], strict=True)
        ]
        lines.append(f"  {batch:>8}" + "".join(f"{text:>14}" for text in shown))
    knees = [knee["batch"] for knee in table["knees"]]
    rule = (
        f"< the knee: the smallest of these batches whose ratio is at most {table['factor']:g} times what as many "
        "steps would need if each saw every unit. Up to there a larger batch is a gain for the same passes."
    )
    if all(knee is None for knee in knees):
        rule = f"No batch here reaches the knee, {rule[len('< the knee: ') :]}"
    elif None in knees:
        rule += " A column without one has it beyond these."
    return [*lines, *_paragraph(rule, "  ")]


def _users(facts: Mapping[str, Any]) -> list[str]:
    users, unit = facts["user_level"], facts["plan"]["budget"]["unit"]
    plural = "queries" if unit == "query" else f"{unit}s"
    columns = users["columns"]
    heads = [c["sampling"].replace("truncated_poisson", "truncated") for c in columns]
    lines = [f"Epsilon of several {plural} of one person, under {users['neighbours']}"]
    lines.append(f"  {plural:>8}" + "".join(f"{head:>13}" for head in heads))
    if any(c["cap"] for c in columns):
        caps = [f"cap {c['cap']}" if c["cap"] else "" for c in columns]
        lines.append(f"  {'':>8}" + "".join(f"{cap:>13}" for cap in caps))
    for place, row in enumerate(columns[0]["rows"]):
        cells = [_number(column["rows"][place]) for column in columns]
        lines.append(f"  {row['units']:>8}" + "".join(f"{cell:>13}" for cell in cells))
    notes = []
    reasons: dict[str, list[str]] = {}
    for head, column in zip(heads, columns, strict=True):
        for row in column["rows"][1:]:
            if row["epsilon"] is None:
                name = f"{head} (cap {column['cap']})" if column["cap"] else head
                names = reasons.setdefault(_short(row["why"]), [])
                names += [] if name in names else [name]
    for why, names in reasons.items():
        notes.append(f"- {', '.join(names)}: {why}.")
    if users["roomy_cap"] is not None:
        notes.append(f"datamodule.cap={users['roomy_cap']} would keep the promise to several, at that much padding.")
    return [*lines, *(line for note in notes for line in _paragraph(note, "  "))]


def _short(why: str) -> str:
    return "no epsilon for several together is known" if "no epsilon for several" in why else why


def _audits(facts: Mapping[str, Any]) -> list[str]:
    rows, eps = facts["audit_power"], facts["plan"]["budget"]["eps"]
    lines = [
        f"What a one-run audit could certify of epsilon {eps:g}, at {rows[0]['confidence']:.0%} confidence",
        f"  {'canaries':>8}{'all guesses right':>20}{'guesses as good as the claim':>31}",
    ]
    for row in rows:
        lines.append(f"  {row['canaries']:>8}{row['at_best']:>20.3g}{row['as_claimed']:>31.3g}")
    note = (
        "Steinke, Nasr and Jagielski 2023. So many canaries contradict no epsilon above the first number, and half "
        "of the audits reach the second; real attacks guess worse."
    )
    return [*lines, *_paragraph(note, "  ")]


def _ceilings(ceilings: Mapping[str, Any] | None) -> list[str]:
    if ceilings is None:
        return []
    lines = ["No attack on one unit does better than"]
    lines.append(f"  membership accuracy  {ceilings['membership_accuracy']:.3g}")
    for rate, value in ceilings["tpr_at_fpr"].items():
        lines.append(f"  {value:<9.3g} true positives at {rate} false positives")
    for prior, value in ceilings["secret_guess"].items():
        lines.append(f"  {value:<9.3g} of naming a secret that one guesses with probability {prior} anyway")
    return lines


def _number(row: Mapping[str, Any]) -> str:
    return "-" if row["epsilon"] is None else f"{row['epsilon']:.4g}"


def _paragraph(text: str, first: str, width: int = WIDTH) -> Sequence[str]:
    """The text in lines that begin under each other."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
