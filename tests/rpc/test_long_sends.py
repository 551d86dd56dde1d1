"""A thread that copies a large buffer into shared memory keeps nobody else from reading, and from calling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from agents_here import LIMIT_S, agents_here
from inside_agents import Agent

from rpcdist import rpc
from rpcdist.errors import TransportError
from rpcdist.rpc._current import use_agent
from rpcdist.rpc._peers.network import Connection
from rpcdist.rpc._peers.peer import Peer
from rpcdist.rpc._values.buffers import TAKES_LONG_FROM_BYTES, TensorBuffer
from rpcdist.testing import eventually
from rpcdist.transport.shared_memory import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"memory cannot be shared here: {unavailable()}")

NUM_SMALL_CALLS = 3


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def make_large() -> torch.Tensor:
    return torch.arange(TAKES_LONG_FROM_BYTES // 4, dtype=torch.float32)


def number() -> int:
    return 7


@pytest.fixture
def agent(job_token: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """That of "a"; "b" is in this process, too, and connected by a socket."""
    monkeypatch.setenv("RPCDIST_CHANNELS", "auto")  # whatever the run says: memory is shared over Unix sockets only
    with agents_here("a", "b") as agents:
        yield agents[0]


def call(agent: Agent, results: list[int]) -> None:
    with use_agent(agent):
        results.extend(rpc.rpc_sync("b", number, timeout=LIMIT_S) for _ in range(NUM_SMALL_CALLS))


def in_thread(function: Callable[..., object], *arguments: object) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join(LIMIT_S)


@pytest.mark.parametrize("copied", ["the arguments", "the result", "the value of a creation"])
def test_small_calls_come_and_go_while_a_large_buffer_is_copied(
    agent: Agent, copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = make_large()
    results: list[int] = []
    begun: list[str] = []
    copy_to = TensorBuffer.copy_to

    def copy_while_others_call(buffer: TensorBuffer, address: int) -> None:
        is_callee = threading.current_thread().name.startswith("rpcdist-worker")
        if is_callee == (copied != "the arguments") and not begun:
            begun.append(copied)
            in_thread(call, agent, results)
        copy_to(buffer, address)

    with use_agent(agent):
        assert rpc.rpc_sync("b", number) == 7  # the connection stands: what waits for it has another way
        monkeypatch.setattr(TensorBuffer, "copy_to", copy_while_others_call)
        for _ in range(100):  # the first ones travel in the socket, and bring segments along
            if copied == "the value of a creation":
                got = rpc.remote("b", make_large).to_here(LIMIT_S)
            else:
                got = rpc.rpc_sync("b", echo, (tensor,))
            assert torch.equal(got, tensor)
            del got  # its segment returns
            if begun:
                break
    assert begun == [copied]
    assert results == [7] * NUM_SMALL_CALLS


def test_a_message_that_cannot_be_sent_any_more_takes_no_other_along(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensor was resized while it waited for the connection. Messages behind it were lost silently."""
    gate, open_now = threading.Event(), Peer._open

    async def open_later(peer: Peer, timeout_s: float) -> Connection:
        await asyncio.to_thread(gate.wait, LIMIT_S)
        return await open_now(peer, timeout_s)

    with use_agent(agent):
        assert rpc.rpc_sync("b", number) == 7
    peer = agent.router.peer(1)
    monkeypatch.setattr(Peer, "_open", open_later)
    assert peer.session is not None
    peer.session.close("the connection of the test ends")
    eventually(lambda: peer.session is None)
    tensor, whole = make_large(), make_large()
    with use_agent(agent):
        resized, before = rpc.rpc_async("b", echo, (tensor,)), rpc.rpc_async("b", number)
        after = rpc.rpc_async("b", echo, (whole,))
        tensor.untyped_storage().resize_(0)
        gate.set()
        with pytest.raises(TransportError, match=r"echo.* was not sent: the memory of a tensor was freed or resized"):
            resized.wait()
        assert before.wait() == 7 and torch.equal(after.wait(), whole)
        assert rpc.rpc_sync("b", number) == 7


def test_large_buffers_that_wait_for_the_connection_are_copied_beside_the_io_loop(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, gate, threads = make_large(), threading.Event(), list[str]()
    open_now, copy_to = Peer._open, TensorBuffer.copy_to

    async def open_later(peer: Peer, timeout_s: float) -> Connection:
        await asyncio.to_thread(gate.wait, LIMIT_S)
        return await open_now(peer, timeout_s)

    def copy_and_note(buffer: TensorBuffer, address: int) -> None:
        threads.append(threading.current_thread().name)
        copy_to(buffer, address)

    with use_agent(agent):
        assert rpc.rpc_sync("b", number) == 7
    peer = agent.router.peer(1)
    monkeypatch.setattr(Peer, "_open", open_later)
    monkeypatch.setattr(TensorBuffer, "copy_to", copy_and_note)
    assert peer.session is not None
    peer.session.close("the connection of the test ends")
    eventually(lambda: peer.session is None)
    with use_agent(agent):
        echoes, numbers = list[rpc.Future[torch.Tensor]](), list[rpc.Future[int]]()
        for _ in range(2):
            echoes.append(rpc.rpc_async("b", echo, (tensor,)))
            numbers.append(rpc.rpc_async("b", number))
        gate.set()
        assert all(torch.equal(echoed, tensor) for echoed in rpc.wait_all(echoes))
        assert rpc.wait_all(numbers) == [7, 7]
        assert rpc.rpc_sync("b", number) == 7
    assert len(threads) >= 2 and not [name for name in threads if "io" in name.split("-")]
