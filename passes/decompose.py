"""Take operators apart that have no symbolic shape function, or that hide two steps in one.

`baddbmm(x, a, b, beta, alpha)`  becomes  `beta * x + alpha * bmm(a, b)`
`new_zeros(x, size)`  becomes  `zeros(size)` of x's dtype and device, which no longer reads x
`copy(x, y)` of equal shape and dtype  becomes  `y`
`index_put(x, [mask], y)` of a boolean mask of x's shape and one number y  becomes  `where(mask, y, x)`
`cat([empty, x])` with an empty vector, as caches begin  becomes  `x`

Legality: the definition of the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten

_FILLED_LIKE = {
    _aten.new_ones.default: _aten.ones.default,
    _aten.new_zeros.default: _aten.zeros.default,
    _aten.new_full.default: _aten.full.default,
    # what is not written yet may hold anything: zeros
    _aten.new_empty.default: _aten.zeros.default,
}


def decompose(gm: fx.GraphModule) -> int:
    """Edit `gm` in place; return how many nodes were taken apart."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target in _PARTS:
            changed += _PARTS[node.target](node)
    gm.recompile()
    return changed


def _replace(node: fx.Node, by: Any) -> bool:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
    return True


def _detach_from_source(node: fx.Node) -> bool:
    value = node.meta["val"]
    node.target = _FILLED_LIKE[node.target]
    node.args = node.args[1:]
    node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return True


def _same_copy(node: fx.Node) -> bool:
    into, source = (a.meta["val"] for a in node.args[:2])
    return into.shape == source.shape and into.dtype == source.dtype and _replace(node, node.args[1])


def _masked_write(node: fx.Node) -> bool:
    x, indices, source = node.args[:3]
    accumulates = len(node.args) > 3 and node.args[3]
    if len(indices) != 1 or indices[0] is None or accumulates:
        return False
    mask, number, into = (n.meta["val"] for n in (indices[0], source, x))
    if mask.dtype is not torch.bool or mask.shape != into.shape or number.dim() != 0 or number.dtype != into.dtype:
        return False
    with node.graph.inserting_before(node):
        chosen = node.graph.call_function(_aten.where.self, (indices[0], source, x))
    chosen.meta = dict(node.meta)
    return _replace(node, chosen)


def _drop_empty_vectors(node: fx.Node) -> bool:
    """Leave out operands of shape [0], which `torch.cat` skips whatever the rank of the others."""
    parts = [p for p in node.args[0] if tuple(p.meta["val"].shape) != (0,)]
    dtype = node.meta["val"].dtype
    if len(parts) == len(node.args[0]) or not parts or any(p.meta["val"].dtype != dtype for p in parts):
        return False
    if len(parts) == 1:
        return _replace(node, parts[0])
    node.update_arg(0, parts)
    return True


def _scaled_sum(node: fx.Node) -> bool:
    x, a, b = node.args[:3]
    graph = node.graph
    with graph.inserting_before(node):
        product = graph.call_function(_aten.bmm.default, (a, b))
        terms = []
        for term, factor in ((x, node.kwargs.get("beta", 1)), (product, node.kwargs.get("alpha", 1))):
            terms.append(term if factor == 1 else graph.call_function(_aten.mul.Tensor, (term, factor)))
        total = graph.call_function(_aten.add.Tensor, tuple(terms))
    for new in (product, *terms, total):
        if isinstance(new, fx.Node) and new is not x:
            new.meta = {k: v for k, v in node.meta.items() if k != "val"}
    return _replace(node, total)


_PARTS: dict[Any, Callable[[fx.Node], bool]] = {
    _aten.copy.default: _same_copy,
    _aten.index_put.default: _masked_write,
    _aten.cat.default: _drop_empty_vectors,
    _aten.baddbmm.default: _scaled_sum,
    **dict.fromkeys(_FILLED_LIKE, _detach_from_source),
}
