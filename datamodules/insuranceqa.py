"""InsuranceQA: real insurance questions and professional answers, from a pip package.

12,889 train, 2,000 dev and 2,000 test questions over 27,413 answers, in twelve domains (Feng et al., "Applying deep
learning to answer selection", ASRU 2015; version 2). The PyPI package ``insuranceqa-data==1.0`` contains the files;
later versions do not. The data are for research only, so this repository contains none of them.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.pairs import PairsDataModule
from lit_dpret.datamodules.readers import parse_json_file
from lit_dpret.datamodules.records import Complain, refuse
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.texts import collapse_whitespace

_PACKAGE = "insuranceqa_data"
_SPLITS = {"train": "train", "valid": "dev", "test": "test"}


@dataclass(kw_only=True, eq=False, repr=False)
class InsuranceQADataModule(PairsDataModule):
    """InsuranceQA from the installed package, or from a folder.

    Six test questions repeat a train question, and 98 of the 3,302 test answers also answer a train question:
    `report_overlap` counts them, and ``drop_overlap=true`` leaves out the train questions concerned.

    Args:
        folder: A BEIR folder, or a folder with the package's ``train.json.gz``, ``valid.json.gz``, ``test.json.gz`` and
            ``answers.json.gz``. None takes the installed package.
        lower_case_queries: As for `PairsDataModule`, but true by default: the source is in Title Case.
    """

    lower_case_queries: bool = True

    def __post_init__(self) -> None:
        self.folder = self.folder or _package_folder()
        super().__post_init__()

    def _sources(self) -> dict[str, Any]:
        folder = Path(str(self.folder))
        if not (folder / "answers.json.gz").exists():
            return super()._sources()
        names = [*_SPLITS, "answers"]
        for name in names:
            if not (folder / f"{name}.json.gz").exists():
                raise DataError(
                    f"{folder / name}.json.gz does not exist; check datamodule.folder.", kind="missing file"
                )
        return {name: folder / f"{name}.json.gz" for name in names}

    def file_columns(self) -> dict[str, tuple[str, ...]]:
        """Return the keys that are read, by file."""
        files = self._sources()
        if "answers" not in files:
            return super().file_columns()
        return {name: ("en",) if name == "answers" else ("en", "domain", "answers") for name in files}

    def read_collection(self, complain: Complain = refuse) -> Collection:
        """Read the package's files as a collection: ids ``train-0``, ``dev-0``, ``test-0``, ``a1``."""
        files = self._sources()
        if "answers" not in files:
            return super().read_collection(complain)
        passages = {
            f"a{number}": collapse_whitespace(_field(answer, "en", str, files["answers"], number))
            for number, answer in _load(files["answers"]).items()
        }
        queries: dict[str, str] = {}
        domains: dict[str, str] = {}
        qrels: dict[str, dict[str, dict[str, int]]] = {}
        asked_in: dict[str, Counter[str]] = {}
        for name, split in _SPLITS.items():
            qrels[split] = {}
            for number, question in _load(files[name]).items():
                query_id = f"{split}-{number}"
                queries[query_id] = collapse_whitespace(_field(question, "en", str, files[name], number))
                domains[query_id] = _field(question, "domain", str, files[name], number)
                answers = [f"a{answer}" for answer in _field(question, "answers", list, files[name], number)]
                qrels[split][query_id] = dict.fromkeys(answers, 1)
                for passage_id in answers:
                    asked_in.setdefault(passage_id, Counter())[domains[query_id]] += 1
        return Collection(
            passages=passages,
            queries=queries,
            qrels=qrels,
            domains=domains,
            passage_domains={passage_id: count.most_common(1)[0][0] for passage_id, count in asked_in.items()},
            query_ids="all",
            source="InsuranceQA",
        )


def _package_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # finds the folder without running the package
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "InsuranceQA is not installed. Install the [quickstart] extra (pip install 'lit-dpret[quickstart]'), or "
            "name a copy with datamodule.folder."
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "answers.json.gz").exists():
        raise ConfigurationError(
            f"The installed {_PACKAGE} in {folder} holds no data; version 1.0 does: "
            "pip install 'insuranceqa-data==1.0'."
        )
    return folder


def _load(path: Path) -> dict[str, Any]:
    found = parse_json_file(path)
    if not isinstance(found, dict) or not found:
        raise DataError(f"{path} holds no entries.")
    return found


def _field(entry: Any, name: str, kind: type, path: Path, number: str) -> Any:
    if not isinstance(entry, dict) or name not in entry:
        found = ", ".join(entry) if isinstance(entry, dict) else "no object"
        raise DataError(f"{path} entry {number!r}: no key {name!r}; found: {found}.")
    if not isinstance(entry[name], kind):
        raise DataError(f"{path} entry {number!r}: {name!r} is not a {kind.__name__}.")
    return entry[name]
