"""The text of a privacy card: the statement, the Markdown and the page.

The texts are made only from the card's own fields. Numbers of the claim are rounded up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_dpret.cards.audits import attacks_sentence, audit_sections, contradicted
from lit_dpret.cards.blocks import (
    Banner,
    Block,
    Bullets,
    Checks,
    ClaimBox,
    Facts,
    Grid,
    Paragraph,
    Section,
    to_html,
    to_markdown,
)
from lit_dpret.privacy.budget import show_delta, show_epsilon

Card = Mapping[str, Any]


def charges_every_unit(card: Card) -> bool:
    """Return whether the claim charges every unit for every step, without amplification by sampling."""
    return (card["accounting"] or {}).get("basis") == "no_amplification"


def printed_epsilon(card: Card) -> str:
    """Return the epsilon to print: a number only if proved."""
    guarantee = card["claim"]["guarantee"]
    if guarantee == "dp":
        return show_epsilon(card["claim"]["epsilon"])
    return "infinite" if guarantee == "none" else "not proved"


WITHOUT_PRIVACY = "no privacy guarantee (epsilon is infinite)"
NOT_PROVED = "privacy not proved (no epsilon)"


def privacy_line(card: Card) -> str:
    """Return the claim in one line, with everything that gives epsilon its meaning."""
    claim = card["claim"]
    if claim["guarantee"] == "none":
        return WITHOUT_PRIVACY
    if claim["guarantee"] != "dp":
        return NOT_PROVED
    terms = [("epsilon", printed_epsilon(card)), *_terms(claim)]
    return ", ".join(f"{name} = {value}" for name, value in terms)


def _unit(claim: Mapping[str, Any]) -> str | None:
    """Return the card's name for the unit: for a record, the data owner's own name."""
    found: str | None = claim.get("unit_name", claim["unit"])
    return found


def _terms(claim: Mapping[str, Any], delta: str = "delta") -> list[tuple[str, str]]:
    """List the terms without which an epsilon means nothing, as far as the claim has them."""
    first = [] if claim["delta"] is None else [(delta, show_delta(claim["delta"]))]
    terms = {"unit": _unit(claim), "neighbours": claim["neighbours"]}
    return first + [(name, str(term)) for name, term in terms.items() if term is not None]


def statement(card: Card) -> str:
    """Return the claim in sentences, from the realised mechanism."""
    claim, subject = card["claim"], card["subject"]
    if claim["guarantee"] == "none":
        return (
            f'"{subject["name"]}" carries no privacy guarantee. It was computed from private data without enough '
            "noise to cover them, so epsilon is infinite, and it may reveal individual records. Handle it like the "
            "private data themselves."
        )
    if claim["guarantee"] != "dp":
        return (
            f'For "{subject["name"]}" no privacy guarantee is proved, because an assumption of the proof does not hold '
            "(see the assumptions). Handle it like the private data themselves."
        )
    start = [str(card["pretraining"]["start"])] if card["pretraining"].get("start") else []
    sentences = [_mechanism_sentence(card), *start, _claim_sentence(card), *_user_sentence(claim)]
    released = ", ".join(claim["output_released"])
    sentences.append(
        f"The claim covers {released}, and everything computed from them without going back to the private data. "
        "What it does not cover is listed on this card."
    )
    sentences.append(without_repetition(str(card["tuning"]["text"])))
    sentences.append(attacks_sentence(card))
    return " ".join(sentences)


def without_repetition(tuning: str) -> str:
    """Return the text on several artefacts' tuning ("... Of NAME: ...") without repeating a sentence.

    Artefacts with the same text as the first one are named at the end.
    """
    first, *parts = re.split(r" (?=Of [^:]+: )", tuning)
    of_first, same, kept = _sentences(first), list[str](), [first]
    told = set(of_first)
    for part in parts:
        name, said = re.split(r": ", part, maxsplit=1)
        sentences = _sentences(said)
        if sentences == of_first:
            same.append(name.removeprefix("Of "))
            continue
        kept.append(f"{name}: {' '.join(s for i, s in enumerate(sentences) if i == 0 or s not in told)}")
        told.update(sentences)
    names = " and ".join(filter(None, [", ".join(same[:-1]), *same[-1:]]))
    return " ".join([*kept, f"The same is true of {names}."] if same else kept)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.]) (?=[A-Z])", text)


def _mechanism_sentence(card: Card) -> str:
    mechanism = card["mechanism"]
    if mechanism["kind"] == "post_processing":
        parent, subject, began = card["parents"][0], card["subject"], mechanism.get("started_from")
        began = "weights that are not named" if began == "unstated" else began
        itself = f' Training of "{subject["name"]}" itself started from {began}.' if began else ""
        itself += _averaged(mechanism)
        return (
            f'"{subject["name"]}" ({subject["artifact_type"]}) was computed from "{parent["name"]}" (card sha256 '
            f"{parent['sha256'][:12]}) without going back to the private data ({mechanism['description']}). This is "
            f"post-processing and costs no privacy, so the claim is its parent's.{itself}"
        )
    n = mechanism.get("n_public")
    size = f" on {n} {card['claim']['unit_plural']}" if n else ""
    done = mechanism["steps_done"]
    if not done:
        return f"Training{size} made no step, so nothing was released."
    if mechanism.get("mode") == "histogram":
        return (
            f"A histogram{size} was computed. Each {card['claim']['unit']} added {mechanism['rows_per_unit']} to "
            f"public bins, and Gaussian noise of standard deviation {_n(mechanism['noise_std'])}{_on_grid(mechanism)} "
            "was added to each bin once."
        )
    if mechanism.get("mode") == "private_evolution":
        facts = mechanism["mode_facts"]
        return (
            f"{facts['generator']}, a public model, wrote candidate queries, and {done} noised "
            f"histogram{'' if done == 1 else 's'} of votes for them {'was' if done == 1 else 'were'} released{size}."
            f"{_ended_early(card)} In each, one {_unit(card['claim'])} gave {mechanism['rows_per_unit']}, to the "
            f"candidates nearest to its queries under {facts['encoder']}, a public encoder, and Gaussian noise of "
            f"standard deviation {_n(mechanism['noise_std'])} (noise multiplier {_n(mechanism['noise_multiplier'])})"
            f"{_on_grid(mechanism)} was added to each count once. No model was trained."
        )
    return (
        f"Training made {done} noisy step{'' if done == 1 else 's'}{size}.{_ended_early(card)} Batches were drawn "
        f"as follows: {mechanism['law_text']}. {_bounded(card)}, and "
        f"Gaussian noise of standard deviation {_n(mechanism['noise_std'])} (noise multiplier "
        f"{_n(mechanism['noise_multiplier'])}){_on_grid(mechanism)} was added to the sum once.{_counted(mechanism)}"
        f"{_facts_of_the_mode(mechanism)}{_averaged(mechanism)}"
    )


def _averaged(mechanism: Mapping[str, Any]) -> str:
    return f" Averaging of the weights: {mechanism['averaging']}." if "averaging" in mechanism else ""


def _ended_early(card: Mapping[str, Any]) -> str:
    mechanism = card["mechanism"]
    if not (counted := mechanism.get("steps_counted")):
        return ""
    ended = f" It ended before the {mechanism['steps_planned']} steps that were planned"
    if any(a["holds"] is False and a["consequence"] == "no_claim" for a in card["assumptions"]):
        return f"{ended}, and when it ended may depend on a private row, which no noise covers."
    return (
        f"{ended}, and when it ended may depend on what it had released by then, so the claim is that of {counted} "
        "steps."
    )


def _on_grid(mechanism: Mapping[str, Any]) -> str:
    return ", as integers on a public grid," if mechanism.get("noise") == "discrete" else ""


def _facts_of_the_mode(mechanism: Mapping[str, Any]) -> str:
    facts = mechanism.get("mode_facts") or {}
    said = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items())
    return f" Facts of the mode {mechanism['mode']}: {said}." if said else ""


def _counted(mechanism: Mapping[str, Any]) -> str:
    counted = mechanism.get("clip_fraction")
    if counted is None:
        return ""
    return (
        " The share of clipped gradients was released with each step, under the same noise (standard deviation "
        f"{_n(counted['standard_deviation'])}). Gradient and count of one unit together move the sum by at most "
        f"{_n(mechanism['sensitivity'])}, to which the noise multiplier refers, so the epsilon covers both."
    )


def _bounded(card: Card) -> str:
    mechanism, coupling = card["mechanism"], card["mechanism"].get("coupling")
    if coupling is None:
        layers = ", each layer separately to this norm divided by the square root of the number of layers"
        return (
            f"In each step the gradient of each {_unit(card['claim'])} was clipped to L2 norm "
            f"{_n(mechanism['max_grad_norm'])} "
            f"({mechanism['clip']}{'' if mechanism.get('clip_groups', 'flat') == 'flat' else layers})"
        )
    return (
        f"The loss compares the {card['claim']['unit_plural']} of a batch with each other. In each step "
        f"{coupling['text']}, so that one {_unit(card['claim'])} moves the sum by at most "
        f"{_n(mechanism['sensitivity'])}"
    )


def _claim_sentence(card: Card) -> str:
    claim = card["claim"]
    how = "computed with the {} accountant of {}".format(*_accountant(card))
    if charges_every_unit(card):
        how += ", without counting on amplification by sampling"
    return (
        f"The result satisfies (epsilon = {printed_epsilon(card)}, delta = {show_delta(claim['delta'])})-differential "
        f"privacy with respect to {claim['neighbours_text']}, {how}. In plain words: whatever is done with what is "
        f"released, such a change makes any conclusion more probable by a factor of at most "
        f"{_factor(claim['epsilon'])}, and by at most {show_delta(claim['delta'])} beyond that."
    )


def _accountant(card: Card) -> tuple[str, str]:
    """Return the accountant of the claim's epsilon, and its library: pld where every unit is charged for every step."""
    accounting = card["accounting"]
    if charges_every_unit(card) and accounting["accountant"] != "pld":
        return "pld", "dp-accounting"
    return accounting["accountant"], f"{accounting['library']} {accounting['version']}"


