"""Imports go to the same layer or an earlier one, and never by a relative or a second name."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# a module that is not named belongs to the last layer
LAYERS = (
    (
        "branchfx.errors",
        "branchfx.options",
        "branchfx.diagnostics",
        "branchfx.attention_rule",
        "branchfx.ops",
        "branchfx.counters",
    ),
    ("branchfx.passes",),
    ("branchfx.codegen",),
    (
        "branchfx.token_tree",
        "branchfx.runtime",
        "branchfx.backend",
        "branchfx.api",
        "branchfx.report",
        "branchfx.dump",
        "branchfx.cli",
        "branchfx.doctor",
        "branchfx.demo",
    ),
)
# where torch's own name for a thing is banned because it loads a second copy
BANNED_ROOTS = ("passes", "codegen", "tests", "benchmarks")


def _sources() -> Iterator[tuple[str, pathlib.Path]]:
    for folder, prefix in (("branchfx", "branchfx"), ("passes", "branchfx.passes"), ("codegen", "branchfx.codegen")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "branchfx" and inside.parts[0] in ("passes", "codegen"):
                continue
            parts = [prefix, *inside.with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _layer(module: str) -> int:
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return index
    return len(LAYERS) - 1


def _imports(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from branchfx import x` may name a submodule, so each name counts
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "branchfx" else [module]
            yield from ((node.lineno, name) for name in names)


def _violations(module: str, text: str) -> list[str]:
    found = []
    for line, name in _imports(text):
        if name.startswith("."):
            found.append(f"{module}:{line} imports {name!r} relatively")
        elif name.split(".")[0] in BANNED_ROOTS:
            found.append(f"{module}:{line} imports {name!r} by its folder's name")
        elif name.split(".")[0] == "branchfx" and _layer(name) > _layer(module):
            found.append(f"{module}:{line} imports {name} of a later layer")
    return found


def test_imports_go_to_the_same_or_an_earlier_layer() -> None:
    found = []
    for module, path in _sources():
        # the lazy names of `branchfx` itself are no dependency of any module
        if module != "branchfx":
            found += _violations(module, path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("branchfx.passes.layout", "from branchfx.token_tree import TokenTree"),
        ("branchfx.passes.layout", "def f():\n    import branchfx.codegen.cpu"),
        ("branchfx.ops", "from branchfx import token_tree"),
        ("branchfx.codegen.cpu.x", "from ..spec import y"),
        ("branchfx.api", "from passes.layout import x"),
    ],
)
def test_violations_are_found(module: str, text: str) -> None:
    assert _violations(module, text)


def test_allowed_imports_are_allowed() -> None:
    text = "import torch\nfrom branchfx.passes.ir import x\nfrom branchfx import options"
    assert not _violations("branchfx.codegen.cpu.x", text)
