"""Importing the package probes no device and loads no compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

import branchfx

HEAVY = ("torch", "triton", "transformers", "sympy", "networkx", "numpy")


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert not _loaded_after("import branchfx") & set(HEAVY)


@pytest.mark.parametrize("name", ["Options", "stats", "OptionError", "Decline", "__version__"])
def test_light_names_do_not_load_torch(name: str) -> None:
    assert "torch" not in _loaded_after(f"import branchfx; branchfx.{name}")


def test_command_line_starts_light() -> None:
    assert "torch" not in _loaded_after("import branchfx.cli; branchfx.cli.main(['options'])")


def test_backend_does_not_load_triton_or_inductor() -> None:
    # torch itself loads triton with AOTAutograd where it is installed; we must not add to that
    torch_alone = _loaded_after("import torch._functorch.aot_autograd, torch._dynamo")
    loaded = _loaded_after("import branchfx.backend")
    assert ("triton" in loaded) == ("triton" in torch_alone)
    assert "torch._inductor.compile_fx" not in loaded


def test_every_public_name_resolves() -> None:
    for name in branchfx.__all__:
        assert getattr(branchfx, name) is not None
    assert set(branchfx.__all__) <= set(dir(branchfx))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = branchfx.nonsense
