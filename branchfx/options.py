"""The backend's options: names, values and defaults, checked when they are given.

A value comes from `options={...}`, else from the environment (`BRANCHFX_<NAME>`), else from the default. This
module alone reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal, cast

from branchfx.errors import OptionError

Inner = Literal["inductor", "aot_eager", "eager"]
Fallback = Literal["warn", "error", "silent"]
Verify = Literal["off", "first", "every"]
Padding = Literal["auto", "skip", "exact"]
Share = Literal["auto", "always", "never"]

ENV_PREFIX = "BRANCHFX_"
# read by tools of this project, not by the backend
_OTHER_ENV_NAMES = ("BRANCHFX_ACCEPT",)
_TRUE_WORDS = ("1", "true", "yes", "on")
_FALSE_WORDS = ("0", "false", "no", "off", "")


@dataclasses.dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option as a user meets it.

    Attributes:
        name: The key in `options={...}`.
        env_name: The environment variable.
        values: What may be given, as text.
        default: The value when neither is given.
        description: What it does, in one line.
    """

    name: str
    env_name: str
    values: str
    default: Any
    description: str


def _about(description: str, *choices: str) -> dict[str, Any]:
    return {"description": description, "choices": choices}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one backend compiles and runs; immutable and hashable, so that it can be part of a cache key.

    Raises:
        OptionError: A value is not of the option's type or not one of its choices.
    """

    inner: Inner = dataclasses.field(
        default="inductor",
        metadata=_about("the compiler of the packed and of the unshared graph", "inductor", "aot_eager", "eager"),
    )
    fallback: Fallback = dataclasses.field(
        default="warn",
        metadata=_about("what a decline does besides running the graph unshared", "warn", "error", "silent"),
    )
    verify: Verify = dataclasses.field(
        default="off",
        metadata=_about(
            "compare the outputs of shared calls with the unshared graph; gradients are not compared",
            "off",
            "first",
            "every",
        ),
    )
    padding: Padding = dataclasses.field(
        default="auto",
        metadata=_about(
            "padded positions: left out and zero, the model's own values, or left out when only outputs read them",
            "auto",
            "skip",
            "exact",
        ),
    )
    share: Share = dataclasses.field(
        default="auto",
        metadata=_about("share when it pays, whenever it is legal, or not at all", "auto", "always", "never"),
    )
    min_shared_tokens: int | None = dataclasses.field(
        default=None,
        metadata=_about("shorter shared runs are not split off; None lets the cost model choose"),
    )
    same_forward: bool = dataclasses.field(
        default=False,
        metadata=_about("run the training forward under no_grad too: bitwise agreement under Inductor"),
    )
    dump: str | None = dataclasses.field(
        default=None,
        metadata=_about("a directory that receives the graph before and after each pass"),
    )
    disable: bool = dataclasses.field(
        default=False,
        metadata=_about("run every graph as the inner compiler would, as if we were not there"),
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))

    @classmethod
    def from_user(cls, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Options:
        """Return the options that a call of `torch.compile` asks for.

        Args:
            options: The caller's `options={...}`; its values win over the environment's.
            environ: The environment; None means the process's own.

        Raises:
            OptionError: A name is unknown or a value is bad; the message lists what is known.
        """
        given = dict(options or {})
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise OptionError(_unknown_option(name))
        if isinstance(given.get("dump"), os.PathLike):
            given["dump"] = os.fspath(given["dump"])
        return dataclasses.replace(cls.from_env(environ), **given)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Options:
        """Return the defaults, overridden by `BRANCHFX_<NAME>` variables.

        Args:
            environ: The environment; None means the process's own.

        Raises:
            OptionError: A variable's value is bad; the message names the variable.
        """
        environ = os.environ if environ is None else environ
        values = {}
        for field in dataclasses.fields(cls):
            env_name = _env_name(field.name)
            if env_name in environ:
                values[field.name] = _parse(field, environ[env_name])
        try:
            return cls(**values)
        except OptionError as error:
            raise OptionError(f"from the environment ({', '.join(map(_env_name, values))}): {error}") from None


def list_options() -> tuple[OptionInfo, ...]:
    """Return every option with its values, default and description, in the order they are documented."""
    return tuple(
        OptionInfo(f.name, _env_name(f.name), _values_text(f), f.default, str(f.metadata["description"]))
        for f in dataclasses.fields(Options)
    )


def unknown_env_names(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the variables with our prefix that nothing reads: most likely misspelt."""
    environ = os.environ if environ is None else environ
    known = {_env_name(f.name) for f in dataclasses.fields(Options)} | set(_OTHER_ENV_NAMES)
    return tuple(sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known))


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _kind(field: dataclasses.Field[Any]) -> Literal["choice", "bool", "int", "path"]:
    if field.metadata["choices"]:
        return "choice"
    return cast(Literal["bool", "int", "path"], {"bool": "bool", "int | None": "int"}.get(str(field.type), "path"))


def _values_text(field: dataclasses.Field[Any]) -> str:
    texts = {"bool": "True | False", "int": "an int >= 1 | None", "path": "a directory | None"}
    return texts.get(_kind(field)) or " | ".join(repr(c) for c in field.metadata["choices"])


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    kind = _kind(field)
    choices = field.metadata["choices"]
    is_good = {
        "choice": isinstance(value, str) and value in choices,
        "bool": isinstance(value, bool),
        "int": value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
        "path": value is None or (isinstance(value, str) and value != ""),
    }[kind]
    if not is_good:
        raise OptionError(
            f"option {field.name!r} is {value!r}, but must be {_values_text(field)}{_nearest(value, choices)}"
        )


def _parse(field: dataclasses.Field[Any], text: str) -> Any:
    kind, word = _kind(field), text.strip().lower()
    if kind == "choice":
        return word
    if kind == "path":
        return text or None
    if kind == "int" and word in ("", "none"):
        return None
    if kind == "int" and word.lstrip("-").isdigit():
        return int(word)
    if kind == "bool" and word in _TRUE_WORDS + _FALSE_WORDS:
        return word in _TRUE_WORDS
    raise OptionError(f"the environment's {_env_name(field.name)} is {text!r}, but must be {_values_text(field)}")


def _unknown_option(name: Any) -> str:
    infos = list_options()
    known = "\n".join(f"  {i.name}: {i.values} (default {i.default!r})" for i in infos)
    return f"unknown option {name!r}{_nearest(name, tuple(i.name for i in infos))}. Known options:\n{known}"


def _nearest(word: Any, known: tuple[str, ...]) -> str:
    matches = difflib.get_close_matches(str(word).lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
