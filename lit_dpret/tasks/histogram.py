"""`task=histogram`: release a noised histogram of the private queries, charged together with a generator."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from lit_dpret.callbacks.endings import ends_by_rows
from lit_dpret.callbacks.own_code import refuse_false_bound
from lit_dpret.cards.card import CARD_NAME, RunFacts, build_card, read_card, subject_of, verify_card, write_card
from lit_dpret.cards.file import refuse_another_claim
from lit_dpret.cards.provenance import environment_facts
from lit_dpret.cards.start import Start, note_start, read_start
from lit_dpret.cards.tuning import TuningData
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.batches import UnitOwners, row_keys
from lit_dpret.privacy.budget import PrivacyBudget, show_delta, show_epsilon
from lit_dpret.privacy.histogram import HISTOGRAM_NAME, ReleasedHistogram, histogram_plan, release_histogram
from lit_dpret.privacy.ledger.assumptions import Assumption, leaks
from lit_dpret.privacy.ledger.dataset_account import require_room, reserved
from lit_dpret.privacy.ledger.dataset_file import EarlierRun
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.private_run import Fingerprints, PrivateRun
from lit_dpret.privacy.ledger.run_ledger import FAILED, LEDGER_NAME, PrivacyLedger, plans_of
from lit_dpret.privacy.ledger.siblings import note_siblings, siblings_now
from lit_dpret.privacy.modes import GaussianMode
from lit_dpret.privacy.noise import load_secret, published_secret
from lit_dpret.privacy.plan import HISTOGRAM, PrivacyPlan
from lit_dpret.settings import Settings, picked
from lit_dpret.synthesis.filters.bins import Bins, LengthBins
from lit_dpret.synthesis.filters.released import foreign_code
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.texts import queries_of as protected_queries
from lit_dpret.texts import refuse_quoted


@dataclass(kw_only=True)
class Histogram(Settings):
    """Release a histogram of the private train queries over public bins.

    The ledger of this run begins with the cost of the generator's training, so that its card claims both together;
    queries chosen by the histogram (``filter=histogram_match``) get that card.
    """

    releases_itself: ClassVar[bool] = True

    generator: Path
    bins: Bins | None = None
    noise_multiplier: float = 10.0
    max_count: int = 1
    tuning_data: TuningData = "unknown"
    tuning_note: str | None = None
    min_free_mb: float = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bins = LengthBins() if self.bins is None else self.bins

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``histogram.json``, its ledger and its card to the run folder; return the epsilons."""
        folder = parts.run_dir
        check_run_dir(folder, min_free_mb=self.min_free_mb)
        mode = parts.make_privacy()
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"task=histogram adds noise and charges it, but privacy={mode.name} does neither. Choose "
                "privacy=dp_sgd, with the unit, neighbours and delta of the generator."
            )
        if mode.noise_multiplier is not None:
            raise ConfigurationError(
                f"privacy.noise_multiplier={mode.noise_multiplier:g} is for training. Leave it null, and set "
                "task.noise_multiplier for the histogram."
            )
        start = self._start(mode)
        data, units = read_units(parts, mode)
        noted, named = {"task.tuning_note": self.tuning_note or ""}, {"hydra.run.dir": folder.resolve().name}
        refuse_quoted(protected_queries(data), noted, named)
        self._bins.fit(data.public_passages)
        public, delta = mode.public_units(len(units)), start.facts["delta"]
        if mode.delta is None and public is not None:
            delta = min(delta, 1 / (2 * public))  # the log may have grown since the generator's run
        budget = PrivacyBudget(eps=mode.eps, delta=delta, unit=mode.unit, neighbours=mode.neighbours).of_units(data)
        plan = histogram_plan(
            budget, noise_multiplier=self.noise_multiplier, max_count=self.max_count, n_public=public,
            **picked(mode, "accountant", "max_units_per_user", "noise"),
        )  # fmt: skip
        start.check_plan(plan)
        dataset = mode.ledger_of_dataset(plan.budget, run_dir=folder)
        if parts.resume and (folder / CARD_NAME).is_file():
            with copied_ledger(parts) as copied:
                self._open(copied, mode, data, plan, start, dataset).ledger.close()
            return self._tell(folder)
        earlier = start.uncounted(dataset)
        if dataset is not None:
            require_room(dataset, folder / LEDGER_NAME, plan.release(), steps=1, earlier=earlier)
        run = self._open(parts, mode, data, plan, start, dataset)
        with run.ledger:
            noised = self._release(run, plan, units, dataset, earlier)
            histogram = ReleasedHistogram(
                names=self._bins.names, counts=tuple(map(float, noised)), bins=self._bins.spec(),
                noise_std=plan.noise_std, max_count=self.max_count,
            )  # fmt: skip
            file = histogram.write(folder)
            run.ledger.append("end", reason="finished", steps=1)
            records = run.ledger.records
        write_card_of_counts(
            records, data, folder, [file],
            trusts=[*self._bins.trusts, *foreign_code(self._bins)],
            mechanism={"bins": len(noised), "max_count": self.max_count},
            tuning={"data": self.tuning_data, "note": self.tuning_note or ""},
            output_released=("the noised histogram", "what it was charged together with"),
        )  # fmt: skip
        return self._tell(folder)

    def _start(self, mode: GaussianMode) -> Start:
        """Read the cost of the generator, after checking its card against its ledger."""
        folder = self.generator
        if not (folder / LEDGER_NAME).is_file() and (folder.parent / LEDGER_NAME).is_file():
            folder = folder.parent
        start = read_start(folder, public=False, knob="task.generator")
        start.check(mode)
        if mode.delta is not None and mode.delta != start.facts["delta"]:
            raise ConfigurationError(
                f"privacy.delta={mode.delta:g}, but the generator's claim is at delta={start.facts['delta']:g}: one "
                "claim has one delta. Leave privacy.delta null."
            )
        self.generator = folder
        return start

    def _open(
        self, parts: Parts, mode: GaussianMode, data: Any, plan: PrivacyPlan, start: Start,
        dataset: DatasetLedger | None,
    ) -> PrivateRun:  # fmt: skip
        folder, bins = parts.run_dir, self._bins.fingerprint()
        if parts.resume and (folder / LEDGER_NAME).is_file():
            before = PrivacyLedger.read(folder / LEDGER_NAME).records
            if any(plan.get("bins") != bins for plan in plans_of(before)):
                raise ResumeError(
                    "resume=true with other bins: this run was started for another histogram. Restore task.bins, or "
                    "start a new run in another hydra.run.dir."
                )
        most = f"at most {self.max_count} count{'' if self.max_count == 1 else 's'}"
        run = counting_run(parts, mode, plan, data, dataset, mode=HISTOGRAM, rows_per_unit=most, bins=bins)
        note_start(run.ledger, start)
        return run

    def _release(
        self, run: PrivateRun, plan: PrivacyPlan, units: Any, dataset: DatasetLedger | None,
        earlier: tuple[EarlierRun, ...],
    ) -> np.ndarray:  # fmt: skip
        with over_rows(run):
            contributions = contributed(units, self._bins)
        with reserved(run, dataset, plan.release(), steps=1, earlier=earlier) as reserve, over_rows(run):
            return release_histogram(
                run, plan, contributions, bins=len(self._bins.names), max_count=self.max_count,
                spec=self._bins.fingerprint(), grant=lambda: reserve(0),
            )  # fmt: skip

    def _tell(self, folder: Path) -> dict[str, float]:
        card, histogram = finished_card(folder), ReleasedHistogram.read(folder)
        for name, share in zip(histogram.names, histogram.target, strict=True):
            say(f"{name:24s} {share:7.1%}")
        claim, parts = card["claim"], (card["accounting"] or {}).get("init_from") or {}
        told = {"bins": float(len(histogram.names))}
        if claim["epsilon"] is not None:
            told |= {"epsilon": claim["epsilon"], "epsilon_of_histogram_alone": parts["epsilon_of_this_run"],
                     "epsilon_of_generator_alone": parts["epsilon_of_start"]}  # fmt: skip
            say(
                f"epsilon of task.generator and histogram together: {show_epsilon(claim['epsilon'])} (task.generator "
                f"alone {show_epsilon(parts['epsilon_of_start'])}), delta {show_delta(claim['delta'])}"
            )
        say(f"histogram: {folder / HISTOGRAM_NAME}\nprivacy card: {folder / CARD_NAME}")
        return told


