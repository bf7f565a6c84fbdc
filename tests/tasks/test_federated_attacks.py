"""`task=federated_attacks` on planted silos: it wins without a defence, and what a defence leaves is measured."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_silos import encoder
from tiny_tasks import parts

from lit_dpret.datamodules.silo_folder import Silo, write_silos
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.federated.data import planted_silos
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.model import AS2Maker
from lit_dpret.tasks import FederatedAttacks
from lit_dpret.tasks.federated_attacks import start_weights
from lit_dpret.tasks.parts import Parts

SIZE = Planted(clients=3, entities=10, attributes=6, told=4, questions=4, phrasings=3, hubs=2)
#: The vocabulary is that of a larger world, so that most of its words stand in no text, as in a real one.
WORLD = replace(SIZE, clients=12, entities=40, attributes=12)
LENGTHS = {"max_query_length": 8, "max_sentence_length": 8}


def asked_by_name(silo: Silo) -> Silo:
    """The silo with a word in every train query that its collection does not have."""
    number = int(silo.name[-1])
    words = [f"entity{number + 3}x{place}" for place in range(40)]
    queries = [
        replace(query, text=f"{query.text} {words[place % 40]}") if query.split == "train" else query
        for place, query in enumerate(silo.queries)
    ]
    return Silo(silo.name, silo.passages, silo.sentences, silo.passage_of, queries)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    write_silos(root / "silos", [asked_by_name(silo) for silo in planted_silos(SIZE)], facts={})
    save_sentence_transformer(root / "encoder", encoder(WORLD, num_hidden_layers=2))
    return root


def task(world: Path, **settings: Any) -> FederatedAttacks:
    small: dict[str, Any] = {"whose": "public", "layers": 1, "candidates": 12, "batch_size": 10, "negatives": 2}
    small |= {"max_query_length": 8, "max_passage_length": 12}
    small |= {"request_eps": [8.0], "update_eps": [1.0], "centroids": 4, "lr": 1e-3, "min_free_mb": 1}
    return FederatedAttacks(**{"silos": world / "silos", "encoder": world / "encoder"} | small | settings)


def run_of(folder: Path, **changes: Any) -> Parts:
    return parts(folder.parent, run_dir=folder, **changes)


@pytest.fixture(scope="module")
def found(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("attacks") / "run"
    scores = task(world).run(run_of(run))
    facts: dict[str, Any] = json.loads((run / "federated_attacks.json").read_text())
    return {"scores": scores, "text": (run / "federated_attacks.md").read_text(), "run": run, **facts}


def of(facts: dict[str, Any], part: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in facts[part] if one["name"] == name]
    return dict(one)


@pytest.mark.slow
def test_exact_requests_name_every_query_of_every_silo(found: dict[str, Any]) -> None:
    assert found["data"] == "silos" and len(found["data_sha256"]) == 64
    exact = of(found, "requests", "exact (the paper)")
    assert exact["pooled"]["named"]["1"]["value"] > 0.95 and exact["pooled"]["nearness"]["auc"] > 0.95
    assert exact["pooled"]["control"]["1"]["high"] < 0.5
    assert found["scores"]["named_by_exact_requests"] == exact["pooled"]["named"]["1"]["value"]


@pytest.mark.costly
def test_fewer_rows_with_noise_name_fewer_queries_and_no_rows_name_none(found: dict[str, Any]) -> None:
    exact, noised, none = (
        of(found, "requests", name)["pooled"]["named"]["1"]["value"]
        for name in ("exact (the paper)", "dp_centroid, eps=8", "none")
    )
    assert none == 0.0 and noised < 0.6 * exact
    assert of(found, "requests", "dp_centroid, eps=8")["rows"] == 12


def test_a_plain_update_names_every_word_that_the_queries_alone_have(found: dict[str, Any]) -> None:
    plain = of(found, "updates", "FedAvg (the paper)")["pooled"]
    assert plain["queries_only"]["recall"]["value"] == 1.0 == plain["queries_only"]["precision"]["value"]
    assert plain["whose"]["auc"] > 0.9
    for silo in of(found, "updates", "FedAvg (the paper)")["silos"].values():
        assert 0.98 < silo["kept"] < 1.0  # AdamW's decay moved every row, and was taken off


def test_words_of_no_text_are_told_by_no_update(found: dict[str, Any]) -> None:
    for one in found["updates"]:
        control = None if one["pooled"] is None else one["pooled"]["control"]
        assert control is None or control["recall"]["value"] == 0.0


def test_noise_leaves_less_and_frozen_words_leave_nothing(found: dict[str, Any]) -> None:
    private = of(found, "updates", "DP-SGD, eps=1")["pooled"]["queries_only"]
    assert private["recall"]["value"] < 0.5 and private["auc"] < 0.9
    assert of(found, "updates", "word embeddings frozen")["pooled"] is None


def test_a_sum_hides_whose_words_they_are_and_still_tells_them(found: dict[str, Any]) -> None:
    clear = of(found, "updates", "FedAvg (the paper)")["pooled"]
    summed = of(found, "updates", "secure sum (the sum is attacked)")
    assert abs(summed["pooled"]["whose"]["auc"] - 0.5) < 0.15 < clear["whose"]["auc"] - 0.5
    assert summed["anyone"]["recall"]["value"] == 1.0 and of(found, "updates", "DP-SGD, eps=1")["anyone"] is None


def test_what_is_done_is_not_done_again(found: dict[str, Any], world: Path) -> None:
    run: Path = found["run"]
    rounds = sorted((run / "rounds").rglob("stage1-000.safetensors"))
    before = [path.stat().st_mtime_ns for path in rounds]
    assert len(rounds) == 9  # three silos, three kinds of round: the masked ones read the clear ones'
    with pytest.raises(ResumeError):
        task(world).run(run_of(run))
    task(world).run(run_of(run, resume=True))
    assert [path.stat().st_mtime_ns for path in rounds] == before


def test_a_report_on_private_silos_is_internal(world: Path, tmp_path: Path) -> None:
    task(world, whose="private", attacks=["requests"], request_eps=[]).run(run_of(tmp_path / "run"))
    written = list((tmp_path / "run").glob("*federated_attacks.*"))
    assert {path.name for path in written} == {f"internal_federated_attacks.{end}" for end in ("json", "md")}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in written)
    assert "put nothing from it on a card" in " ".join(written[0].with_suffix(".md").read_text().split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whose": None}, "declare their kind"),
        ({"attacks": ["guess"]}, r"task\.attacks="),
        ({"candidates": 1}, r"task\.candidates=1"),
        ({"request_eps": [1.0, 1.0]}, r"task\.request_eps="),
        ({"update_eps": [-1.0]}, r"task\.update_eps="),
        ({"weight_decay": 1.0}, r"task\.weight_decay=1"),
        ({"candidates": 90}, r"Lower it, or build larger silos"),
        ({"batch_size": 900}, r"Lower it, or build larger silos"),
        ({"layers": 0}, r"task\.layers=0 must be an integer"),
        ({"layers": 3}, r"layers=3: BertModel can keep 1 to 2 layers"),
    ],
)
def test_what_cannot_be_is_refused_first(world: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        task(world, **settings).run(run_of(tmp_path / "run"))
    assert not (tmp_path / "run" / "rounds").exists()


def test_one_silo_has_nobody_to_attack_it(tmp_path: Path, world: Path) -> None:
    write_silos(tmp_path / "one", planted_silos(replace(SIZE, clients=1)), facts={})
    with pytest.raises(ConfigurationError, match="holds one silo"):
        task(world, silos=tmp_path / "one").run(run_of(tmp_path / "run"))


def test_a_cut_encoder_computes_with_its_first_layers_alone(world: Path) -> None:
    whole, cut = (
        start_weights(AS2Maker(encoder=str(world / "encoder"), layers=layers, **LENGTHS))[0].encoder
        for layers in (None, 1)
    )
    features = whole.tokenize(["entity0x0 attribute1"], "query")
    states = whole.backbone(**features, output_hidden_states=True).hidden_states
    torch.testing.assert_close(cut.backbone(**features).last_hidden_state, states[1])
    assert len(states) == 3
