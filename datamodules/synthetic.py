"""Synthetic queries from ``task=synthesize`` as training data.

Training on them is post-processing: the claim of the generator's privacy card covers everything computed from them and
from public data, at no further cost. So a folder without a card is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import Passages, folder_parts, open_corpus, read_parts
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import parse_json_file
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.errors import ConfigurationError, DataError, schema_problem
from lit_dpret.files import CARD_NAME, SUMMARY_NAME, SYNTHETIC_SCHEMA, file_sha256
from lit_dpret.privacy.budget import SamplingName


@dataclass(kw_only=True, eq=False, repr=False)
class SyntheticDataModule(PairsDataModule):
    """A folder of synthetic queries: ``queries.*``, ``qrels/train.*``, ``privacy_card.json``, often ``corpus.*``.

    Args:
        folder: The folder.
        corpus: The corpus file, if the folder has none or another is to be used.
        evaluation: A DataModule whose dev and test queries are used for evaluation, over its passages and those of the
            folder together (the same id must mean the same text). The folder then needs no corpus. Its train split is
            ignored, and so is a split that the folder has itself: choosing a checkpoint by the folder's own dev queries
            costs no privacy; by real ones it may. ``drop_overlap`` is refused with it: real queries, which no card
            covers, would choose the training data.
        keep: A file with one query id per line: only these queries are trained on. They must have been chosen by public
            means (for example by their round trip), as the card states in a declaration; null for all.
        require_privacy_card: False accepts a folder without a card. Models trained on it then have no claim to inherit.
        sampling: As for `SampledDataModule`, but ``shuffle`` by default.

    Raises:
        ConfigurationError: ``drop_overlap`` with ``evaluation``.
        DataError: The folder is missing, or holds no readable privacy card.
    """

    folder: str | Path = field()
    evaluation: PairsDataModule | None = None
    keep: str | Path | None = None
    require_privacy_card: bool = True
    sampling: SamplingName = "shuffle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluation is not None and self.drop_overlap:
            raise ConfigurationError(
                "datamodule.drop_overlap=true cannot go with datamodule.evaluation: its queries would decide which "
                "synthetic queries are used for training, and the folder's claim does not cover them. Set "
                "datamodule.drop_overlap=false; where the evaluation queries are public, datamodule.keep can list the "
                "queries to train on."
            )
        self._card_at_reading: str | None = None

    @property
    def privacy_card_path(self) -> Path | None:
        """The card whose claim all training on this folder inherits; None if there is none and none is required.

        Refuses a missing card if one is required, and a card that changed since the queries were read.
        """
        path = Path(str(self.folder)) / CARD_NAME
        if not path.is_file():
            if not self.require_privacy_card:
                return None
            raise DataError(
                f"{self.folder} has no {CARD_NAME}, so the claim of its queries is unknown. Name the folder that "
                "task=synthesize wrote, or set datamodule.require_privacy_card=false to train without a claim."
            )
        card = parse_json_file(path)
        if not isinstance(card, dict) or not card:
            raise DataError(f"{path} is not a readable privacy card: a JSON object is expected.")
        if self._card_at_reading not in (None, file_sha256(path)):
            raise DataError(
                f"{path} changed after the queries were read. Build a new DataModule to train on the queries that the "
                "new card describes."
            )
        return path

    def assumptions(self) -> list[str]:
        """Return, for the card, the assumptions that a claim on these queries relies on."""
        if self.keep is None:
            return super().assumptions()
        return ["The synthetic queries of datamodule.keep were chosen by no private data, as declared."]

    def _sources(self) -> dict[str, Any]:
        found = folder_parts(str(self.folder), corpus=self.corpus, needs_corpus=self.evaluation is None)
        if "train" not in found["qrels"]:
            raise DataError(f"{self.folder} has no qrels/train.tsv: there is nothing to train on.")
        made = _summary(Path(str(self.folder)) / SUMMARY_NAME).get("configuration")
        of_passages_alone = isinstance(made, dict) and made.get("generator") == "pseudo_queries"
        if self.privacy_card_path is None and not of_passages_alone:
            rank_zero_warn(f"{self.folder} has no {CARD_NAME}: models trained on it have no privacy claim to inherit.")
        return found

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read the folder's splits, and the other splits of ``evaluation``."""
        read = self._whole_collection(complain)
        return read if self.keep is None else keep_queries(read, Path(self.keep))

    def _whole_collection(self, complain: Complain) -> Collection:
        found = self._sources()
        if (card := self.privacy_card_path) is not None:
            self._card_at_reading = file_sha256(card)
        passages = Passages()
        if found["corpus"]:
            passages = open_corpus(found["corpus"], self._corpus_settings(), complain=complain)
        if self.evaluation is None:
            return read_parts(**{**found, "corpus": passages}, complain=complain, repeated=self.repeated_judgements)
        other, texts = self.evaluation.collection, dict(passages.texts)
        for passage_id, text in self.evaluation.public_passages().items():
            if texts.setdefault(passage_id, text) != text:
                raise DataError(
                    f"{self.folder}: passage {passage_id!r} has another text in {other.source} (datamodule.evaluation)."
                )
        passages = Passages(texts, {**passages.domains, **other.passage_domains})
        own = read_parts(**{**found, "corpus": passages}, complain=complain, repeated=self.repeated_judgements)
        qrels, queries, domains = dict(own.qrels), dict(own.queries), dict(own.domains)
        for split, judged in other.qrels.items():
            if split == "train" or split in own.qrels:
                continue
            qrels[split] = judged
            for query_id in judged:
                if query_id in own.queries:
                    raise DataError(
                        f"{self.folder}: query id {query_id!r} is also the id of an evaluation query of {other.source}."
                    )
                queries[query_id] = other.queries[query_id]
                if query_id in other.domains:
                    domains[query_id] = other.domains[query_id]
        return replace(own, qrels=qrels, queries=queries, domains=domains)


def _summary(path: Path) -> dict[str, Any]:
    """Return the summary of a folder, refusing one of another schema; folders from other programs have none."""
    facts = parse_json_file(path) if path.is_file() else {}
    if isinstance(facts, dict) and "schema" in facts and (problem := schema_problem(facts["schema"], SYNTHETIC_SCHEMA)):
        raise DataError(f"{path} cannot be read: {problem}")
    return facts if isinstance(facts, dict) else {}


def keep_queries(collection: Collection, path: Path) -> Collection:
    """Return the collection with only the train queries whose ids ``path`` lists, one per line."""
    try:
        listed = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"datamodule.keep={path} cannot be read: {error.strerror}.") from error
    ids = {line.strip() for line in listed if line.strip()}
    train = collection.qrels.get("train", {})
    if not ids:
        raise DataError(f"datamodule.keep={path} lists no query: no training data would remain.")
    if unknown := sorted(ids - set(train)):
        raise DataError(
            f"datamodule.keep={path} lists {unknown[0]!r}, which is not a train query of {collection.source}."
        )
    kept = {query: judged for query, judged in train.items() if query in ids}
    gone = set(train) - ids - {q for split, judged in collection.qrels.items() if split != "train" for q in judged}
    queries = {query: text for query, text in collection.queries.items() if query not in gone}
    return replace(collection, qrels={**collection.qrels, "train": kept}, queries=queries)
