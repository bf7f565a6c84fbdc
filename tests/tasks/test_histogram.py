"""`task=histogram` and the choice by it: one claim for generator and histogram, and no choice without it."""

from __future__ import annotations

import copy
import errno
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_chain import run
from tiny_generator import generator
from tiny_tasks import parts, with_query, with_users, write_log

from lit_dpret.cards.amendments import AttackResult, add_evidence
from lit_dpret.cards.audits import BOUND
from lit_dpret.cards.card import card_sha256, read_card, verify_card
from lit_dpret.cards.file import checksum, write_card
from lit_dpret.cards.provenance import plain_assumption
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError, PrivateDataError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.histogram import ReleasedHistogram
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.judgement import claimed_releases
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.synthesis.filters import HistogramMatch, LabelBins, LengthBins, apply_filters, load_released
from lit_dpret.synthesis.filters.histogram_match import quotas
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import Filter, Histogram

LABELS = {f"p{i}": ("even", "odd")[i % 2] for i in range(0, 100)}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generator's run, and queries that it wrote."""
    root = tmp_path_factory.mktemp("chain")
    log = PairsDataModule(folder=write_log(root / "log"), sampling="poisson", expected_batch_size=8)
    mode = DPSGD(eps=50.0, noise_multiplier=4.0, max_grad_norm=0.5, secret_file=root / "secret")
    run(root / "generator", generator(privacy=mode, seed=0), log)
    synthesize(
        root / "generator" / "model", log.public_passages(), root / "made" / "synthetic",
        passages_are_public=True, queries_per_passage=4,
    )  # fmt: skip
    return root


def counted(chain: Path, folder: Path, task: dict[str, Any] | None = None, **changes: Any) -> dict[str, float]:
    mode = partial(DPSGD, **{"eps": 9.0, "secret_file": chain / "secret"} | changes.pop("mode", {}))
    data = {"folder": chain / "log", "sampling": "poisson"} | changes.pop("data", {})
    datamodule = partial(PairsDataModule, **data)
    settings = {
        "generator": chain / "generator", "bins": LabelBins(mapping=LABELS), "noise_multiplier": 2.0, **(task or {}),
    }  # fmt: skip
    privacy = changes.pop("make_privacy", mode)
    return Histogram(**settings).run(
        parts(folder.parent, privacy, run_dir=folder, make_datamodule=datamodule, **changes)
    )


@pytest.fixture(scope="module")
def histogram(chain: Path) -> Path:
    counted(chain, chain / "histogram")
    return chain / "histogram"


@pytest.mark.slow
def test_the_card_claims_training_and_histogram_composed_from_one_ledger(chain: Path, histogram: Path) -> None:
    card, parent = read_card(histogram), read_card(chain / "generator")
    records = PrivacyLedger.read(histogram / "privacy_ledger.jsonl").records
    training = charged_releases(PrivacyLedger.read(chain / "generator" / "privacy_ledger.jsonl").records)
    own = charged_releases(records)
    delta = parent["claim"]["delta"]
    assert [release.label for release in own] == ["histogram"]
    assert card["claim"]["delta"] == delta
    assert card["claim"]["epsilon"] == pytest.approx(
        epsilon([*training, *own], delta=delta, neighbours="zero_out"), rel=1e-9
    )
    alone = [epsilon(releases, delta=delta, neighbours="zero_out") for releases in (training, own)]
    assert max(alone) < card["claim"]["epsilon"] < sum(alone)
    assert card["parents"][0]["sha256"] == card_sha256(chain / "generator")
    assert "training and histogram together" in card["pretraining"]["start"]
    assert verify_card(card, histogram / "privacy_ledger.jsonl", folder=histogram) == []
    assert len(claimed_releases(records)) == 2
    assert card["claim"]["statement"].startswith("A histogram on 56 queries was made. Each query added at most 1 ")
    assert card["tuning"]["data"] == parent["tuning"]["data"] == "unknown"
    assert any("hyper-parameters" in gap for gap in card["not_covered"])


