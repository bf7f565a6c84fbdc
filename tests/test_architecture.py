"""Imports run one way. Each package may import the packages listed here, and no others of ours."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from lit_dpret.privacy import modes

ROOT = Path(__file__).resolve().parent.parent
# They import nothing of ours, so every layer may use them.
EVERYWHERE = {"errors", "lazy", "settings", "texts"}
_ROOMS = yaml.safe_load((ROOT / "tests" / "data" / "rooms.yaml").read_text(encoding="utf-8"))
ALLOWED = {room: set(imported) for room, imported in _ROOMS.items()}


@cache
def ours() -> list[Path]:
    """Every source file, found in the real folders; the links inside the package are not followed."""
    folders = [ROOT / name for name in ("lit_dpret", "callbacks", "datamodules", "reproduction")]
    links = {"callbacks", "datamodules", "configs"}
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not (folder.name == "lit_dpret" and path.relative_to(folder).parts[0] in links)
    ]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("callbacks", "datamodules", "reproduction"):
        return parts[0]
    return room_of(".".join(parts[1:]))


def room_of(name: str) -> str:
    """The room of a module: its package, or the part of ``audit`` that it belongs to."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "audit" and parts[1:] not in ([], ["__init__"]) else parts[0]


def imported(path: Path) -> set[str]:
    """Our modules that a file imports, anywhere in it, without the leading ``lit_dpret.``."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: import by full name, not relatively"
            names |= {node.module} if node.module != "lit_dpret" else {f"lit_dpret.{a.name}" for a in node.names}
    ours = {name for name in names if name.split(".")[0] in ("lit_dpret", "reproduction")} - {"lit_dpret"}
    return {name.removeprefix("lit_dpret.") for name in ours}


def test_every_file_belongs_to_a_known_package() -> None:
    assert {package_of(path) for path in ours()} <= set(ALLOWED) | EVERYWHERE


@pytest.mark.costly
def test_imports_run_one_way() -> None:
    for path in ours():
        allowed = ALLOWED.get(package_of(path), set()) | EVERYWHERE | {package_of(path)}
        for name in imported(path):
            assert any(name == a or name.startswith(f"{a}.") for a in allowed), f"{path} must not import {name}"


def name_of(path: Path) -> str:
    """What a file is imported as, without the leading ``lit_dpret.``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[parts[0] == "lit_dpret" :]).removesuffix(".__init__")


@cache
def imported_at_once(path: Path) -> set[str]:
    """Our files that importing a file imports, packages on the way to them included; not those inside functions."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lit_dpret"):
            base = str(node.module).removeprefix("lit_dpret").lstrip(".")
            found |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
        waiting += ast.iter_child_nodes(node)
    return {".".join(name.split(".")[:depth]) for name in found for depth in range(1, name.count(".") + 2)}


# What a package must not reach, by whatever path; `imported` sees the first step alone.
_GROUND = ("distributed", "privacy", "audit.statistics", "retrieval", "losses")
_MIDDLE = ("encoders", "negatives", "datamodules", "modules", "synthesis", "audit.canaries")
_ABOVE = {"callbacks", "sweeps", "costs", "tasks", "report", "federated", "audit.attacks"}
NEVER_REACHED: dict[str, set[str]] = {
    **{package: {"cards", *_MIDDLE, *_ABOVE} for package in _GROUND},
    "cards": {*_MIDDLE, *_ABOVE},
    **{package: _ABOVE for package in _MIDDLE},
    "callbacks": {"modules", "encoders", "negatives", "losses", "tasks", "federated", "audit.attacks"},
}


@pytest.mark.parametrize("package", NEVER_REACHED)
def test_no_package_reaches_by_others_what_it_may_not_import(package: str) -> None:
    files = {name_of(path): path for path in ours()}
    steps = {name: imported_at_once(path) & set(files) for name, path in files.items()}
    came_from = {name: "" for name in files if room_of(name) == package}
    waiting = list(came_from)
    while waiting:
        here = waiting.pop()
        for name in steps[here] - set(came_from):
            came_from[name] = here
            waiting.append(name)
    for name in came_from:
        path = [name]
        while came_from[path[-1]]:
            path.append(came_from[path[-1]])
        assert room_of(name) not in NEVER_REACHED[package], " <- ".join(path)


@cache
def roots(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    tree = parsed(path)
    found = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return found | {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


@pytest.mark.costly
def test_only_the_command_line_knows_hydra() -> None:
    for path in ours():
        assert package_of(path) == "cli" or not roots(path) & {"hydra", "omegaconf"}, path


def test_the_command_line_starts_without_what_only_some_tasks_need() -> None:
    heavy = {"torch", "lightning", "transformers", "scipy"}
    code = f"import sys, lit_dpret.cli; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.costly
@pytest.mark.parametrize(
    "code",
    [
        "from lit_dpret.tasks import Verify",
        "from lit_dpret.tasks import Compare",
        "from lit_dpret.config import format_choices, format_help; format_help(''), format_choices('model')",
    ],
    ids=["verify", "compare", "help"],
)
def test_a_command_that_reads_a_few_files_starts_without_torch(code: str) -> None:
    code += "; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


FIT = """
import pathlib, tempfile
from lit_dpret.callbacks import PrivacyCard
from stand_ins import Regression, dp, fit
folder = pathlib.Path(tempfile.mkdtemp())
fit(folder / "run", Regression(privacy=dp(folder)), extra=[PrivacyCard(run_dir=folder / "run")])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "most"),
    [("import lit_dpret.callbacks", 3), ("from lit_dpret.callbacks import PrivacyAccountant", 98), (FIT, 144)],
    ids=["callbacks", "the accountant", "a tiny fit"],
)
def test_nothing_is_loaded_that_is_not_used(code: str, most: int) -> None:
    count = "\nimport sys\nprint('\\n', *(m for m in sys.modules if m.startswith('lit_dpret')))"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    loaded = subprocess.run(
        [sys.executable, "-c", code + count],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | path,
    )
    assert len(loaded.stdout.splitlines()[-1].split()) <= most


