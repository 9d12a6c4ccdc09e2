"""Cut a call into rows: where rows and positions are in its outputs, and the inputs of each row alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from branchfx.passes.ir import Data, InputRole, Layout, Position, Row
from branchfx.passes.pipeline import SharingPlan
from branchfx.passes.rules.registry import shape_of
from branchfx.runtime.packed import batch_size, real_sizes
from branchfx.token_tree import TokenTree

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where rows and positions are in an output.

    Attributes:
        dim: The dim of rows; the rows and positions in one dim when `merged`.
        position: The dim of positions; None where there is none or `merged`.
        merged: Whether the dim holds rows times positions.
        kept: [B, L] bool, the positions that are in the tree; None where all entries count.
    """

    dim: int
    position: int | None
    merged: bool
    kept: Tensor | None

    def rows(self, value: Tensor, count: int) -> Tensor:
        """Return a view with rows first, then positions."""
        if self.merged:
            shape = value.shape
            split = value.reshape(*shape[: self.dim], count, -1, *shape[self.dim + 1 :])
            return split.movedim((self.dim, self.dim + 1), (0, 1))
        return value.movedim(self.dim, 0) if self.position is None else value.movedim((self.dim, self.position), (0, 1))


def is_float(value: Any) -> bool:
    """Whether a value is a tensor of floats."""
    return isinstance(value, Tensor) and value.is_floating_point()


def output_tolerances(args: Sequence[Any], shared: Sequence[Any], plan: SharingPlan) -> list[float]:
    """Return the tolerance of each output: that of the coarsest dtype on the way to it."""
    values = [*(n.meta.get("val") for n in plan.captured.gm.graph.nodes), *args]
    device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    is_low = torch.is_autocast_enabled(device) or any(is_float(v) and v.dtype.itemsize <= 2 for v in values)
    is_single = any(is_float(v) and v.dtype is torch.float32 for v in values)
    out = []
    for value in shared:
        least = _TOLERANCE.get(value.dtype, _LOW_PRECISION) if is_float(value) else 0.0
        out.append(max(least, _LOW_PRECISION if is_low else _TOLERANCE[torch.float32] if is_single else 0.0))
    return out


def output_places(
    shared: Sequence[Any], args: Sequence[Any], tree: TokenTree, plan: SharingPlan
) -> list[OutputPlace | None]:
    """Return where the rows and positions of each output are; None where that is not known."""
    output = next(n for n in plan.captured.gm.graph.nodes if n.op == "output")
    layouts = [plan.layouts.layout(n) if isinstance(n, torch.fx.Node) else None for n in output.args[0]]
    return [_place(layout, args, tree, plan) for layout in layouts]


def _place(layout: Layout | None, args: Sequence[Any], tree: TokenTree, plan: SharingPlan) -> OutputPlace | None:
    if layout is None or layout.data is not Data.TOKEN or layout.has_slots or len(layout.positions) > 1:
        return None
    kept: Tensor | None = None
    if layout.positions:
        window, sizes = layout.positions[0].window, real_sizes(plan, args)
        start = 0 if window.start is None else int(window.start.subs(sizes))
        stop = tree.columns if window.stop is None else int(window.stop.subs(sizes))
        kept = tree.unpack_index[:, start:stop] >= 0
    for dim, factors in enumerate(layout.dims):
        if len(factors) == 2 and isinstance(factors[0], Row) and isinstance(factors[1], Position):
            return OutputPlace(dim, None, True, kept)
    row, position = layout.where_is(Row), layout.where_is(Position)
    if row < 0 or (position < 0 and layout.positions):
        return None
    return OutputPlace(row, position if layout.positions else None, False, kept)


def split_rows(plan: SharingPlan, args: Sequence[Any]) -> Iterator[list[Any]] | None:
    """Return the inputs of each row, or None where an input cannot be cut into rows."""
    rows, dims = plan.captured.rows, []
    nodes = [n for n in plan.captured.gm.graph.nodes if n.op == "placeholder"]
    for node, spec, arg in zip(nodes, plan.captured.inputs, args, strict=True):
        value, dim = node.meta["val"], None
        if isinstance(value, torch.SymInt):
            if value.node.expr.has(rows) and value.node.expr != rows:
                return None
            dim = -1 if value.node.expr == rows else None
        elif isinstance(arg, Tensor) and spec.role is not InputRole.PARAMETER:
            sizes = shape_of(value)
            with_rows = [d for d, size in enumerate(sizes) if size.has(rows)]
            if len(with_rows) > 1 or any(sizes[d] != rows for d in with_rows):
                return None
            dim = with_rows[0] if with_rows else None
        dims.append(dim)
    count = batch_size(plan, args)[0]
    return ([_cut(arg, dim, row) for arg, dim in zip(args, dims, strict=True)] for row in range(count))


def _cut(arg: Any, dim: int | None, row: int) -> Any:
    if dim is None:
        return arg
    return arg.narrow(dim, row, 1) if isinstance(arg, Tensor) else 1
