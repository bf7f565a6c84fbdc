"""The combined sources of a run: a row's negatives in a step, and which mode accepts which source."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, UnsupportedModelError, first_line
from lit_dpret.negatives.base import (
    NOBODY,
    InBatchNegatives,
    NegativeSource,
    PassageSource,
    PreBatchNegatives,
    Seat,
    Towers,
    TrainRow,
    TrainTexts,
    public_coins,
    uniform_places,
)
from lit_dpret.negatives.drawn import LabelledNegatives
from lit_dpret.negatives.mined import DynamicNegatives, MinedSource, StaticNegatives
from lit_dpret.negatives.rankings import check_private_place
from lit_dpret.privacy.ledger.trained import objects_in
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.user_generators import kept_generators, seed_generators

_ASKED = 9  # this many rows show whether a source remembers others
_COPIED = 1 << 26
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, np.ndarray, np.generic, torch.Tensor)

Sources = Sequence[NegativeSource] | Mapping[str, NegativeSource]


class RowNegatives:
    """The sources of one run under a privacy mode; sources that the mode does not accept are refused.

    Guarantees:
        - A row's own passages (``own_at`` of `places`) are a function of its own record, of public passages and coins,
          and of weights, whatever else is in the batch.
        - A passage that answers the row's query, or has the text of one that does, is never its negative.
        - Every row gets equally many: if a source has too few, public passages are drawn by coins.
        - A pickle or copy contains no query text, and nothing that a source derived from queries when it was prepared.
    """

    #: Trial deep copies of a module share this object instead of copying it.
    holds_texts = True

    def __init__(self, sources: Sources, privacy: PrivacyMode) -> None:
        listed = list(sources.values()) if isinstance(sources, Mapping) else list(sources)
        check_sources(listed, privacy)
        self.sources, self.private = listed, privacy.guarantee != "inherited"
        self._mode, self._guarantee = privacy.name, privacy.guarantee
        if privacy.guarantee == "dp":
            for source in listed:
                if isinstance(source, MinedSource) and source.cache_dir is not None:
                    check_private_place(Path(source.cache_dir), f"model.negatives.{source.name}.cache_dir")
        self.in_batch = next((s for s in listed if isinstance(s, InBatchNegatives)), None)
        self.pre_batch = next((s for s in listed if isinstance(s, PreBatchNegatives)), None)
        self.dynamic = next((s for s in listed if isinstance(s, DynamicNegatives)), None)
        self.static = next((s for s in listed if isinstance(s, StaticNegatives)), None)
        self.labelled = next((s for s in listed if isinstance(s, LabelledNegatives)), None)
        named = [s for s in listed if isinstance(s, PassageSource)]
        self._own = [s for s in named if not s.shared_in_batch]
        self._shared = [s for s in named if s.shared_in_batch]
        self.texts: TrainTexts | None = None
        self._as_given: dict[int, dict[str, Any]] = {}
        self._resumed: tuple[int, str] | None = None
        self._short = 0

    @property
    def couples_rows(self) -> bool:
        """Whether a row's loss depends on other rows."""
        return any(source.couples_rows for source in self.sources)

    @property
    def only_in_batch(self) -> bool:
        """Whether the only negatives are the plain ones of the batch."""
        return self.in_batch is not None and not self.in_batch.gather and len(self.sources) == 1

    @property
    def names_passages(self) -> bool:
        """Whether a source names passages of the public list, which must then be embedded."""
        return bool(self._own or self._shared)

    def assumptions(self) -> list[str]:
        """Return the unverifiable assumptions about files of sources, as statements for the card."""
        made_of = {
            "dp": "its own query and public data alone",
            "inherited": "the queries that the parent of this card covers and public data alone",
        }.get(self._guarantee)
        if made_of is None:
            return []
        return [
            f"Each line of the file of model.negatives.{source.name} ({Path(source.file).name}) was made from "
            f"{made_of}, {'as declared' if source.is_declared else 'which nothing declares or checks'}."
            for source in self.sources
            if source.file is not None
        ]

    def files_read(self) -> dict[str, Path]:
        """Return the files that sources read, by the settings that name them, in the order of the sources."""
        return {f"model.negatives.{one.name}.file": Path(one.file) for one in self.sources if one.file is not None}

    def learn(self, texts: TrainTexts, towers: Towers) -> None:
        """Mine with the current weights, before the first step; refuse a custom source that remembers rows."""
        self.texts = texts
        for source in self.sources:
            if isinstance(source, PassageSource):
                self._as_given.setdefault(id(source), dict(vars(source)))
                source.prepare(texts, towers, private=self.private)
                if self._guarantee == "dp" and not type(source).__module__.startswith("lit_dpret."):
                    _refuse_memory(source, texts, self._mode)

    def __getstate__(self) -> dict[str, Any]:
        fresh = {}
        for source in self.sources:
            if (given := self._as_given.get(id(source))) is not None:
                fresh[id(source)] = made = copy.copy(source)
                vars(made).clear()
                vars(made).update(given)
        state = {}
        for name, value in vars(self).items():
            listed = [fresh.get(id(each), each) for each in value] if isinstance(value, list) else value
            state[name] = fresh.get(id(value), listed)
        return state | {"texts": None, "_as_given": {}}

    def keys(self, rows: Sequence[TrainRow]) -> dict[str, Tensor]:
        """Return the keys of the rows of a batch; see `TrainTexts.keys`."""
        return self._known().keys(rows)

    def before_step(self, epoch: int) -> None:
        """Mine again at a new epoch, if configured."""
        static = self.static
        if static is None or static.refresh != "epoch" or static.mined_in == epoch:
            return
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed[0] == epoch:  # the weights at the start of this epoch are gone
            if static.recall(*resumed):
                return
            rank_zero_warn(
                f"The rankings that epoch {epoch} began with are not in model.negatives.static.cache_dir="
                f"{static.cache_dir}: passages are mined again, with the current weights, and this run will differ "
                "from one without an interruption."
            )
        static.remine(epoch)

    def places(
        self, keys: Mapping[str, Tensor], *, step: int, epoch: int, embed: Callable[[], Tensor]
    ) -> dict[str, Tensor]:
        """Return the passages of the public list for the rows of a batch, by their `keys`.

        If a source searches with query embeddings, ``embed`` embeds the queries of these rows without gradient and
        dropout, ``(rows, dim)``.

        Returns:
            ``own_at``, the indices of passages for each row alone, and ``shared_at``, those of negatives for every row,
            both ``(rows, as many as the sources say)`` and -1 where no passage is left; and, if a source has labels,
            ``own_margins``, the labels of ``own_at``, NaN without one.
        """
        texts = self._known()
        query_at, answers_at = keys["query_at"].cpu(), keys["answers_at"].cpu()
        groups = texts.group_of(answers_at)
        top = None
        if self.dynamic is not None:
            queries = embed()
            top = self.dynamic.nearest(queries, int(texts.copies(groups).max()))
        own: list[list[int]] = []
        shared: list[list[int]] = []
        margins: list[list[float]] = []
        for row, query in enumerate(query_at.tolist()):
            answers = frozenset(g for g in groups[row].tolist() if g != NOBODY)
            seat = Seat(query, texts.queries[query], int(answers_at[row, 0]), answers)
            taken: set[int] = set()
            for sources, found in ((self._own, own), (self._shared, shared)):
                places: list[int] = []
                for source in sources:
                    if isinstance(source, DynamicNegatives) and top is not None:
                        chosen = source.choose_near(seat, queries[row], top, row, step=step)
                    else:
                        chosen = source.choose(seat, step=step, epoch=epoch)
                    places += self._filled(chosen, source, seat, step, taken)
                found.append(places)
            if self.labelled is not None:
                margins.append(self.labelled.margins(seat, own[-1]))
        device = keys["query_at"].device
        made = {
            name: torch.tensor(found, dtype=torch.long, device=device).reshape(len(query_at), -1)
            for name, found in (("own_at", own), ("shared_at", shared))
        }
        return made if self.labelled is None else made | {"own_margins": torch.tensor(margins, device=device)}

    def _filled(self, chosen: list[int], source: PassageSource, seat: Seat, step: int, taken: set[int]) -> list[int]:
        """Return ``per_query`` indices: those chosen that no source named before, then random ones, then -1."""
        texts = self._known()
        kept = [place for place in chosen if place not in taken]
        taken.update(kept)
        short = source.per_query - len(kept)
        if short:
            self._short += 1
            if self._short == 1 and self._guarantee != "dp":
                rank_zero_warn(
                    "A source of negatives has too few passages for some query (margins, depth, few words in common, "
                    "or another source named them): random public passages replace them. This warning appears once."
                )
            draw = public_coins(source.seed, "fill", source.name, step, seat.text)
            more = uniform_places(draw, texts.groups, short, answers=seat.answers, taken=taken)
            taken.update(more)
            kept += more
        return kept + [NOBODY] * (source.per_query - len(kept))

    def _known(self) -> TrainTexts:
        if self.texts is None:
            raise ConfigurationError(
                "model.negatives was not prepared: give the Trainer a DataModule that lists its public passages, or "
                "call learn_negatives."
            )
        return self.texts

    def state_dict(self) -> dict[str, Any]:
        """Return a fingerprint of weights, and the ``pre_batch`` queue; no other trace of rows."""
        state: dict[str, Any] = {}
        if self.static is not None:
            state["static"] = {"epoch": self.static.mined_in, "weights": self.static.weights}
        if self.pre_batch is not None:
            state["pre_batch"] = self.pre_batch.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore `state_dict`; rankings mined in later epochs are read on demand."""
        if "static" in state:
            self._resumed = (int(state["static"]["epoch"]), str(state["static"]["weights"]))
        if self.pre_batch is not None and "pre_batch" in state:
            self.pre_batch.load_state_dict(state["pre_batch"], device)


def refusal(source: NegativeSource, mode: PrivacyMode | type[PrivacyMode]) -> str | None:
    """Return why a mode does not accept a source; None if it does.

    If a mode clips each row's gradient, no source may couple rows. If its proof covers only the similarity table of a
    batch, nothing may be added to that table. If it clips the gradient of a whole batch, any function of the batch is
    allowed. No private mode accepts a source that remembers private rows from one step to the next.
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
        return "a judgement that a passage does not answer is part of no pair, so the claim does not cover it"
    if not source.is_declared:
        return "it is not declared that each line of its file was made from its own query and public data alone"
    if mode.candidates in ("rows", "pool"):
        if source.couples_rows:
            return "it makes the loss of a row depend on other rows, so that clipping each row bounds nothing"
        return None
    if mode.clips_whole_batch or source.name == "in_batch":
        return None
    return "the sensitivity of that mode is proved for the passages of the batch as the only candidates"


