"""The `torch.compile` backend: capture, pipeline, and at each call the packed graph or the caller's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from branchfx.codegen.inner import CompiledGraph, available_inner
from branchfx.codegen.registration import register_kernels
from branchfx.counters import recorder
from branchfx.diagnostics import Code, Decline, DeclineReporter
from branchfx.dump import observer
from branchfx.errors import VerifyError
from branchfx.named_batch import named_batch
from branchfx.options import Options
from branchfx.passes.fake_inputs import Placeholder, describe_placeholders, size_hint, with_sizes_of
from branchfx.passes.pipeline import SharingPlan, plan_sharing
from branchfx.runtime.choose import worth_sharing
from branchfx.runtime.packed import (
    batch_size,
    build_tree,
    dynamic_dims,
    fits,
    has_masked_query,
    tree_arguments,
)
from branchfx.runtime.verify import check_outputs
from branchfx.runtime.verify_gradients import check_gradients
from branchfx.runtime.work import WorkModel

logger = logging.getLogger("branchfx.backend")


def branchreplay(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo.

    Args:
        gm: The captured graph.
        example_inputs: The first call's inputs.
        mode: Must be None or "default".
        options: `torch.compile(options=...)`; see `branchfx.list_options()`.

    Returns:
        A callable with the graph's signature.

    Raises:
        OptionError: An option or its value is unknown.
        DeclinedError: The graph cannot be shared and `fallback="error"`.
    """
    settings = Options.from_user(options)
    register_kernels()
    device = next((a.device.type for a in example_inputs if isinstance(a, torch.Tensor)), "cpu")
    inner = available_inner(settings.inner, device)
    reporter = DeclineReporter(settings.fallback)
    if inner != settings.inner:
        reporter.report(Decline(Code.NO_COMPILER, "", "Inductor needs a C++ compiler and none is on the path"))
    if settings.disable or settings.share == "never":
        return _unshared(gm, example_inputs, inner)
    return _shared(gm, describe_placeholders(gm, example_inputs), example_inputs, settings, inner, reporter)


def _shared(
    gm: fx.GraphModule,
    placeholders: Sequence[Placeholder],
    inputs: Sequence[Any],
    settings: Options,
    inner: Any,
    reporter: DeclineReporter,
) -> Callable[..., Any]:
    """Plan the sharing of a graph, for inputs whose sizes are related as in this call."""
    device = next((a.device.type for a in inputs if isinstance(a, torch.Tensor)), "cpu")
    recorder().record_compile("capture_grad" if torch.is_grad_enabled() else "capture_nograd")
    named = named_batch()
    plan = plan_sharing(
        gm,
        inputs,
        placeholders=placeholders,
        named=None if named is None else (named.input_ids.shape[0], named.input_ids.shape[1]),
        padding=settings.padding,
        autocast_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        observe=observer(settings.dump),
    )
    if not isinstance(plan, SharingPlan):
        for decline in plan:
            recorder().record_decline(decline.code)
        for decline in plan:
            reporter.report(decline)

        def again(args: Sequence[Any]) -> Callable[..., Any]:
            return _shared(gm, with_sizes_of(placeholders, args), args, settings, inner, reporter)

        return DeclinedGraph(gm, _unshared(gm, inputs, inner), inputs, again)
    for note in plan.notes:
        logger.info("in row space: %s", note)
    return SharedGraph(gm, inputs, plan, settings, inner)


class DeclinedGraph:
    """A graph that is not shared for the sizes it was captured with.

    A graph captured with a malformed batch, say a mask of other rows than the ids, has guards that take well-formed
    ones too; those are planned on their own.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        original: Callable[..., Any],
        inputs: Sequence[Any],
        again: Callable[[Sequence[Any]], Callable[..., Any]],
    ) -> None:
        self.again = again
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.free = [
            (i, d)
            for i, (node, value) in enumerate(zip(nodes, inputs, strict=True))
            if isinstance(value, torch.Tensor)
            for d in range(value.dim())
            if _is_symbolic(node, d)
        ]
        self.planned: dict[tuple[Any, ...], Callable[..., Any]] = {self._situation(inputs): original}

    def __call__(self, *args: Any) -> Any:
        """Run the graph as the caller wrote it, or plan it for sizes that are related in another way."""
        situation = self._situation(args)
        if situation not in self.planned:
            self.planned[situation] = self.again(args)
        return self.planned[situation](*args)

    def _situation(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return what another plan may depend on: related sizes, and whether the caller names the tokens."""
        return (named_batch() is None, *_equal_sizes(self.free, args))


