"""What filters keep, on scores small enough to check by hand, and what they refuse to look at."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generator import generator, lines, lively_generator, write_parent_card
from transformers import BertConfig, BertForSequenceClassification

from lit_dpret.cards.amendments import note_not_covered
from lit_dpret.cards.card import Assumption, CardFacts, card_sha256, inherit_card, read_card, subject_of, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError, PrivateDataError, UnsupportedModelError
from lit_dpret.modules.token_scores import TokenScorer
from lit_dpret.privacy.ledger.trained import NOTE_NAME, TRAINED_KEY
from lit_dpret.retrieval.topk import TopK
from lit_dpret.retrieval.trec_runs import Ranking
from lit_dpret.synthesis.filters import (
    BestOf,
    CrossEncoderScore,
    LanguageModelScore,
    QueryFilter,
    ReleasedQueries,
    ReleasedQuery,
    RoundTrip,
    apply_filters,
    load_released,
)
from lit_dpret.synthesis.filters.bins import TopicBins
from lit_dpret.synthesis.filters.by_score import Progress
from lit_dpret.synthesis.filters.cross_encoder import CrossEncoder
from lit_dpret.synthesis.filters.released import require_covered


def made(*queries: tuple[str, str], **metadata: list[Any]) -> ReleasedQueries:
    """Public queries ``(text, passage id)``, called q0, q1 and so on."""
    return ReleasedQueries(
        queries=tuple(
            ReleasedQuery(
                query_id=f"q{i}", text=text, passage_id=passage,
                metadata={key: values[i] for key, values in metadata.items()},
            )
            for i, (text, passage) in enumerate(queries)
        ),
        passages={"a": "text a", "b": "text b", "c": "text c"}, provenance="declared public",
    )  # fmt: skip


class Fixed(QueryFilter):
    """Scores from a list, by query id; keeps what scores above 0."""

    name = "fixed"

    def __init__(self, scores: Mapping[str, float]) -> None:
        self.scores, self.asked = scores, list[str]()

    def check(self, released: ReleasedQueries) -> list[Assumption]:
        return []  # it looks at nothing but its list

    def score(self, released: ReleasedQueries, progress: Progress | None = None) -> np.ndarray:
        self.asked = [query.query_id for query in released]
        return np.array([self.scores[name] for name in self.asked])

    def keep(self, released: ReleasedQueries, scores: np.ndarray) -> np.ndarray:
        return scores > 0

    def settings(self) -> dict[str, Any]:
        return {}


class Always:
    """Ranks the passages in one order for every query."""

    def __init__(self, *order: str, encoder: str = "bm25") -> None:
        self.order, self.encoder = order, encoder

    def rank(self, queries: Mapping[str, str], passages: Mapping[str, str], *, k: int) -> Ranking:
        names = sorted(passages)
        row = [names.index(name) for name in self.order[:k]]
        indices = torch.tensor([row] * len(queries))
        return Ranking(query_ids=list(queries), passage_ids=names, top=TopK(torch.zeros(indices.shape), indices))


def kept_by(one: QueryFilter, released: ReleasedQueries) -> list[str]:
    _, kept = one.choose(released)
    return [query.query_id for query in released.only(kept.tolist())]


# -- what is kept ----------------------------------------------------------------------------


def test_a_round_trip_keeps_the_queries_whose_passage_is_among_the_first_k() -> None:
    released = made(("x", "a"), ("y", "b"), ("z", "c"))
    assert kept_by(RoundTrip(Always("b", "c", "a"), k=1), released) == ["q1"]
    assert kept_by(RoundTrip(Always("b", "c", "a"), k=2), released) == ["q1", "q2"]
    scores, _ = RoundTrip(Always("b", "c", "a"), k=2).choose(released)
    assert scores.tolist() == [-math.inf, -1.0, -2.0]


def test_recorded_log_probabilities_are_taken_per_word_and_the_best_share_is_kept() -> None:
    released = made(("one", "a"), ("one two three", "b"), ("one two", "c"), log_prob=[-3.0, -4.0, -9.0])
    scores, _ = LanguageModelScore(keep_share=1.0).choose(released)
    assert scores.tolist() == [-1.5, -1.0, -3.0]
    assert kept_by(LanguageModelScore(keep_share=0.34), released) == ["q0", "q1"]  # a share is rounded up
    assert kept_by(LanguageModelScore(keep_share=0.3), released) == ["q1"]
    assert kept_by(LanguageModelScore(min_score=-1.5), released) == ["q0", "q1"]


def test_best_of_keeps_the_best_of_every_passage_and_the_earlier_one_of_equals() -> None:
    released = made(("u", "a"), ("v", "a"), ("w", "a"), ("x", "b"), ("y", "c"))
    scores = {"q0": 1.0, "q1": 3.0, "q2": 3.0, "q3": -7.0, "q4": -math.inf}
    assert kept_by(BestOf(Fixed(scores)), released) == ["q1", "q3"]
    assert kept_by(BestOf(Fixed(scores), n=2), released) == ["q1", "q2", "q3"]


def test_each_filter_is_asked_only_about_what_passed_the_ones_before_it() -> None:
    first, second = Fixed({"q0": 1, "q1": -1, "q2": 2}), Fixed({"q0": -1, "q1": 1, "q2": 1})
    left, applied = apply_filters(made(("x", "a"), ("y", "b"), ("z", "c")), [first, second])
    assert second.asked == ["q0", "q2"] and [query.query_id for query in left] == ["q2"]
    assert [(one.asked, one.kept, one.lowest_kept) for one in applied] == [(3, 2, 1.0), (2, 1, 1.0)]
    assert applied[0].examples == ([(1.0, "x", "a"), (2.0, "z", "c")], [(-1.0, "y", "b")])


# -- models that score -----------------------------------------------------------------------


@pytest.mark.costly
def test_the_generator_scores_its_own_queries_by_what_it_recorded(released: ReleasedQueries, source: Path) -> None:
    """A whole query's log probability is the mean over its tokens times their number, the end mark among them."""
    scores, _ = LanguageModelScore(model=source, keep_share=1.0, batch_size=5).choose(released)
    codec = TokenScorer.load(source).codec
    checked = 0
    for score, query in zip(scores, released, strict=True):
        tokens = len(codec.queries([query.text])[0])
        if tokens < codec.contract.max_query_length:  # longer ones may have been cut
            assert query.log_prob == pytest.approx(score * tokens, rel=1e-4)
            checked += 1
    assert checked > 10


