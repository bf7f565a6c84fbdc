"""`task=own_log`: from a log of one's own to the comparison of `task=pipeline`, in one command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from lit_dpret.datamodules.readers import Problems
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.settings import require_whole
from lit_dpret.tasks.check_data import PAGE, CheckData, fitting_batch, fitting_length, make_rulers
from lit_dpret.tasks.fit import PlannedFit
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.pipeline import Pipeline

SPLIT = "split"


@dataclass(kw_only=True)
class OwnLog(Pipeline):
    """Check a log, split it where it is not, and run the pipeline with sizes that follow from what is public of it.

    Guarantees:
        - Batches follow from the number of units, which ``zero_out`` and ``replace_one`` take as public, and lengths
          from the public passages; no setting is chosen by looking at a query.
    """

    # Tokens at which passages are cut; None for the least that cuts under 5 % of them.
    passage_length: int | None = None
    longest: int = 128  # what ``passage_length`` does not exceed by itself, for the sake of time

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("task", self, 8, "longest")
        require_whole("task", self, 8, "passage_length", null=True)

    def run(self, parts: Parts) -> dict[str, float]:
        """Run the check, the split and every stage of the pipeline that is not done yet; returns its numbers.

        Raises:
            ConfigurationError: The passages of the log are not declared public, or its size is not public.
            DataError: The log has problems; the report names all of them.
        """
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        neighbours = getattr(parts.make_privacy(), "neighbours", "zero_out")
        if neighbours == "add_or_remove":
            raise ConfigurationError(
                "privacy.neighbours=add_or_remove keeps the number of queries private, and the batches of task=own_log "
                "follow from it. Use task=pipeline with sizes of your own, or privacy.neighbours=zero_out."
            )
        data = parts.make_datamodule()
        if not getattr(data, "has_public_passages", False):
            raise ConfigurationError(
                "task=own_log needs a public list of passages, to search and to write queries for. Declare that of the "
                "log public with datamodule.passages_are_public=true, or name one with datamodule.corpus."
            )
        log = self._split(parts, data)
        parts = replace(parts, make_datamodule=partial(parts.make_datamodule, **log))
        self._fit_sizes(parts)
        return super().run(parts)

    def planned_fits(self, parts: Parts) -> list[PlannedFit]:
        """Refuse: what is trained follows from a split that does not exist before the task runs."""
        raise ConfigurationError("task=own_log decides its sizes when it runs. In a sweep or a plan use task=pipeline.")

    def _split(self, parts: Parts, data: Any) -> dict[str, Any]:
        """Return the settings that read the log with a test split: those given, or those of a split that is written."""
        folder = parts.run_dir / SPLIT
        if folder.exists() and not parts.resume:
            raise ConfigurationError(
                f"{folder} is the split of an earlier command, perhaps of another log. Say resume=true to go on with "
                "it, or choose another hydra.run.dir."
            )
        if not folder.exists():
            data.prepare_data()
            try:
                is_split = set(data.read_collection(Problems(examples=0)).qrels) != {"train"}
            except DataError:
                is_split = True  # the check tells of this and of every other problem
            # The report is as private as the log; it is kept beside the split for the owner.
            check = CheckData(write_split=None if is_split else folder)
            program = " ".join(takewhile(lambda word: "=" not in word, parts.command.split()))
            check.run(replace(parts, run_dir=parts.run_dir / "check", command=program), show=False)
            say(f"no problems in the log; the whole check: {parts.run_dir / 'check' / PAGE}")
            if is_split:
                return {}
        unset = dict.fromkeys(("folder", "pairs", "columns", "corpus", "queries", "qrels"))
        return {**unset, "folder": str(folder)}

    def _fit_sizes(self, parts: Parts) -> None:
        """Set batches and lengths, and say what was chosen and why."""
        data = parts.read_data(expected_batch_size=None, sample_rate=None)
        mode = parts.make_privacy()
        data.use_unit(getattr(mode, "unit", "query"), getattr(mode, "neighbours", "zero_out"))
        units = data.n_units
        self.generator_batch = fitting_batch(units, self.generator_batch)
        self.retriever_batch = fitting_batch(units, self.retriever_batch)
        ruler = make_rulers(parts, mode)[0]["passage"]
        passages = list(data.public_passages().values())
        fitting = fitting_length(ruler.count(passages[:: max(1, len(passages) // 2000)]))
        length = self.passage_length or min(self.longest, fitting)
        self.generator = partial(self.generator, max_passage_length=length)
        self.retriever = partial(self.retriever, max_passage_length=length)
        searched = min(self.max_passages or len(passages), len(passages))
        say(
            f"{units} units to train on: batches of {self.generator_batch} for the generator and "
            f"{self.retriever_batch} for the retriever, at most a quarter of them",
            f"passages are cut at {length} tokens (task.passage_length; {fitting} would cut under 5 % of them)",
            f"{searched} of {len(passages)} passages are searched (task.max_passages)",
        )
