"""Questions made of a silo's own sentences, and what trains on them: no train query has a say in either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_silos import SIZE, maker

from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, silo_folders, write_silos
from lit_dpret.federated.data import planted_silos, pseudo_silo
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.systems import System, trained_alone


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


def test_what_trains_on_them_is_the_same_whoever_asked_and_leaves_no_copy(tmp_path: Path) -> None:
    own = PddAs2(stage1=Stage1(warmup_rounds=0, rounds=1, batch_size=4, bm25_n=1, static_n=1, top_k=4, lr=3e-3))

    def reached(system: System, change: Callable[[Silo], Silo]) -> dict[str, dict[str, list[float]]]:
        folder = tmp_path / system / change.__name__
        silos = silo_folders(write_silos(folder / "silos", map(change, planted_silos(SIZE)), facts={}))
        found = trained_alone(system, own, silos, maker(), folder / "state", split="test")
        assert not (folder / "state" / "data").exists()
        return {name: {metric: [*values] for metric, values in of.items()} for name, of in found.items()}

    trained = reached("pseudo_queries", replace)
    assert trained == reached("pseudo_queries", with_other_questions) != reached("zero_shot", replace)
