"""Settle which operand a maximum or minimum of sizes is, and check it at each call.

`slice(table, max(0, 2048 - T))`  becomes  `slice(table, 2048 - T)`, with the relation `2048 - T >= 0`

Legality: the relations hold in the captured call, and a call in which one does not runs unshared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from branchfx.passes.fake_inputs import size_hint

Ordered = tuple[str | int, str | int]
"""Two sizes, each a node name or a number; the first is at least the second."""


def settle_extremes(gm: fx.GraphModule) -> tuple[Ordered, ...]:
    """Replace `max` and `min` of sizes in place by the operand that they are in this call.

    Returns:
        What this takes for granted.
    """
    pairs: list[Ordered] = []
    for node in gm.graph.nodes:
        if node.target not in (torch.sym_max, torch.sym_min):
            continue
        a, b = sorted(node.args, key=lambda x: size_hint(x.meta["val"] if isinstance(x, fx.Node) else x))
        low, high = (x.name if isinstance(x, fx.Node) else x for x in (a, b))
        pairs.append((high, low))
        node.replace_all_uses_with(b if node.target is torch.sym_max else a)
    return tuple(pairs)


def assumed_relations(gm: fx.GraphModule, pairs: Sequence[Ordered]) -> tuple[sympy.Basic, ...]:
    """Return the relations between the graph's sizes, once its values are known."""
    found = {n.name: n.meta.get("val") for n in gm.graph.nodes}
    sizes = [[_size_expr(found[x] if isinstance(x, str) else x) for x in pair] for pair in pairs]
    return tuple(sympy.Ge(high, low) for high, low in sizes)


def _size_expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
