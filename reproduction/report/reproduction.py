"""Every table and figure of a paper on one page, numbered as in the paper, next to our version or why there is none.

The page is made only from the stored results of the parts that were run; nothing is typed in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Paragraph, Section
from lit_dpret.errors import DataError, in_words
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.report.federated_report import table_1
from lit_dpret.report.figures import new_figure, save_png
from lit_dpret.report.page import Page, Picture, copied_picture
from lit_dpret.tasks.hard_negatives import case_grid
from reproduction.federated.study_page import gain_grid, read_study, study_grid
from reproduction.published import PAPER_002 as PUBLISHED
from reproduction.published import PAPER_004 as PAPER_004_PRINTS
from reproduction.report import variant_figures as figures
from reproduction.report.variant_runs import UNTRAINED, VariantRun, by_variant, read_runs, sizes_of, ties_of
from reproduction.report.variants import (
    BATCH_RUNS,
    RUNS,
    UNTRAINED_RUNS,
    MetricsTable,
    bounded_norms,
    equal_negatives,
    settings_shown,
)

SCHEMA = "lit-dpret/reproduction/1"
# Returns blocks from the folder of a part's results and draws a picture to the second path. Raises `DataError` if the
# results lack what it shows.
Show = Callable[[Path, Path], Sequence[Block]]
State = Literal["shown", "left out", "not reproduced"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure."""

    number: str  # as in the paper, ``Table 1``; names the half that is shown, if only one half is
    says: str  # what the paper shows there
    parts: Sequence[str] = ()  # that can make it; the first one with results does
    show: Show | None = None  # makes the blocks; None if no part makes the item
    differs: str = ""  # how ours differs from the paper's, in addition to the sizes of the part
    why_not: str = ""  # why no part makes it, or none of this suite's
    quotes: bool = False  # its tables hold texts of the data, which may not be redistributable


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper: its tables and figures in order, and what is promised about our models."""

    name: str
    title: str
    promise: str
    items: tuple[Item, ...]
    internal: bool = False


def read_paper(name: str, shows: Mapping[str, Show]) -> Paper:
    """Return the paper of ``NAME.yaml`` next to this file; ``shows`` makes the blocks of its items, by number."""
    facts = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    items = tuple(Item(**one, show=shows.get(one["number"])) for one in facts.pop("items"))
    return Paper(name=name, items=items, **facts)


@dataclass(frozen=True, kw_only=True)
class PartTold:
    """The known facts of a part."""

    name: str
    sizes: str  # the sizes in which it is run, compared to the paper's
    command: str  # which runs it alone
    results: Path | None = None  # the folder of its results; None if there are none
    absent: str = ""  # why there are none
    ran: str = ""  # the number, steps and batches of the stored runs
    seconds: float | None = None  # of the stored runs, or of the last attempt; None if not measured
    taken: bool = False  # its results come from an earlier run


@dataclass(frozen=True)
class _Told:
    """The outcome for an item."""

    item: Item
    state: State
    blocks: Sequence[Block] = ()
    part: PartTold | None = None
    reason: str = ""

    def section(self) -> Section:
        blocks: list[Block] = [Paragraph(f"The paper: {self.item.says}"), *self.blocks]
        if self.state != "shown":
            blocks.append(Banner(f"{self.state.capitalize()}. {self.reason}", "plain"))
        differs = " ".join(filter(None, (self.item.differs, self.part.sizes))) if self.part else ""
        blocks += [Paragraph(f"Not as in the paper: {differs}", small=True)] if differs else []
        return Section(self.item.number, blocks)

    def tables(self) -> dict[str, Grid]:
        """Return the item's tables by file name; from the second on, the name has a number."""
        grids = [block for block in self.blocks if isinstance(block, Grid)]
        slug = _slug(self.item.number)
        return {f"{slug}{f'_{place}' if place > 1 else ''}.csv": grid for place, grid in enumerate(grids, 1)}

    def facts(self) -> dict[str, Any]:
        return {
            "number": self.item.number, "state": self.state, "part": self.part.name if self.part else None,
            "reason": self.reason, "differs": self.item.differs, "blocks": [_plain(block) for block in self.blocks],
        }  # fmt: skip


