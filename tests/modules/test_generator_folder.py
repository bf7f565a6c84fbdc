"""A generator as a folder: saved whole, loaded with its contract, refused in one line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from rank_runs import REFUSED, told
from tiny_generator import ROWS, SHAPE, generator, tokenizer
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import files_of_at_most
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertConfig, BertModel, T5Config, T5EncoderModel
from zero_runs import ZeroServer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError
from lit_dpret.modules.embedding_trainer import save_net
from lit_dpret.modules.generator_folder import CONTRACT_NAME, load_generator, weights_hash
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.privacy.modes import NoPrivacy

# -- the folder ------------------------------------------------------------------------------


def test_a_saved_generator_comes_back_with_its_weights_words_and_contract(tmp_path: Path) -> None:
    module = generator(prompt="Ask: ", max_passage_length=9, lower_case=True)
    folder = module.save_model(tmp_path / "deep" / "g")
    loaded = QueryGenerator.load_model(folder)
    assert loaded.contract == module.codec.contract
    assert not loaded.model.training
    batch = module.collate_rows(ROWS)
    ids = loaded.codec.passages([row.passage for row in ROWS])
    assert ids == [row[row != 0].tolist() for row in batch["input_ids"]]
    torch.testing.assert_close(loaded.model(**batch).logits, module.model(**batch).logits, rtol=0, atol=0)
    plain = AutoModelForSeq2SeqLM.from_pretrained(folder)
    torch.testing.assert_close(plain(**batch).logits, module.model(**batch).logits, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(folder)("bana delo")["input_ids"] == tokenizer()("bana delo")["input_ids"]


def test_using_a_tokenizer_leaves_no_trace_in_its_saved_file(tmp_path: Path) -> None:
    unused, used = generator(), generator()
    used.collate_rows(ROWS)
    left, right = unused.save_model(tmp_path / "a"), used.save_model(tmp_path / "b")
    assert (left / "tokenizer.json").read_bytes() == (right / "tokenizer.json").read_bytes()
    assert weights_hash(left) == weights_hash(right)


def test_the_hash_sees_weights_and_contract(tmp_path: Path) -> None:
    plain = weights_hash(generator().save_model(tmp_path / "a"))
    assert plain != weights_hash(generator(seed=1).save_model(tmp_path / "b"))
    assert plain != weights_hash(generator(prompt="Ask: ").save_model(tmp_path / "c"))


def test_a_save_that_fails_leaves_the_old_generator_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = generator().save_model(tmp_path / "g")
    before = weights_hash(folder)
    other = generator(seed=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(other.codec.tokenizer), "save_pretrained", full)
    with pytest.raises(StorageError, match="No space left"):
        other.save_model(folder)
    monkeypatch.undo()
    assert weights_hash(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["g"]
    other.save_model(folder)
    assert weights_hash(folder) != before
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def save_of(kind: str, folder: Path) -> Path:
    if kind == "generator":
        return generator().save_model(folder)
    if kind == "net":
        return save_net(torch.nn.Linear(90, 90), folder)
    save_sentence_transformer(
        folder, TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=6, passage_max_length=8))
    )
    return folder


@pytest.mark.parametrize("kind", ["generator", "net", "encoder"])
def test_weights_that_the_disk_does_not_take_are_refused_by_their_folder(kind: str, tmp_path: Path) -> None:
    """Safetensors reports a full disk by an error of its own, which is no OSError."""
    with files_of_at_most(4096), pytest.raises(StorageError, match=re.escape(str(tmp_path / "g"))):
        save_of(kind, tmp_path / "g")
    save_of(kind, tmp_path / "g")


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="will not be replaced"):
        generator().save_model(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


# -- refusals --------------------------------------------------------------------------------


def load(pretrained: Any, **settings: Any) -> QueryGenerator:
    return QueryGenerator(privacy=NoPrivacy(), optimizer=generator().optimizer_spec, pretrained=pretrained, **settings)


def test_a_folder_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(UnsupportedModelError, match="holds no usable") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_that_does_not_exist_is_refused_without_asking_a_hub(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is not a folder"):
        load(tmp_path / "nowhere")


def test_a_name_that_cannot_be_reached_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedModelError, match="could not be downloaded") as caught:
        load("lit-dpret-tests/no-such-model")
    assert "lit-dpret-tests/no-such-model" in str(caught.value) and "\n" not in str(caught.value)


def test_an_encoder_alone_is_refused(tmp_path: Path) -> None:
    T5EncoderModel(T5Config(vocab_size=90, **SHAPE)).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match=r"model\.pretrained"):
        load(tmp_path / "t5", tokenizer=tokenizer())
    BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=90)).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(UnsupportedModelError, match=r"model\.pretrained"):
        load(tmp_path / "bert", tokenizer=tokenizer())


def test_attention_that_depends_on_the_longest_text_of_a_batch_is_refused(tmp_path: Path) -> None:
    shape = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    with pytest.raises(UnsupportedModelError, match="attention_type"):
        load(None, config={"model_type": "bigbird_pegasus", **shape}, tokenizer=tokenizer())


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    folder = generator().save_model(tmp_path / "g")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UnsupportedModelError, match="holds no usable"):
        load(folder)


def test_half_precision_weights_are_trained_in_float32(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    module = generator()
    module.model.half()
    module.save_model(folder)
    assert {p.dtype for p in load(folder).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"pretrained": None}, "give one of them"),
        ({"pretrained": None, "config": SHAPE, "tokenizer": None}, r"model\.tokenizer"),
        ({"pretrained": None, "config": {"d_modle": 16}}, "d_modle"),
        ({"pretrained": None, "config": {**SHAPE, "vocab_size": 10}}, "vocab_size=10"),
        ({"pretrained": None, "config": {"model_type": "t6"}}, "t6"),
        ({"pretrained": None, "config": {**SHAPE, "d_model": "wide"}}, "does not describe"),
        ({"pretrained": None, "config": SHAPE, "dropout": 1.5}, "dropout=1.5"),
        ({"pretrained": None, "config": SHAPE, "loss_normalisation": "batch"}, "loss_normalisation"),
        ({"pretrained": None, "config": SHAPE, "max_query_length": 1}, "max_query_length=1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        load(**{"tokenizer": tokenizer(), **settings})


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = generator().save_model(tmp_path / "g")
    words = tokenizer()
    words.add_tokens(["zanzibar"])
    with pytest.raises(ConfigurationError, match="do not belong together"):
        load(folder, tokenizer=words)


def test_half_precision_training_is_refused() -> None:
    module = generator()
    trainer: Any = SimpleNamespace(precision="16-mixed")
    module._trainer = trainer
    with pytest.raises(ConfigurationError, match="16-mixed"):
        module.setup("fit")


@pytest.mark.parametrize("facts", ['{"format": 2}', '{"format": 1, "suffix": "?"}', "[]", "{"])
def test_a_contract_that_cannot_be_honoured_is_refused(tmp_path: Path, facts: str) -> None:
    folder = generator().save_model(tmp_path / "g")
    (folder / CONTRACT_NAME).write_text(facts)
    with pytest.raises(UnsupportedModelError):
        load_generator(folder)


# -- a checkpoint of one family of strategies under another: the run goes on, or is refused in one l--


KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("zero_fit", 1, {}),
    "ddp": ("fit", 2, {}),
    "fsdp": ("shard_jobs:fit", 2, {}),
    "zero1": ("zero_fit", 2, {"zero": {"stage": 1}}),
    "zero2": ("zero_fit", 2, {"zero": {"stage": 2}}),
    "zero3": ("zero_fit", 2, {"zero": {"stage": 3}}),
}
WAY_OUT = {False: r"trainer=cpu, gpu, ddp and fsdp", True: r"with trainer=deepspeed"}


@pytest.fixture(scope="module")
def killed(zero_server: ZeroServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """A run of a kind that was killed in its fourth step, made once."""
    root = tmp_path_factory.mktemp("killed")

    def copy(kind: str, place: Path) -> Path:
        job, world, settings = KINDS[kind]
        folder = root / kind / "run"
        if not folder.exists():
            doom = {"whose": -1, "at": 3}
            assert zero_server.run(job, folder, world=world, doom=doom, steps=5, **settings) == [-9] * world
        shutil.copy2(folder.parent / "secret", place / "secret")
        return Path(shutil.copytree(folder, place / "run"))

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_every_pair_goes_on_or_is_refused_in_one_line(
    before: str, after: str, zero_server: ZeroServer, killed: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    folder = killed(before, tmp_path)
    job, world, settings = KINDS[after]
    statuses = zero_server.run(job, folder, world=world, steps=5, resume=True, **settings)
    of_zero = before.startswith("zero")
    if of_zero == after.startswith("zero"):
        assert statuses == [0] * world, told(folder, 0).get("text")
        assert told(folder, 0)["global_step"] == 5
        return
    assert statuses == [REFUSED] * world
    text = told(folder, 0)["text"]
    assert told(folder, 0)["error"] == "ResumeError" and re.search(WAY_OUT[of_zero], text) and "\n" not in text
