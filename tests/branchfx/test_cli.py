from __future__ import annotations

import json

import pytest

from branchfx.cli import main
from branchfx.diagnostics import CODES
from branchfx.options import list_options


def test_options_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert all(info.name in text and info.env_name in text for info in list_options())
    assert main(["options", "--json"]) == 0
    assert [i["name"] for i in json.loads(capsys.readouterr().out)] == [i.name for i in list_options()]


def test_codes_lists_every_code_or_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codes"]) == 0
    text = capsys.readouterr().out
    assert all(code in text for code in CODES)
    assert main(["codes", "bfx008", "--json"]) == 0
    assert [i["code"] for i in json.loads(capsys.readouterr().out)] == ["BFX008"]
    assert main(["codes", "BFX999"]) == 2
    assert "known" in capsys.readouterr().err


def test_doctor_reports_backend_and_misspelt_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHFX_FALBACK", "error")
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert findings["backend_listed"]
    assert any("BRANCHFX_FALBACK" in problem for problem in findings["problems"])
    monkeypatch.delenv("BRANCHFX_FALBACK")
    main(["doctor"])
    assert "branchreplay listed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["demo", "--rollouts", "0"], ["nonsense"]])
def test_bad_command_lines_exit_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