def write_reproduction(
    paper: Paper, parts: Sequence[PartTold], folder: Path, *, command: str, quote: bool = True,
    notes: Sequence[str] = (),
) -> dict[str, State]:  # fmt: skip
    """Write ``NAME.md``, ``.html``, ``.json``, tables as ``.csv``, and pictures; return the outcome for each item."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_as_run(part) for part in parts]
    known = {part.name: part for part in parts}
    told = [_tell(item, known, folder, quote=quote) for item in paper.items]
    overview = [(one.item.number, one.state, one.reason or (one.part.name if one.part else "")) for one in told]
    sections = [
        Section("What there is", [Grid(("in the paper", "here", "by the part, or why not"), overview)]),
        *(one.section() for one in told),
        Section("How this was made", _made_by(parts, command)),
        *([Section("Notes", [Bullets(list(notes))])] if notes else []),
    ]
    known_parts = [{name: value for name, value in asdict(part).items() if name != "results"} for part in parts]
    facts = {
        "schema": SCHEMA, "paper": paper.name, "title": paper.title, "promise": paper.promise, "command": command,
        "notes": list(notes), "items": [one.facts() for one in told], "parts": known_parts,
    }  # fmt: skip
    tables = {name: grid for one in told for name, grid in one.tables().items()}
    for item in paper.items:  # an earlier page may have shown tables that this one must not
        for stale in {*folder.glob(f"{_slug(item.number)}.csv"), *folder.glob(f"{_slug(item.number)}_[0-9].csv")}:
            if stale.name not in tables:
                stale.unlink()
    Page(
        name=paper.name, title=paper.title, subtitle=today(), lead=[Banner(paper.promise, "caution")],
        sections=sections, facts=facts, tables=tables, owner_only=paper.internal,
    ).write(folder)  # fmt: skip
    return {one.item.number: one.state for one in told}


def _as_run(part: PartTold) -> PartTold:
    """Add the number, steps and time of a part's stored runs; return a part without stored runs unchanged."""
    if part.results is None or not (part.results / RUNS).is_file():
        return part
    files = (part.results / name for name in (RUNS, BATCH_RUNS, "equal_negatives.jsonl", "losses.jsonl"))
    stored = [run for file in files if file.is_file() for run in read_runs(file)]
    found = {(run.variant, run.seed, run.batch_size): run for run in stored}
    seconds = sum(run.seconds[-1] for run in found.values() if run.seconds)
    # A resumed attempt took less time than its runs did in total.
    return replace(part, ran=f"{sizes_of(found.values())}.", seconds=seconds or part.seconds)


def _tell(item: Item, parts: Mapping[str, PartTold], folder: Path, *, quote: bool) -> _Told:
    if item.show is None:
        return _Told(item, "not reproduced", reason=item.why_not)
    reasons = []
    for name in item.parts:
        part = parts.get(name)
        if part is None or part.results is None:
            reasons.append(f"{name}: {part.absent}" if part else item.why_not or f"{name}: there is no such part")
            continue
        try:
            blocks = item.show(part.results, folder / f"{_slug(item.number)}.png")
        except DataError as error:
            reasons.append(f"{name} was run without it: {error}")
            continue
        if item.quotes and not quote:
            kept = [block for block in blocks if not isinstance(block, Grid)]
            return _Told(item, "left out", kept, part, "It quotes texts of the data (task.quote=false).")
        return _Told(item, "shown", blocks, part)
    return _Told(item, "left out", reason=" ".join(reasons))


def _slug(number: str) -> str:
    return re.sub(r"\W+", "_", number).strip("_").lower()


def _made_by(parts: Sequence[PartTold], command: str) -> list[Block]:
    rows = []
    for part in parts:
        state = part.absent or ("taken from an earlier run" if part.taken else "run")
        minutes = "–" if part.seconds is None else f"{part.seconds / 60:.1f}"
        rows.append((part.name, state, minutes, part.ran, part.sizes))
    grid = Grid(("part", "state", "minutes", "run here", "sizes"), rows, frozenset({2}))
    said = "Minutes are the training times of all runs shown, if these record them, else of the last attempt."
    commands = "\n".join(part.command for part in parts if part.results is not None)
    blocks: list[Block] = [Paragraph("All of it:"), Code(command), grid, Paragraph(said, small=True)]
    return [*blocks, Paragraph("Each part alone:"), Code(commands)] if commands else blocks


def _plain(block: Block) -> dict[str, Any]:
    if isinstance(block, Grid):
        return {"header": list(block.header), "rows": [list(row) for row in block.rows]}
    return (
        {"picture": block.path.name, "says": block.says} if isinstance(block, Picture) else {"text": block.markdown()}
    )


# -- paper 002 (Logit-DP), from the stored runs of task=variants and task=second_task


BASELINE = "Non-private"


