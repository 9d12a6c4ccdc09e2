"""Examination of an installation: versions, compiler, and whether torch finds the backend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

from branchfx.errors import OptionError
from branchfx.options import Options, unknown_env_names

_PACKAGES = (
    "branchfx", "torch", "triton", "sympy", "networkx", "numpy", "transformers", "accelerate", "peft", "trl", "gguf",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """Return versions, compiler, devices and problems, ready for JSON."""
    import torch

    problems = []
    backends = torch.compiler.list_backends(exclude_tags=())
    is_listed = "branchreplay" in backends
    if not is_listed:
        problems.append("torch does not list the backend `branchreplay`: install branchfx with pip, not by path")
    compiler = _find_compiler()
    if compiler is None:
        problems.append("no C++ compiler: Inductor cannot compile for the CPU, aot_eager will be used; install g++")
    unknown = unknown_env_names()
    if unknown:
        problems.append(f"environment variables that nothing reads: {', '.join(unknown)}")
    try:
        options = str(Options.from_env())
    except OptionError as error:
        options = "invalid"
        problems.append(str(error))
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "compiler": compiler,
        "backend_listed": is_listed,
        "options": options,
        "problems": problems,
    }


def format_findings(findings: dict[str, Any]) -> str:
    """Return the findings as text."""
    versions = ", ".join(f"{name} {version}" for name, version in findings["versions"].items() if version)
    missing = ", ".join(name for name, version in findings["versions"].items() if not version)
    lines = [
        f"python       {findings['python']} on {findings['platform']}",
        f"packages     {versions}",
        f"not here     {missing or 'none'}",
        f"devices      {', '.join(findings['devices']) or 'CPU only'}, {findings['threads']} threads",
        f"compiler     {findings['compiler'] or 'none'}",
        f"branchreplay {'listed' if findings['backend_listed'] else 'NOT listed'} by torch.compiler.list_backends()",
        f"options      {findings['options']}",
        *(f"PROBLEM      {problem}" for problem in findings["problems"]),
    ]
    return "\n".join(lines) if findings["problems"] else "\n".join([*lines, "no problems found"])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)
