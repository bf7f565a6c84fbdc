"""A silo with questions made of its own sentences in the place of its people's: what it has without any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lit_dpret.datamodules.silo_folder import Silo, SiloQuery
from lit_dpret.synthesis.pseudo_queries import pseudo_queries
from lit_dpret.synthesis.textsim.words import words

TRAIN = "train"


def pseudo_silo(silo: Silo) -> Silo:
    """The silo with one pseudo-query a passage for its train queries; dev and test queries stay, to measure with.

    A pseudo-query is answered by the sentence of its passage that has most of its words, which it was made of, and by
    no other: the sentences beside it say other things.

    Guarantees:
        - Given the sentences, no train query has a say in what is trained on: with others, or other answers to them,
          the result is the same. Where a collection was chosen by its queries, that choice remains.
    """
    of_passage: dict[str, dict[str, str]] = {}
    for sid, text in silo.sentences.items():
        of_passage.setdefault(silo.passage_of[sid], {})[sid] = text
    made = pseudo_queries({pid: "\n".join(sentences.values()) for pid, sentences in of_passage.items()})
    asked = [
        SiloQuery(f"pseudo-{one.passage_id}", one.text, (_made_of(one.text, of_passage[one.passage_id]),), TRAIN)
        for one in made
        if one.text
    ]
    return replace(silo, queries=[*asked, *(query for query in silo.queries if query.split != TRAIN)])


def _made_of(query: str, sentences: Mapping[str, str]) -> str:
    asked = set(words(query))
    return max(sentences, key=lambda sid: len(asked.intersection(words(sentences[sid]))))