def _figure(draw: Callable[[Sequence[VariantRun], Path], str], *, single: bool = False) -> Show:
    """Return a figure of a report's runs, and its caption; with ``single``, of one run of each variant."""

    def show(results: Path, picture: Path) -> list[Block]:
        runs = read_runs(results / RUNS)
        if single:
            runs = [min(group, key=lambda run: run.seed) for group in by_variant(runs).values()]
        said = f"{draw(runs, picture)} {sizes_of(runs)}."
        return [Picture(picture, said), Paragraph(said, small=True)]

    return show


def _batch_sizes(results: Path, picture: Path) -> list[Block]:
    """Draw single runs of Naive-DP, with the runs of the other variants as a reference for a low loss."""
    stored = read_runs(results / BATCH_RUNS)
    variant = stored[0].variant
    single = {run.batch_size: run for run in sorted(stored, key=lambda run: -run.seed) if run.variant == variant}
    others = [run for run in read_runs(results / RUNS) if run.variant != variant]
    said = figures.draw_batch_sizes([*single.values(), *others], picture, variant=variant)
    said = f"{said} {sizes_of(single.values())}."
    return [Picture(picture, said), Paragraph(said, small=True)]


def _judged(results: Path) -> tuple[list[VariantRun], list[VariantRun]]:
    """Return the runs of a report, and the same runs with the untrained encoders added."""
    runs, untrained = read_runs(results / RUNS), results / UNTRAINED_RUNS
    return runs, [*runs, *(read_runs(untrained) if untrained.is_file() else [])]


def _table(paper: Mapping[str, Sequence[float]], *, relative: bool) -> Show:
    def show(results: Path, _: Path) -> list[Block]:
        runs, judged = _judged(results)
        base = BASELINE if any(run.variant == BASELINE for run in runs) else None
        table = MetricsTable.of(judged, baseline=base)
        said = table.caption(relative=relative and base is not None).replace(": mean / standard deviation", "")
        classes = len(runs[0].confusion or [])
        more = (f"{sizes_of(runs)}. {classes} classes.", table.shares_of_the_gain(start=UNTRAINED), ties_of(judged))
        grid = table.beside_the_paper(paper, relative=relative, marks=bounded_norms(results))
        return [grid, Paragraph(" ".join(filter(None, (said, *more))), small=True)]

    return show


def _own_table(results: Path, _: Path) -> list[Block]:
    runs, judged = _judged(results)
    table = MetricsTable.of(judged, baseline=None)
    said = " ".join(filter(None, (table.caption(relative=False), f"{sizes_of(runs)}.", ties_of(judged))))
    return [table.grid(relative=False), Paragraph(said, small=True), *settings_shown(results, results)[:1]]


def _shows() -> dict[str, Show]:
    absolute, relative, confusions = PUBLISHED["table_3"], PUBLISHED["table_1"], _figure(figures.draw_confusions)
    return {
        "Figure 1, left": _figure(figures.draw_relative_loss),
        "Figure 1, right": _batch_sizes,
        "Table 1, embedding net": _table(relative["EmbeddingNet"], relative=True),
        "Table 1, ResNet18": _table(relative["ResNet18"], relative=True),
        "Figure 2": _figure(figures.draw_smoothed_loss, single=True),
        "Table 2": _table(PUBLISHED["table_2"], relative=True),
        "Figure 3": confusions,
        "Figure 4": confusions,
        "Table 3, embedding net": _table(absolute["EmbeddingNet"], relative=False),
        "Table 3, ResNet18": _table(absolute["ResNet18"], relative=False),
        "Figure 5": _figure(figures.draw_runtime),
        "Table 4": _table(PUBLISHED["table_4"], relative=False),
        "Beyond the paper, equal negatives": equal_negatives,
        "Beyond the paper, learning rate": _own_table,
        "Beyond the paper, settings": settings_shown,
    }


PAPER_002 = read_paper("paper_002", _shows())


# -- paper 004 (PDD-AS2), from the stored results of a federated run or an attack


# The counts shown for each client: their colour, and their name in words.
_COUNTS = {
    "passages": ("#56B4E9", "passages"), "sentences": ("#0072B2", "sentences"), "train": ("#D55E00", "train questions"),
    "dev": ("#E69F00", "dev questions"), "test": ("#009E73", "test questions"),
}  # fmt: skip
_ARMS = {
    "none": ("without embeddings", "#000000", "-"),
    "shuffled": ("with shuffled embeddings (control)", "#D55E00", "--"),
    "own": ("with the texts' own embeddings", "#0072B2", "-."),
}


