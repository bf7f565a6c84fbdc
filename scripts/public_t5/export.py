"""The model folder: half-precision safetensors that load as float32, config, tokenizer, sentencepiece model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration


def export(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, vocabulary: Path, folder: Path
) -> None:
    """Write the model into `folder`, file by file by rename, so that a reader never meets half a file.

    The embedding, which the head shares, is stored once. The config asks for float32, so loading widens the
    weights; rounding them to float16 once is all that is lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as name:
        partial = Path(name)
        weights = {"shared.weight": model.shared.weight}
        weights |= {n: p for n, p in model.named_parameters() if p is not model.shared.weight}
        save_file(
            {n: p.detach().to(torch.float16).contiguous() for n, p in weights.items()},
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = model.config.to_dict() | {"architectures": ["T5ForConditionalGeneration"], "dtype": "float32"}
        config.pop("_name_or_path", None)
        config.pop("transformers_version", None)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        generation = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 32}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(partial)
        shutil.copyfile(vocabulary, partial / "spiece.model")
        for path in partial.iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)
