"""All studies: the points of each for a federation's settings, and what the paper says about it.

If one number implies another, such as ``n`` of the best ``top_k``, the label states what was run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.systems import System
from lit_dpret.report.federated_report import WITHOUT_QUERIES


@dataclass(frozen=True, kw_only=True)
class SiloChange:
    """A change to the federation's silos with which a point is run."""

    # Of each silo's train queries, drawn by the run's seed; with the same seed a smaller share is part of a larger one.
    share: float = 1.0
    # The last silo keeps ``1 / skew`` of its train queries; the others are in between. The run's seed draws which silo
    # is the last, so that the size of a silo does not follow from its domain.
    skew: float = 1.0
    parts: int = 1  # silos into which each is divided: its queries are dealt out, and each keeps the whole collection

    def drawn(self, seed: int) -> dict[str, float]:
        """Return what determines the silos of one seed; without the seed if nothing is drawn."""
        facts: dict[str, float] = {"share": self.share, "skew": self.skew, "parts": self.parts}
        return facts | ({"seed": seed} if self.share < 1 or self.skew > 1 else {})


AS_THEY_ARE = SiloChange()


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row of a study, run once for every seed."""

    line: str  # shared with other points: its line or colour in the plot
    label: str  # how it differs from them
    system: System  # of the paper's Table 1
    at: float | None = None  # its position on the plot's axis; null if the axis is a measured one
    # Settings that differ from the federation's.
    stage1: Mapping[str, Any] = field(default_factory=dict)
    stage2: Mapping[str, Any] = field(default_factory=dict)
    silos: SiloChange = AS_THEY_ARE

    @property
    def name(self) -> str:
        return f"{self.line}: {self.label}"

    def settings(self, of: PddAs2) -> PddAs2:
        kind = {"customised": "dynamic", "fed_negative": "fed"}.get(self.system)
        stage2 = {**self.stage2, **({} if kind is None else {"negatives": kind})}
        return replace(of, stage1=replace(of.stage1, **self.stage1), stage2=replace(of.stage2, **stage2)).check()


class Contrast(NamedTuple):
    """Two points of a study, compared seed by seed."""

    claim: str  # empty if nothing is claimed
    more: str  # the point that should be higher, according to the claim
    less: str


class Trend(NamedTuple):
    """A difference between two lines that falls as a client has more queries."""

    claim: str
    of: str
    over: str


StudyName = Literal["negatives", "data_ratio", "hubness", "gain", "communication", "clients"]
STUDIES: tuple[StudyName, ...] = get_args(StudyName)
_TOLD = yaml.safe_load(Path(__file__).with_name("studies.yaml").read_text(encoding="utf-8"))
LINES: dict[System, str] = _TOLD.pop("lines")
_COMMUNICATION_EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The inputs from which the points of a study are made."""

    run: PddAs2
    clients: int
    systems: Sequence[System]
    values: Sequence[float]


