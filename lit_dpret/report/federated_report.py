"""PDD-AS2 and its baselines as a page, a table and data: the paper's Table 1 with our values.

The numbers here are computed from private queries, whatever the training budget: keep the page with the queries. The
guarantee (what each silo spent) and the measures are shown side by side and never combined into one number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Paragraph, Section
from lit_dpret.files import write_whole
from lit_dpret.report.chart import gain_chart
from lit_dpret.report.page import Drawing, Page
from lit_dpret.report.table import ends, interval_of, show, verdict
from lit_dpret.retrieval.statistics import Interval, seed_interval
from lit_dpret.settings import picked

_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper_004.json").read_text(encoding="utf-8"))
# Columns of Table 1 by our names, with their titles.
COLUMNS: Mapping[str, str] = _PAPER["columns"]
# Rows in the paper's order: by our name, the group's heading, the paper's name and its numbers; None for rows of ours.
TABLE_1: Mapping[str, tuple[str, str, list[float] | None]] = {
    row["system"]: (row["group"], row["label"], row["values"]) for row in _PAPER["rows"]
}
# Rows that no train query influences, given the collections; the second learns from a silo's sentences.
WITHOUT_QUERIES: tuple[Literal["zero_shot", "pseudo_queries"], ...] = ("zero_shot", "pseudo_queries")
# Pairs (better, worse) by the paper's text or table.
ORDERS: list[tuple[str, str]] = [(better, worse) for better, worse in _PAPER["orders"]]


def impossible_cells() -> list[tuple[str, str, float, float]]:
    """Return rows whose passage R@k is below their sentence R@k, which contradicts equation 9.

    A passage scores as its best sentence, so the passage of a sentence among the first k is among the first k.

    Example:
        >>> impossible_cells()[0]
        ('Central-training', 'R@20', 0.629, 0.553)
    """
    found = []
    for _, name, values in TABLE_1.values():
        known = dict(zip(COLUMNS, values or (), strict=False))
        for level in ("success@1", "success@20", "success@100", "mrr@10") if known else ():
            sentence, passage = (known[f"{side}/{level}"] for side in ("sentence", "passage"))
            if passage < sentence:
                found.append((name, level.replace("success", "R"), sentence, passage))
    return found


def table_1(systems: Mapping[str, Any]) -> Grid:
    """Return a table with each cell ours / the paper's, in the paper's order and under its headings."""
    body: list[list[object]] = []
    heading = ""
    for system, (group, label, theirs) in TABLE_1.items():
        if system not in systems:
            continue
        if group != heading:
            heading = group
            body.append([group, *([""] * len(COLUMNS))])
        measures = systems[system]["measures"]
        papers = ["–"] * len(COLUMNS) if theirs is None else [f"{paper:.3f}" for paper in theirs]
        ours = [measures[name]["over_silos"] for name in COLUMNS]  # empty for silos elsewhere that keep their measures
        ours = ["withheld" if found.get("mean") is None else show(interval_of(found)) for found in ours]
        body.append([label, *(f"{mine} / {paper}" for mine, paper in zip(ours, papers, strict=True))])
    return Grid(("ours / paper", *COLUMNS.values()), body, frozenset(range(1, 1 + len(COLUMNS))))


# -- the page

NAME = "pdd_as2"
_SCHEMA = "lit-dpret/federated-report/1"
_GAIN = "sentence/success@1"
_HOW = (
    "Each cell: ours, the mean over silos and then over seeds with its 95 % t-interval over seeds, and after the slash "
    "the paper's. The paper's data, encoder and sizes differ, so compare only the orders, not the numbers. R@k is the "
    "paper's name for any-hit (success@k): whether one of the answering sentences is among the first k. The paper does "
    "not say how it averages; the mean over silos counts each silo equally, and a separate table has the mean over all "
    "queries."
)
_ONE_RUN = (
    "A run is one system with one seed, stage 1 included, with its own ledgers: a budget is for one run. So 'one run' "
    "is what deploying that system once costs (the largest over seeds). A row of the tables above is a mean over "
    "seeds, and the page shows several rows: for anyone who has what all seeds of a row released, or all runs behind "
    "this page, the costs are composed, each private run counted once. Those are the other columns, and no budget "
    "bounds them. Systems that train alone or centrally have no budget, since they send nothing, or promise nothing."
)


@dataclass(frozen=True, kw_only=True)
class FederatedRow:
    """One system with all its seeds."""

    system: str  # its name in `TABLE_1`
    # By seed, client and measure: one value for each query; a silo that withholds its values is missing.
    values: Mapping[int, Mapping[str, Mapping[str, Sequence[float]]]]
    # By client: the largest epsilon of one seed; None without a guarantee, empty if nothing is sent.
    epsilon: Mapping[str, float | None] = field(default_factory=dict)
    # By client: the epsilon of everything that all seeds released together, if its ledgers are known.
    over_seeds: Mapping[str, float] = field(default_factory=dict)
    # Bytes by client and phase, averaged over seeds.
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cpu_seconds: float = 0.0  # of all seeds together
    faults: Sequence[str] = ()  # clients whose answers were omitted, and why

    @property
    def label(self) -> str:
        """The name in the table."""
        return TABLE_1[self.system][1]

    def over_silos(self, metric: str) -> dict[int, float]:
        """Return the mean over silos of their means over queries, for each seed with reported measures."""
        return {seed: float(np.mean([np.mean(one) for one in found])) for seed, found in self._reported(metric)}

    def over_queries(self, metric: str) -> dict[int, float]:
        """Return the mean over all queries of all silos, for each seed."""
        return {seed: float(np.mean(np.concatenate(found))) for seed, found in self._reported(metric)}

    def _reported(self, metric: str) -> list[tuple[int, list[Sequence[float]]]]:
        known = ((seed, clients.values()) for seed, clients in self.values.items() if clients)
        return [(seed, [measures[metric] for measures in clients]) for seed, clients in known]

    def of_client(self, client: str, metric: str) -> dict[int, float]:
        """Return the mean over one silo's queries, for each seed."""
        return {seed: float(np.mean(clients[client][metric])) for seed, clients in self.values.items()}

    @property
    def clients(self) -> list[str]:
        """The silos that reported measures for every seed."""
        first, *rest = self.values.values()
        return [name for name in first if all(name in one for one in rest)]


