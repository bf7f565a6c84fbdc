"""Shadow models of a target: the target's own training, repeated on random halves of the data, within a time limit.

A shadow model trained for fewer steps than the target memorizes less, and is poor evidence of what the target
memorizes. So each takes the target's number of steps, and a short time limit means fewer of them.
"""

from __future__ import annotations

import io
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray

from lit_dpret.audit.attacks.coins import Coins
from lit_dpret.audit.attacks.signals import (
    EncodedPairs,
    encode_pairs,
    encoder_signals,
    generator_signals,
    mean_by_query,
)
from lit_dpret.audit.statistics.shadow import FEWEST, ShadowMatrix, balanced_halves
from lit_dpret.callbacks import PrivacyAccountant, ProgressLine, StepProgress
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.files import write_whole
from lit_dpret.modules.generator_folder import is_generator, load_generator
from lit_dpret.modules.token_scores import TokenScorer, TokenScores
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.stages import Stages
from lit_dpret.texts import normalise

Others = Literal["coins", "dev", "test"]

SHIFT = (
    "Members and others come from different splits, so an attack may distinguish the splits rather than the members. "
    "Numbers above one half, or above a ceiling, may be due to that."
)
MOST_POPULATION = 500


@dataclass(frozen=True, eq=False, repr=False)
class Suspects:
    """Queries in a fixed order: first the attacked ones, then the population for RMIA."""

    universe: list[str]  # ids of all queries that shadow models may be trained on
    ids: list[str]  # ids of the suspects
    member: NDArray[np.bool_]  # whether the target was trained on them, shape ``(suspects,)``
    attacked: int  # number attacked, counted from the first; the rest are not members
    queries: list[str]  # query text of each row; a row is a suspect with one of its passages
    passages: list[str]  # passage text of each row
    row_of: NDArray[np.int64]  # index of the suspect that a row belongs to, shape ``(rows,)``
    fair: bool  # whether a coin decided about each query of the universe, so that members and others follow one law
    left_out: int  # queries of the universe whose text occurs under several ids; they are not attacked
    # Other queries without a passage in the collection (as after sampling passages): nothing is learned from them, so
    # they are not attacked either.
    unanswered: int = 0

    @property
    def population(self) -> NDArray[np.int64]:
        """The positions of the population among the suspects."""
        return np.arange(self.attacked, len(self.ids))

    def texts(self) -> list[str]:
        """Return the query of each suspect, once."""
        firsts = np.unique(self.row_of, return_index=True)[1]
        return [self.queries[row] for row in firsts]


