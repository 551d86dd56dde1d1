"""What `rpc_stream` returns on an event loop, where it must not wait for the callee's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

from rpcdist.errors import BlockingInLoop
from rpcdist.rpc._calling.result_streams import Stream
from rpcdist.rpc.future import Future

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
        self._is_closed = False

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
        return next(self._started(self._start.wait()))  # in another thread

    def __aiter__(self) -> AsyncIterator[T]:
        if (stream := self._stream) is not None:
            aiter(stream)  # as above
        return self

    async def __anext__(self) -> T:
        return await anext(self._started(await self._start))

    def _started(self, result: object) -> Stream[T]:
        stream: Stream[T] = check_is_stream(result, self._function)
        if self._is_closed:
            stream.close()  # whoever reads on may be told of the answer before `_close_result` is
        return stream

    def close(self) -> None:
        self._is_closed = True
        if not self._start.cancel():  # answered already, but perhaps not decoded yet
            self._start._when_done(_close_result)

    async def aclose(self) -> None:
        self.close()


def _close_result(start: Future[Any]) -> None:
    if start.exception() is None and isinstance(stream := start.value(), Stream):
        stream.close()


def check_is_stream(result: object, function: object) -> Stream[Any]:
    """Raises `TypeError` if a function that should be a generator function returned something else."""
    if isinstance(result, Stream):
        return result
    raise TypeError(f"rpc_stream expects a generator function, but {function!r} returned {type(result).__name__}")
