"""What one unit moves in low precision, found by search: nothing but its own gradient, wherever a run is allowed.

In bfloat16 a row's gradient depends on the shape of its batch, and rankings of passages on its last bits. The longest
query decides how far all are padded, so emptying it is what moves other rows most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from half_precision import LONGEST, PASSAGES, STILL, Log, encoder, largest_ratio, moved, sums_of, tower
from stand_ins import Line, Regression
from tiny_generator import DECODERS, decoder_only, generator
from tiny_generator import passage as words

from lit_dpret.callbacks.fixed_shapes import refuse_changing_rows, rests_on_shapes
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.modules.coupling_collations import CollationPasses
from lit_dpret.modules.physical_batches import piece_of, slots_of
from lit_dpret.negatives import BM25Negatives, DynamicNegatives, NegativeSource, RandomNegatives, StaticNegatives
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Poisson
from lit_dpret.privacy.batches import PADDING, Draw, FixedShape, copied_rows
from lit_dpret.privacy.clipping import GhostClipping
from lit_dpret.privacy.collation import UnitCollator
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.ledger.trained import note_built
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, PerExampleDuplicated, PublicPassages
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler

PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]
LOW = PRECISIONS[1:]
FROZEN = {"towers": "separate", "passage_tower": "frozen"}
SOURCES: dict[str, Callable[[], list[NegativeSource] | None]] = {
    "pool": lambda: None,
    "random": lambda: [RandomNegatives(per_query=1)],
    "bm25": lambda: [BM25Negatives(per_query=1, depth=200)],
    "static": lambda: [StaticNegatives(per_query=1, depth=200, refresh="epoch")],
    "dynamic": lambda: [DynamicNegatives(per_query=1, depth=200)],
}
#: A sum in float32 of so many rows is off by rounding; nothing else may be.
ROUNDING = 1e-5
#: For bf16-true: autograd adds up the gradients of small parameters over all tokens in bfloat16 there, with too few
#: digits for the engine's audit.
CALM: dict[str, Any] = {"temperature": 1.0, "initializer_range": 0.1, "matrices_alone": True}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
#: Builds a module for a folder and a precision.
Make = Callable[[Path, str], Any]


def private(folder: Path, mode: type = DPSGD, **settings: Any) -> Any:
    known = {"max_grad_norm": 1e-4, "eps": 30.0, "delta": 1e-3, "noise_multiplier": 20.0, "noise_seed": 7}
    return mode(secret_file=folder / "secret", **known | settings)


def sourced(source: str, mode: type) -> Make:
    def make(folder: Path, precision: str) -> Any:
        gradient = {"passage_gradient": "none" if source == "dynamic" else "own"} if mode is PublicPassages else {}
        known = (FROZEN if source == "dynamic" else {}) | (CALM if precision == "bf16-true" else {})
        return encoder(private(folder, mode, **gradient), negatives=SOURCES[source](), **known)

    return make


def clipped_by(engine: str) -> Make:
    def make(folder: Path, precision: str) -> Any:
        more = CALM if precision == "bf16-true" else {"matrices_alone": True}  # opacus takes no padding_idx
        return encoder(private(folder, engine=engine), negatives=SOURCES["dynamic"](), **FROZEN, **more)

    return make


def writing(build: Callable[..., Any]) -> Make:
    def make(folder: Path, precision: str) -> Any:
        module = build(privacy=private(folder))
        module.optimizer_spec = STILL
        return module

    return make


def frozen(mode: type) -> Make:
    return lambda folder, precision: FrozenDualEncoder(
        privacy=private(folder, mode), optimizer=STILL, encoder=tower(), pool_size=64
    )


class Measures(Regression):
    """Rows of four numbers, from lengths; nothing is said of fixed shapes."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Any]:
        numbers = torch.tensor([[len(row.query), len(row.passage), row.query.count("a"), 1.0] for row in rows])
        return {"inputs": numbers.sin(), "target": numbers[:, 0]}


def measures(folder: Path, precision: str) -> Any:
    torch.manual_seed(0)
    # In batches as they come a row that moves up draws other dropout masks, of the same law; at its place the same.
    return Measures(privacy=private(folder), optimizer=STILL, dropout=0.0 if precision == "32-true" else 0.1)


class SeveralAnswers(Log):
    """Queries with one to four right passages: lists of them are as long as a batch's longest."""

    def line(self, unit: int) -> Line:
        line = super().line(unit)
        more = {f"p{(unit * 31 + k) % len(PASSAGES):03}" for k in range(0 if unit != LONGEST else 3)}
        return replace(line, positives=line.positives | more)


