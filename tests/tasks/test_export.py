"""A checkpoint becomes a folder that others load, with the claim of its run."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from card_chain import run
from cards import forge
from datasets import load_dataset
from huggingface_hub import ModelCard, constants
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from pair_stand_ins import Pairs, data_module
from safetensors.torch import load_file
from stand_ins import fit
from tiny_generator import generator
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import files_of_at_most, no_parts, trainer, write_log

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card, write_card
from lit_dpret.cards.file import card_sha256
from lit_dpret.cards.hub import base_model_of
from lit_dpret.cards.start import read_start
from lit_dpret.cards.text import statement
from lit_dpret.cards.verification import verify_chain
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError, StorageError, VerificationError
from lit_dpret.modules import DualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, PrivacyMode, PublicPassages
from lit_dpret.synthesis.dataset_folder import DATA_FILES
from lit_dpret.synthesis.writer import synthesize
from lit_dpret.tasks import Export
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.ranking import fingerprints

SAMPLING: dict[str, Any] = {
    "sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6,
}  # fmt: skip


class KeepTheSecondStep(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if batch.last and batch.step == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "kept.ckpt")


def base(folder: Path) -> str:
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=6, passage_max_length=8))
    save_sentence_transformer(folder / "base", tower)
    return str(folder / "base")


def trained(
    folder: Path,
    mode: PrivacyMode,
    *,
    precision: str = "32-true",
    average: Sequence[Callback] = (),
    tuning_data: str = "unknown",
    **settings: Any,
) -> DualEncoder:
    module = DualEncoder(
        privacy=mode, optimizer=OptimizerSpec(lr=0.05), encoder=base(folder), temperature=1.0, max_query_length=6,
        max_passage_length=8, **settings,
    )  # fmt: skip
    data = data_module(folder / "data", **SAMPLING)
    extra = [*average, PrivacyCard(tuning_data=tuning_data), KeepTheSecondStep()]
    fit(folder / "run", module, data, steps=4, extra=extra, precision=precision)
    return module


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{f.relative_to(folder)} {name}": value for f in files for name, value in load_file(f).items()}


def private(folder: Path) -> PublicPassages:
    return PublicPassages(
        eps=3.0, delta=1e-3, noise_multiplier=20.0, max_grad_norm=0.1, pool_size=5, secret_file=folder / "secret"
    )


@pytest.fixture(scope="module")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a claim; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("private")
    trained(folder, private(folder))
    return folder / "run"


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without privacy."""
    folder = tmp_path_factory.mktemp("bare")
    trained(folder, NoPrivacy())
    return folder / "run"


@pytest.mark.costly
@pytest.mark.parametrize("settings", [{}, {"lora": {"r": 2, "target_modules": ["query"]}}], ids=["full", "lora"])
def test_a_run_in_bfloat16_leaves_and_exports_its_float32_masters(settings: dict[str, Any], tmp_path: Path) -> None:
    trained(tmp_path, private(tmp_path), precision="bf16-true", **settings)
    Export(checkpoint=tmp_path / "run").run(no_parts(tmp_path / "out"))
    left, exported = (weights_in(tmp_path / name / "model") for name in ("run", "out"))
    assert left.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) and value.dtype == torch.float32 for name, value in left.items())
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    masters = [state["master"] for state in checkpoint["optimizer_states"][0]["state"].values()]
    if not settings:
        written = {(value.shape, float(value.double().sum())) for value in left.values()}
        assert {(master.shape, float(master.double().sum())) for master in masters} <= written
    assert any(not torch.equal(value, value.bfloat16().float()) for value in left.values())


@pytest.mark.costly
def test_the_newest_checkpoint_of_a_private_run_keeps_its_claim(tmp_path: Path) -> None:
    module = trained(tmp_path, private(tmp_path), towers="separate", lora={"r": 2, "target_modules": ["query"]})
    Export(checkpoint=tmp_path / "run").run(no_parts(tmp_path / "out"))
    towers = load_towers(tmp_path / "out" / "model")
    texts = ["flood insurance", "my house", "what is the best life policy"]
    torch.testing.assert_close(towers.query_encoder.encode(texts, "query"), module.encode_queries(texts))
    torch.testing.assert_close(towers.passage_encoder.encode(texts, "passage"), module.encode_passages(texts))
    card, parent = (read_card(tmp_path / name) for name in ("out/model", "run"))
    assert card["claim"]["epsilon"] == parent["claim"]["epsilon"] > 0
    assert card["parents"][0]["name"] == "DualEncoder"
    assert card["environment"]["hardware"].startswith("cpu") and card["environment"]["precision"] == "float32"
    readme = (tmp_path / "out" / "model" / "README.md").read_text()
    assert f"epsilon = {parent['claim']['epsilon']:.3f}" in readme
    assert readme.startswith("---\nlibrary_name: sentence-transformers\n")


