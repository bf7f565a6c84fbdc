"""What canaries are made of, and that their secrets are drawn by coins that nothing else uses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import write_log

from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.audit.canaries.canary import cut_side
from lit_dpret.audit.canaries.suite import planted_facts
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError


@pytest.fixture
def data(tmp_path: Path) -> PairsDataModule:
    return PairsDataModule(folder=write_log(tmp_path / "log"), sampling="poisson")


def test_the_papers_kinds_have_their_digits_in_the_query_or_to_the_letter_in_the_passage(
    data: PairsDataModule,
) -> None:
    passages = data.public_passages()
    for canary in CanarySuite(sides=("query", "passage"), seed=0).make(data).canaries:
        query, passage = canary.query_with(canary.secret), canary.passage_with(canary.secret)
        assert (len(canary.secret), canary.secret.isdigit()) == (10, True)
        assert canary.secret in canary.candidates
        assert canary.query
        assert canary.secret not in canary.query
        if canary.side == "passage":
            assert query == canary.query
            assert passage.endswith(canary.secret)
            assert (passage == canary.secret) == (canary.kind == "digits")
            assert canary.passage_id not in passages
            continue
        assert query == f"{canary.query} {canary.secret}"
        assert canary.secret not in passage
        if canary.kind == "digits":
            assert canary.passage.isdigit()
            assert canary.passage_id not in passages
        else:
            assert canary.passage == passages[canary.passage_id]
    queries, qrels = data.evaluation_set("test")
    own = {text: next(iter(qrels[query])) for query, text in queries.items()}
    kinds: Any = ("own_passage", "random_passage")
    made = CanarySuite(kinds=kinds, repetitions=(1,), count=2, queries="test", seed=2).make(data, released=False)
    for canary in made.canaries:
        assert (canary.passage_id == own[canary.query]) == (canary.kind == "own_passage")


def test_no_training_query_is_read(data: PairsDataModule) -> None:
    """Made with the train split taken away, the canaries are the same."""
    train = {data.collection.queries[query] for query in data.collection.qrels["train"]}
    suite = CanarySuite(kinds=("digits", "own_passage", "random_passage", "echo", "new_token"), seed=4)
    made = suite.make(data)

    class PublicSide:
        def public_passages(self) -> Any:
            return data.public_passages()

        def evaluation_set(self, split: str = "test") -> Any:
            raise AssertionError("no queries are needed")

    assert suite.make(PublicSide()).canaries == made.canaries
    assert not {canary.query for canary in made.canaries} & train
    with pytest.raises(ConfigurationError, match="would not cover it"):
        CanarySuite(queries="train").make(data)


def test_secrets_are_uniform_among_their_candidates_and_independent_of_other_kinds(data: PairsDataModule) -> None:
    places = Counter(
        canary.candidates.index(canary.secret)
        for seed in range(150)
        for canary in CanarySuite(candidates=4, repetitions=(1,), seed=seed).make(data).canaries
    )
    assert sum(places.values()) == 450
    assert len(places) == 4
    assert all(abs(count - 112.5) < 4 * (450 * 0.25 * 0.75) ** 0.5 for count in places.values())
    few = CanarySuite(kinds=("digits",), seed=9).make(data).canaries
    more = CanarySuite(kinds=("digits", "echo"), seed=9).make(data).canaries
    assert {one.name: one.secret for one in few}.items() <= {one.name: one.secret for one in more}.items()


def test_coins_are_fair_and_every_canary_has_candidates_and_a_query_of_its_own(data: PairsDataModule) -> None:
    suite = CanarySuite(kinds=("own_passage",), repetitions=(1,), count=20, include=0.5, candidates=2)
    included = sum(c.included for seed in range(30) for c in replace(suite, seed=seed).make(data).canaries)
    assert abs(included - 300) < 4 * 150**0.5
    made = replace(suite, candidates=100, seed=1).make(data).canaries
    assert len({canary.query for canary in made}) == 20
    assert len({secret for canary in made for secret in canary.candidates}) == 20 * 100


def test_echo_and_new_token_canaries_have_their_secret_in_the_query(data: PairsDataModule) -> None:
    made = CanarySuite(kinds=("echo", "new_token"), sides=("query", "passage"), seed=3).make(data).canaries
    assert {canary.side for canary in made} == {"query"} and len(made) == 6
    words = {word for text in data.public_passages().values() for word in text.lower().split()}
    for canary in made:
        assert len(set(canary.candidates)) == 100
        if canary.kind == "echo":
            assert all(set(secret.split()) <= words and len(secret.split()) == 5 for secret in canary.candidates)
        else:
            assert all(secret.count("<extra_id_") == 2 for secret in canary.candidates)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kinds": ()}, "kinds"), ({"kinds": ("digit",)}, "kinds"), ({"sides": ("query", "query")}, "sides"),
        ({"repetitions": (0,)}, "repetitions"), ({"count": 0}, "count=0"), ({"candidates": 1}, "candidates=1"),
        ({"include": 0.3}, "fair coins"), ({"kinds": ("new_token",), "new_tokens": 5}, "25 pairs"),
        ({"kinds": ("echo",), "sides": ("passage",)}, "no canary"), ({"seed": "abc"}, "seed='abc'"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_canaries_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        CanarySuite(**settings).check()


def test_too_few_queries_and_unknown_sources_are_refused(data: PairsDataModule, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"8 queries for 300 canaries"):
        CanarySuite(count=100, repetitions=(1,), queries="test").make(data, released=False)
    with pytest.raises(ConfigurationError, match=r"canaries\.queries"):
        CanarySuite(queries=str(tmp_path / "none.txt")).make(data)
    (tmp_path / "pairs.tsv").write_text("query\tpassage\na\tb\nc\td\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="public list of passages"):
        CanarySuite().make(PairsDataModule(pairs=tmp_path / "pairs.tsv"))


OTHERS = [f"how do tides {i} turn at noon" for i in range(12)]


def write_queries(path: Path, texts: Sequence[str]) -> Path:
    """A file of queries in the format of its name."""
    lines = list(texts)
    if path.suffix == ".tsv":
        lines = ["_id\ttext", *(f"{number}\t{text}" for number, text in enumerate(texts))]
    if path.suffix == ".jsonl":
        lines = [json.dumps({"_id": str(number), "text": text}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["own.txt", "own.tsv", "own.jsonl"])
def test_a_file_of_queries_is_read_by_the_format_of_its_name(name: str, data: PairsDataModule, tmp_path: Path) -> None:
    path = write_queries(tmp_path / name, OTHERS)
    made = CanarySuite(queries=str(path), count=4, repetitions=(1,), seed=0).make(data)
    assert {canary.query for canary in made.canaries} == set(OTHERS)
    assert "as declared" in planted_facts(made)["words"]
    assert "words" not in planted_facts(CanarySuite(seed=0).make(data))
    wrong = {"own.tsv": ["7\tid and text"], "own.txt": ["7\thow do tides turn", '{"text": "how do tides turn"}']}
    for line in wrong.get(name, ["how do tides turn"]):
        path.write_text(f"{line}\n" * 12, encoding="utf-8")
        with pytest.raises(DataError, match=rf"^canaries\.queries.*{name}"):
            CanarySuite(queries=str(path)).make(data)


@pytest.mark.parametrize(
    ("name", "query", "line"),
    [
        ("own.txt", "why is my left knee so sore", "Why is my LEFT knee, so sore?"),
        ("own.tsv", "why is my left knee so sore", "q25 Why is my LEFT knee, so sore? (asked twice)"),
        ("own.jsonl", "why is my left knee so sore", "- Why is my LEFT knee, so sore?!"),
        ("own.txt", "turn at noon", "Turn at noon!"),  # words that stand within other queries by chance
    ],
)
def test_a_file_that_holds_a_train_query_is_refused(
    name: str, query: str, line: str, data: PairsDataModule, tmp_path: Path
) -> None:
    """Its owner could not take the copy back, so two units would be theirs and the claim is of one."""
    log = data.collection
    log.queries[next(iter(log.qrels["train"]))] = query
    CanarySuite(queries=str(write_queries(tmp_path / name, OTHERS)), seed=0).make(data)
    path = write_queries(tmp_path / name, [*OTHERS, line])
    for released in (True, False):
        with pytest.raises(ConfigurationError, match=r"canaries\.queries") as found:
            CanarySuite(queries=str(path), seed=0).make(data, released=released)
        assert found.value.trap == "T25"
        assert query.split()[-1] not in str(found.value)


def test_queries_of_other_splits_make_canaries_only_of_a_model_that_is_not_released(
    data: PairsDataModule, tmp_path: Path
) -> None:
    log = data.collection
    log.queries[next(iter(log.qrels["test"]))] = "why is my left knee so sore"
    path = str(write_queries(tmp_path / "own.txt", [*OTHERS, "why is my left knee so sore"]))
    for source in (path, "test"):
        suite = CanarySuite(kinds=("digits",), repetitions=(1,), queries=source, seed=0)
        suite.make(data, released=False)
        with pytest.raises(ConfigurationError, match=r"canaries\.queries"):
            suite.make(data)


# -- words that leave a model no room for a secret


class Words:
    """Reads the first ``longest`` words of a query."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
        last = None if whole or side == "passage" else self.longest
        return [[int.from_bytes(word.encode(), "big") for word in text.split()][:last] for text in texts]


