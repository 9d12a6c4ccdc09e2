"""Counters of what the backend did: `branchfx.stats()`.

The counter behind `stats()` is process-wide, on purpose and as the only such state in the package: graphs are
compiled by torch, so a user has no object of ours to ask. A lock guards it.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args

CompileKind = Literal["capture_grad", "capture_nograd", "packed", "baseline"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCounts:
    """How many tokens calls were given, and how many they had to compute.

    Attributes:
        rows: B, summed over calls.
        tokens: Valid tokens, padding not counted.
        padded_tokens: B * T, padding counted.
        unique_tokens: N, the tokens of the token tree; equal to `tokens` for a call that built no tree.
    """

    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    unique_tokens: int = 0

    @property
    def token_ratio(self) -> float:
        """Valid tokens over unique tokens: the bound on the speed-up of token-local work; 1.0 without tokens."""
        return self.tokens / self.unique_tokens if self.unique_tokens else 1.0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.padded_tokens + other.padded_tokens,
            self.unique_tokens + other.unique_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and the ratio, ready for JSON."""
        return {**dataclasses.asdict(self), "token_ratio": self.token_ratio}


def _no_counts() -> Mapping[str, int]:
    return types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the counters.

    Attributes:
        last: The last call's tokens.
        total: All calls' tokens.
        calls: Calls of compiled graphs.
        calls_shared: Calls that ran on unique tokens.
        calls_declined: Calls that ran unshared, by diagnostic code.
        graphs_declined: Graphs that were declined when compiled, by diagnostic code.
        compiles: Captures and compilations, by kind.
        verify_failures: Calls whose verification failed.
    """

    last: TokenCounts = TokenCounts()
    total: TokenCounts = TokenCounts()
    calls: int = 0
    calls_shared: int = 0
    calls_declined: Mapping[str, int] = dataclasses.field(default_factory=_no_counts)
    graphs_declined: Mapping[str, int] = dataclasses.field(default_factory=_no_counts)
    compiles: Mapping[str, int] = dataclasses.field(default_factory=_no_counts)
    verify_failures: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain dicts, ready for JSON."""
        return {
            "last": self.last.to_dict(),
            "total": self.total.to_dict(),
            "calls": self.calls,
            "calls_shared": self.calls_shared,
            "calls_declined": dict(self.calls_declined),
            "graphs_declined": dict(self.graphs_declined),
            "compiles": dict(self.compiles),
            "verify_failures": self.verify_failures,
        }

    def __str__(self) -> str:
        lines = []
        for name, counts in (("last", self.last), ("total", self.total)):
            lines.append(
                f"{name:6s}{counts.rows} rows, {counts.tokens} tokens ({counts.padded_tokens} padded), "
                f"{counts.unique_tokens} unique, token ratio {counts.token_ratio:.2f}"
            )
        lines.append(f"calls {self.calls}: {self.calls_shared} shared, declined {_counts_text(self.calls_declined)}")
        lines.append(f"graphs declined {_counts_text(self.graphs_declined)}")
        lines.append(f"compiles {_counts_text(self.compiles)}; verify failures {self.verify_failures}")
        return "\n".join(lines)


class StatsRecorder:
    """Counts events from any thread; `snapshot` returns them as an immutable `Stats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = Stats()

    def record_call(
        self,
        *,
        rows: int,
        tokens: int,
        padded_tokens: int,
        unique_tokens: int,
        shared: bool,
        declined_by: str | None = None,
    ) -> None:
        """Count one call of a compiled graph.

        Args:
            rows: B.
            tokens: Valid tokens of the batch.
            padded_tokens: B * T.
            unique_tokens: N; pass `tokens` when no tree was built.
            shared: Whether the call ran on unique tokens.
            declined_by: The diagnostic code that kept it from sharing.

        Raises:
            ValueError: The call was shared and declined.
        """
        if shared and declined_by is not None:
            raise ValueError(f"a shared call cannot be declined by {declined_by}")
        counts = TokenCounts(rows, tokens, padded_tokens, unique_tokens)
        with self._lock:
            now = self._stats
            self._stats = dataclasses.replace(
                now,
                last=counts,
                total=now.total + counts,
                calls=now.calls + 1,
                calls_shared=now.calls_shared + shared,
                calls_declined=_counted(now.calls_declined, declined_by),
            )

    def record_compile(self, kind: CompileKind) -> None:
        """Count one capture or compilation.

        Raises:
            ValueError: The kind is unknown.
        """
        if kind not in get_args(CompileKind):
            raise ValueError(f"unknown compile kind {kind!r}; known: {', '.join(get_args(CompileKind))}")
        with self._lock:
            self._stats = dataclasses.replace(self._stats, compiles=_counted(self._stats.compiles, kind))

    def record_decline(self, code: str) -> None:
        """Count one graph that was declined when it was compiled."""
        with self._lock:
            declined = _counted(self._stats.graphs_declined, code)
            self._stats = dataclasses.replace(self._stats, graphs_declined=declined)

    def record_verify_failure(self) -> None:
        """Count one call whose verification failed."""
        with self._lock:
            self._stats = dataclasses.replace(self._stats, verify_failures=self._stats.verify_failures + 1)

    def snapshot(self) -> Stats:
        """Return the counters as they are now."""
        with self._lock:
            return self._stats

    def reset(self) -> None:
        """Set every counter to zero."""
        with self._lock:
            self._stats = Stats()


_RECORDER = StatsRecorder()


def recorder() -> StatsRecorder:
    """Return the process-wide recorder that the backend writes to."""
    return _RECORDER


def stats() -> Stats:
    """Return what branchreplay did in this process so far."""
    return _RECORDER.snapshot()


def reset_stats() -> None:
    """Set the process-wide counters to zero."""
    _RECORDER.reset()


def _counted(counts: Mapping[str, int], key: str | None) -> Mapping[str, int]:
    if key is None:
        return counts
    return types.MappingProxyType({**counts, str(key): counts.get(key, 0) + 1})


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {count}" for key, count in sorted(counts.items())) or "none"
