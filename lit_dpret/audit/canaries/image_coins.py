"""Canaries of a run on images: pictures of pure noise, each with a coin of its own.

Noise belongs to nobody and no two pictures of it are alike, and a model that brings two views of one together has
learned that picture. Everything follows from a seed, which is kept as the coins are.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path

import numpy as np
import torch

from lit_dpret.audit.canaries.coin_flips import CoinFlips
from lit_dpret.audit.canaries.files import CANARIES
from lit_dpret.datamodules.images import ImageRow
from lit_dpret.errors import DataError, schema_problem
from lit_dpret.files import write_whole

SCHEMA = "lit-dpret/image-canaries/1"


def image_coins(count: int, *, shape: tuple[int, int, int], seed: int | None, run_dir: Path) -> CoinFlips:
    """Make ``count`` pictures of noise and their coins, and write what they follow from to ``canaries.json``.

    Args:
        count: How many.
        shape: Channels, height, width.
        seed: Null takes one from the operating system. Whoever knows it knows the coins.
        run_dir: Where the file goes, readable by its owner alone.

    Raises:
        StorageError: It cannot be written.
    """
    facts = {
        "schema": SCHEMA,
        "note": "Coins of an audit: whoever reads this before the audit could make it say anything.",
        "nonce": secrets.token_hex(16),
        "count": count,
        "shape": list(shape),
        "seed": secrets.randbits(63) if seed is None else seed,
    }
    text = json.dumps(facts, indent=1) + "\n"
    write_whole(run_dir / CANARIES, text, owner_only=True)
    return _made(text)


def read_image_coins(path: Path) -> CoinFlips:
    """The canaries of the file that `image_coins` wrote.

    Raises:
        DataError: It is missing, malformed, or a newer version wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        facts = json.loads(text)
        problem = schema_problem(facts.get("schema"), SCHEMA)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"There is no readable file of image canaries at {path}.") from error
    if problem:
        raise DataError(f"{path} cannot be read: {problem}")
    try:
        return _made(text)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is malformed.") from error


def _made(text: str) -> CoinFlips:
    facts = json.loads(text)
    count, shape = int(facts["count"]), tuple(int(side) for side in facts["shape"])
    draws = np.random.Generator(np.random.Philox(key=int(facts["seed"])))
    included = tuple(bool(coin) for coin in draws.random(count) < 0.5)
    pixels = torch.from_numpy(draws.integers(0, 256, size=(2 * count, *shape), dtype=np.uint8))
    rows = [ImageRow(f"canary:{place}", pixels[place], 0) for place in range(count)]
    twins = [ImageRow(f"canary:{place}:twin", pixels[count + place], 0) for place in range(count)]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return CoinFlips(
        rows=rows, twins=twins, included=included, facts={"canaries": count, "units": count, "sha256": digest}
    )
