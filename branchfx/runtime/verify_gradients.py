"""Compare a shared call's gradients with those of the unshared graph, for random gradients of its outputs.

Both run a forward and a backward of their own, before the call that the user sees; the unshared one row by row where
its outputs belong to rows, so that it holds the activations of one row at a time. Gradients go to no `.grad`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from branchfx.diagnostics import Code
from branchfx.passes.pipeline import SharingPlan
from branchfx.runtime.rows import OutputPlace, is_float, output_places, output_tolerances, split_rows
from branchfx.token_tree import TokenTree

logger = logging.getLogger("branchfx.verify")

_NEGLIGIBLE = 1e-3
"""A gradient smaller than this share of the largest one's norm is held against that."""

_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
_Gradients = list[Tensor | None]


def check_gradients(
    gm: fx.GraphModule,
    shared: Callable[..., Any],
    args: Sequence[Any],
    tree: TokenTree,
    plan: SharingPlan,
) -> str | None:
    """Run both graphs with gradients and compare those of every input that requires one.

    The relative L2 distance must be within the tolerance of `check_outputs`.

    Args:
        gm: The captured graph.
        shared: The packed graph, as a function of the same inputs.
        args: The inputs.
        tree: The call's tree.
        plan: The graph's plan.

    Returns:
        Which input's gradient differs, with the distance, or None.
    """
    trained = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    if not trained or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    if any(note.code == Code.RANDOM_OP for note in plan.notes):
        logger.info("gradients are not compared: the graph draws random numbers in row space")
        return None
    devices = sorted({a.device.index for a in args if isinstance(a, Tensor) and a.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        outputs = shared(*args)
        places = output_places(outputs, args, tree, plan)
        limit = max(output_tolerances(args, outputs, plan), default=0.0)
        weights = [_weights(o, place) for o, place in zip(outputs, places, strict=True)]
        ours = _gradients(outputs, weights, args, trained)
        del outputs
        theirs = _by_row(gm.forward, args, trained, weights, places, plan)
        if theirs is None:
            theirs = _gradients(gm(*args), weights, args, trained)
    # the gradient of named hidden states goes to one row of those that share: only their sum is the same
    inputs = [spec.name for spec in plan.captured.inputs]
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    pairs = {
        names[i]: (a, b) for i, a, b in zip(trained, ours, theirs, strict=True) if inputs[i] != plan.captured.named
    }
    return _compare(pairs, limit)


def _weights(output: Any, place: OutputPlace | None) -> Tensor | None:
    """Return random gradients of an output, zero where the tree has no token; None where it needs none."""
    if not is_float(output) or not output.requires_grad:
        return None
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator).to(output)
    if place is not None and place.kept is not None:
        rows = place.rows(weights, place.kept.shape[0])
        rows[~place.kept.to(weights.device)] = 0.0
        if place.merged:
            # a reshape may have copied
            weights = rows.movedim((0, 1), (place.dim, place.dim + 1)).reshape(weights.shape)
    return weights


def _gradients(
    outputs: Sequence[Any], weights: Sequence[Tensor | None], args: Sequence[Any], at: list[int]
) -> _Gradients:
    pairs = [(o, w) for o, w in zip(outputs, weights, strict=True) if w is not None]
    if not pairs:
        return [None] * len(at)
    found = torch.autograd.grad([o for o, _ in pairs], [args[i] for i in at], [w for _, w in pairs], allow_unused=True)
    return list(found)


def _by_row(
    original: Callable[..., Any],
    args: Sequence[Any],
    at: list[int],
    weights: Sequence[Tensor | None],
    places: Sequence[OutputPlace | None],
    plan: SharingPlan,
) -> _Gradients | None:
    """Return the sum of the rows' gradients, or None where the graph cannot be run a row at a time."""
    if any(place is None for place, w in zip(places, weights, strict=True) if w is not None):
        return None
    pieces = split_rows(plan, args)
    if pieces is None:
        return None
    try:
        return _sum(original, pieces, at, weights, places)
    except _REFUSALS as error:
        logger.info("the unshared graph does not take one row: %s", str(error).partition("\n")[0])
        return None


def _sum(
    original: Callable[..., Any],
    pieces: Iterator[list[Any]],
    at: list[int],
    weights: Sequence[Tensor | None],
    places: Sequence[OutputPlace | None],
) -> _Gradients:
    total: _Gradients = [None] * len(at)
    for row, piece in enumerate(pieces):
        outputs = original(*piece)
        pairs = [(o, w, p) for o, w, p in zip(outputs, weights, places, strict=True) if w is not None and p is not None]
        own = [p.rows(o, 1)[0] for o, _, p in pairs]
        given = [p.rows(w, w.shape[p.dim] if p.kept is None else p.kept.shape[0])[row] for _, w, p in pairs]
        found = torch.autograd.grad(own, [piece[i] for i in at], given, allow_unused=True)
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, found, strict=True)]
    return total


def _compare(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]], limit: float) -> str | None:
    norms = {name: 0.0 if g is None else float(g.double().norm()) for name, (_, g) in pairs.items()}
    least = max((n for n in norms.values() if math.isfinite(n)), default=0.0) * _NEGLIGIBLE
    for name, (a, b) in pairs.items():
        if a is None and b is None:
            continue
        if a is None or b is None:
            # one of them has no path to the input: then the other one's must be zero
            present = a if b is None else b
            if present is not None and bool(present.any()):
                return f"the gradient of {name} is {'missing' if a is None else 'not missing'}"
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return f"the gradient of {name} is not finite at the same places"
        difference = torch.where(b.isfinite(), a - b, 0).double().norm()
        distance = float(difference) / max(norms[name] if math.isfinite(norms[name]) else 0.0, least, 1e-30)
        if distance > limit:
            return f"the gradient of {name} differs by {distance:.2e} (relative L2; allowed {limit:.0e})"
    return None