def read_units(parts: Parts, mode: Any) -> tuple[Any, Any]:
    """Read the data and group them for a release of counts over units; return data module and units."""
    data = parts.read_data()
    refuse_another_claim(data)
    data.use_unit(mode.unit, mode.neighbours)
    refuse_false_bound(mode, data)
    units = data.train_units()
    if foreign_code(units) or foreign_code(data):
        owners = UnitOwners(mode.unit)
        for unit in range(len(units)):
            owners.note(unit, row_keys(units.rows(unit), mode.unit, or_row=True))
    return data, units


def write_card_of_counts(
    records: Any, data: Any, folder: Path, files: list[Path], *, trusts: Iterable[Assumption], **facts: Any
) -> None:
    """Write the card of released counts; ``facts`` are fields of `RunFacts`."""
    # The bound per unit relies on the units of a DataModule from outside this package.
    of_units = foreign_code(data, "that a unit has all rows of one person or query, and no other's,")
    run = RunFacts(environment=environment_facts(), assumptions=[*leaks(records), *trusts, *of_units], **facts)
    write_card(build_card(records, subject_of("histogram", folder.resolve().name, files, root=folder), run), folder)


def finished_card(folder: Path) -> dict[str, Any]:
    """Return the card of a finished release after checking it against its ledger and its files."""
    card = read_card(folder)
    if problems := verify_card(card, folder / LEDGER_NAME, folder=folder):
        raise ResumeError(f"The card in {folder} does not match the files there: {problems[0]}")
    return card