def draw_silos(counts: Mapping[str, Mapping[str, int]], path: Path) -> str:
    """Draw figure 3, the size of each client on a logarithmic axis; return the caption."""
    figure, axis = _axis(8.5, 1.2 + 0.5 * len(counts))
    height = 0.8 / len(_COUNTS)
    for place, (name, (colour, words)) in enumerate(_COUNTS.items()):
        at = [client + (place - 2) * height for client in range(len(counts))]
        axis.barh(at, [found[name] for found in counts.values()], height=height, color=colour, label=words)
    axis.set_yticks(range(len(counts)), list(counts))
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set(xlim=(1, None), xlabel="how many")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.legend(loc="outside lower center", ncols=len(_COUNTS), frameon=False)
    save_png(figure, path, owner_only=True)
    return f"Passages, sentences and questions of each of {len(counts)} clients; the axis is logarithmic."


def draw_language_model_losses(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> str:
    """Draw figure 6, training loss of a language model with and without embeddings; return the caption."""
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


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {in_words(error)}.") from error


def _command_of(facts: Any) -> list[Block]:
    return [Paragraph("Made by", small=True), Code(facts["command"])] if facts.get("command") else []


def _silos(results: Path, picture: Path) -> list[Block]:
    counts = _json(results / "manifest.json")["clients"]
    said = draw_silos(counts, picture)
    rows = [(name, *(found[column] for column in _COUNTS)) for name, found in counts.items()]
    grid = Grid(("client", *_COUNTS), rows, frozenset(range(1, 6)))
    return [Picture(picture, said), Paragraph(said, small=True), grid]


def _main_table(results: Path, _: Path) -> list[Block]:
    facts = _json(results / "pdd_as2.json")
    said = (
        f"Means over silos, then over seeds, with 95 % t-intervals over seeds. {facts['model']}. R@k is the paper's "
        "name for a hit at k."
    )
    return [table_1(facts["systems"]), Paragraph(said, small=True), *_command_of(facts)]


def _study(name: str, *, columns: Sequence[str] | None = None, table: bool = True) -> Show:
    def show(results: Path, picture: Path) -> list[Block]:
        page = read_study(results / f"{name}.json")
        source = results / (f"{name}.svg" if page.gains else f"{name}.png")
        drawn = copied_picture(source, picture.with_suffix(source.suffix), page.title)
        blocks: list[Block] = [study_grid(page, columns), drawn] if table else [drawn, study_grid(page, columns)]
        if page.gains:
            blocks.append(gain_grid(page.gains))
        blocks.append(Bullets(list(page.findings)))
        return [*blocks, Paragraph(" ".join(page.notes), small=True), *_command_of({"command": page.command})]

    return show


def _perplexities(results: Path, _: Path) -> list[Block]:
    facts = _json(results / "inversion.json")
    probe = facts["probe"]
    ours = (probe.get("perplexity_untrained"), probe["perplexity_without"], probe["perplexity"])
    rows = [
        (label, "–" if value is None else f"{value:.2f}", f"{theirs:.1f}")
        for (label, theirs), value in zip(PAPER_004_PRINTS["perplexities"].items(), ours, strict=True)
    ]
    rows.append(("Control: CLM with shuffled embeddings", f"{probe['shuffled_perplexity']:.2f}", "–"))
    sure = f"{100 * probe['confidence']:g} %"
    said = (
        f"An embedding reveals {probe['nats']:.4f} nats of a token, {sure} interval {probe['low']:.4f} to "
        f"{probe['high']:.4f} (paired bootstrap over {probe['texts']} texts), against the same model with other texts' "
        f"embeddings. Identified among {facts['ranking']['candidates']} candidates: "
        f"{facts['ranking']['direct']['value']:.3f} of the texts."
    )
    grid = Grid(("perplexity", "ours", "the paper's"), rows, frozenset({1, 2}), narrow=True)
    return [grid, Paragraph(said), *_command_of(facts)]


def _losses(results: Path, picture: Path) -> list[Block]:
    curves = _json(results / "inversion.json").get("curves")
    if not curves:
        raise DataError(f"{results / 'inversion.json'} holds no training losses.")
    said = f"{draw_language_model_losses(curves, picture)} The paper's: {PAPER_004_PRINTS['figure_6']}."
    return [Picture(picture, said), Paragraph(said, small=True)]


def _cases(results: Path, _: Path) -> list[Block]:
    facts = _json(results / "hard_negatives.json")
    return [case_grid(facts["cases"]), *_command_of(facts)]


def _written(results: Path, _: Path) -> list[Block]:
    facts = _json(results / "inversion.json")
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
