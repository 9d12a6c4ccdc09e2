"""What must hold of a graph after every rewrite; a graph in which it does not is not used.

Checked: the graph is well-formed, its inputs are those of the captured graph (the packed one has more, behind them),
it has as many outputs, it holds known kinds of operators, and its switches of grad mode and autocast are kept in order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_AROUND = 5
_SWITCHES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")
_SIZES = (
    *(operator.getitem, operator.add, operator.mul, operator.sub, operator.floordiv, operator.truediv),
    *(operator.mod, operator.pow, operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
    *(operator.ge, operator.and_, operator.or_, operator.not_),
    *(torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not, torch.sym_ite, torch.sym_sum),
)


class BrokenGraphError(Exception):
    """A rewrite left a graph that breaks a rule; the argument says which, and shows the nodes around."""


class GraphVerifier:
    """Remembers the signature of the first graph and holds the later ones against it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        """Take the signature of a lowered graph."""
        self.inputs = _names(gm)
        self.outputs = len(_outputs(gm))
        self.switches = _switches(gm)

    def check(self, stage: str, gm: fx.GraphModule) -> None:
        """Raise where `gm`, the result of `stage`, breaks a rule.

        Raises:
            BrokenGraphError: It does.
        """
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise BrokenGraphError(f"after {stage}: {error}") from error
        names = _names(gm)
        if names[: len(self.inputs)] != self.inputs:
            raise BrokenGraphError(f"after {stage}: the inputs are {names}, not {self.inputs}")
        if len(_outputs(gm)) != self.outputs:
            raise BrokenGraphError(f"after {stage}: {len(_outputs(gm))} outputs, not {self.outputs}")
        if _switches(gm) != self.switches:
            raise BrokenGraphError(f"after {stage}: switches of grad mode or autocast were lost or moved")
        for node in gm.graph.nodes:
            if node.op == "call_function" and not _is_known(node.target):
                raise BrokenGraphError(f"after {stage}: {node.target} is no operator\n{_around(node)}")
            if node.op in ("call_method", "call_module"):
                raise BrokenGraphError(f"after {stage}: a {node.op}\n{_around(node)}")


def _names(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]


def _outputs(gm: fx.GraphModule) -> Any:
    return next(n for n in gm.graph.nodes if n.op == "output").args[0]


def _switches(gm: fx.GraphModule) -> list[Any]:
    """Return the calls without a value, such as `_set_grad_enabled`, in order; asserted metadata aside."""
    return [
        (_name(n.target), tuple(a for a in n.args if not isinstance(a, fx.Node)))
        for n in gm.graph.nodes
        if n.op == "call_function" and _name(n.target) in _SWITCHES
    ]


def _is_known(target: Callable[..., Any]) -> bool:
    return isinstance(target, torch._ops.OperatorBase) or target in _SIZES or _name(target) in _SWITCHES


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _around(node: fx.Node) -> str:
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    return "\n".join(str(n.format_node()) for n in nodes[max(at - _AROUND, 0) : at + _AROUND])
