"""`branchfx::tree_attention` against the dense float64 reference: every rule, every path, outputs and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from branchfx.attention_rule import AttentionRule
from branchfx.codegen import reference
from branchfx.codegen.cpu import attention
from branchfx.codegen.registration import register_kernels

register_kernels()

SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PREDICATES = [
    "(a0_k > 0) & (q >= k)",
    "Eq(a0_q, a0_k) | (Mod(q - k, 3) < 2)",
    "(k < 3) | (floor(q/4) <= floor(k/4) + 1)",
    "~(Mod(k, 2) > Mod(q, 3))",
]
BIASES = ["-0.125*(q - k)", "a1_k*Abs(q - k)/8", "Piecewise((a1_q, q > k + 3), (Max(-2, k - q), True))"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree, a rule and the shapes of one call."""

    segments: tuple[tuple[int, int, int], ...]
    position: tuple[int, ...]
    query_index: tuple[int, ...] | None = None
    rule: AttentionRule = dataclasses.field(default_factory=AttentionRule)
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    value_width: int = 8
    has_bias: bool = False
    has_sinks: bool = False

    @property
    def tokens(self) -> int:
        return len(self.position)


@pytest.fixture(autouse=True)
def _nan_filled_empty() -> Iterator[None]:
    """Let `torch.empty` hold NaN, so that a result that reads it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def flat_tree(prefix: int, leaves: int, length: int) -> dict[str, Any]:
    """Return segments and positions of one shared prefix and equal leaves."""
    tokens = prefix + leaves * length
    starts = range(prefix, tokens, length)
    segments = ((0, prefix, tokens), *((s, s + length, s + length) for s in starts))
    return {"segments": segments, "position": (*range(prefix), *([*range(prefix, prefix + length)] * leaves))}


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int]]:
    segments: list[tuple[int, int, int]] = []
    position: list[int] = []

    def grow(depth: int, column: int, length: int) -> None:
        start, slot = len(position), len(segments)
        segments.append((0, 0, 0))
        position.extend(range(column, column + length))
        stop = len(position)
        if depth < 6 and stop < 150:
            equal = draw(st.none() | st.integers(1, 12))
            for _ in range(draw(st.integers(0, 3))):
                below = draw(st.integers(1, 30)) if equal is None else equal
                grow(6 if equal else depth + 1, column + length, below)
        segments[slot] = (start, stop, len(position))

    for _ in range(draw(st.integers(1, 3))):
        grow(0, draw(st.integers(0, 5)), draw(st.integers(1, 60)))
    return segments, position


@st.composite
def query_subsets(draw: st.DrawFn, segments: list[tuple[int, int, int]], tokens: int) -> tuple[int, ...] | None:
    kind = draw(st.sampled_from(["all", "tails", "middles", "scattered", "none"]))
    if kind == "all":
        return None
    kept: list[int] = []
    for start, stop, _ in segments:
        length = stop - start
        first = start + draw(st.integers(0, length))
        last = stop if kind == "tails" else draw(st.integers(first, stop))
        kept.extend(range(first, last))
    if kind == "scattered":
        kept = sorted(draw(st.sets(st.integers(0, tokens - 1), max_size=tokens)))
    return () if kind == "none" else tuple(kept)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    segments, position = draw(trees())
    kv_heads = draw(st.sampled_from([1, 2]))
    rule = AttentionRule(
        window=draw(st.none() | st.integers(1, 70)),
        chunk=draw(st.none() | st.integers(1, 70)),
        softcap=draw(st.sampled_from([None, None, None, 2.0])),
        predicate=draw(st.sampled_from([None, None, None, *PREDICATES])),
        bias=draw(st.sampled_from([None, None, None, *BIASES])),
    )
    if draw(st.booleans()):
        rule = AttentionRule()
    return Case(
        tuple(segments),
        tuple(position),
        draw(query_subsets(segments, len(position))),
        rule,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        width=draw(st.sampled_from([1, 8, 12])),
        value_width=draw(st.sampled_from([8, 12, 5])),
        has_bias=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
    )


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Make the arguments of the operator, the usual transposed views of `[1, N, H, D]`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    index = None if case.query_index is None else torch.tensor(case.query_index, dtype=torch.int64)
    queries = case.tokens if index is None else index.numel()
    bias = None
    if case.has_bias:
        bias = normal(case.heads if case.kv_heads > 1 else 1, case.tokens)
        # keys that padding hides altogether, the first one too: some queries then see nothing.
        bias[:, :2] = -torch.inf
    flags = torch.randint(0, 2, (1, case.tokens), generator=generator)
    return {
        "query": normal(1, queries, case.heads, case.width).transpose(1, 2).requires_grad_(),
        "key": normal(1, case.tokens, case.kv_heads, case.width).transpose(1, 2).requires_grad_(),
        "value": normal(1, case.tokens, case.kv_heads, case.value_width).transpose(1, 2).requires_grad_(),
        "segments": torch.tensor(case.segments, dtype=torch.int64).reshape(-1, 3),
        "position": torch.tensor(case.position, dtype=torch.int64),
        "query_index": index,
        "key_bias": bias,
        "sinks": normal(case.heads).requires_grad_() if case.has_sinks else None,
        "atoms": [flags, normal(case.heads, 1)],
        "scale": 0.4,
        "rule": case.rule.to_json(),
    }


def widen(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the same inputs in float64."""

    def double(x: Any) -> Any:
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().double().requires_grad_(x.requires_grad) if is_float else x

    return {k: [double(a) for a in v] if k == "atoms" else double(v) for k, v in inputs.items()}


