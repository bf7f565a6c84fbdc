"""Public bins: every query falls into one, and the same bins can be made again from what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_generator import write_parent_card
from tiny_models import WORDS, tiny_bert, tiny_tokenizer

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError
from lit_dpret.synthesis.filters import Bins, LabelBins, LengthBins, TopicBins
from lit_dpret.synthesis.filters.bins import bins_from_spec

TEXTS = ["bana", "bana delo", "bana delo fibi gomu", " ".join(["kuri"] * 30)]
PASSAGES = {f"p{i}": text for i, text in enumerate([*TEXTS, "mana nelo", "pibi romu", "suri tato", "teku bana"])}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=12, passage_max_length=12))
    save_sentence_transformer(folder, tower)
    return folder


def test_every_length_has_one_bin_and_so_has_every_label_and_a_passage_without_one(tmp_path: Path) -> None:
    bins: Bins = LengthBins(edges=[2, 4])
    assert bins.names == ("0 to 1 words", "2 to 3 words", "4 or more words")
    assert bins.assign(TEXTS, ["p"] * 4).tolist() == [0, 1, 2, 2]
    file = tmp_path / "labels.tsv"
    file.write_text("p0\tlife\np1\tauto\nelsewhere\thome\n")
    bins = LabelBins(labels=file)
    bins.fit(lambda: PASSAGES)
    assert bins.names == ("auto", "life", "no label")
    assert bins.assign(["x"] * 3, ["p0", "p1", "p2"]).tolist() == [1, 0, 2]
    file.write_text("p0\tlife\nsecret words\n")
    for path, named in ((file, "line 2"), (tmp_path / "none", r"task\.bins\.labels")):
        with pytest.raises(DataError, match=named) as caught:
            LabelBins(labels=path)
        assert "secret" not in str(caught.value)


def test_a_topic_is_the_nearest_centroid_of_public_passages_and_fitting_is_repeatable(encoder: Path) -> None:
    def fitted() -> TopicBins:
        bins = TopicBins(topics=3, encoder=str(encoder), encoder_is_public=True)
        bins.fit(lambda: PASSAGES)
        return bins

    bins = fitted()
    assert fitted().spec() == bins.spec() and len(bins.names) == 3
    assert str(encoder.parent) not in str(bins.spec())
    found = bins.assign(TEXTS, ["p"] * 4)
    tower = TextEncoder.from_pretrained(encoder)
    vectors = tower.encode(TEXTS, "query").numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert found.tolist() == (vectors @ np.array(bins.spec()["centroids"]).T).argmax(axis=1).tolist()
    equally_near = [[0.0] * tower.dim] * 3
    bins = TopicBins(topics=3, encoder=str(encoder), encoder_is_public=True, centroids=equally_near)
    assert bins.assign(TEXTS, [""] * 4).tolist() == [0] * 4, "the first is taken"


@pytest.mark.slow
def test_no_query_has_a_say_in_the_bin_of_another_one(encoder: Path) -> None:
    """The boundary runs through the embedding that a query has in a batch, which is another one without one query."""
    coins = np.random.default_rng(0)
    texts = list(dict.fromkeys(" ".join(coins.choice(WORDS, size=1 + i % 11)) for i in range(100)))
    tower, tried = TextEncoder.from_pretrained(encoder), 0
    whole = tower.encode(texts, "query").numpy()
    for gone in range(0, len(texts), 12):
        left = [text for text in texts if text != texts[gone]]
        before, after = np.delete(whole, gone, axis=0), tower.encode(left, "query").numpy()
        for row, one in np.argwhere(before != after)[:1]:
            vector = before[row] / np.linalg.norm(before[row])
            other = int(np.argmax(np.abs(vector) * (np.arange(len(vector)) != one)))
            boundary = np.zeros_like(vector)
            boundary[[one, other]] = vector[other], -vector[one]
            for side in (boundary, -boundary):
                bins = TopicBins(
                    topics=2, encoder=str(encoder), encoder_is_public=True, centroids=[[0.0] * len(side), side.tolist()]
                )
                found, again = (bins.assign(each, [""] * len(each)) for each in (texts, left))
                assert np.delete(found, gone).tolist() == again.tolist()
                tried += 1
    assert tried


def test_bins_can_be_made_again_from_what_is_stored(encoder: Path) -> None:
    topics = TopicBins(topics=2, encoder=str(encoder), encoder_is_public=True)
    topics.fit(lambda: PASSAGES)
    for bins in (LengthBins(edges=[3]), LabelBins(mapping={"p0": "a", "p1": "b"}), topics):
        again = bins_from_spec(bins.spec(), encoder=str(encoder), encoder_is_public=True)
        assert again.fingerprint() == bins.fingerprint() and again.names == bins.names
        ids = ["p0", "p1", "p2", "p3"]
        assert again.assign(TEXTS, ids).tolist() == bins.assign(TEXTS, ids).tolist()
    assert LengthBins(edges=[3]).fingerprint() != LengthBins(edges=[4]).fingerprint()


def test_topics_need_a_public_encoder_and_enough_passages(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="encoder_is_public"):
        TopicBins(encoder=str(encoder))
    spec = {"kind": "topic", "encoder": "mine", "centroids": [[1.0]]}
    with pytest.raises(ConfigurationError, match=r"^task\.filters\.histogram_match\.encoder=mine has no privacy card"):
        bins_from_spec(spec, knob="task.filters.histogram_match.encoder")
    part = tmp_path / "run" / "tower"
    part.mkdir(parents=True)
    (part / "weights").write_bytes(b"w")
    write_parent_card(part.parent)
    for private in (part.parent, part):
        with pytest.raises(PrivateDataError, match=r"privacy_card\.json shows"):
            TopicBins(encoder=str(private), encoder_is_public=True)
    with pytest.raises(ConfigurationError, match=r"topics=9 is more than the 8 public"):
        TopicBins(topics=9, encoder=str(encoder), encoder_is_public=True).fit(lambda: PASSAGES)
    for edges in ([], [0, 2], [3, 3], [5, 4]):
        with pytest.raises(ConfigurationError, match=r"task\.bins\.edges"):
            LengthBins(edges=edges)
    spec: dict[str, Any]
    for spec in ({}, {"kind": "length"}, {"kind": "phase of the moon"}):
        with pytest.raises(DataError, match="bins of the histogram"):
            bins_from_spec(spec)
