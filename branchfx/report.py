"""What sharing does to one captured graph, as data and text: node counts, sites, declines, the tree, predicted work.

Work is that of one forward, predicted with `passes/cost.py`. Products and attention are counted as FLOPs (a
multiply-add is 2), every value as bytes written once; an attention costs `2 * heads * (Dk + Dv)` a visible pair.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from branchfx.attention_rule import AttentionRule
from branchfx.diagnostics import Decline, format_decline
from branchfx.passes.cost import TOKENS, CostEstimate, contraction_length, node_cost, width
from branchfx.passes.demand import own_window
from branchfx.passes.ir import BASE, AttentionSite, Layout, Window
from branchfx.passes.pipeline import SharingPlan
from branchfx.runtime.choose import worth_sharing
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


@dataclasses.dataclass(frozen=True, slots=True)
class SiteReport:
    """One attention site.

    Attributes:
        node: The node that it replaces.
        rule: Visibility and score besides causality, as text.
        scale: Factor of the dot product.
        key_valid: Nodes of the padding masks it reads.
    """

    node: str
    rule: str
    scale: float
    key_valid: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchReport:
    """What one call's batch shares.

    Attributes:
        rows: B.
        columns: T.
        tokens: Positions in the tree.
        padded_tokens: B * T.
        unique_tokens: N.
        token_ratio: `tokens / unique_tokens`.
        depth: Segments on the longest path.
        segments: Number of segments.
        pays: Whether `share="auto"` runs this batch packed.
        before: Work of the caller's graph.
        after: Work of the packed graph.
        drawing: The tree as text.
    """

    rows: int
    columns: int
    tokens: int
    padded_tokens: int
    unique_tokens: int
    token_ratio: float
    depth: int
    segments: int
    pays: bool
    before: Work
    after: Work
    drawing: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and what is saved, ready for JSON."""
        saved = {
            "flops_saved": self.before.flops - self.after.flops,
            "bytes_saved": self.before.bytes_written - self.after.bytes_written,
        }
        return {**dataclasses.asdict(self), "before": self.before.to_dict(), "after": self.after.to_dict()} | saved

    def to_text(self) -> str:
        """Return a few lines, then the tree."""
        before, after = self.before, self.after
        unpaid = "" if self.pays else ' (too little for share="auto": runs unshared)'
        lines = [
            f"{self.rows} rows, {self.tokens} tokens ({self.padded_tokens} padded), {self.unique_tokens} unique, "
            f"token ratio {self.token_ratio:.2f}{unpaid}",
            f"predicted forward: {_change(before.flops, after.flops)} FLOPs "
            f"(token-local {_change(before.token_flops, after.token_flops)}, "
            f"attention {_change(before.attention_flops, after.attention_flops)}), "
            f"{_change(before.bytes_written, after.bytes_written)} bytes written",
            *self.drawing.splitlines(),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphReport:
    """One captured graph.

    Attributes:
        shared: Whether a packed graph was made.
        captured_nodes: Nodes of Dynamo's graph.
        ops_before: Operators of the graph in ATen, by name with their count; of Dynamo's graph where it is declined.
        ops_after: The same for the packed graph; empty where it is declined.
        packed_nodes: Nodes that run on unique tokens.
        sites: The attention sites.
        declines: Why the graph is not shared.
        notes: Refusals that keep a part of a shared graph in row space.
        batch: What the call's batch shares; None where the graph is declined or did not run.
        not_built: Why there is no `batch` for a graph that is shared and ran.
    """

    shared: bool
    captured_nodes: int
    ops_before: dict[str, int]
    ops_after: dict[str, int]
    packed_nodes: int
    sites: tuple[SiteReport, ...]
    declines: tuple[Decline, ...]
    notes: tuple[Decline, ...]
    batch: BatchReport | None = None
    not_built: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "sites": [{**dataclasses.asdict(s), "key_valid": list(s.key_valid)} for s in self.sites],
            "declines": [d.to_dict() for d in self.declines],
            "notes": [d.to_dict() for d in self.notes],
            "batch": None if self.batch is None else self.batch.to_dict(),
        }

    def to_text(self) -> str:
        """Return the report as lines that can be read."""
        if not self.shared:
            lines = [f"declined, {self.captured_nodes} nodes: runs as the caller wrote it"]
            return "\n".join([*lines, *_indented(format_decline(d) for d in self.declines)])
        lines = [
            f"shared, {self.captured_nodes} nodes: {sum(self.ops_before.values())} operators before, "
            f"{sum(self.ops_after.values())} after, {self.packed_nodes} of them on unique tokens",
        ]
        for site in self.sites:
            masks = f", padding read from {', '.join(site.key_valid)}" if site.key_valid else ""
            lines.append(f"  attention {site.node}: {site.rule}{masks}")
        if self.notes:
            lines += ["  in row space:", *_indented((format_decline(d) for d in self.notes), "    ")]
        if self.batch is not None:
            lines += _indented([self.batch.to_text()])
        elif self.not_built:
            lines.append(f"  no tree: {self.not_built}")
        return "\n".join(lines)


