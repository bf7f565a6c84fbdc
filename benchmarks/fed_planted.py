"""What a personal query encoder and fed-negatives are worth on planted silos; the table of docs/federated.md.

    python benchmarks/fed_planted.py

Three clients whose dialects half contradict each other, a new one-layer transformer, no privacy. Every system of one
seed continues from the same stage 1. About half a minute for each seed on one core.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import options, say, write
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.federated.aggregation import take_weights
from lit_dpret.federated.data import planted_silos, planted_words
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.inprocess import InProcessFederation
from lit_dpret.federated.settings import PddAs2, Stage1, Stage2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.modules import AS2DualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy

METRICS = ("sentence/success@1", "sentence/mrr@10", "passage/success@1")
SYSTEMS: dict[str, dict[str, Any]] = {
    "+ customised (own negatives, 8 of 24)": {"negatives": "dynamic"},
    "+ fed-negative (8 of 24)": {"negatives": "fed"},
    "+ fed-negative (the best 60)": {"negatives": "fed", "n": 60, "top_k": 60},
}


def main() -> None:
    parser = options(__doc__, "fed_planted.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--entities", type=int, default=12, help="of each client; fewer for a try")
    parser.add_argument("--epochs", type=int, default=5, help="of stage 2")
    arguments = parser.parse_args()
    rows: dict[str, list[list[float]]] = {}
    sent: dict[str, dict[str, int]] = {}
    for seed in arguments.seeds:
        size = Planted(entities=arguments.entities, told=6, questions=6, phrasings=3, shared=0.5, seed=seed)
        stage1 = Stage1(warmup_rounds=1, rounds=3, batch_size=16, bm25_n=4, static_n=4, top_k=20, lr=3e-3)
        stage2 = Stage2(epochs=arguments.epochs, batch_size=16, n=8, top_k=24, lr=3e-3)
        with tempfile.TemporaryDirectory() as folder:
            for name, change in SYSTEMS.items():
                settings = PddAs2(stage1=stage1, stage2=replace(stage2, **change), seed=seed)
                result = federation(Path(folder), settings, size, name).run()
                for system in result.systems:
                    shown = name if system == "stage2" else system
                    values = [result.mean(system, metric) for metric in METRICS]
                    if shown == name or name == next(iter(SYSTEMS)):
                        rows.setdefault(shown, []).append(values)
                sent[name] = dict(result.sent)
    report = {"metrics": METRICS, "seeds": arguments.seeds, "systems": rows, "sent_bytes_of_the_last_seed": sent}
    write(report, arguments.out)
    say(table(rows))


def table(rows: dict[str, list[list[float]]]) -> str:
    lines = [f"| system | {' | '.join(METRICS)} |", "| --- |" + " ---: |" * len(METRICS)]
    for name, values in rows.items():
        cells = [f"{sum(v) / len(v):.3f} [{min(v):.3f}, {max(v):.3f}]" for v in zip(*values, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def federation(folder: Path, settings: PddAs2, size: Planted, name: str) -> InProcessFederation:
    if not (folder / "silos").exists():
        write_silos(folder / "silos", planted_silos(size), facts={})

    def make(*, privacy: Any, optimizer_lr: float, **more: Any) -> AS2DualEncoder:
        spec = OptimizerSpec(name="adamw", lr=optimizer_lr)
        return AS2DualEncoder(privacy=privacy, optimizer=spec, encoder=encoder(size, settings.seed), **more)

    state = folder / "".join(filter(str.isalnum, name))
    clients = [SiloClient(path, state / client, settings, make, secret_file=folder / "secret")
               for client, path in silo_folders(folder / "silos").items()]  # fmt: skip
    start = take_weights(make(privacy=NoPrivacy(), optimizer_lr=1e-3))
    return InProcessFederation(clients, settings, start, state / "server")


def encoder(size: Planted, seed: int) -> TextEncoder:
    words = planted_words(size)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "[UNK]", "[CLS]", "[SEP]", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="[UNK]")
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=24, initializer_range=0.1,
    )  # fmt: skip
    return TextEncoder(BertModel(config), tokenizer, Contract(query_max_length=8, passage_max_length=12))


if __name__ == "__main__":
    main()
