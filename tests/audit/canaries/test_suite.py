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
from lit_dpret.audit.canaries.canary import Canary, cut_side
from lit_dpret.audit.canaries.suite import planted_facts
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError


@pytest.fixture
def data(tmp_path: Path) -> PairsDataModule:
    return PairsDataModule(folder=write_log(tmp_path / "log"), sampling="poisson")


def test_the_papers_kinds_have_their_digits_in_the_query_and_a_passage_without_them(data: PairsDataModule) -> None:
    passages = data.public_passages()
    for canary in CanarySuite(seed=0).make(data).canaries:
        assert len(canary.secret) == 10 and canary.secret.isdigit() and canary.secret in canary.candidates
        assert canary.query_with(canary.secret) == f"{canary.query} {canary.secret}" and canary.query
        assert canary.secret not in canary.passage_with(canary.secret)
        if canary.kind == "digits":
            assert canary.passage.isdigit() and canary.passage_id not in passages
        else:
            assert canary.passage == passages[canary.passage_id]


def test_to_the_papers_letter_the_digits_stand_in_the_passage_and_the_first_kind_is_only_digits(
    data: PairsDataModule,
) -> None:
    for canary in CanarySuite(sides=("passage",), seed=0).make(data).canaries:
        assert canary.query_with(canary.secret) == canary.query and canary.secret not in canary.query
        text = canary.passage_with(canary.secret)
        assert text.endswith(canary.secret) and (text == canary.secret) == (canary.kind == "digits")
        assert canary.passage_id not in data.public_passages()


def test_own_and_random_passages_are_the_querys_own_and_another(data: PairsDataModule) -> None:
    queries, qrels = data.evaluation_set("test")
    own = {text: next(iter(qrels[query])) for query, text in queries.items()}
    made = CanarySuite(repetitions=(1,), count=2, queries="test", seed=2).make(data, released=False)
    for canary in made.canaries:
        if canary.kind == "own_passage":
            assert canary.passage_id == own[canary.query]
        if canary.kind == "random_passage":
            assert canary.passage_id != own[canary.query]


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


def test_secrets_are_uniform_among_their_candidates(data: PairsDataModule) -> None:
    places = Counter(
        canary.candidates.index(canary.secret)
        for seed in range(150)
        for canary in CanarySuite(candidates=4, repetitions=(1,), seed=seed).make(data).canaries
    )
    assert sum(places.values()) == 450
    assert all(abs(count - 112.5) < 4 * (450 * 0.25 * 0.75) ** 0.5 for count in places.values()) and len(places) == 4


def test_coins_are_fair_and_every_canary_has_candidates_and_a_query_of_its_own(data: PairsDataModule) -> None:
    made = CanarySuite(kinds=("own_passage",), repetitions=(1,), count=20, include=0.5, seed=1).make(data).canaries
    included = sum(
        canary.included
        for seed in range(30)
        for canary in CanarySuite(
            kinds=("own_passage",), repetitions=(1,), count=20, include=0.5, candidates=2, seed=seed
        )
        .make(data)
        .canaries
    )
    assert abs(included - 300) < 4 * 150**0.5
    assert len({canary.query for canary in made}) == 20
    assert len({secret for canary in made for secret in canary.candidates}) == 20 * 100


def test_one_more_kind_changes_nothing_of_the_secrets_of_the_others(data: PairsDataModule) -> None:
    few = CanarySuite(kinds=("digits",), seed=9).make(data).canaries
    more = CanarySuite(kinds=("digits", "echo"), seed=9).make(data).canaries
    assert {one.name: one.secret for one in few}.items() <= {one.name: one.secret for one in more}.items()


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
        CanarySuite(**settings)


def test_too_few_queries_and_unknown_sources_are_refused(data: PairsDataModule, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"8 queries for 300 canaries"):
        CanarySuite(count=100, repetitions=(1,), queries="test").make(data, released=False)
    with pytest.raises(ConfigurationError, match="neither pseudo"):
        CanarySuite(queries=str(tmp_path / "none.txt")).make(data)
    (tmp_path / "own.txt").write_text("\n".join(f"how do tides {i}" for i in range(12)), encoding="utf-8")
    made = CanarySuite(queries=str(tmp_path / "own.txt"), seed=0).make(data)
    assert all(canary.query.startswith("how do tides") for canary in made.canaries)
    assert "as declared" in planted_facts(made)["words"]
    assert "words" not in planted_facts(CanarySuite(seed=0).make(data))


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


