"""A run folder like the training loop's, for tests of what is derived from its ledger."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_dpret.cards.card import Assumption, CardFacts, RunFacts, build_card, inherit_card, subject_of, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.start import note_start, read_start
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Poisson, SamplingLaw
from lit_dpret.privacy.budget import Neighbours, PrivacyBudget, Unit
from lit_dpret.privacy.ledger.chain import GENESIS, canonical_json, record_hash
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.plan import PrivacyPlan

N, DELTA, NOISE = 1000, 5e-4, 4.0  # with much noise the accountants are fast
LAW = Poisson(sample_rate=0.05)
Change = Callable[[dict[str, Any]], None]


def make_plan(
    law: SamplingLaw = LAW,
    *,
    neighbours: Neighbours = "zero_out",
    unit: Unit = "query",
    noise: float = NOISE,
    **facts: Any,
) -> PrivacyPlan:
    return PrivacyPlan(
        budget=PrivacyBudget(eps=50.0, delta=DELTA, unit=unit, neighbours=neighbours),
        law=law,
        steps=20,
        noise_multiplier=noise,
        max_grad_norm=0.5,
        sensitivity=0.5,
        denominator=50.0,
        physical_batch_size=16,
        n_public=None if neighbours == "add_or_remove" else N,
        **facts,
    )


class Run:
    """A run folder with a ledger, written as the training loop writes it."""

    def __init__(self, folder: Path, plan: PrivacyPlan | None, mode: str = "dp_sgd", *, planned: int = 10) -> None:
        self.folder, self.plan = folder, plan
        self.path = folder / "privacy_ledger.jsonl"
        self.ledger = PrivacyLedger.open(self.path)
        self.resume(plan, mode=mode, planned_steps=planned)

    def resume(self, plan: PrivacyPlan | None, **facts: Any) -> None:
        """Write the record with which an attempt begins."""
        usual = {"run_id": "r", "attempt": 0, "mode": "dp_sgd", "rows_per_unit": "one", "secure_rng": False}
        stated = {"plan": None if plan is None else plan.to_dict(), "planned_steps": 20} | usual | facts
        self.ledger.append("plan", nonce=secrets.token_hex(16), **stated)

    def step(self, step: int, *, attempt: int = 0, confirm: bool = True, **facts: Any) -> None:
        release = self.plan.release() if self.plan is not None else NonPrivateRelease(label="train")
        stated: dict[str, Any] = {"noise_std": 0.0, "sensitivity": None, "denominator": 50.0}
        if self.plan is not None:
            stated = {"noise_std": self.plan.noise_std, "sensitivity": 0.5, "denominator": 50.0}
            stated["law"] = self.plan.law.to_dict()
        self.ledger.append("intent", attempt=attempt, step=step, release=release.to_dict())
        if confirm:
            self.ledger.append("release", attempt=attempt, step=step, **(stated | facts))

    def train(self, steps: int = 10, **facts: Any) -> Run:
        for step in range(steps):
            self.step(step, **facts)
        self.ledger.append("end", reason="finished", steps=steps)
        return self

    def card(self, **facts: Any) -> dict[str, Any]:
        subject = facts.pop("subject", {"artifact_type": "weights", "name": "generator", "sha256": {}})
        return build_card(self.ledger.records, subject, RunFacts(**facts))

    def write_card(self, **facts: Any) -> Path:
        """Write the card next to the ledger; return the path of its JSON."""
        return write_card(self.card(**facts), self.folder)


def forge(card: dict[str, Any], **claim: Any) -> dict[str, Any]:
    """Edit the claim and correct the checksum, as an attacker who knows the format would."""
    forged = json.loads(json.dumps(card))
    forged["claim"].update(claim)
    forged["checksum"] = checksum(forged)
    return dict(forged)


def rewrite_chain(path: Path, change: Change) -> None:
    """Change every record, and recompute the hash chain so that only the change is visible."""
    head, lines = GENESIS, []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        change(record)
        record["prev"] = head
        record["hash"] = head = record_hash(record)
        lines.append(canonical_json(record) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def started(root: Path) -> Run:
    """Return a run that starts from the model of another private run; its folder is ``root / "second"``."""
    model = root / "first" / "model"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"w")
    first = Run(root / "first", make_plan()).train(3)
    first.write_card(subject=subject_of("weights", "first", [model / "weights"], root=model))
    second = Run(root / "second", make_plan())
    note_start(second.ledger, read_start(first.folder, public=False))
    return second.train(3)


CHILD = {"artifact_type": "dataset", "name": "synthetic queries", "sha256": {}}
REFUTED = [Assumption("Each gradient was clipped.", "refuted")]


def made_from(parent: Path, **facts: Any) -> dict[str, Any]:
    """Return the card of synthetic queries derived from the artefact of the card in ``parent``."""
    return inherit_card(parent, CHILD, CardFacts(**facts), description="sampling")
