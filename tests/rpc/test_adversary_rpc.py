"""Hostile exceptions, handlers and threads: each call gets its answer, and nothing is lost or kept."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import adversary_functions as functions
import pytest
import rpc_victim_functions
from peer_timeouts import CALM_S, PROMPT_S
from values_helpers import fail

from rpcdist import rpc
from rpcdist.errors import RpcdistError, SerializationError
from rpcdist.testing import RpcWorld, WorkerPool
from rpcdist.transport.io_loop import IoLoop

KINDS = ("half a surrogate pair", "str exits", "no attributes", "constructor exits")


@pytest.mark.parametrize("kind", KINDS)
def test_any_exception_has_a_form_that_can_be_sent(kind: str) -> None:
    with pytest.raises(BaseException) as caught:
        functions.raise_hostile(kind)
    arrived = fail(caught.value).arrived()
    assert isinstance(arrived, Exception) and not isinstance(arrived, SystemExit)


def test_a_wait_for_a_loop_that_is_closed_meanwhile_says_so() -> None:
    io = IoLoop("rpcdist-test")
    io.start_thread()
    began = threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(io.run, wait(), 30.0)
        assert began.wait(30.0)
        io.close()
        with pytest.raises(RpcdistError, match="closed"):
            waiting.result(30.0)


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    """Workers that outlive what is tested here."""
    world = module_pool.world("a", "b", peer_timeout=CALM_S)
    yield world
    world.shutdown()


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_exception_reaches_the_caller(world: RpcWorld, kind: str) -> None:
    name, _ = world["a"].run(functions.call_hostile, "b", kind)
    expected = {
        "half a surrogate pair": "FileNotFoundError",
        "str exits": "StrExits",
        "constructor exits": "ConstructorExits",
    }
    assert name == expected.get(kind, "RemoteError")
    assert world["a"].run(rpc.rpc_sync, "b", rpc_victim_functions.add, (1, 2)) == 3


@pytest.mark.multiproc
def test_a_result_cannot_end_the_callers_program(world: RpcWorld) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", functions.make_exit).error(SerializationError)
    assert "SystemExit" in str(error)


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["sys.exit", *KINDS])
def test_a_hostile_hook_ends_the_backward_pass_everywhere(world: RpcWorld, kind: str) -> None:
    text, took_s = world["a"].run(functions.backward_through, "b", kind)
    assert "'b'" in text and took_s < PROMPT_S


@pytest.mark.multiproc
def test_shutdown_on_a_loop_is_refused_before_anything_is_closed(world: RpcWorld) -> None:
    assert "await rpc.shutdown_async()" in world["a"].run(functions.shut_down_on_a_loop)
    assert world["a"].run(rpc.rpc_sync, "b", rpc_victim_functions.add, (1, 2)) == 3


@pytest.mark.multiproc
def test_a_program_that_lives_on_a_loop(module_pool: WorkerPool) -> None:
    said, result = module_pool.start("alone").run(functions.live_on_a_loop, module_pool.new_url())
    assert "await rpc.init_rpc_async(...)" in said and result == "3"


@pytest.mark.multiproc
def test_a_stream_does_not_unpickle_what_calls_may_not(module_pool: WorkerPool, tmp_path: Path) -> None:
    witness = tmp_path / "unpickled"
    world = module_pool.new_world(2)
    joining = [world.begin_join("x", 0, allow_pickle=False), world.begin_join("y", 1)]
    for pending in joining:
        pending.result()
    assert world["x"].run(functions.read_two, "y", str(witness)) == ["1", "RemoteError_Touching"]
    tried = witness.read_text().split() if witness.exists() else []  # y may try its own exception
    assert str(world["x"].pid) not in tried
    world.shutdown()


@pytest.mark.multiproc
def test_threads_that_shut_down_at_the_same_time_close_once(module_pool: WorkerPool) -> None:
    world = module_pool.world("m", "n", peer_timeout=CALM_S)
    assert world["m"].run(functions.shut_down_from_many_threads) < PROMPT_S
    assert "did not stop cleanly" not in world["m"].output()
    world.shutdown("n", graceful=False)


@pytest.mark.multiproc
def test_streams_that_failed_keep_nothing_alive(module_pool: WorkerPool) -> None:
    world = module_pool.world("p", "q", peer_timeout=CALM_S)
    assert world["p"].run(functions.fail_streams_and_leave, "q") == 0
    world.shutdown("q", graceful=False)
