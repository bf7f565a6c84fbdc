"""One client of a federation, run where its data are: its training rounds, requests, answers and measures.

Everything that a transport has to move is an argument or a return value here. Everything else stays in the silo's state
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.datamodules.silo import SiloDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.aggregation import Weights, put_weights, take_weights
from lit_dpret.federated.centroids import CentroidPlan
from lit_dpret.federated.evaluation import SentenceCollection
from lit_dpret.federated.fitting import (
    KeepOptimizer,
    NotRepeatedError,
    TowardsAnchor,
    attempt_folder,
    broken_attempt,
    fit_epochs,
)
from lit_dpret.federated.model import refuse_private_start, start_and_dim
from lit_dpret.federated.negatives import (
    Block,
    FedNegatives,
    FedPool,
    OtherPositives,
    kept_pool,
    respond,
    respond_uniformly,
)
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo_account import SiloAccount, centroids_once, collection_centroids
from lit_dpret.federated.silo_ledger import NothingLeftError
from lit_dpret.federated.storage import Served, keep_facts, save_tensors
from lit_dpret.federated.synthetic import public_sentences
from lit_dpret.modules.as2 import AS2DualEncoder
from lit_dpret.negatives import (
    BM25Negatives,
    DynamicNegatives,
    InBatchNegatives,
    NegativeSource,
    RandomNegatives,
    StaticNegatives,
)
from lit_dpret.negatives.base import public_coins
from lit_dpret.negatives.rankings import silenced
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.retrieval.metrics import Values

if TYPE_CHECKING:  # keys needs the package cryptography, which an extra installs
    from lit_dpret.federated.keys import Credentials


# Builds the model. Takes ``privacy``, ``optimizer_lr``, ``towers``, ``passage_tower`` and ``negatives``.
MakeModule = Callable[..., AS2DualEncoder]


@dataclass(frozen=True)
class Told:
    """A silo owner's choice of what to report to the server."""

    measures: bool = False  # the mean measures and the number of test queries; never under a budget
    # How much of its budget the silo has spent, sent with the measures. It depends on the settings and the number of
    # units, not on their content.
    epsilon: bool = False


