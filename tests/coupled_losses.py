"""Losses whose rows depend on each other in different ways, and a training that must refuse them."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import Regression, dp, fit
from torch import Tensor

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy.batches import UnitBatch

SEED = 1
GLOBAL: list[Tensor] = []


class Plain(Regression):
    def losses(self, inputs: Tensor, target: Tensor) -> Tensor:
        return (self.net(inputs).squeeze(-1) - target).square()


class Mixup(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        inputs = rows["inputs"]
        if self.training:
            order, share = torch.randperm(len(inputs)), torch.rand(())
            inputs = share * inputs + (1 - share) * inputs[order]
        return self.losses(inputs, rows["target"])


class CentredTargets(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        centre = rows["target"].mean() if self.training else 0.0
        return self.losses(rows["inputs"], rows["target"] - centre)


class SignOfTheBatch(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        factor = rows["inputs"][:, 0].mean().sign() if self.training else 1.0
        return factor * self.losses(rows["inputs"], rows["target"])


class DividedByTheNumberOfRows(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) / (len(rows["target"]) if self.training else 1)


class GradientAlone(Plain):
    """The loss depends on its own row only, but a statistic of the batch scales its gradient."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.losses(rows["inputs"], rows["target"])
        return found.detach() + (found - found.detach()) * rows["target"].square().mean()


class InBlocks:
    """Report training block by block, as if no process could hold the whole gradient (`PrivateModule.in_blocks`)."""

    @property
    def in_blocks(self) -> bool:
        return True

    @in_blocks.setter
    def in_blocks(self, value: bool) -> None:
        pass


class PlainInBlocks(InBlocks, Plain):
    pass


class GradientAloneInBlocks(InBlocks, GradientAlone):
    pass


class WeaklyCoupled(Plain):
    """A loss with one part in two hundred from the batch, less than an earlier rounding tolerance."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) * (1 + 5e-3 * rows["target"].mean().tanh())


class Remembering(Plain):
    """A loss whose targets depend on those of the previous batch; subclasses choose where these are kept."""

    def remember(self, value: Tensor) -> None:
        self.bank = [value]

    def recall(self) -> Tensor | None:
        return self.bank[-1] if getattr(self, "bank", None) else None

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        before = self.recall()
        if self.training:
            self.remember(rows["target"].mean().detach())
        return self.losses(rows["inputs"], rows["target"] - (0.0 if before is None else before))


class RememberingInAQueue(Remembering):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net.bank = deque(maxlen=2)  # type: ignore[assignment]

    def remember(self, value: Tensor) -> None:
        self.net.bank.append(value)  # type: ignore[union-attr, operator]

    def recall(self) -> Tensor | None:
        return self.net.bank[-1] if self.net.bank else None  # type: ignore[index]


class RememberingInAClosure(Remembering):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        kept: list[Tensor] = []
        self.remember = kept.append  # type: ignore[method-assign]
        self.recall = lambda: kept[-1] if kept else None  # type: ignore[method-assign]


class RememberingInAGlobal(Remembering):
    def remember(self, value: Tensor) -> None:
        GLOBAL.append(value)

    def recall(self) -> Tensor | None:
        return GLOBAL[-1] if GLOBAL else None


class RememberingInPlace(Remembering):
    """A loss that keeps targets in place, in a tensor too large to be copied."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.bank = torch.zeros(4)

    def remember(self, value: Tensor) -> None:
        self.bank[0] = value

    def recall(self) -> Tensor:
        return self.bank[0].clone()


class FittedOnTheFirstBatch(Plain):
    """A loss that centres targets by the mean of the first rows that it sees."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if not hasattr(self, "centre"):
            self.centre = rows["target"].mean()
        return self.losses(rows["inputs"], rows["target"] - self.centre)


class ByPlace(Plain):
    """A loss that changes the target of every other row by position."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        turn = torch.arange(len(rows["target"])) % 2
        return self.losses(rows["inputs"], rows["target"] + turn)


class CollatedInCompany(Plain):
    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        return super().collate_rows(rows) | {"company": torch.full((len(rows),), float(len(rows)))}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) * rows["company"]


class AugmentedAndCentred(Plain):
    """A collation that adds noise to each row and then centres by the batch, before any check sees the rows."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        inputs = found["inputs"] + 0.01 * torch.randn_like(found["inputs"])
        return found | {"inputs": inputs - inputs.mean(0)}


class PreparedFromTheBatch(Plain):
    """A loss that computes the batch statistic in the hook that prepares its other inputs."""

    def before_batch(self, batch: UnitBatch) -> None:
        self.centre = batch.rows["target"].mean()

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"] - self.centre)


class PreparedRows(Plain):
    """A hook that writes the statistic into the rows after collation and before any comparison."""

    def before_batch(self, batch: UnitBatch) -> None:
        batch.rows["target"] -= batch.rows["target"].mean()


class Step:
    """A value computed once per step for all its physical batches; kept in an object, as real code does."""

    __slots__ = ("made", "queue", "step")

    def __init__(self) -> None:
        self.step, self.made, self.queue = -1, torch.zeros(()), [0.0]

    def mean(self, step: int, target: Tensor) -> Tensor:
        if step != self.step:
            self.step, self.made = step, target.detach().mean()
        return self.made

    def earlier(self, step: int, target: Tensor) -> float:
        """Return the value of the previous step, as MoCo's queue keeps its keys."""
        if step != self.step:
            self.step = step
            self.queue.append(float(target.detach().sum()))
        return self.queue[-2]


class CentredOncePerStep(Plain):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.kept = Step()

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"] - self.kept.mean(self.trainer.global_step, rows["target"]))