def _user_sentence(claim: Mapping[str, Any]) -> list[str]:
    """State the guarantee for a user with several units, if a bound on their number was declared."""
    most = claim.get("max_units_per_user")
    if most is None:
        return []
    before = claim.get("max_units_before", [])
    units = claim["unit_plural"] if most > 1 else _unit(claim)
    who = f"a person who contributed up to {most} {units}"
    if None in before:
        return [f"For {who} no epsilon is stated: a run before this one declared no bound on their number."]
    who += "".join(f", and up to {earlier} to a run before this one" for earlier in before)
    if claim["user_level_epsilon"] is None:
        return [f"For {who} no epsilon is proved."]
    return [
        f"For {who}, a bound that was declared, the same releases satisfy (epsilon = "
        f"{show_epsilon(claim['user_level_epsilon'])}, delta = {show_delta(claim['delta'])})-differential privacy "
        "with respect to all of them together."
    ]


def _factor(epsilon: float) -> str:
    power = f"e^{show_epsilon(epsilon)}"
    if epsilon > 30:
        return f"{power}, which is no limit in practice"
    value = math.exp(epsilon)
    return f"{power} = {show_epsilon(value) if value < 1e5 else f'{value:.1e}'}"


def claim_blocks(card: Card) -> list[Block]:
    """Return the blocks with the number and its conditions, and the card's banners and cautions."""
    claim = card["claim"]
    number = ClaimBox(printed_epsilon(card), _terms(claim, "delta (δ)"), guaranteed=claim["guarantee"] == "dp")
    return [
        *(Banner(text) for text in card["banners"]),
        *([Banner(attacks_sentence(card))] if contradicted(card) else []),
        number,
        *(Banner(without_repetition(text), "caution") for text in card["cautions"]),
    ]


