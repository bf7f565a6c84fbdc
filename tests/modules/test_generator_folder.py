"""A generator as a folder: saved whole, loaded with its contract, refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from rank_runs import REFUSED, told
from safetensors.torch import load_file
from tiny_generator import PASSAGES, ROWS, SHAPE, copy_pairs, decoder_only, generator, prompt_of, prompted, tokenizer
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import files_of_at_most
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertConfig, BertModel, T5Config, T5EncoderModel
from zero_runs import ZeroServer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError
from lit_dpret.modules.embedding_trainer import save_net
from lit_dpret.modules.generator_folder import CONTRACT_NAME, GeneratorModel, load_generator, weights_hash
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.modules.token_scores import TokenScorer
from lit_dpret.modules.virtual_tokens import PromptedEmbedding
from lit_dpret.privacy.ledger.trained import note_built
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.sampler import Decoding

TIED = pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])

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


@pytest.mark.costly
def test_what_holds_no_generator_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("no model")
    T5EncoderModel(T5Config(vocab_size=90, **SHAPE)).save_pretrained(tmp_path / "t5")
    BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=90)).save_pretrained(
        tmp_path / "bert"
    )
    torn = generator().save_model(tmp_path / "torn")
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for name in ("notes", "nowhere", "t5", "bert", "torn"):
        with pytest.raises(UnsupportedModelError, match=r"model\.pretrained") as caught:
            load(tmp_path / name, tokenizer=tokenizer())
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="lit-dpret-tests/no-such-model") as caught:
        load("lit-dpret-tests/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_model_or_tokenizer_that_does_not_load_is_named_by_its_setting_or_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("./nowhere", "lit-dpret-tests/no-such-tokenizer"):
        for make in (load, QueryGenerator.outline):
            given: Any = {"config": {"d_model": 16}, "tokenizer": name}
            given |= {"optimizer": generator().optimizer_spec} if make is QueryGenerator.outline else {}
            with pytest.raises(UnsupportedModelError, match=f"^model.tokenizer={re.escape(name)} "):
                make(pretrained=None, **given)
    folder = generator().save_model(tmp_path / "g")
    (folder / "model.safetensors").unlink()
    for read in (QueryGenerator.load_model, TokenScorer.load):
        with pytest.raises(UnsupportedModelError, match=f"^{re.escape(str(folder))} holds no usable language model"):
            read(folder)
    endless = tokenizer()
    endless.eos_token = None
    with pytest.raises(UnsupportedModelError, match=r"^model\.tokenizer: its tokenizer has no eos_token"):
        load(None, config={"d_model": 16}, tokenizer=endless)


def test_attention_that_depends_on_the_longest_text_of_a_batch_is_refused(tmp_path: Path) -> None:
    shape = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    with pytest.raises(UnsupportedModelError, match="attention_type"):
        load(None, config={"model_type": "bigbird_pegasus", **shape}, tokenizer=tokenizer())


def test_half_precision_weights_are_trained_in_float32(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    module = generator()
    module.model.half()
    module.save_model(folder)
    assert {p.dtype for p in load(folder).parameters()} == {torch.float32}


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = generator().save_model(tmp_path / "g")
    words = tokenizer()
    words.add_tokens(["zanzibar"])
    with pytest.raises(ConfigurationError, match="do not belong together"):
        load(folder, tokenizer=words)


@pytest.mark.parametrize("facts", ['{"format": 2}', '{"format": 1, "suffix": "?"}', "[]", "{"])
def test_a_contract_that_cannot_be_honoured_is_refused(tmp_path: Path, facts: str) -> None:
    folder = generator().save_model(tmp_path / "g")
    (folder / CONTRACT_NAME).write_text(facts)
    with pytest.raises(UnsupportedModelError):
        load_generator(folder)


# -- tuned prompts and adapters: what the folder holds of them ---------------------------------


@TIED
def test_the_saved_folder_is_the_start_and_the_rows_of_the_prompt_and_nothing_else(
    tmp_path: Path, untied: bool
) -> None:
    module = prompted(untied=untied)
    folder = module.save_model(tmp_path / "generator")
    assert isinstance(module.model.encoder.embed_tokens, PromptedEmbedding), "the export left the module as it was"
    bare = generator()
    if untied:
        bare.model.lm_head.weight = torch.nn.Parameter(module.model.lm_head.weight.detach().clone())
        bare.model.config.scale_decoder_outputs = False
        note_built(bare)
    start = bare.save_model(tmp_path / "start")
    assert {p.name for p in folder.iterdir()} == {p.name for p in start.iterdir()}
    made, known = load_file(folder / "model.safetensors"), load_file(start / "model.safetensors")
    assert set(made) == set(known)
    for name, weight in known.items():
        assert torch.equal(made[name][: len(weight)], weight), name
    assert torch.equal(made["shared.weight"][-3:], prompt_of(module))
    longer = {name for name, weight in made.items() if len(weight) != len(known[name])}
    assert longer == ({"shared.weight", "lm_head.weight"} if untied else {"shared.weight"})
    assert not untied or not made["lm_head.weight"][-3:].any()


@TIED
def test_a_loaded_generator_gives_bit_for_bit_the_scores_and_queries_of_the_trained_one(
    tmp_path: Path, untied: bool
) -> None:
    module = prompted(untied=untied).eval()
    loaded = QueryGenerator.load_model(module.save_model(tmp_path / "generator"))
    assert loaded.contract == module.codec.contract and loaded.contract.virtual_ids
    batch = module.collate_rows(ROWS)
    with torch.no_grad():
        expected, found = (each(**batch).logits for each in (module.model, loaded.model))
    assert torch.equal(found, expected)
    decoding = Decoding(max_new_tokens=8, temperature=0.7)
    own = GeneratorModel(module.model, module.codec, tmp_path)
    made = [[query.text for query in draw_group(each, PASSAGES, 2, 0, decoding)] for each in (own, loaded)]
    assert made[0] == made[1] and len(set(made[0])) > 3
    bare = GeneratorModel(generator().model.eval(), generator().codec, tmp_path)
    assert [query.text for query in draw_group(bare, PASSAGES, 2, 0, decoding)] != made[0], "the prompt matters"


def test_plain_transformers_write_the_same_queries_and_no_virtual_token(tmp_path: Path) -> None:
    folder = prompted(away=3.0, untied=True).save_model(tmp_path / "generator")
    loaded = QueryGenerator.load_model(folder)
    contract = json.loads((folder / CONTRACT_NAME).read_text())
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    for text in PASSAGES.values():
        ids = torch.tensor([[*contract["virtual_ids"], *tokenizer()(contract["prompt"] + text)["input_ids"]]])
        written = theirs.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0]
        assert not set(written.tolist()) & set(contract["virtual_ids"])
        with torch.no_grad():
            scores = loaded.model(input_ids=ids, decoder_input_ids=written[None, :-1]).logits[0]
        assert scores.argmax(dim=1).tolist() == written[1:].tolist()


def test_a_tuned_generator_is_refused_with_other_virtual_tokens_and_as_a_start(tmp_path: Path) -> None:
    folder = prompted().save_model(tmp_path / "generator")
    with pytest.raises(ConfigurationError, match=r"model\.prompt_tuning"):
        generator(pretrained=folder, config=None)
    facts = json.loads((folder / CONTRACT_NAME).read_text())
    for wrong in ([5, 6, 7], [*facts["virtual_ids"], 999]):
        (folder / CONTRACT_NAME).write_text(json.dumps(facts | {"virtual_ids": wrong}))
        with pytest.raises(UnsupportedModelError, match="virtual_ids"):
            QueryGenerator.load_model(folder)


ADAPTED: dict[str, Callable[[], QueryGenerator]] = {
    "a T5": lambda: generator(lora={"r": 2, "target_modules": ["q", "v"]}),
    "an untied llama": lambda: decoder_only(
        lora={"r": 2, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}, tied=False
    ),
    "tokens of a llama": lambda: decoder_only(
        lora={"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}
    ),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_export_has_the_adapters_merged_and_is_the_model_that_was_trained(name: str, tmp_path: Path) -> None:
    module = ADAPTED[name]().eval()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained and (name != "a T5" or all("lora_" in each for each in trained))
    rows = module.collate_rows(copy_pairs(3))
    start, coins = module.per_row_loss(rows).detach(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn(parameter.shape, generator=coins)
    adapted = module.per_row_loss(rows).detach()
    assert (adapted - start).abs().max() > 1e-3, "the adapters did something"
    folder = module.save_model(tmp_path / "generator")
    assert any("lora_" in name for name, _ in module.named_parameters()), "the export left the module as it was"
    module.model = QueryGenerator.load_model(folder).model
    assert not any("lora" in name for name, _ in module.named_parameters())
    torch.testing.assert_close(module.per_row_loss(rows).detach(), adapted)


# -- a checkpoint of one family of strategies under another -----------------------------------


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
