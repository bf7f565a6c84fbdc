"""Read the files of `configs/` for ``list``, ``--help`` and the documentation: choices, settings, comments.

``lit-dpret list`` prints it, and `configuration_page` writes it as a page of the documentation, so that neither can
fall behind the files.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from lit_dpret.errors import ConfigurationError

CONFIG_MODULE = "lit_dpret.configs"
# The choices of the studies, which stand beside the package in a clone and are no part of the wheel.
STUDIES = Path(__file__).resolve().parent.parent / "reproduction" / "configs"

# How --help and the list of tasks arrange them.
TASK_GROUPS = {
    "plan and check": ("plan", "doctor", "check_data"),
    "train": ("fit", "fit_scored", "pipeline", "own_log", "sweep"),
    "synthetic queries": ("synthesize", "evolve", "filter", "pseudo_labels", "histogram"),
    "retrieve and measure": ("evaluate", "compare", "encode", "index", "search", "export"),
    "compare texts": ("similarity", "pretraining_overlap"),
    "attack and verify": ("audit", "membership", "inversion", "verify"),
    "federations": (
        "build_silos", "federated", "federated_attacks", "federated_generators", "hard_negatives",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        name: With dots, as it is set on the command line.
        default: As the file has it.
        comment: What stands behind it in the file.
        argument: The class that it is an argument of, and its name there; None where the file constructs nothing.
    """

    name: str
    default: str
    comment: str
    argument: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """The constructor's documentation of the key; empty if no constructor of ours has it.

        It imports that class. ``--help`` and ``list`` never ask, since all classes together load torch and more.
        """
        return "" if self.argument is None else arguments_of(self.argument[0]).get(self.argument[1], "")


@dataclass(frozen=True)
class Choice:
    """One file of a group, selected by ``group=name``.

    Attributes:
        group: The folder.
        name: The file without its ending.
        summary: The first sentence of the comment that it begins with.
        target: What it constructs, if anything.
        keys: In the order of the file.
        example: The first command in that comment; empty where there is none.
    """

    group: str
    name: str
    summary: str
    target: str | None
    keys: tuple[Key, ...]
    example: str = ""


def groups() -> list[str]:
    """Return the groups of choices, by name."""
    folder = files(CONFIG_MODULE)
    return sorted(part.name for part in folder.iterdir() if part.is_dir() and not part.name.startswith("_"))


def names(group: str) -> list[str]:
    """Return the names of the choices of a group."""
    return sorted(_files(group))


def _files(group: str) -> dict[str, Traversable]:
    """The file of each choice of a group, by its name."""
    folders: list[Traversable] = [files(CONFIG_MODULE).joinpath(group), STUDIES / group]
    parts = [part for folder in folders if folder.is_dir() for part in folder.iterdir()]
    # Files that begin with _ are parts that several choices share.
    found = [part for part in parts if part.name.endswith(".yaml") and not part.name.startswith("_")]
    return {part.name.removesuffix(".yaml"): part for part in found}


def choices(group: str) -> list[Choice]:
    """Return the choices of a group, by name.

    Raises:
        ConfigurationError: There is no such group.
    """
    if group not in groups():
        raise ConfigurationError(f"{group!r} is no group of settings. There are: {', '.join(groups())}.")
    return [_read(group, name, file.read_text(encoding="utf-8")) for name, file in sorted(_files(group).items())]


def top_level() -> Choice:
    """Return the settings outside of groups."""
    return _read("", "train", files(CONFIG_MODULE).joinpath("train.yaml").read_text(encoding="utf-8"))


