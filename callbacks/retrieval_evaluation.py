"""Validation within a run: retrieval metrics of the current model on public, synthetic or private queries.

A metric costs nothing on public queries, and nothing more on synthetic ones that have their own privacy card. On
private dev queries it is a release that no noise covers, whatever the mode. It is refused unless declared, and then the
card states no epsilon, even if the training queries are different ones: a user may have queries in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_dpret.callbacks.averages import averaged
from lit_dpret.callbacks.log_gate import tell
from lit_dpret.callbacks.planning import accountant_of, ledger_of
from lit_dpret.callbacks.public_validation import ask_stoppers, stop_by
from lit_dpret.cards.file import card_of_data, check_dataset_card
from lit_dpret.cards.lineage import training_behind
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.ledger.run_ledger import DECLARED_EVENT, PRIVATE_EVENT
from lit_dpret.retrieval.metrics import Metric
from lit_dpret.retrieval.search import lexicographic_rank, search
from lit_dpret.retrieval.trec_runs import DEFAULT_METRICS, EvaluationResult, Ranking, check_qrels, evaluate
from lit_dpret.settings import require_choice, require_whole
from lit_dpret.texts import normalise, train_queries

DevData = Literal["public", "synthetic", "private"]

#: The share of public queries that may also be train queries: common questions occur in every log, so a benchmark's
#: overlap up to this says nothing about this log.
SHARED_BY_CHANCE = 0.1


@dataclass(kw_only=True, eq=False, repr=False)
class RetrievalEvaluation(Callback):
    """Rank the passages for one split's queries every few steps, and log the mean metrics, such as ``val/ndcg@10``.

    Guarantees:
        - Under a mode with a guarantee, nothing is computed on undeclared data.
        - ``data=private`` needs ``card_entry=true``. Before each evaluation, an event with a `NonPrivateRelease` is
          then in the ledger on disk; the card says what was released and states no epsilon.
        - ``data=public`` is refused if the queries are those that the run protects, whatever their split is called. It
          is also refused if they are those behind an inherited claim (``privacy=synthetic``) or behind the run that
          this one starts from, provided that `training_behind` recognises their log.
        - ``data=synthetic`` is checked against the privacy card of the data.
        - Nothing is drawn from any random stream, so the run is the same with and without evaluation.
        - On several ranks, rank 0 evaluates, and all ranks get the means.
        - If a callback averages the weights, the average is evaluated.
        - An `EarlyStopping` that monitors one of the metrics decides after each evaluation.

    Args:
        data: The kind of the evaluated queries: ``public``, ``synthetic`` or ``private``. Null is for
            ``privacy=none`` alone.
        card_entry: Declares that metrics of private dev queries may be released, which leaves no guarantee.
        datamodule: A DataModule to evaluate on; null for the run's own.
        split: The split of its queries.
        every_n_steps: Evaluate each time this many logical steps are done, and after the last one.
        metrics: The metrics to compute, such as ``ndcg@10``.
        top_k: How deep to rank; at least the deepest cutoff of the metrics.
        max_queries: Evaluate on this many queries, the first by id; null for all.
        prefix: The prefix of the logged names.

    Raises:
        ConfigurationError: A setting is out of range, or two contradict each other.
    """

    data: DevData | None = None
    card_entry: bool = False
    datamodule: Any = None
    split: str = "dev"
    every_n_steps: int = 100
    metrics: Sequence[str] = DEFAULT_METRICS
    top_k: int = 100
    max_queries: int | None = None
    prefix: str = "val"
    #: No other code may declare one of these names to log a number, or to keep one in an attribute or checkpoint.
    tells_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        knob = "callbacks.evaluation"
        if self.data is not None:
            require_choice(f"{knob}.data", self.data, get_args(DevData))
        if self.card_entry and self.data != "private":
            raise ConfigurationError(
                f"{knob}.card_entry=true is only for data=private, and data={self.data}. Leave it false."
            )
        require_whole(knob, self, 1, "every_n_steps")
        require_whole(knob, self, 1, "max_queries", null=True)
        parsed = [Metric.parse(name) for name in self.metrics]
        if not parsed or self.top_k < max(metric.cutoff for metric in parsed):
            raise ConfigurationError(
                f"{knob}.top_k={self.top_k} cannot compute metrics={list(self.metrics)}: name at least one, and none "
                "with a cutoff above top_k."
            )
        self.metrics = tuple(str(metric) for metric in parsed)
        self.last: EvaluationResult | None = None
        self._loaded: tuple[dict[str, str], dict[str, dict[str, int]], dict[str, str]] | None = None

    # -- which queries it may evaluate -------------------------------------------------------

    @property
    def declared_leak(self) -> str | None:
        """The declared leak, for `task=doctor`; None without one."""
        if self.data != "private":
            return None
        return f"callbacks.evaluation.data=private logs {', '.join(self.metrics)} of private {self.split} queries."

    @property
    def public_metrics(self) -> tuple[str, ...]:
        """The logged names that may stop a run or select a checkpoint: on public or synthetic queries."""
        return tuple(f"{self.prefix}/{name}" for name in self.metrics) if self.data in ("public", "synthetic") else ()

    def refuse_undeclared(self, module: Any, data: Any) -> None:
        """Refuse an evaluation whose data are undeclared, or contradict their declaration."""
        if getattr(getattr(module, "privacy", None), "guarantee", "none") == "none":
            return
        if self.data is None:
            raise ConfigurationError(
                f"RetrievalEvaluation computes metrics of the {self.split} queries and does not declare their kind. "
                "Set callbacks.evaluation.data to public or synthetic; or to private, with card_entry=true, and the "
                "card will state no epsilon.",
                trap="T25",
            )
        if self.data == "private" and not self.card_entry:
            raise ConfigurationError(
                f"RetrievalEvaluation(data=private): each metric of the {self.split} queries is an uncounted release. "
                "Evaluate on other queries, or afterwards (task=evaluate); or set "
                "callbacks.evaluation.card_entry=true, and the card will say so and state no epsilon.",
                trap="T25",
            )
        if self.data == "public" and self.datamodule is None and self.split == "train":
            raise ConfigurationError(
                "callbacks.evaluation.data=public, but callbacks.evaluation.split=train holds the queries that the run "
                "protects. Choose another split or callbacks.evaluation.datamodule.",
                trap="T25",
            )
        source = self.datamodule if self.datamodule is not None else data
        if self.data == "public" and (card := card_of_data(source, self.split)) is not None:
            raise ConfigurationError(
                f"callbacks.evaluation.data=public, but the {self.split} queries have a privacy card ({card}). Set "
                "callbacks.evaluation.data=synthetic, or evaluate on other queries.",
                trap="T25",
            )
        if self.data == "synthetic":
            self._check_synthetic(source)

    def refuse_protected(self, module: Any, data: Any) -> None:
        """Refuse queries declared public that are train queries of ``data``, which must be set up."""
        if self.data != "public" or getattr(getattr(module, "privacy", None), "guarantee", "none") != "dp":
            return
        source = self.datamodule if self.datamodule is not None else data
        queries, _, _ = self._load(source)
        if trains_on(data, queries, users_of=source if module.privacy.unit == "user" else None):
            raise ConfigurationError(
                f"callbacks.evaluation.data=public, but over a tenth of callbacks.evaluation.split={self.split} are "
                "train queries of the run, or of its users. Evaluate on others, omit them from training "
                "(datamodule.drop_overlap=true), or split by users (lit-dpret check_data task.split_by=user).",
                trap="T25",
            )

    def refuse_queries_behind(self, folders: Sequence[Path], data: Any) -> None:
        """Refuse queries declared public on which an artefact in ``folders``, part of the claim, was trained."""
        if self.data != "public":
            return
        source = self.datamodule if self.datamodule is not None else data
        queries, _, _ = self._load(source)
        for log in filter(None, (source, getattr(source, "evaluation", None))):
            name, unit = next(filter(None, (training_behind(folder, log) for folder in folders)), (None, ""))
            if name is not None and trains_on(log, queries, users_of=source if unit == "user" else None):
                raise ConfigurationError(
                    f"callbacks.evaluation.data=public, but over a tenth of callbacks.evaluation.split={self.split} "
                    f"are train queries of the log that {name} was trained on privately, or of its users. Evaluate on "
                    "others, or after the run.",
                    trap="T25",
                )

    def _check_synthetic(self, source: Any) -> None:
        if not hasattr(source, "privacy_card_path"):
            raise ConfigurationError(
                f"callbacks.evaluation.data=synthetic, but {type(source).__name__} reads data without a privacy card. "
                "Set callbacks.evaluation.datamodule to a SyntheticDataModule, or another kind.",
                trap="T25",
            )
        if self.split != "train" and getattr(source, "evaluation", None) is not None:
            raise ConfigurationError(
                f"callbacks.evaluation.data=synthetic, but the {self.split} queries come from the evaluation of "
                f"{type(source).__name__}, which holds real ones. Set callbacks.evaluation.split=train.",
                trap="T25",
            )
        check_dataset_card(source.privacy_card_path)

    # -- during the run ----------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data: Any = getattr(trainer, "datamodule", None)
        self.refuse_undeclared(pl_module, data)
        if not all(hasattr(pl_module, name) for name in ("encode_queries", "encode_passages")):
            raise UnsupportedModelError(
                f"RetrievalEvaluation ranks by encode_queries and encode_passages, and {type(pl_module).__name__} "
                "lacks them. Remove it from the callbacks."
            )
        source = self.datamodule if self.datamodule is not None else data
        Ranks.here().share(lambda: setattr(self, "_loaded", self._load(source)))

    def _load(self, source: Any) -> tuple[dict[str, str], dict[str, dict[str, int]], dict[str, str]]:
        queries, qrels = source.evaluation_set(self.split)
        passages = source.public_passages()
        if self.max_queries is not None:
            chosen = sorted(qrels)[: self.max_queries]
            queries, qrels = {name: queries[name] for name in chosen}, {name: qrels[name] for name in chosen}
        check_qrels(qrels, query_ids=queries, passage_ids=passages)
        return queries, qrels, passages

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop_by(trainer, self.public_metrics)
        if self.data in ("public", "synthetic"):
            Ranks.here().share(lambda: self._declare(trainer))

    def _declare(self, trainer: L.Trainer) -> None:
        if (ledger := ledger_of(trainer)) is not None:
            ledger.append("event", name=DECLARED_EVENT, data=self.data, split=self.split)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not batch.last:
            return
        done = batch.step + 1
        if done % self.every_n_steps == 0 or done == getattr(
            accountant_of(trainer), "planned_steps", trainer.max_steps
        ):
            module: Any = pl_module
            whole = module.whole() if hasattr(module, "whole") else nullcontext()  # a custom module may lack it
            with averaged(trainer, pl_module), whole:
                self.last = Ranks.here().share(lambda: self._evaluate(trainer, pl_module, done))
            found = {f"{self.prefix}/{name}": mean for name, mean in self.last.means.items()}
            tell(trainer, found, done)
            ask_stoppers(trainer, pl_module, self.public_metrics)

    def _evaluate(self, trainer: L.Trainer, module: Any, step: int) -> EvaluationResult:
        if self.data == "private" and (ledger := ledger_of(trainer)) is not None:
            release = NonPrivateRelease(label=f"{', '.join(self.metrics)} of private {self.split} queries")
            ledger.append("event", name=PRIVATE_EVENT, at_step=step, release=release.to_dict())
        return self.measure(module)

    def measure(self, module: Any) -> EvaluationResult:
        """Return the metrics of a module, with intervals and values per query; ``setup`` must have loaded the data."""
        if self._loaded is None:
            raise ConfigurationError("RetrievalEvaluation has no data before a fit has set it up.")
        queries, qrels, passages = self._loaded
        ids = list(passages)
        top = search(
            module.encode_queries(list(queries.values())),
            module.encode_passages(list(passages.values())),
            min(self.top_k, len(ids)),
            tie_rank=lexicographic_rank(ids),
        )
        return evaluate(Ranking(query_ids=list(queries), passage_ids=ids, top=top), qrels, self.metrics, resamples=200)


def trains_on(data: Any, queries: Mapping[str, str], *, users_of: Any = None) -> bool:
    """Return whether more of ``queries`` are train queries of ``data`` than chance explains, compared by text.

    With ``users_of``, the DataModule of the queries, queries of users who have train queries count as well. Data
    without train queries that can be read as texts are trusted.
    """
    trained = set(map(normalise, train_queries(data)))
    ours: Any = getattr(data, "collection", None)
    theirs: Any = getattr(users_of, "collection", None)
    users = set()
    if ours is not None and theirs is not None:
        users = {ours.users[name] for name in ours.qrels.get("train", {}) if name in ours.users}
    shared = [normalise(text) in trained or (bool(users) and theirs.users.get(name) in users)
              for name, text in queries.items()]  # fmt: skip
    return sum(shared) > SHARED_BY_CHANCE * len(queries)
