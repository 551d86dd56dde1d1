"""Streams of CUDA around handlers, and how long memory is kept for them, on a stand-in for those of torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcdist import rpc
from rpcdist._proto import value_pb2
from rpcdist.rpc import future as future_module
from rpcdist.rpc._devices import handler_streams
from rpcdist.rpc._devices.handler_streams import (
    HandlerStreams,
    behind_default_streams,
    in_default_streams,
    into_default_streams,
)
from rpcdist.rpc._marshal import arrived_value
from rpcdist.rpc._marshal.arrived_value import ArrivedValue
from rpcdist.rpc._serving import dispatcher
from rpcdist.rpc._values import buffers, tensors
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.rpc.future import Future
from rpcdist.testing import InProcessCluster

Log = list[tuple[Any, ...]]


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log = log
        self.name = name
        self.device = torch.device("cuda:0")
        self.device_index = 0

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, "waits for", event.recorded_in))

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


class Event:
    recorded_in = ""

    def record(self, stream: Stream) -> None:
        self.recorded_in = stream.name


class OnGpu:
    """A tensor, as far as streams are concerned."""

    is_cuda = True
    device = torch.device("cuda:0")

    def __init__(self, log: Log) -> None:
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(("kept for", stream.name))


class Gpu:
    """The streams of one GPU, with one thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: Log = []
        self.default = self.current = Stream(self.log, "default")
        self._num_made = 0
        monkeypatch.setattr(handler_streams, "_idle", {})
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: self.default)
        monkeypatch.setattr(torch.cuda, "set_stream", self._enter)
        monkeypatch.setattr(torch.cuda, "stream", self._within)

    def _make(self, device: int) -> Stream:
        self._num_made += 1
        return Stream(self.log, f"of the pool {self._num_made}")

    def _enter(self, stream: Stream) -> None:
        self.current = stream

    def _within(self, stream: Stream) -> Any:
        gpu, before = self, self.current

        class Within:
            def __enter__(self) -> None:
                gpu.current = stream

            def __exit__(self, *exc: object) -> None:
                gpu.current = before

        return Within()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_handler_is_ordered_between_what_was_before_and_what_comes_after(gpu: Gpu) -> None:
    streams = HandlerStreams([0])
    assert gpu.current.name == "of the pool 1"
    inner = HandlerStreams([0])  # a call that another thread handles at the same time
    inner.leave()
    streams.leave()
    streams.leave()
    assert gpu.current is gpu.default
    assert gpu.log == [
        ("of the pool 1", "waits for", "default"),
        ("of the pool 2", "waits for", "of the pool 1"),
        ("of the pool 1", "waits for", "of the pool 2"),
        ("default", "waits for", "of the pool 1"),
    ]
    HandlerStreams([0])
    assert gpu.current.name == "of the pool 1"  # used again, as the last one that was left


