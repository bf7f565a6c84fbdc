"""Settings of a PDD-AS2 run, and its refusals under a privacy budget.

The defaults are the paper's where it states one. With ``privacy.eps`` set the run *fails closed*: a setting that would
release something that no ledger counts is refused by name, before any data is read. Only
``configs/federated/inprocess.yaml`` explains what each setting means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import Neighbours, NoiseName
from lit_dpret.settings import require_choice, require_number, require_switch, require_whole

Weighting = Literal["examples", "uniform", "capped"]
Stage1Negatives = Literal["static", "bm25", "random"]
# The phases that can be measured: BM25, the shared model of stage 1, the personal models of stage 2.
Phase = Literal["bm25", "stage1", "stage2"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def _require_choices(where: str, settings: object) -> None:
    for name, hint in get_type_hints(type(settings)).items():
        if get_origin(hint) is Literal:
            require_choice(f"{where}.{name}", getattr(settings, name), get_args(hint))


@dataclass(frozen=True, kw_only=True)
class Stage1:
    """Federated training of both encoders."""

    warmup_rounds: int = 1
    rounds: int = 10
    batch_size: int = 8
    negatives: Stage1Negatives = "static"
    bm25_n: int = 8
    other_positives: int = 1
    static_n: int = 8
    top_k: int = 300
    in_batch: bool = True
    strategy: Literal["fedavg", "fedprox"] = "fedavg"
    strength: float = 0.0
    weighting: Weighting = "examples"
    n_hat: int | None = None
    aggregation: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"] = "mean"
    malicious: int = 1
    lr: float = 3e-5
    optimizer_state: Literal["reset", "keep"] = "reset"

    def check(self) -> None:
        require_switch("federated.stage1", self, "in_batch")
        require_whole("federated.stage1", self, 0, "warmup_rounds", "rounds", "other_positives")
        require_whole("federated.stage1", self, 1, "batch_size", "bm25_n", "static_n", "top_k", "malicious")
        require_whole("federated.stage1", self, 1, "n_hat", null=True)
        require_number("federated.stage1", self, "lr")
        require_number("federated.stage1", self, "strength", zero=True)
        _require_choices("federated.stage1", self)
        if self.warmup_rounds + self.rounds < 1:
            raise ConfigurationError("federated.stage1 has no round. Set federated.stage1.rounds to at least 1.")
        if (self.strategy == "fedprox") != (self.strength > 0):
            raise ConfigurationError(
                f"federated.stage1.strength={self.strength:g} must be positive with strategy=fedprox, and 0 otherwise."
            )
        if (self.weighting == "capped") != (self.n_hat is not None):
            raise ConfigurationError(
                f"federated.stage1.n_hat={self.n_hat} must be a number with weighting=capped, and null otherwise."
            )
        if self.aggregation != "mean" and self.weighting != "uniform":
            raise ConfigurationError(
                f"federated.stage1.weighting={self.weighting} with aggregation={self.aggregation}: a silo that reports "
                "a false size would decide. Set federated.stage1.weighting=uniform."
            )


@dataclass(frozen=True, kw_only=True)
class Stage2:
    """Training of a query encoder for each client, with a frozen sentence encoder."""

    epochs: int = 1
    refresh_every: int = 1
    batch_size: int = 32
    negatives: Literal["fed", "dynamic"] = "fed"
    n: int = 200
    top_k: int = 300
    select: Literal["all", "random"] = "all"
    select_count: int | None = None
    request: Literal["exact", "dp_centroid", "none"] = "exact"
    response: Literal["raw", "public", "dp_centroid", "synthetic"] = "raw"
    centroids: int = 64
    centroid_iterations: int = 3
    send_as: Literal["float16", "float32"] = "float16"
    in_batch: bool = True
    anchor: float = 0.0
    lr: float = 3e-5

    def asks(self, epoch: int) -> bool:
        """Return whether other clients are asked for negatives before a local epoch."""
        return self.negatives == "fed" and epoch % self.refresh_every == 0

    def check(self) -> None:
        require_switch("federated.stage2", self, "in_batch")
        require_whole("federated.stage2", self, 0, "epochs")
        require_whole("federated.stage2", self, 1, "batch_size", "n", "top_k", "centroids", "centroid_iterations",
                  "refresh_every")  # fmt: skip
        require_whole("federated.stage2", self, 1, "select_count", null=True)
        require_number("federated.stage2", self, "lr")
        require_number("federated.stage2", self, "anchor", zero=True)
        _require_choices("federated.stage2", self)
        if self.n > self.top_k:
            raise ConfigurationError(f"federated.stage2.n={self.n} must be at most top_k={self.top_k}.")


@dataclass(frozen=True, kw_only=True)
class FederatedPrivacy:
    """The budget of each silo for everything that leaves it in one run, or in all runs that share its ledger folder."""

    eps: float | None = None
    delta: float | None = None
    unit: Literal["query", "pair"] = "query"
    neighbours: Neighbours = "zero_out"
    max_grad_norm: float = 1.0
    request_share: float = 0.3
    collection_eps: float | None = None
    collection_delta: float = 1e-5
    collection_radius: float = 10.0
    accountant: Literal["pld", "rdp"] = "pld"
    noise: NoiseName = "gaussian"

    def check(self) -> None:
        _require_choices("federated.privacy", self)
        if self.eps is not None and self.neighbours == "add_or_remove":
            raise ConfigurationError(
                "federated.privacy.neighbours=add_or_remove protects a silo's number of queries, on which its steps "
                "depend. Set it to zero_out or replace_one."
            )
        require_number("federated.privacy", self, "eps", "delta", "collection_eps", null=True)
        require_number("federated.privacy", self, "max_grad_norm", "request_share", "collection_delta",
                       "collection_radius")  # fmt: skip
        if not self.request_share < 1:
            raise ConfigurationError(f"federated.privacy.request_share={self.request_share} must be between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class Safeguards:
    """Limits on what others see of a silo, and on a silo's influence on others."""

    train_on: Literal["queries", "synthetic"] = "queries"
    secure_sum: bool = False
    update_limit: float = 1.0
    update_norm: float | None = 1.0
    sum_threshold: int | None = None
    seal: bool = False
    roster: bool = False


