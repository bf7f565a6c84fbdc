"""Questions made of a silo's own sentences, and what trains on them: no train query has a say in either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_silos import SIZE, maker

from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, silo_folders, write_silos
from lit_dpret.federated.data import planted_silos, pseudo_silo
from lit_dpret.federated.federation import PerClient
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.systems import trained_alone


def with_other_questions(silo: Silo) -> Silo:
    """The same silo, with other people's train questions and other answers to them."""
    first = next(iter(silo.sentences))
    others = [SiloQuery(f"other-{i}", f"nothing alike {i}", (first,), "train") for i in range(3)]
    return replace(silo, queries=[*others, *(query for query in silo.queries if query.split != "train")])


@pytest.fixture
def silo() -> Silo:
    return planted_silos(SIZE)[0]


def test_every_passage_is_asked_for_in_the_words_of_the_sentence_that_answers(silo: Silo) -> None:
    made = [query for query in pseudo_silo(silo).queries if query.split == "train"]
    assert len(made) == len({silo.passage_of[query.positives[0]] for query in made}) == len(silo.passages)
    for query in made:
        (answer,) = query.positives
        assert set(query.text.split()) <= set(silo.sentences[answer].lower().split())


def test_no_train_question_has_a_say_and_the_others_stay_to_measure_with(silo: Silo) -> None:
    made = pseudo_silo(silo)
    assert made == pseudo_silo(with_other_questions(silo))
    assert [query for query in made.queries if query.split != "train"] == [
        query for query in silo.queries if query.split != "train"
    ]
    assert not {query.text for query in made.queries if query.split == "train"} & {
        query.text for query in silo.queries if query.split == "train"
    }
    assert (made.sentences, made.passages) == (silo.sentences, silo.passages)


def listed(found: PerClient) -> dict[str, dict[str, list[float]]]:
    return {name: {metric: [*values] for metric, values in of.items()} for name, of in found.items()}


@pytest.mark.slow
def test_what_trains_on_them_learns_something_and_the_same_whoever_asked(tmp_path: Path) -> None:
    own = PddAs2(stage1=Stage1(warmup_rounds=0, rounds=1, batch_size=4, bm25_n=1, static_n=1, top_k=4, lr=3e-3))
    found, start = {}, {}
    for name, change in (("ours", lambda silo: silo), ("others", with_other_questions)):
        folders = silo_folders(write_silos(tmp_path / name, map(change, planted_silos(SIZE)), facts={}))
        state = tmp_path / f"{name}-state"
        found[name] = listed(trained_alone("pseudo_queries", own, folders, maker(), state, split="test"))
        start[name] = listed(
            trained_alone("zero_shot", own, folders, maker(), tmp_path / f"{name}-start", split="test")
        )
        assert not (state / "data").exists(), "the copy of the collection stays"
    assert found["ours"] == found["others"] and start["ours"] == start["others"] != found["ours"]