def _equal_sizes(places: Sequence[tuple[int, int]], args: Sequence[Any]) -> tuple[int, ...]:
    """Return for each of some sizes the first of them, in the same dim, that equals it."""
    first: dict[tuple[int, int], int] = {}
    return tuple(first.setdefault((d, size_hint(args[i].shape[d])), k) for k, (i, d) in enumerate(places))


def _unshared(gm: fx.GraphModule, example_inputs: Sequence[Any], inner: str) -> Callable[..., Any]:
    """Compile the caller's graph as if we were not there."""
    recorder().record_compile("baseline")
    if inner == "eager":
        return gm.forward
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, list(example_inputs))  # type: ignore[no-any-return]
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs))  # type: ignore[no-any-return]


class SharedGraph:
    """One captured graph with its packed rewrite; holds nothing of a batch between calls."""

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], plan: SharingPlan, options: Options, inner: Any
    ) -> None:
        self.gm = gm
        self.verified = False
        self.plan = plan
        self.options = options
        self.work = WorkModel(plan)
        count = recorder().record_compile
        dims = dynamic_dims(plan, example_inputs)
        self.packed = CompiledGraph(plan.packed.gm, dims, inner, lambda: count("packed"))
        own = [
            frozenset(d for d in dim if _is_symbolic(node, d))
            for dim, node in zip(dims, (n for n in gm.graph.nodes if n.op == "placeholder"), strict=False)
        ]
        self.original = CompiledGraph(gm, own, inner, lambda: count("baseline"))

    def __call__(self, *args: Any) -> Any:
        """Run one call packed, or as the caller wrote it."""
        plan, options = self.plan, self.options
        rows, columns = batch_size(plan, args)
        if rows < 2 or columns < 1:
            return self._original(args, rows, columns, rows * columns, Code.ONE_ROW if rows else Code.EMPTY_BATCH)
        named = named_batch()
        if not fits(plan, args, named):
            return self._original(args, rows, columns, rows * columns, Code.BAD_INPUT)
        shared_length = 16 if options.min_shared_tokens is None else options.min_shared_tokens
        tree, valid = build_tree(plan, args, shared_length, named)
        if tree.tokens < 2:
            return self._original(args, rows, columns, tree.valid_tokens, Code.EMPTY_BATCH)
        if has_masked_query(plan, valid):
            return self._original(args, rows, columns, tree.valid_tokens, Code.MASKED_QUERY)
        if options.share == "auto" and not worth_sharing(*self.work.of(tree, args), tree, args):
            return self._original(args, rows, columns, tree.valid_tokens, Code.SHARING_DOES_NOT_PAY)
        recorder().record_call(
            rows=rows,
            tokens=tree.valid_tokens,
            padded_tokens=rows * columns,
            unique_tokens=tree.tokens,
            shared=True,
        )
        tree_args = tree_arguments(plan, tree, args)
        if options.verify == "off" or (options.verify == "first" and self.verified):
            return self._packed(*args, *tree_args)
        problem = check_gradients(self.gm, lambda *a: self._packed(*a, *tree_args), args, tree, plan)
        outputs = self._packed(*args, *tree_args)
        problem = problem or check_outputs(self.gm.forward, args, outputs, tree, plan)
        self.verified = True
        if problem is None:
            return outputs
        recorder().record_verify_failure()
        if options.fallback == "error":
            raise VerifyError(f"a shared call is not the unshared one: {problem}")
        logger.warning("a shared call is not the unshared one: %s; returning the unshared result", problem)
        return self.original(*args)

    def _packed(self, *args: Any) -> Any:
        if not self.options.same_forward or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return self.packed(*args)
        # the training forward, so that a policy ratio is exactly 1 at the first step
        with torch.enable_grad():
            outputs = self.packed(*args)
        return [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]

    def _original(self, args: Sequence[Any], rows: int, columns: int, tokens: int, why: Code) -> Any:
        recorder().record_call(
            rows=rows,
            tokens=tokens,
            padded_tokens=rows * columns,
            unique_tokens=tokens,
            shared=False,
            declined_by=why,
        )
        return self.original(*args)


def _is_symbolic(node: fx.Node, dim: int) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return dim < 0
    return isinstance(value, torch.Tensor) and dim >= 0 and isinstance(value.shape[dim], torch.SymInt)
