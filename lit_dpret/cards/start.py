"""Starting from another run's model: its cost is included in the new run's ledger and card.

A run with ``init_from=RUN`` writes the earlier run's releases into its own ledger before its first step, and its card
claims the composition of both. That two data sets share no person cannot be shown, so the two are always composed. The
run does not start unless the earlier card agrees with its ledger and with the model's files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_dpret.cards.audits import contradicted
from lit_dpret.cards.check import verify_card
from lit_dpret.cards.file import CARD_NAME, MODEL_FOLDER, card_above, card_sha256, described_files, read_card
from lit_dpret.cards.lineage import Lineage
from lit_dpret.cards.text import charges_every_unit
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, ResumeError
from lit_dpret.files import linked_folders
from lit_dpret.privacy.accounting import composition as accounting
from lit_dpret.privacy.accounting.releases import GaussianRelease, Release, release_from_dict
from lit_dpret.privacy.ledger.assumptions import units_before
from lit_dpret.privacy.ledger.dataset_file import EarlierRun
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.judgement import claimed_releases, every_unit_in_every_step, plan_of, promised_releases
from lit_dpret.privacy.ledger.run_ledger import (
    LEDGER_NAME,
    NOISE_KINDS,
    START_EVENT,
    PrivacyLedger,
    counted_in,
    ledger_identity,
    noise_keys,
    plans_of,
    private_start,
    recorded_start,
)
from lit_dpret.privacy.plan import EVOLUTION, PrivacyPlan


@dataclass(frozen=True)
class Start:
    """Facts about the run that the weights are loaded from."""

    folder: Path  # of the earlier run
    # The content of the ledger's event: ``name``, ``card_sha256``, ``public``, ``guarantee``, ``releases``,
    # ``parents``, ``runs`` (the identities of the releases' ledgers) and ``tuning`` (how its settings were chosen). If
    # known also ``head`` (the last record of a step in its own ledger), ``mode`` (if it trained nothing), ``unit``,
    # ``unit_by`` (the rows that form one unit), ``neighbours``, ``duplicates``, ``epsilon``, ``delta``, ``n_public``
    # (of the largest data set in its chain whose size is public) and ``units`` (the releases of each run of its chain,
    # with its ``max_units_per_user``); ``derived`` if its card inherited the claim of another one.
    facts: Mapping[str, Any]
    knob: str = "init_from"  # the setting that named it, for messages
    ledger: Path | None = None  # of its releases; None if there are none

    def releases(self) -> list[Release]:
        """Return the releases of the start; empty for a public one."""
        return [release_from_dict(release) for release in self.facts["releases"]]

    def earlier(self) -> tuple[EarlierRun, ...]:
        """Return the run of the start and its cost; empty for a public start."""
        return EarlierRun.of_start(self.facts)

    def uncounted(self, dataset: DatasetLedger | None) -> tuple[EarlierRun, ...]:
        """Return the run of the start if the data-set ledger does not count it yet; refuse any other ledger."""
        if self.facts["public"]:
            return ()
        records = [] if self.ledger is None else PrivacyLedger.read(self.ledger).records
        known = counted_in(records)
        if dataset is not None and dataset.path.exists() and dataset.begin() in known:
            if not {plan["run_id"] for plan in plans_of(records)} & dataset.run_ids():
                raise LedgerError(
                    f"privacy.dataset_ledger={dataset.path} counted {self.knob}={self.folder} and lacks it now: this "
                    "is an older copy. Restore the newest one: without it the spending is unknown."
                )
            return ()
        if known:
            raise ConfigurationError(
                f"{self.knob}={self.folder} was counted in a privacy.dataset_ledger, but this run names none or "
                "another: the total of the data set would miss this run. Name the same file."
            )
        return () if dataset is None else self.earlier()

    def check(self, mode: Any) -> None:
        """Refuse a start with which the run could not keep the guarantee of its mode."""
        guarantee, facts = mode.guarantee, self.facts
        if guarantee == "none" or facts["public"]:
            return
        if guarantee == "inherited":
            raise ConfigurationError(
                f"{self.knob}={self.folder} was trained on private data, and privacy={mode.name} claims no more than "
                "the card of its data: the two claims are not composed. Start from a public model, or train under "
                "privacy=dp_sgd."
            )
        if facts["guarantee"] != "dp":
            way = "Start from another run, or choose privacy=none."
            if facts["guarantee"] == "none":  # the only one that may come from public data
                way = "Start from another run, choose privacy=none, or, if it was trained on public data alone, set "
                way += "init_from_is_public=true."
            if self.knob != "init_from":  # another setting takes no declaration
                way = "Name a run that has one."
            raise ConfigurationError(
                f"{self.knob}={self.folder} carries no privacy guarantee ({facts['guarantee']}), so nothing made "
                f"from it under privacy={mode.name} can have one. {way}"
            )
        for knob in ("unit", "neighbours"):
            if facts[knob] != getattr(mode, knob):
                raise ConfigurationError(
                    f"privacy.{knob}={getattr(mode, knob)}, but {self.knob}={self.folder} was trained under "
                    f"privacy.{knob}={facts[knob]}, and epsilons of different guarantees do not add up. Use the same."
                )
        for release in self.releases():
            if isinstance(release, GaussianRelease):
                accounting.check_supported(release.law, mode.accountant, mode.neighbours)

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Refuse a plan whose claim would have another unit than the start, or a larger delta.

        Its delta can exceed that of the start only under a mode that makes its own plans.
        """
        if (theirs := self.facts.get("duplicates")) is not None:
            budget, where = plan.budget, f"{self.knob}={self.folder} was trained under"
            unit_by = self.facts.get("unit_by")
            budget.refuse_other_units(budget.unit, budget.neighbours, theirs, where, unit_by=unit_by)
        delta = self.facts.get("delta")
        if delta is not None and plan.budget.delta > delta * (1 + 1e-9):
            raise ConfigurationError(
                f"privacy.delta={plan.budget.delta:g}, but {self.knob}={self.folder} claims delta={delta:g}, and the "
                "claim is about its people too. Set privacy.delta to that, or to null."
            )
        if (units := self.facts.get("n_public")) is not None:
            plan.budget.refuse_large_delta(units)


