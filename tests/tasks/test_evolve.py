"""`task=evolve`: from votes to a data set, with one claim; killed anywhere, it goes on and spends nothing twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from tiny_generator import generator, lively_generator, write_parent_card
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import parts, retriever, with_query, with_users, write_log

from lit_dpret.cards.card import card_sha256, read_card, verify_card
from lit_dpret.cards.start import read_start
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.datamodules.rows import Row
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError, LitDpretError, ResumeError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.histogram import ReleasedHistogram, exact_counts
from lit_dpret.privacy.ledger.judgement import claimed_releases
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.ledger.trained import TrainedIn, mark_trained
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.synthesis.filters import HistogramMatch, LengthBins, load_released
from lit_dpret.synthesis.shards import ShardStore
from lit_dpret.tasks import Evolve, Filter, Histogram
from lit_dpret.tasks import evolve as evolve_task
from lit_dpret.tasks.evolve import _Voters

T = 2
DATA_FILES = ("queries.jsonl", "corpus.jsonl", "qrels/train.tsv", "qrels/train.jsonl", "pairs/train.jsonl")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private log and a public encoder."""
    root = tmp_path_factory.mktemp("world")
    write_log(root / "log")
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=12, passage_max_length=12))
    save_sentence_transformer(root / "encoder", tower)
    return root


def evolve(world: Path, folder: Path, task: dict[str, Any] | None = None, **changes: Any) -> dict[str, float]:
    mode = partial(DPSGD, **{"eps": 30.0, "secret_file": world / "secret"} | changes.pop("mode", {}))
    data = {"folder": world / "log", "sampling": "poisson"} | changes.pop("data", {})
    settings: dict[str, Any] = {
        "passages_are_public": True, "generations": T, "population": 12, "threshold": 0.0, "max_new_tokens": 5,
        "encoder": str(world / "encoder"), "encoder_is_public": True, "group_size": 5, **(task or {}),
    }  # fmt: skip
    given = {
        "run_dir": folder, "make_datamodule": partial(PairsDataModule, **data),
        "make_module": lambda privacy: lively_generator(), **changes,
    }  # fmt: skip
    return Evolve(**settings).run(parts(folder.parent, given.pop("make_privacy", mode), **given))


@pytest.fixture(scope="module")
def evolved(world: Path) -> Path:
    evolve(world, world / "evolved")
    return world / "evolved"


