"""A module or Trainer that was in a fit before, and methods of a subclass that would be left out."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from negative_cases import NOISE, tower
from pair_stand_ins import batch_of, data_module
from stand_ins import Numbers, Regression, dp, fit
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import DualEncoder, FrozenDualEncoder, OptimizerSpec
from lit_dpret.negatives import BM25Negatives
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, NoPrivacy, PerExampleDuplicated, PublicPassages

SAMPLING = {"sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6}


MODES: dict[str, Any] = {
    "none": NoPrivacy(),
    "batch_clip": BatchClip(max_grad_norm=0.1, **NOISE),
    "per_example_duplicated": PerExampleDuplicated(max_grad_norm=0.1, **NOISE),
    "logit_dp": LogitDP(max_logit_grad_norm=0.1, **NOISE),
    "public_passages": PublicPassages(max_grad_norm=0.1, pool_size=6, **NOISE),
}


def settings(privacy: Any) -> dict[str, Any]:
    return {"privacy": privacy, "optimizer": OptimizerSpec(lr=0.01), "encoder": tower()}


class Stopped(L.Callback):
    """Ends a fit before its first step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise RuntimeError("stopped")


def other_data(folder: Path) -> Any:
    """Passages and queries of other words under the same ids."""
    data = data_module(folder, **SAMPLING)
    for name in ("passages.jsonl", "queries.jsonl", "corpus.jsonl"):
        for file in folder.rglob(name):
            file.write_text(file.read_text().replace("flood", "theft").replace("insurance", "claim"))
    return data


def pool_of(module: Any) -> Any:
    return module._pool_texts if isinstance(module, DualEncoder) else module.passage_embeddings.tolist()


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["dual", "frozen"])
def test_a_second_fit_learns_the_passages_and_negatives_of_its_own_data(kind: str, tmp_path: Path) -> None:
    def made(folder: Path) -> Any:
        private = {"max_grad_norm": 0.1, "secret_file": folder / "secret", **NOISE}
        if kind == "dual":
            return DualEncoder(**settings(PublicPassages(**private)), negatives=[BM25Negatives()])
        return FrozenDualEncoder(**settings(DPSGD(**private)))

    torch.manual_seed(0)
    module, data = made(tmp_path), other_data(tmp_path / "other")
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path / "one", module, data_module(tmp_path / "data", **SAMPLING), steps=1, extra=[Stopped()])
    earlier = pool_of(module)
    fit(tmp_path / "two", module, data, steps=1)
    torch.manual_seed(0)
    fresh = made(tmp_path)
    fit(tmp_path / "three", fresh, other_data(tmp_path / "again"), steps=1)
    assert pool_of(module) == pool_of(fresh) != earlier
    if kind == "dual":
        assert module._negatives.of_rows.texts.queries == fresh._negatives.of_rows.texts.queries


def test_a_trainer_that_has_made_steps_before_is_refused(tmp_path: Path) -> None:
    runner = fit(tmp_path / "plain", Regression(privacy=NoPrivacy()), Numbers(), steps=2)
    runner.callbacks.append(PrivacyAccountant(run_dir=tmp_path / "run"))
    with pytest.raises(ConfigurationError, match="Trainer"):
        runner.fit(Regression(privacy=dp(tmp_path)), datamodule=Numbers())
    assert not (tmp_path / "run" / "privacy_card.json").exists()


class OwnLoss(DualEncoder):
    def per_row_loss(self, rows: dict[str, Any]) -> Tensor:
        return 100 * super().per_row_loss(rows)


@pytest.mark.parametrize("name", MODES)
def test_a_loss_of_ones_own_is_called_or_refused(name: str) -> None:
    instead = {"logit_dp": "Pass a PairwiseLoss as loss=, or choose", "per_example_duplicated": "Choose"}
    if name in instead:
        with pytest.raises(UnsupportedModelError, match=rf"per_row_loss: .* {instead[name]} privacy=batch_clip"):
            OwnLoss(**settings(MODES[name]))
        return
    OwnLoss(**settings(MODES[name]))


