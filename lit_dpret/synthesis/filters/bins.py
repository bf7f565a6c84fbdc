"""Public bins: assign queries to a few kinds, defined without private queries.

There are three kinds of bins: by the number of words, by the nearest of several centroids of public passages, and by a
public label of the query's passage. Anything fitted is fitted to public passages and stored with the histogram, so that
synthetic queries are put into exactly the same bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.cards.start import traces_of_training
from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError, PrivateDataError, in_words
from lit_dpret.files import json_sha256
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.filters.released import declared, shown


class Bins(ABC):
    """A public partition of queries."""

    kind: str = ""
    trusts: tuple[Assumption, ...] = ()
    """The assumptions that a claim takes on trust where the bins are used."""

    def fit(self, passages: Callable[[], Mapping[str, str]]) -> None:  # noqa: B027 - bins need not depend on them
        """Read the public passages, if the bins depend on them; without passages, asking for them is refused."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The name of each bin, in order."""

    @abstractmethod
    def assign(self, texts: Sequence[str], passage_ids: Sequence[str]) -> np.ndarray:
        """Return the bin of each query, given its passage; integers, shape ``(texts,)``."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Return all that `bins_from_spec` needs to rebuild them; plain JSON values, public."""

    def fingerprint(self) -> str:
        """Return the SHA-256 of the spec."""
        return json_sha256(self.spec())


class LengthBins(Bins):
    """Bins by the number of words; ``edges`` are the lowest numbers of words of all bins but the first, ascending."""

    kind = "length"

    def __init__(self, *, edges: Sequence[int] = (4, 6, 8, 10, 13, 17)) -> None:
        self.edges = [int(edge) for edge in edges]
        if not self.edges or self.edges[0] < 1 or any(a >= b for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ConfigurationError(
                f"task.bins.edges={list(edges)} must be increasing numbers of words, each at least 1."
            )

    @property
    def names(self) -> tuple[str, ...]:
        lows = [0, *self.edges]
        highs = [f" to {edge - 1}" for edge in self.edges] + [" or more"]
        return tuple(f"{low}{high} words" for low, high in zip(lows, highs, strict=True))

    def assign(self, texts: Sequence[str], passage_ids: Sequence[str]) -> np.ndarray:
        return np.searchsorted(self.edges, [len(text.split()) for text in texts], side="right")

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "edges": self.edges}


class LabelBins(Bins):
    """Bins by a public label of the passage, from a tab-separated file of ids and labels or from a mapping."""

    kind = "label"
    _NONE = "no label"

    def __init__(self, *, labels: str | Path | None = None, mapping: Mapping[str, str] | None = None) -> None:
        if (labels is None) == (mapping is None):
            raise ConfigurationError("task.bins.labels: give either a file of passage ids and labels, or a mapping.")
        self.labels = dict(mapping) if mapping is not None else _read_labels(Path(str(labels)))

    def fit(self, passages: Callable[[], Mapping[str, str]]) -> None:
        """Keep the labels of these passages."""
        known = passages()
        self.labels = {name: label for name, label in self.labels.items() if name in known}

    @property
    def names(self) -> tuple[str, ...]:
        return (*sorted(set(self.labels.values())), self._NONE)

    def assign(self, texts: Sequence[str], passage_ids: Sequence[str]) -> np.ndarray:
        place = {name: i for i, name in enumerate(self.names)}
        return np.array([place[self.labels.get(name, self._NONE)] for name in passage_ids], dtype=np.int64)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "mapping": dict(sorted(self.labels.items()))}


def _read_labels(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"task.bins.labels={path} cannot be read: {error.strerror}.") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        name, tab, label = line.partition("\t")
        if not (name and tab and label.strip()):
            raise DataError(f"{path}, line {number}: it must be a passage id, a tab and a label.")
        found[name] = label.strip()
    return found


