"""`task=similarity` and `task=pretraining_overlap`: what they find, and that private queries are asked about."""

from __future__ import annotations

import gzip
import json
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Texts, fit
from tiny_generator import PASSAGES, SETTINGS, lively_generator, write_parent_card
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import no_parts, write_beir

from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.report.figures import can_draw
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import PretrainingOverlap, Similarity
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.uncovered import declare

pytest.importorskip("sacrebleu", reason='needs the extra: pip install "lit-dpret[quality]"')
pytest.importorskip("sklearn", reason='needs the extra: pip install "lit-dpret[quality]"')

SECRET = "does my policy cover the wet basement of missus threadgold"


def beir(folder: Path, queries: dict[str, dict[str, str]], passages: dict[str, str]) -> Path:
    """A folder in BEIR's layout from ``{split: {passage id: query}}``."""
    asked = {f"{split}{i}": text for split, texts in queries.items() for i, text in enumerate(texts.values())}
    judged = {split: [(f"{split}{i}", name) for i, name in enumerate(texts)] for split, texts in queries.items()}
    return write_beir(folder, passages, asked, judged)


SUBJECTS = ["flood", "fire", "hail", "theft", "wind", "frost", "mould", "rust", "dents", "leaks"]
THINGS = ["house", "car", "boat", "barn"]
CELLS = {f"p{i}{j}": (one, other) for i, one in enumerate(SUBJECTS) for j, other in enumerate(THINGS)}
TEXTS = {name: f"The policy pays for {one} at the {other}." for name, (one, other) in CELLS.items()}
ORIGINAL = {name: f"does it pay for {one} at my {other}" for name, (one, other) in CELLS.items()} | {"p00": SECRET}
MADE = {name: f"what is paid for {one} at the {other}" for name, (one, other) in CELLS.items()} | {
    "p01": ORIGINAL["p01"]
}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A synthetic set without a card; its query of p01 is a copy."""
    return beir(tmp_path / "made", {"train": MADE}, TEXTS)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    held_out = {name: text.replace("my", "his") for name, text in ORIGINAL.items()}
    return beir(tmp_path / "original", {"train": ORIGINAL, "dev": held_out}, TEXTS)


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    saved = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=16))
    save_sentence_transformer(tmp_path / "encoder", saved, saved)
    return str(tmp_path / "encoder")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic set that a private generator wrote, with its card."""
    folder = tmp_path_factory.mktemp("written")
    source = lively_generator().save_model(folder / "generator")
    write_parent_card(source)
    return synthesize(source, PASSAGES, folder / "set", **SETTINGS)


@pytest.fixture
def carded(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(written, tmp_path / "set")


def parts(folder: Path, make: Callable[[], Any]) -> Parts:
    return no_parts(folder, make_datamodule=make)


def pairs(folder: Path) -> Callable[[], PairsDataModule]:
    return lambda: PairsDataModule(folder=folder)


def facts(run: Path, name: str = "similarity") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"{name}.json").read_text(encoding="utf-8"))
    return found


# -- similarity ----------------------------------------------------------------------------------


