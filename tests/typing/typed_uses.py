"""Programs of users, with the types that they intend. Type checkers check it; it is never run.

`assert_type` compares what a checker infers with what it should. A line that ends with `type: ignore` has to be an
error, and an ignored error that is none is one: mypy and pyright both say so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, assert_type

import torch
from torch import Tensor, nn

from rpcdist import rpc
from rpcdist.nn import RemoteModule
from rpcdist.rpc import Future, RRef, Stream


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    async def wait_for(self, count: int, *, patience_s: float = 1.0) -> str:
        return f"{count} after {patience_s} s"

    def numbers(self) -> Iterator[int]:
        yield self.count


class Doubling(nn.Module):
    def forward(self, rows: Tensor, times: int = 2) -> tuple[Tensor, int]:
        return rows * times, times


def length(text: str, scale: float = 1.0) -> float:
    return len(text) * scale


async def length_later(text: str) -> float:
    return float(len(text))


@rpc.functions.async_execution
def length_in_future(text: str) -> Future[float]:
    return rpc.rpc_async("other", length, (text,))


@rpc.functions.async_execution
def length_in_torch_future(text: str) -> torch.futures.Future[float]:
    return torch.futures.Future()


@rpc.functions.idempotent
def read(key: str) -> bytes:
    return key.encode()


def words(text: str) -> Iterator[str]:
    yield from text.split()


def words_by_generator(text: str) -> Generator[str, None, int]:
    yield from text.split()
    return 0


async def words_later(text: str) -> AsyncIterator[str]:
    for word in text.split():
        yield word


def anything(text: str) -> Any:
    return text


def synchronous_calls() -> None:
    assert_type(rpc.rpc_sync("w", length, ("ab",)), float)
    assert_type(rpc.rpc_sync(1, length_later, args=("ab",), timeout=3), float)
    assert_type(rpc.rpc_sync("w", length_in_future, ("ab",)), float)
    assert_type(rpc.rpc_sync("w", length_in_torch_future, ("ab",)), float)
    assert_type(rpc.rpc_sync("w", read, ("key",)), bytes)
    assert_type(rpc.rpc_sync("w", words, ("a b",)), Stream[str])
    assert_type(rpc.rpc_sync("w", torch.add, (torch.ones(2), 1)), Tensor)
    assert_type(rpc.rpc_sync("w", Counter, (1,)), Counter)
    assert_type(rpc.rpc_sync("w", anything, ("a",)), Any)


async def asynchronous_calls() -> None:
    assert_type(rpc.rpc_async("w", length, ("ab",)), Future[float])
    assert_type(await rpc.rpc_async("w", length, ("ab",)), float)
    assert_type(await rpc.rpc_async("w", length_later, ("ab",)), float)
    assert_type(await rpc.rpc_async("w", length_in_future, ("ab",)), float)
    assert_type(await rpc.rpc_async("w", read, ("key",)), bytes)
    async with await rpc.rpc_async("w", words_later, ("a b",)) as stream:
        assert_type(stream, Stream[str])
        async for word in stream:
            assert_type(word, str)
    async for word in await rpc.rpc_async("w", words_by_generator, ("a b",)):
        assert_type(word, str)


def streams() -> None:
    assert_type(rpc.rpc_stream("w", words, ("a b",)), Stream[str])
    assert_type(rpc.rpc_stream("w", words_by_generator, ("a b",)), Stream[str])
    assert_type(rpc.rpc_stream("w", words_later, ("a b",)), Stream[str])
    for word in rpc.rpc_stream("w", words, ("a b",)):
        assert_type(word, str)
    rpc.rpc_stream("w", length, ("ab",))  # type: ignore[arg-type]


async def calls_with_their_arguments() -> None:
    assert_type(rpc.call("w", length, "ab", scale=2.0), float)
    assert_type(rpc.call("w", length_later, "ab"), float)
    assert_type(rpc.call("w", length_in_future, "ab"), float)
    assert_type(rpc.call("w", words, "a b"), Stream[str])
    assert_type(rpc.call("w", words_later, "a b"), Stream[str])
    assert_type(rpc.call_async("w", length, "ab"), Future[float])
    assert_type(await rpc.call_async("w", length_later, "ab"), float)
    assert_type(await rpc.call_async("w", words_later, "a b"), Stream[str])
    rpc.call("w", length, 1)  # type: ignore[call-overload]
    rpc.call("w", length, "ab", size=1)  # type: ignore[call-arg, arg-type]
    rpc.call("w", length_later)  # type: ignore[call-overload]
    await rpc.call_async("w", length, "ab", scale="2")  # type: ignore[arg-type]


async def references() -> None:
    counter = rpc.remote("w", Counter, (1,))
    assert_type(counter, RRef[Counter])
    assert_type(rpc.remote("w", length_later, ("ab",)), RRef[float])
    assert_type(rpc.remote("w", length_in_future, ("ab",)), RRef[float])
    assert_type(counter.to_here(), Counter)
    assert_type(await counter, Counter)
    assert_type(counter.call(Counter.add, 1), int)
    assert_type(counter.call(Counter.wait_for, 1, patience_s=2.0), str)
    assert_type(counter.call(Counter.numbers), Stream[int])
    assert_type(counter.call_async(Counter.add, 1), Future[int])
    assert_type(await counter.call_async(Counter.wait_for, 1), str)
    counter.call(Counter.add, "1")  # type: ignore[call-overload]
    counter.call(Counter.add)  # type: ignore[call-overload]
    counter.call(Doubling.forward, torch.ones(2))  # type: ignore[call-overload]
    await counter.call_async(Counter.wait_for, 1, patience_s="2")  # type: ignore[arg-type]


async def actors() -> None:
    actor = rpc.remote("w", Counter, (1,), serial=True, max_restarts=3)
    assert_type(actor, rpc.RestartingActor[Counter])
    assert_type(actor.call(Counter.add, 1), int)
    assert_type(await actor.call_async(Counter.wait_for, 1), str)
    actor.call(Counter.add, "1")  # type: ignore[call-overload]
    assert_type(actor.rpc_async().add(1), Future[Any])


async def proxies(counter: RRef[Counter]) -> None:
    """A checker cannot know the methods behind a name; it knows how they are called."""
    assert_type(counter.rpc_async().add(1), Future[Any])
    assert_type(counter.remote().add(1), RRef[Any])
    assert_type(counter.rpc_sync().add(1), Any)
    await counter.rpc_async().wait_for(1)


def remote_modules() -> None:
    linear = RemoteModule("w", nn.Linear, (2, 3))
    assert_type(linear(torch.ones(2)), Tensor)
    assert_type(linear.forward_async(torch.ones(2)), Future[Tensor])
    doubling = RemoteModule("w/cuda:0", Doubling)
    assert_type(doubling(torch.ones(2), times=3), tuple[Tensor, int])
    doubling(1)  # type: ignore[arg-type]
    by_function(doubling)


def by_function(module: RemoteModule) -> None:
    assert_type(module(1), Any)
