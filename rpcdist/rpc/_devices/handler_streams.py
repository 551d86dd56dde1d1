"""The CUDA streams of functions that were called with GPU tensors.

A function runs with a stream of its own for each device of its arguments, so that concurrent calls are also concurrent
on the device. The stream waits for the thread's current stream when the call begins, and that stream waits for it when
the call ends, so work that was enqueued before and after a call keeps the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from rpcdist.rpc._values.buffers import keep_for_current_streams

_idle: Final[dict[int, list[_PoolStream]]] = {}
"""The unused streams of each device, in the order of their last use. Consecutive calls share a stream, and with it the
memory that torch's allocator keeps for the stream."""


class _PoolStream:
    """A stream, with the events by which it waits for another stream, and that stream for it."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)
        self._begin, self._end = torch.cuda.Event(), torch.cuda.Event()

    def begin_behind(self, outer: torch.cuda.Stream) -> None:
        self._begin.record(outer)
        self.stream.wait_event(self._begin)

    def end_before(self, outer: torch.cuda.Stream) -> None:
        self._end.record(self.stream)
        outer.wait_event(self._end)


class HandlerStreams:
    """Streams that are current on this thread from their creation until `leave`, which is idempotent."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._entered: list[tuple[torch.cuda.Stream, _PoolStream]] = []
        try:
            for device in devices:
                self._enter(device)
        except BaseException:  # a device has no memory left, for example
            self.leave()
            raise

    def _enter(self, device: int) -> None:
        outer = torch.cuda.current_stream(device)
        try:
            inner = _idle.setdefault(device, []).pop()
        except IndexError:
            inner = _PoolStream(device)
        inner.begin_behind(outer)
        self._entered.append((outer, inner))
        _make_current(inner.stream)

    def leave(self) -> None:
        while self._entered:
            outer, inner = self._entered.pop()
            inner.end_before(outer)
            _make_current(outer)
            _idle[inner.device].append(inner)


def into_default_streams(gpus: Iterable[torch.device]) -> None:
    """Makes the default streams of some GPUs wait for the current ones."""
    for gpu in gpus:
        default, current = torch.cuda.default_stream(gpu), torch.cuda.current_stream(gpu)
        if current != default:
            default.wait_stream(current)


def behind_default_streams(gpus: Iterable[torch.device]) -> None:
    """Makes the current streams of some GPUs wait for the default ones."""
    for gpu in gpus:
        default, current = torch.cuda.default_stream(gpu), torch.cuda.current_stream(gpu)
        if current != default:
            current.wait_stream(default)


def _make_current(stream: Any) -> None:
    """Sets the current stream of its device; unlike `torch.cuda.set_stream`, keeps the current device."""
    device = torch.cuda.current_device()
    torch.cuda.set_stream(stream)
    if device != stream.device_index:
        torch.cuda.set_device(device)


def gpu_tensors(value: object) -> list[torch.Tensor]:
    """The tensors in a value that are on GPUs."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


@contextmanager
def in_default_streams(value: object) -> Iterator[None]:
    """Makes the default streams current, after the tensors of a value: for state that several calls change in turn."""
    tensors = gpu_tensors(value)
    gpus = {tensor.device for tensor in tensors}
    into_default_streams(gpus)
    with ExitStack() as streams:
        for device in gpus:
            streams.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
        keep_for_current_streams(tensors)
        yield


class ArrivedTensors:
    """The GPU tensors of one value, copied in a stream that may not be the current one of the thread that uses them.

    Streams that use them wait for an event, and not for that stream, which may have later copies that wait for GPUs of
    other workers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        by_device: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.get_device(), []).append(tensor)
        self._by_device = [
            (stream := torch.cuda.current_stream(device), stream.record_event(), of_one)
            for device, of_one in by_device.items()
        ]

    @classmethod
    def of(cls, value: object) -> ArrivedTensors:
        return cls(gpu_tensors(value))

    def followed_by(self, result: object) -> ArrivedTensors:
        return self.of(result)

    def join_gpus(self) -> None:
        """Makes the current streams of this thread wait for the tensors."""
        for stream, event, tensors in self._by_device:
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
                for tensor in tensors:
                    tensor.record_stream(current)
