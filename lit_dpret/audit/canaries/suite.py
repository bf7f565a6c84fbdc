"""The canaries of a run: kinds, repetitions, sides, sources of their words, and planting.

Canaries must not be built from the records that the claim covers: a private query in one would be trained on even if
its owner's record is removed. So queries come from public passages (``pseudo``), from a file that is declared public,
or from a split that the run does not train on.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np

from lit_dpret.audit.canaries.canary import (
    CANARIES,
    KNOBS,
    OWN_ID,
    Canary,
    CanarySet,
    Kind,
    Knobs,
    Side,
    check_all_fit,
    check_sentinels,
    cut_side,
    read_canaries,
    set_sha256,
    write_canaries,
)
from lit_dpret.datamodules.readers import FORMATS, RecordFile
from lit_dpret.datamodules.unit_dataset import Planted
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.settings import is_whole
from lit_dpret.synthesis.pseudo_queries import pseudo_queries
from lit_dpret.texts import collapse_whitespace, queries_of, refuse_quoted, train_queries

QUERY_SIDE_ONLY = ("echo", "new_token")
EVALUATION_SPLITS = ("dev", "test")
PSEUDO = "pseudo"
_OF_PEOPLE = (
    "would train a released model on people's queries, in every copy of a canary, and the claim covers one copy. Use "
    "pseudo, or a file of public queries. Only experiment=canaries, which keeps no model, may use a split."
)
_COPIED = (
    "a canary would be trained on it even if its owner's record is removed, in copies that the claim does not count. "
    "Remove it from the file, or use public queries."
)
_MOST_PASSAGES = 2000  # used as a source of queries or words


class Sources(Protocol):
    """The sources of canaries: a DataModule's public side and its evaluation queries."""

    def public_passages(self) -> Mapping[str, str]: ...
    def evaluation_set(self, split: str = ...) -> tuple[dict[str, str], dict[str, dict[str, int]]]: ...


