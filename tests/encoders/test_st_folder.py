from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TEXTS, tiny_bert, tiny_t5, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.st_folder import GENERATOR_CONTRACT, read_folder, save_sentence_transformer
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError

Model = tuple[TextEncoder, TextEncoder | None, nn.Linear | None]
"""Query encoder, passage encoder where it is another, query head."""
SAME: dict[str, Any] = {"query_max_length": 9, "passage_max_length": 9}
PREFIXES: dict[str, Any] = {"query_prefix": "query: ", "passage_prefix": "passage: "}


def tiny_encoder(family: str = "bert", seed: int = 0, **contract: Any) -> TextEncoder:
    backbone = tiny_bert(seed) if family == "bert" else tiny_t5(seed)
    return TextEncoder(backbone, tiny_tokenizer(eos_only=family == "t5"), Contract(**{**SAME, **contract})).eval()


def two_poolings(**lengths: int) -> Model:
    """One set of weights, read off in two ways."""
    query = tiny_encoder()
    passage = TextEncoder(query.backbone, query.tokenizer, Contract(pooling="cls", **{**SAME, **lengths})).eval()
    return query, passage, None


def head(dim: int = 16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(16, dim, bias=bias)


MODELS: dict[str, Callable[[], Model]] = {
    "flat": lambda: (tiny_encoder(), None, None),
    "flat t5": lambda: (tiny_encoder("t5"), None, None),
    "prefixes": lambda: (tiny_encoder(**PREFIXES), None, None),
    "t5 with prefixes, not normalised": lambda: (tiny_encoder("t5", normalise=False, **PREFIXES), None, None),
    "cls": lambda: (tiny_encoder(pooling="cls"), None, None),
    "max, lower case": lambda: (tiny_encoder(pooling="max", lower_case=True, **PREFIXES), None, None),
    "projection on both sides": lambda: (tiny_encoder().changed(projection=head(7)), None, None),
    "query head": lambda: (tiny_encoder(**PREFIXES), None, head()),
    "query head without bias, t5": lambda: (tiny_encoder("t5", normalise=False), None, head(bias=False)),
    "two lengths": lambda: (tiny_encoder(passage_max_length=14), None, None),
    "two lengths and projection": lambda: (
        tiny_encoder(passage_max_length=14).changed(projection=head(7)),
        None,
        None,
    ),
    "two lengths and a query head": lambda: (tiny_encoder("t5", passage_max_length=14, lower_case=True), None, head()),
    "two towers": lambda: (tiny_encoder(**PREFIXES), tiny_encoder(seed=1, **PREFIXES), None),
    "two poolings": lambda: two_poolings(),
    "two poolings and lengths": lambda: two_poolings(passage_max_length=14),
    "two families": lambda: (tiny_encoder(query_max_length=5), tiny_encoder("t5", passage_max_length=60), None),
}
ALL = pytest.mark.parametrize("name", list(MODELS))


def expected(model: Model) -> tuple[Tensor, Tensor]:
    """Our embeddings of all texts as queries and as passages, one batch each."""
    query, passage, linear = model
    with_head = query if linear is None else query.changed(projection=linear)
    return with_head.encode(TEXTS, "query"), (passage or query).encode(TEXTS, "passage")


def save(name: str, folder: Path) -> Path:
    return write(MODELS[name](), folder)


def write(model: Model, folder: Path) -> Path:
    query, passage, linear = model
    save_sentence_transformer(folder, query if linear is None else query.changed(projection=linear), passage or query)
    return folder


@ALL
def test_sentence_transformers_computes_our_embeddings_bit_for_bit(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    st = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is the other implementation; install it to compare"
    )
    ours = MODELS[name]()
    model = st.SentenceTransformer(str(write(ours, tmp_path)), device="cpu")
    queries, passages = expected(ours)
    settings = {"batch_size": len(TEXTS), "convert_to_tensor": True}
    assert torch.equal(model.encode_query(TEXTS, **settings), queries)
    assert torch.equal(model.encode_document(TEXTS, **settings), passages)
    if passages.shape == queries.shape:
        assert not torch.equal(queries, passages) or name in ("flat", "flat t5", "cls", "projection on both sides")
    assert [str(w.message) for w in recwarn if "sentence_transformers" in str(w.filename)] == []


@ALL
def test_what_is_saved_is_loaded_again(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    towers = load_towers(write(model, tmp_path))
    queries, passages = expected(model)
    assert torch.equal(towers.query_encoder.eval().encode(TEXTS, "query"), queries)
    assert torch.equal(towers.passage_encoder.eval().encode(TEXTS, "passage"), passages)
    query, passage, linear = model
    one = passage is None and linear is None
    assert (towers.query_encoder is towers.passage_encoder) == one
    assert (towers.query_encoder.backbone is towers.passage_encoder.backbone) == (
        passage is None or passage.backbone is query.backbone
    )
    if one:
        loaded = TextEncoder.from_pretrained(tmp_path)
        assert loaded.contract == query.contract
        assert loaded.fingerprint() == query.fingerprint()
    else:
        with pytest.raises(UnsupportedModelError, match=r"model\.encoder"):
            TextEncoder.from_pretrained(tmp_path)


@pytest.mark.like(3)
@ALL
def test_a_backbone_of_both_sides_is_written_once_and_stays_one_in_sentence_transformers(
    name: str, tmp_path: Path
) -> None:
    st = pytest.importorskip("sentence_transformers", reason="fine-tunes what was exported")
    query, passage, linear = model = MODELS[name]()
    write(model, tmp_path / "ours")
    backbones = {id(side.backbone) for side in (query, passage or query)}
    theirs = st.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    held = [part for part in theirs.modules() if type(part).__name__ == "Transformer" and hasattr(part, "tokenizer")]
    assert len(held) == len(backbones)
    if passage is None and linear is None:  # nothing but lengths and prefixes tells the sides apart
        assert AutoModel.from_pretrained(tmp_path / "ours").config.hidden_size == 16
        assert max(AutoTokenizer.from_pretrained(tmp_path / "ours")(TEXTS, truncation=True)["input_ids"], key=len)
    with torch.no_grad():
        for part in held:
            for weight in part.parameters():
                weight += 0.01
    theirs.save(str(tmp_path / "tuned"))
    towers = load_towers(tmp_path / "tuned")
    assert len({id(side.backbone) for side in towers}) == len(backbones)
    tuned = [encode(TEXTS, batch_size=len(TEXTS)) for encode in (theirs.encode_query, theirs.encode_document)]
    for side, found, encoder in zip(("query", "passage"), tuned, towers, strict=True):
        assert torch.equal(encoder.eval().encode(TEXTS, side), torch.from_numpy(found))


@pytest.mark.parametrize("name", ["query head", "two lengths and a query head", "two towers", "two poolings"])
def test_a_text_without_a_side_is_refused_where_the_sides_are_computed_differently(name: str, tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers", reason="it is what refuses")
    model = st.SentenceTransformer(str(save(name, tmp_path)), device="cpu")
    with pytest.raises(ValueError, match="task"):
        model.encode(TEXTS)
    assert model.encode(TEXTS, task="query").shape == model.encode_query(TEXTS).shape


def test_the_pooler_that_embeddings_do_not_use_is_saved_with_the_rest(tmp_path: Path) -> None:
    pooler = tiny_bert().pooler.dense.weight
    for name in ("flat", "two lengths", "two poolings and lengths"):
        for file in save(name, tmp_path / name).rglob("model.safetensors"):
            assert torch.equal(load_file(file)["pooler.dense.weight"], pooler), file


def test_the_similarity_is_noted_for_the_reader(tmp_path: Path) -> None:
    def noted(folder: Path) -> str:
        return str(json.loads((folder / "config_sentence_transformers.json").read_text())["similarity_fn_name"])

    assert noted(save("flat", tmp_path / "a")) == "cosine"
    assert noted(save("t5 with prefixes, not normalised", tmp_path / "b")) == "dot"
    save_sentence_transformer(tmp_path / "c", tiny_encoder(), similarity="dot")
    assert noted(tmp_path / "c") == "dot"


def test_sides_that_make_no_folder_are_refused(tmp_path: Path) -> None:
    query = tiny_encoder()
    lower = query.changed(contract=Contract(lower_case=True, **SAME))
    cases = [
        (query.changed(projection=head(7)), query, "7 dimensions"),
        (query, tiny_encoder(normalise=False), "normalise=False"),
        (query, lower, "lower_case"),
    ]
    for query_side, passage_side, named in cases:
        with pytest.raises(ConfigurationError, match=named):
            save_sentence_transformer(tmp_path / "a", query_side, passage_side)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        save_sentence_transformer(tmp_path / "file" / "model", query)


def test_prompts_and_limits_of_other_peoples_folders_are_read(tmp_path: Path) -> None:
    save("flat", tmp_path)
    config = tmp_path / "config_sentence_transformers.json"
    config.write_text(json.dumps({"prompts": {"passage": "p: ", "web": "w: "}, "default_prompt_name": "web"}))
    assert (read_folder(tmp_path).query_prefix, read_folder(tmp_path).passage_prefix) == ("w: ", "p: ")
    config.unlink()
    (tmp_path / "sentence_bert_config.json").unlink()
    assert TextEncoder.from_pretrained(tmp_path).contract == Contract(**SAME)  # the tokenizer says it too
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"embedding_dimension": 16, "pooling_mode": "cls"}))
    assert TextEncoder.from_pretrained(tmp_path).contract.pooling == "cls"