MakePoints = Callable[[Asked], list[Point]]
MakeContrasts = Callable[[Sequence[Point]], list[Contrast]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study: its points, and its report, whose words come from ``studies.yaml``."""

    name: StudyName  # as in ``task.study=NAME``
    title: str
    systems: tuple[System, ...]  # that it can compare, in order
    default: tuple[System, ...]  # those that it compares by default
    values: tuple[float, ...]  # the default values of what varies; empty if more than one thing does
    axis: str  # label of the plot's axis
    points: MakePoints
    says: str  # the paper's finding, in our words; empty if it has none
    contrasts: MakeContrasts  # the differences that would show the finding
    trend: Trend | None = None  # the trend that would show it in a study of many silos
    notes: tuple[str, ...] = ()


def study_of(name: str | None) -> Study:
    """Return the study with this name."""
    found = _CATALOGUE.get(str(name))
    if found is None:
        raise ConfigurationError(f"task.study={name} is not a study. Choose one of {', '.join(STUDIES)}.")
    return found


def _point(system: System, label: str, at: float, *, n: int, stage1_k: int, stage2_k: int) -> Point:
    """Build a point with ``n`` negatives from the best ``stage1_k`` or ``stage2_k``, in its system's stage."""
    second = system in ("customised", "fed_negative")
    stage1 = {} if second else {"bm25_n": n, "static_n": n, "top_k": stage1_k}
    stage2 = {"n": n, "top_k": stage2_k} if second else {}
    return Point(line=LINES[system], label=label, system=system, at=at, stage1=stage1, stage2=stage2)


def _negatives(asked: Asked) -> list[Point]:
    least = asked.run.stage1.top_k, asked.run.stage2.top_k
    return [
        _point(system, f"n={n}", n, n=n, stage1_k=max(n, least[0]), stage2_k=max(n, least[1]))
        for system in asked.systems
        for n in ((10, 200) if system in ("customised", "fed_negative") else (2, 8))
    ]


def _data_ratio(asked: Asked) -> list[Point]:
    return [
        Point(line=LINES[system], label=f"{share:g}", system=system, at=share, silos=SiloChange(share=share))
        for system, share in product(asked.systems, asked.values)
    ]


def _hubness(asked: Asked) -> list[Point]:
    return [
        _point(system, f"k={k}", k, n=10, stage1_k=k, stage2_k=k)
        for system, k in product(asked.systems, map(int, asked.values))
    ]


def _gain(asked: Asked) -> list[Point]:
    (skew,) = asked.values
    change: dict[str, Any] = {"label": "silos of other sizes", "silos": SiloChange(skew=skew)}
    return [Point(line=LINES[system], system=system, **change) for system in asked.systems]


def _communication(asked: Asked) -> list[Point]:
    stage = asked.run.stage2
    epochs = max(_COMMUNICATION_EPOCHS, stage.epochs)
    ratio = stage.top_k / stage.n
    base = {"epochs": epochs, "refresh_every": 1, "select": "all", "select_count": None, "send_as": "float16"}
    found: list[Point] = []

    def add(line: str, label: str, **change: object) -> None:
        found.append(Point(line=line, label=label, system="fed_negative", stage2={**base, **change}))

    if "customised" in asked.systems:
        found.append(Point(line=LINES["customised"], label="nothing is sent", system="customised", stage2=base))
    if "fed_negative" in asked.systems:
        add("all of these", f"n={stage.n} of {stage.top_k}, all clients, float16, every epoch")
        for n in sorted({max(1, stage.n // 20), max(1, stage.n // 4)} - {stage.n}):
            add("n", f"n={n} of {max(n, round(ratio * n))}", n=n, top_k=max(n, round(ratio * n)))
        for count in (count for count in (1, 3) if count < asked.clients - 1):  # more would be all the others
            add("clients asked", f"{count} at random", select="random", select_count=count)
        add("precision", "float32", send_as="float32")
        for every in sorted({2, epochs}):
            add("refresh interval", "once" if every == epochs else f"every {every} epochs", refresh_every=every)
    return found


def _clients(asked: Asked) -> list[Point]:
    found: list[Point] = []
    for system, count in product(asked.systems, map(int, asked.values)):
        parts, rest = divmod(count, asked.clients)
        if rest or not parts:
            raise ConfigurationError(
                f"task.values: {count} clients cannot be made of {asked.clients} silos, each of which is divided into "
                f"equally many parts. Use multiples of {asked.clients}."
            )
        silos = SiloChange(parts=parts)
        found.append(Point(line=LINES[system], label=f"{count} clients", system=system, at=count, silos=silos))
    return found


def _ends(claim: str) -> MakeContrasts:
    """Compare the last point of each line with its first."""

    def contrasts(points: Sequence[Point]) -> list[Contrast]:
        lines = [[one for one in points if one.line == line] for line in dict.fromkeys(one.line for one in points)]
        return [Contrast(claim, line[-1].name, line[0].name) for line in lines if len(line) > 1]

    return contrasts


def _each_against(system: System, claim: str, others: Sequence[System] = ()) -> MakeContrasts:
    """Compare every point, or those of ``others``, with the point of a baseline on the same silos."""

    def contrasts(points: Sequence[Point]) -> list[Contrast]:
        base = {point.label: point.name for point in points if point.system == system}
        return [
            Contrast(claim, point.name, base[point.label])
            for point in points
            if point.system != system and point.label in base and (not others or point.system in others)
        ]

    return contrasts


def _more_and_others(points: Sequence[Point]) -> list[Contrast]:
    """Compare more negatives with fewer, and equally many from other clients with the client's own."""
    claim = "fed-negatives are better than as many of the client's own"
    others = _each_against("customised", claim, ["fed_negative"])
    return _ends("more negatives are better")(points) + others(points)


def _against_first(points: Sequence[Point]) -> list[Contrast]:
    base = [point.name for point in points if point.line == "all of these"]
    return [Contrast("", base[0], point.name) for point in points if base and point.name != base[0]]


def _with_rows_without_queries(make: MakePoints) -> MakePoints:
    """Add the rows that depend on no train query, whatever varies in the other rows."""

    def points(asked: Asked) -> list[Point]:
        learnt = make(replace(asked, systems=[name for name in asked.systems if name not in WITHOUT_QUERIES]))
        silos = {point.silos for point in learnt}
        same = silos.pop() if len(silos) == 1 else AS_THEY_ARE
        free = [name for name in asked.systems if name in WITHOUT_QUERIES]
        return [Point(line=LINES[name], label="no train query", system=name, silos=same) for name in free] + learnt

    return points


_STAR = "the federation is above a single client"
_MADE: dict[StudyName, tuple[MakePoints, MakeContrasts]] = {
    "negatives": (_negatives, _more_and_others),
    "data_ratio": (_data_ratio, _each_against("single_star", _STAR)),
    "hubness": (_hubness, _ends("10 of many are better than the best 10")),
    "gain": (_gain, _each_against("single_star", _STAR)),
    "communication": (_communication, _against_first),
    "clients": (_clients, _ends("")),
}
_TRENDS = {"gain": Trend("clients with fewer queries gain more", LINES["stage1"], LINES["single_star"])}


def _read() -> dict[str, Study]:
    found: dict[str, Study] = {}
    for name, (points, contrasts) in _MADE.items():
        facts: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in _TOLD[name].items()}
        facts["values"] = tuple(map(float, facts["values"]))  # so that shares 1 and 1.0 are the same cell
        facts |= {key: (*WITHOUT_QUERIES, *facts[key]) for key in ("systems", "default")}
        made = _with_rows_without_queries(points)
        found[name] = Study(name=name, points=made, contrasts=contrasts, trend=_TRENDS.get(name), **facts)
    return found


_CATALOGUE = _read()
