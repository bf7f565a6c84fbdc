"""Which privacy mode each way to run on several processes can honour, and why not the others.

One table is read by everybody: a fit refuses by it, ``task=doctor`` tells it, and ``docs/several_processes.md``
prints it. A strategy that is in no row is refused, because nobody has shown what it does to a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Stands for every privacy mode in `Strategy.refused`.
EVERY_MODE = "*"


@dataclass(frozen=True)
class Strategy:
    """One row: a strategy of Lightning, and what is true under it.

    Args:
        name: As ``trainer.strategy`` names it.
        how: What becomes of sums and noise, as a sentence; empty where every mode is refused.
        refused: Why a mode is refused, by ``mode``, by ``mode/engine``, or by `EVERY_MODE`; what is not named is
            supported.
    """

    name: str
    how: str
    refused: Mapping[str, str] = field(default_factory=dict)

    def reason_against(self, mode: str, engine: str | None = None) -> str | None:
        """Why ``privacy=mode`` is refused, with ``privacy.engine`` where the mode has one; None where it is not."""
        for key in (EVERY_MODE, mode, f"{mode}/{engine}"):
            if key in self.refused:
                return self.refused[key]
        return None


_VALUE_DEPENDENT = "its shapes, or its branches, follow from values, and XLA would compile each of them anew"

_ON_XLA = {
    mode: _VALUE_DEPENDENT
    for mode in ("batch_clip", "logit_dp", "per_example_duplicated", "public_passages",
                 *(f"dp_sgd/{engine}" for engine in ("vmap", "opacus", "loop")))
}  # fmt: skip

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
        "up in float32 or wider and cut up again; each rank adds the noise of its shard, once, and updates its shard.",
    ),
    Strategy(
        "deepspeed",
        "Each rank clips its units; the clipped sums are added up in float32 or wider, each coordinate on the rank "
        "that keeps its master weight; that rank adds its noise, once; DeepSpeed's optimizer takes what is finished.",
    ),
    Strategy(
        "xla",
        "One process drives one XLA device, on batches filled up to one shape; noise is drawn on the host.",
        _ON_XLA,
    ),
    Strategy(
        "xla_processes",
        "As xla, in several processes of one device each that were started from outside; the clipped sums are added up "
        "on the hosts, in float32 or wider, before every rank adds the same noise.",
        _ON_XLA,
    ),
    Strategy(
        "xla_fork",
        "",
        {EVERY_MODE: "a forked process is a copy of one that may hold open ledgers, and what its callbacks learn is "
                     "lost with it"},
    ),
    Strategy(
        "plain_deepspeed",
        "",
        {EVERY_MODE: "its checkpoints are folders of pickles, which a kill can leave half written, and nothing tells "
                     "a module who takes its gradients; lit_dpret.modules.zero_strategy.ZeroStrategy does both"},
    ),
    Strategy(
        "ddp_spawn",
        "",
        {EVERY_MODE: "what the callbacks learn in a spawned process, epsilon above all, is lost with it"},
    ),
    Strategy(
        "ddp_fork",
        "",
        {EVERY_MODE: "a forked process is a copy of one that may hold open ledgers, and what its callbacks learn is "
                     "lost with it"},
    ),
    Strategy("custom", "", {EVERY_MODE: "nobody has shown what it does to a clipped sum"}),
)  # fmt: skip


def strategy(name: str) -> Strategy:
    """The row of that name; the one of ``custom`` where there is none."""
    rows = {row.name: row for row in STRATEGIES}
    return rows.get(name, rows["custom"])


def markdown_table(modes: Sequence[str]) -> str:
    """The table for a reader: a row for each strategy, a column for each privacy mode, and the reasons below it.

    A mode is ``yes``, a number that stands for the reason against it, or ``yes`` with the numbers of the engines that
    are refused.
    """
    reasons: list[str] = []

    def number(reason: str) -> str:
        if reason not in reasons:
            reasons.append(reason)
        return f"[{reasons.index(reason) + 1}]"

    def cell(row: Strategy, mode: str) -> str:
        against = row.reason_against(mode)
        if against is not None:
            return number(against)
        engines = {k.split("/")[1]: number(r) for k, r in row.refused.items() if k.startswith(f"{mode}/")}
        return "; ".join(["yes", *(f"{engine} {mark}" for engine, mark in engines.items())])

    lines = [f"| `trainer.strategy` | {' | '.join(f'`{mode}`' for mode in modes)} |", "| --- " * (len(modes) + 1) + "|"]
    lines += [f"| {row.name} | {' | '.join(cell(row, mode) for mode in modes)} |" for row in STRATEGIES]
    lines += ["", *(f"[{i}] {reason[:1].upper()}{reason[1:]}." for i, reason in enumerate(reasons, 1))]
    how = [f"* **{row.name}**: {row.how}" for row in STRATEGIES if row.how]
    return "\n".join([*lines, "", *how])
