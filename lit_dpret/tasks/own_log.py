"""`task=own_log`: run the comparison of `task=pipeline` on your own log, in one command."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Annotated, Any

from lit_dpret.datamodules import InsuranceQADataModule
from lit_dpret.datamodules.records import Problems
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError, UnplannedError
from lit_dpret.privacy.ledger.run_ledger import STAGES_NAME
from lit_dpret.settings import Least
from lit_dpret.tasks.check_data import PAGE, CheckData
from lit_dpret.tasks.fit import PlannedFit
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.pipeline import Pipeline
from lit_dpret.tasks.rulers import fitting_batch, fitting_length, make_rulers
from lit_dpret.tasks.stages import Stages

SPLIT, CHECK = "split", "check"


@dataclass(kw_only=True)
class OwnLog(Pipeline):
    """Check a log, split it if needed, and run the pipeline with sizes derived from public facts.

    Guarantees:
        - Batch sizes follow from the number of units, which ``zero_out`` and ``replace_one`` take as public, and
          lengths from the public passages; no setting is chosen by looking at a query.
        - Nothing is declared in the user's name: the cards name the settings chosen by rule, and state that the data
          used to choose the others are unknown, unless ``tuning_data`` says otherwise.
        - A run does not continue with another log, nor without the report of the check.
    """

    # Tokens at which passages are cut; None for the smallest length that cuts under 5 % of them.
    passage_length: Annotated[int, Least(8)] | None = None
    longest: Annotated[int, Least(8)] = 128  # upper limit for an automatic ``passage_length``, to save time

    def run(self, parts: Parts) -> dict[str, float]:
        """Run the check, the split and every unfinished stage of the pipeline; return its numbers."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        if getattr(parts.make_privacy(), "neighbours", "zero_out") == "add_or_remove":
            raise ConfigurationError(
                "privacy.neighbours=add_or_remove keeps the number of queries private, but task=own_log derives its "
                "batch sizes from it. Use task=pipeline with your own batch sizes, or privacy.neighbours=zero_out."
            )
        data = parts.make_datamodule()
        if isinstance(data, InsuranceQADataModule):
            raise ConfigurationError(
                "task=own_log is for your own log, but the data are InsuranceQA, the default. Name yours: "
                "datamodule=pairs datamodule.pairs=log.jsonl. experiment=quickstart does the same on InsuranceQA."
            )
        if not getattr(data, "has_public_passages", False):
            raise ConfigurationError(
                "task=own_log needs a public list of passages, to search and to write queries for. Declare the log's "
                "passages public with datamodule.passages_are_public=true, or name a list with datamodule.corpus."
            )
        log = self._split(parts, data)
        parts = replace(parts, make_datamodule=partial(parts.make_datamodule, **log))
        self._fit_sizes(parts)
        return super().run(parts)

    def planned_fits(self, parts: Parts) -> list[PlannedFit]:
        """Refuse to plan: the trainings depend on a split that does not exist before the task runs."""
        raise UnplannedError("task=own_log decides its sizes when it runs. For a sweep or a plan use task=pipeline.")

    def _split(self, parts: Parts, data: Any) -> dict[str, Any]:
        """Return settings that read the log with a test split: none if it has one, otherwise those of a newly written
        split.
        """
        folder, check = parts.run_dir / SPLIT, parts.run_dir / CHECK
        begun = Stages(check, resume=parts.resume, fingerprint="task=own_log")
        if folder.exists() and not (check / STAGES_NAME).exists():
            raise ConfigurationError(f"{folder} belongs to another task. Choose another hydra.run.dir.")
        data.prepare_data()
        is_split, splits = True, set[str]()  # also if unreadable, which the check reports like any problem
        with suppress(DataError):
            log = data.read_collection(Problems(examples=0))
            splits = set(log.qrels)
            is_split = splits != {"train"}
            begun.on_data(log.queries, log.passages, log.qrels, log.users)
        if splits and is_split and "test" not in splits:
            raise DataError(
                f"The log has the splits {', '.join(sorted(splits))}, but task=own_log evaluates on the split test. "
                "Name one of them test, or leave the splits out: then the task splits the log."
            )
        # The report is written last, and is as private as the log; it is kept next to the split for the owner.
        if not ((check / STAGES_NAME).exists() and (check / PAGE).exists() and (is_split or folder.exists())):
            shutil.rmtree(folder, ignore_errors=True)
            (check / PAGE).unlink(missing_ok=True)
            check.mkdir(mode=0o700, exist_ok=True)
            begun.begin()
            program = " ".join(takewhile(lambda word: "=" not in word, parts.command.split()))
            try:
                CheckData(write_split=None if is_split else folder).run(
                    replace(parts, run_dir=check, command=program), show=False
                )
            except LitDpretError:  # the corrected log may use the folder
                (check / STAGES_NAME).unlink()
                raise
            say(f"no problems in the log; the full check: {check / PAGE}")
        if is_split:
            return {}
        unset = dict.fromkeys(("folder", "pairs", "columns", "corpus", "queries", "qrels"))
        return {**unset, "folder": str(folder)}

    def _fit_sizes(self, parts: Parts) -> None:
        """Set batch sizes and lengths, and print what was chosen and why; the cards only name the settings chosen by
        rule.
        """
        data = parts.read_data(expected_batch_size=None, sample_rate=None)
        mode = parts.make_privacy()
        data.use_unit(getattr(mode, "unit", "query"), getattr(mode, "neighbours", "zero_out"))
        units = data.n_units
        ruled = []
        for name in ("generator_batch", "retriever_batch"):
            given = getattr(self, name)
            setattr(self, name, fitting_batch(units, given))
            ruled += [f"task.{name}"] if getattr(self, name) < given else []
        ruler = make_rulers(parts, mode)[0]["passage"]
        passages = list(data.public_passages().values())
        fitting = fitting_length(ruler.count(passages[:: max(1, len(passages) // 2000)]))
        length = self.passage_length or min(self.longest, fitting)
        ruled += ["the length of passages"] if self.passage_length is None and fitting <= self.longest else []
        if ruled:
            rule = "By rule, from the number of units and the lengths of the public passages"
            self.tuning_note = " ".join(filter(None, (self.tuning_note, f"{rule}: {', '.join(ruled)}.")))
        self.generator = partial(self.generator, max_passage_length=length)
        self.retriever = partial(self.retriever, max_passage_length=length)
        searched = min(self.max_passages or len(passages), len(passages))
        say(
            f"{units} units to train on: batches of {self.generator_batch} for the generator and "
            f"{self.retriever_batch} for the retriever, at most a quarter of them",
            f"passages are cut at {length} tokens (task.passage_length; {fitting} would cut under 5 % of them)",
            f"{searched} of {len(passages)} passages are searched (task.max_passages)",
        )
        unit = getattr(mode, "unit", "query")
        if unit != "user" and data.collection.users:
            say(
                f"the log names users, but the guarantee is for one {unit}, not for all queries of a person; "
                "privacy.unit=user with datamodule.max_rows_per_unit guarantees the latter"
            )
        if self.tuning_data == "unknown":
            say(
                "how the other settings were chosen is not declared, and the cards say so; if all of them were fixed "
                "before this log was used, set task.tuning_data=none"
            )
