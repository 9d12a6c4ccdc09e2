"""`with branchfx.rollouts(ids, mask):` names the token tree for graphs that see hidden states only."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NamedBatch:
    """The rollouts that the caller says a batch of hidden states belongs to.

    Attributes:
        input_ids: [B, T] ints.
        attention_mask: [B, T], not zero at real tokens; None where all are.
    """

    input_ids: Tensor
    attention_mask: Tensor | None

    @property
    def keys(self) -> list[Tensor]:
        """Token values, [B, T] each, that say what is equal."""
        return [self.input_ids] if self.attention_mask is None else [self.input_ids, self.attention_mask]


_current: contextvars.ContextVar[NamedBatch | None] = contextvars.ContextVar("branchfx_rollouts", default=None)


@contextlib.contextmanager
def rollouts(input_ids: Tensor, attention_mask: Tensor | None = None) -> Iterator[None]:
    """Say which tokens the hidden states `[B, T, d]` of the calls inside belong to.

    A graph that is given ids finds its tree itself; this is for one that is given `inputs_embeds` or hidden states,
    of which nothing proves that equal prefixes have equal values. Here the caller says so: at two positions with the
    same ids (and mask) up to there, the hidden states must be equal. Gradients of shared positions are summed into
    the first row that has them, which gives the parameters upstream the gradients that they had.

    Args:
        input_ids: [B, T] ints.
        attention_mask: [B, T]; None where every token is real.

    Raises:
        ValueError: The shapes are not [B, T] and equal.
    """
    if input_ids.dim() != 2 or (attention_mask is not None and attention_mask.shape != input_ids.shape):
        shapes = [tuple(x.shape) for x in (input_ids, attention_mask) if x is not None]
        raise ValueError(f"input_ids and attention_mask must be [B, T], not {' and '.join(map(str, shapes))}")
    token = _current.set(NamedBatch(input_ids.detach(), None if attention_mask is None else attention_mask.detach()))
    try:
        yield
    finally:
        _current.reset(token)


def named_batch() -> NamedBatch | None:
    """Return the batch named by the innermost `rollouts` that is open."""
    return _current.get()