@dataclass(frozen=True, kw_only=True)
class FederatedFacts:
    """Facts of the page other than the numbers."""

    silos: Mapping[str, Mapping[str, int]]  # passages, sentences and queries of each client
    split: str  # the questions evaluated on
    model: str  # the encoder, in words
    # The trust table's rows: what leaves a silo, what the server sees, what other silos see, what protects.
    trust: Sequence[tuple[str, str, str, str]]
    eps: float | None  # of each silo; None without privacy
    unit: str  # of the budget
    command: str  # the command that reproduces the page
    delta: float | None = None  # of each silo's budget; None for 1/(2n), where n is the number of its units
    neighbours: str = "zero_out"  # of the budget
    # By client: the epsilon of all runs that the page covers, all systems and seeds composed; empty if its ledgers
    # are not known.
    together: Mapping[str, float] = field(default_factory=dict)
    # The same for the passages of its collection, if their centroids were released.
    passages: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # everything that results depend on, by name
    notes: Sequence[str] = ()  # further remarks
    data: Mapping[str, str] = field(default_factory=dict)  # the data used, as every result states it (`data_facts`)

    @property
    def terms(self) -> str:
        """The conditions printed next to every epsilon on the page."""
        delta = f"1/(2n), n being the number of its {self.unit} units" if self.delta is None else f"{self.delta:g}"
        return f"delta = {delta}, for one {self.unit}, {self.neighbours}"


def write_federated_report(folder: Path, rows: Sequence[FederatedRow], facts: FederatedFacts) -> dict[str, Path]:
    """Write ``pdd_as2.{html,md,json}`` and, if there is something to draw, ``gain_per_client.svg``.

    ``rows`` are systems, each with at least one seed. Return the paths by file name.
    """
    by_name = {row.system: row for row in rows}
    ordered = [by_name[name] for name in TABLE_1 if name in by_name]
    figure = gain_chart({"Gain in sentence R@1 of stage 1 over a silo alone (STAR)": _gains(by_name, "stage1")})
    page = Page(
        name=NAME, title="PDD-AS2 over silos, compared with the paper", lead=_lead(ordered, facts),
        sections=_sections(ordered, by_name, facts, figure), facts=_data(ordered, by_name, facts),
    )  # fmt: skip
    written = page.write(folder)
    if figure:
        path = folder / "gain_per_client.svg"
        written[path.name] = write_whole(path, figure, owner_only=True)
    return written


