"""What `rpc_stream` returns on an event loop, where it must not wait for the callee's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

from rpcdist.errors import BlockingInLoop
from rpcdist.rpc._calling.result_streams import Stream
from rpcdist.rpc.future import Future

__all__ = ["StartingStream", "check_is_stream"]

T = TypeVar("T")


class StartingStream(Stream[T]):
    """A stream whose call is under way; the first `async for` waits for its answer.

    Cancelling that first wait cancels the call, as with `await rpc.rpc_async(...)`.

    Args:
        start: its result is the stream.
        function: what was called, for messages.
    """

    def __init__(self, start: Future[Any], function: object) -> None:
        self._start = start
        self._function = function

    def __repr__(self) -> str:
        return repr(self._stream or self._start)

    @property
    def _stream(self) -> Stream[T] | None:
        """The stream, when the call has been answered with one."""
        if not self._start.done() or self._start.exception() is not None:
            return None
        result = self._start.value()
        return result if isinstance(result, Stream) else None

    def __iter__(self) -> Iterator[T]:
        if (stream := self._stream) is not None:
            iter(stream)  # raises if its items have been taken
        return self

    def __next__(self) -> T:
        if asyncio._get_running_loop() is not None:
            raise BlockingInLoop("iterating a stream with `for`", "async for item in rpc.rpc_stream(...)")
        stream: Stream[T] = check_is_stream(self._start.wait(), self._function)  # in another thread
        return next(stream)

    def __aiter__(self) -> AsyncIterator[T]:
        if (stream := self._stream) is not None:
            aiter(stream)  # as above
        return self

    async def __anext__(self) -> T:
        stream: Stream[T] = check_is_stream(await self._start, self._function)
        return await stream.__anext__()

    def close(self) -> None:
        self._start.cancel()
        if (stream := self._stream) is not None:
            stream.close()

    async def aclose(self) -> None:
        self.close()


def check_is_stream(result: object, function: object) -> Stream[Any]:
    """Raises `TypeError` if a function that should be a generator function returned something else."""
    if isinstance(result, Stream):
        return result
    raise TypeError(f"rpc_stream expects a generator function, but {function!r} returned {type(result).__name__}")