class CentredOncePerStepInAClosure(Plain):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        kept = Step()
        self.centre = lambda target: target - kept.mean(self.trainer.global_step, target)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], self.centre(rows["target"]))


class FittedOnceInAnObject(CentredOncePerStep):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"] - self.kept.mean(self.trainer.current_epoch, rows["target"]))


class CentredByACache(Plain):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.mean_of = lru_cache(maxsize=1)(lambda step: self.now.mean())

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        self.now = rows["target"].detach()
        return self.losses(rows["inputs"], rows["target"] - self.mean_of(self.trainer.current_epoch))


class QueueOncePerStep(CentredOncePerStep):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        earlier = self.kept.earlier(self.trainer.global_step, rows["target"])
        return self.losses(rows["inputs"], rows["target"] - earlier)


class MinesInLargeBatches(Plain):
    """A loss that trains only on the harder half if there are enough rows to choose from."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found if len(found) < 10 else found * (found.detach() >= found.detach().median())


class TrimsATenth(Plain):
    """A loss that drops the largest tenth of the losses: none if there are fewer than ten rows."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        out = found.detach().topk(len(found) // 10).indices
        return found.index_fill(0, out, 0.0)


class GradientAloneInLargeBatches(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found if len(found) < 10 else found.detach() + (found - found.detach()) * found.detach().mean()


class DividedByManyRows(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found if len(found) < 10 else found / len(found)


class Fitted:
    """A normaliser that holds the mean of the rows that it was fitted on."""

    def __init__(self, rows: Tensor) -> None:
        self.mean = rows.detach().mean(0)

    def __call__(self, rows: Tensor) -> Tensor:
        return rows - self.mean


def fitted_closure(rows: Tensor) -> Any:
    mean = rows.detach().mean(0)
    return lambda x: x - mean


class FittedAtFirstUse(Plain):
    make: Any = Fitted

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.normalise: Any = None

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if self.normalise is None:
            self.normalise = type(self).make(rows["inputs"])
        return self.losses(self.normalise(rows["inputs"]), rows["target"])


class FittedClosureAtFirstUse(FittedAtFirstUse):
    make = staticmethod(fitted_closure)


class FittedInADict(Plain):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.kept: dict[str, Any] = {}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if "normalise" not in self.kept:
            self.kept["normalise"] = Fitted(rows["inputs"])
        return self.losses(self.kept["normalise"](rows["inputs"]), rows["target"])


class FittedInEachStep(Plain):
    """A loss that normalises by what it fitted on the first batch of a step, kept in a dict of many objects."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.kept: dict[Any, Any] = {"before": Fitted(torch.zeros(1, 4))}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        step = self.trainer.global_step
        if step not in self.kept:
            self.kept[step] = Fitted(rows["inputs"])
        return self.losses(self.kept[step](rows["inputs"]), rows["target"])


class ScaledInLowPrecision(Plain):
    """A loss that scales activations by the largest one of the batch, as eight-bit recipes do."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        hidden = self.net[1](self.net[0](rows["inputs"]))
        if torch.is_autocast_enabled("cpu") or hidden.dtype == torch.bfloat16:
            hidden = hidden / hidden.detach().abs().max()
        return (self.net[3](hidden).squeeze(-1).float() - rows["target"]).square()


class QuantisedInLowPrecision(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        hidden = self.net[1](self.net[0](rows["inputs"]))
        if torch.is_autocast_enabled("cpu") or hidden.dtype == torch.bfloat16:
            step = hidden.detach().abs().max() / 127
            hidden = hidden + ((hidden / step).round() * step - hidden).detach()
        return (self.net[3](hidden).squeeze(-1).float() - rows["target"]).square()


class ClipsGradientsLater(Plain):
    """A loss with a hook that clips the gradient of a batch at the head, after a warm-up."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        hidden = self.net[0](rows["inputs"])
        if self.trainer.global_step > 0 and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * (0.1 / gradient.norm()).clamp(max=1.0))
        return (self.net[3](hidden.tanh()).squeeze(-1) - rows["target"]).square()


COUPLED = (
    MinesInLargeBatches, TrimsATenth, GradientAloneInLargeBatches, DividedByManyRows, FittedAtFirstUse,
    FittedClosureAtFirstUse, FittedInADict, FittedInEachStep,
    PreparedFromTheBatch, PreparedRows, CentredOncePerStep, CentredOncePerStepInAClosure, FittedOnceInAnObject,
    CentredByACache, QueueOncePerStep, Mixup, CentredTargets, SignOfTheBatch, WeaklyCoupled, DividedByTheNumberOfRows,
    CollatedInCompany, AugmentedAndCentred, ByPlace, FittedOnTheFirstBatch, GradientAlone, GradientAloneInBlocks,
    Remembering, RememberingInAQueue, RememberingInAClosure, RememberingInAGlobal, RememberingInPlace,
)  # fmt: skip


def train(folder: Path, module: type[Any], **settings: Any) -> Any:
    torch.manual_seed(0)
    GLOBAL.clear()
    fitted = module(privacy=dp(folder, noise_seed=SEED))  # a batch of one unit may reveal what a larger one does not
    fit(folder / "run", fitted, **settings)
    return fitted


def refused(folder: Path, module: type[Any], *, named: str = "", trap: str = "T11", **settings: Any) -> None:
    """Check that training a module is refused with the trap, by a message that matches ``named``."""
    with pytest.raises((UnsupportedModelError, ConfigurationError), match=named) as refusal:
        train(folder, module, **settings)
    assert refusal.value.trap == trap
