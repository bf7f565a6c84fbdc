"""`task=suite`: what is run, what is left out and why, what is kept, and what the page says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_images
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from variant_runs import run as variant_run

from lit_dpret import cli
from lit_dpret.cards.blocks import Block, Grid, Paragraph
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.tasks.parts import ComposedRun, Parts, as_typed
from reproduction import SecondTask, Suite, SuitePart
from reproduction import suite as papers
from reproduction.report.reproduction import Item, Paper, PartTold, _as_run
from reproduction.report.variant_runs import write_runs
from reproduction.report.variants import PAPER_METRICS


def shown(results: Path, _: Path) -> Sequence[Block]:
    path = results / "score.json"
    if not path.exists():
        raise DataError(f"{path.name} is not there.")
    return [Grid(("ours", "theirs"), [(json.loads(path.read_text())["score"], 0.5)]), Paragraph("of one run.")]


PAPER = Paper(
    name="paper_x",
    title="A paper",
    promise="Nothing is promised.",
    items=(
        Item(number="Table 1", says="a score.", parts=("first",), show=shown, differs="Ours is tiny."),
        Item(number="Table 2", says="another.", parts=("better", "second"), show=shown),
        Item(number="Figure 1", says="a drawing.", why_not="It shows the method."),
    ),
)


class Scores:
    """A task that writes what its settings say, and counts."""

    def __init__(self, ran: list[str], settings: Sequence[str], run_dir: Path) -> None:
        self.ran, self.settings, self.run_dir = ran, [s for s in settings if not s.startswith("run_dir=")], run_dir

    def run(self, parts: Parts) -> dict[str, float]:
        assert parts.run_dir == self.run_dir
        self.ran.append(" ".join(self.settings))
        if "stop" in self.settings:
            raise KeyboardInterrupt
        if "fail" in self.settings:
            raise DataError("its file is broken.")
        (parts.run_dir / "out").mkdir(exist_ok=True)
        (parts.run_dir / "out" / "score.json").write_text(json.dumps({"score": len(self.ran)}))
        return {"score": 1.0}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(papers.PAPERS, "paper_x", PAPER)


@pytest.fixture
def ran() -> Iterator[list[str]]:
    yield []


def parts(folder: Path, ran: list[str], *, resume: bool = False) -> Parts:
    def make_run(overrides: Sequence[str]) -> ComposedRun:
        if "refuse" in overrides:
            raise ConfigurationError("task.seeds=[] must be some different numbers.")
        own = Path(overrides[-1].removeprefix("run_dir=").strip("'"))
        made = Parts(run_dir=own, make_privacy=dict, make_datamodule=dict, make_module=dict, make_trainer=dict)
        return ComposedRun(lambda _: "", lambda: (Scores(ran, overrides, own), made))

    return Parts(
        run_dir=folder, resume=resume, seed=3, make_run=make_run, make_privacy=dict, make_datamodule=dict,
        make_module=dict, make_trainer=dict, command="python train.py experiment=paper_x resume=true",
    )  # fmt: skip


def suite(**changes: Any) -> Suite:
    settings: dict[str, Any] = {
        "paper": "paper_x", "min_free_mb": 1, "data": {"images": None},
        "parts": {
            "first": SuitePart(settings=["a=1"], results="out", sizes="Three runs of ten."),
            "better": SuitePart(settings=["b=1"], results="out", needs=["images"]),
            "second": SuitePart(settings=["c=1"], results="out", after=["first"]),
        },
    }  # fmt: skip
    return Suite(**settings | changes)


def page(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report" / "paper_x.json").read_text(encoding="utf-8"))
    return found


def changed(name: str, **changes: Any) -> dict[str, SuitePart]:
    made = suite().parts
    return {**made, name: SuitePart(**{**vars(made[name]), **changes})}


def test_every_part_is_run_in_its_folder_and_what_lacks_its_data_is_left_out_with_the_reason(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite().run(parts(tmp_path / "run", ran)) == {"shown": 2.0, "not_shown": 1.0}
    assert ran == ["seed=3 a=1", "seed=3 c=1"]
    found = page(tmp_path / "run")
    assert [(item["number"], item["state"], item["part"]) for item in found["items"]] == [
        ("Table 1", "shown", "first"), ("Table 2", "shown", "second"), ("Figure 1", "not reproduced", None),
    ]  # fmt: skip
    assert found["items"][0]["blocks"][0] == {"header": ["ours", "theirs"], "rows": [[1, 0.5]]}
    assert (tmp_path / "run" / "report" / "table_1.csv").read_text(encoding="utf-8").split() == ["ours,theirs", "1,0.5"]
    told = (tmp_path / "run" / "report" / "paper_x.md").read_text(encoding="utf-8")
    for words in ("task.data.images is not set", "python train.py a=1 hydra.run.dir=", "Nothing is promised."):
        assert words in told, words
    assert "resume=true" not in told  # the command gives the same, not the rest of it
    out = capsys.readouterr().out
    assert "Table 2: shown" in out and "part better left out: task.data.images is not set" in out
    assert out.startswith("task.data.images is not set: "), "said before the first part begins"


def test_an_interrupted_suite_goes_on_where_it_was_and_its_page_was_there_in_between(
    tmp_path: Path, ran: list[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        suite(parts=changed("second", settings=["stop"])).run(parts(tmp_path, ran))
    assert [item["state"] for item in page(tmp_path)["items"]] == ["shown", "left out", "not reproduced"]
    assert "second: it was not run yet." in page(tmp_path)["items"][1]["reason"]
    with pytest.raises(ResumeError, match="resume=true"):
        suite().run(parts(tmp_path, ran))
    with pytest.raises(ResumeError, match=r"other settings of task\.parts\.first"):
        suite(parts=changed("first", more=["seed=9"])).run(parts(tmp_path, ran, resume=True))
    with pytest.raises(ConfigurationError, match="The part second"):
        suite(parts=changed("second", settings=["fail"])).run(parts(tmp_path, ran, resume=True))
    for _ in range(2):
        suite().run(parts(tmp_path, ran, resume=True))
        assert ran == ["seed=3 a=1", "seed=3 stop", "seed=3 fail", "seed=3 c=1"]
    assert page(tmp_path)["items"][1]["state"] == "shown"


def test_a_further_setting_stands_in_the_place_of_the_parts_own(tmp_path: Path, ran: list[str]) -> None:
    twice = changed("first", settings=["a=1", "b=2", "+c=3"], more=["b=4", "c=5"])
    suite(parts=twice, only=["first"]).run(parts(tmp_path, ran))
    assert ran == ["seed=3 a=1 b=4 c=5"]
    told = (tmp_path / "report" / "paper_x.md").read_text(encoding="utf-8")
    assert "python train.py a=1 b=4 c=5 hydra.run.dir=" in told


def test_what_cannot_be_run_is_refused_before_the_first_part_begins(tmp_path: Path, ran: list[str]) -> None:
    lonely = {name: part for name, part in suite().parts.items() if name == "better"}
    for changes, named in (
        ({"parts": lonely}, r"task\.data\.images"),
        ({"parts": changed("second", more=["refuse"])}, r"task.parts.second: task.seeds=\[\]"),
        ({"only": ["second"]}, r"first.* task\.only"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            suite(**changes).run(parts(tmp_path, ran, resume=True))
    assert ran == [] and not (tmp_path / "report").exists()
    suite(only=["first"]).run(parts(tmp_path, ran, resume=True))
    suite(only=["second"]).run(parts(tmp_path, ran, resume=True))  # the first is there by now
    assert ran == ["seed=3 a=1", "seed=3 c=1"]


@pytest.mark.parametrize(
    ("change", "why"), [({"packages": ["no_such_package"]}, "no_such_package"), ({"taken": "."}, "score.json")]
)
def test_a_part_without_its_package_or_with_results_that_lack_something_is_left_out_and_says_so(
    change: dict[str, Any], why: str, tmp_path: Path, ran: list[str]
) -> None:
    alone = SuitePart(**{**vars(suite().parts["second"]), "after": []})
    suite(parts={**changed("first", **change), "second": alone}).run(parts(tmp_path, ran))
    item = page(tmp_path)["items"][0]
    assert item["state"] == "left out" and why in item["reason"] and item["blocks"] == []


def test_earlier_results_stand_in_for_a_part_and_nothing_is_run_for_a_report(tmp_path: Path, ran: list[str]) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "score.json").write_text('{"score": 0.25}')
    taken = changed("first", taken=str(earlier))
    suite(parts=taken, report_only=True).run(parts(tmp_path / "run", ran))
    found = page(tmp_path / "run")
    assert ran == [] and found["items"][0]["blocks"][0]["rows"] == [[0.25, 0.5]]
    assert found["parts"][0]["taken"] and str(earlier) in found["parts"][0]["command"]
    assert "only the results were taken" in found["items"][1]["reason"]
    with pytest.raises(ConfigurationError, match=r"no part in .* is finished"):
        suite(report_only=True).run(parts(tmp_path / "other", ran))


def test_texts_of_the_data_are_left_out_of_the_page_where_they_must_not_be_passed_on(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quoting = replace(PAPER, items=(replace(PAPER.items[0], quotes=True), *PAPER.items[1:]))
    monkeypatch.setitem(papers.PAPERS, "paper_x", quoting)
    suite(quote=False).run(parts(tmp_path, ran))
    item = page(tmp_path)["items"][0]
    assert item["state"] == "left out" and item["blocks"] == [{"text": "of one run."}]
    assert not (tmp_path / "report" / "table_1.csv").exists()
    assert "task.quote=false" in (tmp_path / "report" / "paper_x.md").read_text(encoding="utf-8")
    suite().run(parts(tmp_path, ran, resume=True))
    assert page(tmp_path)["items"][0]["blocks"][0]["rows"] == [[1, 0.5]]
    assert (tmp_path / "report" / "table_1.csv").exists()
    suite(quote=False).run(parts(tmp_path, ran, resume=True))
    assert not (tmp_path / "report" / "table_1.csv").exists()


# -- the papers -------------------------------------------------------------------------------


def composed(*overrides: str) -> Any:
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        return compose("train", overrides=list(overrides))


@cache
def target_of(*settings: str) -> str:
    return str(composed(*settings, "run_dir=run").task._target_)


EXPERIMENTS = ["paper_002", "paper_002_full", "paper_004", "paper_004_full"]


@pytest.mark.costly
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_item_of_a_paper_has_its_part_and_every_part_composes(experiment: str) -> None:
    cfg = composed(f"experiment={experiment}", "run_dir=run")
    task = cfg.task
    items = papers.PAPERS[task.paper].items
    needed = {part for item in items for part in item.parts}
    assert {part for item in items for part in item.parts if not item.why_not} <= set(task.parts)
    if experiment.endswith("_full"):
        assert needed <= set(task.parts)
    helping = {name for part in task.parts.values() for name in part.get("after", [])}
    assert set(task.parts) <= needed | helping
    settings = OmegaConf.to_container(task.parts, resolve=True)
    assert isinstance(settings, dict)
    for part in settings.values():
        made = target_of(*[word.replace("=None", "=null") for word in part["settings"]])
        assert made.startswith(("lit_dpret.tasks.", "reproduction."))
        assert part["sizes"], "a page says how ours differs in size"


@pytest.mark.parametrize("exact", [True, False])
def test_pictures_and_tables_tell_their_own_runs_and_where_pairs_were_clipped_by_a_bound(
    exact: bool, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    made = [variant_run(name, metrics=dict.fromkeys(PAPER_METRICS, 0.25)) for name in ("Logit-DP", "Non-private")]
    write_runs(made, tmp_path / "runs.jsonl")
    write_runs([variant_run(batch_size=10, losses=[3.0] * 30), made[0]], tmp_path / "batch_runs.jsonl")
    settings = {"variant": "Logit-DP", "exact_norms": exact, "norms": "k_blocks", "name": "logit_dp",
                "batch_size": 100, "seconds_per_step": 1.0, "first_step": 0.999, "mean_step": 0.5}  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps([settings]))
    items = {item.number: item.show for item in papers.PAPERS["paper_002"].items}
    wanted = ["Table 3, embedding net", "Figure 1, left", "Figure 1, right", "Figure 2"]
    wanted += [number for number in items if number.endswith("settings")]
    shown = ["\n".join(b.markdown() for b in show(tmp_path, tmp_path / "x.png")) for n in wanted if (show := items[n])]
    assert ("| Logit-DP, by a bound of its norms |" in shown[0]) != exact and "| Logit-DP" in shown[0]
    assert "3 steps of 100 examples" in shown[1] and "30 steps of 10 examples" not in shown[1]
    assert "1 run of 30 steps of 10 examples: Logit-DP" in shown[2]
    assert f"k_blocks ({'exact' if exact else 'bound'})" in shown[4] and "0.999" in shown[4]


def test_a_part_tells_of_all_its_stored_runs_each_once(tmp_path: Path) -> None:
    write_runs([variant_run(name, seed) for name in ("Naive-DP", "Non-private") for seed in (0, 1)],
               tmp_path / "runs.jsonl")  # fmt: skip
    small = variant_run("Naive-DP", batch_size=10, losses=[3.0] * 30)
    write_runs([small, variant_run("Naive-DP", 0)], tmp_path / "batch_runs.jsonl")
    told = _as_run(PartTold(name="x", sizes="", command="", results=tmp_path, seconds=0.4))
    assert told.seconds == 4 * 3 + 30, "of all runs, and not of the attempt that went on from them"
    assert told.ran.startswith("2 runs of 3 steps") and told.ran.endswith("30 steps of 10 examples: Naive-DP.")


def more(part: str, *settings: str) -> str:
    return f"task.parts.{part}.more={json.dumps(list(settings))}"


@pytest.mark.slow
def test_paper_002_on_a_dozen_images_is_interrupted_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tiny_images.parquet(tmp_path / "images")
    small = ["task.seeds=[0]", "task.epochs=1", "task.batch_size=4", "task.held_out_images=6", "task.held_out_group=3",
             "task.only=[non_private]"]  # fmt: skip
    words = ["experiment=paper_002", f"run_dir={tmp_path / 'run'}", f"task.data.cifar10={images}",
             "task.only=[embedding_net,fine_tune_cifar100,fine_tune]", more("embedding_net", *small),
             more("fine_tune", "task.seeds=[0]", "task.epochs=1",
                  f"task.data.folder={tmp_path / 'nowhere'}")]  # fmt: skip
    real = SecondTask.run

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SecondTask, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.run(composed(*words))
    report = tmp_path / "run" / "report"
    states = {item["number"]: item for item in json.loads((report / "paper_002.json").read_text())["items"]}
    assert states["Figure 3"]["state"] == "shown" and (report / "figure_3.png").is_file()
    assert "it was not run yet" in states["Table 2"]["reason"]
    assert "task.data.cifar100" in states["Table 2"]["reason"]
    trained = (tmp_path / "run" / "embedding_net" / "stage.json").stat().st_mtime_ns

    monkeypatch.setattr(SecondTask, "run", real)
    result = cli.run(composed(*words, "resume=true"))
    assert (tmp_path / "run" / "embedding_net" / "stage.json").stat().st_mtime_ns == trained
    states = {item["number"]: item for item in json.loads((report / "paper_002.json").read_text())["items"]}
    assert states["Table 2"]["part"] == "fine_tune" and states["Table 4"]["state"] == "shown"
    assert "5 classes" in states["Table 2"]["blocks"][1]["text"]  # five groups of CIFAR-10
    assert states["Figure 4"]["state"] == "left out" and "paper_002_full" in states["Figure 4"]["reason"]
    assert "batch_runs.jsonl" in states["Figure 1, right"]["reason"]  # that variant was not run
    assert result["shown"] == sum(item["state"] == "shown" for item in states.values())

    hundred = tiny_images.cifar100_pickles(tmp_path / "hundred")  # data that came later
    cli.run(
        composed(*words, "resume=true", f"task.data.cifar100={hundred}",
                 more("fine_tune_cifar100", "task.seeds=[0]", "task.epochs=1"))
    )  # fmt: skip
    states = {item["number"]: item for item in json.loads((report / "paper_002.json").read_text())["items"]}
    assert states["Table 2"]["part"] == "fine_tune_cifar100" and "20 classes" in states["Table 2"]["blocks"][1]["text"]


PLANTED = ("++federated.planted.clients=2", "++federated.planted.entities=8", "++federated.planted.told=3",
           "++federated.planted.questions=2", "++federated.planted.hubs=1", "federated.silos=planted",
           "federated.model.encoder=planted", "federated.model.layers=null", "federated.model.train_embeddings=true",
           "federated.model.max_query_length=8", "federated.model.max_sentence_length=12", "federated.stage1.rounds=1",
           "federated.stage1.warmup_rounds=0", "federated.stage1.top_k=10", "federated.clients=null")  # fmt: skip


@pytest.mark.slow
def test_paper_004_on_planted_silos(tmp_path: Path) -> None:
    client = f"{tmp_path}/run/silos/silos/clients/client0"
    study = [*PLANTED, "task.seeds=[0]", "task.plot=true"]
    shown = {
        "silos": ["task.source=planted", "++task.planted.clients=2", "++task.planted.entities=14",
                  "++task.planted.told=3"],
        "encoder": PLANTED,
        "cases": [f"task.silo={client}"],
        "inversion": [f"task.texts={client}/sentences.jsonl", "task.known=20", "task.attacked=20", "task.steps=2",
                      "task.candidates=5", "task.samples=2", "task.max_tokens=8"],
        "hubness": [*study, "task.values=[10,20]"],
        "data_ratio": [*study, "task.values=[0.5,1]", "task.systems=[stage1]"],  # in one folder with hubness
        "gain": study,
        "table_1": [*PLANTED, "task.seeds=[0]", "task.systems=[bm25,stage1]"],
    }  # fmt: skip
    cfg = composed(
        "experiment=paper_004", f"run_dir={tmp_path / 'run'}", f"task.only=[{','.join(shown)}]", "task.min_free_mb=1",
        *(more(name, *settings) for name, settings in shown.items()),
        *(f"++task.parts.{name}.packages=[]" for name in shown),
    )  # fmt: skip
    cli.run(cfg)
    report = tmp_path / "run" / "report"
    items = {item["number"]: item for item in json.loads((report / "paper_004.json").read_text())["items"]}
    left = {"Table 4"}
    drawings = {"Figure 1", "Figure 2"}
    assert {number for number, item in items.items() if item["state"] == "shown"} == set(items) - left - drawings
    assert all("task.only" in items[number]["reason"] for number in left)
    table = items["Table 1"]["blocks"][0]["rows"]
    assert any(row[0] == "BM25" and row[1].endswith("/ 0.172") for row in table)
    assert items["Table 3"]["blocks"][0]["rows"][0][0] == "Without training"
    assert len(items["Table 6"]["blocks"][0]["rows"]) == 2
    for picture in ("figure_3.png", "figure_4.svg", "figure_6.png", "table_2.png"):
        assert (report / picture).stat().st_size > 1000
    assert (report / "paper_004.html").stat().st_mode & 0o077 == 0  # measures of clients' own questions


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task.sedes=[0]", r"task\.parts\.table_1: task\.sedes is not a setting \(in .*experiment=pdd_as2"),
        ("task.seeds=[]", r"task\.parts\.table_1: task\.seeds=\[\] must be"),
        ("task=none", r"task\.parts\.table_1: .*task/none"),
    ],
)
def test_a_wrong_setting_of_a_part_is_named_with_the_part_before_anything_runs(
    tmp_path: Path, setting: str, words: str
) -> None:
    cfg = composed("experiment=paper_004", f"run_dir={tmp_path / 'run'}", "task.only=[silos,table_1]",
                   more("table_1", setting), "++task.parts.table_1.packages=[]", "++task.parts.silos.packages=[]",
                   "task.min_free_mb=1")  # fmt: skip
    with pytest.raises(ConfigurationError, match=words):
        cli.run(cfg)
    assert not (tmp_path / "run" / "silos").exists()


def test_what_a_shell_would_change_is_quoted_on_a_page(tmp_path: Path, ran: list[str]) -> None:
    words = ["task.only=[a,b]", "task.root=${oc.env:DATA}", "task.note=two words", "+task.x={a: 1}", "~task.y"]
    command = f"python train.py {as_typed(words)}"
    assert "task.only=[a,b]" in command.split() and "~task.y" not in command.split(), "no more than a shell needs"
    assert replace(parts(tmp_path, ran), command=f"{command} resume=true").command_again() == command
    shell = ["bash", "-c", f"printf '%s\\n' {as_typed(words)}"]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines() == words
