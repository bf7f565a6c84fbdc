"""Words that leave a model no room for a secret are passed over, and no secret or coin has a say in which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import write_log

from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.audit.canaries.canary import Canary, cut_side
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError


class Words:
    """Reads the first ``longest`` words of a query."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]]:
        last = None if whole or side == "passage" else self.longest
        return [[int.from_bytes(word.encode(), "big") for word in text.split()][:last] for text in texts]


@pytest.fixture
def data(tmp_path: Path) -> PairsDataModule:
    return PairsDataModule(folder=write_log(tmp_path / "log"), sampling="poisson")


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
