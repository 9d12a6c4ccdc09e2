"""The results of the speed benchmark as data, and as a table."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

_CASE_COLUMNS = (
    *("B", "T", "tokens", "unique", "token ratio", "FLOP ratio"),
    *("speed-up", "of the FLOP ratio", "over prefix-grouper", "tree / step"),
)
_ARM_COLUMNS = (
    *("seconds", "speed-up over the faster baseline", "useful rate / sgemm", "compile s"),
    *("step peak MB", "output error", "worst gradient error"),
)


@dataclasses.dataclass
class ArmResult:
    """What one arm did.

    Attributes:
        seconds: Median of a step.
        first_call_seconds: Of the first step, compilation included.
        peak_bytes: Memory of a step on top of the model; None where it was not measured.
        output_error: Relative L2 of the log-probabilities to the first arm's.
        gradient_error: Largest relative L2 of a parameter's gradient to the first arm's.
    """

    seconds: float
    first_call_seconds: float
    peak_bytes: int | None
    output_error: float
    gradient_error: float

    @property
    def compile_seconds(self) -> float:
        """What the first step took on top of a later one."""
        return max(self.first_call_seconds - self.seconds, 0.0)


@dataclasses.dataclass
class CaseResult:
    """What one case gave.

    Attributes:
        name: Of the case.
        rows: B.
        length: T.
        tokens: That are no padding.
        unique_tokens: N.
        flop_ratio: Operations of the padded step over those of the unique tokens; linear and attention counted.
        useful_flops: Operations of a step over the unique tokens.
        tree_share: Seconds of a step that go to the token tree and the decision, as a part of our step.
        sgemm_rate: Floating-point operations a second of the machine, measured in the same process.
        arms: By name.
    """

    name: str
    rows: int
    length: int
    tokens: int
    unique_tokens: int
    flop_ratio: float
    useful_flops: int
    tree_share: float | None
    sgemm_rate: float
    arms: dict[str, ArmResult]

    def speedup(self, arm: str = "ours") -> float | None:
        """Return how much faster an arm is than the faster of eager and Inductor."""
        baselines = [self.arms[n].seconds for n in ("eager", "inductor") if n in self.arms]
        return min(baselines) / self.arms[arm].seconds if baselines and arm in self.arms else None

    def useful_rate(self, arm: str) -> float:
        """Return an arm's useful operations a second over the sgemm rate."""
        return self.useful_flops / self.arms[arm].seconds / self.sgemm_rate


def to_json(results: list[CaseResult], settings: dict[str, Any]) -> str:
    """Return everything as text."""
    return json.dumps({"settings": settings, "cases": [dataclasses.asdict(r) for r in results]}, indent=2) + "\n"


def to_markdown(results: list[CaseResult]) -> str:
    """Return one table a case, below a table of the cases."""
    lines = _header("case", *_CASE_COLUMNS)
    for r in results:
        speedup, peer = r.speedup(), r.arms.get("prefix_grouper")
        share = None if speedup is None else speedup / r.flop_ratio
        over_peer = peer.seconds / r.arms["ours"].seconds if peer and "ours" in r.arms else None
        lines.append(
            f"| {r.name} | {r.rows} | {r.length} | {r.tokens} | {r.unique_tokens} | {r.tokens / r.unique_tokens:.2f} "
            f"| {r.flop_ratio:.2f} | {_number(speedup)} | {_number(share)} | {_number(over_peer)} "
            f"| {'' if r.tree_share is None else format(r.tree_share, '.1%')} |"
        )
    for r in results:
        lines += ["", f"### {r.name}", "", *_arm_table(r)]
    return "\n".join(lines) + "\n"


def write(path: str | None, text: str) -> None:
    """Write a text to a file, if one was asked for."""
    if path:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(text)


def _arm_table(r: CaseResult) -> list[str]:
    lines = _header("arm", *_ARM_COLUMNS)
    for name, arm in r.arms.items():
        peak = "" if arm.peak_bytes is None else f"{arm.peak_bytes / 1e6:.0f}"
        lines.append(
            f"| {name} | {arm.seconds:.3f} | {_number(r.speedup(name))} | {r.useful_rate(name):.2f} "
            f"| {arm.compile_seconds:.1f} | {peak} | {arm.output_error:.1e} | {arm.gradient_error:.1e} |"
        )
    return lines


def _header(first: str, *others: str) -> list[str]:
    return [f"| {' | '.join((first, *others))} |", "|---|" + "--:|" * len(others)]


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"