def pieces(cut: int, **settings: Any) -> Log:
    return Log(64, physical_batch_size=cut, **settings)


def answers(**settings: Any) -> Log:
    return SeveralAnswers(32, physical_batch_size=16, **settings)


# How a module is built, the log that it is trained on (None for one of its precision), and which units are emptied.
CASES: dict[str, tuple[Make, Callable[..., Log] | None, tuple[int, ...]]] = {
    "static PublicPassages": (sourced("static", PublicPassages), None, (LONGEST, 20)),
    "generator in pieces": (writing(generator), partial(pieces, 24), (LONGEST,)),
    "decoder in pieces": (writing(decoder_only), partial(pieces, 24), (LONGEST,)),
    **{f"frozen {mode.__name__}": (frozen(mode), None, (LONGEST,)) for mode in (DPSGD, PublicPassages)},
    **{f"several answers, {source}": (sourced(source, PublicPassages), answers, (LONGEST,))
       for source in ("pool", "random")},
    **{f"several answers, frozen {mode.__name__}": (frozen(mode), answers, (LONGEST,))
       for mode in (DPSGD, PublicPassages)},
    "module that knows of no shapes": (measures, None, (LONGEST,)),
}  # fmt: skip
SLOW: dict[str, tuple[Make, Callable[..., Log] | None, tuple[int, ...]]] = {
    **{f"{source} {mode.__name__}": (sourced(source, mode), None, (LONGEST, 20))
       for mode, source in itertools.product((PublicPassages, DPSGD), SOURCES)
       if (mode, source) not in ((PublicPassages, "static"), (DPSGD, "pool"))},
    **{f"clipped by {engine}": (clipped_by(engine), None, (LONGEST,)) for engine in ("vmap", "opacus", "loop")},
    "generator": (writing(generator), partial(pieces, 64), (LONGEST,)),
}  # fmt: skip


def is_slow(name: str, precision: str) -> bool:
    """Return whether a case is among the slow tests; bf16-mixed is what a GPU's run has by default."""
    return name in SLOW or (precision != "bf16-mixed" and name != "module that knows of no shapes")


@pytest.mark.costly
@pytest.mark.parametrize("accelerator", DEVICES)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=pytest.mark.slow if is_slow(name, precision) else ())
        for name, precision in itertools.product(CASES | SLOW, PRECISIONS)
    ],
)
def test_no_unit_moves_the_rows_of_another_one(tmp_path: Path, name: str, precision: str, accelerator: str) -> None:
    make, data, emptied = (CASES | SLOW)[name]
    size = 32 if precision == "bf16-true" else 128
    found = largest_ratio(
        tmp_path, lambda: make(tmp_path, precision), emptied, data=data or partial(Log, size), precision=precision,
        accelerator=accelerator,
    )  # fmt: skip
    assert 0.9 < found <= 1 + ROUNDING
    said = f"trainer.precision={precision}" in (tmp_path / "whole" / "privacy_ledger.jsonl").read_text()
    assert said is (precision in LOW), "the card says what low precision rests on"


@pytest.mark.costly
@pytest.mark.parametrize(
    "precision", ["bf16-mixed", *(pytest.param(p, marks=pytest.mark.slow) for p in PRECISIONS[::2])]
)
@pytest.mark.parametrize("mode", [BatchClip, PerExampleDuplicated])
def test_modes_that_bound_any_change_of_other_rows_need_no_fixed_shape(
    tmp_path: Path, mode: type, precision: str
) -> None:
    def make() -> Any:
        return encoder(private(tmp_path, mode), **CALM)

    found = largest_ratio(tmp_path, make, (LONGEST,), data=partial(Log, 16), precision=precision)
    assert 0 < found <= 1 + ROUNDING


