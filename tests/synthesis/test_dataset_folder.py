"""The data card says what somebody who finds the folder has to know, and says nothing that was not counted."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import DatasetCard
from tiny_generator import PASSAGES, SETTINGS, lines
from tiny_tasks import no_parts

from lit_dpret.cards.card import card_sha256, read_card
from lit_dpret.errors import ConfigurationError
from lit_dpret.synthesis.filters import LanguageModelScore, apply_filters, load_released, write_selection
from lit_dpret.synthesis.pseudo_queries import write_pseudo_queries
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import Synthesize


def header(folder: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")
    found: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    return found


def section(folder: Path, name: str) -> str:
    text = (folder / "README.md").read_text()
    assert f"## {name}\n" in text
    return re.split(r"^## ", text.split(f"## {name}\n", 1)[1], flags=re.MULTILINE)[0]


def test_it_states_the_claim_with_all_that_an_epsilon_needs_beside_it_and_its_gaps(whole: Path, source: Path) -> None:
    card, told = read_card(whole), section(whole, "Privacy")
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", told, flags=re.MULTILINE))
    assert float(rows["epsilon"]) == pytest.approx(card["claim"]["epsilon"], rel=1e-2)
    assert float(rows["delta"]) == card["claim"]["delta"] == 1e-5
    assert rows["unit of privacy"] == card["claim"]["unit_text"]
    assert rows["neighbouring data sets"] == card["claim"]["neighbours_text"]
    assert "Poisson sampling, each unit with probability 0.01" in rows["mechanism and sampling"]
    assert rows["accountant"].startswith("pld (dp-accounting")
    assert card_sha256(source) in rows["derived from"]
    assert card["claim"]["statement"] in told
    gaps = (whole / "README.md").read_text().split("### What is not covered\n")[1].split("\n## ")[0]
    assert [line[2:] for line in gaps.strip().splitlines()] == card["not_covered"]


def test_the_header_says_to_a_hub_what_is_claimed_and_no_language_or_licence_that_nobody_stated(
    whole: Path, tmp_path: Path
) -> None:
    data, card = DatasetCard.load(whole / "README.md").data.to_dict(), read_card(whole)
    assert "language" not in data and "license" not in data
    assert data["privacy"]["epsilon"] >= card["claim"]["epsilon"] > 0.99 * data["privacy"]["epsilon"]
    assert [data["privacy"][key] for key in ("guarantee", "unit")] == ["dp", card["claim"]["unit"]]
    assert data["privacy"]["card_sha256"] == card_sha256(whole)
    pseudo = write_pseudo_queries(PASSAGES, tmp_path / "pseudo")
    assert "privacy" not in header(pseudo) and "license" not in header(pseudo)


def test_languages_and_licence_are_those_that_were_given_and_pass_on_to_a_selection(
    source: Path, tmp_path: Path
) -> None:
    terms = {"language": "no, pt-BR", "license": "cc-by-4.0"}
    whole = synthesize(source, PASSAGES, tmp_path / "set", **SETTINGS, **terms)
    released = load_released(whole)
    kept, applied = apply_filters(released, [LanguageModelScore(keep_share=0.5)])
    selected = write_selection(kept, tmp_path / "kept", applied=applied)
    for folder in (whole, selected):
        assert header(folder)["language"] == ["no", "pt-BR"]  # and not false, which YAML reads in a bare no
        assert header(folder)["license"] == "cc-by-4.0"
        assert "`cc-by-4.0`, as declared" in section(folder, "Licence")
    assert "language_model (keep_share 0.5)" in section(selected, "Origin")


def test_datasets_reads_all_four_configurations(whole: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="reads the folder with Hugging Face datasets")
    assert set(datasets.get_dataset_config_names(str(whole))) == {"default", "corpus", "queries", "pairs"}
    read = {
        name: datasets.load_dataset(str(whole), name, cache_dir=str(tmp_path))
        for name in ("default", "corpus", "queries", "pairs")
    }
    queries, corpus = lines(whole / "queries.jsonl"), lines(whole / "corpus.jsonl")
    assert [(r["_id"], r["text"]) for r in read["queries"]["queries"]] == [(q["_id"], q["text"]) for q in queries]
    assert {r["_id"]: r["text"] for r in read["corpus"]["corpus"]} == {c["_id"]: c["text"] for c in corpus}
    judged = [(r["query-id"], r["corpus-id"], r["score"]) for r in read["default"]["train"]]
    assert judged == [(q["_id"], q["metadata"]["passage_id"], 1) for q in queries]
    assert read["pairs"]["train"].column_names == ["query", "positive"]
    assert read["pairs"]["train"][0] == {"query": queries[0]["text"], "positive": PASSAGES[judged[0][1]]}


def test_beir_reads_the_folder(whole: Path) -> None:
    loader = pytest.importorskip("beir.datasets.data_loader", reason="reads the folder with BEIR")
    corpus, queries, qrels = loader.GenericDataLoader(str(whole)).load(split="train")
    assert {name: one["text"] for name, one in corpus.items()} == PASSAGES
    assert queries == {q["_id"]: q["text"] for q in lines(whole / "queries.jsonl")}
    assert qrels == {q["_id"]: {q["metadata"]["passage_id"]: 1} for q in lines(whole / "queries.jsonl")}


# -- what task=synthesize says on the card of what its own settings were chosen on


class Public:
    """A datamodule with passages and nothing else."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def public_passages(self) -> dict[str, str]:
        return dict(PASSAGES)


class WithLog(Public):
    collection = SimpleNamespace(queries={"q": "Bana elo, ibi omu?"})


def synthetic_card(source: Path, folder: Path, make: Any = Public, **settings: Any) -> dict[str, Any]:
    task = Synthesize(generator=source, passages_are_public=True, max_passages=2, max_new_tokens=4, **settings)
    task.run(no_parts(folder, make_datamodule=make))
    return read_card(folder / "synthetic")


def test_settings_that_were_fixed_beforehand_are_no_gap_of_the_card(source: Path, tmp_path: Path) -> None:
    gap = "synthetic: The choice of hyper-parameters: the data that it was made on were not stated."
    assert gap in synthetic_card(source, tmp_path / "unknown")["not_covered"]
    card = synthetic_card(source, tmp_path / "none", tuning_data="none", tuning_note="as they come")
    assert card["tuning"]["data"] == "none" and card["tuning"]["note"] == "as they come"
    assert gap not in card["not_covered"]
    with pytest.raises(ConfigurationError, match=r"task\.tuning_data='?mine"):
        Synthesize(generator=source, tuning_data="mine")


@pytest.mark.parametrize("told", [{"tuning_note": "unlike bana elo ibi omu"}, {"license": "bana-elo-ibi-omu"}])
def test_a_query_of_the_log_is_no_note_on_the_card(source: Path, tmp_path: Path, told: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\.{next(iter(told))}") as refused:
        synthetic_card(source, tmp_path / "run", WithLog, **told)
    assert refused.value.trap == "T25" and not (tmp_path / "run" / "synthetic").exists()
    assert synthetic_card(source, tmp_path / "other", WithLog, tuning_note="unlike bana elo")
