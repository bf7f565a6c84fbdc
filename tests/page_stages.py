"""The prerequisites of the pages: the files that a reader brings, and the commands of other pages. Not a test."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_images
import torch
import zstandard
from shown_commands import ROOT
from tiny_generator import tokenizer
from tiny_silos import SIZE, SMALL, declare_public
from tiny_tasks import write_log
from transformers import BertConfig, BertForSequenceClassification

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.documents import SiloSettings
from lit_dpret.federated.model import AS2Maker

TOPICS = ["flood", "fire", "theft", "hail", "travel", "dental"]
PASSAGES = [f"Clause {i} covers {TOPICS[i % 6]} damage up to {100 + i} dollars a year." for i in range(120)]
RECORDS = [
    {"query": f"does clause {i} cover {TOPICS[i % 6]}?", "passage": text, "user_id": f"u{i // 3}"}
    for i, text in enumerate(PASSAGES)
]


@dataclass(frozen=True)
class Stage:
    """The prerequisites of a page.

    Attributes:
        files: Functions that write the files that the reader brings.
        first: Our commands from other pages that this one builds on.
        names: Placeholders in shown words, and the names used for them here.
        left: Files that must exist in the end.
        snippets: Whether the commands use results of the Python snippets.
    """

    files: tuple[Callable[[Path], Any], ...] = ()
    first: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    snippets: bool = False


def private_log(folder: Path) -> None:
    """Write 120 queries of 40 people with their passages, and the list of passages."""
    _write(folder / "log.jsonl", RECORDS)
    _write(folder / "passages.jsonl", [{"_id": f"p{i}", "text": text} for i, text in enumerate(PASSAGES)])


def table_log(folder: Path) -> None:
    """Write the same as a table, without a list of passages."""
    rows = ["query\tpassage\tuser_id", *("\t".join(record.values()) for record in RECORDS)]
    (folder / "log.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    answers = ["question,answer", *(f'"{record["query"]}","{record["passage"]}"' for record in RECORDS)]
    (folder / "faq.csv").write_text("\n".join(answers) + "\n", encoding="utf-8")


def beir_folder(folder: Path) -> None:
    write_log(folder / "BEIR_FOLDER")


def own_collection(folder: Path) -> None:
    write_log(folder / "collection")


def lightning_cli(folder: Path) -> None:
    """Write the files that the page shows, under the names that it gives them."""
    page = (ROOT / "docs" / "howto" / "lightning.md").read_text(encoding="utf-8")
    for name in ("train_cli.py", "generator.yaml"):
        shown = re.search(rf"`{name}`:\n\n```\w+\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
        assert shown is not None, name
        small = shown[1].replace("max_steps: 60", "max_steps: 2").replace("_size: 32", "_size: 8, sampling: poisson")
        (folder / name).write_text(small, encoding="utf-8")


def beir_sets(folder: Path) -> None:
    write_log(folder / "FOLDER" / "scifact")


def hub_data(folder: Path) -> None:
    rows = [{"question": r["query"], "answer": r["passage"], "author": r["user_id"]} for r in RECORDS]
    (folder / "hub_data").mkdir()
    _write(folder / "hub_data" / "train.jsonl", rows)


def msmarco(folder: Path) -> None:
    root = folder / "DIR"
    root.mkdir()
    (root / "collection.tsv").write_text("".join(f"{i}\t{text}\n" for i, text in enumerate(PASSAGES)))
    for split, chosen in (("train", range(100)), ("dev.small", range(100, 120))):
        (root / f"queries.{split}.tsv").write_text("".join(f"{i}\t{RECORDS[i]['query']}\n" for i in chosen))
        (root / f"qrels.{split}.tsv").write_text("".join(f"{i}\t0\t{i}\t1\n" for i in chosen))


def squad(folder: Path) -> None:
    def article(place: int) -> dict[str, Any]:
        asked = [
            {"context": PASSAGES[i], "qas": [{"id": f"s{i}", "question": RECORDS[i]["query"],
             "answers": [{"answer_start": PASSAGES[i].index("damage"), "text": "damage"}]}]}
            for i in range(place * 20, place * 20 + 20)
        ]  # fmt: skip
        return {"title": f"Article {place}", "paragraphs": asked}

    (folder / "DIR").mkdir(exist_ok=True)
    for split, places in (("train", range(5)), ("dev", [5])):
        content = {"version": "1.1", "data": [article(place) for place in places]}
        (folder / "DIR" / f"{split}-v1.1.json").write_text(json.dumps(content), encoding="utf-8")


def cifar(folder: Path) -> None:
    tiny_images.cifar10_pickles(folder / "cifar10", images=20)


def our_pages(folder: Path) -> None:
    """Link our pages, which a clone has; a page may use results of earlier runs from there."""
    (folder / "docs").symlink_to(ROOT / "docs")


def hard_negatives(folder: Path) -> None:
    """Write GPL's file about InsuranceQA: four passages for every train question, with the datamodule's ids."""
    lines = [{"qid": f"train-{i}", "pos": [], "neg": {"bm25": ["a14", "a55", "a64", "a99"]}} for i in range(12_889)]
    _write(folder / "hard-negatives.jsonl", lines)


def protocol(folder: Path) -> None:
    (folder / "audit.md").write_text("# What will be looked at\n", encoding="utf-8")


def cross_encoder(folder: Path) -> None:
    torch.manual_seed(0)
    words = tokenizer()
    config = BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=64, num_labels=1)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder / "cross_encoder")
    words.save_pretrained(folder / "cross_encoder")


def public_text(folder: Path) -> None:
    _write(folder / "c4_sample.jsonl", [{"text": f"{record['query']} {record['passage']}"} for record in RECORDS])


def measured_texts(folder: Path) -> None:
    """Write collections under the names by which similarity.md reports its numbers."""
    root = folder / "FOLDER"
    write_log(root / "insuranceqa")
    asked = "".join(json.dumps({"_id": f"w{i}", "text": record["query"]}) + "\n" for i, record in enumerate(RECORDS))
    (root / "real_queries").mkdir()
    (root / "real_queries" / "queries.jsonl.gz").write_bytes(gzip.compress(asked.encode()))
    read = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES)
    (root / "pretrain_text").mkdir()
    (root / "pretrain_text" / "text.jsonl.zst").write_bytes(zstandard.compress(read.encode()))


def silos(folder: Path) -> None:
    """Write planted silos that declare some of their sentences public, and the document of one of them."""
    write_silos(folder / "silos", planted_silos(SIZE), facts={})
    declare_public(folder)
    (folder / "clients").mkdir()
    (folder / "clients" / "cdc").symlink_to(silo_folders(folder / "silos")["client0"])
    make = AS2Maker(encoder="planted", planted=SIZE, max_query_length=8, max_sentence_length=12)
    settings = SiloSettings(data=folder / "clients" / "cdc", state=folder / "state", federated=SMALL, model=make)
    (folder / "silo.yaml").write_text(settings.to_yaml(), encoding="utf-8")


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


CHECK = (
    "check_data datamodule=pairs datamodule.pairs=log.jsonl datamodule.corpus=passages.jsonl "
    "task.write_split=log_split hydra.run.dir=runs/check"
)
OWN_GENERATOR = (
    "fit model=generator privacy.eps=3 datamodule=pairs datamodule.folder=log_split "
    "datamodule.expected_batch_size=32 hydra.run.dir=runs/generator"
)
GENERATOR = "model=generator privacy.eps=3 hydra.run.dir=runs/generator"
SYNTHETIC = "synthesize task.generator=runs/generator/model task.passages_are_public=true hydra.run.dir=runs/synthetic"
ENCODER = (
    "model=dual_encoder privacy=synthetic datamodule=synthetic datamodule.folder=runs/synthetic/synthetic "
    "hydra.run.dir=runs/encoder"
)
EMBEDDINGS = "encode task.encoder=runs/encoder/model hydra.run.dir=runs/corpus"
INDEX = "index task.embeddings=runs/corpus/embeddings hydra.run.dir=runs/index"

STAGES: dict[str, Stage] = {
    "README.md": Stage(files=(private_log,), left=("runs/quickstart/report.html",)),
    "docs/ablations.md": Stage(files=(beir_folder,), names={"PUBLIC_PAIRS": "BEIR_FOLDER"}),
    "docs/canaries.md": Stage(names={"=RUN": "=runs/canary", "RUN": "runs/canary"}),
    "docs/commands.md": Stage(
        files=(private_log, silos), first=("experiment=quickstart",), left=("runs/index/index/privacy_card.json",)
    ),
    "docs/data.md": Stage(
        files=(private_log, table_log, beir_folder, hub_data, msmarco, squad),
        names={"datamodule.path=DIR": "datamodule.path=hub_data"},
    ),
    "docs/evaluation.md": Stage(
        files=(beir_sets, private_log),
        first=tuple(f"task=evaluate task.encoder=bm25 hydra.run.dir={run}" for run in ("RUN_A", "RUN_B")),
        names={"RUN/model": "minilm", "COLLECTION": "FOLDER/scifact"}, left=("runs/compared/comparison.md",),
    ),
    "docs/filters.md": Stage(
        files=(cross_encoder,), first=(GENERATOR, SYNTHETIC),
        names={"RUN/synthetic": "runs/synthetic/synthetic", "FOLDER": "cross_encoder"},
    ),
    "docs/federated.md": Stage(
        files=(silos, squad),
        names={"federated.silos=DIR": "federated.silos=silos", "distilbert-base-uncased": "minilm",
               "train-v1.1.json": "DIR/train-v1.1.json"},
    ),
    "docs/howto/own_log.md": Stage(
        files=(private_log,),
        left=("runs/plan/plan.json", "runs/generator/privacy_card.html", "runs/release/data/privacy_card.sig"),
    ),
    "docs/howto/federation.md": Stage(files=(private_log,), first=(CHECK,), snippets=True),
    "docs/howto/release.md": Stage(
        files=(private_log,), first=(CHECK, OWN_GENERATOR),
        left=("runs/release/data/privacy_card.sig", "runs/retriever/privacy_card.html"),
    ),
    "docs/howto/read_a_card.md": Stage(first=(GENERATOR,), names={"FOLDER": "runs/generator"}),
    "docs/howto/lightning.md": Stage(files=(private_log, lightning_cli), left=("runs/cli/model/privacy_card.json",)),
    "docs/howto/tools.md": Stage(files=(own_collection,)),
    "docs/images.md": Stage(files=(cifar,), names={"DIR": "cifar10"}),
    "docs/membership.md": Stage(names={"task.encoder=RUN": "task.encoder=minilm"}),
    "docs/negatives.md": Stage(
        files=(cross_encoder, hard_negatives),
        first=(GENERATOR, SYNTHETIC,
               "pseudo_labels task.data=runs/synthetic/synthetic task.cross_encoder=cross_encoder "
               "task.cross_encoder_is_public=true hydra.run.dir=runs/labels"),
        names={"DIR": "runs/synthetic/synthetic", "RUN/pseudo": "runs/labels/pseudo"},
    ),
    "docs/reproduce.md": Stage(files=(cifar,), names={"DIR": "cifar10", "clients/annuities": "clients/life-insurance"}),
    "docs/reproduction.md": Stage(files=(cifar, our_pages), names={"DIR": "cifar10"}),
    "docs/paper_000.md": Stage(files=(our_pages,)),
    "docs/search.md": Stage(first=(GENERATOR, SYNTHETIC, ENCODER)),
    "docs/several_processes.md": Stage(names={"/shared/runs": "runs"}),
    "docs/similarity.md": Stage(
        files=(public_text, measured_texts), first=(GENERATOR, SYNTHETIC),
        names={"RUN/synthetic": "runs/synthetic/synthetic", "c4_sample.jsonl.gz": "c4_sample.jsonl"},
    ),
    "docs/synthesis.md": Stage(first=(GENERATOR,)),
    "docs/verify.md": Stage(files=(protocol,), first=(GENERATOR, SYNTHETIC, ENCODER, EMBEDDINGS, INDEX),
                            names={"runs/corpus/index": "runs/index/index", "downloads/encoder": "runs/encoder/model",
               "downloads/synthetic": "runs/synthetic/synthetic", "downloads/generator": "runs/generator"}),
}  # fmt: skip
"""Pages without prerequisites have no entry."""