def report_graph(gm: fx.GraphModule, plan: SharingPlan | tuple[Decline, ...]) -> GraphReport:
    """Return what the pipeline made of a graph, without a batch."""
    nodes = len(gm.graph.nodes)
    if not isinstance(plan, SharingPlan):
        return GraphReport(False, nodes, _operators(gm), {}, 0, (), plan, ())
    sites = tuple(SiteReport(s.node, rule_text(s.rule), s.scale, s.key_valid) for s in plan.sites.attention.values())
    return GraphReport(
        True,
        nodes,
        _operators(plan.captured.gm),
        _operators(plan.packed.gm),
        len(plan.placement.packed),
        sites,
        (),
        plan.notes,
    )


def report_batch(plan: SharingPlan, tree: TokenTree, args: Sequence[Any]) -> BatchReport:
    """Return what a batch shares, and the work before and after."""
    before, after = predicted_work(plan, tree, args)
    return BatchReport(
        rows=tree.rows,
        columns=tree.columns,
        tokens=tree.valid_tokens,
        padded_tokens=tree.rows * tree.columns,
        unique_tokens=tree.tokens,
        token_ratio=tree.token_ratio,
        depth=tree.depth,
        segments=len(tree.segments),
        pays=worth_sharing(plan, tree),
        before=before,
        after=after,
        drawing=tree.to_text(),
    )


def rule_text(rule: AttentionRule) -> str:
    """Return an attention rule in words and expressions."""
    parts = ["causal"]
    if rule.window is not None:
        parts.append(f"window {rule.window}")
    if rule.chunk is not None:
        parts.append(f"chunks of {rule.chunk}")
    if rule.softcap is not None:
        parts.append(f"softcap {rule.softcap:g}")
    if rule.predicate is not None:
        parts.append(f"visible where {rule.predicate}")
    if rule.bias is not None:
        parts.append(f"bias {rule.bias}")
    return ", ".join(parts)


def predicted_work(plan: SharingPlan, tree: TokenTree, args: Sequence[Any]) -> tuple[Work, Work]:
    """Return the work of one forward of the caller's graph and of the packed one."""
    counter = _TokenCounter(plan, tree, args)
    before, after = Work(), Work()
    for node in plan.captured.gm.graph.nodes:
        if node.name not in plan.placement.live or node.op != "call_function":
            continue
        layout = plan.layouts.layout(node)
        if layout is None:
            continue
        if node.name in plan.sites.attention:
            site = plan.sites.attention[node.name]
            each = 2.0 * (width(_layout_of(plan, site.query)) + width(layout))
            row_pairs, packed_pairs = counter.pairs(site, own_window(plan.layouts, node.name))
            moved = node_cost(node, layout, 0)
            before += Work(0.0, each * row_pairs, _bytes(moved, counter.rows(own_window(plan.layouts, node.name))))
            after += Work(0.0, each * packed_pairs, _bytes(moved, counter.packed(plan.packed.windows[node.name])))
        elif layout.is_token:
            cost = node_cost(node, layout, contraction_length(node))
            own = own_window(plan.layouts, node.name)
            here = _work(cost, counter.rows(own))
            before += here
            is_packed = node.name in plan.placement.packed
            after += _work(cost, counter.packed(plan.packed.windows[node.name])) if is_packed else here
    return before, after


class _TokenCounter:
    """Tokens and visible pairs of one batch, in row space and packed."""

    def __init__(self, plan: SharingPlan, tree: TokenTree, args: Sequence[Any]) -> None:
        self.plan, self.tree = plan, tree
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

    def pairs(self, site: AttentionSite, own: Window) -> tuple[int, int]:
        """Return the visible (query, key) pairs of the batch's rows, and of the tree."""
        start, stop = self.bounds(own)
        columns = torch.arange(start, stop)
        in_rows = self.tree.rows * int(_seen(site.rule, columns + 1, columns).sum())
        window = self.plan.packed.windows[site.node]
        tokens = self._tokens(window)
        packed = _seen(site.rule, self.path_length[tokens], self.tree.column_of_token[tokens])
        return in_rows, int(packed.sum())

    def _tokens(self, window: Window) -> Tensor:
        return self.tree.subset(*self.bounds(window)).token_index


def _seen(rule: AttentionRule, past: Tensor, column: Tensor) -> Tensor:
    """Return how many of `past` keys, itself included, each query sees under the window and the chunk."""
    if rule.window is not None:
        past = past.clamp(max=rule.window)
    return past if rule.chunk is None else torch.minimum(past, column % rule.chunk + 1)


def _layout_of(plan: SharingPlan, name: str) -> Layout:
    layout = plan.layouts.of[name]
    assert isinstance(layout, Layout)
    return layout


def _work(cost: CostEstimate, tokens: int) -> Work:
    return Work(float(cost.flops.subs(TOKENS, tokens)), 0.0, _bytes(cost, tokens))


def _bytes(cost: CostEstimate, tokens: int) -> float:
    return float(cost.bytes_moved.subs(TOKENS, tokens))


def _operators(gm: fx.GraphModule) -> dict[str, int]:
    """Return how often each operator or function occurs, by name."""
    calls = (n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module"))
    counts = collections.Counter(n._pretty_print_target(n.target) for n in calls)
    return dict(sorted(counts.items()))


def _change(before: float, after: float) -> str:
    return f"{before:.3g} -> {after:.3g}"


def _indented(texts: Iterable[str], indent: str = "  ") -> list[str]:
    return [indent + line for text in texts for line in text.splitlines()]
