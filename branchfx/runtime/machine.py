"""Constants of a machine, measured once and kept: the rates of a product and of a copy, and what a tree costs."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import platformdirs
import torch

from branchfx.token_tree import build_token_tree

logger = logging.getLogger("branchfx.machine")

_VERSION = 1
_SIZE = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class MachineRates:
    """What one device does in a second.

    Attributes:
        flops_per_second: FLOP/s of a float32 product of two 1024 x 1024 matrices.
        bytes_per_second: Bytes written a second by a copy of 64 MiB.
        tree_seconds: Seconds to build a tree, besides those a position.
        tree_seconds_per_position: Seconds to build a tree a position of the batch.
    """

    flops_per_second: float
    bytes_per_second: float
    tree_seconds: float
    tree_seconds_per_position: float


@functools.cache
def machine_rates(device: str) -> MachineRates:
    """Return the rates of a device type, from the user's cache or measured now (some 0.1 s)."""
    name = f"{platform.machine()}-{os.cpu_count()}-{torch.get_num_threads()}-{device}-torch{torch.__version__}"
    if device == "cuda":
        name += f"-{torch.cuda.get_device_name()}"
    path = pathlib.Path(platformdirs.user_cache_dir("branchfx")) / f"machine-{_VERSION}.json"
    known = _read(path)
    if name not in known:
        rates = _measure(device)
        logger.info("measured %s: %s", name, rates)
        _write(path, known | {name: dataclasses.asdict(rates)})
        return rates
    return MachineRates(**known[name])


def _measure(device: str) -> MachineRates:
    matrix = torch.randn(_SIZE, _SIZE, device=device)
    source = torch.zeros(1 << 24, device=device)
    into = torch.empty_like(source)
    product = _seconds(lambda: matrix @ matrix, device)
    copy = _seconds(lambda: into.copy_(source), device)
    small, large = (_tree_seconds(columns) for columns in (64, 1024))
    each = max(large - small, 0.0) / (8 * (1024 - 64))
    return MachineRates(2 * _SIZE**3 / product, source.nbytes / copy, max(small - each * 8 * 64, 0.0), each)


def _tree_seconds(columns: int) -> float:
    ids = torch.arange(columns).repeat(8, 1)
    ids[:, columns // 2 :] += torch.arange(8)[:, None]
    return _seconds(lambda: build_token_tree([ids], None), "cpu")


def _seconds(function: Callable[[], object], device: str) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _read(path: pathlib.Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    fields = {f.name for f in dataclasses.fields(MachineRates)}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict) and set(v) == fields}


def _write(path: pathlib.Path, known: dict[str, dict[str, float]]) -> None:
    """Keep the rates; a machine without a writable cache measures again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=2))
        part.replace(path)
    except OSError as error:
        logger.info("rates are not kept: %s", error)