def run(op: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return outputs and gradients by name."""
    out, lse = op(**inputs)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    leaves = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    grads = torch.autograd.grad(out, list(leaves.values()), weight)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative L2 distance; minus infinity must be in the same places."""
    assert got.isnan().sum() == 0
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    finite = want != -torch.inf
    distance = (got.double() - want)[finite].norm()
    # gradients that are zero but for rounding (a query with one key) have no relative error.
    return float(distance / want[finite].norm().clamp(min=0.1 * max(want.numel(), 1) ** 0.5))


def check(case: Case, dtype: torch.dtype = torch.float32, tolerance: float = 5e-6) -> None:
    inputs = make_inputs(case, dtype)
    got = run(torch.ops.branchfx.tree_attention, inputs)
    want = run(reference.tree_attention, widen(inputs))
    errors = {name: error(got[name], want[name]) for name in want}
    assert max(errors.values()) <= tolerance, errors


SCATTERED = Case(**flat_tree(40, 3, 9), query_index=(0, *range(1, 67, 2)), has_bias=True)


@given(cases())
@example(SCATTERED)
@settings(SETTINGS, max_examples=60)
def test_matches_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=70), AttentionRule(softcap=3.0)], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_several_blocks(rule: AttentionRule, has_sinks: bool) -> None:
    check(Case(**flat_tree(700, 4, 45), rule=rule, has_sinks=has_sinks, has_bias=has_sinks))


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=64), AttentionRule(chunk=90)], ids=str)
def test_scattered_queries_whose_first_keys_are_all_masked(rule: AttentionRule) -> None:
    # more than one of the flash kernel's own key blocks (512) lies below the window of a block's last query.
    check(Case(**flat_tree(1300, 3, 40), query_index=tuple(range(0, 1420, 3)), rule=rule, has_bias=True))


@given(cases())
@settings(SETTINGS, max_examples=15)
def test_float64(case: Case) -> None:
    check(case, torch.float64, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=33), AttentionRule(softcap=1e4)], ids=str)
@pytest.mark.parametrize("depth", [1, 4])
def test_low_precision_as_close_as_sdpa(dtype: torch.dtype, rule: AttentionRule, depth: int) -> None:
    tokens = 60 * depth + 4 * 16
    chain = [(60 * i, 60 * i + 60, tokens) for i in range(depth)]
    leaves = [(60 * depth + 16 * i, 60 * depth + 16 * i + 16, 60 * depth + 16 * i + 16) for i in range(4)]
    position = (*range(60 * depth), *([*range(60 * depth, 60 * depth + 16)] * 4))
    case = Case((*chain, *leaves), position, rule=rule, width=32, value_width=32)
    inputs = make_inputs(case, dtype)
    seen = reference.visible(rule, inputs["segments"], inputs["position"], torch.arange(tokens))

    def sdpa(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(query, key, value, seen, scale=0.4, enable_gqa=True), query.new_zeros(0)

    want = run(reference.tree_attention, widen(inputs))
    got, plain = run(torch.ops.branchfx.tree_attention, inputs), run(sdpa, inputs)
    for name in ("out", "query", "key", "value"):
        assert error(got[name], want[name]) <= 2 * error(plain[name], want[name]), name


def test_queries_that_see_nothing() -> None:
    case = Case(**flat_tree(20, 3, 7), rule=AttentionRule(predicate="q > k + 2"))
    inputs = make_inputs(case)
    got = run(torch.ops.branchfx.tree_attention, inputs)
    assert (got["out"][:, :, :3] == 0).all()
    assert (got["lse"][:, :, :3] == -torch.inf).all()
    assert (got["query"][:, :, :3] == 0).all()
    check(case)


def test_a_gradient_that_is_expanded_and_operands_in_any_layout() -> None:
    inputs = make_inputs(Case(**flat_tree(20, 3, 7)))
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].detach().mT.contiguous().mT.requires_grad_()
    names = ("query", "key", "value")
    got = torch.autograd.grad(torch.ops.branchfx.tree_attention(**inputs)[0].sum(), [inputs[n] for n in names])
    wide = widen(inputs)
    want = torch.autograd.grad(reference.tree_attention(**wide)[0].sum(), [wide[n] for n in names])
    for g, w in zip(got, want, strict=True):
        assert error(g, w) <= 5e-6


