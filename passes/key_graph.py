"""The sharing key: the values that the packed region reads from row space, computed before the call.

The packed region is a function of these values, of the columns where it reads them, and of the tree. So two tokens
may share exactly when their keys are equal, entry by entry, for them and for their whole past.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from branchfx.passes.editor import GraphBuilder
from branchfx.passes.ir import CapturedGraph, Data, Position, Row
from branchfx.passes.layout import TokenLayouts
from branchfx.passes.mixing import MixingSites
from branchfx.passes.placement import Placement


@dataclasses.dataclass(frozen=True)
class KeyGraph:
    """How to compute the key of a batch.

    Attributes:
        gm: From the captured inputs to the key values and then the validity masks; run without gradients.
        keys: How many of its outputs are keys.
        shapes: For each output, the dim of rows and the dim of positions.
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


def common_validity(sites: MixingSites) -> tuple[str, ...] | None:
    """Return the validity that every site has, or None when they differ."""
    found = {site.key_valid for site in sites.attention.values()}
    return next(iter(found)) if len(found) == 1 else None


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
        shapes.append((layout.where_is(Row), layout.where_is(Position)))
    # hidden states may hold their column
    absolute = bool(graph.named or placement.positions_at) or any(s.reads_columns for s in sites.attention.values())
    return KeyGraph(build.module(graph.gm), len(keys), tuple(shapes), absolute, valid, drops)


def _derived_from(graph: CapturedGraph, name: str) -> set[str]:
    found = {name} if name else set()
    for node in graph.gm.graph.nodes:
        if any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    return found
