"""The backend beside what users combine it with: checkpoints, adapters, autocast, DDP, losses, bad input."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import branchfx
from tests import batches, exactness, models
from tests.batches import Batch
from tests.exactness import compare, compare_function, compile_for_test, step

_TREE = batches.tree([(7, [(3, [4, 2]), 5]), (3, [2, 2])], padding="right", shuffle=True)
_OTHER_TREE = batches.tree([(4, [6, 1, (2, [3, 3])])], seed=3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Forget the graphs and the counters of other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    branchfx.reset_stats()


def test_gradient_checkpointing() -> None:
    """Non-reentrant checkpoints are entered, and still share."""
    model = models.build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(model, _TREE)


def test_lora() -> None:
    """Adapters of peft train, the frozen weights get no gradient."""
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(models.build("qwen3"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    report = compare(model, _TREE)
    assert all("lora_" in name for name in set(report.ours.grads) - report.ours.missing)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_autocast(name: str) -> None:
    """Autocast to bfloat16 keeps to twice the unmodified model's own distance to float64."""
    compare(models.build(name), _TREE, context=lambda: torch.autocast("cpu", torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"inner": "eager"}, 0.0),
        ({"inner": "aot_eager"}, 0.0),
        ({"inner": "inductor", "same_forward": True}, 0.0),
        ({"inner": "inductor"}, 1e-6),
    ],
    ids=["eager", "aot_eager", "inductor-same-forward", "inductor"],
)
def test_no_grad_agrees_with_grad(options: dict[str, Any], bound: float) -> None:
    """The forward of a scoring pass equals the forward of the update."""
    compiled = compile_for_test(models.build("llama"), **options)
    with torch.no_grad():
        scored = compiled(**_TREE.kwargs).logits[_TREE.valid]
    trained = compiled(**_TREE.kwargs).logits[_TREE.valid]
    assert trained.requires_grad
    assert exactness.relative(scored, trained.detach(), float(scored.norm())) <= bound


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inference_mode(name: str) -> None:
    """The compiled model runs in inference mode."""
    model = models.build(name).eval()
    compiled = compile_for_test(model)
    with torch.inference_mode():
        expected = model(**_TREE.kwargs).logits[_TREE.valid]
        actual = compiled(**_TREE.kwargs).logits[_TREE.valid]
    assert exactness.relative(actual, expected, float(expected.norm())) < exactness.TOLERANCE
    if exactness.BACKEND == "branchreplay":
        assert branchfx.stats().calls_shared == 1


def test_fullgraph() -> None:
    """A model that is one graph stays one."""
    model = models.build("llama")
    backend = exactness.BACKEND
    options = dict(exactness.OPTIONS) if backend == "branchreplay" else None
    compare(model, _TREE, compiled=torch.compile(model, backend=backend, fullgraph=True, options=options))


def test_dynamic_from_the_start() -> None:
    """`dynamic=True` shares as well."""
    model = models.build("llama")
    compiled = compile_for_test(model, dynamic=True)
    for batch in (_TREE, _OTHER_TREE):
        compare(model, batch, compiled=compiled)


@pytest.mark.parametrize("reverse", [False, True], ids=["first-in-first-out", "last-in-first-out"])
def test_two_forwards_then_two_backwards(reverse: bool) -> None:
    """Calls with different trees keep their own trees until their backwards."""
    model = models.build("llama")
    compiled = compile_for_test(model)
    parameters = dict(model.named_parameters())

    def losses(call: Callable[..., Any]) -> list[Tensor]:
        return [call(**b.kwargs).logits[b.valid].square().mean() * k for k, b in ((1, _TREE), (3, _OTHER_TREE))]

    def gradients(call: Callable[..., Any]) -> dict[str, Tensor]:
        pending = losses(call)
        for loss in reversed(pending) if reverse else pending:
            loss.backward()
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    expected, actual = gradients(model), gradients(compiled)
    assert set(expected) == set(actual)
    for name, grad in expected.items():
        assert exactness.relative(actual[name], grad, float(grad.norm())) < exactness.TOLERANCE, name