def test_no_grad_gives_the_same_bits() -> None:
    inputs = make_inputs(Case(**flat_tree(50, 4, 9)))
    out = torch.ops.branchfx.tree_attention(**inputs)[0]
    with torch.no_grad():
        assert torch.equal(torch.ops.branchfx.tree_attention(**inputs)[0], out)
    with torch.inference_mode():
        assert torch.equal(torch.ops.branchfx.tree_attention(**inputs)[0], out)


def test_second_derivative_is_refused() -> None:
    inputs = make_inputs(Case(**flat_tree(20, 3, 7)))
    out = torch.ops.branchfx.tree_attention(**inputs)[0]
    (grad,) = torch.autograd.grad(out.square().sum(), inputs["query"], create_graph=True)
    with pytest.raises(NotImplementedError):
        grad.sum().backward()


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest number of elements that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                # an expanded view holds no memory of its own.
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [
        (AttentionRule(), 3000),
        (AttentionRule(window=64), 20000),
        (AttentionRule(chunk=100), 8000),
        (AttentionRule(softcap=9.0, predicate="q - k < 128"), 2500),
        (AttentionRule(softcap=9.0, window=64), 6000),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_scattered", [False, True])
def test_memory_is_linear(rule: AttentionRule, tokens: int, is_scattered: bool) -> None:
    index = tuple(range(0, tokens, 3)) if is_scattered else None
    case = Case(((0, tokens, tokens),), tuple(range(tokens)), index, rule, heads=2, kv_heads=1)
    inputs = make_inputs(case)
    arguments: dict[str, Any] = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        out, lse = attention.tree_attention(**arguments)
        attention.tree_attention_backward(out, out=out, lse=lse, **arguments)
    assert largest.numel <= max(128 * tokens, 2 * 256 * 512)


def test_a_window_does_the_work_of_the_window() -> None:
    class Scores(TorchDispatchMode):  # type: ignore[no-untyped-call]
        pairs = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention" in str(func):
                self.pairs += args[0].shape[0] * args[0].shape[2] * args[1].shape[2]
            return func(*args, **(kwargs or {}))

    case = Case(**flat_tree(4000, 8, 40), rule=AttentionRule(window=100), heads=1, kv_heads=1)
    inputs = make_inputs(case)
    with torch.no_grad(), Scores() as scores:  # type: ignore[no-untyped-call]
        attention.tree_attention(**inputs)
    assert scores.pairs <= case.tokens * (100 + 256)


@pytest.mark.parametrize(
    "case",
    [
        Case(**flat_tree(20, 3, 7), has_sinks=True, has_bias=True),
        Case(**flat_tree(20, 3, 7), query_index=(19, 20, 25, 33), value_width=12),
        Case(**flat_tree(20, 3, 7), rule=AttentionRule(window=6), heads=1, kv_heads=1),
        Case(**flat_tree(20, 3, 7), rule=AttentionRule(softcap=3.0, predicate=PREDICATES[0], bias=BIASES[1])),
    ],
)
def test_opcheck(case: Case) -> None:
    inputs = make_inputs(case)
    torch.library.opcheck(torch.ops.branchfx.tree_attention.default, (), inputs)
    arguments: dict[str, Any] = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    out, lse = torch.ops.branchfx.tree_attention(**arguments)
    arguments |= {"grad_out": torch.randn_like(out), "out": out, "lse": lse}
    torch.library.opcheck(torch.ops.branchfx.tree_attention_backward.default, (), arguments)


def test_compiles_once_for_every_tree() -> None:
    rule = AttentionRule().to_json()

    def layer(x: Tensor, weight: Tensor, segments: Tensor, position: Tensor, index: Tensor) -> Tensor:
        heads = [t.reshape(1, -1, 2, 8).transpose(1, 2) for t in (x @ weight).chunk(3, -1)]
        heads[0] = heads[0].index_select(2, index)
        out, _ = torch.ops.branchfx.tree_attention(*heads, segments, position, index, None, None, [], 0.4, rule)
        result: Tensor = out.transpose(1, 2).reshape(1, -1, 16).sin()
        return result

    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    weight = torch.randn(12, 48, requires_grad=True)
    for prefix, leaves, length in ((20, 3, 7), (31, 5, 4), (9, 2, 11)):
        tree = flat_tree(prefix, leaves, length)
        tokens = len(tree["position"])
        x = torch.randn(1, tokens, 12, requires_grad=True)
        segments, position = torch.tensor(tree["segments"]), torch.tensor(tree["position"])
        arguments = (x, weight, segments, position, torch.arange(prefix - 1, tokens))
        want, got = layer(*arguments), compiled(*arguments)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(want)
        for g, w in zip(
            torch.autograd.grad(got, (x, weight), grad), torch.autograd.grad(want, (x, weight), grad), strict=True
        ):
            assert error(g, w.double()) <= 1e-5
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), want, rtol=1e-5, atol=1e-5)
    # one for training, one for no_grad.
    assert counter.frame_count == 2