@pytest.mark.parametrize(
    ("name", "line"),
    [("own.txt", "7\thow do tides turn"), ("own.txt", '{"text": "how do tides turn"}'), ("own.tsv", "7\tid and text")],
)
def test_a_file_of_another_format_than_its_name_says_is_refused(
    name: str, line: str, data: PairsDataModule, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(f"{line}\n" * 12, encoding="utf-8")
    with pytest.raises(DataError, match=rf"^canaries\.queries.*{name}"):
        CanarySuite(queries=str(tmp_path / name)).make(data)


@pytest.mark.parametrize(
    ("name", "around"), [("own.txt", "{}"), ("own.tsv", "q25 {} (asked twice)"), ("own.jsonl", "- {}!")]
)
def test_a_file_that_holds_a_train_query_is_refused(
    name: str, around: str, data: PairsDataModule, tmp_path: Path
) -> None:
    """Its owner could not take the copy back, so two units would be theirs and the claim is of one."""
    log = data.collection
    log.queries[next(iter(log.qrels["train"]))] = "why is my left knee so sore"
    path = write_queries(tmp_path / name, [*OTHERS, around.format("Why is my LEFT knee, so sore?")])
    for released in (True, False):
        with pytest.raises(ConfigurationError, match=r"canaries\.queries") as found:
            CanarySuite(queries=str(path), seed=0).make(data, released=released)
        assert found.value.trap == "T25" and "sore" not in str(found.value)


def test_words_of_a_short_query_stand_in_other_queries_by_chance(data: PairsDataModule, tmp_path: Path) -> None:
    log = data.collection
    log.queries[next(iter(log.qrels["train"]))] = "turn at noon"
    path = write_queries(tmp_path / "own.txt", OTHERS)
    CanarySuite(queries=str(path), seed=0).make(data)
    with pytest.raises(ConfigurationError, match=r"canaries\.queries"):
        CanarySuite(queries=str(write_queries(path, [*OTHERS, "Turn at noon!"])), seed=0).make(data)


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


def test_data_without_a_public_list_of_passages_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("query\tpassage\na\tb\nc\td\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="public list of passages"):
        CanarySuite().make(PairsDataModule(pairs=tmp_path / "pairs.tsv"))


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


def words_of(text: str) -> int:
    return len(text.split())


def test_a_query_that_leaves_no_room_for_the_secret_is_passed_over_for_another(
    data: PairsDataModule, suite: CanarySuite
) -> None:
    free = suite.make(data).canaries
    assert max(words_of(one.query) for one in free) == 7
    read = suite.make(data, Words(7)).canaries
    assert [one.name for one in read] == [one.name for one in free]
    assert all(words_of(one.query_with(one.secret)) <= 7 for one in read)
    assert len({one.query for one in read}) == len(read)
    assert suite.make(data, Words(8)).canaries == free, "what fits is taken as it comes"


def test_the_secret_and_the_coin_are_the_same_whichever_query_was_taken(
    data: PairsDataModule, suite: CanarySuite
) -> None:
    free, read = suite.make(data).canaries, suite.make(data, Words(7)).canaries
    assert [one.query for one in read] != [one.query for one in free]
    assert [(one.candidates, one.secret, one.included) for one in read] == [
        (one.candidates, one.secret, one.included) for one in free
    ]


def test_every_candidate_has_to_fit_so_that_the_one_drawn_has_no_say() -> None:
    """Among two candidates of different lengths the longer one decides, drawn or not."""
    one = Canary(
        name="a", kind="echo", side="query", query="x", passage_id="p", passage="", candidates=("y", "y z"), secret="y"
    )
    assert cut_side(Words(2), one) == cut_side(Words(2), replace(one, secret="y z")) == "query"
    assert cut_side(Words(3), one) is None


def test_too_few_queries_with_room_are_refused_with_their_number_and_the_knobs(
    data: PairsDataModule, suite: CanarySuite
) -> None:
    with pytest.raises(ConfigurationError, match=r"^0 of the 40 queries .* 8 are needed: .*max_query_length.*Raise it"):
        suite.make(data, Words(3))


def test_where_no_query_would_help_the_first_canary_is_refused_by_name(
    data: PairsDataModule, suite: CanarySuite
) -> None:
    class Counted(Words):
        asked = 0

        def token_ids(self, *words: Any, **how: Any) -> list[list[int]]:
            self.asked += 1
            return super().token_ids(*words, **how)

    with pytest.raises(ConfigurationError, match=r"-0: its query is longer than model\.max_query_length=0"):
        suite.make(data, reader := Counted(0))
    assert reader.asked < 10, "nor were all others tried"
    echo = replace(suite, kinds=("echo",), suffix_words=6)
    with pytest.raises(ConfigurationError, match=r"max_query_length=5.*lower canaries\.suffix_words"):
        echo.make(data, Words(5))
    short = type(
        "Short",
        (Words,),
        {
            "token_ids": lambda self, texts, side, *, whole=False: [
                [1] * len(text.split()) if whole or side == "query" else [1] for text in texts
            ]
        },
    )(9)
    with pytest.raises(ConfigurationError, match=r"-0: its passage is longer than model\.max_passage_length=1"):
        replace(suite, sides=("passage",)).make(data, short)


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