def test_only_one_file_of_the_federation_knows_flower() -> None:
    assert [path.name for path in ours() if "flwr" in roots(path)] == ["library.py"]


def test_privacy_and_retrieval_do_not_know_lightning() -> None:
    for package in ("audit/statistics", "privacy", "retrieval", "synthesis/textsim"):
        for path in (ROOT / "lit_dpret" / package).rglob("*.py"):
            assert "lightning" not in roots(path), path


def test_the_audit_is_numbers_in_and_numbers_out() -> None:
    for path in (ROOT / "lit_dpret" / "audit" / "statistics").rglob("*.py"):
        assert "torch" not in roots(path), path


def test_product_code_raises_and_never_asserts() -> None:
    for path in ours():
        tree = parsed(path)
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Assert)], f"{path} asserts"


def test_an_epsilon_is_printed_rounded_up_and_never_to_the_nearest() -> None:
    """`show_epsilon` does it: a number below the card's would be a stronger claim."""
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in ours()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None
        and re.search(r"epsilon|eps_spent", ast.unparse(node.value))
    ]  # fmt: skip
    for template in (ROOT / "lit_dpret" / "report" / "templates").glob("*.md"):
        found += [line for line in template.read_text(encoding="utf-8").splitlines() if "format(epsilon" in line]
    assert not found


def test_nobody_outside_the_modes_asks_which_mode_it_is() -> None:
    """A mode declares what it can do; who asks for its class or its name would refuse a mode of a user's own."""
    names = {mode.name for mode in vars(modes).values() if isinstance(mode, type) and hasattr(mode, "name")}
    found = []
    for path in ours():
        if path.is_relative_to(ROOT / "lit_dpret" / "privacy" / "modes"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} & set(modes.__all__)
                found += [f"{path}:{node.lineno} asks for {name}" for name in asked - {"PrivacyMode"}]
            if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "name":
                compared = {getattr(part, "value", None) for right in node.comparators for part in ast.walk(right)}
                whose = ast.unparse(node.left)
                found += [f"{path}:{node.lineno} compares {whose}" for _ in compared & names if "source" not in whose]
    assert not found


@pytest.mark.costly
def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "scripts" / "draw_architecture.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PICTURE.read_text(encoding="utf-8") == script.draw(), "python scripts/draw_architecture.py"


def test_the_page_on_the_rooms_names_what_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:lit_dpret|callbacks|datamodules|configs|reproduction|scripts|tests)/[\w/.]*)`", page)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_no_text_rounds_a_delta_by_itself() -> None:
    """`show_delta` rounds up; a format that rounds to the nearest may state a smaller one, or differ from the card."""
    rounded = re.compile(r"\{[^{}]*delta[^{}()]*(\([^{}]*\))?:\.\dg\}")
    assert rounded.search('f"{budget.delta:.3g}"') and not rounded.search('f"{budget.delta:g}, {eps:.3g}"')
    told = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("lit_dpret", "callbacks", "datamodules")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if rounded.search(line) and ">>>" not in line
    ]
    assert told == []
