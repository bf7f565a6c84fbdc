"""What code of the user's draws from global generators is each unit's own, in every step, and nobody can try it out."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import Line, Numbers, Regression, dp, fit
from torch import Tensor
from torch.utils.data import DataLoader

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.coupling_collations import CollationPasses
from lit_dpret.privacy.accounting.releases import FullBatch, Poisson, SamplingLaw
from lit_dpret.privacy.batches import Draw, FixedShape, SeededDraws, UnitBatch, copied_rows
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler
from lit_dpret.privacy.user_generators import generators_now, kept_generators, seed_generators, seed_torch

UNITS, LONG = 12, 3
COINS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())), "random": random.random, "numpy": lambda: float(np.random.rand()),
}  # fmt: skip


def words(row: Line, longer: bool) -> int:
    """How many coins a row takes: one unit may have a word more than in the neighbouring data."""
    return 2 + (longer and row.query == str(LONG))


class Dropping:
    """Drops words while rows are collated."""

    def __init__(self, coin: str = "torch", *, longer: bool = False) -> None:
        self.coin, self.longer = COINS[coin], longer

    def __call__(self, rows: list[Line]) -> dict[str, Tensor]:
        kept = [sum(self.coin() for _ in range(words(row, self.longer))) for row in rows]
        return {"who": torch.tensor([int(row.query) for row in rows]), "kept": torch.tensor(kept)}


class Cropping:
    """A data set of somebody's own that draws for each unit; two rows each."""

    def __init__(self, coin: str = "torch", *, longer: bool = False) -> None:
        self.coin, self.longer = COINS[coin], longer

    def __len__(self) -> int:
        return UNITS

    def __getitem__(self, draw: Draw) -> Any:
        row = Line(f"q{draw.unit}", str(draw.unit), "p", "1", frozenset())
        crop = [self.coin() for _ in range(words(row, self.longer))][-1]
        return draw, [] if draw.unit < 0 else [Line("q", row.query, "p", str(crop), frozenset())] * 2


def plain(rows: list[Line]) -> dict[str, Tensor]:
    return {"who": torch.tensor([int(row.query) for row in rows]),
            "kept": torch.tensor([float(row.passage) for row in rows])}  # fmt: skip


def sampler(law: SamplingLaw | None = None, **settings: Any) -> PrivateBatchSampler:
    chosen = {"units": UNITS, "steps_per_epoch": 3, "physical_batch_size": 5} | settings
    return PrivateBatchSampler(law or FullBatch(), stream=KeyedStream(b"s" * 32, "run"), **chosen)


def batches(dataset: Any, collate: Any, *, law: SamplingLaw | None = None, workers: int = 0, **settings: Any) -> Any:
    collator = UnitCollator(collate, "all", **settings)
    own = torch.Generator()  # from which a loader seeds its workers
    return list(
        DataLoader(dataset, batch_sampler=sampler(law), collate_fn=collator, num_workers=workers, generator=own)
    )


def coins_of(found: list[UnitBatch]) -> dict[tuple[int, int], list[float]]:
    """What each unit drew in each step."""
    kept: dict[tuple[int, int], list[float]] = {}
    for batch in found:
        if batch.rows is not None:
            for who, value in zip(batch.rows["who"].tolist(), batch.rows["kept"].tolist(), strict=True):
                kept.setdefault((batch.step, who), []).append(value)
    return kept


@pytest.mark.parametrize("law", [FullBatch(), Poisson(sample_rate=0.5)], ids=["full batch", "poisson"])
@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("place", ["collate_rows", "dataset"])
def test_a_unit_with_a_word_more_moves_the_coins_of_no_other_unit(place: str, coin: str, law: SamplingLaw) -> None:
    found = []
    for longer in (False, True):
        torch.manual_seed(int(longer))  # a public seed plays no part
        random.seed(int(longer))
        np.random.seed(int(longer))
        parts: Any = (
            (Cropping(coin, longer=longer), plain)
            if place == "dataset"
            else (Cropping(), Dropping(coin, longer=longer))
        )
        found.append(coins_of(batches(*parts, law=law)))
    assert found[0].keys() == found[1].keys()
    moved = {who for step, who in found[0] if found[0][step, who] != found[1][step, who]}
    assert moved == {LONG}
    assert len({values[0] for values in found[0].values()}) == len(found[0]), "units or steps share their coins"


