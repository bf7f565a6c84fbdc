"""Synthetic queries from a silo's own DP generator, used instead of real ones: written, verified, charged once.

Using them costs no more privacy (post-processing; Dwork and Roth 2014, proposition 2.1): ``response=synthetic`` sends
their embeddings, ``train_on=synthetic`` trains on them. Before first use, the chain from the data set to the
generator's run is verified. Under a budget that run must be charged to this silo's own ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.callbacks.progress import StepProgress
from lit_dpret.cards.file import CARD_NAME, MODEL_FOLDER, read_card
from lit_dpret.cards.lineage import Lineage
from lit_dpret.cards.text import privacy_line
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.layouts import CorpusSettings, folder_parts, read_parts
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError
from lit_dpret.federated.fitting import NotRepeatedError, attempt_folder, broken_attempt, fit_epochs
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2
from lit_dpret.federated.silo_ledger import NoisePlan, SiloLedger, noise_of_rest, silo_budget
from lit_dpret.federated.storage import keep_facts
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.releases import Poisson, Release
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.settings import require_number, require_whole
from lit_dpret.synthesis.writer import synthesize

SYNTHETIC = "synthetic"
GENERATOR = "generator"
PUBLIC = "public_sids.txt"
_WHERE = "federated synthetic queries"


@dataclass(frozen=True, repr=False)
class SyntheticSet:
    """The verified synthetic queries of a silo."""

    folder: Path
    texts: list[str]  # each once
    claim: str  # of their card, in one line
    releases: list[Release]  # charged to this silo's ledger; empty without a budget

    def __repr__(self) -> str:
        return f"SyntheticSet({len(self.texts)} queries)"


def public_sentences(folder: Path) -> dict[str, str]:
    """Return by id the sentences that the silo declares public: one id per line of ``public_sids.txt``."""
    path = folder / PUBLIC
    if not path.is_file():
        raise DataError(
            f"{path} is missing: it lists the ids of the silo's public sentences, one per line. Write it, or set "
            "federated.train_on=queries and another federated.stage2.response."
        )
    ids = {line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    sentences = SiloDataModule(folder=folder).silo.sentences
    if not ids or not ids <= sentences.keys():
        what = f"{min(ids - sentences.keys())!r}, which is not a sentence of this collection" if ids else "no sentence"
        raise DataError(f"{path} names {what}. Write ids of sentences of the silo, one per line.")
    return {sid: text for sid, text in sentences.items() if sid in ids}


@dataclass(frozen=True, kw_only=True)
class GeneratorTerms:
    """Training settings of a silo's generator."""

    eps: float  # how much of the silo's budget the generator may cost by itself
    epochs: int = 1
    batch_size: int = 32  # on average

    def __post_init__(self) -> None:
        require_number("task", self, "eps")  # a generator is trained only with it
        require_whole("task", self, 1, "epochs", "batch_size")
        object.__setattr__(self, "eps", float(self.eps))


def train_generator(
    silo: str | Path,
    state: str | Path,
    settings: PddAs2,
    make_generator: Callable[..., Any],
    terms: GeneratorTerms,
    *,
    secret_file: str | Path | None = None,
    label: str | None = None,
) -> Path:
    """Train a silo's query generator on its train queries, charged to the ledger of its rounds; return its run folder.

    Guarantees:
        - All noise that is drawn fits in the silo's budget, in addition to everything else in its ledger.
        - The run's card states only the generator's epsilon; the ledger composes it with the rest.
        - A finished generator is not trained again. An interrupted one resumes: its steps are repeated bit by bit and
          charged once. If they cannot be repeated, as on a GPU, what it released stays charged, and another generator
          is trained with the noise that the budget leaves, or none.

    ``silo`` is the client's folder, ``state`` is as for `SiloClient`, and ``label`` is that of a progress line.
    """
    privacy, root = settings.privacy, Path(state) / GENERATOR
    data, budget = check_generator(silo, settings, terms)
    steps = terms.epochs * max(1, round(data.n_units / terms.batch_size))
    facts = {**asdict(terms), "budget": budget.to_dict(), "seed": settings.seed}
    keep_facts(root / "run.json", "generator", facts)
    if (done := finished_generator(state)) is not None:
        return done
    law = Poisson(sample_rate=terms.batch_size / data.n_units)
    noise = calibrate_noise(
        eps=terms.eps, delta=budget.delta, neighbours=budget.neighbours, law=law, steps=steps,
        accountant=privacy.accountant, knob="task.eps",
    )  # fmt: skip
    ledger = SiloLedger(
        Path(state) / "private", budget, accountant=privacy.accountant, noise=privacy.noise, secret_file=secret_file
    )
    ledger.require_whole(Path(state))

    def fit(folder: Path, noise_multiplier: float, *, repeat: bool) -> Path:
        mode = ledger.training(noise_multiplier=noise_multiplier, max_grad_norm=privacy.max_grad_norm)
        line = None if label is None else StepProgress(label, steps=steps)
        fit_epochs(
            make_generator(privacy=mode), data, folder, epochs=terms.epochs, callbacks=[PrivacyCard(run_dir=folder)],
            progress=line, repeat=repeat,
        )  # fmt: skip
        return folder

    if (broken := broken_attempt(root)) is not None:
        try:
            return fit(*broken, repeat=True)
        except NotRepeatedError:
            ledger.settle_broken(broken[0] / LEDGER_NAME)
        data, _ = check_generator(silo, settings, terms)
        noise = noise_of_rest(
            NoisePlan(noise, None), budget, [(law, steps)], spent=ledger.charged(), accountant=privacy.accountant
        ).training
    return fit(attempt_folder(root), noise, repeat=False)


