"""Load released artefacts, the only permitted inputs of computations without privacy cost.

A function of released artefacts and public data is post-processing (Dwork and Roth 2014, proposition 2.1). So the
input of a filter has a type of its own, `ReleasedQueries`; private queries are refused. A scoring model that was
trained on private records is free only if the queries were generated from it, or it was derived from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lit_dpret.cards.card import CARD_NAME, read_card
from lit_dpret.cards.file import card_above, card_names, check_artefact, check_dataset_card, names_behind
from lit_dpret.cards.provenance import assumption_of, plain_assumption
from lit_dpret.cards.start import traces_of_training
from lit_dpret.datamodules.layouts import CorpusSettings, folder_parts, open_corpus
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.synthesis.dataset_folder import ReleasedQuery

Provenance = Literal["card", "declared public"]

_CORPUS = CorpusSettings(knob="task.data", empty_knob=None)
_ID, _TEXT = ("_id", "id"), ("text",)
_QUERY_ID, _PASSAGE_ID = ("query-id", "query_id"), ("corpus-id", "corpus_id", "passage_id")


@dataclass(frozen=True, kw_only=True)
class ReleasedQueries:
    """Released queries, with the passages that they were written for.

    Use `load_released` to build it. Calling the constructor directly declares that the queries are public or carry a
    claim.
    """

    queries: tuple[ReleasedQuery, ...]
    passages: Mapping[str, str]  # text by passage id; public, and includes at least the passages of the queries
    provenance: Provenance  # ``card``: a privacy card states their guarantee; or ``declared public``
    # SHA-256 of the privacy cards of the data set and of everything that it was derived from.
    ancestors: frozenset[str] = frozenset()
    folder: Path | None = None
    claim: Path | None = None  # folder of the card that covers them, if it is not ``folder``

    def __len__(self) -> int:
        return len(self.queries)

    def __iter__(self) -> Iterator[ReleasedQuery]:
        return iter(self.queries)

    def only(self, kept: Sequence[bool]) -> ReleasedQueries:
        """Return the queries for which ``kept`` is true, in order; the passages stay."""
        return replace(self, queries=tuple(q for q, keep in zip(self.queries, kept, strict=True) if keep))

    def under(self, claim: Path | None) -> ReleasedQueries:
        """Put the queries under another card, which covers them and the other inputs to their selection."""
        if claim is None:
            return self
        card = read_card(claim)
        names = names_behind(claim / CARD_NAME, card)
        return replace(self, claim=claim, ancestors=self.ancestors | names)

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return the texts of the queries, and of each query's passage."""
        return [query.text for query in self], [self.passages[query.passage_id] for query in self]


def require_released(value: object, what: str) -> ReleasedQueries:
    """Return ``value`` if it is `ReleasedQueries`; refuse it otherwise."""
    if isinstance(value, ReleasedQueries):
        return value
    raise PrivateDataError(
        f"{what} takes ReleasedQueries, not {type(value).__name__}: its result would not be post-processing, and no "
        "claim would cover it. Load a folder of synthetic queries with load_released."
    )


def require_of_its_folder(released: ReleasedQueries) -> None:
    """Refuse queries with a card that are not from the card's folder."""
    if released.provenance != "card" or released.folder is None:
        return
    check_dataset_card(released.folder / CARD_NAME)
    parts = folder_parts(released.folder, needs_corpus=False)
    sources = _sources(parts["qrels"]["train"])
    known = {name: (text, sources.get(name)) for _, name, text, _ in _queries(parts["queries"])}
    own = {} if parts["corpus"] is None else open_corpus(parts["corpus"], _CORPUS).texts
    for number, query in enumerate(released):
        text = released.passages.get(query.passage_id)
        if known.get(query.query_id) != (query.text, query.passage_id) or own.get(query.passage_id, text) != text:
            raise PrivateDataError(
                f"Query number {number} to be written is not in {released.folder} with its passage, so the privacy "
                "card there does not cover it. Write what load_released and its `only` returned."
            )


