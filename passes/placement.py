"""Pass 5: which nodes run packed, and where values change space: a minimum cut.

Every token value that an operator can also compute on `[1, N, ...]` may be placed in packed space. The cost of a
node is its FLOPs and bytes at B*T or at N tokens, the cost of an edge that changes space the bytes of the pack or
the unpack. Attention sites are packed, graph outputs and everything opaque are rows. Solved with networkx.

Legality: the packed region is a function of what is packed into it and of nothing else; so two tokens may share
when those values agree for them and for their whole past. Only values made of the caller's inputs alone may be
packed, because they are compared, entry by entry, before each call.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import networkx as nx
import torch
from torch import fx

from branchfx.passes.cost import Machine, contraction_length, node_cost, value_bytes
from branchfx.passes.ir import CapturedGraph, Data, InputRole, Layout, Size
from branchfx.passes.layout import TokenLayouts
from branchfx.passes.mixing import MixingSites
from branchfx.passes.rules.registry import RuleTable

_aten = torch.ops.aten

FILLED = (_aten.zeros.default, _aten.ones.default, _aten.full.default)
"""Constants of a size: the packed region makes its own."""

_NEVER = float("inf")
"""Capacity of an edge that no cut may take."""

_SHARING_GUESS = 3.0
"""Tokens of the batch over unique tokens that the cut assumes; every value above 1 gives nearly the same cut."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where values live.

    Attributes:
        packed: Names of the nodes that run packed.
        pack_at: Token values computed in row space that the packed region reads (the sharing key), in graph order.
        unpack_at: Packed values that row space or an output reads, in graph order.
        positions_at: Values by column that the packed region reads.
        fused_gathers: Row-space gathers over the last dim of a packed value: read by two indices, never unpacked.
        escapes: Whether a packed value is read in row space by something other than an output.
        live: Names of all nodes that an output needs.
    """

    packed: frozenset[str]
    pack_at: tuple[str, ...]
    unpack_at: tuple[str, ...]
    positions_at: tuple[str, ...]
    fused_gathers: frozenset[str]
    escapes: bool
    live: frozenset[str]


def site_inputs(sites: MixingSites, name: str) -> tuple[str, ...]:
    """Return the names of the nodes that a site reads."""
    site = sites.attention[name]
    optional = [n for n in (site.key_bias, site.sinks) if n is not None]
    return (site.query, site.key, site.value, *optional, *site.atoms, *site.key_valid)


def live_nodes(graph: CapturedGraph, sites: MixingSites) -> frozenset[str]:
    """Return the nodes that outputs need once every site is replaced."""
    nodes = {n.name: n for n in graph.gm.graph.nodes}
    todo = [n.name for n in graph.gm.graph.nodes if n.op == "output"]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo.extend(
            site_inputs(sites, name) if name in sites.attention else [i.name for i in nodes[name].all_input_nodes]
        )
    return frozenset(seen)


class PlacementAnalysis:
    """Solves the placement of one graph."""

    def __init__(self, rules: RuleTable, machine: Machine | None = None) -> None:
        self.rules = rules
        self.machine = machine or Machine()

    def run(self, graph: CapturedGraph, layouts: TokenLayouts, sites: MixingSites) -> Placement:
        """Place every live node."""
        live = live_nodes(graph, sites)
        order = [n for n in graph.gm.graph.nodes if n.name in live]
        free = {n.name for n in order if self.can_pack(n, layouts, sites)}
        from_inputs = _made_of_inputs(graph)
        network = nx.DiGraph()
        for node in order:
            if node.name in free:
                self._node(network, node, layouts, sites)
        for node in order:
            self._edges(network, node, layouts, sites, free, from_inputs, live)
        packed: frozenset[str] = frozenset()
        if network.has_node("packed") and network.has_node("rows"):
            try:
                _, (packed_side, _) = nx.minimum_cut(network, "packed", "rows")
                packed = frozenset(n for n in packed_side if n in free)
            except nx.NetworkXUnbounded:
                # a site reads something that cannot be packed: nothing is, and the pipeline says why
                packed = frozenset()
        return self._result(order, layouts, sites, packed, live)

    def can_pack(self, node: fx.Node, layouts: TokenLayouts, sites: MixingSites) -> bool:
        """Whether a node's value is a token value that the same operator computes on packed arguments."""
        if node.name in sites.attention:
            return True
        if node.op != "call_function":
            return False
        found = layouts.of.get(node.name)
        if found is None or not all(_runs_packed(x) for x in (found if isinstance(found, tuple) else (found,))):
            return False
        if node.target is operator.getitem:
            return True
        rule = self.rules.get(node.target)
        if rule is None or not (rule.packable or (isinstance(found, Layout) and _is_routed(found))):
            return False
        if node.target is _aten.index.Tensor:
            source = layouts.layout(node.args[0])  # type: ignore[arg-type]
            if any(index is not None and _is_routed(layouts.layout(index)) for index in node.args[1]):  # type: ignore[union-attr]
                return True
            looked_up = (
                [d for d, index in zip(source.dims, node.args[1], strict=False) if index is not None] if source else []
            )
            return all(isinstance(f, Size) for d in looked_up for f in d)
        return True

    def _node(self, network: Any, node: fx.Node, layouts: TokenLayouts, sites: MixingSites) -> None:
        layout = layouts.of[node.name]
        if node.name in sites.attention:
            network.add_edge("packed", node.name, capacity=_NEVER)
            return
        if isinstance(layout, tuple):
            network.add_edge("packed", node.name, capacity=1e-12)
            return
        cost = node_cost(node, layout, contraction_length(node))
        network.add_edge("packed", node.name, capacity=self.machine.seconds(cost, _SHARING_GUESS))
        network.add_edge(node.name, "rows", capacity=self.machine.seconds(cost, 1.0))

    def _edges(
        self,
        network: Any,
        node: fx.Node,
        layouts: TokenLayouts,
        sites: MixingSites,
        free: set[str],
        from_inputs: frozenset[str],
        live: frozenset[str],
    ) -> None:
        layout = layouts.of.get(node.name)
        if layout is None:
            return
        readers = [u for u in node.users if u.name in live]
        readers += [n for n in _site_readers(sites, node) if n not in readers]
        for user in readers:
            if user.name in sites.attention and node.name not in site_inputs(sites, user.name):
                continue  # an internal value of the site
            if node.name in free:
                if user.name not in free:
                    network.add_edge(node.name, "rows", **self._more(network, node, self._unpack(node, user, layout)))
                    continue
                network.add_edge(node.name, user.name, capacity=self._unpack(node, user, layout))
                if isinstance(layout, Layout) and node.name in from_inputs:
                    network.add_edge(
                        user.name, node.name, capacity=self.machine.seconds(value_bytes(node, layout), 1.0)
                    )
                else:
                    network.add_edge(user.name, node.name, capacity=_NEVER)
            elif user.name in free and not _packs_freely(layout, node.name in from_inputs):
                network.add_edge(user.name, "rows", capacity=_NEVER)

    def _unpack(self, node: fx.Node, user: fx.Node, layout: Any) -> float:
        if isinstance(layout, tuple) or _is_routed(layout):
            return _NEVER
        if user.target is _aten.gather.default and user.args[0] is node:
            own = user.meta["val"]
            return float(own.dtype.itemsize * 2) / self.machine.bytes_per_second
        return self.machine.seconds(value_bytes(node, layout), _SHARING_GUESS)

    def _more(self, network: Any, node: fx.Node, seconds: float) -> dict[str, float]:
        """Add to the capacity of the edge to row space that the node's own cost made."""
        old = network.get_edge_data(node.name, "rows", default={"capacity": 0.0})
        return {"capacity": seconds + old["capacity"]}

    def _result(
        self,
        order: list[fx.Node],
        layouts: TokenLayouts,
        sites: MixingSites,
        packed: frozenset[str],
        live: frozenset[str],
    ) -> Placement:
        pack_at, unpack_at, positions_at = [], [], []
        gathers: set[str] = set()
        escapes = False
        for node in order:
            layout = layouts.of.get(node.name)
            readers = [u for u in node.users if u.name in live and not _is_internal(u, node, sites)]
            readers += [r for r in _site_readers(sites, node) if r not in readers]
            if node.name in packed:
                outside = [u for u in readers if u.name not in packed]
                fused = [u for u in outside if _fuses(u, node, layouts)]
                gathers.update(u.name for u in fused)
                rest = [u for u in outside if u not in fused]
                if rest:
                    unpack_at.append(node.name)
                escapes = escapes or bool(fused) or any(u.op != "output" for u in rest)
            elif isinstance(layout, Layout) and any(u.name in packed for u in readers):
                if layout.data is Data.TOKEN:
                    pack_at.append(node.name)
                elif layout.positions and node.target not in FILLED:
                    positions_at.append(node.name)
        return Placement(
            packed, tuple(pack_at), tuple(unpack_at), tuple(positions_at), frozenset(gathers), escapes, live
        )