def test_state_dict_keys() -> None:
    """`model.compile` leaves the names of parameters alone, before and after a step."""
    model = models.build("llama")
    keys = list(model.state_dict())
    reference = models.build("llama")
    options = dict(exactness.OPTIONS) if exactness.BACKEND == "branchreplay" else None
    model.compile(backend=exactness.BACKEND, options=options)
    model(**_TREE.kwargs).logits[_TREE.valid].sum().backward()
    assert list(model.state_dict()) == keys
    expected = reference(**_TREE.kwargs).logits[_TREE.valid]
    actual = model(**_TREE.kwargs).logits[_TREE.valid]
    assert exactness.relative(actual.detach(), expected.detach(), float(expected.norm())) < exactness.TOLERANCE


def _by_log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def _by_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)


def _by_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize(
    ("keep", "logprob"),
    [
        pytest.param(0, _by_log_softmax, id="all-log_softmax"),
        pytest.param(0, _by_logsumexp, id="all-logsumexp"),
        pytest.param(0, _by_cross_entropy, id="all-cross_entropy"),
        pytest.param(3, _by_log_softmax, id="logits_to_keep-log_softmax"),
        pytest.param(3, _by_logsumexp, id="logits_to_keep-logsumexp"),
        pytest.param(3, _by_cross_entropy, id="logits_to_keep-cross_entropy"),
    ],
)
def test_loss_in_the_graph(logprob: Callable[[Tensor, Tensor], Tensor], keep: int) -> None:
    """Log-probabilities inside the graph, labels at branch points included, in the three usual spellings."""
    model, batch = models.build("llama"), batches.tree((5, [(2, [2, 2]), 4]), padding="left")

    def function(call: Callable[..., Any], ids: Tensor, mask: Tensor) -> Tensor:
        logits = call(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        n = logits.shape[1]
        return logprob(logits, ids[:, -n:]) * mask[:, -n:] * mask[:, -n - 1 : -1]

    compiled = compile_for_test(lambda ids, mask: function(model, ids, mask))
    args = (batch.ids, batch.attention_mask)
    report = compare_function(model, lambda m: function(m, *args), ours=lambda: compiled(*args))
    report.check_shared()


def test_default_call() -> None:
    """A call as a newcomer writes it makes a cache and returns it: its keys and values are those of each row."""
    model, batch = models.build("qwen3", use_cache=True), batches.group(4, 6, 5)

    def function(call: Callable[..., Any]) -> Tensor:
        out = call(input_ids=batch.ids, attention_mask=batch.attention_mask)
        cached = [x for layer in out.past_key_values.layers for x in (layer.keys, layer.values)]
        return torch.cat([out.logits.flatten(), *(x.flatten() for x in cached)])

    compiled = compile_for_test(model)
    compare_function(model, function, ours=lambda: function(compiled)).check_shared()


@pytest.mark.parametrize("padding", ["right", "left"])
def test_named_rollouts(padding: batches.Padding) -> None:
    """A model that is given embeddings shares the tokens that the caller names, and only while they are named."""
    model, batch = models.build("llama"), batches.tree((5, [(2, [2, 2]), 4]), padding=padding)
    compiled = compile_for_test(model, fallback="silent", verify="every")

    def function(call: Callable[..., Any], named: bool) -> Tensor:
        embeds = call.get_input_embeddings()(batch.ids)
        context = branchfx.rollouts(batch.ids, batch.attention_mask) if named else contextlib.nullcontext()
        with context:
            return call(inputs_embeds=embeds, attention_mask=batch.attention_mask).logits[batch.valid]

    for named in (False, True, False):
        report = compare_function(model, lambda m: function(m, False), ours=lambda n=named: function(compiled, n))
        assert report.shared is named


def test_whole_loss_in_the_graph() -> None:
    """A clipped policy loss down to its scalar."""
    model, batch = models.build("qwen3"), batches.group(4, 6, 5)
    old = torch.randn(4, 10, generator=torch.Generator().manual_seed(1)) * 0.1 - 4.0
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0])[:, None]

    def loss(call: Callable[..., Any], ids: Tensor) -> Tensor:
        logprobs = _by_log_softmax(call(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])
        ratio = (logprobs - old.to(logprobs.dtype)).exp()
        return torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[:, 5:].mean()

    compiled = compile_for_test(lambda ids: loss(model, ids))
    compare_function(model, lambda m: loss(m, batch.ids), ours=lambda: compiled(batch.ids)).check_shared()


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_no_recompile(grad: bool) -> None:
    """30 calls with 30 different (B, T, tree) take at most two graphs."""
    model = models.build("llama")
    compiled = compile_for_test(model)
    parameters = dict(model.named_parameters())
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), torch.set_grad_enabled(grad):
        for i in range(30):
            forest = [(2 + i % 7, [(1 + i % 3, [2, 3 + i % 2]), *[1 + i % 5] * (1 + i % 4)]), 3]
            batch = batches.tree(forest[: 1 + i % 2], seed=i, padding=("right", "left")[i % 3 == 1])
            if grad:
                step(lambda b=batch: compiled(**b.kwargs).logits[b.valid], parameters)
            else:
                compiled(**batch.kwargs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert all(count <= 2 for count in branchfx.stats().compiles.values()), branchfx.stats().compiles


def _ddp_worker(rank: int, folder: str, backend: str) -> None:
    """Run a step of each process's half of the rows, and keep the averaged gradients of rank 0."""
    exactness.BACKEND = backend
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batch = (_TREE, _OTHER_TREE)[rank]
    for name in ("plain", "ours"):
        model = models.build("llama")
        wrapped = nn.parallel.DistributedDataParallel(model)
        call = compile_for_test(wrapped) if name == "ours" else wrapped
        call(**batch.kwargs).logits[batch.valid].square().mean().backward()
        if rank == 0:
            torch.save({n: p.grad for n, p in model.named_parameters()}, f"{folder}/{name}.pt")
    torch.save(branchfx.stats().calls_shared, f"{folder}/shared{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ddp(tmp_path: pathlib.Path) -> None:
    """Two gloo processes with different trees average the gradients of the unmodified model."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(_ddp_worker, (str(tmp_path), exactness.BACKEND), nprocs=2)
    expected, actual = (torch.load(tmp_path / f"{name}.pt") for name in ("plain", "ours"))
    for name, grad in expected.items():
        assert exactness.relative(actual[name], grad, float(grad.norm())) < exactness.TOLERANCE, name
    if exactness.BACKEND == "branchreplay":
        assert [torch.load(tmp_path / f"shared{rank}.pt") for rank in (0, 1)] == [1, 1]


def outcome(call: Callable[..., Any], batch: Batch) -> tuple[type[BaseException] | None, Any]:
    """Return the kind of error that a call gives, or the logits."""
    try:
        return None, call(**batch.kwargs).logits.detach()
    except Exception as error:
        return type(error), None


_BAD = {
    "no rows": Batch(torch.zeros(0, 5, dtype=torch.long), torch.zeros(0, 5, dtype=torch.long)),
    "no columns": Batch(torch.zeros(2, 0, dtype=torch.long)),
    "id too large": Batch(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 10_000]])),
    "negative id": Batch(torch.tensor([[1, 2, 3, 4], [1, 2, 3, -5]])),
    "mask too short": Batch(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]), torch.ones(2, 3, dtype=torch.long)),
    "mask of more rows": Batch(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]), torch.ones(3, 4, dtype=torch.long)),
    "float ids": Batch(torch.tensor([[1.0, 2.0], [1.0, 3.0]])),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", _BAD)
def test_bad_input(name: str, warm: bool) -> None:
    """A bad batch gives an error where the model gives one, unmodified or traced alone, and the next call is right."""
    model = models.build("llama")
    compiled = compile_for_test(model, fallback="silent")
    if warm:
        compare(model, _TREE, compiled=compiled, float64=False)
    plain_error, expected = outcome(model, _BAD[name])
    traced_error, _ = outcome(torch.compile(model, backend="eager"), _BAD[name])
    error, actual = outcome(compiled, _BAD[name])
    allowed = (plain_error, traced_error)
    assert error in allowed, f"{error} where the model gives {allowed}"
    if error is None and expected is not None:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    compare(model, _TREE, compiled=compiled, float64=False)


def test_nan_weights() -> None:
    """NaN goes where it goes in the unmodified model."""
    model = models.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")
        model.model.embed_tokens.weight[7] = float("nan")
    for nan_rows in (batches.pad([[1, 2, 7, 3], [1, 2, 4, 5]]), _TREE):
        expected = model(**nan_rows.kwargs).logits[nan_rows.valid]
        actual = compile_for_test(model)(**nan_rows.kwargs).logits[nan_rows.valid]
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_nothing_half_applied_after_an_error() -> None:
    """A call that fails leaves gradients and weights as they were."""
    model = models.build("llama")
    compiled = compile_for_test(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.suppress(Exception):
        compiled(**_BAD["id too large"].kwargs).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
