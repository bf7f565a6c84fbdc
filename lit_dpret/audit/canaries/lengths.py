"""Whether a model reads planted secrets to their end.

A secret that is cut away is trained on by nobody: its canary is an ordinary text, the audit that rests on it finds
nothing, and looks like one that found nothing to find. So it is refused before training, for every candidate of a
secret and whichever side it stands on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

from lit_dpret.audit.canaries.canary import Canary
from lit_dpret.errors import ConfigurationError

_PIECES = 2  # a tokenizer may put a mark of white space before the token


class Reader(Protocol):
    """What knows how texts become tokens: a module that trains on them, or a saved generator's codec."""

    def token_ids(self, texts: Sequence[str], side: str, *, whole: bool = False) -> list[list[int]] | None: ...


def check_all_fit(reader: object, canaries: Iterable[Canary], *, shorter: str | None = None) -> None:
    """`check_fits` of each canary, where ``reader`` has a say in tokens.

    Raises:
        ConfigurationError: As `check_fits`.
    """
    if hasattr(reader, "token_ids"):
        for canary in canaries:
            check_fits(reader, canary, shorter=shorter)


def cut_side(reader: object, canary: Canary) -> Literal["query", "passage"] | None:
    """The side whose text is too long for the model to read to its end, with any of the candidates; the query first.

    Which candidate was drawn has no say in it, so a canary may be taken or passed over by this.
    """
    if not hasattr(reader, "token_ids"):
        return None
    for side, texts in _filled(canary):
        whole, read = reader.token_ids(texts, side, whole=True), reader.token_ids(texts, side)
        if whole is not None and read is not None and whole != read:
            return side
    return None


def check_fits(reader: Reader, canary: Canary, *, shorter: str | None = None) -> None:
    """Refuse a canary of which a model does not see the whole secret.

    Args:
        reader: The model's way with texts; one that gives no tokens refuses nothing.
        canary: With its secret and all others that could have been planted.
        shorter: What else can be done about a text that is too long, beside raising the length.

    Raises:
        ConfigurationError: A text with a secret in it is cut, naming canary and length; or two secrets are one to the
            tokenizer.
    """
    check_sentinels(reader, canary)
    for side, texts in _filled(canary):
        whole, read = reader.token_ids(texts, side, whole=True), reader.token_ids(texts, side)
        if whole is None or read is None:
            return
        if whole != read:
            longest = max(map(len, read))
            words = "suffix" if canary.kind == "echo" else side
            raise ConfigurationError(
                f"Canary {canary.name}: its {side} is longer than model.max_{side}_length={longest}, so the secret "
                f"would be cut. Raise it, or {shorter or f'lower canaries.{words}_words'}."
            )
        if len(set(map(tuple, whole))) < len(whole):
            raise ConfigurationError(
                f"Canary {canary.name}: the tokenizer gives two candidates the same tokens. Does it know the "
                "characters of canaries.kinds? A new_token canary needs a model with as many <extra_id_N> as "
                "canaries.new_tokens."
            )


def _filled(canary: Canary) -> Iterator[tuple[Literal["query", "passage"], list[str]]]:
    """Each side that holds the secret, and its text with every candidate."""
    if canary.side in ("query", "both"):
        yield "query", [canary.query_with(secret) for secret in canary.candidates]
    if canary.side in ("passage", "both"):
        yield "passage", [canary.passage_with(secret) for secret in canary.candidates]


def check_sentinels(reader: object, canary: Canary) -> None:
    """Refuse a tokenizer to which an unused token of T5 is a word like any other, in many pieces.

    Raises:
        ConfigurationError: The canary is of kind ``new_token``, and the reader has no such tokens.
    """
    if canary.kind != "new_token" or not hasattr(reader, "token_ids"):
        return
    found = reader.token_ids(["", "<extra_id_0>"], "query", whole=True)
    if found is not None and len(found[1]) - len(found[0]) > _PIECES:
        raise ConfigurationError(
            f"Canary {canary.name} is of kind new_token, and this model has no unused tokens <extra_id_N>: its "
            f"tokenizer makes {len(found[1]) - len(found[0])} tokens of one. Choose canaries.kinds=[echo], whose "
            "secrets are rare words, for it."
        )