class OfASeed(Dropping):
    """Draws from a generator that it makes of the seed that torch was given, so that torch's own stays as it was."""

    def __call__(self, rows: list[Line]) -> dict[str, Tensor]:
        own = np.random.default_rng(torch.initial_seed() % 2**32)
        self.coin = own.random
        return super().__call__(rows)


class InAFork(Dropping):
    """Puts torch's generator back after it drew."""

    def __call__(self, rows: list[Line]) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            return super().__call__(rows)


@pytest.mark.parametrize("kind", [OfASeed, InAFork])
@pytest.mark.parametrize("workers", [0, 2])
def test_nor_where_the_global_generators_are_left_as_they_were(kind: type[Dropping], workers: int) -> None:
    found = [coins_of(batches(Cropping(), kind(longer=longer), workers=workers)) for longer in (False, True)]
    moved = {who for step, who in found[0] if found[0][step, who] != found[1][step, who]}
    assert moved == {LONG}


@pytest.mark.parametrize("place", ["collate_rows", "dataset"])
def test_workers_draw_what_one_process_draws(place: str) -> None:
    parts: Any = (Cropping(), plain) if place == "dataset" else (Cropping(), Dropping())
    assert coins_of(batches(*parts, workers=2)) == coins_of(batches(*parts))


def test_a_resumed_run_draws_what_it_would_have_drawn_and_another_attempt_draws_anew() -> None:
    whole = coins_of(batches(Cropping(), Dropping()))
    for attempt, same in ((0, True), (1, False)):
        resumed = sampler()
        resumed.next_step, resumed.attempt = 2, attempt
        rest = coins_of(list(DataLoader(Cropping(), batch_sampler=resumed, collate_fn=UnitCollator(Dropping(), "all"))))
        assert (rest == {key: value for key, value in whole.items() if key[0] == 2}) is same


