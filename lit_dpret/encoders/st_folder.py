"""Read and write model folders in the sentence-transformers layout.

Prefixes, lengths, pooling and normalisation are part of a model. The layout records them all, so that a plain
``SentenceTransformer(folder)`` computes our embeddings. Class names are the old ones, which every version of that
library reads. A folder whose single transformer truncates queries and passages at different lengths needs version 6.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lit_dpret.encoders.backbones import load_linear, load_transformer, position_limit, resolve_folder, take_pooler
from lit_dpret.encoders.contract import Contract, Side
from lit_dpret.encoders.text_encoder import TextEncoder
from lit_dpret.errors import ConfigurationError, StorageError, UnsupportedModelError, unwritten
from lit_dpret.files import meant, settle_modes

_TYPES = "sentence_transformers.models"
_POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_LENGTHS: Mapping[Side, str] = {"query": "query_length", "passage": "document_length"}


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A folder's description of one route from text to embedding."""

    transformer: Path
    pooling: str = "mean"
    max_length: int | None = None
    lower_case: bool = False
    dense: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder's description of both routes."""

    query: Tower
    passage: Tower
    normalise: bool = True
    query_prefix: str = ""
    passage_prefix: str = ""


def read_folder(folder: Path) -> ModelFolder:
    """Read the description in a transformers or sentence-transformers folder."""
    if not (folder / "modules.json").is_file():
        if not (folder / "config.json").is_file():
            raise UnsupportedModelError(
                f"encoder={str(folder)!r} holds neither modules.json nor config.json, so it is neither a "
                f"sentence-transformers nor a transformers model.{meant(folder, 'modules.json', 'config.json')}"
            )
        return ModelFolder(query=Tower(transformer=folder), passage=Tower(transformer=folder))
    modules = [
        (str(module["type"]).rsplit(".", 1)[-1], folder / str(module["path"]))
        for module in sorted(_json(folder / "modules.json"), key=lambda module: int(module["idx"]))
    ]
    kinds = [kind for kind, _ in modules]
    normalise = kinds[-1] == "Normalize"
    inner = modules[:-1] if normalise else modules
    if [kind for kind, _ in inner] in (["Router"], ["Asym"]):
        query, passage = _read_router(inner[0][1])
    else:
        query, passage = _read_tower(folder, inner, "query"), _read_tower(folder, inner, "passage")
    prompts, default = _read_prompts(folder)
    query_prefix = prompts.get("query", default)
    passage_prefix = next((prompts[key] for key in ("document", "passage", "corpus") if key in prompts), default)
    return ModelFolder(
        query=query,
        passage=passage,
        normalise=normalise,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )


def _read_prompts(folder: Path) -> tuple[dict[str, str], str]:
    path = folder / "config_sentence_transformers.json"
    config = _json(path) if path.is_file() else {}
    prompts = {key: text for key, text in (config.get("prompts") or {}).items() if text is not None}
    return prompts, prompts.get(config.get("default_prompt_name") or "", "")


def _read_router(folder: Path) -> tuple[Tower, Tower]:
    path = next((folder / name for name in ("router_config.json", "config.json") if (folder / name).is_file()), None)
    if path is None:
        raise UnsupportedModelError(f"{folder}: a Router without router_config.json.")
    config = _json(path)
    routes: Mapping[str, list[str]] = config["structure"]
    if set(routes) != {"query", "document"}:
        raise UnsupportedModelError(f"{path}: routes {sorted(routes)} are not query and document.")
    query, passage = (
        [(str(config["types"][name]).rsplit(".", 1)[-1], folder / name) for name in routes[route]]
        for route in ("query", "document")
    )
    return _read_tower(folder, query, "query"), _read_tower(folder, passage, "passage")


def _read_tower(folder: Path, modules: list[tuple[str, Path]], side: Side) -> Tower:
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Dense"]):
        raise UnsupportedModelError(
            f"encoder={str(folder)!r} consists of {', '.join(kinds) or 'nothing'}; supported are Transformer, Pooling, "
            "an optional linear Dense, and an optional Normalize."
        )
    transformer = modules[0][1]
    said: Mapping[str, Any] = next((_json(path) for path in sorted(transformer.glob("sentence_*_config.json"))), {})
    dense = modules[2][1] if len(modules) == 3 else None
    if dense is not None:
        config = _json(dense / "config.json")
        linear = str(config.get("activation_function", "")).endswith(".Identity") and not config.get("use_residual")
        if not linear:
            raise UnsupportedModelError(
                f"{dense}: a Dense with activation {config.get('activation_function')!r} or a residual is not linear; "
                "only Identity without use_residual is supported."
            )
    return Tower(
        transformer=transformer,
        pooling=_read_pooling(modules[1][1]),
        max_length=said.get(_LENGTHS[side]) or said.get("max_seq_length"),
        lower_case=bool(said.get("do_lower_case", False)),
        dense=dense,
    )


