"""No privacy: the upper bound that every private run is measured against."""

from __future__ import annotations

from typing import ClassVar

from lit_dpret.distributed.strategies import Supported, on_xla
from lit_dpret.privacy.modes.base import Guarantee, PlainGradients


class NoPrivacy(PlainGradients):
    """Train on the private data as they are. The card says that nothing is promised.

    Guarantees:
        - Epsilon is infinite in the ledger, and the card carries no number.
        - The update is the mean gradient over the units of the batch.
    """

    name: ClassVar[str] = "none"
    strategies: ClassVar[Supported] = on_xla()
    guarantee: ClassVar[Guarantee] = "none"
