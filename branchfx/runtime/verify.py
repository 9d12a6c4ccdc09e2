"""Compare a shared call's outputs with those of the unshared graph.

The unshared graph runs without gradients. Where its outputs belong to rows it runs on one row at a time, so that no
second batch of outputs is held. A graph that was captured for one batch size may refuse a row, or give a row other
values; then the whole batch decides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from branchfx.diagnostics import Code
from branchfx.passes.pipeline import SharingPlan
from branchfx.runtime.rows import OutputPlace, is_float, output_places, output_tolerances, split_rows
from branchfx.token_tree import TokenTree

logger = logging.getLogger("branchfx.verify")

_NEGLIGIBLE = 1e-3
"""Root mean square below which an output is measured as if it had this: a loss that cancels to zero is no mismatch."""

_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
_Rows = list[tuple[float, float, int]]


def check_outputs(
    original: Callable[..., Any],
    args: Sequence[Any],
    shared: Sequence[Any],
    tree: TokenTree,
    plan: SharingPlan,
) -> str | None:
    """Run the unshared graph without gradients and compare floating-point outputs where the tree has tokens.

    An output is compared row by row: the relative L2 distance of a row, with a row's norm taken to be at least the
    mean one, must be within 1e-3, or 5e-2 where a dtype of 16 bits takes part.

    Args:
        original: The captured graph.
        args: Its inputs.
        shared: What the packed graph returned.
        tree: The call's tree.
        plan: What says which dims of inputs and outputs are rows and positions.

    Returns:
        What differs, with the distance, or None.
    """
    if any(note.code == Code.RANDOM_OP for note in plan.notes):
        logger.info("outputs are not compared: the graph draws random numbers in row space")
        return None
    devices = sorted({a.device.index for a in args if isinstance(a, Tensor) and a.device.type == "cuda"})
    # the caller's random numbers are not used up by the second run
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        comparison = _Comparison(shared, output_places(shared, args, tree, plan), output_tolerances(args, shared, plan))
        pieces = None if not comparison.is_by_row else split_rows(plan, args)
        if pieces is not None and _agrees_by_row(comparison, original, pieces):
            return None
        return comparison.whole(original(*args))


def _agrees_by_row(comparison: _Comparison, original: Callable[..., Any], pieces: Iterator[list[Any]]) -> bool:
    try:
        return comparison.by_row(original(*piece) for piece in pieces) is None
    except _REFUSALS as error:
        logger.info("the unshared graph does not take one row: %s", str(error).partition("\n")[0])
        return False


class _Comparison:
    """The shared outputs and how each is compared."""

    def __init__(self, shared: Sequence[Any], places: Sequence[OutputPlace | None], limits: Sequence[float]) -> None:
        self.shared, self.places, self.limits = shared, places, limits

    @property
    def is_by_row(self) -> bool:
        """Whether every compared output has a dim of rows."""
        return all(p is not None for p, o in zip(self.places, self.shared, strict=True) if is_float(o))

    def by_row(self, expected: Iterator[Sequence[Any]]) -> str | None:
        """Compare with the outputs of one-row runs."""
        found: dict[int, _Rows] = {}
        for row, outputs in enumerate(expected):
            for number, (ours, theirs) in enumerate(zip(self.shared, outputs, strict=True)):
                place = self.places[number]
                if is_float(ours) and place is not None:
                    count = ours.shape[place.dim] if place.kept is None else place.kept.shape[0]
                    kept = None if place.kept is None else place.kept[row]
                    problem, measured = _measure(place.rows(ours, count)[row], place.rows(theirs, 1)[0], kept)
                    if problem is not None:
                        return f"output {number} {problem} in row {row}"
                    found.setdefault(number, []).append(measured)
        return self._verdict(found)

    def whole(self, expected: Sequence[Any]) -> str | None:
        """Compare with the outputs of one run."""
        found: dict[int, _Rows] = {}
        for number, (ours, theirs) in enumerate(zip(self.shared, expected, strict=True)):
            if not is_float(ours):
                continue
            if ours.shape != theirs.shape:
                return f"output {number} has shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
            for row, (a, b, kept) in enumerate(self._row_pairs(self.places[number], ours, theirs)):
                problem, measured = _measure(a, b, kept)
                if problem is not None:
                    return f"output {number} {problem} in row {row}"
                found.setdefault(number, []).append(measured)
        return self._verdict(found)

    def _row_pairs(
        self, place: OutputPlace | None, ours: Tensor, theirs: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        if place is None:
            yield ours, theirs, None
            return
        count = ours.shape[place.dim] if place.kept is None else place.kept.shape[0]
        for row, (a, b) in enumerate(zip(place.rows(ours, count), place.rows(theirs, count), strict=True)):
            yield a, b, None if place.kept is None else place.kept[row]

    def _verdict(self, found: dict[int, _Rows]) -> str | None:
        for number, rows in found.items():
            mean = math.sqrt(sum(reference for _, reference, _ in rows) / len(rows))
            for row, (difference, reference, entries) in enumerate(rows):
                least = max(mean, _NEGLIGIBLE * math.sqrt(entries), 1e-30)
                distance = math.sqrt(difference) / max(math.sqrt(reference), least)
                if distance > self.limits[number]:
                    limit = self.limits[number]
                    return f"output {number} differs by {distance:.2e} in row {row} (relative L2; allowed {limit:.0e})"
        return None


def _measure(ours: Tensor, theirs: Tensor, kept: Tensor | None) -> tuple[str | None, tuple[float, float, int]]:
    """Return what cannot be measured, and the squared distance, the squared norm and the number of entries."""
    nothing = (0.0, 0.0, 0)
    if ours.shape != theirs.shape:
        return f"has shape {tuple(ours.shape)}, not {tuple(theirs.shape)}", nothing
    ours, theirs = ours.detach(), theirs.detach()
    if kept is not None:
        kept = kept.to(ours.device)
        ours, theirs = ours[kept], theirs[kept]
    if not ours.numel():
        return None, nothing
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return "is not finite at the same places", nothing
    difference = torch.where(finite, ours - theirs, 0).double().square().sum()
    reference = torch.where(finite, theirs, 0).double().square().sum()
    return None, (float(difference), float(reference), ours.numel())