@pytest.fixture
def suite(tmp_path: Path) -> CanarySuite:
    """Eight canaries of forty public queries, of three to seven words in turn."""
    lines = [" ".join(f"word{word}" for word in range(number, number + 3 + number % 5)) for number in range(40)]
    path = tmp_path / "public.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return CanarySuite(
        kinds=("random_passage",), repetitions=(1,), count=8, candidates=2, include=0.5, seed=3, queries=str(path)
    )


def test_a_query_that_leaves_no_room_for_the_secret_is_passed_over_for_another_and_changes_no_coin(
    data: PairsDataModule, suite: CanarySuite
) -> None:
    free, read = suite.make(data).canaries, suite.make(data, Words(7)).canaries
    assert max(len(one.query.split()) for one in free) == 7
    assert all(len(one.query_with(one.secret).split()) <= 7 for one in read)
    assert len({one.query for one in read}) == len(read)
    assert [one.query for one in read] != [one.query for one in free]
    same = ("name", "candidates", "secret", "included")
    assert [[getattr(one, each) for each in same] for one in read] == [
        [getattr(one, each) for each in same] for one in free
    ]
    assert suite.make(data, Words(8)).canaries == free, "what fits is taken as it comes"
    with pytest.raises(ConfigurationError, match=r"^0 of the 40 queries .* 8 are needed: .*max_query_length"):
        suite.make(data, Words(3))
    # Among two candidates of different lengths the longer one decides, drawn or not.
    one = replace(free[0], kind="echo", query="x", candidates=("y", "y z"), secret="y")
    assert cut_side(Words(2), one) == cut_side(Words(2), replace(one, secret="y z")) == "query"
    assert cut_side(Words(3), one) is None