LAYER_NORM = {"idx": 2, "name": "2", "path": "2_LayerNorm", "type": "x.LayerNorm"}


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, r"cls \+ mean"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "lasttoken"),
        ("1_Pooling/config.json", {"include_prompt": False}, "prompt"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh"),
        ("2_Dense/config.json", {"use_residual": True}, "2_Dense"),
        ("modules.json", LAYER_NORM, "Transformer, Pooling, LayerNorm"),
        ("modules.json", None, r"modules\.json"),
        ("2_Dense/model.safetensors", None, "2_Dense"),
    ],
)
def test_a_module_that_we_would_not_reproduce_and_a_broken_file_are_refused_by_name(
    tmp_path: Path, file: str, changes: dict[str, Any] | None, named: str
) -> None:
    place = save("projection on both sides", tmp_path) / file
    if file.endswith(".safetensors"):
        place.unlink()
    elif changes is None:
        place.write_text("[")
    elif changes is LAYER_NORM:
        place.write_text(json.dumps([*json.loads(place.read_text())[:2], LAYER_NORM]))
    else:
        place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))
    with pytest.raises(UnsupportedModelError, match=named):
        load_towers(tmp_path)


def test_a_generator_is_no_encoder(tmp_path: Path) -> None:
    """Its T5 would load, and rank at random."""
    tiny_t5().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_towers(tmp_path).query_encoder.dim
    (tmp_path / GENERATOR_CONTRACT).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"encoder="):
        load_towers(tmp_path)