class SiloClient:
    """One client of a federation.

    Guarantees:
        - With ``privacy.eps`` set, everything that a method returns and that depends on queries is charged to the
          silo's ledger before it is returned. Nothing is returned that the budget does not cover. With
          ``hides_failures``, which `build_client_app` sets, the same holds for errors that training raises.
        - With ``train_on=synthetic`` everything that is trained or sent depends on the silo's own queries only through
          its generator, which the ledger has already counted.

    Args:
        data: The client's folder (`lit_dpret.datamodules.silo_folder`).
        state: A private folder for the client's own use, kept between rounds.
        settings: The run's settings, checked.
        make_module: Builds the model of each round; the encoder is public.
        secret_file: Keys the noise; null for the user's state folder.
        credentials: The silo's signing key and the roster; needed and used only with ``roster=true``.
        ledgers: Folder of the ledgers; null for one in ``state``. Epsilon composes over all runs with the same folder.
        told: What the silo also reports to the server.
    """

    def __init__(
        self,
        data: str | Path,
        state: str | Path,
        settings: PddAs2,
        make_module: MakeModule,
        *,
        secret_file: str | Path | None = None,
        credentials: Credentials | None = None,
        ledgers: str | Path | None = None,
        told: Told = Told(),
    ) -> None:
        self.settings = settings.check()
        self.told = told
        # Hides failed training queries from whoever chose the weights. The owner of a run in one process sees them.
        self.hides_failures = False
        if settings.privacy.eps is not None or settings.train_on != "queries":
            refuse_private_start(make_module)
        self.folder, self.state = Path(data), Path(state)
        self.ledgers = self.state / "private" if ledgers is None else Path(ledgers)
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = {"seed": settings.seed, **asdict(settings.privacy)}
        facts |= {} if settings.train_on == "queries" else {"train_on": settings.train_on}
        keep_facts(self.state / "run.json", "stage1", {**facts, **asdict(settings.stage1)})
        if settings.stage2.epochs:
            keep_facts(self.state / "run.json", self._kind, {**facts, **asdict(settings.stage2)})
        self._make = make_module
        self._secret_file = secret_file
        self.data = SiloDataModule(folder=self.folder, seed=settings.seed)
        silo = self.data.silo
        self.name = silo.name
        self.credentials = credentials if settings.roster else None
        if settings.roster and (credentials is None or credentials.name != self.name):
            raise ConfigurationError(
                f"federated.roster=true, but silo {self.name!r} has "
                f"{'no signing key and roster' if credentials is None else 'the signing key of another silo'}."
            )
        self.collection = SentenceCollection(silo.sentences, silo.passage_of)
        self._sentences: dict[tuple[int, ...] | None, tuple[str, Tensor]] = {}
        self.account = SiloAccount.open(
            self.folder, self.state, settings, name=self.name, secret_file=secret_file, ledgers=self.ledgers
        )
        self.ledger, self.synthetic = self.account.ledger, self.account.synthetic
        self.queries = dict(self._datamodule(settings.stage1.batch_size).evaluation_set("train")[0])

    def __repr__(self) -> str:
        return f"SiloClient({self.name})"

    @property
    def examples(self) -> int:
        """|D_i|, the number of train queries, used as the aggregation weight; private for real queries."""
        return len(self.queries)

    @cached_property
    def model(self) -> tuple[Weights, int]:
        """The initial weights, and the dimension of an embedding (`start_and_dim`)."""
        return start_and_dim(self._make)

    # -- stage 1 -------------------------------------------------------------------------------

    def accept_round(self, weights: Mapping[str, Tensor], number: int) -> Path:
        """Record that a round is served, before any computation; return the path of its result."""
        Served(self.state).round(number, dict(weights))
        return self.state / f"stage1-{number:03}.safetensors"

    def train_shared(self, weights: Mapping[str, Tensor], number: int) -> Weights:
        """Train one local epoch of stage 1 from the global weights; repeated calls return the same weights."""
        stage, done = self.settings.stage1, self.accept_round(weights, number)
        if done.is_file():
            return load_file(done)

        def start(privacy: PrivacyMode) -> AS2DualEncoder:
            module = self._make(
                privacy=privacy,
                optimizer_lr=stage.lr,
                towers="shared",
                passage_tower="trained",
                negatives=self._shared_negatives(number),
            )
            put_weights(module, weights)
            return module

        callbacks: list[Callback] = []
        if stage.strategy == "fedprox":
            callbacks.append(TowardsAnchor(weights, stage.strength))
        if stage.optimizer_state == "keep":
            callbacks.append(KeepOptimizer(self._optimizer_path(number - 1), self._optimizer_path(number)))
        module = self._fit("stage1", number, start, stage.batch_size, callbacks)
        found = take_weights(module)
        save_tensors(found, done)
        # Once a round's update is in the global model, the server does not ask for that round again.
        for passed in (self.state / f"stage1-{number - 1:03}.safetensors", self._optimizer_path(number - 1)):
            passed.unlink(missing_ok=True)
        return found

    def _fit(
        self,
        kind: str,
        number: int,
        start: Callable[[PrivacyMode], AS2DualEncoder],
        batch_size: int,
        callbacks: list[Callback],
    ) -> AS2DualEncoder:
        """Train one local epoch and return its model; under a budget, repeat an interrupted epoch."""

        def begun(noise_multiplier: float | None = None) -> AS2DualEncoder:
            module = start(self.account.mode(kind, number, noise_multiplier=noise_multiplier))
            module.drops_failing_units = self.hides_failures
            return module

        folder, data = self.state / f"{kind}-{number:03}", self._datamodule(self._batch(batch_size))
        # An interrupted fit repeats its noise bit by bit and is charged once. If this machine cannot repeat it,
        # everything that it announced stays charged, and the rest of the run gets more noise to pay for it. If the
        # budget leaves nothing, this fit and all later ones leave the weights unchanged.
        broken = None if self.account.noise is None else broken_attempt(folder)
        if self.ledger is not None and broken is not None and self.account.ended is None:
            attempt, noise = broken
            module = begun(noise)
            try:
                fit_epochs(module, data, attempt, callbacks=callbacks, repeat=True)
                return module
            except NotRepeatedError:
                self.ledger.settle_broken(attempt / LEDGER_NAME)
            stage1 = kind == "stage1"
            rounds = number if stage1 else self.settings.stage1.warmup_rounds + self.settings.stage1.rounds
            try:
                self.account.keep_within(
                    rounds=rounds, epochs=0 if stage1 else number, refreshes=0 if stage1 else number + 1
                )
            except NothingLeftError:
                self.account.end(f"round {number} of stage 1" if stage1 else f"epoch {number} of stage 2")
            data = self._datamodule(self._batch(batch_size))
        module = begun()
        if self.account.ended is None:
            fit_epochs(module, data, attempt_folder(folder), callbacks=callbacks)
        return module

    def _optimizer_path(self, number: int) -> Path:
        return self.state / f"optimizer-{number:03}.pt"

    def _shared_negatives(self, number: int) -> list[NegativeSource]:
        stage, seed = self.settings.stage1, self._turn_seed("stage1", number)
        warm = stage.negatives == "static" and number < stage.warmup_rounds
        sources: list[NegativeSource] = [InBatchNegatives()] if stage.in_batch else []
        if stage.negatives == "random":
            sources.append(RandomNegatives(per_query=stage.static_n, seed=seed))
        elif warm or stage.negatives == "bm25":
            sources.append(BM25Negatives(per_query=stage.bm25_n, depth=stage.top_k, seed=seed))
        else:
            sources.append(StaticNegatives(per_query=stage.static_n, depth=stage.top_k, seed=seed))
        if warm and stage.other_positives:
            sources.append(OtherPositives(per_query=stage.other_positives, seed=seed))
        return sources

    def _turn_seed(self, kind: str, number: int) -> int:
        """Return the public seed of one fit: every fit counts its steps from 0, but must draw differently."""
        return int(public_coins(self.settings.seed, kind, number).integers(2**31))

    # -- stage 2 -------------------------------------------------------------------------------

    def request(self, weights: Mapping[str, Tensor], refresh: int) -> Tensor:
        """Return the request rows for other clients, ``(rows, dim)``, computed once per refresh and stored.

        With ``request=none`` there are no rows. If the budget has nothing left, there is one row of zeros, which
        reveals nothing.
        """
        stage = self.settings.stage2
        module = self._personal_module(weights)
        if stage.request == "none":
            return torch.empty(0, module.encoder.dim)
        kept = self.state / f"request-{refresh:03}.safetensors"
        if kept.is_file():
            return load_file(kept)["rows"]
        if stage.request == "exact":
            # A row that cannot be searched with would be reported to the server by the other silo, even when sealed.
            rows = silenced(module.encode_queries(list(self.queries.values())))
            save_tensors({"rows": rows}, kept)
            return rows
        if self.account.ended is not None:
            return torch.zeros(1, module.encoder.dim)
        if self.ledger is None or self.account.noise is None or self.account.noise.request is None:
            raise ConfigurationError(
                "federated.stage2.request=dp_centroid needs a budget. Set federated.privacy.eps, or request=exact."
            )

        def noise(begun: bool) -> float:
            if begun:
                rounds = self.settings.stage1.warmup_rounds + self.settings.stage1.rounds
                self.account.keep_within(rounds=rounds, epochs=refresh, refreshes=refresh)
            planned = self.account.noise
            return 0.0 if planned is None or planned.request is None else planned.request

        plan = CentroidPlan(count=stage.centroids, iterations=stage.centroid_iterations, seed=self.settings.seed)
        texts = list(self.queries.values())
        try:
            return centroids_once(
                kept, self.ledger, "fed_request", plan, noise=noise,
                rows=lambda: module.tower("query").encode(texts, "query", apart=True),
            )  # fmt: skip
        except NothingLeftError:
            self.account.end(f"request of refresh {refresh}")
            return torch.zeros(1, module.encoder.dim)

    def serve(self, weights: Mapping[str, Tensor], rows: Tensor, *, refresh: int) -> Block:
        stage = self.settings.stage2
        candidates = self._candidates(weights)
        if not len(rows):  # an empty request: every asker gets the same sample in this refresh
            seed = self.settings.seed + refresh
            return respond_uniformly(self.name, candidates, stage.n, seed=seed, send_as=stage.send_as)
        return respond(self.name, rows, candidates, stage.top_k, send_as=stage.send_as)

    def has_personal(self, number: int) -> bool:
        return self._personal_path(number).is_file()

    def personalise(self, weights: Mapping[str, Tensor], pool: FedPool | None, number: int) -> None:
        """Train one local epoch of the client's own query encoder and store it in the state folder.

        ``pool`` holds other clients' sentences. It is None for the client's own sentences (``negatives=dynamic``), and
        between two refreshes to use the last answers.
        """
        if self.has_personal(number):
            return
        stage, turn = self.settings.stage2, self._turn_seed("stage2", number)
        source: NegativeSource
        if stage.negatives == "fed" and stage.refresh_every > 1:
            first = number - number % stage.refresh_every
            pool = kept_pool(pool, self.state / f"pool-{first:03}.safetensors")
        if pool is None:
            source = DynamicNegatives(per_query=stage.n, depth=stage.top_k, seed=turn)
        else:
            listed = list(self.queries) if pool.lists is not None else None
            source = FedNegatives(pool, queries=listed, per_query=stage.n, depth=stage.top_k, seed=turn)
        sources: list[NegativeSource] = [InBatchNegatives(), source] if stage.in_batch else [source]
        anchor: list[Callback] = []
        if stage.anchor:
            anchor.append(TowardsAnchor(take_weights(self._global_module(weights)), stage.anchor))

        def start(privacy: PrivacyMode) -> AS2DualEncoder:
            return self._personal_module(weights, privacy=privacy, negatives=sources)

        module = self._fit(self._kind, number, start, stage.batch_size, anchor)
        save_tensors(take_weights(module), self._personal_path(number))

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, weights: Mapping[str, Tensor] | None, *, personal: bool, split: str = "test"
    ) -> dict[str, Values]:
        """Evaluate every query of a split on the client's own collection; the result is as private as the queries.

        A query whose embedding cannot be searched with is an error. With ``hides_failures`` it finds the first
        sentences of the collection instead.
        """
        queries, qrels = self.data.evaluation_set(split)
        if weights is None:
            levels = self.collection.bm25(list(queries.values()))
        else:
            module = self._personal_module(weights) if personal else self._global_module(weights)
            asked = module.encode_queries(list(queries.values()))
            asked = silenced(asked) if self.hides_failures else asked
            levels = self.collection.dense(asked, self._embedded(weights))
        return self.collection.measure(levels, list(queries), qrels)

    # -- privacy -------------------------------------------------------------------------------

    def epsilon(self) -> float | None:
        """Return the epsilon spent on the silo's queries; None without a budget."""
        return None if self.ledger is None else self.ledger.epsilon()

    # -- data and models -----------------------------------------------------------------------

    def _batch(self, size: int) -> int:
        """Return the batch size: all queries if there are fewer; under a budget `SiloAccount` refuses that silo."""
        return size if self.settings.privacy.eps is not None else min(size, self.examples)

    def _datamodule(self, batch_size: int) -> PairsDataModule:
        if self.synthetic is not None and self.settings.train_on == "synthetic":
            return SyntheticDataModule(
                folder=self.synthetic.folder, expected_batch_size=batch_size, physical_batch_size=batch_size,
                seed=self.settings.seed,
            )  # fmt: skip
        private = self.settings.privacy.eps is not None
        return SiloDataModule(
            folder=self.folder,
            sampling="poisson" if private else "shuffle",
            expected_batch_size=batch_size,
            physical_batch_size=batch_size,
            seed=self.settings.seed,
        )

    def _global_module(self, weights: Mapping[str, Tensor], **settings: Any) -> AS2DualEncoder:
        """Return the global model with two towers; the sentence side is frozen."""
        settings = {"privacy": NoPrivacy(), "negatives": None, **settings}
        module = self._make(optimizer_lr=self.settings.stage2.lr, towers="separate", passage_tower="frozen", **settings)
        module.put_global(weights)
        return module

    def _personal_module(self, weights: Mapping[str, Tensor], **settings: Any) -> AS2DualEncoder:
        """Return the global model with the client's own query encoder, if it has one."""
        module = self._global_module(weights, **settings)
        newest = sorted(self.state.glob(f"{self._kind}-*.safetensors"))
        if newest:
            put_weights(module, load_file(newest[-1]))
        return module

    def _personal_path(self, number: int) -> Path:
        return self.state / f"{self._kind}-{number:03}.safetensors"

    @property
    def _kind(self) -> str:
        """The prefix of stage 2's files. Runs with different negatives can share a state folder and its stage 1."""
        return f"personal-{self.settings.stage2.negatives}"

    def _embedded(self, weights: Mapping[str, Tensor], places: Sequence[int] | None = None) -> Tensor:
        """Embed all or some sentences of the collection with the global sentence encoder, once per encoder."""
        module, texts = self._global_module(weights), self.collection.texts
        key, some = module.tower("passage").fingerprint(), None if places is None else tuple(places)
        found = self._sentences.get(some)
        if found is None or found[0] != key:
            chosen = texts if some is None else [texts[place] for place in some]
            found = self._sentences[some] = (key, module.encode_passages(chosen))
        return found[1]

    def _candidates(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings that may be sent to others, according to the kind of response."""
        response = self.settings.stage2.response
        if response == "raw":
            return self._embedded(weights)
        if response == "public":
            ids = public_sentences(self.folder)
            return self._embedded(weights, [at for at, sid in enumerate(self.collection.sentence_ids) if sid in ids])
        module = self._global_module(weights)
        if response == "synthetic":
            return module.encode_passages([] if self.synthetic is None else self.synthetic.texts)
        tower = module.tower("passage")
        return collection_centroids(
            self.state / f"collection-{tower.fingerprint()[:16]}.safetensors",
            lambda: tower.encode(self.collection.texts, "passage", apart=True), self.collection, self.settings,
            secret_file=self._secret_file, ledgers=self.ledgers,
        )  # fmt: skip