@contextmanager
def copied_ledger(parts: Parts) -> Iterator[Parts]:
    """Yield the parts with a copy of the ledger, to compare a finished run with the request without continuing it."""
    with TemporaryDirectory() as place:
        shutil.copy(parts.run_dir / LEDGER_NAME, place)
        yield replace(parts, run_dir=Path(place))


def counting_run(
    parts: Parts, private: GaussianMode, plan: PrivacyPlan, data: Any, dataset: DatasetLedger | None, **described: Any
) -> PrivateRun:
    """Open the ledger of a task that releases counts under a plan without training; ``described`` adds facts."""
    seed = private.noise_seed
    run = PrivateRun.open(
        parts.run_dir / LEDGER_NAME,
        resume=parts.resume,
        secret=load_secret(private.secret_file, run_dir=parts.run_dir) if seed is None else published_secret(seed),
        described={
            **picked(private, "unit", "neighbours", "secure_rng", "noise_seed"),
            "law": plan.law.to_dict(),
            "planned_steps": plan.steps,
            "plan": plan.to_dict(),
            "plan_fingerprint": plan.fingerprint(),
            **described,
        },
        fingerprints=Fingerprints(data=data.data_fingerprint),
        run_id=None if seed is None else "seeded",
        dataset=dataset,
    )
    note_siblings(run.ledger, siblings_now())
    return run


@contextmanager
def over_rows(run: PrivateRun) -> Iterator[None]:
    """Record an end in the ledger if this work on private rows fails, as training does: no noise covers a failure."""
    try:
        yield
    except BaseException as error:
        if ends_by_rows(error, at_hand=True):
            run.ledger.append("end", reason=FAILED, steps=len({step for _, step in run.releases}))
        raise


def contributed(units: Any, bins: Bins) -> list[list[int]]:
    """Return the bins of each unit's queries, each query once, ordered by a hash of its text; private."""
    rows = queries_of(units)
    texts = [row.query for unit in rows for row in unit]
    sources = [row.passage_id for unit in rows for row in unit]
    placed = iter(bins.assign(texts, sources).tolist() if texts else [])
    return [[next(placed) for _ in unit] for unit in rows]


def queries_of(units: Any) -> list[list[Any]]:
    """Return, for each unit, one row per query, ordered by a hash of the query text; private."""
    found = []
    for unit in range(len(units)):
        first: dict[str, Any] = {}
        for row in units.rows(unit):
            first.setdefault(row.query_id, row)
        found.append(sorted(first.values(), key=lambda row: _order(row.query)))
    return found


def _order(text: str) -> bytes:
    return sha256(f"lit-dpret histogram\x1f{text}".encode("utf-8", "surrogatepass")).digest()
