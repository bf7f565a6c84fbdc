"""Losses that couple rows where no engine sees it: each is refused by a real fit, and honest modules are not."""

from __future__ import annotations

import random
from collections import deque
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from torch import Tensor, nn

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import coupling_passes
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.modules.coupling_passes import Passes, shortened
from lit_dpret.modules.module_state import Looks
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.batches import UnitBatch, copied_rows
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases

Patch = pytest.MonkeyPatch
GLOBAL: list[Tensor] = []
SEED = 1


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
    """The loss is the row's own; its gradient is multiplied by a statistic of the batch."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.losses(rows["inputs"], rows["target"])
        return found.detach() + (found - found.detach()) * rows["target"].square().mean()


class InBlocks:
    """As where no process may hold the gradient of all weights (`PrivateModule.in_blocks`)."""

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
    """One part in two hundred from the batch, below what was once taken for rounding."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) * (1 + 5e-3 * rows["target"].mean().tanh())


class Remembering(Plain):
    """Its targets follow those of the batch before; ``keep`` says where they are kept."""

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
    """A tensor that is too large for copies to be made of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.bank = torch.zeros(4)

    def remember(self, value: Tensor) -> None:
        self.bank[0] = value

    def recall(self) -> Tensor:
        return self.bank[0].clone()


class FittedOnTheFirstBatch(Plain):
    """Centres targets by a mean that it takes from the first rows that it sees."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if not hasattr(self, "centre"):
            self.centre = rows["target"].mean()
        return self.losses(rows["inputs"], rows["target"] - self.centre)


class ByPlace(Plain):
    """Every other row has another target, whoever it is."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        turn = torch.arange(len(rows["target"])) % 2
        return self.losses(rows["inputs"], rows["target"] + turn)


class CollatedInCompany(Plain):
    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        return super().collate_rows(rows) | {"company": torch.full((len(rows),), float(len(rows)))}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) * rows["company"]


class AugmentedAndCentred(Plain):
    """Noise of each row's own, and then a statistic of the batch, before anybody sees the rows."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        inputs = found["inputs"] + 0.01 * torch.randn_like(found["inputs"])
        return found | {"inputs": inputs - inputs.mean(0)}


class PreparedFromTheBatch(Plain):
    """Takes the statistic of the batch in the hook that prepares further inputs of the loss."""

    def before_batch(self, batch: UnitBatch) -> None:
        self.centre = batch.rows["target"].mean()

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"] - self.centre)


class PreparedRows(Plain):
    """Writes the statistic into the rows, after these were collated and before anybody compares them."""

    def before_batch(self, batch: UnitBatch) -> None:
        batch.rows["target"] -= batch.rows["target"].mean()


class Step:
    """Keeps what is made once for each step, for all of its physical batches; in an object, as such code does."""

    __slots__ = ("made", "queue", "step")

    def __init__(self) -> None:
        self.step, self.made, self.queue = -1, torch.zeros(()), [0.0]

    def mean(self, step: int, target: Tensor) -> Tensor:
        if step != self.step:
            self.step, self.made = step, target.detach().mean()
        return self.made

    def earlier(self, step: int, target: Tensor) -> float:
        """Return the number of the step before, as MoCo's queue has its keys."""
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


COUPLED = (
    PreparedFromTheBatch, PreparedRows, CentredOncePerStep, CentredOncePerStepInAClosure, FittedOnceInAnObject,
    CentredByACache, QueueOncePerStep, Mixup, CentredTargets, SignOfTheBatch, WeaklyCoupled, DividedByTheNumberOfRows,
    CollatedInCompany, AugmentedAndCentred, ByPlace, FittedOnTheFirstBatch, GradientAlone, GradientAloneInBlocks,
    Remembering, RememberingInAQueue, RememberingInAClosure, RememberingInAGlobal, RememberingInPlace,
)  # fmt: skip


