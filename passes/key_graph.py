"""The sharing key: the values that the packed region reads from row space, computed before the call.

The packed region is a function of these values, of the columns where it reads them, and of the tree. So two tokens
may share exactly when their keys are equal, entry by entry, for them and for their whole past.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from branchfx.passes.editor import GraphBuilder
from branchfx.passes.ir import CapturedGraph, Data, InputRole, Layout, Position, Row
from branchfx.passes.layout import TokenLayouts
from branchfx.passes.mixing import MixingSites
from branchfx.passes.placement import Placement

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class KeyGraph:
    """How to compute the key of a batch.

    Attributes:
        gm: From the captured inputs to the key values and then the validity masks; run without gradients.
        keys: How many of its outputs are keys.
        shapes: For each output, the dim of rows and the dim of positions; equal where one dim is their product.
        absolute_columns: Whether equal tokens must stand in equal columns.
        valid: Names of the nodes that say which tokens are real.
        drops: Whether tokens that are not real are left out of the tree.
    """

    gm: fx.GraphModule
    keys: int
    shapes: tuple[tuple[int, int], ...]
    absolute_columns: bool
    valid: tuple[str, ...]
    drops: bool


def common_validity(graph: CapturedGraph, layouts: TokenLayouts, sites: MixingSites) -> tuple[str, ...] | None:
    """Return the padding mask that every site has, or None when they differ or it is no padding.

    A key that is hidden may still be a query. It is padding only where an input that is not the ids holds zero.
    """
    found = {site.key_valid for site in sites.attention.values()}
    if len(found) != 1:
        return None
    (masks,) = found
    inputs = {s.name for s in graph.inputs if s.role is InputRole.TOKEN and s.name not in (graph.tokens, graph.named)}
    nodes = {n.name: n for n in graph.gm.graph.nodes}
    todo, seen = [nodes[name] for name in masks], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor) and node.name not in inputs:
            return None
        layout = layouts.layout(node)
        if node.op == "call_function" and layout is not None and layout.data is Data.TOKEN and not _keeps_zero(node):
            return None
        todo.extend(node.all_input_nodes)
    return masks


_MOVES = (
    *(_aten._to_copy.default, _aten.to.dtype, _aten.clone.default, _aten.alias.default, _aten.detach.default),
    *(_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default),
    *(_aten.slice.Tensor, _aten.index.Tensor, _aten.contiguous.default),
)


def _keeps_zero(node: fx.Node) -> bool:
    """Whether a value is zero (or false) where its argument is, and only there."""
    return node.target in _MOVES or (node.target is _aten.ne.Scalar and node.args[1] == 0)


def build_key_graph(
    graph: CapturedGraph, layouts: TokenLayouts, sites: MixingSites, placement: Placement, drops: bool
) -> KeyGraph:
    """Extract the computation of the key.

    Args:
        graph: The captured graph.
        layouts: Its layouts.
        sites: Its attention sites.
        placement: Where values live.
        drops: Whether tokens that are not real are left out; every site then has the same validity.
    """
    valid = tuple(dict.fromkeys(n for site in sites.attention.values() for n in site.key_valid))
    masks = {n for site in sites.attention.values() for n in site.key_valid}
    # of hidden states the caller says what is equal
    known = _derived_from(graph, graph.named)
    keys = tuple(name for name in placement.pack_at if not (drops and name in masks) and name not in known)
    nodes = {n.name: n for n in graph.gm.graph.nodes}
    wanted = [nodes[name] for name in (*keys, *valid)]
    needed: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(node.all_input_nodes)
    build = GraphBuilder()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = build.copy(node, lambda n: copies[n])
    build.graph.output(tuple(copies[n] for n in wanted))
    shapes = []
    for node in wanted:
        layout = layouts.layout(node)
        assert layout is not None
        assert layout.data is Data.TOKEN
        shapes.append(_row_and_position(layout))
    # hidden states may hold their column
    absolute = bool(graph.named or placement.positions_at) or any(s.reads_columns for s in sites.attention.values())
    return KeyGraph(build.module(graph.gm), len(keys), tuple(shapes), absolute, valid, drops)


def _row_and_position(layout: Layout) -> tuple[int, int]:
    row, position = layout.where_is(Row), layout.where_is(Position)
    if row >= 0 and position >= 0:
        return row, position
    for dim, factors in enumerate(layout.dims):
        if [type(f) for f in factors] == [Row, Position]:
            return dim, dim
    raise NotImplementedError(f"a key of layout {layout}")


def _derived_from(graph: CapturedGraph, name: str) -> set[str]:
    found = {name} if name else set()
    for node in graph.gm.graph.nodes:
        if any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    return found
