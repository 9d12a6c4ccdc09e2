"""Predicted work of one forward of a plan, unshared and packed, for a batch.

Products and attention are counted as FLOPs (a multiply-add is 2), every value as bytes written once; an attention
costs `2 * heads * (Dk + Dv)` a visible pair. The symbolic costs of `passes/cost.py` are linear in tokens, so they are
summed once a plan, by the columns that they are for; a batch only multiplies.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from branchfx.attention_rule import AttentionRule
from branchfx.passes.cost import TOKENS, CostEstimate, contraction_length, node_cost, value_bytes, width
from branchfx.passes.demand import own_window
from branchfx.passes.ir import BASE, Layout, Window
from branchfx.passes.pipeline import SharingPlan
from branchfx.runtime.packed import real_sizes
from branchfx.token_tree import TokenTree


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Predicted work of one forward.

    Attributes:
        token_flops: FLOPs of products and linear layers.
        attention_flops: FLOPs of the attention sites, visible pairs only.
        bytes_written: Bytes of all values, each written once.
    """

    token_flops: float = 0.0
    attention_flops: float = 0.0
    bytes_written: float = 0.0

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.token_flops + self.attention_flops

    def __add__(self, other: Work) -> Work:
        return Work(
            self.token_flops + other.token_flops,
            self.attention_flops + other.attention_flops,
            self.bytes_written + other.bytes_written,
        )

    def to_dict(self) -> dict[str, float]:
        """Return the numbers, ready for JSON."""
        return {**dataclasses.asdict(self), "flops": self.flops}

    def times(self, count: float) -> Work:
        """Return the work of so many of these."""
        return Work(self.token_flops * count, self.attention_flops * count, self.bytes_written * count)


class WorkModel:
    """Work a token of every part of a plan."""

    def __init__(self, plan: SharingPlan) -> None:
        """Sum the costs of the nodes that run."""
        self.plan = plan
        # work a token in row space, by the columns that the value has
        self.rows: dict[Window, Work] = collections.defaultdict(Work)
        # and in packed space, by the columns that somebody reads
        self.packed: dict[Window, Work] = collections.defaultdict(Work)
        # row-space work of the packed schedule: what is not packed, and the way back to rows
        self.kept: dict[Window, Work] = collections.defaultdict(Work)
        # FLOPs a visible pair
        self.pairs: dict[tuple[AttentionRule, Window, Window], float] = collections.defaultdict(float)
        for node in plan.captured.gm.graph.nodes:
            layout = plan.layouts.layout(node)
            if node.name not in plan.placement.live or node.op != "call_function" or layout is None:
                continue
            own = own_window(plan.layouts, node.name)
            site = plan.sites.attention.get(node.name)
            if site is None and not layout.is_token:
                continue
            work = _a_token(node_cost(node, layout, 0 if site else contraction_length(node)))
            self.rows[own] += work
            if node.name not in plan.placement.packed:
                self.kept[own] += work
                continue
            window = plan.packed.windows[node.name]
            self.packed[window] += work
            if node.name in plan.placement.unpack_at:
                self.kept[own] += _a_token(value_bytes(node, layout))
            if site is not None:
                query = plan.layouts.of[site.query]
                assert isinstance(query, Layout)
                self.pairs[site.rule, own, window] += 2.0 * (width(query) + width(layout))

    def of(self, tree: TokenTree, args: Sequence[Any]) -> tuple[Work, Work]:
        """Return the work of the caller's graph and of the packed schedule."""
        counter = _TokenCounter(self.plan, tree, args)
        before, after = Work(), Work()
        for window, work in self.rows.items():
            before += work.times(counter.rows(window))
        for window, work in self.kept.items():
            after += work.times(counter.rows(window))
        for window, work in self.packed.items():
            after += work.times(counter.packed(window))
        for (rule, own, window), flops in self.pairs.items():
            in_rows, in_tree = counter.pairs(rule, own, window)
            before += Work(attention_flops=flops * in_rows)
            after += Work(attention_flops=flops * in_tree)
        return before, after


def _a_token(cost: CostEstimate) -> Work:
    return Work(float(cost.flops.subs(TOKENS, 1)), 0.0, float(cost.bytes_moved.subs(TOKENS, 1)))


class _TokenCounter:
    """Tokens and visible pairs of one batch, in row space and packed."""

    def __init__(self, plan: SharingPlan, tree: TokenTree, args: Sequence[Any]) -> None:
        self.tree = tree
        self.sizes = real_sizes(plan, args)
        steps = torch.zeros(tree.tokens + 1, dtype=torch.int64)
        steps[:-1] += 1
        steps.index_add_(0, tree.subtree_end, torch.full_like(tree.subtree_end, -1))
        # [N], tokens of the path from the root to each token, itself included
        self.path_length = steps[:-1].cumsum(0)

    def bounds(self, window: Window) -> tuple[int, int]:
        start = 0 if window.start is None else int(window.start.subs(self.sizes))
        return start, self.tree.columns if window.stop is None else int(window.stop.subs(self.sizes))

    def rows(self, window: Window) -> int:
        start, stop = self.bounds(window)
        return self.tree.rows * (stop - start)

    def packed(self, window: Window) -> int:
        return self.tree.tokens if window == BASE else self._tokens(window).numel()

    def pairs(self, rule: AttentionRule, own: Window, window: Window) -> tuple[int, int]:
        """Return the visible (query, key) pairs of the batch's rows, and of the tree."""
        start, stop = self.bounds(own)
        columns = torch.arange(start, stop)
        in_rows = self.tree.rows * int(_seen(rule, columns + 1, columns).sum())
        tokens = self._tokens(window)
        packed = _seen(rule, self.path_length[tokens], self.tree.column_of_token[tokens])
        return in_rows, int(packed.sum())

    def _tokens(self, window: Window) -> Tensor:
        return self.tree.subset(*self.bounds(window)).token_index


def _seen(rule: AttentionRule, past: Tensor, column: Tensor) -> Tensor:
    """Return how many of `past` keys, itself included, each query sees under the window and the chunk."""
    if rule.window is not None:
        past = past.clamp(max=rule.window)
    return past if rule.chunk is None else torch.minimum(past, column % rule.chunk + 1)
