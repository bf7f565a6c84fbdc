"""One row of a study: a system of the paper's table, and in what its settings or its silos are others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.systems import System


@dataclass(frozen=True, kw_only=True)
class SiloChange:
    """How the silos of a point are made of those of the federation.

    Args:
        share: Of each silo's train queries, drawn by the run's seed; the shares of one seed lie in each other.
        skew: The last silo keeps ``1 / skew`` of its train queries, those between lie between. Which silo is the last
            is drawn by the run's seed, so that the size of a silo is not its domain.
        parts: Silos that each one is divided into: their queries are dealt, and each keeps the whole collection.
    """

    share: float = 1.0
    skew: float = 1.0
    parts: int = 1

    def drawn(self, seed: int) -> dict[str, float]:
        """What the silos of one seed depend on; the same where nothing is drawn."""
        facts: dict[str, float] = {"share": self.share, "skew": self.skew, "parts": self.parts}
        return facts | ({"seed": seed} if self.share < 1 or self.skew > 1 else {})


AS_THEY_ARE = SiloChange()


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is run once for every seed.

    Args:
        line: What the point has in common with others: its line or colour in the plot.
        label: In what it differs from them.
        system: Of the paper's Table 1.
        at: Where it stands on the plot's axis; null where the axis is a measured one.
        stage1: Settings of stage 1 that are others than the federation's.
        stage2: The same of stage 2.
        silos: The same of the silos.
    """

    line: str
    label: str
    system: System
    at: float | None = None
    stage1: Mapping[str, Any] = field(default_factory=dict)
    stage2: Mapping[str, Any] = field(default_factory=dict)
    silos: SiloChange = AS_THEY_ARE

    @property
    def name(self) -> str:
        """Unique within a study."""
        return f"{self.line}: {self.label}"

    def settings(self, of: PddAs2) -> PddAs2:
        """The settings of this point, checked.

        Raises:
            ConfigurationError: They are refused.
        """
        kind = {"customised": "dynamic", "fed_negative": "fed"}.get(self.system)
        stage2 = {**self.stage2, **({} if kind is None else {"negatives": kind})}
        return replace(of, stage1=replace(of.stage1, **self.stage1), stage2=replace(of.stage2, **stage2)).check()
