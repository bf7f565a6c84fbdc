"""A canary: texts with a gap, the secret that fills it, and its other candidates.

The secret was drawn uniformly from the candidates, by a coin independent of training; otherwise ranks and exposure mean
nothing. If a model's length limits cut the secret away, it is never trained on. So such a canary is refused before
training, for every candidate and on both sides (`check_all_fit`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_dpret.datamodules.rows import Row
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import read_json, write_whole

Kind = Literal["digits", "own_passage", "random_passage", "echo", "new_token"]
Side = Literal["query", "passage", "both"]

OWN_ID = "canary:"
"""Prefix of the ids of passages that a canary adds; these passages are in no list of passages."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A planted pair."""

    name: str  # unique among the canaries of a run; the suite uses ``kind-side-copies-number``
    kind: Kind  # the form of the pair around its secret; `CanarySuite` lists the kinds
    side: Side
    query: str = field(repr=False)
    # Id of its passage: one of the data's ids if the passage is an unchanged one of the data, else a new id.
    passage_id: str = field(repr=False)
    passage: str = field(repr=False)
    candidates: tuple[str, ...] = field(repr=False)
    secret: str = field(repr=False)
    copies: int = 1  # how often the pair is in the training data; each copy is a unit
    included: bool = True  # whether it was planted at all; decided by a coin if the suite tosses one

    def query_with(self, secret: str) -> str:
        return self.query if self.side == "passage" else f"{self.query} {secret}".strip()

    def passage_with(self, secret: str) -> str:
        return self.passage if self.side == "query" else f"{self.passage} {secret}".strip()

    def units(self) -> Iterator[tuple[Row, ...]]:
        """Yield one unit for each copy, without a row if the coin excluded the canary."""
        query, passage = self.query_with(self.secret), self.passage_with(self.secret)
        for copy in range(self.copies):
            row = Row(f"{OWN_ID}{self.name}:{copy}", query, self.passage_id, passage, frozenset((self.passage_id,)))
            yield (row,) if self.included else ()


@dataclass(frozen=True)
class CanarySet:
    """The canaries of one training run, and their sources."""

    canaries: tuple[Canary, ...]
    settings: dict[str, Any]
    # Random, so that the hash of the set in a ledger and a card cannot be used to test a guess at a secret.
    nonce: str = field(repr=False)

    def units(self) -> list[tuple[Row, ...]]:
        """Return the units of all copies; their number does not depend on coins."""
        return [unit for canary in self.canaries for unit in canary.units()]


CANARIES = "canaries.json"
SCHEMA = "lit-dpret/canaries/1"


def set_sha256(canaries: CanarySet) -> str:
    """Return the SHA-256 of the file: it commits to the planted canaries before training, and reveals no secret."""
    return hashlib.sha256(_text(canaries).encode()).hexdigest()


def write_canaries(canaries: CanarySet, folder: str | Path) -> Path:
    """Write ``canaries.json``, readable only by its owner; raise `StorageError` on failure."""
    return write_whole(Path(folder) / CANARIES, _text(canaries), owner_only=True)


def read_canaries(path: str | Path) -> CanarySet:
    """Read the canaries that `write_canaries` wrote, from the file or its folder.

    Raises:
        DataError: It is missing, malformed, or written by a newer version.
    """
    path = Path(path)
    path = path / CANARIES if path.is_dir() else path
    facts = read_json(path, SCHEMA)
    try:
        canaries = tuple(Canary(**one | {"candidates": tuple(one["candidates"])}) for one in facts["canaries"])
        return CanarySet(canaries, dict(facts["settings"]), str(facts["nonce"]))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is malformed: a field of a canary is missing or unknown.") from error


def _text(canaries: CanarySet) -> str:
    facts = {
        "schema": SCHEMA,
        "note": "Secrets and coins of an audit: whoever reads this before the audit could make it say anything.",
        "nonce": canaries.nonce,
        "settings": canaries.settings,
        "canaries": [asdict(canary) for canary in canaries.canaries],
    }
    return json.dumps(facts, indent=1, ensure_ascii=True) + "\n"


_PIECES = 2  # a tokenizer may put a white-space mark before the token


@dataclass(frozen=True)
class Knobs:
    """The names of the settings that errors about a suite mention."""

    group: str = "canaries"
    queries: str = "canaries.queries"
    count: str = "canaries.count"
    echo: str = "canaries.kinds=[echo]"
    shorter: str | None = None  # advice for texts that are too long, in addition to raising the length


KNOBS = Knobs()


def check_all_fit(reader: object, canaries: Iterable[Canary], knobs: Knobs = KNOBS) -> None:
    """Refuse a canary whose secret a model would truncate; a reader without tokens refuses nothing."""
    for canary in canaries:
        check_sentinels(reader, canary, knobs)
        for side, whole, read in _token_ids(reader, canary):
            if whole != read:
                longest = max(map(len, read))
                words = "suffix" if canary.kind == "echo" else side
                raise ConfigurationError(
                    f"Canary {canary.name}: its {side} is longer than model.max_{side}_length={longest}, so the secret "
                    f"would be cut. Raise it, or {knobs.shorter or f'lower {knobs.group}.{words}_words'}."
                )
            if len(set(map(tuple, whole))) < len(whole):
                raise ConfigurationError(
                    f"Canary {canary.name}: the tokenizer gives two candidates the same tokens. Does it know the "
                    "characters of the secrets? A new_token canary needs a model with as many <extra_id_N> as "
                    f"{knobs.group}.new_tokens."
                )


def cut_side(reader: object, canary: Canary) -> Literal["query", "passage"] | None:
    """Return the side whose text, with any of the candidates, is too long for the model; the query first.

    It does not depend on which candidate was drawn, so canaries may be chosen or skipped by it.
    """
    return next((side for side, whole, read in _token_ids(reader, canary) if whole != read), None)


def _token_ids(
    reader: Any, canary: Canary
) -> Iterator[tuple[Literal["query", "passage"], list[list[int]], list[list[int]]]]:
    """Yield each side that holds the secret, and its text's tokens with every candidate: complete, and as truncated."""
    texts: dict[Literal["query", "passage"], list[str]] = {}
    if canary.side in ("query", "both"):
        texts["query"] = [canary.query_with(secret) for secret in canary.candidates]
    if canary.side in ("passage", "both"):
        texts["passage"] = [canary.passage_with(secret) for secret in canary.candidates]
    for side, filled in texts.items() if hasattr(reader, "token_ids") else ():
        whole, read = reader.token_ids(filled, side, whole=True), reader.token_ids(filled, side)
        if whole is not None and read is not None:
            yield side, whole, read


def check_sentinels(reader: object, canary: Canary, knobs: Knobs = KNOBS) -> None:
    """Raise `ConfigurationError` if the tokenizer splits an unused token of T5 into several tokens."""
    if canary.kind != "new_token" or not hasattr(reader, "token_ids"):
        return
    found = reader.token_ids(["", "<extra_id_0>"], "query", whole=True)
    if found is not None and len(found[1]) - len(found[0]) > _PIECES:
        raise ConfigurationError(
            f"Canary {canary.name} is of kind new_token, and this model has no unused tokens <extra_id_N>: its "
            f"tokenizer splits one into {len(found[1]) - len(found[0])} tokens. Choose {knobs.echo}, whose "
            "secrets are rare words."
        )
