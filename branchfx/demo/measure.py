"""Measurements of one training step: seconds, peak memory growth, gradients."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from branchfx.demo.grpo import GroupBatch, train_step

_SAMPLE_SECONDS = 0.002
# a parameter whose gradient is smaller than this share of the largest one is compared against that share
NEGLIGIBLE_SHARE = 1e-6


@dataclasses.dataclass
class PeakMemory:
    """How far memory rose above where it stood; None where it cannot be measured."""

    growth_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class GradientDifference:
    """The largest relative L2 difference over all parameters, and where it is."""

    value: float
    parameter: str


def timed_step(model: Any, batches: Sequence[GroupBatch]) -> float:
    """Run one step and return its seconds; gradients are left in `.grad`."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    _synchronize()
    start = time.perf_counter()
    train_step(model, batches)
    _synchronize()
    return time.perf_counter() - start


def take_gradients(model: Any) -> dict[str, Tensor]:
    """Move the gradients out of the model, by parameter name."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def gradient_difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> GradientDifference:
    """Compare gradients, parameter by parameter.

    The difference is `|got - expected| / max(|expected|, NEGLIGIBLE_SHARE * largest |expected|)`, so a gradient that
    is zero but for rounding does not count as different. A missing gradient or a NaN is an infinite difference.
    """
    norms = {name: float(g.double().norm()) for name, g in expected.items()}
    floor = NEGLIGIBLE_SHARE * max(norms.values(), default=0.0) or sys.float_info.min
    worst = GradientDifference(0.0, "none")
    for name in sorted({*got, *expected}):
        value = float("inf")
        if name in got and name in expected:
            value = float((got[name].double() - expected[name].double()).norm()) / max(norms[name], floor)
        if not value <= worst.value:
            worst = GradientDifference(value if value == value else float("inf"), name)
    return worst


@contextlib.contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure how far memory rises inside the block.

    On a GPU it is the allocator's peak. On a CPU the process's resident set is sampled every 2 ms, after free
    memory was handed back to the system, so that what one arm leaves behind does not hide what the next one needs.
    """
    result = PeakMemory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield result
        result.growth_bytes = torch.cuda.max_memory_allocated() - before
        return
    if not pathlib.Path("/proc/self/statm").exists():
        yield result
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before, peak, stop = _resident_bytes(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            peak[0] = max(peak[0], _resident_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield result
    finally:
        stop.set()
        sampler.join()
    result.growth_bytes = max(peak[0] - before, 0)


def _resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
