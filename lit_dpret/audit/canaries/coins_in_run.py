"""The coin-flipped canaries of a run: made once, kept beside it, and the same when it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.audit.canaries.canary import Kind
from lit_dpret.audit.canaries.coin_flips import CoinFlips, coins_of
from lit_dpret.audit.canaries.files import CANARIES, read_canaries, write_canaries
from lit_dpret.audit.canaries.image_coins import image_coins, read_image_coins
from lit_dpret.audit.canaries.lengths import check_all_fit
from lit_dpret.audit.canaries.suite import CanarySuite
from lit_dpret.errors import ResumeError

SHORTER = "take canaries with shorter queries: a file of them as callbacks.audit.queries, or another kind"


def coins_in_run(
    data: Any,
    count: int,
    *,
    kind: Kind,
    queries: str,
    seed: int | None,
    run_dir: Path,
    begun: bool,
    resume: bool,
    reader: object = None,
) -> CoinFlips:
    """The coin-flipped canaries of a run: made and written beside it, or read where it goes on.

    Guarantees:
        - No private row is read: words come from public passages, or a file that is declared public.
        - A run that has begun goes on with the canaries and coins that it began with, or not at all.

    Args:
        data: The DataModule that they will be planted in.
        count: How many.
        kind: Of texts, as in `CanarySuite`.
        queries: The same.
        seed: The same.
        run_dir: Where ``canaries.json`` lies.
        begun: Whether the run has a ledger.
        resume: Whether it may.
        reader: The module that will be trained on them; it must read every secret, and every twin's, to its end.

    Raises:
        ResumeError: The run has begun, and its canaries are missing or were others.
        ConfigurationError: The data give nothing to make canaries from, or ``reader`` would cut a secret; nothing is
            written then.
    """
    images = hasattr(data, "image_shape")
    settings = {"kinds": [kind], "queries": queries, "count": count, "seed": seed}
    if not begun:
        if images:
            return image_coins(count, shape=data.image_shape, seed=seed, run_dir=run_dir)
        suite = CanarySuite(
            kinds=(kind,), repetitions=(1,), count=count, candidates=2, include=0.5, queries=queries, seed=seed
        )
        canaries = suite.make(data, reader, shorter=SHORTER)
        write_canaries(canaries, run_dir)
        return coins_of(canaries)
    path = run_dir / CANARIES
    if not resume:
        raise ResumeError(
            f"{run_dir} already holds a run. Say resume=true to go on with it, or choose another hydra.run.dir."
        )
    if not path.is_file():
        raise ResumeError(
            f"The run in {run_dir} was begun without the canaries of callbacks.audit, or {CANARIES} was lost: "
            "nothing can be planted any more. Restore the file, or set callbacks.audit to null if there was none."
        )
    if images:
        found = read_image_coins(path)
        known: Mapping[str, Any] = settings | {"count": len(found.rows)}
    else:
        read = read_canaries(path)
        check_all_fit(reader, read.canaries, shorter=SHORTER)
        found, known = coins_of(read), read.settings
    for name, value in settings.items():
        if known.get(name) != value:
            raise ResumeError(
                f"resume=true with another callbacks.audit: {name} was {known.get(name)!r} and is {value!r} now. The "
                "canaries of a run are fixed when it begins; restore the setting."
            )
    return found
