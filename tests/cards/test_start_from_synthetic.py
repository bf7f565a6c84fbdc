"""A private run that starts from a model trained on synthetic data claims what both private runs cost."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain
from tiny_tasks import retriever, trainer

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.cards.start import read_start
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.ledger.dataset_file import DatasetFile, composed
from lit_dpret.privacy.ledger.judgement import claimed_releases
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.modes import PublicPassages, SyntheticData
from lit_dpret.tasks.fit import Training, train


def private(chain: Chain, **settings: Any) -> PublicPassages:
    return PublicPassages(eps=50.0, noise_multiplier=3.0, secret_file=chain.root / "secret", **settings)


def fit(chain: Chain, name: str, mode: Any = None, data: Any = None, start: Path | None = None) -> Path:
    folder, start = chain.root / name, start or chain.encoder
    folder.mkdir()
    module = retriever(privacy=mode or private(chain), encoder=str(start / "model"))
    callbacks = [PrivacyAccountant(run_dir=folder, eps_log_points=1, init_from=start), PrivacyCard(run_dir=folder)]
    data = data or PairsDataModule(folder=chain.root / "log", sampling="poisson", expected_batch_size=8)
    train(module, data, Training(run_dir=folder, make_trainer=partial(trainer, max_steps=2), callbacks=callbacks))
    return folder


def own_releases(folder: Path) -> list[Any]:
    releases = claimed_releases(PrivacyLedger.read(folder / LEDGER_NAME).records)
    return [one for one in releases if one.label != "earlier run"]


def cost(*folders: Path, delta: float) -> float:
    releases = [one for folder in folders for one in claimed_releases(PrivacyLedger.read(folder / LEDGER_NAME).records)]
    return epsilon(releases, delta=delta, neighbours="zero_out")


@pytest.mark.costly
def test_the_claim_is_that_of_the_generator_and_of_this_run_together(chain: Chain) -> None:
    alone = cost(chain.generator, delta=read_card(chain.generator)["claim"]["delta"])
    card = read_card(fit(chain, "run"))
    assert card["claim"]["epsilon"] > alone * 1.01
    own = read_start(chain.root / "run", public=False).releases()
    assert {one.label for one in own} == {"earlier run"}
    assert card["claim"]["epsilon"] == pytest.approx(cost(chain.root / "run", delta=card["claim"]["delta"]), rel=1e-9)
    generator = read_card(chain.generator)["mechanism"]["n_public"]
    assert read_start(chain.encoder, public=False).facts["n_public"] == generator == 56, "for the check of delta"
    names = [parent["name"] for parent in card["parents"]]
    assert [parent["sha256"] for parent in card["parents"][1:]] == [
        parent["sha256"] for parent in read_card(chain.encoder)["parents"]
    ] and len(names) == 3
    assert not verify_chain(chain.root / "run").failed
    stated = {one["text"] for one in card["assumptions"]}
    assert any("went into encoder" in text for text in stated)
    before = [one["text"] for one in read_card(chain.encoder)["assumptions"] if one["holds"] is not True]
    assert before and {f"Of encoder: {text}" for text in before} <= stated


@pytest.mark.costly
def test_two_trainings_from_one_synthetic_start_count_its_generator_once(chain: Chain) -> None:
    total = chain.root / "total.jsonl"
    for name in ("one", "two"):
        fit(chain, name, private(chain, dataset_ledger=total, total_eps=100.0))
    counted = composed([entry.charge for entry in DatasetFile.read(total).book.entries.values()])
    delta = read_card(chain.root / "one")["claim"]["delta"]
    once = read_start(chain.encoder, public=False).releases()
    assert epsilon(counted, delta=delta, neighbours="zero_out") == pytest.approx(
        epsilon([*once, *2 * own_releases(chain.root / "one")], delta=delta, neighbours="zero_out"), rel=1e-6
    )


def edit_claim(folder: Path) -> None:
    card = json.loads((folder / "privacy_card.json").read_text())
    card["claim"]["epsilon"] /= 2
    (folder / "privacy_card.json").write_text(json.dumps(card))


def cut_ledger(folder: Path) -> None:
    lines = (folder / LEDGER_NAME).read_text().splitlines(keepends=True)
    (folder / LEDGER_NAME).write_text("".join(lines[:-2]))


def change_model(folder: Path) -> None:
    file = next(path for path in (folder / "model").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("damage", "link"),
    [
        (shutil.rmtree, "generator"), (shutil.rmtree, "synthetic"), (cut_ledger, "generator"),
        (edit_claim, "encoder"), (change_model, "encoder"),
    ],
)  # fmt: skip
def test_a_start_whose_private_run_is_not_there_or_does_not_agree_is_refused(
    damage: Any, link: str, chain: Chain
) -> None:
    damage(getattr(chain, link))
    with pytest.raises(DataError, match=r"init_from|privacy_card"):
        read_start(chain.encoder, public=False)


def test_it_is_no_public_start_and_no_start_under_privacy_synthetic(chain: Chain) -> None:
    with pytest.raises(ConfigurationError, match=r"init_from"):
        read_start(chain.encoder, public=True)
    with pytest.raises(LitDpretError, match=r"privacy=synthetic"):
        fit(chain, "run", SyntheticData(), SyntheticDataModule(folder=chain.synthetic, expected_batch_size=8))
