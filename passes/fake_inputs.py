"""The placeholders of a capture, and fake inputs of chosen sizes for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from branchfx.passes.ir import InputRole

DimKey = str | int | tuple[str, int]
"""The class of a dim, its constant size, or a class and what to add to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """What the capture says of one placeholder.

    Attributes:
        name: Node name.
        role: PARAMETER for parameters and buffers, SYMBOL for a SymInt, OTHER for the rest.
        dims: For a tensor: a key a dim, equal keys for dims that Dynamo knows to be equal; ints are static.
        sizes: The real sizes of this call, or the value of the SymInt.
        dtype: Of a tensor, else None.
        device: Of a tensor, else None.
        requires_grad: Of a tensor.
        constant: The value itself where it is neither a tensor nor a SymInt.
    """

    name: str
    role: InputRole
    dims: tuple[str | int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    constant: Any = None


def describe_placeholders(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Placeholder, ...]:
    """Read the placeholders of Dynamo's graph."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    out = []
    for i, (node, value) in enumerate(zip(nodes, example_inputs, strict=True)):
        seen = node.meta.get("example_value", value)
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            key = str(seen.node.expr) if isinstance(seen, torch.SymInt) else f"scalar{i}"
            out.append(Placeholder(node.name, InputRole.SYMBOL, (key,), (size_hint(value),)))
        elif isinstance(value, torch.Tensor):
            parameter = _is_parameter(node, value)
            dims: list[str | int] = []
            for d, size in enumerate(seen.shape):
                if isinstance(size, torch.SymInt):
                    dims.append(str(size.node.expr))
                else:
                    dims.append(int(size) if parameter else f"{i}.{d}")
            out.append(
                Placeholder(
                    node.name,
                    InputRole.PARAMETER if parameter else InputRole.OTHER,
                    tuple(dims),
                    tuple(size_hint(s) for s in value.shape),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                )
            )
        else:
            out.append(Placeholder(node.name, InputRole.OTHER, (), (), constant=value))
    return tuple(out)


def with_sizes_of(placeholders: Sequence[Placeholder], inputs: Sequence[Any]) -> tuple[Placeholder, ...]:
    """Return what the capture says of its placeholders, for the sizes of another call."""
    out = []
    for p, value in zip(placeholders, inputs, strict=True):
        if p.role is InputRole.SYMBOL:
            p = dataclasses.replace(p, sizes=(size_hint(value),))
        elif isinstance(value, torch.Tensor):
            p = dataclasses.replace(p, sizes=tuple(size_hint(s) for s in value.shape))
        out.append(p)
    return tuple(out)


def size_hint(size: int | torch.SymInt) -> int:
    """Return the captured value of a size; `int()` would make Dynamo specialize on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _is_parameter(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether a placeholder is a parameter or a registered buffer of a module."""
    if isinstance(value, torch.nn.Parameter):
        return True
    arg = node.meta.get("grapharg")
    return arg is not None and arg.source is not None and arg.source.guard_source.is_unspecialized_nn_module()


class FakeInputs:
    """Makes fake inputs over one ShapeEnv, one symbol a distinct key."""

    def __init__(self, hints: Callable[[str, int], int]) -> None:
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.hints = hints
        self.symint: dict[str, Any] = {}
        self.symbol: dict[str, sympy.Symbol] = {}
        self.real: dict[sympy.Symbol, int] = {}
        self.binding: dict[sympy.Symbol, tuple[int, int]] = {}

    def size(self, key: str, real: int, index: int, dim: int) -> Any:
        """Return the size of a class of dims, making its symbol at the first use."""
        if key not in self.symint:
            hint = self.hints(key, real)
            if dim >= 0 and real < 2:
                return real
            source = ConstantSource(f"dim_{len(self.symint)}")
            symbol = (
                self.env.create_unspecified_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
                if dim < 0
                else self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            )
            self.symint[key] = self.env.create_symintnode(symbol, hint=hint, source=source)
            self.symbol[key], self.real[symbol], self.binding[symbol] = symbol, real, (index, dim)
        return self.symint[key]

    def near(self, key: str, offset: int) -> Any:
        """Return a size that differs from another by a constant."""
        return self.symint[key] + offset

    def make(self, placeholders: Sequence[Placeholder], key_of: Callable[[str | int], DimKey]) -> list[Any]:
        """Return one fake value a placeholder."""
        out: list[Any] = []
        for i, p in enumerate(placeholders):
            for d, (own, real) in enumerate(zip(p.dims, p.sizes, strict=True)):
                key = key_of(own)
                if isinstance(key, str):
                    self.size(key, real, i, -1 if p.role is InputRole.SYMBOL else d)
        with self.mode:
            for i, p in enumerate(placeholders):
                if p.role is InputRole.SYMBOL:
                    key = key_of(p.dims[0])
                    out.append(key if isinstance(key, int) else self.size(key, p.sizes[0], i, -1))
                elif p.dtype is None:
                    out.append(p.constant)
                else:
                    keys = [key_of(d) for d in p.dims]
                    shape = [
                        k if isinstance(k, int) else self.size(k, r, i, d) if isinstance(k, str) else self.near(*k)
                        for d, (k, r) in enumerate(zip(keys, p.sizes, strict=True))
                    ]
                    fake = torch.empty(shape, dtype=p.dtype, device=p.device)
                    out.append(fake.requires_grad_(p.requires_grad))
        return out


def lowering_inputs(placeholders: Sequence[Placeholder]) -> list[Any]:
    """Return fake inputs for the lowering: static where the capture is static, symbolic where it is symbolic."""
    inputs = FakeInputs(lambda _key, real: real)
    static = {f"{i}.{d}": s for i, p in enumerate(placeholders) for d, s in enumerate(p.sizes)}
    # a SymInt must exist before the dims that use its symbol, whatever the order of placeholders
    return inputs.make(placeholders, lambda key: static.get(key, key) if isinstance(key, str) else key)