@pytest.mark.costly
def test_what_was_declared_of_the_settings_of_run_and_export_is_on_the_card_and_the_rest_is_told(
    private_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, private(tmp_path), tuning_data="none")
    accounted = {}
    for name, source, own in (("both", tmp_path / "run", "none"), ("of_run", tmp_path / "run", "unknown"),
                              ("of_export", private_run, "none")):  # fmt: skip
        Export(checkpoint=source, tuning_data=own).run(no_parts(tmp_path / name))
        card = read_card(tmp_path / name / "model")
        accounted[name] = card["tuning"]["accounted"]
        assert ("task.tuning_data" in capsys.readouterr().err) is not accounted[name]
        assert not verify_chain(tmp_path / name / "model").failed
    assert accounted == {"both": True, "of_run": False, "of_export": False}
    with pytest.raises(ConfigurationError, match=r"task\.tuning_data"):
        Export(checkpoint=private_run, tuning_data="nobody")
    with pytest.raises(ConfigurationError, match=r"task\.tuning_data"):
        Export(data=tmp_path, tuning_data="none")


def exported(checkpoint: Path, folder: Path) -> dict[str, Any]:
    Export(checkpoint=checkpoint).run(no_parts(folder))
    assert not verify_chain(folder / "model").failed
    return read_card(folder / "model")


@pytest.mark.parametrize("given", ["out", "out/model"])
def test_training_goes_on_from_an_exported_model_and_is_charged_what_its_run_cost(
    given: str, private_run: Path, tmp_path: Path
) -> None:
    Export(checkpoint=private_run).run(no_parts(tmp_path / "out"))
    start, source = (read_start(folder, public=False) for folder in (tmp_path / given, private_run))
    assert start.releases() == source.releases() != []
    same = ("guarantee", "unit", "neighbours", "duplicates", "epsilon", "delta", "n_public", "units")
    assert all(start.facts[name] == source.facts[name] for name in same)
    (tmp_path / "out" / "model" / "adapter.safetensors").write_bytes(b"of another model")
    with pytest.raises(DataError, match="does not describe"):
        read_start(tmp_path / given, public=False)


@pytest.mark.costly
def test_an_exported_card_says_which_average_the_weights_are(private_run: Path, tmp_path: Path) -> None:
    ema = EMAWeightAveraging(decay=0.5, update_starting_at_step=3, use_buffers=False)
    trained(tmp_path, private(tmp_path), average=[ema])
    own = read_card(tmp_path / "run")["mechanism"]["averaging"]
    whole = exported(tmp_path / "run", tmp_path / "out")
    assert whole["mechanism"]["averaging"].startswith(own) and whole["mechanism"]["averaging"] in statement(whole)
    assert weights_in(tmp_path / "out" / "model").keys() == weights_in(tmp_path / "run" / "model").keys()
    early = exported(tmp_path / "run" / "checkpoints" / "kept.ckpt", tmp_path / "early")["mechanism"]["averaging"]
    assert "kept.ckpt" in early and early.endswith("before the first update")
    assert "averaging" not in exported(private_run, tmp_path / "plain")["mechanism"]


@pytest.mark.slow
def test_a_checkpoint_without_the_average_of_its_run_is_not_called_one(tmp_path: Path) -> None:
    trained(tmp_path, private(tmp_path), average=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)])
    own = read_card(tmp_path / "run")["mechanism"]["averaging"]
    found = exported(tmp_path / "run", tmp_path / "out")["mechanism"]["averaging"]
    assert found.startswith("none") and found.endswith(own)