def test_a_cross_encoder_gives_the_logit_of_the_pair_with_the_longer_text_cut_and_that_of_sentence_transformers(
    cross_encoder_folder: Path,
) -> None:
    scorer = CrossEncoder.load(cross_encoder_folder)
    query, passage = "bana delo", " ".join(["fibi"] * 40)
    tokens = scorer.tokenizer(query, passage, truncation="longest_first", max_length=24, return_tensors="pt")
    assert tokens["input_ids"].shape[1] == 24
    with torch.inference_mode():
        expected = float(scorer.model(**tokens).logits)
    assert scorer.score([query], [passage])[0] == pytest.approx(expected, rel=1e-6)
    library = pytest.importorskip("sentence_transformers", reason="compares with sentence-transformers")
    theirs = library.CrossEncoder(str(cross_encoder_folder), activation_fn=torch.nn.Identity(), device="cpu")
    queries, passages = ["bana delo", "fibi"], ["gomu kuri", "bana bana bana delo fibi"]
    predicted = theirs.predict(list(zip(queries, passages, strict=True)))
    np.testing.assert_allclose(scorer.score(queries, passages), predicted, rtol=1e-5)


# -- nothing private enters ------------------------------------------------------------------


def private_pairs(folder: Path) -> PairsDataModule:
    (folder / "pairs.jsonl").write_text('{"query": "secret words", "passage": "a passage"}\n')
    return PairsDataModule(pairs=folder / "pairs.jsonl")


@pytest.mark.parametrize(
    "one", [Fixed({}), RoundTrip(Always("a")), LanguageModelScore(keep_share=1), BestOf(Fixed({}))]
)
def test_private_data_are_another_type_and_are_refused(one: QueryFilter, tmp_path: Path) -> None:
    data = private_pairs(tmp_path)
    for private in (data, data.collection, data.pair_rows("train"), ["secret words"]):
        with pytest.raises(PrivateDataError, match="takes ReleasedQueries, not") as told:
            one.choose(private)  # type: ignore[arg-type]  # what mypy refuses too
        assert "secret" not in str(told.value)


