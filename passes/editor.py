"""The only place that creates nodes of a rewritten graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import fx

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "ac_graph_id")
_PURE_FUNCTIONS = (operator.getitem, operator.add, operator.mul, operator.sub, operator.floordiv)


class GraphBuilder:
    """Builds a graph next to the captured one; copies provenance, shares no meta dict.

    Attributes:
        origin: The captured node whose provenance new nodes get.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.origin: fx.Node | None = None
        self._last_input: fx.Node | None = None
        self._last_size: fx.Node | None = None
        self._extra: dict[str, fx.Node] = {}
        self._cache: dict[Any, fx.Node] = {}

    def copy(self, node: fx.Node, argument: Callable[[fx.Node], Any]) -> fx.Node:
        """Copy a node with mapped arguments."""
        new = self.graph.node_copy(node, argument)
        new.meta = {k: v for k, v in node.meta.items() if k in (*_KEPT_META, "val")}
        return new

    def mark_inputs(self) -> None:
        """Further placeholders go behind the present ones."""
        self._last_input = next(reversed(self.graph.nodes))

    def placeholder(self, name: str) -> fx.Node:
        """Return the extra placeholder of that name."""
        if name not in self._extra:
            assert self._last_input is not None
            with self.graph.inserting_after(self._last_input):
                node = self.graph.placeholder(name)
            node.meta["val"] = None
            self._extra[name] = node
            self._last_input = node
        return self._extra[name]

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Add a call with the origin's provenance."""
        node = self.graph.call_function(target, args, kwargs or {})
        if self.origin is not None:
            node.meta = {k: v for k, v in self.origin.meta.items() if k in _KEPT_META}
            node.meta["val"] = self.origin.meta.get("val")
        return node

    def once(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """Add a size computation right behind the inputs and the sizes it reads, once."""
        key = (target, args)
        if key not in self._cache:
            after = self._last_size or self._last_input
            assert after is not None
            with self.graph.inserting_after(after):
                self._cache[key] = self._last_size = self.graph.call_function(target, args)
        return self._cache[key]

    def size_of_expr(self, expr: Any, leaf: Callable[[Any], fx.Node]) -> Any:
        """Return the node (or int) of a size expression."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return leaf(expr)
        parts = [self.size_of_expr(a, leaf) for a in expr.args]
        combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(type(expr))
        if combine is None:
            raise NotImplementedError(f"the size {expr}")
        total = parts[0]
        for part in parts[1:]:
            total = self.call(combine, (total, part))
        return total

    def output(self, node: fx.Node, argument: Callable[[fx.Node], Any]) -> None:
        """Add the output."""
        self.graph.output(fx.map_arg(node.args[0], argument))

    def finish(self, extra: Iterable[str]) -> set[str]:
        """Drop dead pure nodes and unread extra placeholders; return the extra placeholders that are read."""
        self.graph.eliminate_dead_code(_is_impure)
        used = set()
        for name in extra:
            node = self._extra[name]
            if node.users:
                used.add(name)
            else:
                self.graph.erase_node(node)
        self.graph.lint()
        return used

    def module(self, constants: torch.nn.Module) -> fx.GraphModule:
        """Return the graph as a module that holds the constants of `constants`."""
        return fx.GraphModule(constants, self.graph)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return not isinstance(node.target, torch._ops.OpOverload) and node.target not in _PURE_FUNCTIONS