def note_start(ledger: PrivacyLedger, start: Start | None) -> None:
    """Record the start of a run in its ledger once, before its first step.

    On resume the start must be the same; only its folder, further evidence on its card, and a card that was rewritten
    may differ.
    """
    before = recorded_start(ledger.records)
    now = None if start is None else dict(start.facts)
    begun = before is not None or bool(noise_keys(ledger.records))
    if begun and _lasting(before) != _lasting(now):
        ledger.close()
        told, given = ("nothing" if facts is None else facts["name"] for facts in (before, now))
        raise ResumeError(
            f"resume=true with another init_from: the ledger's run started from {told}, this one from {given}, or from "
            "another state of it. Restore it, or start a new run in another hydra.run.dir."
        )
    if not begun and now is not None:
        ledger.append("event", name=START_EVENT, start=now)


def _lasting(facts: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the facts of a start that never change; the ledgers of its runs, if any, identify it."""
    if facts is None or not facts["runs"]:
        return facts
    of_card = ("name", "head", "card_sha256", "parents", "assumptions", "not_covered")
    return {key: value for key, value in facts.items() if key not in of_card}


def model_folder(run: str | Path) -> Path:
    """Return the model folder of a run; ``run`` itself if it is one."""
    folder = Path(run).expanduser()
    return folder / MODEL_FOLDER if (folder / MODEL_FOLDER).is_dir() else folder


def places_of(model: str | Path) -> list[Path]:
    """Return the places where files that document a model's training may be.

    They are its folder, the ``model/`` in it, and the ``model/`` that it is or is a part of, with the run around that;
    and the same of the folders that its weights are linked from. For a model on the hub, it is the cached folder with
    the card, ledger and note that are beside its weights; none if it has none, or if the hub cannot be asked.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return _cached_notes(str(model))
    places = [folder.resolve(), model_folder(folder).resolve()]
    places += [target for place in tuple(places) for target in linked_folders(place)]
    for found in tuple(places):
        for place in (found, *list(found.parents)[:2]):
            if place.name == MODEL_FOLDER:
                places += [place, place.parent]
    return list(dict.fromkeys(places))


@lru_cache(maxsize=64)
def _cached_notes(name: str) -> list[Path]:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return []
    from transformers.utils.hub import cached_files  # as does everything that reads a model from the hub

    from lit_dpret.privacy.ledger.trained import NOTE_NAME

    failures = ("gated_repo", "missing_entries", "connection_errors")
    lenient = {f"_raise_exceptions_for_{failure}": False for failure in failures}
    with suppress(OSError, ValueError):  # no such repository
        found = cached_files(name, [CARD_NAME, LEDGER_NAME, NOTE_NAME], **lenient) or []
        return list(dict.fromkeys(Path(file).parent for file in found))
    return []


def ledgers_of(model: str | Path) -> list[Path]:
    """Return the run ledgers in these places."""
    return [ledger for place in places_of(model) if os.path.lexists(ledger := place / LEDGER_NAME)]


def traces_of_training(model: str | Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that shows a model's training run, with its mode or the guarantee on its card.

    The search covers cards, ledgers and the notes of `save_model`, in and around the folder (`places_of`), and a card
    further up that lists its files. Each may survive where another was lost.
    """
    from lit_dpret.privacy.ledger.trained import NOTE_NAME, noted_in  # it needs torch, and verification imports this

    for place in places_of(model):
        if os.path.lexists(place / CARD_NAME):
            yield place / CARD_NAME, str(read_card(place)["claim"]["guarantee"])
        yield from ((place / NOTE_NAME, run.privacy) for run in sorted(noted_in(place)))
        if os.path.lexists(ledger := place / LEDGER_NAME):
            records = PrivacyLedger.read(ledger).records
            yield from ((ledger, str(plan["mode"])) for plan in plans_of(records))
            if (behind := private_start(records)) is not None:
                yield ledger, behind[1]
    if (folder := Path(model).expanduser()).is_dir() and (above := card_above(folder)) is not None:
        yield above, str(read_card(above)["claim"]["guarantee"])


def read_start(run: str | Path, *, public: bool, knob: str = "init_from") -> Start:
    """Read the start for ``init_from=run``; ``knob`` is the setting that named it.

    Guarantees:
        - A private start is accepted only if its card agrees with its ledger, file for file and number for number.
        - A start whose card an audit contradicts has no guarantee to pass on.
        - A start that was trained on synthetic data, or exported, costs what the private runs behind it cost. Their
          cards and ledgers must be near it, or in its export, and verify together with its own.
        - Without a card, only a declaration (``public``) makes a start public. The declaration is refused if a card,
          note or ledger shows training under any mode but ``privacy=none``. For ``privacy=none``, the declaration
          alone decides whether the data were public.
    """
    folder = Path(run).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"{knob}={run} is not a folder. Give the folder of a run, or a model folder.")
    around = folder.resolve().parent
    if folder.resolve().name == MODEL_FOLDER and (around / CARD_NAME).is_file() and (around / LEDGER_NAME).is_file():
        folder = around
    name = folder.resolve().name
    facts: dict[str, Any] = {"name": name, "card_sha256": None, "public": public, "guarantee": None,
                             "releases": [], "parents": [], "runs": []}  # fmt: skip
    if public:
        _refuse_what_was_private(folder, knob, run)
        # The model that is declared public may have been trained by this program.
        if (ledger := folder / LEDGER_NAME).is_file():
            facts["runs"] = [ledger_identity(PrivacyLedger.read(ledger).records)]
    if not (folder / CARD_NAME).is_file() and (model_folder(folder) / CARD_NAME).is_file():  # of an export
        folder = model_folder(folder)
    if not (folder / CARD_NAME).is_file():
        if not public:
            way = "If it was trained on public data alone, set init_from_is_public=true."
            if knob != "init_from":  # another setting composes with a private run, and takes no declaration
                way = "Name the folder of the run that trained it under a privacy guarantee."
            raise ConfigurationError(
                f"{knob}={run} has no {CARD_NAME}: the private data behind its weights are unknown. {way}"
            )
        return Start(folder, facts, knob)
    card = read_card(folder)
    claim, sha256 = card["claim"], card_sha256(folder)
    parents = [{"name": card["subject"]["name"], "sha256": sha256, "schema": card["schema"]}, *card["parents"]]
    facts |= {"card_sha256": sha256, "guarantee": claim["guarantee"], "parents": parents}
    if public:
        return Start(folder, facts, knob)
    derived = card["mechanism"]["kind"] == "post_processing"
    ledger = _ledger_behind(card, folder, f"{knob}={run}") if derived else folder / str(card["ledger"]["name"])
    votes = card["mechanism"].get("mode") == EVOLUTION
    if card["subject"]["artifact_type"] != "weights" and not (votes and knob == "task.generator"):
        raise ConfigurationError(
            f"{knob}={run} holds a {card['subject']['artifact_type']}, not a model that a run trained. Name the run "
            "that trained one."
        )
    model = folder if votes else model_folder(folder)
    listed = card["subject"]["sha256"]
    if not listed or (not votes and described_files(model) - set(listed)):
        raise DataError(f"{knob}={run}: its card does not describe the model in {model}. Finish that run first.")
    if not ledger.is_file():
        raise DataError(
            f"{knob}={run}: its card does not have {ledger.name} next to it, the ledger from which its claim follows. "
            "Name the whole folder of the run, which holds both."
        )
    if problems := verify_card(card, ledger, folder=model):
        raise DataError(f"{knob}={run}: its card does not match its files: {problems[0]}")
    try:
        records = PrivacyLedger.read(ledger).records
        releases = claimed_releases(records)
    except LedgerError as error:
        raise DataError(f"{knob}={run}: {error}") from error
    if charges_every_unit(card):
        releases = every_unit_in_every_step(releases)
    facts |= {"mode": EVOLUTION} if votes else {}
    # The last record of a step distinguishes two copies of a ledger if either made one more step. Resuming a finished
    # run releases nothing, and keeps that record.
    noised = [str(record["hash"]) for record in records if record["kind"] in NOISE_KINDS]
    facts["head"] = noised[-1] if noised else card["ledger"]["head"]
    facts["runs"] = [ledger_identity(records), *(recorded_start(records) or {}).get("runs", [])]
    if derived:
        facts["derived"] = True
        facts["runs"] += [f"claim {card['ledger']['head']}"]  # as noted with weights that were trained on these data
        if (own := folder / LEDGER_NAME).is_file():
            facts["runs"] += [ledger_identity(PrivacyLedger.read(own).records)]
    facts["releases"] = [replace(release, label="earlier run").to_dict() for release in releases]
    facts["tuning"] = {key: card["tuning"].get(key) for key in ("data", "accounted", "text")}
    if contradicted(card):
        facts["guarantee"] = "not_proved"
    elif claim["guarantee"] == "dp":
        facts |= {key: claim[key] for key in ("unit", "neighbours", "duplicates", "epsilon", "delta")}
        plan, _ = plan_of(records)
        facts |= {} if plan is None or plan.budget.unit_by is None else {"unit_by": plan.budget.unit_by}
        # What else the composed claim rests on, and what it does not cover.
        facts["randomness"] = dict(card["randomness"])
        facts["assumptions"] = [one for one in card["assumptions"] if one["holds"] is not True]
        facts["not_covered"] = card["not_covered"]
        planted = card["empirical"].get("planted") or (recorded_start(records) or {}).get("planted")
        facts |= {} if planted is None else {"planted": planted}
        # For a start that was trained on synthetic data, the plan is that of the run that made the data.
        behind = None if plan is None else plan.n_public
        sizes = (card["mechanism"].get("n_public"), behind, (recorded_start(records) or {}).get("n_public"))
        facts["n_public"] = max((size for size in sizes if size is not None), default=None)
        runs = [(promised_releases(records), claim.get("max_units_per_user")), *units_before(recorded_start(records))]
        if charges_every_unit(card):
            runs = [(every_unit_in_every_step(own), most) for own, most in runs]
        facts["units"] = [
            {"max_units_per_user": most, "releases": [release.to_dict() for release in own]} for own, most in runs
        ]
    return Start(folder, facts, knob, ledger)


def _ledger_behind(card: Mapping[str, Any], folder: Path, given: str) -> Path:
    """Return the ledger of a derived card's claim; refuse a card that does not verify with all cards before it."""
    if failed := verify_chain(folder).failed:
        raise DataError(
            f"{given} was derived from a private run, but does not verify with the runs before it: "
            f"{failed[0].artefact}, {failed[0].check}. Put their folders back next to it; lit-dpret verify {folder} "
            "says what is missing."
        )
    lineage = Lineage()
    lineage.look_near(folder / CARD_NAME)
    if (ledger := lineage.ledger(card, folder / CARD_NAME)) is None:
        raise DataError(f"{given}: the ledger of {card['parents'][-1]['name']} is not near it. Put its folder back.")
    return ledger


def _refuse_what_was_private(folder: Path, knob: str, run: str | Path) -> None:
    if not (folder / CARD_NAME).is_file() and (above := card_above(folder)) is not None:
        raise ConfigurationError(
            f"{knob}={run} is declared public, but it is part of an artefact described by {above}, and that card "
            "mentions private data. Name its run, without init_from_is_public=true."
        )
    for place, privacy in traces_of_training(folder):
        if privacy != "none":
            raise ConfigurationError(
                f"{knob}={run} is declared public, but {place} mentions private data ({privacy}). Name the whole "
                "folder of that run, without init_from_is_public=true: its claim is then composed.",
                trap="T30",
            )