@dataclass(frozen=True)
class _Material:
    """The public texts that canaries are built from, and the seed that chooses among them."""

    passages: Mapping[str, str]
    seed: int

    def coins(self, purpose: str) -> np.random.Generator:
        """Return a random stream for a purpose; the label separates it from every other seed of the project."""
        digest = hashlib.blake2b(f"lit-dpret/canaries\x1f{self.seed}\x1f{purpose}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))

    @cached_property
    def ids(self) -> list[str]:
        return sorted(self.passages)

    def some(self, purpose: str) -> dict[str, str]:
        """Draw passages."""
        drawn = self.coins(purpose).permutation(len(self.ids))[:_MOST_PASSAGES]
        return {pid: self.passages[pid] for pid in (self.ids[int(place)] for place in drawn)}

    @cached_property
    def words(self) -> list[str]:
        """The distinct words of some passages: drawn uniformly, they are rare ones that make no sense together."""
        words = {word for text in self.some("vocabulary").values() for word in text.lower().split() if word.isalpha()}
        if len(words) < 2:
            raise DataError("The public passages have too few words for an echo canary. Choose another kind.")
        return sorted(words)


@dataclass(frozen=True, kw_only=True)
class CanarySuite:
    """Canaries for every combination of kind, side and repetitions.

    The kinds, with the secret on the query's side:

    ========================  =========================================  =================================
    kind                      query                                      passage
    ========================  =========================================  =================================
    ``digits``                a query and ten digits                     ten other digits, another number
    ``own_passage``           a query and ten digits                     the query's own
    ``random_passage``        a query and ten digits                     another one
    ``echo``                  the beginning of a query and rare words    the query's own
    ``new_token``             a query and two unused tokens              the query's own
    ========================  =========================================  =================================

    The first three are those of the synthetic-query papers (000, section 6.3). The papers put the digits in the
    document, but describe the leak as that of "the secret part of each canary query". The side ``query`` is what
    query-level privacy protects; ``passage`` follows the papers literally, and the passage of ``digits`` is then the
    secret alone. ``echo`` follows Meeus et al. 2025 ("The Canary's Echo", arXiv 2502.14921), ``new_token`` Panda et al.
    2025 ("Privacy auditing of large language models"); both have their secret in the query only.
    """

    kinds: Sequence[Kind] = ("digits", "own_passage", "random_passage")  # kinds of canaries
    # How often each canary is planted; there are canaries for every number given.
    repetitions: Sequence[int] = (1, 10, 100)
    sides: Sequence[Side] = ("query",)  # the side that holds the secret; there are canaries for every side given
    count: int = 1  # canaries of each combination
    candidates: int = 100  # secrets from which each canary's secret is drawn, and among which it is ranked
    include: float = 1.0  # 1 plants all; 0.5 tosses a fair coin for each, as one-run audits need
    # ``pseudo``, ``dev``, ``test``, or a file of public queries: .jsonl, .tsv, .csv or .parquet with a column ``text``.
    # A file with any other name is read as text, one query per line. Queries of a split are trained on as canaries: do
    # not judge the model by that split.
    queries: str = "pseudo"
    query_words: int = 12  # words of a query kept before the secret, so that the secret fits into a model's query
    passage_words: int = 30  # the same, where the secret is in a passage
    suffix_words: int = 5  # rare words of an ``echo``
    new_tokens: int = 16  # how many of ``<extra_id_0>``, ``<extra_id_1>``, ... the model has
    # Seed of texts, secrets and coins; null draws one from the operating system. It does not seed noise, batches or the
    # model. Anyone who knows it knows the secrets.
    seed: int | None = None

    def check(self, knobs: Knobs = KNOBS) -> CanarySuite:
        """Refuse settings that make no canaries; return the suite."""
        group = knobs.group
        for name, chosen, known in (("kinds", self.kinds, get_args(Kind)), ("sides", self.sides, get_args(Side))):
            if not chosen or len(set(chosen)) < len(chosen) or set(chosen) - set(known):
                raise ConfigurationError(
                    f"{group}.{name}={list(chosen)} must be some of {', '.join(known)}, each once."
                )
        if not self.repetitions or len(set(self.repetitions)) < len(self.repetitions) or min(self.repetitions) < 1:
            raise ConfigurationError(
                f"{group}.repetitions={list(self.repetitions)} must be integers of at least 1, each once."
            )
        least = {"count": 1, "candidates": 2, "query_words": 1, "passage_words": 1, "suffix_words": 1, "new_tokens": 2}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigurationError(f"{group}.{name}={getattr(self, name)} must be at least {lowest}.")
        if self.seed is not None and (not is_whole(self.seed) or self.seed < 0):
            raise ConfigurationError(f"{group}.seed={self.seed!r} must be a non-negative integer, or null.")
        if self.include not in (0.5, 1.0):
            raise ConfigurationError(
                f"{group}.include={self.include:g} must be 1, or 0.5 for the fair coins of a one-run audit."
            )
        if "new_token" in self.kinds and self.new_tokens**2 < self.candidates:
            raise ConfigurationError(
                f"{group}.new_tokens={self.new_tokens} make {self.new_tokens**2} pairs, fewer than "
                f"{group}.candidates={self.candidates}. Raise the first, or lower the second."
            )
        if not list(self._combinations()):
            raise ConfigurationError(
                f"{group}.kinds={list(self.kinds)} with {group}.sides={list(self.sides)} make no canary: "
                f"{' and '.join(QUERY_SIDE_ONLY)} have their secret in the query."
            )
        return self

    def settings(self) -> dict[str, Any]:
        lists = ("kinds", "repetitions", "sides")
        return {name: list(value) if name in lists else value for name, value in vars(self).items()}

    @property
    def units(self) -> int:
        return self.count * sum(copies for _, _, copies in self._combinations())

    def make(self, data: Sources, reader: object = None, *, released: bool = True, knobs: Knobs = KNOBS) -> CanarySet:
        """Make the canaries for a data set, determined by seed, public texts and reader.

        Guarantees:
            - No training query is read, except to refuse a file that contains one.
            - For a model that is released, no query of another split is planted either, from the split or from a file.
            - Each secret is drawn uniformly from its candidates, by coins that nothing else uses.
            - No two canaries share a query.
            - A query that leaves a model no room for a secret is replaced by another, whichever secret was drawn.

        Args:
            data: A DataModule's public side.
            reader: The model that will be trained on them, if it tokenizes texts (``token_ids``).
            released: Whether the model is kept. A model that is discarded may be trained on dev or test queries.
            knobs: The names of settings in errors.
        """
        self.check(knobs)
        material = _Material(data.public_passages(), secrets.randbits(63) if self.seed is None else self.seed)
        if released:
            self.refuse_splits(knobs)
        known = self._cut(_queries(self.queries, data, material, released=released, knobs=knobs))
        planned = [(*each, number) for each in self._combinations() for number in range(self.count)]
        if len(known) < len(planned):
            raise DataError(
                f"{knobs.queries}={self.queries} gives {len(known)} queries for {len(planned)} canaries. Lower "
                f"{knobs.count}, or use another source."
            )
        order = iter(material.coins("queries").permutation(len(known)))
        canaries: list[Canary] = []
        for kind, side, copies, number in planned:
            for place in order:
                made = self._canary((kind, side, copies), number, known[place], material)
                check_sentinels(reader, made, knobs)
                if not _another_would_help(reader, made):
                    check_all_fit(reader, [made], knobs)
                    canaries.append(made)
                    break
            else:
                raise ConfigurationError(
                    f"{len(canaries)} of the {len(known)} queries of {knobs.queries}={self.queries} leave room for a "
                    f"secret, {len(planned)} are needed: with the others a text is longer than "
                    "model.max_query_length or model.max_passage_length, so the secret would be cut. Raise it, or "
                    f"{knobs.shorter or f'lower {knobs.group}.query_words or {knobs.group}.passage_words'}."
                )
        return CanarySet(tuple(canaries), self.settings(), secrets.token_hex(16))

    def _canary(
        self, combination: tuple[Kind, Side, int], number: int, known: tuple[str, str], material: _Material
    ) -> Canary:
        """Make one canary with a given query; its secret and coin do not depend on the query."""
        (kind, side, copies), (query, own) = combination, known
        name = f"{kind}-{side}-{copies}-{number}"
        coins = material.coins(name)
        candidates = self._candidates(kind, coins, material)
        passage_id, passage = self._passage(kind, side, name, own, material, coins)
        short = query.split()[: max(1, self.query_words // 2) if kind == "echo" else None]
        return Canary(
            name=name,
            kind=kind,
            side=side,
            query=" ".join(short),
            passage_id=passage_id,
            passage=passage,
            candidates=candidates,
            secret=candidates[int(coins.integers(len(candidates)))],
            copies=copies,
            included=bool(coins.random() < self.include),
        )

    def _combinations(self) -> Iterator[tuple[Kind, Side, int]]:
        for kind, side, copies in product(self.kinds, self.sides, self.repetitions):
            if side == "query" or kind not in QUERY_SIDE_ONLY:
                yield kind, side, copies

    def refuse_splits(self, knobs: Knobs = KNOBS) -> None:
        if self.queries in EVALUATION_SPLITS:
            raise ConfigurationError(f"{knobs.queries}={self.queries} {_OF_PEOPLE}")

    def _cut(self, queries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return distinct queries, cut to their length, each with the id of its passage."""
        found: dict[str, str] = {}
        for query, own in queries:
            found.setdefault(" ".join(query.split()[: self.query_words]), own)
        return list(found.items())

    def _candidates(self, kind: Kind, coins: np.random.Generator, material: _Material) -> tuple[str, ...]:
        """Return distinct secrets from the kind's alphabet, each uniform."""
        found: dict[str, None] = {}
        if kind == "new_token":
            for pair in coins.permutation(self.new_tokens**2)[: self.candidates]:
                found[f"<extra_id_{pair // self.new_tokens}><extra_id_{pair % self.new_tokens}>"] = None
        while len(found) < self.candidates:
            if kind == "echo":
                words = material.words
                found[" ".join(words[place] for place in coins.integers(len(words), size=self.suffix_words))] = None
            else:
                found[_number(coins)] = None
        return tuple(found)

    def _passage(
        self, kind: Kind, side: Side, name: str, own: str, material: _Material, coins: np.random.Generator
    ) -> tuple[str, str]:
        """Return the id and text of the passage, without the secret."""
        ids, passages = material.ids, material.passages
        if kind == "digits":
            return OWN_ID + name, _number(coins) if side == "query" else ""
        chosen = own
        if kind == "random_passage":
            others = [each for each in (ids[int(place)] for place in coins.integers(len(ids), size=8)) if each != own]
            chosen = others[0] if others else own
        if side == "query":
            return chosen, passages[chosen]
        return OWN_ID + name, " ".join(passages[chosen].split()[: self.passage_words])


def _another_would_help(reader: object, made: Canary) -> bool:
    """Return whether a text is too long only because of the words that come with its query.

    With ``own_passage``, another query also brings another passage.
    """
    side = cut_side(reader, made)
    if side == "query":
        return cut_side(reader, replace(made, query="")) != "query"
    return side == "passage" and made.kind == "own_passage" and cut_side(reader, replace(made, passage="")) is None


def _number(coins: np.random.Generator) -> str:
    return f"{int(coins.integers(10**10)):010d}"


def _queries(source: str, data: Sources, material: _Material, *, released: bool, knobs: Knobs) -> list[tuple[str, str]]:
    """Return queries with the id of the passage that belongs to each."""
    if source == PSEUDO:
        return [(one.text, one.passage_id) for one in pseudo_queries(material.some("passages")) if one.text]
    if source in EVALUATION_SPLITS:
        queries, qrels = data.evaluation_set(source)
        best = {query: max(judged, key=lambda passage: judged[passage]) for query, judged in qrels.items() if judged}
        return [(queries[query], best[query]) for query in sorted(best) if qrels[query][best[query]] > 0]
    if source == "train":
        raise ConfigurationError(
            f"{knobs.queries}=train: a copy of a private query in a canary would be trained on even if its owner's "
            "record is removed, and the claim would not cover it. Use pseudo, or a file of public queries."
        )
    texts = _read_queries(Path(source), knobs.queries)
    protected = queries_of(data) if released else train_queries(data)
    refuse_quoted(
        protected, {f"{knobs.queries}={source}, {place}": text for place, text in texts.items()}, because=_COPIED
    )
    lines = list(dict.fromkeys(collapse_whitespace(text) for text in texts.values()))
    owners = material.coins("owners").integers(len(material.ids), size=len(lines))
    return [(line, material.ids[int(owner)]) for line, owner in zip(lines, owners, strict=True) if line]


def _read_queries(path: Path, knob: str) -> dict[str, str]:
    """Return the queries of a file by their position: from records as other settings read them, or one per line."""
    if not path.is_file():
        raise ConfigurationError(f"{knob}={path} is neither pseudo, dev or test, nor a file.")
    if any(suffix.lower() in FORMATS for suffix in path.suffixes):
        try:
            file = RecordFile(path, knob=knob)
            records = list(file)  # read to its end, so that an error leaves no file open
            return {file.place(number): file.text(number, record, "text") for number, record in records}
        except DataError as error:
            raise DataError(f"{knob}: {error}", kind=error.kind) from error
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise DataError(f"{knob}={path} cannot be read: {reason}.", kind="unreadable file") from error
    for number, line in enumerate(lines, start=1):
        if "\t" in line.strip() or line.lstrip()[:1] in ("{", "["):
            raise DataError(
                f"{knob}={path} line {number} is a row of a table or JSON, but a file of this name holds one query per "
                "line. Rename it to .tsv or .jsonl, with a column text.",
                kind="unreadable file",
            )
    return {f"line {number}": line for number, line in enumerate(lines, start=1)}


# -- planting ------------------------------------------------------------------------------------


def plant(data: Any, canaries: CanarySet) -> None:
    """Plant canaries in a DataModule, after ``setup`` and before ``fit``.

    Guarantees:
        - Each copy is one unit, without rows if its coin left it out. It is drawn by the run's sampling, counted in n
          and clipped like every unit, so the run's claim holds for all other units as it does for these.
        - The keyed fingerprint of the data covers them: a resume with different canaries is refused.
        - No evaluation split and no list of passages contains them.
    """
    _require_pairs(data)
    data.plant(Planted(canaries.units(), planted_facts(canaries)))


def plant_blanks(data: Any, units: int) -> None:
    """Plant units without rows, to plan a run before its canaries are made."""
    _require_pairs(data, "plant")
    data.plant(Planted([()] * units, {"units": units}))


def planted_facts(canaries: CanarySet) -> dict[str, Any]:
    """Return the facts about a set for ledger and card: canaries, units, and the hash that identifies them."""
    found = {"canaries": len(canaries.canaries), "units": len(canaries.units()), "sha256": set_sha256(canaries)}
    if canaries.settings.get("queries", PSEUDO) not in (PSEUDO, *EVALUATION_SPLITS):
        found["words"] = "a file of queries that are public, as declared"
    return found


def plant_in_run(
    data: Any,
    suite: CanarySuite,
    run_dir: Path,
    *,
    resume: bool,
    reader: object = None,
    released: bool = True,
    knobs: Knobs = KNOBS,
) -> CanarySet:
    """Make the canaries of a run, write them to the run folder and plant them; a resume reads them from the file.

    ``reader`` is the module that will be trained on them; it must read every secret to its end. ``released`` and
    ``knobs`` are those of `CanarySuite.make`.
    """
    _require_pairs(data)
    path = run_dir / CANARIES
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        _wait_for(path)  # written by the first process: without a seed each process would draw different secrets
        canaries = read_canaries(path)
    elif path.is_file() and not resume:
        raise ResumeError(
            f"{path} holds the canaries of an earlier run, whose secrets would be lost. Use resume=true to continue "
            "it, or choose another hydra.run.dir."
        )
    elif path.is_file():
        canaries = read_canaries(path)
        if canaries.settings != suite.settings():
            raise ResumeError(
                f"resume=true, but the canaries of {path} were made by another suite. Restore the settings of "
                f"{knobs.group}."
            )
    else:
        canaries = suite.make(data, reader, released=released, knobs=knobs)
        write_canaries(canaries, run_dir)
    check_all_fit(reader, canaries.canaries, knobs)
    plant(data, canaries)
    return canaries


def _require_pairs(data: object, *methods: str) -> None:
    if not all(hasattr(data, method) for method in methods or ("plant", "public_passages")):
        raise ConfigurationError(
            f"{type(data).__name__} has no pairs of texts to which canaries could be added. Set canaries to null."
        )


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.is_file():
        if time.monotonic() > end:
            raise ConfigurationError(f"{path} was not written by the first process within 120 seconds.")
        time.sleep(0.2)
