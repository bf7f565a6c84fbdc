"""What a client may answer other clients' requests with, by the kind of response that it agreed to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.centroids import CentroidPlan, dp_centroids
from lit_dpret.federated.evaluation import SentenceCollection
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo_ledger import SiloLedger
from lit_dpret.federated.storage import save_tensors
from lit_dpret.federated.synthetic import public_sentences
from lit_dpret.modules.as2 import AS2DualEncoder
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.releases import FullBatch
from lit_dpret.privacy.budget import PrivacyBudget

SENTENCES_PER_PASSAGE = 1
"""How many sentences of a passage count in the centroids of a private collection: each costs noise for all."""


def public_places(folder: Path, collection: SentenceCollection) -> list[int]:
    """Places of the sentences that the silo declares public (`lit_dpret.federated.synthetic.public_sentences`).

    Raises:
        DataError: There is no declaration, or it names none of the collection.
    """
    ids = public_sentences(folder)
    return [place for place, sid in enumerate(collection.sentence_ids) if sid in ids]


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
    """Private centroids of a collection, released once for each sentence encoder and then reused for free.

    The unit is a passage, in a ledger of its own in ``ledgers``; one sentence of each counts. ``sentences`` embeds
    them, none of which has a say in another one's embedding.

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
