"""The dual encoder with sources of negatives: its loss by hand, what a private row can move, and whole runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from negative_cases import JUDGED, NOISE, PASSAGES, QUERIES, dual, in_double, lines, loss_by_hand, texts
from pair_stand_ins import batch_of, clipped_sum, data_module, plan_of
from stand_ins import KillAt, Killed, fit
from tiny_models import WORDS
from tiny_tasks import write_log, write_synthetic
from torch import Tensor

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.modules import DualEncoder
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.negatives import (
    BM25Negatives,
    DynamicNegatives,
    GoldNegatives,
    InBatchNegatives,
    NegativeSource,
    PreBatchNegatives,
    RandomNegatives,
    StaticNegatives,
    TrainTexts,
)
from lit_dpret.privacy.batches import UnitBatch, take_rows
from lit_dpret.privacy.modes import (
    DPSGD,
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PrivacyMode,
    PublicPassages,
    SyntheticData,
)

FROZEN = {"towers": "separate", "passage_tower": "frozen"}


def settings_of(sources: list[NegativeSource]) -> dict[str, Any]:
    return FROZEN if any(isinstance(source, DynamicNegatives) for source in sources) else {}


def ready(module: DualEncoder, *numbers: int, step: int = 0, queries: dict[str, str] = QUERIES) -> UnitBatch:
    """A batch of some queries that a training step would see."""
    batch = batch_of(module.collate_rows(lines(*numbers, queries=queries)))
    batch.step = step
    module.before_batch(batch)
    return batch


def by_hand(module: DualEncoder, batch: UnitBatch, *numbers: int, in_batch: bool, shared: bool = False) -> Tensor:
    """The cross entropy of every row, candidate by candidate, from texts."""
    names, batch_ids = sorted(PASSAGES), [line.passage_id for line in lines(*numbers)]
    own_at, shared_at = batch.rows["own_at"].tolist(), batch.rows["shared_at"].tolist()
    everybody = [names[p] for places in shared_at for p in places]
    found = []
    for row, places in zip(lines(*numbers), own_at, strict=True):
        of_all = (batch_ids if in_batch else []) + (everybody if shared else [])
        others = [*(names[p] for p in places), *(p for p in of_all if p not in row.positives)]
        found.append(loss_by_hand(module, row, others))
    return torch.stack(found)


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        RandomNegatives(per_query=2),
        BM25Negatives(per_query=2, depth=8),
        StaticNegatives(per_query=2, depth=8),
        DynamicNegatives(depth=4),
        BM25Negatives(per_query=2, depth=8, shared_in_batch=True),
    ],
    ids=["random", "bm25", "static", "dynamic", "shared"],
)
def test_the_loss_is_the_cross_entropy_of_the_passage_among_all_that_was_named(source: Any, in_batch: bool) -> None:
    sources = [InBatchNegatives(), source] if in_batch else [source]
    module = in_double(negatives=sources, **settings_of(sources))
    batch = ready(module, 0, 1, 3, 4)
    expected = by_hand(module, batch, 0, 1, 3, 4, in_batch=in_batch, shared=source.shared_in_batch)
    torch.testing.assert_close(module.per_row_loss(batch.rows), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_where_the_corpus_is_too_small_empty_places_count_for_nothing(shared: bool) -> None:
    few = {name: PASSAGES[name] for name in ("p0", "p2", "p5")}
    module = dual(negatives=[RandomNegatives(per_query=3, shared_in_batch=shared)]).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.learn_negatives(texts(passages=few))
        batch = ready(module, 0, 1)
    found = module.per_row_loss(batch.rows)
    for loss, row in zip(found, lines(0, 1), strict=True):
        others = [p for p in few if p not in row.positives] * (2 if shared else 1)
        if shared:  # each row named what does not answer it: p5 by both, and p0 and p2 by one
            others = ["p5", "p5", "p2" if row.passage_id == "p0" else "p0"]
        torch.testing.assert_close(loss, loss_by_hand(module, row, others), rtol=1e-6, atol=1e-6)


def test_in_batch_alone_is_what_null_is_bit_for_bit() -> None:
    plain, named = dual(), dual(negatives=[InBatchNegatives()])
    rows = lines(0, 1, 2, 3)
    found = []
    for module in (plain, named):
        loss = module.per_row_loss(module.collate_rows(rows))
        found.append([loss, *torch.autograd.grad(loss.sum(), [*module.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert named._negatives is None and named.coupled_loss


def test_pre_batch_compares_with_the_passages_of_the_batches_before_without_a_gradient() -> None:
    module = in_double(negatives=[PreBatchNegatives(batches=2)]).train()
    for numbers in ((0, 1), (2, 3), (4, 5)):
        module.per_row_loss(ready(module, *numbers).rows)
    found = module.per_row_loss(ready(module, 1, 6).rows)
    for i, row in enumerate(lines(1, 6)):
        before = [line.passage_id for line in lines(2, 3, 4, 5) if line.passage_id not in row.positives]
        assert float(found[i].detach()) == pytest.approx(float(loss_by_hand(module, row, before)), rel=1e-6)
    queue = module._negatives.of_rows.pre_batch._queue  # type: ignore[union-attr]
    assert not any(embeddings.requires_grad for embeddings, _ in queue)


def test_dynamic_names_what_the_query_tower_ranks_high_now() -> None:
    module = in_double(negatives=[DynamicNegatives(depth=3)], **FROZEN)
    first = ready(module, 0, 1).rows["own_at"]
    with torch.no_grad():
        for parameter in module.encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    second = ready(module, 0, 1).rows["own_at"]
    assert not torch.equal(first, second)
    names, passages = sorted(PASSAGES), module.encode_passages([PASSAGES[name] for name in sorted(PASSAGES)])
    for row, places in zip(lines(0, 1), second.tolist(), strict=True):
        ranked = (passages @ module.encode_queries([row.query])[0]).argsort(descending=True).tolist()
        assert places == [p for p in ranked if names[p] not in row.positives][:3]


def test_dynamic_finds_as_many_as_it_was_asked_for_behind_the_answers_and_their_copies(
    recwarn: pytest.WarningsRecorder,
) -> None:
    copies = PASSAGES | {f"copy {i} of {name}": PASSAGES[name] for name in ("p0", "p2", "p3") for i in range(3)}
    module = dual(negatives=[DynamicNegatives(depth=4)], **FROZEN)
    module.learn_negatives(texts(passages=copies))
    together, alone = ready(module, 0, 1).rows["own_at"], ready(module, 0).rows["own_at"]
    assert (together >= 0).all() and torch.equal(together[:1], alone)
    assert not [each for each in recwarn if "random public passages" in str(each.message)]


@pytest.mark.parametrize("kinds", [[InBatchNegatives], [InBatchNegatives, BM25Negatives], [DynamicNegatives]])
def test_frozen_passages_that_are_looked_up_give_the_same_loss_and_gradient(kinds: list[Any], tmp_path: Path) -> None:
    found = []
    for cache in (None, tmp_path / "passages", tmp_path / "passages"):
        module = in_double(negatives=[kind() for kind in kinds], passage_cache_dir=cache, **FROZEN)
        batch = batch_of(module.collate_rows(lines(0, 1, 3, 3, 6)))
        module.before_batch(batch)
        losses = module.per_row_loss(batch.rows)
        found.append([losses, *torch.autograd.grad(losses.sum(), [*module.encoder.parameters()])])
        assert ("passage" in batch.rows) == (cache is None and DynamicNegatives not in kinds)
    for one in found[1:]:
        for a, b in zip(found[0], one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert len(list((tmp_path / "passages").iterdir())) == 1, "read the second time"


def test_a_public_pool_of_frozen_passages_is_looked_up(tmp_path: Path) -> None:
    found = []
    for cache in (None, tmp_path / "passages"):
        mode = PublicPassages(max_grad_norm=1e6, pool_size=5, **NOISE)
        module = in_double(mode, passage_cache_dir=cache, **FROZEN)
        found.append(clipped_sum(module, plan_of(mode, module, n_max=8), module.collate_rows(lines(0, 1, 4))))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["logit_dp", "per_example_duplicated"])
def test_in_batch_by_name_is_the_modes_own_where_it_takes_the_batch_apart(name: str, tmp_path: Path) -> None:
    make: Any = {"logit_dp": LogitDP, "per_example_duplicated": PerExampleDuplicated}[name]
    bound = {"max_logit_grad_norm": 1.0} if name == "logit_dp" else {"max_grad_norm": 1.0}
    settings = {"negatives": [InBatchNegatives()], "passage_cache_dir": tmp_path, **FROZEN}
    sums = []
    for given in ({}, settings):
        mode = make(**bound, **NOISE)
        module = dual(mode, **FROZEN | given).double()
        sums.append(clipped_sum(module, plan_of(mode, module, n_max=8), module.collate_rows(lines(0, 1, 4))))
    assert torch.equal(*sums)


def test_a_step_before_the_negatives_are_prepared_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="call learn_negatives"):
        dual(negatives=[RandomNegatives()]).collate_rows(lines(0))


# -- one row at a time -------------------------------------------------------------------------

ROW_SOURCES: dict[str, Any] = {
    "random": lambda: RandomNegatives(per_query=2),
    "gold": lambda: GoldNegatives(per_query=2),
    "bm25": lambda: BM25Negatives(per_query=2, depth=8),
    "static": lambda: StaticNegatives(per_query=2, depth=8),
    "dynamic": lambda: DynamicNegatives(depth=4),
}
ROW_MODES: dict[str, Any] = {
    "public none": lambda: PublicPassages(max_grad_norm=1e6, pool_size=5, **NOISE),
    "public own": lambda: PublicPassages(max_grad_norm=1e6, pool_size=5, passage_gradient="own", **NOISE),
    "public full": lambda: PublicPassages(max_grad_norm=1e6, pool_size=5, passage_gradient="full", **NOISE),
    "dp_sgd": lambda: DPSGD(max_grad_norm=1e6, **NOISE),
}


#: Every mode with one source and every source with one mode; the rest of the table is slow.
ROW_CASES = [
    pytest.param(mode, source, marks=[] if source == "bm25" or mode == "public none" else [pytest.mark.slow])
    for mode in ROW_MODES
    for source in ROW_SOURCES
    if source != "dynamic" or mode in ("public none", "dp_sgd")  # frozen passages have no gradient to choose
]


def row_case(mode: str, source: str) -> DualEncoder:
    sources = [ROW_SOURCES[source]()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return in_double(ROW_MODES[mode](), negatives=sources, **settings_of(sources))


def gradients_of_rows(module: DualEncoder, queries: dict[str, str], count: int = 4) -> Tensor:
    """What each row of one batch adds, by the mode itself."""
    batch = ready(module, *range(count), queries=queries)
    plan = plan_of(module.privacy, module, n_max=8)
    parts = [take_rows(batch.rows, slice(i, i + 1)) for i in range(count)]
    # `clipped_sum` chooses anew for each part: it must come out the same as for the batch.
    return torch.stack([clipped_sum(module, plan, part) for part in parts])


@pytest.mark.like(2)
@pytest.mark.parametrize(("mode", "source"), ROW_CASES)
def test_another_record_of_one_query_changes_its_gradient_alone(mode: str, source: str) -> None:
    """Mined anew with the poisoned text, as the run on the neighbouring data would do."""
    module = row_case(mode, source)
    before = gradients_of_rows(module, QUERIES)
    module.learn_negatives(texts(judged=JUDGED | {"q5": {"p1": 1, "p17": 1, "p4": 0}, "q6": {"p19": 1}}))
    assert torch.equal(gradients_of_rows(module, QUERIES), before), "what answers other queries changes nothing at all"
    poisoned = QUERIES | {"q2": "life life life life life"}
    module.learn_negatives(texts(queries=poisoned))
    after = gradients_of_rows(module, poisoned)
    changed = [not torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(before, after, strict=True)]
    assert changed == [False, False, True, False]
    plan = plan_of(module.privacy, module, n_max=8)
    together = clipped_sum(module, plan, module.collate_rows(lines(*range(4), queries=poisoned)))
    torch.testing.assert_close(together, after.sum(0), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["public none", "public own", "public full", "dp_sgd"])
def test_each_row_is_clipped_as_if_it_were_alone(mode: str) -> None:
    module = row_case(mode, "bm25")
    module.privacy.max_grad_norm = 0.05  # type: ignore[attr-defined]
    alone = gradients_of_rows(module, QUERIES)
    torch.testing.assert_close(alone.norm(dim=1), torch.full((4,), 0.05, dtype=torch.float64), rtol=1e-4, atol=0)
    plan = plan_of(module.privacy, module, n_max=8)
    together = clipped_sum(module, plan, module.collate_rows(lines(*range(4))))
    torch.testing.assert_close(together, alone.sum(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_every_engine_clips_a_row_with_its_own_negatives_alike(engine: Any) -> None:
    sums = []
    for name in ("ghost", engine):
        mode = DPSGD(max_grad_norm=0.05, engine=name, **NOISE)
        module = in_double(mode, negatives=[BM25Negatives(per_query=3, depth=8), RandomNegatives()])
        sums.append(clipped_sum(module, plan_of(mode, module, n_max=8), module.collate_rows(lines(*range(5)))))
    torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-9)


def test_the_guard_against_coupled_rows_sees_through_a_source_that_lies() -> None:
    """Sharing negatives couples; were it not declared, the check of the first batch would find it."""
    source = BM25Negatives(per_query=2, depth=8, shared_in_batch=True)
    source.couples_rows = False
    module = in_double(DPSGD(max_grad_norm=1.0, **NOISE), negatives=[source])
    check, batch = CouplingCheck(), ready(module, 0, 1, 2, 3)
    check.prepare(module, batch, seed=0)
    with pytest.raises(Exception, match="different when other rows are in the batch"):
        check.look(module, batch, seed=0)


# -- whole runs --------------------------------------------------------------------------------

RUNS: dict[str, tuple[Any, list[Any]]] = {
    "none": (NoPrivacy, [InBatchNegatives, RandomNegatives, PreBatchNegatives, BM25Negatives, StaticNegatives]),
    "none dynamic": (NoPrivacy, [InBatchNegatives, DynamicNegatives]),
    "dp_sgd": (DPSGD, [BM25Negatives, RandomNegatives]),
    "public_passages": (PublicPassages, [BM25Negatives, StaticNegatives]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_with_its_sources_mined_from_the_datamodule(name: str, tmp_path: Path) -> None:
    make, kinds = RUNS[name]
    private = {"max_grad_norm": 0.1, "secret_file": tmp_path / "secret", **NOISE}
    mode: PrivacyMode = make() if make is NoPrivacy else make(**private)
    module = dual(mode, negatives=[kind() for kind in kinds], **(FROZEN if DynamicNegatives in kinds else {}))
    before = {key: value.clone() for key, value in module.named_parameters()}
    sampling = {"sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6}
    fit(tmp_path / "run", module, data_module(tmp_path / "data", **sampling), steps=3)
    for key, value in module.named_parameters():
        assert torch.equal(value, before[key]) != value.requires_grad, key


def hard_negatives(path: Path) -> GoldNegatives:
    """A file with one line for each train query of `data_module`, declared to be made line by line."""
    lines = [{"qid": f"queries{i}", "neg": {"m": [f"corpus{(i + 4) % 13}"]}} for i in range(13)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return GoldNegatives(file=path, lines_are_independent=True)


@pytest.mark.costly
def test_a_declared_file_stands_on_the_card_as_an_assumption_and_so_does_another_one_after_a_resume(
    tmp_path: Path,
) -> None:
    def run(file: str, *, resume: bool, steps: int) -> dict[str, Any]:
        mode = DPSGD(max_grad_norm=1.0, secret_file=tmp_path / "secret", **NOISE)
        module = dual(mode, negatives=[RandomNegatives(), hard_negatives(tmp_path / file)])
        stop = [] if resume else [KillAt(steps)]
        fit(tmp_path / "run", module, data_module(tmp_path / f"data {file}"), steps=4, save_every=1, resume=resume,
            extra=[PrivacyCard(run_dir=tmp_path / "run"), *stop])  # fmt: skip
        return read_card(tmp_path / "run")

    with pytest.raises(Killed):
        run("first.jsonl", resume=False, steps=2)
    card = run("second.jsonl", resume=True, steps=4)
    said = {a["text"]: a["holds"] for a in card["assumptions"] if "model.negatives" in a["text"]}
    assert said == {
        f"Each line of the file of model.negatives.gold ({name}) was made from its own query and public data alone, "
        "as declared.": "unverified"
        for name in ("first.jsonl", "second.jsonl")
    }
    assert card["claim"]["guarantee"] == "dp"
    assert verify_card(card, tmp_path / "run" / "privacy_ledger.jsonl") == []


def test_under_synthetic_a_file_of_negatives_stands_on_the_card_too(tmp_path: Path) -> None:
    module = dual(SyntheticData(), negatives=[InBatchNegatives(), hard_negatives(tmp_path / "mined.jsonl")])
    assert module.assumptions() == [
        "Each line of the file of model.negatives.gold (mined.jsonl) was made from the queries that the parent of this "
        "card covers and public data alone, as declared."
    ]
    assert dual(negatives=[hard_negatives(tmp_path / "mined.jsonl")]).assumptions() == []  # there is no claim


def test_synthetic_queries_are_mined_for_and_their_rankings_are_public(tmp_path: Path) -> None:
    log = PairsDataModule(folder=write_log(tmp_path / "log", WORDS))
    data = SyntheticDataModule(
        folder=write_synthetic(tmp_path / "made", log), evaluation=log, expected_batch_size=8, physical_batch_size=24
    )
    source = BM25Negatives(cache_dir=tmp_path / "rankings")
    module = dual(SyntheticData(), negatives=[InBatchNegatives(), source])
    fit(tmp_path / "run", module, data, steps=2)
    assert [path.name[:12] for path in (tmp_path / "rankings").iterdir()] == ["public-bm25-"]
    assert len(source.mined) == len(module._negatives.of_rows.texts.queries) > 0  # type: ignore[union-attr]


@pytest.mark.costly
def test_without_coupling_a_logical_batch_may_be_cut(tmp_path: Path) -> None:
    module = dual(DPSGD(max_grad_norm=1.0, secret_file=tmp_path / "secret", **NOISE), negatives=[BM25Negatives()])
    data = data_module(tmp_path / "data", physical_batch_size=4)
    fit(tmp_path / "run", module, data, steps=1)


def repeatable(**settings: Any) -> DualEncoder:
    """Noise and coins from a number, so that two runs can be compared bit by bit."""
    return dual(BatchClip(max_grad_norm=0.1, noise_seed=1, **NOISE), **settings)


def trained(folder: Path, module: DualEncoder, **settings: Any) -> DualEncoder:
    """Six steps, in two epochs of three."""
    data = folder.parent / f"data{len(list(folder.parent.glob('data*')))}"
    fit(folder, module, data_module(data, expected_batch_size=5), steps=6, save_every=1, **settings)
    return module


def epochs(folder: Path, *, cache: Path | None, kill: int | None = None, resume: bool = False) -> DualEncoder:
    """Mined at the start of each epoch."""
    source = StaticNegatives(refresh="epoch", depth=6, cache_dir=cache)
    module = repeatable(negatives=[InBatchNegatives(), source])
    return trained(folder, module, resume=resume, extra=[] if kill is None else [KillAt(kill)])


def same_weights(one: DualEncoder, other: DualEncoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
def test_a_run_that_is_killed_inside_an_epoch_goes_on_with_that_epochs_negatives(tmp_path: Path) -> None:
    whole = epochs(tmp_path / "whole", cache=tmp_path / "private" / "a")
    with pytest.raises(Killed):
        epochs(tmp_path / "run", cache=tmp_path / "private" / "b", kill=5)
    assert same_weights(whole, epochs(tmp_path / "run", cache=tmp_path / "private" / "b", resume=True))
    assert len(list((tmp_path / "private" / "b").iterdir())) == 2


@pytest.mark.costly
def test_where_no_rankings_are_kept_a_resumed_epoch_says_that_it_mines_again(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        epochs(tmp_path / "run", cache=None, kill=5)
    # Other passages make another sum, for which the noise of the step that is repeated must not be used: said, too.
    with pytest.warns(UserWarning, match="mined again, with the current weights"), suppress(ResumeError):
        epochs(tmp_path / "run", cache=None, resume=True)
    module = epochs(tmp_path / "run", cache=None, resume=True)
    assert module.trainer.global_step == 6


def test_the_queue_of_batches_survives_a_kill() -> None:
    """A run without privacy has no coins that repeat, so the queue itself is compared."""
    module = in_double(negatives=[InBatchNegatives(), PreBatchNegatives(batches=3)]).train()
    for numbers in ((0, 1), (2, 3)):
        module.per_row_loss(ready(module, *numbers).rows)
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    resumed = in_double(negatives=[InBatchNegatives(), PreBatchNegatives(batches=3)])
    resumed.on_load_checkpoint(checkpoint)
    losses = [each.per_row_loss(ready(each, 4, 5).rows) for each in (module, resumed)]
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def test_a_checkpoint_holds_no_hash_of_private_texts(tmp_path: Path) -> None:
    """Whoever knows all queries but one could test guesses at it."""
    module = dual(DPSGD(max_grad_norm=1.0, secret_file=tmp_path / "secret", **NOISE), negatives=[StaticNegatives()])
    fit(tmp_path / "run", module, data_module(tmp_path / "data", physical_batch_size=13), steps=1, save_every=1)
    kept = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["lit_dpret_negatives"]
    other = dual(negatives=[StaticNegatives()])
    other.learn_negatives(texts())
    assert (
        kept == other._negatives.of_rows.state_dict() == {"static": {"epoch": 0, "weights": kept["static"]["weights"]}}
    )  # type: ignore[union-attr]


# -- two logs that differ in one unit, from the file to the loss: no row that is in both may notice --


#: User i has line i and line i + 4; two people ask the same, once with the same answer and once with another.
LOG = [
    {"query": QUERIES[f"q{i}"], "passage_id": f"p{2 * i}", "passage": PASSAGES[f"p{2 * i}"], "user_id": f"u{i % 4}"}
    for i in range(8)
]
LOG += [
    {"query": QUERIES["q1"], "passage_id": name, "passage": PASSAGES[name], "user_id": "u9"} for name in ("p2", "p11")
]

SOURCES: dict[str, Callable[[], NegativeSource]] = {
    "random": lambda: RandomNegatives(per_query=3),
    "bm25": lambda: BM25Negatives(per_query=2, depth=5),
    "bm25 with margins": lambda: BM25Negatives(per_query=3, depth=5, relative_margin=0.2, range_min=1),
    "static": lambda: StaticNegatives(per_query=2, depth=5),
    "dynamic": lambda: DynamicNegatives(per_query=2, depth=5),
}


def losses(folder: Path, log: list[dict[str, Any]], mode: type, unit: str, source: str) -> dict[Any, list[Any]]:
    """By query, passage and user: the passages that the row is told from, and its loss, all rows in one batch."""
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in log), encoding="utf-8")
    corpus = [{"_id": name, "text": text} for name, text in PASSAGES.items()]
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in corpus), encoding="utf-8")
    data = PairsDataModule(pairs=folder / "log.jsonl", corpus=folder / "corpus.jsonl", expected_batch_size=2)
    data.use_unit(unit)
    data.setup("fit")
    torch.manual_seed(0)
    frozen = {"passage_gradient": "none"} if source == "dynamic" and mode is PublicPassages else {}
    privacy = mode(max_grad_norm=1.0, unit=unit, **NOISE, **frozen)
    module = dual(privacy, negatives=[SOURCES[source]()], **(FROZEN if source == "dynamic" else {})).double()
    module.learn_public_passages(data.public_passages())
    module.learn_negatives(TrainTexts.of(data))
    units = data.train_units()
    rows = [row for number in range(len(units)) for row in units.rows(number)]
    batch = batch_of(module.collate_rows(rows))
    module.before_batch(batch)
    found: dict[Any, list[Any]] = {}
    with torch.no_grad():
        told = zip(rows, batch.rows["own_at"].tolist(), module.per_row_loss(batch.rows).tolist(), strict=True)
        for row, places, loss in told:
            found.setdefault((row.query, row.passage_id), []).append((places, round(loss, 9)))
    return found


@pytest.mark.like(4)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("unit", ["query", "pair", "user"])
@pytest.mark.parametrize("mode", [PublicPassages, DPSGD])
def test_rows_that_are_in_both_logs_have_the_same_loss(mode: type, unit: str, source: str, tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole", LOG, mode, unit, source)
    for left_out in ("u1", "u0"):
        kept = [r for i, r in enumerate(LOG) if (r["user_id"] != left_out if unit == "user" else i != int(left_out[1]))]
        changed = [{**r, "query": "best best best"} if r not in kept else r for r in LOG]
        for name, neighbour in (("removed", kept), ("replaced", changed)):
            other = losses(tmp_path / f"{left_out} {name}", neighbour, mode, unit, source)
            for record in kept:
                row = (record["query"], record["passage_id"])
                assert set(map(str, other[row])) <= set(map(str, whole[row])), (name, record)