class OfManyLengths(Log):
    """A short pair is collated alone in another shape than beside a long one."""

    def line(self, unit: int) -> Line:
        asked, answered = ((3, 2), (2, 4), (13, 26), (2, 2))[unit % 4]
        return Line(f"q{unit}", words(unit, asked), f"p{unit}", words(3 * unit + 1, answered), frozenset())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_an_honest_generator_is_not_refused_because_another_shape_rounds_otherwise(tmp_path: Path, seed: int) -> None:
    """Weights as large as trained ones, whose losses move by 2e-3 with the shape of a batch in bfloat16."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    config = {"model_type": "llama", **DECODERS["llama"], **shape}
    settings: dict[str, Any] = {"config": config, "max_passage_length": 40, "max_query_length": 16, "seed": seed}
    module = decoder_only(privacy=private(tmp_path), away=0.0, **settings)
    module.optimizer_spec = STILL
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    note_built(module)
    sums_of(tmp_path / "run", module, OfManyLengths(16, physical_batch_size=4), steps=1, precision="bf16-true")


class Lengths(Measures):
    """Rows filled up to the longest of their batch."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Any]:
        padded = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row.query)) for row in rows], batch_first=True)
        return super().collate_rows(rows) | {"letters": padded}


@pytest.mark.parametrize("precision", LOW)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, precision: str) -> None:
    full = private(tmp_path, PublicPassages, passage_gradient="full", units_at_once=2)
    pairs = LogitDP(eps=3.0, delta=1e-3, noise_seed=7, secret_file=tmp_path / "secret", max_logit_grad_norm=1.0)
    for module in (encoder(full), encoder(pairs), Lengths(privacy=private(tmp_path))):
        with pytest.raises(ConfigurationError, match=r"trainer\.precision") as refused:
            sums_of(tmp_path / "refused", module, Log(16), precision=precision)
        assert refused.value.trap == "T39"


@pytest.mark.parametrize(("dtype", "products", "way"), [
    (torch.bfloat16, "highest", "Use float32 weights"), (torch.float32, "high", "Leave that setting at its default"),
])  # fmt: skip
def test_the_way_out_of_low_precision_is_not_the_precision_that_is_already_set(
    dtype: torch.dtype, products: str, way: str
) -> None:
    module: Any = torch.nn.Linear(2, 2, dtype=dtype)
    module.privacy = LogitDP(eps=3.0, delta=1e-3, noise_seed=7, max_logit_grad_norm=1.0)
    trainer: Any = SimpleNamespace(precision="32-true")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    try:
        with pytest.raises(ConfigurationError, match=way):
            refuse_changing_rows(trainer, module)
    finally:
        torch.set_float32_matmul_precision(before)


class PadsToTheLongest(Lengths):
    """It places rows by itself, and how long a row is filled up follows from the longest one of the batch."""

    def place_rows(self, features: Any, places: Any, rows: int) -> Any:
        return copied_rows(features, places, rows)


class PadsToAMultiple(PadsToTheLongest):
    """Only in a batch with the longest query, which is drawn late, is another length due."""

    def place_rows(self, features: Any, places: Any, rows: int) -> Any:
        wide = torch.nn.functional.pad(features["letters"], (0, -features["letters"].shape[1] % 32))
        return copied_rows(features | {"letters": wide}, places, rows)


class CentresWhatItPlaces(Measures):
    def place_rows(self, features: Any, places: Any, rows: int) -> Any:
        centred = features["target"] - features["target"].mean()
        return copied_rows(features | {"target": centred}, places, rows)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("physical", [2, 8])
def test_a_module_that_places_rows_in_a_shape_that_follows_from_them_is_refused(
    tmp_path: Path, physical: int, precision: str
) -> None:
    module = PadsToTheLongest(privacy=private(tmp_path), optimizer=STILL)
    with pytest.raises(UnsupportedModelError, match=r"letters.*trainer\.precision") as refused:
        sums_of(tmp_path / "run", module, Log(16, physical_batch_size=physical), precision=precision)
    assert refused.value.trap == "T39"
    assert '"intent"' not in (tmp_path / "run" / "privacy_ledger.jsonl").read_text()


@pytest.mark.parametrize("kind", [Lengths, PadsToTheLongest])
def test_a_unit_that_is_alone_in_its_batch_may_have_a_shape_of_its_own(tmp_path: Path, kind: type[Measures]) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return kind(privacy=private(tmp_path), optimizer=STILL, dropout=0.0)

    data = partial(Log, 8, physical_batch_size=1)
    assert 0.9 < largest_ratio(tmp_path, make, (3,), data=data, precision="bf16-mixed") <= 1 + ROUNDING


