"""Threads that read their connections while they wait: signals, forks, stopped peers, and many threads at once."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import rpc_leading_functions as functions
from full_sets import FULL_ONLY
from peer_timeouts import CALM_S

from rpcdist import rpc
from rpcdist.testing import RpcWorld, WorkerPool, eventually

pytestmark = pytest.mark.multiproc


@pytest.fixture(params=["auto", "tcp"])
def world(request: pytest.FixtureRequest, worker_pool: WorkerPool) -> RpcWorld:
    worker_pool.environment["RPCDIST_CHANNELS"] = request.param
    return worker_pool.world("a", "b", peer_timeout=CALM_S)


# The ways to call by turns over the channels.
BY_TURNS = [("auto", "rpc_sync"), ("tcp", "rpc_async"), ("auto", "remote")]
SELDOM = [("tcp", "rpc_sync"), ("auto", "rpc_async"), ("tcp", "remote")]


@pytest.mark.parametrize(
    ("world", "how"), [*BY_TURNS, *(pytest.param(*each, marks=FULL_ONLY) for each in SELDOM)], indirect=["world"]
)
def test_ctrl_c_at_any_moment_leaves_the_connection_whole(world: RpcWorld, how: str) -> None:
    """Where bytes had been lost, the next reply could not be found, or the next message be read."""
    chance = random.Random(5)
    caller = world["a"]
    session = None
    for _ in range(6):
        before = world["b"].run(functions.num_doubled)
        pending = caller.begin(functions.call_until_interrupted, "b", how)
        eventually(lambda: world["b"].run(functions.num_doubled) > before, "it calls")  # noqa: B023
        threading.Event().wait(chance.uniform(0.05, 0.3))  # the moment is the point: anywhere in a call
        os.kill(caller.pid, signal.SIGINT)
        assert pending.result()[0] == "KeyboardInterrupt"
        session = session or caller.run(functions.session_with, "b")
        assert caller.run(functions.session_with, "b") == session
    world.shutdown()


def test_ctrl_c_before_a_call_is_sent_leaves_nothing_to_wait_for(world: RpcWorld) -> None:
    """Nobody has its future, but `shutdown` would wait for it until its deadline."""
    left = world["a"].run(functions.calls_left_by_ctrl_c, "b")
    assert left == {"rpc_sync": 0, "rpc_async": 0, "remote": 0, "on a loop": 0, "rpc_sync, before its wait": 0}


def test_the_handler_of_a_signal_may_make_calls(world: RpcWorld) -> None:
    caller = world["a"]
    chance = random.Random(6)
    pending = caller.begin(functions.call_while_signals_come, "b", 10)
    while not pending.done():
        threading.Event().wait(chance.uniform(0.01, 0.1))
        os.kill(caller.pid, signal.SIGUSR1)
    calls, results = pending.result()
    assert calls and sorted(results) == [2 * number for number in range(len(results))]
    world.shutdown()


def test_a_fork_while_a_thread_reads_harms_nobody(world: RpcWorld) -> None:
    assert world["a"].run(functions.fork_while_another_leads, "b") == (7, 1.0)
    world.shutdown()


def test_a_peer_that_is_stopped_for_a_moment_answers_later(world: RpcWorld) -> None:
    pending = world["a"].begin(functions.call_until_interrupted, "b")
    for _ in range(3):
        os.kill(world["b"].pid, signal.SIGSTOP)
        threading.Event().wait(0.1)  # shorter than the peer's time
        os.kill(world["b"].pid, signal.SIGCONT)
        threading.Event().wait(0.1)
    os.kill(world["a"].pid, signal.SIGINT)
    how, calls = pending.result()
    assert (how, calls > 0) == ("KeyboardInterrupt", True)
    world.shutdown()


def test_many_threads_that_call_without_pause(world: RpcWorld) -> None:
    for number in (2, 8):
        assert world["a"].run(functions.call_from_threads, "b", number, 100) == []
    world.shutdown()


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async"])
def test_calls_near_the_recursion_limit_leave_the_connection_whole(world: RpcWorld, how: str) -> None:
    """The thread that read a reply failed amid a message, and the connection of all threads ended."""
    world["a"].run(rpc.rpc_sync, "b", str)
    kept = world["a"].run(functions.session_with, "b")
    outcomes = world["a"].run(functions.call_near_the_recursion_limit, "b", how)
    assert set(outcomes) == {"8", "RecursionError"}
    assert world["a"].run(functions.session_with, "b") == kept