def artefact(folder: Path, parent: Path, **facts: Any) -> Path:
    """A folder that was computed from ``parent`` alone, with the card that says so."""
    folder.mkdir()
    (folder / "weights").write_text(folder.name)
    subject = subject_of("weights", folder.name, [folder / "weights"], root=folder)
    write_card(inherit_card(parent, subject, CardFacts(**facts), description="trained on the queries"), folder)
    return folder


def with_card(folder: Path, part: str, **facts: Any) -> None:
    """Rewrite a part of a card, with a checksum that fits."""
    card = read_card(folder)
    card[part] |= facts
    (folder / "privacy_card.json").write_text(json.dumps(card | {"checksum": checksum(card)}))


def test_what_was_made_from_the_same_releases_may_filter_however_far_it_went_and_in_which_order(
    released: ReleasedQueries, whole: Path, source: Path, tmp_path: Path
) -> None:
    """An export of a retriever of these queries, and one of a part of them; a note on a card changes nothing of it."""
    retriever, part = artefact(tmp_path / "retriever", whole), artefact(tmp_path / "part", whole)
    far = [artefact(tmp_path / "export", retriever), artefact(tmp_path / "of_part", part)]
    assert not {read_card(folder)["parents"][0]["sha256"] for folder in far} & released.ancestors
    for folder in (source, whole, retriever, *far):
        require_covered(folder, released, declared_public=False, knob="encoder")
    copies = [Path(shutil.copytree(folder, tmp_path / "copy" / folder.name)) for folder in (whole, source)]
    retriever = artefact(tmp_path / "of_copy", copies[0])
    for copy in copies:
        note_not_covered(copy, "Similarity", computed="private queries")
    for folder in (retriever, *copies):
        require_covered(folder, load_released(copies[0]), declared_public=False, knob="encoder")


@pytest.mark.parametrize("declared", [False, True])
def test_a_model_that_saw_other_private_data_is_refused_whatever_is_declared(
    declared: bool, released: ReleasedQueries, whole: Path, source: Path, tmp_path: Path
) -> None:
    """So is what was made from it; only its card may show that it was no post-processing of these releases alone."""
    other = generator(seed=5).save_model(tmp_path / "other")
    write_parent_card(other)
    assert card_sha256(other / "privacy_card.json") not in released.ancestors
    later, child = artefact(tmp_path / "later", source), artefact(tmp_path / "child", source)
    with_card(later, "ledger", head="0" * 64)  # trained further on private data
    with_card(child, "mechanism", kind="dp_sgd")
    doubtful = [Assumption("No private metric was shown.", "refuted")]
    chosen = artefact(tmp_path / "chosen", whole, tuning={"data": "private"})
    broken = artefact(tmp_path / "broken", whole, assumptions=doubtful)
    for folder, reason in (
        (other, "itself trained on private data"),
        (artefact(tmp_path / "of_other", other), "itself trained on private data"),
        (artefact(tmp_path / "of_later", later), "itself trained on private data"),
        (child, "itself trained on private data"),
        (chosen, "settings were chosen on private data"),
        (artefact(tmp_path / "of_chosen", chosen), "settings were chosen on private data"),
        (broken, "No private metric"),
        (artefact(tmp_path / "of_broken", broken), "itself trained on private data"),
    ):
        with pytest.raises(PrivateDataError, match=f"encoder=.*{reason}"):
            require_covered(folder, released, declared_public=declared, knob="encoder")


def test_a_retriever_whose_choice_of_settings_is_not_stated_leaves_that_to_trust(
    released: ReleasedQueries, whole: Path, tmp_path: Path
) -> None:
    folder = artefact(tmp_path / "retriever", whole)
    (trust,) = require_covered(folder, released, declared_public=True, knob="encoder")
    assert "NOT ACCOUNTED" in trust.text
    assert trust.standing == "unverified"
    with_card(folder, "tuning", data="none", accounted=True)
    assert require_covered(folder, released, declared_public=True, knob="encoder") == []


