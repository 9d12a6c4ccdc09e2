"""`branchfx::unpack` and `branchfx::unpack_gather` against their references."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchfx.codegen import reference
from branchfx.codegen.registration import register_kernels

register_kernels()

OPS = torch.ops.branchfx
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_index(tokens: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2 if tokens else -1, max(tokens, 0), shape, generator=generator)


@given(
    st.integers(1, 20),
    st.sampled_from([(7,), (3, 9), (2, 3, 4), (0,), (40,)]),
    st.sampled_from([(), (5,), (2, 3), (0,)]),
    st.sampled_from(DTYPES),
)
@settings(SETTINGS, max_examples=60)
def test_unpack_matches_reference(
    tokens: int, shape: tuple[int, ...], rest: tuple[int, ...], dtype: torch.dtype
) -> None:
    index = make_index(tokens, shape)
    packed = torch.randn(tokens, *rest).to(dtype).requires_grad_()
    wide = packed.detach().double().requires_grad_()
    out, want = OPS.unpack(packed, index), reference.unpack(wide, index)
    assert torch.equal(out.double(), want)
    grad = torch.randn(out.shape).to(dtype)
    (got,) = torch.autograd.grad(out, packed, grad)
    (expected,) = torch.autograd.grad(want, wide, grad.double())
    assert_sum_rounded_once(got, expected)


@given(st.integers(1, 9), st.sampled_from([(7,), (3, 9), (0,)]), st.integers(1, 3), st.sampled_from(DTYPES))
@settings(SETTINGS, max_examples=60)
def test_unpack_gather_matches_reference(tokens: int, shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    index = make_index(tokens, shape)
    label = torch.randint(0, 4, (*shape, k), generator=torch.Generator().manual_seed(1))
    label[index < 0] = -100
    packed = torch.randn(tokens, 4).to(dtype).requires_grad_()
    wide = packed.detach().double().requires_grad_()
    out, want = OPS.unpack_gather(packed, index, label), reference.unpack_gather(wide, index, label)
    assert torch.equal(out.double(), want)
    grad = torch.randn(out.shape).to(dtype)
    (got,) = torch.autograd.grad(out, packed, grad)
    (expected,) = torch.autograd.grad(want, wide, grad.double())
    assert_sum_rounded_once(got, expected)


def assert_sum_rounded_once(got: Tensor, expected: Tensor) -> None:
    """Assert float32 sums for 16-bit values: no more than one rounding away from the exact sum."""
    if got.dtype in (torch.bfloat16, torch.float16):
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), expected, rtol=eps / 2 * 1.01, atol=1e-5)
    else:
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    packed = torch.empty(0, 3, requires_grad=True)
    out = OPS.unpack(packed, torch.full((2, 2), -1))
    assert out.shape == (2, 2, 3)
    assert (out == 0).all()
    out.sum().backward()
    with pytest.raises(IndexError):
        OPS.unpack(packed, torch.tensor([0]))


@pytest.mark.parametrize(("index", "label"), [(0, 4), (0, -1), (3, 0)])
def test_out_of_range_raises(index: int, label: int) -> None:
    packed = torch.randn(3, 4)
    with pytest.raises(IndexError):
        OPS.unpack_gather(packed, torch.tensor([1, index]), torch.tensor([[0], [label]]))
    if index == 3:
        with pytest.raises(IndexError):
            OPS.unpack(packed, torch.tensor([1, index]))


def test_garbage_of_token_zero_does_not_leak_into_absent_rows() -> None:
    packed = torch.full((2, 3), torch.nan)
    assert (OPS.unpack(packed, torch.tensor([-1])) == 0).all()
    assert (OPS.unpack_gather(packed, torch.tensor([-1]), torch.tensor([[-100]])) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    index = torch.randint(-1, 300, (8, 500), generator=torch.Generator().manual_seed(2))
    grad = torch.randn(8, 500, 64).to(dtype)
    label = torch.randint(0, 3, (8, 500, 1))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            column = OPS.unpack_gather_backward(grad[..., :1], index, label, 300, 3)
            results.append((OPS.unpack_backward(grad, index, 300), column))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])


def test_results_do_not_read_uninitialised_memory() -> None:
    index = make_index(9, (4, 5))
    label = torch.zeros(4, 5, 2, dtype=torch.int64)
    torch.use_deterministic_algorithms(True)
    try:
        assert OPS.unpack(torch.ones(9, 3), index).isfinite().all()
        assert OPS.unpack_gather(torch.ones(9, 3), index, label).isfinite().all()
        assert OPS.unpack_backward(torch.ones(4, 5, 3), index, 30).isfinite().all()
        assert OPS.unpack_gather_backward(torch.ones(4, 5, 2), index, label, 30, 3).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_second_derivative() -> None:
    packed = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index, label = make_index(5, (2, 4)), torch.randint(0, 3, (2, 4, 2))
    torch.autograd.gradgradcheck(lambda x: OPS.unpack(x, index).square(), (packed,))
    torch.autograd.gradgradcheck(lambda x: OPS.unpack_gather(x, index, label).square(), (packed,))


def test_opcheck() -> None:
    packed = torch.randn(9, 4, requires_grad=True)
    index = make_index(9, (3, 5))
    label = torch.randint(0, 4, (3, 5, 2))
    for op, arguments in (
        (OPS.unpack, (packed, index)),
        (OPS.unpack_backward, (torch.randn(3, 5, 4), index, 9)),
        (OPS.unpack_gather, (packed, index, label)),
        (OPS.unpack_gather_backward, (torch.randn(3, 5, 2), index, label, 9, 4)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_compiles_once_for_every_size() -> None:
    def loss(hidden: Tensor, weight: Tensor, index: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = (hidden @ weight).log_softmax(-1)
        return OPS.unpack_gather(logits, index, label).squeeze(-1), OPS.unpack(hidden.exp(), index)

    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(loss, backend=counter, dynamic=True, fullgraph=True)
    weight = torch.randn(6, 11, requires_grad=True)
    for tokens, rows, columns in ((20, 3, 9), (33, 4, 10), (7, 2, 5)):
        hidden = torch.randn(tokens, 6, requires_grad=True)
        index = make_index(tokens, (rows, columns))
        label = torch.randint(0, 11, (rows, columns, 1))
        wanted, gotten = loss(hidden, weight, index, label), compiled(hidden, weight, index, label)
        torch.testing.assert_close(gotten, wanted)
        grads = [torch.randn_like(x) for x in wanted]
        torch.testing.assert_close(
            torch.autograd.grad(gotten, (hidden, weight), grads), torch.autograd.grad(wanted, (hidden, weight), grads)
        )
    assert counter.frame_count == 1
