"""Contexts: their members, their ends, and failures of a backward pass; nothing may stay behind."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autograd_functions as functions
import pytest
import rpc_functions
import torch
from peer_timeouts import PROMPT_S
from rpc_cluster import Cluster

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.autograd import _gradients
from rpcdist.autograd._gradients import GradientTable
from rpcdist.autograd._interface import (
    _current_context,
    _get_debug_info,
    _get_max_id,
    _release_context,
    _retrieve_context,
)
from rpcdist.errors import BlockingInLoop, ConfigError, DeadlineExceeded
from rpcdist.testing import eventually

pytestmark = pytest.mark.multiproc

rpc_sync: Any = rpc.rpc_sync
rpc_async: Any = rpc.rpc_async
EMPTY = {"num_autograd_contexts": "0", "num_current_backward_passes": "0"}
SETTLE_LIMIT_S = 10.0


def debug_info(names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    return {name: rpc_sync(name, functions.autograd_state) for name in names}


@pytest.fixture(autouse=True)
def nothing_stays(cluster: Cluster) -> Iterator[None]:
    """No worker keeps a context or a pass after the test."""
    yield
    empty = dict.fromkeys(cluster.names, EMPTY)
    # A release is not waited for, and nothing here hears of it.
    eventually(lambda: debug_info(cluster.names) == empty, "no context and no pass is left", SETTLE_LIMIT_S)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)


def test_ids() -> None:
    me = rpc.get_worker_info().id
    with autograd.context() as first:
        assert first >> 48 == me
        assert _current_context()._context_id() == first
        assert _retrieve_context(first) is _current_context()
        assert first <= _get_max_id() == (me << 48) + 2**48 - 1
    with autograd.context() as second:
        assert second != first
    with pytest.raises(autograd.ContextNotFound, match=f"Could not find autograd context with id: {first}"):
        autograd.get_gradients(first)


def test_a_context_inside_another() -> None:
    with autograd.context(), pytest.raises(autograd.AutogradError, match="Already have an autograd context id"):
        autograd.context().__enter__()


def test_threads_and_tasks_have_contexts_of_their_own() -> None:
    found: list[object] = []

    def other_thread() -> None:
        with autograd.context() as context_id:
            found.append(context_id)

    with autograd.context() as context_id:
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert len({*found, context_id}) == 2


def test_workers_are_known(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context():
        rpc_sync("worker1", functions.layer, (x.detach(), w.detach()))
        rpc_sync("worker2", functions.layer, (x, w))
        context = _current_context()
        assert context._known_worker_ids() == {1, 2}
        assert len(context._send_functions()) == len(context._recv_functions()) == 1
        (send,) = context._send_functions().values()
        # Not `name()`, which torch below 2.13 refuses for functions that were written in Python.
        assert type(send).__name__ == "SendRpcBackward" and [n.variable for n, _ in send.next_functions] == [x, w]  # type: ignore[union-attr]
        (recv,) = context._recv_functions().values()
        assert type(recv).__name__ == "RecvRpcBackward"
        assert debug_info(("worker1", "worker2")).popitem()[1]["num_autograd_contexts"] == "1"


def test_nested_workers_release_the_context(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context():
        functions.nested(["worker1", "worker2", "worker3"], x, w)
        assert all(info["num_autograd_contexts"] == "1" for info in debug_info(cluster.names).values())


@pytest.mark.parametrize(
    ("roots", "error", "text"),
    [
        (None, TypeError, "incompatible function arguments"),
        ([], autograd.AutogradError, "No tensors provided for gradient computation"),
        ([1], TypeError, "incompatible function arguments"),
        ([torch.rand(3)], autograd.AutogradError, "requires_grad not set on"),
        ([torch.rand(3, requires_grad=True)], autograd.AutogradError, "is not a scalar, all roots need to be scalar"),
        ([torch.rand(1, requires_grad=True)], autograd.AutogradError, "does not have a valid gradient function"),
    ],
    ids=lambda value: None,
)
def test_roots_that_cannot_be_used(roots: Any, error: type[Exception], text: str) -> None:
    with autograd.context() as context_id, pytest.raises(error, match=text):
        autograd.backward(context_id, roots)


def test_an_unknown_context_and_mode() -> None:
    assert rpc.RpcOptions(autograd_mode="fast").autograd_mode == "fast"
    with pytest.raises(ConfigError, match="autograd_mode must be 'smart' or 'fast'"):
        rpc.RpcOptions(autograd_mode="slow")
    loss = (torch.ones(1, requires_grad=True) * 2).sum()
    with pytest.raises(autograd.ContextNotFound, match="id: 100"):
        autograd.backward(100, [loss])
    with autograd.context() as context_id, pytest.raises(ConfigError, match="'smart' or 'fast'"):
        autograd.backward(context_id, [loss], mode="slow")  # type: ignore[arg-type]


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_an_error_anywhere_names_its_worker(cluster: Cluster, worker: int) -> None:
    x, w = tensors()
    with autograd.context() as context_id:
        value = rpc_sync("worker1", functions.layer, (x, w))
        value = rpc_sync(f"worker{worker}", functions.fails_backward, (value,))
        value = rpc_sync("worker3", functions.layer, (value, w))
        with pytest.raises(autograd.BackwardError, match=f"Error on Node {worker}: this backward fails") as caught:
            autograd.backward(context_id, [value.sum()])
        error = caught.value
        assert (error.node, error.worker, error.type_name) == (worker, f"worker{worker}", "ValueError")
        assert "Failing" in error.traceback or "backward" in error.traceback or worker == 0


def test_an_error_while_a_gate_waits(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context() as context_id:
        shared = x @ w
        value = rpc_sync("worker1", functions.fails_backward, (shared,)) + shared
        started = time.monotonic()
        with pytest.raises(autograd.BackwardError, match="Error on Node 1: this backward fails"):
            autograd.backward(context_id, [(value * shared).sum()])
        assert time.monotonic() - started < PROMPT_S


def test_an_in_place_change_is_detected(cluster: Cluster) -> None:
    x, _ = tensors()
    with autograd.context() as context_id:
        loss = rpc_sync("worker1", functions.spoiled, (x,))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, [loss])


def test_checkpointing_that_cannot_work_says_so(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context() as context_id:
        loss = rpc_sync("worker1", functions.checkpointed, (x, w, True)).sum()
        with pytest.raises(autograd.AutogradError, match="use_reentrant=False"):
            autograd.backward(context_id, [loss])
        with pytest.raises(autograd.AutogradError, match="inside a checkpointed region"):
            rpc_sync("worker1", functions.calls_inside_checkpoint, (x, w, "worker2"))


def test_what_was_received_in_another_context_cannot_be_used(cluster: Cluster) -> None:
    x, _ = tensors()
    with autograd.context():
        rpc_sync("worker1", functions.keep, ("other context", x))
    with autograd.context() as context_id:
        loss = rpc_sync("worker1", functions.take, ("other context",)).sum()
        with pytest.raises(autograd.BackwardError, match=r"received in another context.*detach"):
            autograd.backward(context_id, [loss])


def test_an_ordinary_backward_says_what_to_call(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context():
        loss = rpc_sync("worker1", functions.layer, (x, w)).sum()
        with pytest.raises(RuntimeError, match=r"rpcdist\.autograd\.backward"):
            loss.backward()


def test_fast_mode_waits_for_unused_results_until_the_timeout(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context() as context_id:
        rpc_sync("worker1", functions.layer, (x, w))
        with pytest.raises(DeadlineExceeded, match=r"RPC ran for more than.*'worker1' owes a gradient"):
            autograd.backward(context_id, [(x @ w).sum()], mode="fast", timeout=0.3)


@pytest.mark.parametrize("how", ["release", "timeout", "cancel"])
def test_a_pass_that_is_ended_from_outside(cluster: Cluster, how: str) -> None:
    """A worker waits inside a hook; the pass ends all the same."""
    x, _ = tensors()
    key = f"ended from outside {how} {time.monotonic_ns()}"  # boards keep what other runs put there
    with autograd.context() as context_id:
        loss = rpc_sync("worker1", functions.wait_at_gradient, (x, key)).sum()
        future = autograd.backward_async(context_id, [loss], timeout=3 if how == "timeout" else 60)
        rpc_sync("worker1", rpc_functions.board_wait, (f"{key} begun",))
        started = time.monotonic()
        if how == "release":
            _release_context(context_id)
        elif how == "cancel":
            future.cancel()
        kind: type[Exception] = DeadlineExceeded if how == "timeout" else RuntimeError
        text = {
            "release": "was released during its backward",
            "timeout": "RPC ran for more than",
            "cancel": "cancelled",
        }
        with pytest.raises(kind, match=text[how]):
            future.wait()
        assert time.monotonic() - started < PROMPT_S
        rpc_sync("worker1", rpc_functions.board_put, (f"{key} go on",))


def test_recovering_from_errors(cluster: Cluster) -> None:
    x, w = tensors()
    with autograd.context() as context_id:
        bad = rpc_sync("worker1", functions.fails_backward, (x @ w,)).sum()
        good = rpc_sync("worker1", functions.layer, (x, w)).sum()
        for _ in range(10):
            with pytest.raises(autograd.BackwardError):
                autograd.backward(context_id, [bad], retain_graph=True)
            autograd.backward(context_id, [good], retain_graph=True)
        expected = torch.autograd.grad(functions.layer(x, w).sum() * 10, [w])
        torch.testing.assert_close(autograd.get_gradients(context_id)[w], expected[0])


def test_messages_may_come_by_the_grpc_service(cluster: Cluster) -> None:
    """The service and the sessions share their handlers: a release that comes as a unary call ends the context."""
    from rpcdist._proto import autograd_pb2

    agent = cluster.agent
    with autograd.context() as context_id:
        rpc_sync("worker1", functions.identity, (1,))
        assert debug_info(("worker1",))["worker1"]["num_autograd_contexts"] == "1"
        message = autograd_pb2.AutogradMessage(context=context_id)
        message.release.SetInParent()

        async def deliver() -> None:
            link = agent.router.peer(1)._connection
            await link.unary("Autograd", "Deliver", message, autograd_pb2.AutogradDelivered, 10.0)

        agent.network.run(deliver(), 20.0)
        eventually(
            lambda: debug_info(("worker1",))["worker1"]["num_autograd_contexts"] == "0", "the release has arrived"
        )


async def test_in_coroutines(cluster: Cluster) -> None:
    async def one(scale: float) -> None:
        x, w = tensors()
        (expected,) = torch.autograd.grad((functions.layer(x, w) * scale).sum(), [w])
        async with autograd.context() as context_id:
            await asyncio.sleep(0)
            value = await rpc_async("worker1", functions.layer, (x, w))
            value = await rpc_async("worker2", torch.mul, (value, scale))
            await autograd.backward_async(context_id, [value.sum()])
            torch.testing.assert_close(autograd.get_gradients(context_id)[w], expected)

    await asyncio.gather(*(one(float(n)) for n in range(8)))


async def test_backward_does_not_block_a_loop(cluster: Cluster) -> None:
    x, w = tensors()
    async with autograd.context() as context_id:
        with pytest.raises(BlockingInLoop, match=re.escape("await autograd.backward_async(...)")):
            autograd.backward(context_id, [(x @ w).sum()])


def test_a_picture(cluster: Cluster, tmp_path: Path) -> None:
    x, w = tensors()
    with autograd.context() as context_id:
        functions.nested(["worker1", "worker2"], x, w)
        text = autograd.draw(context_id, tmp_path / "graph.svg")
        calls = len(_current_context()._send_functions())
    assert (tmp_path / "graph.dot").read_text() == text
    assert (tmp_path / "graph.svg").exists() == (shutil.which("dot") is not None)
    assert [f'label="worker{n}"' in text for n in range(4)] == [True, True, True, False]
    assert text.count("[style=bold]") == 4 and calls == 1  # two calls and two results; drawing adds none
    assert len(re.findall(r'^    "recv .*" -> "send ', text, re.MULTILINE)) == 4


def test_the_times_of_a_pass(cluster: Cluster, tmp_path: Path) -> None:
    x, w = tensors()
    began_s = time.time()
    with autograd.context() as context_id:
        loss = functions.nested(["worker1", "worker2"], x, w).sum()
        assert autograd.profile(context_id) == []
        autograd.backward(context_id, [loss])
        eventually(lambda: len({span.worker for span in autograd.profile(context_id)}) == 3, "all parts have ended")
        spans = autograd.profile(context_id)
        text = autograd.draw(context_id, tmp_path / "graph.dot", timings=True)
    assert len({span.backward for span in spans}) == 1
    for worker in ("worker0", "worker1", "worker2"):
        mine = [span for span in spans if span.worker == worker]
        assert sum(span.kind == "analysis" for span in mine) == 1
        assert any(span.kind == "run" for span in mine)
        assert all(began_s <= span.start_s and span.duration_s >= 0 for span in mine)
        assert all(bool(span.peer) == (span.kind in ("wait", "gate")) for span in mine)
    assert [span.start_s for span in spans] == sorted(span.start_s for span in spans)
    assert {span.peer for span in spans if span.worker == "worker0" and span.kind == "wait"} == {"worker1"}
    assert re.search(r'"worker0" -> "worker1" \[label="waited \d+\.\d\d ms", style=dashed', text)
    assert re.search(r'"worker2" \[label="looked at its graph: .* ms\\nran it: .* ms \(\d runs?\)"', text)


def test_debug_info_of_rpc(cluster: Cluster) -> None:
    assert _get_debug_info().keys() == EMPTY.keys()
    assert rpc.debug_info().keys() >= EMPTY.keys()


def test_the_same_gradient_twice_counts_twice() -> None:
    """As when a hook returns a tensor that it has kept."""
    table, leaf, gradient = GradientTable(), torch.ones(3, requires_grad=True), torch.ones(3)
    table.add([(leaf, gradient)])
    table.add([(leaf, gradient)])
    torch.testing.assert_close(table.snapshot()[leaf], 2 * torch.ones(3))
    torch.testing.assert_close(gradient, torch.ones(3))


def test_gradients_on_gpus_are_ready_in_the_current_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass may run on a stream of the program, and a step on the default stream of another thread."""
    log: list[tuple[str, set[torch.device]]] = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(_gradients, "into_default_streams", lambda gpus: log.append(("into", set(gpus))))
    monkeypatch.setattr(_gradients, "behind_default_streams", lambda gpus: log.append(("behind", set(gpus))))
    table, leaf = GradientTable(), torch.ones(3, requires_grad=True)
    table.add([(leaf, torch.ones(3))])
    table.of([leaf])
    assert not log
    table.add([(leaf, torch.ones(3).as_subclass(OnGpu))])
    assert [name for name, _ in log] == ["behind", "into"]
    for act, expected in (
        (table.snapshot, ["behind"]),
        (lambda: table.of([leaf]), ["behind"]),
        (lambda: table.scale([leaf], 2.0), ["behind", "into"]),
    ):
        log.clear()
        act()
        assert [name for name, _ in log] == expected and all(gpus for _, gpus in log)
