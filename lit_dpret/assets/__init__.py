"""Data shipped inside the package: a small T5 that this project trained on public text.

The folder is an ordinary Hugging Face model folder: `AutoTokenizer.from_pretrained` and
`AutoModelForSeq2SeqLM.from_pretrained` load it with no hub and no network. Its model card,
`public_t5/README.md`, says what text it saw; `lit_dpret.assets.overlap` lets the holder of a private
set check that none of its queries were among it.
"""

from __future__ import annotations

from pathlib import Path

from lit_dpret.errors import DataError


def public_t5_path() -> Path:
    """Return the folder of the public T5: config, safetensors weights, tokenizer, model card, query hashes.

    Raises:
        DataError: the weights are not in this installation.
    """
    folder = Path(__file__).parent / "public_t5"
    if not (folder / "model.safetensors").is_file():
        raise DataError(
            f"{folder} holds no public T5. Install the whole package, or train one with scripts/train_public_t5.py."
        )
    return folder
