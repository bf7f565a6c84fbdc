"""Pages of the site that are written from the code when it is built; mkdocs calls `on_files`."""

from __future__ import annotations

import importlib
from typing import Any

from mkdocs.structure.files import File, Files

from lit_dpret.callbacks.traps import pitfalls_page
from lit_dpret.config import configuration_page

REFERENCE = {
    "modules": ("Modules", "What is trained; each is a `LightningModule` for a plain Trainer.", "lit_dpret.modules"),
    "privacy": ("Privacy modes", "How a step is clipped, noised and counted.", "lit_dpret.privacy.modes"),
    "datamodules": ("DataModules", "What is trained on.", "lit_dpret.datamodules"),
    "callbacks": ("Callbacks", "The accountant, the card, evaluation and progress.", "lit_dpret.callbacks"),
    "retrieval": (
        "Retrieval",
        "Search, metrics, significance.",
        "lit_dpret.retrieval.search lit_dpret.retrieval.metrics lit_dpret.retrieval.statistics",
    ),
}
"""The pages of the reference: title, a sentence, and the modules whose public names are told."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of every setting and of every pitfall, and the reference."""
    files.append(File.generated(config, "pitfalls.md", content=pitfalls_page()))
    files.append(File.generated(config, "configuration.md", content=configuration_page()))
    for name, (title, sentence, package) in REFERENCE.items():
        files.append(File.generated(config, f"reference/{name}.md", content=_page(title, sentence, package)))
    return files


def _page(title: str, sentence: str, modules: str) -> str:
    told = [
        f"::: {module}.{name}"
        for module in modules.split()
        for name in sorted(getattr(importlib.import_module(module), "__all__", ())) or _defined(module)
    ]
    return "\n\n".join([f"# {title}", sentence, *told]) + "\n"


def _defined(module: str) -> list[str]:
    """The public functions and classes of a module that lists none."""
    found = vars(importlib.import_module(module)).items()
    return [name for name, thing in found if not name.startswith("_") and getattr(thing, "__module__", "") == module]
