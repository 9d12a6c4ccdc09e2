"""Pass 7: positions that nobody reads are not computed.

A slice such as `logits_to_keep` reads the columns of a window only. Walking backward over the packed region, a value
that only the window's readers need is computed for the window's tokens, down to the queries of the last attention:
the last layer of the prompt then computes keys and values alone.

Legality: a packed value is computed per token, so leaving tokens out changes no other token; an attention may take
queries that are a subset of its keys.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from branchfx.passes.ir import BASE, CapturedGraph, Layout, Window
from branchfx.passes.layout import TokenLayouts
from branchfx.passes.mixing import MixingSites
from branchfx.passes.placement import Placement

_SLICE = torch.ops.aten.slice.Tensor


def own_window(layouts: TokenLayouts, name: str) -> Window:
    """Return the columns that a value is defined on."""
    found = layouts.of[name]
    layout = found[0] if isinstance(found, tuple) else found
    assert isinstance(layout, Layout)
    positions = layout.positions
    return positions[0].window if positions else BASE


def demanded_windows(
    graph: CapturedGraph, layouts: TokenLayouts, sites: MixingSites, placement: Placement
) -> Mapping[str, Window]:
    """Return, for each packed node, the columns whose tokens it is computed for."""
    out: dict[str, Window] = {}
    needs: dict[str, set[Window]] = {name: set() for name in placement.packed}
    for name in placement.unpack_at:
        needs[name].add(own_window(layouts, name))
    nodes = {n.name: n for n in graph.gm.graph.nodes}
    for name in placement.fused_gathers:
        source = nodes[name].args[0]
        assert isinstance(source, fx.Node)
        needs[source.name].add(own_window(layouts, source.name))
    for node in reversed(graph.gm.graph.nodes):
        if node.name not in placement.packed:
            continue
        own, wanted = own_window(layouts, node.name), needs[node.name]
        window = next(iter(wanted)) if len(wanted) == 1 else own
        out[node.name] = window
        site = sites.attention.get(node.name)
        if site is not None:
            _need(needs, site.query, window)
            for name in (site.key, site.value, *site.atoms, *filter(None, (site.key_bias,))):
                _need(needs, name, BASE)
            continue
        for source in node.all_input_nodes:
            _need(needs, source.name, window)
    for node in graph.gm.graph.nodes:
        # the results of an operator are held where the operator runs; a reader cuts them
        source = node.args[0] if node.target is operator.getitem else None
        if node.name in out and isinstance(source, fx.Node) and source.name in out:
            out[node.name] = out[source.name]
    return out


def _need(needs: dict[str, set[Window]], name: str, window: Window) -> None:
    if name in needs:
        needs[name].add(window)
