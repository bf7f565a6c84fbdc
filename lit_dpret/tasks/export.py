"""`task=export`: export a checkpoint as a standard model folder, or a synthetic set for publication."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch

from lit_dpret.callbacks.checkpoint_files import newest_checkpoint
from lit_dpret.cards.card import CardFacts, inherit_card, read_card, subject_of, write_card
from lit_dpret.cards.file import CARD_FILES, CARD_NAME, MODEL_FOLDER, PROVENANCE, README
from lit_dpret.cards.hub import (
    base_model_of,
    check_license,
    check_repositories,
    claim_metadata,
    front_matter,
    stated_languages,
)
from lit_dpret.cards.lineage import copy_lineage, refuse_told_failures
from lit_dpret.cards.provenance import environment_facts
from lit_dpret.cards.text import privacy_line, statement
from lit_dpret.cards.tuning import TuningData
from lit_dpret.cards.verification import verify_chain
from lit_dpret.encoders import load_towers
from lit_dpret.encoders.backbones import hub_answers
from lit_dpret.errors import ConfigurationError, DataError, StorageError, VerificationError, first_line, unwritten
from lit_dpret.files import SUMMARY_NAME, meant
from lit_dpret.modules import PrivateModule
from lit_dpret.modules.checkpointed import CLASS_KEY
from lit_dpret.privacy.ledger.private_run import Position
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, plans_of
from lit_dpret.report.page import render
from lit_dpret.settings import Settings, require_switch
from lit_dpret.synthesis.dataset_folder import DATA_FILES
from lit_dpret.synthesis.shards import MANIFEST_NAME, SHARDS_NAME
from lit_dpret.tasks.parts import CHECKPOINTS, Parts, check_run_dir, say, say_unaccounted
from lit_dpret.tasks.ranking import fingerprints

OURS = "lit_dpret.modules."
T = TypeVar("T")


@dataclass(frozen=True)
class HubRepository:
    """A repository of models or data sets, which need not exist yet.

    The token comes from ``hf auth login`` or ``HF_TOKEN``, and is never written to disk.
    """

    name: str
    private: bool = True
    kind: Literal["model", "dataset"] = "model"

    def check(self) -> None:
        """Refuse an impossible upload before the work starts."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise ConfigurationError(f"task.push_to_hub={self.name} needs a token. Run hf auth login, or set HF_TOKEN.")
        if not hub_answers():
            raise ConfigurationError(
                f"task.push_to_hub={self.name}: the Hugging Face Hub does not answer, or HF_HUB_OFFLINE is set. "
                "Connect, or leave task.push_to_hub null and upload the folder later."
            )
        self._asked(lambda api: api.whoami())
        if self.private and self._asked(
            lambda api: (
                api.repo_exists(self.name, repo_type=self.kind)
                and not api.repo_info(self.name, repo_type=self.kind).private
            )
        ):
            raise ConfigurationError(
                f"task.push_to_hub={self.name} exists and is public. Set task.push_private=false if the {self.kind} "
                "may be public, or name another repository."
            )

    def send(self, folder: Path) -> str:
        """Upload the files of a folder in one commit; return the address of the repository."""

        def sent(api: Any) -> str:
            url = api.create_repo(self.name, repo_type=self.kind, private=self.private, exist_ok=True)
            api.upload_folder(
                repo_id=self.name, repo_type=self.kind, folder_path=folder,
                commit_message=f"The {self.kind} with its privacy card",
            )  # fmt: skip
            return str(url)

        try:
            return self._asked(sent)
        except ConfigurationError as error:
            raise StorageError(
                f"{error} The {self.kind} is complete in {folder}; to upload it later: hf upload {self.name} {folder} "
                f"--repo-type {self.kind}{' --private' if self.private else ''}."
            ) from error

    def _asked(self, ask: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return ask(HfApi())
        except (OSError, ValueError, HfHubHTTPError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            way = (
                " Run hf auth login, or set HF_TOKEN, with a token that has write access."
                if status in (401, 403)
                else ""
            )
            raise ConfigurationError(
                f"task.push_to_hub={self.name}: the request to the hub failed: {first_line(error).rstrip('.')}.{way}"
            ) from error


@dataclass(kw_only=True)
class Export(Settings):
    """Write ``model/`` from a checkpoint, with a model card and a privacy card; or ``data/`` from a synthetic set.

    Guarantees:
        - A synthetic set is exported only if its card, its files and everything that the card was derived from pass the
          checks of `task=verify`. The cards and ledgers that those checks read are included, so the export passes them
          by itself.
        - The privacy card repeats the claim of the checkpoint's run; a run without a card is refused.
        - After a failure over private rows nothing is exported.
        - Nothing without a proven guarantee goes to a hub without ``push_without_guarantee``, and nothing goes into a
          public repository without ``push_private=false``.
        - No code in the checkpoint is run: it is read as data, and only classes of this package are built.
    """

    checkpoint: Path | None = None
    data: Path | None = None
    evaluation: Path | None = None
    base_model: str | None = None
    license: str | None = None
    language: str | None = None
    datasets: Sequence[str] = ()
    push_to_hub: str | None = None
    push_private: bool = True
    push_without_guarantee: bool = False
    tuning_data: TuningData = "unknown"
    derives_from: ClassVar[tuple[str, ...]] = ("task.checkpoint", "task.data")

    def __post_init__(self) -> None:
        super().__post_init__()
        stated_languages(self.language)
        check_license(self.license)
        check_repositories("task.base_model", [] if self.base_model is None else [self.base_model])
        check_repositories("task.datasets", self.datasets)
        check_repositories("task.push_to_hub", [] if self.push_to_hub is None else [self.push_to_hub])
        require_switch("task", self, "push_private", "push_without_guarantee")
        if (self.checkpoint is None) == (self.data is None):
            raise ConfigurationError(
                "task=export takes either task.checkpoint, which becomes a model folder, or task.data, a synthetic "
                "set. Set one of them."
            )
        own = {name: getattr(self, name) for name in ("evaluation", "base_model", "license", "language", "datasets")}
        own["tuning_data"] = "" if self.tuning_data == "unknown" else self.tuning_data
        if self.data is not None and (told := [name for name, value in own.items() if value]):
            raise ConfigurationError(
                f"task.{told[0]}={own[told[0]]} is for the card of a model. Leave it out: task=synthesize sets "
                "license, language and tuning_data of a set when it writes it."
            )

    def run(self, parts: Parts) -> dict[str, float]:
        """Write the folder; return its size in bytes."""
        check_run_dir(parts.run_dir, min_free_mb=100)
        new = parts.run_dir / (MODEL_FOLDER if self.data is None else "data")
        if new.exists():  # its old content would be published, and certified, with the new
            raise ConfigurationError(f"{new} exists already. Export into a new folder: set another hydra.run.dir.")
        if self.data is not None:
            return self._export_data(self.data, new)
        metrics = self._metrics()
        path = self._path()
        run_dir = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
        if not (run_dir / CARD_NAME).is_file():
            raise DataError(
                f"{run_dir} holds no {CARD_NAME}: the claim of {path.name} would be unknown. Finish the run "
                "(resume=true), or name a checkpoint inside its run folder as task.checkpoint."
            )
        run_card = read_card(run_dir / CARD_NAME)  # refused here, before anything is built
        refuse_told_failures(
            run_dir / CARD_NAME, f"task.checkpoint={self.checkpoint}", f"the weights in {run_dir / MODEL_FOLDER}"
        )
        claim, done = run_card["claim"], run_card["mechanism"]
        public = metrics.get("whose") == "public" and metrics.get("split") != "train"
        if self.evaluation is not None and not public and claim["guarantee"] == "dp":
            raise ConfigurationError(
                f"task.evaluation={self.evaluation} was measured on a train split, or on queries not declared public: "
                f"no claim of {run_dir.name} covers its scores, which would be published with the model. Use one "
                "on public queries (task=evaluate task.whose=public task.split=test).",
                trap="T25",
            )
        hub = self._hub("model", run_dir.name, claim["guarantee"])
        module = load_module(path)
        _refuse_other_run(path, run_dir / LEDGER_NAME)
        averaging = _averaging(path, done.get("averaging"))

        def card_of(files: list[Path], folder: Path) -> dict[str, Any]:
            return inherit_card(
                run_dir / CARD_NAME,
                subject_of("weights", f"exported {type(module).__name__}", files, root=folder),
                CardFacts(
                    mechanism={name: done[name] for name in ("started_from",) if name in done} | averaging,
                    environment=environment_facts(device="cpu", precision=_precision(module)),
                    tuning={"data": self.tuning_data},
                ),
                description=f"writing the checkpoint {path.name} out as a model folder",
            )

        card_of([], new)  # refuses an outdated card before weights are written without one
        with _beside(new) as folder:
            module.save_model(folder)
            files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("privacy_card.")]
            card = card_of(files, folder)
            write_card(card, folder)
            self._refuse_scores_of_another(metrics, folder)
            encoder = (folder / "modules.json").is_file()
            facts = {"encoder": encoder, "folder": self.push_to_hub or new.name, "card": card, "scores": metrics}
            facts |= {"privacy": privacy_line(card), "statement": statement(card)}
            facts |= {"header": front_matter(self._header(card, metrics, encoder=encoder))}
            facts |= {"sides_differ": (folder / "router_config.json").is_file()}
            (folder / "README.md").write_text(render("model_card.md", facts), encoding="utf-8")
            copy_lineage(folder / CARD_NAME, folder / PROVENANCE, near=run_dir / CARD_NAME)
        if failed := verify_chain(new, self_contained=True).failed:  # for example, a parent stored elsewhere
            say(
                f"warning: a recipient of {new} alone cannot check its card (lit-dpret verify): {failed[0].artefact}, "
                f"{failed[0].check}: {failed[0].text}"
            )
        return _handed_on("model", new, hub)

    def _hub(self, kind: Literal["model", "dataset"], name: str, guarantee: str) -> HubRepository | None:
        """Return the repository to send to, after all checks pass; None if nothing is to be sent."""
        if self.push_to_hub is None:
            return None
        if guarantee != "dp" and not self.push_without_guarantee:
            raise ConfigurationError(
                f"task.push_to_hub={self.push_to_hub}: {name} proves no guarantee (its card says {guarantee}), so the "
                f"{kind} may reveal single records. Set task.push_without_guarantee=true to publish it anyway."
            )
        hub = HubRepository(self.push_to_hub, self.push_private, kind)
        hub.check()
        return hub

    def _export_data(self, source: Path, new: Path) -> dict[str, float]:
        """Copy a synthetic set and the files that its card is checked against, without the state of its generation."""
        if not (source / SUMMARY_NAME).is_file():
            raise DataError(
                f"task.data={source} holds no {SUMMARY_NAME}, so it is not a set written by task=synthesize or filter."
                f"{meant(source, SUMMARY_NAME)}"
            )
        card = source / CARD_NAME  # pseudo-queries have none: no private data was read for them
        if card.is_file() and (failed := verify_chain(card).failed):
            raise VerificationError(
                f"task.data={source} fails its checks, the first: {failed[0].artefact}, {failed[0].check}: "
                f"{failed[0].text} lit-dpret verify {source} lists all."
            )
        known = read_card(card) if card.is_file() else None
        if known is not None:
            refuse_told_failures(card, f"task.data={source}", f"the queries, passages and qrels in {source}")
        names = DATA_FILES if known is None else known["subject"]["sha256"]
        files = _files_of_set(source, {*names, *CARD_FILES, README, SUMMARY_NAME})
        hub = self._hub("dataset", source.name, "nothing" if known is None else known["claim"]["guarantee"])
        with _beside(new) as folder:
            for file in files:
                into = folder / file.relative_to(source)
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, into)
            if known is not None:
                copy_lineage(card, folder / PROVENANCE)
                if failed := verify_chain(folder, self_contained=True).failed:
                    raise VerificationError(
                        f"The exported set of {source} would fail task=verify task.self_contained=true, so it is not "
                        f"written. The first failure: {failed[0].artefact}, {failed[0].check}: {failed[0].text}"
                    )
            if self.push_to_hub is not None:
                readme = (folder / "README.md").read_text(encoding="utf-8")
                shown = readme.replace('load_dataset("FOLDER"', f'load_dataset("{self.push_to_hub}"')
                (folder / "README.md").write_text(shown, encoding="utf-8")
        return _handed_on("data", new, hub)

    def _header(self, card: dict[str, Any], scores: dict[str, Any], *, encoder: bool) -> dict[str, Any]:
        private = ["differential-privacy"] if card["claim"]["guarantee"] == "dp" else []
        header: dict[str, Any] = {
            "library_name": "sentence-transformers" if encoder else "transformers",
            "pipeline_tag": "sentence-similarity" if encoder else "text2text-generation",
            "tags": private + (["feature-extraction", "dense-retrieval"] if encoder else ["query-generation"]),
            "base_model": self.base_model or base_model_of(card),
            "license": self.license,
            "language": stated_languages(self.language),
            "datasets": [*self.datasets],
            "privacy": claim_metadata(card),
        }
        if scores.get("metrics"):
            data, known = str(scores.get("data", "unnamed")), scores.get("data_sha256")
            args = {"args": {"sha256": known}} if known else {}
            result = {
                "task": {"type": "information-retrieval", "name": "Information Retrieval"},
                "dataset": {"name": data, "type": data, "split": scores.get("split", "unknown"), **args},
                "metrics": [
                    {"type": name.lower(), "name": name, "value": one["mean"]}
                    for name, one in scores["metrics"].items()
                ],
            }
            header["model-index"] = [{"name": card["subject"]["name"], "results": [result]}]
        return header

    def _refuse_scores_of_another(self, scores: Mapping[str, Any], folder: Path) -> None:
        """Refuse to publish scores with weights, prefixes or lengths other than the measured ones."""
        if not scores or not (folder / "modules.json").is_file():
            return
        if scores.get("fingerprints") != fingerprints(load_towers(folder)):
            raise DataError(
                f"task.evaluation={self.evaluation} has the scores of {scores.get('encoder', 'an unnamed model')}, "
                f"not of the exported weights and lengths. Export without task.evaluation, evaluate the exported "
                "model (task=evaluate task.encoder=...), and export again with that."
            )

    def _path(self) -> Path:
        given = Path(self.checkpoint or "")
        if given.is_file():
            return given
        found = newest_checkpoint(given / CHECKPOINTS) if given.is_dir() else None
        if found is None:
            raise DataError(
                f"task.checkpoint={self.checkpoint} is neither a checkpoint nor a run folder with a complete one in "
                f"{CHECKPOINTS}/."
            )
        return found

    def _metrics(self) -> dict[str, Any]:
        if self.evaluation is None:
            return {}
        try:
            found = json.loads(self.evaluation.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"task.evaluation={self.evaluation} is not an evaluation.json: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("metrics"), dict):
            raise DataError(
                f"task.evaluation={self.evaluation} holds no metrics. Name a file that task=evaluate wrote."
            )
        if not found.get("fingerprints", True):
            raise DataError(
                f"task.evaluation={self.evaluation} measured {found.get('encoder')}, which is not a model. Leave it "
                "out."
            )
        return found


@contextmanager
def _beside(new: Path) -> Iterator[Path]:
    """Yield a draft folder, renamed to ``new`` if nothing fails; the draft of a killed export is discarded."""
    draft = new.with_name(f".{new.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        yield draft
        draft.rename(new)
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise StorageError(
            f"{new} cannot be written: {unwritten(cause)}. Nothing of it is left: free space and run the same "
            "command again, or choose another hydra.run.dir."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _files_of_set(source: Path, names: Set[str]) -> list[Path]:
    """Return the files of a set to export, by their names; print which other files in its folder stay behind."""
    there = {file.relative_to(source).as_posix(): file for file in sorted(source.rglob("*")) if not file.is_dir()}
    if links := [name for name in there if name in names and there[name].is_symlink()]:
        raise DataError(f"task.data={source}: {links[0]} is a link. Replace it with the file.")
    ours = (f"{SHARDS_NAME}/", "provenance/", MANIFEST_NAME, f".{MANIFEST_NAME}")  # provenance is collected again
    if left := [name for name in there if name not in names and not name.startswith(ours)]:
        say(f"not exported, since they do not belong to the set: {', '.join(left)}")
    return [file for name, file in there.items() if name in names]


def _handed_on(what: str, folder: Path, hub: HubRepository | None) -> dict[str, float]:
    """Print the path of a finished folder, push it if a hub is given, and return its size in bytes."""
    shown = [f"{what}: {folder}"] + ([f"privacy card: {folder / CARD_NAME}"] if (folder / CARD_NAME).is_file() else [])
    say(*shown)
    if (folder / CARD_NAME).is_file():
        say_unaccounted(read_card(folder))
    if hub is not None:
        say(f"pushed to: {hub.send(folder)}")
    return {"bytes": float(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))}


def load_module(path: Path) -> Any:
    """Return the module of a checkpoint, of any class of this package."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        name = content.get(CLASS_KEY)
    except Exception as error:
        raise DataError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(name, str):
        raise DataError(f"{path} does not name its class: lit-dpret did not write it.")
    if not name.startswith(OURS):
        raise ConfigurationError(
            f"{path} is a checkpoint of {name}, which is not a class of this package, so only your code can read it: "
            f"{name.rpartition('.')[2]}.load_from_checkpoint(path). The model that its run saved, with its card, is in "
            "model/ of the run's folder."
        )
    module_name, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module_name), attribute, None)
    if not (isinstance(found, type) and issubclass(found, PrivateModule)):
        raise DataError(f"{path} names the class {name}, which does not exist.")
    if found.CHECKPOINT_HYPER_PARAMS_KEY not in content:
        raise ConfigurationError(
            f"task.checkpoint={path} is of a {attribute} that was built with an object (model.net, or an encoder "
            "built in Python), which no checkpoint describes. Its run saved its model in model/ next to checkpoints/. "
            f"In Python, {attribute}.load_from_checkpoint(path, net=...).save_model(folder) saves this checkpoint's."
        )
    return found.load_from_checkpoint(path)


def _averaging(path: Path, of_run: str | None) -> dict[str, str]:
    """Return, for the card, the kind of weight averaging in a checkpoint; empty if its run used none."""
    if of_run is None:
        return {}
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if "current_model_state" not in content:  # as with StochasticWeightAveraging, which averages at the end
        return {"averaging": f"none that the checkpoint {path.name} mentions; in the model of its run, {of_run}"}
    begun = int(content["averaging_state"]["n_averaged"]) > 0
    return {"averaging": f"{of_run}; as of the checkpoint {path.name}{'' if begun else ', before the first update'}"}


def _refuse_other_run(path: Path, ledger: Path) -> None:
    """Refuse a checkpoint of a run other than the one whose card is next to it."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    position = Position.among(content.get("callbacks", {}), place=str(path))
    records = PrivacyLedger.read(ledger).records if ledger.is_file() else []
    if position is None or position.run_id not in {plan["run_id"] for plan in plans_of(records)}:
        whose = "no accounted run" if position is None else f"run {position.run_id}"
        raise DataError(
            f"task.checkpoint={path} is of {whose}, and {ledger} does not mention it: its card does not cover these "
            "weights. Use a checkpoint of the run whose card and ledger are in the folder."
        )


def _precision(module: torch.nn.Module) -> str:
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    return ", ".join(sorted(kinds))