def train(folder: Path, module: type[Any], **settings: Any) -> Any:
    torch.manual_seed(0)
    GLOBAL.clear()
    fitted = module(privacy=dp(folder, noise_seed=SEED))  # a batch of one unit may show what a larger one does not
    fit(folder / "run", fitted, **settings)
    return fitted


@pytest.mark.parametrize("module", COUPLED, ids=lambda module: module.__name__)
def test_a_loss_that_couples_rows_is_refused_before_anything_is_released(module: type[Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path, module)
    assert refusal.value.trap == "T11"
    assert '"intent"' not in (tmp_path / "run" / "privacy_ledger.jsonl").read_text()


class QueueByACounter(CentredOncePerStep):
    """Pushes once for each batch that a hook counts, so that no pass of a check pushes anything."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.counted = batch_idx

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        kept = self.kept
        if kept.counted != kept.step:
            kept.step, kept.earlier, kept.made = kept.counted, kept.made, rows["target"].detach().sum()
        return self.losses(rows["inputs"], rows["target"] - kept.earlier)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.kept: Any = SimpleNamespace(counted=-1, step=-1, made=torch.zeros(()), earlier=torch.zeros(()))


def test_what_earlier_batches_left_is_found_where_no_pass_writes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = QueueByACounter(privacy=dp(tmp_path, noise_seed=SEED, noise_multiplier=4.0))
    with pytest.raises(UnsupportedModelError, match="earlier batches left in ") as refusal:
        fit(tmp_path / "run", module, steps=12)
    assert refusal.value.trap == "T11"


class CountsWhatCameBefore(Plain):
    """A row's part is smaller the more rows stand before it, as where a passage counts once in a batch."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        before = rows["inputs"][:, :1].abs().cumsum(0).squeeze(1) - rows["inputs"][:, 0].abs()
        return self.losses(rows["inputs"], rows["target"]) / (1 + before)


@pytest.mark.parametrize(("module", "units"), [(Remembering, 1), (CountsWhatCameBefore, 8)])
def test_in_low_precision_it_is_refused_as_well(module: type[Any], units: int, tmp_path: Path) -> None:
    data = Numbers(sampling="poisson", physical_batch_size=units)
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path, module, data=data, precision="bf16-mixed", steps=4)
    assert refusal.value.trap == "T11"


class CountsAPassageOnce(Plain):
    """Of the rows that are collated together, the first one with a passage has a loss."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        seen = [row.passage for row in rows]
        first = torch.tensor([float(text not in seen[:place]) for place, text in enumerate(seen)])
        return super().collate_rows(rows) | {"first": first}

    def place_rows(self, features: Any, places: Any, rows: int) -> Any:
        return copied_rows(features, places, rows)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(rows["inputs"], rows["target"]) * rows["first"]


class CountsAPassageOnceInOneShape(CountsAPassageOnce):
    fixed_shapes = True


@pytest.mark.parametrize(
    ("module", "units", "precision"),
    [
        (CountsAPassageOnce, 2, "32-true"), (CountsAPassageOnceInOneShape, 16, "32-true"),
        (CountsAPassageOnceInOneShape, 2, "32-true"), (CountsAPassageOnce, 2, "bf16-mixed"),
        (CountsAPassageOnce, 3, "bf16-true"), (CountsAPassageOnce, 16, "bf16-true"),
    ],
)  # fmt: skip
def test_a_row_that_depends_on_rows_before_it_in_the_same_collation_is_refused(
    module: type[Any], units: int, precision: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    for other in ("compare_company", "compare_sizes", "compare_histories"):  # which may meet it by luck, or not
        monkeypatch.setattr(Passes, other, lambda *_, **__: None)
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path, module, data=Numbers(physical_batch_size=units), precision=precision, steps=1)
    assert refusal.value.trap == "T11"


class CoupledFromStepThree(Plain):
    """Begins to couple rows when the first batches have been looked at."""

    calls = 0

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.losses(rows["inputs"], rows["target"])
        late = self.trainer.global_step >= 3
        return found * rows["target"].mean() if late else found


def test_a_coupling_that_begins_later_is_found_in_a_later_batch_and_leaves_no_claim(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="other rows"):
        train(tmp_path, CoupledFromStepThree)
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert any(isinstance(release, NonPrivateRelease) for release in charged_releases(records))


def test_a_resumed_run_is_looked_at_again(tmp_path: Path, monkeypatch: Patch) -> None:
    looked: list[int] = []
    company = Passes.compare_company

    def seen(self: Any, *rest: Any, **settings: Any) -> None:
        looked.append(self.module.trainer.global_step)
        company(self, *rest, **settings)

    monkeypatch.setattr(Passes, "compare_company", seen)
    with pytest.raises(Killed):
        train(tmp_path, Plain, extra=[KillAt(3)])
    looked.clear()
    train(tmp_path, Plain, resume=True)
    assert looked[0] == 2  # the first batch after the checkpoint of step 2


class Augmented(Plain):
    """Noise of each row's own from every generator that there is, and a schedule by the number of calls."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls, self.sums, self.own = 0, {"seen": torch.zeros(2)}, np.random.default_rng(0)
        self.coins = torch.Generator().manual_seed(1)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        self.sums["seen"] = self.sums["seen"] + 1  # of calls, not of rows
        inputs = rows["inputs"] + 0.1 * torch.randn_like(rows["inputs"]) + 0.01 * random.random()
        inputs = inputs + 0.01 * float(np.random.rand()) + 0.01 * float(self.own.random())
        inputs = inputs + 0.01 * torch.rand((), generator=self.coins)
        return self.losses(nn.functional.dropout(inputs, 0.2), rows["target"]) * (1 + 1 / self.calls)


