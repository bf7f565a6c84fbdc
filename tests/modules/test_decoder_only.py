"""Decoder-only language models as generators: their rows, loss, clipping, sampling and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import dp
from tiny_generator import DECODERS, PASSAGES, ROWS, decoder_only, losses, pair, passage, tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import QueryGenerator
from lit_dpret.modules.generator_folder import GeneratorContract, GeneratorModel, TextCodec
from lit_dpret.modules.token_scores import TokenScorer
from lit_dpret.privacy.batches import take_rows
from lit_dpret.privacy.clipping import make_engine
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


def test_a_query_ends_before_its_first_line_break() -> None:
    module = decoder_only(away=0.3)
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


def test_plain_transformers_read_the_folder(tmp_path: Path) -> None:
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
