"""Check from hashes whether the public warm-up data contained one of your private queries.

A public warm-up is free only while its text is public, so it must not contain the private queries.
The holder of the private set cannot publish it, and the warm-up's questions need not be shipped: the
warm-up publishes a short hash of each question it trained on, and the holder looks up its own.
Two questions count as the same when they agree after `without_punctuation`, so case, punctuation and spacing
do not hide a copy. The hashes are of public text; a hash of a private query is never written.

False alarms: n hashes of 6 bytes answer "seen" for an unseen query with probability n / 2**48
(below 1e-9 for 200,000 hashes). There are no false all-clears: equal normalised text has equal hashes.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import Path

from lit_dpret.errors import DataError

HASH_BYTES = 6
HASH_FILE = "public_warmup_queries.sha256_48"

_NOT_WORD = re.compile(r"[\W_]+")


def without_punctuation(text: str) -> str:
    """Return the text in NFKC, case-folded, without punctuation and white space.

    >>> without_punctuation("What's  a Deductible?") == without_punctuation("whats a deductible")
    True
    """
    return _NOT_WORD.sub("", unicodedata.normalize("NFKC", text).casefold())


def query_hash(text: str) -> bytes:
    """Return the first `HASH_BYTES` bytes of the SHA-256 of the normalised text."""
    return hashlib.sha256(without_punctuation(text).encode()).digest()[:HASH_BYTES]


def overlap(queries: Iterable[str], hashes: Collection[bytes]) -> list[str]:
    """Return those of `queries` whose normalised text is among `hashes`, in order.

    >>> overlap(["Is it PUBLIC?", "is it private?"], {query_hash("is it public")})
    ['Is it PUBLIC?']
    """
    return [query for query in queries if query_hash(query) in hashes]


def write_hashes(queries: Iterable[str], path: Path) -> int:
    """Write the concatenated sorted, distinct hashes of `queries`; return their number."""
    hashes = sorted({query_hash(query) for query in queries})
    path.write_bytes(b"".join(hashes))
    return len(hashes)


def read_hashes(path: Path) -> frozenset[bytes]:
    """Read what `write_hashes` wrote.

    Raises:
        DataError: the file is missing, or its length is not a whole number of hashes.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist, so no hashes of the warm-up's questions can be read.") from error
    if not data or len(data) % HASH_BYTES:
        raise DataError(f"{path} has {len(data)} bytes, which is not a whole number of {HASH_BYTES}-byte hashes.")
    return frozenset(data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES))
