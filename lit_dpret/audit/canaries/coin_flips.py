r"""Canaries with one fair coin each, and their replacement in the data if the coin excludes them.

A one-run audit (Steinke et al. 2023, arXiv 2305.08846, Theorem 5.2) requires that the map from coins to the release is
(eps, delta)-DP in one coin. So the data sets of a coin's two sides must be *neighbours under the relation of the
claim* (`CoinFlips.units`). The bound is then on the claim's own epsilon, however canaries influence each other.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_dpret.audit.canaries.canary import CANARIES, CanarySet, Knobs, check_all_fit, read_canaries, write_canaries
from lit_dpret.audit.canaries.suite import CanarySuite, planted_facts
from lit_dpret.datamodules.images import ImageRow
from lit_dpret.datamodules.rows import Row
from lit_dpret.datamodules.unit_dataset import Planted
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.files import read_json, write_whole


@dataclass(frozen=True, kw_only=True)
class CoinFlips:
    """Rows, the twin of each row, and whether each row is trained on."""

    rows: Sequence[Any] = field(repr=False)
    twins: Sequence[Any] = field(repr=False)  # they replace excluded canaries under ``replace_one``
    included: tuple[bool, ...] = field(repr=False)
    facts: Mapping[str, Any]  # public before the coins are revealed

    def units(self, neighbours: str) -> list[tuple[Any, ...]]:
        """Return the units to train on, so that flipping one coin gives a neighbour under that relation.

        Tails is an empty unit under ``zero_out``, which keeps n whatever the coins are. Under ``replace_one`` it is the
        *twin*, the same text with another secret; an empty unit would be only half the change. Under ``add_or_remove``
        it is nothing.
        """
        found: list[tuple[Any, ...]] = []
        for row, twin, included in zip(self.rows, self.twins, self.included, strict=True):
            if included:
                found.append((row,))
            elif neighbours == "replace_one":
                found.append((twin,))
            elif neighbours == "zero_out":
                found.append(())
        return found

    def planted(self, neighbours: str) -> Planted:
        """Return the units and their public facts, for a DataModule's ``plant``."""
        return Planted(self.units(neighbours), self.facts)


def coins_of(canaries: CanarySet) -> CoinFlips:
    """Return the coins and rows of canaries made with ``include=0.5``, one copy and at least two candidates each."""
    for canary in canaries.canaries:
        if canary.copies != 1 or len(canary.candidates) < 2 or canaries.settings.get("include") != 0.5:
            raise ConfigurationError(
                f"Canary {canary.name} has {canary.copies} copies, {len(canary.candidates)} candidates and "
                f"include={canaries.settings.get('include')}: a one-run audit needs one copy, at least two candidates "
                "and include=0.5, a fair coin."
            )
    rows: list[Row] = []
    twins: list[Row] = []
    for canary in canaries.canaries:
        other = next(secret for secret in canary.candidates if secret != canary.secret)
        for secret, kept in ((canary.secret, rows), (other, twins)):
            query, passage = canary.query_with(secret), canary.passage_with(secret)
            kept.append(
                Row(f"canary:{canary.name}", query, canary.passage_id, passage, frozenset((canary.passage_id,)))
            )
    included = tuple(canary.included for canary in canaries.canaries)
    return CoinFlips(rows=rows, twins=twins, included=included, facts=planted_facts(canaries))


IMAGE_SCHEMA = "lit-dpret/image-canaries/1"


