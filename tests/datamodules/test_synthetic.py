from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.synthetic import SyntheticDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.pseudo_queries import write_pseudo_queries


@pytest.fixture
def written(tmp_path: Path, harbour: Path) -> Path:
    """A folder as ``task=synthesize`` writes it."""
    folder = tmp_path / "synthetic"
    (folder / "qrels").mkdir(parents=True)
    shutil.copy(harbour / "corpus.jsonl", folder / "corpus.jsonl")
    queries = [{"_id": f"genQ{i}", "text": f"invented {i}", "metadata": {"log_prob": -1.5}} for i in range(3)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    (folder / "qrels" / "train.tsv").write_text(
        "query-id\tcorpus-id\tscore\ngenQ0\tp1\t1\ngenQ1\tp1\t1\ngenQ2\tp7\t1\n"
    )
    (folder / "qrels" / "train.jsonl").write_text('{"query-id": "genQ0", "corpus-id": "p1", "score": 1}\n')
    (folder / "privacy_card.json").write_text('{"claim": {"epsilon": 3.0}}')
    return folder


def test_a_synthesised_folder_is_training_data_with_a_card(written: Path) -> None:
    datamodule = SyntheticDataModule(folder=written)
    datamodule.prepare_data()
    rows = [(row.query_id, row.passage_id) for row in datamodule.pair_rows()]
    assert rows == [("genQ0", "p1"), ("genQ1", "p1"), ("genQ2", "p7")]
    assert datamodule.privacy_card_path == written / "privacy_card.json"
    assert len(datamodule.public_passages()) == 8
    for name in ("train.tsv", "train.jsonl"):
        (written / "qrels" / name).rename(written / "qrels" / name.replace("train", "test"))
    with pytest.raises(DataError, match="nothing to train on"):
        SyntheticDataModule(folder=written).prepare_data()


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}"])
def test_a_folder_without_a_readable_card_is_refused(written: Path, content: str | None) -> None:
    card = written / "privacy_card.json"
    card.unlink()
    if content is not None:
        card.write_text(content)
    datamodule = SyntheticDataModule(folder=written)
    with pytest.raises(DataError, match=r"privacy_card\.json|privacy card"):
        datamodule.prepare_data()
    with pytest.raises(DataError, match=r"privacy_card\.json|privacy card"):
        datamodule.setup()
    with pytest.raises(DataError, match=r"privacy_card\.json|privacy card"):
        _ = datamodule.privacy_card_path