@dataclass(frozen=True, kw_only=True)
class PddAs2(Safeguards):
    """All public settings of a run."""

    stage1: Stage1 = field(default_factory=Stage1)
    stage2: Stage2 = field(default_factory=Stage2)
    privacy: FederatedPrivacy = field(default_factory=FederatedPrivacy)
    seed: int = 0

    @property
    def asks(self) -> bool:
        """Whether stage 2 asks other clients for negatives."""
        return self.stage2.negatives == "fed" and self.stage2.epochs > 0

    @property
    def generated(self) -> bool:
        """Whether a silo needs queries from its DP generator (`lit_dpret.federated.synthetic`)."""
        return self.train_on == "synthetic" or (self.asks and self.stage2.response == "synthetic")

    @property
    def hides(self) -> bool:
        """Whether single queries are hidden from the server, which then does not learn of failures on them."""
        return self.privacy.eps is not None or self.secure_sum or self.seal

    @property
    def reports_examples(self) -> bool:
        """Whether the aggregation needs each silo's number of train queries in clear."""
        return self.stage1.weighting != "uniform" and not self.secure_sum

    def check(self) -> PddAs2:
        """Refuse invalid values, and under a budget everything that no ledger would count; return the settings."""
        self.stage1.check()
        self.stage2.check()
        self.privacy.check()
        _require_choices("federated", self)
        require_switch("federated", self, "secure_sum", "seal", "roster")
        require_number("federated", self, "update_limit")
        require_number("federated", self, "update_norm", null=True)
        require_whole("federated", self, 1, "sum_threshold", null=True)
        if self.secure_sum and self.stage1.aggregation != "mean":
            raise ConfigurationError(
                f"federated.stage1.aggregation={self.stage1.aggregation} compares updates, which federated.secure_sum="
                "true hides from the server. Set aggregation=mean, or secure_sum=false."
            )
        if self.secure_sum and self.stage1.weighting == "examples":
            raise ConfigurationError(
                "federated.stage1.weighting=examples with federated.secure_sum=true: a masked weight needs a public "
                "bound. Set weighting=capped with n_hat, or uniform."
            )
        if self.sum_threshold is not None and not self.secure_sum:
            raise ConfigurationError(f"federated.sum_threshold={self.sum_threshold} needs federated.secure_sum=true.")
        if self.sum_threshold is not None and self.sum_threshold < 3:
            raise ConfigurationError(
                f"federated.sum_threshold={self.sum_threshold} must be at least 3: in a sum of two, each silo knows "
                "the other's update."
            )
        if self.roster and not (self.secure_sum or self.seal):
            raise ConfigurationError(
                "federated.roster=true signs the keys of federated.secure_sum and federated.seal. Set one of them."
            )
        if self.asks and self.stage2.response == "dp_centroid" and self.privacy.collection_eps is None:
            raise ConfigurationError(
                "federated.stage2.response=dp_centroid releases centroids of the collection. Set their budget, "
                "federated.privacy.collection_eps, or another response."
            )
        if self.train_on == "synthetic" and self.asks and self.stage2.request == "dp_centroid":
            raise ConfigurationError(
                "federated.stage2.request=dp_centroid adds useless noise with federated.train_on=synthetic, whose "
                "queries are released already. Set request=exact, or none."
            )
        if self.privacy.eps is not None:
            for applies, refusal in self._uncounted():
                if applies:
                    raise ConfigurationError(f"federated.privacy.eps={self.privacy.eps:g}: federated.{refusal}")
        return self

    def _uncounted(self) -> list[tuple[bool, str]]:
        """Return each way in which something could leave a silo uncounted: whether it applies, and the refusal."""
        stage1, stage2 = self.stage1, self.stage2
        raw = (
            self.asks and stage2.response == "raw",
            "stage2.response=raw sends embeddings of private sentences. Set it to public, dp_centroid or synthetic.",
        )
        if self.train_on == "synthetic":  # what depends on queries was charged when the generator was trained
            return [raw]
        coupled = "in_batch=true makes a query's loss depend on the other queries of its batch. Set it to false."
        return [
            (stage1.in_batch, f"stage1.{coupled}"),
            (stage2.in_batch, f"stage2.{coupled}"),
            (
                stage1.negatives == "static" and stage1.warmup_rounds > 0 and stage1.other_positives > 0,
                "stage1.other_positives contrasts a query with the answers to other queries. Set it to 0.",
            ),
            (
                self.asks and stage2.request == "exact",
                "stage2.request=exact sends the embedding of every query. Set it to dp_centroid or none.",
            ),
            raw,
            (
                stage1.weighting == "examples",
                "stage1.weighting=examples reports to the server how many queries each silo has. Set it to uniform, "
                "or to capped with federated.secure_sum=true.",
            ),
            (
                stage1.weighting == "capped" and not self.secure_sum,
                "stage1.weighting=capped reports to the server how many queries a small silo has. Set "
                "federated.secure_sum=true, or weighting=uniform.",
            ),
        ]
