"""Choose the trained part of a model: parameters by name; at most one choice, adapters and virtual tokens included."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lit_dpret.errors import ConfigurationError, UnsupportedModelError


def refuse_two_choices(choices: Mapping[str, Any]) -> None:
    """Refuse more than one setting of ``model`` that selects the trained parameters."""
    given = [f"model.{name}" for name, value in choices.items() if value is not None]
    if len(given) > 1:
        raise ConfigurationError(
            f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} select the trained parameters. Set all but "
            "one of them to null."
        )


def freeze_all_but(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train only the parameters whose name matches a pattern."""
    parameters = dict(model.named_parameters())
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in parameters if re.search(pattern, name)}
        except re.error as error:
            raise ConfigurationError(
                f"model.trainable_patterns: {pattern!r} is not a regular expression: {error}."
            ) from error
        if not found:
            raise ConfigurationError(
                f"model.trainable_patterns: {pattern!r} matches no parameter. Tied weights go by their first name; "
                f"the names begin with {', '.join(sorted({name.split('.')[0] for name in parameters}))}."
            )
        chosen |= found
    if not chosen:
        raise UnsupportedModelError("model.trainable_patterns is empty: nothing would be learnt.")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)