def format_choices(group: str | None) -> str:
    """Return the groups with their choices, or the choices of one with a sentence each, for a terminal."""
    if group is None:
        lines = ["Chosen by group=name; lit-dpret list GROUP describes each choice.", ""]
        width = max(map(len, groups()))
        lines += [f"{name:{width}}  {', '.join(names(name))}" for name in groups()]
        return "\n".join(lines)
    summaries = {choice.name: choice.summary for choice in choices(group)}
    width = max(map(len, summaries))

    def listed(shown: Iterable[str]) -> list[str]:
        return [f"{name:{width}}  {summaries[name]}".rstrip() for name in shown]

    if group != "task":
        return "\n".join(listed(summaries))
    return "\n\n".join("\n".join([f"{kind}:", *listed(tasks)]) for kind, tasks in tasks_by_kind().items())


def tasks_by_kind() -> dict[str, list[str]]:
    """Return the tasks under the headings of `TASK_GROUPS`; studies, and tasks under no heading, come last."""
    found = {kind: list(tasks) for kind, tasks in TASK_GROUPS.items()}
    grouped = {task for tasks in found.values() for task in tasks}
    others = [name for name in names("task") if name not in grouped]
    studies = {path.stem for path in STUDIES.glob("task/*.yaml")}
    more = {"studies": [t for t in others if t in studies], "others": [t for t in others if t not in studies]}
    return found | {kind: tasks for kind, tasks in more.items() if tasks}


def format_help(program: str) -> str:
    """Return what ``--help`` prints: the tasks by kind with an example each, and where the settings are described."""
    examples = {choice.name: choice.example.replace("python train.py", program) for choice in choices("task")}
    width = max(map(len, examples))

    def listed(kind: str, tasks: list[str]) -> list[str]:
        if kind == "studies":
            return [f"{kind}: {', '.join(tasks)}", ""]
        return [f"{kind}:", *(f"  {task:{width}}  {examples[task]}".rstrip() for task in tasks), ""]

    return "\n".join(
        [
            f"{program} TASK group=CHOICE group.key=VALUE ...",
            "",
            *(line for kind, tasks in tasks_by_kind().items() for line in listed(kind, tasks)),
            f"Groups of settings: {', '.join(name for name in groups() if name != 'task')}",
            "",
            "  lit-dpret list task       what each task does",
            "  lit-dpret list GROUP      what each choice of a group is",
            f"  {program} ... --cfg job   the settings of a command, without running it",
            f"  {program} -m ...          one run for each of several values, as privacy.eps=1,3,8",
            f"  {program} --hydra-help    options of Hydra",
        ]
    )


def configuration_page() -> str:
    """Return every setting of every choice, as a page in Markdown."""
    lines = [
        "# Every setting",
        "",
        "Written from the files of `configs/` and the docstrings of what they construct, when this site is built.",
        "`group=name` chooses a file, `group.key=value` sets a key of it, `lit-dpret list` prints the choices.",
        "",
        "## Of every run",
        "",
        *_table(top_level()),
    ]
    for group in groups():
        lines += [f"## {group}", ""]
        for choice in choices(group):
            lines += [f"### {group}={choice.name}", ""]
            lines += [choice.summary, ""] if choice.summary else []
            lines += [f"Constructs `{choice.target}`.", ""] if choice.target else []
            lines += _table(choice)
    return "\n".join(lines).rstrip() + "\n"


