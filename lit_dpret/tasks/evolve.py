"""`task=evolve`: synthetic queries by private selection, from a public language model without training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.card import CARD_NAME, CardFacts, inherit_card, read_card
from lit_dpret.cards.start import traces_of_training
from lit_dpret.cards.text import privacy_line
from lit_dpret.distributed.ray_workers import device_named
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import OutputFolder
from lit_dpret.modules import QueryGenerator
from lit_dpret.modules.generator_folder import GeneratorModel, load_generator
from lit_dpret.privacy.histogram import HISTOGRAM_NAME, ReleasedHistogram, release_histogram, votes_plan
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.privacy.ledger.dataset_account import require_room, reserved
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.private_run import PrivateRun
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, plans_of
from lit_dpret.privacy.ledger.trained import runs_behind
from lit_dpret.privacy.modes import GaussianMode
from lit_dpret.privacy.plan import EVOLUTION, PrivacyPlan
from lit_dpret.settings import Count, picked, require_number
from lit_dpret.synthesis.dataset_folder import DataCard, check_passages
from lit_dpret.synthesis.evolution import Candidate, at_most, distinct, in_turn, numbered, offspring, survivors, votes
from lit_dpret.synthesis.filters.bins import require_public_encoder
from lit_dpret.synthesis.filters.released import shown
from lit_dpret.synthesis.groups import Generation, canonical_groups
from lit_dpret.synthesis.writer import check_disk, draw_into, drawing_facts, list_assumption, opened, write_set
from lit_dpret.tasks import histogram
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.synthesize import SYNTHETIC, SetDrawing, public_sample
from lit_dpret.texts import queries_of as protected_queries

GENERATOR, GENERATIONS = "generator", "generations"
MOST_GENERATIONS = 50
_OF_THE_MACHINE = ("device", "threads", "torch", "transformers")
_COMPARED = ("population", "queries", "threshold", "keep", "vote_power", "fresh", "per_passage", "variation", "nearest")


@dataclass(kw_only=True)
class Evolve(SetDrawing):
    """Write synthetic queries selected by the votes of private queries, with a privacy card of the votes."""

    releases_itself: ClassVar[bool] = True

    passages_are_public: bool = False
    generations: Count = 3
    population: Count = 2000
    queries: Count | None = None
    threshold: float = 2.0
    keep: Count | None = None
    vote_power: float = 1.0
    fresh: float = 0.0
    per_passage: Count | None = None
    variation: str = "{passage}"
    nearest: Count = 1
    max_votes: Count = 1
    encoder: str = "minilm"
    encoder_is_public: bool = False
    cache_dir: OutputFolder | None = None
    max_passages: Count | None = None
    max_new_tokens: int | None = None
    min_free_mb: float = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("task", self, "threshold", "vote_power", "fresh", zero=True)
        if self.fresh > 1:
            raise ConfigurationError(f"task.fresh={self.fresh} must be a share of the new candidates, from 0 to 1.")
        _check_variation(self.variation)
        if self.generations > MOST_GENERATIONS:
            raise ConfigurationError(
                f"task.generations={self.generations}: each one is a release, and all share one budget. Set at most "
                f"{MOST_GENERATIONS}; Lin et al. stop at 20, and 2 to 5 suffice for queries."
            )
        if self.nearest > self.max_votes:
            raise ConfigurationError(
                f"task.nearest={self.nearest}: each query votes for that many candidates, but task.max_votes="
                f"{self.max_votes} allows a unit fewer votes. Raise max_votes, which adds noise, or lower nearest."
            )
        self._about = DataCard(
            title="", tags=["synthetic", "differential-privacy", "query-generation", "beir"], language=self.language,
            license=self.license,
        )  # fmt: skip
        self._trusts = require_public_encoder(self.encoder, self.encoder_is_public, knob="task.encoder")

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``run_dir/synthetic``, with ledger and card of the votes in the run folder; return epsilon."""
        folder = parts.run_dir
        check_run_dir(folder, min_free_mb=self.min_free_mb)
        mode = self._mode(parts)
        module = self._module(parts, mode)
        data, units = histogram.read_units(parts, mode)
        asked = self.variation.format(passage="\n", query="\n")
        module.refuse_protected(data, {"task.variation": asked})
        self.refuse_queries(protected_queries(data), folder)
        passages = self._passages(data)
        plan = self._plan(mode, data, len(units))
        dataset = mode.ledger_of_dataset(plan.budget, run_dir=folder)
        if parts.resume and (folder / SYNTHETIC / CARD_NAME).is_file():
            with histogram.copied_ledger(parts) as copied:
                writer = self._writer(copied, module)
                self._open(copied, mode, data, plan, module, writer, passages, dataset, finished=True).ledger.close()
            return self._tell(folder)
        if dataset is not None:
            require_room(dataset, folder / LEDGER_NAME, plan.release(), steps=plan.steps, earlier=())
        writer = self._writer(parts, module)
        run = self._open(parts, mode, data, plan, module, writer, passages, dataset)
        with run.ledger:
            with reserved(run, dataset, plan.release(), steps=plan.steps) as reserve:
                voters = _Voters(units, self.encoder, self.nearest, self.cache_dir, plan.n_public is not None)
                found = self._evolve(run, plan, writer, passages, voters, reserve)
            run.ledger.append("end", reason="finished", steps=plan.steps)
            records = run.ledger.records
        histogram.write_card_of_counts(
            records, data, folder, sorted((folder / GENERATIONS).glob(f"*/{HISTOGRAM_NAME}")),
            trusts=self._trusts, mechanism={"max_votes": self.max_votes}, tuning=self.tuning,
            output_released=("the noised votes of every generation", "the queries that they selected"),
            pretraining={"model": shown(module.pretrained)},
        )  # fmt: skip
        self._write(folder, found, passages, writer)
        return self._tell(folder)

    # -- checks before any expensive work --------------------------------------------------------

    def _mode(self, parts: Parts) -> GaussianMode:
        if self.passages_are_public is not True:
            raise ConfigurationError(
                f"task.passages_are_public={self.passages_are_public}: candidates are written for the whole list of "
                "passages, and the set names those selected. Use a list that was fixed without looking at the private "
                "queries, or that the claim treats as known (privacy.neighbours=zero_out), and set "
                "task.passages_are_public=true."
            )
        mode: GaussianMode = parts.make_privacy()
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"task=evolve releases noisy votes, but privacy={mode.name} adds no noise. Choose privacy=dp_sgd: its "
                "budget, unit, neighbours and noise apply, and its clipping is ignored."
            )
        if mode.unit != "user" and self.max_votes > self.nearest:
            raise ConfigurationError(
                f"task.max_votes={self.max_votes}, but a {mode.unit} has one query, with task.nearest={self.nearest} "
                "votes: the others would only add noise. Set both to the same number."
            )
        return mode

    def _module(self, parts: Parts, mode: GaussianMode) -> QueryGenerator:
        module = parts.make_module(privacy=mode)
        if not isinstance(module, QueryGenerator):
            raise ConfigurationError(
                f"task=evolve asks a language model for queries, but {type(module).__name__} writes none. Choose "
                "model=generator."
            )
        trace = next(traces_of_training(module.pretrained), None)
        behind = sorted(runs_behind(module))
        if trace is not None or behind:
            told, privacy = trace if trace is not None else (behind[0].folder or "this process", behind[0].privacy)
            raise ConfigurationError(
                f"model.pretrained={module.pretrained}: {told} shows that a run trained it (privacy={privacy}), and "
                "the card of the votes would omit that cost. Use a public model; for a privately trained "
                "generator use task=synthesize.",
                trap="T30",
            )
        return module

    def _passages(self, data: Any) -> dict[str, str]:
        chosen = public_sample(data.public_passages(), self.max_passages)
        check_passages(chosen)
        texts = {name: text for name, text in chosen.items() if text.strip()}
        if not texts:
            raise DataError(f"None of the {len(chosen)} passages has any text.")
        return texts

    def _plan(self, mode: GaussianMode, data: Any, units: int) -> PrivacyPlan:
        if not units:
            raise DataError("The train split has no unit that could vote.")
        public = mode.public_units(units)
        plan = votes_plan(
            mode.budget(public).of_units(data), releases=self.generations, max_votes=self.max_votes, n_public=public,
            **picked(mode, "noise_multiplier", "accountant", "max_units_per_user", "noise"),
        )  # fmt: skip
        if public is not None and plan.noise_std * 20 > public * self.max_votes:
            raise ConfigurationError(
                f"task.generations={self.generations} within privacy.eps={mode.eps:g} need noise of standard deviation "
                f"{plan.noise_std:.3g} on each count, but {public} units have {public * self.max_votes} votes: the "
                "noise would hide even a candidate with a tenth of them. Use fewer generations, more units, or more "
                "budget."
            )
        return plan

    # -- the run -------------------------------------------------------------------------------

    def _writer(self, parts: Parts, module: QueryGenerator) -> _Writer:
        """Save the model where workers will find it, and load it as they do."""
        place = parts.run_dir / GENERATOR
        module.save_model(place)
        generator = load_generator(place)
        longest = generator.contract.max_query_length if self.max_new_tokens is None else self.max_new_tokens
        settings = picked(
            self, "top_p", "temperature", "top_k", "min_new_tokens", "group_size", "precision", "threads", "workers",
        )  # fmt: skip
        how = Generation(seed=parts.seed, max_new_tokens=longest, device=str(device_named(self.device)), **settings)
        how.decoding()  # refused here, before the ledger is begun
        return _Writer(place, generator, how)

    def _open(
        self, parts: Parts, mode: GaussianMode, data: Any, plan: PrivacyPlan, module: QueryGenerator, writer: _Writer,
        passages: Mapping[str, str], dataset: DatasetLedger | None, *, finished: bool = False,
    ) -> PrivateRun:  # fmt: skip
        # Public facts, compared one by one on resume.
        facts = {
            "generator": shown(module.pretrained),
            "encoder": shown(self.encoder),
            **picked(self, *_COMPARED),
            **{f"drawn_{name}": value for name, value in drawing_facts(writer.place, passages, writer.how).items()},
        }
        if finished:  # this machine may be another one
            records = PrivacyLedger.read(parts.run_dir / LEDGER_NAME).records
            before = plans_of(records)[0]["mode_facts"]
            facts |= {f"drawn_{name}": before.get(f"drawn_{name}") for name in _OF_THE_MACHINE}
        most = f"at most {self.max_votes} vote{'' if self.max_votes == 1 else 's'}"
        return histogram.counting_run(
            parts, mode, plan, data, dataset, mode=EVOLUTION, rows_per_unit=most, mode_facts=facts,
            assumptions=module.assumptions(),
        )  # fmt: skip

    def _evolve(
        self, run: PrivateRun, plan: PrivacyPlan, writer: _Writer, passages: Mapping[str, str], voters: _Voters,
        reserve: Any,
    ) -> list[Candidate]:  # fmt: skip
        """Return the last population, on which no votes are taken."""
        place = run.ledger.path.parent / GENERATIONS
        untried, drawn = in_turn(passages), Counter[str]()
        kept: list[Candidate] = []
        first = self._untried(untried, self.population, passages)
        if len(first) < self.population:
            say(
                f"task.per_passage={self.per_passage} of {len(passages)} passages: generations have {len(first)} "
                f"candidates, not task.population={self.population}"
            )
        texts = {name: passages[source] for name, source in _named(first, drawn)}
        for step in range(plan.steps):
            where, last = place / f"{step + 1:02d}", step + 1 == plan.steps
            label = f"the candidates of generation {step + 1} of {plan.steps}"
            found = distinct([*kept, *writer.draw(where, texts, label)])
            counts = self._voted(run, plan, step, where, found, voters, reserve)
            size = self.population if not last or self.queries is None else self.queries
            best = survivors(counts, least=self.threshold * plan.noise_std)
            best = [best[place] for place in at_most([found[index].passage_id for index in best], self.per_passage)]
            best = best[: self.keep][:size]
            kept = [found[index] for index in best]
            # No votes are taken on the final set, so only selected candidates contribute to it.
            fresh = 0 if last else round(self.fresh * (size - len(kept)))
            key = sha256(f"lit-dpret/evolution\x1f{writer.how.seed}\x1f{step}".encode()).digest()[:8]  # a public seed
            seed = int.from_bytes(key, "big")
            numbers = offspring(counts[best] ** self.vote_power, size - len(kept) - fresh, seed=seed)
            parents = [parent for parent, number in zip(kept, numbers, strict=True) for _ in range(number)]
            held = [one.passage_id for one in kept]
            parents = [parents[place] for place in at_most([one.passage_id for one in parents], self.per_passage, held)]
            fresh = 0 if last else size - len(kept) - len(parents)
            held += [one.passage_id for one in parents]
            texts = {
                name: passages[source] for name, source in _named(self._untried(untried, fresh, passages, held), drawn)
            }
            for (name, source), parent in zip(
                _named([parent.passage_id for parent in parents], drawn), parents, strict=True
            ):
                texts[name] = self.variation.format(passage=passages[source], query=parent.text)
        return distinct([*kept, *writer.draw(place / f"{plan.steps + 1:02d}", texts, "the rest of the set")])

    def _untried(
        self, turn: Iterator[str], count: int, passages: Mapping[str, str], held: Sequence[str] = ()
    ) -> list[str]:
        """Return the passages of the next ``count`` new candidates; fewer if ``task.per_passage`` leaves fewer."""
        if self.per_passage is None:
            return list(islice(turn, count))
        found, taken = list[str](), Counter(held)
        for source in islice(turn, min(self.per_passage, count) * len(passages)):
            if taken[source] < self.per_passage:
                taken[source] += 1
                found.append(source)
            if len(found) == count:
                break
        return found

    def _voted(
        self, run: PrivateRun, plan: PrivacyPlan, step: int, folder: Path, found: list[Candidate], voters: _Voters,
        reserve: Any,
    ) -> np.ndarray:  # fmt: skip
        """Return the noised votes of one generation; those on disk if the ledger has already released them."""
        spec = sha256(json.dumps([[each.name, each.text] for each in found]).encode()).hexdigest()
        bins = {"kind": "candidates", "sha256": spec, "encoder": shown(self.encoder)}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HISTOGRAM_NAME).is_file():
            known = ReleasedHistogram.read(folder)
            counts = np.array(known.counts)
            digest = sha256(counts.tobytes()).hexdigest()
            released = [record for (_, each), record in run.releases.items() if each == step]
            if dict(known.bins) == bins and any(record.get("update_hash") == digest for record in released):
                return counts
        with histogram.over_rows(run):
            noised = release_histogram(
                run, plan, voters.votes([each.text for each in found]), bins=len(found), max_count=self.max_votes,
                spec=spec, step=step, grant=lambda: reserve(step),
            )  # fmt: skip
        ReleasedHistogram(
            names=tuple(each.name for each in found), counts=tuple(map(float, noised)), bins=bins,
            noise_std=plan.noise_std, max_count=self.max_votes,
        ).write(folder)  # fmt: skip
        return noised

    def _write(self, folder: Path, found: list[Candidate], passages: Mapping[str, str], writer: _Writer) -> None:
        place, order = folder / SYNTHETIC, {name: number for number, name in enumerate(passages)}
        queries = sorted(found, key=lambda each: (order[each.passage_id], each.draw))
        configuration = drawing_facts(writer.place, passages, writer.how) | {
            "evolution": {**picked(self, "generations", *_COMPARED, "max_votes"), "encoder": shown(self.encoder)}
        }

        def card_of(hashes: Mapping[str, str], environment: Mapping[str, Any]) -> dict[str, Any]:
            return inherit_card(
                folder / CARD_NAME,
                {"artifact_type": "dataset", "name": place.name, "sha256": dict(hashes)},
                CardFacts(
                    tuning=self.tuning,
                    environment=environment,
                    generation={
                        "doc_source": "declared_public",
                        "per_doc": 0,
                        "decoding": {key: configuration[key] for key in vars(writer.how.decoding())},
                        "filters": [],
                        "seeds": [writer.how.seed],
                    },
                    assumptions=[Assumption(list_assumption(read_card(folder)["claim"]["neighbours"]), "unverified")],
                ),
                description="candidates selected by the noised votes, and new ones drawn for the same passages",
                parent_ledger=folder / LEDGER_NAME,
            )

        about = replace(self._about, title=f"Synthetic queries: {place.name}", origin=[
            f"Generator: `{configuration['generator'][:16]}` (SHA-256 of its files), a public model, untrained; the "
            f"votes of the private queries selected from what it wrote in {self.generations} generations of "
            f"{self.population} candidates.",
            "Filters: none.",
        ])  # fmt: skip
        write_set(
            place, lambda: iter(queries), passages, configuration, about, card_of,
            amount=f"{len(queries)} in the last generation; seed {writer.how.seed}",
        )  # fmt: skip

    def _tell(self, folder: Path) -> dict[str, float]:
        card, place = histogram.finished_card(folder), folder / SYNTHETIC
        last = ReleasedHistogram.read(sorted((folder / GENERATIONS).glob(f"*/{HISTOGRAM_NAME}"))[-1].parent)
        selected = sum(count > self.threshold * last.noise_std for count in last.counts)
        say(
            f"last votes: {selected} of {len(last.counts)} candidates above {self.threshold:g} standard deviations of "
            f"the noise ({last.noise_std:.4g})",
            privacy_line(card),
            f"synthetic queries: {place}\nprivacy card: {place / CARD_NAME}",
        )
        epsilon = card["claim"]["epsilon"]
        return {"selected": float(selected)} | ({} if epsilon is None else {"epsilon": float(epsilon)})