@pytest.mark.parametrize("change", ["other weights", "another file", "a missing file"])
def test_a_covered_models_card_beside_other_weights_is_refused(
    change: str, released: ReleasedQueries, source: Path, tmp_path: Path
) -> None:
    """The cheapest way to have a private model choose: put it into a folder with a card that is covered."""
    folder = tmp_path / "forged"
    shutil.copytree(source, folder)
    require_covered(folder, released, declared_public=False, knob="encoder")
    if change == "other weights":
        for weights in lively_generator(seed=5).save_model(tmp_path / "private").glob("*.safetensors"):
            shutil.copy2(weights, folder)
    elif change == "another file":
        (folder / "pytorch_model.bin").write_bytes(b"weights")
    else:
        next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(DataError, match="card describes something else"):
        require_covered(folder, released, declared_public=True, knob="encoder")


def test_a_part_of_a_private_model_without_the_card_is_refused_whatever_is_declared(
    released: ReleasedQueries, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    weights = run / "model" / "0_Transformer" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_text("private")
    generator(seed=5).save_model(tmp_path / "other")
    write_parent_card(tmp_path / "other")
    subject = subject_of("weights", "DualEncoder", [weights], root=run / "model")
    write_card(inherit_card(tmp_path / "other", subject, description="trained"), run)
    (tmp_path / "link").symlink_to(weights.parent)
    for folder in (run / "model", weights.parent, tmp_path / "link"):
        with pytest.raises(PrivateDataError, match="without its card"):
            require_covered(folder, released, declared_public=True, knob="encoder")


@pytest.mark.parametrize("privacy", ["dp_sgd", "none"])
@pytest.mark.parametrize("place", ["run", "model"])
def test_a_model_whose_card_was_lost_is_no_public_one_whatever_is_declared(
    place: str, privacy: str, released: ReleasedQueries, tmp_path: Path
) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    require_covered(tmp_path / "run", released, declared_public=True, knob="encoder")
    note = json.dumps({TRAINED_KEY: [["a run", privacy]]})
    (model / NOTE_NAME).write_text(note, encoding="utf-8")
    folder = model if place == "model" else model.parent
    with pytest.raises(PrivateDataError, match="encoder="):
        require_covered(folder, released, declared_public=True, knob="encoder")
    with pytest.raises(PrivateDataError, match=r"task\.bins\.encoder="):
        TopicBins(encoder=str(folder), encoder_is_public=True)


def test_a_folder_that_is_called_as_a_public_model_is_asked_for_its_card(
    released: ReleasedQueries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_covered("minilm", released, declared_public=False, knob="encoder")
    require_covered("bm25", released, declared_public=False, knob="encoder", ranks=True)
    for name, knob in (("minilm", "encoder"), ("bm25", "model")):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigurationError, match="has no privacy card"):
            require_covered(name, released, declared_public=False, knob=knob)


@pytest.mark.parametrize("change", ["edited", "hidden behind another", "taken from elsewhere"])
def test_queries_that_their_card_does_not_describe_are_refused(change: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(whole, folder)
    load_released(folder)
    queries = folder / "queries.jsonl"
    if change == "edited":
        queries.write_text(queries.read_text().replace("genQ", "genQ9", 1))
    elif change == "hidden behind another":
        (folder / "queries.jsonl.gz").write_bytes(gzip.compress(queries.read_bytes()))
        queries.unlink()
    else:
        retriever = artefact(tmp_path / "retriever", whole)
        shutil.copy2(retriever / "privacy_card.json", folder)
    with pytest.raises(DataError, match=r"claim (does not cover it|does not cover these queries)"):
        load_released(folder)


def test_a_corpus_with_another_text_for_a_querys_passage_is_refused(whole: Path, tmp_path: Path) -> None:
    corpus, more = lines(whole / "corpus.jsonl"), tmp_path / "more.jsonl"
    more.write_text("".join(f"{json.dumps(one)}\n" for one in [*corpus, {"_id": "new", "text": "another"}]))
    assert len(load_released(whole, corpus=more).passages) == len(corpus) + 1
    corpus[0]["text"] = "my secret"
    more.write_text("".join(f"{json.dumps(one)}\n" for one in corpus))
    with pytest.raises(DataError, match=r"task\.corpus") as told:
        load_released(whole, corpus=more)
    assert "secret" not in str(told.value)


def test_an_empty_passage_is_refused_without_a_setting_that_the_task_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\tp\t1\n")
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "what"}\n')
    (tmp_path / "corpus.jsonl").write_text('{"_id": "p", "title": "", "text": ""}\n')
    with pytest.raises(DataError, match=r"passage 'p' has an empty text; mend it\.$"):
        load_released(tmp_path, declared_public=True)


def test_a_model_without_a_card_must_be_declared_public_before_the_first_filter_scores(
    released: ReleasedQueries, cross_encoder_folder: Path
) -> None:
    undeclared, first = CrossEncoderScore(cross_encoder_folder, keep_share=0.5), Fixed({})
    with pytest.raises(
        ConfigurationError,
        match=r"^task\.filters\.cross_encoder\.model=.* task\.filters\.cross_encoder\.model_is_public=",
    ):
        apply_filters(released, [first, BestOf(undeclared)])
    assert first.asked == []
    with pytest.raises(
        ConfigurationError, match=r"^task\.filters\.language_model\.model=some/model has no privacy card"
    ):
        LanguageModelScore(model="some/model", keep_share=0.5).choose(released)
    where = r"task\.filters\.round_trip"
    with pytest.raises(ConfigurationError, match=rf"^{where}\.ranker\.encoder=.* {where}\.encoder_is_public=true"):
        RoundTrip(Always("a", encoder="some/encoder")).choose(released)
    scores, kept = CrossEncoderScore(cross_encoder_folder, model_is_public=True, keep_share=0.5).choose(released)
    assert kept.sum() == math.ceil(0.5 * len(released))
    assert scores[kept].min() >= scores[~kept].max()


# -- bad input -------------------------------------------------------------------------------


PAIR = made(("x", "a"), ("y", "b"))


@pytest.mark.parametrize(
    ("attempt", "named"),
    [
        (lambda: RoundTrip(Always("a"), k=0), "k=0"),
        (lambda: BestOf(Fixed({}), n=0), "n=0"),
        (lambda: LanguageModelScore(), "keep_share=None and min_score=None"),
        (lambda: LanguageModelScore(keep_share=0.5, min_score=-1.0), "keep_share=0.5 and min_score=-1.0"),
        (lambda: LanguageModelScore(keep_share=1.5), "keep_share=1.5"),
        (lambda: Fixed({"q0": math.nan, "q1": 1.0}).choose(PAIR), "filter fixed gave 2 scores .* 1 of them"),
        (lambda: apply_filters(PAIR, [Fixed({"q0": -1.0, "q1": -1.0})]), "None of 2 queries passes the filter fixed"),
        (lambda: LanguageModelScore(keep_share=0.5).choose(PAIR), "log_prob"),
    ],
)
def test_settings_out_of_range_and_filters_that_keep_nothing_are_refused(
    attempt: Callable[[], object], named: str
) -> None:
    with pytest.raises(LitDpretError, match=named):
        attempt()


def test_what_is_no_cross_encoder_is_refused(cross_encoder_folder: Path, source: Path, tmp_path: Path) -> None:
    CrossEncoder.load(cross_encoder_folder).tokenizer.save_pretrained(tmp_path)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=3, **shape)).save_pretrained(tmp_path)
    for folder, named in ((source, "cross-encoder"), (tmp_path, "3 outputs")):
        with pytest.raises(UnsupportedModelError, match=named):
            CrossEncoder.load(folder)
    with pytest.raises(ConfigurationError, match="max_length=99"):
        CrossEncoder.load(cross_encoder_folder, max_length=99)


@pytest.mark.parametrize(
    ("file", "line", "named"),
    [
        ("queries.jsonl", '{"_id": "new", "text": "words"}', "'new' has no passage"),
        ("queries.jsonl", '{"_id": "genQ1", "text": "words"}', "'genQ1' was given before"),
        ("queries.jsonl", '{"_id": "new", "text": " "}', "'new' has an empty text"),
        ("qrels/train.tsv", "genQ1\tp999\t1", "has passages"),
    ],
)
def test_a_folder_without_a_card_is_private_until_it_is_declared_public_and_a_malformed_one_refused_by_line(
    file: str, line: str, named: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("privacy_card.*"))
    with pytest.raises(DataError, match="queries_are_public=true"):
        load_released(folder)
    public = load_released(folder, declared_public=True)
    assert public.provenance == "declared public"
    assert len(public) == len(load_released(whole))
    with open(folder / file, "a", encoding="utf-8") as out:
        out.write(line + "\n")
    with pytest.raises(DataError, match=named):
        load_released(folder, declared_public=True)