@pytest.mark.costly
def test_a_checkpoint_of_another_run_is_not_under_this_card(private_run: Path, bare_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(private_run, tmp_path / "run")
    foreign = run / "checkpoints" / "foreign.ckpt"
    shutil.copy(bare_run / "checkpoints" / "last.ckpt", foreign)
    with pytest.raises(DataError, match=r"task\.checkpoint"):
        Export(checkpoint=foreign).run(no_parts(tmp_path / "out"))
    foreign.unlink()
    (run / "privacy_ledger.jsonl").unlink()
    with pytest.raises(DataError, match=r"task\.checkpoint"):
        Export(checkpoint=run).run(no_parts(tmp_path / "out"))


def test_a_card_that_is_missing_or_against_its_ledger_leaves_no_weights(private_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(private_run, tmp_path / "run")
    write_card(forge(read_card(run), epsilon=0.01), run)
    with pytest.raises(DataError, match="ledger"):
        Export(checkpoint=run).run(no_parts(tmp_path / "out"))
    (run / "privacy_card.json").unlink()
    with pytest.raises(DataError, match="would be unknown"):
        Export(checkpoint=run).run(no_parts(tmp_path / "out"))
    assert not (tmp_path / "out" / "model").exists()


def evaluation_of(model: Path, folder: Path, **facts: Any) -> Path:
    """What `task=evaluate` writes of a model."""
    metrics = {"nDCG@10": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    known = {"metrics": metrics, "queries": 20, "split": "test", "whose": "public"}
    known |= {"fingerprints": fingerprints(load_towers(model))}
    path = folder / "evaluation.json"
    path.write_text(json.dumps(known | facts))
    return path


def test_scores_of_another_model_are_not_handed_on(bare_run: Path, tmp_path: Path) -> None:
    evaluation = evaluation_of(bare_run.parent / "base", tmp_path)
    with pytest.raises(DataError, match=r"task\.evaluation"):
        Export(checkpoint=bare_run, evaluation=evaluation).run(no_parts(tmp_path / "out"))
    assert not (tmp_path / "out" / "model" / "README.md").exists()
    evaluation.write_text(json.dumps({"metrics": {}, "encoder": "bm25", "fingerprints": []}))
    with pytest.raises(DataError, match="bm25"):
        Export(checkpoint=bare_run, evaluation=evaluation).run(no_parts(tmp_path / "none"))
    assert not (tmp_path / "none" / "model").exists()


@pytest.mark.costly
def test_a_hub_reads_what_is_known_and_the_claim_and_nothing_unstated(private_run: Path, tmp_path: Path) -> None:
    Export(checkpoint=private_run).run(no_parts(tmp_path / "bare"))
    known = ModelCard.load(tmp_path / "bare" / "model" / "README.md").data.to_dict()
    assert not {"base_model", "license", "language", "datasets", "model-index"} & known.keys()
    readme = (tmp_path / "bare" / "model" / "README.md").read_text()
    assert not any(str(place) in readme for place in (tmp_path, private_run.parent))

    evaluation = evaluation_of(private_run / "model", tmp_path, data="scifact", data_sha256="ab" * 32)
    stated: dict[str, Any] = {
        "base_model": "org/model", "language": "en, no", "license": "cc-by-4.0", "datasets": ["org/set"],
    }  # fmt: skip
    Export(checkpoint=private_run, evaluation=evaluation, **stated).run(no_parts(tmp_path / "out"))
    assert "| nDCG@10 | 0.5000 | 0.4000 to 0.6000 |" in (tmp_path / "out" / "model" / "README.md").read_text()
    data = ModelCard.load(tmp_path / "out" / "model" / "README.md").data
    assert {name: getattr(data, name) for name in stated} == stated | {"language": ["en", "no"]}
    (score,) = data.eval_results
    assert (score.dataset_name, score.dataset_split, score.metric_type, score.metric_value) == (
        "scifact", "test", "ndcg@10", 0.5,
    )  # fmt: skip
    assert score.dataset_args == {"sha256": "ab" * 32}
    claim = read_card(tmp_path / "out" / "model")["claim"]
    assert claim["epsilon"] <= data.privacy["epsilon"] < 1.01 * claim["epsilon"]
    assert data.privacy["delta"] == claim["delta"] and data.privacy["neighbours"] == claim["neighbours"]
    assert data.privacy["card_sha256"] == card_sha256(tmp_path / "out" / "model")


@pytest.mark.parametrize(
    ("start", "base"),
    [("minilm", "sentence-transformers/all-MiniLM-L6-v2"), ("org/model", "org/model"), ("base", None), ("t5", None)],
)
def test_the_base_model_is_a_start_that_a_hub_knows(start: str, base: str | None) -> None:
    assert base_model_of({"pretraining": {"model": start}, "mechanism": {}}) == base
    inherited = {"pretraining": {"model": "its/generator"}, "mechanism": {"started_from": start}}
    assert base_model_of(inherited) == base, "the start of these weights, not of those behind their claim"


def test_a_file_that_is_no_checkpoint_and_a_class_of_others_are_refused(tmp_path: Path) -> None:
    from lit_dpret.tasks.export import load_module

    (tmp_path / "a.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        load_module(tmp_path / "a.ckpt")
    torch.save({"lit_dpret_class": "os.system"}, tmp_path / "b.ckpt")
    with pytest.raises(ConfigurationError, match=r"os\.system.*not a class of this package"):
        load_module(tmp_path / "b.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "c.ckpt")
    with pytest.raises(DataError, match="does not name its class"):
        load_module(tmp_path / "c.ckpt")
    with pytest.raises(DataError, match="neither a checkpoint nor a run folder"):
        Export(checkpoint=tmp_path / "nowhere").run(no_parts(tmp_path / "out"))
    with pytest.raises(DataError, match="is not an existing file"):
        Pairs.load_from_checkpoint(tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize("facts", [{"split": "train"}, {"whose": "private"}, {"whose": None}])
def test_undeclared_scores_are_not_handed_on(private_run: Path, tmp_path: Path, facts: dict[str, Any]) -> None:
    evaluation = evaluation_of(private_run / "model", tmp_path, **facts)
    with pytest.raises(ConfigurationError, match=r"task\.evaluation") as refusal:
        Export(checkpoint=private_run, evaluation=evaluation).run(no_parts(tmp_path / "out"))
    assert refusal.value.trap == "T25" and not (tmp_path / "out" / "model").exists()


# -- to a hub ---------------------------------------------------------------------------------

TOKEN = "hf_of_nobody"


class Hub(ThreadingHTTPServer):
    """Keeps what is sent; knows its repositories by whether they are private."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.private: dict[str, bool] = {}
        self.kinds: dict[str, str] = {}
        self.files: dict[str, bytes] = {}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").removeprefix("/api/datasets/").partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path.startswith("/api/whoami"):
            self.answer({"name": "org", "type": "user", "auth": {}})
        elif name in self.server.private:
            self.answer({"id": name, "private": self.server.private[name], "siblings": [], "tags": []})
        else:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"org/{asked['name']}"
            self.server.kinds[name] = asked.get("type", "model")
            self.server.private[name] = asked.get("private", asked.get("visibility") == "private")
            self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/{name}"})
        elif "/preupload/" in self.path:
            listed = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.answer({"files": listed})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"success": True, "commitUrl": f"{self.path}", "commitOid": "0" * 40})
        else:
            self.answer({})

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        about = {"Content-Length": str(len(data)), "Content-Type": "application/json"} | (headers or {})
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def pushed(run: Path, out: Path, **settings: Any) -> None:
    Export(checkpoint=run, push_to_hub="org/model", **settings).run(no_parts(out))


def unpacked(hub: Hub, got: Path) -> Path:
    """Return what was sent, as on another machine."""
    for name, content in hub.files.items():
        (got / name).parent.mkdir(parents=True, exist_ok=True)
        (got / name).write_bytes(content)
    return got


def refused(run: Path, out: Path, knob: str, **settings: Any) -> None:
    """Nothing is written before it, nor sent."""
    with pytest.raises(ConfigurationError, match=knob) as refusal:
        pushed(run, out, **settings)
    assert not (out / "model").exists() and TOKEN not in str(refusal.value)


def test_a_private_run_is_pushed_whole_to_a_private_repository(hub: Hub, private_run: Path, tmp_path: Path) -> None:
    pushed(private_run, tmp_path / "out")
    assert hub.private == {"org/model": True}
    folder = tmp_path / "out" / "model"
    assert hub.files == {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert {"README.md", "privacy_card.json", "model.safetensors"} <= hub.files.keys()
    readme = hub.files["README.md"].decode()
    assert ModelCard(readme).data.privacy["guarantee"] == "dp" and 'SentenceTransformer("org/model")' in readme
    got = unpacked(hub, tmp_path / "got")
    assert not (checked := verify_chain(got, self_contained=True)).failed
    assert any(one.check == "ledger" and one.outcome == "ok" for one in checked.findings)
    assert not list(got.rglob("*.ckpt")) and len({one.artefact for one in checked.findings}) == 2


def test_what_is_refused_is_refused_before_anything_is_written_or_sent(
    hub: Hub, private_run: Path, bare_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = private_run, tmp_path / "out"
    refused(bare_run, out, r"task\.push_without_guarantee")
    hub.private["org/model"] = False
    refused(run, out, r"task\.push_private")
    hub.private.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    refused(run, out, r"task\.push_to_hub=org/model.*HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    refused(run, out, "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(run, out, r"task\.push_to_hub=org/model")
    assert not hub.private and not hub.files


def test_a_model_without_guarantee_is_pushed_on_demand_without_one(hub: Hub, bare_run: Path, tmp_path: Path) -> None:
    pushed(bare_run, tmp_path / "out", push_without_guarantee=True, push_private=False)
    assert hub.private == {"org/model": False}
    told = ModelCard(hub.files["README.md"].decode()).data.privacy
    assert told["guarantee"] == "none" and "epsilon" not in told


# -- a synthetic set ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set that a generator wrote, where a pipeline leaves it."""
    root = tmp_path_factory.mktemp("set")
    log = PairsDataModule(folder=write_log(root / "log"), sampling="poisson", expected_batch_size=8)
    mode = DPSGD(eps=50.0, noise_multiplier=4.0, accountant="rdp", secret_file=root / "secret")
    run(root / "generator", generator(privacy=mode, seed=0), log)
    return synthesize(
        root / "generator" / "model", log.public_passages(), root / "made" / "synthetic", passages_are_public=True
    )


@pytest.mark.costly
def test_a_set_goes_to_the_hub_with_all_that_its_claim_is_checked_by(hub: Hub, made: Path, tmp_path: Path) -> None:
    Export(data=made, push_to_hub="org/queries").run(no_parts(tmp_path / "out"))
    assert hub.kinds == {"org/queries": "dataset"} and hub.private == {"org/queries": True}
    got = unpacked(hub, tmp_path / "got")
    checked = verify_chain(got, self_contained=True)
    assert checked.failed == [] and any(one.check == "ledger" and one.outcome == "ok" for one in checked.findings)
    pairs = load_dataset(str(got), "pairs", split="train", cache_dir=str(tmp_path / "cache"))
    assert len(pairs) == len((made / "pairs" / "train.jsonl").read_text().splitlines()) > 0
    assert not any("shards" in name or "manifest" in name for name in hub.files)
    readme = hub.files["README.md"].decode()
    assert 'load_dataset("org/queries", "pairs"' in readme and readme.startswith("---\n")
    for name in DATA_FILES:
        assert hub.files[name] == (made / name).read_bytes()


def test_a_changed_set_is_refused_before_anything_is_written_or_sent(hub: Hub, made: Path, tmp_path: Path) -> None:
    changed = tmp_path / "runs" / "changed"
    shutil.copytree(made.parent.parent, changed)
    with (changed / "made" / "synthetic" / "queries.jsonl").open("a") as file:
        file.write('{"_id": "genQ0", "text": "what did ann ask"}\n')
    with pytest.raises(VerificationError, match=r"^task\.data=.* queries\.jsonl"):
        Export(data=changed / "made" / "synthetic", push_to_hub="org/queries").run(no_parts(tmp_path / "out"))
    assert not hub.files and not hub.private and not (tmp_path / "out" / "data").exists()


def test_only_what_the_card_knows_leaves_a_set(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made.parent.parent, tmp_path / "runs")
    source = tmp_path / "runs" / "made" / "synthetic"
    (source / "notes.txt").write_text("what did ann ask")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("what did ann ask")
    (source / "queries.txt").symlink_to(source.parent.parent / "secret")
    Export(data=source).run(no_parts(tmp_path / "out"))
    there = {p.relative_to(tmp_path / "out" / "data") for p in (tmp_path / "out" / "data").rglob("*") if p.is_file()}
    own = {"README.md", "generation.json", "privacy_card.json", "privacy_card.md", "privacy_card.html"}
    assert {str(p) for p in there if p.parts[0] != "provenance"} == own | set(DATA_FILES)
    told = capsys.readouterr().out
    assert all(name in told for name in ("notes.txt", ".cache/x", "queries.txt"))


def test_a_link_in_place_of_a_file_of_a_set_is_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made.parent.parent, tmp_path / "runs")
    source = tmp_path / "runs" / "made" / "synthetic"
    (source / "README.md").unlink()
    (source / "README.md").symlink_to(source.parent.parent / "secret")
    with pytest.raises(DataError, match=r"task\.data.*README\.md"):
        Export(data=source).run(no_parts(tmp_path / "out"))
    assert not (tmp_path / "out" / "data").exists()


@pytest.mark.parametrize("name", ["data", "model"])
def test_an_export_takes_nothing_of_an_earlier_one_with_it(name: str, made: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "stale.jsonl").write_text("what did ann ask")
    settings = {"data": made} if name == "data" else {"checkpoint": made.parent.parent / "generator"}
    with pytest.raises(ConfigurationError, match=r"hydra\.run\.dir"):
        Export(**settings).run(no_parts(tmp_path))
    assert [p.name for p in (tmp_path / name).iterdir()] == ["stale.jsonl"]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "size"), [("data", 1500), ("model", 12_000)])
def test_a_full_disk_blocks_no_next_export(name: str, size: int, made: Path, private_run: Path, tmp_path: Path) -> None:
    task = Export(data=made) if name == "data" else Export(checkpoint=private_run)
    new = tmp_path / "out" / name
    (tmp_path / "out" / f".{new.name}.draft").mkdir(parents=True)
    (tmp_path / "out" / f".{new.name}.draft" / "stale.jsonl").write_text("of a killed export", encoding="utf-8")
    with files_of_at_most(size), pytest.raises(StorageError, match=re.escape(str(new))):
        task.run(no_parts(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())
    task.run(no_parts(tmp_path / "out"))
    assert [place.name for place in (tmp_path / "out").iterdir()] == [new.name]
    assert not list(new.rglob("stale*")) and not verify_chain(new).failed


def test_a_set_that_fails_is_not_sent(hub: Hub, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_dpret.tasks.export.copy_lineage", lambda card, folder: None)
    with pytest.raises(VerificationError, match=r"self_contained"):
        Export(data=made, push_to_hub="org/queries").run(no_parts(tmp_path / "out"))
    assert not hub.files


class FailsOnce(Callback):
    """An end as of a private row, in the middle of a run."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if batch.step == 2:
            raise DataError("row 7 has no text")


def interrupted_by_a_row(folder: Path, module: Any, data: Any) -> None:
    """A run that a private row ended, and that was then resumed to its end."""
    folder.mkdir(parents=True)
    how = {"run_dir": folder, "make_trainer": partial(trainer, max_steps=4)}
    for resume in (False, True):
        own: list[Callback] = [PrivacyAccountant(run_dir=folder, resume=resume), PrivacyCard(run_dir=folder)]
        extra: list[Callback] = [] if resume else [FailsOnce(), KeepTheSecondStep()]
        with nullcontext() if resume else pytest.raises(DataError):
            train(module(), data, Training(callbacks=[*own, *extra], resume=resume, **how))


@pytest.mark.costly
def test_a_card_and_a_ledger_of_a_failure_over_private_rows_leave_by_no_export(hub: Hub, tmp_path: Path) -> None:
    log = PairsDataModule(folder=write_log(tmp_path / "log"), sampling="poisson", expected_batch_size=8)
    mode = partial(DPSGD, eps=50.0, noise_multiplier=4.0, accountant="rdp", secret_file=tmp_path / "secret")
    first = tmp_path / "first"
    interrupted_by_a_row(first, lambda: generator(privacy=mode(), seed=0), log)
    told = {one["consequence"] for one in read_card(first)["assumptions"] if one["holds"] is False}
    assert told == {"weights_alone"}
    made = synthesize(first / "model", log.public_passages(), tmp_path / "made" / "set", passages_are_public=True)
    for settings in ({"data": made}, {"checkpoint": first}):
        name = next(iter(settings))
        with pytest.raises(DataError, match=rf"task\.{name}=.*{re.escape(str(first))}"):
            Export(**settings, push_to_hub="org/it").run(no_parts(tmp_path / "out"))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert not hub.files and not hub.private