def _lead(rows: Sequence[FederatedRow], facts: FederatedFacts) -> list[Block]:
    if facts.eps is None:
        claim = Banner("No privacy: no budget is set, and epsilon is infinite for every silo.", "caution")
    else:
        budget = (
            f"Each silo has a budget of epsilon = {facts.eps:g} at {facts.terms}, for everything that leaves it in one "
            "run: one system with one seed."
        )
        runs = sum(len(row.values) for row in rows if row.epsilon) if facts.silos else 1  # without silos here: one run
        most = max(facts.together.values(), default=None)
        if runs <= 1:
            page = "This page shows one such run."
        elif most is None:
            page = f"This page shows {runs} such runs; what they cost together is not known here."
        else:
            page = (
                f"This page shows {runs} such runs: together they cost a silo up to epsilon = "
                f"{_spent(most)}, each private run counted once."
            )
        claim = Banner(f"{budget} {page} What was spent is listed below, silo by silo.", "plain")
    internal = Banner(
        "Internal: the measures on this page were computed on the silos' own private queries. No budget covers them: "
        "keep the page where the queries are kept."
    )
    return [claim, internal]


def _sections(
    rows: Sequence[FederatedRow], by_name: Mapping[str, FederatedRow], facts: FederatedFacts, figure: str
) -> list[Section]:
    count = sum(found[facts.split] for found in facts.silos.values())
    whose = f"{count} {facts.split} questions of {len(facts.silos)} silos, each on its own collection"
    if not facts.silos:
        whose = f"{facts.split} questions of silos elsewhere, as means that they chose to share"
    seeds = max(len(row.values) for row in rows)
    where = f"{whose}; {facts.model}. {seeds} seed{'s' if seeds > 1 else ''}."
    sections = [
        Section(
            "Table 1: ours / the paper's", [Paragraph(where), Paragraph(_HOW), table_1(_systems(rows)), *_impossible()]
        ),
        Section("The same, as means over all queries", [_over_queries(rows)]),
        Section("Which of the paper's orders hold here", _orders(by_name)),
        *([Section("What people's queries bought", bought)] if (bought := _bought(by_name)) else []),
        Section("Gain of each client (the form of Figure 4)", _gain_blocks(by_name, facts, figure)),
        Section("What travelled", _traffic(rows)),
        Section("Epsilon of each silo", _epsilon(rows, facts)),
        Section(
            "Who sees what", [Grid(("what leaves a silo", "the server", "other silos", "protection"), facts.trust)]
        ),
    ]
    if facts.silos:
        sections.append(Section("The silos", [_silos(facts.silos)]))
    if faults := [f"{row.label}: {fault}" for row in rows for fault in row.faults]:
        sections.append(Section("Faults", [Bullets(faults)]))
    cost = "Processor time: " + ", ".join(f"{row.label} {row.cpu_seconds:.0f} s" for row in rows)
    sections.append(Section("Notes", [Bullets([*facts.notes, f"{cost}."])]))
    return [*sections, Section("How to reproduce this", [Code(facts.command)])]


def _over_queries(rows: Sequence[FederatedRow]) -> Grid:
    told = [row for row in rows if any(row.values.values())]
    body = [[row.label, *(f"{np.mean(list(row.over_queries(name).values())):.3f}" for name in COLUMNS)] for row in told]
    return Grid(("ours", *COLUMNS.values()), body, frozenset(range(1, 1 + len(COLUMNS))))


def _impossible() -> list[Block]:
    found = impossible_cells()
    cells = "; ".join(
        f"{name} {what}: sentences {ours:.3f}, passages {theirs:.3f}" for name, what, ours, theirs in found
    )
    return [
        Paragraph(
            f"{len(found)} of the paper's cells contradict its own equation 9, by which a passage scores as its best "
            f"sentence: passages are below sentences in {cells}.",
            small=True,
        )
    ]


