"""Read what a mask buffer holds: a lower triangle, or the band of a window.

Some models keep `tril(ones(max, max))` as a buffer and cut `[:T, :T]` out of it. What it says cannot be proven from
the graph, so its value is compared at capture with the triangle or band that its last row suggests, and at each call
the buffer must still be that tensor, unchanged (`holds_band`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from branchfx.passes.ir import CapturedGraph, InputRole


def causal_tables(graph: CapturedGraph, inputs: Sequence[Any]) -> Mapping[str, int]:
    """Return the buffers whose entry (i, j) is `0 <= i - j < band`, with their band, by placeholder name."""
    found: dict[str, int] = {}
    for spec, value in zip(graph.inputs, inputs, strict=True):
        if spec.role is not InputRole.PARAMETER or spec.requires_grad or not _is_square(value):
            continue
        band = int(value[..., -1, :].sum())
        if band and holds_band(value, band):
            found[spec.name] = band
    return found


def holds_band(value: Tensor, band: int) -> bool:
    """Whether entry (i, j) of `[..., n, n]` is `0 <= i - j < band` everywhere."""
    expected = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).tril()
    return bool((value == expected.triu(1 - band)).all())


def _is_square(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, FakeTensor)
        and value.dtype is torch.bool
        and value.dim() >= 2
        and value.shape[-1] == value.shape[-2] > 1
        and value.numel() == value.shape[-1] ** 2
    )