def finished_generator(state: str | Path) -> Path | None:
    """Return the run folder of the finished generator in a silo's state folder; None if there is none."""
    runs = sorted((Path(state) / GENERATOR).glob("attempt-*"))
    return next((run for run in runs if (run / MODEL_FOLDER / CARD_NAME).is_file()), None)


def check_generator(silo: str | Path, settings: PddAs2, terms: GeneratorTerms) -> tuple[SiloDataModule, PrivacyBudget]:
    """Refuse what `train_generator` could not train; return the training data and the silo's whole budget."""
    batch_size = terms.batch_size
    data, budget = units_and_budget(
        silo, settings.privacy, sampling="poisson", expected_batch_size=batch_size, physical_batch_size=batch_size,
        seed=settings.seed,
    )  # fmt: skip
    if terms.eps > budget.eps:
        raise ConfigurationError(
            f"{_WHERE}: task.eps={terms.eps:g}, the generator's, must be at most federated.privacy.eps={budget.eps:g}."
        )
    if batch_size > data.n_units:
        raise ConfigurationError(
            f"{_WHERE}: task.batch_size={batch_size} exceeds the number of the silo's train queries (or pairs, if they "
            "are the unit). Lower it."
        )
    return data, budget


def write_synthetic(silo: str | Path, generator: str | Path, **decoding: Any) -> Path:
    """Let a silo's generator write queries for its public sentences, into the silo's folder."""
    folder = Path(silo)
    return synthesize(
        Path(generator) / MODEL_FOLDER,
        # A query reveals the sentence for which it was written, and the generator's claim protects queries, not
        # sentences. So the generator sees only sentences that the silo declares public.
        public_sentences(folder),
        folder / SYNTHETIC,
        passages_are_public=True,
        **decoding,
    )


def read_synthetic(silo: str | Path, ledger: SiloLedger | None, *, near: Sequence[str | Path] = ()) -> SyntheticSet:
    """Read the synthetic queries of a silo and verify their claim.

    The folders ``near`` are also searched for the card and ledger of their generator. ``ledger`` is the silo's, None if
    the federation promises nothing.

    Guarantees, after it returns:
        - The files are those that the card describes, an unbroken chain leads from the generator's ledger to the card,
          and no audit contradicts it.
        - No query was written for a sentence of the collection that is not declared public.
        - Unit and neighbours are those of the ledger's budget, and the generator's run is charged to it once.
    """
    folder = Path(silo) / SYNTHETIC
    path = folder / CARD_NAME
    if not path.is_file():
        raise DataError(
            f"{_WHERE}: {folder} has no {CARD_NAME}, so their privacy is unknown. Write them with "
            "task=federated_generators, or set federated.train_on=queries and another federated.stage2.response."
        )
    found = verify_chain(path, parents=[place for place in near if Path(place).exists()])
    if found.failed:
        first = found.failed[0]
        raise PrivateDataError(
            f"{folder}: its card is not valid ({len(found.failed)} checks failed, the first: {first.artefact}, "
            f"{first.check}: {first.text}). If its generator's run is elsewhere, name its state folder "
            "(federated.state, or --state of lit-dpret silo)."
        )
    card = read_card(path)
    _require_claim(card, None if ledger is None else ledger.budget, folder)
    texts = _texts(Path(silo), folder)
    releases: list[Release] = []
    if ledger is not None:
        lineage = Lineage([place for place in near if Path(place).exists()])
        lineage.look_near(path)
        own = lineage.ledger(card, path)
        if own is None:
            raise PrivateDataError(
                f"{folder}: the ledger of its generator was not found, so its cost is unknown. Name the state folder "
                "that holds the generator (federated.state, or --state of lit-dpret silo)."
            )
        releases = ledger.require_charged(PrivacyLedger.read(own).records, f"The generator of {folder}")
    return SyntheticSet(folder, texts, privacy_line(card), releases)