@dataclass(kw_only=True, eq=False)
class TopicBins(Bins):
    """Bins by the nearest centroid of public passages under a public encoder.

    The centroids are those of spherical k-means (Dhillon and Modha 2001), fitted to a sample of the passages. A hash of
    their ids selects the sample and the starting points.
    """

    kind = "topic"

    topics: int = 20
    encoder: str = "minilm"  # or the folder or hub name of a public encoder
    encoder_is_public: bool = False  # declares that nothing private went into an encoder other than ``minilm``
    max_passages: int = 2000  # size of the sample
    rounds: int = 20  # iterations of k-means
    centroids: Sequence[Sequence[float]] | None = None  # given ones, ``(topics, dimension)``; then nothing is fitted

    def __post_init__(self) -> None:
        require_whole("task.bins", self, 1, "topics", "max_passages", "rounds")
        self.encoder = str(self.encoder)
        self.trusts = require_public_encoder(self.encoder, self.encoder_is_public, knob="task.bins.encoder")
        self._centroids = None if self.centroids is None else np.asarray(self.centroids, dtype=np.float32)

    def fit(self, passages: Callable[[], Mapping[str, str]]) -> None:
        if self._centroids is not None:
            return
        texts = passages()
        chosen = sorted(texts, key=lambda name: sha256(name.encode("utf-8", "surrogatepass")).digest())
        chosen = chosen[: self.max_passages]
        if len(chosen) < self.topics:
            raise ConfigurationError(f"task.bins.topics={self.topics} is more than the {len(chosen)} public passages.")
        tower = load_towers(self.encoder).passage_encoder
        vectors = tower.encode([texts[name] for name in chosen], "passage").float().numpy()
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        centroids = vectors[: self.topics].copy()
        for _ in range(self.rounds):
            nearest = (vectors @ centroids.T).argmax(axis=1)
            for topic in range(self.topics):
                mean = vectors[nearest == topic].sum(axis=0)
                if (length := float(np.linalg.norm(mean))) > 0:  # a topic that lost all passages keeps its centroid
                    centroids[topic] = mean / length
        self._centroids = np.round(centroids, 5)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"topic {number}" for number in range(len(self._fitted())))

    def assign(self, texts: Sequence[str], passage_ids: Sequence[str]) -> np.ndarray:
        """Assign as in `Bins.assign`; among equally near centroids the first wins.

        Each query is embedded and compared separately from all others. Otherwise their number would decide how its
        scores are rounded, and so, at a boundary, its bin; that is more than a unit is charged for.
        """
        centroids = self._fitted().astype(np.float64)
        vectors = load_towers(self.encoder).query_encoder.encode(texts, "query", apart=True).double().numpy()
        return np.array([(centroids * vector).sum(axis=1).argmax() for vector in vectors], dtype=np.int64)

    def spec(self) -> dict[str, Any]:
        rounded = [[round(float(value), 5) for value in row] for row in self._fitted()]
        return {"kind": self.kind, "encoder": shown(self.encoder), "centroids": rounded}

    def _fitted(self) -> np.ndarray:
        if self._centroids is None:
            raise ConfigurationError("The topics are not fitted to public passages yet. Call fit first.")
        return self._centroids


def require_public_encoder(encoder: str, is_public: bool, *, knob: str) -> tuple[Assumption, ...]:
    """Return a claim's unverified assumptions if private queries are compared under this encoder.

    ``knob`` is the setting that names the encoder; with ``_is_public`` appended, it is the declaration.
    """
    folder = Path(str(encoder)).expanduser()
    if (trace := next(traces_of_training(encoder), None)) is not None:
        raise PrivateDataError(
            f"{knob}={encoder} was trained in a run of this package, as {trace[0]} shows, so its bins could reveal "
            "private queries. Use minilm or another public encoder."
        )
    if str(encoder) == "minilm" and not folder.is_dir():
        return ()
    return (declared(encoder, is_public, knob),)


def bins_from_spec(
    spec: Mapping[str, Any],
    *,
    encoder: str | None = None,
    encoder_is_public: bool = False,
    knob: str = "task.bins.encoder",
) -> Bins:
    """Return the bins of a histogram.

    ``encoder`` is the folder of the topics' encoder, if the encoder is not known by name; ``knob`` is its setting.
    """
    try:
        if spec["kind"] == LengthBins.kind:
            return LengthBins(edges=spec["edges"])
        if spec["kind"] == LabelBins.kind:
            return LabelBins(mapping=spec["mapping"])
        if spec["kind"] == TopicBins.kind:
            require_public_encoder(str(encoder or spec["encoder"]), encoder_is_public, knob=knob)
            return TopicBins(
                topics=len(spec["centroids"]), encoder=encoder or spec["encoder"], centroids=spec["centroids"],
                encoder_is_public=encoder_is_public,
            )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise DataError(f"The bins of the histogram are malformed ({in_words(error)}).") from error
    raise DataError(f"The bins of the histogram are of kind {spec['kind']!r}, which this version does not know.")
