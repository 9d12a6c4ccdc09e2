"""The facts that flow between passes: which dims of a value are rows and positions, where it may be shared.

A dim is a product of factors in row-major order, so `[B, T, C]`, `[B*T, C]` and `[B*H, T, D]` are described
alike and a `view` is a regrouping of the same factor sequence. The idea of one fact a value and one rule an
operator is that of JAX's batching interpreter (jax/_src/interpreters/batching.py).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import sympy
from torch import fx

from branchfx.attention_rule import AttentionRule


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The axis of the caller's rows, size B."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The columns `[start, stop)` of the caller's batch; None is the end of the batch on that side."""

    start: sympy.Expr | None = None
    stop: sympy.Expr | None = None


BASE = Window()


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """An axis of positions: the columns of `window`, size T for `BASE`."""

    window: Window = BASE


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """An axis of (token, choice) pairs in an order that `order` names: the node that sorted them."""

    order: str
    factors: tuple[Factor, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A constant factor of a dim."""

    value: int


Factor = Row | Position | Slots | Size
Dim = tuple[Factor, ...]


class Data(enum.IntEnum):
    """What a value's entries depend on, besides parameters and their own index.

    NONE: nothing. ORDINAL: the index of the row (such as `arange(B*T)`): equal tokens of two rows differ.
    TOKEN: the token inputs of its own row at columns up to its own position. ROW: anything else.
    """

    NONE = 0
    TOKEN = 1
    ORDINAL = 2
    ROW = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SlotIndex:
    """What an index tensor of expert routing holds.

    Attributes:
        kind: `slot`: the flat (token, choice) pair that a sorted slot came from. `token`: its token. `inverse`: the
            sorted slot of a flat pair. `counts`: slots an expert, or their running sum. `iota`: 0, 1, 2, ...
        order: The node that sorted the slots; "" for `iota`.
    """

    kind: str
    order: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What is known of one value: the factors of each dim, what its entries depend on, and what they index."""

    dims: tuple[Dim, ...]
    data: Data = Data.NONE
    index: SlotIndex | None = None

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors, row-major."""
        return tuple(f for dim in self.dims for f in dim)

    @property
    def positions(self) -> tuple[Position, ...]:
        """The position factors, in order."""
        return tuple(f for f in self.factors if isinstance(f, Position))

    @property
    def has_row(self) -> bool:
        """Whether a dim holds the caller's rows."""
        return any(isinstance(f, Row) for f in self.factors)

    @property
    def has_slots(self) -> bool:
        """Whether a dim holds permuted (token, choice) pairs."""
        return any(isinstance(f, Slots) for f in self.factors)

    @property
    def is_pair(self) -> bool:
        """Whether the value is indexed by a query and a key."""
        return len(self.positions) >= 2

    @property
    def is_token(self) -> bool:
        """Whether the value at (b, t) is a function of row b's tokens at columns <= t, and of nothing else."""
        if self.data is not Data.TOKEN:
            return False
        return self.has_slots or (self.has_row and len(self.positions) == 1)

    @property
    def is_position(self) -> bool:
        """Whether the value is a function of the column alone."""
        return self.data is Data.NONE and not self.has_row and len(self.positions) == 1

    @property
    def is_replicated(self) -> bool:
        """Whether the value is the same for all rows and positions."""
        return self.data is Data.NONE and not any(isinstance(f, (Row, Position, Slots)) for f in self.factors)

    @property
    def heads(self) -> int:
        """The product of the constants before the last two dims: heads, of what an attention reads."""
        return math.prod(f.value for dim in self.dims[:-2] for f in dim if isinstance(f, Size))

    def where_is(self, kind: type) -> int:
        """Return the dim that is exactly one factor of `kind`, or -1."""
        return next((i for i, d in enumerate(self.dims) if len(d) == 1 and isinstance(d[0], kind)), -1)

    def __str__(self) -> str:
        return f"{self.data.name.lower()}[{', '.join('*'.join(factor_text(f) for f in d) or '1' for d in self.dims)}]"


def factor_text(factor: Factor) -> str:
    """Return the short name of a factor: `B`, `T`, `T[-65:]`, or its size."""
    if isinstance(factor, Row):
        return "B"
    if isinstance(factor, Position):
        w = factor.window
        return "T" if w == BASE else f"T[{'' if w.start is None else w.start}:{'' if w.stop is None else w.stop}]"
    if isinstance(factor, Slots):
        return f"slots({'*'.join(factor_text(f) for f in factor.factors)})"
    return str(factor.value)


class InputRole(enum.Enum):
    """What an input of the graph is to the analysis."""

    PARAMETER = "parameter"
    TOKEN = "token"
    SYMBOL = "symbol"
    OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True)
class InputSpec:
    """One placeholder: its name, role, and whether it requires a gradient."""

    name: str
    role: InputRole
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class CapturedGraph:
    """A functional ATen graph, polymorphic in B and T; `node.meta["val"]` holds the symbolic value.

    Attributes:
        gm: The graph; its outputs are one flat tuple.
        inputs: One spec a placeholder, in order.
        rows: The symbol B.
        positions: The symbol T.
        bindings: For each free symbol, the (input index, dim) that gives its value; dim -1 is a SymInt input.
        assumed: Relations between sizes that must hold in a call, such as T <= 2048.
        named: The input of hidden states whose tokens the caller names; "" where the graph is given token ids.
        tokens: The input of token ids; "" where the graph sees hidden states.
        tables: Mask buffers that hold a triangle or band: placeholder name to the band (see `tables`).
    """

    gm: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    rows: sympy.Symbol
    positions: sympy.Symbol
    bindings: Mapping[sympy.Symbol, tuple[int, int]]
    assumed: tuple[sympy.Basic, ...] = ()
    tables: Mapping[str, int] = dataclasses.field(default_factory=dict)
    named: str = ""
    tokens: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSite:
    """One attention, however it was spelled: `out = softmax(score(q, k)) v` over the visible keys.

    Attributes:
        node: The node whose value the site replaces.
        query: Node of the queries; `key`, `value` likewise. Their layouts name rows, heads and positions.
        rule: Window, chunk, softcap, predicate, bias.
        scale: Factor of the dot product.
        key_valid: Bool token values at the key that must be true (a padding mask), as nodes.
        key_bias: A token or position value at the key that is added to the score, or None.
        sinks: Node of the per-head extra logit, or None.
        atoms: Nodes of the values that `rule` names `a0`, `a1`, ...
        additive: Whether masking was spelled by adding a large negative number (a query with no visible key
            then attends to everything, future included).
        reads_columns: Whether the rule uses absolute columns (not only differences q - k).
        transposed_key: Whether the key node holds K^T, as the written-out product does.
    """

    node: str
    query: str
    key: str
    value: str
    rule: AttentionRule
    scale: float
    key_valid: tuple[str, ...] = ()
    key_bias: str | None = None
    sinks: str | None = None
    atoms: tuple[str, ...] = ()
    additive: bool = False
    reads_columns: bool = False
    transposed_key: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Analysis results, bound to one captured graph; keyed by node name."""

    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    sites: Mapping[str, AttentionSite]
    notes: Mapping[str, Any]
