"""A stream on a loop that is closed before its call is answered, while the answer is decoded, and after."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from future_helpers import bring, settle

from rpcdist.errors import Cancelled
from rpcdist.rpc import Stream
from rpcdist.rpc._calling.result_streams import StartingStream, StreamState
from rpcdist.rpc.future import Future


def count_up() -> None:
    """Stands for the generator function that was called."""


class Call:
    """A call that is answered with a stream, and whether its generator was told to end."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        state = StreamState(1, "count_up", 16, lambda items: None, lambda: self.cancelled.append("stream"))
        self._opened: Stream[object] = Stream(state, None, deque())
        self.start: Future[Any] = Future(on_cancel=lambda: self.cancelled.append("call"))

    def answered(self) -> None:
        bring(self.start, lambda: self._opened)

    def decoded(self) -> None:
        settle(self.start)


@pytest.mark.parametrize("steps", ["close answer decode", "answer close decode", "answer decode close"])
async def test_a_stream_that_is_closed_at_any_time_ends_its_generator(steps: str) -> None:
    call = Call()
    stream: StartingStream[object] = StartingStream(call.start, count_up)
    for step in steps.split():
        {"close": stream.close, "answer": call.answered, "decode": call.decoded}[step]()
    assert call.cancelled == ["call" if steps.startswith("close") else "stream"]
    with pytest.raises(Cancelled):
        await anext(stream)


async def test_a_stream_that_is_closed_while_somebody_waits_for_the_answer_gives_it_nothing() -> None:
    call = Call()
    stream: StartingStream[object] = StartingStream(call.start, count_up)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # it waits now
    call.answered()
    stream.close()
    call.decoded()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(reader, 10)
    assert call.cancelled == ["stream"]
