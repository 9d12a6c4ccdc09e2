"""Fixtures of the whole suite: seeds, few threads, a clean compiler, golden texts."""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from branchfx.counters import reset_stats

_GOLDEN = pathlib.Path(__file__).parent / "golden"
_TRUE_WORDS = ("1", "true", "yes", "on")


def pytest_configure(config: pytest.Config) -> None:
    # parallel runs of the suite have a core each
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
    if _is_accepting() and os.environ.get("CI"):
        raise pytest.UsageError("BRANCHFX_ACCEPT=1 rewrites golden texts and is forbidden where CI is set")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_options_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # a developer's own settings must not change what is tested
    for name in list(os.environ):
        if name.startswith("BRANCHFX_") and name != "BRANCHFX_ACCEPT":
            monkeypatch.delenv(name)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled code and counters, before and after a test that compiles."""
    torch._dynamo.reset()
    reset_stats()
    yield
    torch._dynamo.reset()
    reset_stats()


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with a file under tests/golden; BRANCHFX_ACCEPT=1 rewrites the file."""

    def check(name: str, text: str) -> None:
        path = _GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if _is_accepting():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        if text != expected:
            lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
            diff = "\n".join(lines)
            pytest.fail(f"differs from tests/golden/{name}; `make accept` rewrites it if this is right\n{diff}", False)

    return check


def _is_accepting() -> bool:
    return os.environ.get("BRANCHFX_ACCEPT", "").lower() in _TRUE_WORDS
