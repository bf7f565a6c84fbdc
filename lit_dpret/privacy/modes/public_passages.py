"""Query-level privacy against a pool of public passages.

If candidates depend only on public data, coins and released weights, the loss is a sum over records, so clipping bounds
each by C. The *text* of passages, and their presence in the collection, must be public; which passage answers which
query stays protected. Passages of the sampled records would couple rows and remove amplification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from torch import nn

from lit_dpret.distributed.strategies import SUMS_ADD_UP, Supported
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.batches import split_batch
from lit_dpret.privacy.modes.base import Candidates, PassageGradient
from lit_dpret.privacy.modes.dp_sgd import DPSGD
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import require_choice, require_whole


@dataclass(kw_only=True, eq=False, repr=False)
class PublicPassages(DPSGD):
    """DP-SGD on the softmax of each query over public passages.

    Guarantees:
        - The sum of clipped gradients moves by at most ``max_grad_norm`` when one record (a query and which passages
          answer it) is emptied, added or removed.
        - The pool of a step is drawn by public coins from (``pool_seed``, step) and from nothing else.
        - Changing the text of one query changes the gradient of that query alone.

    Args:
        passage_gradient: Through which passages a query's gradient flows: ``none`` of them, so that it trains only the
            query side (cheapest); its ``own`` positive; or, exactly, the ``full`` pool, which costs a forward and
            backward pass of the pool for every query.
        pool_size: The number of public passages that a step draws as candidates; null for all of them.
        pool_seed: The seed of those draws; public.
        units_at_once: With ``full``, how many units, each row with a copy of the pool, go through the model together.
    """

    name: ClassVar[str] = "public_passages"
    strategies: ClassVar[Supported] = SUMS_ADD_UP
    candidates: ClassVar[Candidates] = "pool"

    passage_gradient: PassageGradient = "none"
    pool_size: int | None = 256
    pool_seed: int = 0
    units_at_once: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("privacy.passage_gradient", self.passage_gradient, get_args(PassageGradient))
        require_whole("privacy", self, 1, "pool_size", null=True)
        require_whole("privacy", self, 0, "pool_seed")
        require_whole("privacy", self, 1, "units_at_once")

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        # A capability instead of a class, so that a user-defined module may have it.
        if not getattr(module, "takes_public_passages", False):
            raise UnsupportedModelError(
                f"privacy=public_passages trains a query against public passages; {type(module).__name__} has none. "
                "Choose model=dual_encoder or model=frozen_dual_encoder, or privacy=dp_sgd.",
                trap="T11",
            )
        super().attach(module, plan, stream)

    def contribute(self, module: Any, batch: Any) -> None:
        if self.passage_gradient != "full":
            super().contribute(module, batch)
            return
        # Each query gets a copy of the pool for exact gradients through it; a few at a time limit the memory.
        for part in split_batch(batch, units_at_once=self.units_at_once):
            super().contribute(module, part)
