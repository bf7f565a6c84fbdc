"""Silos: what is written reads back, what is broken is named, and what each builder makes of its source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_silos import maker

from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, read_silo, silo_folders, write_silos
from lit_dpret.datamodules.splitting import write_split
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.federated.data import (
    planted_silos,
    planted_words,
    pseudo_silo,
    section_of,
    sentence_spans,
    silos_by_domain,
)
from lit_dpret.federated.data.planted import Planted, meaning
from lit_dpret.federated.data.questions import (
    Question,
    read_genres,
    read_newsqa,
    silos_by_article,
    squad_json,
    story_id,
)
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.systems import System, trained_alone
from lit_dpret.tasks import BuildSilos
from lit_dpret.tasks.parts import Parts

SIZE = Planted(clients=2, entities=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_silos(tmp_path / "silos", planted_silos(SIZE), facts={"source": "planted"})


def test_what_is_written_reads_back_for_its_owner_alone_and_its_repr_shows_no_text(folder: Path) -> None:
    assert [read_silo(path) for path in silo_folders(folder).values()] == planted_silos(SIZE)
    for path in (folder, *silo_folders(folder).values()):
        assert path.stat().st_mode & 0o077 == 0
    shown = repr(read_silo(silo_folders(folder)["client0"]))
    assert "entity" not in shown and "client0" in shown


def test_nothing_is_overwritten_and_a_refused_silo_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^folder=.* exists"):
        write_silos(folder, planted_silos(SIZE), facts={})
    broken = Silo("x", {"p": ""}, {"p-s0": "a"}, {"p-s0": "p"}, [SiloQuery("q", "t", ("gone",), "train")])
    with pytest.raises(DataError, match=r"'q' .*'gone'"):
        write_silos(tmp_path / "other", [broken], facts={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["silos"]


def test_a_silo_that_is_not_as_it_was_written_is_refused_by_file_and_line_and_never_by_its_text(folder: Path) -> None:
    path = silo_folders(folder)["client1"]
    queries, manifest = path / "queries.jsonl", path / "manifest.json"
    lines = queries.read_text().splitlines()
    queries.write_text("\n".join([*lines, ""]))
    assert read_silo(path, verify=False).name == "client1"
    queries.write_text("\n".join([*lines, json.dumps({"qid": "new", "words": "secret"})]))
    with pytest.raises(DataError, match=r"queries\.jsonl .*manifest"):
        read_silo(path)
    with pytest.raises(DataError, match=rf"queries\.jsonl line {len(lines) + 1}: .*'text'") as refusal:
        read_silo(path, verify=False)
    assert "secret" not in str(refusal.value)
    (path / "sentences.jsonl").unlink()
    with pytest.raises(DataError, match=r"sentences\.jsonl does not exist\. Restore it"):
        read_silo(path)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": "lit-dpret/silos/2"}))
    with pytest.raises(DataError, match="silos/2"):
        read_silo(path)
    manifest.unlink()
    with pytest.raises(DataError, match=r"manifest\.json does not exist; check the path\."):
        read_silo(path)


def test_a_silo_is_a_datamodule_whose_passages_are_its_sentences(folder: Path) -> None:
    data = SiloDataModule(folder=silo_folders(folder)["client0"], sampling="poisson", expected_batch_size=4)
    silo = planted_silos(SIZE)[0]
    assert dict(data.public_passages()) == silo.sentences
    row = data.pair_rows("train")[0]
    query = next(one for one in silo.queries if one.qid == row.query_id)
    assert row.passage == silo.sentences[query.positives[0]] and row.positives == frozenset(query.positives)
    data.use_unit("query")
    assert data.n_units == silo.counts()["train"]


# -- sentences -------------------------------------------------------------------------------


@given(st.text(alphabet='aZ. \n?!"1', max_size=80))
def test_sentences_hold_every_character_that_is_no_white_space_once_and_in_order(text: str) -> None:
    spans = sentence_spans(text)
    covered = [i for a, b in spans for i in range(a, b)]
    assert covered == sorted(set(covered)) and all(text[a:b].strip() == text[a:b] != "" for a, b in spans)
    assert {i for i, c in enumerate(text) if not c.isspace()} <= set(covered)


@pytest.mark.parametrize(("text", "count"), [
    ("It fell 3.5 percent. Then it rose.", 2),
    ("Gen. J. Smith met Mr. Brown in the U.S. Capitol.", 1),
    ('He said "Stop!" and left. She stayed.', 2),
    ("(CNN) -- No stop here\n\nA new paragraph", 2),
    ("no capital. after this dot", 1),
    ("", 0),
    ("x" * 4100, 3),
])  # fmt: skip
def test_a_text_falls_into_so_many_sentences(text: str, count: int) -> None:
    assert len(sentence_spans(text)) == count


# -- builders --------------------------------------------------------------------------------


def collection() -> Collection:
    passages = {f"p{i}": f"First of {i}. Second of {i}." for i in range(12)}
    queries = {f"q{i}": f"question {i}" for i in range(12)}
    domain = {f"q{i}": "big one" if i < 8 else "small" for i in range(12)}
    qrels: dict[str, dict[str, dict[str, int]]] = {"train": {}, "test": {}}
    for i in range(12):
        qrels["test" if i % 4 == 3 else "train"][f"q{i}"] = {f"p{i}": 1}
    places = {f"p{i}": domain[f"q{i}"] for i in range(12)} | {"p20": "small"}
    passages["p20"] = "Nobody asks."
    return Collection(passages=passages, queries=queries, qrels=qrels, domains=domain, passage_domains=places)


def test_a_domain_becomes_a_client_whose_queries_are_answered_by_every_sentence_of_their_passages() -> None:
    big, small = silos_by_domain(collection(), clients=2, min_train=2, min_test=1)
    assert (big.name, small.name) == ("big-one", "small")
    assert big.check().counts() == {"passages": 8, "sentences": 16, "train": 6, "dev": 0, "test": 2}
    query = next(query for query in small.queries if query.qid == "q8")
    assert [small.sentences[sid] for sid in query.positives] == ["First of 8.", "Second of 8."]
    assert "p20" in small.passages


def test_a_sample_is_drawn_by_a_public_seed_and_each_split_has_a_limit_of_its_own() -> None:
    def drawn(seed: int | None) -> list[str]:
        limits = {"max_train_queries": 3, "max_test_queries": 1, "max_passages": 1}
        big, _ = silos_by_domain(collection(), clients=2, min_train=2, min_test=1, seed=seed, **limits)
        counts = big.counts()
        assert (counts["train"], counts["test"], counts["passages"]) == (3, 1, 4)  # those that answer, and no others
        return [query.qid for query in big.queries]

    assert drawn(0) == drawn(0) and drawn(None) == ["q0", "q1", "q2", "q3"]
    assert len({tuple(drawn(seed)) for seed in range(8)}) > 3


def test_too_few_domains_of_a_size_are_refused_with_the_knobs() -> None:
    with pytest.raises(DataError, match=r"Lower task\.clients, task\.min_train"):
        silos_by_domain(collection(), clients=2, min_train=5, min_test=1)
    with pytest.raises(DataError, match=r"Lower federated\.clients, federated\.sample\.min_train"):
        silos_by_domain(collection(), clients=2, min_train=5, min_test=1, where="federated.sample")
    with pytest.raises(ConfigurationError, match=r"federated\.sample\.max_passages=0"):
        silos_by_domain(collection(), max_passages=0, where="federated.sample")


def test_articles_become_clients_and_paragraphs_stay_on_one_side() -> None:
    passages = {f"p{i}": ("Art" if i < 30 else "Bee", f"It was {i}. Then {i + 100} came.") for i in range(40)}
    questions = [Question(f"q{i}-{k}", "?", f"p{i}", answers=[str(i + 100 * k)]) for i in range(40) for k in (0, 1)]
    questions.append(Question("lost", "?", "p0", answers=["nothing of it"]))
    (art,), counts = silos_by_article(passages, questions, clients=1, min_train=5, min_test=1)
    assert art.name == "Art" and counts == {"ambiguous": 0, "dropped": 1}
    for query in art.check().queries:
        place, number = query.qid.removeprefix("q").split("-")
        assert query.positives == (f"p{place}-s{number}",)
    splits = {query.qid.split("-")[0]: set() for query in art.queries}
    for query in art.queries:
        splits[query.qid.split("-")[0]].add(query.split)
    assert all(len(found) == 1 for found in splits.values()) and {"train"} in splits.values()


def test_an_answer_that_stands_in_two_sentences_is_counted_as_ambiguous_unless_its_offset_is_known() -> None:
    text = "Paris is large. Paris is old."
    told = [
        Question("q", "?", "p", answers=["Paris"], split="train"),
        Question("t", "?", "p", answers=["old"], split="test"),
    ]
    (silo,), counts = silos_by_article({"p": ("A", text)}, told, clients=1, min_train=1, min_test=1)
    assert counts["ambiguous"] == 1 and silo.queries[0].positives == ("p-s0", "p-s1")
    articles = [{"title": "A", "paragraphs": [{"context": text, "qas": [
        {"id": "q", "question": "?", "answers": [{"answer_start": 16, "text": "Paris"}]}]}]}]  # fmt: skip
    passages, questions = squad_json(articles, split="train")
    (silo,), counts = silos_by_article(passages, questions, clients=1, min_train=1, min_test=0)
    assert counts["ambiguous"] == 0 and silo.sentences[silo.queries[0].positives[0]] == "Paris is old."


@pytest.mark.parametrize(("url", "genre"), [
    ("http://web.archive.org/web/20080101id_/http://www.cnn.com:80/2007/US/12/31/a.b/index.html", "us"),
    ("http://www.cnn.com/2009/SHOWBIZ/Movies/01/01/x/index.html", "entertainment"),
    ("http://edition.cnn.com/2014/05/06/opinions/x/", "opinion"),
    ("http://www.cnn.com/2013/08/09/world/europe/x/index.html", "world"),
    ("http://cnn.com/2010/12/25/x.html", None),
    ("http://money.cnn.com/2010/TECH/01/01/x", None),
    ("http://www.cnn.com/video/x", None),
])  # fmt: skip
def test_the_genre_is_the_section_in_the_address(url: str, genre: str | None) -> None:
    assert section_of(url) == genre


def test_the_known_story_is_found_by_the_hash_of_its_address_and_newsqa_becomes_silos(tmp_path: Path) -> None:
    urls = [f"http://www.cnn.com/2008/HEALTH/05/01/story{i}/index.html" for i in range(3)]
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "cnn_wayback_training_urls.txt").write_text("\n".join([*urls, "http://www.cnn.com/video/x"]))
    genres = read_genres(tmp_path / "urls")
    assert genres == dict.fromkeys(map(story_id, urls), "health")
    text = "The fever began in May. It ended in June.\n\nNobody knows why."
    asked = [
        {"q": "When did it end?", "consensus": {"s": text.index("in June"), "e": text.index("in June") + 7}},
        {"q": "Bad?", "consensus": {"badQuestion": True}},
        {"q": "None?", "consensus": {"noAnswer": True}},
        {"q": "Not agreed?", "consensus": {}},
    ]
    types = ["train", "train", "test"]
    data = [{"storyId": f"./cnn/stories/{story_id(url)}.story", "text": text, "type": kind, "questions": asked}
            for url, kind in zip(urls, types, strict=True)]  # fmt: skip
    data.append({"storyId": "./cnn/stories/unknown.story", "text": text, "type": "dev", "questions": asked})
    (tmp_path / "combined.json").write_text(json.dumps({"data": data}))
    stories, questions, counts = read_newsqa(tmp_path / "combined.json", genres)
    assert counts == {"no_genre": 4, "no_answer": 6, "bad_question": 3} and len(questions) == 3
    (health,), _ = silos_by_article(stories, questions, clients=1, min_train=2, min_test=1)
    assert health.name == "health"
    assert {health.sentences[sid] for query in health.queries for sid in query.positives} == {"It ended in June."}


# -- planted ---------------------------------------------------------------------------------


def test_planted_silos_are_the_same_every_time_and_their_vocabulary_is_complete() -> None:
    silos = planted_silos(SIZE)
    assert silos == planted_silos(SIZE) != planted_silos(Planted(clients=2, entities=6, seed=1))
    words = set(planted_words(SIZE))
    for silo in silos:
        silo.check()
        assert {word for text in silo.sentences.values() for word in text.split()} <= words
        assert {word for query in silo.queries for word in query.text.split()} <= words


def test_dialect_words_differ_unless_they_are_shared_and_a_skewed_federation_has_clients_of_falling_size() -> None:
    size = Planted(clients=3, attributes=6)
    assert all(len({meaning(size, client)[word] for client in range(3)}) == 3 for word in range(6))
    shared = Planted(clients=3, attributes=6, shared=0.5)
    assert [meaning(shared, client)[:3] for client in range(3)] == [[0, 1, 2]] * 3
    sizes = [silo.counts()["train"] for silo in planted_silos(Planted(clients=4, entities=40, skew=8))]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 6 * sizes[-1]


def test_common_entities_are_told_of_everywhere_and_no_two_clients_tell_the_same() -> None:
    size = Planted(clients=3, entities=8, attributes=9, told=3, common=True, duplicates=1, hubs=0)
    silos = planted_silos(size)
    facts = [{tuple(text.split()[:2]) for text in silo.sentences.values() if "attribute" in text} for silo in silos]
    assert not facts[0] & facts[1] and not facts[1] & facts[2] and {len(found) for found in facts} == {24}
    for silo in silos:
        held_out = {query.text.split()[-1] for query in silo.queries if query.split == "test"}
        assert held_out and not held_out & {query.text.split()[-1] for query in silo.queries if query.split == "train"}
        assert {len(query.positives) for query in silo.queries if query.split == "train"} == {1}
        assert {len(query.positives) for query in silo.queries if query.split == "test"} == {2}
    with pytest.raises(ConfigurationError, match="attributes=6"):
        planted_silos(Planted(clients=3, attributes=6, told=3, common=True))


# -- task=build_silos


def build(run: Path, **settings: Any) -> Path:
    nothing: Any = None
    BuildSilos(**settings).run(Parts(run, nothing, nothing, nothing, nothing))
    return run / "silos"


def test_planted_silos_are_built_once_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    out = build(tmp_path, source="planted", planted={"clients": 2, "entities": 5})
    assert list(silo_folders(out)) == ["client0", "client1"] and "| client0 |        5 |" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="silos"):
        build(tmp_path, source="planted")
    made = (out / "manifest.json").stat().st_mtime_ns
    again = Parts(tmp_path, nothing, nothing, nothing, nothing, resume=True)
    assert BuildSilos(source="planted").run(again) == {"clients": 2.0}
    assert (out / "manifest.json").stat().st_mtime_ns == made
    with pytest.raises(ResumeError, match=r"planted.* insuranceqa"):
        BuildSilos(source="insuranceqa").run(again)


@pytest.mark.parametrize(("settings", "message"), [
    ({"source": "yahoo"}, r"task\.source='yahoo'"),
    ({"source": "newsqa"}, r"task\.newsqa"),
    ({"source": "newsqa", "newsqa": "x.json"}, r"task\.cnn_urls"),
    ({"source": "medquad"}, r"task\.folder"),
    ({"source": "insuranceqa", "topics": "x.tsv"}, r"task\.topics"),
    ({"source": "planted", "planted": {"clints": 3}}, "clints"),
    ({"source": "planted", "planted": {"hubs": -1}}, r"^task\.planted\.hubs=-1 "),
    ({"source": "planted", "planted": {"told": 2, "questions": 3}}, r"^task\.planted: questions=3, told=2"),
])  # fmt: skip
def test_a_source_that_cannot_be_built_is_refused_before_anything_is_read(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BuildSilos(**settings)


def test_a_silo_of_a_log_that_was_divided_by_its_texts_says_so_on_its_cards(tmp_path: Path) -> None:
    write_split(collection(), tmp_path / "split", public_passages=True)
    settings = {"source": "medquad", "folder": tmp_path / "split", "clients": 2, "min_train": 2, "min_test": 1}
    for silo in silo_folders(build(tmp_path / "run", **settings)).values():
        assert any("divided by a hash" in one for one in SiloDataModule(folder=silo).assumptions())
    (tmp_path / "split" / "division.json").unlink()
    for silo in silo_folders(build(tmp_path / "again", **settings)).values():
        assert not SiloDataModule(folder=silo).assumptions()


def test_squad_comes_from_its_json_too(tmp_path: Path) -> None:
    paragraphs = [
        {"context": f"It began in {i}. It ended in {i + 50}.",
         "qas": [{"id": f"q{i}", "question": "When?", "answers": [{"answer_start": 12, "text": str(i)}]}]}
        for i in range(10, 40)
    ]  # fmt: skip
    (tmp_path / "dev-v1.1.json").write_text(json.dumps({"data": [{"title": "Old War", "paragraphs": paragraphs}]}))
    out = build(tmp_path / "run", source="squad", folder=tmp_path / "dev-v1.1.json", clients=1, min_train=5, min_test=1)
    silo = read_silo(silo_folders(out)["Old-War"])
    assert all(silo.sentences[sid].startswith("It began") for query in silo.queries for sid in query.positives)


def test_articles_of_one_topic_are_one_client_and_articles_without_a_topic_are_left_out_and_counted(
    tmp_path: Path,
) -> None:
    articles = [
        {"title": title, "paragraphs": [
            {"context": f"{title} began in {year}.", "qas": [
                {"id": f"{title}{year}", "question": "When?", "answers": [{"answer_start": 0, "text": title}]}]}
            for year in range(1900, 1900 + size)
        ]}
        for title, size in (("War", 30), ("Peace", 10), ("Rhine", 5))
    ]  # fmt: skip
    (tmp_path / "dev.json").write_text(json.dumps({"data": articles}))
    (tmp_path / "topics.tsv").write_text("article\ttopic\nPeace\thistory\nWar\thistory\n")
    settings = {"source": "squad", "folder": tmp_path / "dev.json", "clients": 1, "min_train": 5, "min_test": 1}
    out = build(tmp_path / "run", topics=tmp_path / "topics.tsv", **settings)
    silo = read_silo(silo_folders(out)["history"])
    assert (len(silo.passages), len(silo.queries)) == (40, 40)
    assert not any("Rhine" in sentence for sentence in silo.sentences.values())
    assert json.loads((out / "manifest.json").read_text())["left_out"]["without_topic"] == 5
    for wrong, message in (
        ("article\tsubject\nWar\thistory\n", r"task\.topics=.* line 2 .*topic"),
        ("article\ttopic\nWar\thistory\nWar\twater\n", r"task\.topics=.* line 3 .*War"),
        ("article\ttopic\nElbe\twater\n", r"task\.topics=.* Elbe"),
    ):
        (tmp_path / "topics.tsv").write_text(wrong)
        with pytest.raises(DataError, match=message):
            build(tmp_path / "refused", topics=tmp_path / "topics.tsv", **settings)


# -- questions made of a silo's own sentences


def with_other_questions(silo: Silo) -> Silo:
    """The same silo, with other people's train questions and other answers to them."""
    first = next(iter(silo.sentences))
    others = [SiloQuery(f"other-{i}", f"nothing alike {i}", (first,), "train") for i in range(3)]
    return replace(silo, queries=[*others, *(query for query in silo.queries if query.split != "train")])


