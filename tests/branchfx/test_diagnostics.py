from __future__ import annotations

import logging
import types
import warnings

import pytest

from branchfx.diagnostics import (
    CODES,
    BranchReplayFallbackWarning,
    Code,
    Decline,
    DeclineReporter,
    format_decline,
    user_line,
)
from branchfx.errors import DeclinedError

TRACE = """  File "/home/u/train.py", line 10, in step
    out = model(ids)
  File "/home/u/model.py", line 31, in forward
    return self.norm(x)
           ^^^^^^^^^^^^
"""


def _random_op(reason: str = "dropout with p=0.1 is active") -> Decline:
    return Decline(Code.RANDOM_OP, "dropout_1", reason)


def test_user_line_is_the_innermost_frame() -> None:
    assert user_line(TRACE) == "/home/u/model.py:31 in forward: return self.norm(x)"
    assert user_line('File "a.py", line 3') == "a.py:3"
    assert user_line(None) is None
    assert user_line("no frames here") is None


def test_decline_at_a_node_takes_name_and_line() -> None:
    node = types.SimpleNamespace(name="layer_norm_2", stack_trace=TRACE)
    decline = Decline.at(Code.UNKNOWN_OPERATOR, node, "no rule for aten.foo.default")
    assert decline.node_name == "layer_norm_2"
    assert decline.stack_trace == "/home/u/model.py:31 in forward: return self.norm(x)"
    assert decline.code == "BFX012"
    assert decline.hint == CODES["BFX012"].hint


def test_text_holds_code_place_reason_and_hint() -> None:
    decline = Decline("BFX008", "dropout_1", "p=0.1", "set it to 0", "m.py:3 in f: drop(x)")
    assert format_decline(decline).splitlines() == [
        "[BFX008] active dropout or another random operation: p=0.1",
        "  at node dropout_1",
        "  from m.py:3 in f: drop(x)",
        "  hint: set it to 0",
    ]
    assert decline.to_dict()["title"] == CODES["BFX008"].title


def test_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match="BFX999"):
        Decline("BFX999", None, "x")


def test_every_code_says_what_and_what_to_do() -> None:
    for code, info in CODES.items():
        assert info.code == code
        assert info.title
        assert info.hint
        assert info.explanation.endswith(".")
        assert not info.hint.endswith(".")


def test_warns_once_a_reason() -> None:
    reporter = DeclineReporter("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reporter.report(_random_op())
        reporter.report(_random_op())
        reporter.report(_random_op("rand_like"))
        DeclineReporter("warn").report(_random_op())
    assert [w.category for w in caught] == [BranchReplayFallbackWarning] * 3
    assert "BFX008" in str(caught[0].message)
    assert "set dropout to 0" in str(caught[0].message)


def test_error_raises_each_time_with_the_decline() -> None:
    reporter = DeclineReporter("error")
    for _ in range(2):
        with pytest.raises(DeclinedError, match="BFX008") as caught:
            reporter.report(_random_op())
        assert caught.value.decline == _random_op()


@pytest.mark.parametrize("fallback", ["warn", "error", "silent"])
@pytest.mark.parametrize("code", [Code.ONE_ROW, Code.SHARING_DOES_NOT_PAY, Code.EMPTY_BATCH])
def test_ordinary_batches_are_logged_only(
    fallback: str, code: Code, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with caplog.at_level(logging.INFO, "branchfx.declines"):
        DeclineReporter(fallback).report(Decline(code, None, "B = 1"))  # type: ignore[arg-type]
    assert not recwarn
    assert [r.name for r in caplog.records] == ["branchfx.declines"]


def test_a_warning_level_code_never_raises() -> None:
    with pytest.warns(BranchReplayFallbackWarning, match="BFX201"):
        DeclineReporter("error").report(Decline(Code.NO_COMPILER, None, "no g++"))


def test_silent_logs_and_counts_nothing_else(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with caplog.at_level(logging.INFO, "branchfx.declines"):
        DeclineReporter("silent").report(_random_op())
    assert not recwarn
    assert "BFX008" in caplog.text
