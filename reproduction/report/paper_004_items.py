"""Tables and figures of paper 004 (PDD-AS2), each from the stored results of a federated run or an attack."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Block, Bullets, Code, Grid, Paragraph
from lit_dpret.errors import DataError
from lit_dpret.report.figures import new_figure, save_png
from lit_dpret.report.page import Picture, copied_picture
from lit_dpret.report.paper_004 import table_1
from lit_dpret.tasks.hard_negatives import case_grid
from reproduction.federated.study_page import gain_grid, read_study, study_grid
from reproduction.report.reproduction import Show, read_paper

_COUNTS = {"passages": "#56B4E9", "sentences": "#0072B2", "train": "#D55E00", "dev": "#E69F00", "test": "#009E73"}
_ARMS = {
    "none": ("without embeddings", "#000000", "-"),
    "shuffled": ("with shuffled embeddings (control)", "#D55E00", "--"),
    "own": ("with the texts' own embeddings", "#0072B2", "-."),
}


def draw_silos(counts: Mapping[str, Mapping[str, int]], path: Path) -> str:
    """Figure 3: how large each client is, on a logarithmic axis; returns the caption."""
    figure, axis = _axis(8.5, 1.2 + 0.5 * len(counts))
    height = 0.8 / len(_COUNTS)
    for place, (name, colour) in enumerate(_COUNTS.items()):
        at = [client + (place - 2) * height for client in range(len(counts))]
        axis.barh(at, [found[name] for found in counts.values()], height=height, color=colour, label=_words(name))
    axis.set_yticks(range(len(counts)), list(counts))
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(left=1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("how many")
    figure.legend(loc="outside lower center", ncols=len(_COUNTS), frameon=False)
    save_png(figure, path, owner_only=True)
    return f"Passages, sentences and questions of each of {len(counts)} clients; the axis is logarithmic."


def _words(name: str) -> str:
    return name if name in ("passages", "sentences") else f"{name} questions"


def draw_language_model_losses(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> str:
    """Figure 6: training loss of a language model with and without embeddings; returns the caption."""
    figure, axis = _axis(7.5, 4.6)
    for arm, (label, colour, dashes) in _ARMS.items():
        steps, losses = zip(*curves[arm], strict=True)
        axis.plot(steps, losses, color=colour, linestyle=dashes, label=label)
    axis.set_xlabel("steps")
    axis.set_ylabel("training loss of a token, nats")
    axis.legend(frameon=False)
    save_png(figure, path, owner_only=True)
    ends = "; ".join(f"{_ARMS[arm][0]} {curves[arm][-1][1]:.3f}" for arm in _ARMS)
    return f"Training loss of the language model, means over neighbouring steps. At the end: {ends} nats."


def _axis(width: float, height: float) -> tuple[Any, Any]:
    figure = new_figure(width, height)
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


# What the paper prints in its Table 3 and, as losses, in its appendix C.
TABLE_3 = {"Without training": 36.3, "CLM without embedding": 25.9, "CLM with sentence embedding": 25.6}
FIGURE_6 = "with embeddings 3.239 nats, without 3.245"


def _facts(path: Path) -> Any:
    """Return what a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}).") from error


def _made_by(facts: Any) -> list[Block]:
    """Return the command that the results themselves name."""
    return [Paragraph("Made by", small=True), Code(facts["command"])] if facts.get("command") else []


def _silos(results: Path, picture: Path) -> list[Block]:
    counts = _facts(results / "manifest.json")["clients"]
    said = draw_silos(counts, picture)
    columns = ("passages", "sentences", "train", "dev", "test")
    rows = [(name, *(found[column] for column in columns)) for name, found in counts.items()]
    return [
        Picture(picture, said),
        Paragraph(said, small=True),
        Grid(("client", *columns), rows, frozenset(range(1, 6))),
    ]


