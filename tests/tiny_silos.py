"""Planted silos on disk, and a transformer of a few thousand weights that knows their words.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.federated.aggregation import take_weights
from lit_dpret.federated.data import planted_silos, planted_words
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.federation import FedResult
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Stage1, Stage2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.transport import FederationRun, InProcessFederation, run_federation
from lit_dpret.modules import AS2DualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy

SIZE = Planted(clients=3, entities=8, attributes=4, told=3, questions=3, hubs=2)
SMALL = PddAs2(
    stage1=Stage1(warmup_rounds=1, rounds=1, batch_size=6, bm25_n=2, static_n=2, top_k=8, lr=3e-3),
    stage2=Stage2(epochs=1, batch_size=6, n=3, top_k=6, lr=3e-3),
)
#: The same run under a budget, with everything that `PddAs2.check` refuses set as it requires.
PRIVATE = replace(
    SMALL,
    stage1=replace(SMALL.stage1, in_batch=False, other_positives=0, weighting="uniform"),
    stage2=replace(SMALL.stage2, in_batch=False, request="dp_centroid", response="public", centroids=4),
    privacy=FederatedPrivacy(eps=20.0, delta=1e-2, accountant="rdp"),
)


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {name: i for i, name in enumerate(["<pad>", "[UNK]", "[CLS]", "[SEP]", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="[UNK]")


def encoder(size: Planted = SIZE, *, dim: int = 16, seed: int = 0, spread: float = 0.3, **settings: Any) -> TextEncoder:
    words = planted_words(size)
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * dim, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 24}  # fmt: skip
    config = BertConfig(vocab_size=len(words) + 4, hidden_size=dim, initializer_range=spread, **{**shape, **settings})
    return TextEncoder(BertModel(config).eval(), tokenizer(words), Contract(query_max_length=8, passage_max_length=12))


def maker(size: Planted = SIZE, **shape: Any) -> Callable[..., AS2DualEncoder]:
    """Return a function that builds the model of a round, the same one every time."""

    def make(*, privacy: Any, optimizer_lr: float, **settings: Any) -> AS2DualEncoder:
        spec = OptimizerSpec(name="adamw", lr=optimizer_lr)
        return AS2DualEncoder(privacy=privacy, optimizer=spec, encoder=encoder(size, **shape), **settings)

    return make


def federation(
    tmp_path: Path, settings: PddAs2 = SMALL, *, size: Planted = SIZE, state: str = "state", **shape: Any
) -> InProcessFederation:
    """Return all clients over planted silos under ``tmp_path``; the same silos each time."""
    if not (tmp_path / "silos").exists():
        write_silos(tmp_path / "silos", planted_silos(size), facts={})
    make = maker(size, **shape)
    clients = [
        SiloClient(folder, tmp_path / state / name, settings, make, secret_file=tmp_path / "secret")
        for name, folder in silo_folders(tmp_path / "silos").items()
    ]
    start = take_weights(make(privacy=NoPrivacy(), optimizer_lr=1e-3))
    return InProcessFederation(clients, settings, start, tmp_path / state / "server")


def ran(settings: PddAs2, silos: Mapping[str, Path], make: Any, folder: Path, **more: Any) -> FedResult:
    """Return the result of one run over these silos."""
    return run_federation(FederationRun(settings=settings, silos=silos, make_module=make, folder=folder, **more))


def declare_public(tmp_path: Path, count: int = 12) -> None:
    """Declare some sentences of every silo public."""
    for folder in silo_folders(tmp_path / "silos").values():
        lines = (folder / "sentences.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        ids = [line.split('"')[3] for line in lines]
        (folder / "public_sids.txt").write_text("\n".join(ids), encoding="utf-8")