def _orders(by_name: Mapping[str, FederatedRow]) -> list[Block]:
    metric = "sentence/mrr@10"
    body = []
    for better, worse in ORDERS:
        theirs = TABLE_1[better][2], TABLE_1[worse][2]
        if better not in by_name or worse not in by_name or theirs[0] is None or theirs[1] is None:
            continue
        if paired := _paired(by_name[better].over_silos(metric), by_name[worse].over_silos(metric)):
            gain = seed_interval(paired)
            paper = theirs[0][0] - theirs[1][0]
            body.append(
                (f"{TABLE_1[better][1]} over {TABLE_1[worse][1]}", f"{paper:+.3f}", show(gain, sign="+"), verdict(gain))
            )
    head = ("the paper's order", "the paper's difference", "ours", "here")
    said = (
        "Differences in sentence MRR@10, mean over silos; ours paired by seed, with the 95 % t-interval over seeds. "
        "It is about training runs on these queries, not about other queries."
    )
    return [Paragraph(said), Grid(head, body, frozenset({1, 2}))] if body else [Paragraph("Too few systems were run.")]


def _bought(by_name: Mapping[str, FederatedRow]) -> list[Block]:
    bases = [name for name in WITHOUT_QUERIES if name in by_name]
    learnt = [name for name in TABLE_1 if name in by_name and name not in (*WITHOUT_QUERIES, "bm25")]
    metric = "sentence/mrr@10"
    body = []
    for name in learnt:
        found = [_paired(by_name[name].over_silos(metric), by_name[base].over_silos(metric)) for base in bases]
        if bases and all(found):
            gains = [seed_interval(paired) for paired in found]
            body.append((TABLE_1[name][1], *(text for gain in gains for text in (show(gain, sign="+"), verdict(gain)))))
    head = ("system", *(text for base in bases for text in (f"over: {TABLE_1[base][1]}", "above it")))
    said = (
        "Differences in sentence MRR@10 from systems that no train query influences, given the collections; paired by "
        "seed, with the 95 % t-interval over seeds. A system that is not above them gained nothing from people's "
        "queries that these runs show. Pseudo-queries are the silo's own sentences, one for each of its passages."
    )
    return [Paragraph(said), Grid(head, body, frozenset(range(1, len(head), 2)))] if body else []


def _gains(by_name: Mapping[str, FederatedRow], system: str, base: str = "single_star") -> dict[str, Interval]:
    if system not in by_name or base not in by_name:
        return {}
    ours, alone = by_name[system], by_name[base]
    return {
        name: seed_interval(_paired(ours.of_client(name, _GAIN), alone.of_client(name, _GAIN)))
        for name in ours.clients
        if name in alone.clients
    }


def _gain_blocks(by_name: Mapping[str, FederatedRow], facts: FederatedFacts, figure: str) -> list[Block]:
    found = {name: _gains(by_name, name) for name in ("stage1", "customised", "fed_negative")}
    found = {name: gains for name, gains in found.items() if gains}
    if not found:
        return [Paragraph("Needs the systems single_star and stage1.")]
    clients = sorted(next(iter(found.values())), key=lambda name: -facts.silos[name]["train"])
    body = [
        (name, facts.silos[name]["train"], *(show(gains[name], sign="+") for gains in found.values()))
        for name in clients
    ]
    head = ("client", "train queries", *(TABLE_1[name][1] for name in found))
    said = "Sentence R@1 against the same silo trained alone with static hard negatives; paired by seed."
    return [Paragraph(said), Drawing(figure), Grid(head, body, frozenset(range(1, len(head))))]


def _traffic(rows: Sequence[FederatedRow]) -> list[Block]:
    sending = [row for row in rows if row.sent]
    if not sending:
        return [Paragraph("Nothing travelled.")]
    phases = list(dict.fromkeys(phase for row in sending for sent in row.sent.values() for phase in sent))
    body = []
    for row in sending:
        totals = [sum(sent.get(phase, 0.0) for sent in row.sent.values()) for phase in phases]
        body.append((row.label, "all silos", *(_megabytes(total) for total in (*totals, sum(totals)))))
    most = sending[-1]
    for name, sent in most.sent.items():
        each = [sent.get(phase, 0.0) for phase in phases]
        body.append((most.label, name, *(_megabytes(value) for value in (*each, sum(each)))))
    head = ("system", "silo", *phases, "together")
    said = (
        "Megabytes of tensors, without envelopes, the mean over seeds. Stage 1 counts both ways; requests count for "
        "the silo that asks, with every copy that the server passes on, and answers for the silo that gives them."
    )
    return [Paragraph(said), Grid(head, body, frozenset(range(2, len(head))))]