def load_released(
    folder: str | Path, *, corpus: str | Path | None = None, declared_public: bool = False, knob: str = "task.data"
) -> ReleasedQueries:
    """Read a folder of synthetic queries (``queries.*``, ``qrels/train.*``, ``corpus.*``) with its claim.

    Args:
        folder: The output of ``task=synthesize``, or another folder in BEIR's layout.
        corpus: All passages, to search more than the folder's own.
        declared_public: Accept a folder without a privacy card: the user declares that nothing private went into it.
        knob: The setting of ``folder`` that errors name.

    Raises:
        DataError: The folder has no card and was not declared public, its files do not match its card, it is
            malformed, one of its queries has more than one passage, or ``corpus`` contradicts it.
    """
    place = Path(folder)
    parts = folder_parts(str(place), corpus=corpus, knob=knob)
    if "train" not in parts["qrels"]:
        raise DataError(
            f"{place} has no qrels/train.tsv, so no query has a passage. Give a folder that task=synthesize wrote."
        )
    if (place / CARD_NAME).is_file():
        card = read_card(place)
        check_dataset_card(place / CARD_NAME)
        ancestors = names_behind(place / CARD_NAME, card)
    elif declared_public:
        ancestors = set()
    else:
        raise DataError(
            f"{place} holds no {CARD_NAME}, so the claim of its queries is unknown. Use a folder from task=synthesize, "
            "or declare with task.queries_are_public=true that it contains nothing private."
        )
    how = replace(_CORPUS, knob=knob if corpus is None else "task.corpus")
    passages = open_corpus(parts["corpus"], how).texts
    sources = _sources(parts["qrels"]["train"])
    if corpus is not None:
        _check_same_passages(place, passages, sources)
    queries = []
    for number, name, text, metadata in _queries(parts["queries"]):
        if name not in sources:
            raise DataError(f"{number}: query {name!r} has no passage in qrels/train.")
        if sources[name] not in passages:
            raise DataError(f"{place}: query {name!r} was written for {sources[name]!r}, which is not in the corpus.")
        queries.append(ReleasedQuery(query_id=name, text=text, passage_id=sources[name], metadata=metadata))
    return ReleasedQueries(
        queries=tuple(queries), passages=passages, provenance="card" if ancestors else "declared public",
        ancestors=frozenset(ancestors), folder=place,
    )  # fmt: skip


def _check_same_passages(place: Path, passages: Mapping[str, str], sources: Mapping[str, str]) -> None:
    """Refuse another corpus in which the text of a passage differs from the one that its queries were written for."""
    try:
        own = open_corpus(folder_parts(str(place))["corpus"], _CORPUS).texts
    except (ConfigurationError, DataError):  # the folder has no corpus to contradict
        return
    for name in sources.values():
        if name in own and name in passages and own[name] != passages[name]:
            raise DataError(
                f"task.corpus has a different text for passage {name!r} than {place}, for whose text the queries were "
                "written. Use the original corpus, or leave it null."
            )


def _queries(path: Path) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    file, seen = RecordFile(path), set()
    for number, record in file:
        name, text = file.id(number, record, *_ID), file.text(number, record, *_TEXT)
        if name in seen:
            raise DataError(f"{file.where(number)}: id {name!r} was given before.")
        if not text.strip():
            raise DataError(f"{file.where(number)}: query {name!r} has an empty text.")
        seen.add(name)
        metadata = record.get("metadata")
        yield file.where(number), name, text, metadata if isinstance(metadata, Mapping) else {}


def _sources(path: Path) -> dict[str, str]:
    file, found = RecordFile(path), dict[str, str]()
    for number, record in file:
        query, passage = file.id(number, record, *_QUERY_ID), file.id(number, record, *_PASSAGE_ID)
        if found.setdefault(query, passage) != passage:
            raise DataError(
                f"{file.where(number)}: query {query!r} has passages {found[query]!r} and {passage!r}; a synthetic "
                "query is written for one. Keep one of the lines."
            )
    return found


def require_covered(
    model: str | Path,
    released: ReleasedQueries,
    *,
    declared_public: bool,
    knob: str,
    declaration: str | None = None,
    ranks: bool = False,
) -> list[Assumption]:
    """Refuse a model that would introduce private data into the selection of released queries.

    Returns:
        The assumptions that the claim of the selection then takes on trust: that a model without a card was declared
        public, or, if its card does not state on what data its settings were chosen, that it was not private.

    Guarantees, after it returns, that one of these holds:
        - The model is ``minilm``, or ``bm25`` where it only ``ranks``, or it was declared public and no card, note or
          ledger in or around its folder records a run that trained it.
        - Its card is that of an artefact from which the queries were derived.
        - It was derived by post-processing from such an artefact, or from the same releases as the queries, and its
          card names no further private data: neither in the choice of its settings nor in an assumption that does not
          hold.

    In the last two cases its files match its card.

    ``declared_public`` says that nothing private went into a model without a card; ``knob`` is the setting by which
    the user named it, and ``declaration`` the one that declares it public, if it is not ``knob`` and ``_is_public``.
    """
    folder = Path(str(model)).expanduser()
    if (str(model) == "bm25" and ranks) or (str(model) == "minilm" and not folder.is_dir()):
        return []
    path = folder / CARD_NAME
    if path.is_file():
        card = read_card(path)
        if not card_names(path, card) & released.ancestors:
            parents = [str(parent["sha256"]) for parent in card["parents"]]
            derived = card["mechanism"].get("kind") == "post_processing" and bool(parents)
            if not derived or not (parents[0] in released.ancestors or _is_of_one_ledger(card, released)):
                raise PrivateDataError(
                    f"{knob}={model} was itself trained on private data ({_claim(card)}), which the claim of the "
                    "queries does not cover: filtering with it would spend more than their card states. Use a public "
                    "model, the generator of the queries, or a retriever that was trained on them."
                )
            if reason := _looked_at_private_data(card):
                raise PrivateDataError(
                    f"{knob}={model} was trained on released queries, but {reason}: selecting with it would spend more "
                    "than their card states. Train one without this, or use a public model."
                )
        check_artefact(folder, card)
        return _open_choice(card, model)
    if folder.is_dir() and (above := card_above(folder)) is not None:
        raise PrivateDataError(
            f"{knob}={model} is part of an artefact described by {above}, without its card. Use the whole folder with "
            "the card."
        )
    if (trace := next(traces_of_training(model), None)) is not None:
        raise PrivateDataError(
            f"{knob}={model} lost its privacy card, and {trace[0]} shows that a run trained it (privacy={trace[1]}). "
            "Use the whole folder that the run wrote, or a public model."
        )
    return [declared(model, declared_public, knob, declaration)]