class LastLoss(Plain):
    """Keeps private numbers of the last batch that no later loss reads, as many modules do for their own logs."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        self.last = {"loss": found.detach(), "rows": [rows["target"]]}
        return found


class Caching(Plain):
    """Keeps in an object what follows from a row alone, what follows from the steps, and private numbers unread."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.state = SimpleNamespace(of_row={}, temperature=1.0, calls=0, ready=None, last=None)

    def before_batch(self, batch: UnitBatch) -> None:
        self.state.calls += 1
        batch.rows["doubled"] = 2 * batch.rows["target"]

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        state = self.state
        if state.ready is None:
            state.ready = torch.ones(2)
        state.temperature *= 0.9
        state.last = rows["target"].detach()
        known = [state.of_row.setdefault(float(x[0]), x[0].detach().sin()) for x in rows["inputs"]]
        target = rows["doubled"] - torch.stack(known) * state.ready[0]
        return self.losses(rows["inputs"], target) / state.temperature


class NoNumberInSomeRecords(Plain):
    """A feature of every third record is NaN, that of the first one too: it adds nothing, and ends no run."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        broken = torch.tensor([int(row.query) % 3 == 0 for row in rows])
        return found | {"inputs": found["inputs"].masked_fill(broken[:, None], torch.nan)}


class NoNumberAndCoins(NoNumberInSomeRecords):
    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        return found | {"target": found["target"] + 0.01 * torch.randn_like(found["target"])}


class TowerOfSomeRows(Plain):
    """A part that is not called where no row of the batch needs it, and so has no gradient there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(dropout=0.0, **settings)
        self.tower = nn.Linear(4, 1)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.net(rows["inputs"]).squeeze(-1)
        if (needs := rows["inputs"][:, 0] > 0.7).any():
            found = found + needs * self.tower(rows["inputs"]).squeeze(-1)
        return (found - rows["target"]).square()


