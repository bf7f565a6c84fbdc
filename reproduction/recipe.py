"""What `task=ablate` and `task=compare_modes` train: retrievers by recipe, and the generators that they learn from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import torch

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.file import read_card
from lit_dpret.cards.start import model_folder, read_start
from lit_dpret.cards.text import printed_epsilon
from lit_dpret.costs.measure import peak, reset_peak, resident
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.losses import PairwiseLoss
from lit_dpret.modules import FrozenDualEncoder, OptimizerSpec
from lit_dpret.modules.frozen_dual_encoder import Head, Negatives
from lit_dpret.modules.generator_folder import is_generator, weights_hash
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.modes.base import Guarantee
from lit_dpret.retrieval.trec_runs import Ranking
from lit_dpret.settings import picked, require_choice
from lit_dpret.synthesis.filters import ReleasedQueries
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.pseudo_labels import Labelling, label
from lit_dpret.synthesis.filters.released import require_covered
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks
from lit_dpret.tasks.ranking import rank_embeddings
from lit_dpret.tasks.similarity import Similarity
from lit_dpret.tasks.stages import Stages

PSEUDO = "pseudo"
RowsPerUnit = Literal["one", "all"]
Part = Literal["recipe", "baseline", "bound"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train the retriever: a privacy mode, the queries it learns from, and the settings chosen for it."""

    label: str  # name in the table
    privacy: partial[PrivacyMode]  # makes the mode; the budget is filled in
    optimizer: OptimizerSpec  # of the head
    steps: int  # logical steps
    batch: int  # average number of units in a step
    temperature: float = 0.05  # divides the similarity in the softmax, if ``loss`` is null
    negatives: Negatives = "auto"  # ``auto``, ``pool`` or ``batch``; see `FrozenDualEncoder`
    pool_size: int | None = None  # public passages that a step draws, for modes other than ``public_passages``
    loss: PairwiseLoss | None = None  # a loss of the table of similarities; null for the softmax
    trials: int | None = None  # how many settings of this recipe were tried
    head: Head = "query"  # ``query``, ``both`` or ``shared``; see `FrozenDualEncoder`
    head_dim: int | None = None  # how many principal directions of the public passages it learns in; null for all
    rows_per_unit: RowsPerUnit = "one"  # ``one`` passage of a drawn query, or ``all`` of them
    # The queries to learn from. Null: the private queries, or with ``privacy=synthetic`` the sets of
    # ``task.synthetic``. ``pseudo``: words of the passages. The name of one of ``task.generators``: its queries,
    # written again for every run.
    queries: str | None = None
    queries_per_passage: int = 1  # how many are written for each passage
    # Learn only from synthetic queries that find their passage among this many results of the zero-shot encoder; null
    # uses ``task.round_trip_filter``.
    round_trip_filter: int | None = None
    # Learn the margins that ``task.teacher`` gives each synthetic query, between its passage and this many others.
    # Null learns instead which passage belongs to the query.
    pseudo_labels: int | None = None
    # The variant whose head, from the same training seed, it continues to train. The claim then covers both trainings.
    start: str | None = None
    eps: float | None = None  # of this training alone, if a budget is split; null for ``task.eps``
    # ``bound``: what can be reached without privacy, of which shares are stated. ``baseline``: what every recipe is
    # tested against. Otherwise ``recipe``.
    part: Part = "recipe"

    def __post_init__(self) -> None:
        for name, choices in (
            ("negatives", Negatives), ("head", Head), ("rows_per_unit", RowsPerUnit), ("part", Part),
        ):  # fmt: skip
            require_choice(f"task.variants: {name}", getattr(self, name), get_args(choices))
        for name in ("steps", "batch", "queries_per_passage", "round_trip_filter", "pseudo_labels", "head_dim"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigurationError(f"task.variants: {name}={number} must be at least 1.")
        if not isinstance(self.privacy, partial) or not issubclass(self.mode, PrivacyMode):
            raise ConfigurationError("task.variants: privacy must make a privacy mode; set its _partial_ to true.")
        if self.queries not in (None, PSEUDO) and not self.learns_from_synthetic:
            raise ConfigurationError(
                f"task.variants: queries={self.queries} cannot go with privacy={self.mode.name}: queries of "
                "a DP generator need privacy=synthetic."
            )
        if self.queries == PSEUDO and self.guarantee != "none":
            raise ConfigurationError(
                f"task.variants: queries=pseudo are public, so privacy={self.mode.name} would protect nothing. "
                "Choose privacy=none."
            )
        if self.start is not None and (self.guarantee != "dp" or self.head != "query" or self.head_dim is not None):
            raise ConfigurationError(
                f"task.variants: start={self.start} cannot go with privacy={self.mode.name}, head={self.head} "
                f"and head_dim={self.head_dim}: only a query head in all directions can be trained further, and only "
                "under a DP mode, which is charged for its start. Leave start null, or set head=query, head_dim=null "
                "and such a mode."
            )
        if self.pseudo_labels is not None and (self.queries is None or self.head != "query"):
            raise ConfigurationError(
                f"task.variants: pseudo_labels={self.pseudo_labels} cannot go with queries={self.queries} and "
                f"head={self.head}. A teacher reads only synthetic queries, and its margins train a query head. Set "
                "queries, and head=query."
            )

    @property
    def mode(self) -> Any:
        return self.privacy.func

    @property
    def guarantee(self) -> Guarantee:
        found: Guarantee = self.mode.guarantee
        return found

    @property
    def learns_from_synthetic(self) -> bool:
        return self.guarantee == "inherited"

    @property
    def learns_from_given(self) -> bool:
        return self.learns_from_synthetic and self.queries is None

    def make_privacy(
        self, *, eps: float | None, delta: float, seed: int, noise_multiplier: float | None
    ) -> PrivacyMode:
        """Make the mode with its budget; if it draws public passages, the training seed determines them."""
        budget: dict[str, Any] = {"eps": eps, "delta": delta} if self.guarantee == "dp" else {}
        if noise_multiplier is not None:
            budget["noise_multiplier"] = noise_multiplier
        pool = {"pool_seed": seed} if self.mode.candidates == "pool" else {}
        return self.privacy(**budget, **pool)

    def module_settings(self, *, seed: int) -> dict[str, Any]:
        names = ("optimizer", "temperature", "negatives", "loss", "pool_size", "head", "head_dim")
        return picked(self, *names) | {"pool_seed": seed}

    def size(self) -> dict[str, Any]:
        """Return the length of the training, and how many settings were tried."""
        return picked(self, "steps", "batch", "trials")

    def describe(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """Describe how a run was trained, in its card's words if possible; the keys are the same for every recipe."""
        mechanism, claim = card["mechanism"], card["claim"]
        coupling = mechanism.get("coupling") or {}
        loss = f"softmax, temperature {self.temperature:g}" if self.loss is None else repr(self.loss)
        if self.pseudo_labels is not None:
            loss = f"margins of a teacher, temperature {self.temperature:g}"
        made = self.queries is not None
        return {
            "mode": self.mode.name, "loss": loss, "epsilon": printed_epsilon(card), "delta": claim["delta"],
            "clipped": mechanism.get("engine") and (coupling.get("bounded") or claim["unit"]),
            "clip_bound": mechanism.get("max_grad_norm"),
            "sensitivity": mechanism.get("sensitivity") if claim["guarantee"] == "dp" else None,
            "sigma": mechanism.get("noise_multiplier"), "noise_std": mechanism.get("noise_std"), "batch": self.batch,
            "sub_batches": coupling.get("sub_batches"), "n_max": coupling.get("n_max"), "steps": self.steps,
            "optimizer": f"{self.optimizer.name}, lr {self.optimizer.lr:g}, {self.optimizer.schedule}",
            "trials": self.trials, "queries": self.queries or ("synthetic" if self.learns_from_given else "private"),
            "per_passage": self.queries_per_passage if made else None, "round_trip": self.round_trip_filter,
            **picked(self, "pseudo_labels", "head", "head_dim", "start"),
            "passages_of_a_query": None if made or self.learns_from_given else self.rows_per_unit,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GeneratorRecipe:
    """A way to train the query generator and to draw from it."""

    label: str  # name in the table
    model: partial[Any]  # makes the generator, given ``privacy``
    privacy: partial[PrivacyMode]  # makes the privacy mode; the budget is filled in
    steps: int  # logical steps
    batch: int  # average number of units in a step
    physical_batch: int = 32  # units that go through the model together
    top_p: float = 0.8  # nucleus
    temperature: float = 1.0  # divides the logits when queries are drawn
    trials: int | None = None  # how many settings were tried
    eps: float | None = None  # if a budget is split; null for ``task.eps``
    # The folder of an earlier run from whose model training starts, instead of the model's own ``pretrained``. It is
    # declared public: nothing private may have gone into it, and the cards state where training started. Null starts
    # from ``model.pretrained``.
    public_start: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "physical_batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"task.generators: {name}={getattr(self, name)} must be at least 1.")
        for name in ("model", "privacy"):
            if not isinstance(getattr(self, name), partial):
                raise ConfigurationError(f"task.generators: {name} must make an object; set its _partial_ to true.")
        mode: Any = self.privacy.func
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"task.generators: privacy={mode.name} has no guarantee, so its queries could not be "
                "compared at the budget. Choose privacy=dp_sgd."
            )

    def missing_start(self) -> Path | None:
        """Return the model folder from which training should start, if it is missing."""
        if self.public_start is None:
            return None
        folder = model_folder(self.public_start)
        return None if is_generator(folder) else folder

    def check_start(self) -> None:
        """Refuse a start that cannot be public, before anything is trained."""
        if self.public_start is not None:
            read_start(self.public_start, public=True, knob="task.generators: public_start")

    def train(
        self, privacy: PrivacyMode, folder: Path, *, parts: Parts, seed: int, resume: bool, tuning: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Train on all private queries; leave ``folder/model`` and the privacy card."""
        L.seed_everything(seed, verbose=False)
        weights, start = {}, {}
        if self.public_start is not None:
            weights = {"pretrained": str(model_folder(self.public_start))}
            start = {"init_from": self.public_start, "init_from_is_public": True}
        model = self.model(privacy=privacy, **weights)
        data = parts.make_datamodule(
            max_passages=None, expected_batch_size=self.batch, sample_rate=None, physical_batch_size=self.physical_batch
        )
        here = torch.device("cpu")
        before = resident(here)
        reset_peak(here)
        callbacks = stage_callbacks(
            folder, resume=resume, label=f"generator {folder.name}", tuning_trials=self.trials, accountant=start,
            **tuning,
        )  # fmt: skip
        make_trainer = partial(parts.make_trainer, max_steps=self.steps)
        train(model, data, Training(run_dir=folder, make_trainer=make_trainer, callbacks=callbacks, resume=resume))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "extra_bytes": max(peak(here) - before, 0),  # of the process, beyond what it held before
        }

    def draw(
        self, generator: Path, passages: Mapping[str, str], folder: Path, *, count: int, seed: int,
        tuning: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """Write ``count`` queries for each public passage into ``folder/data``."""
        told = {"data": tuning["tuning_data"], "note": tuning["tuning_note"] or ""}
        with ProgressLine(f"generating queries, {folder.name}") as progress:
            synthesize(
                generator / "model", passages, folder / "data", passages_are_public=True, queries_per_passage=count,
                seed=seed, tuning=told, progress=progress, **picked(self, "top_p", "temperature"),
            )  # fmt: skip
        return {"passages": len(passages)}

    def describe(self) -> str:
        """Return everything that must not change when a generator is resumed."""
        start = "" if self.public_start is None else f" start={weights_hash(model_folder(self.public_start))}"
        return repr(self) + start


# -- measures of synthetic queries, and the labels of a teacher


_READ = "ledger_head"


def likeness(data: Path, folder: Path, *, parts: Parts, max_texts: int) -> dict[str, Any]:
    """Return BLEU and MAUVE of synthetic queries against private ones; no epsilon covers them, as the card states."""
    task = Similarity(
        synthetic=data, reference="private", card_entry=True, measures=("bleu", "mauve"), features=("query",),
        max_texts=max_texts, seeds=3, ceiling=False, plot=False,
    )  # fmt: skip
    scores = task.run(replace(parts, run_dir=folder, resume=False))
    return {"bleu": scores["bleu"], "mauve": scores["mauve/query"]}


@dataclass(frozen=True)
class Teacher:
    """A cross-encoder that is declared public."""

    source: str

    def check(self) -> None:
        """Refuse a model that is missing, is not a cross-encoder, or has a privacy card."""
        nothing = ReleasedQueries(queries=(), passages={}, provenance="declared public")
        require_covered(self.source, nothing, declared_public=True, knob="task.teacher")
        CrossEncoder.load(self.source)

    def fingerprint(self) -> str:
        """Return `CrossEncoder.fingerprint`, which differs for another model under the same name."""
        return CrossEncoder.load(self.source).fingerprint()

    def label(
        self, released: ReleasedQueries, folder: Path, *, zero_shot: FrozenDualEncoder, per_query: int, seed: int
    ) -> dict[str, Any]:
        """Write ``folder/gpl-training-data.tsv``, labels for queries and passages of their first fifty."""
        with ProgressLine("labelling synthetic queries") as progress:
            how = Labelling(
                cross_encoder=self.source, cross_encoder_is_public=True, encoder_is_public=True, per_query=per_query,
                seed=seed,
            )  # fmt: skip
            label(released, folder, how, ranker=_Untrained(zero_shot), progress=progress)
        return {"queries": len(released), "teacher": self.fingerprint()}


def of_those(released: ReleasedQueries, kept: Path | None) -> ReleasedQueries:
    """Return the queries whose ids a file lists, or all queries without a file."""
    if kept is None:
        return released
    ids = set(kept.read_text(encoding="utf-8").splitlines())
    return replace(released, queries=tuple(query for query in released.queries if query.query_id in ids))


class _Untrained:
    """A ranker with a frozen encoder, whose cache holds the embeddings of the passages."""

    def __init__(self, model: FrozenDualEncoder) -> None:
        self.model, self.encoder = model, model.pretrained or "encoder"

    def rank(self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int) -> Ranking:
        return rank_embeddings(
            list(queries), self.model.encode_queries(list(queries.values())), list(passages),
            self.model.encode_passages(list(passages.values())), k=k,
        )  # fmt: skip


def made_by(folder: Path) -> dict[str, str]:
    """Return which private training a stage's input came from, by the card in ``folder``; kept in the result."""
    # Identified by the last record of the ledger on which the card rests: no two trainings share it.
    return {_READ: str(read_card(folder)["ledger"]["head"])}


def refuse_other_training(
    stages: Stages, run_dir: Path, generator: str, *, cards: Mapping[str, Path], readers: Sequence[str]
) -> None:
    """Refuse finished stages that come from a training other than the one in a generator's folder."""
    source = made_by(run_dir / generator) if stages.is_done(generator) else None
    for stage in filter(stages.is_done, [*cards, *readers]):
        found: Mapping[str, Any] = made_by(cards[stage]) if stage in cards else stages.result(stage)
        if source is None or found[_READ] != source[_READ]:
            raise ResumeError(
                f"resume=true, but {stage} comes from another training than the one in {generator}, which was moved "
                f"away or trained again. Restore that, or move away {run_dir / stage} and everything derived from it "
                "too; charges in a ledger remain."
            )
