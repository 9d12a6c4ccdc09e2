"""Compile a graph with Inductor, AOTAutograd in eager mode, or not at all, with chosen dims dynamic.

The graph is compiled under its own ShapeEnv, outside Dynamo; the guards that come up are kept with the compiled
function and checked before each call, so a size that breaks one is compiled again instead of run wrongly.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

Inner = Literal["inductor", "aot_eager", "eager"]
logger = logging.getLogger("branchfx.inner")


@dataclasses.dataclass(frozen=True)
class _Variant:
    """One compiled function, the sizes it holds for, and where its symbols are read from."""

    function: Callable[..., Any]
    guards: tuple[Any, ...]
    static: tuple[tuple[int, ...], ...]
    symbols: tuple[tuple[sympy.Symbol, int, int], ...]
    grad: bool

    def accepts(self, args: Sequence[Any]) -> bool:
        if torch.is_grad_enabled() != self.grad:
            return False
        for arg, fixed in zip(args, self.static, strict=True):
            if (
                fixed
                and isinstance(arg, torch.Tensor)
                and any(f >= 0 and f != s for f, s in zip(fixed, arg.shape, strict=True))
            ):
                return False
        if not self.guards:
            return True
        known = {s: (args[i].shape[d] if d >= 0 else args[i]) for s, i, d in self.symbols}
        return all(g.subs(known) != sympy.false for g in self.guards)


class CompiledGraph:
    """A graph compiled lazily, again for sizes that its guards exclude.

    Attributes:
        compiles: How often a compiler ran.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        dynamic: Sequence[frozenset[int]],
        inner: Inner,
        on_compile: Callable[[], None] | None = None,
    ) -> None:
        """Prepare a graph; nothing is compiled yet.

        Args:
            gm: The graph.
            dynamic: For each argument the dims that change between calls; for an int argument, {-1}.
            inner: Which compiler.
            on_compile: Called at each compile.
        """
        self.gm = gm
        self.dynamic = tuple(dynamic)
        self.inner = inner
        self.on_compile = on_compile
        self.compiles = 0
        self._variants: tuple[_Variant, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Run the graph, compiling it first where no compiled variant takes these sizes."""
        if self.inner == "eager":
            return self.gm(*args)
        for variant in self._variants:
            if variant.accepts(args):
                return variant.function(*args)
        variant = self._compile(args)
        # the newest first: later calls look like this one
        self._variants = (variant, *self._variants)
        return variant.function(*args)

    def _compile(self, args: Sequence[Any]) -> _Variant:
        self.compiles += 1
        if self.on_compile is not None:
            self.on_compile()
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env)
        fakes: list[Any] = []
        symbols: list[tuple[sympy.Symbol, int, int]] = []
        static: list[tuple[int, ...]] = []
        for i, (arg, dims) in enumerate(zip(args, self.dynamic, strict=True)):
            if isinstance(arg, torch.Tensor):
                sizes = [
                    DimDynamic.DYNAMIC if d in dims and arg.shape[d] > 1 else DimDynamic.STATIC
                    for d in range(arg.dim())
                ]
                if dims:
                    context = StatelessSymbolicContext(sizes)  # type: ignore[var-annotated]
                    fake = mode.from_tensor(arg, symbolic_context=context, source=ConstantSource(f"arg{i}"))
                else:
                    fake = mode.from_tensor(arg, static_shapes=True)
                static.append(
                    tuple(s if kind is DimDynamic.STATIC else -1 for s, kind in zip(arg.shape, sizes, strict=True))
                )
                for d, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                        symbols.append((size.node.expr, i, d))
                fakes.append(fake)
            elif isinstance(arg, int) and not isinstance(arg, bool) and dims:
                source = ConstantSource(f"arg{i}")
                symbol = env.create_unspecified_symbol(arg, source, dynamic_dim=DimDynamic.DYNAMIC)
                fakes.append(env.create_symintnode(symbol, hint=arg, source=source))
                symbols.append((symbol, i, -1))
                static.append(())
            else:
                fakes.append(arg)
                static.append(())
        with tracing(TracingContext(mode)):
            function = _compiler(self.inner)(self.gm, fakes)
        known = {s for s, _, _ in symbols}
        guards = tuple(g.expr for g in env.guards if g.expr.free_symbols <= known)
        guards += tuple(
            sympy.Eq(s, env.replace(s))
            for s, _, _ in symbols
            if env.replace(s) != s and env.replace(s).free_symbols <= known
        )
        return _Variant(function, guards, tuple(static), tuple(symbols), torch.is_grad_enabled())


def _compiler(inner: Inner) -> Callable[..., Any]:
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def available_inner(wanted: Inner, device: str = "cpu") -> Inner:
    """Return the inner compiler to use: Inductor on CPU needs a C++ compiler."""
    if wanted == "inductor" and device == "cpu" and not any(shutil.which(c) for c in ("g++", "clang++", "c++")):
        return "aot_eager"
    return wanted
