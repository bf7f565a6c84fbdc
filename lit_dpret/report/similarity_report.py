"""Report the similarity of synthetic to original queries: JSON, Markdown and a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.cards.blocks import Banner, Block, Code, Grid, Paragraph, Section
from lit_dpret.report.figures import BLUE, ORANGE, can_draw, new_figure, save_png
from lit_dpret.report.page import Page, Written

Facts = Mapping[str, Any]
NAME = "similarity"

_REFERENCES = {
    "reference": "all original queries",
    "reference_sample": "as many of them as were held out",
    "held_out": "held-out queries, which the generator never saw",
}


def write_similarity(
    facts: Facts, folder: Path, *, command: str = "", plot: bool | None = None, owner_only: bool = False
) -> Written:
    """Write ``similarity.json``, ``.md`` and ``.html``, and ``similarity.png`` if it can be drawn."""
    made, known = facts["synthetic"], facts["reference"]
    declared = ", as declared" if known["whose"] == "public" else ""
    subtitle = (
        f"{made['queries']:,} synthetic queries ({made['privacy']}); {known['queries']:,} original ones, "
        f"{known['whose']}{declared}"
    )
    lead: list[Block] = [Banner(facts["not_covered"])] if facts["not_covered"] else []
    sections = [*_bleu(facts), *_mauve(facts), *_diversity(facts), *_overlap(facts), *_closing(facts, command)]
    page = Page(
        name=NAME, title=f"Similarity of {made['name']} to {known['from']}", subtitle=subtitle, lead=lead,
        sections=sections, facts=facts, owner_only=owner_only,
    )  # fmt: skip
    paths = list(page.write(folder).values())
    if "diversity" in facts and (plot or (plot is None and can_draw())):
        paths.append(draw_similarity(facts["diversity"], folder / f"{NAME}.png", owner_only=owner_only))
    return Written(tuple(paths), (page.markdown(), *(f"written: {path}" for path in paths)))


def scores_of(facts: Facts) -> dict[str, float]:
    """Return the scores by name."""
    scores: dict[str, float] = {}
    if facts.get("bleu"):
        scores["bleu"] = facts["bleu"]["score"]
    for kind, each in (facts.get("mauve") or {}).items():
        scores[f"mauve/{kind}"] = each["mean"]
    for n, value in facts["diversity"]["synthetic"]["distinct"].items() if "diversity" in facts else ():
        scores[f"distinct-{n}"] = value
    for kind in ("exact", "ngram") if "overlap" in facts else ():
        if (share := facts["overlap"]["reference"][kind]["share"]) is not None:
            scores[f"overlap/{kind}"] = share
    return scores


def show_share(share: Facts) -> str:
    """Return a share with its interval and counts, from its JSON."""
    if share["share"] is None:
        return "none could be compared"
    return (
        f"{share['share']:.2%} [{share['low']:.2%}, {share['high']:.2%}] ({share['positives']:,} of {share['total']:,})"
    )


def _ceiling(each: Facts) -> str:
    return f"{each['ceiling']['mean']:.3f}" if each["ceiling"] else ""


def _bleu(facts: Facts) -> list[Section]:
    found = facts.get("bleu")
    if not found:
        return []
    rows = [
        ("BLEU (0 to 100)", f"{found['score']:.2f}"),
        ("as the papers write it", f"{found['as_in_the_papers']:.4f}"),
        ("precision of 1- to 4-grams", ", ".join(f"{p:.1f}" for p in found["precisions"])),
        ("brevity penalty", f"{found['brevity_penalty']:.3f}"),
        ("queries scored", f"{found['scored']:,}"),
        ("without an original query of their passage", f"{found['without_reference']:,}"),
        ("signature", found["signature"]),
    ]
    text = "Each synthetic query against all original queries of the same passage, by sacrebleu."
    return [Section("BLEU", [Paragraph(text), Grid(("", ""), rows)])]


def _mauve(facts: Facts) -> list[Section]:
    if not facts.get("mauve"):
        return []
    rows = [
        (
            each["featuriser"], f"{each['mean']:.4f}", "" if each["sd"] is None else f"{each['sd']:.4f}",
            ", ".join(f"{value:.3f}" for value in each["values"]), _ceiling(each), f"{each['texts'][0]:,}",
            each["buckets"],
        )
        for each in facts["mauve"].values()
    ]  # fmt: skip
    text = (
        "1 for equal distributions, 1/252 for disjoint ones. The sd is over seeds of k-means only. Values of other "
        "features, numbers of texts or buckets cannot be compared with these. The ceiling is the value of two samples "
        "of the original queries, of the same size: even samples of one distribution stay below 1."
    )
    head = ("features", "mean", "sd", "by seed", "ceiling", "texts of each", "buckets")
    return [Section("MAUVE", [Grid(head, rows, frozenset({1, 2, 4, 5, 6})), Paragraph(text, small=True)])]


def _diversity(facts: Facts) -> list[Section]:
    if "diversity" not in facts:
        return []
    found = facts["diversity"]
    made, known = found["synthetic"], found["reference"]
    rows = [(f"distinct-{n}", f"{made['distinct'][n]:.4f}", f"{known['distinct'][n]:.4f}") for n in made["distinct"]]
    rows += [(f"words, {n}", f"{made['words'][n]:.1f}", f"{known['words'][n]:.1f}") for n in made["words"]]
    rows += [
        (
            f"begins with {name}" if name != "other" else "begins otherwise", f"{share:.1%}",
            f"{known['question_types'][name]:.1%}",
        )
        for name, share in made["question_types"].items()
    ]  # fmt: skip
    moved = found["total_variation"]
    text = (
        f"{found['texts']:,} queries of each side. Of the synthetic ones {moved['lengths']:.1%} would have to change "
        f"their length, and {moved['question_types']:.1%} their type, for the two histograms to be the same."
    )
    grid = Grid(("", "synthetic", "original"), rows, frozenset({1, 2}), narrow=True)
    return [Section("Diversity, length and type", [Paragraph(text), grid])]


def _overlap(facts: Facts) -> list[Section]:
    if "overlap" not in facts:
        return []
    n = facts["overlap"]["reference"]["n"]
    rows = [
        (_REFERENCES[name], f"{each['references']:,}", show_share(each["exact"]), show_share(each["ngram"]))
        for name, each in facts["overlap"].items()
    ]
    text = (
        "Synthetic queries that repeat an original one, case, punctuation and spaces aside, with exact 95 % intervals; "
        f"{n} words in a row are counted among queries with that many. Short questions coincide by chance: what counts "
        "is the difference from queries that the generator never saw."
    )
    head = ("found in", "queries", "word for word", f"{n} words in a row")
    return [Section("Copied queries", [Grid(head, rows, frozenset({1})), Paragraph(text, small=True)])]


def _closing(facts: Facts, command: str) -> list[Section]:
    sections = []
    if facts["not_computed"]:
        rows = list(facts["not_computed"].items())
        sections.append(Section("Not computed", [Grid(("what", "why"), rows)]))
    return [*sections, *([Section("How to reproduce this", [Code(command)])] if command else [])]


_SIDES = (("synthetic", BLUE, True), ("reference", ORANGE, False))
_TITLES = {"lengths": "words of a query", "question_types": "first word of a query"}


def draw_similarity(diversity: Mapping[str, Any], path: Path, *, owner_only: bool) -> Path:
    """Draw the histograms of lengths and question types, with sides distinguished by fill and colour."""
    figure = new_figure(10, 7)
    for axis, (name, title) in zip(figure.subplots(2, 1), _TITLES.items(), strict=True):
        labels = list(diversity["synthetic"][name])
        for offset, (side, colour, filled) in zip((-0.2, 0.2), _SIDES, strict=True):
            shares = [100 * diversity[side][name][label] for label in labels]
            places = [place + offset for place in range(len(labels))]
            axis.bar(
                places, shares, width=0.4, edgecolor=colour, facecolor=colour if filled else "none",
                label="synthetic" if side == "synthetic" else "original",
            )  # fmt: skip
        axis.set_xticks(range(len(labels)), labels)
        axis.set(xlabel=title, ylabel="% of queries")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    return save_png(figure, path, owner_only=owner_only, dpi=120)
