"""The audit that a training carries where the unit is a person: a canary is a person with one query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from memoriser import CANARIES, audited, without_noise, write_large_log

from lit_dpret.cards.file import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import PrivacyViolation

QUERIES, USERS = 800, 400


def log_of_users(folder: Path) -> PairsDataModule:
    """The large log, every two of its queries written by one person."""
    place = write_large_log(folder / "log", queries=QUERIES)
    rows = []
    queries = [json.loads(line) for line in (place / "queries.jsonl").read_text(encoding="utf-8").splitlines()]
    corpus = [json.loads(line) for line in (place / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, query in enumerate(queries):
        passage = corpus[number % len(corpus)]
        rows.append(
            {"query": query["text"], "query_id": query["_id"], "passage": passage["text"],
             "passage_id": passage["_id"], "user_id": f"user {number % USERS}"}
        )  # fmt: skip
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PairsDataModule(
        pairs=folder / "pairs.jsonl", corpus=place / "corpus.jsonl", sampling="poisson", expected_batch_size=100,
        physical_batch_size=400, rows_per_unit="all",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("broken", [True, False], ids=["without noise", "as claimed"])
def test_a_claim_about_people_is_audited_by_people_who_are_canaries(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"unit": "user", "data": log_of_users(tmp_path), "steps": 40}
    if broken:
        without_noise(monkeypatch)
        with pytest.raises(PrivacyViolation, match=r"contradicts the claim: with 300 canaries"):
            audited(tmp_path, **settings)
    else:
        audited(tmp_path, **settings)
    card = read_card(tmp_path / "run")
    bound = card["empirical"]["results"][0]
    assert card["claim"]["unit"] == "user" and card["claim"]["epsilon"] <= 2.0
    assert (bound["eps_lower"] > 2.0) == broken and bound["n"] == CANARIES
    assert card["empirical"]["planted"]["units"] == CANARIES