def choose_suspects(data: Any, others: Others, coins: Coins | None, *, count: int, rows: int, seed: int) -> Suspects:
    """Draw ``count`` suspects with their first ``rows`` passages from the target's training data.

    Guarantees:
        - With ``coins``, the choice of attacked queries does not depend on the coins, as the theorem of the one-run
          audit requires.
        - With a split, half of the attacked are members, as far as there are enough.
    """
    collection = data.collection
    trained = list(collection.split("train"))
    if others == "coins":
        if coins is None:
            raise ConfigurationError(
                "task.others=coins, but the run tossed none. Train the target with task.membership_coins=true, or "
                "take others from another split (task.others=dev), which may differ in more than membership."
            )
        if set(coins.heads) != set(trained):
            raise DataError(
                "The run's coins are for other queries than the datamodule's train split. Give the datamodule the "
                "settings that the run was trained with."
            )
        outside = [query for query in trained if not coins.heads[query]]
    else:
        outside = list(collection.split(others))
    universe = trained if others == "coins" else [*trained, *outside]
    split_of = dict.fromkeys(outside, "train" if others == "coins" else others) | dict.fromkeys(trained, "train")
    known = {query: normalise(collection.queries[query]) for query in universe}
    copies = Counter(known.values())
    rng, held_out = np.random.default_rng(seed), set(outside)
    single = [query for query in universe if copies[known[query]] == 1]
    free = [query for query in single if collection.positives(split_of[query], query)]
    unanswered = len(single) - len(free)
    free = [free[place] for place in rng.permutation(len(free))]
    absent = [query for query in free if query in held_out]
    # With coins, count all queries rather than the tails: otherwise the number attacked would depend on the coins.
    apart = min(MOST_POPULATION, len(free) // 8 if others == "coins" else len(absent) // 4)
    if others == "coins":
        chosen = free[: min(count, len(free) - 2 * apart)]
    else:
        half = min(count // 2, len(absent) - apart)
        present = [query for query in free if query not in held_out]
        chosen = [*present[:half], *absent[:half]]
    attacked = set(chosen)
    population = [query for query in absent if query not in attacked][:apart]
    member = np.array([query not in held_out for query in [*chosen, *population]])
    if not len(population) or len(set(member[: len(chosen)])) < 2:
        raise DataError(
            f"{len(free)} queries are too few for an attack, not counting copies and those without a passage: there "
            "must be members, others, and some to compare with. Raise datamodule.max_train_queries and "
            "datamodule.max_passages, where they are set."
        )
    texts: list[str] = []
    passages: list[str] = []
    row_of: list[int] = []
    for place, query in enumerate([*chosen, *population]):
        for passage in collection.positives(split_of[query], query)[:rows]:
            texts.append(collection.queries[query])
            passages.append(collection.passages[passage])
            row_of.append(place)
    return Suspects(
        universe=universe, ids=[*chosen, *population], member=member, attacked=len(chosen), queries=texts,
        passages=passages, row_of=np.array(row_of), fair=others == "coins", left_out=len(universe) - len(single),
        unanswered=unanswered,
    )  # fmt: skip


Progress = Callable[[int, int], None]


@dataclass(eq=False, repr=False)
class Attacker:
    """Compute signals of target, reference and shadow models, for the same suspects, pool and settings."""

    target: Path
    suspects: Suspects
    pool: list[str]
    temperature: float
    batch_size: int
    device: str
    reference: TokenScores | EncodedPairs | None = None  # the suspects under a model trained without private data

    def signals(
        self, source: str | Path, progress: Progress, *, moments: bool = False
    ) -> dict[str, NDArray[np.float64]]:
        """Return signals of every suspect, averaged over its rows, each of shape ``(suspects,)``.

        ``moments`` adds the generator signal that needs the mean and deviation over its whole vocabulary.
        """
        seen, suspects = self.look(source, progress, moments=moments), self.suspects
        if isinstance(seen, TokenScores):
            known = self.reference if isinstance(self.reference, TokenScores) else None
            found = generator_signals(seen, suspects.queries, reference=known)
        else:
            paired = self.reference if isinstance(self.reference, EncodedPairs) else None
            found = encoder_signals(seen, temperature=self.temperature, reference=paired)
        return mean_by_query(found, suspects.row_of, len(suspects.ids))

    def look(self, source: str | Path, progress: Progress, *, moments: bool = False) -> TokenScores | EncodedPairs:
        """Return a model's token scores or embeddings of the suspects' rows."""
        texts = (self.suspects.queries, self.suspects.passages)
        settings: dict[str, Any] = {"batch_size": self.batch_size, "progress": progress}
        if is_generator(self.target):
            contract = None if is_generator(source) else load_generator(self.target).contract
            scorer = TokenScorer.load(source, contract=contract, device=self.device)
            return scorer.score(*texts, moments=moments, **settings)
        return encode_pairs(load_towers(source), *texts, self.pool, device=self.device, **settings)


PILOT_STEPS = 5
SIGNALS = "signals.npz"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Trained shadow models."""

    matrix: ShadowMatrix
    steps: int
    wanted: int
    seconds: float


class Shadows:
    """Train, score and discard ``count`` shadow models, one stage each, in ``minutes`` of estimated wall time.

    Guarantees:
        - A finished shadow model is not trained again; an interrupted one starts over.
        - Each has as many steps as the target's configuration, however slow the machine is.
        - There are ``count`` of them, or the even number that fits into the time at the speed of a few timed steps;
          none if not even four fit. The number is decided once: every text is in the training data of half of them.
        - Only a shadow model's signals and its ledger are kept.
    """

    def __init__(self, parts: Parts, *, count: int, minutes: float) -> None:
        self.parts, self.count, self.minutes = parts, count, minutes
        self.why_none: str | None = None
        self.planned = int(parts.make_trainer().max_steps)
        if self.planned < 1:
            raise ConfigurationError(
                "trainer.max_steps must be at least 1: it is the length of shadow trainings. Set it to the target's."
            )
        if getattr(parts.make_privacy(), "dataset_ledger", None) is not None:
            raise ConfigurationError(
                "privacy.dataset_ledger adds up releases, and shadow models are never released. Set it to null for "
                "task=membership."
            )

    def train(self, suspects: Suspects, attacker: Attacker, stages: Stages, *, scoring: float) -> Trained | None:
        """Return the matrix of all suspects, or None if the time is too short for four models."""

        def planned(folder: Path, resume: bool) -> dict[str, float]:
            # It does not matter which half the timed model gets.
            pace = self._pace(folder, suspects, balanced_halves(len(suspects.universe), FEWEST, seed=0)[0])
            each = self.planned * pace["seconds_per_step"] + pace["around"] + scoring
            return pace | {"seconds_each": each, "models": models_in(60 * self.minutes, each, wanted=self.count)}

        plan = stages.run("pilot", planned)
        count, spent = int(plan["models"]), stages.seconds["pilot"]
        if count == 0:
            self.why_none = (
                f"There are no shadow models, so the strongest attacks are missing: {FEWEST} of the target's "
                f"{self.planned} steps would take {FEWEST * plan['seconds_each'] / 60:.1f} minutes, but "
                f"task.minutes={self.minutes:g}. Raise it, and run the task in another hydra.run.dir."
            )
            return None
        halves = balanced_halves(len(suspects.universe), count, seed=self.parts.seed)
        columns = {query: place for place, query in enumerate(suspects.universe)}
        chosen = np.array([columns[query] for query in suspects.ids])
        models = []
        with ProgressLine("shadow models", every=0.0) as progress:
            for number in range(count):
                progress(number, count, f"of {self.planned} steps each")
                work = partial(
                    self._one, suspects=suspects, half=halves[number], attacker=attacker, number=number, count=count
                )
                stages.run(name := f"shadow_{number}", lambda folder, _, w=work: w(folder))  # type: ignore[misc]
                spent += stages.seconds[name]
                with np.load(stages.run_dir / name / SIGNALS, allow_pickle=False) as stored:
                    models.append({signal: np.asarray(stored[signal], dtype=np.float64) for signal in stored.files})
            progress(count, count)
        return Trained(
            matrix=ShadowMatrix.stack(models, halves[:, chosen]), steps=self.planned, wanted=self.count, seconds=spent
        )

    def _pace(self, folder: Path, suspects: Suspects, half: NDArray[np.bool_]) -> dict[str, float]:
        """Return the seconds per step and the fixed seconds per model, timed on a few steps of a model that is
        discarded.
        """
        watch, start = _Watch(), time.monotonic()
        self._fit(folder, suspects, half, steps=min(PILOT_STEPS, self.planned), seed=self.parts.seed, watch=watch)
        around = time.monotonic() - start - sum(watch.seconds)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return {"seconds_per_step": watch.typical(), "around": around}

    def _one(
        self, folder: Path, *, suspects: Suspects, half: NDArray[np.bool_], attacker: Attacker, number: int, count: int
    ) -> dict[str, float]:
        for left_over in folder.iterdir():  # left by an interrupted attempt
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        folder.chmod(0o700)  # its log reveals facts about the queries, too
        label, watch, start = f"shadow {number + 1} of {count}", _Watch(), time.monotonic()
        seed = self.parts.seed + 1 + number
        model = self._fit(folder, suspects, half, steps=self.planned, seed=seed, label=label, watch=watch)
        around, start = time.monotonic() - start - sum(watch.seconds), time.monotonic()
        content = io.BytesIO()
        with ProgressLine(f"{label}: signals") as progress:
            np.savez(content, **attacker.signals(model, progress))  # type: ignore[arg-type]
        write_whole(folder / SIGNALS, content.getvalue(), owner_only=True)
        shutil.rmtree(model)
        scoring = time.monotonic() - start
        return {"steps": self.planned, "seconds_per_step": watch.typical(), "around": around, "scoring": scoring}

    def _fit(
        self, folder: Path, suspects: Suspects, half: NDArray[np.bool_], *, steps: int, seed: int,
        watch: _Watch, label: str = "pilot",
    ) -> Path:  # fmt: skip
        L.seed_everything(seed, verbose=False)
        data = self.parts.make_datamodule()
        chosen = {query for query, inside in zip(suspects.universe, half, strict=True) if inside}
        module = self.parts.make_module(privacy=self.parts.make_privacy())

        def make_trainer(**settings: Any) -> L.Trainer:
            made: L.Trainer = self.parts.make_trainer(max_steps=steps, enable_checkpointing=False, **settings)
            return made

        callbacks = [PrivacyAccountant(run_dir=folder, **self.parts.start), StepProgress(label), watch]
        how = Training(run_dir=folder, make_trainer=make_trainer, callbacks=callbacks)
        train(module, data, how, after_setup=partial(data.train_on, chosen))
        if len(watch.seconds) < steps:  # stopped by a callback, or by a Trainer that treats an interruption as the end
            raise ResumeError(
                f"A shadow model was trained for {len(watch.seconds)} of {steps} steps and then stopped. The same "
                "command with resume=true trains it again."
            )
        saved: Path = module.save_model(folder / "model")
        return saved


def models_in(seconds: float, each: float, *, wanted: int) -> int:
    """Return how many shadow models with ``each`` seconds fit: an even number from 4 to ``wanted``, or 0.

    >>> models_in(1200, 100, wanted=8), models_in(1200, 190, wanted=8), models_in(1200, 301, wanted=8)
    (8, 6, 0)
    """
    fitting = min(wanted, int(seconds / max(each, 1e-9)) // 2 * 2)
    return fitting if fitting >= FEWEST else 0


class _Watch(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def typical(self) -> float:
        """Return the median without the first step, which includes setup; a microsecond if there was no step."""
        return float(np.median(self.seconds[1:] or self.seconds or [1e-6]))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if getattr(batch, "last", True):
            now = time.monotonic()
            self.seconds.append(now - self._since)
            self._since = now
