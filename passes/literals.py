"""Read the literals of shape-taking calls off the symbolic shapes of their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_END = 2**62


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """How literals are read that their surroundings leave open; a wrong reading does not run.

    Attributes:
        any_distance: A second dim of an input is T less a constant, such as the columns of the response.
        merged_rows: A first size that is a multiple of B holds B, such as B * heads.
        repeats_rows: As many copies as there are rows are one a row; else they may be one an expert.
    """

    any_distance: bool = False
    merged_rows: bool = False
    repeats_rows: bool = True


READINGS = (Reading(), Reading(any_distance=True), Reading(merged_rows=True), Reading(repeats_rows=False))
"""In the order in which they are tried."""


class LiteralReader(fx.Interpreter):
    """Runs a graph on fake tensors of symbolic sizes, and gives each literal the size that it stands for.

    Attributes:
        literals: For (node, argument, item or -1): the size expression that replaces the literal.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        real: Mapping[sympy.Symbol, int],
        batch: Sequence[torch.SymInt],
        shape_taking: Mapping[Any, tuple[int, ...]],
        reading: Reading = Reading(),
    ) -> None:
        """Prepare a run.

        Args:
            gm: The static graph.
            real: The captured value of every free size.
            batch: B and T as SymInts.
            shape_taking: Operators that take sizes, and the arguments that hold them.
            reading: What decides where the shapes do not.
        """
        super().__init__(gm)
        self.real = real
        self.rows, self.positions = batch
        self.shape_taking = shape_taking
        self.reading = reading
        self.literals: dict[tuple[str, int, int], sympy.Expr] = {}

    def value(self, size: Any) -> int:
        """Return the captured value of a size."""
        return int(_expr(size).subs(self.real))

    def run_node(self, n: fx.Node) -> Any:
        """Run a node with its literals replaced."""
        spots = self.shape_taking.get(n.target) if n.op == "call_function" else None
        if spots is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        replaced = list(args)
        for spot in spots:
            if spot >= len(args):
                continue
            sizes = args[spot]
            if isinstance(sizes, (list, tuple)):
                read = self._sizes(n, args, list(sizes))
                for j, (old, new) in enumerate(zip(sizes, read, strict=True)):
                    if type(old) is int and isinstance(new, torch.SymInt):
                        self.literals[(n.name, spot, j)] = new.node.expr
                replaced[spot] = read
            elif type(sizes) is int:
                new = self._bound(n, args, spot, sizes)
                if isinstance(new, torch.SymInt):
                    self.literals[(n.name, spot, -1)] = new.node.expr
                replaced[spot] = new
        return n.target(*replaced, **kwargs)

    def _sizes(self, n: fx.Node, args: Sequence[Any], sizes: list[Any]) -> list[Any]:
        if n.target in _VIEWS:
            return self._view(list(args[0].shape), sizes)
        if n.target is _aten.expand.default:
            source = [1] * (len(sizes) - args[0].dim()) + list(args[0].shape)
            return [
                old if old != 1 and type(size) is int and size == self.value(old) else self._free(size, d)
                for d, (old, size) in enumerate(zip(source, sizes, strict=True))
            ]
        if n.target in (_aten.split_with_sizes.default, _aten.unflatten.int, _aten.repeat.default):
            copies = n.target is _aten.repeat.default and self.reading.repeats_rows
            return [self._free(s, d) if copies and d == 0 else s for d, s in enumerate(sizes)]
        return [self._free(size, d) for d, size in enumerate(sizes)]

    def _free(self, size: Any, dim: int) -> Any:
        """A size that nothing around it fixes: B in front, else T, else B * T, else the constant."""
        if type(size) is not int or size <= 1:
            return size
        rows, positions = self.value(self.rows), self.value(self.positions)
        first, second = (self.rows, self.positions) if dim == 0 else (self.positions, self.rows)
        for candidate in (first, second):
            # in a later dim a size equal to B is a number of heads at least as often
            if size == self.value(candidate) and (candidate is not self.rows or dim == 0):
                return candidate
        if size == rows * positions:
            return self.rows * self.positions
        if self.reading.merged_rows and dim == 0 and size % rows == 0:
            return self.rows * (size // rows)
        return size

    def _view(self, source: list[Any], sizes: list[Any]) -> list[Any]:
        """Group the source dims from both ends up to the inferred dim."""
        hole = next((i for i, s in enumerate(sizes) if type(s) is int and s == -1), len(sizes))
        front = self._groups(source, sizes[:hole])
        back = self._groups(source[::-1], sizes[hole + 1 :][::-1], reverse=True)[::-1]
        return [*front, *sizes[hole : hole + 1], *back]

    def _factors(self, size: Any) -> list[Any]:
        """Split `B * T * c` into its factors, rows first; 1 has none."""
        rest = _expr(size)
        out: list[Any] = []
        for axis in (self.rows, self.positions):
            quotient = sympy.cancel(rest / _expr(axis))
            if rest.has(_expr(axis)) and quotient.as_numer_denom()[1] == 1:
                out.append(axis)
                rest = quotient
        offset = sympy.expand(rest - _expr(self.positions))
        if not rest.is_Integer and offset.is_Integer:
            return [*out, self.positions + int(offset)]
        if not rest.is_Integer:
            return [size]
        return [*out, int(rest)] if rest != 1 else out

    def _groups(self, source: list[Any], sizes: list[Any], reverse: bool = False) -> list[Any]:
        out: list[Any] = []
        queue = [f for s in source for f in (self._factors(s)[::-1] if reverse else self._factors(s))]
        for size in sizes:
            if type(size) is not int:
                taken = self.value(size)
                while queue and taken > 1:
                    taken //= self.value(queue.pop(0))
                out.append(size)
                continue
            product: Any = 1
            need = size
            while need > 1 and queue:
                have = self.value(queue[0])
                if need % have == 0:
                    product = product * queue.pop(0)
                    need //= have
                elif type(queue[0]) is int and have % need == 0:
                    queue[0] = have // need
                    product, need = product * need, 1
                else:
                    break
            out.append(product if need == 1 else size)
        return out

    def _bound(self, n: fx.Node, args: Sequence[Any], spot: int, bound: int) -> Any:
        """A bound of `arange`, `slice`, `narrow` or `split`."""
        if n.target is _aten.slice.Tensor and spot == 2 and bound < 0:
            size = args[0].shape[args[1]]
            distance = self.value(size) + bound
            # the last T or T - 1 columns, counted from the end
            return distance - size if isinstance(size, torch.SymInt) and 0 <= distance <= 1 else bound
        if not 1 < bound < _END:
            return bound
        rows, positions = self.value(self.rows), self.value(self.positions)
        late_range = n.target in (_aten.arange.start, _aten.arange.start_step) and args[0] != 0
        if n.target is _aten.linspace.default or late_range:
            # a range that does not start at 0 numbers no rows
            return self.positions if bound == positions else bound
        if n.target in (_aten.arange.default, _aten.arange.start, _aten.arange.start_step):
            total = self.rows * self.positions
            for value, candidate in ((positions, self.positions), (rows, self.rows), (rows * positions, total)):
                if bound == value:
                    return candidate
            choices, rest = divmod(bound, rows * positions)
            return total * choices if rest == 0 else bound
        if n.target is _aten.slice.Tensor:
            size = args[0].shape[args[1]]
            if isinstance(size, torch.SymInt):
                distance = self.value(size) - bound
                return size - distance if spot == 3 and 0 <= distance <= 1 else bound
            # the first or last T rows of a table; of an activation, half a head is as likely
            is_table = not any(_expr(s).has(_expr(self.rows)) for s in args[0].shape)
            if spot == 2 and is_table and (len(args) < 4 or args[3] >= _END) and size - bound == positions:
                return size - self.positions
            return self.positions if spot == 3 and is_table and bound == positions and bound != size else bound
        return bound
