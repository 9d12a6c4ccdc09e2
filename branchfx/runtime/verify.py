"""Compare a shared call's outputs with the unshared graph's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2


def check_outputs(
    original: Callable[..., Any], args: Sequence[Any], shared: Sequence[Any], *, skips_padding: bool
) -> str | None:
    """Run the unshared graph without gradients and compare.

    Args:
        original: The captured graph.
        args: Its inputs.
        shared: What the packed graph returned.
        skips_padding: Whether positions whose outputs are all zero were left out as padding.

    Returns:
        What differs, with the relative L2 distance, or None.
    """
    with torch.no_grad():
        expected = original(*args)
    for number, (ours, theirs) in enumerate(zip(shared, expected, strict=True)):
        if not isinstance(ours, Tensor) or not ours.is_floating_point():
            continue
        difference, reference = (ours.detach() - theirs).double(), theirs.double()
        if skips_padding and ours.dim() >= 3:
            kept = (ours.detach() != 0).flatten(2).any(-1)
            difference, reference = difference[kept], reference[kept]
        distance = float(difference.norm() / reference.norm().clamp_min(1e-30)) if reference.numel() else 0.0
        limit = _TOLERANCE.get(ours.dtype, _LOW_PRECISION)
        if not distance <= limit and bool(reference.isfinite().all()):
            return f"output {number} differs by {distance:.2e} (relative L2; allowed {limit:.0e})"
    return None
