"""Take the Python floats of a `dynamic=True` capture as the constants that they are in this call.

Dynamo passes an epsilon or a scale as a 0-d tensor and reads it with `item()`, which ATen cannot trace with a known
value. The value of the captured call is put in its place, and each later call is checked to have the same.

Legality: a call whose float differs runs the caller's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def specialize_floats(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[fx.GraphModule, tuple[tuple[int, float], ...]]:
    """Return the graph with such floats as constants (`gm` itself if it has none), and (input index, value) pairs."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values: dict[str, tuple[int, float]] = {}
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
        if is_scalar and node.users and all(u.op == "call_method" and u.target == "item" for u in node.users):
            values[node.name] = (index, float(value))
    if not values:
        return gm, ()
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        source = node.args[0] if node.op == "call_method" and node.target == "item" else None
        if isinstance(source, fx.Node) and source.name in values:
            constant = values[source.name][1]
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n, old=node, new=constant: new if n is old else n)
                user.kwargs = fx.map_arg(user.kwargs, lambda n, old=node, new=constant: new if n is old else n)
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(gm, graph), tuple(values.values())
