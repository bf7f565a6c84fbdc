"""Generators of queries: their loss, their tokens, how they are clipped and trained, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from stand_ins import KillAt, Killed, dp, fit
from tiny_generator import (
    DECODERS,
    PASSAGES,
    ROWS,
    SHAPE,
    CopyTask,
    decoder_only,
    generator,
    losses,
    pair,
    passage,
    prompt_of,
    prompted,
    tokenizer,
)

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.generator_folder import GeneratorContract, GeneratorModel, TextCodec, load_generator
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.privacy.batches import take_rows
from lit_dpret.privacy.clipping import ENGINES, make_engine
from lit_dpret.privacy.clipping.base import room_for_rounding
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.sampler import Decoding

PROMPT = {"prompt_tuning": {"num_virtual_tokens": 3}}
LORA = {"lora": {"r": 2, "target_modules": ["q", "v"]}}

# -- the loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["mean", "sum"])
@pytest.mark.parametrize("make", [generator, prompted], ids=["all weights", "a prompt"])
def test_the_loss_of_a_row_is_that_of_hugging_face_for_this_row_alone(
    make: Callable[..., QueryGenerator], normalisation: str
) -> None:
    module = make(loss_normalisation=normalisation).double()
    together, counts = losses(module, ROWS), []
    for row, loss in zip(ROWS, together, strict=True):
        batch = module.collate_rows([row])
        torch.testing.assert_close(loss, module.per_row_loss(batch)[0], rtol=1e-12, atol=1e-12)
        counts.append(int((batch["labels"] != -100).sum()))
        times = counts[-1] if normalisation == "sum" else 1
        torch.testing.assert_close(loss, module.model(**batch).loss * times)
    assert counts == [3, 2, 7]  # the end mark is a target too


def test_the_loss_is_float32_under_bfloat16_autocast() -> None:
    module = generator()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert losses(module, ROWS).dtype == torch.float32
    assert losses(module.double(), ROWS).dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "width"), [(generator, 12), (prompted, 3 + 12), (decoder_only, 14 + 8 - 1)], ids=["t5", "prompt", "llama"]
)
def test_batches_of_a_fixed_shape_have_the_same_losses(make: Callable[[], QueryGenerator], width: int) -> None:
    module = make().double()
    features = module.collate_rows(ROWS)
    placed = module.place_rows(features, [3, 0, 4], 6)
    assert placed["input_ids"].shape == (6, width) and placed["labels"].shape == (6, 8)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in placed.items()}
    found = module.per_row_loss(wide)
    torch.testing.assert_close(found[[3, 0, 4]], module.per_row_loss(features), rtol=1e-9, atol=1e-12)
    assert found[[1, 2, 5]].tolist() == [0, 0, 0]


def test_loss_and_gradient_of_a_tuned_prompt_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    ours, bare = prompted().double(), generator().double()
    config = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, num_transformer_submodules=1)
    theirs = peft.get_peft_model(bare.model, config).double()
    weight = theirs.prompt_encoder["default"].embedding.weight
    weight.data.copy_(prompt_of(ours))
    batch = bare.collate_rows(ROWS)
    bare.model = theirs
    expected, found = bare.per_row_loss(batch), losses(ours, ROWS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), prompt_of(ours)), torch.autograd.grad(expected.sum(), weight)
    )


# -- tokens ----------------------------------------------------------------------------------


def test_a_long_text_loses_its_end_and_keeps_its_end_mark() -> None:
    module = generator(max_passage_length=6, max_query_length=4)
    batch = module.collate_rows([pair(passage(1, 20), passage(2, 20)), pair("bana", "bana")])
    words = tokenizer()
    expected = words("generate_query: " + passage(2, 20), truncation=True, max_length=6)["input_ids"]
    assert batch["input_ids"][0].tolist() == expected
    assert batch["labels"][0].tolist() == words(passage(1, 20), truncation=True, max_length=4)["input_ids"]
    assert batch["labels"][1].tolist() == [words.convert_tokens_to_ids("bana"), 1, -100, -100]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0]
    assert batch["input_ids"][1, 3:].tolist() == [0, 0, 0]
    assert torch.isfinite(losses(module, [pair("", "bana"), pair("", "")])).all(), "an empty query has its end mark"


def test_lower_case_applies_to_both_texts_and_not_to_the_prompt() -> None:
    class Cased:
        eos_token_id = 1

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            self.seen = texts
            return {"input_ids": [[1] for _ in texts]}

    words: Any = Cased()
    codec = TextCodec(words, GeneratorContract(prompt="Ask: ", lower_case=True))
    codec.passages(["A Tide"])
    assert words.seen == ["Ask: a tide"]
    codec.queries(["A Tide"])
    assert words.seen == ["a tide"]


def test_ids_beyond_the_tokenizer_are_passed_over() -> None:
    """T5 has more embeddings than words; a noisy model may draw one of the spare ones."""
    module = generator(config={**SHAPE, "vocab_size": 128})
    word = tokenizer().convert_tokens_to_ids("bana")
    assert module.codec.text([word, 120, word, 0]) == "bana bana"


def test_a_passage_is_cut_as_without_a_prompt_and_virtual_tokens_come_before_it() -> None:
    bare, module = generator(max_passage_length=6), generator(max_passage_length=6, **PROMPT)
    virtual = list(module.codec.contract.virtual_ids)
    first = bare.model.get_input_embeddings().num_embeddings
    assert virtual == [first, first + 1, first + 2]
    texts = [passage(2, 20), "bana"]
    assert module.codec.passages(texts) == [virtual + ids for ids in bare.codec.passages(texts)]
    assert module.codec.queries(texts) == bare.codec.queries(texts)
    longest = module.longest_rows(2)["input_ids"]
    assert longest.shape == (2, 9) and longest[:, :3].tolist() == [virtual, virtual]


# -- what is trained, and what it starts from -------------------------------------------------


def test_only_matching_parameters_or_only_the_prompt_are_trained() -> None:
    module = generator(trainable_patterns=[r"^decoder\.", "final_layer_norm"])
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert trained == {
        name for name, _ in module.model.named_parameters() if name.startswith("decoder.") or "final_layer" in name
    }
    assert not module.model.shared.weight.requires_grad  # tied: the decoder's copy of it is the encoder's
    tuned = generator(**PROMPT)
    (only,) = [p for p in tuned.parameters() if p.requires_grad]
    assert only is prompt_of(tuned) and tuple(only.shape) == (3, SHAPE["d_model"])


def test_a_prompt_starts_from_words_from_a_text_repeated_or_cut_or_from_random_numbers() -> None:
    module = generator(prompt_tuning={"num_virtual_tokens": 50})
    words = module.model.get_input_embeddings().weight
    for row in prompt_of(module):
        assert (row == words).all(dim=1).nonzero()[0].item() not in tokenizer().all_special_ids
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "bana delo fibi"}
    module = generator(prompt_tuning={"num_virtual_tokens": 5, **text})
    ids = tokenizer()("bana delo fibi bana delo", add_special_tokens=False)["input_ids"]
    assert torch.equal(prompt_of(module), module.model.get_input_embeddings().weight[ids])
    random = prompt_of(generator(prompt_tuning={"num_virtual_tokens": 400, "prompt_tuning_init": "RANDOM"}))
    assert float(random.detach().std()) == pytest.approx(1, abs=0.05)


def test_a_loaded_model_trains_with_dropout_and_its_rate_can_be_set(tmp_path: Path) -> None:
    folder = generator(dropout=None).save_model(tmp_path / "g")
    loaded = generator(pretrained=folder, config=None, tokenizer=None, dropout=None)
    assert all(part.training for part in loaded.modules())
    assert {part.p for part in loaded.modules() if isinstance(part, torch.nn.Dropout)} == {0.1}
    assert not torch.equal(losses(loaded, ROWS), losses(loaded, ROWS))
    calm = generator(pretrained=folder, config=None, tokenizer=None, dropout=0.0)
    torch.testing.assert_close(losses(calm, ROWS), losses(calm, ROWS), rtol=0, atol=0)


# -- clipping and training -------------------------------------------------------------------


CLIPPED: dict[str, Callable[[], QueryGenerator]] = {
    "all weights": generator,
    "sums over tokens": partial(generator, loss_normalisation="sum"),
    "checkpointing": partial(generator, gradient_checkpointing=True),
    "the decoder": partial(generator, trainable_patterns=[r"^decoder\."]),
    "a prompt": prompted,
    "a prompt, untied": partial(prompted, untied=True),
    "a prompt, sums": partial(prompted, loss_normalisation="sum"),
    "a prompt, checkpointing": partial(prompted, gradient_checkpointing=True),
    "a llama": decoder_only,
    "a llama with adapters": partial(decoder_only, lora={"r": 2}),
    "a llama with a prompt": partial(decoder_only, **PROMPT),
    "a llama, checkpointing": partial(decoder_only, gradient_checkpointing=True),
}
#: Opacus makes a mistake with their embeddings of positions or padding, and is refused.
NOT_BY_OPACUS = ("all weights", "sums over tokens", "checkpointing", "the decoder", "a llama", "a llama, checkpointing")


@pytest.mark.like(3)
@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", CLIPPED)
def test_every_engine_clips_as_one_row_at_a_time(name: str, engine: str) -> None:
    module = CLIPPED[name]().double()
    if engine == "opacus" and name in NOT_BY_OPACUS:
        with pytest.raises(UnsupportedModelError, match=r"privacy\.engine=ghost"):
            make_engine(engine, module, max_grad_norm=0.5)
        return
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    each = [
        torch.autograd.grad(losses(module, [row])[0], [*trained.values()], allow_unused=True, materialize_grads=True)
        for row in ROWS
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in gradients]).norm() for gradients in each])
    bound = 1.001 * float(norms.median())
    lowered = room_for_rounding(bound, trained.values())
    scales = [min(1.0, lowered / float(norm)) for norm in norms]
    batch = module.collate_rows(ROWS)

    def chosen(index: Any = slice(None)) -> torch.Tensor:
        return module.per_row_loss(take_rows(batch, index))

    clipping = make_engine(engine, module, max_grad_norm=bound)
    for _ in range(2):  # the engine verifies its first batch, and not a later one
        stats = clipping.add(chosen, torch.arange(3), torch.ones(3, dtype=torch.bool))
        torch.testing.assert_close(stats.norms.double(), norms, rtol=1e-9, atol=1e-12)
        found = clipping.take()
        assert set(found) == set(trained) and stats.clipped == 1
        for place, total in enumerate(found.values()):
            expected = sum(scale * gradients[place] for scale, gradients in zip(scales, each, strict=True))
            torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)


RUNS: dict[str, tuple[Callable[..., QueryGenerator], dict[str, Any], str]] = {
    "a T5": (generator, {}, "ghost"),
    "a T5, clipped by the loop": (generator, {}, "loop"),
    "a llama": (decoder_only, {}, "ghost"),
    "a llama with adapters, untied": (decoder_only, {"lora": {"r": 2}, "tied": False}, "ghost"),
    "a llama with a prompt": (decoder_only, PROMPT, "ghost"),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", RUNS)
def test_a_private_run_leaves_a_generator_with_a_card_that_writes_what_it_learnt(name: str, tmp_path: Path) -> None:
    make, settings, engine = RUNS[name]
    module = make(privacy=dp(tmp_path, eps=8.0, noise_multiplier=3.0, engine=engine), **settings)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    runner = fit(tmp_path / "run", module, CopyTask("poisson"), steps=3, save_every=1000, extra=[PrivacyCard()])
    assert runner.global_step == 3 and "train/loss" not in runner.callback_metrics
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert [record["kind"] for record in records].count("release") == 3
    moved = {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name, weight in module.named_parameters() if weight.requires_grad}
    folder = tmp_path / "run" / "model"
    assert verify_chain(folder).failed == [] and read_card(folder)["claim"]["epsilon"] <= 8
    trained = GeneratorModel(module.model.eval(), module.codec, folder)
    written = [
        draw_group(each, PASSAGES, 2, 0, Decoding(max_new_tokens=6)) for each in (trained, load_generator(folder))
    ]
    assert [query.text for query in written[0]] == [query.text for query in written[1]]


def trained_prompt(folder: Path, *, resume: bool = False, seed: int = 0, extra: Sequence[Any] = ()) -> QueryGenerator:
    module = generator(privacy=dp(folder, eps=8.0, noise_multiplier=3.0), seed=seed, **PROMPT)
    fit(folder / "run", module, CopyTask("poisson"), steps=4, resume=resume, extra=[PrivacyCard(), *extra])
    return module


@pytest.mark.costly
def test_a_run_that_was_cut_off_goes_on_from_its_prompt(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        trained_prompt(tmp_path, extra=[KillAt(3)])
    file = tmp_path / "run" / "checkpoints" / "last.ckpt"
    saved = torch.load(file, weights_only=True)["state_dict"]
    again = trained_prompt(tmp_path, resume=True, seed=7)  # other coins for its prompt and weights: both are loaded
    assert torch.equal(again.model.shared.weight, saved["model.shared.weight"])
    assert not torch.equal(prompt_of(again), saved["model.encoder.embed_tokens.prompt.weight"])
    loaded = QueryGenerator.load_from_checkpoint(file, tokenizer=tokenizer())
    assert torch.equal(prompt_of(loaded), prompt_of(again))
    assert loaded.codec.contract == again.codec.contract


def test_half_precision_training_is_refused() -> None:
    module = generator()
    trainer: Any = SimpleNamespace(precision="16-mixed")
    module._trainer = trainer
    with pytest.raises(ConfigurationError, match="16-mixed"):
        module.setup("fit")


@pytest.mark.parametrize(("query", "refused"), [("Bana delo, fibi gomu huri?", True), ("bana delo", False)])
def test_a_query_of_the_run_is_no_text_that_the_virtual_tokens_start_from(
    query: str, refused: bool, tmp_path: Path
) -> None:
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "bana delo fibi gomu huri"}
    module = generator(prompt_tuning={"num_virtual_tokens": 5, **text}, privacy=dp(tmp_path))
    assert any("prompt_tuning" in each and "declared" in each for each in module.assumptions())
    data = SimpleNamespace(collection=SimpleNamespace(queries={"q": query}))
    if refused:
        with pytest.raises(ConfigurationError, match=r"prompt_tuning_init_text") as raised:
            module.refuse_protected(data)
        assert raised.value.trap == "T25"
    else:
        module.refuse_protected(data)


# -- lengths and padding ---------------------------------------------------------------------

BERT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip


def stored_pair(folder: Path, encoder: Any) -> Path:
    """An encoder with a decoder of its own, as `EncoderDecoderModel` puts any two together."""
    torch.manual_seed(0)
    decoder = hf.BertLMHeadModel(hf.BertConfig(is_decoder=True, add_cross_attention=True, **BERT))
    model = hf.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id, model.config.eos_token_id = 0, 0, 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)  # so large that a token counts
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["ConvBert", "Nystromformer"])
def test_a_model_in_which_padding_counts_is_refused(kind: str, tmp_path: Path) -> None:
    """What it makes of one passage would follow from how long the other ones of the batch are."""
    more = {"embedding_size": 16, "head_ratio": 1} if kind == "ConvBert" else {}
    encoder = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**BERT, **more))
    with pytest.raises(UnsupportedModelError, match="padding"):
        generator(pretrained=stored_pair(tmp_path, encoder), config=None, dropout=None)


def test_texts_longer_than_the_tables_of_positions_are_refused_by_name(tmp_path: Path) -> None:
    folder = stored_pair(tmp_path, hf.RobertaModel(hf.RobertaConfig(**BERT)))  # its places begin behind the padding's
    settings: dict[str, Any] = {"pretrained": folder, "config": None, "dropout": None}
    module = generator(**settings, max_passage_length=39, max_query_length=40)
    assert losses(module, [pair(passage(3, 60), passage(5, 60))]).isfinite().all()
    for name, length in (("max_passage_length", 40), ("max_query_length", 41)):
        with pytest.raises(ConfigurationError, match=rf"model\.{name}"):
            generator(**settings | {name: length})
    lengths: dict[str, Any] = {"kind": "gpt2", "max_passage_length": 20, "max_query_length": 10}
    decoder_only(**lengths, prompt_tuning={"num_virtual_tokens": 10})
    with pytest.raises(ConfigurationError, match=r"model\.max_passage_length.*prompt_tuning"):
        decoder_only(**lengths, prompt_tuning={"num_virtual_tokens": 11})


ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 3.0], "long_factor": [8.0, 9.0]}
LONG_ROPE: dict[str, Any] = DECODERS["llama"] | {
    "model_type": "phi3", "max_position_embeddings": 160, "original_max_position_embeddings": 40,
    "rope_parameters": ROPE,
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_rotary_positions_that_could_change_with_the_longest_text_are_held(engine: str, tmp_path: Path) -> None:
    """The model had written its choice, always the same one, into a buffer, and so was refused in the first batch."""
    settings: dict[str, Any] = {"config": LONG_ROPE, "max_passage_length": 30, "max_query_length": 10}
    patterns = ["proj"] if engine == "ghost" else None  # it has no rule for the norms of this model
    module = decoder_only(privacy=dp(tmp_path, engine=engine), trainable_patterns=patterns, **settings)
    plain = decoder_only(**settings)
    for part in plain.model.modules():
        if hasattr(part, "rope_type"):
            part.rope_type = "longrope"
    torch.testing.assert_close(losses(module, ROWS), losses(plain, ROWS), rtol=0, atol=0)
    fit(tmp_path / "run", module, CopyTask("truncated_poisson"), steps=2)
    with pytest.raises(ConfigurationError, match=r"model\.max_passage_length.*40 tokens"):
        decoder_only(**settings | {"max_passage_length": 31})


# -- refusals --------------------------------------------------------------------------------


BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
TEXT = {"prompt_tuning_init": "TEXT"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"config": None}, r"model\.pretrained=None and model\.config=None"),
        ({"tokenizer": None}, r"model\.tokenizer"),
        ({"config": {"d_modle": 16}}, "d_modle"),
        ({"config": {**SHAPE, "vocab_size": 10}}, "vocab_size=10"),
        ({"config": {"model_type": "t6"}}, "t6"),
        ({"config": {**SHAPE, "d_model": "wide"}}, r"model\.config"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"loss_normalisation": "batch"}, "loss_normalisation"),
        ({"max_query_length": 1}, "max_query_length=1"),
        ({"trainable_patterns": ["lm_haed"]}, "lm_haed"),
        ({"trainable_patterns": ["("]}, r"model\.trainable_patterns"),
        ({"trainable_patterns": []}, r"model\.trainable_patterns"),
        ({"trainable_patterns": ["decoder"], **LORA}, r"model\.trainable_patterns and model\.lora"),
        ({"trainable_patterns": ["decoder"], **PROMPT}, r"trainable_patterns and model\.prompt_tuning"),
        ({**PROMPT, **LORA}, r"model\.lora and model\.prompt_tuning both"),
        ({**PROMPT, **LORA, "trainable_patterns": ["decoder"]}, r"model\.trainable_patterns.*all"),
        ({"prompt_tuning": {"tokens": 3}}, r"prompt_tuning\.tokens .*num_virtual_tokens"),
        ({"prompt_tuning": {"num_virtual_tokens": 0}}, "num_virtual_tokens=0"),
        ({"prompt_tuning": {"prompt_tuning_init": "words"}}, "prompt_tuning_init"),
        ({"prompt_tuning": TEXT}, "prompt_tuning_init_text"),
        ({"prompt_tuning": {"prompt_tuning_init_text": "bana"}}, "prompt_tuning_init_text"),
        ({"prompt_tuning": {**TEXT, "prompt_tuning_init_text": "</s>"}}, "prompt_tuning_init_text"),
        ({**PROMPT, "config": BART}, r"model\.prompt_tuning.*bart"),
        ({"config": {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
          "prompt": "{passage} Ask: "}, "bert"),  # it looks ahead
        ({"config": {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
          "prompt": "{passage} Ask: "}, "mamba"),  # without keys and values
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=named):
        generator(**settings)


@pytest.mark.parametrize(
    ("build", "setting", "named"),
    [
        (generator, "modules_to_save", "shared"), (generator, "modules_to_save", "lm_head"),
        (generator, "modules_to_save", "decoder"), (generator, "target_modules", "lm_head"),
        (generator, "target_modules", "shared"), (decoder_only, "modules_to_save", "embed_tokens"),
        (decoder_only, "target_modules", "lm_head"), (decoder_only, "target_modules", "embed_tokens"),
    ],
)  # fmt: skip
def test_one_use_of_a_tied_weight_is_not_trained_alone(build: Callable[..., Any], setting: str, named: str) -> None:
    """The export, where the weight is one, would be another model than was trained."""
    lora: dict[str, Any] = {"r": 2, "target_modules": ["q"] if build is generator else ["q_proj"]}
    lora[setting] = [*lora.get(setting, ()), named]
    with pytest.raises(ConfigurationError, match=rf"model\.lora\.{setting}.*{named}"):
        build(lora=lora)


@pytest.mark.parametrize(
    ("build", "lora"),
    [
        (generator, {"target_modules": ["q"], "lora_bias": True}),
        (decoder_only, {"target_modules": ["q_proj"], "lora_bias": True}),
        (decoder_only, {"target_modules": ["q_proj"], "layer_replication": [[0, 1], [0, 1]]}),
    ],
)
def test_adapters_of_which_no_model_could_be_saved_are_refused_before_they_train(
    build: Callable[..., Any], lora: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.lora"):
        build(lora={"r": 2, **lora})
