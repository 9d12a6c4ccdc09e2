"""Every diagnostic code has its page entry, and the page is the one the code writes."""

from __future__ import annotations

import pathlib
import re

from branchfx.diagnostics import CODES, Code, format_codes_markdown

ROOT = pathlib.Path(__file__).parents[2]


def test_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "codes.md").read_text()
    assert page == format_codes_markdown(), "run: branchfx codes --markdown > docs/codes.md"


def test_every_code_is_documented() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "codes.md").read_text()
    assert [code for code in CODES if code not in text] == []


def test_names_and_table_agree() -> None:
    assert set(CODES) == {code.value for code in Code}
    assert all(re.fullmatch(r"BFX\d{3}", code) for code in CODES)


def test_modules_name_codes_that_exist() -> None:
    unknown = []
    for folder in ("branchfx", "passes", "codegen"):
        for path in (ROOT / folder).rglob("*.py"):
            unknown += [
                f"{path.name}: {code}" for code in re.findall(r"BFX\d{3}", path.read_text()) if code not in CODES
            ]
    assert not unknown