def test_a_device_without_memory_leaves_the_streams_of_the_thread_as_they_were(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(device: int) -> Stream:
        if device == 1:
            raise torch.OutOfMemoryError("no memory for streams")
        return Stream(gpu.log, "of the pool")

    monkeypatch.setattr(torch.cuda, "Stream", make)
    with pytest.raises(torch.OutOfMemoryError):
        HandlerStreams([0, 1])
    assert gpu.current is gpu.default
    assert gpu.log[-1] == ("default", "waits for", "of the pool")


def test_state_that_calls_change_in_turn_is_used_on_default_streams(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_streams, "gpu_tensors", lambda value: value)
    streams = HandlerStreams([0])
    gpu.log.clear()
    with in_default_streams([OnGpu(gpu.log)]):
        assert gpu.current is gpu.default
    assert gpu.current.name == "of the pool 1"
    assert gpu.log == [("default", "waits for", "of the pool 1"), ("kept for", "default")]
    streams.leave()


def test_streams_that_are_the_default_ones_wait_for_nothing(gpu: Gpu) -> None:
    into_default_streams([torch.device("cuda:0")])
    behind_default_streams([torch.device("cuda:0")])
    assert not gpu.log
    HandlerStreams([0])
    gpu.log.clear()
    into_default_streams([torch.device("cuda:0")])
    behind_default_streams([torch.device("cuda:0")])
    assert gpu.log == [("default", "waits for", "of the pool 1"), ("of the pool 1", "waits for", "default")]


def test_memory_that_is_sent_is_kept_until_the_copy_is_made(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's result is of the stream of the handler, in which the next handler may use the memory again at once;
    the copy is made in another stream.
    """

    def lend(device: int, spans: object) -> None:
        gpu.log.append(("lent",))

    tensor = torch.ones(5)
    monkeypatch.setattr(buffers, "keep_for_current_streams", lambda kept: gpu.log.append(("kept", *kept)))
    monkeypatch.setattr(buffers.GpuBuffer, "on_host", lambda buffer: buffer)
    value = value_pb2.Value()
    value.buffers.add(size=20)
    span = buffers.GpuBuffer(tensor.data_ptr(), 20, [tensor])
    tensors._send_gpu_spans(value, 0, [span], DeviceRoute(None, lend), [])
    ((first, kept), second) = gpu.log
    assert (first, second) == ("kept", ("lent",)) and kept is tensor


# ---------------------------------------------------------------- arguments that outlive the handler


async def later(tensor: Tensor) -> float:
    return float(tensor.sum())


def items(tensor: Tensor) -> Iterator[float]:
    yield float(tensor.sum())


async def items_later(tensor: Tensor) -> AsyncIterator[float]:
    yield float(tensor.sum())


@rpc.functions.async_execution
def chained(tensor: Tensor) -> Any:
    done: Future[float] = Future()
    done.set_result(float(tensor.sum()))
    return done


def at_once(tensor: Tensor) -> float:
    return float(tensor.sum())


class Counter:
    def add(self, tensor: Tensor) -> float:
        return float(tensor.sum())


@pytest.fixture
def handling(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Arguments arrive on the CPU as if they were on a GPU."""
    log: Log = []

    class Noted:
        def __init__(self, devices: object) -> None:
            log.append(("entered",))
            self._is_left = False

        def leave(self) -> None:
            if not self._is_left:
                log.append(("left",))
            self._is_left = True

    def leaves(value: Any) -> list[Tensor]:
        return [leaf for leaf in value[0] if isinstance(leaf, Tensor)]

    monkeypatch.setattr(dispatcher, "HandlerStreams", Noted)
    monkeypatch.setattr(dispatcher, "gpu_tensors", leaves)
    monkeypatch.setattr(dispatcher, "keep_for_current_streams", lambda kept: log.append(("kept", len(kept))))
    monkeypatch.setattr(ArrivedValue, "gpus", lambda self: [0] if self._value.tensors else [])
    return log


KEPT = [("entered",), ("left",), ("kept", 1)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [(later, KEPT), (items, KEPT), (items_later, KEPT), (chained, KEPT), (at_once, KEPT[:2])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_arguments_are_kept_for_the_streams_of_the_code_that_uses_them(
    handling: Log, function: Any, expected: Log
) -> None:
    with InProcessCluster("alice", "bob", by_value=True) as cluster, cluster.use("alice"):
        if function in (items, items_later):
            assert list(rpc.rpc_stream("bob", function, (torch.ones(3).expand(2, 3),))) == [6.0]
        else:
            assert rpc.rpc_sync("bob", function, (torch.ones(3).expand(2, 3),)) == 6.0
    assert handling == expected


def test_arguments_of_an_actor_are_kept(handling: Log) -> None:
    with InProcessCluster("alice", "bob", by_value=True) as cluster, cluster.use("alice"):
        counter = rpc.remote("bob", Counter, serial=True)
        assert counter.rpc_sync().add(torch.ones(3).expand(2, 3)) == 6.0
        del counter
    assert handling == KEPT


# ---------------------------------------------------------------- futures


class Joined:
    def __init__(self) -> None:
        self.count = 0

    def join_gpus(self) -> None:
        self.count += 1


async def test_await_of_a_future_with_devices_waits_in_the_current_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    base = future_module._Base

    class Base:
        wait = staticmethod(waited.append)

        def __getattr__(self, name: str) -> Any:
            return getattr(base, name)

    future: Future[int] = Future()
    future.set_result(3)
    future._devices = ["cuda:0"]
    monkeypatch.setattr(future_module, "_Base", Base())
    assert await future == 3 and len(waited) == 1
    failed: Future[int] = Future()
    failed.set_exception(ValueError("no"))
    failed._devices = ["cuda:0"]
    with pytest.raises(ValueError, match="no"):
        await failed
    assert len(waited) == 1


def test_tensors_of_an_error_are_there_in_the_streams_of_each_thread_that_takes_it() -> None:
    future: Future[int] = Future()
    arrived = Joined()
    future._arrived = arrived  # type: ignore[assignment]
    future.set_exception(ValueError("no"))
    for number in (1, 2):
        with pytest.raises(ValueError, match="no"):
            future.wait()
        assert arrived.count == number


class WithTensor(Exception):
    pass


def fail(tensor: Tensor) -> None:
    raise WithTensor(tensor.clone())


def test_tensors_of_an_error_that_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Arrived:
        def __init__(self, tensors: list[Tensor]) -> None:
            made.append(len(tensors))

        def join_gpus(self) -> None:
            made.append(-1)

    monkeypatch.setattr(arrived_value, "ArrivedTensors", Arrived)
    monkeypatch.setattr(ArrivedValue, "is_on_gpus", property(lambda self: bool(self._value.tensors)))
    with InProcessCluster("alice", "bob", by_value=True) as cluster, cluster.use("alice"):
        future = rpc.rpc_async("bob", fail, (torch.ones(3),))
        with pytest.raises(WithTensor):
            future.wait()
    assert made[:1] == [0] and -1 in made  # on the CPU, and so none of them
