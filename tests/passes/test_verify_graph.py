"""The invariants after a rewrite, each broken on purpose."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from branchfx.passes.verify import BrokenGraphError, GraphVerifier

_aten = torch.ops.aten


def lowered() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    y = graph.call_function(_aten.relu.default, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output((y,))
    return fx.GraphModule({}, graph)


def _node(gm: fx.GraphModule, target: object) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.target is target)


def _function(gm: fx.GraphModule) -> None:
    _node(gm, _aten.relu.default).target = torch.relu


def _method(gm: fx.GraphModule) -> None:
    relu = _node(gm, _aten.relu.default)
    relu.op, relu.target = "call_method", "relu"


def _switch(gm: fx.GraphModule) -> None:
    gm.graph.erase_node(_node(gm, torch._C._set_grad_enabled))


def _input(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("before")


def _output(gm: fx.GraphModule) -> None:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], *output.args[0]),)


def _order(gm: fx.GraphModule) -> None:
    relu = _node(gm, _aten.relu.default)
    next(n for n in gm.graph.nodes if n.op == "placeholder").prepend(relu)


BREAKS = {
    "is no operator": _function,
    "a call_method": _method,
    "switches": _switch,
    "the inputs are": _input,
    "outputs, not": _output,
    "after stage": _order,
}


def test_a_rewrite_may_add_inputs_behind_and_sizes() -> None:
    gm = lowered()
    verifier = GraphVerifier(gm)
    with gm.graph.inserting_after(next(n for n in gm.graph.nodes if n.op == "placeholder")):
        tree = gm.graph.placeholder("tree_column_0")
    with gm.graph.inserting_before(_node(gm, _aten.relu.default)):
        size = gm.graph.call_function(_aten.sym_size.int, (tree, 0))
        gm.graph.call_function(operator.mul, (size, 2))
    verifier.check("stage", gm)


@pytest.mark.parametrize("text", BREAKS)
def test_a_broken_rewrite_is_found(text: str) -> None:
    breaks: Callable[[fx.GraphModule], None] = BREAKS[text]
    gm = lowered()
    verifier = GraphVerifier(gm)
    breaks(gm)
    with pytest.raises(BrokenGraphError, match=text):
        verifier.check("stage", gm)