def test_every_passage_is_asked_for_in_the_words_of_its_answer_and_no_train_question_has_a_say() -> None:
    silo = planted_silos(SIZE)[0]
    made = pseudo_silo(silo)
    assert made == pseudo_silo(with_other_questions(silo))
    train, others = ([query for query in made.queries if (query.split == "train") == own] for own in (True, False))
    assert len(train) == len({silo.passage_of[query.positives[0]] for query in train}) == len(silo.passages)
    for query in train:
        (answer,) = query.positives
        assert set(query.text.split()) <= set(silo.sentences[answer].lower().split())
    assert others == [query for query in silo.queries if query.split != "train"]
    assert not {query.text for query in train} & {query.text for query in silo.queries if query.split == "train"}
    assert (made.sentences, made.passages) == (silo.sentences, silo.passages)


@pytest.mark.costly
def test_what_trains_on_them_is_the_same_whoever_asked_and_leaves_no_copy(tmp_path: Path) -> None:
    own = PddAs2(stage1=Stage1(warmup_rounds=0, rounds=1, batch_size=4, bm25_n=1, static_n=1, top_k=4, lr=3e-3))

    def reached(system: System, change: Callable[[Silo], Silo]) -> dict[str, dict[str, list[float]]]:
        folder = tmp_path / system / change.__name__
        silos = silo_folders(write_silos(folder / "silos", map(change, planted_silos(SIZE)), facts={}))
        found = trained_alone(system, own, silos, maker(SIZE), folder / "state", split="test")
        assert not (folder / "state" / "data").exists()
        return {name: {metric: [*values] for metric, values in of.items()} for name, of in found.items()}

    trained = reached("pseudo_queries", replace)
    assert trained == reached("pseudo_queries", with_other_questions) != reached("zero_shot", replace)