@pytest.mark.costly
def test_bins_that_need_no_passages_do_not_ask_for_public_ones(chain: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(
        json.dumps({"query_id": f"q{i}", "query": f"words {i}", "passage": f"answer {i}"}) + "\n" for i in range(40)
    ))  # fmt: skip
    counted(chain, tmp_path / "run", {"bins": None}, data={"folder": None, "pairs": log})
    with pytest.raises(ConfigurationError, match="passages_are_public"):
        counted(chain, tmp_path / "labels", data={"folder": None, "pairs": log})


def test_queries_with_a_claim_of_their_own_are_not_counted_under_another(chain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="privacy card"):
        counted(chain, tmp_path / "run", data={"folder": chain / "made" / "synthetic"})
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_a_query_of_the_log_is_no_note_and_no_name_of_the_run(chain: Path, tmp_path: Path) -> None:
    log = Path(shutil.copytree(chain / "log", tmp_path / "log"))
    with_query(log, "Bana elo, ibi omu?")
    with pytest.raises(ConfigurationError, match="tuning_note"):
        counted(chain, tmp_path / "run", {"tuning_note": "not bana elo ibi omu"}, data={"folder": log})
    with pytest.raises(ConfigurationError, match=r"hydra\.run\.dir"):
        counted(chain, tmp_path / "bana-elo-ibi-omu", data={"folder": log})
    assert not list(tmp_path.rglob("privacy_ledger.jsonl"))


class Oversampled(PairsDataModule):
    """The mistake of a data set that counts each query twice."""

    def train_units(self) -> Any:
        units = super().train_units()

        class Twice:
            duplicates = units.duplicates
            most_units_of_a_user = units.most_units_of_a_user

            def __len__(self) -> int:
                return 2 * len(units)

            def rows(self, unit: int) -> Any:
                return units.rows(unit % len(units))

        return Twice()