def _epsilon(rows: Sequence[FederatedRow], facts: FederatedFacts) -> list[Block]:
    if facts.eps is None:
        return [Paragraph("No privacy: epsilon is infinite for every silo and every unit.")]
    private = [row for row in rows if row.epsilon]
    clients = list(dict.fromkeys(name for row in private for name in row.epsilon))
    head = [f"silo (unit: {facts.unit})"]
    for row in private:
        head += [f"{row.label}, one run", *([f"its {len(row.values)} seeds together"] if len(row.values) > 1 else [])]
    body = []
    for name in clients:
        cells = [name]
        for row in private:
            over = [_known(row.over_seeds.get(name))] if len(row.values) > 1 else []
            cells += [_spent(row.epsilon.get(name)), *over]
        body.append([*cells, _known(facts.together.get(name))])
    head.append("everything behind this page")
    said = f"{_ONE_RUN} The budget of one run is {facts.eps:g}, at {facts.terms}."
    blocks: list[Block] = [Paragraph(said), Grid(head, body, frozenset(range(1, len(head))))]
    if facts.passages:
        listed = ", ".join(f"{name} {_spent(value)}" for name, value in facts.passages.items())
        blocks.append(
            Paragraph(
                "Centroids of the collections were released as well, with a separate budget for each run. Epsilon "
                f"of one passage in all runs behind this page together: {listed}."
            )
        )
    return blocks


def _silos(silos: Mapping[str, Mapping[str, int]]) -> Grid:
    columns = ("passages", "sentences", "train", "dev", "test")
    body: list[list[object]] = [[name, *(counts[column] for column in columns)] for name, counts in silos.items()]
    body.append(["all", *(sum(counts[column] for counts in silos.values()) for column in columns)])
    return Grid(("client", *columns), body, frozenset(range(1, 6)))


def _data(rows: Sequence[FederatedRow], by_name: Mapping[str, FederatedRow], facts: FederatedFacts) -> dict[str, Any]:
    """Return everything on the page as data; it has means of private queries, so it is as internal as the page."""
    same = ("eps", "unit", "delta", "neighbours", "split", "model", "silos", "settings", "command", "notes")
    return {
        "schema": _SCHEMA, **facts.data, **picked(facts, *same),
        "internal": "computed on private queries; covered by no guarantee",
        "epsilon_of_page": dict(facts.together),
        "epsilon_of_page_per_passage": dict(facts.passages),
        "systems": _systems(rows),
        "gain_of_stage1_over_single_star": {name: ends(gain) for name, gain in _gains(by_name, "stage1").items()},
        "impossible_in_the_paper": impossible_cells(),
        "trust": [list(line) for line in facts.trust],
    }  # fmt: skip


def _systems(rows: Sequence[FederatedRow]) -> dict[str, Any]:
    table = {}
    for row in rows:
        paper = dict(zip(COLUMNS, TABLE_1[row.system][2] or (), strict=False))
        measures = {
            name: {
                "over_silos": _over_seeds(row.over_silos(name)) | {"per_seed": _keyed(row.over_silos(name))},
                "over_queries": {"per_seed": _keyed(row.over_queries(name))},
                "paper": paper.get(name),
            }
            for name in COLUMNS
        }
        clients = {client: {name: _keyed(row.of_client(client, name)) for name in COLUMNS} for client in row.clients}
        table[row.system] = {
            "label": row.label, "measures": measures, "clients": clients, "sent_bytes": row.sent,
            "epsilon": dict(row.epsilon), "epsilon_over_seeds": dict(row.over_seeds), "cpu_seconds": row.cpu_seconds,
            "faults": list(row.faults),
        }  # fmt: skip
    return table


def _over_seeds(by_seed: Mapping[int, float]) -> dict[str, Any]:
    return dict(ends(seed_interval(list(by_seed.values())))) if by_seed else {}


def _paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Return differences by seed; a system that does not learn has one result, which is compared with every seed."""
    if len(one) == 1 < len(other):
        one = dict.fromkeys(other, *one.values())
    elif len(other) == 1 < len(one):
        other = dict.fromkeys(one, *other.values())
    return [one[seed] - other[seed] for seed in one if seed in other]


def _keyed(by_seed: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): value for seed, value in by_seed.items()}


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}" if count < 1e6 else f"{count / 1e6:.1f}"


def _known(value: float | None) -> str:
    return "not known here" if value is None else _spent(value)


def _spent(value: float | None) -> str:
    return "infinite" if value is None else f"{math.ceil(value * 1000) / 1000:.3f}"
