"""Losses that couple rows where no engine sees it: each is refused by a real fit, and honest modules are not."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from coupled_losses import (
    COUPLED,
    SEED,
    CentredOncePerStep,
    ClipsGradientsLater,
    Plain,
    PlainInBlocks,
    Remembering,
    refused,
    train,
)
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from torch import Tensor, nn

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.modules.coupling_passes import Passes
from lit_dpret.modules.coupling_values import FixedCoins, shortened
from lit_dpret.modules.kept_state import Looks
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.state_watch import StateWatch

Patch = pytest.MonkeyPatch


@pytest.mark.costly
@pytest.mark.parametrize("module", COUPLED, ids=lambda module: module.__name__)
def test_a_loss_that_couples_rows_is_refused_before_anything_is_released(module: type[Any], tmp_path: Path) -> None:
    refused(tmp_path, module)
    assert '"intent"' not in (tmp_path / "run" / "privacy_ledger.jsonl").read_text()


class QueueByACounter(CentredOncePerStep):
    """Pushes once for each batch that a hook counts."""

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


@pytest.mark.costly
def test_a_queue_of_earlier_rows_is_empty_in_every_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = QueueByACounter(privacy=dp(tmp_path, noise_seed=SEED, noise_multiplier=4.0))
    with pytest.warns(UserWarning, match="SimpleNamespace.made"):
        fit(tmp_path / "run", module, steps=12)
    assert not module.kept.made and not module.kept.earlier and module.kept.step > 3


class CoupledFromStepThree(Plain):
    """Begins to couple rows when the first batches have been looked at."""

    calls = 0

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.losses(rows["inputs"], rows["target"])
        late = self.trainer.global_step >= 3
        return found * rows["target"].mean() if late else found


def test_a_coupling_that_begins_later_is_found_in_a_later_batch_and_leaves_no_claim(tmp_path: Path) -> None:
    refused(tmp_path, CoupledFromStepThree, named="other rows")
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert any(isinstance(release, NonPrivateRelease) for release in charged_releases(records))


class CoupledInTheThirdBatchAlone(Plain):
    """Couples rows in one batch alone, and only where there are many of them."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.losses(rows["inputs"], rows["target"])
        coupled = self.trainer.global_step == 1 and len(found) > 10
        return found * (1 + rows["target"].mean()) if coupled else found


class EveryBatch(Looks):
    def due(self, coin: int) -> bool:
        self.made += 1
        return True


