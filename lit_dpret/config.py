"""Read the files of `configs/` for ``list``, ``--help`` and the documentation: choices, settings, comments."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from lit_dpret.errors import ConfigurationError

CONFIG_MODULE = "lit_dpret.configs"
# The choices of the studies, which are next to the package in a clone and are not part of the wheel.
STUDIES = Path(__file__).resolve().parent.parent / "reproduction" / "configs"

# The groups in which --help and the list of tasks show them.
TASK_GROUPS = {
    "plan and check": ("plan", "doctor", "check_data"),
    "train": ("fit", "fit_scored", "pipeline", "own_log", "sweep"),
    "synthetic queries": ("synthesize", "evolve", "filter", "pseudo_labels", "histogram"),
    "retrieve and measure": ("evaluate", "compare", "encode", "index", "search", "export_embeddings", "export"),
    "compare texts": ("similarity", "pretraining_overlap"),
    "attack and verify": ("audit", "membership", "inversion", "verify"),
    "federations": (
        "build_silos", "federated", "federated_attacks", "federated_generators", "hard_negatives",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One setting."""

    name: str  # with dots, as on the command line
    default: str  # as written in the file
    comment: str  # the comment after it in the file
    argument: tuple[str, str] | None = None  # the class that takes it as an argument, and the argument's name

    @property
    def text(self) -> str:
        """The constructor's documentation of the key, else empty; it imports that class, which may be slow."""
        return "" if self.argument is None else arguments_of(self.argument[0]).get(self.argument[1], "")

    @property
    def explanation(self) -> str:
        """Its effect and allowed values: the constructor's documentation, else the file's comment."""
        told = self.text or self.comment
        return f"{told} ({self.comment})" if self.text and "|" in self.comment else told


@dataclass(frozen=True)
class Choice:
    """One file of a group, selected by ``group=name``."""

    group: str
    name: str
    summary: str  # the first sentence of the comment at the top of the file
    target: str | None  # the class that it constructs, if any
    keys: tuple[Key, ...]
    example: str = ""  # the first command in that comment


def groups() -> list[str]:
    """Return the groups of choices, by name."""
    folder = files(CONFIG_MODULE)
    return sorted(part.name for part in folder.iterdir() if part.is_dir() and not part.name.startswith("_"))


def names(group: str) -> list[str]:
    """Return the names of the choices of a group."""
    return sorted(_files(group))


def _files(group: str) -> dict[str, Traversable]:
    folders: list[Traversable] = [files(CONFIG_MODULE).joinpath(group), STUDIES / group]
    parts = [part for folder in folders if folder.is_dir() for part in folder.iterdir()]
    # Files that begin with _ are parts that several choices share.
    found = [part for part in parts if part.name.endswith(".yaml") and not part.name.startswith("_")]
    return {part.name.removesuffix(".yaml"): part for part in found}


def alike(word: str, known: Iterable[str], cutoff: float = 0.8) -> list[str]:
    """Return the known name closest to ``word``, ignoring case and punctuation; empty if none is close.

    Example:
        >>> alike("check-data", ["check_data", "plan"]), alike("Fit", ["fit"]), alike("train", ["fit"])
        (['check_data'], ['fit'], [])
    """
    plain = {re.sub(r"[\W_]", "", name).lower(): name for name in known}
    return [plain[one] for one in difflib.get_close_matches(re.sub(r"[\W_]", "", word).lower(), plain, 1, cutoff)]


def choices(group: str) -> list[Choice]:
    """Return the choices of a group, by name."""
    if group not in groups():
        raise ConfigurationError(f"{group!r} is not a group of settings. There are: {', '.join(groups())}.")
    return [_read(group, name, file.read_text(encoding="utf-8")) for name, file in sorted(_files(group).items())]


def top_level() -> Choice:
    """Return the settings outside of groups."""
    return _read("", "train", files(CONFIG_MODULE).joinpath("train.yaml").read_text(encoding="utf-8"))


def listed(word: str | None = None) -> str:
    """Return the output of ``lit-dpret list``, for a terminal.

    Without a ``word``, list the groups and their choices; for a group, its choices with a sentence each; for
    ``group=choice``, its settings. For any other word, list what has it in its name, or else in its description.
    """
    if word is None:
        width = max(map(len, groups()))
        return "\n".join(
            [
                "Choose with group=name. lit-dpret list GROUP describes the choices of a group, lit-dpret list",
                "GROUP=CHOICE the settings of one; lit-dpret list WORD finds settings: lit-dpret list accountant.",
                "",
                *(f"{name:{width}}  {', '.join(names(name))}" for name in groups()),
            ]
        )
    if word in groups():
        return format_choices(word)
    group, equals, name = word.partition("=")
    if not equals:
        return _found(word)
    for choice in choices(group):
        if choice.name == name:
            return "\n".join([choice.summary, "", *_settings(choice.keys, {})]).strip()
    raise ConfigurationError(f"{group} has no choice {name!r}. There are: {', '.join(names(group))}.")