def test_own_units_that_share_rows_are_refused(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PairsDataModule", Oversampled)
    with pytest.raises(DataError) as refused:
        counted(chain, tmp_path / "run")
    assert refused.value.trap == "T38" and not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_own_bins_noise_on_a_grid_and_the_choice_of_its_settings_are_on_the_card(chain: Path, tmp_path: Path) -> None:
    class Mine(LabelBins):
        pass

    run = tmp_path / "run"
    counted(chain, run, {"bins": Mine(mapping=LABELS), "tuning_data": "private"}, mode={"noise": "discrete"})
    card = read_card(run)
    assert any("Mine" in one["text"] for one in card["assumptions"])
    assert card["tuning"]["data"] == "private" and not card["tuning"]["accounted"]
    assert card["mechanism"]["noise"] == "discrete" and card["randomness"]["rng"].startswith("ChaCha20; before it: ")
    assert card["randomness"]["floating_point"], "the claim is about both"
    assert any("floating-point form" in gap for gap in card["not_covered"])
    assert verify_chain(run, parents=[chain / "generator"]).failed == []


def test_with_little_noise_it_is_the_histogram_of_the_queries(chain: Path, tmp_path: Path) -> None:
    counted(chain, tmp_path / "run", {"noise_multiplier": 1.0, "tuning_data": "none"})
    tuning = read_card(tmp_path / "run")["tuning"]
    assert tuning["data"] == "unknown" and not tuning["accounted"], "the generator's own are not stated"
    counts = np.array(ReleasedHistogram.read(tmp_path / "run").counts)
    data = PairsDataModule(folder=chain / "log")
    data.setup("fit")
    passages = [row.passage_id for row in data.pair_rows("train")]
    exact = [sum(LABELS[name] == label for name in passages) for label in ("even", "odd")]
    assert np.abs(counts - [*exact, 0]).max() <= 8 and min(exact) > 20


def test_the_chosen_queries_come_closer_to_the_histogram_and_carry_its_claim(
    chain: Path, histogram: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    match = HistogramMatch(histogram, keep_share=0.5)
    Filter(data=chain / "made" / "synthetic", filters={"match": match}, tuning_data="none").run(parts(tmp_path))
    folder, told = tmp_path / "run" / "filtered", capsys.readouterr().out
    card = read_card(folder)
    facts = card["generation"]["filters"][-1]
    assert card["environment"]["hardware"].startswith("cpu") and card["environment"]["precision"] == "float32"
    kept = len((folder / "queries.jsonl").read_text().splitlines())
    granularity = 3 / (2 * kept)  # shares of three bins are multiples of 1 / kept
    nobody_wrote = float(ReleasedHistogram.read(histogram).target[2])  # queries of the third bin: noise alone is in it
    assert facts["distance_after"] <= nobody_wrote + granularity
    assert facts["uses_private_data"] is False and facts["histogram_card_sha256"] == card_sha256(histogram)
    assert card["claim"]["epsilon"] == read_card(histogram)["claim"]["epsilon"]
    assert card["claim"]["epsilon"] > read_card(chain / "made" / "synthetic")["claim"]["epsilon"]
    assert card["parents"][0]["sha256"] == card_sha256(histogram)
    of_set, here = (read_card(each)["assumptions"] for each in (chain / "made" / "synthetic", folder))
    stated = [plain_assumption(one["text"]) for one in here]
    assert {plain_assumption(one["text"]) for one in of_set if one["holds"] == "unverified"} <= {*stated}
    assert any("list of passages" in text for text in stated), "which synthesize was told, and no histogram"
    readme = (folder / "README.md").read_text()
    assert "histogram_match" in readme and "together with a histogram of the private queries" in readme
    assert f"histogram {facts['distance_before']:.3f} before, {facts['distance_after']:.3f} after" in told
    found = verify_chain(folder, parents=[histogram, chain / "generator"])
    assert not found.failed, found.failed


def test_the_choice_is_repeatable_and_another_seed_makes_another(chain: Path, histogram: Path) -> None:
    released = load_released(chain / "made" / "synthetic")

    def chosen(seed: int) -> list[str]:
        kept, _ = apply_filters(released, [HistogramMatch(histogram, keep_share=0.4, seed=seed)])
        return [query.query_id for query in kept]

    assert chosen(0) == chosen(0) != chosen(1)
    assert len(chosen(0)) == round(0.4 * len(released))


@pytest.mark.costly
def test_a_histogram_that_was_charged_to_another_generator_is_refused(chain: Path, tmp_path: Path) -> None:
    """Its own card is in order; but no claim covers both it and these queries."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copytree(chain / "log", other / "log")
    log = PairsDataModule(folder=other / "log", sampling="poisson", expected_batch_size=8)
    mode = DPSGD(eps=50.0, noise_multiplier=5.0, max_grad_norm=0.5, secret_file=chain / "secret")
    run(other / "generator", generator(privacy=mode, seed=1), log, steps=1)
    counted(chain, other / "histogram", {"generator": other / "generator"})
    released = load_released(chain / "made" / "synthetic")
    with pytest.raises(PrivateDataError, match=r"a different ledger from these queries.*no claim covers both"):
        apply_filters(released, [HistogramMatch(other / "histogram")])


@pytest.mark.parametrize(
    ("bound", "duplicates", "words"),
    [(2, "keep", "contradicts these data"), (8, "merge", r"datamodule\.duplicates=merge"), (8, "keep", None)],
)
def test_a_bound_on_the_units_of_a_user_is_held_against_the_log_before_anything_is_counted(
    bound: int, duplicates: str, words: str | None, chain: Path, tmp_path: Path
) -> None:
    log = Path(shutil.copytree(chain / "log", tmp_path / "log"))
    with_users(log, 8)
    changes: dict[str, Any] = {"mode": {"max_units_per_user": bound}, "data": {"folder": log, "duplicates": duplicates}}
    if words is None:
        counted(chain, tmp_path / "run", **changes)
        claim = read_card(tmp_path / "run")["claim"]
        assert claim["user_level_epsilon"] is None, "the generator declared no bound"
        return
    with pytest.raises(ConfigurationError, match=words):
        counted(chain, tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_a_second_histogram_beside_the_first_is_refused(chain: Path, histogram: Path, tmp_path: Path) -> None:
    """Each composes with the generator alone; what is chosen by both costs more than either card says."""
    counted(chain, tmp_path / "second", {"bins": LengthBins(edges=[2])})
    released = load_released(chain / "made" / "synthetic")
    first, second = HistogramMatch(histogram), HistogramMatch(tmp_path / "second")
    for both in ([first, second], [second, first]):
        with pytest.raises(PrivateDataError, match=r"a second histogram.*one of them alone"):
            apply_filters(released, both)
        assert [one.distances for one in both] == [None, None], "before the first one scores"
    again, _ = apply_filters(released, [first, HistogramMatch(histogram, keep_share=0.9, seed=1)])
    assert again.claim == histogram, "looking at one release twice costs nothing"
    Filter(data=chain / "made" / "synthetic", filters={"match": first}, tuning_data="none").run(parts(tmp_path))
    with pytest.raises(PrivateDataError, match=r"a second histogram.*one of them alone"):
        apply_filters(load_released(tmp_path / "run" / "filtered"), [second])


# -- a generator that was audited in between ---------------------------------------------------


def audited(generator: Path, **changes: Any) -> None:
    """What task=audit leaves on the cards of a run: one after the other, so that their bytes come to differ."""
    found = AttackResult(attack="planted secrets", n=10, metric="share of rank 1", estimate=0.1, confidence=0.95)
    for copies, folder in enumerate((generator, generator / "model"), start=1):
        add_evidence(folder, [replace(found, **{"copies": copies} | changes)])


@pytest.fixture
def own_chain(chain: Path, tmp_path: Path) -> Path:
    """The chain in a folder that a test may change; its generator's card is nowhere else within reach."""
    return Path(shutil.copytree(chain, tmp_path / "own", ignore=shutil.ignore_patterns("histogram")))


def load_made_by(own_chain: Path) -> Any:
    """The queries, as of a generator whose card is the one that lies there now."""
    made = load_released(own_chain / "made" / "synthetic")
    return replace(made, ancestors=frozenset({card_sha256(own_chain / "generator")}))


@pytest.mark.parametrize("first", ["queries", "histogram"])
def test_a_generator_audited_between_histogram_and_queries_is_the_same(first: str, own_chain: Path) -> None:
    made, passages = own_chain / "made" / "synthetic", PairsDataModule(folder=own_chain / "log")
    passages.setup("fit")
    if first == "histogram":
        counted(own_chain, own_chain / "histogram")
        shutil.rmtree(made)
        audited(own_chain / "generator")
        synthesize(
            own_chain / "generator" / "model", passages.public_passages(), made, passages_are_public=True,
            queries_per_passage=4,
        )  # fmt: skip
    else:
        audited(own_chain / "generator")
        counted(own_chain, own_chain / "histogram")
    kept, _ = apply_filters(load_released(made), [HistogramMatch(own_chain / "histogram", keep_share=0.5)])
    assert kept.claim == own_chain / "histogram"


def test_a_card_that_changed_more_than_by_results_is_another_one(own_chain: Path) -> None:
    """It lists the SHA-256 of the card that the histogram started from, and claims less than that one did."""
    counted(own_chain, own_chain / "histogram")
    card = copy.deepcopy(read_card(own_chain / "generator"))
    note = {"day": "2026-01-01", "sha256_before": card_sha256(own_chain / "generator"), "results": []}
    card["amendments"] = [note]
    chosen = HistogramMatch(own_chain / "histogram")
    for claimed, same in ((card["claim"]["epsilon"], True), (card["claim"]["epsilon"] / 2, False)):
        card["claim"]["epsilon"] = claimed
        for folder in (own_chain / "generator", own_chain / "generator" / "model"):
            write_card(card | {"checksum": checksum(card)}, folder)
        with nullcontext() if same else pytest.raises(PrivateDataError, match="a different ledger from these queries"):
            apply_filters(load_made_by(own_chain), [chosen])


def test_a_generator_that_the_audit_contradicts_composes_with_nothing(own_chain: Path) -> None:
    counted(own_chain, own_chain / "histogram")
    audited(own_chain / "generator", metric=BOUND, eps_lower=99.0, ceiling=1.0, confidence=0.9999)
    with pytest.raises(PrivateDataError, match="no claim covers both"):
        apply_filters(load_made_by(own_chain), [HistogramMatch(own_chain / "histogram")])


def test_a_histogram_whose_counts_were_changed_is_refused(chain: Path, histogram: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(histogram, edited)
    facts = json.loads((edited / "histogram.json").read_text())
    facts["counts"][0] += 1
    (edited / "histogram.json").write_text(json.dumps(facts))
    with pytest.raises(Exception, match="does not match its files"):
        apply_filters(load_released(chain / "made" / "synthetic"), [HistogramMatch(edited)])


def test_an_interrupted_one_is_charged_once(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReleasedHistogram, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        counted(chain, tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(ResumeError, match="already holds a ledger"):
        counted(chain, tmp_path / "run")
    with pytest.raises(ResumeError, match="other bins"):
        counted(chain, tmp_path / "run", {"bins": LengthBins(edges=[2])}, resume=True)
    told = counted(chain, tmp_path / "run", resume=True)
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert sum(release.count for release in charged_releases(records)) == 1
    before = (tmp_path / "run" / "privacy_ledger.jsonl").read_bytes()
    assert counted(chain, tmp_path / "run", resume=True) == told
    with pytest.raises(ResumeError, match="noise_multiplier"):
        counted(chain, tmp_path / "run", {"noise_multiplier": 3.0}, resume=True)
    with pytest.raises(ResumeError, match="other bins"):
        counted(chain, tmp_path / "run", {"bins": LengthBins(edges=[2])}, resume=True)
    assert (tmp_path / "run" / "privacy_ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"data": {"duplicates": "merge"}}, ConfigurationError, r"datamodule\.duplicates=merge, but task\.generator"),
        ({"mode": {"unit": "pair"}}, ConfigurationError, r"privacy\.unit=pair, but task\.generator"),
        ({"mode": {"neighbours": "replace_one"}}, ConfigurationError, r"privacy\.neighbours=replace_one"),
        ({"mode": {"delta": 1e-3}}, ConfigurationError, r"privacy\.delta=0\.001"),
        ({"mode": {"noise_multiplier": 3.0}}, ConfigurationError, r"task\.noise_multiplier"),
        ({"task": {"noise_multiplier": 0.1}}, BudgetExceededError, r"privacy\.eps=9"),
        ({"task": {"max_count": 0}}, ConfigurationError, "max_count=0"),
        ({"make_privacy": NoPrivacy}, ConfigurationError, "privacy=none"),
    ],
)
def test_what_makes_no_one_claim_is_refused_before_anything_is_counted(
    chain: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        counted(chain, tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_the_ledger_of_the_data_counts_histogram_and_generator(chain: Path, histogram: Path, tmp_path: Path) -> None:
    claim = read_card(histogram)["claim"]["epsilon"]
    counts = {"dataset_ledger": tmp_path / "total.jsonl", "total_eps": 1.02 * claim}
    counted(chain, tmp_path / "run", mode=counts)
    card = read_card(tmp_path / "run")
    budget = DPSGD(eps=9.0, delta=card["claim"]["delta"]).budget(None)
    total = DatasetLedger(tmp_path / "total.jsonl", total_eps=None, budget=budget).total()
    assert (total.runs, total.running) == (1, 0)
    assert total.epsilon == pytest.approx(claim), "the generator was counted in no ledger of the data set"
    with pytest.raises(BudgetExceededError, match="total_eps"):
        counted(chain, tmp_path / "second", mode=counts)
    assert not (tmp_path / "second" / "privacy_ledger.jsonl").exists()
    with pytest.raises(BudgetExceededError, match="total_eps"):  # the histogram alone would fit
        counted(chain, tmp_path / "third", mode={"dataset_ledger": tmp_path / "small.jsonl", "total_eps": 0.9 * claim})
    assert not (tmp_path / "third" / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize("killed", ["write", "settle"])
def test_a_killed_histogram_goes_on_where_the_limit_of_the_data_set_covers_it_once(
    chain: Path, histogram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    limit = 1.02 * read_card(histogram)["claim"]["epsilon"]
    counts = {"dataset_ledger": tmp_path / "total.jsonl", "total_eps": limit}
    monkeypatch.setattr(ReleasedHistogram if killed == "write" else DatasetLedger, killed, interrupted)
    with pytest.raises(KeyboardInterrupt):
        counted(chain, tmp_path / "run", mode=counts)
    monkeypatch.undo()
    told = counted(chain, tmp_path / "run", mode=counts, resume=True)
    assert told["epsilon"] == pytest.approx(read_card(histogram)["claim"]["epsilon"])


# -- quotas -----------------------------------------------------------------------------------


def test_quotas_follow_the_target_as_far_as_there_are_queries() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        target = random.dirichlet(np.ones(6)) * (random.random(6) < 0.8)
        if target.sum() == 0:
            continue
        target /= target.sum()
        there = random.integers(0, 40, 6)
        wanted = int(random.integers(1, 120))
        quota = quotas(target, there, wanted)
        assert (quota <= there).all() and (quota[target == 0] == 0).all()
        assert quota.sum() == min(wanted, there[target > 0].sum())
        free = (quota < there) & (target > 0)
        if free.all() and wanted:
            assert np.abs(quota - wanted * target).max() <= 1
        elif free.any():  # a bin that ran short leaves its share to the others, none of which falls below its own
            assert (quota[free] >= np.floor(wanted * target[free])).all()


@pytest.mark.parametrize("error", [RuntimeError("a text of 3000 words"), MemoryError(), SystemExit(1)])
def test_a_failure_over_private_rows_is_recorded_as_such_and_the_card_after_a_resume_says_so(
    error: BaseException, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(LabelBins, "assign", fails)
        with pytest.raises(type(error)):
            counted(chain, tmp_path / "run")
    path = tmp_path / "run" / "privacy_ledger.jsonl"
    last = PrivacyLedger.read(path).records[-1]
    assert (last["kind"], last["reason"], last["steps"]) == ("end", "failed", 0), "the same for every failure"
    assert "words" not in path.read_text(encoding="utf-8")  # no digit, which a hash may hold too
    counted(chain, tmp_path / "run", resume=True)
    card = read_card(tmp_path / "run")
    assert any("the published files alone" in banner for banner in card["banners"])
    assert verify_card(card, path, folder=tmp_path / "run") == []


def test_a_full_disk_is_no_failure_of_a_row(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, error in enumerate((BudgetExceededError("over"), OSError(errno.ENOSPC, "full"), KeyboardInterrupt())):
        with monkeypatch.context() as broken:
            broken.setattr(LabelBins, "assign", lambda *_, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(type(error)):
                counted(chain, tmp_path / str(number))
        kinds = [
            record["kind"] for record in PrivacyLedger.read(tmp_path / str(number) / "privacy_ledger.jsonl").records
        ]
        assert "end" not in kinds