def check_generated(silo: str | Path, state: str | Path, settings: PddAs2) -> SyntheticSet:
    """Read the synthetic queries of a silo as its rounds will, with the ledger in its state folder ``state``."""
    ledger = None if settings.privacy.eps is None else open_ledger(silo, state, settings.privacy)
    return read_synthetic(silo, ledger, near=[state])


def open_ledger(silo: str | Path, state: str | Path, privacy: FederatedPrivacy) -> SiloLedger:
    """Open the ledger of a silo's queries for reading."""
    return SiloLedger(Path(state) / "private", units_and_budget(silo, privacy)[1], accountant=privacy.accountant)


def units_and_budget(
    silo: str | Path, privacy: FederatedPrivacy, **sampling: Any
) -> tuple[SiloDataModule, PrivacyBudget]:
    """Return a silo's train queries in units of privacy, and its whole budget."""
    if privacy.eps is None:
        raise ConfigurationError("federated.privacy.eps=null: without a budget there is no ledger. Set it.")
    data = SiloDataModule(folder=silo, **sampling)
    data.use_unit(privacy.unit, privacy.neighbours)
    budget = silo_budget(
        privacy.eps, privacy.delta, unit=privacy.unit, neighbours=privacy.neighbours, units=data.n_units
    )
    return data, budget.of_units(data)


def _require_claim(card: Mapping[str, Any], budget: PrivacyBudget | None, folder: Path) -> None:
    claim = card["claim"]
    if card["subject"]["artifact_type"] != "dataset":
        raise PrivateDataError(f"{folder}: its card describes a {card['subject']['artifact_type']}, not a data set.")
    if claim["guarantee"] != "dp" or claim["epsilon"] is None:
        raise PrivateDataError(
            f"{folder}: its card claims no differential privacy ({claim['guarantee']}). Train its generator under a "
            "budget."
        )
    if budget is None:
        return
    where = "federated.privacy"
    for knob in (f"{where}.unit", f"{where}.neighbours", "datamodule.duplicates"):
        name = knob.rpartition(".")[2]
        if claim[name] != (wanted := getattr(budget, name)):
            raise PrivateDataError(
                f"{folder}: its claim has {name}={claim[name]}, and {knob}={wanted}, so their epsilons do not add up. "
                "Train the generator with the same value."
            )
    if (card["accounting"] or {}).get("basis") == "no_amplification":
        raise PrivateDataError(
            f"{folder}: its claim has no amplification by sampling. Train the generator with Poisson sampling."
        )


def _texts(silo: Path, folder: Path) -> list[str]:
    """Return the queries; refuse a set with queries for sentences that are not public."""
    read = read_parts(**folder_parts(str(folder)), how=CorpusSettings(empty_knob=None))
    texts = list(dict.fromkeys(text for text in read.queries.values() if text.strip()))
    if not texts:
        raise DataError(f"{folder} holds no query. Write the queries again (task=federated_generators).")
    sentences = SiloDataModule(folder=silo).silo.sentences
    private = set(sentences.values()) - set(public_sentences(silo).values())
    if hidden := sum(text in private for text in read.passages.values()):
        raise PrivateDataError(
            f"{folder}: {hidden} sentences that queries were written for are not in {PUBLIC}. A query reveals its "
            "sentence, which the generator's claim does not protect. Write the queries again "
            "(task=federated_generators)."
        )
    return texts
