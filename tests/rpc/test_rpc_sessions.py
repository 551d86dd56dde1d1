"""`rpc.session`, `init_rpc_async`, `shutdown_async`: RPC starts and ends in coroutines, also in cancelled ones."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rpcdist import rpc
from rpcdist.errors import ConfigError, NotInitialized, RendezvousError
from rpcdist.testing import InProcessCluster, eventually_async, free_port


@pytest.fixture(autouse=True)
def no_launcher(no_agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


async def test_a_session_in_a_coroutine() -> None:
    async with rpc.session("me", rank=0, world_size=1):
        assert await rpc.rpc_async("me", pow, (2, 10)) == 1024
    with pytest.raises(NotInitialized):
        rpc.get_worker_info()


def test_a_session_in_a_thread() -> None:
    with rpc.session("me", rank=0, world_size=1) as session:
        assert isinstance(session, rpc.RpcSession)
        assert rpc.rpc_sync("me", pow, (2, 10)) == 1024
    with pytest.raises(KeyError), rpc.session("me", rank=0, world_size=1):
        raise KeyError("of the block")
    assert not rpc.api._is_current_rpc_agent_set()


async def test_the_functions_of_a_session() -> None:
    await rpc.init_rpc_async("me", rank=0, world_size=1)
    assert await rpc.rpc_async("me", pow, (2, 10)) == 1024
    assert await rpc.shutdown_async() == {}
    with pytest.raises(NotInitialized):
        await rpc.shutdown_async()
    with pytest.raises(ConfigError, match="name"):
        await rpc.init_rpc_async("not a name", rank=0, world_size=1)


async def test_a_start_that_is_cancelled_is_undone(leak_guard: object) -> None:
    """The other worker never comes; the thread of the start ends when its time is over."""
    options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}", init_timeout=1.5)
    starting = asyncio.create_task(rpc.init_rpc_async("me", rank=0, world_size=2, rpc_backend_options=options))
    await eventually_async(lambda: "rpcdist-init" in names_of_threads(), "it starts")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually_async(lambda: "rpcdist-init" not in names_of_threads(), "its thread has ended")
    assert not rpc.api._is_current_rpc_agent_set()


async def test_a_shutdown_that_is_cancelled_leaves_at_once() -> None:
    cluster = InProcessCluster("stays", "leaves")
    try:
        with cluster.use("leaves"):
            leaving = asyncio.create_task(rpc.shutdown_async())
            await eventually_async(lambda: "rpcdist-shutdown" in names_of_threads(), "it waits for the other")
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            with pytest.raises(NotInitialized):
                rpc.get_worker_info()
        await asyncio.to_thread(cluster.run, "stays", rpc.shutdown)  # waits for nobody who has left
    finally:
        await asyncio.to_thread(cluster.close)
        await asyncio.get_running_loop().shutdown_default_executor()
    await eventually_async(lambda: "rpcdist-shutdown" not in names_of_threads(), "its thread has ended")


def test_the_start_has_a_limit_of_its_own() -> None:
    options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}", init_timeout=0.5, rpc_timeout=0)
    with pytest.raises(RendezvousError, match=r"after \d+\.\d s, these ranks have not joined: 1"):
        rpc.init_rpc("me", rank=0, world_size=2, rpc_backend_options=options)
    assert (rpc.RpcOptions().startup_limit_s, rpc.RpcOptions(rpc_timeout=0.1).startup_limit_s) == (60, 60)
    assert (rpc.RpcOptions(rpc_timeout=90).startup_limit_s, rpc.RpcOptions(rpc_timeout=0).startup_limit_s) == (90, None)
    assert rpc.TensorPipeRpcBackendOptions(rpc_timeout=7).startup_limit_s == 7


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
