"""The generator's loss, its tokens and its training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_generator
import torch
import transformers as hf
from stand_ins import dp, fit
from tiny_generator import (
    DECODERS,
    ROWS,
    SHAPE,
    CopyTask,
    copy_pairs,
    decoder_only,
    generator,
    losses,
    pair,
    passage,
    tokenizer,
)

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.generator_folder import GeneratorContract, TextCodec
from lit_dpret.modules.outline import PUBLISHED, GeneratorOutline
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.modules.token_scores import TokenScorer, token_scores
from lit_dpret.privacy.batches import take_rows
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import NoPrivacy

# -- the loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["mean", "sum"])
def test_the_loss_of_a_row_does_not_depend_on_the_other_rows_nor_on_padding(normalisation: str) -> None:
    module = generator(loss_normalisation=normalisation).double()
    together = losses(module, ROWS)
    alone = torch.cat([losses(module, [row]) for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_the_mean_loss_of_one_row_is_what_hugging_face_computes() -> None:
    module = generator()
    for row in ROWS:
        batch = module.collate_rows([row])
        torch.testing.assert_close(module.per_row_loss(batch)[0], module.model(**batch).loss)


def test_the_sum_is_the_mean_times_the_rows_own_number_of_tokens() -> None:
    mean, total = generator(), generator(loss_normalisation="sum")
    batch = mean.collate_rows(ROWS)
    tokens = (batch["labels"] != -100).sum(dim=1)
    assert tokens.tolist() == [3, 2, 7]  # the end mark is a target too
    torch.testing.assert_close(total.per_row_loss(batch), mean.per_row_loss(batch) * tokens)


def test_the_loss_is_float32_under_bfloat16_autocast() -> None:
    module = generator()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert losses(module, ROWS).dtype == torch.float32
    assert losses(module.double(), ROWS).dtype == torch.float64


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


def test_an_empty_query_still_has_a_loss() -> None:
    assert torch.isfinite(losses(generator(), [pair("", "bana"), pair("", "")])).all()


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


# -- what is trained --------------------------------------------------------------------------


def test_only_matching_parameters_are_trained() -> None:
    module = generator(trainable_patterns=[r"^decoder\.", "final_layer_norm"])
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert trained == {
        name for name, _ in module.model.named_parameters() if name.startswith("decoder.") or "final_layer" in name
    }
    assert not module.model.shared.weight.requires_grad  # tied: the decoder's copy of it is the encoder's


@pytest.mark.parametrize(("patterns", "word"), [(["lm_haed"], "lm_haed"), (["("], "regular"), ([], "empty")])
def test_patterns_that_train_nothing_are_refused(patterns: list[str], word: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=word):
        generator(trainable_patterns=patterns)


def test_a_loaded_model_trains_with_dropout_and_its_rate_can_be_set(tmp_path: Path) -> None:
    folder = generator(dropout=None).save_model(tmp_path / "g")
    loaded = QueryGenerator(privacy=NoPrivacy(), optimizer=generator().optimizer_spec, pretrained=folder)
    assert all(part.training for part in loaded.modules())
    assert {part.p for part in loaded.modules() if isinstance(part, torch.nn.Dropout)} == {0.1}
    assert not torch.equal(losses(loaded, ROWS), losses(loaded, ROWS))
    calm = QueryGenerator(privacy=NoPrivacy(), optimizer=generator().optimizer_spec, pretrained=folder, dropout=0.0)
    torch.testing.assert_close(losses(calm, ROWS), losses(calm, ROWS), rtol=0, atol=0)


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_it_trains_privately_and_the_ledger_says_so(tmp_path: Path, engine: str) -> None:
    module = generator(privacy=dp(tmp_path, eps=8.0, noise_multiplier=3.0, engine=engine))
    before = [p.detach().clone() for p in module.parameters()]
    runner = fit(tmp_path / "run", module, CopyTask("poisson"), steps=3, save_every=1000)
    assert runner.global_step == 3
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert [record["kind"] for record in records].count("release") == 3
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert "train/loss" not in runner.callback_metrics
    QueryGenerator.load_model(module.save_model(tmp_path / "run" / "generator"))


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_checkpointing": True}, {"trainable_patterns": [r"^decoder\."]}, {"loss_normalisation": "sum"}],
    ids=["plain", "checkpointing", "decoder only", "sum"],
)
def test_clipping_by_ghost_norms_equals_clipping_one_row_at_a_time(settings: dict[str, Any]) -> None:
    sums = []
    for engine in ("ghost", "loop"):
        module = generator(**settings if engine == "ghost" else {**settings, "gradient_checkpointing": False}).double()
        clipper = make_engine(engine, module, max_grad_norm=0.5)
        batch = module.collate_rows(ROWS)
        clipper.add(
            lambda i=slice(None), m=module, b=batch: m.per_row_loss(take_rows(b, i)),
            torch.arange(3),
            torch.ones(3, dtype=torch.bool),
        )
        sums.append(clipper.take())
    assert set(sums[0]) == set(sums[1])
    for name, total in sums[0].items():
        torch.testing.assert_close(total, sums[1][name], rtol=1e-6, atol=1e-9)


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


def test_virtual_tokens_take_places_as_well() -> None:
    settings: dict[str, Any] = {"kind": "gpt2", "max_passage_length": 20, "max_query_length": 10}
    decoder_only(**settings, prompt_tuning={"num_virtual_tokens": 10})
    with pytest.raises(ConfigurationError, match=r"model\.max_passage_length.*prompt_tuning"):
        decoder_only(**settings, prompt_tuning={"num_virtual_tokens": 11})


ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 3.0], "long_factor": [8.0, 9.0]}
LONG_ROPE: dict[str, Any] = DECODERS["llama"] | {
    "model_type": "phi3", "max_position_embeddings": 160, "original_max_position_embeddings": 40,
    "rope_parameters": ROPE,
}  # fmt: skip


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


# -- low-rank adapters in a generator: what is trained, and what is exported -------------------


LORA = {"r": 2, "target_modules": ["q", "v"]}


def test_only_adapters_are_trained_and_the_export_has_them_merged_into_its_weights(tmp_path: Path) -> None:
    module = generator(lora=LORA)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    rows = {
        "input_ids": torch.tensor([[5, 6, 7, 1]]), "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "labels": torch.tensor([[8, 9, 1]]),
    }  # fmt: skip
    adapted = module.per_row_loss(rows).detach()
    folder = module.save_model(tmp_path / "generator")
    assert any("lora_" in name for name, _ in module.named_parameters()), "the export left the module as it was"
    exported = generator()
    exported.model = QueryGenerator.load_model(folder).model
    assert not any("lora" in name for name, _ in exported.named_parameters())
    torch.testing.assert_close(exported.per_row_loss(rows).detach(), adapted)
    assert (adapted - generator().per_row_loss(rows).detach()).abs() > 1e-3, "the adapters did something"


def test_adapters_and_patterns_are_not_both_what_is_trained() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.trainable_patterns and model\.lora"):
        generator(lora=LORA, trainable_patterns=[r"^decoder\."])


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


@pytest.mark.parametrize(
    ("tied", "lora"),
    [
        (False, {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}),
        (True, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}),
    ],
)
def test_an_export_is_the_model_that_was_trained(tmp_path: Path, tied: bool, lora: dict[str, Any]) -> None:
    module = decoder_only(lora={"r": 2, **lora}, tied=tied).eval()
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=coins)
    rows = module.collate_rows(copy_pairs(3))
    trained = module.per_row_loss(rows).detach()
    module.model = QueryGenerator.load_model(module.save_model(tmp_path / "generator")).model
    torch.testing.assert_close(module.per_row_loss(rows).detach(), trained)


# -- log probabilities of the tokens of a query, by teacher forcing ----------------------------


QUERIES = ["bana delo", "fibi", "gomu kuri bana felo"]
PASSAGES = ["bana delo fibi", "kuri", "gomu gomu gomu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_generator.lively_generator().save_model(tmp_path_factory.mktemp("token-scores") / "model")


def test_the_scores_of_a_query_add_up_to_the_loss_of_its_row(folder: Path) -> None:
    module = tiny_generator.lively_generator()
    rows = [tiny_generator.pair(query, passage) for query, passage in zip(QUERIES, PASSAGES, strict=True)]
    with torch.no_grad():
        losses = tiny_generator.losses(module.eval(), rows)
    found = token_scores(folder, QUERIES, PASSAGES)
    np.testing.assert_allclose(-found.per_token(), losses.numpy(), rtol=1e-5)
    assert found.mask.sum(axis=1).tolist() == [3, 2, 5]  # the end mark counts
    assert (found.log_probs[~found.mask] == 0).all() and (found.tokens[~found.mask] == -100).all()


def test_a_score_does_not_depend_on_the_company(folder: Path) -> None:
    together, alone = token_scores(folder, QUERIES, PASSAGES), token_scores(folder, QUERIES, PASSAGES, batch_size=1)
    np.testing.assert_allclose(together.log_probs, alone.log_probs, rtol=1e-5)


def test_moments_are_those_of_a_token_that_the_model_draws(folder: Path) -> None:
    scorer = TokenScorer.load(folder)
    found = scorer.score(QUERIES[1:2], PASSAGES[1:2], moments=True)
    vocabulary = [word for word in tiny_generator.WORDS]
    first = [scorer.score([word], PASSAGES[1:2]).log_probs[0, 0] for word in vocabulary]
    specials = 1 - sum(math.exp(value) for value in first)  # pad, end, unknown and prompt: no text gives them
    assert found.means is not None and found.deviations is not None
    mean = sum(math.exp(value) * value for value in first)
    # Entropy of what is left over lies between one lump and four equal ones.
    low, high = specials * math.log(specials / 4), specials * math.log(specials)
    assert mean + low - 1e-6 <= found.means[0, 0] <= mean + high + 1e-6
    assert found.deviations[0, 0] > 0 and found.deviations.shape == found.log_probs.shape


def test_queries_without_passages_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="2 queries and 1 passages"):
        token_scores(folder, QUERIES[:2], PASSAGES[:1])


def test_the_public_reference_reads_texts_by_the_contract_it_is_given(folder: Path) -> None:
    own = TokenScorer.load(folder)
    reference = TokenScorer.load("public_t5", contract=own.codec.contract)
    assert reference.codec.contract == own.codec.contract


# -- a plan of a model needs its shape alone: no weights, no network, no memory ----------------


#: In millions; the counts of Raffel et al. (2020), section 3.7, to which the paper's "60M, 220M, 770M, 3B" refer.
SIZES = {"google-t5/t5-small": 60.5, "google-t5/t5-base": 222.9, "google-t5/t5-large": 737.7, "google-t5/t5-3b": 2851.6}


def outline(**settings: Any) -> GeneratorOutline:
    return GeneratorOutline.of_settings(optimizer=OptimizerSpec(), **settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_t5_is_outlined_without_memory_or_a_network(name: str) -> None:
    found = outline(pretrained=name)
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert name not in SIZES or found.parameters / 1e6 == pytest.approx(SIZES[name], abs=0.05)
    assert found.trained == found.parameters and found.name == name


def test_lora_leaves_few_weights_to_train() -> None:
    whole, adapted = (
        outline(pretrained="google-t5/t5-3b", lora=lora) for lora in (None, {"r": 16, "target_modules": ["q", "v"]})
    )
    assert adapted.trained == adapted.parameters - whole.parameters == 16 * 2 * 72 * (1024 + 4096)


def test_of_a_prompt_its_vectors_are_trained_and_a_plan_reads_no_words_for_them() -> None:
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "what people ask"}
    found = outline(pretrained="google-t5/t5-3b", prompt_tuning={"num_virtual_tokens": 50, **text})
    assert found.trained == 50 * 1024 and all(parameter.is_meta for parameter in found.model.parameters())
    with pytest.raises(ConfigurationError, match="both select"):
        outline(pretrained="google-t5/t5-3b", prompt_tuning={}, lora={"r": 2, "target_modules": ["q"]})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"trainable_patterns": [r"^decoder\."]},
        {"lora": {"r": 2, "target_modules": ["q"]}},
        {"prompt_tuning": {"num_virtual_tokens": 3}},
    ],
    ids=["plain", "checkpointing", "decoder only", "lora", "prompt"],
)
def test_an_outline_has_the_names_and_shapes_of_the_generator(settings: dict[str, Any]) -> None:
    given = {"pretrained": None, "config": SHAPE, "tokenizer": tokenizer(), **settings}
    real = generator(**settings).outlined
    paper = outline(**given, max_passage_length=12, max_query_length=8)
    shapes = [
        {name: (tuple(p.shape), p.requires_grad) for name, p in each.model.named_parameters()} for each in (real, paper)
    ]
    assert shapes[0] == shapes[1] and shapes[0]
    assert (real.gradient_checkpointing, real.trained) == (paper.gradient_checkpointing, paper.trained)
    assert (real.max_passage_length, real.max_query_length) == (paper.max_passage_length, paper.max_query_length)
    assert real.source_length == paper.source_length == 12 + (3 if "prompt_tuning" in settings else 0)


def test_what_cannot_be_outlined_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        outline(pretrained=None)
    with pytest.raises(ConfigurationError, match="vocab_size"):
        outline(pretrained=None, config={"d_model": 8})
    with pytest.raises(UnsupportedModelError, match="nothing is not a folder"):
        outline(pretrained=tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        outline(pretrained="google-t5/t5-small", trainable_patterns=["no such layer"])
