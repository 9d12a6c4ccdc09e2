"""`check_outputs` on right and on deliberately wrong outputs, and the option `verify` end to end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import branchfx
from branchfx import backend as backend_module
from branchfx.codegen.registration import register_kernels
from branchfx.errors import VerifyError
from branchfx.passes.pipeline import SharingPlan, plan_sharing
from branchfx.runtime.packed import build_tree, tree_arguments
from branchfx.runtime.verify import check_outputs
from branchfx.runtime.verify_gradients import check_gradients
from branchfx.token_tree import TokenTree
from tests.batches import Batch, group, tree
from tests.models import build

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@dataclasses.dataclass
class Call:
    gm: fx.GraphModule
    args: tuple[Any, ...]
    plan: SharingPlan
    tree: TokenTree
    shared: list[Any]

    def check(self, shared: Sequence[Any] | None = None, original: Callable[..., Any] | None = None) -> str | None:
        return check_outputs(
            original or self.gm.forward, self.args, self.shared if shared is None else shared, self.tree, self.plan
        )


def _call(function: Callable[..., Any], batch: Batch, *, dynamic: bool | None = None) -> Call:
    """Capture one call and run it packed."""
    register_kernels()
    calls: list[Call] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        plan = plan_sharing(gm, inputs)
        assert isinstance(plan, SharingPlan)

        def call(*args: Any) -> Any:
            token_tree, _ = build_tree(plan, args, 1)
            shared = list(plan.packed.gm(*args, *tree_arguments(plan, token_tree, args)))
            calls.append(Call(gm, args, plan, token_tree, shared))
            return gm.forward(*args)

        return call

    torch.compile(lambda: function(**batch.kwargs), backend=backend, dynamic=dynamic)()
    (only,) = calls
    return only


def _runs(call: Call) -> tuple[Callable[..., Any], list[int]]:
    """Return the original that records the batch size of each run's first output."""
    sizes: list[int] = []

    def original(*args: Any) -> Any:
        outputs = call.gm.forward(*args)
        sizes.append(outputs[0].shape[0])
        return outputs

    return original, sizes


PADDED = tree([(20, [5, 3, (1, [2, 0])])])


@pytest.mark.parametrize("dynamic", [None, True])
def test_right_outputs_pass_although_padding_is_zero(dynamic: bool | None) -> None:
    call = _call(build("llama"), PADDED, dynamic=dynamic)
    assert not call.shared[0][1, -1].any()
    assert call.check() is None


def test_a_dynamic_graph_runs_one_row_at_a_time() -> None:
    call = _call(build("llama"), group(3, 20, 4), dynamic=True)
    original, sizes = _runs(call)
    assert call.check(original=original) is None
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("wrong", ["zero", "scale", "swap", "nan"])
def test_wrong_outputs_are_found(wrong: str, dynamic: bool | None) -> None:
    call = _call(build("llama"), PADDED, dynamic=dynamic)
    logits = call.shared[0].detach().clone()
    if wrong == "zero":
        logits[2, 21] = 0.0
    elif wrong == "scale":
        logits[1] *= 1.01
    elif wrong == "swap":
        logits = logits.roll(1, 0)
    else:
        logits[0, 3, 5] = float("nan")
    problem = call.check([logits, *call.shared[1:]])
    assert problem is not None
    assert "output 0" in problem
    assert ("finite" if wrong == "nan" else "relative L2") in problem


def test_padded_positions_are_not_compared() -> None:
    call = _call(build("llama"), PADDED)
    logits = call.shared[0].detach().clone()
    logits[1, -1] = 7.0
    assert call.check([logits, *call.shared[1:]]) is None


def test_a_window_of_columns_is_compared_at_its_own_columns() -> None:
    model = build("llama")

    def shifted(**kwargs: Any) -> Tensor:
        logits: Tensor = model(**kwargs).logits[:, :-1]
        return logits

    call = _call(shifted, PADDED)
    assert call.check() is None
    logits = call.shared[0].detach().clone()
    logits[3, 0] += 1.0
    assert call.check([logits]) is not None