class Headed(DualEncoder):
    def represent(self, features: Any, side: Any) -> Tensor:
        return super().represent(features, side).flip(1)


class WholeHeaded(Headed):
    def encode_queries(self, texts: Any, *, progress: Any = None) -> Tensor:
        return super().encode_queries(texts, progress=progress).flip(1)

    def encode_passages(self, texts: Any, *, progress: Any = None) -> Tensor:
        return super().encode_passages(texts, progress=progress).flip(1)

    def save_model(self, folder: str | Path) -> Path:
        return super().save_model(folder)


def test_a_head_that_is_not_saved_is_refused_and_one_that_is_everywhere_embeds_the_pool_too(tmp_path: Path) -> None:
    mode = PublicPassages(max_grad_norm=0.1, pool_size=6, secret_file=tmp_path / "secret", **NOISE)
    with pytest.raises(UnsupportedModelError, match="encode_queries, encode_passages, save_model"):
        Headed(**settings(mode))
    module: Any = WholeHeaded(**settings(mode))
    fit(tmp_path / "run", module, data_module(tmp_path / "data", **SAMPLING), steps=1)
    module.before_batch(dataclasses.replace(batch_of({"query": {"input_ids": torch.zeros(2, 1)}}), step=1))
    texts = [module._pool_texts[i] for i in module._candidates.chosen.tolist()]
    torch.testing.assert_close(module._candidates.embeddings, module.encode_passages(texts))
    assert not torch.allclose(module.encode_passages(texts), module.tower("passage").encode(texts, "passage"))


class Stepwise(DualEncoder):
    """Builds what its loss reads in ``setup``, and asks for the step where rows are collated."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.width = torch.ones(self.encoder.dim)

    def collate_rows(self, rows: list[Any]) -> dict[str, Any]:
        return super().collate_rows(rows) | {"step": torch.full((len(rows),), float(self.trainer.global_step))}

    def per_row_loss(self, rows: dict[str, Any]) -> Tensor:
        return super().per_row_loss(rows) * self.width.mean() / (1 + rows["step"])


@pytest.mark.costly
def test_setup_may_build_what_the_loss_reads_and_collation_may_ask_for_the_step(tmp_path: Path) -> None:
    mode = PublicPassages(max_grad_norm=0.1, pool_size=6, secret_file=tmp_path / "secret", **NOISE)
    fit(tmp_path / "run", Stepwise(**settings(mode)), data_module(tmp_path / "data", **SAMPLING), steps=2)


KINDS: dict[str, Any] = {
    "mined": lambda mode: DualEncoder(**settings(mode(PublicPassages)), negatives=[BM25Negatives()]),
    "frozen": lambda mode: FrozenDualEncoder(**settings(mode(DPSGD))),
    "pairs": lambda mode: DualEncoder(**settings(mode(LogitDP))),
    "batch": lambda mode: DualEncoder(**settings(mode(BatchClip))),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_or_copy_of_a_trained_module_holds_no_query(kind: str, tmp_path: Path) -> None:
    def mode(of: Any) -> Any:
        bound = {"max_logit_grad_norm" if of is LogitDP else "max_grad_norm": 0.1}
        return of(**bound, secret_file=tmp_path / "secret", **NOISE)

    module, data = KINDS[kind](mode), data_module(tmp_path / "data", **SAMPLING)
    file = tmp_path / "data" / "queries.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [line | {"text": f"{line['text']} {line['text']}"} for line in lines]  # which no passage holds
    file.write_text("".join(json.dumps(line) + "\n" for line in told))
    fit(tmp_path / "run", module, data, steps=1)
    queries = list(data.collection.queries.values())
    tokens = module.text_encoder("query").tokenize(queries, "query")["input_ids"]
    held = [*(query.encode() for query in queries), *(row[1:5].numpy().tobytes() for row in tokens)]
    assert len(held) == 26
    for each in (module, copy.deepcopy(module)):
        written = pickle.dumps(each)
        assert not any(text in written for text in held)
    fit(tmp_path / "again", KINDS[kind](mode), data_module(tmp_path / "more", **SAMPLING), steps=1)
