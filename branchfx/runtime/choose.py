"""Whether sharing pays for a batch: predicted work over measured rates, the tree's own cost included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from branchfx.runtime.machine import MachineRates, machine_rates
from branchfx.runtime.work import Work
from branchfx.token_tree import TokenTree

_BACKWARD = 2.0
"""Work of a backward in forwards."""

_LEAST_RATIO = 1.02
"""Positions a unique token below which nothing is expected: gathers and the general attention cost a few percent."""


def worth_sharing(before: Work, after: Work, tree: TokenTree, args: Sequence[Any]) -> bool:
    """Whether the packed schedule is expected to be faster than the caller's graph."""
    positions = tree.rows * tree.columns
    if positions < _LEAST_RATIO * tree.tokens:
        return False
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
    rates = machine_rates(device)
    passes = 1.0 + (_BACKWARD if torch.is_grad_enabled() else 0.0)
    saved = passes * (_seconds(before, rates) - _seconds(after, rates))
    return saved > rates.tree_seconds + rates.tree_seconds_per_position * positions


def _seconds(work: Work, rates: MachineRates) -> float:
    return work.flops / rates.flops_per_second + work.bytes_written / rates.bytes_per_second
