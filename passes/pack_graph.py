"""Pass 6: the rewrite. The packed region runs on `[1, N, ...]`, sites become tree attention, edges pack and unpack.

Before: embedding(ids) [B, T, C] -> ... -> sdpa -> ... -> linear [B, R, V]
After:  index_select(ids) [1, N] -> embedding -> ... -> tree_attention -> ... -> linear [1, N', V] -> unpack [B, R, V]

Legality: every packed node is the captured operator on packed arguments, with sizes read from its layout (rows are
1, positions N); what is read from row space is one representative of each token. The dense masks are dead then.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from branchfx.passes.demand import demanded_windows, own_window
from branchfx.passes.editor import GraphBuilder
from branchfx.passes.ir import BASE, CapturedGraph, Layout, Position, Row, Size, Slots, Window
from branchfx.passes.layout import TokenLayouts
from branchfx.passes.mixing import MixingSites
from branchfx.passes.pack_sites import SiteWriter
from branchfx.passes.placement import FILLED, Placement
from branchfx.passes.rules.registry import RuleTable

_aten = torch.ops.aten
_branchfx = torch.ops.branchfx

_RESHAPED = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.unflatten.int,
    _aten.flatten.using_ints,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TreeInput:
    """An input that the runtime fills from the token tree.

    Attributes:
        name: Placeholder name.
        kind: `flat` (row * L + column - start of each token), `column`, `token` (index into the base tokens),
            `query` (the same on the CPU), `unpack` ([B, L] index), `segments`.
        window: The columns whose tokens it lists.
        held: For `flat`, the columns `[start, start + L)` that the row-space value holds.
    """

    name: str
    kind: str
    window: Window
    held: Window = BASE


@dataclasses.dataclass(frozen=True)
class PackedGraph:
    """The rewritten graph: the captured inputs, then the tree's inputs.

    Attributes:
        gm: The graph.
        tree_inputs: What to pass after the captured inputs, in order.
        windows: For each packed node, the columns it is computed for (for reports).
    """

    gm: fx.GraphModule
    tree_inputs: tuple[TreeInput, ...]
    windows: Mapping[str, Window]


class PackTokens:
    """Rewrites one graph; the captured graph stays as it is.

    Attributes:
        key_masks: Sites whose padding is kept inside the attention (`padding="exact"`).
    """

    def __init__(self, rules: RuleTable, autocast_dtype: torch.dtype | None, skip_padding: bool) -> None:
        self.rules = rules
        self.autocast_dtype = autocast_dtype
        self.skip_padding = skip_padding

    def run(self, graph: CapturedGraph, layouts: TokenLayouts, sites: MixingSites, placement: Placement) -> PackedGraph:
        """Build the packed graph."""
        windows = demanded_windows(graph, layouts, sites, placement)
        writer = _Writer(graph, layouts, sites, placement, windows, self.rules, self.autocast_dtype, self.skip_padding)
        return writer.write()


class _Writer(SiteWriter):
    def __init__(
        self,
        graph: CapturedGraph,
        layouts: TokenLayouts,
        sites: MixingSites,
        placement: Placement,
        windows: Mapping[str, Window],
        rules: RuleTable,
        autocast_dtype: torch.dtype | None,
        skip_padding: bool,
    ) -> None:
        self.captured, self.layouts, self.sites = graph, layouts, sites
        self.placement, self.windows, self.rules = placement, windows, rules
        self.skip_padding = skip_padding
        self.build = GraphBuilder()
        self.row: dict[str, Any] = {}
        self.packed: dict[tuple[str, Window], fx.Node] = {}
        self.inputs: dict[tuple[str, Window, Window], TreeInput] = {}
        self.autocast: list[torch.dtype | None] = [autocast_dtype]
        self.by_name = {n.name: n for n in graph.gm.graph.nodes}

    # -- the walk ------------------------------------------------------------------------------------------------

    def write(self) -> PackedGraph:
        for node in self.captured.gm.graph.nodes:
            if node.op == "placeholder":
                self.row[node.name] = self.build.copy(node, lambda n: n)
        self.build.mark_inputs()
        for node in self.captured.gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            self.build.origin = node
            if node.name in self.placement.packed:
                self._emit_packed(node)
                if node.name in self.placement.unpack_at:
                    self.row[node.name] = self._unpack(node)
            elif node.name in self.placement.fused_gathers:
                self.row[node.name] = self._gather(node)
            elif node.name in self.placement.live or not self._is_pure(node):
                self._track_autocast(node)
                self.row[node.name] = self.build.copy(node, lambda n: self.row[n.name])
        output = next(n for n in self.captured.gm.graph.nodes if n.op == "output")
        self.build.output(output, lambda n: self.row[n.name])
        used = self.build.finish([i.name for i in self.inputs.values()])
        tree_inputs = tuple(i for i in self.inputs.values() if i.name in used)
        return PackedGraph(self.build.module(self.captured.gm), tree_inputs, self.windows)

    def _is_pure(self, node: fx.Node) -> bool:
        return (
            isinstance(node.target, torch._ops.OpOverload)
            or node.target in (operator.getitem,)
            or "val" not in node.meta
            or node.meta["val"] is not None
        )

    def _track_autocast(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            dtype, enabled = node.args[1], node.args[2] if len(node.args) > 2 else True
            self.autocast.append(dtype if enabled else None)  # type: ignore[arg-type]
        elif name == "_exit_autocast":
            self.autocast.pop()

    # -- inputs of the tree --------------------------------------------------------------------------------------

    def tree(self, kind: str, window: Window, held: Window = BASE) -> fx.Node:
        """Return the placeholder of a tree input."""
        key = (kind, window, held)
        if key not in self.inputs:
            self.inputs[key] = TreeInput(f"tree_{kind}_{len(self.inputs)}", kind, window, held)
        return self.build.placeholder(self.inputs[key].name)

    def tokens(self, window: Window) -> fx.Node:
        """The number of tokens of a window, as a node."""
        return self.build.once(_aten.sym_size.int, (self.tree("column", window), 0))

    def sizes(self, layout: Layout, window: Window, *, infer: bool) -> list[Any]:
        """The packed shape of a layout; with `infer`, the dim that holds positions is -1."""
        out: list[Any] = []
        for dim in layout.dims:
            constant = 1
            positions = False
            for factor in (g for f in dim for g in (f.factors if isinstance(f, Slots) else (f,))):
                if isinstance(factor, Size):
                    constant *= factor.value
                elif isinstance(factor, Position):
                    positions = True
            if not positions:
                out.append(constant)
            elif infer:
                out.append(-1)
            else:
                count = self.tokens(window)
                out.append(count if constant == 1 else self.build.once(operator.mul, (count, constant)))
        return out

    # -- packed nodes --------------------------------------------------------------------------------------------

    def _emit_packed(self, node: fx.Node) -> None:
        window = self.windows[node.name]
        site = self.sites.attention.get(node.name)
        if site is not None:
            result = self._attention(node, site, window)
        elif self._is_window_slice(node):
            result = self.value(node.args[0], window)
        elif node.target in _RESHAPED:
            layout = self._single(node)
            result = self.build.call(
                _aten.reshape.default, (self.value(node.args[0], window), self.sizes(layout, window, infer=True))
            )
        else:
            args, kwargs = self._arguments(node, window)
            result = self.build.call(node.target, args, kwargs)
        self.packed[(node.name, window)] = result

    def _is_window_slice(self, node: fx.Node) -> bool:
        if node.target is not _aten.slice.Tensor:
            return False
        source = self.layouts.layout(node.args[0])  # type: ignore[arg-type]
        return (
            source is not None
            and source.dims != self._single(node).dims
            and source.positions != self._single(node).positions
        )

    def _arguments(self, node: fx.Node, window: Window) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = list(fx.map_arg(node.args, lambda n: self.value(n, window)))
        kwargs = fx.map_arg(dict(node.kwargs), lambda n: self.value(n, window))
        if node.target is _aten.expand.default:
            args[1] = self.sizes(self._single(node), window, infer=False)
        elif node.target in (_aten.arange.default, _aten.arange.start):
            args = [*args[:-1], self.sizes(self._single(node), window, infer=False)[0]]
        elif node.target is _aten.repeat.default:
            source, here = self._single(node.args[0]), self._single(node)  # type: ignore[arg-type]
            lead = len(here.dims) - len(source.dims)
            full = self.sizes(here, window, infer=False)
            args[1] = [
                full[i]
                if i < lead or source.dims[i - lead] == ()
                else 1
                if Row() in here.dims[i] and Row() not in source.dims[i - lead]
                else count
                for i, count in enumerate(node.args[1])  # type: ignore[arg-type]
            ]
        return tuple(args), kwargs  # type: ignore[return-value]

    def value(self, node: Any, window: Window) -> Any:
        """Return the packed value of a node for the tokens of a window."""
        found = self.layouts.of.get(node.name)
        if found is None:
            return self.row[node.name]
        key = (node.name, window)
        if key in self.packed:
            return self.packed[key]
        if node.name in self.placement.packed:
            held = self.windows[node.name]
            assert held == own_window(self.layouts, node.name) == BASE, node
            result = self._cut(self.packed[(node.name, held)], self._single(node), window)
        elif isinstance(found, tuple) or not any(isinstance(f, (Row, Position)) for f in found.factors):
            return self.row[node.name]
        else:
            result = self._pack(node, found, window)
        self.packed[key] = result
        return result

    def _cut(self, x: fx.Node, layout: Layout, window: Window) -> fx.Node:
        """Select the tokens of a window from a packed value that holds all tokens."""
        index = self.tree("token", window)
        plain = [tuple(f for f in dim if not isinstance(f, Row)) for dim in layout.dims]
        dim = next((i for i, d in enumerate(plain) if len(d) == 1 and isinstance(d[0], Position)), -1)
        if dim >= 0:
            return self.build.call(_aten.index_select.default, (x, dim, index))
        factors = [f for d in plain for f in d]
        split = [-1 if isinstance(f, Position) else f.value for f in factors]  # type: ignore[union-attr]
        at = next(i for i, f in enumerate(factors) if isinstance(f, Position))
        x = self.build.call(_aten.reshape.default, (x, split))
        x = self.build.call(_aten.index_select.default, (x, at, index))
        return self.build.call(_aten.reshape.default, (x, self.sizes(layout, window, infer=True)))

    def _pack(self, node: fx.Node, layout: Layout, window: Window) -> fx.Node:
        """Gather one representative of each token from a row-space value."""
        if node.target in FILLED:
            sizes = self.sizes(layout, window, infer=False)
            return self.build.call(node.target, (sizes, *node.args[1:]), dict(node.kwargs))
        x = self.row[node.name]
        own = layout.positions[0].window if layout.positions else BASE
        row, position = layout.where_is(Row), layout.where_is(Position)
        if (layout.has_row and row < 0) or (layout.positions and position < 0):
            x, layout, back = self._unmerged(node, x, layout)
            packed = self._pack_plain(x, layout, window, own)
            return self.build.call(_aten.reshape.default, (packed, self.sizes(back, window, infer=True)))
        return self._pack_plain(x, layout, window, own)

    def _pack_plain(self, x: fx.Node, layout: Layout, window: Window, own: Window) -> fx.Node:
        row, position = layout.where_is(Row), layout.where_is(Position)
        if position < 0:
            return self.build.call(_aten.slice.Tensor, (x, row, 0, 1))
        if row < 0:
            return self.build.call(_aten.index_select.default, (x, position, self._columns(window, own)))
        # [.., B, .., T, ..] -> [B*T, ..] -> [N, ..] -> [.., 1, .., N, ..]
        rank = len(layout.dims)
        order = [row, position, *[d for d in range(rank) if d not in (row, position)]]
        y = x if order == list(range(rank)) else self.build.call(_aten.permute.default, (x, order))
        y = self.build.call(_aten.flatten.using_ints, (y, 0, 1))
        y = self.build.call(_aten.index_select.default, (y, 0, self.tree("flat", window, own)))
        y = self.build.call(_aten.unsqueeze.default, (y, 0))
        if order == list(range(rank)):
            return y
        return self.build.call(_aten.permute.default, (y, [order.index(d) for d in range(rank)]))

    def _columns(self, window: Window, own: Window) -> fx.Node:
        column = self.tree("column", window)
        if own.start is None:
            return column
        return self.build.call(_aten.sub.Tensor, (column, self.build.size_of_expr(own.start, self._leaf)))

    def _leaf(self, symbol: Any) -> fx.Node:
        index, dim = self.captured.bindings[symbol]
        node = self.row[self.captured.inputs[index].name]
        return node if dim < 0 else self.build.once(_aten.sym_size.int, (node, dim))

    def _unmerged(self, node: fx.Node, x: fx.Node, layout: Layout) -> tuple[fx.Node, Layout, Layout]:
        """View merged dims as one dim a factor."""
        dims: list[tuple[Any, ...]] = []
        sizes: list[Any] = []
        for dim in layout.dims:
            for factor in dim or ((),):
                dims.append((factor,) if factor != () else ())
                if isinstance(factor, Size):
                    sizes.append(factor.value)
                elif factor == ():
                    sizes.append(1)
                else:
                    expr = self.captured.rows if isinstance(factor, Row) else self._length(factor)
                    sizes.append(self.build.size_of_expr(expr, self._leaf))
        return self.build.call(_aten.reshape.default, (x, sizes)), Layout(tuple(dims), layout.data), layout

    def _length(self, factor: Position) -> Any:
        w = factor.window
        stop = self.captured.positions if w.stop is None else w.stop
        return stop if w.start is None else (stop - w.start).expand()

    # -- back to rows --------------------------------------------------------------------------------------------

    def _unpack(self, node: fx.Node) -> fx.Node:
        layout = self._single(node)
        window = own_window(self.layouts, node.name)
        x = self.value(node, window)
        row, position = layout.where_is(Row), layout.where_is(Position)
        index = self.tree("unpack", window)
        if row < 0 or position < 0:
            return self._unpack_merged(x, layout, window, index)
        rank = len(layout.dims)
        order = [row, position, *[d for d in range(rank) if d not in (row, position)]]
        if order != list(range(rank)):
            x = self.build.call(_aten.permute.default, (x, order))
        x = self.build.call(_aten.select.int, (x, 0, 0))
        x = self.build.call(_branchfx.unpack.default, (x, index))
        if order == list(range(rank)):
            return x
        return self.build.call(_aten.permute.default, (x, [order.index(d) for d in range(rank)]))

    def _unpack_merged(self, x: fx.Node, layout: Layout, window: Window, index: fx.Node) -> fx.Node:
        factors = [f for f in layout.factors]
        order = [i for i, f in enumerate(factors) if isinstance(f, Row)] + [
            i for i, f in enumerate(factors) if isinstance(f, Position)
        ]
        order += [i for i in range(len(factors)) if i not in order]
        split = self.build.call(
            _aten.reshape.default,
            (x, [1 if isinstance(f, Row) else -1 if isinstance(f, Position) else f.value for f in factors]),  # type: ignore[union-attr]
        )
        split = self.build.call(_aten.permute.default, (split, order))
        split = self.build.call(_aten.select.int, (split, 0, 0))
        rows = self.build.call(_branchfx.unpack.default, (split, index))
        rows = self.build.call(_aten.permute.default, (rows, [order.index(i) for i in range(len(factors))]))
        sizes: list[Any] = []
        for dim in layout.dims:
            size: Any = 1
            for factor in dim:
                if isinstance(factor, Size):
                    part: Any = factor.value
                else:
                    part = self.build.once(_aten.sym_size.int, (index, 0 if isinstance(factor, Row) else 1))
                size = part if size == 1 else self.build.once(operator.mul, (size, part))
            sizes.append(size)
        return self.build.call(_aten.reshape.default, (rows, sizes))

    def _gather(self, node: fx.Node) -> fx.Node:
        """`gather(packed, -1, labels)`: one read a (token, label)."""
        source: Any = node.args[0]
        layout = self._single(source)
        window = own_window(self.layouts, source.name)
        x = self.value(source, window)
        index, label = self.tree("unpack", window), self.row[node.args[2].name]  # type: ignore[union-attr]
        if len(layout.dims) == 2:
            index = self.build.call(_aten.reshape.default, (index, [-1]))
        else:
            x = self.build.call(_aten.select.int, (x, layout.where_is(Row), 0))
        return self.build.call(_branchfx.unpack_gather.default, (x, index, label))
