"""A silo's account in one run: its ledger, the noise that its plan needs, and the privacy mode of each fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.centroids import CentroidPlan, dp_centroids
from lit_dpret.federated.evaluation import SentenceCollection
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo_ledger import NoisePlan, SiloLedger, split_budget
from lit_dpret.federated.storage import save_json, save_tensors
from lit_dpret.federated.synthetic import SyntheticSet, read_synthetic, units_and_budget
from lit_dpret.modules.as2 import AS2DualEncoder
from lit_dpret.negatives.base import coins
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.releases import FullBatch, Poisson, SamplingLaw
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode, SyntheticData

_NOISE = "noise.json"


@dataclass(frozen=True)
class SiloAccount:
    """The account of one silo in one run.

    Attributes:
        name: Of the silo.
        settings: Of the run.
        ledger: Of what was spent of its queries; None without ``privacy.eps``.
        noise: Of the planned releases; None where the run makes none.
        synthetic: The silo's generated queries, where the run uses them.
    """

    name: str
    settings: PddAs2
    ledger: SiloLedger | None
    noise: NoisePlan | None
    synthetic: SyntheticSet | None

    @classmethod
    def open(
        cls,
        folder: Path,
        state: Path,
        settings: PddAs2,
        *,
        name: str,
        secret_file: str | Path | None,
        ledgers: Path,
    ) -> SiloAccount:
        """Open the account of the silo at ``folder``, whose run keeps its files in ``state``.

        Noise is chosen once, for everything that was planned when the state folder was begun.

        Raises:
            ConfigurationError: A batch is larger than the silo.
            LedgerError: The ledger is damaged, or older than the state folder.
        """
        privacy, near = settings.privacy, [state]
        if privacy.eps is None:
            synthetic = read_synthetic(folder, budget=None, ledger=None, near=near) if settings.generated else None
            return cls(name, settings, None, None, synthetic)
        data, budget = units_and_budget(folder, privacy)
        ledger = SiloLedger(
            ledgers, budget, accountant=privacy.accountant, noise=privacy.noise, secret_file=secret_file
        )
        ledger.require_whole(state)
        synthetic = read_synthetic(folder, budget=budget, ledger=ledger, near=near) if settings.generated else None
        if settings.train_on == "synthetic":
            return cls(name, settings, ledger, None, synthetic)
        fits, kept = _planned_fits(settings, name, data.n_units), state / _NOISE
        if kept.is_file():
            noise = NoisePlan(**json.loads(kept.read_text(encoding="utf-8")))
        else:
            stage = settings.stage2
            asks = settings.asks and stage.request == "dp_centroid"
            noise = split_budget(
                budget, tuple(fits), requests=stage.refreshes * stage.centroid_iterations if asks else 0,
                request_share=privacy.request_share, spent=tuple(ledger.charged()), accountant=privacy.accountant,
            )  # fmt: skip
            save_json(kept, asdict(noise))
        return cls(name, settings, ledger, noise, synthetic)

    def mode(self, *turn: object) -> PrivacyMode:
        """Return the mode of one fit; without a budget its shuffling follows the public seed, so that runs repeat."""
        mode: PrivacyMode
        if self.settings.train_on == "synthetic" or self.ledger is None or self.noise is None:
            mode = SyntheticData() if self.settings.train_on == "synthetic" else NoPrivacy()
            mode.noise_seed = int(coins(self.settings.seed, self.name, *map(str, turn)).integers(2**31))
            return mode
        return self.ledger.training(
            noise_multiplier=self.noise.training, max_grad_norm=self.settings.privacy.max_grad_norm
        )


def _planned_fits(settings: PddAs2, name: str, units: int) -> list[tuple[SamplingLaw, int]]:
    """Return by which law each stage draws its batches, and how many of them."""
    one, two = settings.stage1, settings.stage2
    planned: list[tuple[SamplingLaw, int]] = []
    for batch, epochs in ((one.batch_size, one.warmup_rounds + one.rounds), (two.batch_size, two.epochs)):
        if not epochs:  # a stage 2 that is not run: its batch asks nothing of a silo
            continue
        if batch > units:
            raise ConfigurationError(
                f"Client {name!r} has fewer train queries than a batch of {batch}. Lower the batch_size of "
                "federated.stage1 and federated.stage2, or leave the client out."
            )
        planned.append((Poisson(sample_rate=batch / units), epochs * max(1, round(units / batch))))
    return planned


SENTENCES_PER_PASSAGE = 1
"""How many sentences of a passage count in the centroids of a private collection: each costs noise for all."""


def collection_centroids(
    sentences: Callable[[], Tensor],
    collection: SentenceCollection,
    module: AS2DualEncoder,
    state: Path,
    settings: PddAs2,
    *,
    secret_file: str | Path | None,
    ledgers: Path,
) -> Tensor:
    """Return private centroids of a collection, released once for each sentence encoder and reused for free.

    The unit is a passage, in a ledger of its own in ``ledgers``; one sentence of each counts. ``sentences`` embeds
    them so that none influences another one's embedding.

    Raises:
        ConfigurationError: There is no budget, or its delta permits publishing one whole passage.
        BudgetExceededError: Another sentence encoder's centroids were released, and both are not covered.
    """
    kept = state / f"collection-{module.tower('passage').fingerprint()[:16]}.safetensors"
    if kept.is_file():
        return load_file(kept)["rows"]
    privacy, stage = settings.privacy, settings.stage2
    if privacy.collection_eps is None:
        raise ConfigurationError("federated.stage2.response=dp_centroid needs federated.privacy.collection_eps.")
    budget = PrivacyBudget(
        eps=privacy.collection_eps, delta=privacy.collection_delta, unit="passage", neighbours=privacy.neighbours
    )
    noise = calibrate_noise(
        eps=budget.eps, delta=budget.delta, neighbours=budget.neighbours, law=FullBatch(),
        steps=stage.centroid_iterations, accountant=privacy.accountant,
    )  # fmt: skip
    if privacy.neighbours != "add_or_remove":
        _check_delta(budget, len(collection.passage_ids))
    ledger = SiloLedger(ledgers, budget, accountant=privacy.accountant, noise=privacy.noise, secret_file=secret_file)
    plan = CentroidPlan(
        count=stage.centroids,
        iterations=stage.centroid_iterations,
        radius=privacy.collection_radius,
        rows_per_unit=SENTENCES_PER_PASSAGE,
        normalise=False,
        seed=settings.seed,
    )
    units = collection.passage_of.tolist()
    with ledger.gaussian("fed_response", noise_multiplier=noise, count=stage.centroid_iterations) as noised:
        rows = dp_centroids(sentences(), plan, noised, units=units)
    save_tensors({"rows": rows}, kept)
    return rows


def _check_delta(budget: PrivacyBudget, passages: int) -> None:
    if budget.delta >= 1 / passages:
        raise ConfigurationError(
            f"federated.privacy.collection_delta={budget.delta:g} is not below 1/n = {1 / passages:.3g} for "
            f"n={passages} passages: such a guarantee allows publishing one of them outright. Lower it."
        )