def test_every_measure_is_in_the_files_and_in_the_scores(
    made: Path, original: Path, encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Similarity(synthetic=made, reference="public", encoder=encoder, held_out="dev", seeds=2)
    scores = task.run(parts(tmp_path / "run", pairs(original)))
    assert set(scores) == {
        "bleu", "mauve/query", "mauve/query_passage", "distinct-1", "distinct-2", "distinct-3", "overlap/exact",
        "overlap/ngram",
    }  # fmt: skip
    found = facts(tmp_path / "run")
    assert found["not_covered"] is None and found["not_computed"] == {}
    assert found["bleu"]["scored"] == 40 and "nrefs:1" in found["bleu"]["signature"]
    assert 0 < scores["bleu"] < 100
    assert found["mauve"]["query"]["ceiling"] is None  # all 40 are in the comparison already
    for kind, featuriser in (("query", "encoder, query"), ("query_passage", "encoder, query and passage in one text")):
        assert (found["mauve"][kind]["featuriser"], found["mauve"][kind]["texts"]) == (featuriser, [40, 40])
        assert len(found["mauve"][kind]["values"]) == 2
    shares = {name: each["exact"]["positives"] for name, each in found["overlap"].items()}
    assert shares == {"reference": 1, "reference_sample": 1, "held_out": 0}
    assert found["diversity"]["synthetic"]["question_types"]["what"] == 39 / 40
    shown = capsys.readouterr().out
    for name in ("similarity.md", "similarity.html"):
        page = (tmp_path / "run" / name).read_text(encoding="utf-8").replace("\\", "")
        assert found["bleu"]["signature"] in page and "Copied queries" in page
    assert found["bleu"]["signature"] in shown.replace("\\", "")
    assert (tmp_path / "run" / "similarity.png").is_file() == can_draw()


def test_no_query_is_shown(made: Path, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Similarity(
        synthetic=made, reference="private", card_entry=True, measures=["bleu", "overlap", "diversity"], plot=False
    )
    task.run(parts(tmp_path / "run", pairs(original)))
    assert "there is no privacy card to say so" in facts(tmp_path / "run")["not_covered"]
    written = "".join(
        path.read_text(encoding="utf-8") for path in (tmp_path / "run").iterdir() if path.suffix != ".png"
    )
    for text in (SECRET, "threadgold", MADE["p01"], MADE["p11"]):
        assert text not in written + capsys.readouterr().out


def test_the_ceiling_is_of_two_samples_of_originals(made: Path, original: Path, encoder: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"reference": "public", "encoder": encoder, "measures": ["mauve"], "seeds": 2}
    settings["buckets"] = 5
    part = Similarity(synthetic=made, max_texts=20, **settings)
    part.run(parts(tmp_path / "part", pairs(original)))
    found = facts(tmp_path / "part")["mauve"]
    for kind in ("query", "query_passage"):
        assert found[kind]["ceiling"]["texts"] == found[kind]["texts"] == [20, 20]
        assert found[kind]["ceiling"]["mean"] > found[kind]["mean"]
    Similarity(synthetic=made, max_texts=20, ceiling=False, **settings).run(parts(tmp_path / "no", pairs(original)))
    assert facts(tmp_path / "no")["mauve"]["query"]["ceiling"] is None


def test_a_file_of_queries_alone_has_no_bleu_and_says_why(made: Path, encoder: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ORIGINAL.values())
    task = Similarity(synthetic=made, reference="public", reference_file=path, encoder=encoder, plot=False)
    scores = task.run(parts(tmp_path / "run", pairs(made)))
    assert "mauve/query" in scores and scores["overlap/exact"] == 1 / 40
    found = facts(tmp_path / "run")
    assert found["bleu"] is None and set(found["not_computed"]) == {"bleu", "mauve of query_passage"}
    assert found["reference"]["from"] == "log.jsonl.gz"
    assert not (tmp_path / "run" / "similarity.png").exists()


@pytest.mark.costly
def test_scores_of_private_queries_are_on_the_card_before_they_are_computed_and_stay_there(
    carded: Path, written: Path, tmp_path: Path
) -> None:
    private = beir(tmp_path / "private", {"train": {name: f"why {text}" for name, text in PASSAGES.items()}}, PASSAGES)
    before = read_card(carded)
    task = Similarity(synthetic=carded, reference="private", card_entry=True, measures=["overlap"])
    task.run(parts(tmp_path / "run", pairs(private)))
    card, found = read_card(carded), facts(tmp_path / "run")
    gaps = [text for text in card["not_covered"] if text not in before["not_covered"]]
    assert gaps == [
        "Similarity (overlap) of set, computed from private queries: anyone who sees these numbers learns more "
        "than the claim covers."
    ]
    assert card["claim"] == before["claim"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").glob("similarity.*")} == {0o600}
    assert "privacy_card.json says so" in found["not_covered"]
    assert found["synthetic"]["privacy"].startswith("epsilon = ")
    assert found["not_covered"] in (tmp_path / "run" / "similarity.html").read_text(encoding="utf-8")
    # Where the measure fails, the card has been marked all the same: somebody may have seen something.
    task = Similarity(synthetic=carded, reference="private", card_entry=True, measures=["mauve"], buckets=10**6)
    with pytest.raises(DataError):
        task.run(parts(tmp_path / "failed", pairs(private)))
    assert len(read_card(carded)["amendments"]) == 2
    # The data are as they were, so that they can still be trained on, and generating them again keeps the note.
    SyntheticDataModule(folder=carded).setup()
    noted = read_card(carded)
    synthesize(written.parent / "generator", PASSAGES, carded, **SETTINGS)
    assert all(read_card(carded)[name] == noted[name] for name in ("amendments", "not_covered", "cautions"))


@pytest.mark.parametrize("named", ["run", "run/model"])
def test_the_card_of_a_run_is_marked_with_the_copy_beside_its_model(named: str, written: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for folder in (run, run / "model"):
        folder.mkdir()
        shutil.copy2(written / "privacy_card.json", folder)
    assert declare(tmp_path / named, "public", measured="A share", where="this") is None
    said = declare(tmp_path / named, "private", measured="A share", where="this folder")
    assert said is not None and said.endswith("(privacy_card.json says so): keep this folder private.")
    for folder in (run, run / "model"):
        begin = f"A share of {Path(named).name}, computed from"
        assert any(text.startswith(begin) for text in read_card(folder)["not_covered"])


def test_public_queries_mark_no_card(carded: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (carded / "privacy_card.json").read_bytes()
    Similarity(synthetic=carded, reference="public", measures=["overlap"]).run(parts(tmp_path / "public", pairs(made)))
    assert (carded / "privacy_card.json").read_bytes() == before
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    task = Similarity(synthetic=carded, reference="private", card_entry=True)
    with pytest.raises(ConfigurationError, match=r"sacrebleu, which is not installed.*lit-dpret\[quality\]"):
        task.run(parts(tmp_path / "run", pairs(carded)))
    assert (carded / "privacy_card.json").read_bytes() == before


def test_what_is_declared_synthetic_is_held_against_its_card(carded: Path, made: Path, tmp_path: Path) -> None:
    task = Similarity(synthetic=made, reference="synthetic", measures=["overlap"])
    with pytest.raises(ConfigurationError, match="PairsDataModule reads data without a privacy card"):
        task.run(parts(tmp_path / "run", pairs(made)))
    task.run(parts(tmp_path / "run", lambda: SyntheticDataModule(folder=carded)))
    with (carded / "queries.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"is not the file that privacy_card\.json describes"):
        task.run(parts(tmp_path / "run", lambda: SyntheticDataModule(folder=carded)))


def test_the_promise_of_a_card_is_of_no_other_queries_nor_marked(carded: Path, made: Path, tmp_path: Path) -> None:
    queries = carded / "queries.jsonl"
    rows = [json.loads(line) | {"text": SECRET} for line in queries.read_text(encoding="utf-8").splitlines()]
    queries.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    before = (carded / "privacy_card.json").read_bytes()
    task = Similarity(synthetic=carded, reference="private", card_entry=True, measures=["overlap"])
    with pytest.raises(DataError, match=r"queries\.jsonl"):
        task.run(parts(tmp_path / "run", pairs(made)))
    assert (carded / "privacy_card.json").read_bytes() == before


def test_data_with_nothing_in_common_or_too_few_texts_are_refused(made: Path, encoder: str, tmp_path: Path) -> None:
    other = beir(tmp_path / "other", {"train": {"x": "is it paid"}}, {"x": "It is."})
    with pytest.raises(DataError, match="nothing to score"):
        Similarity(synthetic=made, reference="public", measures=["bleu"]).run(parts(tmp_path / "run", pairs(other)))
    task = Similarity(synthetic=made, reference="public", measures=["mauve"], encoder=encoder)
    with pytest.raises(DataError, match="needs 20 of each"):
        task.run(parts(tmp_path / "run", pairs(other)))
    with pytest.raises(DataError, match=r"nowhere.*task\.synthetic"):
        Similarity(synthetic=tmp_path / "nowhere", reference="public").run(parts(tmp_path / "run", pairs(made)))
    with pytest.raises(DataError, match=r"has no qrels/train.tsv"):
        beir(tmp_path / "dev", {"dev": {"x": "is it paid"}}, {"x": "It is."})
        Similarity(synthetic=tmp_path / "dev", reference="public").run(parts(tmp_path / "run", pairs(made)))


# -- overlap with a pre-training corpus ----------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files; the query of p01 and the passage of p02 stand in them, and 13 words of nothing."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": f"He asked: {ORIGINAL['p01'].upper()}?"}) + "\n")
    (folder / "b.jsonl").write_text(json.dumps({"text": f"So. {TEXTS['p02']} Yes."}) + "\n", encoding="utf-8")
    return folder


def test_corpora_are_counted(original: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = PretrainingOverlap(corpus=corpus, queries="public", sampled=0.5)
    assert task.run(parts(tmp_path / "run", pairs(original))) == {"queries": 1 / 40, "passages": 1 / 40}
    found = facts(tmp_path / "run", "pretraining_overlap")
    assert found["corpus"]["documents"] == 2 and found["not_covered"] is None
    assert found["found"]["queries"]["ngram"]["total"] == 0  # none has 13 words
    PretrainingOverlap(corpus=corpus, queries="public", max_texts=7).run(parts(tmp_path / "few", pairs(original)))
    few = facts(tmp_path / "few", "pretraining_overlap")
    assert {each["exact"]["total"] for each in few["found"].values()} == {7} and "whole_corpus" not in few
    low, high = found["whole_corpus"]["queries"]["exact"]
    assert low == found["found"]["queries"]["exact"]["low"]
    assert high == pytest.approx(2 * found["found"]["queries"]["exact"]["high"])
    page = (tmp_path / "run" / "pretraining_overlap.md").read_text(encoding="utf-8")
    for text in (page, capsys.readouterr().out):
        assert "(1 of 40)" in text and "lower bound" in text
        assert ORIGINAL["p01"] not in text


def test_shares_of_private_queries_are_on_the_card(carded: Path, original: Path, corpus: Path, tmp_path: Path) -> None:
    task = PretrainingOverlap(corpus=corpus, queries="private", card_entry=True, card=carded)
    task.run(parts(tmp_path / "run", pairs(original)))
    assert any("Overlap with a pre-training corpus of set" in text for text in read_card(carded)["not_covered"])
    assert "privacy_card.json says so" in facts(tmp_path / "run", "pretraining_overlap")["not_covered"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").glob("pre*")} == {0o600}


def test_a_card_that_cannot_be_marked_is_refused_before_queries_are_read(original: Path, tmp_path: Path) -> None:
    """A slip in the path would else let the numbers out with a card elsewhere that keeps silent about them."""
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    task = PretrainingOverlap(
        corpus=tmp_path / "corpus.jsonl", queries="private", card_entry=True, card=tmp_path / "runn"
    )
    with pytest.raises(DataError, match=r"task\.card=.*runn holds no privacy_card\.json"):
        task.run(parts(tmp_path / "run", pairs(original)))
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("place", ["run/synthetic", "run/stages/synthetic"])
def test_the_private_log_of_training_is_not_public(place: str, made: Path, original: Path, tmp_path: Path) -> None:
    """The ledger beside the artefact knows its data by a fingerprint that needs the secret of the run."""
    run = tmp_path / "run"
    synthetic = tmp_path / place
    data = PairsDataModule(folder=original, expected_batch_size=8, physical_batch_size=24)
    mode = DPSGD(eps=30.0, delta=1e-3, max_grad_norm=1.0, noise_multiplier=20.0)
    fit(run if synthetic.parent == run else synthetic.parent / "generator", Texts(privacy=mode), data, steps=1)
    shutil.copytree(made, synthetic)
    task = Similarity(synthetic=synthetic, reference="public", measures=["overlap"])
    with pytest.raises(ConfigurationError, match=r"task\.reference=public"):
        task.run(parts(tmp_path / "found", pairs(original)))
    assert list((tmp_path / "found").iterdir()) == []
    others = beir(tmp_path / "others", {"train": dict(list(ORIGINAL.items())[5:])}, TEXTS)
    task.run(parts(tmp_path / "found", pairs(others)))
    # Nor does a file get round it, also not one with a part of them, written otherwise.
    task.reference_file, part = tmp_path / "some.jsonl", list(ORIGINAL.values())[:9]
    task.reference_file.write_text("".join(json.dumps({"text": text.upper()}) + "\n" for text in part))
    with pytest.raises(ConfigurationError, match=r"task\.reference=public"):
        task.run(parts(tmp_path / "file", pairs(original)))
    task.run(parts(tmp_path / "elsewhere", pairs(tmp_path / "not here")))
    assert "original ones, public, as declared" in (tmp_path / "elsewhere" / "similarity.md").read_text()


def test_a_corpus_that_cannot_be_read_is_refused(original: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.jsonl").write_text('{"content": "a"}\n', encoding="utf-8")
    (tmp_path / "none.jsonl").write_text("", encoding="utf-8")
    for name, says in (
        ("empty", "holds no .jsonl"),
        ("missing.jsonl", "does not exist; check task.corpus"),
        ("missing", "does not exist; check task.corpus"),
        ("other.jsonl", "no key 'text'"),
        ("none.jsonl", "holds no record"),
    ):
        with pytest.raises(DataError, match=says):
            task = PretrainingOverlap(corpus=tmp_path / name, queries="public")
            task.run(parts(tmp_path / "run", pairs(original)))
