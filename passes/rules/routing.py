"""Expert routing: tokens sorted by expert, one grouped product, and the way back.

The dispatch that transformers writes is `topk`, `sort` of the expert ids, a gather by the permutation, `histc` and
its running sum as offsets, `grouped_mm`, the inverse permutation, a view, and a sum over choices. Each step is
token-local up to the order of (token, choice) pairs, which `Slots` remembers by the node that sorted them; values
of different orders never meet. Capacity limits and token dropping have no rule here, so they decline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from branchfx.diagnostics import Code
from branchfx.passes.ir import Data, Layout, Row, Size, SlotIndex, Slots
from branchfx.passes.rules.registry import OpRule, Refusal, RuleContext

_aten = torch.ops.aten


def slots_of(layout: Layout, dim: int = 0) -> Slots | None:
    """Return the slots that a dim holds, or None."""
    if not layout.dims or len(layout.dims[dim]) != 1:
        return None
    factor = layout.dims[dim][0]
    return factor if isinstance(factor, Slots) else None


def _sort(node: fx.Node, ctx: RuleContext) -> tuple[Layout, ...]:
    """Sorting expert ids over all (token, choice) pairs defines an order; over a constant dim it is token-local."""
    x = ctx.layout(node.args[0])
    d = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)) % max(len(x.dims), 1)  # type: ignore[arg-type]
    if all(isinstance(f, Size) for f in x.dims[d]):
        return (x, x)
    if len(x.dims) != 1 or x.data is not Data.TOKEN or not any(isinstance(f, Row) for f in x.dims[0]):
        raise Refusal(Code.ROW_REDUCTION, "a sort runs over positions")
    dim = (Slots(node.name, x.dims[0]),)
    return Layout((dim,), Data.TOKEN), Layout((dim,), Data.ORDINAL, SlotIndex("slot", node.name))


def _floor_divide(node: fx.Node, ctx: RuleContext) -> Layout:
    """A slot's pair divided by the number of choices is its token."""
    x = ctx.layout(node.args[0])
    slots = slots_of(x)
    if x.index is not None and x.index.kind == "slot" and slots is not None and slots.factors[-1] == Size(node.args[1]):  # type: ignore[arg-type]
        return Layout(x.dims, x.data, SlotIndex("token", x.index.order))
    from branchfx.passes.rules.pointwise import pointwise_layout

    return pointwise_layout(node, ctx)


def _histogram(node: fx.Node, ctx: RuleContext) -> Layout:
    """Slots an expert: a property of the whole order, read only by the grouped product of the same order."""
    x = ctx.layout(node.args[0])
    slots = slots_of(x)
    if slots is None or x.data is not Data.TOKEN:
        raise Refusal(Code.ROW_REDUCTION, "a histogram counts over positions")
    return Layout(((Size(int(ctx.shape(node)[0])),),), Data.ORDINAL, SlotIndex("counts", slots.order))


def _grouped_product(node: fx.Node, ctx: RuleContext) -> Layout:
    x, weight = ctx.layout(node.args[0]), ctx.layout(node.args[1])
    offsets = ctx.layout(node.args[2] if len(node.args) > 2 else node.kwargs.get("offs"))
    slots = slots_of(x)
    if slots is None or offsets.index != SlotIndex("counts", slots.order) or not weight.is_replicated:
        raise Refusal(Code.UNKNOWN_OPERATOR, "a grouped product whose groups are not those of its rows' order")
    return Layout((x.dims[0], weight.dims[-1]), Data.TOKEN)


def _empty_like(node: fx.Node, ctx: RuleContext) -> Layout:
    x = ctx.layout(node.args[0])
    return Layout(x.dims, x.data, None if x.index is None else SlotIndex("empty", x.index.order))


def _index_put(node: fx.Node, ctx: RuleContext) -> Layout:
    """`inverse[permutation] = arange(...)`."""
    into, source = ctx.layout(node.args[0]), ctx.layout(node.args[2])
    indices = node.args[1]
    index = ctx.layout(indices[0]) if len(indices) == 1 else Layout(())  # type: ignore[arg-type, index]
    slots = slots_of(index)
    known = (
        slots is not None
        and index.index == SlotIndex("slot", slots.order)
        and into.index == SlotIndex("empty", slots.order)
        and source.index == SlotIndex("iota", "")
        and source.dims == (slots.factors,)
        and (len(node.args) < 4 or not node.args[3])
    )
    if not known or slots is None:
        raise Refusal(Code.RECURRENCE, "a write to computed positions")
    return Layout((slots.factors,), Data.ORDINAL, SlotIndex("inverse", slots.order))


def looked_up(x: Layout, index: Layout) -> Layout | None:
    """Return the layout of `x[index]` where the index permutes slots, or None if it is another lookup."""
    if index.index is None or not x.dims:
        return None
    kind, order = index.index.kind, index.index.order
    if kind == "inverse":
        found = slots_of(x)
        if found is not None and found.order == order:
            return Layout((found.factors, *x.dims[1:]), x.data)
        return None
    slots = slots_of(index)
    if slots is None:
        return None
    expected = {"slot": slots.factors, "token": slots.factors[:-1]}.get(kind)
    return Layout(((slots,), *x.dims[1:]), x.data) if x.dims[0] == expected else None


def _targets(*paths: str) -> tuple[Any, ...]:
    out = []
    for path in paths:
        found: Any = torch.ops
        for part in path.split("."):
            found = getattr(found, part, None)
            if found is None:
                break
        if found is not None:
            out.append(found)
    return tuple(out)


RULES = (
    OpRule((_aten.sort.default, _aten.sort.stable), _sort),
    OpRule((_aten.floor_divide.default, _aten.div.Tensor_mode), _floor_divide),
    OpRule((_aten.histc.default,), _histogram),
    OpRule((_aten._grouped_mm.default,), _grouped_product),
    OpRule((_aten.empty_like.default,), _empty_like),
    OpRule((_aten.index_put.default,), _index_put),
)


def library_rules() -> tuple[OpRule, ...]:
    """Rules of operators that other packages register; they exist once the package is imported."""
    found = _targets("transformers.grouped_mm_fallback.default")
    return (OpRule(found, _grouped_product),) if found else ()
