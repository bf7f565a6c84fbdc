"""`task=similarity`: compare a synthetic data set with the original one, and count copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.callbacks.retrieval_evaluation import trains_on
from lit_dpret.cards.file import CARD_NAME, check_dataset_card, read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.layouts import CorpusSettings, folder_parts, read_parts
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.encoders import Towers, load_towers
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError
from lit_dpret.report.similarity_report import scores_of, write_similarity
from lit_dpret.settings import Count, Settings
from lit_dpret.synthesis.textsim import diversity
from lit_dpret.synthesis.textsim.bleu import corpus_bleu, references_by_passage
from lit_dpret.synthesis.textsim.mauve import mauve
from lit_dpret.synthesis.textsim.overlap import overlap
from lit_dpret.synthesis.textsim.words import need
from lit_dpret.tasks.parts import Parts, by_hash, check_run_dir, say, some_of
from lit_dpret.tasks.ranking import embedded_texts
from lit_dpret.tasks.uncovered import Whose, check_declared, check_synthetic, declare, refuse_training_data

Qrels = Mapping[str, Mapping[str, int]]
Measure = Literal["bleu", "mauve", "diversity", "overlap"]
Features = Literal["query", "query_passage"]

_PACKAGES: dict[Measure, Literal["sacrebleu", "sklearn"]] = {"bleu": "sacrebleu", "mauve": "sklearn"}
_NO_PASSAGES = "task.reference_file has queries without passages"


@dataclass(frozen=True)
class Texts:
    """Queries with the passages they were written for or asked about; one row per pair."""

    queries: Mapping[str, str]
    rows: Sequence[tuple[str, str]]
    passages: Mapping[str, str]

    @classmethod
    def of(cls, queries: Mapping[str, str], qrels: Qrels, passages: Mapping[str, str]) -> Texts:
        """Return the queries of a judged split that have a passage."""
        rows = [(query, passage) for query, judged in qrels.items() for passage, grade in judged.items() if grade > 0]
        return cls({query: queries[query] for query in dict(rows)}, rows, passages)

    @classmethod
    def read(cls, path: Path) -> Texts:
        """Read queries without passages, from a file of records with a ``text``."""
        file = RecordFile(path, knob="task.reference_file")
        return cls({str(number): file.text(number, record, "text") for number, record in file}, [], {})

    def facts(self, source: Any) -> dict[str, Any]:
        """Return the identity of the data, as every result states it, and their numbers."""
        return {**data_facts(source, self.queries), "queries": len(self.queries), "pairs": len(self.rows)}

    def sample(self, count: int) -> list[str]:
        """Return this many queries, chosen by hash of id; all if there are fewer."""
        chosen = sorted(self.queries, key=by_hash)[:count]
        return [self.queries[name] for name in chosen]

    def sample_rows(self, count: int) -> list[tuple[str, str]]:
        """Return query and passage of this many rows, chosen by hash of their ids."""
        chosen = sorted(self.rows, key=lambda row: by_hash("\t".join(row)))[:count]
        return [(self.queries[query], self.passages[passage]) for query, passage in chosen]


@dataclass(kw_only=True)
class Similarity(Settings):
    """Compare the queries of a synthetic data set with original ones."""

    synthetic: Path
    reference: Whose | None = None
    card_entry: bool = False
    split: str = "train"
    reference_file: Path | None = None
    held_out: str | None = None
    measures: Sequence[Measure] | None = None
    ngram: Count = 8
    encoder: str = "minilm"
    features: Sequence[Features] = ("query", "query_passage")
    max_texts: Count = 5000
    seeds: Count = 5
    buckets: int | None = None
    ceiling: bool = True
    plot: bool | None = None
    batch_size: Count = 64
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference = check_declared(self.reference, self.card_entry, knob="task.reference", measured="similarity")
        self.chosen: Sequence[Measure] = some_of("task.measures", self.measures, get_args(Measure))
        self.features = some_of("task.features", self.features, get_args(Features))
        if self.reference_file is not None and self.held_out is not None:
            raise ConfigurationError(
                f"task.held_out={self.held_out} is a split of the datamodule, which task.reference_file replaces. Set "
                "one of them."
            )
        if self.reference_file is not None and self.measures is not None and "bleu" in self.measures:
            raise ConfigurationError(
                f"task.measures names bleu, which compares queries of one passage, but {_NO_PASSAGES}. Leave bleu out."
            )
        if self.reference_file is not None and self.reference == "synthetic":
            raise ConfigurationError(
                "task.reference=synthetic is checked against a privacy card, but task.reference_file has none. Pass "
                "the folder as datamodule=synthetic, or declare the kind of the queries."
            )

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``similarity.json``, ``.md``, ``.html`` and, with matplotlib, ``similarity.png``; return the scores."""
        check_run_dir(parts.run_dir, min_free_mb=50)
        for measure, package in _PACKAGES.items():
            if measure in self.chosen:
                need(package)  # fails before the card is marked and texts are encoded in vain
        privacy = self._privacy()  # the declaration below is written on this card
        made, original = self._made(), self._original(parts)
        held_out = None if self.held_out is None else self._split(parts, self.held_out)
        warning = declare(
            self.synthetic, self.reference, measured=f"Similarity ({', '.join(self.chosen)})", where="this folder",
        )  # fmt: skip
        facts: dict[str, Any] = {
            "synthetic": {"name": self.synthetic.resolve().name, "privacy": privacy, **made.facts(self.synthetic)},
            "reference": {
                "whose": self.reference,
                "from": f"the split {self.split}" if self.reference_file is None else self.reference_file.name,
                **original.facts(self.reference_file or parts.make_datamodule()),
            },
            "not_covered": warning,
            "not_computed": {},
        }
        measures: dict[Measure, Callable[[], Any]] = {
            "bleu": lambda: self._bleu(made, original, facts["not_computed"]),
            "mauve": lambda: self._mauve(made, original, facts["not_computed"]),
            "diversity": lambda: self._diversity(made, original),
            "overlap": lambda: self._overlap(made, original, held_out),
        }
        facts |= {name: measure() for name, measure in measures.items() if name in self.chosen}
        internal = self.reference == "private"
        written = write_similarity(facts, parts.run_dir, command=parts.command, plot=self.plot, owner_only=internal)
        say(*written.lines)
        return scores_of(facts)

    def _privacy(self) -> str:
        path = self.synthetic / CARD_NAME
        if not path.is_file():
            return "no privacy card"
        check_dataset_card(path)
        return privacy_line(read_card(path))

    # -- the texts -----------------------------------------------------------------------------

    def _made(self) -> Texts:
        how = CorpusSettings(knob="task.synthetic", empty_knob=None)
        read = read_parts(**folder_parts(self.synthetic, knob="task.synthetic"), how=how)
        if "train" not in read.qrels:
            raise DataError(
                f"task.synthetic={self.synthetic} has no qrels/train.tsv, so it holds no synthetic queries."
            )
        return Texts.of(read.queries, read.qrels["train"], read.passages)

    def _original(self, parts: Parts) -> Texts:
        if self.reference_file is None:
            return self._split(parts, self.split)
        texts = Texts.read(self.reference_file)
        if self.reference == "public":
            data = None
            with suppress(LitDpretError):  # without its data there is nothing to compare with
                given = parts.make_datamodule()
                given.setup("test")
                data = given
            if trains_on(data, texts.queries):
                refuse_training_data(data, self.synthetic, knob="task.reference")
        return texts

    def _split(self, parts: Parts, split: str) -> Texts:
        data = parts.read_data("test")
        if self.reference == "synthetic":
            check_synthetic(data, split)
        if self.reference == "public":
            refuse_training_data(data, self.synthetic, knob="task.reference")
        queries, qrels = data.evaluation_set(split)
        return Texts.of(queries, qrels, data.collection.passages)

    # -- the measures --------------------------------------------------------------------------

    def _bleu(self, made: Texts, original: Texts, missing: dict[str, str]) -> dict[str, Any] | None:
        if not original.rows:
            missing["bleu"] = _NO_PASSAGES
            return None
        by_passage: dict[str, list[str]] = {}
        for query, passage in original.rows:
            by_passage.setdefault(passage, []).append(original.queries[query])
        references = references_by_passage([passage for _, passage in made.rows], by_passage)
        return corpus_bleu([made.queries[query] for query, _ in made.rows], references).to_dict()

    def _mauve(self, made: Texts, original: Texts, missing: dict[str, str]) -> dict[str, Any]:
        towers, found = load_towers(self.encoder), dict[str, Any]()
        for kind in self.features:
            if kind == "query_passage" and not original.rows:
                missing["mauve of query_passage"] = _NO_PASSAGES
                continue
            p, q, more = self._features(kind, made, original)
            what = "query" if kind == "query" else "query and passage in one text"
            how: dict[str, Any] = {
                "featuriser": f"{'minilm' if self.encoder == 'minilm' else Path(self.encoder).name}, {what}",
                "seeds": range(self.seeds),
                "buckets": self.buckets,
            }
            side: Literal["query", "passage"] = "query" if kind == "query" else "passage"
            known = self._encode(towers, q, side)
            found[kind] = mauve(self._encode(towers, p, side), known, **how).to_dict() | {"ceiling": None}
            if self.ceiling and len(more) == len(q):
                found[kind]["ceiling"] = mauve(self._encode(towers, more, side), known, **how).to_dict()
        return found

    def _features(self, kind: Features, made: Texts, original: Texts) -> tuple[list[str], list[str], list[str]]:
        """Return equally many texts of both sides, and the same number of further originals, if there are enough."""
        if kind == "query":
            count = min(len(made.queries), len(original.queries), self.max_texts)
            texts, known = made.sample(count), original.sample(2 * count)
        else:
            count = min(len(made.rows), len(original.rows), self.max_texts)
            texts, known = (
                [f"{query} {passage}" for query, passage in each.sample_rows(number)]
                for each, number in ((made, count), (original, 2 * count))
            )
        return texts, known[:count], known[count:]

    def _encode(self, towers: Towers, texts: Sequence[str], side: Literal["query", "passage"]) -> Any:
        tower = towers.query_encoder if side == "query" else towers.passage_encoder
        return embedded_texts(tower, texts, side, batch_size=self.batch_size, device=self.device).numpy()

    def _diversity(self, made: Texts, original: Texts) -> dict[str, Any]:
        count = min(len(made.queries), len(original.queries), self.max_texts)
        found: dict[str, Any] = {"texts": count}
        for name, texts in (("synthetic", made.sample(count)), ("reference", original.sample(count))):
            found[name] = {
                "distinct": {str(n): diversity.distinct_n(texts, n) for n in (1, 2, 3)},
                "words": diversity.lengths(texts),
                "lengths": diversity.length_histogram(texts),
                "question_types": diversity.question_types(texts),
            }
        found["total_variation"] = {
            name: diversity.total_variation(found["synthetic"][name], found["reference"][name])
            for name in ("lengths", "question_types")
        }
        return found

    def _overlap(self, made: Texts, original: Texts, held_out: Texts | None) -> dict[str, Any]:
        texts = list(made.queries.values())
        found = {"reference": overlap(texts, list(original.queries.values()), n=self.ngram).to_dict()}
        if held_out is not None:
            count = min(len(original.queries), len(held_out.queries))
            for name, each in (("reference_sample", original), ("held_out", held_out)):
                found[name] = overlap(texts, each.sample(count), n=self.ngram).to_dict()
        return found
