"""The trainings that the parts of the reproduction share, each a pipeline with some rows, run on demand."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

from lit_dpret.callbacks import ProgressLine
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.generator_folder import GeneratorContract
from lit_dpret.modules.language_models import load_language_model
from lit_dpret.privacy.modes import NoPrivacy, PrivacyMode
from lit_dpret.report.table import RowResult, from_json
from lit_dpret.settings import require_whole
from lit_dpret.tasks.parts import Parts, require_budgets
from lit_dpret.tasks.pipeline import Pipeline
from lit_dpret.tasks.stages import described
from reproduction.paper_000.shrink import SmallerGenerator
from reproduction.published import SIZES, Point
from reproduction.study import Study, budget_name

# Used instead of a folder or name: a smaller generator made from the public one, with public passages only.
SHRUNK = "shrunk"
BASELINES = "baselines"
_SIZES, _BESIDE = {"small": "public_t5", "mini": SHRUNK}, {"small": "T5-Base", "mini": "T5-Small"}
# Settings of the pipeline on which no training depends, or which are named together with those that do matter.
_SETTING = ("generator", "only", "embeddings", "min_free_mb")


class LeftOut(Exception):
    """A part cannot be done here; the message is for the report."""


@dataclass(frozen=True)
class Cell:
    """A generator of one size under one budget; an epsilon of None means no privacy."""

    size: str
    eps: float | None

    @property
    def name(self) -> str:
        return f"{self.size}-{budget_name(self.eps)}"


def _write_smaller(
    shrink: SmallerGenerator, passages: Mapping[str, str], folder: Path, contract: GeneratorContract, seed: int
) -> None:
    with ProgressLine("making the smaller generator") as progress:
        shrink.write(passages, folder, contract=contract, seed=seed, progress=progress)


@dataclass(kw_only=True, eq=False)
class Trainings(Study):
    """The settings that vary, and the trainings, each done once, whichever part asks first.

    A result depends only on its own settings. If it was made with others it is refused; other results are untouched.
    """

    tuning_knob = "task.pipeline"

    pipeline: Callable[..., Pipeline]
    shrink: SmallerGenerator
    shrink_passages: int = 4000
    sizes: Mapping[str, str] = None  # type: ignore[assignment]  # null, here and below: set by __post_init__
    beside: Mapping[str, str] = None  # type: ignore[assignment]
    main: str = None  # type: ignore[assignment]
    eps: Sequence[float | None] = (3.0, 8.0, 16.0, None)
    others_at: Sequence[float | None] = None  # type: ignore[assignment]
    originals_are_public: bool = False
    min_free_mb: float = 5000

    def __post_init__(self) -> None:
        if self.beside is None:
            self.beside = _BESIDE if self.sizes is None else {name: name for name in self.sizes if name in SIZES}
        self.sizes = _SIZES if self.sizes is None else self.sizes
        self.main = next(iter(self.sizes), "") if self.main is None else self.main
        self.others_at = self.eps if self.others_at is None else self.others_at
        if self.main not in self.sizes:
            known = ", ".join(self.sizes) or "there are none"
            raise ConfigurationError(f"task.main={self.main} is not one of task.sizes: {known}.")
        if unknown := sorted(set(self.beside) - set(self.sizes)):
            raise ConfigurationError(
                f"task.beside names {unknown[0]!r}, which is not one of task.sizes: {', '.join(self.sizes)}."
            )
        if wrong := [name for name in self.sizes if not name or set(name) & set("/\\ ")]:
            raise ConfigurationError(f"task.sizes: {wrong[0]!r} names a folder, so it must have no slash and no space.")
        require_budgets("task.eps", self.eps, some=True)
        if not set(self.others_at) <= set(self.eps):
            raise ConfigurationError(
                f"task.others_at={list(self.others_at)} must be some of task.eps={list(self.eps)}."
            )
        require_whole("task", self, 1, "shrink_passages")

    def open(self, parts: Parts) -> Self:
        """Open the run folder, or refuse one that was begun with another seed; return self."""
        self.parts = parts
        self.base = self.pipeline()
        self.embeddings = parts.run_dir / "embeddings"
        self.begin(parts, fingerprint=f"paper_000, seed {parts.seed}")
        return self

    @property
    def tuning_data(self) -> str:
        """The data on which the settings of the pipeline were chosen."""
        return self.pipeline().tuning_data

    def kept_models(self) -> set[str]:
        return {cell.name for cell in self.cells() if cell.eps is not None}

    def cells(self) -> list[Cell]:
        """Return all generators, those along the paper's axis of epsilon first."""
        others = [size for size in self.sizes if size != self.main]
        more = [Cell(size, eps) for eps in self.others_at for size in others]
        return [Cell(self.main, eps) for eps in self.eps] + more

    @property
    def finite(self) -> list[float]:
        return [eps for eps in self.eps if eps is not None]

    def point(self, cell: Cell) -> Point:
        """Return the paper's row that corresponds to ``cell``; the paper may not have it."""
        return self.beside.get(cell.size, ""), cell.eps

    @property
    def seconds(self) -> dict[str, float]:
        return self._stages.seconds

    def folder(self, name: str) -> Path:
        return self.parts.run_dir / name

    def result(self, name: str, settings: object, work: Callable[[Parts], Any]) -> Any:
        """Return the JSON values of ``work`` in the folder ``name``; the ``repr`` of ``settings`` identifies them."""
        mark = hashlib.sha256(described(repr(settings)).encode()).hexdigest()

        def made(folder: Path, resume: bool) -> dict[str, Any]:
            return {"result": work(replace(self.parts, run_dir=folder, resume=resume))}

        return self.once(name, mark, made, knob="task")["result"]

    # -- the trainings -------------------------------------------------------------------------

    def baselines(self) -> dict[str, RowResult]:
        """Return ``bm25``, ``zero_shot``, ``original`` and ``pseudo``; only ``original`` saw private queries."""
        systems = ("bm25", "zero_shot", "original", "pseudo")
        return dict(zip(systems, self._pipeline(BASELINES, systems, None), strict=True))

    def direct(self, eps: float) -> RowResult:
        """Return the retriever trained on the original queries under ``eps``."""
        (row,) = self._pipeline(self.direct_name(eps), ("direct",), eps)
        return row

    def direct_name(self, eps: float) -> str:
        return f"direct-{budget_name(eps)}"

    def synthetic(self, cell: Cell) -> RowResult:
        """Train the generator, draw its queries and train a retriever on them; return the retriever's row."""
        (row,) = self._pipeline(cell.name, ("synthetic",), cell.eps, size=cell.size)
        return row

    def queries_of(self, cell: Cell) -> Path:
        """Return the synthetic data set of ``cell``, made if necessary."""
        self.synthetic(cell)
        return self.folder(cell.name) / "synthetic" / "data"

    def privacy(self, eps: float | None) -> Callable[[], PrivacyMode]:
        return NoPrivacy if eps is None else partial(self.parts.make_privacy, eps=eps)

    def _pipeline(
        self, name: str, systems: Sequence[str], eps: float | None, *, size: str | None = None
    ) -> list[RowResult]:
        changes: dict[str, Any] = {"only": systems, "embeddings": self.embeddings}
        shared = {k: v for k, v in vars(self.base).items() if k not in _SETTING and not k.startswith("_")}
        # Baselines do not depend on the generator, and a change of its settings must not refuse their results.
        settings: list[Any] = [shared, systems, eps]
        if size is not None:
            changes["generator"] = partial(self.base.generator, pretrained=self.source(size))
            settings += [self.base.generator, self.sizes[size]]

        def work(parts: Parts) -> Any:
            self.pipeline(**changes).run(replace(parts, make_privacy=lambda **_: self.privacy(eps)()))
            for checkpoints in parts.run_dir.glob("*/checkpoints"):  # keep the models only; an encoder is large
                shutil.rmtree(checkpoints)
            return json.loads((parts.run_dir / "results.json").read_text(encoding="utf-8"))

        return from_json(self.result(name, settings, work))

    # -- the sizes -----------------------------------------------------------------------------

    def source(self, size: str) -> str:
        """Return where the public weights of a size are; make a ``shrunk`` one if necessary."""
        given = self.sizes[size]
        return str(self._shrunk()) if given == SHRUNK else given

    def described(self, size: str) -> str:
        """Return the name of a size in tables, with its number of weights."""
        source = self.source(size)

        def work(parts: Parts) -> int:
            return sum(p.numel() for p in load_language_model(source).parameters())

        return f"{size} (ours, {self.result(f'size-{size}', source, work) / 1e6:.1f} M)"

    def _shrunk(self) -> Path:
        def work(parts: Parts) -> str:
            data = parts.read_data(max_passages=self.shrink_passages, expected_batch_size=None, sample_rate=None)
            codec = self.base.generator(privacy=NoPrivacy(), pretrained=self.shrink.teacher).codec
            # In a process of its own: in this one, weights that an optimizer trained are refused as a private start.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                process.submit(
                    _write_smaller, self.shrink, dict(data.public_passages()), parts.run_dir / "model", codec.contract,
                    parts.seed,
                ).result()  # fmt: skip
            return "model"

        inside: str = self.result(SHRUNK, [self.shrink, self.shrink_passages], work)
        return self.folder(SHRUNK) / inside
