"""Does the secret stand in generated text? Drawn for the canary's passage, and compared after normalisation.

Queries are drawn for the passage without the secret (`prompt_without_secret`): a leak is what the model remembered.
Where the secret stands in the passage, it is also drawn for the passage as it was planted; the secret in those
queries may be a copy of the model's input, and is counted apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lit_dpret.audit.canaries.canary import Canary
from lit_dpret.audit.canaries.scores import prompt_without_secret
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.generator_folder import GeneratorModel
from lit_dpret.synthesis.sampler import Decoding, Encoded, decode, encode, uniforms

_BETWEEN_DIGITS = re.compile(r"(?<=\d)[\s.,\-]+(?=\d)")
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Leak:
    """What was generated for a canary.

    Attributes:
        name: Of the canary.
        draws: Queries drawn.
        found: In how many of them the secret stands.
        copied: The same for the passage with its secret in it; None where that is the same passage.
        sample: The first query drawn, and the first with the secret if there is one.
    """

    name: str
    draws: int
    found: int
    copied: int | None
    sample: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def draw_leaks(
    generator: GeneratorModel,
    canaries: Sequence[Canary],
    *,
    decoding: Decoding,
    draws: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Leak]:
    """Draw queries for each canary's passage and look for its secret.

    Guarantees:
        - The queries of a canary depend on model, passage, seed and its name alone.

    Raises:
        ConfigurationError: ``draws`` is not positive.
    """
    if draws < 1:
        raise ConfigurationError(f"task.draws={draws} must be at least 1.")
    found = []
    for done, canary in enumerate(canaries):
        texts = _draw(generator, prompt_without_secret(canary), canary.name, decoding, draws, seed)
        hits = [text for text in texts if holds(text, canary.secret)]
        copied = None
        if canary.side != "query":
            planted = _draw(generator, canary.passage_with(canary.secret), canary.name, decoding, draws, seed)
            copied = sum(holds(text, canary.secret) for text in planted)
        found.append(Leak(canary.name, draws, len(hits), copied, tuple(dict.fromkeys([texts[0], *hits[:1]]))))
        if progress is not None:
            progress(done + 1, len(canaries))
    return found


def holds(text: str, secret: str) -> bool:
    """Whether a secret stands in a text, case and white space aside, and what stands between digits.

    Example:
        >>> holds("call 48 29-137 755", "4829137755"), holds("call 482913775", "4829137755")
        (True, False)
    """
    return normalised(secret) in normalised(text)


def normalised(text: str) -> str:
    """The form in which texts and secrets are compared."""
    return _SPACES.sub("", _BETWEEN_DIGITS.sub("", text)).casefold()


def _draw(generator: GeneratorModel, passage: str, name: str, decoding: Decoding, draws: int, seed: int) -> list[str]:
    one = encode(generator.model, generator.codec.passages([passage]))
    encoded = Encoded(one.states.expand(draws, -1, -1), one.mask.expand(draws, -1))
    numbers = np.stack([uniforms(seed, f"canary:{name}", draw, decoding.max_new_tokens) for draw in range(draws)])
    sampled = decode(generator.model, encoded, numbers, decoding)
    # With special tokens, which `TextCodec.text` leaves out: new-token canaries consist of them.
    return [str(generator.tokenizer.decode(one.tokens, skip_special_tokens=False)) for one in sampled]