def card_markdown(card: Card) -> str:
    """Return the card as Markdown."""
    return to_markdown(*_page(card))


def card_html(card: Card) -> str:
    """Return the card as one self-contained HTML page."""
    return to_html(*_page(card))


def _page(card: Card) -> tuple[str, str, list[Block], list[Section], str]:
    subject = card["subject"]
    title, subtitle = f"Privacy card: {subject['name']}", f"{subject['artifact_type']}; card made {card['created']}"
    footer = f"{card['schema']}. The machine-readable card and the ledger are authoritative; this page repeats them."
    return title, subtitle, claim_blocks(card), _sections(card), footer


def _sections(card: Card) -> list[Section]:
    claim, accounting = card["claim"], card["accounting"]
    sections = [
        Section("Statement", [Paragraph(claim["statement"])]),
        Section("Protected", [Bullets(claim["protected"])] if claim["protected"] else [Paragraph("Nothing.")]),
    ]
    if claim["unprotected_quantities"]:
        sections.append(Section("Taken as public", [Bullets(claim["unprotected_quantities"])]))
    sections.append(Section("Not covered", [Bullets(not_covered(card))]))
    if card["assumptions"]:  # they include those of its parents, some of which are the same
        checks = dict.fromkeys((a["holds"], a["text"]) for a in card["assumptions"])
        sections.append(Section("Assumptions", [Checks(list(checks))]))
    sections.append(Section("What was done", [Facts(_mechanism_rows(card["mechanism"]))]))
    if accounting is not None:
        sections.append(Section("Accounting", _accounting_blocks(card)))
    if ceilings := card["empirical"].get("ceilings"):
        sections.append(Section("What no attack can exceed", _ceiling_blocks(ceilings)))
    sections += audit_sections(card)
    sections.append(Section("Origin", _origin_blocks(card)))
    return sections