def test_a_loss_is_compared_with_the_whole_batch() -> None:
    model = build("llama")

    def loss(**kwargs: Any) -> Tensor:
        labels = kwargs["input_ids"].masked_fill(kwargs["attention_mask"] == 0, -100)
        out: Tensor = model(**kwargs, labels=labels).loss
        return out

    call = _call(loss, PADDED, dynamic=True)
    assert call.check() is None
    assert call.check([call.shared[0] * 1.01]) is not None


def test_low_precision_has_its_own_tolerance() -> None:
    model = build("llama", dtype=torch.bfloat16)

    def wide(**kwargs: Any) -> Tensor:
        out: Tensor = model(**kwargs).logits.float()
        return out

    call = _call(wide, group(3, 20, 4))
    assert call.check() is None
    assert call.check([call.shared[0] * 1.01]) is None
    assert call.check([call.shared[0] * 1.2]) is not None


def test_the_callers_random_numbers_are_left_alone() -> None:
    call = _call(build("llama"), group(3, 20, 4))

    def original(*args: Any) -> Any:
        torch.rand(3)
        return call.gm.forward(*args)

    before = torch.get_rng_state()
    assert call.check(original=original) is None
    assert torch.equal(torch.get_rng_state(), before)


def _compiled(**options: Any) -> Any:
    model = build("llama")
    model.compile(backend="branchreplay", options={"inner": "eager", "share": "always", **options})
    return model


def test_the_option_finds_nothing_in_right_calls() -> None:
    model = _compiled(verify="every", fallback="error")
    for batch in (group(3, 20, 4), PADDED):
        model(**batch.kwargs).logits.sum().backward()
    assert branchfx.stats().calls_shared == 2
    assert branchfx.stats().verify_failures == 0


@pytest.fixture
def _wrong_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = backend_module.SharedGraph._packed
    monkeypatch.setattr(backend_module.SharedGraph, "_packed", lambda self, *a: [o * 1.5 for o in run(self, *a)])


@pytest.mark.usefixtures("_wrong_packed")
@pytest.mark.parametrize(("grad", "problem"), [(True, "gradient of .*embed_tokens"), (False, "output 0")])
def test_the_option_raises_on_a_wrong_call(grad: bool, problem: str) -> None:
    with torch.set_grad_enabled(grad), pytest.raises(VerifyError, match=problem):
        _compiled(verify="first", fallback="error")(**group(3, 20, 4).kwargs)
    assert branchfx.stats().verify_failures == 1


@pytest.mark.usefixtures("_wrong_packed")
def test_the_option_returns_the_unshared_result_of_a_wrong_call(caplog: pytest.LogCaptureFixture) -> None:
    batch = group(3, 20, 4)
    with caplog.at_level(logging.WARNING, "branchfx.backend"):
        logits = _compiled(verify="first")(**batch.kwargs).logits
    torch.testing.assert_close(logits, build("llama")(**batch.kwargs).logits)
    assert branchfx.stats().verify_failures == 1


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


@pytest.mark.parametrize("batch", [group(3, 20, 4), PADDED], ids=["group", "padded"])
@pytest.mark.parametrize("reduces", [False, True], ids=["logits", "loss"])
def test_wrong_gradients_are_found(batch: Batch, reduces: bool) -> None:
    model = build("llama")

    def function(**kwargs: Any) -> Tensor:
        labels = kwargs["input_ids"].masked_fill(kwargs["attention_mask"] == 0, -100)
        out = model(**kwargs, labels=labels)
        return out.loss if reduces else out.logits

    call = _call(function, batch, dynamic=True)

    def shared(*args: Any) -> list[Any]:
        return list(call.plan.packed.gm(*args, *tree_arguments(call.plan, call.tree, args)))

    def wrong(*args: Any) -> list[Any]:
        index = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad)
        return shared(*args[:index], _Halved.apply(args[index]), *args[index + 1 :])

    assert check_gradients(call.gm, shared, call.args, call.tree, call.plan) is None
    problem = check_gradients(call.gm, wrong, call.args, call.tree, call.plan)
    assert problem is not None
    assert "gradient" in problem
    assert all(p.grad is None for p in model.parameters())