def test_a_shape_that_changes_in_a_later_batch_is_refused_then_and_nothing_is_claimed(tmp_path: Path) -> None:
    class Late(Log):
        def rows(self, unit: int) -> list[Line]:
            """The longest query of all is there once the looks at the start have asked for it."""
            self.asked = getattr(self, "asked", 0) + (unit == LONGEST)
            return [] if unit == LONGEST and self.asked < 7 else super().rows(unit)

    module = PadsToAMultiple(privacy=private(tmp_path), optimizer=STILL)
    with pytest.raises(UnsupportedModelError, match="letters"):
        sums_of(tmp_path / "run", module, Late(16), precision="bf16-mixed", steps=12)
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert any(isinstance(release, NonPrivateRelease) for release in charged_releases(records))


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("found_by", ["compare_collated", "compare_placed"])
def test_a_module_that_mixes_rows_where_it_places_them_is_refused(
    tmp_path: Path, precision: str, found_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in {"compare_collated", "compare_placed"} - {found_by}:
        monkeypatch.setattr(CollationPasses, each, lambda *_, **__: None)
    with pytest.raises(UnsupportedModelError, match="other rows"):
        sums_of(tmp_path, CentresWhatItPlaces(privacy=private(tmp_path), optimizer=STILL), Log(16), precision=precision)


def scattered(units: int, *, step: int = 0, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The units of each physical batch of a step, each at its place."""
    sampler = PrivateBatchSampler(
        Poisson(sample_rate=0.9), units=units, steps_per_epoch=10_000, physical_batch_size=4,
        stream=KeyedStream(b"k" * 32, "run"), ranks=Ranks(rank, world),
    )  # fmt: skip
    sampler.scatters = True
    return [[draw.unit for draw in batch] for batch in sampler.physical_batches(step)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("units", [1, 12])
def test_scattered_units_stand_once_each_in_batches_of_one_shape(units: int, world: int) -> None:
    seen: set[int] = set()
    for step in range(20):
        of_ranks = [scattered(units, step=step, rank=rank, world=world) for rank in range(world)]
        assert len({len(batches) for batches in of_ranks}) == 1
        batches = [batch for own in of_ranks for batch in own]
        assert {len(batch) for batch in batches} == {4}
        drawn = [unit for batch in batches for unit in batch if unit != PADDING]
        assert len(set(drawn)) == len(drawn)
        seen.update(drawn)
    assert seen == set(range(units))


def test_the_place_of_a_scattered_unit_follows_from_no_other_unit() -> None:
    """So that without one unit the others can stand where they stood: places are independent and uniform."""
    pairs = []
    for step in range(3000):
        at = {unit: place for batch in scattered(3, step=step) for place, unit in enumerate(batch)}
        if 0 in at and 1 in at:
            pairs.append(4 * at[0] + at[1])
    counts = torch.bincount(torch.tensor(pairs), minlength=16)
    expected = len(pairs) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 15 + 6 * 30**0.5


@pytest.mark.costly
def test_units_are_scattered_where_their_number_is_private(tmp_path: Path) -> None:
    for neighbours, precision in (("add_or_remove", "bf16-mixed"), ("add_or_remove", "32-true"), ("zero_out", LOW[0])):
        module = Measures(privacy=private(tmp_path, neighbours=neighbours), optimizer=STILL)
        data = Log(48, physical_batch_size=8, sampling="poisson", sample_rate=0.5, expected_batch_size=24)
        sums, charged = sums_of(tmp_path / neighbours / precision, module, data, precision=precision)
        assert all(0 < moved(step, {name: 0 * sum_ for name, sum_ in step.items()}) < 48 * charged for step in sums)
        assert data.batch_sampler.scatters is (neighbours == "add_or_remove" and precision != "32-true")


@pytest.mark.parametrize("limit", [1, 5])
def test_pieces_of_a_batch_keep_its_shape_and_end_in_a_slot_that_nobody_fills(limit: int) -> None:
    log, module = Log(16), generator()
    shape = FixedShape.of(log, module.place_rows, spare=1)
    collate = UnitCollator(module.collate_rows, shape=shape)

    def summed(log: Log, size: int | None) -> Any:
        batch = collate([(Draw(unit, 0, 0, True), log.rows(unit)) for unit in range(16)])
        engine, widths = GhostClipping(module, max_grad_norm=1e-2), set()
        for piece in (piece_of(batch, slots) for slots in slots_of(batch, size)):
            assert not piece.mask[-1] and not piece.data_rows[piece.unit_ids == len(piece.mask) - 1].any()
            widths.add((len(piece.mask), *piece.rows["input_ids"].shape))
            engine.add(module.unit_loss(piece), piece.unit_ids, piece.mask)
        return engine.take(), widths

    whole, _ = summed(log, None)
    pieces, widths = summed(log, limit)
    without, same = summed(Log(16, emptied=LONGEST), limit)
    assert widths == same
    assert moved(whole, pieces) <= 1e-5
    assert 0.9 < moved(pieces, without) / 1e-2 <= 1 + ROUNDING


@pytest.mark.parametrize("change", ["products", "weights"])
def test_float32_with_fewer_digits_counts_as_low_precision(tmp_path: Path, change: str) -> None:
    module = encoder(private(tmp_path))
    runner = L.Trainer(accelerator="cpu", precision="32-true", logger=False, enable_checkpointing=False)
    assert not rests_on_shapes(runner, module)
    before = torch.get_float32_matmul_precision()
    try:
        if change == "products":
            torch.set_float32_matmul_precision("high")  # TF32
        else:
            module.encoder.bfloat16()
        assert rests_on_shapes(runner, module)
        assert not rests_on_shapes(runner, encoder(private(tmp_path, BatchClip)))
    finally:
        torch.set_float32_matmul_precision(before)


def test_convolutions_are_computed_in_float32_inside_a_private_step(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Asking(Measures):
        public_metrics = ("seen",)  # declared, so that the test can read it

        def per_row_loss(self, rows: dict[str, Any]) -> torch.Tensor:
            if self.training:
                seen.append(torch.backends.cudnn.allow_tf32)
            return super().per_row_loss(rows)

    before = torch.backends.cudnn.allow_tf32
    sums_of(tmp_path, Asking(privacy=private(tmp_path), optimizer=STILL), Log(16), precision="32-true")
    assert seen and not any(seen) and torch.backends.cudnn.allow_tf32 == before


# -- rows that fill batches of fixed shape up: no unit has a say in another one's slot by them -----


class Distances(Regression):
    """The loss of q0 is a distance of zero, where the derivative of a root is not finite: its unit is dropped."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Any]:
        numbers = torch.tensor([[len(row.query), len(row.passage), row.query.count("a"), 1.0] for row in rows])
        return {"inputs": numbers.sin(), "apart": torch.tensor([float(row.query_id != "q0") for row in rows])}

    def per_row_loss(self, rows: dict[str, Any]) -> torch.Tensor:
        return (self.net(rows["inputs"]).squeeze(-1).float() * rows["apart"]).square().sqrt()


class Placing(Distances):
    """It fills up by itself, and takes the first row of the batch for that."""

    def place_rows(self, features: Any, places: Sequence[int], rows: int) -> Any:
        of = torch.zeros(rows, dtype=torch.long)
        of[list(places)] = torch.arange(len(places))
        return {name: value[of] for name, value in features.items()}


class Compiled(Placing):
    """Its engine takes all rows of a slot, filled in or not."""

    fixed_shapes = True


@pytest.mark.like(3)
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(
    ("make", "engine", "unit"),
    [
        (Distances, "ghost", "query"), (Distances, "vmap", "query"), (Distances, "opacus", "query"),
        (Distances, "loop", "query"), (Distances, "ghost", "user"), (Placing, "ghost", "query"),
        (Compiled, "ghost", "query"),
    ],
)  # fmt: skip
def test_a_row_without_a_finite_gradient_drops_its_own_unit_alone(
    tmp_path: Path, make: type[Distances], engine: str, unit: str, precision: str
) -> None:
    """Each unit has room for another row, and the rows that fill it up are nobody else's."""

    def build() -> Any:
        torch.manual_seed(0)
        return make(privacy=private(tmp_path, engine=engine, unit=unit), optimizer=STILL, dropout=0.0)

    data = partial(Log, 12, rows_per_unit="all", max_rows_per_unit=2)
    assert largest_ratio(tmp_path, build, (0,), data=data, precision=precision) <= 1e-5


def test_what_fills_a_slot_up_is_its_units_own_and_charged_to_nobody() -> None:
    shape = FixedShape(slots=4, rows_of_a_slot=3, place_rows=copied_rows)
    collate = UnitCollator(lambda rows: {"n": torch.tensor(rows)}, "all", shape=shape)
    batch = collate([(Draw(unit, 0, 0, True), rows) for unit, rows in enumerate([[5, 6], [], [7]])])
    assert batch.rows["n"].view(4, 3)[[0, 2]].tolist() == [[5, 6, 5], [7, 7, 7]]
    owners, real = batch.owners_of_rows()
    assert owners[batch.data_rows].tolist() == [0, 0, 2] and not real[owners[~batch.data_rows]].any()
    assert real[:4].tolist() == batch.mask.tolist() == [True, True, True, False]