def test_a_missing_card_can_be_accepted_with_a_warning_but_for_queries_made_of_passages_alone(
    written: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    made = SyntheticDataModule(folder=written)
    made.setup()
    folder = write_pseudo_queries(made.public_passages(), tmp_path / "pseudo")
    SyntheticDataModule(folder=folder, require_privacy_card=False).setup()
    assert not [one for one in recwarn if "privacy claim" in str(one.message)]
    (written / "privacy_card.json").unlink()
    with pytest.raises(DataError, match=r"datamodule\.require_privacy_card=false"):
        SyntheticDataModule(folder=written).setup()
    datamodule = SyntheticDataModule(folder=written, require_privacy_card=False)
    with pytest.warns(UserWarning, match="no privacy claim to inherit"):
        datamodule.setup()
    assert datamodule.privacy_card_path is None


def test_evaluation_queries_come_from_the_other_datamodule_and_its_train_split_does_not(
    written: Path, harbour: Path
) -> None:
    datamodule = SyntheticDataModule(folder=written, evaluation=PairsDataModule(folder=harbour))
    real = PairsDataModule(folder=harbour)
    for split in ("dev", "test"):
        assert datamodule.evaluation_set(split) == real.evaluation_set(split)
    assert set(datamodule.collection.qrels["train"]) == {"genQ0", "genQ1", "genQ2"}
    assert not set(datamodule.collection.queries) & set(real.collection.qrels["train"])


def test_real_evaluation_queries_may_not_choose_the_synthetic_ones(written: Path, harbour: Path) -> None:
    real = PairsDataModule(folder=harbour)
    with pytest.raises(
        ConfigurationError, match=r"datamodule\.drop_overlap=true cannot go with datamodule\.evaluation"
    ):
        SyntheticDataModule(folder=written, evaluation=real, drop_overlap=True)
    assert SyntheticDataModule(folder=written, drop_overlap=True).pair_rows()


def test_the_folder_may_lack_a_corpus_that_is_found_elsewhere(written: Path, harbour: Path) -> None:
    (written / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"lacks corpus\.jsonl"):
        SyntheticDataModule(folder=written).setup()
    elsewhere = SyntheticDataModule(folder=written, corpus=harbour / "corpus.jsonl").collection
    evaluated = SyntheticDataModule(folder=written, evaluation=PairsDataModule(folder=harbour)).collection
    assert elsewhere.passages == evaluated.passages == PairsDataModule(folder=harbour).collection.passages


def test_a_dev_split_of_the_folder_is_preferred_to_the_real_one(written: Path, harbour: Path) -> None:
    (written / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\ngenQ3\tp2\t1\n")
    with (written / "queries.jsonl").open("a") as stream:
        stream.write('{"_id": "genQ3", "text": "invented 3"}\n')
    datamodule = SyntheticDataModule(folder=written, evaluation=PairsDataModule(folder=harbour))
    assert list(datamodule.evaluation_set("dev")[0]) == ["genQ3"]
    assert list(datamodule.evaluation_set("test")[0]) == ["e1", "e2"]


def test_an_id_with_two_meanings_is_refused(written: Path, harbour: Path) -> None:
    corpus, queries = written / "corpus.jsonl", written / "queries.jsonl"
    corpus.write_text(corpus.read_text().replace("Gulls", "Terns"))
    with pytest.raises(DataError, match="passage 'p8' has another text"):
        SyntheticDataModule(folder=written, evaluation=PairsDataModule(folder=harbour)).setup()
    shutil.copy(harbour / "corpus.jsonl", corpus)
    for path in (queries, written / "qrels" / "train.tsv"):
        path.write_text(path.read_text().replace("genQ2", "e1"))
    with pytest.raises(DataError, match="'e1' is also the id of an evaluation query"):
        SyntheticDataModule(folder=written, evaluation=PairsDataModule(folder=harbour)).setup()


def test_only_the_listed_queries_are_trained_on(written: Path, tmp_path: Path) -> None:
    whole = SyntheticDataModule(folder=written)
    ids = sorted({row.query_id for row in whole.pair_rows("train")})
    listed = tmp_path / "kept.txt"
    listed.write_text(f"{ids[0]}\n\n", encoding="utf-8")
    kept = SyntheticDataModule(folder=written, keep=listed)
    assert {row.query_id for row in kept.pair_rows("train")} == {ids[0]} < set(ids)
    assert kept.collection.passages == whole.collection.passages


@pytest.mark.parametrize(("content", "named"), [("", "no query"), ("nobody\n", "nobody"), (None, "cannot be read")])
def test_a_list_of_queries_that_makes_no_sense_is_refused(
    written: Path, tmp_path: Path, content: str | None, named: str
) -> None:
    listed = tmp_path / "kept.txt"
    if content is not None:
        listed.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=named):
        SyntheticDataModule(folder=written, keep=listed).setup()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_refusal_of_its_judgements_names_is_obeyed(elsewhere: bool, written: Path, harbour: Path) -> None:
    with (written / "qrels" / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("genQ0\tp1\t2\n")
    with (written / "queries.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"_id": "genQ9", "text": "invented 9"}\n')
    given: dict[str, Any] = {"folder": written}
    if elsewhere:
        given["evaluation"] = PairsDataModule(folder=harbour)
    with pytest.raises(DataError, match=r"datamodule\.repeated_judgements"):
        SyntheticDataModule(**given).setup("fit")
    given["repeated_judgements"] = "highest"
    with pytest.raises(DataError, match=r"datamodule\.drop_queries_without_passage"):
        SyntheticDataModule(**given).setup("fit")
    read = SyntheticDataModule(**given, drop_queries_without_passage=True).collection
    assert read.qrels["train"]["genQ0"] == {"p1": 2} and "genQ9" not in read.queries
