"""Emit a mixing site: views of the packed values as heads, and one `tree_attention` call."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from branchfx.passes.editor import GraphBuilder
from branchfx.passes.ir import BASE, AttentionSite, Layout, Position, Row, Size, Window
from branchfx.passes.layout import TokenLayouts
from branchfx.passes.placement import Placement

_aten = torch.ops.aten
_branchfx = torch.ops.branchfx


class SiteWriter:
    """The part of the writer that emits sites; the rest of the writer provides the values."""

    build: GraphBuilder
    row: dict[str, Any]
    layouts: TokenLayouts
    placement: Placement
    by_name: Mapping[str, fx.Node]
    autocast: list[torch.dtype | None]
    skip_padding: bool

    def tree(self, kind: str, window: Window, held: Window = BASE) -> fx.Node:
        """Return the placeholder of a tree input."""
        raise NotImplementedError

    def value(self, node: Any, window: Window) -> Any:
        """Return the packed value of a node for the tokens of a window."""
        raise NotImplementedError

    def sizes(self, layout: Layout, window: Window, *, infer: bool) -> list[Any]:
        """Return the packed shape of a layout."""
        raise NotImplementedError

    def _single(self, node: Any) -> Layout:
        layout = self.layouts.layout(node)
        assert layout is not None, node
        return layout

    def _attention(self, node: fx.Node, site: AttentionSite, window: Window) -> fx.Node:
        keys, values = self._grouped(self.by_name[site.key]), self._grouped(self.by_name[site.value])
        if (
            keys is None
            or values is None
            or site.transposed_key
            or self._single(keys).heads != self._single(values).heads
        ):
            keys, values = self.by_name[site.key], self.by_name[site.value]
        query = self._heads(self.by_name[site.query], window)
        key = self._heads(keys, BASE, transposed=site.transposed_key)
        value = self._heads(values, BASE)
        if self.autocast[-1] is not None:
            query, key, value = (self._cast(x, self.autocast[-1]) for x in (query, key, value))
        subset = None if window == BASE else self.tree("query", window)
        atoms = [self._per_key(self.by_name[name]) for name in site.atoms]
        out = self.build.call(
            _branchfx.tree_attention.default,
            (
                query,
                key,
                value,
                self.tree("segments", BASE),
                self.tree("column", BASE),
                subset,
                self._key_bias(site),
                None if site.sinks is None else self.row[site.sinks],
                atoms,
                site.scale,
                site.rule.to_json(),
            ),
        )
        first = self.build.call(operator.getitem, (out, 0))
        layout = self._single(node)
        kinds = [type(f) for f in layout.factors]
        assert (kinds[0], *kinds[-2:]) == (Row, Position, Size), layout
        dtype = node.meta["val"].dtype
        shaped = self.build.call(_aten.reshape.default, (first, self.sizes(layout, window, infer=True)))
        return self._cast(shaped, dtype) if self.autocast[-1] is None else shaped

    def _cast(self, x: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        if x.meta["val"] is not None and x.meta["val"].dtype == dtype:
            return x
        return self.build.call(_aten._to_copy.default, (x,), {"dtype": dtype})

    def _grouped(self, node: fx.Node) -> fx.Node | None:
        """Undo `repeat_kv`: the kernel reads each key head for its group of query heads."""
        chain = node
        while chain.target in (
            _aten._unsafe_view.default,
            _aten.view.default,
            _aten.reshape.default,
            _aten.clone.default,
        ):
            chain = chain.args[0]  # type: ignore[assignment]
        if chain is node or chain.target is not _aten.expand.default:
            return None
        source: Any = chain.args[0]
        if source.target is not _aten.unsqueeze.default or source.args[1] != 2:
            return None
        before, after = self.layouts.layout(source.args[0]), self.layouts.layout(node)
        if before is None or after is None or len(before.dims) != 4 or len(after.dims) != 4:
            return None
        same = before.dims[0] == after.dims[0] and before.dims[2:] == after.dims[2:]
        return source.args[0] if same and source.args[0].name in self.placement.packed else None

    def _heads(self, node: fx.Node, window: Window, transposed: bool = False) -> fx.Node:
        """View a packed value as `[1, H, N, D]`."""
        x = self.value(node, window)
        layout = self._single(node)
        if transposed:
            rank = len(layout.dims)
            x = self.build.call(_aten.transpose.int, (x, rank - 2, rank - 1))
            layout = Layout((*layout.dims[:-2], layout.dims[-1], layout.dims[-2]), layout.data)
        if len(layout.dims) == 4 and layout.dims[0] == (Row(),):
            return x
        width = layout.dims[-1][0].value if layout.dims[-1] else 1  # type: ignore[union-attr]
        return self.build.call(_aten.reshape.default, (x, [1, layout.heads, -1, width]))

    def _per_key(self, node: fx.Node) -> fx.Node:
        """View a token value as `[H or 1, N or 1]`."""
        x = self.value(node, BASE)
        layout = self._single(node)
        heads = 1
        for factor in layout.factors:
            heads *= factor.value if isinstance(factor, Size) else 1
        if not layout.positions:
            return self.build.call(_aten.reshape.default, (x, [heads, 1]))
        if layout.where_is(Position) != len(layout.dims) - 1:
            dims = [d for d in range(len(layout.dims)) if d != layout.where_is(Position)]
            x = self.build.call(_aten.permute.default, (x, [*dims, layout.where_is(Position)]))
        return self.build.call(_aten.reshape.default, (x, [heads, -1]))

    def _key_bias(self, site: AttentionSite) -> fx.Node | None:
        bias = None if site.key_bias is None else self._per_key(self.by_name[site.key_bias])
        if self.skip_padding:
            return bias
        for name in site.key_valid:
            valid = self._per_key(self.by_name[name])
            if valid.meta["val"] is None or valid.meta["val"].dtype != torch.bool:
                valid = self.build.call(_aten.ne.Scalar, (valid, 0))
            mask = self.build.call(_aten.new_zeros.default, (valid, [1]), {"dtype": torch.float32})
            low = self.build.call(
                _aten.masked_fill.Scalar, (mask, self.build.call(_aten.logical_not.default, (valid,)), float("-inf"))
            )
            bias = low if bias is None else self.build.call(_aten.add.Tensor, (bias, low))
        return bias
