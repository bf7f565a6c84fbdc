"""What a membership attack found, for its owner: JSON for programs, Markdown for people. Neither is to be released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.report.page import INTERNAL, Written, write_short

Facts = Mapping[str, Any]
EVIDENCE = (
    "A lower bound is evidence of leakage; absence of evidence is no guarantee. The ceilings come from the accountant "
    "alone, and the two are never one number."
)


def write_membership(facts: Facts, folder: Path) -> Written:
    """Write ``internal_membership.json`` and ``.md``, readable for their owner alone."""
    title, internal = f"Membership attacks on {facts['target']['name']}", INTERNAL.format(what="queries")
    return write_short(folder, "membership", title, facts, _lines(facts), internal=internal)


def membership_table(attacks: Sequence[Facts], ceilings: Facts | None) -> list[str]:
    """The attacks as a Markdown table, the ceilings as its last row."""
    rates = ("0.1", "0.01", "0.001")
    lines = [
        "| attack | AUC | TPR at 10 % FPR | at 1 % | at 0.1 % | accuracy | evidence: epsilon at least |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for attack in attacks:
        cells = [_interval(attack["auc"]), *(_interval(attack["tpr_at_fpr"][rate]) for rate in rates)]
        evidence = attack["evidence"]
        cells += [_interval(attack["balanced_accuracy"]), "–" if evidence is None else f"{evidence['eps_lower']:.3f}"]
        mark = " **above its ceiling**" if attack["exceeded"] else ""
        lines.append(f"| {attack['attack']}{mark} | {' | '.join(cells)} |")
    if ceilings is not None:
        top = [f"{ceilings['tpr_at_fpr'][rate]:.3f}" for rate in rates]
        lines.append(f"| *no attack above* | | {' | '.join(top)} | {ceilings['membership_accuracy']:.3f} | |")
    return lines


def _lines(facts: Facts) -> list[str]:
    target, suspects, claim = facts["target"], facts["suspects"], facts["claim"]
    drawn = "by fair coins" if suspects["fair_coins"] else "from another split"
    unanswered = suspects.get("left_out_without_passage", 0)
    nor = f", nor are {unanswered:,} that have no passage" if unanswered else ""
    lines = [
        f"A {target['kind']}; {target['privacy']}. {suspects['attacked']:,} queries, {suspects['members']:,} of them "
        f"trained on, the others chosen {drawn}; {suspects['left_out_as_copies']:,} queries whose text occurs several "
        f"times are not attacked{nor}.", "",
        *membership_table(facts["attacks"], claim["ceilings"]), "",
        f"Intervals: {100 * facts['confidence']:g} %, bootstrap over queries, each attack for itself. Evidence: the "
        f"error divided among the {len(facts['attacks'])} attacks. {EVIDENCE}", "",
    ]  # fmt: skip
    for attack in facts["attacks"]:
        for one in attack["exceeded"]:
            lines.append(
                f"* {attack['attack']}: {one['what']} is at least {one['at_least']:.4g}, above {one['ceiling']:.4g} "
                f"(confidence {facts['alarm']:g} over all attacks)."
            )
    if facts["shadows"] is not None:
        shadows = facts["shadows"]
        lines.append(
            f"* {shadows['models']} shadow models of {shadows['steps']} steps each, as many as the target's "
            f"configuration has, in {shadows['seconds'] / 60:.1f} minutes."
        )
    if facts["memorisation"] is not None:
        found = facts["memorisation"]
        lines.append(
            f"* Counterfactual memorisation ({found['signal']}): {found['mean']:.4f} in the mean; the most memorised "
            "queries stand in the JSON by id."
        )
    if facts["disclosures"] is not None:
        found = facts["disclosures"]
        lines.append(
            f"* The release repeats {found['repeated']} of {found['queries']} queries, {found['trained']} that were "
            f"trained on and {found['phantoms']} phantoms: {found['excess']} in excess; evidence of leakage at least "
            f"{found['evidence']['eps_lower']:.3f}."
        )
    lines += [f"* {caveat}" for caveat in facts["caveats"]]
    return lines


def _interval(found: Facts) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