def _read_pooling(folder: Path) -> str:
    config = _json(folder / "config.json")
    if not config.get("include_prompt", True):
        raise UnsupportedModelError(f"{folder}: pooling without the prompt (include_prompt: false) is not supported.")
    modes = config.get("pooling_mode") or [mode for mode, key in _POOLING_KEYS.items() if config.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in ("mean", "cls", "max"):
        raise UnsupportedModelError(f"{folder}: pooling {' + '.join(modes)} is not one of mean, cls and max.")
    return str(modes[0])


def save_sentence_transformer(
    folder: str | Path,
    query_encoder: TextEncoder,
    passage_encoder: TextEncoder | None = None,
    *,
    similarity: str | None = None,
) -> None:
    """Write a dual encoder as a folder that ``SentenceTransformer(folder)`` loads.

    Guarantees:
        - ``encode_query`` and ``encode_document`` of the model that the library loads are bit-equal to ours for the
          same batch (float32), prefixes and truncation included.
        - `TextEncoder.from_pretrained` or `load_towers` gives back the same model.

    One tower for both sides becomes a flat folder, which transformers can load too. If the sides are computed
    differently, the folder is a Router with two routes and no default route: a default would silently treat a text
    without a side as a passage. A backbone that both sides share is written once, with the maximal length of each side.
    ``similarity`` is a note for readers; by default cosine if embeddings are normalised, else dot.
    """
    passage_encoder = query_encoder if passage_encoder is None else passage_encoder
    query, passage = query_encoder.contract, passage_encoder.contract
    if query_encoder.dim != passage_encoder.dim or query.normalise != passage.normalise:
        raise ConfigurationError(
            f"The query side ends in {query_encoder.dim} dimensions (normalise={query.normalise}) and the passage side "
            f"in {passage_encoder.dim} (normalise={passage.normalise}); both must be the same."
        )
    one_backbone = query_encoder.backbone is passage_encoder.backbone
    if one_backbone and query.lower_case != passage.lower_case:
        raise ConfigurationError(
            f"The sides share one backbone, but lower_case is {query.lower_case} for queries and {passage.lower_case} "
            "for passages; a folder stores it once per backbone. Set the same for both sides, or use separate towers."
        )
    flat = one_backbone and query.pooling == passage.pooling and query_encoder.projection is passage_encoder.projection
    sides: dict[Side, TextEncoder] = {"query": query_encoder, "passage": passage_encoder}
    root = Path(folder)
    normalise = ["Normalize"] if query.normalise else []
    try:
        root.mkdir(parents=True, exist_ok=True)
        if flat:
            _write_transformer(root, sides)
            kinds = _write_head(root, ["1_Pooling", "2_Dense"], query_encoder)
        else:
            kinds = ["Router"]
            _write_router(root, sides, shared=one_backbone)
        modules = [
            {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{_TYPES}.{kind}"}
            for i, kind in enumerate(kinds + normalise)
        ]
        for module in modules[1:]:
            (root / str(module["path"])).mkdir(exist_ok=True)
        if normalise:
            _write_json(root / str(modules[-1]["path"]) / "config.json", {})
        _write_json(
            root / "config_sentence_transformers.json",
            {
                "prompts": {"query": query.query_prefix, "document": passage.passage_prefix},
                "default_prompt_name": None,
                "similarity_fn_name": similarity or ("cosine" if query.normalise else "dot"),
            },
        )
        _write_json(root / "modules.json", modules)
        settle_modes(*root.rglob("*.safetensors"))
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{root} cannot be written: {unwritten(error)}.") from error


def _write_router(root: Path, sides: Mapping[Side, TextEncoder], *, shared: bool) -> None:
    structure: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    routes: dict[Side, str] = {"query": "query", "passage": "document"}
    for side, encoder in sides.items():
        route, owner = routes[side], "query" if shared else routes[side]
        if owner == route:
            _write_transformer(root / f"{route}_0_Transformer", sides if shared else {side: encoder})
        names = [f"{owner}_0_Transformer", f"{route}_1_Pooling", f"{route}_2_Dense"]
        kinds = _write_head(root, names[1:], encoder)
        structure[route] = names[: len(kinds)]
        types.update({name: f"{_TYPES}.{kind}" for name, kind in zip(names, kinds, strict=False)})
    parameters = {"default_route": None, "allow_empty_key": False}
    _write_json(root / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})


def _write_transformer(folder: Path, sides: Mapping[Side, TextEncoder]) -> None:
    """Write weights, including unused ones, and a tokenizer with the maximal lengths of these sides.

    If two encoders share a backbone, the first to be built holds the unused weights. If the lengths differ, a reader
    that does not name a side gets the longer one.
    """
    encoder = next(iter(sides.values()))
    unused = next((side.unused_weights for side in sides.values() if side.unused_weights), {})
    encoder.backbone.save_pretrained(folder, state_dict={**encoder.backbone.state_dict(), **unused})
    lengths = {_LENGTHS[side]: each.contract.max_length(side) for side, each in sides.items()}
    longest = max(lengths.values())
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = longest
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    said = {"max_seq_length": longest, "do_lower_case": encoder.contract.lower_case}
    _write_json(folder / "sentence_bert_config.json", said | (lengths if len(set(lengths.values())) > 1 else {}))


def _write_head(root: Path, names: list[str], encoder: TextEncoder) -> list[str]:
    """Write the modules after the transformer into the folders ``names``; return the kinds of the route's modules."""
    pooling, dense = (root / name for name in names)
    width = encoder.backbone.config.hidden_size
    modes = {key: mode == encoder.contract.pooling for mode, key in _POOLING_KEYS.items()}
    _write_json(pooling / "config.json", {"word_embedding_dimension": width, **modes, "include_prompt": True})
    if encoder.projection is None:
        return ["Transformer", "Pooling"]
    linear = encoder.projection
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None}
    _write_json(dense / "config.json", {**sizes, "activation_function": "torch.nn.modules.linear.Identity"})
    save_file(
        {f"linear.{name}": value.detach().contiguous() for name, value in linear.state_dict().items()},
        dense / "model.safetensors",
    )
    return ["Transformer", "Pooling", "Dense"]


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(
            f"{path} is missing or not JSON ({reason}), so the model cannot be read."
        ) from error


