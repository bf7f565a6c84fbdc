"""`task=paper_000`: which trainings it asks for, what it leaves out, that nothing is done twice; and its tables."""

from __future__ import annotations

import csv
import io
import json
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from tiny_generator import generator
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import parts, retriever, trainer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.modules import OptimizerSpec, QueryGenerator
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, noise_keys
from lit_dpret.privacy.modes import DPSGD, SyntheticData
from lit_dpret.report.table import RowResult, write_json
from lit_dpret.retrieval.statistics import Interval
from lit_dpret.tasks import Pipeline, PretrainingOverlap, Similarity
from reproduction import CanaryStudy, Paper000, ZeroShot
from reproduction.paper_000.grid import Grid
from reproduction.paper_000.retrieval import Order
from reproduction.paper_000.shrink import SmallerGenerator
from reproduction.paper_000.study import Trainings
from reproduction.paper_000.table import PaperRow, PaperTable, figure_of
from reproduction.spent import spent_under

CANARIES = Path(__file__).parents[2] / "docs" / "reproduction" / "canaries"
STEPS = 2


class StandIn:
    """In place of a pipeline: remembers what was asked of it, and writes results and queries as one does."""

    asked: list[tuple[str, tuple[str, ...], str]]

    def __init__(
        self, only: Any = ("synthetic",), embeddings: Any = None, generator: Any = None, steps: int = 1,
        tuning_data: str = "unknown",
    ) -> None:  # fmt: skip
        self.tuning_data, self.tuning_note = tuning_data, None
        self.only, self.embeddings, self.steps = tuple(only), embeddings, steps
        self.generator, self.retriever = generator or partial(dict), partial(dict)
        self.max_passages = 20

    def run(self, own: Any) -> dict[str, float]:
        mode = own.make_privacy()
        budget = f"eps {mode.eps:g}" if isinstance(mode, DPSGD) else "none"
        self.asked.append((own.run_dir.name, self.only, budget))
        rows = [
            RowResult(name, {m: Interval(0.4, 0.3, 0.5) for m in ("nDCG@10", "Recall@10")}, budget)
            for name in self.only
        ]
        write_json(rows, own.run_dir / "results.json")
        for folder in ("synthetic/data", "pseudo_queries"):
            (own.run_dir / folder / "qrels").mkdir(parents=True, exist_ok=True)
            data = own.make_datamodule(max_passages=20)
            data.setup("fit")
            names = list(data.public_passages())
            lines = [json.dumps({"_id": f"q{name}", "text": f"{own.run_dir.name} asks {name}"}) for name in names]
            (own.run_dir / folder / "queries.jsonl").write_text("\n".join(lines), encoding="utf-8")
            judged = "".join(f"q{name}\t{name}\t1\n" for name in names)
            (own.run_dir / folder / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
        return {}


@pytest.fixture
def asked() -> Iterator[list[tuple[str, tuple[str, ...], str]]]:
    StandIn.asked = []
    yield StandIn.asked


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Public weights: a generator without a privacy card."""
    generator().save_model(tmp_path / "public")
    return tmp_path / "public"


def paper(public: Path, **changes: Any) -> Paper000:
    settings: dict[str, Any] = {
        "pipeline": StandIn,
        "shrink": SmallerGenerator(teacher=str(public), layers=1, feed_forward=16, epochs=1, batch=8),
        "similarity": partial(Similarity, measures=["bleu", "mauve"], features=["query"], ceiling=False, seeds=2),
        "zero_shot": partial(ZeroShot, sets=["scifact", "fiqa"], min_free_mb=1, top_k=10),
        "overlap": partial(PretrainingOverlap, corpus=None, max_texts=10, subsets=2, ngram=2),
        "canaries": partial(CanaryStudy),
        "grid": Grid(lr=[0.01], max_grad_norm=[0.1, 1.0], batch=[8], epochs=[0.3], split="test", max_passages=4),
        "sizes": {"whole": str(public), "copy": str(public)}, "beside": {"whole": "T5-Base", "copy": "T5-Small"},
        "main": "whole", "eps": [3.0, 8.0, None], "others_at": [3.0], "originals_are_public": True,
        "canaries_from": CANARIES, "shrink_passages": 12, "min_free_mb": 1, "only": ["retrieval"],
    }  # fmt: skip
    return Paper000(**settings | changes)


def table(run: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((run / "report" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


@pytest.mark.costly
def test_each_row_of_tables_3_and_4_is_one_training_under_its_own_budget(
    public: Path, tmp_path: Path, asked: list[Any]
) -> None:
    told = paper(public).run(parts(tmp_path))
    report = json.loads((tmp_path / "run" / "report" / "paper_000.json").read_text(encoding="utf-8"))
    assert str(CANARIES) not in report["spent"]
    assert asked == [
        ("baselines", ("bm25", "zero_shot", "original", "pseudo"), "none"),
        ("whole-eps3", ("synthetic",), "eps 3"),
        ("whole-eps8", ("synthetic",), "eps 8"),
        ("whole-none", ("synthetic",), "none"),
        ("copy-eps3", ("synthetic",), "eps 3"),
        ("direct-eps8", ("direct",), "eps 8"),
        ("direct-eps3", ("direct",), "eps 3"),
    ]
    rows = {(row["source"].split(" (")[0], row["epsilon"]): row for row in table(tmp_path / "run", "table_3_retrieval")}
    assert rows["whole", "3"]["paper"] == {"nDCG@10": 0.183, "Recall@10": 0.3108}
    assert rows["copy", "3"]["papers_row"] == "T5-Small, ε = 3" and rows["copy", "3"]["paper"]["nDCG@10"] == 0.1346
    assert rows["T5-XL", "3"]["ours"] == {} and rows["T5-XL", "3"]["note"] == "not run here"
    assert [row["epsilon"] for row in rows.values()].count("public only") == 3
    assert len(told) == 1 + 4 + 3
    orders = json.loads((tmp_path / "run" / "report" / "table_3_retrieval.json").read_text())["notes"][1:]
    assert len(orders) == 4 + 3 * 2, "by budget and size, and beside what is had without private queries"
    direct = table(tmp_path / "run", "table_4_direct")
    assert [row["epsilon"] for row in direct] == ["∞", "8", "3", *["public only"] * 3]
    assert direct[1]["paper"]["nDCG@10"] == 0.0386


@pytest.mark.slow
def test_an_interrupted_reproduction_goes_on_with_the_trainings_that_are_left(
    public: Path, tmp_path: Path, asked: list[Any]
) -> None:
    class Stopped(StandIn):
        def run(self, own: Any) -> dict[str, float]:
            if own.run_dir.name == "whole-eps8":
                raise KeyboardInterrupt
            return super().run(own)

    with pytest.raises(KeyboardInterrupt):
        paper(public, pipeline=Stopped).run(parts(tmp_path))
    with pytest.raises(ResumeError, match="resume=true"):
        paper(public).run(parts(tmp_path))
    paper(public, only=["retrieval", "examples"]).run(parts(tmp_path, resume=True))
    assert len(asked) == len({name for name, *_ in asked}) == 7, "what is finished is not done again, by no part"
    paper(public, eps=[3.0, None], only=["retrieval"]).run(parts(tmp_path, resume=True))
    assert len(asked) == 7, "fewer rows need no training"
    with pytest.raises(ResumeError, match=r"whole-eps3 was run with other settings|baselines was made with other"):
        paper(public, pipeline=partial(StandIn, steps=2)).run(parts(tmp_path, resume=True))


def test_a_result_is_known_again_by_another_process_whose_functions_lie_elsewhere(tmp_path: Path) -> None:
    def made_anew() -> Any:
        def work(lr: float) -> None: ...

        return work

    def trainings(parts: Any) -> Trainings:
        return paper(tmp_path).open(parts)

    own, done = parts(tmp_path), []
    own.run_dir.mkdir()
    for again in (False, True):
        known = trainings(replace(own, resume=again))
        assert known.result("x", [partial(made_anew(), lr=0.1)], lambda _: done.append(1) or 7) == 7
    assert len(done) == 1
    with pytest.raises(ResumeError, match="x was run with other settings"):
        trainings(replace(own, resume=True)).result("x", [partial(made_anew(), lr=0.2)], lambda _: 8)


@pytest.mark.slow
def test_what_is_not_there_is_left_out_with_its_reason_and_the_rest_is_told(
    public: Path, tmp_path: Path, asked: list[Any]
) -> None:
    wanted = ["retrieval", "zero_shot", "overlap", "canaries"]
    paper(public, only=wanted).run(parts(tmp_path))
    report = json.loads((tmp_path / "run" / "report" / "paper_000.json").read_text(encoding="utf-8"))
    assert set(report["left_out"]) == {"zero_shot", "overlap"}
    assert "task.zero_shot.root=null" in report["left_out"]["zero_shot"]
    assert "task.overlap.corpus=null" in report["left_out"]["overlap"]
    assert [one["name"] for one in report["tables"]] == ["table_3_retrieval", "table_4_direct", "table_7_canaries"]
    (tmp_path / "empty").mkdir()
    absent = partial(ZeroShot, sets=["scifact"], root=tmp_path / "empty", min_free_mb=1)
    paper(public, only=["zero_shot"], zero_shot=absent).run(parts(tmp_path, resume=True))
    report = json.loads((tmp_path / "run" / "report" / "paper_000.json").read_text(encoding="utf-8"))
    assert "holds none of" in report["left_out"]["zero_shot"]


@pytest.mark.slow
def test_original_queries_and_what_may_repeat_them_are_shown_only_where_declared_public(
    public: Path, tmp_path: Path, asked: list[Any]
) -> None:
    for place, declared in (("open", True), ("closed", False)):
        own = parts(tmp_path / place)
        wanted = ["retrieval", "examples", "similarity", "grid", "overlap"] if not declared else ["examples"]
        paper(public, originals_are_public=declared, only=wanted).run(own)
        report = own.run_dir / "report"
        shown = (report / "table_2_examples.md").read_text(encoding="utf-8")
        assert ("| original |" in shown) is declared
        assert ("whole-none asks" in shown) is declared, "made without privacy: it may repeat a query word for word"
        assert "whole-eps3 asks" in shown and "baselines asks" in shown
        for file in report.iterdir():
            assert bool(stat.S_IMODE(file.stat().st_mode) & 0o077) is declared, file
        if declared:
            texts = [json.loads(line)["text"] for line in (tmp_path / place / "log" / "corpus.jsonl").open()]
            assert any(text in shown for text in texts)
            paper(public, only=["examples"], example_texts=False).run(parts(tmp_path / place, resume=True))
            bare = (report / "table_2_examples.md").read_text(encoding="utf-8")
            assert "whole-eps3 asks" in bare and "| original |" not in bare and not any(text in bare for text in texts)
        if not declared:
            page = json.loads((report / "paper_000.json").read_text(encoding="utf-8"))
            assert set(page["left_out"]) == {"similarity", "grid", "overlap"}
            assert all("task.originals_are_public=false" in why for why in page["left_out"].values())
            assert "Internal" in (report / "paper_000.html").read_text(encoding="utf-8")


def test_the_canaries_of_a_finished_study_stand_beside_those_of_the_paper_and_are_missing_from_the_sum(
    public: Path, tmp_path: Path, asked: list[Any]
) -> None:
    paper(public, only=["canaries"]).run(parts(tmp_path))
    rows = table(tmp_path / "run", "table_7_canaries")
    spent = json.loads((tmp_path / "run" / "report" / "paper_000.json").read_text(encoding="utf-8"))["spent"]
    assert f"The study in {CANARIES}" in spent and "5 of its 5 private trainings" in spent, "it has no ledgers here"
    known = json.loads((CANARIES / "canaries.json").read_text(encoding="utf-8"))["rows"]
    mine = next(row for row in rows if row["epsilon"] == "16" and row["source"] == "secret in the query")
    one = next(
        r for r in known if (r["model"], r["side"], r["kind"], r["copies"]) == ("eps = 16", "query", "three kinds", 10)
    )
    assert mine["ours"]["rank_10"] == one["mean_rank"] and mine["paper"]["rank_10"] == 43
    assert "delta" in mine["privacy"] and not asked
    with pytest.raises(DataError, match=r"task\.canaries_from=.* holds no readable canaries\.json"):
        paper(public, only=["retrieval", "canaries"], canaries_from=tmp_path / "no").run(parts(tmp_path, resume=True))
    few = parts(tmp_path / "few")
    few = replace(few, make_datamodule=partial(few.make_datamodule, max_passages=4))
    with pytest.raises(DataError, match=r"raise datamodule\.max_passages and datamodule\.max_train_queries"):
        paper(public, only=["retrieval", "canaries"], canaries=dict, canaries_from=None, canary_queries=1).run(few)
    assert not asked, "refused before the first training"


def test_a_mode_that_trains_no_generator_is_refused_before_any_training(
    public: Path, tmp_path: Path, asked: list[Any]
) -> None:
    with pytest.raises(ConfigurationError, match="privacy=synthetic trains none"):
        paper(public).run(parts(tmp_path, privacy=lambda **_: SyntheticData()))
    assert not asked
    for part, wrong in (
        ("similarity", {"similarity": partial(Similarity, measures=["rouge"])}),
        ("overlap", {"overlap": partial(PretrainingOverlap, corpus=None, subsets=0)}),
    ):
        with pytest.raises(ConfigurationError, match=r"task\.(measures|subsets)="):
            paper(public, only=["retrieval", part], **wrong).run(parts(tmp_path / part))
    assert not asked


# -- with real trainings, all parts ------------------------------------------------------------


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    saved = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    save_sentence_transformer(tmp_path / "encoder", saved, saved)
    return str(tmp_path / "encoder")


class Interrupt(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if type(module).__name__ == "QueryGenerator" and batch.last and batch.step == 1:
            raise KeyboardInterrupt


def generator_of(public: Path) -> Any:
    adam = OptimizerSpec(name="adam", lr=0.01)
    return partial(QueryGenerator, pretrained=str(public), optimizer=adam, max_passage_length=12, max_query_length=8)


def real(public: Path, encoder: str, **changes: Any) -> Paper000:
    pipeline = partial(
        Pipeline, generator=generator_of(public),
        retriever=partial(retriever), generator_steps=STEPS, generator_batch=8, generator_physical_batch=8,
        generator_max_grad_norm=0.1, retriever_steps=STEPS, retriever_batch=16, retriever_max_grad_norm=0.5,
        min_free_mb=1, max_passages=20, round_trip_filter=None,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "pipeline": pipeline, "sizes": {"whole": str(public), "mini": "shrunk"}, "eps": [8.0, None],
        "others_at": [8.0], "beside": {"whole": "T5-Base", "mini": "T5-Small"},
        "similarity": partial(
            Similarity, measures=["bleu", "mauve"], features=["query"], ceiling=False, seeds=2, encoder=encoder
        ),
    }  # fmt: skip
    return paper(public, **settings | changes)


@pytest.mark.slow
def test_every_part_with_real_trainings_and_nothing_spent_twice_after_an_interruption(
    public: Path, encoder: str, tmp_path: Path
) -> None:
    pytest.importorskip("sacrebleu", reason='needs the extra: pip install "lit-dpret[quality]"')
    pytest.importorskip("sklearn", reason='needs the extra: pip install "lit-dpret[quality]"')

    def interrupted(callbacks: Any = (), **settings: Any) -> L.Trainer:
        return trainer(callbacks=[*callbacks, Interrupt()], **settings)

    wanted = ["retrieval", "examples", "similarity", "zero_shot", "grid", "overlap", "canaries"]
    beir, corpus = tmp_path / "beir", tmp_path / "corpus.jsonl"
    beir.mkdir()
    own = parts(tmp_path)
    (beir / "scifact").symlink_to(tmp_path / "log")
    corpus.write_text(json.dumps({"text": "nothing of it"}) + "\n", encoding="utf-8")
    more = {
        "only": wanted,
        "zero_shot": partial(ZeroShot, sets=["scifact"], min_free_mb=1, top_k=10, root=beir),
        "overlap": partial(PretrainingOverlap, corpus=corpus, max_texts=10, subsets=2, ngram=2),
    }
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        real(public, encoder, **more).run(parts(tmp_path, make_trainer=interrupted))
    told = real(public, encoder, **more).run(parts(tmp_path, resume=True))
    run = own.run_dir
    report = json.loads((run / "report" / "paper_000.json").read_text(encoding="utf-8"))
    assert not report["left_out"] and len(report["tables"]) == 8 and all(0 <= value <= 1 for value in told.values())
    for name in ("table_1_grid", "table_3_retrieval", "table_5_zero_shot", "table_6_similarity", "overlap"):
        rows = table(run, name)
        assert rows and any(row["ours"] for row in rows), name
        assert all(row["privacy"] for row in rows if row["ours"] and name != "overlap"), name
    for name in ("whole-eps8/generator", "mini-eps8/generator", "direct-eps8/direct"):
        keys = noise_keys(PrivacyLedger.read(run / name / LEDGER_NAME).records)
        assert len(keys) == len(set(keys)) == STEPS, name
    spent = spent_under(run)
    assert spent.private == 5, "two generators, one direct training, two points of the grid"
    assert spent.bare >= 3 and "delta" in spent.text and "zero_out" in spent.text
    assert report["spent"].startswith(spent.text)
    assert "5 of its 5 private trainings" in report["spent"], "the canary study came without its ledgers"
    assert not (run / "embeddings").exists(), "embeddings of queries are as private as the queries"


NAN = float("nan")


def test_every_number_is_in_the_spreadsheet_and_in_the_data() -> None:
    rows = [
        PaperRow(system="BM25", epsilon="public only", metrics={"ndcg": Interval(0.3, 0.2, 0.4)}, privacy="no queries"),
        PaperRow(system="ours", epsilon="3", metrics={"ndcg": Interval(0.5, 0.4, 0.6), "bleu": Interval(0.1, NAN, NAN)},
                 paper={"ndcg": 0.183}, beside="T5-Base, ε = 3", privacy="epsilon = 3 at delta = 1e-05"),
    ]  # fmt: skip
    table = PaperTable("table_9", "Table 9", {"ndcg": "nDCG@10", "bleu": "BLEU"}, rows, caption="Something.")
    head, *lines = csv.reader(io.StringIO(table.sheet().csv()))
    ours = dict(zip(head, lines[1], strict=True))
    assert [ours[f"nDCG@10{end}"] for end in ("", " low", " high", " paper")] == ["0.5", "0.4", "0.6", "0.183"]
    assert ours["BLEU low"] == "" and ours["privacy"] == "epsilon = 3 at delta = 1e-05"
    row = json.loads(json.dumps(table.facts(), allow_nan=False))["rows"][1]
    assert row["ours"]["bleu"] == {"mean": 0.1, "low": None, "high": None} and row["papers_row"] == "T5-Base, ε = 3"


def row(mean: float, reach: float) -> PaperRow:
    return PaperRow(system="ours", epsilon="3", metrics={"ndcg": Interval(mean, mean - reach, mean + reach)})


@pytest.mark.parametrize(
    ("better", "worse", "said"),
    [
        (row(0.6, 0.05), row(0.4, 0.05), "holds.* do not overlap"),
        (row(0.4, 0.05), row(0.6, 0.05), "the other way round.* do not overlap"),
        (row(0.5, 0.1), row(0.55, 0.1), "the other way round.* overlap, which decides nothing"),
        (row(0.5, 0.1), row(0.5, 0.1), "equal, "),
    ],
)
def test_an_order_is_called_shown_only_where_the_intervals_are_apart(
    better: PaperRow, worse: PaperRow, said: str
) -> None:
    assert re.search(said, Order(better, worse).told("ndcg", "nDCG@10") or "")


def test_a_picture_says_which_rows_were_not_run_and_promises_no_interval_where_there_is_none() -> None:
    bare = PaperRow(system="alone", epsilon="3", metrics={"ndcg": Interval(0.4, NAN, NAN)})
    missing = PaperRow(system="missing", epsilon="8", metrics={})
    table = PaperTable("table", "A table", {"ndcg": "nDCG@10"}, [bare, missing], caption="Something.")
    drawn = figure_of(table)
    assert [text.get_text() for text in drawn.axes[0].get_yticklabels()][1] == "missing, ε = 8 (not run)"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["ours"]
    whole = figure_of(replace(table, rows=[row(0.5, 0.1)]))
    assert "interval" in whole.legends[0].get_texts()[0].get_text()
