"""Compare our MAUVE with its authors' program on the same features, and write ``tests/data/mauve.json``; not a test.

mauve-text is under the GPL and is not a dependency. Install it in a separate environment, without those of its
dependencies that are already there, and run this with that environment's Python:

    python -m venv aside && aside/bin/pip install mauve-text && aside/bin/pip install -e ".[quickstart,quality]"
    LIT_DPRET_DATA=FOLDER aside/bin/python tests/compare_mauve.py tests/data/mauve.json

This calls only its documented function, on features; none of its code is read or copied.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TEXTS = 1000
SEEDS = range(10)
GAUSSIAN = {"same": 0.0, "shifted": 1.0, "far": 2.0}
Features = NDArray[np.float32]


def gaussian_set(shift: float) -> tuple[Features, Features]:
    """Draw two samples of normal features in 20 dimensions, whose means are ``shift`` apart."""
    rng = np.random.default_rng(0)
    p, q = (rng.standard_normal((TEXTS, 20)).astype(np.float32) for _ in range(2))
    q[:, 0] += shift
    return p, q


def question_sets(root: Path) -> dict[str, tuple[Features, Features]]:
    """Embed InsuranceQA's questions by MiniLM, paired with others of them and 30 % web queries, and with web queries.

    Texts are lower-cased, and sampled by their hashes.
    """
    from lit_dpret.encoders import TextEncoder

    encoder = TextEncoder.from_pretrained("minilm")
    drawn = []
    for name in ("insuranceqa/queries.jsonl.gz", "real_queries/queries.jsonl.gz"):
        with gzip.open(root / name, "rt", encoding="utf-8") as file:
            texts = {json.loads(line)["text"].lower() for line in file}
        first = sorted(texts, key=lambda text: sha256(text.encode()).digest())[: 2 * TEXTS]
        drawn.append(encoder.encode(first, "query").numpy())
    questions, queries = drawn
    mixed = np.concatenate([questions[TEXTS : TEXTS + 7 * TEXTS // 10], queries[: 3 * TEXTS // 10]])
    return {"mixed": (questions[:TEXTS], mixed), "unlike": (questions[:TEXTS], queries[:TEXTS])}


def main() -> None:
    import mauve as theirs

    from lit_dpret.synthesis.textsim.mauve import mauve as ours

    sets = {name: gaussian_set(shift) for name, shift in GAUSSIAN.items()}
    sets |= question_sets(Path(os.environ["LIT_DPRET_DATA"]))
    found = {}
    for name, (p, q) in sets.items():
        values = {
            "mauve-text": [float(theirs.compute_mauve(p_features=p, q_features=q, seed=s).mauve) for s in SEEDS],
            "ours": list(ours(p, q, featuriser=name, seeds=SEEDS).values),
        }
        found[name] = {
            who: {"mean": np.mean(each).round(4), "sd": np.std(each, ddof=1).round(4), "values": np.round(each, 4)}
            for who, each in values.items()
        }
        sys.stdout.write(f"{name}: {found[name]}\n")
    versions = {name: version(name) for name in ("mauve-text", "faiss-cpu", "scikit-learn", "numpy")}
    settings = {"texts": TEXTS, "seeds": len(SEEDS), "buckets": TEXTS // 10, "settings": "the defaults of both"}
    facts = {"versions": versions, **settings, "sets": found}
    text = json.dumps(facts, indent=1, default=lambda value: value.tolist())
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
