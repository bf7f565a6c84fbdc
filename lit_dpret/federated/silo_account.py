"""A silo's account in one run: its ledger, the noise for its plan, and the privacy mode of each fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.centroids import CentroidPlan, dp_centroids
from lit_dpret.federated.evaluation import SentenceCollection
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo_ledger import NoisePlan, SiloLedger, noise_of_rest, split_budget
from lit_dpret.federated.storage import save_json, save_tensors
from lit_dpret.federated.synthetic import SyntheticSet, read_synthetic, units_and_budget
from lit_dpret.negatives.base import public_coins
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.releases import FullBatch, Poisson, SamplingLaw
from lit_dpret.privacy.budget import PrivacyBudget, require_delta
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode, SyntheticData

_NOISE = "noise.json"
_ENDED = "nothing_left.json"


@dataclass(frozen=True)
class SiloAccount:
    """The account of one silo in one run."""

    name: str
    settings: PddAs2
    ledger: SiloLedger | None  # of the spending on its queries; None without a budget
    units: int  # of privacy; 0 without a budget
    state: Path  # folder of the run's files
    synthetic: SyntheticSet | None

    @property
    def noise(self) -> NoisePlan | None:
        """The noise of the remaining releases; None if the run makes none."""
        kept = self.state / _NOISE
        if self.ledger is None or self.settings.train_on == "synthetic":
            return None
        return NoisePlan(**json.loads(kept.read_text(encoding="utf-8")))

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
        privacy, near = settings.privacy, [state]
        if privacy.eps is None:
            synthetic = read_synthetic(folder, None, near=near) if settings.generated else None
            return cls(name, settings, None, 0, state, synthetic)
        data, budget = units_and_budget(folder, privacy)
        ledger = SiloLedger(
            ledgers, budget, accountant=privacy.accountant, noise=privacy.noise, secret_file=secret_file
        )
        ledger.require_whole(state)
        synthetic = read_synthetic(folder, ledger, near=near) if settings.generated else None
        account = cls(name, settings, ledger, data.n_units, state, synthetic)
        if settings.train_on == "queries":
            fits, kept = account._fits(), state / _NOISE
            # The noise is chosen once, for everything that was planned when the state folder was first used. It is
            # raised if something that was released is lost (`keep_within`).
            if not kept.is_file():
                noise = split_budget(
                    budget, tuple(fits), requests=account._requests(), request_share=privacy.request_share,
                    spent=tuple(ledger.charged()), accountant=privacy.accountant,
                )  # fmt: skip
                save_json(kept, asdict(noise))
        return account

    @property
    def ended(self) -> str | None:
        """The reason why the silo makes no more releases in this run; None if it has budget left."""
        kept = self.state / _ENDED
        return str(json.loads(kept.read_text(encoding="utf-8"))) if kept.is_file() else None

    def end(self, lost: str) -> None:
        """Let the silo continue without releases, with its current weights: no budget remains after what was ``lost``.

        Whether this happens depends only on what was announced and on when the process was killed.
        """
        why = (
            f"federated.privacy.eps={self.settings.privacy.eps:g} is spent: the interrupted {lost} cannot be repeated "
            "on this machine, is lost and stays charged. The silo trains and requests nothing more in this run, and "
            "keeps its current weights. To train to the end, start over in a new folder with new ledgers, whose budget "
            "is spent in addition."
        )
        save_json(self.state / _ENDED, why)
        rank_zero_warn(f"Silo {self.name}: {why}")

    def mode(self, *turn: object, noise_multiplier: float | None = None) -> PrivacyMode:
        """Return the mode of one fit; without a budget, shuffling follows the public seed, so that runs repeat."""
        mode: PrivacyMode
        noise = self.noise
        if self.ledger is None or noise is None:
            mode = SyntheticData() if self.settings.train_on == "synthetic" else NoPrivacy()
            mode.noise_seed = int(public_coins(self.settings.seed, self.name, *map(str, turn)).integers(2**31))
            return mode
        return self.ledger.training(
            noise_multiplier=noise.training if noise_multiplier is None else noise_multiplier,
            max_grad_norm=self.settings.privacy.max_grad_norm,
        )

    def keep_within(self, *, rounds: int = 0, epochs: int = 0, refreshes: int = 0) -> None:
        """Raise the noise for the rest of the run if it would exceed the budget.

        ``rounds`` and ``epochs`` are over, not counting lost ones. Requests from refresh ``refreshes`` on are still to
        come.
        """
        planned, ledger = self.noise, self.ledger
        if planned is None or ledger is None:
            return
        rest = noise_of_rest(
            planned, ledger.budget, self._fits(rounds, epochs), requests=self._requests(refreshes),
            spent=ledger.charged(), accountant=ledger.accountant,
        )  # fmt: skip
        if rest != planned:
            save_json(self.state / _NOISE, asdict(rest))

    def _fits(self, rounds: int = 0, epochs: int = 0) -> list[tuple[SamplingLaw, int]]:
        """Return the sampling law and the number of remaining batches of each stage, after these rounds and epochs."""
        one, two, units = self.settings.stage1, self.settings.stage2, self.units
        planned: list[tuple[SamplingLaw, int]] = []
        all_rounds = one.warmup_rounds + one.rounds
        for batch, times, over in ((one.batch_size, all_rounds, rounds), (two.batch_size, two.epochs, epochs)):
            if not times:  # stage 2 is not run, so its batch size does not matter
                continue
            if batch > units:
                raise ConfigurationError(
                    f"Client {self.name!r} has fewer train queries (or pairs, if they are the unit) than "
                    f"batch_size={batch} of federated.stage1 or stage2. Lower it, or leave the client out."
                )
            planned.append((Poisson(sample_rate=batch / units), (times - over) * max(1, round(units / batch))))
        return planned

    def _requests(self, first: int = 0) -> int:
        """Return how many iterations of centroids the requests take from epoch ``first`` of stage 2 on."""
        stage = self.settings.stage2
        if not self.settings.asks or stage.request != "dp_centroid":
            return 0
        return sum(stage.asks(epoch) for epoch in range(first, stage.epochs)) * stage.centroid_iterations


def centroids_once(
    kept: Path,
    ledger: SiloLedger,
    label: str,
    plan: CentroidPlan,
    *,
    rows: Callable[[], Tensor],
    noise: Callable[[bool], float],
    units: Sequence[Hashable] | None = None,
) -> Tensor:
    """Release private centroids, charged to the ledger as ``label``, and store them in a file for free reuse.

    ``rows`` embeds the private texts, each independently of the others. ``noise`` returns the noise multiplier, given
    whether an earlier try was interrupted: what that released stays charged, and more noise has to pay for it.
    """
    ledger.settle_broken_releases()
    begun, private = kept.with_suffix(".begun"), rows()
    with ledger.gaussian(label, noise_multiplier=noise(begun.is_file()), count=plan.iterations) as noised:
        save_json(begun, label)
        found = dp_centroids(private, plan, noised, units=units)
    save_tensors({"rows": found}, kept)
    return found


def collection_centroids(
    kept: Path,
    sentences: Callable[[], Tensor],
    collection: SentenceCollection,
    settings: PddAs2,
    *,
    secret_file: str | Path | None,
    ledgers: Path,
) -> Tensor:
    """Return private centroids of a collection (`centroids_once`), stored per sentence encoder."""
    if kept.is_file():
        return load_file(kept)["rows"]
    privacy, stage, passages = settings.privacy, settings.stage2, len(collection.passage_ids)
    if privacy.collection_eps is None:
        raise ConfigurationError("federated.stage2.response=dp_centroid needs federated.privacy.collection_eps.")
    require_delta(privacy.collection_delta, knob="federated.privacy.collection_delta")
    budget = PrivacyBudget(
        eps=privacy.collection_eps, delta=privacy.collection_delta, unit="passage", neighbours=privacy.neighbours
    )
    if privacy.neighbours != "add_or_remove" and budget.delta >= 1 / passages:
        raise ConfigurationError(
            f"federated.privacy.collection_delta={budget.delta:g} must be below 1/n = {1 / passages:.3g} for the n "
            "passages, or the guarantee allows publishing one of them."
        )
    # The unit is a passage, with its own ledger in ``ledgers``; one sentence of each counts.
    ledger = SiloLedger(ledgers, budget, accountant=privacy.accountant, noise=privacy.noise, secret_file=secret_file)

    def noise(begun: bool) -> float:
        planned = calibrate_noise(
            eps=budget.eps, delta=budget.delta, neighbours=budget.neighbours, law=FullBatch(),
            steps=stage.centroid_iterations, accountant=privacy.accountant, knob="federated.privacy.collection_eps",
        )  # fmt: skip
        if not begun:
            return planned
        rest = noise_of_rest(
            NoisePlan(planned, planned), budget, (), requests=stage.centroid_iterations, spent=ledger.charged(),
            accountant=privacy.accountant,
        )  # fmt: skip
        return rest.request or planned

    plan = CentroidPlan(
        count=stage.centroids, iterations=stage.centroid_iterations, radius=privacy.collection_radius,
        normalise=False, seed=settings.seed,
    )  # fmt: skip
    units = collection.passage_of.tolist()
    return centroids_once(kept, ledger, "fed_response", plan, rows=sentences, noise=noise, units=units)