def check_sources(sources: Sequence[NegativeSource], mode: PrivacyMode) -> None:
    """Refuse sources that a mode does not accept, with a message of one line."""
    names = [source.name for source in sources]
    if not names:
        raise ConfigurationError(
            "model.negatives is empty: a query needs negatives. Leave it null for those of the "
            "privacy mode, or name sources."
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(
            f"model.negatives names {twice} twice. Name each source once; per_query sets how many passages it gives."
        )
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
        return f"If that is so, set model.negatives.{source.name}.lines_are_independent=true."
    if source.name == "gold" and mode.unit == "pair":
        return "Set privacy.unit=query."
    if mode.candidates in ("rows", "pool"):
        return "Choose among random, gold, bm25, static, dynamic and labelled."
    if mode.clips_whole_batch:
        return "Choose among in_batch, random, gold, bm25, static, dynamic and labelled."
    if source.keeps_private_state:
        return "Set model.negatives to null or in_batch."
    return "Set model.negatives to null, or choose privacy=batch_clip or privacy=public_passages."


def _refuse_memory(source: PassageSource, texts: TrainTexts, mode: str) -> None:
    """Refuse a source whose passages for a row change after requests for other rows.

    Copies of it get requests for different other rows and then for the same row, with equal states of the global random
    generators, in the same epoch and in the next. What a source keeps of the row itself, such as a cache, changes
    nothing. Copies share what cannot be copied (a lock, a connection). A source that raises, as it may in a later
    epoch, is not examined.
    """
    seats = [_seat(texts, query) for query in range(len(texts.queries)) if texts.positives(query)][:_ASKED]
    asked, histories = seats[0:1], (seats[1::2], seats[2::2])
    shared = {id(each): each for each in (texts, *filter(_is_shared, objects_in(source)))}
    for epoch in (0, 1):
        answers = []
        for history in histories:
            copied = _copy_of(source, shared, mode)
            try:
                with kept_generators():
                    for number, others in enumerate((history, asked)):
                        seed_generators(number)
                        found = [list(copied.choose(seat, step=number, epoch=epoch * number)) for seat in others]
            except Exception:  # user code may refuse calls outside training
                return
            answers.append(found)
        if answers[0] != answers[1]:
            raise UnsupportedModelError(
                f"privacy={mode} cannot take model.negatives.{source.name}: {type(source).__name__} names other "
                "passages for a query after requests for other queries, so one unit affects steps that it is not part "
                "of. Let choose() depend on its seat, step, epoch and lit_dpret.negatives.base.public_coins alone.",
                trap="T11",
            )


def _copy_of(source: PassageSource, shared: Mapping[int, Any], mode: str) -> PassageSource:
    """Return a copy that shares the given objects, by their ids; refuse a source that cannot be copied."""
    try:
        return copy.deepcopy(source, dict(shared))
    except Exception as error:  # user code may raise anything
        raise UnsupportedModelError(
            f"privacy={mode} cannot take model.negatives.{source.name}: {type(source).__name__} cannot be copied, so "
            f"it cannot be examined ({type(error).__name__}: {first_line(error)}). Give it a __deepcopy__ that shares "
            "what cannot be copied.",
            trap="T11",
        ) from error


def _seat(texts: TrainTexts, query: int) -> Seat:
    places = texts.positives(query)
    groups = texts.group_of(torch.tensor(places))
    return Seat(query, texts.queries[query], places[0], frozenset(groups.tolist()))


def _is_shared(value: Any) -> bool:
    """Return whether copies of a source share an object: an encoder, or one that is too large or cannot be copied."""
    size = getattr(value, "nbytes", 0) if isinstance(value, (np.ndarray, torch.Tensor)) else 0
    if isinstance(value, nn.Module) or size > _COPIED:
        return True
    if hasattr(value, "__dict__") or isinstance(value, (*_PLAIN, list, tuple, dict, set, frozenset)):
        return False
    try:
        copy.deepcopy(value)
    except Exception:  # a lock, a connection, a file
        return True
    return False
