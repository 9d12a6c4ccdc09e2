"""Compare a shared call's outputs with those of the unshared graph; gradients are not compared.

The unshared graph runs without gradients. Where its outputs belong to rows it runs on one row at a time, so that no
second batch of outputs is held. A graph that was captured for one batch size may refuse a row, or give a row other
values; then the whole batch decides.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from branchfx.diagnostics import Code
from branchfx.passes.ir import Data, InputRole, Layout, Position, Row
from branchfx.passes.pipeline import SharingPlan
from branchfx.passes.rules.registry import shape_of
from branchfx.runtime.packed import batch_size, real_sizes
from branchfx.token_tree import TokenTree

logger = logging.getLogger("branchfx.verify")

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2
_NEGLIGIBLE = 1e-3
"""Root mean square below which an output is measured as if it had this: a loss that cancels to zero is no mismatch."""

_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
_Rows = list[tuple[float, float, int]]


def check_outputs(
    original: Callable[..., Any],
    args: Sequence[Any],
    shared: Sequence[Any],
    tree: TokenTree | None = None,
    *,
    plan: SharingPlan | None = None,
    skips_padding: bool = False,
) -> str | None:
    """Run the unshared graph without gradients and compare floating-point outputs where the tree has tokens.

    An output is compared row by row: the relative L2 distance of a row, with a row's norm taken to be at least the
    mean one, must be within 1e-3, or 5e-2 where a dtype of 16 bits takes part.

    Args:
        original: The captured graph.
        args: Its inputs.
        shared: What the packed graph returned.
        tree: The call's tree.
        plan: What says which dims of inputs and outputs are rows and positions. Without it or the tree the whole
            batch is compared.
        skips_padding: Without a plan or a tree: whether positions that are zero in `shared` are padding.

    Returns:
        What differs, with the distance, or None.
    """
    if plan is not None and any(note.code == Code.RANDOM_OP for note in plan.notes):
        logger.info("outputs are not compared: the graph draws random numbers in row space")
        return None
    devices = sorted({a.device.index for a in args if isinstance(a, Tensor) and a.device.type == "cuda"})
    # the caller's random numbers are not used up by the second run
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        comparison = _Comparison(shared, _places(shared, args, tree, plan), _tolerances(args, shared, plan))
        pieces = None if plan is None or not comparison.is_by_row else _split(plan, args)
        if pieces is not None and _agrees_by_row(comparison, original, pieces):
            return None
        if skips_padding and (tree is None or plan is None):
            comparison.skip_zeros()
        return comparison.whole(original(*args))


def _agrees_by_row(comparison: _Comparison, original: Callable[..., Any], pieces: Iterator[list[Any]]) -> bool:
    try:
        return comparison.by_row(original(*piece) for piece in pieces) is None
    except _REFUSALS as error:
        logger.info("the unshared graph does not take one row: %s", str(error).partition("\n")[0])
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
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


class _Comparison:
    """The shared outputs and how each is compared."""

    def __init__(self, shared: Sequence[Any], places: Sequence[_Place | None], limits: Sequence[float]) -> None:
        self.shared, self.places, self.limits = shared, places, limits
        self.skips_zeros = False

    @property
    def is_by_row(self) -> bool:
        """Whether every compared output has a dim of rows."""
        return all(p is not None for p, o in zip(self.places, self.shared, strict=True) if _is_float(o))

    def skip_zeros(self) -> None:
        """Take positions whose outputs are all zero for padding."""
        self.skips_zeros = True

    def by_row(self, expected: Iterator[Sequence[Any]]) -> str | None:
        """Compare with the outputs of one-row runs."""
        found: dict[int, _Rows] = {}
        for row, outputs in enumerate(expected):
            for number, (ours, theirs) in enumerate(zip(self.shared, outputs, strict=True)):
                place = self.places[number]
                if _is_float(ours) and place is not None:
                    count = ours.shape[place.dim] if place.kept is None else place.kept.shape[0]
                    kept = None if place.kept is None else place.kept[row]
                    problem, measured = _measure(place.rows(ours, count)[row], place.rows(theirs, 1)[0], kept)
                    if problem is not None:
                        return f"output {number} {problem} in row {row}"
                    found.setdefault(number, []).append(measured)
        return self._verdict(found)

    def whole(self, expected: Sequence[Any]) -> str | None:
        """Compare with the outputs of one run."""
        found: dict[int, _Rows] = {}
        for number, (ours, theirs) in enumerate(zip(self.shared, expected, strict=True)):
            if not _is_float(ours):
                continue
            if ours.shape != theirs.shape:
                return f"output {number} has shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
            for row, (a, b, kept) in enumerate(self._row_pairs(self.places[number], ours, theirs)):
                problem, measured = _measure(a, b, kept)
                if problem is not None:
                    return f"output {number} {problem} in row {row}"
                found.setdefault(number, []).append(measured)
        return self._verdict(found)

    def _row_pairs(
        self, place: _Place | None, ours: Tensor, theirs: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        if place is None:
            kept = (ours != 0).flatten(2).any(-1) if self.skips_zeros and ours.dim() >= 3 else None
            yield ours, theirs, kept
            return
        count = ours.shape[place.dim] if place.kept is None else place.kept.shape[0]
        for row, (a, b) in enumerate(zip(place.rows(ours, count), place.rows(theirs, count), strict=True)):
            yield a, b, None if place.kept is None else place.kept[row]

    def _verdict(self, found: dict[int, _Rows]) -> str | None:
        for number, rows in found.items():
            mean = math.sqrt(sum(reference for _, reference, _ in rows) / len(rows))
            for row, (difference, reference, entries) in enumerate(rows):
                least = max(mean, _NEGLIGIBLE * math.sqrt(entries), 1e-30)
                distance = math.sqrt(difference) / max(math.sqrt(reference), least)
                if distance > self.limits[number]:
                    limit = self.limits[number]
                    return f"output {number} differs by {distance:.2e} in row {row} (relative L2; allowed {limit:.0e})"
        return None


def _measure(ours: Tensor, theirs: Tensor, kept: Tensor | None) -> tuple[str | None, tuple[float, float, int]]:
    """Return what cannot be measured, and the squared distance, the squared norm and the number of entries."""
    nothing = (0.0, 0.0, 0)
    if ours.shape != theirs.shape:
        return f"has shape {tuple(ours.shape)}, not {tuple(theirs.shape)}", nothing
    ours, theirs = ours.detach(), theirs.detach()
    if kept is not None:
        kept = kept.to(ours.device)
        ours, theirs = ours[kept], theirs[kept]
    if not ours.numel():
        return None, nothing
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return "is not finite at the same places", nothing
    difference = torch.where(finite, ours - theirs, 0).double().square().sum()
    reference = torch.where(finite, theirs, 0).double().square().sum()
    return None, (float(difference), float(reference), ours.numel())


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tolerances(args: Sequence[Any], shared: Sequence[Any], plan: SharingPlan | None) -> list[float]:
    """Return the tolerance of each output: that of the coarsest dtype on the way to it."""
    values = list(args) if plan is None else [n.meta.get("val") for n in plan.captured.gm.graph.nodes] + list(args)
    device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    is_low = torch.is_autocast_enabled(device) or any(_is_float(v) and v.dtype.itemsize <= 2 for v in values)
    is_single = any(_is_float(v) and v.dtype is torch.float32 for v in values)
    out = []
    for value in shared:
        least = _TOLERANCE.get(value.dtype, _LOW_PRECISION) if _is_float(value) else 0.0
        out.append(max(least, _LOW_PRECISION if is_low else _TOLERANCE[torch.float32] if is_single else 0.0))
    return out


def _places(
    shared: Sequence[Any], args: Sequence[Any], tree: TokenTree | None, plan: SharingPlan | None
) -> list[_Place | None]:
    """Return where the rows and positions of each output are; None where that is not known."""
    if tree is None or plan is None:
        return [None] * len(shared)
    output = next(n for n in plan.captured.gm.graph.nodes if n.op == "output")
    layouts = [plan.layouts.layout(n) if isinstance(n, torch.fx.Node) else None for n in output.args[0]]
    return [_place(layout, args, tree, plan) for layout in layouts]


def _place(layout: Layout | None, args: Sequence[Any], tree: TokenTree, plan: SharingPlan) -> _Place | None:
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
            return _Place(dim, None, True, kept)
    row, position = layout.where_is(Row), layout.where_is(Position)
    if row < 0 or (position < 0 and layout.positions):
        return None
    return _Place(row, position if layout.positions else None, False, kept)


def _split(plan: SharingPlan, args: Sequence[Any]) -> Iterator[list[Any]] | None:
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
