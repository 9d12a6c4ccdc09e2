"""What sharing does to one captured graph, as data and text: node counts, sites, declines, the tree, predicted work."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from branchfx.attention_rule import AttentionRule
from branchfx.diagnostics import Decline, format_decline
from branchfx.passes.pipeline import SharingPlan
from branchfx.runtime.choose import worth_sharing
from branchfx.runtime.work import Work, WorkModel
from branchfx.token_tree import TokenTree


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
    before, after = WorkModel(plan).of(tree, args)
    return BatchReport(
        rows=tree.rows,
        columns=tree.columns,
        tokens=tree.valid_tokens,
        padded_tokens=tree.rows * tree.columns,
        unique_tokens=tree.tokens,
        token_ratio=tree.token_ratio,
        depth=tree.depth,
        segments=len(tree.segments),
        pays=worth_sharing(before, after, tree, args),
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


def _operators(gm: fx.GraphModule) -> dict[str, int]:
    """Return how often each operator or function occurs, by name."""
    calls = (n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module"))
    counts = collections.Counter(n._pretty_print_target(n.target) for n in calls)
    return dict(sorted(counts.items()))


def _change(before: float, after: float) -> str:
    return f"{before:.3g} -> {after:.3g}"


def _indented(texts: Iterable[str], indent: str = "  ") -> list[str]:
    return [indent + line for text in texts for line in text.splitlines()]
