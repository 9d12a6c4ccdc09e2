from __future__ import annotations

import concurrent.futures
import json

import pytest

import branchfx
from branchfx.counters import StatsRecorder, TokenCounts, recorder


def _record(target: StatsRecorder, **changes: object) -> None:
    call: dict = {"rows": 8, "tokens": 400, "padded_tokens": 480, "unique_tokens": 100, "shared": True}
    target.record_call(**{**call, **changes})


def test_last_and_total() -> None:
    target = StatsRecorder()
    _record(target)
    _record(target, rows=1, tokens=20, padded_tokens=20, unique_tokens=20, shared=False, declined_by="BFX102")
    stats = target.snapshot()
    assert stats.last == TokenCounts(1, 20, 20, 20)
    assert stats.total == TokenCounts(9, 420, 500, 120)
    assert (stats.calls, stats.calls_shared, dict(stats.calls_declined)) == (2, 1, {"BFX102": 1})
    assert stats.last.token_ratio == 1.0
    assert stats.total.token_ratio == pytest.approx(3.5)


def test_compiles_declines_and_verify_failures() -> None:
    target = StatsRecorder()
    for kind in ("capture_grad", "packed", "packed", "baseline", "capture_nograd"):
        target.record_compile(kind)
    target.record_decline("BFX008")
    target.record_verify_failure()
    stats = target.snapshot()
    assert stats.compiles == {"capture_grad": 1, "packed": 2, "baseline": 1, "capture_nograd": 1}
    assert stats.graphs_declined == {"BFX008": 1}
    assert stats.verify_failures == 1
    with pytest.raises(ValueError, match="unknown compile kind"):
        target.record_compile("other")  # type: ignore[arg-type]


def test_snapshot_does_not_change_later() -> None:
    target = StatsRecorder()
    before = target.snapshot()
    _record(target, shared=False, declined_by="BFX101")
    assert before.calls == 0
    assert not before.calls_declined
    with pytest.raises(TypeError):
        target.snapshot().calls_declined["BFX101"] = 5  # type: ignore[index]


def test_reset() -> None:
    target = StatsRecorder()
    _record(target)
    target.reset()
    assert target.snapshot() == StatsRecorder().snapshot()
    assert target.snapshot().total.token_ratio == 1.0


def test_shared_and_declined_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="BFX101"):
        _record(StatsRecorder(), declined_by="BFX101")


def test_threads_lose_no_count() -> None:
    target = StatsRecorder()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: _record(target), range(2000)))
    assert target.snapshot().calls == 2000
    assert target.snapshot().total.rows == 16000


def test_public_accessor() -> None:
    branchfx.reset_stats()
    _record(recorder())
    assert branchfx.stats().calls == 1
    assert "400 tokens (480 padded), 100 unique, token ratio 4.00" in str(branchfx.stats())
    assert json.loads(json.dumps(branchfx.stats().to_dict()))["last"]["token_ratio"] == 4.0
    branchfx.reset_stats()
    assert branchfx.stats().calls == 0
