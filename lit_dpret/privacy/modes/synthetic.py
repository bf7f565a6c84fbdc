"""Training on DP synthetic data: post-processing, and the claim of the data's own card."""

from __future__ import annotations

from typing import ClassVar

from lit_dpret.distributed.strategies import Supported, on_xla
from lit_dpret.privacy.modes.base import Guarantee, PlainGradients


class SyntheticData(PlainGradients):
    """Train without noise on data that a private generator let out.

    Guarantees:
        - The run's card repeats the claim of the data's card and names it by SHA-256; it never
          claims more than the data did.
        - A data set without a card is refused before training.
    """

    name: ClassVar[str] = "synthetic"
    strategies: ClassVar[Supported] = on_xla()
    guarantee: ClassVar[Guarantee] = "inherited"