def _fuses(user: fx.Node, node: fx.Node, layouts: TokenLayouts) -> bool:
    """Whether a row-space gather can read a packed `[.., V]` value by (token, label)."""
    if user.target is not _aten.gather.default or user.args[0] is not node or user.args[2] is node:
        return False
    layout = layouts.layout(node)
    rank = node.meta["val"].dim()
    if layout is None or int(user.args[1]) % rank != rank - 1:  # type: ignore[arg-type]
        return False
    return (len(layout.dims) == 3 and [len(d) for d in layout.dims[:2]] == [1, 1]) or len(layout.dims) == 2


def _is_internal(user: fx.Node, node: fx.Node, sites: MixingSites) -> bool:
    return user.name in sites.attention and node.name not in site_inputs(sites, user.name)


def _site_readers(sites: MixingSites, node: fx.Node) -> list[fx.Node]:
    nodes: Mapping[str, fx.Node] = {n.name: n for n in node.graph.nodes} if _names_of(sites, node) else {}
    return [nodes[s] for s in _names_of(sites, node)]


def _names_of(sites: MixingSites, node: fx.Node) -> list[str]:
    return [name for name in sites.attention if node.name in site_inputs(sites, name)]


def _is_routed(layout: Layout | None) -> bool:
    """Whether a value is in the order of expert slots, or indexes it: it has no meaning in the other space."""
    return layout is not None and (layout.index is not None or layout.has_slots)


def _runs_packed(layout: Layout) -> bool:
    return layout.is_token or _is_routed(layout)


def _packs_freely(layout: Any, from_inputs: bool) -> bool:
    """Whether a row-space value may be read in packed space."""
    if isinstance(layout, tuple):
        return False
    if layout.data is Data.NONE:
        return len(layout.positions) <= 1
    return layout.is_token and from_inputs


def _made_of_inputs(graph: CapturedGraph) -> frozenset[str]:
    """Names of nodes that no parameter reaches: they can be computed before the call and compared exactly."""
    specs = {s.name: s for s in graph.inputs}
    out: set[str] = set()
    for node in graph.gm.graph.nodes:
        if node.op == "placeholder":
            if specs[node.name].role is not InputRole.PARAMETER:
                out.add(node.name)
        elif node.op == "call_function" and all(n.name in out for n in node.all_input_nodes):
            out.add(node.name)
    return frozenset(out)
