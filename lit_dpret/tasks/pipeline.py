"""`task=pipeline`: from a private query log to synthetic queries, a retriever, a card and a report.

The retriever trained on DP synthetic queries is compared with BM25, the untrained encoder, and the same retriever
trained on the real queries without privacy, on the real queries under DP, and on pseudo-queries cut out of the
passages. Each private system is a separate release; a user who publishes two of them, or the better one, must add them
up.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import lightning as L
from rich.console import Console

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.cards.tuning import TuningData
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.files import OutputFolder
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.privacy.ledger.siblings import among_siblings, siblings_now
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode, SyntheticData
from lit_dpret.privacy.noise import load_secret
from lit_dpret.report.html import RunReport
from lit_dpret.report.page import shortened
from lit_dpret.report.table import RowResult, console_table, write_csv, write_json
from lit_dpret.retrieval.statistics import Interval
from lit_dpret.retrieval.trec_runs import EvaluationResult
from lit_dpret.settings import Settings, picked
from lit_dpret.synthesis.pseudo_queries import write_pseudo_queries
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks.encoder_privacy import PUBLIC, privacy_of_encoder, refuse_trained
from lit_dpret.tasks.fit import PlannedFit, Training, plan_fit, refuse_several_ranks, train
from lit_dpret.tasks.multirun import planned_together, siblings_facts
from lit_dpret.tasks.parts import Parts, by_hash, check_run_dir, say, some_of
from lit_dpret.tasks.pipeline_stages import set_batch, stage_callbacks, train_retriever
from lit_dpret.tasks.ranking import score_bm25, score_embeddings
from lit_dpret.tasks.round_trip import KEPT, check_made
from lit_dpret.tasks.stages import Stages, settings_fingerprint


def _notes(rows: Sequence[RowResult]) -> list[str]:
    bare = [row.system for row in rows if row.privacy.startswith("no privacy guarantee")]
    found = [
        "The guarantee at the top of the page holds for the synthetic queries and for the retriever trained on them. "
        "Every other row has its own guarantee, in the table.",
        "Each row trained on the real queries is a separate release. Publishing several costs up to the sum of their "
        "epsilons, at the sum of their deltas. So does comparing them and publishing the better one.",
        "The numbers are computed on the test queries of the log, which no epsilon protects: show them only to those "
        "who may see these queries.",
    ]
    if bare:
        found.append(
            f"Trained on the real queries without protection: {'; '.join(bare)}. No guarantee covers these models or "
            "their numbers."
        )
    return found


def _files(folder: Path) -> dict[str, Path]:
    found = {
        "query generator": folder / "generator" / "model",
        "its privacy card": folder / "generator" / "privacy_card.html",
        "its ledger": folder / "generator" / "privacy_ledger.jsonl",
        "synthetic queries": folder / "synthetic" / "data",
        "retriever trained on them": folder / "from_synthetic" / "model",
        "retriever trained directly under DP": folder / "direct" / "model",
        "results": folder / "results.json",
    }
    return {what: path for what, path in found.items() if path.exists()}


METRIC_NAMES = {"ndcg@10": "nDCG@10", "recall@10": "Recall@10", "mrr@10": "MRR@10"}
System = Literal["bm25", "zero_shot", "original", "direct", "synthetic", "pseudo"]
# Settings that no finished stage depends on, or that the stage itself compares; they may change on resume.
_MAY_CHANGE = ("min_free_mb", "only", "embeddings", "round_trip_filter")
# Shared by the stages and removed at the end: embeddings of queries are as private as the queries.
EMBEDDINGS = "embeddings"
_PRIVATE_STAGES = ("direct", "generator")
_ROUND_TRIP_K = 10
_UNPROTECTED = "original queries, no privacy"
SCORE = "synthetic/nDCG@10"
"""The result by which pipelines are compared: that of the retriever trained on synthetic queries."""


@dataclass(kw_only=True)
class Pipeline(Settings):
    """Generator, synthetic queries, retriever, baselines, report."""

    undeclared_results: ClassVar[bool] = True  # results on the DataModule's test queries
    results_without_privacy: ClassVar[tuple[str, ...]] = (_UNPROTECTED,)
    """Results of systems without privacy, which must not decide the choice of a private run."""

    generator: Callable[..., Any]
    retriever: Callable[..., Any]
    generator_steps: int
    generator_batch: int
    generator_physical_batch: int
    generator_max_grad_norm: float
    retriever_steps: int
    retriever_batch: int
    retriever_max_grad_norm: float
    max_passages: int | None = None
    queries_per_passage: int = 1
    top_p: float = 0.8
    temperature: float = 1.0
    group_size: int = 64
    round_trip_filter: int | None = None
    samples: int = 10
    tuning_note: str | None = None
    tuning_data: TuningData = "unknown"
    only: Sequence[System] = get_args(System)
    embeddings: OutputFolder | None = None
    min_free_mb: float = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.only = tuple(some_of("task.only", self.only, get_args(System)))
        if self.round_trip_filter is not None and self.round_trip_filter < 1:
            raise ConfigurationError(f"task.round_trip_filter={self.round_trip_filter} must be at least 1, or null.")
        if counting := [one for one in ("direct", "synthetic", "pseudo") if one in chosen]:
            refuse_trained(self.retriever, "encoder", f"task.retriever.encoder, with task.only={counting}")

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every unfinished stage; return the headline numbers."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        refuse_several_ranks(parts.make_trainer(logger=False))
        self._parts = parts
        self._trips: dict[str, dict[str, Any]] = {}
        self._stages = Stages(
            parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint(), scratch=(EMBEDDINGS,)
        )
        privacy = self._privacy(self.generator_max_grad_norm)
        load_secret(privacy.secret_file, run_dir=parts.run_dir)  # refused here: the stages only know their own folders
        if privacy.guarantee == "dp" and "synthetic" in self.only:
            refuse_trained(self.generator, "pretrained", f"task.generator.pretrained under privacy={privacy.name}")
        log = self._log = self._whole_log()
        log.prepare_data()
        log.setup("fit")
        self._stages.on_data(
            log.collection.queries, log.collection.passages, log.collection.qrels, log.collection.users
        )
        self._require_room(privacy)
        self._siblings = self._together(privacy)
        L.seed_everything(parts.seed, verbose=False)
        self._searched = self._data_of_system(NoPrivacy())
        self._searched.setup("fit")
        systems: dict[System, Callable[[], RowResult]] = {
            "bm25": self._bm25,
            "zero_shot": self._zero_shot,
            "original": lambda: self._trained("original", _UNPROTECTED, NoPrivacy),
            "synthetic": lambda: self._from_synthetic(privacy),
            "pseudo": self._no_private_data,
        }
        if privacy.guarantee == "dp":
            systems["direct"] = lambda: self._trained(
                "direct", "original queries, direct DP", lambda: self._privacy(self.retriever_max_grad_norm)
            )
        rows = {name: systems[name]() for name in get_args(System) if name in self.only and name in systems}
        told = self._tell(rows)
        shutil.rmtree(parts.run_dir / EMBEDDINGS, ignore_errors=True)
        return {**told, **({SCORE: rows["synthetic"].metrics["nDCG@10"].mean} if "synthetic" in rows else {})}

    def planned_fits(self, parts: Parts) -> list[PlannedFit]:
        """Return the private trainings of ``run``: of the retriever and of the generator."""
        self._parts = parts
        if parts.make_privacy().guarantee != "dp":
            return []
        return [fit for stage in _PRIVATE_STAGES for fit in self._planned(stage)]

    def _planned(self, stage: str) -> list[PlannedFit]:
        """Return the private training of one stage, as a list; empty if its system is not requested."""
        system, make, steps, clip = {
            "direct": ("direct", self.retriever, self.retriever_steps, self.retriever_max_grad_norm),
            "generator": ("synthetic", self.generator, self.generator_steps, self.generator_max_grad_norm),
        }[stage]
        if system not in self.only:
            return []
        mode = self._privacy(clip)
        data = self._data_of_system(mode) if stage == "direct" else self._whole_log()
        data.prepare_data()
        data.setup("fit")
        if stage == "direct":
            set_batch(data, mode, self.retriever_batch)
        return plan_fit(mode, data, self._trainer(steps)(logger=False), make_module=make)

    def _require_room(self, privacy: Any) -> None:
        """Plan all private trainings first, so that none turns out impossible after another has spent its budget.

        Each reserves its own budget when it starts, so another run may still take the room in between.
        """
        # A sweep has already planned and reserved its trials, and stages that have begun are already counted.
        if privacy.guarantee != "dp" or self._parts.trial_of is not None:
            return
        waiting = [one for one in _PRIVATE_STAGES if not (self._parts.run_dir / one / LEDGER_NAME).exists()]
        planned = [fit for stage in waiting for fit in self._planned(stage)]
        if planned and privacy.dataset_ledger is not None:
            budget = min((fit.plan.budget for fit in planned), key=lambda budget: budget.delta)
            ledger = privacy.ledger_of_dataset(budget, run_dir=self._parts.run_dir)
            ledger.require([release for fit in planned for release in fit.releases])

    def _together(self, privacy: Any) -> Mapping[str, Any] | None:
        """Return what the ledger of each private training records about the other; None if there is only one.

        A command or a sweep that starts this task several times knows of more trainings.
        """
        if siblings_now() is not None or privacy.guarantee != "dp" or self._parts.trial_of is not None:
            return siblings_now()
        planned = [fit for stage in _PRIVATE_STAGES for fit in self._planned(stage)]
        found = siblings_facts(len(planned), ["what is trained"], private_runs=len(planned))
        return None if found is None else found | {"planned": planned_together(planned)}

    # -- pieces ------------------------------------------------------------------------------

    def _fingerprint(self) -> str:
        privacy = settings_fingerprint(self._privacy(1.0), but=["counts"])
        return settings_fingerprint(self, but=_MAY_CHANGE, seed=self._parts.seed, privacy=privacy)

    def _privacy(self, max_grad_norm: float) -> Any:
        mode = self._parts.make_privacy()
        if mode.guarantee == "none":
            return mode
        if mode.guarantee != "dp" or mode.candidates not in ("rows", "pool"):
            raise ConfigurationError(
                f"task=pipeline compares training with and without privacy, and privacy={mode.name} cannot train its "
                "generator and retriever privately. Choose privacy=dp_sgd, or privacy=none for the upper bound."
            )
        mode.max_grad_norm = max_grad_norm
        return mode

    def _whole_log(self) -> Any:
        return self._parts.make_datamodule(
            max_passages=None, expected_batch_size=self.generator_batch,
            physical_batch_size=self.generator_physical_batch,
        )  # fmt: skip

    def _data_of_system(self, mode: PrivacyMode) -> Any:
        """Return a retriever's data; with the declared sample rate if the rate must not be derived from n."""
        declared = mode.guarantee == "dp" and mode.neighbours == "add_or_remove"
        return self._parts.make_datamodule(
            max_passages=self.max_passages, expected_batch_size=None, physical_batch_size=self.retriever_batch,
            sample_rate=self._whole_log().sample_rate if declared else None,
        )  # fmt: skip

    def _callbacks(self, folder: Path, resume: bool, label: str) -> list[Any]:
        return stage_callbacks(
            folder, resume=resume, label=label, accountant={"trial_of": self._parts.trial_of},
            tuning_note=self.tuning_note, tuning_data=self.tuning_data,
        )  # fmt: skip

    def _trainer(self, steps: int) -> Callable[..., Any]:
        return lambda **settings: self._parts.make_trainer(max_steps=steps, **settings)

    # -- stages ------------------------------------------------------------------------------

    def _bm25(self) -> RowResult:
        queries, qrels = self._searched.evaluation_set("test")
        result = score_bm25(queries, self._searched.public_passages(), qrels)
        return _row("BM25", result, PUBLIC)

    def _zero_shot(self) -> RowResult:
        model = self._retriever(NoPrivacy())
        with ProgressLine("encoding passages and queries") as progress:
            model.prepare(self._searched, progress=progress)
        return _row("zero-shot encoder", self._score(model), privacy_of_encoder(model.pretrained, model))

    def _retriever(self, privacy: Any) -> Any:
        return self.retriever(privacy=privacy, cache_dir=self.embeddings or self._parts.run_dir / EMBEDDINGS)

    def _score(self, model: Any) -> EvaluationResult:
        queries, qrels = self._searched.evaluation_set("test")
        passages = self._searched.public_passages()
        asked = model.encode_queries(list(queries.values()), keep=True)
        found = model.encode_passages(list(passages.values()))
        return score_embeddings(list(queries), asked, list(passages), found, qrels)

    def _trained(
        self, name: str, label: str, privacy: Callable[[], Any], data: SyntheticDataModule | None = None
    ) -> RowResult:
        def work(folder: Path, resume: bool) -> dict[str, Any]:
            L.seed_everything(self._parts.seed, verbose=False)
            model = self._retriever(privacy())
            if data is not None:  # its queries were all encoded for the round trip; the cache holds them as a whole
                whole = self._made(Path(str(data.folder)), card=data.require_privacy_card)
                whole.setup("fit")
                model.prepare(whole)
            source = data or self._data_of_system(model.privacy)
            with among_siblings(self._siblings if model.privacy.guarantee == "dp" else siblings_now()):
                train_retriever(
                    model, source, folder, parts=self._parts, steps=self.retriever_steps, batch=self.retriever_batch,
                    callbacks=self._callbacks(folder, resume, f"retriever ({label})"), resume=resume,
                )  # fmt: skip
            result = self._score(model)
            return {"intervals": {m: [i.mean, i.low, i.high] for m, i in result.intervals.items()}}

        result = self._stages.run(name, work)
        card = read_card(self._parts.run_dir / name)
        metrics = {METRIC_NAMES[m]: Interval(*values) for m, values in result["intervals"].items()}
        return RowResult(system=label, metrics=metrics, privacy=privacy_line(card))

    def _from_synthetic(self, privacy: PrivacyMode) -> RowResult:
        """Train the generator, write synthetic queries, and train a retriever on those that pass the round trip."""
        self._stages.run("generator", lambda folder, resume: self._train_generator(folder, resume, privacy))
        self._stages.run("synthetic", self._synthesize)
        made = self._consistent("round_trip", self._parts.run_dir / "synthetic" / "data")
        label = "DP synthetic queries" if privacy.guarantee == "dp" else "synthetic queries, no privacy"
        return self._trained("from_synthetic", label, SyntheticData, made)

    def _train_generator(self, folder: Path, resume: bool, privacy: PrivacyMode) -> dict[str, Any]:
        with among_siblings(self._siblings):
            how = Training(
                run_dir=folder, make_trainer=self._trainer(self.generator_steps), resume=resume,
                callbacks=self._callbacks(folder, resume, "query generator"),
                loggers=self._parts.make_loggers(run_dir=folder),
            )  # fmt: skip
            return train(self.generator(privacy=privacy), self._log, how)

    def _synthesize(self, folder: Path, resume: bool) -> dict[str, Any]:
        passages = self._searched.public_passages()
        with ProgressLine("generating queries") as progress:
            synthesize(
                self._parts.run_dir / "generator" / "model", passages, folder / "data", passages_are_public=True,
                seed=self._parts.seed, tuning={"data": self.tuning_data, "note": self.tuning_note or ""},
                progress=progress, **picked(self, "queries_per_passage", "top_p", "temperature", "group_size"),
            )  # fmt: skip
        return {"passages": len(passages)}

    def _made(self, folder: Path, keep: Path | None = None, *, card: bool = True) -> SyntheticDataModule:
        return SyntheticDataModule(
            folder=folder, evaluation=self._searched, keep=keep, require_privacy_card=card,
            physical_batch_size=self.retriever_batch,
        )  # fmt: skip

    def _consistent(self, name: str, folder: Path, *, card: bool = True) -> SyntheticDataModule:
        """Return the queries of ``folder`` that find their own passage, or all without a filter; runs as stage
        ``name``.
        """

        def work(stage: Path, resume: bool) -> dict[str, Any]:
            model, data = self._retriever(NoPrivacy()), self._made(folder, card=card)
            k, passages = self.round_trip_filter or _ROUND_TRIP_K, self._searched.public_passages()
            found = check_made(model, data, stage, passages=passages, k=k, seed=self._parts.seed)
            if self.round_trip_filter is not None and not found["kept"]:
                raise DataError(
                    f"task.round_trip_filter={k}: none of {found['queries']} synthetic queries finds its own passage "
                    f"among the first {k} results. Continue with all of them (resume=true "
                    "task.round_trip_filter=null), or train the generator longer in a new run."
                )
            return found | {"filter": self.round_trip_filter}

        trip = self._trips[name] = self._stages.run(name, work)
        if trip["filter"] != self.round_trip_filter:
            raise ResumeError(
                f"task.round_trip_filter={self.round_trip_filter}, but stage {name} of this run was finished with "
                f"{trip['filter']}. Restore that value, or choose another hydra.run.dir."
            )
        keep = None if self.round_trip_filter is None else self._parts.run_dir / name / KEPT
        return self._made(folder, keep, card=card)

    def _no_private_data(self) -> RowResult:
        """Return the row of the same retriever, trained on pseudo-queries cut out of the public passages."""
        folder = self._parts.run_dir / "pseudo_queries"
        self._stages.run(
            "pseudo_queries",
            lambda folder, resume: {"folder": str(write_pseudo_queries(self._searched.public_passages(), folder))},
        )
        data = self._consistent("pseudo_round_trip", folder, card=False)
        row = self._trained("from_pseudo", "pseudo-queries from the passages", NoPrivacy, data)
        start = self._retriever(NoPrivacy())
        return replace(row, privacy=privacy_of_encoder(start.pretrained, start))

    def _tell(self, rows: dict[System, RowResult]) -> dict[str, float]:
        """Write and print the results, and the page if there are synthetic queries; return nDCG@10 by system."""
        folder, table = self._parts.run_dir, list(rows.values())
        self._stages.begin()  # rows without a stage are also results of this run
        queries, qrels = self._searched.evaluation_set("test")
        about = data_facts(self._searched, passages := self._searched.public_passages(), queries, qrels)
        write_json(table, folder / "results.json", about)
        write_csv(table, folder / "results.csv", about)
        Console().print(console_table(table, title="Retrieval"))
        where = (
            f"{len(queries)} test queries over {len(passages)} passages of {about['data']}; frozen encoder with a "
            "linear query head"
        )
        if "synthetic" in rows:
            self._report(table, where)
        else:
            say(where)
        if all((folder / one / LEDGER_NAME).exists() for one in _PRIVATE_STAGES):  # now, or before task.only changed
            say(
                "Two private trainings are compared here: publishing both, or the better one, costs up to the sum of "
                "their epsilons, at the sum of their deltas. Each card that records both states on what condition a "
                "smaller epsilon holds."
            )
        seconds = self._stages.seconds
        say(f"Stages took {sum(seconds.values()):.0f} s: " + ", ".join(f"{k} {v:.0f}" for k, v in seconds.items()))
        return {row.system: row.metrics["nDCG@10"].mean for row in table}

    def _report(self, table: list[RowResult], evaluated_on: str) -> None:
        """Write the page and print a short version of it; its sample of queries is chosen by a hash of the id."""
        folder = self._parts.run_dir
        synthetic = self._made(folder / "synthetic" / "data")
        synthetic.setup("fit")
        pairs = synthetic.pair_rows("train")
        shown = sorted(pairs, key=lambda row: by_hash(row.query_id))[: self.samples]
        trip = self._trips["round_trip"]
        notes = _notes(table)
        if self.round_trip_filter is not None:
            notes.append(
                f"The retriever was trained on the {trip['kept']} of {trip['queries']} synthetic queries that find "
                f"their own passage among the first {trip['k']} results of the zero-shot encoder; the pseudo-queries "
                "were chosen in the same way."
            )
        report = RunReport(
            title="Retrieval from private queries: what it reached, and what was promised",
            table=table,
            card=read_card(folder / "synthetic" / "data"),
            samples=[(row.passage_id, row.passage, row.query) for row in shown],
            round_trip=trip,
            files=(files := _files(folder)),
            command=self._parts.command,
            evaluated_on=evaluated_on,
            notes=notes,
        ).write(folder)
        for row in shown:
            say(row.query, f"    {shortened(row.passage, 160)}")
        say(
            f"Round trip: {trip['recall'][0]:.3f} of {trip['queries']} synthetic queries find their own passage among "
            f"the first {trip['k']}; with shuffled passages {trip['control'][0]:.3f}.",
            *(f"{what}: {path}" for what, path in {**files, "report": report}.items()),
        )


def _row(system: str, result: EvaluationResult, privacy: str) -> RowResult:
    return RowResult(
        system=system,
        metrics={METRIC_NAMES[name]: interval for name, interval in result.intervals.items()},
        privacy=privacy,
    )
