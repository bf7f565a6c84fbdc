"""Strategies for one or several devices, and which of them each privacy mode supports.

A mode declares its strategies (`PrivacyMode.strategies`); a fit, ``task=doctor`` and ``docs/several_processes.md`` read
the same table. A strategy in no row, and one that a mode does not declare, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

#: The declaration of a mode: the strategies that it supports, each with its engines; None for every engine.
Supported = Mapping[str, frozenset[str] | None]

ONE_DEVICE: Supported = {"one_device": None}
#: For a mode whose sum over the units of all ranks is the sum of the ranks' sums.
SUMS_ADD_UP: Supported = {**ONE_DEVICE, "ddp": None, "fsdp": None, "deepspeed": None}


def with_xla(engines: frozenset[str] | None = None) -> Supported:
    """Add XLA devices to `SUMS_ADD_UP`, for engines without value-dependent shapes and branches."""
    return {**SUMS_ADD_UP, "xla": engines, "xla_processes": engines}


class Declares(Protocol):
    """A privacy mode, or its class."""

    name: str
    strategies: Supported


@dataclass(frozen=True)
class Strategy:
    """One row: a Lightning strategy, and its properties."""

    # The strategy's name in refusals and tables. ``fsdp`` is FSDP2, Lightning's ``ModelParallelStrategy``; its
    # ``FSDPStrategy`` is ``custom``.
    name: str
    how: str = ""  # how sums and noise are handled, as a sentence; empty if every mode is refused
    refused: str | None = None  # why every mode is refused; None if a mode may declare it
    # Why a mode that does not declare it is refused.
    undeclared: str = "the mode does not declare that the sums of several ranks add up to its own"

    def reason_against(self, mode: Declares, engine: str | None = None) -> str | None:
        """Return why ``mode`` with ``privacy.engine`` is refused; None if it is supported."""
        if self.refused is not None:
            return self.refused
        engines = mode.strategies.get(self.name, frozenset())
        return None if engines is None or engine in engines else self.undeclared


_ON_XLA = "its shapes, or its branches, depend on values, and XLA would recompile for each of them"
_FORKED = "a forked process is a copy of one that may hold open ledgers, and what its callbacks learn is lost with it"

STRATEGIES: tuple[Strategy, ...] = (
    Strategy("one_device", "One process does everything."),
    Strategy(
        "ddp",
        "Each rank clips its units; the clipped sums are added up in float32 or wider; each rank then adds the same "
        "noise, once, and makes the same update.",
    ),
    Strategy(
        "fsdp",
        "Each rank keeps a shard of every parameter and gathers the rest to clip its units; the clipped sums are added "
        "up in float32 or wider and sharded again; each rank adds the noise of its shard, once, and updates its shard.",
    ),
    Strategy(
        "deepspeed",
        "Each rank clips its units; the clipped sums are added up in float32 or wider, each coordinate on the rank "
        "that keeps its master weight; that rank adds its noise, once; DeepSpeed's optimizer takes the finished "
        "gradient.",
    ),
    Strategy(
        "xla",
        "One process drives one XLA device, on batches padded to one shape; noise is drawn on the host.",
        undeclared=_ON_XLA,
    ),
    Strategy(
        "xla_processes",
        "As xla, in several processes of one device each that were started from outside; the clipped sums are added up "
        "on the hosts, in float32 or wider, before every rank adds the same noise.",
        undeclared=_ON_XLA,
    ),
    Strategy("xla_fork", refused=_FORKED),
    Strategy(
        "plain_deepspeed",
        refused="its checkpoints are folders of pickles, which a kill can leave half written, and it gives "
        "a module no way to hand over its gradients; use lit_dpret.distributed.zero.ZeroStrategy, which has neither "
        "problem",
    ),
    Strategy("ddp_spawn", refused="what the callbacks learn in a spawned process, epsilon above all, is lost with it"),
    Strategy("ddp_fork", refused=_FORKED),
    Strategy("custom", refused="its effect on a clipped sum is unknown"),
)


def strategy(name: str) -> Strategy:
    """Return the row with that name, or that of ``custom``."""
    rows = {row.name: row for row in STRATEGIES}
    return rows.get(name, rows["custom"])


def markdown_table(modes: Iterable[Declares], engines: Iterable[str]) -> str:
    """Return the table as Markdown: a row per strategy, a column per mode, and the numbered reasons below."""
    modes, engines, reasons = list(modes), list(engines), dict[str, int]()

    def number(reason: str) -> str:
        return f"[{reasons.setdefault(reason, len(reasons) + 1)}]"

    def cell(row: Strategy, mode: Declares) -> str:
        against = {engine: row.reason_against(mode, engine) for engine in engines}
        if None not in against.values():
            return number(str(next(iter(against.values()))))
        return "; ".join(["yes", *(f"{engine} {number(reason)}" for engine, reason in against.items() if reason)])

    lines = [f"| `trainer.strategy` | {' | '.join(f'`{m.name}`' for m in modes)} |", "| --- " * (len(modes) + 1) + "|"]
    lines += [f"| {row.name} | {' | '.join(cell(row, mode) for mode in modes)} |" for row in STRATEGIES]
    lines += ["", *(f"[{i}] {reason[:1].upper()}{reason[1:]}." for reason, i in reasons.items())]
    how = [f"* **{row.name}**: {row.how}" for row in STRATEGIES if row.how]
    return "\n".join([*lines, "", *how])