_RUN = "the training on the private data"


def not_covered(card: Card) -> list[str]:
    """List the gaps of a claim, each once, with the artefacts that have it."""
    names = {card["subject"]["name"], *(parent["name"] for parent in card["parents"])}
    whose: dict[str, list[str]] = {}
    for entry in card["not_covered"]:
        name, _, gap = str(entry).partition(": ")
        if gap and name in names:
            whose.setdefault(gap, []).append(name)
        else:
            whose.setdefault(entry, []).append(_RUN)
    return [gap if of == [_RUN] else f"{', '.join(of)}: {gap}" for gap, of in whose.items()]


def _mechanism_rows(mechanism: Mapping[str, Any]) -> list[tuple[str, object]]:
    labels = {
        "law_text": "sampling law",
        "noise_std": "noise standard deviation",
        "n_public": "number of units (public)",
        "max_grad_norm": "clipping bound (max grad norm)",
    }
    return [
        (labels.get(name, name.replace("_", " ")), _n(value))
        for name, value in mechanism.items()
        if name != "law" and value is not None
    ]


def _accounting_blocks(card: Card) -> list[Block]:
    accounting = card["accounting"]
    rows: list[tuple[str, object]] = [
        ("accountant", "{} ({})".format(*_accountant(card))),
        ("duplicates", card["claim"]["duplicates_policy"]),
        ("delta rule", card["claim"]["delta_rule"]),
    ]
    if accounting.get("error_bound"):
        rows.insert(1, ("exactness", accounting["error_bound"]))
    labels = {
        "epsilon_if_shuffled": "epsilon if the batches had come from shuffled passes",
        "epsilon_rdp": "epsilon by the RDP accountant",
        "epsilon_replace_one": "epsilon for replacing one unit",
        "epsilon_underreported_by_gdp": "NOT A GUARANTEE: epsilon by the central limit of Gaussian DP, under-reported",
    }
    for key, label in labels.items():
        value = accounting.get(key)
        reason = accounting["not_computed"].get(key, "not computed")
        rows.append((label, show_epsilon(value) if value is not None else reason))
    if (total := accounting.get("dataset_total")) is not None:
        rows.append(("all runs on this data set", total_of_runs(total)))
    blocks: list[Block] = [Facts(rows)]
    composition = [
        (part["text"], part["count"], "" if part["epsilon_alone"] is None else show_epsilon(part["epsilon_alone"]))
        for part in accounting["composition"]
    ]
    blocks.append(Paragraph("Everything that was released, as charged:"))
    blocks.append(Grid(("Release", "Times", "Epsilon alone"), composition, frozenset({1, 2})))
    if groups := accounting.get("groups"):
        blocks.append(Paragraph(_GROUPS_TEXT))
        shown = [(group["units"], _group(group)) for group in groups]
        blocks.append(Grid(("Units", "Epsilon"), shown, frozenset({0, 1}), narrow=True))
    if curve := card["claim"]["curve"]:
        blocks.append(Paragraph("The same guarantee at other values of delta:"))
        grid = [(f"{delta:.1e}", show_epsilon(epsilon)) for epsilon, delta in curve]
        blocks.append(Grid(("Delta", "Epsilon"), grid, frozenset({0, 1}), narrow=True))
    return blocks


