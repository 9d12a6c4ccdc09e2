"""Take operators apart that have no symbolic shape function, or that hide two steps in one.

`baddbmm(x, a, b, beta, alpha)`  becomes  `beta * x + alpha * bmm(a, b)`
`new_zeros(x, size)`  becomes  `zeros(size)` of x's dtype and device, which no longer reads x
`copy(x, y)` of equal shape and dtype  becomes  `y`
`cat([empty, x])` with an empty vector, as caches begin  becomes  `x`

Legality: the definition of the operators.
"""

from __future__ import annotations

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


def _detach_from_source(node: fx.Node) -> None:
    value = node.meta["val"]
    node.target = _FILLED_LIKE[node.target]
    node.args = node.args[1:]
    node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}


def _drop_empty_vectors(node: fx.Node) -> bool:
    """Leave out operands of shape [0], which `torch.cat` skips whatever the rank of the others."""
    parts = [p for p in node.args[0] if tuple(p.meta["val"].shape) != (0,)]
    if len(parts) == len(node.args[0]) or not parts:
        return False
    dtype = node.meta["val"].dtype
    if len(parts) == 1 and parts[0].meta["val"].dtype == dtype:
        node.replace_all_uses_with(parts[0])
        node.graph.erase_node(node)
        return True
    if all(p.meta["val"].dtype == dtype for p in parts):
        node.update_arg(0, parts)
        return True
    return False


def decompose(gm: fx.GraphModule) -> int:
    """Edit `gm` in place; return how many nodes were taken apart."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is _aten.copy.default:
            into, source = (a.meta["val"] for a in node.args[:2])
            if into.shape == source.shape and into.dtype == source.dtype:
                node.replace_all_uses_with(node.args[1])
                gm.graph.erase_node(node)
                changed += 1
            continue
        if node.target in _FILLED_LIKE:
            _detach_from_source(node)
            changed += 1
            continue
        if node.target is _aten.cat.default:
            changed += _drop_empty_vectors(node)
            continue
        if node.target is not _aten.baddbmm.default:
            continue
        x, a, b = node.args[:3]
        with gm.graph.inserting_before(node):
            product = gm.graph.call_function(_aten.bmm.default, (a, b))
            terms = []
            for term, factor in ((x, node.kwargs.get("beta", 1)), (product, node.kwargs.get("alpha", 1))):
                terms.append(term if factor == 1 else gm.graph.call_function(_aten.mul.Tensor, (term, factor)))
            total = gm.graph.call_function(_aten.add.Tensor, tuple(terms))
        for new in (product, *terms, total):
            if isinstance(new, fx.Node) and new is not x:
                new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        node.replace_all_uses_with(total)
        gm.graph.erase_node(node)
        changed += 1
    gm.recompile()
    return changed
