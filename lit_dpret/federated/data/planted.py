"""Silos of invented words with a known structure, for tests and experiments; not private.

A question names an entity, and an attribute in the *dialect* of its client: at other clients the same word means
another attribute. So no shared query encoder is right for every client, but a personal one can be (stage 2 of PDD-AS2).
*Hubs* name many attributes and are near every question. *Near duplicates* repeat a fact in almost the same words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_dpret.datamodules.silo_folder import Silo, SiloQuery
from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_number, require_switch, require_whole


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Sizes of the planted silos."""

    clients: int = 3  # how many
    entities: int = 24  # of each client
    attributes: int = 6  # that an entity can have; there are as many dialect words
    told: int = 4  # attributes that a passage states, one sentence each
    questions: int = 3  # attributes of each entity that are asked about
    phrasings: int = 1  # how often each is asked, in different words
    hubs: int = 4  # hub sentences of each client
    # Further sentences that state the same in almost the same words, for each attribute. Test and dev questions are
    # judged for all of them. Train questions are judged only for the first, as real labels are: the others are false
    # negatives that a search of the client's own collection finds.
    duplicates: int = 0
    # All clients describe the same entities, each with different attributes. What is near a question is then in other
    # collections rather than in its own, as fed-negatives suppose.
    common: bool = False
    shared: float = 0.0  # the share of dialect words that mean the same at every client
    skew: float = 1.0  # the last client has ``1 / skew`` of the first one's entities; the others are in between
    seed: int = 0  # of everything

    def check(self, where: str = "planted") -> Planted:
        """Refuse invalid sizes; ``where`` comes before each name in the message."""
        require_whole(where, self, 1, "clients", "entities", "attributes", "told", "questions", "phrasings")
        require_whole(where, self, 0, "hubs", "duplicates", "seed")
        require_switch(where, self, "common")
        require_number(where, self, "shared", zero=True)
        require_number(where, self, "skew")
        if not self.questions <= self.told <= self.attributes:
            raise ConfigurationError(
                f"{where}: questions={self.questions}, told={self.told} and attributes={self.attributes} must not "
                "decrease in this order: a question is about a fact in a passage, and a fact is one of the attributes."
            )
        if self.common and self.clients * self.told > self.attributes:
            raise ConfigurationError(
                f"{where}.common=true divides attributes={self.attributes} of an entity among "
                f"clients={self.clients}, which leaves less than told={self.told} for each. Raise attributes, or lower "
                "told."
            )
        if not 0 <= self.shared <= 1 or not self.skew >= 1:
            raise ConfigurationError(f"{where}.shared={self.shared} must be in [0, 1] and skew={self.skew} at least 1.")
        return self


_FILLERS = tuple(f"filler{i}" for i in range(12))
_VALUES = tuple(f"value{i}" for i in range(16))


def planted_words(size: Planted) -> list[str]:
    """Return every word that can occur, in order: a public vocabulary for a word tokenizer."""
    entities = list(dict.fromkeys(_entity(size, c, e) for c in range(size.clients) for e in range(size.entities)))
    kinds = [f"{kind}{i}" for kind in ("attribute", "dialect") for i in range(size.attributes)]
    return [*_FILLERS, *_VALUES, *kinds, *entities]


def planted_silos(size: Planted) -> list[Silo]:
    """Build the silos, each with train, dev and test questions about every entity's attributes.

    Guarantees:
        - The same ``size`` gives the same silos on every machine.
        - A question is answered by the sentence that states its attribute of its entity, and by its near duplicates.
    """
    size.check()
    return [_silo(size, number) for number in range(size.clients)]


def meaning(size: Planted, client: int) -> list[int]:
    """Return the attribute that each dialect word means at one client."""
    fixed = round(size.shared * size.attributes)
    # A rotation by the client's number: among at most `attributes - fixed` clients no two agree on any of these words.
    free = list(range(fixed, size.attributes))
    turned = [free[(place + client) % len(free)] for place in range(len(free))] if free else []
    return [*range(fixed), *turned]


def _silo(size: Planted, client: int) -> Silo:
    draw = np.random.default_rng((size.seed, client))
    share = 1.0 if size.clients == 1 else client / (size.clients - 1)
    count = max(2, round(size.entities / size.skew**share))
    word_for = {attribute: word for word, attribute in enumerate(meaning(size, client))}
    passages: dict[str, str] = {}
    sentences: dict[str, str] = {}
    passage_of: dict[str, str] = {}
    queries: list[SiloQuery] = []

    def add(pid: str, text: str) -> str:
        sid = f"{pid}-s{sum(owner == pid for owner in passage_of.values())}"
        sentences[sid], passage_of[sid] = text, pid
        return sid

    for entity in range(count):
        pid, name = f"c{client}p{entity}", _entity(size, client, entity)
        passages[pid] = name
        told = _told(size, client, entity)
        answers: dict[int, list[str]] = {}
        for one in told:
            fact = f"{name} attribute{one} {_some(draw, _VALUES, 1)}"
            answers[one] = [add(pid, f"{fact} {_some(draw, _FILLERS, 2)}") for _ in range(1 + size.duplicates)]
        add(pid, f"{name} {_some(draw, _FILLERS, 3)}")
        asked = draw.permutation(told)[: size.questions].tolist()
        for number, one in enumerate(asked):
            split = _split(size, client, entity, number)
            for phrasing in range(size.phrasings):
                text = f"{_some(draw, _FILLERS, 1 + phrasing % 2)} dialect{word_for[one]} {name}"
                qid = f"c{client}q{entity}-{number}-{phrasing}"
                judged = answers[one][:1] if split == "train" else answers[one]
                queries.append(SiloQuery(qid, text, tuple(judged), split))
    for hub in range(size.hubs):
        pid = f"c{client}p{int(draw.integers(count))}"
        named = " ".join(f"attribute{i}" for i in draw.permutation(size.attributes)[: max(1, size.attributes // 2)])
        add(pid, f"{named} {_FILLERS[hub % len(_FILLERS)]}")
    return Silo(f"client{client}", passages, sentences, passage_of, queries)


def _split(size: Planted, client: int, entity: int, number: int) -> str:
    """Hold out whole entities if they are common, different ones at each client; otherwise one question of each."""
    if size.common:
        place = (entity + client) % 8
        return "test" if place in (0, 4) else "dev" if place == 5 else "train"
    return "test" if number == 0 else "dev" if number == 1 and entity % 4 == 0 else "train"


def _entity(size: Planted, client: int, entity: int) -> str:
    return f"entity{entity}" if size.common else f"entity{client}x{entity}"


def _told(size: Planted, client: int, entity: int) -> list[int]:
    """Draw the attributes that a client's passage states; with common entities no two clients state the same one."""
    key, first = (0, client * size.told) if size.common else (client + 1, 0)
    order: list[int] = np.random.default_rng((size.seed, key, entity)).permutation(size.attributes).tolist()
    return order[first : first + size.told]


def _some(draw: np.random.Generator, words: tuple[str, ...], count: int) -> str:
    return " ".join(words[i] for i in draw.integers(len(words), size=count))
