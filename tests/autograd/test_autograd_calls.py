"""Gradients through calls of every kind, against the gradient of the same program in one process.

Each program is a function of an executor `run(worker, function, *arguments)`, which calls the function here, or there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import autograd_functions as functions
import pytest
import torch
from rpc_cluster import Cluster
from torch import Tensor

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc

pytestmark = pytest.mark.multiproc

Run = Callable[..., Any]
Program = Callable[[Run, list[Tensor]], Any]
rpc_sync: Any = rpc.rpc_sync
rpc_async: Any = rpc.rpc_async


def here(worker: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def over_rpc_sync(worker: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return rpc_sync(worker, function, arguments)


def over_rpc_async(worker: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return rpc_async(worker, function, arguments).wait()


def over_remote(worker: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return rpc.remote(worker, function, arguments).to_here()


EXECUTORS = {"rpc_sync": over_rpc_sync, "rpc_async": over_rpc_async, "remote": over_remote}


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 3, dtype=dtype, requires_grad=True)
    return [x, *(torch.randn(3, 3, dtype=dtype, requires_grad=True) for _ in range(3))]


def compare(program: Program, run: Run, leaves: Sequence[Tensor] | None = None, mode: Any = None) -> None:
    """The gradients of all leaves, in one process and through calls. Those that get none are absent."""
    tensors = list(leaves or inputs())
    expected = torch.autograd.grad(program(here, tensors), tensors, allow_unused=True)
    with autograd.context() as context_id:
        loss = program(run, tensors)
        autograd.backward(context_id, [loss], mode=mode)
        found = autograd.get_gradients(context_id)
    for tensor, gradient in zip(tensors, expected, strict=True):
        if gradient is None:
            assert tensor not in found
        else:
            torch.testing.assert_close(found.pop(tensor), gradient)
        assert tensor.grad is None
    assert not found


def one_call(run: Run, t: list[Tensor]) -> Any:
    return run("worker1", functions.layer, t[0], t[1]).sum()


def unused_result(run: Run, t: list[Tensor]) -> Any:
    run("worker1", functions.layer, t[0], t[2])  # torch hangs on this one
    return run("worker2", functions.layer, t[0], t[1]).sum()


def unused_in_handler(run: Run, t: list[Tensor]) -> Any:
    results = run("worker1", functions.several, run("worker2", functions.double, t[0]))
    return results[1].sum()


def one_of_several_results(run: Run, t: list[Tensor]) -> Any:
    first, second, _ = run("worker1", functions.identity, (t[0] * 2, t[1] * 3, t[2] * 4))
    run("worker2", functions.double, first)
    return second.sum()


def same_tensor_to_two_workers(run: Run, t: list[Tensor]) -> Any:
    hidden = t[0] @ t[1]
    return (run("worker1", functions.layer, hidden, t[2]) * run("worker2", functions.layer, hidden, t[2])).sum()


def same_tensor_twice(run: Run, t: list[Tensor]) -> Any:
    first = run("worker1", functions.layer, t[0], t[1])
    second = run("worker1", functions.layer, t[0], t[1])
    return (first * second).sum() + run("worker1", torch.mul, t[2], t[2]).sum()


def there_and_back_again(run: Run, t: list[Tensor]) -> Any:
    """A->B->A->B, with inner nodes that all hops share: here gates are needed."""
    shared = t[0] @ t[1]
    value = shared
    for _ in range(3):
        value = torch.tanh(run("worker1", functions.double, value) @ t[2]) + shared
    return value.sum()


def calls_itself(run: Run, t: list[Tensor]) -> Any:
    shared = t[0] @ t[1]
    value = run("worker0", functions.layer, shared, t[2])
    return (run("worker0", functions.layer, value, t[2]) * shared).sum()


def diamond(run: Run, t: list[Tensor]) -> Any:
    top = run("worker1", functions.layer, t[0], t[1])
    left, right = run("worker2", functions.layer, top, t[2]), run("worker3", functions.layer, top, t[3])
    return run("worker1", torch.mul, left, right).sum()


def nested_calls(run: Run, t: list[Tensor]) -> Any:
    return run("worker1", functions.layer, t[0], t[1]).sum() + t[0].sum()


def long_chain(run: Run, t: list[Tensor]) -> Any:
    value = t[0]
    for number in range(12):
        value = run(f"worker{number % 4}", functions.layer, value, t[1 + number % 3])
    return value.sum()


def containers(run: Run, t: list[Tensor]) -> Any:
    batch = functions.Batch(t[0] * 1, {"scale": [t[0], torch.zeros(1)]})
    result = run("worker1", functions.batch_forward, batch, [t[1], t[2]])
    return (result.data * result.extra["more"][0]).sum()


def custom_function(run: Run, t: list[Tensor]) -> Any:
    return run("worker1", functions.cubed, t[0] @ t[1]).sum()


def detached(run: Run, t: list[Tensor]) -> Any:
    hidden = run("worker1", functions.layer, t[0].detach(), t[1])
    return run("worker2", functions.layer, hidden.detach() + t[2].sum(), t[3]).sum()


def without_grad(run: Run, t: list[Tensor]) -> Any:
    with torch.no_grad():
        hidden = run("worker1", functions.layer, t[0], t[1])
    assert not hidden.requires_grad
    return run("worker1", functions.layer, hidden, t[2]).sum()


def checkpointed_there(run: Run, t: list[Tensor]) -> Any:
    return run("worker1", functions.checkpointed, t[0] @ t[1], t[2], False).sum()


def changed_in_place(run: Run, t: list[Tensor]) -> Any:
    return run("worker1", functions.in_place, t[0] @ t[1]).mul_(2).sum()


def autocast(run: Run, t: list[Tensor]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return run("worker1", functions.double, t[0] @ t[1]).float().sum()


def nothing_remote(run: Run, t: list[Tensor]) -> Any:
    return (t[0] @ t[1]).sum()


PROGRAMS: list[Program] = [
    one_call,
    unused_result,
    unused_in_handler,
    one_of_several_results,
    same_tensor_to_two_workers,
    same_tensor_twice,
    there_and_back_again,
    calls_itself,
    diamond,
    long_chain,
    containers,
    custom_function,
    detached,
    without_grad,
    checkpointed_there,
    changed_in_place,
    autocast,
    nothing_remote,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_programs(cluster: Cluster, executor: str, program: Program) -> None:
    compare(program, EXECUTORS[executor])


@pytest.mark.parametrize("program", [one_call, diamond, there_and_back_again, calls_itself])
def test_programs_in_fast_mode(cluster: Cluster, program: Program) -> None:
    compare(program, over_rpc_sync, mode="fast")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes(cluster: Cluster, dtype: torch.dtype) -> None:
    def program(run: Run, t: list[Tensor]) -> Any:
        loss = run("worker1", functions.layer, t[0], t[1]).sum()
        return loss.abs() if dtype.is_complex else loss

    compare(program, over_rpc_sync, inputs(dtype))


def test_mixed_dtypes(cluster: Cluster) -> None:
    def program(run: Run, t: list[Tensor]) -> Any:
        doubled, cut = run("worker1", functions.identity, (t[0].double(), t[1].half()))
        return doubled.sum().float() + cut.sum().float()

    compare(program, over_rpc_sync)


@pytest.mark.parametrize(
    "function", [functions.layer_in_coroutine, functions.layer_in_future], ids=["async def", "async_execution"]
)
def test_asynchronous_handlers(cluster: Cluster, function: Callable[..., Any]) -> None:
    def program(run: Run, t: list[Tensor]) -> Any:
        called = functions.layer if run is here else function
        return run("worker1", called, run("worker1", called, t[0], t[1]), t[2]).sum()

    compare(program, over_rpc_sync)


@pytest.mark.parametrize(
    "function", [functions.nested_in_coroutine, functions.nested_in_future], ids=["async def", "async_execution"]
)
def test_nested_calls_of_asynchronous_handlers(cluster: Cluster, function: Callable[..., Any]) -> None:
    def program(run: Run, t: list[Tensor]) -> Any:
        if run is here:
            return functions.layer(functions.layer(t[0], t[1]), t[1]).sum()
        return run("worker1", function, "worker2", t[0], t[1]).sum()

    compare(program, over_rpc_sync)


@pytest.mark.parametrize(
    "path", [["worker1"], ["worker1", "worker2", "worker3"], ["worker1", "worker0"], ["worker1", "worker0", "worker1"]]
)
def test_nested_calls(cluster: Cluster, path: list[str]) -> None:
    def local(depth: int, x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) if not depth else local(depth - 1, x * 2, w) @ w + x

    def program(run: Run, t: list[Tensor]) -> Any:
        if run is here:
            return local(len(path), t[0], t[1]).sum()
        return functions.nested(path, t[0], t[1]).sum()

    compare(program, over_rpc_sync)


@pytest.mark.parametrize("function", [functions.stream, functions.stream_in_coroutine])
def test_streams(cluster: Cluster, function: Callable[..., Any]) -> None:
    count = 5

    def program(run: Run, t: list[Tensor]) -> Any:
        x = t[0] @ t[1]
        if run is not here:
            items: list[Tensor] = list(rpc.rpc_stream("worker1", function, (x, count)))
        else:
            items = [x * (n + 1) if function is functions.stream else torch.sin(x * (n + 1)) for n in range(count)]
        return (items[0] * items[3]).sum()

    compare(program, over_rpc_sync)


def test_references_and_proxies(cluster: Cluster) -> None:
    x = inputs()[0]
    twin = functions.Model(7)
    model = rpc.remote("worker1", functions.Model, (7,))  # made outside of any context
    for _ in range(2):
        expected = torch.autograd.grad(twin(twin(x)).sum(), [x, *twin.parameters()])
        with autograd.context() as context_id:
            hidden = model.rpc_sync().forward(x)
            result = model.remote().forward(hidden)
            autograd.backward(context_id, [model.rpc_async().forward(x).wait().sum() * 0 + result.to_here().sum()])
            torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected[0])
            found = model.rpc_sync().collected(context_id)
        for gradient, (name, _) in zip(expected[1:], twin.named_parameters(), strict=True):
            torch.testing.assert_close(found[name], gradient)


def test_backward_of_a_reference(cluster: Cluster) -> None:
    x = inputs()[0]
    twin = functions.Model(7)
    (expected,) = torch.autograd.grad(twin(x).sum(), [x])
    model = rpc.remote("worker1", functions.Model, (7,))
    with autograd.context() as context_id:
        loss = rpc.remote("worker2", torch.sum, (model.rpc_sync().forward(x),))
        loss.backward(context_id, retain_graph=True)
        loss.backward(context_id)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], 2 * expected)


def test_several_roots_and_a_second_backward(cluster: Cluster) -> None:
    x, w, v, _ = inputs()
    with autograd.context() as context_id:
        first = over_rpc_sync("worker1", functions.layer, x, w).sum()
        second = over_rpc_sync("worker2", functions.layer, x, v).sum()
        autograd.backward(context_id, [first, second], retain_graph=True)
        autograd.backward(context_id, [first])
        found = autograd.get_gradients(context_id)
    local = torch.autograd.grad(functions.layer(x, w).sum() * 2 + functions.layer(x, v).sum(), [x, w, v])
    for leaf, gradient in zip([x, w, v], local, strict=True):
        torch.testing.assert_close(found[leaf], gradient)


def test_a_second_backward_without_retain_graph_is_an_error(cluster: Cluster) -> None:
    x, w, *_ = inputs()
    with autograd.context() as context_id:
        loss = over_rpc_sync("worker1", functions.layer, x, w).sum()
        autograd.backward(context_id, [loss])
        with pytest.raises(autograd.BackwardError, match="second time") as caught:
            autograd.backward(context_id, [loss])
        assert caught.value.worker == "worker1"


def test_a_parameter_behind_unused_results_only(cluster: Cluster) -> None:
    x, w, v, _ = inputs()
    fired: list[str] = []
    w.register_hook(lambda gradient: fired.append("unused"))
    v.register_hook(lambda gradient: fired.append("used"))
    with autograd.context() as context_id:
        over_rpc_sync("worker1", functions.layer, x, w)
        tensors = over_rpc_sync("worker1", functions.identity, (x @ w, x @ v))
        autograd.backward(context_id, [tensors[1].sum()])
        assert w not in autograd.get_gradients(context_id)
    assert fired == ["used"]


@pytest.mark.parametrize("hops", [1, 4])
def test_tensor_hooks_fire_once_with_the_whole_gradient(cluster: Cluster, hops: int) -> None:
    x, w, *_ = inputs()
    seen: dict[str, list[Tensor]] = {"leaf": [], "inner": []}

    def program(run: Run) -> Any:
        shared = x @ w
        shared.register_hook(lambda gradient: seen["inner"].append(gradient.clone()))
        value = shared
        for _ in range(hops):
            value = run("worker1", functions.layer, value, w) + shared
        return value.sum()

    def hook(gradient: Tensor) -> Tensor:
        seen["leaf"].append(gradient.clone())
        return gradient * 3

    w.register_hook(hook)
    expected = torch.autograd.grad(program(here), [x, w])
    local = {name: gradients.copy() for name, gradients in seen.items()}
    for gradients in seen.values():
        gradients.clear()
    with autograd.context() as context_id:
        autograd.backward(context_id, [program(over_rpc_sync)])
        found = autograd.get_gradients(context_id)
    torch.testing.assert_close(found[x], expected[0])
    torch.testing.assert_close(found[w], expected[1])
    for name, gradients in seen.items():
        assert len(gradients) == 1
        torch.testing.assert_close(gradients, local[name])


@pytest.mark.parametrize("num_pads", [0, 80], ids=["small", "large"])
@pytest.mark.parametrize("where", ["tensor", "before the node", "behind the node"])
def test_hooks_on_what_was_received_fire_once(cluster: Cluster, where: str, num_pads: int) -> None:
    """Whether the engine executes the node or only hands over its gradient; a large graph has it executed."""
    x, w, *_ = inputs()
    fired: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        fired.append(gradient.clone())
        return gradient * 3

    with autograd.context() as context_id:
        received = over_rpc_sync("worker1", functions.layer, x, w)
        node: Any = received.grad_fn
        if where == "tensor":
            received.register_hook(hook)
        elif where == "before the node":
            node.register_prehook(lambda gradients: (hook(gradients[0]),))
        else:
            node.register_hook(lambda _, gradients: fired.append(gradients[0].clone()))
        value = received
        for _ in range(num_pads):
            value = value + 0
        autograd.backward(context_id, [value.sum()])
        found = autograd.get_gradients(context_id)
    factor = 1 if where == "behind the node" else 3
    expected = torch.autograd.grad(functions.layer(x, w).sum(), [x, w])
    assert len(fired) == 1
    torch.testing.assert_close(fired[0], torch.ones_like(received))
    torch.testing.assert_close([found[x], found[w]], [factor * gradient for gradient in expected])


def test_callbacks_of_hooks_may_replace_gradients(cluster: Cluster) -> None:
    """Acts as a reducer: it starts work in the hook, and puts in the result at the end of the run."""
    x, w, *_ = inputs()

    def finish(captured: autograd.Captured) -> None:
        captured[w] = torch.full_like(w, 5.0)

    w.register_hook(lambda gradient: autograd.queue_callback(finish))
    with autograd.context() as context_id:
        autograd.backward(context_id, [over_rpc_sync("worker1", functions.layer, x, w).sum()])
        assert bool((autograd.get_gradients(context_id)[w] == 5).all())


@pytest.mark.parametrize("dense", [False, True])
def test_embeddings(cluster: Cluster, dense: bool) -> None:
    """Sparse gradients, and a parameter that is reached both densely and sparsely."""
    rows = torch.tensor([1, 2, 2, 7])
    twin = functions.Embedding(3)
    remote = rpc.remote("worker1", functions.Embedding, (3,))
    ((twin(rows, dense) ** 2).sum() + (twin(rows[:2], False) ** 2).sum()).backward()
    expected = twin.table.weight.grad
    assert expected is not None
    with autograd.context() as context_id:
        first = remote.rpc_sync().forward(rows, dense)
        second = remote.rpc_sync().forward(rows[:2], False)
        autograd.backward(context_id, [(first**2).sum() + (second**2).sum()])
        found = remote.rpc_sync().collected(context_id)
    assert found.is_sparse == (not dense)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_sparse_tensors_as_arguments(cluster: Cluster, default: str) -> None:
    weight = torch.randn(5, 3).to_sparse().requires_grad_()
    with torch.device(default), autograd.context() as context_id:
        loss = torch.sparse.sum(over_rpc_sync("worker1", functions.double, weight))
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)[weight]
    torch.testing.assert_close(found.to_dense(), torch.full((5, 3), 2.0))


def test_a_thousand_calls(cluster: Cluster) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        futures = [rpc_async(f"worker{1 + n % 3}", functions.double, (x * n,)) for n in range(1000)]
        loss = sum(future.wait().sum() for future in futures)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)[x]
    torch.testing.assert_close(found, torch.full((3,), 2.0 * sum(range(1000))))


def test_contexts_of_several_threads(cluster: Cluster) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for program in (one_call, there_and_back_again, diamond):
                compare(program, over_rpc_sync)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