class DrawsLater(Plain):
    """Drops inputs when the first batches have been looked at."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(dropout=0.0, **settings)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(nn.functional.dropout(rows["inputs"], 0.5 * (self.trainer.global_step > 1)), rows["target"])


@pytest.mark.parametrize(
    "module", [Plain, PlainInBlocks, Augmented, LastLoss, Caching, NoNumberInSomeRecords, NoNumberAndCoins,
               TowerOfSomeRows, DrawsLater]
)  # fmt: skip
@pytest.mark.parametrize("rows", ["one", "all"])
def test_an_honest_module_trains(module: type[Any], rows: str, tmp_path: Path) -> None:
    train(tmp_path, module, data=Numbers(rows_per_unit=rows, physical_batch_size=4 if rows == "one" else 16))


def test_what_is_looked_at_changes_no_weight_and_no_state(tmp_path: Path, monkeypatch: Patch) -> None:
    found = []
    for look in (CouplingCheck.look, lambda *_: None):
        monkeypatch.setattr(CouplingCheck, "look", look)
        torch.manual_seed(0)
        module = LastLoss(privacy=dp(tmp_path, noise_seed=1))
        fit(tmp_path / f"run{len(found)}", module)
        found.append((module.state_dict(), module.last["loss"]))
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])
    assert torch.equal(found[0][1], found[1][1])


class Unrepeatable(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * random.SystemRandom().random()


def test_randomness_that_cannot_be_repeated_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="in per_row_loss from torch"):
        train(tmp_path, Unrepeatable)


def test_fixed_coins_give_a_row_the_same_in_a_batch_of_any_size() -> None:
    def drawn(rows: int) -> Tensor:
        x = torch.ones(rows, 3)
        parts = [torch.rand(rows, 3), torch.randn(rows, 3), torch.rand_like(x), torch.bernoulli(x * 0.5)]
        parts += [nn.functional.dropout(x, 0.5), torch.empty(rows, 3).exponential_(), nn.functional.alpha_dropout(x)]
        parts += [torch.randint(0, 9, (rows, 3)), torch.multinomial(x, 3, replacement=True), torch.normal(x, x)]
        one = x[:, None, None]
        heads = nn.functional.scaled_dot_product_attention(one, one, one, dropout_p=0.5)
        return torch.cat([*parts, heads.flatten(1)], dim=1)

    with coupling_passes._FixedCoins():
        few, many = drawn(2), drawn(7)
    assert torch.equal(few, many[:2])


def test_batches_of_one_unit_are_compared_with_those_before_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="keeps of one batch"):
        train(tmp_path, Remembering, data=Numbers(physical_batch_size=1))
    train(tmp_path / "honest", Plain, data=Numbers(physical_batch_size=1))


class MaskedInCollation(Plain):
    """Drops numbers of each row by chance while rows are collated, as masked language models do."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        return found | {"inputs": found["inputs"] * (torch.rand_like(found["inputs"]) > 0.2)}


def test_rows_that_are_collated_at_random_are_not_taken_for_coupled(tmp_path: Path) -> None:
    train(tmp_path, MaskedInCollation)


class EveryFourthStep(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found * rows["target"].mean() if self.trainer.global_step % 4 == 2 else found


def test_a_coupling_with_a_rhythm_meets_a_batch_that_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="other rows"):
        for seed in range(8):  # a run meets such a batch by its own coins; at places without a coin none of them would
            torch.manual_seed(0)
            module = EveryFourthStep(privacy=dp(tmp_path, noise_seed=seed, noise_multiplier=2.0))
            fit(tmp_path / f"{seed}", module, steps=24)


