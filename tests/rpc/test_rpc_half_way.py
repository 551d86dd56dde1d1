"""A large payload is half way when its peer stops or dies, its time is over, or Ctrl-C comes; or its memory is lent."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import rpc_half_way_functions as functions
import rpc_victim_functions as victims
from full_sets import FULL_ONLY
from peer_timeouts import CALM_S, UNIT_S

from rpcdist import rpc, testing
from rpcdist.errors import DeadlineExceeded, WorkerLost
from rpcdist.testing import RpcWorld, WorkerPool, eventually, wait_until_asleep
from rpcdist.testing.worker import Pending
from rpcdist.transport.shared_memory import unavailable

pytestmark = pytest.mark.multiproc

CTRL_C_LIMIT_S = 30 * testing.UNIT_S
TOTAL = float(functions.NUM_FLOATS)
TRANSFERS: dict[str, Any] = {"send": functions.send, "fetch": functions.fetch}


def on_each_channel(*always: str) -> pytest.MarkDecorator:
    """The named channels in every run, and the others in the full set."""
    others = [kind for kind in ("local", "tcp", "grpc") if kind not in always]
    full = [pytest.param(kind, marks=[pytest.mark.stress, FULL_ONLY]) for kind in others]
    return pytest.mark.parametrize("channels", [*always, *full])


def in_frames(pool: WorkerPool, channels: str, *names: str, **options: Any) -> RpcWorld:
    """Workers whose payloads cross one connection in chunks, although they could share memory, or have more of them."""
    pool.environment.update(RPCDIST_CHANNELS=channels, RPCDIST_PAYLOAD_CONNECTIONS="0")
    return pool.world(*names, share_payloads=False, **options)


def begin_half_way(world: RpcWorld, how: str, to: str, *arguments: Any) -> Pending[Any]:
    """A call of `a` in the middle of whose payload the other worker stands still, in the middle of it too."""
    world[to].run(functions.stop_half_way, how)
    pending = world["a"].begin(*arguments)
    world[to].wait_until_stopped()
    return pending


@on_each_channel()  # it waits for the silence of a peer twice
def test_a_peer_that_stops_half_way_is_given_up_and_others_are_not(worker_pool: WorkerPool, channels: str) -> None:
    world = in_frames(worker_pool, channels, "a", "b", "c", peer_timeout=UNIT_S)
    for how, call in TRANSFERS.items():
        pending = begin_half_way(world, how, "b", call, "b")
        assert world["c"].run(rpc.rpc_sync, "a", victims.add, (1, 2)) == 3  # while `a` waits for `b`
        error = pending.error(WorkerLost)
        assert error.worker == "b" and "no sign of life" in error.reason
        assert world["a"].run(call, "c") == TOTAL
        world["b"].resume()
        world["a"].run(victims.call_until_it_works, "b")
        assert world["a"].run(call, "b") == TOTAL
    assert world["a"].run(victims.sees) == {}


@on_each_channel("local")
def test_a_peer_that_is_killed_half_way_fails_the_call_at_once(worker_pool: WorkerPool, channels: str) -> None:
    world = in_frames(worker_pool, channels, "a", "b", "c", "d", peer_timeout=CALM_S)
    for how, victim in (("send", "b"), ("fetch", "c")):
        world[victim].run(functions.kill_half_way, how)
        error = world["a"].begin(TRANSFERS[how], victim).error(WorkerLost)
        assert error.worker == victim and "broke" in error.reason
        assert world["a"].run(TRANSFERS[how], "d") == TOTAL
        assert world[victim].wait() == -signal.SIGKILL
    assert world["a"].run(victims.sees) == {}


@on_each_channel("local")
def test_ctrl_c_and_deadlines_end_a_call_half_way_and_not_its_connection(
    worker_pool: WorkerPool, channels: str
) -> None:
    """Bytes that were lost, or written twice, would end the session or fail the next transfer."""
    world = in_frames(worker_pool, channels, "a", "b", peer_timeout=CALM_S)
    session = world["a"].run(victims.connection_to, "b")
    for how, call in TRANSFERS.items():
        pending = begin_half_way(world, how, "b", victims.error_of, call, "b")
        wait_until_asleep(world["a"].pid)
        interrupted = time.monotonic()
        os.kill(world["a"].pid, signal.SIGINT)
        name, _, _ = pending.result()
        assert (how, name) == (how, "KeyboardInterrupt")
        assert time.monotonic() - interrupted < CTRL_C_LIMIT_S
        world["b"].resume()
        assert world["a"].run(call, "b") == TOTAL
        pending = begin_half_way(world, how, "b", call, "b", UNIT_S)
        assert "b" in str(pending.error(DeadlineExceeded))
        world["b"].resume()
        assert world["a"].run(call, "b") == TOTAL
    assert world["a"].run(victims.connection_to, "b") == session
    assert world["a"].run(victims.wait_until_empty) == world["b"].run(victims.wait_until_empty) == ""
    world.shutdown()


@pytest.mark.skipif(unavailable() is not None, reason=f"memory cannot be shared here: {unavailable()}")
def test_memory_that_a_stopped_peer_borrows_or_lent_stays_as_it_is(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=UNIT_S)
    world["a"].run(functions.lend, "b", 1.0)
    world["b"].run(functions.lend, "a", 2.0)
    world["b"].stop()
    error = world["a"].begin(functions.send, "b").error(WorkerLost)
    assert error.worker == "b" and "no sign of life" in error.reason
    world["a"].run(functions.lend, "c", 3.0)  # were the memory of `b` free for others, this would write to it
    assert world["c"].run(functions.totals_of_kept) == [3 * TOTAL]
    assert world["a"].run(functions.totals_of_kept) == [2 * TOTAL]
    world["b"].resume()
    world["a"].run(victims.call_until_it_works, "b")
    assert world["b"].run(functions.totals_of_kept) == [TOTAL]
    for call in TRANSFERS.values():
        assert world["a"].run(call, "b") == TOTAL
    eventually(lambda: world["a"].run(victims.sees) == {}, "nothing is in flight")
