"""The studies of PDD-AS2: what each of them runs, what is run once, what is refused, and what is told."""

from __future__ import annotations

import csv
import json
import math
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import no_parts

from lit_dpret.datamodules.silo_folder import read_silo, silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.synthetic import PUBLIC
from lit_dpret.federated.systems import SystemResult
from lit_dpret.tasks.parts import Parts
from reproduction import FederatedStudy
from reproduction.federated.catalogue import STUDIES, Asked, Point, SiloChange, study_of
from reproduction.federated.cells import Cells, changed_silos, divided, kept_shares, sizes, with_share
from reproduction.federated.study import _promise, trend_finding
from reproduction.federated.study_page import (
    SHOWN,
    ClientGain,
    Measured,
    StudyPage,
    StudyRow,
    draw_study,
    read_study,
    study_grid,
    write_study,
)

SIZE = {"clients": 2, "entities": 6, "attributes": 4, "told": 2, "questions": 2, "hubs": 1}
STAGE1 = {"warmup_rounds": 0, "rounds": 1, "batch_size": 8, "bm25_n": 2, "static_n": 2, "top_k": 4, "lr": 3e-3}
STAGE2 = {"epochs": 1, "batch_size": 8, "n": 2, "top_k": 4, "lr": 3e-3}


def plan(**settings: Any) -> FederationPlan:
    given: dict[str, Any] = {
        "silos": "planted", "clients": None, "planted": SIZE,
        "model": {"encoder": "planted", "max_query_length": 8, "max_sentence_length": 12},
        "stage1": STAGE1, "stage2": STAGE2,
    }  # fmt: skip
    return FederationPlan(**{**given, **settings})


def parts(folder: Path, *, resume: bool = False, **settings: Any) -> Parts:
    return no_parts(folder, resume=resume, make_federation=lambda: plan(**settings), command="python train.py ...")


