"""The wheel holds every module of the tree, and nothing but our top-level name."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {"branchfx": "branchfx", "passes": "branchfx/passes", "codegen": "branchfx/codegen"}


def _modules() -> set[str]:
    """Return the paths inside the wheel that the tree's modules must have."""
    found = set()
    for folder, target in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder)
            if folder != "branchfx" or inside.parts[0] not in ("passes", "codegen"):
                found.add(f"{target}/{inside.as_posix()}")
    return found


def _pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    packages = {path.rpartition("/")[0].replace("/", ".") for path in _modules() if path.endswith("/__init__.py")}
    assert set(_pyproject()["tool"]["setuptools"]["packages"]) == packages


def test_every_folder_of_modules_is_a_package() -> None:
    modules = _modules()
    missing = {m.rpartition("/")[0] for m in modules if f"{m.rpartition('/')[0]}/__init__.py" not in modules}
    assert not missing, f"no __init__.py in {sorted(missing)}"


def test_links_lead_to_the_real_folders() -> None:
    for name in ("passes", "codegen"):
        link = ROOT / "branchfx" / name
        assert link.is_symlink()
        assert link.readlink() == pathlib.Path("..", name)


def test_backend_is_an_entry_point_only() -> None:
    assert _pyproject()["project"]["entry-points"] == {
        "torch_dynamo_backends": {"branchreplay": "branchfx.backend:branchreplay"}
    }


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a git checkout")
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools to build a wheel")
def test_wheel_of_a_clean_copy_holds_every_module(tmp_path: pathlib.Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    copy = tmp_path / "copy"
    for name in listing.stdout.decode().split("\0"):
        source = ROOT / name
        if name and (source.is_symlink() or source.is_file()):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", tmp_path, copy], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("branchfx-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == _modules()
    assert "branchfx/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"branchfx"}