def _check_variation(text: str) -> None:
    try:
        found = {field for _, field, spec, how in Formatter().parse(text) if field is not None and not (spec or how)}
        text.format(passage="", query="")
    except (ValueError, KeyError, IndexError, AttributeError):
        found = set()
    if "passage" not in found or found - {"passage", "query"}:
        raise ConfigurationError(
            f"task.variation={text!r} must contain {{passage}}, and may contain {{query}}: the model reads it in place "
            "of a passage when it varies a query. Double all other braces."
        )


def _named(sources: Iterable[str], drawn: Counter[str]) -> list[tuple[str, str]]:
    sources = list(sources)
    return list(zip(numbered(sources, drawn), sources, strict=True))


@dataclass
class _Writer:
    """The public model in its folder, and the settings for drawing from it."""

    place: Path
    generator: GeneratorModel
    how: Generation

    def draw(self, folder: Path, texts: Mapping[str, str], label: str) -> list[Candidate]:
        """Return the candidates of these names, each drawn for its text; existing results in ``folder`` are kept."""
        if not texts:
            return []
        groups = canonical_groups(self.generator.codec, texts, self.how.group_size)
        configuration = drawing_facts(self.place, texts, self.how)

        def fits() -> None:
            check_disk(folder, texts, draws=1, max_new_tokens=self.how.max_new_tokens or 1)

        with (
            opened(folder, configuration, len(groups), check=fits) as store,
            ProgressLine(f"writing {label}") as progress,
        ):
            draw_into(
                store, groups, texts, self.place, self.how, progress=progress,
                generator=None if self.how.workers else self.generator,
            )  # fmt: skip
            drawn = {str(record["passage_id"]): record for record in store.records()}
        return [Candidate.of_record(drawn[name]) for name in texts]


@dataclass
class _Voters:
    """The private queries, embedded once and only if votes are requested."""

    units: Any
    encoder: str
    nearest: int
    cache_dir: Path | None = None
    shows_progress: bool = False

    def votes(self, candidates: list[str]) -> Any:
        tower, owned, queries = self._embedded
        found: Tensor = tower.encode(candidates, "query")
        return votes(owned, queries, found.float().numpy(), self.nearest)

    @cached_property
    def _embedded(self) -> tuple[Any, list[list[int]], np.ndarray]:
        texts: list[str] = []
        owned: list[list[int]] = []
        for rows in histogram.queries_of(self.units):
            worded = [row.query for row in rows if row.query.strip()]  # a blanked unit casts no vote
            owned.append(list(range(len(texts), len(texts) + len(worded))))
            texts += worded
        tower = load_towers(self.encoder).query_encoder
        with ProgressLine("embedding the private queries") as progress:
            told = progress if self.shows_progress else None
            # Embedded separately, so that no query affects the rounding of another's embedding, and with it a vote.
            found = tower.encode(texts, "query", apart=True, cache_dir=self.cache_dir, progress=told)
        return tower, owned, found.float().numpy()