def _found(word: str) -> str:
    """Return the choices and settings whose names contain ``word``; if there are none, those whose descriptions do."""
    wanted = word.lower()
    every = [top_level(), *(choice for group in groups() for choice in choices(group))]
    # An experiment sets keys of other groups, which are described there.
    own = [(one, key) for one in every for key in one.keys if not one.group or key.argument or key.comment]

    def search(in_name: bool) -> list[str]:
        lines = [
            f"{one.group}={one.name}\n    {one.summary}".rstrip()
            for one in every
            if one.group and wanted in (one.name if in_name else one.summary).lower()
        ]
        where: dict[str, list[str]] = {}
        keys: dict[str, Key] = {}
        for one, key in own:
            if wanted in (key.name if in_name else key.comment).lower():
                keys.setdefault(key.name, key)
                where.setdefault(key.name, []).extend([f"{one.group}={one.name}"] if one.group else [])
        nearest_first = sorted(keys.values(), key=lambda key: (wanted != _last(key), wanted not in _last(key)))
        return [*lines, *_settings(nearest_first, where)]

    lines = search(in_name=True) or search(in_name=False)
    if not lines:
        alike = difflib.get_close_matches(wanted, {*groups(), *(_last(key) for _, key in own)}, n=3)
        meant = f"Did you mean {' or '.join(alike)}? " if alike else ""
        raise ConfigurationError(
            f"{word!r} is not a group of settings, and is in no name or description of a choice or setting. {meant}The "
            f"groups are: {', '.join(groups())}."
        )
    return "\n".join(lines)


def _last(key: Key) -> str:
    return key.name.rsplit(".", 1)[-1].lower()


def _settings(keys: Iterable[Key], where: dict[str, list[str]]) -> list[str]:
    lines = []
    for key in keys:
        lines.append(f"{key.name} = {key.default}")
        having = where.get(key.name, [])
        for text in (key.explanation, f"A setting of {', '.join(having)}." if having else ""):
            lines += textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def format_choices(group: str) -> str:
    """Return the choices of a group with a sentence each, for a terminal."""
    summaries = {choice.name: choice.summary for choice in choices(group)}
    width = max(map(len, summaries))

    def lines(shown: Iterable[str]) -> list[str]:
        return [f"{name:{width}}  {summaries[name]}".rstrip() for name in shown]

    parts = tasks_by_kind().items() if group == "task" else {"": [*summaries]}.items()
    blocks = ["\n".join([*([f"{kind}:"] if kind else []), *lines(shown)]) for kind, shown in parts]
    return "\n\n".join([*blocks, f"The settings of one: lit-dpret list {group}={next(iter(summaries))}"])


def tasks_by_kind() -> dict[str, list[str]]:
    """Return the tasks under the headings of `TASK_GROUPS`; studies, and tasks under no heading, come last."""
    found = {kind: list(tasks) for kind, tasks in TASK_GROUPS.items()}
    grouped = {task for tasks in found.values() for task in tasks}
    others = [name for name in names("task") if name not in grouped]
    studies = {path.stem for path in STUDIES.glob("task/*.yaml")}
    more = {"studies": [t for t in others if t in studies], "others": [t for t in others if t not in studies]}
    return found | {kind: tasks for kind, tasks in more.items() if tasks}


def format_help(program: str) -> str:
    """Return the output of ``--help``: the tasks by kind with an example each, and where the settings are described."""
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
            "  lit-dpret list GROUP      what each choice of a group is; GROUP=CHOICE: its settings",
            "  lit-dpret list WORD       the settings with the word in their name, such as accountant",
            f"  {program} ... --cfg job   the settings of a command, without running it",
            f"  {program} -m ...          one run for each of several values, such as privacy.eps=1,3,8",
            f"  {program} --hydra-help    options of Hydra",
        ]
    )


def configuration_page() -> str:
    """Return every setting of every choice, as a page in Markdown."""
    lines = [
        "# Every setting",
        "",
        "Generated from the files of `configs/` and the docstrings of what they construct, when this site is built.",
        "`group=name` chooses a file, `group.key=value` sets a key of it, `lit-dpret list GROUP=CHOICE` prints",
        "a section of this page.",
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
        rows.append(f"| `{key.name}` | `{_cell(key.default)}` | {_cell(key.explanation)} |")
    return [*rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _with_shared(group: str, text: str) -> list[Key]:
    """Return the keys of a file and of the files that its defaults include, its own first."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    found = list(_keys(node, text.splitlines())) if isinstance(node, yaml.MappingNode) else []
    for part in (yaml.safe_load(text) or {}).get("defaults", ()):
        if isinstance(part, str) and part.startswith("_") and part != "_self_":
            own = {key.name for key in found}
            shared = files(CONFIG_MODULE).joinpath(group, f"{part}.yaml").read_text(encoding="utf-8")
            found += [key for key in _with_shared(group, shared) if key.name not in own]
    return found


def _read(group: str, name: str, text: str) -> Choice:
    lines = text.splitlines()
    found = _with_shared(group, text)
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
    """Return the first sentence of the comment at the top, without commands and Hydra's own line."""
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
        if key.value == "<<":  # keys of a merged anchor that this mapping does not override
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
        comment = _continued(behind, lines, value.end_mark.line) if "#" in behind else ""
        yield Key(name, default or "''", comment or _above(lines, key.start_mark.line, key.start_mark.column))


def _continued(behind: str, lines: list[str], row: int) -> str:
    """Return the comment after a value in line ``row``, with the lines below that continue in its column."""
    column = lines[row].index("#", len(lines[row]) - len(behind))
    told = [lines[row][column:]]
    for line in lines[row + 1 :]:
        if line[:column].strip() or not line[column:].startswith("#"):
            break
        told.append(line[column:])
    return " ".join(line.lstrip("#").strip() for line in told)


def _above(lines: list[str], row: int, column: int) -> str:
    """Return the comment directly above a key, in its column; not the one at the top of the file."""
    first = row
    while first and lines[first - 1][column:].startswith("#") and not lines[first - 1][:column].strip():
        first -= 1
    return " ".join(line.lstrip("# ").strip() for line in lines[first:row]) if first else ""


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