def points_of(name: str, run: PddAs2 | None = None, clients: int = 10, **settings: Any) -> list[Point]:
    study = study_of(name)
    values = settings.pop("values", study.values or (8.0,))
    systems = settings.pop("systems", study.default)
    return study.points(Asked(run=run or PddAs2(), clients=clients, systems=systems, values=values))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every local epoch of any silo that is really run."""
    from lit_dpret.federated import silo

    seen: list[str] = []
    fit = silo.fit_epochs

    def counted(module: Any, data: Any, folder: Path, **settings: Any) -> None:
        seen.append(folder.parent.name)
        fit(module, data, folder, **settings)

    monkeypatch.setattr(silo, "fit_epochs", counted)
    yield seen


# -- what is run --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_the_points_of_a_study_have_different_names_and_settings_that_are_accepted(name: str) -> None:
    points = points_of(name)
    assert [point.system for point in points[:2]] == ["zero_shot", "pseudo_queries"], "what is had without a query"
    assert len({point.name for point in points}) == len(points)
    for point in points:
        point.settings(PddAs2())
    for contrast in study_of(name).contrasts(points):
        assert {contrast.more, contrast.less} <= {point.name for point in points}


def test_every_point_of_communication_differs_from_the_first_in_one_thing() -> None:
    base, *others = [point for point in points_of("communication") if point.system == "fed_negative"]
    first = base.settings(PddAs2()).stage2
    kinds = {"n": {"n", "top_k"}, "clients asked": {"select", "select_count"}, "precision": {"send_as"},
             "refresh interval": {"refresh_every"}}  # fmt: skip
    for point in others:
        stage = point.settings(PddAs2()).stage2
        changed = {name for name in vars(first) if getattr(stage, name) != getattr(first, name)}
        assert changed == kinds[point.line], point.name
    few = [point.label for point in points_of("communication", clients=3) if point.line == "clients asked"]
    assert few == ["1 at random"]  # three of two others are all of them


def test_clients_that_cannot_be_made_of_the_silos_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"30 clients cannot be made of 4 silos.*multiples of 4"):
        points_of("clients", clients=4, values=(4, 30))


# -- silos --------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Path]:
    silos = planted_silos(Planted(clients=3, entities=12, attributes=4, told=3, questions=3, hubs=1))
    found = silo_folders(write_silos(tmp_path / "base", silos, facts={}))
    (found["client1"] / PUBLIC).write_text(next(iter(silos[1].sentences)) + "\n", encoding="utf-8")
    return found


def test_a_smaller_share_lies_in_a_larger_one_and_only_train_queries_go(base: dict[str, Path]) -> None:
    silo = read_silo(base["client0"])
    whole, half, tenth = (with_share(silo, share, seed=1) for share in (1.0, 0.5, 0.1))
    ids = [{query.qid for query in one.queries} for one in (whole, half, tenth)]
    assert ids[2] < ids[1] < ids[0] and whole.queries == silo.queries
    train = silo.counts()["train"]
    assert half.counts() == {**silo.counts(), "train": math.ceil(train / 2)}
    assert tenth.counts()["train"] == math.ceil(train / 10)
    assert {query.qid for query in with_share(silo, 0.5, seed=2).queries} != ids[1]


def test_parts_of_a_silo_have_its_queries_once_and_its_collection_each(base: dict[str, Path]) -> None:
    silo = read_silo(base["client0"])
    made = divided(silo, 3)
    listed = [query.qid for part in made for query in part.queries]
    assert sorted(listed) == sorted(query.qid for query in silo.queries)
    assert all(part.sentences == silo.sentences and all(part.counts().values()) for part in made)
    assert len({part.name for part in made}) == 3
    with pytest.raises(DataError, match="dev queries, too few for 9 clients"):
        divided(silo, 9)


def test_sizes_are_drawn_by_the_seed_reach_from_one_to_one_over_the_skew_and_are_those_of_the_silos(
    base: dict[str, Path], tmp_path: Path
) -> None:
    change = SiloChange(skew=4.0)
    shares = [kept_shares(base, change, seed=seed) for seed in range(8)]
    assert all(sorted(one.values()) == pytest.approx([0.25, 0.5, 1.0]) for one in shares)
    assert len({max(one, key=lambda name: one[name]) for one in shares}) > 1  # no client is always the large one
    whole, made = sizes(base), sizes(changed_silos(base, change, tmp_path / "made", seed=0))
    assert made == {name: math.ceil(round(shares[0][name] * whole[name], 9)) for name in base}


def test_made_silos_are_made_once_and_keep_what_is_declared_public(base: dict[str, Path], tmp_path: Path) -> None:
    change = SiloChange(share=0.5, parts=2)
    made = changed_silos(base, change, tmp_path / "made", seed=0)
    assert list(made) == [f"client{client}.{part}" for client in range(3) for part in range(2)]
    assert [name for name, folder in made.items() if (folder / PUBLIC).is_file()] == ["client1.0", "client1.1"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*")}
    assert changed_silos(base, change, tmp_path / "made", seed=0) == made
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*")}
    assert changed_silos(base, SiloChange(), tmp_path / "none", seed=0) == base and not (tmp_path / "none").exists()


# -- cells --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_points_that_differ_in_stage_2_alone_share_stage_1_and_no_cell_is_run_twice(
    tmp_path: Path, trained: list[str]
) -> None:
    federation = plan()
    folders = federation.folders(tmp_path / "data")
    cells = Cells(federation, folders, tmp_path / "cells", split="test")
    few, many = (Point(line="fed", label=str(n), system="fed_negative", stage2={"n": n, "top_k": 4}) for n in (1, 3))
    first = [cells.result(point, 0) for point in (few, many)]
    assert sorted(trained) == ["personal-fed-000"] * 4 + ["stage1-000"] * 2
    shared = cells.result(Point(line="stage 1", label="", system="stage1"), 0)
    trained.clear()
    again = Cells(federation, folders, tmp_path / "cells", split="test")
    assert [again.result(point, 0) for point in (few, many)] == first and not trained
    assert shared.sent["client0"]["stage 1"] == first[0].sent["client0"]["stage 1"] > 0
    # Weights that nothing goes on from are not kept.
    assert not list((tmp_path / "cells").rglob("personal-*")) and not list((tmp_path / "cells").rglob("stage1-*.safe*"))


@pytest.mark.costly
def test_a_cell_has_the_result_that_the_same_settings_have_in_a_folder_of_their_own(tmp_path: Path) -> None:
    from tiny_silos import ran

    federation = plan()
    folders = federation.folders(tmp_path / "data")
    point = Point(line="fed", label="3", system="fed_negative", stage2={"n": 3})
    found = Cells(federation, folders, tmp_path / "cells", split="test").result(point, 0)
    run = federation.settings(0)
    run = replace(run, stage2=replace(run.stage2, n=3))
    alone = ran(run, folders, federation.model, tmp_path / "alone", measure=["stage2"])
    for name, measures in alone.systems["stage2"].items():
        assert found.values[name] == {metric: list(values) for metric, values in measures.items()}
    assert found.sent == {name: dict(sent) for name, sent in alone.traffic.by_silo().items()}


# -- the task -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_and_grows_by_seeds(tmp_path: Path, trained: list[str]) -> None:
    settings: dict[str, Any] = {"study": "data_ratio", "values": [0.5, 1.0], "plot": False, "min_free_mb": 1}
    FederatedStudy(seeds=[0], **settings).run(parts(tmp_path))
    assert len(trained) == 10  # two systems, two shares, two silos, one round; and a round of each on pseudo-queries
    with pytest.raises(ResumeError, match="resume=true"):
        FederatedStudy(seeds=[0], **settings).run(parts(tmp_path))
    trained.clear()
    found = FederatedStudy(seeds=[0, 1], **settings).run(parts(tmp_path, resume=True))
    assert len(trained) == 10
    trained.clear()
    FederatedStudy(study="gain", seeds=[0], skew=1.0, systems=["single_star", "stage1"], plot=False, min_free_mb=1).run(
        parts(tmp_path)
    )
    assert not trained  # another study in the same folder finds what it shares: all queries, both systems
    folder = tmp_path / "studies" / "data_ratio"
    told = json.loads((folder / "data_ratio.json").read_text(encoding="utf-8"))
    assert [(row["line"], row["label"]) for row in told["rows"][2:]] == [
        ("single client, STAR", "0.5"), ("single client, STAR", "1"),
        ("PDD-AS2, stage 1", "0.5"), ("PDD-AS2, stage 1", "1"),
    ]  # fmt: skip
    measure = told["rows"][5]["measures"]["sentence/success@1"]
    assert len(measure["per_seed"]) == 2 and measure["low"] <= measure["mean"] <= measure["high"]
    assert found["PDD-AS2, stage 1: 1"] == pytest.approx(measure["mean"])
    assert told["internal"] is True and "epsilon is infinite" in told["promise"]
    assert "No guarantee covers them" in (folder / "data_ratio.md").read_text(encoding="utf-8")
    with (folder / "data_ratio.csv").open(encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 7
    assert "<script" not in (folder / "data_ratio.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("study", "federation", "message"), [
    ({"study": "clients", "values": [2, 40]}, {}, "queries, too few for 20 clients"),
    ({"study": "data_ratio"}, {"privacy": {"eps": 8.0, "delta": 1e-2}, "declare_public": True},
     "would have about .* fewer than a batch of 8"),
    ({"study": "gain"}, {"stage2": {**STAGE2, "response": "synthetic"}}, "a generator was charged for a whole silo"),
    ({"study": "communication"}, {"stage2": {**STAGE2, "request": "none", "response": "dp_centroid"}},
     "federated.privacy.collection_eps, or another response"),
])  # fmt: skip
def test_a_study_that_could_not_be_finished_is_refused_before_anything_is_trained(
    study: dict[str, Any], federation: dict[str, Any], message: str, tmp_path: Path, trained: list[str]
) -> None:
    with pytest.raises((ConfigurationError, DataError), match=message):
        FederatedStudy(**study, plot=False, min_free_mb=1).run(parts(tmp_path, **federation))
    assert not trained


@pytest.mark.slow
def test_under_a_budget_every_cell_goes_on_with_ledgers_of_its_own_and_stays_within_it(tmp_path: Path) -> None:
    privacy = {"eps": 20.0, "delta": 1e-2, "accountant": "rdp"}
    stage1 = {**STAGE1, "batch_size": 4}
    stage2 = {**STAGE2, "batch_size": 4, "centroids": 2, "centroid_iterations": 1}
    federation = plan(
        privacy=privacy, stage1=stage1, stage2=stage2, declare_public=True, secret_file=str(tmp_path / "secret")
    )
    cells = Cells(federation, federation.folders(tmp_path / "data"), tmp_path / "cells", split="test")
    points = [Point(line="fed", label=str(n), system="fed_negative", stage2={"n": n}) for n in (1, 2)]
    points.append(Point(line="shared", label="", system="stage1"))
    epsilons = [cells.result(point, 0).epsilon["client0"] for point in points]
    assert all(value is not None and 0 < value <= 20 for value in epsilons)
    assert epsilons[0] == pytest.approx(epsilons[1]) and epsilons[2] < epsilons[0]
    # The states of finished points are gone, and what they released is not: all of them cost more than the budget.
    together = cells.spent()
    assert set(together) == set(cells.base) and together["client0"] > 20.0
    assert f"epsilon = {math.ceil(max(together.values()) * 1000) / 1000:.3f}" in _promise(cells.plan, cells)
    assert cells._client_of("client0.1") == "client0"


@pytest.mark.parametrize(("gains", "verdict"), [
    ([[0.0, 0.1, 0.21], [0.0, 0.1, 0.2], [0.0, 0.12, 0.2]], "; holds."),
    ([[0.21, 0.1, 0.0], [0.2, 0.1, 0.0], [0.2, 0.12, 0.0]], "; the other way round."),
    ([[0.0, 0.1, 0.2], [0.2, 0.1, 0.0], [0.1, 0.1, 0.1]], "; not decided."),
    ([[0.0, 0.1, 0.2]] * 3, "all seeds agree"),
    ([[0.0, 0.1, 0.2]], "one seed decides nothing"),
])  # fmt: skip
def test_whether_small_clients_gain_more_is_judged_by_the_seeds(gains: list[list[float]], verdict: str) -> None:
    trend = study_of("gain").trend
    assert trend is not None
    counts = {"a": 80, "b": 40, "c": 20}

    def of(levels: list[float]) -> SystemResult:
        return SystemResult({name: {SHOWN: [level]} for name, level in zip(counts, levels, strict=True)})

    more = {seed: of([0.3 + gain for gain in one]) for seed, one in enumerate(gains)}
    less = {seed: of([0.3] * 3) for seed in more}
    assert verdict in trend_finding(trend, {trend.of: more, trend.over: less}, dict.fromkeys(more, counts))


PNG = b"\x89PNG\r\n\x1a\n"


def row(line: str, label: str, at: float | None, level: float, sent: float = 0.0, **more: Any) -> StudyRow:
    values = [level - 0.01, level, level + 0.01]
    measures = {name: Measured.of(values) for name in ("sentence/mrr@10", "passage/success@1")}
    measures[SHOWN] = Measured.of(values, more.pop("paper", None))
    return StudyRow(
        line=line, label=label, at=at, measures=measures, bytes_per_client={"stage 1": 3e6, "responses": sent}, **more
    )


LINES = StudyPage(
    title="Ten of the best k", axis="k",
    rows=[
        row("stage 1", "k=10", 10, 0.2, paper=0.121),
        row("stage 1", "k=300", 300, 0.3, paper=0.217),
        row("alone", "k=10", 10, 0.25),
        row("alone", "k=300", 300, 0.24),
    ],
    paper_says="The best harm.", findings=["It appears here."], command="python train.py ...", promise="Nothing.",
)  # fmt: skip
BYTES = replace(
    LINES, axis="bytes of a client",
    rows=[
        row("own negatives", "nothing is sent", None, 0.2),
        row("base", "n=200", None, 0.3, 4e6),
        row("clients asked", "1", None, 0.25, 1e6),
        row("clients asked", "3", None, 0.28, 3e6),
    ],
)  # fmt: skip
CLIENTS = replace(
    LINES, axis="train queries of the client",
    rows=[row("alone", "all", None, 0.2), row("stage 1", "all", None, 0.3)],
    gains=[
        ClientGain(client=f"#{rank}", queries=queries, gains={"stage 1": [gain, gain + 0.02], "alone": [0.0, gain]})
        for rank, queries, gain in ((1, 120, -0.05), (2, 60, 0.01), (3, 15, 0.2))
    ],
)  # fmt: skip


@pytest.mark.parametrize("page", [LINES, BYTES, CLIENTS], ids=["lines", "bytes", "clients"])
def test_each_form_of_study_is_drawn_stands_in_its_page_and_reads_back_as_it_was_written(
    page: StudyPage, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture, kind = draw_study(page, tmp_path / "plot"), "svg+xml" if page.gains else "png"
    assert picture.read_bytes().startswith(b"<svg" if page.gains else PNG)
    files = write_study(page, tmp_path, "study", picture=picture)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.values()} == {0o600}
    told = files["study.md"].read_text(encoding="utf-8")
    assert f"]({picture.name})" in told and ("| 15 | +0.210" in told.replace("\\", "")) is bool(page.gains)
    html = files["study.html"].read_text(encoding="utf-8")
    assert f'src="data:image/{kind};base64,' in html and "http" not in html.partition("</style>")[2]
    found = read_study(tmp_path / "study.json")
    again = write_study(found, tmp_path, "again")
    assert again["again.json"].read_text() == files["study.json"].read_text() and study_grid(found) == study_grid(page)


def test_numbers_of_a_study_are_those_of_its_seeds_and_of_the_paper(tmp_path: Path) -> None:
    page = replace(LINES, rows=[row("stage 1", "k=10", 10, 0.2, paper=0.121, epsilon=7.5)])
    files = write_study(page, tmp_path, "hubness")
    measure = json.loads(files["hubness.json"].read_text(encoding="utf-8"))["rows"][0]["measures"][SHOWN]
    assert measure["per_seed"] == pytest.approx([0.19, 0.2, 0.21]) and measure["paper"] == 0.121
    assert measure["mean"] == pytest.approx(0.2) and measure["high"] - 0.2 == pytest.approx(0.02484, abs=1e-4)
    header, line = files["hubness.csv"].read_text(encoding="utf-8").splitlines()
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(cells["sentence/success@1 paper"]) == 0.121 and float(cells["epsilon"]) == 7.5
    assert "7.5" in files["hubness.md"].read_text(encoding="utf-8")


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"rows": []}')
    for name in ("study.json", "none.json"):
        with pytest.raises(DataError, match="holds no study"):
            read_study(tmp_path / name)