def _is_of_one_ledger(card: Mapping[str, Any], released: ReleasedQueries) -> bool:
    """Return whether a model's card and that of the queries make the same claim about the same releases.

    This holds for an export of a retriever of these queries, and for a retriever of a filtered part of them. A
    retriever from a later run that began with the generator of the queries has another ledger.
    """
    place = released.claim or released.folder
    if released.provenance != "card" or place is None:
        return False
    mine, theirs = ([(one["ledger"] or {}).get("head"), one["claim"]["guarantee"], one["claim"]["epsilon"]]
                    for one in (card, read_card(place)))  # fmt: skip
    return mine[0] is not None and mine == theirs


def foreign_code(part: object, what: str = "that it looks at nothing private") -> list[Assumption]:
    """Return, for the card, the assumption on an external part: its class, and what relies on its code."""
    kind = type(part)
    if kind.__module__.split(".")[0] == "lit_dpret":
        return []
    text = f"{kind.__qualname__} is from outside lit-dpret: {what} rests on its code."
    return [Assumption(text, "unverified")]


def declared(model: str | Path, is_public: bool, knob: str, declaration: str | None = None) -> Assumption:
    """Return the assumption that a model without a privacy card is public; refuse one not declared public."""
    if not is_public:
        raise ConfigurationError(
            f"{knob}={model} has no privacy card, so it may have been trained on private data. Declare with "
            f"{declaration or f'{knob}_is_public'}=true that none went into it, or use another model."
        )
    return Assumption(
        text=f"No private data went into {shown(model)}, by which queries were embedded, scored or put into bins, as "
        "declared: numbers do not tell where they come from.",
        standing="unverified",
    )


def trusted_beside(source: Path, claim: Path) -> list[Assumption]:
    """Return the unverified assumptions of a set's card that the card at ``claim``, which replaces it, leaves out."""
    stated = {plain_assumption(one["text"]) for one in read_card(claim)["assumptions"]}
    found = [one for one in read_card(source)["assumptions"] if one["holds"] == "unverified"]
    left_out = [one for one in found if plain_assumption(one["text"]) not in stated]
    return [assumption_of(source.resolve().name, one) for one in left_out]


def _open_choice(card: Mapping[str, Any], model: str | Path) -> list[Assumption]:
    """Return the gap left by a model whose settings were chosen on unstated or synthetic data."""
    if card["tuning"]["data"] not in ("unknown", "synthetic"):
        return []
    text = (
        f"No choice on private data is behind the settings of {shown(model)}, which took part in the selection: its "
        "card leaves them open (NOT ACCOUNTED), and so does this claim."
    )
    return [Assumption(text, "unverified")]


def _looked_at_private_data(card: Mapping[str, Any]) -> str | None:
    """Return the private data that a post-processing card names in addition to its parent's claim."""
    if card["tuning"]["data"] == "private":
        return "its settings were chosen on private data (callbacks.card.tuning_data)"
    broken = [a for a in card["assumptions"] if a["holds"] is False and a["consequence"] == "no_guarantee"]
    return f"its card says that an assumption does not hold ({broken[0]['text']})" if broken else None


def shown(model: str | Path) -> str:
    """Return a model's name for a card; for a folder only the last part, since paths are private.

    Example:
        >>> shown("cross-encoder/ms-marco-MiniLM-L6-v2"), shown("/home/me/encoder")
        ('cross-encoder/ms-marco-MiniLM-L6-v2', 'encoder')
    """
    path = Path(model)
    return path.name if path.is_absolute() or path.is_dir() else str(model)


def _claim(card: Mapping[str, Any]) -> str:
    claim = card["claim"]
    return f"epsilon {show_epsilon(claim['epsilon'])}" if claim.get("epsilon") is not None else "no epsilon claimed"