#: The file that marks a model folder as a generator's; `QueryGenerator` writes it.
GENERATOR_CONTRACT = "lit_dpret_generator.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Towers(NamedTuple):
    """The two sides of a dual encoder; the same object twice for a shared encoder."""

    query_encoder: TextEncoder
    passage_encoder: TextEncoder


def load_towers(encoder: str | Path, *, dtype: str = "float32", revision: str | None = None) -> Towers:
    """Load a dual encoder from any folder that `save_sentence_transformer` can write.

    The arguments are those of `TextEncoder.from_pretrained`.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}.")
    folder = resolve_folder(encoder, revision)
    if (folder / GENERATOR_CONTRACT).is_file():
        raise UnsupportedModelError(
            f"encoder={encoder} is the model of a query generator (it holds {GENERATOR_CONTRACT}), whose embeddings "
            "are meaningless. Name the model of a dual encoder."
        )
    found = read_folder(folder)
    one_backbone = found.query.transformer == found.passage.transformer
    backbone, tokenizer = load_transformer(found.query.transformer, _DTYPES[dtype])
    pooler = take_pooler(backbone)

    def tower(said: Tower) -> TextEncoder:
        sides = (found.query, found.passage) if one_backbone else (said, said)
        query_length, passage_length = (_length(side, backbone, tokenizer) for side in sides)
        contract = Contract(
            pooling=said.pooling,
            normalise=found.normalise,
            query_max_length=query_length,
            passage_max_length=passage_length,
            query_prefix=found.query_prefix,
            passage_prefix=found.passage_prefix,
            lower_case=said.lower_case,
        )
        projection = None if said.dense is None else load_linear(said.dense, _DTYPES[dtype])
        loaded = TextEncoder(backbone, tokenizer, contract, projection)
        loaded.unused_weights = pooler
        return loaded

    query_encoder = tower(found.query)
    if replace(found.query, max_length=found.passage.max_length) == found.passage:  # equal but for the length
        return Towers(query_encoder, query_encoder)
    if not one_backbone:
        backbone, tokenizer = load_transformer(found.passage.transformer, _DTYPES[dtype])
        pooler = take_pooler(backbone)
    return Towers(query_encoder, tower(found.passage))


def cut(towers: Towers, *, query_max_length: int | None = None, passage_max_length: int | None = None) -> Towers:
    """Return the same encoders with shared weights and other maximal lengths; None keeps a length."""
    chosen = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
    lengths: dict[str, Any] = {name: length for name, length in chosen.items() if length is not None}

    if not lengths:
        return towers
    sides = {id(each): each.changed(contract=replace(each.contract, **lengths)) for each in towers}
    return Towers(*(sides[id(each)] for each in towers))


def _length(tower: Tower, backbone: Any, tokenizer: Any) -> int:
    """Return where this tower truncates texts: as its folder says, else as tokenizer or model allow, else 512."""
    own = tokenizer.model_max_length if tokenizer.model_max_length < 1_000_000 else None
    limit = position_limit(backbone)
    length = tower.max_length or own or limit or 512
    return length if limit is None else min(length, limit)
