"""Replace checkpointed regions by their bodies, every node marked for recomputation.

Non-reentrant `torch.utils.checkpoint` reaches a backend as the operator `tag_activation_checkpoint` with a graph of
its own. The rewrite must see inside; the partitioner reads the marks `recompute` and `ac_graph_id` and recomputes the
same values in the backward as before.

Legality: the operator runs its body; what differs is only where activations are kept.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def inline_checkpoints(gm: fx.GraphModule) -> fx.GraphModule:
    """Return `gm` without checkpoint operators: `gm` itself if it has none, else a copy."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    if not any(node.target is checkpoint for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for number, node in enumerate(n for n in list(graph.nodes) if n.target is checkpoint):
        body = gm.get_submodule(str(node.args[0].target))  # type: ignore[union-attr]
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        present = set(graph.nodes)
        with graph.inserting_before(node):
            result = graph.graph_copy(body.graph, dict(zip(inputs, node.args[1:], strict=True)))
        for new in graph.nodes:
            if new not in present:
                new.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                new.meta["ac_graph_id"] = number
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise NotImplementedError("a checkpointed region whose result is used whole")
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(gm, graph)
