"""`rpc.session`, `init_rpc_async`, `shutdown_async`: RPC starts and ends in coroutines, also in cancelled ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rpcdist import rpc, testing
from rpcdist.collectives import TCPStore
from rpcdist.errors import ConfigError, NotInitialized, RendezvousError
from rpcdist.testing import LIMIT_S, InProcessCluster, WorkerPool, eventually_async, free_port


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


NUM_LOOKS = 10

Place = tuple[str, int, int | None]
"""The URL, the rank and the world size of a start that waits for others."""


@contextmanager
def nothing_listens(_: Path) -> Iterator[Place]:
    yield f"tcp://127.0.0.1:{free_port()}", 1, 2


@contextmanager
def nothing_answers(_: Path) -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"tcp://127.0.0.1:{silent.getsockname()[1]}", 1, 2


@contextmanager
def rank_0_without_the_others(_: Path) -> Iterator[Place]:
    yield f"tcp://127.0.0.1:{free_port()}", 0, 2


@contextmanager
def store_without_rank_0(_: Path) -> Iterator[Place]:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield f"tcp://127.0.0.1:{store.port}", 1, 2


@contextmanager
def store_without_rank_0_in_a_world_that_changes(_: Path) -> Iterator[Place]:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield f"tcp://127.0.0.1:{store.port}", 1, None


@contextmanager
def file_without_rank_0(folder: Path) -> Iterator[Place]:
    yield f"file://{folder}/file", 1, 2


@contextmanager
def no_store_of_torchrun(_: Path) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_PORT": free_port(), "RANK": 1, "WORLD_SIZE": 2}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        yield "env://", -1, None


@contextmanager
def store_of_torchrun_without_rank_0(_: Path) -> Iterator[Place]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_PORT": store.port, "RANK": 1, "WORLD_SIZE": 2}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        yield "env://", -1, None


@pytest.fixture(
    params=[
        nothing_listens, nothing_answers, rank_0_without_the_others, store_without_rank_0,
        store_without_rank_0_in_a_world_that_changes, file_without_rank_0, no_store_of_torchrun,
        store_of_torchrun_without_rank_0,
    ]
)  # fmt: skip
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with request.param(tmp_path) as place:
        yield place


async def test_a_start_that_is_cancelled_ends_at_once(place: Place, tmp_path: Path) -> None:
    """A start that is cancelled in any of its waits leaves no thread and no port; the next one succeeds at once."""
    url, rank, world_size = place
    options = rpc.RpcOptions(init_method=url, init_timeout=2 * LIMIT_S)
    starting = asyncio.create_task(rpc.init_rpc_async("me", None, rank, world_size, options))
    await until_the_start_waits()
    began = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually_async(lambda: "rpcdist-init" not in names_of_threads(), "its thread has ended")
    assert not rpc.api._is_current_rpc_agent_set()
    async with rpc.session("me", None, 0, 1, rpc.RpcOptions(init_method=f"file://{tmp_path}/next")):
        assert await rpc.rpc_async("me", pow, (2, 10)) == 1024
    assert time.monotonic() - began < LIMIT_S


async def test_a_start_that_is_cancelled_frees_its_port_at_once() -> None:
    options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
    for _ in range(3):
        starting = asyncio.create_task(rpc.init_rpc_async("me", None, 0, 2, options))
        await until_the_start_waits()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    async with rpc.session("me", None, 0, 1, options):
        assert await rpc.rpc_async("me", pow, (2, 10)) == 1024


@pytest.mark.multiproc
async def test_workers_that_give_up_and_try_again_find_each_other(worker_pool: WorkerPool) -> None:
    """A start in which the workers did not find each other does not count, here or at the others."""
    options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}", init_timeout=2 * LIMIT_S)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(testing.UNIT_S / 10):
                await rpc.init_rpc_async("a", None, 0, 2, options)
    other = worker_pool.start("b")
    joining = other.begin(rpc.init_rpc, "b", None, 1, 2, options)
    async with rpc.session("a", None, 0, 2, options):
        joining.result()
        assert await rpc.rpc_async("b", pow, (2, 10)) == 1024
        leaving = other.begin(rpc.shutdown)
    leaving.result()


@pytest.mark.multiproc
def test_a_worker_comes_back_to_a_world_that_others_have_not_left(worker_pool: WorkerPool) -> None:
    options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
    other = worker_pool.start("b")
    joining = other.begin(rpc.init_rpc, "b", None, 0, None, options)
    for _ in range(2):
        with rpc.session("a", None, 1, None, options):
            assert rpc.rpc_sync("b", pow, (2, 10)) == 1024
    joining.result()
    other.run(rpc.shutdown)


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


async def until_the_start_waits() -> None:
    states: list[str] = []

    def sleeps() -> bool:
        ids = [thread.native_id for thread in threading.enumerate() if thread.name == "rpcdist-init"]
        states.extend(Path(f"/proc/self/task/{id}/stat").read_text().rpartition(")")[2].split()[0] for id in ids)
        return states[-NUM_LOOKS:] == NUM_LOOKS * ["S"]

    await eventually_async(sleeps, "the start waits")


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