def test_the_global_generators_are_afterwards_as_before() -> None:
    before = generators_now()
    batches(Cropping(), Dropping())
    draws = SeededDraws([Draw(1, 0, 0, True, seed=5)])
    assert pickle.loads(pickle.dumps(draws)) == draws and generators_now() == before
    with pytest.raises(ZeroDivisionError):
        batches(Cropping(), lambda rows: torch.rand(()) / (1 // 0))
    assert generators_now() == before


def test_rows_that_draw_nothing_are_collated_at_once() -> None:
    calls: list[int] = []
    batches(Cropping(), lambda rows: [calls.append(len(rows)), plain(rows)][1])
    assert max(calls) == 10


def test_without_a_guarantee_rows_that_draw_are_collated_at_once_under_secret_seeds() -> None:
    padded = lambda rows: {"kept": torch.rand(len(rows), len(rows))}  # noqa: E731
    first, again = (batches(Cropping(), padded, apart=False) for _ in range(2))
    assert torch.equal(first[0].rows["kept"], again[0].rows["kept"]) and first[0].rows["kept"].shape == (10, 10)


@pytest.mark.parametrize(
    "collate",
    [
        lambda rows: {"kept": torch.rand(len(rows), 2 + int(rows[0].query))},
        lambda rows: {"kept": torch.rand(3)},
        lambda rows: {"kept": torch.rand(())},
    ],
    ids=["filled up to the longest", "no axis of rows", "one number"],
)
def test_units_that_cannot_be_collated_apart_are_refused(collate: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"dataset\[draw\]") as refused:
        batches(Cropping(), collate)
    assert refused.value.trap == "T11"


@pytest.mark.parametrize("seeded", [False, True], ids=["global coins", "a generator of the seed"])
def test_right_answers_of_rows_that_are_collated_apart_are_those_of_the_whole_batch(seeded: bool) -> None:
    """A unit alone knows of its own columns only."""

    def collate(rows: list[Line]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(torch.initial_seed()) if seeded else None
        kept = torch.rand(len(rows), generator=generator)
        return {"who": torch.tensor([int(row.query) for row in rows]), "kept": kept,
                "answers": torch.tensor([[one.query == other.query for other in rows] for one in rows])}  # fmt: skip

    found = batches(Cropping(), collate)
    assert any(len(batch.mask) > 2 for batch in found)
    for batch in (batch for batch in found if batch.rows is not None):
        who = batch.rows["who"]
        assert torch.equal(batch.rows["answers"], who[:, None] == who[None])


def test_right_answers_that_coins_decide_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="answers") as refused:
        batches(
            Cropping(), lambda rows: {"kept": torch.rand(len(rows)), "answers": torch.rand(len(rows), len(rows)) < 0.5}
        )
    assert refused.value.trap == "T11"


def test_rows_that_are_not_numbers_are_no_coins() -> None:
    calls: list[int] = []
    broken = lambda rows: {"kept": torch.full((len(rows), 2), torch.nan)}  # noqa: E731
    found = batches(Cropping(), lambda rows: [calls.append(len(rows)), broken(rows)][1])
    whole = Counter(len(batch.unit_ids) for batch in found if batch.rows is not None)
    assert whole <= Counter(calls), "no unit is collated by itself, but to compare it"


def test_coins_that_are_drawn_where_rows_are_placed_are_refused() -> None:
    def place(features: Any, places: Any, rows: int) -> Any:
        return copied_rows({**features, "kept": features["kept"] * torch.rand(len(places))}, places, rows)

    with pytest.raises(ConfigurationError, match="place_rows"):
        batches(Cropping(), plain, shape=FixedShape(6, 2, place))


@pytest.mark.parametrize("coin", COINS)
def test_what_a_unit_is_alone_is_never_what_it_drew_by_luck_another_time(coin: str) -> None:
    one_in_two = lambda rows: {"kept": torch.tensor([COINS[coin]() < 0.5 for _ in rows])}  # noqa: E731
    for step in [0, 1, 2, 4] * 10:
        items = [(Draw(unit, step, 0, True, seed=step), [object()]) for unit in range(4)]
        batch = UnitCollator(one_in_two)(items)
        assert batch.alone is None or torch.equal(batch.alone["kept"], batch.rows["kept"][:2])


class Drops(Regression):
    """One coin in two, so that two looks are often equal by luck."""

    coin = "torch"

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        found = super().collate_rows(rows)
        kept = torch.tensor([[1.0 if COINS[self.coin]() < 0.5 else 2.0] for _ in rows])
        return found | {"inputs": found["inputs"] * kept}


@pytest.mark.costly
@pytest.mark.parametrize("coin", COINS)
def test_a_run_is_not_refused_because_two_draws_were_equal_by_luck(
    coin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drops, "coin", coin)
    for seed in range(2):  # each was refused, or not, by the luck of its own coins
        fit(tmp_path / f"{seed}", Drops(privacy=dp(tmp_path, noise_seed=seed)), Numbers(), steps=4)


class DrawsFrom(Regression):
    """A loss with a number for each row from ``random`` or numpy, which its neighbours shift, or one for all rows."""

    coin, of_each_row = "numpy", True

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        count = len(rows["target"])
        drawn = [COINS[self.coin]() for _ in range(count if self.of_each_row else 1)]
        return super().per_row_loss(rows) + rows["inputs"].new_tensor(drawn) * self.net(rows["inputs"]).squeeze(-1)


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("of_each_row", [True, False])
def test_a_loss_draws_from_torch_and_what_it_draws_elsewhere_for_each_row_is_refused_by_name(
    coin: str, of_each_row: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawsFrom, "coin", coin)
    monkeypatch.setattr(DrawsFrom, "of_each_row", of_each_row)
    monkeypatch.setattr(CollationPasses, "compare_collated", lambda *_: None)  # which may meet it first
    run = lambda: fit(tmp_path / "run", DrawsFrom(privacy=dp(tmp_path, noise_seed=1)), steps=3)  # noqa: E731
    if coin == "torch" or not of_each_row:
        run()
        return
    with pytest.raises(UnsupportedModelError, match="from random or numpy") as refused:
        run()
    assert refused.value.trap == "T11"


@pytest.mark.costly
@pytest.mark.parametrize("coin", COINS)
def test_what_a_loss_draws_follows_from_the_secret_and_not_from_the_public_seed(
    coin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[float]] = []

    class Seen(Regression):
        public_metrics = ("drawn",)  # declared, so that the test can read it

        def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
            drawn[-1].append(COINS[coin]())
            return super().per_row_loss(rows)

        def before_batch(self, batch: UnitBatch) -> None:
            drawn[-1].append(COINS[coin]())

    for public, secret in ((0, 1), (5, 1), (0, 2)):
        torch.manual_seed(public)
        random.seed(public)
        np.random.seed(public)
        module = Seen(privacy=dp(tmp_path, noise_seed=secret))
        drawn.append([])
        fit(tmp_path / f"{public}{secret}", module, steps=2)
    assert drawn[0] == drawn[1] != drawn[2]


# -- how many coins there are ----------------------------------------------------------------


@pytest.mark.parametrize("coin", COINS)
def test_every_bit_of_a_seed_decides_what_is_drawn(coin: str) -> None:
    seeds = [0, *(1 << bit for bit in range(0, 256, 16))]
    with kept_generators():
        drawn = [(seed_generators(seed), [COINS[coin]() for _ in range(4)])[1] for seed in (*seeds, *seeds)]
    assert drawn[: len(seeds)] == drawn[len(seeds) :] and len({tuple(each) for each in drawn}) == len(seeds)


def test_no_mask_of_a_batch_is_found_by_trying_what_manual_seed_keeps() -> None:
    seed = KeyedStream(b"s" * 32, "run").model_seed(0, 0, 0)
    with kept_generators():
        seed_generators(seed)
        mask = torch.nn.functional.dropout(torch.ones(64))
        state = torch.get_rng_state().numpy()
        for tried in (seed & 0xFFFFFFFF, seed & (1 << 63) - 1, torch.initial_seed(), int(state[24:32].view("u8")[0])):
            torch.manual_seed(tried)
            assert not torch.equal(torch.nn.functional.dropout(torch.ones(64)), mask)


def test_all_words_of_the_twister_follow_from_the_seed() -> None:
    states = []
    for seed in range(40):
        seed_torch(generator := torch.Generator(), seed)
        states.append(generator.get_state().numpy()[24 : 24 + 8 * 624].view("u8"))
    found = np.stack(states)
    assert (found < 1 << 32).all() and ((found == found[0]).sum(0) == 1).all()


def test_a_filled_generator_draws_what_is_uniform_and_goes_on_after_a_save() -> None:
    seed_torch(generator := torch.Generator(), 3)
    drawn = torch.rand(100_000, dtype=torch.float64, generator=generator)
    assert abs(drawn.mean() - 0.5) < 0.005 and abs(drawn.var() - 1 / 12) < 0.002
    other = torch.Generator()
    other.set_state(generator.get_state())
    assert torch.equal(torch.randn(700, generator=generator), torch.randn(700, generator=other))


def test_seeds_of_batches_and_units_cannot_be_tried_out() -> None:
    stream = KeyedStream(b"s" * 32, "run")
    for seeds in (
        [stream.model_seed(0, step, 0) for step in range(64)],
        [stream.unit_seed(0, 0, n) for n in range(64)],
    ):
        every = 0
        for seed in seeds:
            every |= seed
        assert every == (1 << 256) - 1, "each of 256 bits is one in some seed"
    assert max(draw.seed for batch in sampler() for draw in batch).bit_length() > 240


OF_ONE_WORD = """
import torch
from lit_dpret.privacy import user_generators

name, overload = {name!r}, {overload!r}

def of_one_word(target, p=None, *, generator=None):  # as MKL does it on processors of Intel
    word = int(torch.randint(1 << 31, (1,), generator=generator))
    own = torch.empty(target.shape, dtype=torch.float64).uniform_(generator=torch.Generator().manual_seed(word))
    return target.copy_(own < 0.5 if name == "bernoulli_" else own)

at_first = getattr(torch.empty(1000), name)(generator=torch.Generator().manual_seed(1))
replaced = torch.library.Library("aten", "IMPL")
replaced.impl(overload, of_one_word, "CPU")
assert user_generators._draws_one_word(name)
user_generators.seed_generators(7)
assert not user_generators._draws_one_word(name)
again = getattr(torch.empty(1000), name)(generator=torch.Generator().manual_seed(1))
torch.testing.assert_close(again, at_first)
if name == "bernoulli_":
    for kind in (torch.float32, torch.bfloat16, torch.bool):
        assert abs(torch.empty(200_000, dtype=kind).bernoulli_(0.1).double().mean() - 0.1) < 0.005
    once = torch.nn.functional.dropout(torch.ones(100_000), 0.1)
    assert abs((once == 0).double().mean() - 0.1) < 0.005
    many = torch.func.vmap(lambda x: torch.nn.functional.dropout(x, 0.5), randomness="different")(torch.ones(4, 99))
    assert len({{tuple(row) for row in many.tolist()}}) == 4
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overload"), [("bernoulli_", "bernoulli_.float"), ("exponential_", "exponential_")])
def test_an_operation_that_makes_all_its_numbers_of_one_word_draws_each_from_the_generator(
    name: str, overload: str
) -> None:
    code = OF_ONE_WORD.format(name=name, overload=overload)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
