"""A study's table in all its forms, and its plots."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from lit_dpret.errors import DataError
from reproduction.federated.study_page import (
    ClientGain,
    Measured,
    StudyPage,
    StudyRow,
    draw_study,
    read_study,
    study_grid,
    write_study,
)

MEASURES = ("sentence/mrr@10", "sentence/success@1", "passage/success@1")
PNG = b"\x89PNG\r\n\x1a\n"


def row(
    line: str, label: str, at: float | None, level: float, sent: float = 0.0, paper: float | None = None
) -> StudyRow:
    told = {name: paper if name == "sentence/success@1" else None for name in MEASURES}
    measures = {name: Measured.of([level - 0.01, level, level + 0.01], told[name]) for name in MEASURES}
    sizes = {"stage 1": 3e6, "responses": sent}
    return StudyRow(line=line, label=label, at=at, measures=measures, bytes_per_client=sizes)


LINES = StudyPage(
    title="Ten of the best k",
    axis="k",
    rows=[
        row("stage 1", "k=10", 10, 0.2, paper=0.121),
        row("stage 1", "k=300", 300, 0.3, paper=0.217),
        row("alone", "k=10", 10, 0.25),
        row("alone", "k=300", 300, 0.24),
    ],
    paper_says="The best harm.",
    findings=["It appears here."],
    command="python train.py ...",
    promise="No privacy is promised for any of these models: epsilon is infinite.",
)
BYTES = replace(
    LINES,
    title="Quality against bytes",
    axis="bytes of a client",
    rows=[
        row("own negatives", "nothing is sent", None, 0.2),
        row("base", "n=200", None, 0.3, 4e6),
        row("clients asked", "1", None, 0.25, 1e6),
        row("clients asked", "3", None, 0.28, 3e6),
    ],
)
CLIENTS = replace(
    LINES,
    title="Gain of each client",
    axis="train queries of the client",
    rows=[row("alone", "all", None, 0.2), row("stage 1", "all", None, 0.3)],
    gains=[
        ClientGain(
            client=f"#{rank}", queries=queries, gains={"stage 1": [gain, gain + 0.02], "customised": [0.0, gain]}
        )
        for rank, queries, gain in ((1, 120, -0.05), (2, 60, 0.01), (3, 15, 0.2))
    ],
)


def test_json_and_csv_say_what_the_page_says(tmp_path: Path) -> None:
    files = write_study(replace(LINES, rows=[replace(LINES.rows[0], epsilon=7.5)]), tmp_path, "hubness")
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.values()} == {0o600}
    told = json.loads(files["hubness.json"].read_text(encoding="utf-8"))
    measure = told["rows"][0]["measures"]["sentence/success@1"]
    assert measure["per_seed"] == pytest.approx([0.19, 0.2, 0.21])
    assert measure["paper"] == 0.121 and told["internal"] is True
    assert measure["mean"] == pytest.approx(0.2) and measure["high"] - 0.2 == pytest.approx(0.02484, abs=1e-4)
    header, line = files["hubness.csv"].read_text(encoding="utf-8").splitlines()
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(cells["sentence/success@1 paper"]) == 0.121 and float(cells["epsilon"]) == 7.5
    assert "7.5" in files["hubness.md"].read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [LINES, BYTES, CLIENTS], ids=["lines", "bytes", "clients"])
def test_each_form_of_plot_is_written_and_stands_in_the_page(page: StudyPage, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, kind = draw_study(page, tmp_path / "plot"), "svg+xml" if page.gains else "png"
    assert picture.read_bytes().startswith(b"<svg" if page.gains else PNG)
    files = write_study(page, tmp_path, "study", picture=picture)
    told = files["study.md"].read_text(encoding="utf-8")
    assert f"]({picture.name})" in told and ("| 15 | +0.210" in told.replace("\\", "")) is bool(page.gains)
    html = files["study.html"].read_text(encoding="utf-8")
    assert f'src="data:image/{kind};base64,' in html and "http" not in html.partition("</style>")[2]


@pytest.mark.parametrize("page", [LINES, BYTES, CLIENTS], ids=["lines", "bytes", "clients"])
def test_a_study_reads_back_as_it_was_written(page: StudyPage, tmp_path: Path) -> None:
    write_study(page, tmp_path, "study")
    found = read_study(tmp_path / "study.json")
    write_study(found, tmp_path, "again")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "study.json").read_text()
    assert study_grid(found) == study_grid(page)


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"rows": []}')
    for name in ("study.json", "none.json"):
        with pytest.raises(DataError, match="holds no study"):
            read_study(tmp_path / name)
