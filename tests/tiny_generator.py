"""A T5 of a hundred words, built quickly; used by the tests of the generator and of generation.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from lit_dpret.cards.card import RunFacts, build_card, subject_of, write_card
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.privacy.accounting.releases import Poisson
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.ledger.trained import note_built
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.privacy.plan import PrivacyPlan

WORDS = [first + second for first in "bdfgklmnprst" for second in ("ana", "elo", "ibi", "omu", "uri", "ato", "eku")]
SHAPE = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class Pair:
    query_id: str
    query: str
    passage_id: str
    passage: str
    positives: frozenset[str]


def tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, lower-cased; every text ends in ``</s>``."""
    known = ["<pad>", "</s>", "<unk>", "generate_query:", *words]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def generator(
    *, privacy: PrivacyMode | None = None, seed: int = 0, lr: float = 1e-2, optimizer: str = "adam", **settings: Any
) -> QueryGenerator:
    """Return a new, random generator."""
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {
        "pretrained": None, "config": SHAPE, "tokenizer": tokenizer(), "max_passage_length": 12,
        "max_query_length": 8, "dropout": 0.0,
    }  # fmt: skip
    return QueryGenerator(
        privacy=privacy or NoPrivacy(), optimizer=OptimizerSpec(name=optimizer, lr=lr), **defaults | settings
    )


def prompted(*, away: float = 0.5, untied: bool = False, **settings: Any) -> QueryGenerator:
    """Return a generator whose tuned prompt is ``away`` from its start; ``untied`` like T5 v1.1, with its own head."""
    module = generator(**{"prompt_tuning": {"num_virtual_tokens": 3}} | settings)
    if untied:
        head = torch.randn(module.model.shared.weight.shape, generator=torch.Generator().manual_seed(4))
        module.model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
        module.model.config.scale_decoder_outputs = False
    with torch.no_grad():
        rows = prompt_of(module)
        rows += away * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3))
    note_built(module)
    return module


def prompt_of(module: QueryGenerator) -> torch.Tensor:
    rows: torch.Tensor = module.model.encoder.embed_tokens.prompt.weight
    return rows


def lively_generator(seed: int = 1) -> QueryGenerator:
    """Return a random generator whose next word is neither certain nor uniform, and that sometimes ends."""
    module = generator(seed=seed, config={**SHAPE, "tie_word_embeddings": False})
    coins = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head = module.model.get_output_embeddings().weight
        head.copy_(0.4 * torch.randn(head.shape, generator=coins))
        head[1] *= 3
    note_built(module)
    return module


def passage(number: int, words: int = 3) -> str:
    """Return a passage of invented words, different for each number."""
    return " ".join(WORDS[(number * 7 + 13 * i + i * i) % len(WORDS)] for i in range(words))


def copy_pairs(count: int) -> list[Pair]:
    """Return pairs whose query is the first two words of the passage."""
    texts = [passage(number) for number in range(count)]
    return [
        Pair(f"q{i}", " ".join(text.split()[:2]), f"p{i}", text, frozenset({f"p{i}"})) for i, text in enumerate(texts)
    ]


def write_parent_card(folder: Path, *, neighbours: Neighbours = "zero_out") -> None:
    """Write a ledger of one private step, and the card of the generator in ``folder`` that follows from it."""
    law = Poisson(sample_rate=0.01)
    plan = PrivacyPlan(
        budget=PrivacyBudget(eps=3.0, delta=1e-5, neighbours=neighbours), law=law, steps=1,
        noise_multiplier=1.0, max_grad_norm=1.0, sensitivity=1.0, denominator=10.0,
        physical_batch_size=8, n_public=1000,
    )  # fmt: skip
    files = [path for path in folder.rglob("*") if path.is_file()]
    with PrivacyLedger.open(folder / "privacy_ledger.jsonl") as ledger:
        own = {"run_id": folder.name, "nonce": folder.name, "attempt": 0, "mode": "dp_sgd", "planned_steps": 1}
        ledger.append("plan", plan=plan.to_dict(), **own)
        ledger.append("intent", attempt=0, step=0, release=plan.release().to_dict(), state_hash=None, sum_tag=None)
        ledger.append("release", attempt=0, step=0, noise_std=1.0, sensitivity=1.0, denominator=10.0, law=law.to_dict())
        records = ledger.records
    subject = subject_of("weights", "tiny", files, root=folder)
    write_card(build_card(records, subject, RunFacts(tuning={"data": "none"})), folder)


PASSAGES = {f"p{number}": passage(number, 2 + number % 5) for number in range(11)}
SETTINGS: dict[str, Any] = {"passages_are_public": True, "queries_per_passage": 3, "group_size": 3, "seed": 5}


def content(folder: Path) -> dict[str, bytes]:
    """Return every file except the privacy card, which contains its date."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("privacy_card")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pair(query: str, text: str) -> Pair:
    return Pair("q", query, "p", text, frozenset({"p"}))


class _Items:
    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs = pairs

    def __getitem__(self, draw: Any) -> Any:
        return draw, [self._pairs[draw.unit]] if draw.unit >= 0 else []

    def __len__(self) -> int:
        return len(self._pairs)


class CopyTask(L.LightningDataModule):
    """The DataModule interface that the accountant needs, over the copy task."""

    sample_rate, cap, rows_per_unit = None, None, "one"

    def __init__(self, sampling: str, size: int = 64, batch: int = 16) -> None:
        super().__init__()
        self.sampling, self.expected_batch_size, self.physical_batch_size = sampling, batch, batch
        self.pairs = copy_pairs(size)
        self.unit_by = None

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        self.unit = unit

    @property
    def n_units(self) -> int:
        return len(self.pairs)

    def data_fingerprint(self, key: bytes) -> str:
        return "copy"

    def attach(self, batch_sampler: Any, collate_fn: Any) -> None:
        self.batch_sampler, self.collate_fn = batch_sampler, collate_fn

    def train_dataloader(self) -> Any:
        return DataLoader(_Items(self.pairs), batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


ROWS = [pair("bana delo", "bana delo fibi"), pair("gomu", passage(5, 9)), pair(passage(3, 6), "kuri")]


def losses(module: QueryGenerator, rows: list[Any]) -> torch.Tensor:
    return module.per_row_loss(module.collate_rows(rows))


_LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
_GEMMA = {**_LLAMA, "head_dim": 4}
#: Configs of small decoder-only models, by model type.
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 8},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 8},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "query_pre_attn_scalar": 4, "sliding_window": 8},
    "gemma3_text": {**_GEMMA, "query_pre_attn_scalar": 4, "sliding_window": 8},
    "gpt_neox": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 40,
    },
    "opt": {
        "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 40, "word_embed_proj_dim": 16,
    },
}  # fmt: skip


def decoder_only(kind: str = "llama", *, tied: bool = True, away: float = 0.1, **settings: Any) -> QueryGenerator:
    """Return a decoder-only generator whose weights are ``away`` from their initial values: no score is certain."""
    config = {"model_type": kind, **DECODERS[kind], "tie_word_embeddings": tied}
    defaults: dict[str, Any] = {"config": config, "prompt": "Passage: {passage} Ask: ", "max_passage_length": 14}
    module = generator(**defaults | settings)
    coins = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter += away * torch.randn(parameter.shape, generator=coins)
    note_built(module)
    return module
