from __future__ import annotations

import pathlib
from typing import Any

import pytest

from branchfx.errors import BranchFxError, OptionError
from branchfx.options import Options, list_options, unknown_env_names


def test_defaults() -> None:
    assert Options.from_user(None, environ={}) == Options()
    assert Options() == Options(
        inner="inductor",
        fallback="warn",
        verify="off",
        padding="auto",
        share="auto",
        min_shared_tokens=None,
        same_forward=False,
        dump=None,
        disable=False,
    )


def test_every_option_can_be_given() -> None:
    given = {
        "inner": "eager",
        "fallback": "silent",
        "verify": "every",
        "padding": "exact",
        "share": "never",
        "min_shared_tokens": 7,
        "same_forward": True,
        "dump": "somewhere",
        "disable": True,
    }
    options = Options.from_user(given, environ={})
    assert {name: getattr(options, name) for name in given} == given
    assert set(given) == {info.name for info in list_options()}


def test_options_win_over_environment_and_environment_over_defaults() -> None:
    environ = {"BRANCHFX_INNER": "eager", "BRANCHFX_VERIFY": "first", "BRANCHFX_MIN_SHARED_TOKENS": "12"}
    options = Options.from_user({"inner": "aot_eager"}, environ=environ)
    assert (options.inner, options.verify, options.min_shared_tokens) == ("aot_eager", "first", 12)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_disable_from_environment(text: str, value: bool) -> None:
    assert Options.from_env({"BRANCHFX_DISABLE": text}).disable is value


def test_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHFX_DISABLE", "1")
    assert Options.from_user().disable


def test_unknown_name_lists_known_ones_and_the_nearest() -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_user({"inne": "eager"}, environ={})
    text = str(caught.value)
    assert "did you mean 'inner'?" in text
    assert all(info.name in text for info in list_options())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner", "inducto"),
        ("inner", None),
        ("inner", ["eager"]),
        ("verify", True),
        ("min_shared_tokens", 0),
        ("min_shared_tokens", True),
        ("min_shared_tokens", 2.0),
        ("same_forward", 1),
        ("dump", ""),
        ("dump", 3),
        ("disable", "1"),
    ],
)
def test_bad_value_names_the_option_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' is .*must be"):
        Options.from_user({name: value}, environ={})
    with pytest.raises(ValueError, match=name):
        Options(**{name: value})


def test_bad_value_gets_the_nearest_choice() -> None:
    with pytest.raises(OptionError, match="did you mean 'aot_eager'"):
        Options.from_user({"inner": "aot-eager"}, environ={})


@pytest.mark.parametrize(
    ("name", "text"),
    [("BRANCHFX_INNER", "fast"), ("BRANCHFX_DISABLE", "perhaps"), ("BRANCHFX_MIN_SHARED_TOKENS", "many")],
)
def test_bad_environment_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=name):
        Options.from_env({name: text})


def test_path_objects_are_taken(tmp_path: pathlib.Path) -> None:
    assert Options.from_user({"dump": tmp_path}, environ={}).dump == str(tmp_path)


def test_misspelt_variables_are_found() -> None:
    environ = {"BRANCHFX_FALBACK": "x", "BRANCHFX_FALLBACK": "warn", "BRANCHFX_ACCEPT": "1", "OTHER": "1"}
    assert unknown_env_names(environ) == ("BRANCHFX_FALBACK",)


def test_options_are_frozen_hashable_and_described() -> None:
    assert hash(Options()) == hash(Options())
    with pytest.raises(AttributeError):
        Options().inner = "eager"  # type: ignore[misc]
    assert all(info.description and info.values for info in list_options())
    assert issubclass(OptionError, BranchFxError)