class FilledUpLater(Plain):
    """From the second step on fills rows up to the longest of the batch, and the loss shows it."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        if self._trainer is not None and self.trainer.global_step > 0:
            found["filling"] = torch.ones(len(rows), 1 + max(int(row.query) for row in rows) // 10)
        return found

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found * rows["filling"].sum(1) if "filling" in rows else found


def test_a_collation_that_couples_rows_from_the_second_step_on_is_refused(tmp_path: Path) -> None:
    module = FilledUpLater(privacy=dp(tmp_path, noise_seed=1, noise_multiplier=2.0))
    with pytest.raises(UnsupportedModelError, match="other rows"):
        fit(tmp_path / "run", module, steps=24)


def test_the_first_batch_is_looked_at_and_then_about_one_in_every_doubling() -> None:
    missed = {place: 0 for place in range(4)}
    for run in range(200):
        coins, looks = random.Random(run), Looks()
        seen = [count for count in range(1, 1001) if looks.due(coins.getrandbits(60))]
        assert seen[0] == 1 and 8 <= len(seen) <= 15
        assert all(1.5 * earlier - 1 <= later <= 2.5 * earlier for earlier, later in pairwise(seen))
        for place in missed:
            missed[place] += all(count % 4 != place for count in seen)
    assert max(missed.values()) < 30  # of what happens in every fourth batch; without coins it might be all 200


class OrdinaryStep(Plain):
    """Trains as any LightningModule does, past the clipping and the noise."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch.rows is None:
            return
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.per_row_loss(batch.rows).mean().backward()
        optimizer.step()


class OneStepMore(OrdinaryStep):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        Regression.training_step(self, batch, batch_idx)
        OrdinaryStep.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("module", [OrdinaryStep, OneStepMore])
