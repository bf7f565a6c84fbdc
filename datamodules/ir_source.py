"""The library ir-datasets, where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

from lit_dpret.errors import ConfigurationError


def ir_datasets_library() -> Any:
    """The module ``ir_datasets``.

    Raises:
        ConfigurationError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module("ir_datasets")
    except ImportError as error:
        raise ConfigurationError(
            'datamodule.download=true needs ir-datasets: pip install "lit-dpret[beir]". Or name the folder of the data '
            "that you have."
        ) from error