def test_where_no_query_would_help_the_first_canary_is_refused_by_name(
    data: PairsDataModule, suite: CanarySuite
) -> None:
    class Counted(Words):
        asked = 0

        def token_ids(self, *words: Any, **how: Any) -> list[list[int]]:
            self.asked += 1
            return super().token_ids(*words, **how)

    class ShortPassages(Words):
        def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
            return [[1] * len(text.split()) if whole or side == "query" else [1] for text in texts]

    with pytest.raises(ConfigurationError, match=r"-0: .*model\.max_query_length=0"):
        suite.make(data, reader := Counted(0))
    assert reader.asked < 10, "nor were all others tried"
    with pytest.raises(ConfigurationError, match=r"max_query_length=5.*canaries\.suffix_words"):
        replace(suite, kinds=("echo",), suffix_words=6).make(data, Words(5))
    with pytest.raises(ConfigurationError, match=r"-0: .*model\.max_passage_length=1"):
        replace(suite, sides=("passage",)).make(data, ShortPassages(9))


def test_with_own_passage_another_query_brings_another_passage(tmp_path: Path) -> None:
    """Passages of which some are in words of several tokens: those leave no room for a secret."""
    folder = write_log(tmp_path / "log", words=[f"{'long' if i % 5 == 0 else 'w'}{i}" for i in range(24)])
    data = PairsDataModule(folder=folder, sampling="poisson")

    class Pieces(Words):
        def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
            pieces = [[*range(sum(9 if word.startswith("long") else 1 for word in text.split()))] for text in texts]
            read = pieces if whole or side == "query" else [each[: self.longest] for each in pieces]
            return [[*each, hash(text)] for each, text in zip(read, texts, strict=True)]

    own = CanarySuite(kinds=("own_passage",), sides=("passage",), repetitions=(1,), count=2, candidates=2, seed=0)
    reader = Pieces(6)
    assert any(cut_side(reader, one) == "passage" for one in replace(own, count=8).make(data).canaries)
    assert all(cut_side(reader, one) is None for one in own.make(data, reader).canaries)
    with pytest.raises(ConfigurationError, match="its passage is longer than"):
        replace(own, kinds=("random_passage",), count=8).make(data, reader)