def image_coins(count: int, *, shape: tuple[int, int, int], seed: int | None, run_dir: Path) -> CoinFlips:
    """Make ``count`` noise images and their coins, and write the facts that determine them to ``canaries.json``.

    Anyone who knows ``seed`` knows the coins; None draws one from the operating system.
    """
    facts = {
        "schema": IMAGE_SCHEMA,
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
    """Read the file that `image_coins` wrote."""
    read_json(path, IMAGE_SCHEMA)
    try:
        return _made(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is malformed: a field is missing or has a wrong value. Restore it.") from error


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


KNOBS = Knobs(
    group="callbacks.audit",
    echo="callbacks.audit.kind=echo",
    queries="callbacks.audit.queries",
    count="callbacks.audit.canaries",
    shorter="use shorter queries (a file of them as callbacks.audit.queries) or another callbacks.audit.kind",
)
"""The names of the settings that errors about an audit's canaries mention."""


def coins_in_run(
    data: Any, suite: CanarySuite, *, run_dir: Path, begun: bool, resume: bool, reader: object = None
) -> CoinFlips:
    """Make a run's coin-flipped canaries and write them to the run folder, or read them on a resume.

    Guarantees:
        - No private row is read: words come from public passages, or from a file that is declared public.
        - A run that has begun continues with its original canaries and coins, or not at all.

    ``begun`` says that the run has a ledger. For images, ``suite`` only gives the number and the seed. ``reader`` is
    the module that will be trained on them; it must read every secret, and every twin's, to its end.
    """
    images = hasattr(data, "image_shape")
    settings = {name: suite.settings()[name] for name in ("kinds", "queries", "count", "seed")}
    if not begun:
        if images:
            return image_coins(suite.count, shape=data.image_shape, seed=suite.seed, run_dir=run_dir)
        canaries = suite.make(data, reader, knobs=KNOBS)
        write_canaries(canaries, run_dir)
        return coins_of(canaries)
    path = run_dir / CANARIES
    if not resume:
        raise ResumeError(
            f"{run_dir} already holds a run. Use resume=true to continue it, or choose another hydra.run.dir."
        )
    if not path.is_file():
        raise ResumeError(
            f"The run in {run_dir} was begun without the canaries of callbacks.audit, or {CANARIES} was lost: "
            "nothing can be planted now. Restore the file, or set callbacks.audit to null if there was none."
        )
    if images:
        found = read_image_coins(path)
        known: Mapping[str, Any] = settings | {"count": len(found.rows)}
    else:
        read = read_canaries(path)
        check_all_fit(reader, read.canaries, KNOBS)
        found, known = coins_of(read), read.settings
    for name, value in settings.items():
        if known.get(name) != value:
            raise ResumeError(
                f"resume=true with another callbacks.audit: {name} was {known.get(name)!r} and is {value!r} now. The "
                "canaries of a run are fixed when it begins; restore the setting."
            )
    return found


AUDIT_SCORES = "audit_scores.json"
SCORES_SCHEMA = "lit-dpret/audit-scores/1"


@dataclass(frozen=True, kw_only=True)
class AuditScores:
    """The score of each canary, in the order of the canary file."""

    sha256: str
    before: tuple[float, ...]
    after: tuple[float, ...] | None = None
    twins_before: tuple[float, ...] = ()
    twins_after: tuple[float, ...] = ()

    def learned(self) -> NDArray[np.float64]:
        """Return each canary's final score beyond the prediction from its first score, ``(canaries,)``.

        Training on other rows moves all scores. A line through (before, after), or through the differences from the
        twins if there are any, removes what the first score explains. It does not depend on the coins.
        """
        if self.after is None:
            raise ResumeError(f"{AUDIT_SCORES} holds no scores after training: the run has not ended.")
        before, after = np.array(self.before), np.array(self.after)
        if self.twins_before:
            before, after = before - np.array(self.twins_before), after - np.array(self.twins_after)
        away = before - before.mean()
        spread = float(away @ away)
        slope = float(away @ after) / spread if spread > 0 else 0.0
        rest: NDArray[np.float64] = after - after.mean() - slope * away
        return rest


def write_scores(scores: AuditScores, folder: Path) -> Path:
    """Write the file, readable only by its owner; raise `StorageError` on failure."""
    facts: dict[str, Any] = {
        "schema": SCORES_SCHEMA,
        "note": "Internal. With the coins in the file of canaries this shows how the audit was decided.",
        **{name: list(value) if isinstance(value, tuple) else value for name, value in vars(scores).items()},
    }
    return write_whole(folder / AUDIT_SCORES, json.dumps(facts) + "\n", owner_only=True)


def read_scores(folder: Path, *, sha256: str) -> AuditScores:
    """Read the scores that `write_scores` wrote for this set of canaries."""
    path = folder / AUDIT_SCORES
    try:
        facts = read_json(path, SCORES_SCHEMA)
        found = AuditScores(
            sha256=str(facts["sha256"]),
            before=_numbers(facts["before"]),
            after=None if facts["after"] is None else _numbers(facts["after"]),
            twins_before=_numbers(facts["twins_before"]),
            twins_after=_numbers(facts["twins_after"]),
        )
    except (DataError, KeyError, TypeError, ValueError) as error:
        raise ResumeError(
            f"{path} cannot be read ({error}), and without the scores before training there is nothing to audit. "
            "Restore the file, or start a new run in another hydra.run.dir."
        ) from error
    if found.sha256 != sha256:
        raise ResumeError(f"{path} is about other canaries than those of this run: restore the file.")
    return found


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