def _table(choice: Choice) -> list[str]:
    if not choice.keys:
        return []
    rows = ["| key | default | |", "|---|---|---|"]
    for key in choice.keys:
        told = key.text or key.comment
        if key.text and "|" in key.comment:
            told += f" ({key.comment})"
        rows.append(f"| `{key.name}` | `{_cell(key.default)}` | {_cell(told)} |")
    return [*rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _read(group: str, name: str, text: str) -> Choice:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    lines = text.splitlines()
    found = list(_keys(node, lines)) if isinstance(node, yaml.MappingNode) else []
    own = {key.name for key in found}
    for part in (yaml.safe_load(text) or {}).get("defaults", ()):
        if isinstance(part, str) and part.startswith("_") and part != "_self_":
            shared = files(CONFIG_MODULE).joinpath(group, f"{part}.yaml").read_text(encoding="utf-8")
            node = yaml.compose(shared, Loader=yaml.SafeLoader)
            found += [key for key in _keys(node, shared.splitlines()) if key.name not in own]
    package = re.search(r"^# @package (\S+)", text, flags=re.MULTILINE)
    place = f"{package[1] if package else group}."
    place = "" if place in (".", "_global_.") else place
    made = {key.name.removesuffix("_target_"): key.default for key in found if key.name.endswith("_target_")}

    def argument(name: str) -> tuple[str, str] | None:
        inside, dot, last = name.rpartition(".")
        target = made.get(inside + dot)
        return None if target is None else (target, last)

    keys = tuple(
        Key(f"{place}{key.name}", key.default, key.comment, argument(key.name))
        for key in found
        if not key.name.split(".")[-1].startswith("_") and not key.name.startswith(("hydra", "defaults"))
    )
    example = re.search(r"^# +((?:python train\.py|lit-dpret) .*?)(?: {2,}\(.*|\\)?$", text, flags=re.MULTILINE)
    return Choice(
        group,
        name,
        _summary(lines),
        made.get(""),
        keys,
        example[1] + "..." * example[0].endswith("\\") if example else "",
    )


def _summary(lines: list[str]) -> str:
    """The first sentence of the comment at the top; commands and Hydra's own line are left out."""
    told: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            break
        words = line.lstrip("#").strip()
        if words.startswith(("python ", "lit-dpret ", "pip ")) or words.startswith("@package"):
            if told:
                break
            continue
        told.append(words)
    whole = " ".join(told)
    sentence = re.match(r".*?\.(?=\s|$)", whole)
    found = (sentence[0] if sentence else whole).rstrip(".:")
    return f"{found}." if found else ""


def _keys(node: yaml.MappingNode, lines: list[str], prefix: str = "") -> Iterator[Key]:
    named = {key.value for key, _ in node.value}
    for key, value in node.value:
        if key.value == "<<":  # what an anchor brings, but for what this mapping says itself
            yield from (
                k for k in _keys(value, lines, prefix) if k.name.removeprefix(prefix).split(".")[0] not in named
            )
            continue
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _keys(value, lines, f"{name}.")
            continue
        if isinstance(value, yaml.ScalarNode):
            default = value.value if value.value != "" or value.style else "null"
        else:
            default = " ".join(lines[value.start_mark.line][value.start_mark.column :].split("  #")[0].split())
            if not value.flow_style:
                default = _block(value)
        line = lines[value.end_mark.line] if value.end_mark.line < len(lines) else ""
        behind = line[value.end_mark.column :] if isinstance(value, yaml.ScalarNode) or value.flow_style else ""
        comment = behind.split("#", 1)[1].strip() if "#" in behind else ""
        yield Key(name, default or "''", comment)


def _block(value: Any) -> str:
    items = [item.value if isinstance(item, yaml.ScalarNode) else "..." for item in value.value]
    return f"[{', '.join(items)}]"


def arguments_of(target: str) -> dict[str, str]:
    """Return the documentation of each argument in the docstrings of a class and its bases in this package."""
    module, _, name = target.rpartition(".")
    if not module.startswith(("lit_dpret", "reproduction")):
        return {}
    found: dict[str, str] = {}
    made: Any = getattr(importlib.import_module(module), name)
    bases = inspect.getmro(made) if inspect.isclass(made) else (made,)
    for base in bases:
        for argument, text in _told(inspect.cleandoc(base.__doc__ or "")).items():
            found.setdefault(argument, text)
    return found


def _told(doc: str) -> dict[str, str]:
    """The section ``Args:`` of a docstring in Google's style."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", f"{doc}\n", flags=re.MULTILINE)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else []:
        begun = re.match(r"[ ]{4}(\w+(?:, \w+)*): (.*)", line)
        if begun:
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2].strip())
        elif line.lstrip().startswith("**"):
            names = []
        elif names and line.strip():
            for name in names:
                found[name] = f"{found[name]} {line.strip()}"
    return {name: text.replace("``", "`") for name, text in found.items()}
