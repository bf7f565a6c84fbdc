"""Prompt tuning of a generator: what is trained, how it is clipped, and what the saved folder holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stand_ins import KillAt, Killed, dp, fit
from tiny_generator import PASSAGES, ROWS, SHAPE, CopyTask, generator, losses, passage, tokenizer
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import QueryGenerator
from lit_dpret.modules.generator_folder import CONTRACT_NAME, GeneratorModel
from lit_dpret.modules.virtual_tokens import PromptedEmbedding
from lit_dpret.privacy.batches import take_rows
from lit_dpret.privacy.clipping import ENGINES, make_engine
from lit_dpret.privacy.clipping.base import room_for_rounding
from lit_dpret.privacy.ledger.trained import note_built
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.sampler import Decoding

PROMPT = {"num_virtual_tokens": 3}
TIED = pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])


def plain(*, untied: bool = False, **settings: Any) -> QueryGenerator:
    """A generator; ``untied`` as the T5 v1.1 are, with an output layer of its own."""
    module = generator(**settings)
    if untied:
        head = torch.randn(module.model.shared.weight.shape, generator=torch.Generator().manual_seed(4))
        module.model.lm_head.weight = torch.nn.Parameter(head, requires_grad="prompt_tuning" not in settings)
        module.model.config.scale_decoder_outputs = False
        note_built(module)
    return module


def prompted(*, away: float = 0.5, **settings: Any) -> QueryGenerator:
    """A generator whose prompt is away from the words that it started from."""
    module = plain(**{"prompt_tuning": PROMPT} | settings)
    coins = torch.Generator().manual_seed(3)
    with torch.no_grad():
        rows = prompt_rows(module)
        rows += away * torch.randn(rows.shape, generator=coins)
    note_built(module)
    return module


def prompt_rows(module: QueryGenerator) -> Tensor:
    embedding = module.model.encoder.embed_tokens
    return embedding.prompt.weight


# -- the loss --------------------------------------------------------------------------------


def test_only_the_prompt_is_trained() -> None:
    module = generator(prompt_tuning=PROMPT)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert [tuple(p.shape) for p in trained] == [(3, SHAPE["d_model"])] and trained[0] is prompt_rows(module)


def test_the_loss_and_the_gradient_of_a_row_depend_neither_on_the_other_rows_nor_on_padding() -> None:
    module = prompted().double()
    together = losses(module, ROWS)
    alone = torch.cat([losses(module, [row]) for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for i, row in enumerate(ROWS):
        found = torch.autograd.grad(losses(module, ROWS)[i], prompt_rows(module))[0]
        expected = torch.autograd.grad(losses(module, [row])[0], prompt_rows(module))[0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert expected.abs().max() > 1e-4, "the loss sees the prompt"


def test_batches_of_a_fixed_shape_have_the_same_losses() -> None:
    module = prompted(max_passage_length=10, max_query_length=8).double()
    features = module.collate_rows(ROWS)
    filled = module.place_rows(features, [3, 0, 1], 5)
    assert filled["input_ids"].shape == (5, 3 + 10)
    found = module.per_row_loss(filled | {"attention_mask": filled["attention_mask"].double()})
    torch.testing.assert_close(found[[3, 0, 1]], module.per_row_loss(features), rtol=1e-9, atol=1e-12)
    assert torch.isfinite(found).all()


def test_loss_and_gradient_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    ours, bare = prompted().double(), generator().double()
    config = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, num_transformer_submodules=1)
    theirs = peft.get_peft_model(bare.model, config).double()
    weight = theirs.prompt_encoder["default"].embedding.weight
    weight.data.copy_(prompt_rows(ours))
    batch = bare.collate_rows(ROWS)
    bare.model = theirs
    expected, found = bare.per_row_loss(batch), losses(ours, ROWS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), prompt_rows(ours)), torch.autograd.grad(expected.sum(), weight)
    )


def test_a_passage_is_cut_as_without_a_prompt_and_virtual_tokens_come_before_it() -> None:
    bare, module = generator(max_passage_length=6), generator(max_passage_length=6, prompt_tuning=PROMPT)
    virtual = list(module.codec.contract.virtual_ids)
    first = bare.model.get_input_embeddings().num_embeddings
    assert virtual == [first, first + 1, first + 2]
    texts = [passage(2, 20), "bana"]
    assert module.codec.passages(texts) == [virtual + ids for ids in bare.codec.passages(texts)]
    assert module.codec.queries(texts) == bare.codec.queries(texts)
    longest = module.longest_rows(2)["input_ids"]
    assert longest.shape == (2, 9) and longest[:, :3].tolist() == [virtual, virtual]


# -- what it starts from ---------------------------------------------------------------------


def test_it_starts_from_embeddings_of_words_and_of_no_mark() -> None:
    module = generator(prompt_tuning={"num_virtual_tokens": 50})
    words = module.model.get_input_embeddings().weight
    special = set(tokenizer().all_special_ids)
    for row in prompt_rows(module):
        assert (row == words).all(dim=1).nonzero()[0].item() not in special


def test_it_starts_from_a_text_repeated_or_cut() -> None:
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "bana delo fibi"}
    module = generator(prompt_tuning={"num_virtual_tokens": 5, **text})
    ids = tokenizer()("bana delo fibi bana delo", add_special_tokens=False)["input_ids"]
    assert torch.equal(prompt_rows(module), module.model.get_input_embeddings().weight[ids])


def test_it_starts_from_random_numbers() -> None:
    rows = prompt_rows(generator(prompt_tuning={"num_virtual_tokens": 400, "prompt_tuning_init": "RANDOM"}))
    assert float(rows.detach().std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"prompt_tuning": {"tokens": 3}}, r"prompt_tuning\.tokens .*num_virtual_tokens"),
        ({"prompt_tuning": {"num_virtual_tokens": 0}}, "num_virtual_tokens=0"),
        ({"prompt_tuning": {"prompt_tuning_init": "words"}}, "prompt_tuning_init"),
        ({"prompt_tuning": {"prompt_tuning_init": "TEXT"}}, "do not go together"),
        ({"prompt_tuning": {"prompt_tuning_init_text": "bana"}}, "do not go together"),
        ({"prompt_tuning": {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "</s>"}}, "no token"),
        ({"prompt_tuning": PROMPT, "trainable_patterns": ["decoder"]}, r"trainable_patterns and model\.prompt_tuning"),
        ({"prompt_tuning": PROMPT, "lora": {"r": 2}}, r"model\.lora and model\.prompt_tuning both"),
        ({"prompt_tuning": PROMPT, "lora": {"r": 2}, "trainable_patterns": ["decoder"]}, "all select"),
        ({"prompt_tuning": PROMPT, "config": {"model_type": "bart", "d_model": 16, "encoder_layers": 1,
          "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
          "decoder_ffn_dim": 16}}, "this is a bart"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        generator(**settings)


# -- training --------------------------------------------------------------------------------


CLIPPED: dict[str, dict[str, Any]] = {
    "tied": {}, "untied": {"untied": True}, "sum": {"loss_normalisation": "sum"},
    "checkpointing": {"gradient_checkpointing": True},
}  # fmt: skip
PAIRS = [
    (engine, name) for engine in sorted(ENGINES) for name in CLIPPED if (engine, name) != ("vmap", "checkpointing")
]


@pytest.mark.like(3)
@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_clipping_is_that_of_one_row_at_a_time(engine: str, name: str) -> None:
    module = prompted(**CLIPPED[name]).double()
    weight = prompt_rows(module)
    each = [torch.autograd.grad(losses(module, [row])[0], weight)[0] for row in ROWS]
    norms = torch.stack([gradient.norm() for gradient in each])
    bound = 1.001 * float(norms.median())
    lowered = room_for_rounding(bound, [weight])
    expected = sum(gradient * min(1.0, lowered / float(gradient.norm())) for gradient in each)
    clipping = make_engine(engine, module, max_grad_norm=bound)
    batch = module.collate_rows(ROWS)

    def chosen(index: Tensor | slice = slice(None)) -> Tensor:
        return module.per_row_loss(take_rows(batch, index))

    for _ in range(2):  # the engine verifies its first batch, and not a later one
        stats = clipping.add(chosen, torch.arange(3), torch.ones(3, dtype=torch.bool))
        torch.testing.assert_close(stats.norms.double(), norms, rtol=1e-9, atol=1e-12)
        (found,) = clipping.take().values()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert stats.clipped == 1


def trained(folder: Path, *, resume: bool = False, seed: int = 0, extra: Sequence[Any] = ()) -> QueryGenerator:
    """A run of DP-SGD on a prompt, and what it exports in ``folder/run/model``."""
    privacy = dp(folder, eps=8.0, noise_multiplier=3.0)
    module = generator(privacy=privacy, prompt_tuning=PROMPT, seed=seed)
    fit(folder / "run", module, CopyTask("poisson"), steps=4, resume=resume, extra=[PrivacyCard(), *extra])
    return module


def test_a_run_that_was_cut_off_goes_on_from_its_prompt(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, extra=[KillAt(3)])
    file = tmp_path / "run" / "checkpoints" / "last.ckpt"
    saved = torch.load(file, weights_only=True)["state_dict"]
    again = trained(tmp_path, resume=True, seed=7)  # other coins for its first prompt and its weights: both are loaded
    assert torch.equal(again.model.shared.weight, saved["model.shared.weight"])
    assert not torch.equal(prompt_rows(again), saved["model.encoder.embed_tokens.prompt.weight"])
    loaded = QueryGenerator.load_from_checkpoint(file, tokenizer=tokenizer())
    assert torch.equal(prompt_rows(loaded), prompt_rows(again))
    assert loaded.codec.contract == again.codec.contract


# -- the folder ------------------------------------------------------------------------------


@TIED
def test_the_saved_folder_is_the_start_and_the_rows_of_the_prompt_and_nothing_else(
    tmp_path: Path, untied: bool
) -> None:
    module = prompted(untied=untied)
    folder = module.save_model(tmp_path / "generator")
    assert isinstance(module.model.encoder.embed_tokens, PromptedEmbedding), "the export left the module as it was"
    start = plain(untied=untied).save_model(tmp_path / "start")
    assert {p.name for p in folder.iterdir()} == {p.name for p in start.iterdir()}
    made, known = load_file(folder / "model.safetensors"), load_file(start / "model.safetensors")
    assert set(made) == set(known)
    for name, weight in known.items():
        assert torch.equal(made[name][: len(weight)], weight), name
    assert torch.equal(made["shared.weight"][-3:], prompt_rows(module))
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
    bare = GeneratorModel(plain(untied=untied).model.eval(), plain().codec, tmp_path)
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


def test_a_contract_of_other_virtual_tokens_is_refused(tmp_path: Path) -> None:
    folder = prompted().save_model(tmp_path / "generator")
    facts = json.loads((folder / CONTRACT_NAME).read_text())
    for wrong in ([5, 6, 7], [*facts["virtual_ids"], 999]):
        (folder / CONTRACT_NAME).write_text(json.dumps(facts | {"virtual_ids": wrong}))
        with pytest.raises(UnsupportedModelError, match="virtual_ids"):
            QueryGenerator.load_model(folder)


def test_a_tuned_generator_is_no_model_to_train_on(tmp_path: Path) -> None:
    folder = prompted().save_model(tmp_path / "generator")
    with pytest.raises(ConfigurationError, match="its prompt would be left out"):
        generator(pretrained=folder, config=None)


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