_GROUPS_TEXT = (
    "Epsilon for several units together, at the same delta, by the pld accountant. It applies to a person with that "
    "many units, and to content that was recorded that many times:"
)


def _group(group: Mapping[str, Any]) -> str:
    if group["epsilon"] is not None:
        return show_epsilon(group["epsilon"])
    wider = group.get("wider")
    more = f"; {show_epsilon(wider['epsilon'])} with datamodule.cap={wider['cap']}" if wider else ""
    return f"{group['why']}{more}"


def total_of_runs(total: Mapping[str, Any]) -> str:
    """Describe the joint cost of all runs that name one data-set ledger."""
    running = f", {total['running']} of them still running or interrupted" if total["running"] else ""
    return (
        f"epsilon = {show_epsilon(total['epsilon'])} at delta = {show_delta(total['delta'])} when this run ended, of a "
        f"limit of {total['total_eps']:g}: {total['runs']} runs{running}, composed by {total['accountant']}; valid if "
        "no run was planned from the results of another"
    )


def _ceiling_blocks(ceilings: Mapping[str, Any]) -> list[Block]:
    rows = [("telling whether one unit was there, with even odds beforehand", ceilings["membership_accuracy"])]
    rows += [
        (f"recognising a unit that was there, with false alarms in {100 * float(rate):g} % of cases", value)
        for rate, value in ceilings["tpr_at_fpr"].items()
    ]
    rows += [
        (f"naming a secret that one blind guess in {1 / float(prior):,.0f} hits", value)
        for prior, value in ceilings["secret_guess"].items()
    ]
    text = (
        "Upper bounds that follow from the accounting alone, for one unit and any attack on what was released. "
        "They are not measurements."
    )
    grid = [(label, _percent(value)) for label, value in rows]
    return [Paragraph(text), Grid(("Attack", "Succeeds at most"), grid, frozenset({1}), narrow=True)]


def _percent(value: float) -> str:
    """Format a share as a percentage, rounded up to three digits."""
    if value <= 0:
        return "0 %"
    if value < 1e-4:
        return f"{show_delta(100 * value)} %"
    digits = max(0, 2 - math.floor(math.log10(100 * value)))
    return f"{math.ceil(100 * value * 10**digits * (1 - 1e-12)) / 10**digits:.{digits}f} %"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{label} ")
        else:
            rows.append((label, "not stated" if value is None else _n(value)))  # "none" would read as "none found"
    return rows


def _origin_blocks(card: Card) -> list[Block]:
    rows: list[tuple[str, object]] = [("tuning", without_repetition(card["tuning"]["text"]))]
    for name in ("pretraining", "generation", "randomness", "environment"):
        if block := card.get(name):
            rows += [(f"{name} {key}".replace("_", " "), value) for key, value in _flatten(block)]
    ledger = card["ledger"]
    if ledger is not None:
        rows += [("ledger", f"{ledger['name']}, {ledger['records']} records"), ("ledger head", ledger["head"])]
    rows += [(f"derived from {parent['name']}", f"card sha256 {parent['sha256']}") for parent in card["parents"]]
    rows += [(f"file {name}", f"sha256 {digest}") for name, digest in card["subject"]["sha256"].items()]
    rows.append(("software", ", ".join(f"{name} {version}" for name, version in card["package_versions"].items())))
    return [Facts(rows)]


def _n(value: object) -> str:
    """Format a value for a reader: numbers short, ranges and lists in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        if set(value) == {"min", "max"}:
            return f"{_n(value['min'])} to {_n(value['max'])}"
        return ", ".join(f"{key}: {_n(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_n(item) for item in value)
    return str(value)