def _main_table(results: Path, _: Path) -> list[Block]:
    facts = _facts(results / "pdd_as2.json")
    said = (
        f"Means over silos, then over seeds, with 95 % t-intervals over seeds. {facts['model']}. R@k is the paper's "
        "name for a hit at k."
    )
    return [table_1(facts["systems"]), Paragraph(said, small=True), *_made_by(facts)]


def _study(name: str, *, columns: Sequence[str] | None = None, table: bool = True) -> Show:
    """Return the table and the plot of a study, and whether the seeds carry what the paper says."""

    def show(results: Path, picture: Path) -> list[Block]:
        page = read_study(results / f"{name}.json")
        drawn = copied_picture(results / f"{name}.png", picture, page.title)
        blocks: list[Block] = [study_grid(page, columns), drawn] if table else [drawn, study_grid(page, columns)]
        if page.gains:
            blocks.append(gain_grid(page.gains))
        blocks.append(Bullets(list(page.findings)))
        return [*blocks, Paragraph(" ".join(page.notes), small=True), *_made_by({"command": page.command})]

    return show


def _perplexities(results: Path, _: Path) -> list[Block]:
    facts = _facts(results / "inversion.json")
    probe = facts["probe"]
    ours = (probe.get("perplexity_untrained"), probe["perplexity_without"], probe["perplexity"])
    rows = [
        (label, "–" if value is None else f"{value:.2f}", f"{theirs:.1f}")
        for (label, theirs), value in zip(TABLE_3.items(), ours, strict=True)
    ]
    rows.append(("Control: CLM with shuffled embeddings", f"{probe['shuffled_perplexity']:.2f}", "–"))
    sure = f"{100 * probe['confidence']:g} %"
    said = (
        f"An embedding tells {probe['nats']:.4f} nats of a token, {sure} interval {probe['low']:.4f} to "
        f"{probe['high']:.4f} (paired bootstrap over {probe['texts']} texts), against the same model with other texts' "
        f"embeddings. Named among {facts['ranking']['candidates']} candidates: "
        f"{facts['ranking']['direct']['value']:.3f} of the texts."
    )
    grid = Grid(("perplexity", "ours", "the paper's"), rows, frozenset({1, 2}), narrow=True)
    return [grid, Paragraph(said), *_made_by(facts)]


def _losses(results: Path, picture: Path) -> list[Block]:
    curves = _facts(results / "inversion.json").get("curves")
    if not curves:
        raise DataError(f"{results / 'inversion.json'} holds no training losses.")
    said = f"{draw_language_model_losses(curves, picture)} The paper's: {FIGURE_6}."
    return [Picture(picture, said), Paragraph(said, small=True)]


def _cases(results: Path, _: Path) -> list[Block]:
    facts = _facts(results / "hard_negatives.json")
    return [case_grid(facts["cases"]), *_made_by(facts)]


def _written(results: Path, _: Path) -> list[Block]:
    facts = _facts(results / "inversion.json")
    if not facts.get("samples"):
        raise DataError(f"{results / 'inversion.json'} holds no written texts: task.samples was 0.")
    rows = [(one["text"], one["own"], one["shuffled"]) for one in facts["samples"]]
    scores = facts["inverter"]
    said = (
        f"Over {scores['own']['texts']} texts: F1 of word sets {scores['own']['token_f1']:.3f}, and "
        f"{scores['shuffled']['token_f1']:.3f} for the control; written back exactly {scores['own']['exact']:.3f}."
    )
    header = ("embedded sentence", "written from its embedding", "control: model of shuffled embeddings")
    return [Grid(header, rows), Paragraph(said)]


_HITS = ("sentence/success@1",)
PAPER_004 = read_paper(
    "paper_004",
    {
        "Figure 3": _silos,
        "Table 1": _main_table,
        "Figure 4": _study("gain", columns=_HITS, table=False),
        "Figure 5": _study("data_ratio", columns=_HITS, table=False),
        "Table 2": _study("hubness", columns=(*_HITS, "passage/success@1")),
        "Table 3": _perplexities,
        "Table 4": _study("negatives"),
        "Table 5": _cases,
        "Figure 6": _losses,
        "Table 6": _written,
    },
)