@pytest.mark.parametrize("module", [CoupledInTheThirdBatchAlone, ClipsGradientsLater])
def test_what_couples_rows_in_a_later_batch_alone_is_found_there(
    module: type[Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Looks, "due", EveryBatch.due)
    refused(tmp_path, module)


class WritesInTheSixthStep(Plain):
    """Sets a weight to a mean of private rows in a batch in which no values are compared."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        if self.trainer.global_step == 5:
            self.net[3].bias.data.zero_().add_(rows["target"].mean())
        return super().per_row_loss(rows)


def test_a_weight_that_is_written_in_any_step_is_refused_before_the_next_update(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Looks, "due", lambda *_: False)
    monkeypatch.setattr(StateWatch, "_compares_values", False)
    refused(tmp_path, WritesInTheSixthStep, named=r"net\.3\.bias")


@pytest.mark.costly
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
    """Noise of each row's own from every global generator, and counts that no loss reads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls, self.sums = 0, {"seen": torch.zeros(2)}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        self.sums["seen"] = self.sums["seen"] + 1  # of calls, not of rows
        inputs = rows["inputs"] + 0.1 * torch.randn_like(rows["inputs"]) + 0.01 * random.random()
        inputs = inputs + 0.01 * float(np.random.rand()) + 0.01 * torch.rand(())
        return self.losses(nn.functional.dropout(inputs, 0.2), rows["target"])


class LastLoss(Plain):
    """Keeps private numbers of the last batch that no later loss reads, as many modules do for their own logs."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        self.last = {"loss": found.detach(), "rows": [rows["target"]]}
        return found


class Caching(Plain):
    """Keeps in an object what follows from a row alone, and private numbers unread; its temperature has the steps."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.state = SimpleNamespace(of_row={}, calls=0, ready=None, last=None)

    def before_batch(self, batch: UnitBatch) -> None:
        self.state.calls += 1
        batch.rows["doubled"] = 2 * batch.rows["target"]

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        state = self.state
        if state.ready is None:
            state.ready = torch.ones(2)
        state.last = rows["target"].detach()
        known = [state.of_row.setdefault(float(x[0]), x[0].detach().sin()) for x in rows["inputs"]]
        target = rows["doubled"] - torch.stack(known) * state.ready[0]
        return self.losses(rows["inputs"], target) / 0.9**self.trainer.global_step


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


TABLE = {
    "names": np.array(["cat", "dog"]),
    "missing": np.array([1.0, np.nan]),
    "scale": np.array(2.0),
    "when": np.array(["2020"], "datetime64"),
}


class Frozen(dict[str, int]):
    def clear(self) -> None:
        raise TypeError

    update = clear


class ReadsConstants(Plain):
    """Texts, missing values, dates and large numbers that the loss reads and nobody writes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.best, self.key, self.longest = float("nan"), 2**70, np.ones(2, np.longdouble)
        self.sparse, self.objects = torch.eye(3).to_sparse(), np.array([None, "a"], dtype=object)
        self.frozen, self.frequencies, self.tree = Frozen(a=1), Counter([1, 1, 2]), dict[str, Any](leaf=[1])
        self.tree["leaf"].append(self.tree)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        known = [TABLE, self.best, self.key, self.longest, self.sparse, self.objects, TABLE["names"], TABLE["missing"]]
        known += [self.frozen, self.frequencies, self.tree]
        return super().per_row_loss(rows) * (self.frequencies[1] - 1 + 0 * len(known))


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


class Checkpointed(Plain):
    """Computes a part with dropout again in its backward pass."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = torch.utils.checkpoint.checkpoint(self.net, rows["inputs"], use_reentrant=False)
        return (found.squeeze(-1) - rows["target"]).square()


class DrawsLater(Plain):
    """Drops inputs when the first batches have been looked at."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(dropout=0.0, **settings)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.losses(nn.functional.dropout(rows["inputs"], 0.5 * (self.trainer.global_step > 1)), rows["target"])


class Learnt(Regression):
    """All rows but for rounding have a loss of zero, and gradients of nothing but rounding."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        logits = 16.6 + 1e-3 * self.net(rows["inputs"]).squeeze(1)
        return nn.functional.binary_cross_entropy(logits.sigmoid(), torch.ones_like(logits), reduction="none")


class NoisyWithAGraph(Plain):
    """Adds noise to its inputs where gradients are taken, as an augmentation may ask."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        noise = 0.1 * torch.randn_like(rows["inputs"]) if torch.is_grad_enabled() else 0.0
        return self.losses(rows["inputs"] + noise, rows["target"])


def test_a_loss_that_is_another_one_with_a_graph_is_compared_without_one(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Looks, "due", EveryBatch.due)
    train(tmp_path, NoisyWithAGraph)


HONEST = [Plain, PlainInBlocks, Augmented, LastLoss, Caching, NoNumberInSomeRecords, NoNumberAndCoins,
          TowerOfSomeRows, Checkpointed, DrawsLater, ReadsConstants]  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize(("module", "rows"), [*product(HONEST, ("one", "all")), (Learnt, "one")])
def test_an_honest_module_trains(module: type[Any], rows: str, tmp_path: Path) -> None:
    train(tmp_path, module, data=Numbers(rows_per_unit=rows, physical_batch_size=4 if rows == "one" else 16))


@pytest.mark.costly
def test_what_is_looked_at_changes_no_weight_and_no_state(tmp_path: Path, monkeypatch: Patch) -> None:
    found = []
    for look in (CouplingCheck.look, lambda *_: None):
        monkeypatch.setattr(CouplingCheck, "look", look)
        torch.manual_seed(0)
        module = LastLoss(privacy=dp(tmp_path, noise_seed=1))
        module.public_metrics = ("last",)  # else it would be put back
        fit(tmp_path / f"run{len(found)}", module)
        found.append((module.state_dict(), module.last["loss"]))
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])
    assert torch.equal(found[0][1], found[1][1])


class Unrepeatable(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * random.SystemRandom().random()


def test_randomness_that_cannot_be_repeated_is_called_that(tmp_path: Path) -> None:
    refused(tmp_path, Unrepeatable, named="in per_row_loss from torch")


def test_fixed_coins_give_a_row_the_same_in_a_batch_of_any_size() -> None:
    def drawn(rows: int) -> Tensor:
        x = torch.ones(rows, 3)
        parts = [torch.rand(rows, 3), torch.randn(rows, 3), torch.rand_like(x), torch.bernoulli(x * 0.5)]
        parts += [nn.functional.dropout(x, 0.5), torch.empty(rows, 3).exponential_(), nn.functional.alpha_dropout(x)]
        parts += [torch.randint(0, 9, (rows, 3)), torch.multinomial(x, 3, replacement=True), torch.normal(x, x)]
        one = x[:, None, None]
        heads = nn.functional.scaled_dot_product_attention(one, one, one, dropout_p=0.5)
        return torch.cat([*parts, heads.flatten(1)], dim=1)

    with FixedCoins():
        few, many = drawn(2), drawn(7)
    assert torch.equal(few, many[:2])


@pytest.mark.costly
def test_batches_of_one_unit_are_compared_with_those_before_them(tmp_path: Path) -> None:
    refused(tmp_path, Remembering, named="keeps of one batch", data=Numbers(physical_batch_size=1))
    train(tmp_path / "honest", Plain, data=Numbers(physical_batch_size=1))


class EveryFourthStep(Plain):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        found = super().per_row_loss(rows)
        return found * rows["target"].mean() if self.trainer.global_step % 4 == 2 else found


@pytest.mark.costly
def test_a_coupling_with_a_rhythm_meets_a_batch_that_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="other rows"):
        for seed in range(8):  # a run meets such a batch by its own coins; at places without a coin none of them would
            torch.manual_seed(0)
            module = EveryFourthStep(privacy=dp(tmp_path, noise_seed=seed, noise_multiplier=2.0))
            fit(tmp_path / f"{seed}", module, steps=24)


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
    refused(tmp_path, module, named="per_row_loss", trap="T7")


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


@pytest.mark.costly
def test_gradients_that_consist_of_rounding_errors_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "saturated", SaturatedAttention, named=r"privacy\.engine=loop")
    train(tmp_path / "plain", Attention)
    apart = SaturatedAttention(privacy=dp(tmp_path / "apart", noise_seed=SEED, engine="loop"))
    fit(tmp_path / "apart" / "run", apart)