def records_of(folder: Path) -> list[dict[str, Any]]:
    return list(PrivacyLedger.read(folder / "privacy_ledger.jsonl").records)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """All that a set and the votes behind it consist of, without cards and ledger, which tell of interruptions."""
    files = [folder / "synthetic" / name for name in (*DATA_FILES, "generation.json")]
    files += sorted(folder.glob("generations/*/*.json*")) + sorted(folder.glob("generations/*/shards/*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- the claim ---------------------------------------------------------------------------------


def test_epsilon_of_all_generations_is_that_of_one_gaussian_of_their_root(world: Path, evolved: Path) -> None:
    """T Gaussians of multiplier s are one of s / sqrt(T), whose epsilon has a formula (Balle and Wang 2018)."""
    card, (noise,) = read_card(evolved), claimed_releases(records_of(evolved))
    mu, delta = np.sqrt(T) / noise.noise_multiplier, card["claim"]["delta"]

    def beyond(eps: float) -> float:
        return float(norm.cdf(mu / 2 - eps / mu) - np.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta)

    exact = brentq(beyond, 0.0, 100.0)
    assert noise.count == T and delta == pytest.approx(1 / (2 * 56))
    assert exact <= card["claim"]["epsilon"] <= 30.0
    assert card["claim"]["epsilon"] == pytest.approx(exact, rel=2e-3)


def test_the_card_follows_from_the_ledger_and_the_set_inherits_it(evolved: Path) -> None:
    card, made = read_card(evolved), read_card(evolved / "synthetic")
    assert verify_card(card, evolved / "privacy_ledger.jsonl", folder=evolved) == []
    assert made["claim"]["epsilon"] == card["claim"]["epsilon"]
    assert made["parents"][0]["sha256"] == card_sha256(evolved)
    found = verify_chain(evolved / "synthetic")
    assert not found.failed, found.failed
    assert f"{T} noised histograms of votes" in card["claim"]["statement"]
    assert card["mechanism"]["rows_per_unit"] == "at most 1 vote"
    said = [one["text"] for one in card["assumptions"]]
    assert any("encoder" in text and "as declared" in text for text in said)
    assert "noised votes of the private queries" in (evolved / "synthetic" / "README.md").read_text()


def test_the_queries_are_paired_with_public_passages_and_train_a_retriever(evolved: Path, world: Path) -> None:
    log = PairsDataModule(folder=world / "log")
    log.setup("fit")
    released = load_released(evolved / "synthetic")
    assert 6 <= len(released) <= 12
    assert {query.passage_id for query in released} <= set(log.public_passages())
    data = SyntheticDataModule(folder=evolved / "synthetic", evaluation=log, physical_batch_size=4)
    data.setup("fit")
    assert len(data.pair_rows("train")) == len(released)


def test_the_votes_are_those_of_the_queries(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to no noise every query's vote is found again in the file of its generation."""
    evolve(world, tmp_path / "run", mode={"eps": 2000.0, "accountant": "rdp"})
    counts = [ReleasedHistogram.read(place) for place in sorted((tmp_path / "run" / "generations").glob("0[12]"))]
    assert [sum(one.counts) for one in counts] == pytest.approx([56, 56], abs=12 * counts[0].noise_std)


def test_a_user_takes_no_more_votes_away_than_the_cap(world: Path, tmp_path: Path) -> None:
    """On the real path, from the log to the counts: users with copies of one query, one after another without rows."""
    log = Path(shutil.copytree(world / "log", tmp_path / "log"))
    with_users(log, 4)
    rows = [json.loads(line) for line in (log / "queries.jsonl").read_text().splitlines()]
    for row in rows[:3]:
        row["text"] = rows[0]["text"]
    texts = ["bana elo", "delo fibi", "gomu kuri", "mana nato", "rana seku", "tomu bibi"]
    judged = (log / "qrels" / "train.tsv").read_text().splitlines()

    def counted(left_out: str | None) -> list[np.ndarray]:
        theirs = {row["_id"] for row in rows if row["user_id"] == left_out}
        left = [json.dumps(row) + "\n" for row in rows if row["_id"] not in theirs]
        (log / "queries.jsonl").write_text("".join(left))
        kept = [line for line in judged if line.split("\t")[0] not in theirs]
        (log / "qrels" / "train.tsv").write_text("\n".join(kept) + "\n")
        data = PairsDataModule(folder=log)
        data.setup("fit")
        data.use_unit("user")
        found = [*_Voters(data.train_units(), str(world / "encoder"), 1).votes(texts)]
        return [exact_counts(found, bins=len(texts), max_count=most, distinct=True).numpy() for most in (1, 3)]

    whole, users = counted(None), sorted({row["user_id"] for row in rows[:-8]})[:6]
    changes = [[all - some for all, some in zip(whole, counted(user), strict=True)] for user in users]
    for most, moved in zip((1, 3), zip(*changes, strict=True), strict=True):
        assert set(np.unique(moved)) <= {0.0, 1.0}
        assert 0 < max(map(np.linalg.norm, moved)) <= np.sqrt(most) + 1e-12


class _Units:
    """Units of given texts."""

    def __init__(self, texts: list[list[str]]) -> None:
        self._rows = [
            [Row(f"q{u}.{i}", text, "p", "", frozenset()) for i, text in enumerate(unit)]
            for u, unit in enumerate(texts)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, unit: int) -> list[Row]:
        return self._rows[unit]


def test_a_blanked_unit_has_no_vote_and_queries_embed_apart(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], TextEncoder.encode

    def encode(self: TextEncoder, texts: Any, side: Any, **settings: Any) -> Any:
        asked.append((list(texts), settings.get("apart", False)))
        return real(self, texts, side, **settings)

    monkeypatch.setattr(TextEncoder, "encode", encode)
    voters = _Voters(_Units([["bana"], [""], [" ", "elo bana"]]), str(world / "encoder"), 1)
    found = list(voters.votes(["bana", "elo"]))
    assert [len(unit) for unit in found] == [1, 0, 1]
    assert asked == [(["bana", "elo bana"], True), (["bana", "elo"], False)]


# -- interruptions -----------------------------------------------------------------------------


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def _at_call(number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Do what ``real`` does until its call of that number, which is interrupted before it does anything."""
    calls = iter(range(1, 1000))
    return lambda *args, **settings: (_interrupted if next(calls) == number else real)(*args, **settings)


POINTS: dict[str, tuple[Any, str, int]] = {
    "while the first candidates are drawn": (ShardStore, "add", 2),
    "after an intent": (PrivacyLedger, "confirm", 1),
    "while the second candidates are drawn": (ShardStore, "add", 4),
    "before the second votes are on the disk": (ReleasedHistogram, "write", 2),
    "while the set is drawn": (ShardStore, "seal", 3),
}


@pytest.fixture(scope="module")
def uninterrupted(world: Path) -> dict[str, bytes]:
    evolve(world, world / "seeded", mode={"noise_seed": 5, "secret_file": None})
    return bytes_of(world / "seeded")


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_killed_goes_on_to_the_same_bytes_and_spends_nothing_twice(
    point: str, world: Path, tmp_path: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, number = POINTS[point]
    seeded: dict[str, Any] = {"mode": {"noise_seed": 5, "secret_file": None}}
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _at_call(number, getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            evolve(world, tmp_path / "run", **seeded)
    with pytest.raises(ResumeError, match="already holds a ledger"):
        evolve(world, tmp_path / "run", **seeded)
    evolve(world, tmp_path / "run", **seeded, resume=True)
    assert bytes_of(tmp_path / "run") == uninterrupted
    assert sum(release.count for release in charged_releases(records_of(tmp_path / "run"))) == T


def test_released_votes_are_kept(world: Path, evolved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(evolved, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "synthetic")
    monkeypatch.setattr(_Voters, "votes", _interrupted)
    before = bytes_of(evolved)
    evolve(world, tmp_path / "run", resume=True)
    assert bytes_of(tmp_path / "run") == before


def test_a_failure_over_queries_is_on_the_card(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    votes = _Voters.votes

    def fails_once(self: Any, candidates: list[str]) -> Any:
        asked.append(len(candidates))
        if len(asked) == 2:
            raise RuntimeError("one query is too long")
        return votes(self, candidates)

    monkeypatch.setattr(_Voters, "votes", fails_once)
    with pytest.raises(RuntimeError, match="too long"):
        evolve(world, tmp_path / "run")
    last = records_of(tmp_path / "run")[-1]
    assert (last["kind"], last["reason"], last["steps"]) == ("end", "failed", 1)
    evolve(world, tmp_path / "run", resume=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "synthetic"):
        assert any("after step 1" in banner for banner in read_card(folder)["banners"])


def test_edited_votes_give_way_to_the_released_ones(world: Path, evolved: Path, tmp_path: Path) -> None:
    shutil.copytree(evolved, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "synthetic")
    file = tmp_path / "run" / "generations" / "01" / "histogram.json"
    facts = json.loads(file.read_text())
    facts["counts"][0] += 50
    file.write_text(json.dumps(facts))
    evolve(world, tmp_path / "run", resume=True)
    assert bytes_of(tmp_path / "run") == bytes_of(evolved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mode": {"eps": 1.0}}, "eps"),
        ({"mode": {"neighbours": "replace_one"}}, "neighbours"),
        ({"task": {"population": 7}}, "population"),
        ({"task": {"generations": 1}}, r"task\.generations"),
        ({"data": {}}, "data set"),
    ],
)
def test_a_finished_run_is_no_answer_to_another_question(
    change: dict[str, Any], named: str, world: Path, evolved: Path, tmp_path: Path
) -> None:
    if "data" in change:
        shutil.copytree(world / "log", tmp_path / "other")
        queries = tmp_path / "other" / "queries.jsonl"
        queries.write_text(queries.read_text().replace("bana", "delo"))
        change = {"data": {"folder": tmp_path / "other"}}
    before = bytes_of(evolved), (evolved / "privacy_ledger.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=named):
        evolve(world, evolved, resume=True, **change)
    assert evolve(world, evolved, resume=True)["epsilon"] == read_card(evolved)["claim"]["epsilon"]
    assert (bytes_of(evolved), (evolved / "privacy_ledger.jsonl").read_bytes()) == before


def test_a_run_that_was_killed_after_an_intent_is_neither_resumed_otherwise_nor_repeated_for_nothing(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another secret its noise cannot be drawn again, and all is spent."""
    with monkeypatch.context() as patch:
        patch.setattr(PrivacyLedger, "confirm", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            evolve(world, tmp_path / "run")
    for change in ({"population": 11}, {"top_p": 0.5}):
        with pytest.raises(ResumeError, match=next(iter(change))):
            evolve(world, tmp_path / "run", change, resume=True)
    with pytest.raises(BudgetExceededError, match=r"privacy\.eps=30"):
        evolve(world, tmp_path / "run", mode={"secret_file": tmp_path / "other"}, resume=True)
    assert claimed_releases(records_of(tmp_path / "run"))[0].count <= T


def test_all_generations_are_reserved_in_the_ledger_of_the_data_set_before_the_first_votes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger: dict[str, Any] = {"dataset_ledger": tmp_path / "data.jsonl", "total_eps": 40.0}
    with monkeypatch.context() as patch:
        patch.setattr(PrivacyLedger, "announce", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            evolve(world, tmp_path / "run", mode=ledger)
    for _ in ("while it is interrupted", "when it is finished"):
        with pytest.raises(BudgetExceededError, match=r"privacy\.total_eps"):
            evolve(world, tmp_path / "second", mode=ledger)
        assert not (tmp_path / "second" / "privacy_ledger.jsonl").exists()
        evolve(world, tmp_path / "run", mode=ledger, resume=True)
    card = read_card(tmp_path / "run")
    assert card["accounting"]["dataset_total"]["epsilon"] == pytest.approx(card["claim"]["epsilon"], rel=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mode", "task"),
    [
        ({"neighbours": "add_or_remove", "delta": 1e-3}, {}),
        ({"neighbours": "replace_one", "noise": "discrete"}, {}),
        ({"unit": "user"}, {"max_votes": 3, "nearest": 2}),
        ({"unit": "pair"}, {"max_votes": 2, "nearest": 2}),
    ],
)
def test_each_unit_has_a_verified_card(world: Path, tmp_path: Path, mode: dict[str, Any], task: dict[str, Any]) -> None:
    shutil.copytree(world / "log", tmp_path / "log")
    with_users(tmp_path / "log", 2)
    evolve(world, tmp_path / "run", task, mode={"eps": 60.0, **mode}, data={"folder": tmp_path / "log"})
    card, most = read_card(tmp_path / "run"), task.get("max_votes", 1)
    bound = np.sqrt(most / 2) if mode.get("neighbours") == "replace_one" else np.sqrt(most)
    assert card["mechanism"]["sensitivity"] == pytest.approx(bound, rel=1e-3)
    assert {key: card["claim"][key] for key in mode if key in card["claim"]} == {
        key: value for key, value in mode.items() if key in card["claim"]
    }
    assert 0 < card["claim"]["epsilon"] <= 60.0
    assert not verify_chain(tmp_path / "run" / "synthetic").failed


# -- how the next candidates are made ----------------------------------------------------------


def drawn_in(folder: Path, generation: int) -> list[str]:
    """The passages of the candidates that were drawn for a generation, in the order of the names."""
    shards = sorted((folder / "generations" / f"{generation:02d}" / "shards").glob("*"))
    records = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    return sorted(record["passage_id"].rpartition("#")[0] for record in records)


def test_new_candidates_are_of_selected_passages_unless_fresh_ones_are_asked_for(
    world: Path, evolved: Path, tmp_path: Path
) -> None:
    evolve(world, tmp_path / "some", {"fresh": 0.5, "keep": 2, "queries": 9})
    first, second, last = (drawn_in(tmp_path / "some", generation) for generation in (1, 2, 3))
    assert len(first) == 12 and len(second) in (10, 11) and len(last) in (7, 8)
    assert len(set(second) - set(first)) == round(len(second) / 2), "the next ones of the public order"
    assert len(set(last)) <= 2
    evolve(world, tmp_path / "none", {"keep": 2, "per_passage": 10**30})
    assert len(set(drawn_in(tmp_path / "none", 2))) <= 2
    assert drawn_in(tmp_path / "none", 1) == drawn_in(evolved, 1), "a bound that no passage reaches changes nothing"


def test_no_passage_has_more_candidates_than_it_may_and_others_get_the_places(world: Path, tmp_path: Path) -> None:
    evolve(world, tmp_path / "run", {"per_passage": 1})
    voted_on = [set(drawn_in(tmp_path / "run", generation)) for generation in (1, 2)]
    assert len(voted_on[0]) == 12 and not voted_on[0] & voted_on[1] and len(voted_on[1]) >= 10
    sources = [query.passage_id for query in load_released(tmp_path / "run" / "synthetic")]
    assert len(set(sources)) == len(sources) > 0


@pytest.mark.parametrize("fresh", [0.0, 0.5])
def test_few_passages_limit_it(world: Path, tmp_path: Path, fresh: float, capsys: pytest.CaptureFixture[str]) -> None:
    evolve(world, tmp_path / "run", {"per_passage": 2, "max_passages": 3, "fresh": fresh, "variation": "{passage}"})
    assert sorted(Counter(drawn_in(tmp_path / "run", 1)).values()) == [2, 2, 2]
    for generation in (1, 2):
        names = ReleasedHistogram.read(tmp_path / "run" / "generations" / f"{generation:02d}").names
        assert max(Counter(name.rpartition("#")[0] for name in names).values()) <= 2
    sources = Counter(query.passage_id for query in load_released(tmp_path / "run" / "synthetic"))
    assert max(sources.values()) <= 2
    assert "task.per_passage=2" in capsys.readouterr().out


# -- a histogram of the same log beside it ---------------------------------------------------------


def counted_beside(world: Path, folder: Path, generator: Path, **changes: Any) -> dict[str, float]:
    mode = partial(DPSGD, eps=30.0, secret_file=world / "secret")
    job = Histogram(generator=generator, bins=LengthBins(edges=[3]), noise_multiplier=2.0)
    data = partial(PairsDataModule, folder=world / "log", sampling="poisson")
    return job.run(parts(folder.parent, mode, run_dir=folder, make_datamodule=data, **changes))


@pytest.mark.parametrize("named", ["", "synthetic"])
def test_a_histogram_is_charged_with_the_votes(world: Path, evolved: Path, tmp_path: Path, named: str) -> None:
    run = shutil.copytree(evolved, tmp_path / "evolved")
    told = counted_beside(world, tmp_path / "histogram", run / named)
    card, votes = read_card(tmp_path / "histogram"), read_card(evolved)
    assert card["claim"]["epsilon"] > votes["claim"]["epsilon"] == told["epsilon_of_generator_alone"]
    assert "trained" not in card["pretraining"]["start"] and "votes" in card["pretraining"]["start"]
    own = charged_releases(records_of(tmp_path / "histogram")), charged_releases(records_of(evolved))
    both = epsilon([*own[0], *own[1]], delta=card["claim"]["delta"], neighbours="zero_out")
    assert card["claim"]["epsilon"] == pytest.approx(both, rel=1e-9)
    chosen = HistogramMatch(tmp_path / "histogram", keep_share=0.5)
    Filter(data=run / "synthetic", filters={"m": chosen}, tuning_data="none").run(
        parts(tmp_path, run_dir=tmp_path / "kept")
    )
    kept = load_released(tmp_path / "kept" / "filtered")
    assert 0 < len(kept.queries) < len(load_released(run / "synthetic").queries)
    assert read_card(tmp_path / "kept" / "filtered")["claim"]["epsilon"] == card["claim"]["epsilon"]
    for place in ("histogram", "kept/filtered"):
        found = verify_chain(tmp_path / place)
        assert not found.failed, found.failed


def test_votes_whose_files_were_changed_start_no_histogram(world: Path, evolved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(evolved, tmp_path / "copy")
    (copy / "generations" / "01" / "histogram.json").write_text("{}")
    with pytest.raises(DataError, match=r"task\.generator"):
        counted_beside(world, tmp_path / "histogram", copy)
    assert not (tmp_path / "histogram" / "privacy_ledger.jsonl").exists()


def test_nothing_is_trained_from_a_run_of_votes(world: Path, evolved: Path) -> None:
    with pytest.raises(ConfigurationError, match="init_from"):
        read_start(evolved, public=False)


def test_a_variation_shows_the_model_its_query(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], evolve_task.draw_into

    def draw_into(store: Any, groups: Any, texts: dict[str, str], *rest: Any, **settings: Any) -> None:
        seen.append(texts)
        real(store, groups, texts, *rest, **settings)

    monkeypatch.setattr(evolve_task, "draw_into", draw_into)
    evolve(world, tmp_path / "run", {"variation": "{query} or {passage}", "keep": 1})
    parents = ReleasedHistogram.read(tmp_path / "run" / "generations" / "01")
    best = parents.names[int(np.argmax(parents.counts))]
    assert " or " not in seen[0][best]
    varied = set(seen[1].values())
    assert len(varied) == 1 and varied.pop().endswith(f" or {seen[0][best]}")


@pytest.mark.parametrize(("bound", "duplicates", "taken"), [(1, "keep", False), (4, "keep", True), (4, "merge", False)])
def test_a_bound_is_held_against_the_log(world: Path, tmp_path: Path, bound: int, duplicates: str, taken: bool) -> None:
    shutil.copytree(world / "log", tmp_path / "log")
    with_users(tmp_path / "log", 4)
    changes: dict[str, Any] = {
        "mode": {"max_units_per_user": bound}, "data": {"folder": tmp_path / "log", "duplicates": duplicates},
    }  # fmt: skip
    if taken:
        evolve(world, tmp_path / "run", **changes)
        assert read_card(tmp_path / "run")["claim"]["user_level_epsilon"] > 30.0
        return
    with pytest.raises(ConfigurationError, match="max_units_per_user"):
        evolve(world, tmp_path / "run", **changes)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"task": {"passages_are_public": False}}, ConfigurationError, r"task\.passages_are_public"),
        ({"task": {"generations": 51}}, ConfigurationError, r"task\.generations=51"),
        ({"task": {"generations": 0}}, ConfigurationError, r"task\.generations"),
        ({"task": {"nearest": 2}}, ConfigurationError, r"task\.nearest=2"),
        ({"task": {"max_votes": 2}}, ConfigurationError, r"task\.max_votes=2"),
        ({"task": {"encoder_is_public": False}}, ConfigurationError, r"task\.encoder_is_public"),
        ({"task": {"top_p": 0.0}}, ConfigurationError, "top_p"),
        ({"task": {"vote_power": -1.0}}, ConfigurationError, r"task\.vote_power"),
        ({"task": {"per_passage": 0}}, ConfigurationError, r"task\.per_passage"),
        ({"task": {"fresh": 1.5}}, ConfigurationError, r"task\.fresh=1\.5"),
        ({"task": {"variation": "{query}"}}, ConfigurationError, r"task\.variation"),
        ({"task": {"variation": "{passage} {0}"}}, ConfigurationError, r"task\.variation"),
        ({"task": {"variation": "{passage.__class__}"}}, ConfigurationError, r"task\.variation"),
        ({"mode": {"eps": 0.5}}, ConfigurationError, r"task\.generations=2 within privacy\.eps=0\.5"),
        ({"mode": {"noise_multiplier": 0.01}}, ConfigurationError, r"privacy\.noise_multiplier=0\.01"),
        ({"make_privacy": NoPrivacy}, ConfigurationError, "privacy=none"),
        ({"make_module": lambda privacy: retriever(privacy=privacy)}, ConfigurationError, "model=generator"),
    ],
)
def test_what_cannot_be_claimed_or_makes_no_sense_is_refused_before_anything_is_drawn(
    world: Path, tmp_path: Path, changes: dict[str, Any], error: type[LitDpretError], words: str
) -> None:
    with pytest.raises(error, match=words):
        evolve(world, tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()
    assert not (tmp_path / "run" / "generations").exists()


def test_a_generator_or_an_encoder_that_a_run_trained_is_refused(world: Path, tmp_path: Path) -> None:
    place = lively_generator().save_model(tmp_path / "trained")
    write_parent_card(place)

    def trained(privacy: Any) -> Any:
        module = lively_generator()
        module.pretrained = str(place)
        return module

    with pytest.raises(ConfigurationError, match=r"model\.pretrained="):
        evolve(world, tmp_path / "run", make_module=trained)
    module = lively_generator()  # as if this process had trained it
    mark_trained(module, [TrainedIn("r", "dp_sgd")])
    with pytest.raises(ConfigurationError, match=r"privacy=dp_sgd"):
        evolve(world, tmp_path / "run", make_module=lambda privacy: module)
    shutil.copytree(world / "encoder", tmp_path / "encoder")
    write_parent_card(tmp_path / "encoder")
    with pytest.raises(LitDpretError, match=r"task\.encoder="):
        evolve(world, tmp_path / "run", {"encoder": str(tmp_path / "encoder")})
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_a_prompt_with_a_private_query_is_refused(world: Path, tmp_path: Path) -> None:
    log = Path(shutil.copytree(world / "log", tmp_path / "log"))
    with_query(log, "bana elo ibi omu uri")

    def prompted(privacy: Any) -> Any:
        return generator(privacy=privacy, prompt="such as: Bana elo, ibi omu uri! ", max_passage_length=40)

    with pytest.raises(ConfigurationError, match=r"model\.prompt"):
        evolve(world, tmp_path / "run", make_module=prompted, data={"folder": log})
    plain = partial(generator, max_passage_length=40)
    for told in (
        {"variation": "as Bana elo, ibi omu uri? {passage}"},
        {"tuning_note": "tried on bana elo ibi omu uri"},
        {"license": "bana-elo-ibi-omu-uri"},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(told))) as raised:
            evolve(world, tmp_path / "run", told, make_module=plain, data={"folder": log})
        assert raised.value.trap == "T25" and not list((tmp_path / "run").rglob("privacy_ledger*"))


class ElsewhereDataModule(PairsDataModule):
    """Of a user's own package."""


def test_the_cards_of_votes_and_set_name_the_data_module_and_how_texts_were_merged(world: Path, tmp_path: Path) -> None:
    data = partial(ElsewhereDataModule, folder=world / "log", sampling="poisson", duplicates="merge")
    evolve(world, tmp_path / "run", make_datamodule=data)
    assert read_card(tmp_path / "run")["claim"]["duplicates"] == "merge"
    for folder in (tmp_path / "run", tmp_path / "run" / "synthetic"):
        told = [each["text"] for each in read_card(folder)["assumptions"]]
        assert any("ElsewhereDataModule" in text and "unit" in text for text in told), folder


def test_votes_that_all_drown_in_noise_end_the_run_by_the_name_of_the_threshold(world: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task\.threshold"):
        evolve(world, tmp_path / "run", {"threshold": 1000.0})
