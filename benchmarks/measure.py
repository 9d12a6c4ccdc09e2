"""Seconds, memory and errors of the arms of one case."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arms import Arm
from branchfx import backend


def seconds_of(function: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def train_step(model: nn.Module, arm: Arm) -> Tensor:
    """Run forward and backward under a fixed random linear loss, and return the log-probabilities."""
    model.zero_grad(set_to_none=True)
    logprobs = arm()
    weight = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    (logprobs * weight).sum().backward()
    return logprobs.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients that the last step left."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 distance."""
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative L2 distance over all parameters; infinite if one lacks its gradient."""
    return max(relative(actual[n], g) if n in actual else float("inf") for n, g in expected.items())


def interleaved_medians(model: nn.Module, arms: Mapping[str, Arm], repeats: int) -> dict[str, float]:
    """Return each arm's median seconds; the arms take turns, and another one begins each round."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeats):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds_of(lambda arm=arms[name]: train_step(model, arm)))  # type: ignore[misc]
    return {name: statistics.median(values) for name, values in times.items()}


class TreeClock:
    """Adds up the seconds that the backend spends on deciding and on the token tree, outside compiled graphs."""

    FUNCTIONS = ("fits", "build_tree", "has_masked_query", "worth_sharing", "tree_arguments")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def __enter__(self) -> TreeClock:
        self.kept = {name: getattr(backend, name) for name in self.FUNCTIONS}
        for name, function in self.kept.items():
            setattr(backend, name, self._timed(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.kept.items():
            setattr(backend, name, function)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            self.calls += name == "build_tree"
            return out

        return run

    @property
    def seconds_a_call(self) -> float:
        """Mean of a call."""
        return self.seconds / max(self.calls, 1)


def sgemm_flops_per_second(size: int = 2048, repeats: int = 7) -> float:
    """Return the machine's rate at a product of two square float32 matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    return 2 * size**3 / statistics.median(seconds_of(lambda: a @ b) for _ in range(repeats))


def peak_step_bytes(model: nn.Module, arm: Arm) -> int:
    """Return how far a warm step lifts the process's resident memory (Linux only)."""
    for _ in range(2):
        train_step(model, arm)
    model.zero_grad(set_to_none=True)
    gc.collect()
    # memory that the allocator holds from earlier steps would hide what this one needs
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    train_step(model, arm)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
