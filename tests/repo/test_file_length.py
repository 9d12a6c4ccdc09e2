"""A file holds one thing, so it stays short."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
MOST_LINES = 450


def test_python_files_are_short() -> None:
    long = []
    for folder in ("branchfx", "passes", "codegen", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = len(path.read_text().splitlines())
            if lines >= MOST_LINES and not path.parent.is_symlink():
                long.append(f"{path.relative_to(ROOT)}: {lines} lines")
    assert not long, "\n".join(long)