def test_an_update_that_was_not_granted_is_refused(module: type[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="per_row_loss") as refusal:
        train(tmp_path, module)
    assert refusal.value.trap == "T7"


class GrowsAVocabulary(Plain):
    """Numbers words in the order in which they come, so a row's features depend on who came before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocabulary: dict[str, int] = {}

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        places = [self.vocabulary.setdefault(row.query, len(self.vocabulary)) for row in rows]
        return super().collate_rows(rows) | {"place": torch.tensor(places)}


class Vocabulary:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        return self.ids.setdefault(word, len(self.ids))


class GrowsAnObject(Plain):
    """The same in an object that is not plain data."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocabulary = Vocabulary()

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        places = torch.tensor([self.vocabulary(row.query) for row in rows])
        return super().collate_rows(rows) | {"place": places}


def test_what_an_object_remembers_is_found_in_copies_of_the_module(tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        train(tmp_path / "found", GrowsAnObject)
    assert refusal.value.trap == "T11"
    monkeypatch.setattr(coupling_passes, "_copy_without_weights", lambda module: module)
    train(tmp_path / "not", GrowsAnObject)


OF_THE_FILE = np.random.default_rng(3)


class DrawsFromItsOwn(Plain):
    """Augments rows from a generator that it keeps, from which rows take numbers in turn."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.coins: Any = np.random.default_rng(3)

    def coin(self, row: Any) -> float:
        return float(self.coins.random())

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        return found | {"inputs": found["inputs"] + torch.tensor([[self.coin(row)] for row in rows])}


class DrawsFromTorchs(DrawsFromItsOwn):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.coins = {"coins": [torch.Generator().manual_seed(3)]}

    def coin(self, row: Any) -> float:
        """Nearly always zero: two looks do not show it, and the generator's state does."""
        return float(torch.rand((), generator=self.coins["coins"][0]) < 1e-6)


class DrawsFromTheFiles(DrawsFromItsOwn):
    def coin(self, row: Any) -> float:
        return float(OF_THE_FILE.random())


class SeedsItsOwnForEachRow(DrawsFromItsOwn):
    def coin(self, row: Any) -> float:
        self.coins = np.random.default_rng([3, int(row.query)])
        return super().coin(row)


@pytest.mark.parametrize("module", [DrawsFromItsOwn, DrawsFromTorchs, DrawsFromTheFiles])
def test_rows_that_take_numbers_from_a_generator_in_turn_are_refused(module: type[Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="generator of its own") as refusal:
        train(tmp_path, module)
    assert refusal.value.trap == "T11"


def test_a_generator_that_is_seeded_for_each_row_is_no_memory(tmp_path: Path) -> None:
    train(tmp_path, SeedsItsOwnForEachRow)


class KeepsWhatItCollated(Plain):
    """A cache: rows are the same with it and without."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cache: dict[str, float] = {}

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = [self.cache.setdefault(row.query, float(len(row.query))) for row in rows]
        return super().collate_rows(rows) | {"length": torch.tensor(found)}


def test_a_collation_that_remembers_is_refused_and_a_cache_is_not(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="keeps of one batch"):
        train(tmp_path, GrowsAVocabulary)
    train(tmp_path / "cached", KeepsWhatItCollated)


class MixesOnTheDevice(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.rows["inputs"] = batch.rows["inputs"] - batch.rows["inputs"].mean(0)
        return batch


def test_batches_that_are_changed_on_the_way_to_the_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="on_after_batch_transfer") as refusal:
        train(tmp_path, MixesOnTheDevice)
    assert refusal.value.trap == "T11"


class MixesBeforeTheStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch.rows is not None:
            batch.rows["inputs"] = batch.rows["inputs"] - batch.rows["inputs"].mean(0)
        super().training_step(batch, batch_idx)


def test_rows_that_are_mixed_before_the_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="inputs"):
        train(tmp_path, MixesBeforeTheStep)


@pytest.mark.slow
def test_the_card_says_which_code_it_trusts(tmp_path: Path) -> None:
    fit(tmp_path / "run", Plain(privacy=dp(tmp_path)), extra=[PrivacyCard(run_dir=tmp_path / "run")])
    card = read_card(tmp_path / "run" / "privacy_card.json")
    assert any(a["text"].startswith("Plain, Numbers: in this code") and a["holds"] == "unverified"
               for a in card["assumptions"])  # fmt: skip
    assert card["claim"]["guarantee"] == "dp"


class Attention(Regression):
    """Attends over 17 places that are made of the row's numbers, times ``scale``."""

    scale = 1.0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.ModuleList([nn.Linear(4, 16) for _ in range(3)] + [nn.Linear(16, 1)])  # type: ignore[assignment]

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        steps = torch.arange(1.0, 18.0)[:, None].sin()
        places = rows["inputs"][:, None] * steps + steps.cos()
        q, k, v = (layer(places).unflatten(2, (2, 8)).transpose(1, 2) for layer in self.net[:3])
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (self.net[3](heads.mean(1)).squeeze(1) - rows["target"]).square()


def test_a_shortened_gradient_keeps_lengths_and_distances() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 700, 411)
    other = one + 1e-3 * other
    short, near = shortened(one), shortened(other)
    assert short.shape == (4096,) and torch.equal(short, shortened(one))
    for found, exact in ((short.norm(), one.norm()), ((near - short).norm(), (other - one).norm())):
        assert 0.9 < found / exact < 1.1, "more than four standard deviations of 2.2 percent"
    torch.testing.assert_close(shortened(other - one), near - short, atol=1e-4, rtol=0)
    assert torch.equal(shortened(one[0]), one[0])


class SaturatedAttention(Attention):
    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        features = super().collate_rows(rows)
        large = torch.tensor([int(row.query) % 4 == 0 for row in rows])[:, None]
        return features | {"inputs": torch.where(large, 3e4 * features["inputs"], features["inputs"])}


def test_gradients_that_consist_of_rounding_errors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"privacy\.engine=loop") as refusal:
        train(tmp_path / "saturated", SaturatedAttention)
    assert refusal.value.trap == "T11"
    train(tmp_path / "plain", Attention)
    apart = SaturatedAttention(privacy=dp(tmp_path / "apart", noise_seed=SEED, engine="loop"))
    fit(tmp_path / "apart" / "run", apart)


class Learnt(Regression):
    """All rows but for rounding have a loss of zero, and gradients of nothing but rounding."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        logits = 16.6 + 1e-3 * self.net(rows["inputs"]).squeeze(1)
        return nn.functional.binary_cross_entropy(logits.sigmoid(), torch.ones_like(logits), reduction="none")


def test_rows_that_are_learnt_have_short_gradients_of_rounding_and_are_not_refused(tmp_path: Path) -> None:
    train(tmp_path, Learnt)
