"""What one attention site does beyond causality, as plain data that can cross an operator's schema."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionRule:
    """The visibility and score of an attention site, besides the tree's own `k <= q < subtree_end[k]`.

    `q` and `k` are the *positions* (columns of the caller's batch) of the query and the key, not packed
    indices. The score of a pair is `softcap(scale * dot) + key_bias[h, k] + bias(q, k)`; the pair is visible
    when it passes the tree's test, the window, the chunk and the predicate.

    Attributes:
        window: A key is visible when `q - k < window`; None means no window. Unit: tokens.
        chunk: A key is visible when `q // chunk == k // chunk`; None means no chunks. Unit: tokens.
        softcap: `x -> softcap * tanh(x / softcap)` is applied to the scaled dot product; None means identity.
        predicate: A sympy expression in `q`, `k`, `a{i}_q`, `a{i}_k` that must be true too; None means true.
            `a{i}_q` is the operator's i-th atom taken at the query, `a{i}_k` at the key.
        bias: A sympy expression in the same symbols that is added to the score; None means zero.
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    predicate: str | None = None
    bias: str | None = None

    def to_json(self) -> str:
        """Return the canonical text: fields that are None left out, keys sorted."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> AttentionRule:
        """Parse the text of `to_json`.

        Raises:
            TypeError: The text names an unknown field.
        """
        return cls(**json.loads(text))

    @property
    def is_fused(self) -> bool:
        """Whether the fused call can take the site: plain causal visibility and no softcap or pair bias."""
        return self == AttentionRule()
