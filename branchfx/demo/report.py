"""The demo's result as a table and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from branchfx.demo.measure import GradientDifference


@dataclasses.dataclass
class ArmResult:
    """What was measured of one way to run the step.

    Attributes:
        name: The backend.
        first_seconds: The first step, compilation included.
        seconds: The interleaved steps after it.
        peak_bytes: How far memory rose during one step without compilation, gradients included; None when unknown.
        difference: Against eager's gradients; None for eager itself.
    """

    name: str
    first_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    difference: GradientDifference | None = None

    @property
    def median_seconds(self) -> float:
        """The median of the interleaved steps."""
        return statistics.median(self.seconds)

    @property
    def compile_seconds(self) -> float:
        """What the first step took beyond a later one."""
        return max(self.first_seconds - self.median_seconds, 0.0)


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """The step's batch: rows, valid tokens, unique tokens."""

    rows: int
    tokens: int
    unique_tokens: int

    @property
    def token_ratio(self) -> float:
        """Valid over unique tokens."""
        return self.tokens / self.unique_tokens


def format_table(size: BatchSize, arms: Sequence[ArmResult]) -> str:
    """Return the table that the demo prints; speed-up is over the first arm."""
    header = ("", "seconds a step", "speed-up", "compile, s", "peak memory", "gradient difference")
    rows = [header]
    for arm in arms:
        rows.append(
            (
                arm.name,
                f"{arm.median_seconds:.2f}",
                f"{arms[0].median_seconds / arm.median_seconds:.2f}x",
                f"{arm.compile_seconds:.1f}" if arm.name != "eager" else "-",
                f"{arm.peak_bytes / 2**20:.0f} MiB" if arm.peak_bytes is not None else "unknown",
                f"{arm.difference.value:.1e}" if arm.difference else "(reference)",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        f"rows {size.rows}   tokens {size.tokens}   unique tokens {size.unique_tokens}   "
        f"token ratio {size.token_ratio:.2f}",
        "",
    ]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_json(size: BatchSize, arms: Sequence[ArmResult], **context: Any) -> dict[str, Any]:
    """Return the same figures, ready for JSON."""
    return {
        **context,
        **dataclasses.asdict(size),
        "token_ratio": size.token_ratio,
        "arms": [
            {
                "name": arm.name,
                "median_seconds": arm.median_seconds,
                "seconds": arm.seconds,
                "compile_seconds": arm.compile_seconds,
                "peak_bytes": arm.peak_bytes,
                "gradient_difference": arm.difference.value if arm.difference else None,
                "gradient_difference_at": arm.difference.parameter if arm.difference else None,
            }
            for arm in arms
        ],
    }
