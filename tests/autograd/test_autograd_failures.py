"""Workers that die in a backward pass, or between forward and backward: prompt errors that name them, no leaks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import autograd_functions as functions
import pytest
import rpc_victim_functions as victim_functions
import torch
from peer_timeouts import CALM_S, PROMPT_S, UNIT_S

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.testing import WorkerPool, eventually, wait_until_asleep

pytestmark = pytest.mark.multiproc

rpc_sync: Any = rpc.rpc_sync


# ---------------------------------------------------------------- what victims run


def slow_backward(path: str, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: victim_functions.announce_and_wait(path))
    return y


def train(through: list[str], path: str) -> tuple[str, str, float]:
    """A pass through workers, the last of which waits in its backward. Returns the error, and what is left."""
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        value: torch.Tensor = x
        for name in through[:-1]:
            value = rpc_sync(name, functions.double, (value,))
        value = rpc_sync(through[-1], slow_backward, (path, value))
        for name in reversed(through[:-1]):
            value = rpc_sync(name, functions.double, (value,))
        try:
            autograd.backward(context_id, [value.sum()])
        except RuntimeError as exc:
            return type(exc).__name__, str(exc), time.monotonic()
    return "none", "", time.monotonic()


def hold_context(to: str, path: str) -> None:
    """Opens a context on another worker and stays in it."""
    with autograd.context():
        rpc_sync(to, functions.identity, (1,))
        victim_functions.announce_and_wait(path)


def backward_after_death(to: str, ready: str, dead: str) -> tuple[str, str]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc_sync(to, functions.double, (x,)).sum()
        Path(ready).touch()
        eventually(Path(dead).exists, "the other worker is dead")
        with pytest.raises(RuntimeError) as caught:
            autograd.backward(context_id, [loss])
    return type(caught.value).__name__, str(caught.value)


def train_and_train_again(path: str) -> tuple[str, str, str]:
    """A pass that is interrupted while this thread waits for worker b, and another one after it."""
    x = torch.ones(3, requires_grad=True)
    interrupted = ""
    with autograd.context() as context_id:
        loss = rpc_sync("b", slow_backward, (path, x)).sum()
        try:
            autograd.backward(context_id, [loss])
        except KeyboardInterrupt:
            interrupted = "KeyboardInterrupt"
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("b", functions.double, (x,)).sum()])
        found = autograd.get_gradients(context_id)[x].tolist()
    return interrupted, str(found), str(time.monotonic())


def is_clean() -> bool:
    return set(functions.autograd_state().values()) == {"0"}


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("through", [["b"], ["c", "b"]], ids=["direct", "behind another"])
def test_a_worker_killed_in_the_middle(worker_pool: WorkerPool, tmp_path: Path, through: list[str]) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=CALM_S)
    running = tmp_path / "running"
    pending = world["a"].begin(train, through, str(running))
    eventually(running.exists, "the backward has reached the worker")
    killed = time.monotonic()
    world["b"].kill()
    kind, text, at = pending.result()
    assert kind == "BackwardError" and "'b'" in text and "lost" in text
    assert at - killed < PROMPT_S
    eventually(lambda: world["a"].run(is_clean) and world["c"].run(is_clean), "the context is released")


def test_a_worker_killed_before_the_backward(worker_pool: WorkerPool, tmp_path: Path) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    ready, dead = tmp_path / "ready", tmp_path / "dead"
    pending = world["a"].begin(backward_after_death, "b", str(ready), str(dead))
    eventually(ready.exists, "the forward is done")
    world["b"].kill()
    dead.touch()
    kind, text = pending.result()
    assert kind == "BackwardError" and "'b'" in text
    eventually(lambda: world["a"].run(is_clean), "the context is released")


def test_contexts_of_a_dead_worker_end(worker_pool: WorkerPool, tmp_path: Path) -> None:
    world = worker_pool.world("a", "b", peer_timeout=UNIT_S)
    running = tmp_path / "running"
    world["b"].run(rpc_sync, "a", functions.identity, (1,))
    world["a"].begin(hold_context, "b", str(running))
    eventually(running.exists, "the context is open")
    world["b"].run(rpc_sync, "a", functions.identity, (1,))  # b is connected to a, and sees it die
    assert not world["b"].run(is_clean)
    world["a"].kill()
    eventually(lambda: world["b"].run(is_clean), "the context is released")


def test_ctrl_c_while_backward_waits(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """The thread that waits reads the connection; Ctrl-C must end that, and lose nothing for the next pass."""
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    running = tmp_path / "running"
    pending = world["a"].begin(train_and_train_again, str(running))
    eventually(running.exists, "the backward has reached the worker")
    wait_until_asleep(world["a"].pid)
    interrupted = time.monotonic()
    os.kill(world["a"].pid, signal.SIGINT)
    kind, gradient, at = pending.result()
    assert (kind, gradient) == ("KeyboardInterrupt", "[2.0, 2.0, 2.0]")
    assert float(at) - interrupted < PROMPT_S
    eventually(lambda: world["a"].run(is_clean), "the context is released")
    world["b"].kill()  # a hook of its waits for ever
    world.shutdown("a", graceful=False)


def test_a_worker_that_is_stopped_in_the_middle(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """The thread that waits reads the connection, and nothing comes: the worker is lost after `peer_timeout`."""
    world = worker_pool.world("a", "b", peer_timeout=UNIT_S)
    running = tmp_path / "running"
    pending = world["a"].begin(train, ["b"], str(running))
    eventually(running.exists, "the backward has reached the worker")
    os.kill(world["b"].pid, signal.SIGSTOP)
    try:
        kind, text, _ = pending.result()
    finally:
        world["b"].kill()
    assert kind == "BackwardError" and "'b'" in text and "lost" in text
    eventually(lambda: world["a"].run(is_clean), "the context is released")
