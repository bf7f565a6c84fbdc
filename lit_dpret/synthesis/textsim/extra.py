"""The packages of the extra ``quality``, imported where they are needed and not before."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from lit_dpret.errors import ConfigurationError

_NEEDS = {"sacrebleu": ("BLEU", "sacrebleu"), "sklearn": ("MAUVE", "scikit-learn")}


def need(package: Literal["sacrebleu", "sklearn"]) -> Any:
    """The imported package.

    Raises:
        ConfigurationError: It is not installed; the message says how to.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        measure, name = _NEEDS[package]
        raise ConfigurationError(
            f'{measure} is computed with {name}, which is not installed. Run: pip install "lit-dpret[quality]".'
        ) from error
