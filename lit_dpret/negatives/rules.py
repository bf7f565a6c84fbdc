"""Which sources a privacy mode can take, and why not where it cannot.

The rule is short. Where each row's gradient is clipped, no source may couple rows. Where a proof holds for
the table of similarities of a batch and for nothing more, nothing may be added to it. Where the gradient of
a whole batch is clipped, any function of the batch will do. And no private mode takes a source that
remembers private rows from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives.base import NegativeSource
from lit_dpret.privacy.modes import PrivacyMode


def refusal(source: NegativeSource, mode: PrivacyMode | type[PrivacyMode]) -> str | None:
    """Why a mode cannot take a source; None where it can.

    Args:
        source: Of negatives.
        mode: The privacy mode, or its class.
    """
    if mode.guarantee != "dp":
        return None
    if source.keeps_private_state:
        return (
            "it keeps embeddings of rows that were drawn in earlier steps, so that a step would no longer be a "
            "function of released weights and of the rows drawn in it"
        )
    if source.gather:
        return "it gathers rows from other processes, and the batch that the mode bounds is that of one process"
    if source.name == "gold" and mode.unit == "pair":
        return "a judgement that a passage does not answer is part of no pair, so nothing that is claimed covers it"
    if not source.is_declared:
        return "nobody declared that each line of its file was made of its own query and of public data alone"
    if mode.candidates in ("rows", "pool"):
        if source.couples_rows:
            return "it makes the loss of a row depend on other rows, so that clipping each row bounds nothing"
        return None
    if mode.clips_whole_batch or source.name == "in_batch":
        return None
    return "the sensitivity of that mode is proved for the passages of the batch as the only candidates"


def check_sources(sources: Sequence[NegativeSource], mode: PrivacyMode) -> None:
    """Refuse what a mode cannot take, in one line.

    Raises:
        ConfigurationError: A source cannot go with the mode, there is none, or one occurs twice.
    """
    names = [source.name for source in sources]
    if not names:
        raise ConfigurationError(
            "model.negatives is empty: a query needs something to be told from. Leave it null for what the privacy "
            "mode takes by itself, or name sources."
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"model.negatives names {twice} twice; raise its per_query instead.")
    for source in sources:
        reason = refusal(source, mode)
        if reason is not None:
            couples = " with shared_in_batch=true" if source.shared_in_batch else ""
            raise ConfigurationError(
                f"model.negatives={source.name}{couples} cannot go with privacy={mode.name}: {reason}. "
                f"{_way_out(source, mode)}"
            )


def _way_out(source: NegativeSource, mode: PrivacyMode) -> str:
    if source.shared_in_batch and mode.candidates in ("rows", "pool"):
        return f"Set model.negatives.{source.name}.shared_in_batch=false."
    if source.gather:
        return f"Set model.negatives.{source.name}.gather=false."
    if not source.is_declared:
        return f"If it was, set model.negatives.{source.name}.lines_are_independent=true."
    if source.name == "gold" and mode.unit == "pair":
        return "Set privacy.unit=query."
    if mode.candidates in ("rows", "pool"):
        return "Choose among random, gold, bm25, static, dynamic and labelled."
    if mode.clips_whole_batch:
        return "Choose among in_batch, random, gold, bm25, static, dynamic and labelled."
    return "Set model.negatives to null, or choose privacy=batch_clip or privacy=public_passages."
